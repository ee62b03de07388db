"""Whether a store holds what was put into it.

Files are read, not mapped: memory beyond the end of a file that was cut meanwhile kills whoever reads it.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

from epic_engine.errors import StoreError

from .catalogue import Catalogue, place_of_row
from .layout import Layout
from .mending import checksum_in, mend
from .schema import SEGMENT, payload_of
from .seals import entry_of, is_whole
from .segments import RECORD_HEADER, info_from, metadata, padded, scan, unpack_header
from .store import VerifyReport
from .upkeep import orphans, sweep

__all__ = ["verify"]

_PAGE = 2000

Row = Sequence[Any]


def verify(
    catalogue: Catalogue,
    layout: Layout,
    *,
    repair: bool = False,
    quick: bool = False,
    progress: Callable[[int], None] | None = None,
) -> VerifyReport:
    """Compare every chunk, its record and its row, and look for files that nothing names.

    Parameters
    ----------
    catalogue, layout
        The store's.
    repair
        Enter a chunk anew from its record where its row is damaged, and in the indices where they have lost it, set
        aside what is lost, and remove what nothing names, but for segments with records of chunks that were lost: a new
        catalogue would find these.
    quick
        Read no payloads, and leave the catalogue's indices unchecked.
    progress
        Called with the number of chunks looked at.

    Raises
    ------
    StoreError
        If the catalogue itself is damaged, or a file cannot be read for a reason that says nothing about it.
    """
    report = VerifyReport()
    catalogue.sound(quick=quick)
    if repair:
        catalogue.check_writable()
    for rows in _pages(catalogue):
        reported = set()
        for row, problem in _problems(layout, rows, quick):
            place = place_of_row(row)
            # Meanwhile it may have been deleted, or copied elsewhere.
            if catalogue.place_of(place.ident) != (place.segment, place.start):
                continue
            (report.missing if isinstance(problem, FileNotFoundError) else report.corrupt).append(_hex(place.key))
            reported.add(place.ident)
            if repair and not mend(catalogue, layout, place):
                catalogue.set_aside(place, str(problem))
        if not quick:
            _check_indices(catalogue, {row[0]: row[8] for row in rows if row[0] not in reported}, report, repair)
        report.checked += len(rows)
        if progress:
            progress(report.checked)
    if not quick:
        report.strays = catalogue.strays()
        if repair and report.strays:
            catalogue.drop_strays()
    report.orphans = [layout.relative(path) for path in orphans(catalogue, layout)]
    report.quarantined = catalogue.quarantined()
    if repair:
        lost = {*report.corrupt, *report.missing}
        keep = {path for path in map(layout.root.joinpath, report.orphans) if lost and _holds(path, lost)}
        sweep(catalogue, layout, everything=True, keep=keep)
    return report


def _check_indices(catalogue: Catalogue, keys: Mapping[int, object], report: VerifyReport, repair: bool) -> None:
    """Report the chunks of a page that are not found by their key or their content; with ``repair``, they are again."""
    for ident in catalogue.lost(min(keys), max(keys)) if keys else ():
        if ident in keys:
            report.corrupt.append(_hex(keys[ident]))
            if repair:
                catalogue.find_again(ident)


def _holds(path: Path, keys: set[str]) -> bool:
    """Whether a file has records of some of these chunks: then it may be all that is left of them."""
    with contextlib.suppress(ValueError):
        return path.suffix == ".seg" and any(record.info.key.hex in keys for record in scan(path))
    return False


def _pages(catalogue: Catalogue) -> Iterator[list[Row]]:
    last = -1 << 63
    while rows := catalogue.rows(last, _PAGE):
        last = rows[-1][0]
        yield list(rows)


def _problems(layout: Layout, rows: list[Row], quick: bool) -> Iterator[tuple[Row, Exception]]:
    """The chunks of a page with which something is wrong, and what; in the order of the files."""
    for (name, kind), group in groupby(sorted(rows, key=_order), itemgetter(2, 3)):
        with contextlib.ExitStack() as stack:
            file: BinaryIO | None = None
            lost: Exception | None = None
            for row in group:
                try:
                    if lost is not None:
                        raise lost
                    file = file or stack.enter_context(open(layout.file(name, kind), "rb"))
                    _check_row(row)
                    if kind == SEGMENT:
                        _check_record(file, row, quick)
                    else:
                        _check_file(file, row, quick)
                except (FileNotFoundError, ValueError) as error:
                    lost = error if file is None else None
                    yield row, error
                except OSError as error:
                    raise StoreError(
                        f"chunk {_hex(row[8])} could not be read from {layout.root}: {error}. Mend the cause, then try "
                        "again."
                    ) from error


def _order(row: Row) -> tuple[int, int]:
    segment, start = row[1], row[4]
    return (segment, start) if type(segment) is int and type(start) is int else (-1, -1)


def _hex(key: object) -> str:
    return key.hex() if isinstance(key, bytes) else str(key)


def _check_row(row: Row) -> None:
    """Raise ValueError if the catalogue's own values do not fit each other."""
    if not is_whole(row[8:25]) or set(map(type, row[4:8])) != {int} or min(row[4:8]) < 0:
        raise ValueError("its row in the catalogue is damaged")
    depends = row[17]
    if not row[25] or row[26] != len({depends[i : i + 32] for i in range(0, len(depends), 32)}):
        raise ValueError("the catalogue has lost what else it knew about it")


def _check_record(file: BinaryIO, row: Row, quick: bool) -> None:
    """Raise ValueError if a record is not what its row says."""
    start, offset, stored, span = row[4:8]
    size = os.fstat(file.fileno()).st_size
    if size < offset + stored or size < start:
        raise ValueError("its file is too short")
    file.seek(start)
    header = unpack_header(file.read(RECORD_HEADER))
    shape = b"" if header is None else struct.pack(f"<{len(header.shape)}I", *header.shape)
    if header is None or (
        header.key, header.offset(start), header.stored, header.checksum, header.dtype.encode(), shape,
        padded(offset + stored) - start,
    ) != (row[8], offset, stored, row[23], row[22], row[21], span):  # fmt: skip
        raise ValueError("its header differs from the catalogue")
    text = file.read(header.metadata_bytes)
    if xxhash.xxh3_128_digest(text) != header.metadata_sum:
        raise ValueError("its metadata differ from what was written")
    if quick:
        return
    # The text can differ where a whole number was given for a real one.
    info = entry_of(row[8:25])
    if info is None or (text != metadata(info) and info_from(header.key, text) != info):
        raise ValueError("its metadata differ from the catalogue")
    if checksum_in(file, offset, stored) != header.checksum:
        raise ValueError("its bytes differ from what was written")


def _check_file(file: BinaryIO, row: Row, quick: bool) -> None:
    """The same for a file of format 1."""
    start, offset, stored, span = row[4:8]
    try:
        size, begin = payload_of(file, stored)
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError("its file is damaged") from error
    if (start, begin, size) != (0, offset, span):
        raise ValueError("its file differs from the catalogue")
    if not quick and checksum_in(file, offset, stored) != row[23]:
        raise ValueError("its bytes differ from what was written")
