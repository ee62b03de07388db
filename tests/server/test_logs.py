"""Logs are lines of JSON, and tell nothing of what is asked, answered and kept, nor of keys."""

from __future__ import annotations

import io
import json
import logging
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from epic_engine import StoreError

from epic_rag.server.logs import JsonFormatter, configure_logs
from tests.rag.stack import save_model
from tests.server.processes import process
from tests.server.running import key_of, running
from tests.server.sockets import chat_body

CHAT = "/v1/chat/completions"


def written(record: logging.LogRecord, **options: Any) -> dict[str, Any]:
    line = JsonFormatter(**options).format(record)
    assert "\n" not in line
    line.encode()
    return json.loads(line)  # type: ignore[no-any-return]


def record(message: str, *arguments: Any, **fields: Any) -> logging.LogRecord:
    return logging.getLogger("epic_rag.x").makeRecord(
        "epic_rag.x", logging.WARNING, "f.py", 1, message, arguments, fields.pop("exc_info", None), extra=fields
    )


def raised(error: BaseException, cause: BaseException | None = None) -> Any:
    try:
        raise error from cause
    except BaseException as caught:
        return type(caught), caught, caught.__traceback__


def test_a_record_is_one_object() -> None:
    made = record("%s of %d\nlines", "one", 2, key="ann", seconds=0.5, path=Path("p"))
    made.created, made.msecs = 0.25, 250.0
    assert written(made) == {
        "time": "1970-01-01T00:00:00.250Z",
        "level": "warning",
        "logger": "epic_rag.x",
        "message": "one of 2\nlines",
        "key": "ann",
        "seconds": 0.5,
        "path": "p",
    }
    assert written(record("%s", "\ud800\x00 é"))["message"] == "\ud800\x00 é"


def test_exceptions_tell_where_and_not_what_they_could_not_read() -> None:
    secret = ValueError("invalid text: 'the vault opens at nine'")
    for exc_info in (raised(secret), raised(KeyError("vault")), raised(TypeError("x"), secret)):
        made = record("failed", exc_info=exc_info)
        assert "vault" not in written(made)["error"]
        assert "test_logs.py" in written(made)["error"]
        assert type(exc_info[1]).__name__ in written(made)["error"]
        assert "vault" in written(made, texts=True)["error"]
    for telling in (OSError(28, "No space left"), StoreError("No space left"), RuntimeError("No space left")):
        shown = written(record("failed", exc_info=raised(telling, secret)))["error"]
        assert "No space left" in shown
        assert "vault" not in shown
    looped = RuntimeError("a")
    looped.__cause__ = looped
    assert written(record("failed", exc_info=(RuntimeError, looped, None)))["error"] == "RuntimeError: a"


@pytest.fixture
def logs() -> Iterator[io.StringIO]:
    """What is logged; everything about logging is afterwards as it was."""
    root, access = logging.getLogger(), logging.getLogger("uvicorn.access")
    names = ("epic_rag", "epic_engine", "uvicorn", "transformers", "")
    levels = {name: logging.getLogger(name).level for name in names}
    handlers = {name: list(logging.getLogger(name).handlers) for name in names}
    propagate = logging.getLogger("transformers").propagate
    yield io.StringIO()
    logging.captureWarnings(False)
    access.disabled = False
    for name in names:
        logging.getLogger(name).setLevel(levels[name])
        logging.getLogger(name).handlers[:] = handlers[name]
    logging.getLogger("transformers").propagate = propagate
    assert root.handlers == handlers[""]


def test_all_loggers_of_the_process_write_json(logs: io.StringIO) -> None:
    configure_logs("info", stream=logs)
    logging.getLogger("epic_rag.server").info("ours")
    logging.getLogger("epic_engine.deep.down").debug("too quiet")
    logging.getLogger("uvicorn.error").info("the server's")
    logging.getLogger("uvicorn.access").info("GET /v1/chunks?after=chunk")
    logging.getLogger("asyncio").error("somebody's")
    logging.getLogger("asyncio").info("too quiet")
    logging.getLogger("transformers.models").warning("a library's")
    warnings.warn("a warning", stacklevel=1)
    lines = [json.loads(line) for line in logs.getvalue().splitlines()]
    assert [line["message"] for line in lines[:4]] == ["ours", "the server's", "somebody's", "a library's"]
    assert "a warning" in lines[4]["message"]
    assert len(lines) == 5


# Words that stand in what is sent and nowhere else; of the answers, all that comes.
SECRETS = ("zanzibar", "quokka", "xylophone", "marmalade", "wombat", "kumquat", "narwhal", "platypus")


def exercise(client: httpx.Client) -> list[str]:
    """Requests of all kinds, good and bad; the answers' texts."""
    answers: list[str] = []

    def post(path: str, body: Any, **options: Any) -> httpx.Response:
        return client.post(path, json=body, **options)

    post("/v1/chunks", {"text": f"{SECRETS[0]} is a chunk of some length.", "metadata": {"of": SECRETS[5]}})
    post("/v1/chunks", {"text": f"{SECRETS[0]} broken", "ttl_seconds": SECRETS[6]})
    post("/v1/documents", {"documents": [{"id": "d", "text": f"{SECRETS[1]} is a document.", "title": SECRETS[5]}]})
    post("/v1/documents", {"documents": [{"id": SECRETS[1]}]})
    client.post("/v1/documents", files={"files": ("a.pdf", f"{SECRETS[1]} is no PDF".encode())})
    for stream in (False, True):
        for extra in ({}, {"epic": {"retrieve": {"k": 2}}}, {"tools": [{"name": SECRETS[7]}]}):
            said = [{"role": "user", "content": f"{SECRETS[2]}?"}]
            answer = post(CHAT, chat_body(max_tokens=24, stream=stream, **extra) | {"messages": said})
            if answer.is_success and not stream:
                answers.append(answer.json()["choices"][0]["message"]["content"])
    post("/v1/completions", {"prompt": f"{SECRETS[3]} ", "max_tokens": 4})
    post("/v1/completions", {"prompt": [10**9], "max_tokens": 4, "user": SECRETS[6]})
    post("/v1/embeddings", {"input": f"{SECRETS[4]}"})
    post("/tokenize", {"text": f"{SECRETS[4]}"})
    post(CHAT, {"messages": [{"role": "user", "content": f"{SECRETS[2]}"}], "model": "other"})
    post(CHAT, {"messages": [{"role": SECRETS[2], "content": SECRETS[2]}], "epic": {SECRETS[6]: 1}})
    client.post(CHAT, content=f'{{"{SECRETS[6]}'.encode(), headers={"content-type": "application/json"})
    client.post(CHAT, content=b"\xff" + SECRETS[6].encode(), headers={"content-type": "application/json"})
    client.get("/v1/models", headers={"authorization": f"Bearer {SECRETS[6]}-a-wrong-key"})
    return answers


def test_no_line_tells_a_text_or_a_key(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(f'[[keys]]\nname = "ann"\nkey = "{key_of("ann")}"\n', encoding="utf-8")
    arguments = ("--log-level", "debug", "--api-key-file", str(keys))
    with process(tmp_path / "store", save_model(tmp_path / "model"), *arguments) as gateway:
        headers = {"Authorization": f"Bearer {key_of('ann')}"}
        with httpx.Client(base_url=gateway.base_url, headers=headers, timeout=60) as client:
            answers = exercise(client)
        gateway.signal(signal.SIGINT)  # it is idle: Ctrl-C ends it
        assert gateway.end() == (0, "")
    records = gateway.records  # every line is JSON
    assert any(line.get("status") == 200 for line in records)
    assert any(line.get("key") == "ann" for line in records)
    assert any("chmod 600" in line["message"] for line in records)
    everything = "\n".join(gateway.lines).lower()
    for secret in (*SECRETS, key_of("ann")):
        assert secret not in everything
    assert answers
    for answer in answers:
        assert json.dumps(answer, ensure_ascii=False)[1:-1].lower() not in everything


def test_texts_are_logged_where_that_is_asked_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for log_texts in (True, False):
        caplog.clear()
        folder = tmp_path / str(log_texts)
        folder.mkdir()
        with (
            caplog.at_level(logging.DEBUG),
            running(folder, log_texts=log_texts) as gateway,
            gateway.client() as client,
        ):
            answers = exercise(client)
        lines = [written(line, texts=log_texts) for line in caplog.records if line.name.startswith("epic_rag")]
        shown = json.dumps(lines, ensure_ascii=False)
        assert ("xylophone?" in shown) == ("marmalade " in shown) == log_texts
        logged = [line["answers"][0] for line in lines if line["message"] == "answered"]
        assert set(answers) <= set(logged) if log_texts else not logged
