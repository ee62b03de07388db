"""Ingests through EpicRAG that are killed at random points; run as ``python -m tests.rag.crash STORE KILLS SEED``.

The model is loaded once, single-threaded, and the ingests are forked from it. Prints the number that were killed.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from tests.rag.stack import model, open_rag

WORDS = [
    "harbour",
    "crane",
    "ferry",
    "bread",
    "oven",
    "library",
    "reading",
    "noon",
    "dusk",
    "tonne",
    "crown",
    "winter",
    "spring",
    "bicycle",
    "lamp",
    "stone",
]


def texts() -> dict[str, str]:
    """Sixty documents of a few chunks each."""
    rng = random.Random(3)
    return {f"doc{i}": " ".join(rng.choice(WORDS) for _ in range(rng.randint(10, 40))) + "." for i in range(60)}


def main(store: Path, kills: int, seed: int) -> None:
    """Fork, kill, repeat."""
    torch.set_num_threads(1)
    model()
    rng = random.Random(seed)
    killed = 0
    for _ in range(kills):
        child = os.fork()
        if child == 0:
            with open_rag(store, rows_per_step=64, selftest=False) as rag:
                rag.add(texts=texts())
            os._exit(0)
        time.sleep(rng.uniform(0.005, 0.12))
        os.kill(child, signal.SIGKILL)
        killed += os.WIFSIGNALED(os.waitpid(child, 0)[1])
    print(killed)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
