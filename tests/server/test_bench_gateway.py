"""Many streaming clients over a shared corpus: no error, every stream whole, and figures that count them rightly."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from epic_engine import ConfigError, EpicError

from epic_rag.benchmarks.gateway import GatewayLoad, _asked, _figures, bench_gateway
from epic_rag.benchmarks.gateway_table import gateway_table
from epic_rag.evaluation.example import EvalExample
from tests.rag.stack import tokenizer
from tests.server.running import Running, key_of, running

EXAMPLES = [
    EvalExample(
        f"e{n}",
        tuple(f"Boat {n}-{m} comes in at {n + m} and carries {7 * n + m} barrels of oil." for m in range(4)),
        f"When does boat {n} come in?",
        ("noon",),
    )
    for n in range(4)
]


def silent(what: str, done: int, total: int) -> None:
    pass


def ended(gateway: Running) -> dict[str, Any]:
    return gateway.engine.stats()["requests"]  # type: ignore[no-any-return]


def test_thirty_two_clients_at_once_lose_nothing(tmp_path: Path) -> None:
    load = GatewayLoad(policies=("naive", "prefix"), clients=32, seconds=1.0, k=6, tokens=16)
    with running(tmp_path, keys={"ann": {}}) as gateway:
        result = bench_gateway(gateway.base_url, EXAMPLES, load, key=key_of("ann"), progress=silent)
        figures = list(result["policies"].values())
        assert result["corpus"]["chunks"] == 16
        assert result["corpus"]["tokens"] == sum(
            len(tokenizer()(text, add_special_tokens=False)["input_ids"]) for e in EXAMPLES for text in e.documents
        )
        for found in figures:
            assert found["requests"] >= 32
            assert found["errors"] == found["incomplete"] == 0
            assert found["requests_s"] == found["requests"] / found["seconds"]
            assert 0 < found["ttft_s"]["p50"] <= found["ttft_s"]["p95"] <= found["request_s"]["p99"]
        # The engine saw as many, under these policies; the chunks were reused where the policy does that.
        requests = ended(gateway)
        assert requests["submitted"] == sum(found["requests"] for found in figures)
        assert requests["policies"] == {name: f["requests"] for name, f in result["policies"].items()}
        assert requests["outcomes"]["failed"] == requests["outcomes"]["cancelled"] == 0
        assert figures[0]["cached_share"] > 0.5
        assert result["ratios"] == {"naive": figures[0]["requests_s"] / figures[1]["requests_s"]}
        assert {"naive", "prefix"} <= set(gateway_table(result).columns[0].cells)  # type: ignore[arg-type]


def test_a_gateway_that_cannot_be_used_is_told(gateway: Running, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="k=17"):
        bench_gateway(gateway.base_url, EXAMPLES, GatewayLoad(k=17), progress=silent)
    with pytest.raises(EpicError, match="reached"):
        bench_gateway("http://127.0.0.1:9", EXAMPLES, GatewayLoad(), progress=silent)
    (tmp_path / "other").mkdir()
    with (
        running(tmp_path / "other", keys={"ann": {}}) as other,
        pytest.raises(EpicError, match="send a key"),
    ):
        bench_gateway(other.base_url, EXAMPLES, GatewayLoad(), progress=silent)


def piece(content: str = "", reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": content}, "finish_reason": reason}], "usage": None}


USAGE = {
    "choices": [],
    "usage": {"prompt_tokens": 8, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 6}},
    "epic": {"timed_out": False},
}
WHOLE = [piece(), piece("a"), piece("b"), piece(reason="length"), USAGE, "[DONE]"]


class Cut(httpx.AsyncByteStream):
    """A body that ends in an error."""

    def __init__(self, body: bytes) -> None:
        self._body = body

    async def __aiter__(self) -> Any:
        yield self._body
        raise httpx.ReadError("cut off")


def asked(events: list[Any], *, status: int = 200, cut: bool = False) -> Any:
    body = "".join(f"data: {e if isinstance(e, str) else json.dumps(e)}\n\n" for e in events).encode()

    def answer(_: httpx.Request) -> httpx.Response:
        return httpx.Response(status, stream=Cut(body)) if cut else httpx.Response(status, content=body)

    async def ask() -> Any:
        async with httpx.AsyncClient(base_url="http://test", transport=httpx.MockTransport(answer)) as client:
            return await _asked(client, {})

    return asyncio.run(ask())


def bad_streams() -> Iterator[tuple[str, Any, int, int]]:
    """Name, what the client saw, errors, incomplete."""
    yield "without its end", asked(WHOLE[:-1]), 0, 1
    yield "without a reason", asked([*WHOLE[:3], *WHOLE[4:]]), 0, 1
    yield "cut off", asked(WHOLE[:3], cut=True), 1, 0
    yield "cut off after its end", asked(WHOLE, cut=True), 1, 0
    yield "with an error", asked([*WHOLE[:3], {"error": {"message": "broken"}}, "[DONE]"]), 1, 0
    yield "timed out", asked([*WHOLE[:4], {**USAGE, "epic": {"timed_out": True}}, "[DONE]"]), 1, 0
    yield "refused", asked(['{"error"'], status=503), 1, 0


def test_streams_that_are_not_whole_are_counted() -> None:
    good = asked(WHOLE)
    assert (good.complete, good.error, good.prompt, good.cached, good.generated) == (True, "", 8, 6, 2)
    assert 0 < good.first <= good.seconds
    for name, bad, errors, incomplete in bad_streams():
        found = _figures([good, bad], 2.0)
        assert (found["errors"], found["incomplete"]) == (errors, incomplete), name
        assert found["requests_s"] == 0.5, name
        assert found["cached_share"] == 0.75, name
        assert bool(found.get("error")) == bool(errors), name
    assert _figures([], 1.0)["cached_share"] is None
