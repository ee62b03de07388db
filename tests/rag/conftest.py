"""Fixtures that several files share: the command line on a tiny saved model."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from epic_rag import cli
from tests.rag.stack import save_model

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="session")
def saved_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], saved_model: Path) -> Run:
    monkeypatch.setenv("EPIC_RAG_MODEL", str(saved_model))

    def invoke(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["epic-rag", *arguments])
        code = 0
        try:
            cli.main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return invoke
