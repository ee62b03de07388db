"""Everything that may be sent has an answer that the OpenAPI document knows; see also ``tests/soak/gateway.py``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.server.conformance import HOSTILE, VALID, check_answer, conform, mutated
from tests.server.running import Running, running

HEADERS = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A gateway whose answers are short."""
    with running(tmp_path_factory.mktemp("fuzzed"), max_tokens=4, request_seconds=5) as gateway:
        yield gateway


def test_answers_are_as_the_document_says(fuzzed: Running) -> None:
    seen = conform(fuzzed.base_url, examples=4)
    operations = {label for label, _ in seen}
    assert {f"POST {path}" for path in VALID} <= operations
    assert {status for _, status in seen} >= {200, 400, 404}


def test_good_bodies_are_good(fuzzed: Running) -> None:
    with fuzzed.client() as client:
        for path, body in VALID.items():
            answer = client.post(path, json=body)
            assert answer.is_success, answer.text
            check_answer(answer)


def test_hostile_bodies_are_answered(fuzzed: Running) -> None:
    with fuzzed.client() as client:
        for path, body in HOSTILE:
            check_answer(client.post(path, content=body, headers=HEADERS))
            streamed = body[:-1] + b',"stream":true}'
            if path.endswith("completions") and body.startswith(b"{") and len(body) < 1000:
                check_answer(client.post(path, content=streamed, headers=HEADERS))
        assert client.get("/health").status_code == 200


@settings(max_examples=150, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(request=mutated())
def test_mutated_bodies_are_answered(fuzzed: Running, request: tuple[str, bytes]) -> None:
    path, body = request
    with fuzzed.client() as client:
        check_answer(client.post(path, content=body, headers=HEADERS))


@settings(max_examples=60, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(
    path=st.text(st.sampled_from("abc/%019fFeE.-~?&=#chunkdomels"), max_size=30),
    method=st.sampled_from(("GET", "DELETE", "POST", "PUT", "HEAD")),
)
@example("v1/chunks/%ff", "GET")
@example("v1/chunks/%00", "DELETE")
@example("v1/documents/%ff%00", "DELETE")
@example("v1/chunks?after=%ed%a0%80", "GET")
@example("v1/documents?after=%00&limit=2", "GET")
@example("v1/chunks?limit=" + "9" * 30, "GET")
@example("v1/models/%0d%0aX:y", "GET")
@example("v1/../../etc/passwd", "GET")
def test_any_path_is_answered(fuzzed: Running, path: str, method: str) -> None:
    with fuzzed.client() as client:
        answer = client.request(method, f"{fuzzed.base_url}/{path}")
        assert answer.status_code < 500, answer.text
        if answer.is_error and method != "HEAD":
            check_answer(answer)
