"""Who reads what in a pass, cut into programs: the host's part of the Triton backend.

Keys of a pass come in *stretches*: runs of chunks, pages that sequences share, and a sequence's own tokens. A stretch
that several sequences read with few rows each, as they do when they decode over the same chunks, is an item of its
own with a reader for every row, so that its memory is read once. All others belong to one sequence: its rows are cut
into tiles and its stretches into pieces, so that every multiprocessor has something to do whether there is one request
or hundreds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from torch import Tensor

from epic_engine.errors import ConfigError

from .base import Run, SequenceRows
from .draft import ALWAYS, Draft, Reader, Region, Shape, Stretch

__all__ = ["Draft", "Shape", "draft", "targets"]

# Fewer keys than this are not worth a program of their own.
_SMALLEST_PIECE = 256
# Programs for each multiprocessor: several fit at once, and the last ones should not run alone.
_PROGRAMS = 4


def draft(batch: Sequence[SequenceRows], shape: Shape, *, ahead: bool = False) -> Draft:
    """Lay out one forward pass over the rows of all sequences, in the order given.

    Parameters
    ----------
    batch
        The rows.
    shape
        Of model and machine.
    ahead
        Whether the same sequences will go on, each by a row a pass: their own stretches are laid out to the end of
        their memory, of which rows see what there is.

    Raises
    ------
    ConfigError
        If rows do not fit their sequence's memory, or the kernels cannot read some of it.
    """
    made = Draft(shape)
    firsts: list[int] = []
    for item in batch:
        firsts.append(len(made.positions))
        made.positions.extend(item.positions)
    shared = _shared(batch, shape)
    few = shape.tile(shape.config(1))
    together: dict[tuple[object, ...], tuple[Stretch, list[Reader]]] = {}
    apart: list[tuple[list[Stretch], list[Stretch], list[Reader]]] = []
    for item, first in zip(batch, firsts, strict=True):
        private, rows = item.private, len(item.positions)
        if private.length + rows > private.capacity:
            raise ConfigError(
                f"{rows} rows do not fit a private KV of {private.capacity} tokens that holds {private.length}."
            )
        made.targets.extend(targets(made, item))
        own: list[Region] = []
        dense: list[Stretch] = []
        at = 0
        for kv, start, stop in private.memory() if ahead else private.pieces(private.length + rows):
            key = _identity(kv, start, stop, private.base)
            if rows <= few and at + stop - start <= private.length and key in shared:
                _join(together, key, made, Run(kv, start, stop, private.base, 0), item, first)
            else:
                own.append((kv, start, stop, at))
            at += stop - start
        for run in _runs(item, shape):
            key = _key(run, shape)
            if run.hidden is not None or (rows <= few and key in shared):
                _join(together, key, made, run, item, first)
            elif run.after <= item.positions[-1]:
                dense.append(made.run(run))
        readers = [Reader(first + i, own=private.length + i + 1) for i in range(rows)]
        apart.append((made.stretches(own, private.base), dense, readers))
    piece = _piece(together.values(), apart, shape)
    for stretch, all_readers in together.values():
        made.together(stretch, all_readers, piece)
    for stretches, dense, readers in apart:
        made.apart(stretches, dense, readers, piece)
    return made


def _runs(item: SequenceRows, shape: Shape) -> Sequence[Run]:
    return item.whole if item.whole is not None and not shape.turn_keys else item.runs


def _key(run: Run, shape: Shape) -> tuple[object, ...]:
    return (*run.shared_as, run.offset) if shape.turn_keys else run.shared_as


def _identity(kv: Tensor, start: int, stop: int, base: int) -> tuple[object, ...]:
    return kv.data_ptr(), start, stop, "own", base


def _shared(batch: Sequence[SequenceRows], shape: Shape) -> set[tuple[object, ...]]:
    """What several sequences read with few rows each."""
    seen: set[tuple[object, ...]] = set()
    found: set[tuple[object, ...]] = set()
    few = shape.tile(shape.config(1))
    for item in batch:
        if len(item.positions) > few:
            continue
        keys = [_key(run, shape) for run in _runs(item, shape) if run.after <= item.positions[0]]
        keys += [_identity(*piece, item.private.base) for piece in item.private.pieces()]
        for key in keys:
            (found if key in seen else seen).add(key)
    return found


def targets(made: Draft, item: SequenceRows) -> Iterator[tuple[int, int, int, int]]:
    """Where the rows' keys and values go: fields of the table of targets."""
    skip, base = item.private.length, item.private.base
    positions = iter(item.positions)
    for kv, start, stop in item.private.memory():
        if skip >= stop - start:
            skip -= stop - start
            continue
        memory, slot = made.memory(kv)
        for place, position in zip(range(slot + start + skip, slot + stop), positions, strict=False):
            yield memory, place, position - base, 0
        skip = 0


def _join(
    together: dict[tuple[object, ...], tuple[Stretch, list[Reader]]],
    key: tuple[object, ...],
    made: Draft,
    run: Run,
    item: SequenceRows,
    first: int,
) -> None:
    """Add a sequence's rows to those that read a run."""
    begin = bisect_left(item.positions, run.after)
    if begin == len(item.positions):
        return
    stretch, readers = together.get(key, (None, []))
    # Each reader brings its own distance, unless keys are turned: then the stretch has that of all its readers.
    offset = run.offset if made.shape.turn_keys else 0
    if stretch is None:
        stretch = replace(made.run(run), offset=offset, after=ALWAYS)
        together[key] = stretch, readers
    hidden = run.hidden.data_ptr() - stretch.start if run.hidden is not None else 0
    readers.extend(Reader(first + i, run.offset - offset, hidden=hidden) for i in range(begin, len(item.positions)))


def _piece(
    together: Iterable[tuple[Stretch, list[Reader]]],
    apart: Sequence[tuple[list[Stretch], list[Stretch], list[Reader]]],
    shape: Shape,
) -> int:
    """Keys of an item, so that there are as many programs as the machine wants."""
    work = 0

    def tiles(readers: Sequence[Reader]) -> int:
        return -(-len(readers) // shape.tile(shape.config(len(readers))))

    for stretch, readers in together:
        work += stretch.keys * tiles(readers)
    for own, dense, readers in apart:
        work += sum(s.keys for s in (*own, *dense)) * tiles(readers)
    return max(_SMALLEST_PIECE, -(-work * shape.kv_heads // (shape.processors * _PROGRAMS)))
