"""Chunks without a model, and how fast a store takes them."""

from __future__ import annotations

import hashlib
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from epic_engine import ChunkInfo, ChunkKey, FileStore
from epic_engine.chunks import content_digest
from epic_engine.errors import ConfigError
from torch import Tensor

__all__ = ["TinyChunks", "fill", "ingest_figures"]

Progress = Callable[[int, int], None]

_SHAPE = (2, 2, 1, 4, 8)
_TOKENS = 4
_VOCABULARY = 49_152
_TENANTS = 8
_MODELS = 3
_BEHIND_ANOTHER = 4


@dataclass(frozen=True)
class TinyChunks:
    """Chunks of four tokens and 256 bytes of KV, each the same whenever it is asked for.

    They belong to eight namespaces and three models, and one in four depends on another.

    Attributes
    ----------
    seed
        Of the token ids, and so of the keys.
    """

    seed: int = 0

    def info(self, number: int, created: float = 0.0) -> ChunkInfo:
        """Catalogue entry of a chunk."""
        ids = self._ids(number)
        namespace, fingerprint = f"tenant-{number % _TENANTS}", f"model-{number % _MODELS}"
        depends: tuple[str, ...] = ()
        context = "isolated"
        if number % _BEHIND_ANOTHER == _BEHIND_ANOTHER - 1:
            depends, context = (content_digest(self._ids(number // 2)),), "neighbours:1"
        key = ChunkKey.of(fingerprint, namespace, f"{context} {depends}", ids)
        nbytes = 2 * int(np.prod(_SHAPE))
        return ChunkInfo(key, namespace, fingerprint, content_digest(ids), context, ids, (), nbytes, created, depends)

    def kv(self, number: int) -> Tensor:
        """KV of a chunk, bfloat16 of shape ``(2, 2, 1, 4, 8)``: bytes without a meaning."""
        raw = bytearray(self._digest(number) * 8)
        return torch.frombuffer(raw, dtype=torch.bfloat16).view(_SHAPE)

    def _digest(self, number: int) -> bytes:
        return hashlib.sha256(b"%d %d" % (self.seed, number)).digest()

    def _ids(self, number: int) -> tuple[int, ...]:
        return tuple((np.frombuffer(self._digest(number), dtype="<u4")[:_TOKENS] % _VOCABULARY).tolist())


def fill(
    directory: Path, log: Path, chunks: TinyChunks, count: int, batch: int, *, progress: Progress | None = None
) -> None:
    """Put chunks into a store until it has so many, and write down how long each put took.

    Where an earlier call was interrupted, this one goes on.

    Parameters
    ----------
    directory
        Of the store.
    log
        Gets a line a put: JSON with ``first``, ``count``, ``seconds`` and ``cpu_s``.
    chunks
        What is put.
    count, batch
        Chunks that the store shall hold, and chunks of a put.
    progress
        Called with the chunks stored and to store.

    Raises
    ------
    ConfigError
        If the store holds other chunks, or more of them.
    """
    with closing(FileStore(directory)) as store:
        done = _resumed(store, chunks, count)
        with open(log, "a", encoding="utf-8") as file:
            while done < count:
                if progress:
                    progress(done, count)
                numbers = range(done, min(done + batch, count))
                group = [(chunks.info(number, time.time()), chunks.kv(number)) for number in numbers]
                begin, cpu = time.perf_counter(), time.process_time()
                store.put(group)
                entry = {"first": done, "count": len(group), "seconds": time.perf_counter() - begin}
                print(json.dumps({**entry, "cpu_s": time.process_time() - cpu}), file=file, flush=True)
                done += len(group)
    if progress:
        progress(done, count)


def _resumed(store: FileStore, chunks: TinyChunks, count: int) -> int:
    done = store.usage().chunks
    ends = [chunks.info(number).key for number in {0, done - 1}] if done else []
    if done > count or len(store.known(ends)) != len(ends):
        raise ConfigError(
            f"{store.path} holds {done:,} chunks, which are not the first of the {count:,} that this benchmark puts: "
            "give a new directory, or the options that it was begun with."
        )
    return done


def ingest_figures(log: Path, span: int) -> dict[str, Any]:
    """How fast a store was filled.

    Parameters
    ----------
    log
        As :func:`fill` wrote it.
    span
        Chunks whose puts are taken together; those of a put count where its first one does.

    Returns
    -------
    dict
        ``spans``: a dict for each with ``first``, ``chunks``, ``rate`` in chunks a second, and ``cpu_s`` a chunk;
        ``first``, ``last``, ``ratio`` (last to first) and ``cpu_ratio`` (the processor's time of the first span to
        the last's, which other processes change less) of those of which more than half is there.
    """
    puts: dict[int, list[dict[str, float]]] = defaultdict(list)
    for put in _puts(log):
        puts[int(put["first"]) // span].append(put)
    spans = [_span(number * span, found) for number, found in sorted(puts.items())]
    figures: dict[str, Any] = {"spans": spans}
    whole = [entry for entry in spans if 2 * entry["chunks"] > span] or spans
    if whole:
        first, last = whole[0], whole[-1]
        figures |= {"first": first["rate"], "last": last["rate"], "ratio": last["rate"] / first["rate"]}
        figures["cpu_ratio"] = first["cpu_s"] / last["cpu_s"]
    return figures


def _puts(log: Path) -> Iterator[dict[str, float]]:
    if log.exists():
        for line in log.read_text(encoding="utf-8").splitlines():
            try:
                yield json.loads(line)
            except ValueError:  # cut, as the process was killed
                continue


def _span(first: int, puts: Sequence[dict[str, float]]) -> dict[str, float]:
    chunks = sum(put["count"] for put in puts)
    seconds, cpu = (sum(put[name] for put in puts) for name in ("seconds", "cpu_s"))
    return {"first": first, "chunks": chunks, "rate": chunks / seconds, "cpu_s": cpu / chunks}
