"""Documents over HTTP: added, listed, deleted, found for a question and found in prompts."""

from __future__ import annotations

import io
import json
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pypdf
import pytest
from epic_engine import Engine

from epic_rag import EpicRAG
from epic_rag.documents import Document, read_document
from epic_rag.errors import MissingDependencyError
from tests.rag.stack import TEXTS, BagOfWords, model, tokenizer
from tests.server.oracle import plain_ids
from tests.server.running import Running, running

DOCUMENTS = [{"id": f"town/{name}", "text": text, "title": name.title()} for name, text in TEXTS.items()]


def events(text: str) -> list[Any]:
    """The objects of a stream of server-sent events."""
    assert text.endswith("data: [DONE]\n\n")
    return [json.loads(piece.removeprefix("data: ")) for piece in text.split("\n\n")[:-2]]


def nearest(question: str, k: int) -> list[str]:
    """Ids of the documents whose vectors are nearest to a question's, nearest first; one chunk each."""
    names = [d["id"] for d in DOCUMENTS]
    scores = BagOfWords().embed([d["text"].strip() for d in DOCUMENTS]) @ BagOfWords().embed([question])[0]
    return [names[i] for i in np.argsort(-scores, kind="stable")[:k]]


def ask(gateway: Running, question: str, *, retrieve: dict[str, Any], **more: Any) -> Any:
    body = {
        "messages": [{"role": "user", "content": question}],
        "epic": {"retrieve": retrieve},
        "max_tokens": 4,
        "temperature": 0,
        **more,
    }
    with gateway.client() as client:
        return client.post("/v1/chat/completions", json=body)


def text_pdf(text: str) -> bytes:
    """A PDF of one page with a line of text, written by hand."""
    stream = f"BT /F1 12 Tf 20 100 Td ({text}) Tj ET".encode()
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 300 200] /Contents 4 0 R "
        b"/Resources << /Font << /F1 << /Type /Font /Subtype /Type1 /BaseFont /Helvetica >> >> >> >>",
        b"<< /Length %d >>\nstream\n%s\nendstream" % (len(stream), stream),
    ]
    out, places = b"%PDF-1.4\n", []
    for number, body in enumerate(objects, 1):
        places.append(len(out))
        out += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    size = len(objects) + 1
    return out + b"xref\n0 %d\n0000000000 65535 f \n%strailer\n<< /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF" % (
        size,
        table,
        size,
        len(out),
    )


@pytest.fixture(scope="module")
def town(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A gateway with the documents, for tests that do not change them."""
    with running(tmp_path_factory.mktemp("town")) as gateway, gateway.client() as client:
        assert client.post("/v1/documents", json={"documents": DOCUMENTS}).is_success
        yield gateway


def test_documents_are_added_listed_and_deleted(gateway: Running) -> None:
    with gateway.client() as client:
        assert client.get("/v1/documents").json()["data"] == []
        done = client.post("/v1/documents", json={"documents": DOCUMENTS}).json()
        assert done["added"] == [d["id"] for d in DOCUMENTS]
        assert done["tokens"] == sum(len(plain_ids(d["text"].strip() + "\n\n")) for d in DOCUMENTS)
        page = client.get("/v1/documents", params={"limit": 3}).json()
        rest = client.get("/v1/documents", params={"limit": 3, "after": page["last_id"]}).json()
        listed = page["data"] + rest["data"]
        assert (page["has_more"], rest["has_more"]) == (True, False)
        assert [d["id"] for d in listed] == sorted(d["id"] for d in DOCUMENTS)
        for one in listed:
            text = TEXTS[one["id"].removeprefix("town/")]
            assert one["tokens"] == len(plain_ids(text.strip() + "\n\n"))
            assert (one["chunks"], one["source"], one["object"]) == (1, one["id"], "document")
            assert one["metadata"] == {"title": one["id"].removeprefix("town/").title()}
            assert abs(one["added_at"] - time.time()) < 120
        gone = client.delete("/v1/documents/town/ferry")
        assert gone.json() == {"id": "town/ferry", "object": "document.deleted", "deleted": True}
        for again in (client.delete("/v1/documents/town/ferry"), client.delete("/v1/documents/town%2Fferry")):
            assert again.status_code == 404
            assert again.json()["error"]["message"] == "there is no document 'town/ferry' here."
        assert len(client.get("/v1/documents").json()["data"]) == len(DOCUMENTS) - 1
    assert "town/ferry" not in json.dumps(ask(gateway, "When does the ferry leave?", retrieve={"k": 4}).json())


def test_known_documents_are_compiled_no_more_and_may_be_described_anew(gateway: Running) -> None:
    with gateway.client() as client:
        client.post("/v1/documents", json={"documents": DOCUMENTS})
        changed = [{**DOCUMENTS[0], "metadata": {"by": "Ines"}}, {**DOCUMENTS[1], "text": "Closed."}, *DOCUMENTS[2:]]
        done = client.post("/v1/documents", json={"documents": changed}).json()
        assert done["updated"] == [DOCUMENTS[1]["id"]]
        assert done["unchanged"] == [d["id"] for d in DOCUMENTS if d is not DOCUMENTS[1]]
        assert done["compiled_tokens"] == done["tokens"] == len(plain_ids("Closed.\n\n"))
        listed = {d["id"]: d for d in client.get("/v1/documents").json()["data"]}
        assert listed[DOCUMENTS[0]["id"]]["metadata"] == {"by": "Ines", "title": DOCUMENTS[0]["title"]}


def test_retrieved_documents_stand_before_the_question_and_are_told(town: Running) -> None:
    for question, k in (("When does the ferry leave?", 2), ("Who built the oven of the bakery?", 3), ("books", 9)):
        answer = ask(town, question, retrieve={"k": k}).json()
        epic = answer["epic"]
        wanted = nearest(question, k)
        assert [s["doc_id"] for s in epic["sources"]] == wanted
        assert [c["id"] for c in epic["chunks"]] == [f"{name}#0" for name in wanted]
        texts = [TEXTS[name.removeprefix("town/")].strip() for name in wanted]
        assert [s["text"] for s in epic["sources"]] == texts
        assert epic["reused_tokens"] == sum(len(plain_ids(text + "\n\n")) for text in texts)
        # The prompt is what a person would have written with these documents.
        written = [
            {
                "role": "system",
                "content": "Answer the question in one short sentence, using only the facts in the documents.",
            },
            {
                "role": "user",
                "content": "Documents:\n\n" + "".join(f"{t}\n\n" for t in texts) + f"Question: {question}",
            },
        ]
        with town.client() as client:
            plain = client.post(
                "/v1/chat/completions", json={"messages": written, "max_tokens": 4, "temperature": 0}
            ).json()
        assert plain["choices"] == answer["choices"]
        assert plain["usage"] == answer["usage"]  # found again as plain text, too
        assert plain["epic"]["sources"] == []


def test_a_query_of_its_own_decides_what_is_retrieved(town: Running) -> None:
    answer = ask(town, "And that?", retrieve={"k": 1, "query": "When does the ferry leave?"}).json()
    assert [s["doc_id"] for s in answer["epic"]["sources"]] == nearest("When does the ferry leave?", 1)
    assert nearest("When does the ferry leave?", 1) != nearest("And that?", 1)
    assert ask(town, " ", retrieve={"k": 1, "query": " "}).status_code == 400


def test_the_first_piece_of_a_stream_tells_the_sources(town: Running) -> None:
    answer = ask(town, "When does the ferry leave?", retrieve={"k": 2}, stream=True)
    first, *others = events(answer.text)
    assert [s["doc_id"] for s in first["epic"]["sources"]] == nearest("When does the ferry leave?", 2)
    assert all("epic" not in piece for piece in others)


def test_the_least_similar_documents_are_left_out_where_they_do_not_fit(town: Running) -> None:
    question = "When does the ferry leave?"
    ranked = nearest(question, 4)
    everything = ask(town, question, retrieve={"k": 4}).json()["usage"]["prompt_tokens"]
    for keep in (3, 1):
        dropped = sum(len(plain_ids(TEXTS[n.removeprefix("town/")].strip() + "\n\n")) for n in ranked[keep:])
        room = 2048 - (everything - dropped)
        answer = ask(town, question, retrieve={"k": 4}, max_tokens=room).json()
        assert [s["doc_id"] for s in answer["epic"]["sources"]] == ranked[:keep], keep
        assert [c["id"] for c in answer["epic"]["chunks"]] == [f"{name}#0" for name in ranked[:keep]]


def test_without_documents_the_question_stands_alone(gateway: Running) -> None:
    alone = ask(gateway, "Why?", retrieve={"k": 3}).json()
    assert alone["epic"]["sources"] == []
    with gateway.client() as client:
        body = {"messages": [{"role": "user", "content": "Why?"}], "max_tokens": 4, "temperature": 0}
        plain = client.post("/v1/chat/completions", json=body).json()
        assert plain["choices"] == alone["choices"]
        assert client.delete("/v1/documents/x").status_code == 404
        refused = client.post("/v1/completions", json={"prompt": "Why?", "epic": {"retrieve": {"k": 3}}})
        assert refused.status_code == 400


def test_progress_is_of_reading_and_compiling(gateway: Running) -> None:
    with gateway.client() as client:
        *news, last = events(client.post("/v1/documents", json={"documents": DOCUMENTS, "stream": True}).text)
    assert last["object"] == "epic.documents"
    stages = {stage: [n for n in news if n["stage"] == stage] for stage in ("read", "compile")}
    assert stages["read"][-1]["done"] == len(DOCUMENTS)
    assert stages["compile"][-1]["done"] == stages["compile"][-1]["total"] == last["tokens"]


def test_files_are_read_by_their_kind_under_their_names(gateway: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    paths: list[Path] = []

    def noted(path: Path, **options: Any) -> Document:
        paths.append(path)
        return read_document(path, **options)

    monkeypatch.setattr("epic_rag.server.uploads.read_document", noted)
    files = {
        "notes.md": b"# The tower\n\nThe tower is ninety metres high.",
        "page.HTML": b"<html><title>Hill</title><body><p>The hill is steep.</p></body></html>",
        "scan.pdf": text_pdf("The well is deep."),
        "../../../tmp/evil.txt": "The gâte is open.".encode(),
        "C:\\temp\\bridge.txt": b"The bridge is new.",
        "/etc/passwd.txt": b"The wall is old.",
    }
    assert "well" in pypdf.PdfReader(io.BytesIO(files["scan.pdf"])).pages[0].extract_text()
    with gateway.client() as client:
        sent = [("files", (name, data)) for name, data in files.items()]
        *_, done = events(client.post("/v1/documents", files=sent, data={"stream": "true"}).text)
        names = set(done["added"])
        # A multipart parser may cut a Windows path to its last part; what it names is an id and nothing else.
        assert {n.rpartition("\\")[2] for n in names} == {n.rpartition("\\")[2] for n in files}
        listed = {d["id"]: d for d in client.get("/v1/documents").json()["data"]}
        assert set(listed) == names
        assert all(d["source"] == d["id"] for d in listed.values())
        assert listed["page.HTML"]["metadata"] == {"title": "Hill"}
        for question, name in (("How deep is the well?", "scan.pdf"), ("Is the gâte open?", "../../../tmp/evil.txt")):
            assert ask(gateway, question, retrieve={"k": 1}).json()["epic"]["sources"][0]["doc_id"] == name
        assert client.delete("/v1/documents/..%2F..%2F..%2Ftmp%2Fevil.txt").is_success
    # Names of ours in one folder, which is gone.
    assert [path.name for path in paths] == ["0.md", "1.html", "2.pdf", "3.txt", "4.txt", "5.txt"]
    assert len({path.parent for path in paths}) == 1
    assert not paths[0].parent.exists()


def test_files_that_cannot_be_read_are_named_without_a_path_of_the_machine(gateway: Running) -> None:
    with gateway.client() as client:
        for name, data in (
            ("a.pdf", b"no pdf"),
            ("b.txt", b"\xff\xfe\xfa\x00"),
            ("c.md", b"\xe9"),
            ("d.exe", b"x"),
            ("noname", b"x"),
        ):
            refused = client.post("/v1/documents", files=[("files", ("ok.txt", b"Fine.")), ("files", (name, data))])
            assert refused.status_code == 400
            message = refused.json()["error"]["message"]
            assert name in message
            assert "/tmp" not in message
            assert "epic-rag-upload" not in message
        assert client.get("/v1/documents").json()["data"] == []
        assert client.post("/v1/documents", files=[("other", ("a.txt", b"x"))]).status_code == 400


@pytest.mark.parametrize(
    "body",
    [
        "",
        "[",
        "[]",
        "{}",
        '{"documents":[]}',
        '{"documents":[{"id":"","text":"x"}]}',
        '{"documents":[{"id":"a"}]}',
        '{"documents":[{"id":"a","text":1}]}',
        '{"documents":[{"id":"a","text":"x","metadata":{"n":1}}]}',
        '{"documents":[{"id":"a","text":"x","unknown":1}]}',
        r'{"documents":[{"id":"a\ud800","text":"x"}]}',
        r'{"documents":[{"id":"a","text":"x\ud800"}]}',
        r'{"documents":[{"id":"a","text":"x","title":"\udc00"}]}',
        "[" * 100_000,
    ],
)
def test_bodies_that_are_no_documents_are_refused(town: Running, body: str) -> None:
    with town.client() as client:
        for kind in ("application/json", "text/plain", "multipart/form-data", "multipart/form-data; boundary=x"):
            refused = client.post("/v1/documents", content=body, headers={"content-type": kind})
            assert refused.status_code == 400, (kind, refused.text)
            assert set(refused.json()["error"]) == {"message", "type", "param", "code"}


def test_documents_that_another_process_adds_are_seen_at_the_next_request(gateway: Running, tmp_path: Path) -> None:
    store = tmp_path / "store"
    with gateway.client() as client:
        assert client.get("/v1/documents").json()["data"] == []
        with (
            Engine(model(), tokenizer=tokenizer(), selftest=False, store=store / "chunks") as engine,
            EpicRAG.open(store, engine, embedder=BagOfWords(), context="isolated") as other,
        ):
            for name in ("ferry", "bakery"):  # the first makes the registry
                other.add(texts={name: TEXTS[name]})
                assert name in [d["id"] for d in client.get("/v1/documents").json()["data"]]
                answer = ask(gateway, TEXTS[name], retrieve={"k": 1}).json()
                assert answer["epic"]["sources"][0]["doc_id"] == name
                content = f"{TEXTS[name].strip()}\n\nWhy?"
                found = client.post("/tokenize", json={"text": content}).json()["chunks"]
                assert [c["id"] for c in found] == [f"{name}#0"]
            other.delete("ferry")
            assert [d["id"] for d in client.get("/v1/documents").json()["data"]] == ["bakery"]


def test_adding_and_deleting_at_once_leaves_whole_documents(gateway: Running) -> None:
    failed: list[str] = []

    def work(number: int) -> None:
        with gateway.client() as client:
            mine = [{"id": f"{number}/{n}", "text": f"{number} {n}. {TEXTS['bakery']}"} for n in range(3)]
            for _ in range(2):
                for answer in (
                    client.post("/v1/documents", json={"documents": mine}),
                    client.delete(f"/v1/documents/{number}/1"),
                ):
                    if not answer.is_success:
                        failed.append(answer.text)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    with gateway.client() as client:
        listed = client.get("/v1/documents").json()["data"]
    assert [d["id"] for d in listed] == [f"{number}/{n}" for number in range(5) for n in (0, 2)]


def test_without_an_embedder_documents_are_not_implemented(tmp_path: Path) -> None:
    def none() -> Any:
        raise MissingDependencyError("embeddings need a package: pip install 'epic-rag[demo]'")

    with running(tmp_path, embedder=none) as gateway, gateway.client() as client:
        assert client.post("/v1/documents", json={"documents": DOCUMENTS}).status_code == 501
        assert client.post("/v1/embeddings", json={"input": "x"}).status_code == 501
        assert client.get("/v1/documents").json()["data"] == []
        assert [m["id"] for m in client.get("/v1/models").json()["data"]] == ["tiny"]
        assert client.post("/v1/chunks", json={"text": TEXTS["ferry"]}).is_success
