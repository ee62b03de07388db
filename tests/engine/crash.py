"""Ingests that are killed at random points; run as ``python -m tests.engine.crash MODEL STORE KILLS``.

One process loads the model, single-threaded, and forks the ingests from it, for a start costs seconds. It prints a
line of JSON for every ingest.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import sys
import time
from contextlib import closing
from pathlib import Path

import torch
from epic_engine import Engine
from transformers import AutoModelForCausalLM

CHUNKS = 900


def chunks() -> list[list[int]]:
    """Many small chunks of several lengths."""
    rng = random.Random(11)
    return [[rng.randrange(3, 199) for _ in range(rng.randint(4, 12))] for _ in range(CHUNKS)]


def ingest(model: object, store: Path, pipe: int) -> None:
    """Compile everything; writes one line of progress per batch to the pipe, unbuffered."""
    os.write(pipe, b"started\n")
    with Engine(model, store=store, rows_per_step=24, selftest=False) as engine:
        engine.compile_many(chunks(), progress=lambda done, total: os.write(pipe, f"{done} {total}\n".encode()) or None)


def durable_tokens(store: Path) -> int:
    """Tokens of the chunks that the catalogue names, without the store's own code."""
    if not (store / "catalogue.sqlite").exists():
        return 0
    with closing(sqlite3.connect(store / "catalogue.sqlite")) as db:
        if db.execute("SELECT count(*) FROM sqlite_master WHERE name='chunks'").fetchone()[0] == 0:
            return 0
        return sum(len(raw) // 4 for (raw,) in db.execute("SELECT token_ids FROM chunks"))


def run(model: object, store: Path, kill_after: float | None, *, ready: bool) -> dict[str, object]:
    """One ingest in a forked process, killed ``kill_after`` seconds after its start (or its first progress)."""
    before = durable_tokens(store)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        try:
            ingest(model, store, write)
            os._exit(0)
        finally:
            os._exit(1)
    os.close(write)
    with os.fdopen(read, "rb", buffering=0) as lines:
        text = lines.readline()
        if ready and kill_after is not None:
            text += lines.readline()
        if kill_after is not None:
            time.sleep(kill_after)
            os.kill(child, signal.SIGKILL)
        text += lines.read()
    status = os.waitpid(child, 0)[1]
    progress = [tuple(map(int, line.split())) for line in text.decode().splitlines() if line[:1].isdigit()]
    return {
        "killed": os.WIFSIGNALED(status),
        "exit": os.waitstatus_to_exitcode(status),
        "before": before,
        "after": durable_tokens(store),
        "progress": progress,
    }


def main() -> None:
    """See the module's docstring."""
    folder, store, kills = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rng = random.Random(5)
    print(json.dumps(run(model, store.with_name("whole"), None, ready=False)), flush=True)
    for number in range(kills):
        delay = rng.uniform(0, 0.08) if number % 4 else rng.uniform(0, 0.06)
        print(json.dumps(run(model, store, delay, ready=bool(number % 4))), flush=True)
    print(json.dumps(run(model, store, None, ready=False)), flush=True)


if __name__ == "__main__":
    main()
