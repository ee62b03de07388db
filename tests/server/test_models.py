"""Models, embeddings, tokens, health and metrics, with the official client and plain HTTP."""

from __future__ import annotations

import asyncio
import base64
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest
from epic_engine import __version__
from prometheus_client.parser import text_string_to_metric_families

from tests.rag.stack import TEXTS, BagOfWords, tokenizer
from tests.server.running import MODEL, Running, running

EMBEDDER = BagOfWords.name


def plain_ids(text: str) -> list[int]:
    """Token ids, by the tokenizer alone."""
    return tokenizer()(text, add_special_tokens=False)["input_ids"]  # type: ignore[no-any-return]


def samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Values by name and labels, read by Prometheus's own parser."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_the_model_and_the_embedder_are_listed(shared_gateway: Running) -> None:
    client = shared_gateway.openai()
    assert [m.id for m in client.models.list()] == [MODEL, EMBEDDER]
    assert client.models.retrieve(MODEL).object == "model"
    assert client.models.retrieve(EMBEDDER).id == EMBEDDER
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("org/other")


def test_embeddings_are_the_embedders(shared_gateway: Running) -> None:
    client = shared_gateway.openai()
    texts = list(TEXTS.values())
    truth = BagOfWords().embed(texts)
    # The official client asks for base64 where nobody says, and decodes it.
    for form in ({}, {"encoding_format": "float"}):
        made = client.embeddings.create(model=EMBEDDER, input=texts, **form)  # type: ignore[arg-type]
        assert [one.index for one in made.data] == list(range(len(texts)))
        np.testing.assert_array_equal(np.array([one.embedding for one in made.data], np.float32), truth)
        assert made.usage.prompt_tokens == made.usage.total_tokens == sum(len(plain_ids(t)) for t in texts)
    with shared_gateway.client() as http:
        raw = http.post("/v1/embeddings", json={"input": texts[0], "encoding_format": "base64"}).json()
        assert base64.b64decode(raw["data"][0]["embedding"]) == truth[0].astype("<f4").tobytes()
        for ids in (plain_ids(texts[0]), [plain_ids(texts[0])]):
            same = http.post("/v1/embeddings", json={"input": ids, "dimensions": BagOfWords.dim}).json()
            assert same["data"][0]["embedding"] == truth[0].tolist()
        for bad, status in (
            ({"input": ""}, 400),
            ({"input": []}, 400),
            ({"input": ["a", ""]}, 400),
            ({"input": [[]]}, 400),
            ({"input": [-1]}, 400),
            ({"input": [[10**6]]}, 400),
            ({"input": ["a"] * 2049}, 400),
            ({"input": "a", "dimensions": BagOfWords.dim - 1}, 400),
            ({"input": "a", "encoding_format": "hex"}, 400),
            ({"input": {"a": 1}}, 400),
            ({}, 400),
            ({"input": "a", "model": "other"}, 404),
        ):
            assert http.post("/v1/embeddings", json=bad).status_code == status, bad
        odd = http.post("/v1/embeddings", content=r'{"input":"\ud800"}', headers={"content-type": "application/json"})
        assert odd.status_code == 400


def test_tokens_are_those_of_the_prompt(gateway: Running) -> None:
    ferry = TEXTS["ferry"].strip()
    with gateway.client() as client:
        made = client.post("/v1/chunks", json={"text": ferry}).json()
        named = client.post("/v1/chunks", json={"token_ids": [9, 8, 7]}).json()
        text = f"Read: {ferry} So"
        answer = client.post("/tokenize", json={"text": text}).json()
        before = plain_ids("Read: ")
        assert answer["tokens"] == [*before, *plain_ids(ferry), *plain_ids(" So")]
        assert answer["count"] == len(answer["tokens"])
        assert answer["max_model_len"] == 2048
        assert answer["chunks"] == [{"id": made["id"], "offset": len(before), "tokens": made["tokens"]}]
        messages = [{"role": "user", "content": "Why?", "chunk_references": [{"id": named["id"]}]}]
        answer = client.post("/tokenize", json={"messages": messages}).json()
        flat = [{"role": "user", "content": "XYZ\n\nWhy?"}]
        head, _, tail = (
            tokenizer().apply_chat_template(flat, tokenize=False, add_generation_prompt=True).partition("XYZ")
        )
        assert answer["tokens"] == [*plain_ids(head), 9, 8, 7, *plain_ids(tail)]
        assert answer["chunks"] == [{"id": named["id"], "offset": len(plain_ids(head)), "tokens": 3}]
        usage = client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1}).json()["usage"]
        assert usage["prompt_tokens"] == answer["count"]
        for bad in ({}, {"text": "a", "messages": messages}, {"messages": []}, {"text": "a", "unknown": 1}):
            assert client.post("/tokenize", json=bad).status_code == 400


def test_health_tells_when_the_gateway_is_draining(gateway: Running) -> None:
    with gateway.client() as client:
        assert client.get("/health").json() == {"status": "ok", "model": MODEL, "version": __version__}
        gateway.app.state.admission.draining = True
        draining = client.get("/health")
        assert draining.status_code == 503
        assert draining.json()["status"] == "draining"
        assert client.get("/v1/models").status_code == 503


def test_metrics_count_requests_by_route_and_tokens_by_kind(gateway: Running) -> None:
    with gateway.client() as client:
        client.post("/v1/chunks", json={"text": TEXTS["ferry"]})
        for name in ("a", "b", "c"):
            client.get(f"/v1/chunks/{name}")
        for path in ("/nothing/1", "/nothing/2"):
            client.get(path)
        client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3})
        page = client.get("/metrics")
    assert page.headers["content-type"].startswith("text/plain")
    found = samples(page.text)

    def count(method: str, route: str, status: str) -> float:
        labels = frozenset({("method", method), ("route", route), ("status", status)})
        return found.get(("epic_http_requests_total", labels), 0)

    assert count("POST", "/v1/chunks", "200") == 1
    assert count("GET", "/v1/chunks/{chunk_id}", "404") == 3
    assert count("POST", "/v1/chat/completions", "200") == 1
    routes = {dict(labels)["route"] for name, labels in found if name == "epic_http_requests_total"}
    assert not any("nothing" in route or "chunks/a" in route for route in routes)  # no series of a client's making
    assert sum(v for (n, ls), v in found.items() if n == "epic_http_requests_total" and ("route", "none") in ls) == 2
    assert found["epic_generated_tokens_total", frozenset()] == 3
    route = ("route", "/v1/chunks/{chunk_id}")
    buckets = [v for (n, ls), v in found.items() if n == "epic_http_request_seconds_bucket" and route in ls]
    assert max(buckets) == found["epic_http_request_seconds_count", frozenset({route})] == 3
    assert sorted(buckets) == buckets


def test_metrics_are_for_keys_that_may_read_them(tmp_path: Path) -> None:
    with running(tmp_path, keys={"ann": {}, "operator": {"metrics": True}}) as gateway:
        with gateway.client("operator") as client:
            assert client.get("/metrics").status_code == 200
        with gateway.client("ann") as client:
            refused = client.get("/metrics")
            assert refused.status_code == 403
            assert refused.json()["error"]["type"] == "permission_error"


def test_metrics_without_prometheus_are_not_implemented(gateway: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "epic_engine.prometheus", raising=False)
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with gateway.client() as client:
        missing = client.get("/metrics")
        assert missing.status_code == 501
        assert "epic-rag[metrics]" in missing.json()["error"]["message"]


def test_every_route_says_what_it_returns(shared_gateway: Running) -> None:
    with shared_gateway.client() as client:
        document = client.get("/openapi.json").json()
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            content = operation["responses"]["200"]["content"]
            assert content, (method, path)
            if "application/json" in content and not path.startswith(("/v1/chat", "/v1/completions")):
                assert content["application/json"]["schema"], (method, path)
    body = document["paths"]["/v1/documents"]["post"]["requestBody"]["content"]
    assert set(body) == {"application/json", "multipart/form-data"}


async def test_slow_work_does_not_keep_others_from_answers(tmp_path: Path) -> None:
    release = threading.Event()

    class Slow(BagOfWords):
        def embed(self, texts: Sequence[str]) -> np.ndarray:
            assert release.wait(30)
            return super().embed(texts)

    with running(tmp_path, embedder=Slow) as gateway:
        async with httpx.AsyncClient(base_url=gateway.base_url, timeout=30) as client:
            waiting = []
            for n in range(45):
                document = {"documents": [{"id": str(n), "text": f"Number {n}."}]}
                waiting.append(asyncio.create_task(client.post("/v1/documents", json=document)))
                waiting.append(asyncio.create_task(client.post("/v1/embeddings", json={"input": "x"})))
            try:
                await asyncio.sleep(0.3)
                chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
                answer = await asyncio.wait_for(client.post("/v1/chat/completions", json=chat), 20)
                assert answer.status_code == 200
                assert not any(one.done() for one in waiting)
            finally:
                release.set()
                ended = await asyncio.gather(*waiting)
            assert all(one.is_success for one in ended)
