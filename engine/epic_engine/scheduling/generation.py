"""One running generation: what was drawn, when it ends, and what its reader gets."""

from __future__ import annotations

import threading
import time
from typing import Any

from torch import Tensor

from epic_engine.config import SamplingParams
from epic_engine.constraint import TokenConstraint
from epic_engine.detokenizer import Detokenizer
from epic_engine.linking.linked import LinkedPrompt
from epic_engine.metrics import Metrics
from epic_engine.request import Completion, FinishReason, RequestStats, StreamEvent
from epic_engine.sampler import Sampler, TokenLogprob

from .channel import Channel

__all__ = ["Generation"]


class Generation:
    """A generation behind one linked prompt.

    Parameters
    ----------
    params
        How tokens are drawn and when generation ends.
    tokenizer
        For text; may be None.
    end_ids
        The model's own end tokens.
    policy
        Link policy, as a string; reported even if the prompt is never linked.
    begin
        When the request was made, ``time.perf_counter()``.
    constraint
        Limits which tokens may be drawn.
    metrics
        Where its end is counted.
    keep
        Whether its linked prompt stays open at the end, for another turn.

    Attributes
    ----------
    channel
        What the reader gets.
    linked
        The prompt; None before it is linked, and after the end unless it is kept.
    tokens
        What was drawn so far.
    in_pass
        Whether a pass is computing it: its memory stays.
    """

    def __init__(
        self,
        params: SamplingParams,
        tokenizer: Any,
        end_ids: frozenset[int],
        policy: str,
        begin: float,
        constraint: TokenConstraint | None = None,
        *,
        metrics: Metrics,
        keep: bool = False,
    ) -> None:
        self.channel: Channel[StreamEvent, Completion] = Channel()
        self.linked: LinkedPrompt | None = None
        self.tokens: list[int] = []
        self.keep = keep
        self.in_pass = False
        self._metrics = metrics
        self._params = params
        self._ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else end_ids)
        self._begin = begin
        self._constraint = constraint
        self._stats = RequestStats(policy=policy)
        self._text = Detokenizer(tokenizer, params.stop, params.visible_token_ids)
        self._logprobs: list[TokenLogprob] = []
        self._sampler: Sampler | None = None
        self._lock = threading.Lock()
        self._ended = False
        self._completion: Completion | None = None

    @property
    def ended(self) -> bool:
        """Whether no more tokens are wanted."""
        return self._ended

    @property
    def unwanted(self) -> bool:
        """As :attr:`ended`."""
        return self._ended

    @property
    def stats(self) -> RequestStats:
        """Counts and times so far."""
        return self._stats

    def start(self, linked: LinkedPrompt, queued: float) -> None:
        """Take a prompt that has been computed; again after it lost its memory."""
        self.linked = linked
        if self._sampler is None:
            linked.count(self._stats)
            self._stats.times.queued = queued
            self._sampler = Sampler(self._params, linked.layout.token_ids, self._constraint)
            if self._constraint is not None and self._constraint.finished:  # it allows the empty text alone
                self.end("stop")

    def accept(self, logits: Tensor, best: int | None = None) -> None:
        """Draw the next token and hand it to the reader.

        Parameters
        ----------
        logits
            ``(vocab,)``, what follows the tokens so far.
        best
            The most likely token, if that is known.
        """
        with self._lock:
            if self._ended:
                return
            assert self._sampler is not None
            drawn = self._sampler.draw(logits, best)
            times = self._stats.times
            times.total = time.perf_counter() - self._begin
            times.first_token = times.first_token or times.total
            if drawn.token_id in self._ends:
                rest = self._text.finish()
                if rest:
                    self.channel.put(StreamEvent(drawn.token_id, rest))
                self._end("stop")
                return
            self.tokens.append(drawn.token_id)
            self._stats.generated = len(self.tokens)
            if self._params.logprobs is not None:
                self._logprobs.append(drawn)
            piece = self._text.push(drawn.token_id)
            complete = self._text.stopped or (self._constraint is not None and self._constraint.finished)
            ended = complete or len(self.tokens) == self._params.max_tokens
            if ended:
                piece += self._text.finish()
            self.channel.put(StreamEvent(drawn.token_id, piece, drawn if self._params.logprobs is not None else None))
            if ended:
                self._end("stop" if complete else "length")

    def end(self, reason: FinishReason) -> None:
        """End early, with what there is."""
        with self._lock:
            self._end(reason)

    def fail(self, error: BaseException) -> None:
        """End with an error for the reader; what there is of the answer is its completion."""
        with self._lock:
            if not self._ended:
                self._ended = True
                self._metrics.request_failed("failed", self._stats.times.queued)
                self.channel.fail(error, self._complete("cancelled"))

    def _end(self, reason: FinishReason) -> None:
        if not self._ended:
            self._ended = True
            self._completion = self._complete(reason)
            self._metrics.request_finished(self._stats, reason, self._stats.times.queued)

    def _complete(self, reason: FinishReason) -> Completion:
        if reason in ("cancelled", "timeout"):
            self._text.finish()
        times = self._stats.times
        if self._stats.generated > 1:
            times.per_token = (times.total - times.first_token) / (self._stats.generated - 1)
        if self.linked is not None:
            self.linked.pending_ids = self.tokens[len(self.linked.appended_ids) :]
        return Completion(tuple(self.tokens), self._text.text, reason, self._stats, tuple(self._logprobs))

    def release(self) -> None:
        """Give the memory back, then let the reader see the end: whoever has seen it finds the memory free."""
        kept = self.keep and self._completion is not None
        if self.linked is not None and not kept:
            self.linked.close()
            self.linked = None
        if self._completion is not None:
            self.channel.end(self._completion)
