"""Chunks that a campaign stores: made from their number, and given back bit for bit by every encoding.

Eight-bit encodings round. What is stored here are numbers that they can hold exactly: whole multiples of a power of
two, keys turned by a Hadamard matrix whose elements are powers of two, too. So one comparison serves all of them.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch
from epic_engine import ChunkInfo, ChunkKey
from epic_engine.chunks import content_digest
from epic_engine.contexts import CompileContext
from torch import Tensor

__all__ = ["NAMESPACES", "content_of", "dependents", "entry", "key_of", "numbers_by_key"]

NAMESPACES = ("alpha", "beta", "gamma ../δ")
_FINGERPRINTS = ("f" * 64, "0123456789abcdef" * 4)
_ENCODINGS = ("raw", "int8", "raw+zstd", "bf16", "int8+zstd", "fp8", "raw")
_HALVES = (torch.float16, torch.bfloat16)
_LAYERS, _HEADS, _DIM = 2, 1, 16
_MOST = 100_000
_FAR = 4e9
_BEFORE = (1, 2)


def _ids(number: int) -> tuple[int, ...]:
    return tuple(range(7 * number, 7 * number + 3 + number % 4))


def key_of(number: int) -> ChunkKey:
    """Key of a chunk; the same for all its versions."""
    before = CompileContext("sink:2", _BEFORE, tuple(key_of(n) for n in _behind(number)))
    return ChunkKey.of(_FINGERPRINTS[number % 2], NAMESPACES[number % 3], before.identity, _ids(number))


def content_of(number: int) -> str:
    """Digest of a chunk's tokens."""
    return content_digest(_ids(number))


def dependents(number: int) -> list[int]:
    """Chunks that were compiled behind this one: with it they go."""
    return [number + 6] if number in _behind(number + 6) else []


def _behind(number: int) -> list[int]:
    """Neighbours that a chunk was compiled behind; of the same tenant and model."""
    return [number - 6] if number % 7 == 3 and number >= 6 else []


@lru_cache(maxsize=4096)
def entry(number: int, version: int = 0, *, old: bool = False) -> tuple[ChunkInfo, Tensor]:
    """A chunk, as the store has to give it back.

    Parameters
    ----------
    number
        0 or more.
    version
        Later ones of the same key have other KV, and replace it.
    old
        As format 1 knew chunks: uncompressed, without an end.
    """
    encoding = "raw" if old else _ENCODINGS[number % len(_ENCODINGS)]
    kv = _kv(encoding.partition("+")[0], number, version)
    info = ChunkInfo(
        key_of(number),
        NAMESPACES[number % 3],
        _FINGERPRINTS[number % 2],
        content_of(number),
        "sink:2",
        _ids(number),
        _BEFORE + tuple(token for n in _behind(number) for token in _ids(n)),
        kv.nbytes,
        float(1000 * version + number % 13),
        tuple(content_of(n) for n in _behind(number)),
    )
    if not old:
        info = replace(
            info,
            encoding=encoding,
            expires=_FAR if number % 11 == 7 else None,
            cost=0.25 * (number % 5) if number % 5 else None,
        )
    return info, kv


def _kv(base: str, number: int, version: int) -> Tensor:
    shape = (_LAYERS, 2, _HEADS, len(_ids(number)), _DIM)
    generator = torch.Generator().manual_seed(number + version * _MOST)
    if base in ("raw", "bf16"):
        kv = torch.randn(shape, generator=generator)
        if base == "bf16":
            return kv.bfloat16().float()
        return kv.to(_HALVES[number % 2]) if number % 5 == 0 else kv
    largest = 127 if base == "int8" else 448
    numbers = torch.randint(-largest, largest + 1, shape, generator=generator).float()
    if base == "fp8":
        numbers = numbers.to(torch.float8_e4m3fn).float()
    numbers[..., number % _DIM] = largest  # the scale of every token is then the power of two
    numbers *= 2.0 ** -(number % 9)
    turn = torch.ones(1, 1)
    while len(turn) < _DIM:
        turn = torch.cat([torch.cat([turn, turn], 1), torch.cat([turn, -turn], 1)])
    return torch.stack([numbers[:, 0] @ (turn / _DIM**0.5), numbers[:, 1]], 1)


def numbers_by_key(numbers: list[int]) -> dict[str, int]:
    """Which number has which key."""
    return {key_of(number).hex: number for number in numbers}
