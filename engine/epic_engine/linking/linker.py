"""From a prompt's segments to a linked prompt that waits to be computed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from epic_engine.attention.base import AttentionBackend
from epic_engine.chunks import ChunkKey
from epic_engine.memory.lease import Lease
from epic_engine.memory.paged_kv import PagedKV
from epic_engine.memory.pages import PagePool
from epic_engine.memory.prefix_cache import PrefixCache
from epic_engine.memory.residency import Residency
from epic_engine.model.decoder import AttentionStep, Decoder
from epic_engine.storage.store import ChunkInfo

from .layout import Body, Layout, LinkPlan
from .linked import LinkedPrompt
from .policies import Choice, LinkPolicy
from .probe import Probe

__all__ = ["Hold", "LinkRequest", "Linker"]


@dataclass(frozen=True, eq=False)
class LinkRequest:
    """A prompt that is to be linked.

    Attributes
    ----------
    segments
        Token ids, or the catalogue entry of a compiled chunk.
    policy
        Which tokens are computed anew.
    after
        The prompt continues this one, whose KV it shares; or None.
    namespace
        Who asks.
    """

    segments: tuple[tuple[int, ...] | ChunkInfo, ...]
    policy: LinkPolicy
    after: LinkedPrompt | None = None
    namespace: str = "default"

    @property
    def keys(self) -> list[ChunkKey]:
        """Chunks that it reads, each once."""
        return list(dict.fromkeys(s.key for s in self.segments if isinstance(s, ChunkInfo)))

    def __len__(self) -> int:
        """Tokens of the whole prompt, those it continues included."""
        before = len(self.after) + len(self.after.pending_ids) if self.after else 0
        return before + sum(len(s.token_ids if isinstance(s, ChunkInfo) else s) for s in self.segments)


@dataclass(frozen=True, eq=False)
class Hold:
    """What a request needs before it can be laid out: its chunks, and pages of its own."""

    lease: Lease
    private: PagedKV

    def release(self) -> None:
        """Give both back."""
        self.lease.release()
        self.private.release()


class Linker:
    """Lays prompts out and lets policies choose.

    Parameters
    ----------
    decoder, backend
        The model and its attention.
    pool, residency, prefixes
        Memory for private KV; compiled chunks; exact KV of earlier prompts.
    run
        Runs rows through the model with a given step; for policies that look first.
    rows_per_step
        Most rows at once.
    """

    def __init__(
        self,
        decoder: Decoder,
        backend: AttentionBackend,
        pool: PagePool,
        residency: Residency,
        prefixes: PrefixCache,
        run: Callable[[Sequence[int], Sequence[int], AttentionStep], None],
        rows_per_step: int,
    ) -> None:
        self._decoder = decoder
        self._backend = backend
        self._pool = pool
        self._residency = residency
        self._prefixes = prefixes
        self._run = run
        self._rows_per_step = rows_per_step

    def acquire(self, request: LinkRequest) -> Hold:
        """Hold the request's chunks, and share the pages of what it continues. One thread at a time.

        Raises
        ------
        OutOfPagesError
            If they do not fit beside what is in use.
        ChunkNotFoundError
            If a chunk is gone.
        """
        lease = self._residency.acquire(request.keys)
        try:
            after = request.after
            return Hold(lease, PagedKV(self._pool) if after is None else after.private.fork())
        except BaseException:
            lease.release()
            raise

    @property
    def loading(self) -> bool:
        """Whether chunks are on their way: memory that they hold meanwhile may be had later."""
        return self._residency.loading

    def prepare(self, request: LinkRequest, hold: Hold, choice: Choice | None = None) -> LinkedPrompt:
        """Lay a prompt out and choose what is computed; computes first passes, but not the prompt.

        Parameters
        ----------
        request
            The prompt.
        hold
            From :meth:`acquire`; the linked prompt keeps it.
        choice
            What the policy chose before, for a prompt that is linked again.
        """
        begin = time.perf_counter()
        after = request.after
        parts: list[tuple[Sequence[int], Body | None]] = []
        if after is not None:
            parts += [(s.token_ids, s.body) for s in after.layout.segments]
            parts += [(tuple(after.appended_ids), None), (tuple(after.pending_ids), None)]
        for item in request.segments:
            if isinstance(item, ChunkInfo):
                resident = hold.lease.body(item.key)
                resident.wait(0)  # the rest comes while layers are computed; a damaged chunk is found out here
                parts.append((item.token_ids, Body(resident.kv, item.context_ids, wait=resident.wait)))
            else:
                parts.append((item, None))
        loaded = time.perf_counter()
        settled = len(after) if after is not None else 0
        layout = Layout(parts)
        if after is None:
            layout = request.policy.arrange(layout, partial(self._prefixes.longest, namespace=request.namespace))
        probe = Probe(self._decoder, self._backend, self._run, self._rows_per_step)
        if choice is None or request.policy.caches_prompt:
            choice = request.policy.choose(layout, probe)
        plan = LinkPlan(
            layout, choice.recompute, choice.damp, settled=settled, runs=after.runs if after is not None else ()
        )
        leases = (*(after.leases if after is not None else ()), hold.lease)
        linked = LinkedPrompt(
            layout,
            plan,
            choice,
            hold.private,
            str(request.policy),
            leases,
            settled=settled,
            probed=probe.rows,
            namespace=request.namespace,
        )
        linked.load_seconds = loaded - begin
        linked.link_seconds = time.perf_counter() - loaded
        return linked

    def linked(self, request: LinkRequest, prompt: LinkedPrompt) -> None:
        """Take note of a prompt that has been computed: its KV enters the prefix cache if its policy says so."""
        if not request.policy.caches_prompt or request.after is not None or prompt.plan.recomputed:
            return
        kv = torch.cat([kv[:, :, :, start:stop] for kv, start, stop in prompt.private.pieces()], dim=3)
        rows = len(prompt.plan.rows)
        self._prefixes.insert(prompt.layout.token_ids, kv[:, :, :, :rows], len(prompt.layout) - rows, request.namespace)
