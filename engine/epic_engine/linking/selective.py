"""Policies that look before they choose: which tokens matter for this prompt.

Both run a cheap first pass (:class:`LinkProbe`) and recompute the slots that it points at.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from epic_engine.errors import ConfigError

from .layout import Layout
from .policies import Choice, LinkPolicy, LinkProbe

__all__ = ["CacheBlend", "QueryAware", "top_slots", "top_windows"]


def _ratio(name: str, argument: str) -> float:
    try:
        ratio = float(argument)
    except ValueError:
        ratio = -1.0
    if not 0 < ratio <= 1:
        raise ConfigError(f"policy '{name}:{argument}' needs a share of the tokens in (0, 1], as in '{name}:0.1'.")
    return ratio


def top_slots(scores: Mapping[int, Tensor], budget: int) -> dict[int, list[int]]:
    """The ``budget`` highest-scoring slots over all segments; ties go to the earlier slot."""
    owners = [(index, slot) for index in sorted(scores) for slot in range(scores[index].numel())]
    if not owners:
        return {}
    flat = torch.cat([scores[index].float() for index in sorted(scores)])
    chosen: dict[int, list[int]] = {}
    for place in torch.sort(flat, descending=True, stable=True).indices[:budget].tolist():
        index, slot = owners[place]
        chosen.setdefault(index, []).append(slot)
    return {index: sorted(slots) for index, slots in chosen.items()}


def top_windows(scores: Mapping[int, Tensor], budget: int, window: int, floor: float) -> dict[int, list[int]]:
    """The highest-scoring windows of consecutive slots, with a share guaranteed to every segment.

    Parameters
    ----------
    scores
        Per segment, a non-negative score of each slot.
    budget
        Slots to choose in all.
    window
        Slots a window; windows are aligned, so that few runs of shared KV are cut.
    floor
        Share of a segment's fair part of the budget that it gets whatever its score, 0 to 1.

    Returns
    -------
    dict
        Sorted slots per segment. The last window is cut so that exactly ``budget`` slots are chosen (or all there
        are).
    """
    total = sum(s.numel() for s in scores.values())
    ranked: dict[int, list[tuple[float, int]]] = {}
    for index, values in scores.items():
        sums = [(float(values[at : at + window].sum()), at) for at in range(0, values.numel(), window)]
        ranked[index] = sorted(sums, key=lambda pair: (-pair[0], pair[1]))
    order: list[tuple[int, int]] = []
    rest: list[tuple[float, int, int]] = []
    for index, windows in sorted(ranked.items()):
        fair = budget * scores[index].numel() / max(total, 1)
        sure = min(len(windows), int(floor * fair / window))
        order += [(index, at) for _, at in windows[:sure]]
        rest += [(-score, index, at) for score, at in windows[sure:]]
    order += [(index, at) for _, index, at in sorted(rest)]
    chosen: dict[int, list[int]] = {}
    left = budget
    for index, at in order:
        if left <= 0:
            break
        slots = range(at, min(at + window, scores[index].numel(), at + left))
        chosen.setdefault(index, []).extend(slots)
        left -= len(slots)
    return {index: sorted(slots) for index, slots in chosen.items()}


class _Selective(LinkPolicy):
    """Shared form ``name:share``."""

    def __init__(self, share: float) -> None:
        self.share = _ratio(self.name, str(share))

    def select(self, layout: Layout) -> Mapping[int, Sequence[int]]:
        """Needs a probe: use :meth:`choose`."""
        raise ConfigError(f"policy {self} chooses by a first pass: call choose() with a probe.")

    def budget(self, scores: Mapping[int, Tensor]) -> int:
        """Slots to recompute."""
        return round(self.share * sum(s.numel() for s in scores.values()))

    @classmethod
    def parse(cls, argument: str) -> LinkPolicy:
        """From ``"r"``."""
        return cls(_ratio(cls.name, argument))

    def __str__(self) -> str:
        return f"{self.name}:{self.share:g}"


class QueryAware(_Selective):
    """Recompute the share r of tokens to which the question attends most, in short windows.

    The question is run over the KV that is linked; its attention to each slot, summed over heads, rows and a range of
    layers, is the score. Its rows count as computed.

    Parameters
    ----------
    share
        r, of the tokens whose KV is not exact where it stands.
    layers
        Range of layers that score, as shares of the depth.
    window
        Slots chosen together.
    floor
        Part of its fair share that every chunk gets, so that none is starved.
    """

    name: ClassVar[str] = "query_aware"
    usage: ClassVar[str] = "query_aware:r"

    def __init__(
        self, share: float, layers: tuple[float, float] = (1 / 3, 1.0), window: int = 8, floor: float = 0.25
    ) -> None:
        super().__init__(share)
        self.layers = layers
        self.window = window
        self.floor = floor

    def choose(self, layout: Layout, probe: LinkProbe) -> Choice:
        """The windows that the question reads most."""
        scores = probe.question_attention(layout, self.layers)
        return Choice(top_windows(scores, self.budget(scores), self.window, self.floor))


class CacheBlend(_Selective):
    """Recompute the share r of tokens whose KV deviates most in the second layer (CacheBlend, EuroSys 2025, section 4).

    The first layer's KV depends on the token alone; the first that can deviate is the second's, so all tokens are run
    through one layer.
    """

    name: ClassVar[str] = "cacheblend"
    usage: ClassVar[str] = "cacheblend:r"

    def choose(self, layout: Layout, probe: LinkProbe) -> Choice:
        """The slots that deviate most."""
        scores = probe.second_layer_deviation(layout)
        return Choice(top_slots(scores, self.budget(scores)))
