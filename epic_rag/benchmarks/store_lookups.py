"""What a process finds that opens a full store: times, and memory. Run by itself, so that nothing is there before.

``python -m epic_rag.benchmarks.store_lookups`` reads its arguments as JSON and prints its result as JSON.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from epic_engine import ChunkInfo, FileStore
from epic_engine.errors import StoreError

from epic_rag.benchmarks.store_fill import TinyChunks

__all__ = ["in_a_process", "look_up"]

_EVERY = 500
_STATUS = Path("/proc/self/status")
_BACKLOG = 20


def in_a_process(directory: Path, count: int, seed: int, lookups: int) -> dict[str, Any]:
    """Call :func:`look_up` in a fresh Python.

    Raises
    ------
    StoreError
        If it fails; with the end of what it printed.
    """
    arguments = {"directory": str(directory), "count": count, "seed": seed, "lookups": lookups}
    command = [sys.executable, "-m", "epic_rag.benchmarks.store_lookups", json.dumps(arguments)]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=False)
    if done.returncode:
        reason = "\n".join(done.stderr.splitlines()[-_BACKLOG:])
        raise StoreError(f"the look-ups in {directory} could not be measured:\n{reason}")
    return dict(json.loads(done.stdout))


def look_up(directory: Path, count: int, seed: int, lookups: int) -> dict[str, Any]:
    """Open a store that :func:`~epic_rag.benchmarks.store_fill.fill` filled, and use it.

    Parameters
    ----------
    directory
        Of the store.
    count, seed
        Chunks in it, and the seed of these.
    lookups
        Random chunks that are looked up in each way.

    Returns
    -------
    dict
        ``open_s``; ``lookups``: by kind ``p50``, ``p99`` and ``max`` in seconds, and ``sorted``, at most 200 of the
        latencies; ``verify_quick_s``, ``verified``, ``clean``, ``gc_s``; ``memory``, see :class:`_Memory`.

    Raises
    ------
    StoreError
        If a chunk is not found, or not what was put.
    """
    memory = _Memory()
    begin = time.perf_counter()
    store = FileStore(directory)
    result: dict[str, Any] = {"open_s": time.perf_counter() - begin}
    with closing(store):
        memory.sample()
        chunks = TinyChunks(seed)
        infos = [chunks.info(number) for number in random.Random(seed).sample(range(count), min(lookups, count))]
        absent = [TinyChunks(~seed).info(number) for number in range(len(infos))]
        calls: dict[str, tuple[Sequence[ChunkInfo], Callable[[ChunkInfo], Any]]] = {
            "known": (infos, lambda info: store.known([info.key])),
            "known, absent": (absent, lambda info: not store.known([info.key])),
            "info": (infos, lambda info: store.info(info.key)),
            "forms": (infos, lambda info: store.forms(info.namespace, info.fingerprint, info.content)),
            "load, first": (infos, lambda info: store.load(info.key).shape),
            "load, again": (infos, lambda info: store.load(info.key).shape),
        }
        result["lookups"] = {kind: _timed(*call, memory) for kind, call in calls.items()}
        begin = time.perf_counter()
        report = store.verify(quick=True, progress=lambda done: memory.sample())
        result |= {"verify_quick_s": time.perf_counter() - begin, "verified": report.checked, "clean": report.clean}
        memory.sample()
        begin = time.perf_counter()
        store.gc()
        result["gc_s"] = time.perf_counter() - begin
        memory.sample()
    return {**result, "memory": memory.figures}


def _timed(infos: Sequence[ChunkInfo], call: Callable[[ChunkInfo], Any], memory: _Memory) -> dict[str, Any]:
    seconds = []
    for number, info in enumerate(infos):
        begin = time.perf_counter()
        found = call(info)
        seconds.append(time.perf_counter() - begin)
        if not found:
            raise StoreError(f"chunk {info.key} is not as it was put: the store was changed since; fill a new one.")
        if not number % _EVERY:
            memory.sample()
    p50, p99 = np.percentile(seconds, (50, 99)).tolist()
    ordered = np.quantile(seconds, np.linspace(0, 1, min(200, len(seconds)))).tolist()
    return {"p50": p50, "p99": p99, "max": max(seconds), "sorted": ordered}


class _Memory:
    """What the system says this process holds, in bytes; empty where there is no ``/proc``.

    ``base`` is what Python, torch and this package took before the store was opened, ``peak`` the most afterwards, and
    ``peak_anonymous`` the most of it that is no map of a file: pages of mapped files count as resident for as long as
    the system has no better use for them. The anonymous memory is read now and then, not all the time.
    """

    def __init__(self) -> None:
        self.figures: dict[str, int] = {}
        found = self._read()
        if found:
            self.figures = {"base": found["VmRSS"], "base_anonymous": found["RssAnon"]}
        self.sample()

    def sample(self) -> None:
        found = self._read()
        if found:
            self.figures["peak"] = found["VmHWM"]
            self.figures["peak_anonymous"] = max(self.figures.get("peak_anonymous", 0), found["RssAnon"])

    def _read(self) -> dict[str, int]:
        try:
            lines = _STATUS.read_text(encoding="utf-8").splitlines()
        except OSError:
            return {}
        fields = (line.split() for line in lines if line.startswith(("VmRSS", "VmHWM", "RssAnon")))
        found = {words[0].rstrip(":"): 1024 * int(words[1]) for words in fields}
        return found if len(found) == 3 else {}


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    print(json.dumps(look_up(Path(given.pop("directory")), **given)))
