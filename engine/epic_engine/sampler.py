"""From logits to the next token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .config import SamplingParams
from .constraint import TokenConstraint
from .errors import ConfigError

__all__ = ["Sampler", "TokenLogprob"]

_LIMITS = torch.finfo(torch.float32)


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of a generated token under the model (before temperature, filters and constraint).

    So the most likely tokens may be some that a constraint forbids.

    Attributes
    ----------
    token_id
        The token drawn.
    logprob
        Natural logarithm of its probability.
    top
        The most likely tokens with their log-probabilities, best first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Sampler:
    """Draws one request's tokens.

    Parameters
    ----------
    params
        Settings.
    prompt_ids
        Tokens of the prompt, which the repetition penalty counts, too.
    constraint
        Limits what may be drawn; takes note of every token drawn.
    """

    def __init__(
        self, params: SamplingParams, prompt_ids: Sequence[int], constraint: TokenConstraint | None = None
    ) -> None:
        self._params = params
        self._constraint = constraint
        self._greedy = (
            params.temperature == 0
            and params.repetition_penalty == 1.0
            and params.logprobs is None
            and not params.logit_bias
            and constraint is None
        )
        self._seen = torch.tensor(sorted(set(prompt_ids)), dtype=torch.int64)
        self._generator = torch.Generator()
        if params.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(params.seed)

    def draw(self, logits: Tensor, best: int | None = None) -> TokenLogprob:
        """Pick the next token.

        Parameters
        ----------
        logits
            ``(vocab,)``.
        best
            The most likely token, if that is known: where it is all that is wanted, the logits stay where they are.

        Raises
        ------
        ConfigError
            If constraint and biases together leave no token.
        """
        params = self._params
        if best is not None and self._greedy:
            return TokenLogprob(best, float("nan"))
        raw = logits.detach().float().cpu()
        scores = raw.clone()
        if params.repetition_penalty != 1.0 and self._seen.numel():
            seen = scores[self._seen]
            seen = torch.where(seen > 0, seen / params.repetition_penalty, seen * params.repetition_penalty)
            scores[self._seen] = seen.clamp(-_LIMITS.max, _LIMITS.max)  # finite whatever the penalty
        for token, bias in params.logit_bias.items():
            scores[token] += bias
        if self._constraint is not None:
            # Before temperature and filters, so that these choose among what is allowed and always find something.
            scores = _constrained(scores, self._constraint)
        token = int(scores.argmax()) if params.temperature == 0 else self._sample(scores)
        if params.repetition_penalty != 1.0:
            self._seen = torch.unique(torch.cat([self._seen, torch.tensor([token])]))
        if self._constraint is not None:
            self._constraint.advance(token)
        if params.logprobs is None:
            return TokenLogprob(token, float("nan"))
        logprobs = torch.log_softmax(raw, dim=-1)
        likely = torch.topk(logprobs, min(params.logprobs, logprobs.numel()))
        top = tuple(zip(likely.indices.tolist(), likely.values.tolist(), strict=True))
        return TokenLogprob(token, float(logprobs[token]), top)

    def _sample(self, scores: Tensor) -> int:
        """Temperature, then top-k, top-p and min-p, each on the distribution the former leaves."""
        params = self._params
        # The maximum stays finite however small the divisor, as long as it is no 0 in float32.
        scores = (scores - scores.max()) / max(params.temperature, _LIMITS.tiny)
        ordered, ids = torch.sort(scores, descending=True)
        if params.top_k:
            ordered, ids = ordered[: params.top_k], ids[: params.top_k]
        probabilities = torch.softmax(ordered, dim=-1)
        if params.top_p < 1:
            before = torch.cumsum(probabilities, dim=-1) - probabilities
            keep = before < params.top_p  # the first token that reaches top_p is kept
            keep[0] = True  # also where top_p is 0 in float32
            probabilities = torch.where(keep, probabilities, 0)
        if params.min_p > 0:
            probabilities = torch.where(probabilities >= params.min_p * probabilities[0], probabilities, 0)
        choice = torch.multinomial(probabilities, 1, generator=self._generator)
        return int(ids[choice])


def _constrained(scores: Tensor, constraint: TokenConstraint) -> Tensor:
    masked = constraint.mask(scores)
    if masked.shape != scores.shape:
        raise ConfigError(
            f"the constraint made {tuple(masked.shape)} of {tuple(scores.shape)} logits: mask() must keep the shape."
        )
    if bool((masked == float("-inf")).all()):
        raise ConfigError(
            "the constraint allows no token here: it is at a dead end, or logit_bias bans all that it allows."
        )
    return masked
