"""How a chunk's KV is written down.

========  ====================================================================================================
``raw``   as it is
``bf16``  bfloat16, of a wider type
``int8``  whole numbers, with a bfloat16 scale for each layer, key or value, head and token
``fp8``   float8_e4m3fn, with the same scales
========  ====================================================================================================

With ``+zstd`` behind it, any of them is one zstd frame; ``raw+zstd`` gives back what was put in, bit for bit.

The eight-bit ones are the scales, ``(layers, 2, kv_heads, tokens)``, followed by the numbers in the order of the KV.
Keys are turned by a Hadamard matrix within each head first: a few of their dimensions are ten times as large as the
others, which would get what is left of the scale. A scale for each token and not for a page of them: the first token
of a prompt draws much of the attention, and its keys and values are a third or a quarter as large as the others'.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from epic_engine.errors import ConfigError, StoreError

__all__ = [
    "ENCODINGS",
    "Encoded",
    "decode",
    "encode",
    "encoded_nbytes",
    "encoding_for",
    "fingerprint_for",
    "joined",
    "rounded",
]

ENCODINGS = ("raw", "bf16", "int8", "fp8")
"""What may stand before ``+zstd``."""

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_LARGEST = {"int8": 127.0, "fp8": 448.0}
# An e4m3 number's bits, moved to where float16 has its exponent and mantissa, are that number over this.
_E4M3_AS_HALF = 256.0
# The matrix that keys are turned by has the square of it numbers, whatever the payload has.
_MOST_HEAD_DIM = 1024
_LEVEL = 3


@dataclass(frozen=True, eq=False)
class Encoded:
    """KV as it is to be written.

    Attributes
    ----------
    parts
        Contiguous uint8 CPU tensors, to be written one behind the other. Those of ``raw`` share the KV's memory.
    encoding
        How to decode it.
    shape, dtype
        Of the KV that was encoded.
    """

    parts: tuple[Tensor, ...]
    encoding: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.numel() for part in self.parts)

    @property
    def kv_nbytes(self) -> int:
        """Bytes of the KV that was encoded."""
        return math.prod(self.shape) * self.dtype.itemsize


def encoding_for(kv_dtype: str, dtype: torch.dtype) -> str:
    """The encoding that keeps a model's KV as its user asks.

    Parameters
    ----------
    kv_dtype
        :attr:`EngineConfig.kv_dtype <epic_engine.config.EngineConfig>`.
    dtype
        What the model computes KV in.

    Raises
    ------
    ConfigError
        If bfloat16 would need as many bytes and lose digits.
    """
    if kv_dtype == "bf16" and dtype == torch.float16:
        raise ConfigError("kv_dtype='bf16' is no narrower than this model's float16: use 'auto', 'int8' or 'fp8'.")
    as_it_is = kv_dtype == "auto" or (kv_dtype == "bf16" and dtype == torch.bfloat16)
    return "raw" if as_it_is else kv_dtype


def fingerprint_for(fingerprint: str, encoding: str) -> str:
    """A model's fingerprint as it stands in the keys of chunks that are kept in an encoding.

    A chunk that was rounded gives other answers, so it is another chunk; compression alone changes nothing.
    """
    base, _ = _parsed(encoding)
    return fingerprint if base == "raw" else hashlib.sha256(f"{fingerprint} kept as {base}".encode()).hexdigest()


def encoded_nbytes(shape: Sequence[int], dtype: torch.dtype, encoding: str) -> int:
    """Bytes that KV takes before compression.

    Raises
    ------
    ValueError
        If this is no shape of KV, no floating dtype, or an unknown encoding.
    """
    base, _ = _parsed(encoding)
    layers, two, heads, tokens, dim = _checked(shape, dtype, base)
    numbers = layers * two * heads * tokens * dim
    if base == "raw":
        return numbers * dtype.itemsize
    if base == "bf16":
        return numbers * 2
    return 2 * layers * two * heads * tokens + numbers


def encode(kv: Tensor | Encoded, encoding: str) -> Encoded:
    """Write KV down.

    Parameters
    ----------
    kv
        ``(layers, 2, kv_heads, tokens, head_dim)``, on any device. Of what is encoded already only the compression is
        changed, and no number is rounded again.
    encoding
        One of :data:`ENCODINGS`, or one with ``+zstd`` behind it.

    Raises
    ------
    ValueError
        If the encoding is unknown, this is no KV, or (but for ``raw``) it holds numbers that are not finite; or if it
        is encoded otherwise already.
    StoreError
        If zstd is asked for and not installed.
    """
    base, compressed = _parsed(encoding)
    if isinstance(kv, Encoded):
        return _recompressed(kv, encoding)
    shape = tuple(kv.shape)
    _checked(shape, kv.dtype, base)
    kv = kv.detach()
    if base == "raw":
        parts = [kv]
    elif base == "bf16":
        parts = [_finite(kv.to(torch.bfloat16))]
    else:
        parts = _eight_bits(kv, base)
    flat = tuple(part.contiguous().cpu().flatten().view(torch.uint8) for part in parts)
    if compressed:
        flat = (_compressed(flat),)
    return Encoded(flat, encoding, shape, kv.dtype)


def decode(raw: Tensor, encoding: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """KV from what was written; the inverse of :func:`encode`, up to rounding.

    Parameters
    ----------
    raw
        The payload: uint8, on the CPU, one dimension.
    encoding, shape, dtype
        As in :class:`Encoded`. No more memory is taken than they say, whatever the payload holds.

    Returns
    -------
    Tensor
        ``(layers, 2, kv_heads, tokens, head_dim)``; a view of ``raw`` where its encoding is ``"raw"``.

    Raises
    ------
    ValueError
        If the payload does not fit, or could not have been written by :func:`encode`.
    StoreError
        If it is compressed and zstd is not installed.
    """
    base, compressed = _parsed(encoding)
    expected = encoded_nbytes(shape, dtype, encoding)
    if raw.dtype != torch.uint8 or raw.dim() != 1 or raw.device.type != "cpu" or not raw.is_contiguous():
        raise ValueError("a payload is a contiguous uint8 tensor of one dimension on the CPU.")
    if compressed:
        raw = _decompressed(raw, expected)
    if raw.numel() != expected:
        raise ValueError(f"the payload has {raw.numel()} bytes, {base} KV of shape {tuple(shape)} has {expected}.")
    if raw.data_ptr() % 8 or raw.storage_offset() % 8:  # a view in another dtype must begin at a multiple of its size
        raw = raw.clone()
    if base == "raw":
        return raw.view(dtype).view(tuple(shape))
    if base == "bf16":
        return raw.view(torch.bfloat16).view(tuple(shape)).to(dtype)
    return _from_eight_bits(raw, base, tuple(shape), dtype)


def joined(encoded: Encoded) -> Tensor:
    """The payload in one piece; shares memory where it has one part."""
    return encoded.parts[0] if len(encoded.parts) == 1 else torch.cat(encoded.parts)


def rounded(kv: Tensor, encoding: str) -> Tensor:
    """KV as it comes back from a store, on its own device. Raises as :func:`encode`."""
    base, _ = _parsed(encoding)
    if base == "raw":
        return kv
    return decode(joined(encode(kv, base)), base, kv.shape, kv.dtype).to(kv.device)


def _parsed(encoding: str) -> tuple[str, bool]:
    base, plus, method = encoding.partition("+")
    if base not in ENCODINGS or (plus and method != "zstd"):
        raise ValueError(
            f"unknown encoding {encoding[:40]!r}: use {', '.join(ENCODINGS)}, or one of them with '+zstd'."
        )
    return base, bool(plus)


def _checked(shape: Sequence[int], dtype: torch.dtype, base: str) -> tuple[int, ...]:
    sizes = tuple(shape)
    if len(sizes) != 5 or any(type(n) is not int or not 0 < n < 2**40 for n in sizes) or sizes[1] != 2:
        raise ValueError(f"KV has the shape (layers, 2, kv_heads, tokens, head_dim), not {str(sizes)[:200]}.")
    if dtype not in _DTYPES:
        raise ValueError(f"KV of {dtype} cannot be stored: floating-point numbers of at least 16 bits are expected.")
    if base == "bf16" and dtype.itemsize <= 2:
        raise ValueError(f"bf16 is for KV wider than 16 bits, not for {dtype}: use raw.")
    if base in _LARGEST and sizes[4] > _MOST_HEAD_DIM:
        raise ValueError(f"{base} is for heads of at most {_MOST_HEAD_DIM} dimensions, not {sizes[4]}: use raw.")
    return sizes


def _recompressed(kept: Encoded, encoding: str) -> Encoded:
    (before, packed), (base, compressed) = _parsed(kept.encoding), _parsed(encoding)
    if before != base:
        raise ValueError(f"KV that is kept as {before} cannot be kept as {base}: compile its tokens again.")
    expected = encoded_nbytes(kept.shape, kept.dtype, base)
    parts = kept.parts
    if packed and not compressed:
        parts = (_decompressed(joined(kept), expected),)
    elif compressed and not packed:
        parts = (_compressed(parts),)
    if not packed and kept.nbytes != expected:
        raise ValueError(f"the payload has {kept.nbytes} bytes, {base} KV of shape {kept.shape} has {expected}.")
    return Encoded(parts, encoding, kept.shape, kept.dtype)


def _finite(numbers: Tensor) -> Tensor:
    if not torch.isfinite(numbers).all():
        raise ValueError("the KV is damaged: it holds numbers that are not finite, or too large for the encoding.")
    return numbers


@functools.lru_cache(maxsize=8)
def _hadamard(dim: int) -> Tensor:
    """An orthogonal, symmetric matrix of equal magnitudes, in blocks where ``dim`` is no power of two."""
    block = torch.ones(1, 1)
    while dim % (2 * len(block)) == 0:
        block = torch.cat([torch.cat([block, block], 1), torch.cat([block, -block], 1)])
    return torch.block_diag(*[block / len(block) ** 0.5] * (dim // len(block)))


def _eight_bits(kv: Tensor, base: str) -> list[Tensor]:
    largest = _LARGEST[base]
    turn = _hadamard(kv.shape[4]).to(kv.device)
    scales = torch.empty(kv.shape[:4], dtype=torch.bfloat16, device=kv.device)
    numbers = torch.empty(kv.shape, dtype=torch.int8 if base == "int8" else torch.float8_e4m3fn, device=kv.device)
    for layer in range(len(kv)):  # a layer at a time stays in the processor's cache
        block = kv[layer].float()
        block = torch.stack([block[0] @ turn, block[1]])
        scales[layer] = block.abs().amax(-1) / largest
        # The rounded scale is what readers multiply by.
        scale = scales[layer].float()
        block /= torch.where(scale > 0, scale, 1.0)[..., None]
        numbers[layer] = (block.round_() if base == "int8" else block).clamp_(-largest, largest).to(numbers.dtype)
    return [_finite(scales), numbers]


def _from_eight_bits(raw: Tensor, base: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    count = math.prod(shape[:4])
    scales = _finite(raw[: 2 * count].view(torch.bfloat16)).view(shape[:4]).float()[..., None]
    if base == "fp8":
        scales *= _E4M3_AS_HALF
    numbers = raw[2 * count :].view(torch.int8).view(shape)
    turn = _hadamard(shape[4])
    kv = torch.empty(shape, dtype=dtype)
    block = torch.empty(shape[1:])
    most = torch.finfo(dtype).max
    for layer in range(shape[0]):
        if base == "int8":
            block.copy_(numbers[layer])
        else:  # torch converts float8 on a CPU many times slower
            block.copy_(((numbers[layer].to(torch.int16) << 7) & ~0x4000).view(torch.float16))
        block *= scales[layer]
        block[0] = block[0] @ turn
        # Scales are rounded, perhaps upwards, and float16 has little room.
        kv[layer] = block.clamp_(-most, most) if dtype == torch.float16 else block
    return kv


def _zstandard() -> ModuleType:
    try:
        import zstandard
    except ImportError as error:
        raise StoreError("compressed chunks need zstandard: pip install zstandard") from error
    return zstandard


def _compressed(parts: Sequence[Tensor]) -> Tensor:
    compressor = _zstandard().ZstdCompressor(level=_LEVEL).compressobj(size=sum(part.numel() for part in parts))
    pieces = [compressor.compress(part.numpy().data) for part in parts]
    return _tensor(b"".join([*pieces, compressor.flush()]))


def _decompressed(raw: Tensor, expected: int) -> Tensor:
    zstandard: Any = _zstandard()
    frame = raw.numpy().data
    try:
        # The size that the frame's header names is what is allocated, and the frame cannot yield more.
        found = zstandard.get_frame_parameters(frame).content_size
        if found != expected:
            raise ValueError(f"the compressed payload holds {found} bytes, {expected} are expected.")
        return _tensor(zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False))
    except (zstandard.ZstdError, MemoryError) as error:
        raise ValueError(f"the compressed payload is damaged: {error}") from error


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
