"""Link policies: which tokens of a linked prompt are computed anew.

A policy is an object with two decisions. :meth:`LinkPolicy.arrange` may replace the prompt's shared KV (the
``prefix`` policy ignores compiled chunks and looks into the prefix cache instead); :meth:`LinkPolicy.select` names
the slots of each linked segment that are recomputed. To add one, subclass and list it in ``_POLICIES``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, Protocol

from epic_engine.errors import ConfigError

from .layout import Body, Layout

__all__ = [
    "Full",
    "LegoLink",
    "LinkPolicy",
    "Naive",
    "Prefix",
    "PrefixLookup",
    "parse_policy",
    "policy_names",
]


class PrefixLookup(Protocol):
    """Where exact KV of earlier prompts is found."""

    def longest(self, token_ids: Sequence[int]) -> list[tuple[tuple[int, ...], Body]]:
        """Consecutive pieces of the longest cached prefix of ``token_ids``."""
        ...


class LinkPolicy(ABC):
    """How a prompt is linked."""

    name: ClassVar[str]
    usage: ClassVar[str]
    caches_prompt: ClassVar[bool] = False

    def arrange(self, layout: Layout, prefixes: PrefixLookup) -> Layout:
        """Choose the shared KV to start from; by default that of the prompt's compiled chunks."""
        return layout

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
        parts: list[tuple[Sequence[int], Body | None]] = list(prefixes.longest(layout.token_ids))
        done = sum(len(ids) for ids, _ in parts)
        parts.append((layout.token_ids[done:], None))
        return Layout(parts)

    def select(self, layout: Layout) -> Mapping[int, Sequence[int]]:
        """No slot: cached prefixes are exact."""
        return {}


class LegoLink(LinkPolicy):
    """Recompute the first k tokens of every chunk whose KV is not exact where it stands (EPIC, section 4.2).

    Parameters
    ----------
    tokens
        k; EPIC uses up to 32. 0 recomputes nothing.
    """

    name = "legolink"
    usage = "legolink:k"

    def __init__(self, tokens: int) -> None:
        if tokens < 0:
            raise ConfigError(f"legolink:{tokens} needs a number of tokens of 0 or more, as in 'legolink:16'.")
        self.tokens = tokens

    def select(self, layout: Layout) -> Mapping[int, Sequence[int]]:
        """The first k slots of chunks that are not exact."""
        return {
            i: range(min(self.tokens, len(s.token_ids)))
            for i, s in enumerate(layout.segments)
            if s.body is not None and not s.exact
        }

    @classmethod
    def parse(cls, argument: str) -> LinkPolicy:
        """From ``"k"``."""
        try:
            return cls(int(argument))
        except ValueError as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"policy 'legolink:{argument}' needs a number of tokens, as in 'legolink:16'.") from None

    def __str__(self) -> str:
        return f"{self.name}:{self.tokens}"


_POLICIES: tuple[type[LinkPolicy], ...] = (Full, Prefix, Naive, LegoLink)


def policy_names() -> list[str]:
    """String forms of all policies, for messages and help texts."""
    return [policy.usage for policy in _POLICIES]


def parse_policy(text: str | LinkPolicy) -> LinkPolicy:
    """A policy from its string form, such as ``"legolink:16"``; a policy is passed through.

    Raises
    ------
    ConfigError
        If the name is unknown or the argument does not fit.
    """
    if isinstance(text, LinkPolicy):
        return text
    name, _, argument = text.strip().partition(":")
    for policy in _POLICIES:
        if policy.name == name:
            return policy.parse(argument)
    raise ConfigError(f"unknown link policy {text!r}: use one of {', '.join(policy_names())}.")
