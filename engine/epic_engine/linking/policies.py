"""Link policies: which tokens of a linked prompt are computed anew.

A policy is an object with two decisions. :meth:`LinkPolicy.arrange` may replace the prompt's shared KV (the
``prefix`` policy ignores compiled chunks and looks into the prefix cache instead); :meth:`LinkPolicy.choose` names
the slots of each linked segment that are recomputed, :meth:`LinkPolicy.select` does so for policies that need no
look at the prompt's KV. To add one, subclass and list it in ``registered``. Policies are combined with ``+``.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from torch import Tensor

from epic_engine.errors import ConfigError

from .layout import Body, Damp, Layout

__all__ = [
    "PAGE",
    "Choice",
    "Damped",
    "Full",
    "LegoLink",
    "LinkPolicy",
    "LinkProbe",
    "Naive",
    "Prefix",
    "PrefixLookup",
    "Union",
    "parse_policies",
    "parse_policy",
    "policy_names",
]


# Tokens of a page, as the block-level form of LegoLink counts them.
PAGE = 16


PrefixLookup = Callable[[Sequence[int]], list[tuple[tuple[int, ...], Body]]]
"""Consecutive pieces of the longest prefix of some tokens whose exact KV an earlier prompt has left."""


class LinkProbe(Protocol):
    """First passes over a prompt, for policies that look before they choose. Their rows count as computed."""

    def question_attention(self, layout: Layout, layers: tuple[float, float]) -> dict[int, Tensor]:
        """The most that any head pays to each slot of the linked KV, from any row of the question.

        Parameters
        ----------
        layout
            The prompt.
        layers
            Range of layers, as shares of the depth.

        Returns
        -------
        dict
            Per index of a linked segment that is not exact: ``(slots,)`` float32, the largest attention over heads
            and rows, summed over layers.
        """
        ...

    def second_layer_deviation(self, layout: Layout) -> dict[int, Tensor]:
        """Squared difference between stored and true KV of each slot in the second layer; keys and shapes as above."""
        ...


@dataclass(frozen=True)
class Choice:
    """What a policy decided.

    Attributes
    ----------
    recompute
        Per index of a linked segment in ``layout.segments``: slots to compute anew.
    damp
        Lowered scores of chunks that are not exact where they stand, for every reader and decode step.
    """

    recompute: Mapping[int, Sequence[int]]
    damp: Damp | None = None


class LinkPolicy(ABC):
    """How a prompt is linked."""

    name: ClassVar[str]
    usage: ClassVar[str]
    caches_prompt: ClassVar[bool] = False

    def arrange(self, layout: Layout, prefixes: PrefixLookup) -> Layout:
        """Choose the shared KV to start from; by default that of the prompt's compiled chunks."""
        return layout

    def choose(self, layout: Layout, probe: LinkProbe) -> Choice:
        """Decide for one prompt; by default what :meth:`select` says."""
        return Choice(self.select(layout))

    @abstractmethod
    def select(self, layout: Layout) -> Mapping[int, Sequence[int]]:
        """Slots to recompute, per index of a linked segment in ``layout.segments``."""

    @classmethod
    def parse(cls, argument: str) -> LinkPolicy:
        """A policy from what stands behind the colon of its string form; empty if there is none."""
        if argument:
            raise ConfigError(f"policy {cls.name!r} takes no argument, got {argument!r}.")
        return cls()

    def __str__(self) -> str:
        return self.name


class Full(LinkPolicy):
    """Recompute everything: what the model gives without any reuse. The oracle for all others."""

    name = "full"
    usage = "full"

    def select(self, layout: Layout) -> Mapping[int, Sequence[int]]:
        """Every slot."""
        return {i: range(len(s.token_ids)) for i, s in enumerate(layout.segments) if s.body is not None}


class Naive(LinkPolicy):
    """Recompute nothing: the lower bound on cost."""

    name = "naive"
    usage = "naive"

    def select(self, layout: Layout) -> Mapping[int, Sequence[int]]:
        """No slot."""
        return {}


class Prefix(LinkPolicy):
    """Reuse the longest prefix shared with an earlier prompt, as vLLM's and SGLang's prefix caches do."""

    name = "prefix"
    usage = "prefix"
    caches_prompt = True

    def arrange(self, layout: Layout, prefixes: PrefixLookup) -> Layout:
        """Cached prefix, then plain tokens; compiled chunks are not used."""
        parts: list[tuple[Sequence[int], Body | None]] = list(prefixes(layout.token_ids))
        done = sum(len(ids) for ids, _ in parts)
        parts.append((layout.token_ids[done:], None))
        return Layout(parts)

    def select(self, layout: Layout) -> Mapping[int, Sequence[int]]:
        """No slot: cached prefixes are exact."""
        return {}


class LegoLink(LinkPolicy):
    """Recompute the first k tokens of every chunk whose KV is not exact where it stands (EPIC, section 4.2).

    String forms: ``legolink:16`` (tokens), ``legolink:1p`` (whole first pages, MEPIC's block-level form) and
    ``legolink:all``.

    Parameters
    ----------
    tokens
        k; EPIC uses up to 32. 0 recomputes nothing, None everything.
    pages
        k in pages of :data:`PAGE` tokens instead.
    """

    name = "legolink"
    usage = "legolink:k"

    def __init__(self, tokens: int | None = None, *, pages: int | None = None) -> None:
        given = pages if pages is not None else tokens
        if given is not None and given < 0:
            raise ConfigError(f"legolink:{given} needs a number of tokens of 0 or more, as in 'legolink:16'.")
        self.pages = pages
        self.tokens = pages * PAGE if pages is not None else tokens

    def select(self, layout: Layout) -> Mapping[int, Sequence[int]]:
        """The first k slots of chunks that are not exact."""
        return {
            i: range(len(s.token_ids) if self.tokens is None else min(self.tokens, len(s.token_ids)))
            for i, s in enumerate(layout.segments)
            if s.body is not None and not s.exact
        }

    @classmethod
    def parse(cls, argument: str) -> LinkPolicy:
        """From ``"k"``, ``"np"`` or ``"all"``."""
        if argument == "all":
            return cls()
        try:
            if argument.endswith("p"):
                return cls(pages=int(argument[:-1]))
            return cls(int(argument))
        except ValueError as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"policy 'legolink:{argument}' needs a number of tokens, as in 'legolink:16'.") from None

    def __str__(self) -> str:
        if self.pages is not None:
            return f"{self.name}:{self.pages}p"
        return f"{self.name}:{'all' if self.tokens is None else self.tokens}"


class Damped(LinkPolicy):
    """Recompute nothing; lower the logits of each chunk's first s tokens by t, never the prompt's first token.

    A chunk's first tokens are attention sinks of their own and draw attention that belongs to the whole prompt's.

    Parameters
    ----------
    amount
        t, above 0.
    tokens
        s.
    """

    name = "damp"
    usage = "damp:t,s"

    def __init__(self, amount: float, tokens: int = 4) -> None:
        if not (amount > 0 and math.isfinite(amount) and tokens >= 1):
            raise ConfigError(f"damp:{amount},{tokens} needs an amount above 0 and at least 1 token, as in 'damp:1,4'.")
        self.damp = Damp(float(amount), tokens)

    def select(self, layout: Layout) -> Mapping[int, Sequence[int]]:
        """No slot."""
        return {}

    def choose(self, layout: Layout, probe: LinkProbe) -> Choice:
        """No slot, and the damping."""
        return Choice({}, self.damp)

    @classmethod
    def parse(cls, argument: str) -> LinkPolicy:
        """From ``"t"`` or ``"t,s"``."""
        amount, _, tokens = argument.partition(",")
        try:
            return cls(float(amount), int(tokens or 4))
        except ValueError as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"policy 'damp:{argument}' needs numbers, as in 'damp:1,4'.") from None

    def __str__(self) -> str:
        return f"{self.name}:{self.damp.amount:g},{self.damp.tokens}"


class Union(LinkPolicy):
    """Several policies at once: their slots unite, and one may damp.

    Parameters
    ----------
    parts
        At least two, none of them ``full`` or ``prefix``, which leave nothing to unite with.
    """

    name = "union"
    usage = "A+B"

    def __init__(self, parts: Sequence[LinkPolicy]) -> None:
        alone = [str(p) for p in parts if isinstance(p, Full | Prefix)]
        if alone:
            raise ConfigError(f"policy {alone[0]!r} cannot be combined with others: use it alone.")
        if sum(isinstance(p, Damped) for p in parts) > 1:
            raise ConfigError("only one of the combined policies may be damp.")
        self.parts = tuple(parts)

    def select(self, layout: Layout) -> Mapping[int, Sequence[int]]:
        """Slots of all parts."""
        return _united([part.select(layout) for part in self.parts])

    def choose(self, layout: Layout, probe: LinkProbe) -> Choice:
        """Slots of all parts, and the damping of one."""
        choices = [part.choose(layout, probe) for part in self.parts]
        damp = next((c.damp for c in choices if c.damp), None)
        return Choice(_united([c.recompute for c in choices]), damp)

    def __str__(self) -> str:
        return "+".join(str(part) for part in self.parts)


def _united(choices: Sequence[Mapping[int, Sequence[int]]]) -> dict[int, list[int]]:
    indices = {index for choice in choices for index in choice}
    return {index: sorted({slot for choice in choices for slot in choice.get(index, ())}) for index in indices}


def registered() -> tuple[type[LinkPolicy], ...]:
    """All policies with a string form."""
    from .selective import CacheBlend, QueryAware  # they are built on this module

    return (Full, Prefix, Naive, LegoLink, CacheBlend, QueryAware, Damped)


def policy_names() -> list[str]:
    """String forms of all policies, for messages and help texts."""
    return [policy.usage for policy in registered()]


def parse_policies(text: str) -> list[LinkPolicy]:
    """Policies from a comma-separated list; a comma before a number belongs to a policy, as in ``"naive,damp:1,4"``."""
    return [parse_policy(part) for part in re.split(r",(?=\s*[A-Za-z])", text) if part.strip()]


def parse_policy(text: str | LinkPolicy) -> LinkPolicy:
    """A policy from its string form, such as ``"legolink:16"`` or ``"legolink:4+query_aware:0.1"``.

    A policy is passed through.

    Raises
    ------
    ConfigError
        If the name is unknown or the argument does not fit.
    """
    if isinstance(text, LinkPolicy):
        return text
    if "+" in text:
        return Union([parse_policy(part) for part in text.split("+")])
    name, _, argument = text.strip().partition(":")
    for policy in registered():
        if policy.name == name:
            return policy.parse(argument)
    raise ConfigError(
        f"unknown link policy {text!r}: use one of {', '.join(policy_names())}, or several joined with '+'."
    )
