"""The gateway at length: ``python -m tests.soak.gateway --dataset FILE``.

Every body that schemathesis and our own mutations make, two hundred clients that leave or do not read, and many
streaming clients over a shared corpus, whose requests a second must be a multiple of a prefix cache's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, seed, settings

from epic_rag.benchmarks.gateway import BASE, GatewayLoad, bench_gateway, own_gateway
from epic_rag.evaluation.datasets import load
from tests.server.aborting import abort, held, open_files
from tests.server.conformance import check_answer, conform, mutated
from tests.server.running import Running, running
from tests.server.sockets import wait_until

__all__ = ["main"]

_PARTS = ("conformance", "bodies", "aborts", "load")
_TOLERANCE = 48 << 20
_LEAST_RATIO = 4.0


def conformance(gateway: Running, options: argparse.Namespace) -> dict[str, Any]:
    """What schemathesis makes of the OpenAPI document."""
    seen = conform(gateway.base_url, examples=options.examples, number=options.seed)
    return {"requests": seen.total(), "statuses": sorted({status for _, status in seen})}


def bodies(gateway: Running, options: argparse.Namespace) -> dict[str, Any]:
    """Good bodies in which something was changed."""
    count = 0
    with gateway.client() as client:

        @seed(options.seed)
        @settings(
            max_examples=20 * options.examples, deadline=None, database=None, suppress_health_check=list(HealthCheck)
        )
        @given(request=mutated())
        def check(request: tuple[str, bytes]) -> None:
            nonlocal count
            count += 1
            path, body = request
            check_answer(client.post(path, content=body, headers={"content-type": "application/json"}))

        check()
    return {"requests": count}


def aborts(gateway: Running, options: argparse.Namespace) -> dict[str, Any]:
    """Clients that leave; what was held before them and after them."""
    rounds = []
    for number in range(3):  # the first starts threads and fills caches
        asyncio.run(abort(gateway.base_url, options.aborts, at_once=16, seed=options.seed + number))
        wait_until(lambda: gateway.app.state.admission.running == 0)
        gateway.check_idle()
        if number:
            wait_until(lambda: open_files() <= rounds[0].files)
        else:
            time.sleep(1)
        rounds.append(held())
    before, _, after = rounds
    assert after.threads == before.threads
    assert after.files <= before.files
    assert after.tasks <= before.tasks
    assert after.resident - before.resident < _TOLERANCE, rounds
    outcomes = gateway.engine.stats()["requests"]["outcomes"]
    assert not outcomes["failed"]
    return {"clients": 2 * options.aborts, "grown_bytes": after.resident - before.resident, "outcomes": outcomes}


def streams(options: argparse.Namespace) -> dict[str, Any]:
    """Many streaming clients at once, with the real model."""
    plan = GatewayLoad(
        policies=(options.policy, BASE), clients=options.clients, seconds=options.seconds, seed=options.seed
    )
    examples = load(options.dataset, limit=options.limit, seed=options.seed)
    with own_gateway("--model", options.model, requests=options.clients) as url:
        found = bench_gateway(url, examples, plan, progress=lambda *_: None)
    problems = [
        f"{policy}: {figures[what]} {what}"
        for policy, figures in found["policies"].items()
        for what in ("errors", "incomplete")
        if figures[what]
    ]
    ratio = found["ratios"].get(options.policy)
    if ratio is None or ratio < _LEAST_RATIO:
        problems.append(f"the ratio is below {_LEAST_RATIO:g}")
    return {**found, **({"failed": problems} if problems else {})}


_CHECKS: dict[str, Callable[[Running, argparse.Namespace], dict[str, Any]]] = {
    "conformance": conformance,
    "bodies": bodies,
    "aborts": aborts,
}


def _on_the_tiny_model(
    check: Callable[[Running, argparse.Namespace], dict[str, Any]], options: argparse.Namespace
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, running(Path(folder), max_tokens=4, request_seconds=30) as gateway:
        return check(gateway, options)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts; returns the exit status, 1 if anything did not hold."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak.gateway", description=__doc__)
    parser.add_argument("--part", action="append", choices=_PARTS, help="by default all; load needs --dataset")
    parser.add_argument("--examples", type=int, default=300, help="of each operation")
    parser.add_argument("--aborts", type=int, default=100, help="clients of a round, of which there are three")
    parser.add_argument("--dataset", help="documents and questions, as epic-rag eval takes them")
    parser.add_argument("--limit", type=int, default=16, help="examples to take")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--policy", default="auto")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write what was found here")
    options = parser.parse_args(arguments)
    parts = options.part or [part for part in _PARTS if part != "load" or options.dataset]
    if "load" in parts and not options.dataset:
        parser.error("load needs --dataset")
    found: dict[str, Any] = {}
    for part in parts:
        begin = time.monotonic()
        try:
            found[part] = streams(options) if part == "load" else _on_the_tiny_model(_CHECKS[part], options)
        except Exception as error:
            found[part] = {"failed": f"{type(error).__name__}: {error}"}
        print(f"{part}: {time.monotonic() - begin:.0f} s\n{json.dumps(found[part], indent=1)}", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 1 if any("failed" in one for one in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
