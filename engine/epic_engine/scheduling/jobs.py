"""A prompt on its way to its first logits, and the generations that wait for them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from epic_engine.linking.linked import LinkedPrompt
from epic_engine.linking.linker import Hold, LinkRequest
from epic_engine.linking.policies import Choice

from .generation import Generation

__all__ = ["LinkJob"]


@dataclass(eq=False)
class LinkJob:
    """One prompt to link.

    Attributes
    ----------
    request
        The prompt.
    order
        Place in the line of arrivals.
    priority
        Higher goes first.
    deadline
        ``time.perf_counter()`` after which nobody wants it.
    generations
        What goes on behind it: none (the prompt itself is wanted), one, or several that share its pages.
    tail
        Tokens behind the prompt that are computed again: those of a generation that lost its memory.
    choice
        What its policy chose when it was linked before.
    expected
        Tokens that are likely to follow.
    room
        Tokens behind the prompt to hold memory for.
    ids, positions
        Rows to compute; ``computed`` of them are.
    done
        Called with the linked prompt, if there are no generations.
    failed
        Called with the error, likewise.
    """

    request: LinkRequest
    order: int
    priority: int = 0
    deadline: float = math.inf
    generations: list[Generation] = field(default_factory=list)
    tail: Sequence[int] = ()
    choice: Choice | None = None
    room: int = 1
    expected: int = 0
    done: Callable[[LinkedPrompt], None] | None = None
    failed: Callable[[BaseException], None] | None = None
    arrived: float = field(default_factory=time.perf_counter)
    started: float | None = None
    hold: Hold | None = None
    linked: LinkedPrompt | None = None
    preparing: bool = False
    reserved: bool = False
    in_pass: bool = False
    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    computed: int = 0
    cancelled: bool = False

    @property
    def rank(self) -> tuple[int, int]:
        """Lower goes first."""
        return -self.priority, self.order

    @property
    def unwanted(self) -> bool:
        """Whether everybody who waited for it has left."""
        return self.cancelled or (bool(self.generations) and all(g.ended for g in self.generations))

    def prepared(self, linked: LinkedPrompt) -> None:
        """Its rows are known."""
        self.linked, self.choice, self.hold = linked, linked.choice, None
        self.preparing = False
        length = len(linked.layout)
        self.ids = [*linked.plan.row_ids, *self.tail]
        self.positions = [*linked.plan.rows, *range(length, length + len(self.tail))]

    def reset(self) -> None:
        """Give back what it holds; it begins again."""
        if self.linked is not None:
            self.linked.close()
        elif self.hold is not None:
            self.hold.release()
        self.linked = self.hold = None
        self.reserved = self.preparing = False
        self.computed = 0

    def fail(self, error: BaseException) -> None:
        """Tell everybody who waits."""
        self.reset()
        for generation in self.generations:
            generation.fail(error)
        if self.failed is not None:
            self.failed(error)
