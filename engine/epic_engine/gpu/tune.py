"""Measures which tiles of segment attention are fastest on this machine's card, and keeps them for the engine.

``python -m epic_engine.gpu.tune``: optional, some minutes. A few tiles around each default one compute a decoding and a
link problem; the fastest is kept if it saves 5 % and gives the same numbers. Engines that start later use it. Exit
status: 0, 1 if something could not be measured, 2 if it cannot run here, 130 if it was interrupted.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import statistics
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from epic_engine.attention.kernels import tuned
from epic_engine.attention.kernels.tuned import CardId, Key, TunedTile, candidates
from epic_engine.attention.select import interpreted
from epic_engine.errors import EpicError

if TYPE_CHECKING:
    from epic_engine.attention.kernels.configs import SegmentConfig

__all__ = ["Problem", "choose", "forget", "main", "save", "tune"]

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_MODEL, _TINY_MODEL = "32,8,128", "16,1,16"
_INTERPRETER = CardId("Triton's interpreter", "0.0")
_MARGIN = 0.95  # share of the default tile's time that a tile may take to be kept
_WORSE = 1.02  # and at most on a single problem
_ROUNDING = 1e-5  # of float32, as a share of the largest number
_INTERRUPTED = 130

Say = Callable[[str], None]


class Problem(Protocol):
    """Work that tiles are measured on; see :class:`~.tune_problems.TileProblem`."""

    name: str

    def numbers(self, config: SegmentConfig) -> Sequence[Tensor]:
        """Results in a tile."""

    def seconds(self, config: SegmentConfig) -> float:
        """Time in a tile, once."""


# -- measuring -------------------------------------------------------------------------------------------------------


def choose(default: SegmentConfig, problems: Sequence[Problem], rounds: int, say: Say) -> tuple[SegmentConfig, float]:
    """The fastest tile, and its time as a share of the default one's.

    Parameters
    ----------
    default
        The default tile, which is returned with 1 unless another is faster by the margin.
    problems
        What to measure on.
    rounds
        Measurements of each tile, in turn with those of the others.
    say
        Takes lines about what happens.
    """
    wanted = [problem.numbers(default) for problem in problems]
    tried = [default]
    for config in candidates(default):
        try:
            error = max(_difference(p.numbers(config), w) for p, w in zip(problems, wanted, strict=True))
        except Exception as failure:  # whatever compiler and driver dislike
            say(f"  {_name(config)}: does not run: {_line(failure)}")
            continue
        if error <= _ROUNDING:
            tried.append(config)
        else:
            say(f"  {_name(config)}: discarded, its numbers differ from the default tile's by {error:.1e}")
    ratios: dict[SegmentConfig, list[list[float]]] = {config: [[] for _ in problems] for config in tried}
    for _ in range(rounds):
        for number, problem in enumerate(problems):
            usual = problem.seconds(default)
            ratios[default][number].append(1.0)
            for config in tried[1:]:
                ratios[config][number].append(problem.seconds(config) / usual)
    best, least = default, 1.0
    for config in tried[1:]:
        shares = [statistics.median(found) for found in ratios[config]]
        together = math.prod(shares) ** (1 / len(shares))
        parts = ", ".join(f"{p.name} {share:.2f}" for p, share in zip(problems, shares, strict=True))
        say(f"  {_name(config)}: {parts} of the default tile's time")
        if together <= _MARGIN and max(shares) <= _WORSE and together < least:
            best, least = config, together
    return best, least


def _difference(got: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """Largest difference as a share of the largest number; infinities must stand at the same places."""
    worst = 0.0
    for a, b in zip(got, wanted, strict=True):
        apart = torch.where(a == b, 0.0, (a - b).abs()).max()
        size = torch.where(b.isfinite(), b.abs(), 0.0).max()
        error = float(apart / size.clamp_min(1e-30))
        worst = math.inf if math.isnan(error) else max(worst, error)
    return worst


def tune(
    defaults: Sequence[SegmentConfig],
    element: int,
    model: str,
    problems: Callable[[SegmentConfig], Sequence[Problem]],
    keep: Callable[[TunedTile], None],
    *,
    rounds: int,
    say: Say,
) -> bool:
    """Measure tiles around some default ones; False if one of these could not be measured.

    Parameters
    ----------
    defaults
        The default tiles.
    element
        Bytes of an element of a query.
    model
        What results say that they were measured with.
    problems
        Makes what to measure on for a default tile.
    keep
        Takes each result as soon as it is there.
    rounds, say
        As in :func:`choose`.
    """
    complete = True
    for number, default in enumerate(defaults, 1):
        say(f"[{number}/{len(defaults)}] {_title(default.head_dim, element, default.block_m)}: {_name(default)}")
        try:
            best, ratio = choose(default, problems(default), rounds, say)
        except (RuntimeError, EpicError) as failure:  # torch's, of memory that is not there
            say(f"  not measured: {_line(failure)}")
            complete = False
            continue
        keep(TunedTile(element, default, best, ratio, model))
        say("  the default stays" if best == default else f"  kept: {_name(best)}, {ratio:.2f} of its time")
    return complete


def _title(head_dim: int, element: int, rows: int) -> str:
    return f"heads of {head_dim}, {8 * element}-bit, {rows} rows"


def _name(config: SegmentConfig) -> str:
    return f"{config.block_n} keys, {config.warps} warps, {config.stages} stages"


def _line(failure: BaseException) -> str:
    return (" ".join(str(failure).split()) or type(failure).__name__)[:200]


# -- the file --------------------------------------------------------------------------------------------------------


def save(path: Path, of: CardId, tiles: Mapping[Key, TunedTile]) -> None:
    """Write a card's file; it is the old one or the new one at every moment.

    Raises
    ------
    OSError
        If it cannot be written.
    """
    entries = [
        {
            "head_dim": head_dim,
            "element": element,
            "rows": rows,
            "default": [t.default.block_n, t.default.warps, t.default.stages],
            "tile": [t.tile.block_n, t.tile.warps, t.tile.stages],
            "ratio": round(t.ratio, 4),
            "model": t.model,
        }
        for (head_dim, element, rows), t in sorted(tiles.items())
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        content = json.dumps({**tuned.identity(of), "tiles": entries}, indent=1)
        temporary.write_text(content + "\n", encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def forget(of: CardId) -> int:
    """Delete a card's files, those for other versions of Triton and kernels as well; returns how many there were."""
    pattern = tuned.tiles_path(of, every_version=True)
    found = list(pattern.parent.glob(pattern.name))
    for path in found:
        path.unlink(missing_ok=True)
    return len(found)


# -- the command -----------------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m epic_engine.gpu.tune", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--model-shape", metavar="HEADS,KV_HEADS,HEAD_DIM", help=f"of attention (default {_MODEL})")
    parser.add_argument("--dtype", choices=sorted(_DTYPES), help="of queries and keys (default bfloat16)")
    parser.add_argument("--list", action="store_true", help="show what is kept for this card")
    parser.add_argument("--forget", action="store_true", help="delete what is kept for this card")
    parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)  # to try this program without a GPU
    return parser


def _model_shape(text: str) -> tuple[int, int, int]:
    """The numbers of ``HEADS,KV_HEADS,HEAD_DIM``.

    Raises
    ------
    ValueError
        If these are not three positive numbers, or heads are no multiple of heads of keys.
    """
    parts = text.split(",")
    if len(parts) != 3 or not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise ValueError(f"{text!r} is not HEADS,KV_HEADS,HEAD_DIM, for example {_MODEL}")
    heads, kv_heads, head_dim = map(int, parts)
    if heads % kv_heads:
        raise ValueError(f"{heads} heads are no multiple of {kv_heads} heads of keys")
    return heads, kv_heads, head_dim


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(given: Sequence[str] | None = None) -> int:
    """Measure, list or forget; returns the exit status."""
    parser = _parser()
    options = parser.parse_args(given)
    if importlib.util.find_spec("triton") is None:
        _say("tune cannot run: Triton is not installed: pip install triton.")
        return 2
    found = _INTERPRETER if options.tiny and interpreted() else tuned.card()
    if found is None:
        _say("tune cannot run: torch sees no GPU here, or several kinds of them (CUDA_VISIBLE_DEVICES chooses one).")
        return 2
    path = tuned.tiles_path(found)
    if options.forget:
        _say(f"{forget(found)} files of {found.name} deleted from {path.parent}")
        return 0
    try:
        tiles = tuned.read_tiles(path, found)
    except ValueError as error:
        _say(f"{path} is ignored: {error}")
        tiles = {}
    if options.list:
        _list(found, path, tiles)
        return 0

    from epic_engine.attention.kernels.configs import default_config

    from .report import tidy
    from .shapes import ModelShape
    from .tune_problems import REAL, TINY, tile_problems

    text = options.model_shape or (_TINY_MODEL if options.tiny else _MODEL)
    dtype = _DTYPES[options.dtype or ("float32" if options.tiny else "bfloat16")]
    try:
        heads, kv_heads, dim = _model_shape(text)
        # No tile has more rows than these.
        readers = range(1, 257)
        defaults = list(dict.fromkeys(default_config(dim, heads // kv_heads, n, dtype) for n in readers))
    except ValueError as error:
        parser.error(str(error))
    model = ModelShape(text, heads * dim, 1, heads, kv_heads, dim, 4 * heads * dim, 1000)
    device = torch.device("cpu" if interpreted() else "cuda")
    sizes = TINY if options.tiny else REAL

    def problems(default: SegmentConfig) -> Sequence[Problem]:
        tidy()
        return tile_problems(default, model, dtype, device, sizes)

    def keep(result: TunedTile) -> None:
        tiles[result.key] = result
        save(path, found, tiles)

    _say(f"{found.name}: tiles for {text} in {str(dtype).removeprefix('torch.')}")
    try:
        complete = tune(defaults, 2 if dtype.itemsize == 2 else 4, text, problems, keep, rounds=sizes.rounds, say=_say)
    except KeyboardInterrupt:
        _say(f"stopped; what was finished is in {path}")
        return _INTERRUPTED
    except OSError as error:
        _say(f"tune cannot write {path}: {error}")
        return 2
    _say(f"kept in {path} for engines that start from now on; --forget deletes it")
    return 0 if complete else 1


def _list(of: CardId, path: Path, tiles: Mapping[Key, TunedTile]) -> None:
    print(
        f"{of.name}, compute capability {of.capability}: {path if tiles else 'nothing is tuned, tiles are the default'}"
    )
    for (head_dim, element, rows), found in sorted(tiles.items()):
        change = "the default" if found.tile == found.default else f"{found.ratio:.2f} of {_name(found.default)}"
        print(f"{_title(head_dim, element, rows)}: {_name(found.tile)} ({change}; {found.model})")


if __name__ == "__main__":
    sys.exit(main())
