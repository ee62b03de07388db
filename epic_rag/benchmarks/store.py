"""The chunk store with very many chunks: how fast it takes them, finds them and reads them, and what that costs.

No model is needed: the chunks are synthetic and tiny, and those whose loads are measured have a real one's shape.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from epic_engine.errors import ConfigError

from epic_rag.benchmarks.store_fill import TinyChunks, fill, ingest_figures
from epic_rag.benchmarks.store_loads import SMOLLM2_CHUNK, bench_loads
from epic_rag.benchmarks.store_lookups import in_a_process
from epic_rag.benchmarks.ttft import machine

__all__ = ["PARTS", "StoreSettings", "bench_store"]

Progress = Callable[[str, int, int], None]
Save = Callable[[Mapping[str, Any]], None]

PARTS = ("chunks", "loads")
_SPANS = 10


@dataclass(frozen=True)
class StoreSettings:
    """What is measured.

    Attributes
    ----------
    parts
        Of :data:`PARTS`: very many chunks; loads against plain reads.
    chunks, batch
        Tiny chunks to put, and how many in one put.
    lookups
        Chunks that are looked up in each way.
    loads, shape, rounds
        For :func:`~epic_rag.benchmarks.store_loads.bench_loads`.
    seed
        Of the chunks.

    Raises
    ------
    ConfigError
        If a part is unknown or a number is not positive.
    """

    parts: tuple[str, ...] = PARTS
    chunks: int = 1_000_000
    batch: int = 1000
    lookups: int = 10_000
    loads: int = 64
    shape: tuple[int, int, int, int, int] = SMOLLM2_CHUNK
    rounds: int = 7
    seed: int = 0

    def __post_init__(self) -> None:
        """Fail before anything is written."""
        if not self.parts or not set(self.parts) <= set(PARTS):
            raise ConfigError(f"parts {', '.join(self.parts)}: name some of {', '.join(PARTS)}.")
        if min(self.chunks, self.batch, self.lookups, self.loads, self.rounds) < 1:
            raise ConfigError("chunks, batch, lookups, loads and rounds must be 1 or more.")


def bench_store(
    directory: Path, settings: StoreSettings, *, progress: Progress | None = None, save: Save | None = None
) -> dict[str, Any]:
    """Measure the chosen parts. After Ctrl-C, what was measured so far comes back.

    Parameters
    ----------
    directory
        For the stores. They stay; a run that was interrupted goes on where another is given the same directory.
    settings
        What to measure.
    progress
        Called with a part's name, its steps done and to do.
    save
        Called with the result so far after each step.

    Returns
    -------
    dict
        ``machine``, ``settings``, ``interrupted``; ``ingest``, see
        :func:`~epic_rag.benchmarks.store_fill.ingest_figures`; ``disk``: ``catalogue`` and ``segments`` in bytes;
        ``open``, see :func:`~epic_rag.benchmarks.store_lookups.look_up`; ``loads``, see
        :func:`~epic_rag.benchmarks.store_loads.bench_loads`.
    """
    result: dict[str, Any] = {"machine": machine(), "settings": asdict(settings), "interrupted": False}
    try:
        if "chunks" in settings.parts:
            _many(directory, settings, result, progress, save)
        if "loads" in settings.parts:
            result["loads"] = bench_loads(
                directory / "loads",
                chunks=settings.loads,
                shape=settings.shape,
                rounds=settings.rounds,
                progress=_of(progress, "loads"),
            )
            if save:
                save(result)
    except KeyboardInterrupt:
        result["interrupted"] = True
    return result


def _many(
    directory: Path, settings: StoreSettings, result: dict[str, Any], progress: Progress | None, save: Save | None
) -> None:
    store, log = directory / "chunks", directory / "puts.jsonl"
    directory.mkdir(parents=True, exist_ok=True)
    try:
        fill(store, log, TinyChunks(settings.seed), settings.chunks, settings.batch, progress=_of(progress, "puts"))
    finally:
        result["ingest"] = ingest_figures(log, max(settings.chunks // _SPANS, 1))
    result["disk"] = {
        "catalogue": sum(file.stat().st_size for file in store.glob("catalogue.sqlite*")),
        "segments": sum(file.stat().st_size for file in store.glob("segments/*.seg")),
    }
    if save:
        save(result)
    look = _of(progress, "look-ups")
    if look:
        look(0, 1)
    result["open"] = in_a_process(store, settings.chunks, settings.seed, settings.lookups)
    if look:
        look(1, 1)
    if save:
        save(result)


def _of(progress: Progress | None, part: str) -> Callable[[int, int], None] | None:
    return None if progress is None else lambda done, total: progress(part, done, total)
