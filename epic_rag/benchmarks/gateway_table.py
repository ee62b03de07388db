"""What ``epic-rag bench gateway`` shows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

__all__ = ["gateway_table"]


def gateway_table(result: Mapping[str, Any]) -> Table:
    """A row a policy, from what :func:`~epic_rag.benchmarks.gateway.bench_gateway` returns."""
    load, corpus = result["load"], result["corpus"]
    drawn = f"{load['k']} of {corpus['chunks']} chunks"
    table = Table(title=f"{load['clients']} streaming clients, {drawn}, {load['tokens']} output tokens")
    table.add_column("policy")
    for name in ("requests", "errors", "incomplete", "requests/s", "tokens/s", "TTFT p50", "p95", "p99", "cached", "×"):
        table.add_column(name, justify="right")
    for policy, found in result["policies"].items():
        ttft = found["ttft_s"]
        ratio = result["ratios"].get(policy)
        share = found["cached_share"]
        table.add_row(
            policy,
            str(found["requests"]),
            str(found["errors"]),
            str(found["incomplete"]),
            f"{found['requests_s']:.2f}",
            f"{found['output_tokens_s']:.1f}",
            *(f"{ttft[q]:.2f} s" if q in ttft else "–" for q in ("p50", "p95", "p99")),
            "–" if share is None else f"{share:.0%}",
            "" if ratio is None else f"{ratio:.1f}",
        )
    return table
