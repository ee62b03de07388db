"""How ``epic-rag serve`` starts and ends, as a process of its own."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from epic_engine import ConfigError, StoreError
from typer.testing import CliRunner

from epic_rag.cli import app, main
from epic_rag.server.run import serve
from epic_rag.server.settings import load_settings
from tests.rag.stack import save_model
from tests.server.processes import process
from tests.server.sockets import chat_body

CHAT = "/v1/chat/completions"
# Long enough that it runs when the signal comes.
LONG: dict[str, Any] = chat_body(max_tokens=1900, stream=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


def begun(client: httpx.Client) -> tuple[Any, Iterator[str]]:
    """A stream of which some has come; it is open until its context is left."""
    stream = client.stream("POST", CHAT, json=LONG)
    lines = stream.__enter__().iter_lines()
    for line in lines:
        if '"content":"' in line and '"content":""' not in line:
            break
    return stream, lines


def test_the_first_signal_lets_answers_end_and_lets_nobody_in(tmp_path: Path, model: Path) -> None:
    with process(tmp_path / "store", model) as gateway, httpx.Client(base_url=gateway.base_url, timeout=60) as client:
        stream, lines = begun(client)
        gateway.signal(signal.SIGTERM)
        refused = None
        while refused is None:  # the signal is noticed within a tenth of a second
            try:
                answer = httpx.post(f"{gateway.base_url}{CHAT}", json=chat_body(max_tokens=1), timeout=60)
            except httpx.ConnectError:
                refused = "connection"
            else:
                refused = answer.json()["error"]["code"] if answer.status_code == 503 else None
        assert refused in ("connection", "shutting_down")
        rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert '"finish_reason":"length"' in rest[-2]
        stream.__exit__(None, None, None)
        assert gateway.end() == (0, "")
        assert all(record["level"] in ("info", "warning") for record in gateway.records), gateway.lines
    # What it kept can be served again: the store was closed.
    assert not list((tmp_path / "store").rglob("*-journal"))


def test_another_signal_ends_at_once(tmp_path: Path, model: Path) -> None:
    with process(tmp_path / "store", model) as gateway, httpx.Client(base_url=gateway.base_url, timeout=60) as client:
        stream, lines = begun(client)
        gateway.signal(signal.SIGINT)
        time.sleep(0.3)
        gateway.signal(signal.SIGTERM)
        assert gateway.end()[0] == 1
        rest: list[str] = []
        with contextlib.suppress(httpx.RemoteProtocolError):
            rest += lines
        assert "data: [DONE]" not in rest
        stream.__exit__(None, None, None)


def test_a_taken_port_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("epic_rag.server.logs.configure_logs", lambda *_, **__: None)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr(sys, "argv", ["epic-rag", "serve", "--store", str(tmp_path), "--port", str(port)])
        with pytest.raises(SystemExit) as ended:
            main()
    assert ended.value.code == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1, said
    assert f"127.0.0.1:{port}" in said
    assert "another port" in said


def test_addresses_that_cannot_be_listened_at_are_refused(tmp_path: Path) -> None:
    for host in ("no.such.host.invalid", "203.0.113.7"):
        with pytest.raises(ConfigError, match=host):
            serve(load_settings({"store": tmp_path, "host": host, "port": 0}))


def test_what_cannot_be_served_is_refused_before_the_model_is_loaded(tmp_path: Path) -> None:
    none: dict[str, Any] = {"port": 0, "model": str(tmp_path / "no-model")}
    (tmp_path / "file").touch()
    for store in (tmp_path / "file", tmp_path / "file" / "store"):
        with pytest.raises(StoreError, match="may be written"):
            serve(load_settings({**none, "store": store}))
    with pytest.raises(ConfigError, match="polcy"):
        serve(load_settings({**none, "store": tmp_path, "policy": "polcy"}))
    with pytest.raises(ConfigError, match="keys"):
        serve(load_settings({**none, "store": tmp_path, "api_key_file": tmp_path / "keys.toml"}))


def test_the_command_names_the_missing_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [n for n in sys.modules if n.startswith("epic_rag.server.") and not n.endswith(".command")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    result = CliRunner().invoke(app, ["serve", "--store", str(tmp_path)])
    assert result.exit_code == 1
    assert "uvicorn" in str(result.exception)
    assert "epic-rag[serve]" in str(result.exception)


def test_help_needs_neither_the_extra_nor_torch() -> None:
    code = (
        "import sys\n"
        "for name in ('fastapi', 'starlette', 'uvicorn', 'pydantic_settings', 'torch', 'transformers'):\n"
        "    sys.modules[name] = None\n"
        "from epic_rag.cli import app\n"
        "app(['serve', '--help'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "--api-key-file" in done.stdout
