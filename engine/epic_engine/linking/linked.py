"""A linked prompt: what it reads, what it owns, and where it stands."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from epic_engine.attention.base import Run, SequenceRows
from epic_engine.errors import ConfigError
from epic_engine.memory.lease import Lease
from epic_engine.memory.paged_kv import PagedKV
from epic_engine.request import RequestStats

from .layout import Layout, LinkPlan, runs_between, whole_runs
from .policies import Choice

__all__ = ["LinkedPrompt"]


class LinkedPrompt:
    """A linked prompt: its plan, its private KV and the logits of its last token; made by :meth:`Engine.link`.

    It holds its KV, and the chunks it reads, until it is closed or dropped.

    Attributes
    ----------
    layout, plan
        Where everything stands, and what is computed.
    policy
        Link policy, as a string.
    private
        KV of computed tokens, and of tokens that were appended.
    logits
        Logits of the last token of the prompt, ``(1, vocab)``.
    appended_ids
        Tokens behind the prompt, computed.
    room
        Most tokens that may be appended.
    namespace
        Whose it is.
    pending_ids
        Tokens behind those that are not: the last token of an answer, which nothing has followed yet.
    """

    def __init__(
        self,
        layout: Layout,
        plan: LinkPlan,
        choice: Choice,
        private: PagedKV,
        policy: str,
        leases: Sequence[Lease],
        *,
        settled: int = 0,
        probed: int = 0,
        namespace: str = "default",
    ) -> None:
        self.layout = layout
        self.plan = plan
        self.choice = choice
        self.policy = policy
        self.private = private
        self.runs = plan.runs
        self.logits = torch.empty(0)
        self.appended_ids: list[int] = []
        self.pending_ids: list[int] = []
        self.room = 0
        self.namespace = namespace
        self.load_seconds = 0.0
        self.link_seconds = 0.0
        self._leases = tuple(leases)
        self._whole: list[Run] | None = None
        self._own = private.length + len(plan.rows)
        self._settled = settled
        self._probed = probed

    @property
    def leases(self) -> tuple[Lease, ...]:
        """Holds on the chunks that it reads."""
        return self._leases

    def rows(self, positions: Sequence[int]) -> SequenceRows:
        """Rows of this prompt at the given places.

        Raises
        ------
        ConfigError
            If it was closed.
        """
        if self.closed:
            raise ConfigError("this linked prompt was closed: link it again.")
        if positions[0] < len(self.layout):
            return SequenceRows(positions, self.private, self.runs)
        if self._whole is None:
            self._whole = whole_runs(self.runs)
        return SequenceRows(positions, self.private, self.runs, self._whole)

    def __len__(self) -> int:
        return len(self.layout) + len(self.appended_ids)

    def rewind(self) -> None:
        """Forget the tokens behind the prompt; there is room for as many again.

        Raises
        ------
        OutOfPagesError
            If a fork holds the pages of that room, and there are no others.
        """
        self.private.truncate(self._own, keep_room=True)
        self.private.reserve(self.room)
        self.appended_ids, self.pending_ids = [], []

    def fork(self) -> LinkedPrompt:
        """A second one that goes on from here; the pages so far are shared, each adds its own behind them."""
        twin = LinkedPrompt.__new__(LinkedPrompt)
        twin.__dict__.update(self.__dict__)
        twin.private = self.private.fork()
        twin.appended_ids, twin.pending_ids = list(self.appended_ids), list(self.pending_ids)
        return twin

    @property
    def closed(self) -> bool:
        """Whether its KV was given back."""
        return self.private is None

    def close(self) -> None:
        """Give the KV back, and the hold on the chunks. Closing twice is fine."""
        if self.private is not None:
            self.private.release()
        # The object may live on in a traceback or a variable; what it held must not.
        self.private = None  # type: ignore[assignment]
        self.runs, self._whole, self._leases, self.logits = [], None, (), torch.empty(0)

    def count(self, stats: RequestStats) -> None:
        """Enter this prompt's counts and times."""
        stats.policy = self.policy
        stats.prompt = len(self.layout)
        stats.continued = self._settled
        stats.linked = self.plan.linked
        stats.recomputed = self.plan.recomputed
        stats.rows = len(self.plan.rows) + self._probed
        first = self._settled
        runs = runs_between(len(self.layout) - first, [row - first for row in self.plan.rows])
        stats.reused_spans = tuple((first + a, first + b) for a, b in runs)
        stats.times.load, stats.times.link = self.load_seconds, self.link_seconds
        if stats.reused:
            new = [s for s in self.layout.linked if s.start >= self._settled]
            stats.reuse = "exact" if all(s.exact for s in new) else "composed"
