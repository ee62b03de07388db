"""Token ids (and a compile context) to relocatable KV.

Compiling is linking with the chunk as its own question: the context's KV stands in front as shared runs, the chunk's
tokens are the rows, and what they leave behind as private KV is the compiled chunk. Its keys are rotated at slots
0 … n - 1 whatever stood before. Chunks are packed into one forward pass without padding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from .attention.base import AttentionBackend, PrivateKV, Run, SequenceRows
from .chunks import ChunkKey
from .contexts import CompileContext
from .errors import ConfigError
from .model.decoder import Decoder

__all__ = ["Compiler", "pack"]


def pack(lengths: Sequence[int], rows: int) -> list[list[int]]:
    """Indices of consecutive chunks per forward pass, at most ``rows`` tokens each (one chunk may exceed it)."""
    batches: list[list[int]] = []
    used = rows
    for index, length in enumerate(lengths):
        if used + length > rows:
            batches.append([])
            used = 0
        batches[-1].append(index)
        used += length
    return batches


class Compiler:
    """Compiles batches of chunks with one model.

    Parameters
    ----------
    decoder
        The model.
    backend
        Its attention.
    load
        Brings a compiled chunk's KV to the device; needed for contexts with neighbours.
    """

    def __init__(
        self, decoder: Decoder, backend: AttentionBackend, load: Callable[[ChunkKey], Tensor] | None = None
    ) -> None:
        self._decoder = decoder
        self._backend = backend
        self._load = load
        self._contexts: dict[tuple[int, ...], Tensor] = {}

    def compile(
        self,
        chunks: Sequence[Sequence[int]],
        context: CompileContext | Sequence[CompileContext],
        run: Callable[[list[int], list[SequenceRows]], None] | None = None,
    ) -> list[Tensor]:
        """Compile chunks in one forward pass.

        Parameters
        ----------
        chunks
            Token ids of each chunk, none empty.
        context
            What they see before themselves: one for all, or one each.
        run
            Runs rows through the model; None runs them here.

        Returns
        -------
        list of Tensor
            KV of each chunk, ``(layers, 2, kv_heads, tokens, head_dim)``.
        """
        contexts = [context] * len(chunks) if isinstance(context, CompileContext) else context
        batch: list[SequenceRows] = []
        own: list[PrivateKV] = []
        for ids, where in zip(chunks, contexts, strict=True):
            runs, base = self._stand(where, run)
            private = PrivateKV(self._decoder.spec, len(ids), self._decoder.device, base=base)
            own.append(private)
            batch.append(SequenceRows(range(base, base + len(ids)), private, runs))
        ids = [t for chunk in chunks for t in chunk]
        if run is not None:
            run(ids, batch)
        else:
            plan = self._backend.plan(batch)
            self._decoder.run(ids, [p for b in batch for p in b.positions], plan)
            plan.commit()
        return [private.kv for private in own]

    def _stand(
        self, context: CompileContext, run: Callable[[list[int], list[SequenceRows]], None] | None
    ) -> tuple[list[Run], int]:
        """What stands before a chunk, and the place where the chunk begins."""
        runs: list[Run] = []
        base = len(context.token_ids)
        if base:
            if context.token_ids not in self._contexts:
                alone = self.compile([context.token_ids], CompileContext("isolated"), run)
                self._contexts[context.token_ids] = alone[0]
            runs.append(Run(self._contexts[context.token_ids], 0, base, offset=0, after=base))
        for key in context.neighbours:
            if self._load is None:
                raise ConfigError("this compiler has no store to load neighbours from.")
            kv = self._load(key)
            length = kv.shape[3]
            runs.append(Run(kv, 0, length, offset=base, after=base + length))
            base += length
        return runs, base
