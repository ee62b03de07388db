"""Files as they are published: compressed if that can be done, and compared with their digest when they are fetched."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import xxhash

from epic_engine.errors import StoreFormatError

__all__ = ["PackedFile", "fetch_file", "pack_file"]

_BLOCK = 16 << 20
_LEVEL = 3
_DIGITS = set("0123456789abcdef")


@dataclass(frozen=True)
class PackedFile:
    """A published file.

    Attributes
    ----------
    name
        Of the object; ends in ``.zst`` if it is compressed.
    nbytes, digest
        Bytes of the object, and their XXH3-128 in hex.
    unpacked
        Bytes of the file without compression.
    """

    name: str
    nbytes: int
    digest: str
    unpacked: int

    def check(self, most: int) -> None:
        """Raise ValueError if this is not what :func:`pack_file` gives for a file of at most so many bytes."""
        fits = (
            isinstance(self.name, str)
            and all(type(size) is int and 0 <= size <= most for size in (self.nbytes, self.unpacked))
            and isinstance(self.digest, str)
            and len(self.digest) == 32
            and not set(self.digest) - _DIGITS
            and (self.name.endswith(".zst") or self.nbytes == self.unpacked)
        )
        if not fits:
            raise ValueError("what it says about a file is damaged")


def pack_file(file: Path, name: str) -> tuple[PackedFile, Path]:
    """Compress a file if zstandard is installed.

    Parameters
    ----------
    file
        Is replaced by a compressed one.
    name
        Of the object that it becomes, without ``.zst``.

    Returns
    -------
    tuple
        What is to be known about it, and the file to upload.
    """
    unpacked = file.stat().st_size
    if importlib.util.find_spec("zstandard"):
        import zstandard

        name += ".zst"
        packed = file.with_name(f"{file.name}.zst")
        with open(file, "rb") as source, open(packed, "wb") as target:
            zstandard.ZstdCompressor(level=_LEVEL).copy_stream(source, target, size=unpacked)
        file.unlink()
        file = packed
    digest = xxhash.xxh3_128()
    with open(file, "rb") as handle:
        while block := handle.read(_BLOCK):
            digest.update(block)
    return PackedFile(name, file.stat().st_size, digest.hexdigest(), unpacked), file


def fetch_file(read: Callable[[str, int, int], bytes], packed: PackedFile, file: Path) -> None:
    """Bring a published file here.

    Parameters
    ----------
    read
        Reads bytes of an object, as :meth:`Objects.read <epic_engine.storage.objects.Objects.read>`.
    packed
        Which one, checked.
    file
        Where it goes; is new.

    Raises
    ------
    ValueError
        If it is not what was published.
    StoreFormatError
        If zstandard is needed and not installed.
    """
    digest = xxhash.xxh3_128()
    arrived = file.with_name(f"{file.name}.packed")
    with open(arrived, "wb") as target:
        for start in range(0, packed.nbytes, _BLOCK):
            block = read(packed.name, start, min(start + _BLOCK, packed.nbytes))
            digest.update(block)
            target.write(block)
    if arrived.stat().st_size != packed.nbytes or digest.hexdigest() != packed.digest:
        raise ValueError(f"{packed.name} differs from what was published")
    if packed.name.endswith(".zst"):
        _unpack(arrived, file, packed.unpacked)
        arrived.unlink()
    else:
        os.replace(arrived, file)


def _unpack(packed: Path, file: Path, expected: int) -> None:
    try:
        import zstandard
    except ImportError as error:
        raise StoreFormatError("what is published is compressed: pip install 'epic-rag[zstd]' to read it.") from error
    size = 0
    try:
        with open(packed, "rb") as source, open(file, "wb") as target:
            reader = zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(source)
            while block := reader.read(_BLOCK):
                size += len(block)
                if size > expected:
                    break
                target.write(block)
    except zstandard.ZstdError as error:
        raise ValueError(f"{packed.name} cannot be decompressed: {error}") from error
    if size != expected:
        raise ValueError(f"{packed.name} does not hold the {expected:,} bytes that were published")
