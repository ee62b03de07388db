"""Rows of the catalogue that are made anew from the records they were made from."""

from __future__ import annotations

from typing import BinaryIO

import xxhash

from .catalogue import Catalogue, Place
from .layout import Layout
from .schema import SEGMENT
from .segments import Record, read_record

__all__ = ["checksum_in", "mend"]

_PIECE = 1 << 20


def checksum_in(file: BinaryIO, offset: int, stored: int) -> bytes:
    """XXH3-128 of a part of a file."""
    digest = xxhash.xxh3_128()
    file.seek(offset)
    while stored > 0 and (piece := file.read(min(stored, _PIECE))):
        digest.update(piece)
        stored -= len(piece)
    return digest.digest()


def mend(catalogue: Catalogue, layout: Layout, place: Place) -> bool:
    """Enter a chunk anew from its record, if that is whole and without doubt the one the row was made from.

    Returns
    -------
    bool
        Whether the catalogue has the chunk again, in a row with another number.
    """
    record = _record_of(layout, place) if catalogue.writable else None
    return record is not None and catalogue.mend(place, record)


def _record_of(layout: Layout, place: Place) -> Record | None:
    if place.kind != SEGMENT or type(place.start) is not int or place.start < 0:
        return None
    try:
        with open(layout.file(place.name), "rb") as file:
            record = read_record(file, place.start)
            if record is None or checksum_in(file, record.offset, record.stored) != record.checksum:
                return None
    except (OSError, ValueError):
        return None
    # A place that was changed, too, may be that of an older record of the same chunk.
    if place.whole:
        fits = (record.info.key.hex, record.checksum) == (place.key.hex(), place.checksum)
    else:
        fits = (record.offset, record.stored, record.end - record.start) == (place.offset, place.stored, place.span)
    return record if fits else None
