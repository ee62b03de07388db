"""Tiles that proved faster than the default ones on this machine's card.

``python -m epic_engine.gpu.tune`` measures them and writes a file for the card; here it is read, once a process.
Without a file, without a GPU, in Triton's interpreter, and where visible cards differ, tiles are the default ones.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from epic_engine.paths import cache_dir

if TYPE_CHECKING:
    from .configs import SegmentConfig

__all__ = ["CardId", "Key", "TunedTile", "candidates", "card", "identity", "read_tiles", "tiles_path", "tuned"]

logger = logging.getLogger(__name__)

Key = tuple[int, int, int]
"""padded head size, bytes of an element of a query, rows of a tile"""

_FEWEST_KEYS, _MOST_KEYS = 16, 256
_FEWEST_WARPS, _MOST_WARPS = 2, 8
_FEWEST_STAGES = 2


@dataclass(frozen=True)
class CardId:
    """What results belong to.

    Attributes
    ----------
    name
        As the driver calls it.
    capability
        Compute capability, for example ``"9.0"``.
    """

    name: str
    capability: str


@dataclass(frozen=True)
class TunedTile:
    """Result of a measurement.

    Attributes
    ----------
    element
        Bytes of an element of a query.
    default, tile
        The default tile, and the fastest one, which may be the same.
    ratio
        Time in the fastest tile as a share of that in the default one.
    model
        What it was measured with.
    """

    element: int
    default: SegmentConfig
    tile: SegmentConfig
    ratio: float
    model: str

    @property
    def key(self) -> Key:
        """What it is for."""
        return self.default.head_dim, self.element, self.default.block_m


def candidates(default: SegmentConfig) -> list[SegmentConfig]:
    """Tiles that may replace a default one; at most eight.

    Rows stay: the planner cuts a pass into items by them. Stages differ by two, for every second one is spent on the
    numbers of pages.
    """
    keys, warps, stages = default.block_n, default.warps, default.stages
    shapes = [
        (keys, warps, stages + 2),
        (keys, warps, stages - 2),
        (keys, warps // 2, stages),
        (keys, warps * 2, stages),
        (keys // 2, warps, stages),
        (keys * 2, warps, stages),
        (keys * 2, warps, stages - 2),
        (keys * 2, warps * 2, stages - 2),
    ]
    return [
        replace(default, block_n=n, warps=w, stages=s)
        for n, w, s in shapes
        if _FEWEST_KEYS <= n <= _MOST_KEYS and _FEWEST_WARPS <= w <= _MOST_WARPS and s >= _FEWEST_STAGES
    ]


def card() -> CardId | None:
    """The card that kernels run on here; None if there is none, or several that differ."""
    import triton

    if triton.knobs.runtime.interpret or not torch.cuda.is_available():
        return None
    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    kinds = {CardId(p.name, f"{p.major}.{p.minor}") for p in found}
    return kinds.pop() if len(kinds) == 1 else None


def tiles_path(of: CardId, *, every_version: bool = False) -> Path:
    """File for a card with this Triton and these kernels, in the cache folder.

    Parameters
    ----------
    of
        The card.
    every_version
        Give a pattern for files of any Triton and kernels instead.
    """
    import triton

    version = "*" if every_version else f"{_plain(triton.__version__)}-{_kernel()[:16]}"
    return cache_dir() / "kernels" / f"{_plain(of.name)}-{of.capability}-triton-{version}.json"


def _plain(text: str) -> str:
    return re.sub(r"[^0-9a-z.]+", "-", text.lower()).strip("-")


def _kernel() -> str:
    """Digest of the kernel's source: what was measured with another one says nothing."""
    return hashlib.sha256(Path(__file__).with_name("segment.py").read_bytes()).hexdigest()


def identity(of: CardId) -> dict[str, str]:
    """What a file is for, as it says itself."""
    import triton

    return {"card": of.name, "capability": of.capability, "triton": triton.__version__, "kernel": _kernel()}


def read_tiles(path: Path, of: CardId) -> dict[Key, TunedTile]:
    """Results in a card's file; empty if there is no file.

    Raises
    ------
    ValueError
        If the file is damaged, belongs to something else, or holds tiles that are no candidates.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        strange = [name for name, value in identity(of).items() if content[name] != value]
        if strange:
            raise ValueError(f"it is for another {strange[0]}")
        found = [_entry(entry) for entry in content["tiles"]]
    except FileNotFoundError:
        return {}
    except (OSError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"it is damaged ({type(error).__name__}: {error})") from error
    return {result.key: result for result in found}


def _entry(entry: Mapping[str, Any]) -> TunedTile:
    from .configs import default_config  # which imports this module

    size, element, rows = entry["head_dim"], entry["element"], entry["rows"]
    dtypes = {2: torch.bfloat16, 4: torch.float32}
    default = default_config(size, 1, rows, dtypes[element])
    if (default.head_dim, default.block_m) != (size, rows):
        raise ValueError(f"no tile has {rows} rows of {size} numbers")
    if entry["default"] != [default.block_n, default.warps, default.stages]:
        raise ValueError("it was measured against other default tiles")
    for tile in (default, *candidates(default)):
        if entry["tile"] == [tile.block_n, tile.warps, tile.stages]:
            ratio = float(entry["ratio"])
            if not (math.isfinite(ratio) and ratio > 0):
                raise ValueError(f"{ratio} is no ratio of times")
            return TunedTile(element, default, tile, ratio, str(entry["model"]))
    raise ValueError(f"{entry['tile']} is none of the tiles that are tried")


@cache
def _tiles() -> Mapping[Key, TunedTile]:
    found = card()
    if found is None:
        return {}
    path = tiles_path(found)
    try:
        return read_tiles(path, found)
    except ValueError as error:
        logger.warning("%s is ignored: %s; python -m epic_engine.gpu.tune would write it anew", path, error)
        return {}


def tuned(default: SegmentConfig, element: int) -> SegmentConfig:
    """The tile to use on this machine in place of a default one.

    Parameters
    ----------
    default
        Returned if there is nothing better.
    element
        Bytes of an element of a query.
    """
    result = _tiles().get((default.head_dim, element, default.block_m))
    return default if result is None else result.tile
