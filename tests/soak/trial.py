"""One trial: a copy of a prepared store, a fault, a verdict. Each runs in a process of its own."""

from __future__ import annotations

import os
import random
import signal
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .disk import Damage
from .judge import Judge
from .ledger import Ledger
from .outcome import Outcome
from .work import Base

__all__ = ["Passes", "Trial", "forked", "killed_at"]

Passes = dict[tuple[int, int], "Counter[str]"]
"""How often the work passes each point, by the number of the base and of the script."""


@dataclass
class Trial:
    """What a kind of fault has to work with.

    Attributes
    ----------
    turn
        How many of its kind were before it.
    rng
        The only source of chance.
    folder
        Empty; removed afterwards.
    bases, passes
        What there is to start from.
    outcome
        To be filled in.
    """

    turn: int
    rng: random.Random
    folder: Path
    bases: list[Base]
    passes: Passes
    outcome: Outcome = field(default_factory=Outcome)

    def start(self, *names: str) -> tuple[Path, Ledger]:
        """A copy of one of the bases, of those with these names if any is given."""
        chosen = self.rng.choice([base for base in self.bases if not names or base.path.name in names])
        return self.copy(chosen)

    def copy(self, base: Base) -> tuple[Path, Ledger]:
        """A copy of a base."""
        copied = base.copied(self.folder)
        return copied.path, copied.ledger

    def judge(self, path: Path, ledger: Ledger, **options: Any) -> Judge:
        """Have the store checked; every second time it is read first."""
        options.setdefault("read_first", self.rng.random() < 0.5)
        options.setdefault("damage", Damage())
        judge = Judge(path, ledger, self.outcome, perhaps=ledger.damaged(), **options)
        judge.check()
        return judge


def forked(work: Callable[[], object]) -> int:
    """Start a process that does some work and ends, with 1 if it raises; returns its number."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return child


def killed_at(point: str, number: int) -> Callable[[str], None]:
    """A hook that kills its process when it passes a point for the n-th time, counted from 0."""
    seen = [0]

    def hook(name: str) -> None:
        if name == point:
            seen[0] += 1
            if seen[0] == number + 1:
                os.kill(os.getpid(), signal.SIGKILL)

    return hook
