"""Measures examples under every policy, compile context and type of stored KV, against full computation of the same
token ids.

Per example, ``full`` comes first: its greedy answer, and its predictions of that answer and of the gold answer. Each
other arm then predicts the same tokens (teacher forcing) behind the same prompt, linked::

    [head: exact][document: compiled]…[question: computed] │ full's answer, its end │  → KL, agreement
                                                           │ gold answer            │  → likelihood

What stored KV loses in a narrower type is measured against the same arm with KV as the model computes it, too: linking
moves answers further than rounding does, and would hide it.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from epic_engine import ChunkKey, Engine, LinkedPrompt, RequestStats, __version__, parse_policy
from epic_engine.detokenizer import Detokenizer
from epic_engine.errors import ConfigError, ContextLengthError
from numpy.typing import NDArray
from torch import Tensor

from epic_rag.compiling import parse_context_name
from epic_rag.errors import RagError
from epic_rag.evaluation.example import EvalExample
from epic_rag.evaluation.metrics import kl_divergence, negative_log_likelihood, score_answer, top1_agreement
from epic_rag.evaluation.records import ArmResult, ExampleResult, RecordFile, compiled_label
from epic_rag.evaluation.stores import DataSetStores, DocumentStore
from epic_rag.prompt import PromptComposer
from epic_rag.retrieval import Embedder

__all__ = ["Arm", "EvalSettings", "Evaluation"]

Prompt = list[tuple[int, ...] | ChunkKey]
Progress = Callable[[int, int], None]

_FORMAT = 3


@dataclass(frozen=True)
class EvalSettings:
    """What is compared.

    Attributes
    ----------
    dataset, seed
        Name or path of the data set and its seed, as given; for the record.
    policies
        String forms; ``full`` always runs, named or not.
    contexts
        Compile contexts in string form.
    kv_dtypes
        What compiled chunks are kept as: values of :attr:`EngineConfig.kv_dtype <epic_engine.EngineConfig>`; none is
        the engine's own.
    max_tokens
        Longest greedy answer.
    """

    dataset: str
    policies: tuple[str, ...]
    contexts: tuple[str, ...] = ("isolated",)
    seed: int = 0
    max_tokens: int = 32
    kv_dtypes: tuple[str, ...] = ()


class Arm(NamedTuple):
    """What is compared: a policy, and how chunks are compiled and kept.

    Attributes
    ----------
    policy, context
        In string form; the context is empty where compiled chunks are not used.
    kv_dtype
        What chunks are kept as.
    """

    policy: str
    context: str
    kv_dtype: str = "auto"


@dataclass(frozen=True)
class _Linked:
    """One prompt linked under one arm."""

    arm: Arm
    engine: Engine
    linked: LinkedPrompt
    seconds: float


class Evaluation:
    """Runs one comparison on one model.

    Parameters
    ----------
    engine
        With a tokenizer. What the evaluation compiles is forgotten again.
    settings
        What is compared.
    embedder
        For compile contexts that look for similar chunks.
    store
        Where documents are compiled; by default the stores that the data set speaks of.
    engines
        Further engines of the same model by their ``kv_dtype``; see :func:`~epic_rag.evaluation.engines.engines_of`.

    Raises
    ------
    ConfigError
        If a policy or context is unknown, nothing is to be compared, a ``kv_dtype`` has no engine, or neighbours are
        asked for without embedder.
    """

    def __init__(
        self,
        engine: Engine,
        settings: EvalSettings,
        *,
        embedder: Embedder | None = None,
        store: DocumentStore | None = None,
        engines: Mapping[str, Engine] | None = None,
    ) -> None:
        if engine.tokenizer is None:
            raise ConfigError("an evaluation asks questions in words: pass tokenizer=… to Engine().")
        if not settings.contexts:
            raise ConfigError("there is no compile context to compare: name at least one, such as 'isolated'.")
        self.engine = engine
        self.engines = {**(engines or {}), engine.config.kv_dtype: engine}
        self.settings = settings
        kv_dtypes = tuple(dict.fromkeys(settings.kv_dtypes)) or (engine.config.kv_dtype,)
        for kv_dtype in kv_dtypes:
            if kv_dtype not in self.engines:
                raise ConfigError(f"no engine keeps chunks as {kv_dtype!r}: pass engines=… of engines_of().")
        self.store = store or DataSetStores(engine, PromptComposer(engine.tokenizer), embedder)
        self.stores = {name: self.store if e is engine else self.store.on(e) for name, e in self.engines.items()}
        self.composer = self.store.composer
        self._composers: dict[str | None, PromptComposer] = {None: self.composer}
        self._ends = frozenset(self.composer.stop_token_ids) | engine.spec.end_ids
        policies = list(dict.fromkeys(str(parse_policy(p)) for p in settings.policies))
        alone = [p for p in policies if p != "full" and parse_policy(p).caches_prompt]
        linked = [p for p in policies if p != "full" and p not in alone]
        contexts = dict.fromkeys(settings.contexts)
        self._wants_neighbours = any(parse_context_name(c)[0] == "neighbours" for c in contexts)
        if store is None and embedder is None and self._wants_neighbours:
            raise ConfigError("neighbours are chosen by their embeddings: pass embedder=… to Evaluation().")
        self.arms = [Arm("full", ""), *(Arm(p, "") for p in alone)]
        self.arms += [Arm(p, context, kept) for context in contexts for p in linked for kept in kv_dtypes]

    @property
    def fingerprint(self) -> dict[str, Any]:
        """Everything that the figures depend on, the examples themselves aside."""
        return {
            "format": _FORMAT,
            "version": __version__,
            **asdict(self.settings),
            "kv_dtypes": list(dict.fromkeys(arm.kv_dtype for arm in self.arms if arm.context)),
            "policies": [f"{p} @ {compiled_label(c, kept)}" if c else p for p, c, kept in self.arms],
            "model": self.engine.fingerprint,
            "dtype": str(self.engine.spec.dtype).removeprefix("torch."),
            "device": self.engine.device.type,
            "threads": torch.get_num_threads(),
            "head": list(self.composer.head_ids),
        }

    def run(
        self,
        examples: Sequence[EvalExample],
        *,
        records: Path | None = None,
        progress: Progress | None = None,
    ) -> list[ExampleResult]:
        """Measure all examples.

        Parameters
        ----------
        examples
            In any order; neighbours with the same documents share their compiled chunks.
        records
            File to which each result is appended; results that it holds already are not measured again.
        progress
            Called with examples done and their total, first with those done before.

        Returns
        -------
        list of ExampleResult
            In the order of ``examples``.

        Raises
        ------
        RagError
            If the file holds results of other settings, or two examples are the same.
        """
        digests = [example.digest for example in examples]
        if len(set(digests)) < len(digests):
            twice = next(e.example_id for e, d in zip(examples, digests, strict=True) if digests.count(d) > 1)
            raise RagError(f"example {twice!r} stands in the data set more than once: give each an id of its own.")
        settings = self.fingerprint
        if self._wants_neighbours:  # any further document may be a nearer neighbour
            settings["corpus"] = hashlib.sha256("".join(sorted(digests)).encode()).hexdigest()[:16]
        if records is None:
            found = self._run(examples, {}, None, progress)
        else:
            with RecordFile(records, settings) as file:
                found = self._run(examples, file.found, file, progress)
        return [found[digest] for digest in digests]

    def _run(
        self,
        examples: Sequence[EvalExample],
        earlier: dict[str, ExampleResult],
        file: RecordFile | None,
        progress: Progress | None,
    ) -> dict[str, ExampleResult]:
        found = {e.digest: earlier[e.digest] for e in examples if e.digest in earlier}
        pending = [e for e in examples if e.digest not in found]
        before = {info.key for engine in self.engines.values() for info in engine.store.entries()}
        if progress:
            progress(len(found), len(examples))
        if pending:
            self.store.gather(examples)
        try:
            for number, example in enumerate(pending):
                result = found[example.digest] = self.measure(example)
                if file is not None:
                    file.append(result)
                following = pending[number + 1 : number + 2]
                if not following or set(following[0].documents) != set(example.documents):
                    self._forget_but(before)
                if progress:
                    progress(len(found), len(examples))
        finally:
            self._forget_but(before)
        return found

    def _forget_but(self, before: set[ChunkKey]) -> None:
        for engine in self.engines.values():
            engine.forget([info.key for info in list(engine.store.entries()) if info.key not in before])

    def measure(self, example: EvalExample) -> ExampleResult:
        """Measure one example under every arm; a prompt that does not fit the model is skipped and says so."""
        composer = self._composer(example.system)
        parts = [composer.encode_chunk(text) for text in example.documents]
        tail = composer.tail_ids(example.question)
        gold = self._gold_ids(composer, tail, example)
        length = sum(map(len, (composer.head_ids, *parts, tail)))
        if length + max(self.settings.max_tokens, len(gold)) > self.engine.max_model_len:
            why = f"the prompt has {length} tokens, max_model_len is {self.engine.max_model_len}"
            return ExampleResult(example.example_id, example.digest, dict(example.group), skipped=why)
        plain: Prompt = [composer.head_ids, *parts, tail]
        try:
            prompts = {
                (context, kept): [*self.link(composer, parts, example, context, kept), tail]
                for context, kept in dict.fromkeys((arm.context, arm.kv_dtype) for arm in self.arms if arm.context)
            }
        except ContextLengthError as error:
            return ExampleResult(example.example_id, example.digest, dict(example.group), skipped=str(error))
        room = max(self.settings.max_tokens, len(gold))
        arms = [self._linked(prompts.get((arm.context, arm.kv_dtype), plain), arm, room) for arm in self.arms]
        results = self._compare(arms, example, gold)
        return ExampleResult(example.example_id, example.digest, dict(example.group), tuple(results))

    def _composer(self, system: str | None) -> PromptComposer:
        if system not in self._composers:
            self._composers[system] = PromptComposer(self.engine.tokenizer, system or "")
        return self._composers[system]

    def _gold_ids(self, composer: PromptComposer, tail: tuple[int, ...], example: EvalExample) -> tuple[int, ...]:
        """The first answer as the model would write it: behind a space where the prompt does not end in one."""
        if not example.answers:
            return ()
        lead = "" if composer.text_of([tail])[-1:].isspace() else " "
        return tuple(composer.tokenizer.encode_text(lead + example.answers[0]))

    def link(
        self,
        composer: PromptComposer,
        parts: Sequence[tuple[int, ...]],
        example: EvalExample,
        context: str,
        kv_dtype: str | None = None,
    ) -> Prompt:
        """Compile a prompt's head and documents; returns all of its segments but the tail."""
        kv_dtype = kv_dtype or self.engine.config.kv_dtype
        head = self.engines[kv_dtype].compile(composer.head_ids, "isolated")
        # Documents are compiled under the default head whatever the request's: a store outlives its requests.
        return [head, *self.stores[kv_dtype].keys(example, parts, context)]

    def _linked(self, prompt: Prompt, arm: Arm, room: int) -> _Linked:
        engine = self.engines[arm.kv_dtype] if arm.context else self.engine
        begin = time.perf_counter()
        linked = engine.link(prompt, policy=arm.policy, room=room)
        return _Linked(arm, engine, linked, time.perf_counter() - begin)

    def _compare(self, arms: Sequence[_Linked], example: EvalExample, gold: tuple[int, ...]) -> list[ArmResult]:
        """Answers of all arms, and how well they predict those of the first, which is ``full``."""
        answers = self._answers(arms)
        # The end of an answer is a prediction too. Any id stands for it: the last one of a continuation is not read.
        own, ended = answers[0]
        predictions = self._predictions(arms, (*own, *sorted(self._ends)[:1]) if ended else own)
        likelihood = self._predictions(arms, gold) if gold else [None] * len(arms)
        unrounded = {a.arm[:2]: p for a, p in zip(arms, predictions, strict=True) if a.arm.kv_dtype == "auto"}
        results = []
        for linked, (tokens, _), logits, golden in zip(arms, answers, predictions, likelihood, strict=True):
            stats = RequestStats()
            linked.linked.count(stats)
            text = self._text(tokens)
            agree = top1_agreement(predictions[0], logits)
            arm = linked.arm
            same = None if arm.kv_dtype == "auto" else unrounded.get(arm[:2])
            results.append(
                ArmResult(
                    policy=stats.policy,
                    context=arm.context,
                    answer=text.strip(),
                    score=score_answer(example.scorer, text, example.answers) if example.answers else None,
                    kl=float(kl_divergence(predictions[0], logits).mean()),
                    agreement=float(agree.mean()),
                    first_token=bool(agree[0]),
                    nll=None if golden is None else float(negative_log_likelihood(golden, gold).mean()),
                    prompt=stats.prompt,
                    rows=stats.rows,
                    recomputed=stats.recomputed,
                    ttft_s=linked.seconds,
                    kv_dtype=arm.kv_dtype,
                    kv_kl=None if same is None else float(kl_divergence(same, logits).mean()),
                    kv_agreement=None if same is None else float(top1_agreement(same, logits).mean()),
                )
            )
        return results

    def _answers(self, arms: Sequence[_Linked]) -> list[tuple[tuple[int, ...], bool]]:
        """Greedy answers, all prompts a token at a time together, and whether each ended by itself."""
        logits = [arm.linked.logits for arm in arms]
        tokens: list[list[int]] = [[] for _ in arms]
        ended = [False] * len(arms)
        going = list(range(len(arms)))
        for left in reversed(range(self.settings.max_tokens)):
            for i in going:
                token = int(logits[i][-1].argmax())
                ended[i] = token in self._ends
                if not ended[i]:
                    tokens[i].append(token)
            going = [i for i in going if not ended[i]]
            if not (going and left):
                break
            for i, row in zip(going, _extend([(arms[i], tokens[i][-1:]) for i in going]), strict=True):
                logits[i] = row
        return [(tuple(t), e) for t, e in zip(tokens, ended, strict=True)]

    def _text(self, tokens: Sequence[int]) -> str:
        detokenizer = Detokenizer(self.engine.tokenizer)
        for token in tokens:
            detokenizer.push(token)
        detokenizer.finish()
        return detokenizer.text

    def _predictions(self, arms: Sequence[_Linked], tokens: Sequence[int]) -> list[NDArray[np.float32]]:
        """Per arm the logits that predict the given tokens behind its prompt, ``(tokens, vocab)``."""
        for arm in arms:
            arm.linked.rewind()
        behind = _extend([(arm, tokens[:-1]) for arm in arms])
        return [
            torch.cat([arm.linked.logits.float().cpu(), rows]).numpy() for arm, rows in zip(arms, behind, strict=True)
        ]


def _extend(batch: Sequence[tuple[_Linked, Sequence[int]]]) -> list[Tensor]:
    """As :meth:`Engine.extend <epic_engine.Engine.extend>`, each prompt on its own engine."""
    found: dict[int, Tensor] = {}
    for engine in dict.fromkeys(arm.engine for arm, _ in batch):
        mine = [i for i, (arm, _) in enumerate(batch) if arm.engine is engine]
        rows = engine.extend([(batch[i][0].linked, batch[i][1]) for i in mine])
        found.update(zip(mine, rows, strict=True))
    return [found[i] for i in range(len(batch))]
