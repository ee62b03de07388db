"""A linked prompt and the generation that follows it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from .attention.base import PrivateKV, Run, SequenceRows
from .config import SamplingParams
from .constraint import TokenConstraint
from .detokenizer import Detokenizer
from .errors import ConfigError
from .linking.layout import Layout, LinkPlan
from .request import Completion, RequestStats, StreamEvent
from .sampler import Sampler, TokenLogprob

__all__ = ["LinkedPrompt", "Stream", "StreamWork"]


class LinkedPrompt:
    """A linked prompt: its plan, its private KV and the logits of its last token; made by :meth:`Engine.link`.

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
    """

    def __init__(self, layout: Layout, plan: LinkPlan, private: PrivateKV, policy: str, probed: int) -> None:
        self.layout = layout
        self.plan = plan
        self.policy = policy
        self.private = private
        self.runs: list[Run] = plan.runs
        self.logits = torch.empty(0)
        self.load_seconds = 0.0
        self.link_seconds = 0.0
        self._probed = probed

    def rows(self, positions: Sequence[int]) -> SequenceRows:
        """Rows of this prompt at the given places."""
        return SequenceRows(positions, self.private, self.runs)

    @property
    def appended(self) -> int:
        """Tokens behind the prompt."""
        return self.private.length - len(self.plan.rows)

    def rewind(self) -> None:
        """Forget the tokens behind the prompt."""
        self.private.length = len(self.plan.rows)

    def count(self, stats: RequestStats) -> None:
        """Enter this prompt's counts and times."""
        stats.policy = self.policy
        stats.prompt = len(self.layout)
        stats.linked = sum(len(s.token_ids) for s in self.layout.linked)
        stats.recomputed = self.plan.recomputed
        stats.rows = len(self.plan.rows) + self._probed
        stats.times.load, stats.times.link = self.load_seconds, self.link_seconds
        if stats.reused:
            stats.reuse = "exact" if all(s.exact for s in self.layout.linked) else "composed"


@dataclass(frozen=True)
class StreamWork:
    """What a stream asks of its engine.

    Attributes
    ----------
    link
        Links the prompt.
    step
        Computes one more token (id and row); returns its logits, ``(vocab,)``.
    tokenizer
        For text; may be None.
    end_ids
        The model's own end tokens.
    """

    link: Callable[[], LinkedPrompt]
    step: Callable[[int, SequenceRows], Tensor]
    tokenizer: Any
    end_ids: frozenset[int]


class Stream:
    """A running generation; made by :meth:`~epic_engine.Engine.stream`.

    Iterate over it for :class:`~epic_engine.request.StreamEvent` objects. Work begins with the first one. Leaving
    early and :meth:`close` (also from another thread) cancel it; either way its KV is freed.
    """

    def __init__(
        self,
        work: StreamWork,
        params: SamplingParams,
        policy: str,
        begin: float,
        constraint: TokenConstraint | None = None,
    ) -> None:
        self._cancelled = threading.Event()
        self._done: list[Completion] = []
        self._policy = policy
        self._events = self._run(work, params, policy, begin, constraint, self._cancelled, self._done)

    def __iter__(self) -> Iterator[StreamEvent]:
        return self

    def __next__(self) -> StreamEvent:
        return next(self._events)

    def close(self) -> None:
        """Cancel: no more tokens are computed and the KV is freed."""
        self._cancelled.set()
        try:
            self._events.close()
        except ValueError:
            return  # another thread is inside the generator; it sees the flag before its next token
        if not self._done:  # closed before the first token
            self._done.append(Completion((), "", "cancelled", RequestStats(policy=self._policy)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def completion(self) -> Completion:
        """The whole answer; what there is of it if the stream was cancelled.

        Raises
        ------
        ConfigError
            If the stream has not ended.
        """
        if not self._done:
            raise ConfigError("the stream has not ended: iterate over it, or close it, before reading completion.")
        return self._done[0]

    # Without self: a stream that is dropped must take its generator, and with it the KV, along at once.
    @staticmethod
    def _run(
        work: StreamWork,
        params: SamplingParams,
        policy: str,
        begin: float,
        constraint: TokenConstraint | None,
        cancelled: threading.Event,
        done: list[Completion],
    ) -> Generator[StreamEvent]:
        stats = RequestStats(policy=policy)
        tokens: list[int] = []
        logprobs: list[TokenLogprob] = []
        text = Detokenizer(work.tokenizer, params.stop, params.visible_token_ids)
        reason: Any = "cancelled"
        linked: LinkedPrompt | None = None
        ended = False
        try:
            if cancelled.is_set():
                return
            linked = work.link()
            linked.count(stats)
            sampler = Sampler(params, linked.layout.token_ids, constraint)
            ends = set(params.stop_token_ids) | (set() if params.ignore_eos else work.end_ids)
            logits = linked.logits[-1]
            if constraint is not None and constraint.finished:  # it allows the empty text alone
                reason = "stop"
                return
            while not cancelled.is_set():
                drawn = sampler.draw(logits)
                now = time.perf_counter() - begin
                stats.times.first_token = stats.times.first_token or now
                stats.times.total = now
                if drawn.token_id in ends:
                    reason = "stop"
                    break
                tokens.append(drawn.token_id)
                stats.generated = len(tokens)
                if params.logprobs is not None:
                    logprobs.append(drawn)
                piece = text.push(drawn.token_id)
                complete = text.stopped or (constraint is not None and constraint.finished)
                ended = complete or len(tokens) == params.max_tokens
                if ended:
                    piece += text.finish()
                    reason = "stop" if complete else "length"
                yield StreamEvent(drawn.token_id, piece, drawn if params.logprobs is not None else None)
                if ended:
                    break
                place = len(linked.layout) + len(tokens) - 1
                logits = work.step(drawn.token_id, linked.rows([place]))
            if reason == "stop" and not ended:
                rest = text.finish()
                if rest:
                    yield StreamEvent(drawn.token_id, rest)
        finally:
            if reason == "cancelled":
                text.finish()
            if stats.generated > 1:
                stats.times.per_token = (stats.times.total - stats.times.first_token) / (stats.generated - 1)
            if linked is not None:
                # The generator object may live on in a traceback or a variable; its KV must not.
                linked.private = None  # type: ignore[assignment]
                linked.runs = []
                linked = None
            done.append(Completion(tuple(tokens), text.text, reason, stats, tuple(logprobs)))
