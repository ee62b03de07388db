"""Policies that look before they choose: which tokens matter for this prompt.

Both run a cheap first pass (:class:`LinkProbe`) and recompute the slots that it points at.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import ClassVar

import torch
from torch import Tensor

from epic_engine.errors import ConfigError

from .layout import Layout
from .policies import Choice, LinkPolicy, LinkProbe

__all__ = ["CacheBlend", "QueryAware", "top_slots", "top_windows"]

# 0 leaves every segment what it draws, 1 gives all segments of a length the same.
_EVENNESS = 0.75


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
    indices = sorted(scores)
    if not indices:
        return {}
    flat = torch.cat([scores[index].float() for index in indices])
    chosen: dict[int, list[int]] = {}
    for owner, slot in _located(_best_first(flat)[:budget], [scores[index].numel() for index in indices]):
        chosen.setdefault(indices[owner], []).append(slot)
    return {index: sorted(slots) for index, slots in chosen.items()}


def top_windows(scores: Mapping[int, Tensor], budget: int, window: int, floor: float) -> dict[int, list[int]]:
    """The highest-scoring windows of consecutive slots, with a share guaranteed to every segment.

    A segment's scores are divided by a power of their sum: a segment that draws more of the attention gets more
    windows, but by far not in proportion, for the last segments draw most of it whatever they say.

    Parameters
    ----------
    scores
        Per segment, a non-negative score of each slot.
    budget
        Slots to choose in all.
    window
        Slots a window; it may begin anywhere. One that would add less than half its slots is passed over.
    floor
        Share of a segment's fair part of the budget that goes to its best windows whatever its score, 0 to 1.

    Returns
    -------
    dict
        Sorted slots per segment. The last window is cut so that exactly ``budget`` slots are chosen (or all there
        are); what no window wants goes to the best single slots.
    """
    total = sum(s.numel() for s in scores.values())
    weighed = {i: s.double() / s.double().sum().clamp_min(1e-30) ** _EVENNESS for i, s in scores.items() if s.numel()}
    taken = {index: bytearray(s.numel()) for index, s in weighed.items()}
    left = budget

    def take(index: int, start: int, stop: int, at_least: int) -> int:
        nonlocal left
        flags = taken[index]
        count = stop - start - flags.count(1, start, stop)
        if count < at_least:
            return 0
        free = [slot for slot in range(start, stop) if not flags[slot]][:left]
        for slot in free:
            flags[slot] = 1
        left -= len(free)
        return len(free)

    ranked: list[tuple[Tensor, int]] = []
    for index, values in sorted(weighed.items()):
        width = min(window, values.numel())
        sums = values.unfold(0, width, 1).sum(dim=-1)
        ranked.append((sums, index))
        sure = int(floor * budget * values.numel() / total)
        for start in _best_first(sums):
            if sure < width:
                break
            sure -= take(index, start, start + width, -(-width // 2))
    order = _best_first(torch.cat([sums for sums, _ in ranked]) if ranked else torch.empty(0))
    for owner, start in _located(order, [sums.numel() for sums, _ in ranked]):
        if left <= 0:
            break
        index = ranked[owner][1]
        width = min(window, weighed[index].numel())
        take(index, start, start + width, -(-width // 2))
    if left > 0:
        rest = {
            i: s.masked_fill(torch.frombuffer(taken[i], dtype=torch.uint8).bool(), -1.0) for i, s in weighed.items()
        }
        free = sum(flags.count(0) for flags in taken.values())
        for index, slots in top_slots(rest, min(left, free)).items():
            for slot in slots:
                taken[index][slot] = 1
    chosen = {index: [slot for slot, flag in enumerate(flags) if flag] for index, flags in taken.items()}
    return {index: slots for index, slots in chosen.items() if slots}


def _best_first(values: Tensor) -> list[int]:
    """Places from the highest value down; equal ones in order."""
    order: list[int] = torch.sort(values, descending=True, stable=True).indices.tolist()
    return order


def _located(places: Sequence[int], sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Places in a row of tensors: which tensor, and where in it."""
    begins = list(accumulate(sizes, initial=0))
    for place in places:
        owner = bisect_right(begins, place) - 1
        yield owner, place - begins[owner]


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

    The question is run over the KV that is linked, up to the last layer that scores. A slot's score is the most that
    any head of any row pays to it, summed over a range of layers: heads that look facts up are few, and in a sum over
    heads they drown in what all the others pay to the first tokens. The pass's rows count as computed.

    Parameters
    ----------
    share
        r, of the tokens whose KV is not exact where it stands.
    layers
        Range of layers that score, as shares of the depth.
    window
        Slots chosen together.
    floor
        Part of its fair share that every chunk gets in whole windows, so that none is starved.
    """

    name: ClassVar[str] = "query_aware"
    usage: ClassVar[str] = "query_aware:r"

    def __init__(
        self, share: float, layers: tuple[float, float] = (1 / 3, 2 / 3), window: int = 12, floor: float = 1.0
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
