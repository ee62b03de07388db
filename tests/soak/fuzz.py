"""Fuzzing for as long as there is time: ``python -m tests.soak.fuzz --minutes 10``.

Every property runs in a process of its own, so that one that takes the interpreter down is a finding, too. Each turn
has another seed; what a failure prints runs it again.
"""

from __future__ import annotations

import argparse
import logging
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence

from tests.fuzz import exchange, models, storage, texts
from tests.fuzz.running import run

__all__ = ["main"]

PROPERTIES = {**storage.PROPERTIES, **exchange.PROPERTIES, **models.PROPERTIES, **texts.PROPERTIES}
_EXAMPLES = 300
_MOST_SECONDS = 900


def _command(name: str, seed: int, examples: int) -> list[str]:
    return [
        sys.executable, "-m", "tests.soak.fuzz", "--only", name, "--seed", str(seed), "--examples", str(examples),
    ]  # fmt: skip


def _turns(minutes: float, seed: int, examples: int) -> int:
    end = time.monotonic() + 60 * minutes
    done: Counter[str] = Counter()
    failed: list[str] = []
    while time.monotonic() < end and not failed:
        for name in PROPERTIES:
            command = _command(name, seed, examples)
            begin = time.monotonic()
            try:
                ended = subprocess.run(command, capture_output=True, text=True, timeout=_MOST_SECONDS, check=False)
                code, output = ended.returncode, ended.stdout + ended.stderr
            except subprocess.TimeoutExpired:
                code, output = None, f"it did not end in {_MOST_SECONDS} s"
            done[name] += examples
            print(f"{name}: {examples} examples, seed {seed}, {time.monotonic() - begin:.0f} s", flush=True)
            if code != 0:
                failed.append(name)
                print(f"{output[-6000:]}\n{name} FAILED ({code}); again: {' '.join(command[1:])}", flush=True)
            if time.monotonic() > end:
                break
        seed += 1
    print(f"{sum(done.values())} examples of {len(done)} properties, {len(failed)} failed", flush=True)
    return 1 if failed else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run properties; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="when to stop")
    parser.add_argument("--seed", type=int, default=1, help="of the first turn")
    parser.add_argument("--examples", type=int, default=_EXAMPLES, help="of a property in one turn")
    parser.add_argument("--only", choices=sorted(PROPERTIES), help="run this one, here")
    given = parser.parse_args(arguments)
    if given.only:
        logging.disable(logging.CRITICAL)
        run(PROPERTIES[given.only], given.examples, given.seed)
        return 0
    return _turns(given.minutes, given.seed, given.examples)


if __name__ == "__main__":
    sys.exit(main())
