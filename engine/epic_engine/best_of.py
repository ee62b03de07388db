"""Several answers to one prompt, the likeliest first."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Unpack

from .config import SamplingParams
from .engine import Engine, Prompt
from .linking.policies import LinkPolicy
from .request import Completion
from .request_options import RequestOptions

__all__ = ["best_of"]


def best_of(
    engine: Engine,
    prompt: Prompt,
    sampling: SamplingParams,
    n: int,
    *,
    policy: str | LinkPolicy | None = None,
    **options: Unpack[RequestOptions],
) -> list[Completion]:
    """Draw ``n`` answers, which share the prompt's link and memory, and order them by likelihood.

    Parameters
    ----------
    engine
        Computes them.
    prompt, policy, options
        As in :meth:`Engine.generate <epic_engine.Engine.generate>`.
    sampling
        How to draw; with ``temperature=0`` all answers are the same.
    n
        How many.

    Returns
    -------
    list of Completion
        Highest mean log-probability a token first; an empty answer last.
    """
    wanted = sampling if sampling.logprobs is not None else replace(sampling, logprobs=0)
    streams = engine.streams(prompt, wanted, n, policy=policy, **options)
    try:
        for stream in streams:
            for _ in stream:
                pass
    finally:
        for stream in streams:
            stream.close()
    return sorted((stream.completion for stream in streams), key=_likelihood, reverse=True)


def _likelihood(done: Completion) -> float:
    return sum(token.logprob for token in done.logprobs) / len(done.logprobs) if done.logprobs else -math.inf
