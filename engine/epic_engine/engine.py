"""The engine: compile, generate, stream, close. One lock, no globals."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from .attention.base import PrivateKV, SequenceRows
from .attention.torch_backend import TorchBackend
from .chunk_library import ChunkLibrary
from .chunks import ChunkKey
from .config import EngineConfig, SamplingParams
from .constraint import TokenConstraint, check_constraint
from .errors import (
    ConfigError,
    ContextLengthError,
)
from .linking.layout import Body, Layout, LinkPlan
from .linking.policies import LinkPolicy, parse_policy
from .linking.probe import Probe
from .memory.file_store import FileStore
from .memory.prefix_cache import PrefixCache
from .memory.residency import Residency
from .memory.store import ChunkInfo, ChunkStore, MemoryStore
from .model.decoder import AttentionStep, Decoder
from .model.loader import load_model
from .model.selftest import SelfTestReport, gate, run_selftest
from .request import Completion
from .stream import LinkedPrompt, Stream, StreamWork

__all__ = ["Engine", "Prompt"]

Prompt = Sequence[Sequence[int] | ChunkKey]


class Engine(ChunkLibrary):
    """Compiles token ids into relocatable KV, links them into prompts and generates.

    Any number of threads may use one engine; forward passes take turns.

    Parameters
    ----------
    model
        A folder, a hub id, a ``.gguf`` file (dequantised), the alias ``"smollm2"``, or a loaded Hugging Face model.
    tokenizer
        Tokenizer for a loaded model; needed for text and stop strings.
    store
        Directory of compiled chunks, a :class:`~epic_engine.memory.store.ChunkStore`, or None for memory.
    head
        Token ids of the prompt's head for ``context="head"``.
    attention
        ``"auto"`` or ``"torch"``.
    **options
        Fields of :class:`~epic_engine.config.EngineConfig`: device, dtype, max_model_len, namespace, context,
        policy, rows_per_step, prefix_cache_bytes, selftest.

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
        if attention not in ("auto", "torch"):
            raise ConfigError(f"attention={attention!r} is not available: use 'auto' or 'torch'.")
        self.policy = parse_policy(self.config.policy)
        loaded, found, device = load_model(
            model, tokenizer=tokenizer, device=self.config.device, dtype=self.config.dtype
        )
        decoder = Decoder(loaded, found, self.config.max_model_len)
        backend = TorchBackend(decoder)
        self.tokenizer = found
        self.selftest: SelfTestReport | None = gate(decoder, backend) if self.config.selftest else None
        self._prefixes = PrefixCache(self.config.prefix_cache_bytes)
        self._own_store = not isinstance(store, ChunkStore)
        opened = _open_store(store)
        try:
            super().__init__(decoder, backend, self.config, opened, Residency(device), head)
        except BaseException:
            if self._own_store:
                opened.close()
            raise

    # -- generating --------------------------------------------------------------------------------------------

    def generate(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        policy: str | LinkPolicy | None = None,
        constraint: TokenConstraint | None = None,
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
        stream = self.stream(prompt, sampling, policy=policy, constraint=constraint)
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
    ) -> Stream:
        """As :meth:`generate`, but yields tokens as they come.

        Bad input is refused here and not at the first token.

        Returns
        -------
        Stream
            Iterates over :class:`~epic_engine.request.StreamEvent`; ``close()`` cancels and frees everything;
            ``completion`` is there once it has ended.
        """
        begin = time.perf_counter()
        self._check_open()
        params = sampling or SamplingParams()
        if params.stop and self.tokenizer is None:
            raise ConfigError("stop strings need a tokenizer: pass tokenizer=… to Engine(), or use stop_token_ids.")
        if any(not 0 <= t < self.spec.vocab_size for t in params.logit_bias):
            raise ConfigError(f"logit_bias names tokens outside the vocabulary of {self.spec.vocab_size}.")
        check_constraint(constraint, params)
        chosen = self.policy if policy is None else parse_policy(policy)
        infos = self._resolve(prompt)
        self._check_length(infos, params.max_tokens)
        work = StreamWork(
            link=lambda: self._link(infos, chosen, params.max_tokens),
            step=lambda token, row: self._forward([token], [row], last=1)[-1],
            tokenizer=self.tokenizer,
            end_ids=self.spec.end_ids,
        )
        return Stream(work, params, str(chosen), begin, constraint)

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

    def link(self, prompt: Prompt, *, policy: str | LinkPolicy | None = None, room: int = 256) -> LinkedPrompt:
        """Link a prompt and stop there; for callers that decide themselves what follows.

        Parameters
        ----------
        prompt, policy
            As in :meth:`generate`.
        room
            Most tokens that :meth:`extend` will append.

        Returns
        -------
        LinkedPrompt
            Holds its KV until it is dropped.

        Raises
        ------
        ConfigError, ContextLengthError, ChunkNotFoundError
            As for :meth:`generate`.
        """
        self._check_open()
        chosen = self.policy if policy is None else parse_policy(policy)
        infos = self._resolve(prompt)
        self._check_length(infos, room)
        return self._link(infos, chosen, room)

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
            if ids:
                self._check_ids(ids, "a continuation")
            if linked.private.length + len(ids) > linked.private.capacity:
                left = linked.private.capacity - linked.private.length
                raise ConfigError(f"{len(ids)} tokens do not fit the {left} that are left: link with a larger room.")
        found: dict[int, list[Tensor]] = {i: [torch.empty(0, self.spec.vocab_size)] for i in range(len(batch))}
        for group in _steps([len(ids) for _, ids in batch], self.config.rows_per_step):
            rows: list[SequenceRows] = []
            tokens: list[int] = []
            for index, count in group:
                linked, ids = batch[index]
                done = sum(map(len, found[index]))
                at = len(linked.layout) + linked.appended
                rows.append(linked.rows(range(at, at + count)))
                tokens += ids[done : done + count]
            logits = self._forward(tokens, rows, last=len(tokens)).float().cpu()
            for (index, _), part in zip(group, logits.split([count for _, count in group]), strict=True):
                found[index].append(part)
        return [torch.cat(parts) for parts in found.values()]

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

    def _check_length(self, infos: Sequence[tuple[int, ...] | ChunkInfo], new: int) -> None:
        length = sum(len(i.token_ids if isinstance(i, ChunkInfo) else i) for i in infos)
        if length + new > self.max_model_len:
            raise ContextLengthError(
                f"the prompt has {length} tokens and {new} more are asked for, {length + new} in all, but "
                f"max_model_len={self.max_model_len}: retrieve fewer or shorter chunks, or lower max_tokens to "
                f"{max(self.max_model_len - length, 0)}."
            )

    def _link(self, infos: Sequence[tuple[int, ...] | ChunkInfo], policy: LinkPolicy, room: int) -> LinkedPrompt:
        begin = time.perf_counter()
        parts: list[tuple[Sequence[int], Body | None]] = []
        for item in infos:
            if isinstance(item, ChunkInfo):
                kv = self._residency.on_device(item.key, self.store.load)
                parts.append((item.token_ids, Body(kv, item.context_ids)))
            else:
                parts.append((item, None))
        loaded = time.perf_counter()
        layout = policy.arrange(Layout(parts), self._prefixes)
        probe = Probe(self.decoder, self.backend, self._run_step, self.config.rows_per_step)
        choice = policy.choose(layout, probe)
        plan = LinkPlan(layout, choice.recompute, choice.damp)
        private = PrivateKV(self.spec, len(plan.rows) + room, self.device)
        linked = LinkedPrompt(layout, plan, private, str(policy), probe.rows)
        ids, step = plan.row_ids, self.config.rows_per_step
        for at in range(0, len(ids), step):
            rows = linked.rows(plan.rows[at : at + step])
            last = at + step >= len(ids)
            linked.logits = self._forward(ids[at : at + step], [rows], last=1 if last else 0)
        if policy.caches_prompt and plan.recomputed == 0:
            start = len(layout) - len(plan.rows)
            self._prefixes.insert(layout.token_ids, private.kv[:, :, :, : len(plan.rows)], start)
        linked.load_seconds = loaded - begin
        linked.link_seconds = time.perf_counter() - loaded
        return linked

    def _forward(self, ids: Sequence[int], batch: list[SequenceRows], last: int) -> Tensor:
        """One forward pass; returns the logits of the last rows, ``(last, vocab)`` (nothing for ``last=0``)."""
        with self._lock:
            self._check_open()
            plan = self.backend.plan(batch)
            positions = [p for rows in batch for p in rows.positions]
            if last:
                logits = self.decoder.logits(ids, positions, plan, last=last)
            else:
                self.decoder.run(ids, positions, plan)
                logits = torch.empty(0, self.spec.vocab_size)
            plan.commit()
            return logits

    def _run_step(self, ids: Sequence[int], positions: Sequence[int], step: AttentionStep) -> None:
        with self._lock:
            self._check_open()
            self.decoder.run(ids, positions, step)

    def run_selftest(self) -> SelfTestReport:
        """Compare the engine with the untouched model now, whatever was found before (see ``epic-rag doctor``)."""
        self._check_open()
        with self._lock:
            return run_selftest(self.decoder, self.backend)

    # -- life --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Free the KV and close the store, unless the store was passed in open. Closing twice is fine."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._prefixes.clear()
            self._residency.clear()
            if self._own_store:
                self.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _steps(lengths: Sequence[int], most: int) -> Iterator[list[tuple[int, int]]]:
    """Forward passes of at most ``most`` rows: pairs of sequence and rows, every sequence at most once a pass."""
    group: list[tuple[int, int]] = []
    room = most
    for index, length in enumerate(lengths):
        while length:
            count = min(length, room)
            group.append((index, count))
            length, room = length - count, room - count
            if not room:
                yield group
                group, room = [], most
    if group:
        yield group


def _open_store(store: str | os.PathLike[str] | ChunkStore | None) -> ChunkStore:
    if store is None:
        return MemoryStore()
    return store if isinstance(store, ChunkStore) else FileStore(Path(store))
