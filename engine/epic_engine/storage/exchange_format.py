"""What an export is: safetensors files that any reader of that format opens, and an index.

::

    DIR/chunks-00001.safetensors    chunks, each with its metadata as JSON in the file's own
    DIR/index.json                  which files there are; written last
    DIR/export.lock                 held by the process that exports; gone when it has finished

``docs/store-format.md`` has every detail.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import xxhash

from epic_engine.chunks import ChunkKey, content_digest
from epic_engine.contexts import CompileContext, identity_behind

from .payload import ENCODINGS, encoded_nbytes
from .segments import DTYPES, info_from, metadata
from .store import ChunkInfo

__all__ = [
    "DIGEST",
    "FILE_NAME",
    "FORMAT",
    "INDEX",
    "LENGTH",
    "LOCK",
    "MOST_HEADER",
    "VERSION",
    "Exported",
    "Part",
    "digest_of",
    "expected_key",
    "file_name",
    "parts_of",
    "read_metadata",
    "write_metadata",
]

FORMAT = "epic-rag chunks"
VERSION = 1
INDEX = "index.json"
LOCK = "export.lock"
FILE_NAME = re.compile(r"chunks-\d{5,9}\.safetensors", re.ASCII)
LENGTH = 8
"""Bytes that say how long the header is."""
MOST_HEADER = 100_000_000
"""The safetensors library reads no longer header."""
DIGEST = ".xxh3_128"
"""Behind a key: where the digest of the key's metadata stands."""

_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_EIGHT_BITS = {"int8": "I8", "fp8": "F8_E4M3"}


@dataclass(frozen=True)
class Part:
    """One tensor of a chunk, named ``KEY.name``; dtype as safetensors names it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class Exported:
    """What an export says about a chunk.

    Attributes
    ----------
    info
        The chunk; its encoding is without compression.
    shape, dtype
        Of the KV that was encoded.
    checksums
        XXH3-128 of each part's bytes, in hex.
    head
        Identity of the context in front of the neighbours; None where there are none, or it was not known.
    """

    info: ChunkInfo
    shape: tuple[int, ...]
    dtype: torch.dtype
    checksums: tuple[str, ...]
    head: str | None

    @property
    def parts(self) -> tuple[Part, ...]:
        """Its tensors, in the order of the payload."""
        return parts_of(self.info.encoding, self.shape, self.dtype)


def file_name(number: int) -> str:
    """Name of the file with this number, from 1."""
    return f"chunks-{number:05}.safetensors"


def parts_of(encoding: str, shape: Sequence[int], dtype: torch.dtype) -> tuple[Part, ...]:
    """The tensors that a payload without compression consists of, in its order.

    Raises
    ------
    ValueError
        If the encoding, shape or dtype is none of KV.
    """
    if encoding not in ENCODINGS:
        raise ValueError(f"its encoding {encoding[:40]!r} is not known")
    nbytes, sizes = encoded_nbytes(shape, dtype, encoding), tuple(shape)
    if encoding in _EIGHT_BITS:
        numbers = math.prod(sizes)
        return (
            Part("scales", "BF16", sizes[:4], nbytes - numbers),
            Part("numbers", _EIGHT_BITS[encoding], sizes, numbers),
        )
    return (Part("kv", _NAMES[dtype if encoding == "raw" else torch.bfloat16], sizes, nbytes),)


def digest_of(data: bytes | memoryview) -> str:
    """XXH3-128 in hex."""
    return xxhash.xxh3_128_hexdigest(data)


def expected_key(info: ChunkInfo, head: str | None) -> ChunkKey | None:
    """The key that follows from everything else that is known about a chunk; None if it cannot be told.

    Parameters
    ----------
    info
        The chunk.
    head
        As in :class:`Exported`; counts only for chunks with neighbours, whose keys are made from it.
    """
    if not info.depends:
        identity = CompileContext(info.context, info.context_ids).identity
    elif head is None:
        return None
    else:
        neighbours = [ChunkKey.of_content(info.fingerprint, info.namespace, head, d) for d in info.depends]
        identity = identity_behind(head, neighbours)
    return ChunkKey.of_content(info.fingerprint, info.namespace, identity, info.content)


def write_metadata(chunk: Exported) -> str:
    """A chunk's metadata, as JSON."""
    meta = {
        "chunk": json.loads(metadata(chunk.info)),
        "shape": chunk.shape,
        "dtype": str(chunk.dtype).removeprefix("torch."),
        "checksums": {part.name: sum_ for part, sum_ in zip(chunk.parts, chunk.checksums, strict=True)},
        "head": chunk.head,
    }
    return json.dumps(meta, separators=(",", ":"))


def read_metadata(key: ChunkKey, text: str) -> Exported:
    """The inverse of :func:`write_metadata`; says nothing about the tensors.

    Raises
    ------
    ValueError
        If it was not written by that, contradicts itself, or belongs to another key.
    """
    try:
        meta = json.loads(text)
        info = info_from(bytes.fromhex(key.hex), json.dumps(meta["chunk"]).encode())
        shape, head = tuple(meta["shape"]), meta["head"]
        if info is None or not (head is None or isinstance(head, str)):
            raise ValueError("its metadata are damaged")
        dtype = DTYPES[meta["dtype"]]
        checksums = tuple(meta["checksums"][part.name] for part in parts_of(info.encoding, shape, dtype))
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError("its metadata are damaged") from error
    fits = (
        content_digest(info.token_ids) == info.content
        and len(info.token_ids) == shape[3]
        and info.nbytes == math.prod(shape) * dtype.itemsize
    )
    if not fits:
        raise ValueError("its metadata contradict each other")
    expected = expected_key(info, head)
    if expected is None:
        raise ValueError("its key cannot be checked: what stood before its neighbours is not known")
    if expected != key:
        raise ValueError("its key belongs to other tokens, another namespace, model or context")
    return Exported(info, shape, dtype, checksums, head)
