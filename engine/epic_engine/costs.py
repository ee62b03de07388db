"""What compiling will take, said before it begins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .errors import InsufficientResourcesError
from .model.spec import ModelSpec
from .storage.payload import encoded_nbytes

__all__ = ["CompileEstimate", "check_fits", "estimate"]


@dataclass(frozen=True)
class CompileEstimate:
    """What compiling will take.

    Attributes
    ----------
    chunks, tokens
        Chunks that are not compiled yet, and their tokens.
    disk_bytes, memory_bytes
        KV to store, and peak memory while a batch is computed.
    seconds
        From a short measurement on this machine.
    """

    chunks: int
    tokens: int
    disk_bytes: int
    memory_bytes: int
    seconds: float

    def __str__(self) -> str:
        return (
            f"{self.chunks} chunks, {self.tokens} tokens: {self.disk_bytes / 2**20:.0f} MiB to store, "
            f"{self.memory_bytes / 2**20:.0f} MiB of memory, about {self.seconds:.0f} s"
        )


def estimate(
    spec: ModelSpec, lengths: Sequence[int], rows_per_step: int, token_seconds: float, encoding: str = "raw"
) -> CompileEstimate:
    """Cost of compiling chunks of the given lengths, in tokens, at a measured speed, and of keeping them encoded."""
    tokens = sum(lengths)
    shapes = ((spec.num_layers, 2, spec.num_kv_heads, length, spec.head_dim) for length in lengths)
    return CompileEstimate(
        chunks=len(lengths),
        tokens=tokens,
        disk_bytes=sum(encoded_nbytes(shape, spec.dtype, encoding) for shape in shapes),
        memory_bytes=_batch_bytes(spec, lengths, rows_per_step),
        seconds=tokens * token_seconds,
    )


def _batch_bytes(spec: ModelSpec, lengths: Sequence[int], rows_per_step: int) -> int:
    """Peak memory of a batch: its KV twice (computed and being written) and the widest activations."""
    rows = min(sum(lengths), max(rows_per_step, max(lengths, default=0)))
    wide = 12 * spec.hidden_size * max(spec.dtype.itemsize, 4)
    return rows * (2 * spec.kv_bytes_per_token + wide)


def check_fits(cost: CompileEstimate, *, disk_free: int, memory_free: int, rows_per_step: int) -> None:
    """Refuse work that cannot be finished.

    Raises
    ------
    InsufficientResourcesError
        If the KV exceeds the disk or a batch the memory; says what to change.
    """
    if cost.disk_bytes > disk_free:
        raise InsufficientResourcesError(
            f"{cost.chunks} chunks ({cost.tokens} tokens) take {cost.disk_bytes / 2**30:.2f} GiB of KV, the store has "
            f"{disk_free / 2**30:.2f} GiB free: ingest less, free some space, or use a smaller model."
        )
    if cost.memory_bytes > memory_free:
        raise InsufficientResourcesError(
            f"a batch takes {cost.memory_bytes / 2**30:.2f} GiB of memory, {memory_free / 2**30:.2f} GiB are free: "
            f"lower rows_per_step={rows_per_step} or split the longest chunk."
        )
