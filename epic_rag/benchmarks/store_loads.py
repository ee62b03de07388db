"""How fast chunks are loaded, against what reads the same bytes without a store."""

from __future__ import annotations

import hashlib
import mmap
import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from epic_engine import ChunkInfo, ChunkKey, FileStore
from epic_engine.chunks import content_digest
from torch import Tensor

__all__ = ["SMOLLM2_CHUNK", "bench_loads"]

Progress = Callable[[int, int], None]

SMOLLM2_CHUNK = (30, 2, 3, 384, 64)
"""KV of 384 tokens of SmolLM2-135M: 8.4 MiB in bfloat16."""
_BASES = ("dd", "mmap copy")
_BLOCK = 1 << 20


def bench_loads(
    directory: Path,
    *,
    chunks: int = 64,
    shape: tuple[int, int, int, int, int] = SMOLLM2_CHUNK,
    rounds: int = 7,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Read a set of chunks in several ways, in turn, first from the page cache and then from the disk.

    ``dd`` reads the store's segments in blocks of a mebibyte; ``mmap copy`` maps them and copies them to memory that
    is there. ``load`` opens the store and loads every chunk, which compares each with its checksum and so reads every
    byte; ``load + copy`` copies each chunk to memory that is there, as well. ``again + copy`` does so when all have
    been compared before; it is not measured cold, because memory that is mapped cannot be driven out.

    Parameters
    ----------
    directory
        For the store; chunks of an earlier call are taken over.
    chunks, shape
        How many chunks, and their KV's shape ``(layers, 2, kv_heads, tokens, head_dim)``, bfloat16.
    rounds
        Times that each way is measured at each temperature; medians count.
    progress
        Called with measurements done and to do.

    Returns
    -------
    dict
        ``chunks``, ``nbytes`` (of all KV), ``rounds``, and by temperature (``warm``, ``cold``) and way: ``rate`` in
        bytes a second (median), ``rates``, ``share`` of the quicker of ``dd`` and ``mmap copy``, ``from_disk`` (bytes
        that came from a disk, by bytes read; None where that is unknown). ``cold`` is absent where pages cannot be
        driven out.
    """
    keys = _write(directory, chunks, shape)
    reading = _Reading(directory, keys, shape)
    temperatures = {"warm": reading.warm, **({"cold": reading.cold} if hasattr(os, "posix_fadvise") else {})}
    plan = {t: [w for w in reading.ways if (t, w) != ("cold", "again + copy")] for t in temperatures}
    total = rounds * sum(map(len, plan.values()))
    samples: dict[str, dict[str, list[_Sample]]] = {t: {way: [] for way in ways} for t, ways in plan.items()}
    done = 0
    for temperature, prepare in temperatures.items():
        for _ in range(rounds):
            for way in plan[temperature]:
                if progress:
                    progress(done, total)
                samples[temperature][way].append(reading.timed(way, prepare))
                done += 1
    if progress:
        progress(done, total)
    return {
        "chunks": chunks,
        "nbytes": chunks * 2 * int(np.prod(shape)),
        "rounds": rounds,
        **{temperature: _figures(by_way) for temperature, by_way in samples.items()},
    }


@dataclass(frozen=True)
class _Sample:
    rate: float
    from_disk: float | None


def _figures(by_way: dict[str, list[_Sample]]) -> dict[str, Any]:
    medians = {way: statistics.median(s.rate for s in samples) for way, samples in by_way.items()}
    best = max(rate for way, rate in medians.items() if way in _BASES)
    figures: dict[str, Any] = {}
    for way, samples in by_way.items():
        shares = [s.from_disk for s in samples if s.from_disk is not None]
        figures[way] = {
            "rate": medians[way],
            "rates": [s.rate for s in samples],
            "share": medians[way] / best,
            "from_disk": statistics.median(shares) if shares else None,
        }
    return figures


def _write(directory: Path, count: int, shape: Sequence[int]) -> list[ChunkKey]:
    """Chunks of random numbers, as far as the store does not have them."""
    ids = [tuple(range(n, n + shape[3])) for n in range(count)]
    keys = [ChunkKey(hashlib.sha256(b"%d of %d" % (n, np.prod(shape))).hexdigest()) for n in range(count)]
    with closing(FileStore(directory)) as store:
        known = store.known(keys)
        for number, key in enumerate(keys):
            if key not in known:
                kv = torch.randn(tuple(shape), generator=torch.Generator().manual_seed(number)).to(torch.bfloat16)
                content = content_digest(ids[number])
                info = ChunkInfo(key, "bench", "model", content, "isolated", ids[number], (), kv.nbytes, time.time())
                store.put([(info, kv)])
    return keys


class _Reading:
    """The ways to read, each timed."""

    def __init__(self, directory: Path, keys: Sequence[ChunkKey], shape: Sequence[int]) -> None:
        self._directory = directory
        self._keys = keys
        self._files = sorted((directory / "segments").glob("*.seg"))
        self._file_bytes = sum(file.stat().st_size for file in self._files)
        self._chunk_bytes = len(keys) * 2 * int(np.prod(shape))
        self._memory = np.ones(self._file_bytes, dtype=np.uint8)
        self._pages = torch.ones((len(keys), *shape), dtype=torch.bfloat16)
        self.ways: dict[str, Callable[[], float]] = {
            **({"dd": self._dd} if shutil.which("dd") else {}),
            "mmap copy": self._mmap_copy,
            "load": lambda: self._load(copy=False),
            "load + copy": lambda: self._load(copy=True),
            "again + copy": self._again,
        }

    def timed(self, way: str, prepare: Callable[[], None]) -> _Sample:
        prepare()
        before = _read_bytes()
        seconds = self.ways[way]()
        after = _read_bytes()
        nbytes = self._file_bytes if way in _BASES else self._chunk_bytes
        return _Sample(nbytes / seconds, None if before is None or after is None else (after - before) / nbytes)

    # -- temperatures ------------------------------------------------------------------------------------------

    def warm(self) -> None:
        for file in self._files:
            with open(file, "rb", buffering=0) as handle:
                while handle.read(_BLOCK):
                    pass

    def cold(self) -> None:
        for file in self._files:
            with open(file, "rb") as handle:
                os.fsync(handle.fileno())  # pages that are not on the disk yet stay
                os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    # -- ways --------------------------------------------------------------------------------------------------

    def _dd(self) -> float:
        begin = time.perf_counter()
        for file in self._files:
            subprocess.run(["dd", f"if={file}", f"of={os.devnull}", "bs=1M"], check=True, capture_output=True)
        return time.perf_counter() - begin

    def _mmap_copy(self) -> float:
        begin = time.perf_counter()
        at = 0
        for file in self._files:
            with open(file, "rb") as handle, mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
                source = np.frombuffer(mapped, dtype=np.uint8)
                self._memory[at : at + len(source)] = source
                at += len(source)
                del source  # a map cannot be closed before
        return time.perf_counter() - begin

    def _load(self, *, copy: bool) -> float:
        begin = time.perf_counter()
        with closing(FileStore(self._directory)) as store:
            self._all(store, copy=copy)
            return time.perf_counter() - begin

    def _again(self) -> float:
        with closing(FileStore(self._directory)) as store:
            self._all(store, copy=False)
            begin = time.perf_counter()
            self._all(store, copy=True)
            return time.perf_counter() - begin

    def _all(self, store: FileStore, *, copy: bool) -> None:
        for number, key in enumerate(self._keys):
            kv: Tensor = store.load(key)
            if copy:
                self._pages[number].copy_(kv)


def _read_bytes() -> int | None:
    """Bytes that this process and its children have had read from a disk."""
    try:
        lines = Path("/proc/self/io").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("read_bytes")), None)
