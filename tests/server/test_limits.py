"""Sizes, rates, counts and times that a request must not exceed; what is computed for clients that are gone."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from epic_rag.prompt_stream import PromptStream
from epic_rag.server import limits, run
from epic_rag.server.errors import ApiError
from epic_rag.server.keys import ApiKey
from epic_rag.server.limits import RateLimiter
from epic_rag.server.settings import load_settings
from tests.server.running import Running, running
from tests.server.sockets import SmallBuffers, chat_body, connection, post, read_until, sent, wait_until

CHAT = "/v1/chat/completions"


def outcomes(gateway: Running) -> dict[str, int]:
    return gateway.engine.stats()["requests"]["outcomes"]  # type: ignore[no-any-return]


def nothing_runs(gateway: Running) -> None:
    """No request holds a slot or memory any more."""
    wait_until(lambda: gateway.app.state.admission.running == 0)
    gateway.check_idle()
    assert gateway.engine.stats()["requests"]["active"] == 0


@contextmanager
def busy(gateway: Running) -> Iterator[None]:
    """No step is taken inside."""
    begun, release = threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        release.wait(60)

    holding = threading.Thread(target=gateway.engine.call, args=(hold,))
    holding.start()
    assert begun.wait(30)
    try:
        yield
    finally:
        release.set()
        holding.join()


# -- rates ---------------------------------------------------------------------------------------------------------


class Clock:
    """Virtual time for the limits."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(limits, "time", SimpleNamespace(monotonic=made.monotonic))
    return made


def api_key(name: str = "ann", **fields: Any) -> ApiKey:
    return ApiKey(name=name, sha256="0" * 64, **fields)


def waits(rates: RateLimiter, key: ApiKey) -> int | None:
    """Seconds that a request is told to wait; None if it may go on."""
    try:
        rates.admit(key)
    except ApiError as error:
        refused = error
    else:
        return None
    assert refused.status == 429
    assert refused.code == "rate_limit_exceeded"
    return int(refused.headers["Retry-After"])


@pytest.mark.parametrize("per_minute", [1, 3, 7, 60, 90, 1000])
def test_requests_are_refilled_evenly_and_retry_after_is_when(clock: Clock, per_minute: int) -> None:
    rates = RateLimiter(load_settings({"store": "s"}))
    key = api_key(requests_per_minute=per_minute)
    for _ in range(per_minute):
        assert waits(rates, key) is None
    for _ in range(5):
        told = waits(rates, key)
        assert told is not None
        assert told - 1 < 60 / per_minute <= told  # the least whole number of seconds after which there is one
        clock.now += 60 / per_minute - 0.001
        assert waits(rates, key) is not None
        clock.now += 0.001
        assert waits(rates, key) is None
    clock.now += 3600  # no more than a minute's are saved up
    for _ in range(per_minute):
        assert waits(rates, key) is None
    told = waits(rates, key)
    assert told is not None
    clock.now += told
    assert waits(rates, key) is None


def test_tokens_that_were_used_are_waited_for(clock: Clock) -> None:
    rates = RateLimiter(load_settings({"store": "s"}))
    key = api_key(tokens_per_minute=600)
    assert waits(rates, key) is None
    rates.spend(key, 600)
    assert waits(rates, key) is None  # used up, and not overdrawn
    rates.spend(key, 95)
    assert waits(rates, key) == 10
    clock.now += 9.4
    assert waits(rates, key) == 1
    clock.now += 0.1
    assert waits(rates, key) is None
    clock.now += 1e6
    rates.spend(key, 1200)
    assert waits(rates, key) == 60


def test_keys_do_not_use_each_others_rates_and_their_own_go_before_the_gateways(clock: Clock) -> None:
    rates = RateLimiter(load_settings({"store": "s", "requests_per_minute": 2, "tokens_per_minute": 10}))
    ann, bob, free = api_key("ann"), api_key("bob"), api_key("free", requests_per_minute=100, tokens_per_minute=1000)
    assert [waits(rates, ann) for _ in range(3)] == [None, None, 30]
    assert [waits(rates, bob) for _ in range(3)] == [None, None, 30]
    assert [waits(rates, free) for _ in range(100)] == [None] * 100
    for key in (ann, free):
        rates.spend(key, 500)
    clock.now += 60
    assert waits(rates, ann) is not None
    assert waits(rates, free) is None
    assert RateLimiter(load_settings({"store": "s"})).spend(ann, 10**9) is None  # no limit, nothing to count


def test_rates_are_told_over_http(tmp_path: Path) -> None:
    keys = {"ann": {"requests_per_minute": 2}, "bob": {"tokens_per_minute": 10}}
    with running(tmp_path, keys=keys) as gateway, gateway.client("ann") as ann, gateway.client("bob") as bob:
        assert [ann.get("/v1/models").status_code for _ in range(2)] == [200, 200]
        refused = ann.get("/v1/models")
        assert refused.status_code == 429
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert 28 <= int(refused.headers["retry-after"]) <= 30
        assert bob.post(CHAT, json=chat_body(max_tokens=2)).status_code == 200  # and took more than ten
        refused = bob.post(CHAT, json=chat_body(max_tokens=2))
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) > 1


# -- how many at once ------------------------------------------------------------------------------------------------


def test_too_many_at_once_are_told_to_come_again(tmp_path: Path) -> None:
    with running(tmp_path, max_concurrent=2) as gateway, gateway.client() as client:
        with busy(gateway), connection(gateway) as one, connection(gateway) as two:
            for waiting in (one, two):
                sent(waiting, CHAT, chat_body(max_tokens=2))
            wait_until(lambda: gateway.app.state.admission.running == 2)
            refused = client.post(CHAT, json=chat_body(max_tokens=2))
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "overloaded"
            assert int(refused.headers["retry-after"]) >= 1
            assert client.get("/v1/chunks").status_code == 503
            # Who looks after the gateway sees that.
            assert client.get("/health").status_code == 200
            assert 'status="503"' in client.get("/metrics").text
        nothing_runs(gateway)
        assert client.post(CHAT, json=chat_body(max_tokens=2)).status_code == 200


# -- bodies ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A gateway that takes short and quick bodies only."""
    folder = tmp_path_factory.mktemp("small")
    with running(folder, max_body_bytes=4096, body_seconds=0.5, request_seconds=2) as gateway:
        yield gateway


@pytest.mark.parametrize(
    "path", [CHAT, "/v1/completions", "/v1/chunks", "/v1/documents", "/v1/embeddings", "/tokenize"]
)
def test_bodies_that_are_too_long_are_refused(small: Running, path: str) -> None:
    with connection(small) as client:  # by what is announced: nothing of it is sent
        client.sendall(post(path, length=4097))
        answer = read_until(client, b"}}")
        assert answer.startswith(b"HTTP/1.1 413")
        assert b'"error"' in answer
        assert client.recv(1) == b""
    with connection(small) as client:  # by what comes, in pieces of 1,000 bytes
        client.sendall(post(path))
        for _ in range(4):
            client.sendall(b"3e8\r\n" + b" " * 1000 + b"\r\n")
        client.sendall(b"61\r\n" + b" " * 97 + b"\r\n")
        assert read_until(client, b"}}").startswith(b"HTTP/1.1 413")
    with connection(small) as client:  # what is just short enough is read
        client.sendall(post(path, length=4096) + b"[" + b" " * 4095)
        assert read_until(client, b"}}").startswith(b"HTTP/1.1 400")
    nothing_runs(small)


def test_announced_lengths_that_are_no_numbers_are_refused(small: Running) -> None:
    for length in (b"-1", b"1e3", b"9" * 30, "٣".encode()):
        with connection(small) as client:
            client.sendall(post(CHAT, length=0).replace(b"Content-Length: 0", b"Content-Length: " + length))
            assert read_until(client, b"\r\n\r\n")[:12] in (b"HTTP/1.1 400", b"HTTP/1.1 413")


def test_bodies_that_do_not_go_on_are_not_waited_for(small: Running) -> None:
    for path in (CHAT, "/v1/documents"):
        with connection(small) as client:
            client.sendall(post(path, length=100) + b"{")
            answer = read_until(client, b"}}")
            assert answer.startswith(b"HTTP/1.1 408")
            assert b'"timeout_error"' in answer
            assert client.recv(1) == b""
    with connection(small) as client:  # byte by byte for ever
        client.sendall(post(CHAT, length=1000))
        client.settimeout(0.1)
        answer = b""
        for _ in range(100):
            try:
                client.sendall(b" ")
                answer += client.recv(4096)
                break
            except TimeoutError:
                continue
        assert answer.startswith(b"HTTP/1.1 408")
    nothing_runs(small)


# -- clients that go away ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_before_the_first_token_costs_nothing(
    gateway: Running, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cancelled: list[PromptStream] = []
    close = PromptStream.aclose

    async def noted(self: PromptStream) -> None:
        cancelled.append(self)
        await close(self)

    monkeypatch.setattr(PromptStream, "aclose", noted)
    with busy(gateway):
        with connection(gateway) as client:
            sent(client, CHAT, chat_body(max_tokens=2000, stream=stream, n=2))
            wait_until(lambda: gateway.engine.stats()["requests"]["submitted"] == 2)
        wait_until(lambda: len(cancelled) == 2)  # though no step was taken
    nothing_runs(gateway)
    assert outcomes(gateway)["cancelled"] == 2
    assert gateway.engine.stats()["tokens"]["generated"] == 0


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_a_client_that_leaves_in_the_middle_cancels_its_answers(gateway: Running, path: str) -> None:
    body = chat_body(max_tokens=1900, stream=True, n=2)
    if path != CHAT:
        body["prompt"] = body.pop("messages")[0]["content"]
    with connection(gateway) as client:
        sent(client, path, body)
        assert read_until(client, b"finish_reason").startswith(b"HTTP/1.1 200")
        wait_until(lambda: gateway.engine.stats()["requests"]["active"] == 2)
    nothing_runs(gateway)
    assert outcomes(gateway)["cancelled"] == 2
    assert gateway.engine.stats()["tokens"]["generated"] < 2 * 1900


def test_a_client_that_leaves_while_a_whole_answer_grows_cancels_it(gateway: Running) -> None:
    with connection(gateway) as client:
        sent(client, CHAT, chat_body(max_tokens=1900))
        wait_until(lambda: gateway.engine.stats()["steps"]["count"] > 3)
    nothing_runs(gateway)
    assert outcomes(gateway)["cancelled"] == 1
    assert gateway.engine.stats()["tokens"]["generated"] < 1900


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_does_not_read_is_given_up(
    tmp_path: Path, stream: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tests.server.running.GatewayServer", SmallBuffers)
    monkeypatch.setattr(run, "_MARGIN_S", 0)
    servers: list[SmallBuffers] = []
    began = SmallBuffers.startup

    async def noted(self: SmallBuffers, sockets: Any = None) -> None:
        servers.append(self)
        await began(self, sockets)

    monkeypatch.setattr(SmallBuffers, "startup", noted)
    with caplog.at_level("INFO", "epic_rag"), running(tmp_path, write_seconds=0.5) as gateway:
        with connection(gateway, buffer=4096) as client:
            # Far more than all buffers hold, if all of it were sent.
            sent(client, CHAT, chat_body(max_tokens=600, stream=stream, logprobs=True, top_logprobs=20))
            wait_until(lambda: gateway.app.state.admission.running == 1)
            nothing_runs(gateway)
            assert ("did not read" in caplog.text) == stream  # a whole answer is one write
            if hasattr(socket, "TCP_USER_TIMEOUT"):  # its connection does not stay open either, though it never reads
                wait_until(lambda: not servers[0].server_state.connections)
        with gateway.client() as other:
            assert other.post(CHAT, json=chat_body(max_tokens=2)).status_code == 200
    assert (outcomes(gateway)["cancelled"], outcomes(gateway)["length"]) == ((1, 1) if stream else (0, 2))


def test_answers_end_when_their_time_is_over(tmp_path: Path) -> None:
    with running(tmp_path, request_seconds=0.3) as gateway, gateway.client() as client:
        whole = client.post(CHAT, json=chat_body(max_tokens=1900)).json()
        assert whole["choices"][0]["finish_reason"] == "length"
        assert whole["epic"]["timed_out"]
        assert 0 < whole["usage"]["completion_tokens"] < 1900
        options = {"stream": True, "stream_options": {"include_usage": True}}
        lines = client.post(CHAT, json=chat_body(max_tokens=1900, **options)).text.split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""]
        last = json.loads(lines[-3].removeprefix("data: "))
        assert last["epic"]["timed_out"]
        assert json.loads(lines[-4].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        short = client.post(CHAT, json=chat_body(max_tokens=2)).json()
        assert not short["epic"]["timed_out"]
        assert short["choices"][0]["finish_reason"] == "length"


def test_what_nobody_foresaw_is_an_error_of_openais_shape(gateway: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise LookupError("a secret text")

    monkeypatch.setattr(gateway.tenant().shelf, "list", broken)
    with gateway.client() as client:
        failed = client.get("/v1/chunks")
        assert failed.status_code == 500
        assert failed.json()["error"]["type"] == "server_error"
        assert "secret" not in failed.text
        assert failed.headers["x-request-id"]
        assert 'route="/v1/chunks",status="500"' in client.get("/metrics").text
    nothing_runs(gateway)


def test_clients_of_the_official_kind_see_rates_as_such(tmp_path: Path) -> None:
    import openai

    with running(tmp_path, keys={"ann": {"requests_per_minute": 1}}) as gateway, gateway.openai("ann") as client:
        client.models.list()
        with pytest.raises(openai.RateLimitError):
            client.models.list()


def test_a_body_is_not_read_for_who_may_not_ask(tmp_path: Path) -> None:
    with running(tmp_path, keys={"ann": {}}) as gateway:
        with connection(gateway) as client:
            client.sendall(post(CHAT, length=1000))
            assert read_until(client, b"}}").startswith(b"HTTP/1.1 401")
        assert httpx.get(f"{gateway.base_url}/health").status_code == 200
