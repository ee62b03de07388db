"""What ``epic-rag store`` shows to people."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from epic_engine.memory.budget import format_bytes
from rich.table import Table

__all__ = ["chunks_table", "documents_table", "stats_tables", "verify_lines"]

_DIGEST = 12


def stats_tables(facts: Mapping[str, Any]) -> list[Table]:
    """Results of ``store stats``: the whole, the namespaces, the chunks by what they have in common."""
    return [_whole(facts), _namespaces(facts["namespaces"]), _groups(facts["groups"])]


def _table(title: str, left: Sequence[str], right: Sequence[str]) -> Table:
    table = Table(title=title)
    for name in left:
        table.add_column(name, overflow="fold")
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _limit(nbytes: int | None) -> str:
    return "none" if nbytes is None else format_bytes(nbytes)


def _whole(facts: Mapping[str, Any]) -> Table:
    table = _table("Store", [""], ["chunks", "tokens", "bytes"])
    held, tokens = facts["compiled_chunks"], facts["compiled_tokens"]
    table.add_row(f"{facts['documents']} documents", str(facts["chunks"]), str(facts["tokens"]), "")
    table.add_row("compiled", str(held), str(tokens), format_bytes(facts["kv_bytes"]))
    table.add_row("as stored", "", "", format_bytes(facts["stored_bytes"]))
    table.add_row("dead, until compacted", "", "", format_bytes(facts["dead_bytes"]))
    table.add_row("on disk", "", "", format_bytes(facts["disk_bytes"]))
    table.add_row("budget", "", "", _limit(facts["budget_bytes"]))
    table.add_row("pinned", str(facts["pinned_chunks"]), "", format_bytes(facts["pinned_bytes"]))
    table.add_row("expired, until collected", str(facts["expired_chunks"]), "", "")
    table.add_row("set aside as damaged", str(facts["quarantined_chunks"]), "", "")
    return table


def _namespaces(rows: Iterable[Mapping[str, Any]]) -> Table:
    table = _table("Namespaces", ["namespace"], ["chunks", "as stored", "quota"])
    for row in rows:
        table.add_row(
            row["namespace"], str(row["chunks"]), format_bytes(row["stored_bytes"]), _limit(row["quota_bytes"])
        )
    return table


def _groups(rows: Iterable[Mapping[str, Any]]) -> Table:
    table = _table(
        "Compiled chunks",
        ["namespace", "model", "context", "encoding"],
        ["chunks", "tokens", "KV", "as stored"],
    )
    for row in rows:
        table.add_row(
            row["namespace"],
            row["fingerprint"][:_DIGEST],
            row["context"],
            row["encoding"],
            str(row["chunks"]),
            str(row["tokens"]),
            format_bytes(row["kv_bytes"]),
            format_bytes(row["stored_bytes"]),
        )
    return table


def documents_table(rows: Iterable[Mapping[str, Any]]) -> Table:
    """Result of ``store ls``."""
    table = _table("Documents and texts", ["document", "namespace"], ["chunks", "tokens", "added"])
    for row in rows:
        table.add_row(
            row["doc_id"], row["namespace"] or "", str(row["chunks"]), str(row["tokens"]), _date(row["added_at"])
        )
    return table


def chunks_table(rows: Iterable[Mapping[str, Any]]) -> Table:
    """Result of ``store ls --chunks``."""
    table = _table(
        "Compiled chunks, oldest first",
        ["key", "namespace", "model", "context", "encoding"],
        ["tokens", "KV", "compiled", "in"],
    )
    for row in rows:
        table.add_row(
            row["key"][:_DIGEST],
            row["namespace"],
            row["model"][:_DIGEST],
            row["context"],
            row["encoding"],
            str(row["tokens"]),
            format_bytes(row["kv_bytes"]),
            _date(row["created"]),
            "" if row["seconds"] is None else f"{row['seconds']:.2f} s",
        )
    return table


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def verify_lines(facts: Mapping[str, Any]) -> list[str]:
    """Result of ``store verify``, with every chunk and file that something is wrong with."""
    lines = [
        f"{facts['checked']} chunks checked: {len(facts['corrupt'])} corrupt, {len(facts['missing'])} missing, "
        f"{len(facts['orphans'])} files without entry, {len(facts['not_compiled'])} to compile when they are next used"
        + (" (repaired)" if facts["repaired"] else "")
    ]
    for kind in ("corrupt", "missing", "orphans"):
        lines += [f"{kind}: {name}" for name in facts[kind]]
    return lines
