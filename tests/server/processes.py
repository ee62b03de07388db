"""A gateway as operators run it: a process of its own, with the tiny model from a folder."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["Process", "process"]

_SECONDS = 120.0


class Process:
    """A gateway that was started.

    Attributes
    ----------
    base_url
        Once it listens.
    lines
        What it has written to standard error so far.
    """

    def __init__(self, arguments: Sequence[str], environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "epic_rag.cli", "serve", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )
        self.lines: list[str] = []
        self.base_url = ""
        self._listening = threading.Event()
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.lines.append(line.rstrip("\n"))
            if '"message": "listening"' in line:
                found = json.loads(line)
                self.base_url = f"http://{found['host']}:{found['port']}"
                self._listening.set()
        self._listening.set()

    def wait_until_it_listens(self) -> None:
        """Until it takes requests."""
        assert self._listening.wait(_SECONDS), self.lines
        assert self.base_url, self.lines

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self._process.send_signal(number)

    def end(self) -> tuple[int, str]:
        """Wait for its end; its exit code and what it has written to standard output."""
        code = self._process.wait(_SECONDS)
        self._reading.join(_SECONDS)
        assert self._process.stdout is not None
        return code, self._process.stdout.read()

    @property
    def records(self) -> list[dict[str, Any]]:
        """Its lines, each a JSON object."""
        return [json.loads(line) for line in list(self.lines)]

    def kill(self) -> None:
        """End it, whatever it does."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait(_SECONDS)


@contextmanager
def process(store: Path, model: Path, *arguments: str, **environment: str) -> Iterator[Process]:
    """A gateway that listens at a free port; killed at the end if it is still there."""
    started = Process(["--store", str(store), "--model", str(model), "--port", "0", *arguments], environment)
    try:
        started.wait_until_it_listens()
        yield started
    finally:
        started.kill()
