"""Results of ``bench store`` as tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rich.table import Table

__all__ = ["store_tables"]

_MEBI = 2**20


def store_tables(result: Mapping[str, Any]) -> list[Table]:
    """A table for each part of :func:`~epic_rag.benchmarks.store.bench_store` that was measured."""
    tables: dict[str, Callable[[Mapping[str, Any]], Table]] = {
        "ingest": _ingest,
        "open": _lookups,
        "disk": _footprint,
        "loads": _loads,
    }
    return [draw(result) for part, draw in tables.items() if result.get(part)]


def _table(title: str, left: str, *right: str) -> Table:
    table = Table(title=title)
    table.add_column(left, no_wrap=True)
    for name in right:
        table.add_column(name, justify="right")
    return table


def _ingest(result: Mapping[str, Any]) -> Table:
    ingest = result["ingest"]
    batch = result["settings"]["batch"]
    table = _table(f"Puts of {batch:,} chunks, durable one by one", "chunks there", "chunks a second", "CPU a chunk")
    for span in ingest["spans"]:
        reached = span["first"] + span["chunks"]
        table.add_row(f"{span['first']:,} to {reached:,}", f"{span['rate']:,.0f}", f"{1e6 * span['cpu_s']:.0f} µs")
    if "ratio" in ingest:
        table.add_row("last to first", f"{ingest['ratio']:.2f}", f"{ingest['cpu_ratio']:.2f}")
    return table


def _lookups(result: Mapping[str, Any]) -> Table:
    table = _table("Look-ups in a fresh process", "", "p50", "p99", "most")
    for kind, figures in result["open"]["lookups"].items():
        table.add_row(kind, *(f"{1000 * figures[name]:.3f} ms" for name in ("p50", "p99", "max")))
    return table


def _footprint(result: Mapping[str, Any]) -> Table:
    chunks, disk, opened = result["settings"]["chunks"], result["disk"], result.get("open", {})
    table = _table(f"A store of {chunks:,} chunks", "", "")
    rows: dict[str, tuple[Any, str]] = {
        "open": (opened.get("open_s"), "{:.3f} s"),
        "verify --quick": (opened.get("verify_quick_s"), "{:.1f} s"),
        "gc": (opened.get("gc_s"), "{:.2f} s"),
        "catalogue": (disk["catalogue"] / _MEBI, "{:.0f} MiB"),
        "catalogue, a chunk": (disk["catalogue"] / chunks, "{:.0f} bytes"),
        "segments": (disk["segments"] / _MEBI, "{:.0f} MiB"),
    }
    memory = opened.get("memory", {})
    for name, key in {
        "resident before it was opened": "base",
        "resident at most": "peak",
        "of that no map of a file, before": "base_anonymous",
        "at most": "peak_anonymous",
    }.items():
        rows[name] = memory[key] / _MEBI if key in memory else None, "{:.0f} MiB"
    for name, (value, form) in rows.items():
        if value is not None:
            table.add_row(name, form.format(value))
    return table


def _loads(result: Mapping[str, Any]) -> Table:
    loads = result["loads"]
    title = f"Reading {loads['chunks']} chunks, {loads['nbytes'] / _MEBI:,.0f} MiB (medians of {loads['rounds']})"
    table = _table(title, "", "GB/s", "of the quicker plain read", "from disk")
    for temperature in ("warm", "cold"):
        for way, figures in loads.get(temperature, {}).items():
            disk = figures["from_disk"]
            table.add_row(
                f"{temperature}: {way}",
                f"{figures['rate'] / 1e9:.2f}",
                f"{figures['share']:.0%}",
                "–" if disk is None else f"{disk:.0%}",
            )
    return table
