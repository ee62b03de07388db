"""A store's bytes as ``docs/store-format.md`` describes them, read without the store's own code.

A picture is taken before a fault; which chunks it damaged is what differs from the picture afterwards.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from tests.damage import where

__all__ = ["Damage", "Spot", "compare", "picture"]

_HEADER = struct.Struct("<8sIBB2xQ32s16s16s24s8x8s")


@dataclass(frozen=True)
class Spot:
    """A record: its header with metadata, and its payload, as they were.

    Attributes
    ----------
    file
        Relative to the store.
    start, offset, stored, end
        Of the record, of its payload, its bytes, and the end of the record with its padding.
    head, payload
        Bytes; a file of format 1 has no head that readers rely on.
    """

    file: str
    start: int
    offset: int
    stored: int
    end: int
    head: bytes
    payload: bytes


@dataclass
class Damage:
    """Keys whose bytes differ now, and those whose file is gone."""

    corrupt: set[str] = field(default_factory=set)
    missing: set[str] = field(default_factory=set)

    @property
    def keys(self) -> set[str]:
        """Both."""
        return self.corrupt | self.missing


def picture(store: Path) -> dict[str, Spot]:
    """Every record that the catalogue names, by its chunk's key.

    Raises
    ------
    AssertionError
        If one of them is not as the format's description says.
    """
    found = {}
    contents: dict[Path, bytes] = {}
    for key, lies in where(store).items():
        if lies.file not in contents:
            contents[lies.file] = lies.file.read_bytes()
        raw = contents[lies.file]
        payload = raw[lies.offset : lies.offset + lies.stored]
        head, end = b"", len(raw)
        if lies.file.suffix == ".seg":
            fields = _HEADER.unpack_from(raw, lies.start)
            magic, length, stored, name, text_sum, payload_sum, seal = *fields[:2], *fields[4:8], fields[9]
            head = raw[lies.start : lies.start + _HEADER.size + length]
            assert (magic, name.hex(), stored) == (b"EPICREC2", key, lies.stored)
            assert seal == xxhash.xxh3_64_digest(head[: _HEADER.size - 8])
            assert text_sum == xxhash.xxh3_128_digest(head[_HEADER.size :])
            assert payload_sum == xxhash.xxh3_128_digest(payload)
            end = -(-(lies.offset + lies.stored) // 64) * 64
        assert len(payload) == lies.stored
        place = (lies.start, lies.offset, lies.stored, end)
        found[key] = Spot(lies.file.relative_to(store).as_posix(), *place, head, payload)
    return found


def compare(before: dict[str, Spot], store: Path) -> Damage:
    """What has happened to records since a picture was taken."""
    damage = Damage()
    contents: dict[str, bytes | None] = {}
    for key, spot in before.items():
        file = store / spot.file
        if spot.file not in contents:
            contents[spot.file] = file.read_bytes() if file.exists() else None
        raw = contents[spot.file]
        if raw is None:
            damage.missing.add(key)
        elif (
            raw[spot.offset : spot.offset + spot.stored] != spot.payload
            or raw[spot.start : spot.start + len(spot.head)] != spot.head
        ):
            damage.corrupt.add(key)
    return damage
