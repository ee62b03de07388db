"""What comes back from a request, and what it cost."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from .sampler import TokenLogprob

__all__ = ["Completion", "RequestStats", "ReuseKind", "StageTimes", "StreamEvent"]

ReuseKind = Literal["exact", "composed", "none"]
FinishReason = Literal["stop", "length", "cancelled", "timeout"]


@dataclass
class StageTimes:
    """Wall-clock seconds of a request's stages.

    Attributes
    ----------
    queued
        Waiting for memory and for the requests before it.
    tokenise
        Text to token ids (0 at the engine, which takes ids).
    load
        Finding and mapping compiled chunks.
    link
        Computing the rows that the policy chose, up to the logits of the first token.
    first_token
        From the call to the first token (TTFT).
    per_token
        Mean of the tokens after the first.
    total
        From the call to the last token.
    """

    queued: float = 0.0
    tokenise: float = 0.0
    load: float = 0.0
    link: float = 0.0
    first_token: float = 0.0
    per_token: float = 0.0
    total: float = 0.0


@dataclass
class RequestStats:
    """Token counts and times of a request.

    Attributes
    ----------
    prompt
        Tokens of the prompt.
    continued
        Of these, tokens of the prompt that this one continues, whose KV is shared with it.
    linked
        Of the others, tokens covered by compiled chunks (``prefix``: by an earlier prompt).
    recomputed
        Of the linked, tokens computed anew.
    reused_spans
        Which tokens of the prompt were taken as they are: ``(start, stop)``, in order, :attr:`reused` in all.
    rows
        Rows run through the model to link, plain tokens and first passes of selective policies included.
    generated
        Tokens of the answer.
    reuse
        ``exact`` if everything reused is what full computation gives, ``composed`` if not, ``none`` without reuse.
    policy
        Link policy, as a string.
    times
        Stage times.
    """

    prompt: int = 0
    continued: int = 0
    linked: int = 0
    recomputed: int = 0
    reused_spans: tuple[tuple[int, int], ...] = ()
    rows: int = 0
    generated: int = 0
    reuse: ReuseKind = "none"
    policy: str = ""
    times: StageTimes = field(default_factory=StageTimes)

    @property
    def reused(self) -> int:
        """Tokens whose KV was taken as it is: ``linked - recomputed``."""
        return self.linked - self.recomputed

    def as_dict(self) -> dict[str, Any]:
        """For JSON; includes ``reused``."""
        return {**asdict(self), "reused": self.reused}


@dataclass(frozen=True)
class Completion:
    """A finished answer.

    Attributes
    ----------
    token_ids
        Generated tokens, without the one that ended generation.
    text
        Their text, cut at the first stop string; empty without a tokenizer.
    finish_reason
        ``stop``, ``length``, ``cancelled`` or ``timeout``.
    stats
        Counts and times.
    logprobs
        One entry a token, if asked for.
    """

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    stats: RequestStats
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class StreamEvent:
    """One generated token and the text that became certain with it."""

    token_id: int
    text: str
    logprob: TokenLogprob | None = None
