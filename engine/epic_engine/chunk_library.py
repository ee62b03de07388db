"""The chunks that one model has compiled: made, found, forgotten."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .attention.base import AttentionBackend, SequenceRows
from .chunks import ChunkKey, CompiledChunk, content_digest
from .compile_turns import compile_in_turns
from .compiler import Compiler
from .config import EngineConfig
from .contexts import CompileContext, parse_context
from .costs import CompileEstimate, check_fits, estimate
from .errors import ChunkNotFoundError, ConfigError, ContextLengthError, EngineClosedError
from .memory.budget import available_memory
from .model.decoder import Decoder
from .storage.payload import encoding_for, fingerprint_for
from .storage.store import ChunkInfo, ChunkStore

__all__ = ["ChunkLibrary", "Prompt"]

Prompt = Sequence[Sequence[int] | ChunkKey]

# A lease outlasts what was measured by far: who loses it has its work done twice, and nothing worse.
_LEASE_SECONDS = 60.0
_LEASE_MARGIN = 20.0
_SLOW_TOKEN_SECONDS = 0.05


class ChunkLibrary(ABC):
    """Compiled chunks of one model and namespace; the half of :class:`~epic_engine.Engine` that works ahead of time.

    Parameters
    ----------
    decoder, backend
        The model and its attention.
    config
        Settings.
    store
        Where chunks are kept.
    head
        Token ids of the prompt's head for ``context="head"``.
    """

    def __init__(
        self,
        decoder: Decoder,
        backend: AttentionBackend,
        config: EngineConfig,
        store: ChunkStore,
        head: Sequence[int],
    ) -> None:
        self.config = config
        self.decoder = decoder
        self.backend = backend
        self.device = decoder.device
        self.spec = decoder.spec
        self.encoding = encoding_for(config.kv_dtype, decoder.spec.dtype)
        self.fingerprint = fingerprint_for(decoder.fingerprint, self.encoding)
        self.max_model_len = decoder.max_model_len
        self.store = store
        self._head = tuple(head)
        self._lock = threading.RLock()
        self._closed = threading.Event()
        self._compiler = Compiler(decoder, backend, lambda key: store.load(key).to(decoder.device))
        self._seconds_per_token: float | None = None
        self._compile_token_seconds = _SLOW_TOKEN_SECONDS
        self.context = self.parse_context(config.context)

    @abstractmethod
    def _forward(self, ids: Sequence[int], batch: list[SequenceRows], last: int) -> Tensor:
        """One forward pass; returns the logits of the last rows."""

    def _run_rows(self, ids: list[int], batch: list[SequenceRows]) -> None:
        self._forward(ids, batch, last=0)

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise EngineClosedError("this engine was closed: make a new one.")

    def _check_ids(self, ids: Sequence[int], what: str) -> None:
        if not len(ids):
            raise ConfigError(f"{what} has no tokens.")
        if min(ids) < 0 or max(ids) >= self.spec.vocab_size:
            raise ConfigError(
                f"{what} has token ids {min(ids)}…{max(ids)}, the vocabulary is 0…{self.spec.vocab_size - 1}: was it "
                "tokenised with another model's tokenizer?"
            )

    def parse_context(self, context: str | CompileContext | None) -> CompileContext:
        """A compile context from its string form; None is the engine's default.

        Raises
        ------
        ConfigError
            If the name is unknown or its argument does not fit.
        """
        if context is None:
            return self.context
        config = self.decoder.reference.config
        sink = next((i for i in (config.bos_token_id, *sorted(self.spec.end_ids)) if isinstance(i, int)), 0)
        return parse_context(context, head=self._head, sink_token=sink)

    def key_of(self, token_ids: Sequence[int], context: str | CompileContext | None = None) -> ChunkKey:
        """The key that these tokens have, or would have, in this engine's model and namespace."""
        return ChunkKey.of(self.fingerprint, self.config.namespace, self.parse_context(context).identity, token_ids)

    def find(self, token_ids: Sequence[int], context: str | CompileContext | None = None) -> ChunkKey | None:
        """Best compiled form of exactly these tokens for this model and namespace, or None.

        The form compiled in ``context`` (None: the engine's default) is preferred, then forms that saw other chunks,
        then forms that saw a head, then the newest.
        """
        self._check_open()
        preferred = self.key_of(token_ids, context)
        if self.has(preferred):
            return preferred
        forms = self.forms(token_ids)
        best = max(forms, key=lambda f: (bool(f.depends), f.context == "head", f.created), default=None)
        return best.key if best else None

    def forms(self, token_ids: Sequence[int]) -> list[ChunkInfo]:
        """All compiled forms of exactly these tokens for this model and namespace, oldest first."""
        self._check_open()
        return self.store.forms(self.config.namespace, self.fingerprint, content_digest(token_ids))

    def has(self, key: ChunkKey) -> bool:
        """Whether this model and namespace have a chunk of this key."""
        info = self.store.info(key)
        return info is not None and (info.namespace, info.fingerprint) == (self.config.namespace, self.fingerprint)

    def compile(self, token_ids: Sequence[int], context: str | CompileContext | None = None) -> ChunkKey:
        """Compile one chunk and store it; returns when it is durable. A known chunk costs nothing.

        Parameters
        ----------
        token_ids
            The chunk's tokens.
        context
            What it sees while it is compiled; None takes the engine's default.
        """
        return self.compile_many([token_ids], context)[0]

    def compile_many(
        self,
        chunks: Sequence[Sequence[int]],
        context: str | CompileContext | None = None,
        *,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[ChunkKey]:
        """Compile chunks in batches and store them.

        Each batch is durable before the next begins, so an interrupted call goes on where it stopped when it is
        repeated.

        Parameters
        ----------
        chunks
            Token ids of each chunk.
        context
            What each sees while it is compiled; None takes the engine's default.
        progress
            Called with tokens done and tokens to do, first with 0.

        Returns
        -------
        list of ChunkKey
            In the order given; equal chunks have equal keys.

        Raises
        ------
        ConfigError
            If a chunk is empty or holds ids outside the vocabulary.
        ContextLengthError
            If a chunk and its context exceed ``max_model_len``.
        ChunkNotFoundError
            If the context has neighbours that this model and namespace do not have.
        InsufficientResourcesError
            If the KV would not fit the store, or a batch not the memory; before any work.
        """
        self._check_open()
        where = self.parse_context(context)
        for neighbour in where.neighbours:  # before anything of them is read
            self._info(neighbour)
        keys = [ChunkKey.of(self.fingerprint, self.config.namespace, where.identity, ids) for ids in chunks]
        for index, ids in enumerate(chunks):
            self._check_ids(ids, f"chunk {index}")
            if len(ids) + len(where.token_ids) > self.max_model_len:
                raise ContextLengthError(
                    f"chunk {index} has {len(ids)} tokens and its compile context {len(where.token_ids)}, more than "
                    f"max_model_len={self.max_model_len}: split it."
                )
        todo = self._missing(chunks, keys)
        if todo:
            self._check_fits([len(ids) for _, ids in todo])
        self._compile_all([(key, ids, where) for key, ids in todo], progress)
        return keys

    def _compile_all(
        self,
        todo: Sequence[tuple[ChunkKey, tuple[int, ...], CompileContext]],
        progress: Callable[[int, int], None] | None,
    ) -> None:
        """Compile chunks that are not stored in batches; what another process is compiling is awaited."""
        lengths = [len(ids) for _, ids, _ in todo]
        done = 0
        if progress:
            progress(0, sum(lengths))

        def finished(indices: list[int]) -> None:
            nonlocal done
            done += sum(lengths[i] for i in indices)
            if progress:
                progress(done, sum(lengths))

        compile_in_turns(
            self.store,
            [key for key, _, _ in todo],
            lengths,
            self.config.rows_per_step,
            lambda indices: self._compile_batch([todo[i] for i in indices]),
            lambda tokens: _LEASE_SECONDS + _LEASE_MARGIN * tokens * self._compile_token_seconds,
            finished,
        )

    def _missing(
        self, chunks: Sequence[Sequence[int]], keys: Sequence[ChunkKey]
    ) -> list[tuple[ChunkKey, tuple[int, ...]]]:
        known = self.store.known(list(dict.fromkeys(keys)))
        wanted = {key: tuple(ids) for key, ids in zip(keys, chunks, strict=True) if key not in known}
        return list(wanted.items())

    def compile_neighbours(
        self,
        chunks: Sequence[Sequence[int]],
        neighbours: Sequence[Sequence[Sequence[int]]],
        *,
        head: Sequence[int] | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[ChunkKey]:
        """Compile each chunk behind other chunks that are likely to be retrieved with it.

        Two passes: every chunk and neighbour is compiled behind the head (and kept: a chunk falls back to that form
        when a neighbour is erased); then each chunk is linked, as the question, behind its neighbours' stored KV, and
        its own KV is kept. The second pass costs one forward of the chunks and no forward of the neighbours.

        Parameters
        ----------
        chunks
            Token ids of each chunk.
        neighbours
            Per chunk, the token ids of its neighbours, in the order in which they stand before it. A chunk without
            neighbours keeps its ``head`` form.
        head
            Token ids of the head; None takes the engine's own. May be empty.
        progress
            As for :meth:`compile_many`, over both passes.

        Returns
        -------
        list of ChunkKey
            In the order given.

        Raises
        ------
        ConfigError, ContextLengthError, InsufficientResourcesError
            As for :meth:`compile_many`.
        """
        self._check_open()
        if len(chunks) != len(neighbours):
            raise ConfigError(f"{len(chunks)} chunks but {len(neighbours)} lists of neighbours: give one per chunk.")
        ids = self._head if head is None else tuple(head)
        first = CompileContext("head", ids) if ids else CompileContext("isolated")
        pool = list(dict.fromkeys(tuple(c) for c in (*chunks, *(n for ns in neighbours for n in ns))))
        offset = 0

        def shifted(done: int, total: int) -> None:
            nonlocal offset
            offset = total
            if progress:
                progress(done, total + sum(map(len, chunks)))

        heads = dict(zip(pool, self.compile_many(pool, first, progress=shifted), strict=True))
        keys: list[ChunkKey] = []
        todo: dict[ChunkKey, tuple[tuple[int, ...], CompileContext]] = {}
        for chunk, others in zip(chunks, neighbours, strict=True):
            own = tuple(chunk)
            names = tuple(heads[tuple(o)] for o in others if tuple(o) != own)
            if not names:
                keys.append(heads[own])
                continue
            where = CompileContext(f"neighbours:{len(names)}", ids, names)
            length = len(own) + len(ids) + sum(len(o) for o in others)
            if length > self.max_model_len:
                raise ContextLengthError(
                    f"a chunk of {len(own)} tokens and its neighbours take {length} tokens, more than "
                    f"max_model_len={self.max_model_len}: use fewer neighbours or shorter chunks."
                )
            keys.append(ChunkKey.of(self.fingerprint, self.config.namespace, where.identity, own))
            todo[keys[-1]] = own, where
        known = self.store.known(list(todo))
        missing = [(key, *entry) for key, entry in todo.items() if key not in known]
        if missing:
            self._check_fits([len(m[1]) for m in missing])

        def behind(done: int, total: int) -> None:
            if progress and done:
                progress(offset + done, offset + total)

        self._compile_all(missing, behind)
        return keys

    def _compile_batch(self, part: Sequence[tuple[ChunkKey, tuple[int, ...], CompileContext]]) -> None:
        begin = time.perf_counter()
        kvs = self._compiler.compile([ids for _, ids, _ in part], [where for _, _, where in part], self._run_rows)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        token_seconds = (time.perf_counter() - begin) / sum(len(ids) for _, ids, _ in part)
        self._compile_token_seconds = token_seconds
        now = time.time()
        entries = []
        for (key, ids, where), kv in zip(part, kvs, strict=True):
            others = [self._info(n) for n in where.neighbours]
            info = ChunkInfo(
                key,
                self.config.namespace,
                self.fingerprint,
                content_digest(ids),
                where.name,
                ids,
                _seen(where, others),
                kv.nbytes,
                now,
                tuple(o.content for o in others),
                cost=token_seconds * len(ids),
                encoding=self.encoding,
            )
            entries.append((info, kv))
        self.store.put(entries)

    def estimate(
        self,
        chunks: Sequence[Sequence[int]],
        context: str | CompileContext | None = None,
        *,
        known_too: bool = False,
    ) -> CompileEstimate:
        """What :meth:`compile_many` would take for these chunks; known ones cost nothing unless ``known_too``.

        Measures the model's speed once, on a short chunk.
        """
        self._check_open()
        where = self.parse_context(context)
        keys = [ChunkKey.of(self.fingerprint, self.config.namespace, where.identity, ids) for ids in chunks]
        todo = list(dict(zip(keys, chunks, strict=True)).items()) if known_too else self._missing(chunks, keys)
        lengths = [len(ids) for _, ids in todo]
        seconds = self._token_seconds() if todo else 0.0
        return estimate(self.spec, lengths, self.config.rows_per_step, seconds, self.encoding)

    def _token_seconds(self) -> float:
        if self._seconds_per_token is None:
            length = min(256, self.max_model_len)
            ids = [(7 * i + 11) % self.spec.vocab_size for i in range(length)]
            for _ in range(2):  # the first run warms up
                start = time.perf_counter()
                self._compiler.compile([ids], CompileContext("isolated"), self._run_rows)
                self._seconds_per_token = (time.perf_counter() - start) / length
        assert self._seconds_per_token is not None
        return self._seconds_per_token

    def _check_fits(self, lengths: Sequence[int]) -> None:
        on_gpu = self.device.type == "cuda"
        check_fits(
            estimate(self.spec, lengths, self.config.rows_per_step, 0.0, self.encoding),
            disk_free=self.store.free_bytes(),
            memory_free=torch.cuda.mem_get_info(self.device)[0] if on_gpu else available_memory(),
            rows_per_step=self.config.rows_per_step,
        )

    def chunk(self, key: ChunkKey) -> CompiledChunk:
        """Look a compiled chunk up, with its KV.

        Raises
        ------
        ChunkNotFoundError
            If this model and namespace do not have it.
        """
        info = self._info(key)
        return CompiledChunk(key, info.token_ids, info.context_ids, self.store.load(key))

    def _info(self, key: ChunkKey) -> ChunkInfo:
        info = self.store.info(key)
        # A key says nothing to whoever guesses it: another tenant's chunk does not exist here.
        if info is None or info.namespace != self.config.namespace or info.fingerprint != self.fingerprint:
            raise ChunkNotFoundError(
                f"no compiled chunk {key} for this model in namespace {self.config.namespace!r}: compile its tokens."
            )
        return info

    def _resolve(self, prompt: Prompt) -> list[tuple[int, ...] | ChunkInfo]:
        """Check the prompt's segments; looks into the catalogue but touches no KV."""
        if isinstance(prompt, ChunkKey | str) or any(isinstance(s, int) for s in prompt):
            raise ConfigError("a prompt is a list of segments: [[token ids], chunk key, …].")
        resolved: list[tuple[int, ...] | ChunkInfo] = []
        for index, segment in enumerate(prompt):
            if isinstance(segment, ChunkKey):
                resolved.append(self._info(segment))
            elif len(segment):
                self._check_ids(segment, f"segment {index}")
                resolved.append(tuple(segment))
        if not resolved:
            raise ConfigError("the prompt is empty: give at least one token.")
        return resolved

    def erase(self, contents: Sequence[Sequence[int]]) -> int:
        """Forget every compiled form of some tokens in this namespace, and every chunk that saw them.

        Parameters
        ----------
        contents
            Token ids of chunks whose text is gone. What was compiled behind them would outlive them, so it goes, too:
            a chunk that had one of them as its neighbour falls back to its ``head`` form.

        Returns
        -------
        int
            Compiled chunks forgotten.
        """
        self._check_open()
        gone = self.store.erase(self.config.namespace, [content_digest(ids) for ids in contents])
        self._drop_deleted()
        return gone

    def forget(self, keys: Sequence[ChunkKey]) -> int:
        """Delete chunks of this namespace from the store; returns how many there were."""
        self._check_open()
        mine = [k for k in keys if (i := self.store.info(k)) is not None and i.namespace == self.config.namespace]
        gone = self.store.delete(mine)
        self._drop_deleted()
        return gone

    @abstractmethod
    def _drop_deleted(self) -> None:
        """Free the memory of chunks that the store no longer has."""


def _seen(context: CompileContext, neighbours: Sequence[ChunkInfo]) -> tuple[int, ...]:
    """The prompt behind which KV compiled in this context is exact; no prompt has token -1."""
    if len(neighbours) > 1:  # the second neighbour's stored KV did not see the first
        return (-1,)
    return context.token_ids + tuple(t for n in neighbours for t in n.token_ids)
