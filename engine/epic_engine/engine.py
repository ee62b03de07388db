"""The engine: compile, generate, stream, close. One lock, no globals."""

from __future__ import annotations

import copy
import os
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Self, TypeVar, Unpack

import torch
from torch import Tensor

from .attention.base import SequenceRows
from .attention.select import BACKENDS, make_backend
from .chunk_library import ChunkLibrary, Prompt
from .chunks import ChunkKey
from .config import EngineConfig, SamplingParams
from .constraint import TokenConstraint, check_constraint
from .errors import ConfigError, ContextLengthError
from .linking.linked import LinkedPrompt
from .linking.linker import LinkRequest
from .linking.policies import LinkPolicy, parse_policy
from .model.decoder import Decoder
from .model.loader import load_model
from .model.selftest import SelfTestReport, gate, run_selftest
from .request import Completion
from .request_options import Options, RequestOptions
from .scheduling.batching import steps
from .scheduling.generation import Generation
from .scheduling.jobs import LinkJob
from .scheduling.serving import Serving
from .storage.opening import open_store
from .storage.store import ChunkStore
from .stream import Stream

__all__ = ["Engine", "Prompt"]

Result = TypeVar("Result")


class Engine(ChunkLibrary):
    """Compiles token ids into relocatable KV, links them into prompts and generates.

    Any number of threads and event loops may use one engine. It serves their requests together: the next tokens of
    all of them are computed in one pass, and a chunk that several read is read once for all.

    Parameters
    ----------
    model
        A folder, a hub id, a ``.gguf`` file (dequantised), the alias ``"smollm2"``, or a loaded Hugging Face model.
    tokenizer
        Tokenizer for a loaded model; needed for text and stop strings.
    store
        Directory of compiled chunks, a :class:`~epic_engine.storage.store.ChunkStore`, or None for memory.
    head
        Token ids of the prompt's head for ``context="head"``.
    attention
        ``"auto"`` (Triton on a GPU that it supports, else torch), ``"triton"`` or ``"torch"``.
    **options
        Fields of :class:`~epic_engine.config.EngineConfig`: device, dtype, max_model_len, namespace, context,
        policy, rows_per_step, prefix_cache_bytes, memory, page_size, chunk_placement, kv_dtype, step_seconds,
        stall_seconds, max_running, cuda_graphs, selftest.

    Raises
    ------
    ModelLoadError
        If the model is not found or unreadable; :class:`~epic_engine.errors.UnsupportedModelError` if it cannot be
        served exactly.
    SelfTestError
        If the engine's numbers differ from the untouched model's.
    ConfigError
        If an option is unknown or cannot be used.
    """

    def __init__(
        self,
        model: Any,
        *,
        tokenizer: Any = None,
        store: str | os.PathLike[str] | ChunkStore | None = None,
        head: Sequence[int] = (),
        attention: str = "auto",
        **options: Any,
    ) -> None:
        try:
            self.config = EngineConfig(**options)
        except TypeError as error:
            known = ", ".join(sorted(EngineConfig.__dataclass_fields__))
            raise ConfigError(f"{error}. Known options: tokenizer, store, head, attention, {known}.") from None
        if attention not in BACKENDS:  # before weights are loaded
            raise ConfigError(f"attention={attention!r} is not available: use {', '.join(map(repr, BACKENDS))}.")
        self.policy = parse_policy(self.config.policy)
        loaded, found, _ = load_model(model, tokenizer=tokenizer, device=self.config.device, dtype=self.config.dtype)
        decoder = Decoder(loaded, found, self.config.max_model_len)
        backend = make_backend(attention, decoder, self.config.page_size)
        self.tokenizer = found
        self.selftest: SelfTestReport | None = gate(decoder, backend) if self.config.selftest else None
        self._of: Engine | None = None
        self._own_store = not isinstance(store, ChunkStore)
        opened = open_store(store)
        try:
            super().__init__(decoder, backend, self.config, opened, head)
            self._serving = Serving(decoder, backend, self.config, opened, self._compiler)
        except BaseException:
            if self._own_store:
                opened.close()
            raise
        self._loop = self._serving.loop
        self.metrics = self._serving.metrics
        # An engine that nobody holds any more ends its thread; the loop knows nothing of the engine.
        weakref.finalize(self, self._loop.stop).atexit = False

    # -- generating --------------------------------------------------------------------------------------------

    def generate(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        policy: str | LinkPolicy | None = None,
        constraint: TokenConstraint | None = None,
        **options: Unpack[RequestOptions],
    ) -> Completion:
        """Link a prompt and generate.

        Parameters
        ----------
        prompt
            Segments in order: token ids (computed) or keys of compiled chunks (linked). Any mix, any order, the
            same chunk twice.
        sampling
            How to draw tokens; greedy by default.
        policy
            Link policy; None takes the engine's default.
        constraint
            Limits which tokens may be drawn; it has state, so each generation needs its own. Log-probabilities
            stay those of the model without it.
        options
            See :class:`RequestOptions`.

        Raises
        ------
        ContextLengthError
            If prompt and ``max_tokens`` exceed ``max_model_len``; before any work.
        ChunkNotFoundError
            If a key is unknown.
        ConfigError
            If the prompt is empty, ids lie outside the vocabulary, the policy is unknown, or a constraint allows no
            token or comes with ``ignore_eos``.
        """
        with self.stream(prompt, sampling, policy=policy, constraint=constraint, **options) as stream:
            for _ in stream:
                pass
        return stream.completion

    def stream(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        policy: str | LinkPolicy | None = None,
        constraint: TokenConstraint | None = None,
        **options: Unpack[RequestOptions],
    ) -> Stream:
        """As :meth:`generate`, but yields tokens as they come.

        Bad input is refused here and not at the first token. Work begins at once and goes on whether or not the
        stream is read; many streams run together.

        Returns
        -------
        Stream
            Iterates over :class:`~epic_engine.request.StreamEvent`; ``close()`` cancels and frees everything;
            ``completion`` is there once it has ended.
        """
        return self.streams(prompt, sampling, 1, policy=policy, constraint=constraint, **options)[0]

    def streams(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        n: int = 2,
        *,
        policy: str | LinkPolicy | None = None,
        constraint: TokenConstraint | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[Stream]:
        """Several answers to one prompt, which is linked once and whose memory they share.

        Parameters
        ----------
        prompt, policy, options
            As in :meth:`generate`.
        sampling
            As there; a seed is raised by one from answer to answer.
        n
            How many.
        constraint
            Only for ``n=1``, because it has state.
        """
        begin = time.perf_counter()
        self._check_open()
        params = sampling or SamplingParams()
        if n < 1 or (n > 1 and constraint is not None):
            raise ConfigError(f"n={n}: ask for at least 1 answer, and for only 1 with a constraint.")
        if params.stop and self.tokenizer is None:
            raise ConfigError("stop strings need a tokenizer: pass tokenizer=… to Engine(), or use stop_token_ids.")
        if any(not 0 <= t < self.spec.vocab_size for t in params.logit_bias):
            raise ConfigError(f"logit_bias names tokens outside the vocabulary of {self.spec.vocab_size}.")
        check_constraint(constraint, params)
        wanted = Options(**options)
        job = self._job(prompt, policy, params.max_tokens, wanted.after)
        job.priority, job.expected = wanted.priority, params.max_tokens
        if wanted.timeout is not None:
            job.deadline = begin + wanted.timeout
        for index in range(n):
            mine = params if params.seed is None or not index else replace(params, seed=params.seed + index)
            job.generations.append(
                Generation(
                    mine,
                    self.tokenizer,
                    self.spec.end_ids,
                    str(job.request.policy),
                    begin,
                    constraint,
                    metrics=self.metrics,
                    keep=wanted.keep,
                )
            )
            self.metrics.request_submitted()
        self._loop.submit(job)
        return [Stream(generation, self._loop.notice) for generation in job.generations]

    def _job(self, prompt: Prompt, policy: str | LinkPolicy | None, new: int, after: LinkedPrompt | None) -> LinkJob:
        """Check a prompt and lay a job out for it; ``new`` tokens will follow."""
        if after is not None:
            self._check_own(after)
        if after is not None and after.closed:
            raise ConfigError("the prompt to continue was closed: keep it open until its last turn has begun.")
        chosen = self.policy if policy is None else parse_policy(policy)
        if after is not None and chosen.caches_prompt:
            raise ConfigError(f"policy {str(chosen)!r} cannot continue a prompt: its cache finds the prompt again.")
        request = LinkRequest(tuple(self._resolve(prompt)), chosen, after, self.config.namespace)
        if len(request) + new > self.max_model_len:
            raise ContextLengthError(
                f"the prompt has {len(request)} tokens and {new} more are asked for, {len(request) + new} in all, but "
                f"max_model_len={self.max_model_len}: retrieve fewer or shorter chunks, or lower max_tokens to "
                f"{max(self.max_model_len - len(request), 0)}."
            )
        return self._serving.job(request, new)

    def score(self, prompt: Prompt, continuation: Sequence[int], *, policy: str | LinkPolicy | None = None) -> Tensor:
        """Logits that predict each token of a given continuation (teacher forcing).

        Parameters
        ----------
        prompt
            As in :meth:`generate`.
        continuation
            Token ids that follow the prompt; at least one.
        policy
            Link policy; None takes the engine's default.

        Returns
        -------
        Tensor
            ``(len(continuation), vocab)`` float32 on the CPU; row i predicts ``continuation[i]``.
        """
        return self.score_many(prompt, [continuation], policy=policy)[0]

    def score_many(
        self, prompt: Prompt, continuations: Sequence[Sequence[int]], *, policy: str | LinkPolicy | None = None
    ) -> list[Tensor]:
        """As :meth:`score` for several continuations of one prompt, which is linked once.

        Returns
        -------
        list of Tensor
            One per continuation, as :meth:`score` gives it.
        """
        for continuation in continuations:
            self._check_ids(continuation, "the continuation")
        linked = self.link(prompt, policy=policy, room=max(map(len, continuations), default=0))
        first = linked.logits.float().cpu()
        found = []
        for continuation in continuations:
            linked.rewind()
            found.append(torch.cat([first, *self.extend([(linked, continuation[:-1])])]))
        return found

    def link(
        self,
        prompt: Prompt,
        *,
        policy: str | LinkPolicy | None = None,
        room: int = 256,
        after: LinkedPrompt | None = None,
    ) -> LinkedPrompt:
        """Link a prompt and stop there; for callers that decide themselves what follows.

        Parameters
        ----------
        prompt, policy
            As in :meth:`generate`.
        room
            Most tokens that :meth:`extend` will append.
        after
            Continue this prompt; its memory is shared.

        Returns
        -------
        LinkedPrompt
            Holds its KV until it is closed or dropped.

        Raises
        ------
        ConfigError, ContextLengthError, ChunkNotFoundError
            As for :meth:`generate`.
        """
        self._check_open()
        job = self._job(prompt, policy, room, after)
        job.room = max(room, 1)
        found: Future[LinkedPrompt] = Future()
        job.done, job.failed = found.set_result, found.set_exception
        self._loop.submit(job)
        try:
            linked = found.result()
            linked.room = room
            return linked
        except BaseException:
            job.cancelled = True  # an interrupted caller: what is under way is let go
            self._loop.notice()
            raise

    def extend(self, batch: Sequence[tuple[LinkedPrompt, Sequence[int]]]) -> list[Tensor]:
        """Append tokens to linked prompts, all of them in shared forward passes.

        Parameters
        ----------
        batch
            Linked prompts, each once, and the token ids that are appended; none is fine.

        Returns
        -------
        list of Tensor
            Per prompt ``(tokens, vocab)`` float32 on the CPU; row i predicts what follows token i.

        Raises
        ------
        ConfigError
            If ids lie outside the vocabulary, a prompt stands in the batch twice, or its room is used up.
        """
        if len({id(linked) for linked, _ in batch}) < len(batch):
            raise ConfigError("a linked prompt stands in the batch twice: append its tokens one after the other.")
        for linked, ids in batch:
            self._check_own(linked)
            if ids:
                self._check_ids(ids, "a continuation")
            if linked.closed:
                raise ConfigError("a linked prompt was closed: link it again.")
            left = linked.room - len(linked.appended_ids)
            if len(ids) > left:
                raise ConfigError(f"{len(ids)} tokens do not fit the {left} that are left: link with a larger room.")
        found: dict[int, list[Tensor]] = {i: [torch.empty(0, self.spec.vocab_size)] for i in range(len(batch))}
        for group in steps([len(ids) for _, ids in batch], self.config.rows_per_step):
            rows: list[SequenceRows] = []
            tokens: list[int] = []
            for index, count in group:
                linked, ids = batch[index]
                done = sum(map(len, found[index]))
                at = len(linked)
                rows.append(linked.rows(range(at, at + count)))
                tokens += ids[done : done + count]
            logits = self._forward(tokens, rows, last=len(tokens)).float().cpu()
            for (index, count), part in zip(group, logits.split([count for _, count in group]), strict=True):
                linked, ids = batch[index]
                done = sum(map(len, found[index]))
                linked.appended_ids += ids[done : done + count]
                found[index].append(part)
        return [torch.cat(parts) for parts in found.values()]

    def _check_own(self, linked: LinkedPrompt) -> None:
        if linked.namespace != self.config.namespace:
            raise ConfigError("a linked prompt belongs to another namespace: link it in this one.")

    def _forward(self, ids: Sequence[int], batch: list[SequenceRows], last: int) -> Tensor:
        """One forward pass; returns the logits of the last rows, ``(last, vocab)`` (nothing for ``last=0``)."""
        self._check_open()
        return self._loop.forward(ids, batch, last)

    def _drop_deleted(self) -> None:
        residency = self._serving.residency
        residency.forget([key for key in residency.resident() if self.store.info(key) is None])

    def prefetch(self, keys: Sequence[ChunkKey]) -> None:
        """Begin to load chunks that will be linked soon, such as those a retriever has just found. Returns at once."""
        self._check_open()
        self._serving.residency.prefetch([key for key in keys if self.has(key)])

    def pin(self, keys: Sequence[ChunkKey]) -> None:
        """Load chunks and keep them in memory until :meth:`unpin`.

        Raises
        ------
        ChunkNotFoundError
            If this model and namespace do not have one.
        OutOfPagesError
            If they do not fit beside what is in use.
        """
        self._check_open()
        self._serving.residency.pin([self._info(key).key for key in keys])

    def unpin(self, keys: Sequence[ChunkKey]) -> None:
        """Let pinned chunks go when memory is needed."""
        self._check_open()
        self._serving.residency.unpin([key for key in keys if self.has(key)])

    def stats(self) -> dict[str, Any]:
        """Requests, tokens, latencies, queues and memory; see :meth:`~epic_engine.metrics.Metrics.stats`."""
        return self.metrics.stats()

    def call(self, work: Callable[[], Result]) -> Result:
        """Run something on the thread that runs the forward passes, between two of them; for profilers and tests."""
        self._check_open()
        return self._loop.call(work)

    def drain(self) -> None:
        """Return once every request has ended and its memory is free."""
        self._loop.drain()

    def check_integrity(self) -> None:
        """Compare the counts of pages with the memory behind them; for tests.

        Raises
        ------
        AssertionError
            If they differ.
        """
        self._serving.residency.check_integrity()

    def run_selftest(self) -> SelfTestReport:
        """Compare the engine with the untouched model now, whatever was found before (see ``epic-rag doctor``)."""
        self._check_open()
        return self._loop.call(lambda: run_selftest(self.decoder, self.backend))

    # -- life --------------------------------------------------------------------------------------------------

    def for_namespace(self, namespace: str) -> Engine:
        """This engine for another tenant: the same model, memory and queues, and other chunks.

        Closing what is returned does nothing: it is closed with this one.

        Raises
        ------
        ConfigError
            If the name cannot be used.
        """
        self._check_open()
        other = copy.copy(self)
        other.config = replace(self.config, namespace=namespace)
        other._of = self
        return other

    def close(self) -> None:
        """End all requests, free the KV and close the store, unless the store was passed in open.

        Closing twice is fine.
        """
        if self._of is not None:
            return
        with self._lock:
            if self._closed.is_set():
                return
            self._closed.set()
        self._serving.close()
        if self._own_store:
            self.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
