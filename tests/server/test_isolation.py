"""What one key has, no other can read, list, name, find, delete or retrieve."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.rag.stack import TEXTS
from tests.server.running import Running

SECRET = "The vault of the harbour master opens with the number nine four two seven, on Sundays only."
UNKNOWN = "chunk-" + "0" * 40


@pytest.fixture
def ann(two_keys: Running) -> Iterator[httpx.Client]:
    with two_keys.client("ann") as client:
        yield client


@pytest.fixture
def bob(two_keys: Running) -> Iterator[httpx.Client]:
    with two_keys.client("bob") as client:
        yield client


def same_but_for_the_id(foreign: httpx.Response, unknown: httpx.Response, theirs: str, nobodys: str) -> None:
    """Two refusals tell nothing of whether there is something."""
    assert foreign.status_code == unknown.status_code == 404
    assert foreign.text.replace(theirs, "ID") == unknown.text.replace(nobodys, "ID")
    volatile = {"date", "x-request-id", "content-length"}
    assert {k: v for k, v in foreign.headers.items() if k not in volatile} == {
        k: v for k, v in unknown.headers.items() if k not in volatile
    }


def chat(client: httpx.Client, **message: Any) -> httpx.Response:
    return client.post(
        "/v1/chat/completions",
        json={"messages": [{"role": "user", "content": "Which number?", **message}], "max_tokens": 4, "temperature": 0},
    )


def test_chunks_of_another_key_are_as_unknown_as_those_of_nobody(ann: httpx.Client, bob: httpx.Client) -> None:
    theirs = bob.post("/v1/chunks", json={"text": SECRET}).json()["id"]
    roads = {
        "get": lambda i: ann.get(f"/v1/chunks/{i}"),
        "delete": lambda i: ann.delete(f"/v1/chunks/{i}"),
        "reference": lambda i: chat(ann, chunk_references=[{"id": i}]),
        "reference with an offset": lambda i: chat(ann, chunk_references=[{"id": i, "offset": 3}]),
        "content part": lambda i: chat(ann, content=[{"type": "chunk", "id": i}, {"type": "text", "text": "?"}]),
        "tokenize": lambda i: ann.post(
            "/tokenize", json={"messages": [{"role": "user", "content": "?", "chunk_references": [{"id": i}]}]}
        ),
    }
    for road in roads.values():
        same_but_for_the_id(road(theirs), road(UNKNOWN), theirs, UNKNOWN)
    assert ann.get("/v1/chunks").json()["data"] == []
    assert bob.get(f"/v1/chunks/{theirs}").status_code == 200  # nothing of that deleted it
    assert chat(bob, chunk_references=[{"id": theirs}]).status_code == 200


def test_texts_of_another_key_are_not_found_in_prompts(ann: httpx.Client, bob: httpx.Client) -> None:
    assert bob.post("/v1/chunks", json={"text": SECRET}).status_code == 200
    added = bob.post("/v1/documents", json={"documents": [{"id": "ferry", "text": TEXTS["ferry"].strip()}]})
    assert added.status_code == 200
    content = f"Read {SECRET}\n\n{TEXTS['ferry'].strip()}\n\nWhy?"
    ours, hers = (chat(client, content=content).json() for client in (bob, ann))
    assert [c["tokens"] > 0 for c in ours["epic"]["chunks"]] == [True, True]
    assert ours["epic"]["reuse"] == "composed"
    assert hers["epic"]["chunks"] == []
    assert hers["epic"]["reuse"] == "none"
    assert hers["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    for body in ({"text": content}, {"messages": [{"role": "user", "content": content}]}):
        assert ann.post("/tokenize", json=body).json()["chunks"] == []
        assert len(bob.post("/tokenize", json=body).json()["chunks"]) == 2
    completion = ann.post("/v1/completions", json={"prompt": content, "max_tokens": 2}).json()
    assert completion["epic"]["chunks"] == []
    assert completion["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_the_same_text_is_compiled_and_deleted_for_each_key_alone(
    two_keys: Running, ann: httpx.Client, bob: httpx.Client
) -> None:
    body = {"text": SECRET, "metadata": {"of": "bob"}}
    theirs = bob.post("/v1/chunks", json=body).json()
    rows = two_keys.engine.stats()["steps"]["rows"]
    hers = ann.post("/v1/chunks", json={"text": SECRET, "ttl_seconds": 60}).json()
    assert hers["id"] == theirs["id"]
    assert hers["metadata"] == {}
    assert hers["expires_at"] is not None
    # Had bob's been taken, the time would tell ann that somebody has this text.
    assert sum(two_keys.engine.stats()["steps"]["rows"].values()) >= sum(rows.values()) + hers["tokens"]
    assert bob.get(f"/v1/chunks/{theirs['id']}").json() == theirs
    assert ann.delete(f"/v1/chunks/{hers['id']}").status_code == 200
    assert bob.get(f"/v1/chunks/{theirs['id']}").json() == theirs
    mine = two_keys.tenant("bobs")
    assert mine.engine.has(mine.compiled.key_of(theirs["id"]))


def test_documents_of_another_key_are_not_listed_retrieved_or_deleted(ann: httpx.Client, bob: httpx.Client) -> None:
    documents = [{"id": f"papers/{name}", "text": text, "title": "secret"} for name, text in TEXTS.items()]
    assert bob.post("/v1/documents", json={"documents": documents}).status_code == 200

    def asked(client: httpx.Client) -> Any:
        body = {
            "messages": [{"role": "user", "content": "When does the ferry leave?"}],
            "epic": {"retrieve": {"k": 3}},
            "max_tokens": 2,
            "temperature": 0,
        }
        return client.post("/v1/chat/completions", json=body).json()

    for _ in range(2):  # without any documents of ann's, and with one
        assert [d["id"] for d in ann.get("/v1/documents").json()["data"]] in ([], ["mine"])
        assert all(source["doc_id"] == "mine" for source in asked(ann)["epic"]["sources"])
        same_but_for_the_id(
            ann.delete("/v1/documents/papers/ferry"), ann.delete("/v1/documents/papers/none"), "ferry", "none"
        )
        assert ann.post("/v1/documents", json={"documents": [{"id": "mine", "text": "The moon is green."}]}).is_success
    assert len(asked(bob)["epic"]["sources"]) == 3
    # The same id in two namespaces is two documents.
    assert ann.post("/v1/documents", json={"documents": [{"id": "papers/ferry", "text": "No ferry."}]}).is_success
    assert ann.delete("/v1/documents/papers/ferry").is_success
    assert len(bob.get("/v1/documents").json()["data"]) == len(TEXTS)


def test_chunks_of_another_keys_documents_cannot_be_named(ann: httpx.Client, bob: httpx.Client) -> None:
    assert bob.post("/v1/documents", json={"documents": [{"id": "ferry", "text": TEXTS["ferry"]}]}).is_success
    for client in (ann, bob):
        for name in ("ferry", "ferry#0", "d:ferry#0", "t:ferry#0"):
            assert chat(client, chunk_references=[{"id": name}]).status_code == 404


def test_without_a_key_nothing_is_told(two_keys: Running) -> None:
    with two_keys.client() as nobody:
        for method, path in (
            ("GET", "/v1/chunks"),
            ("GET", f"/v1/chunks/{UNKNOWN}"),
            ("POST", "/v1/chunks"),
            ("GET", "/v1/documents"),
            ("DELETE", "/v1/documents/x"),
            ("GET", "/v1/models"),
            ("POST", "/v1/embeddings"),
            ("POST", "/tokenize"),
            ("GET", "/metrics"),
        ):
            refused = nobody.request(method, path)
            assert refused.status_code == 401, path
            assert refused.json()["error"]["code"] == "invalid_api_key", path
        assert nobody.get("/health").status_code == 200
