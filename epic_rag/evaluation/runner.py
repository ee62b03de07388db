"""Measures examples under every policy and compile context, against full computation of the same token ids.

Per example, ``full`` comes first: its greedy answer, and its predictions of that answer and of the gold answer. Each
other arm then predicts the same tokens (teacher forcing) behind the same prompt, linked::

    [head: exact][document: compiled]…[question: computed] │ full's answer, its end │  → KL, agreement
                                                           │ gold answer            │  → likelihood
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from epic_engine import ChunkKey, Completion, Engine, SamplingParams, parse_policy
from epic_engine.errors import ConfigError, ContextLengthError
from numpy.typing import NDArray

from epic_rag.compiling import compile_chunks, parse_context_name
from epic_rag.errors import RagError
from epic_rag.evaluation.example import EvalExample
from epic_rag.evaluation.metrics import kl_divergence, negative_log_likelihood, score_answer, top1_agreement
from epic_rag.evaluation.records import ArmResult, ExampleResult, RecordFile
from epic_rag.prompt import PromptComposer
from epic_rag.retrieval import Embedder

__all__ = ["EvalSettings", "Evaluation", "Target"]

Prompt = list[tuple[int, ...] | ChunkKey]
Progress = Callable[[int, int], None]

_FORMAT = 1


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
    max_tokens
        Longest greedy answer.
    """

    dataset: str
    policies: tuple[str, ...]
    contexts: tuple[str, ...] = ("isolated",)
    seed: int = 0
    max_tokens: int = 32


@dataclass(frozen=True)
class Target:
    """What all arms of an example predict.

    Attributes
    ----------
    example
        The example.
    gold
        Ids of the gold answer; empty without accepted answers.
    own
        Ids of full computation's greedy answer and, where it ended by itself, one more for its end.
    logits
        Full computation's predictions of ``own``, ``(len(own), vocab)``.
    """

    example: EvalExample
    gold: tuple[int, ...]
    own: tuple[int, ...]
    logits: NDArray[np.float32]


class Evaluation:
    """Runs one comparison on one engine.

    Parameters
    ----------
    engine
        With a tokenizer. What the evaluation compiles is forgotten again.
    settings
        What is compared.
    embedder
        For compile contexts that look for similar chunks.

    Raises
    ------
    ConfigError
        If a policy or context is unknown, nothing is to be compared, or neighbours are asked for without embedder.
    """

    def __init__(self, engine: Engine, settings: EvalSettings, *, embedder: Embedder | None = None) -> None:
        if engine.tokenizer is None:
            raise ConfigError("an evaluation asks questions in words: pass tokenizer=… to Engine().")
        if not settings.contexts:
            raise ConfigError("there is no compile context to compare: name at least one, such as 'isolated'.")
        self.engine = engine
        self.settings = settings
        self.composer = PromptComposer(engine.tokenizer)
        self._composers: dict[str | None, PromptComposer] = {None: self.composer}
        self._embedder = embedder
        self._sampling = SamplingParams(
            max_tokens=settings.max_tokens, stop_token_ids=tuple(self.composer.stop_token_ids)
        )
        policies = list(dict.fromkeys(str(parse_policy(p)) for p in settings.policies))
        alone = [p for p in policies if p != "full" and parse_policy(p).caches_prompt]
        linked = [p for p in policies if p != "full" and p not in alone]
        contexts = dict.fromkeys(settings.contexts)
        if embedder is None and any(parse_context_name(c)[0] == "neighbours" for c in contexts):
            raise ConfigError("neighbours are chosen by their embeddings: pass embedder=… to Evaluation().")
        self.arms: list[tuple[str, str]] = [("full", ""), *((p, "") for p in alone)]
        """Pairs of policy and context; an empty context where compiled chunks are not used."""
        self.arms += [(policy, context) for context in contexts for policy in linked]

    @property
    def fingerprint(self) -> dict[str, Any]:
        """Everything that the figures depend on, the examples themselves aside."""
        return {
            "format": _FORMAT,
            **asdict(self.settings),
            "policies": [f"{policy} @ {context}" if context else policy for policy, context in self.arms],
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
        if records is None:
            found = self._run(examples, {}, None, progress)
        else:
            with RecordFile(records, self.fingerprint) as file:
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
        before = {info.key for info in self.engine.store.entries()}
        if progress:
            progress(len(found), len(examples))
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
        self.engine.forget([info.key for info in list(self.engine.store.entries()) if info.key not in before])

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
        full, target = self.reference(plain, example, gold)
        arms = [full]
        try:
            linked = {c: self.link(composer, parts, example, c) for c in self.settings.contexts}
        except ContextLengthError as error:
            return ExampleResult(example.example_id, example.digest, dict(example.group), skipped=str(error))
        for policy, context in self.arms[1:]:
            arms.append(self.arm(linked[context] + [tail] if context else plain, policy, context, target))
        return ExampleResult(example.example_id, example.digest, dict(example.group), tuple(arms))

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
        self, composer: PromptComposer, parts: Sequence[tuple[int, ...]], example: EvalExample, context: str
    ) -> Prompt:
        """Compile a prompt's head and documents; returns all of its segments but the tail."""
        head = self.engine.compile(composer.head_ids, "isolated")
        # Documents are compiled under the default head whatever the request's: a store outlives its requests.
        keys = compile_chunks(
            self.engine, parts, example.documents, context, composer=self.composer, embedder=self._embedder
        )
        return [head, *keys]

    def reference(self, prompt: Prompt, example: EvalExample, gold: tuple[int, ...]) -> tuple[ArmResult, Target]:
        """Full computation of a prompt: its own result, and what the other arms are measured against."""
        done = self.engine.generate(prompt, self._sampling, policy="full")
        # The end of an answer is a prediction too. Any id stands for it: the last one of a continuation is not read.
        end = (self.composer.stop_token_ids or (0,))[:1]
        own = done.token_ids + (end if done.finish_reason == "stop" else ())
        target = Target(example, gold, own, self._predictions(prompt, own, "full"))
        return self._result("", done, target.logits, self._gold_nll(prompt, "full", gold), target), target

    def arm(self, prompt: Prompt, policy: str, context: str, target: Target) -> ArmResult:
        """Measure one prompt under one policy, against full computation's answer and predictions."""
        # The answer before the scores: they would leave the whole prompt in a prefix cache.
        done = self.engine.generate(prompt, self._sampling, policy=policy)
        logits = self._predictions(prompt, target.own, policy)
        return self._result(context, done, logits, self._gold_nll(prompt, policy, target.gold), target)

    def _predictions(self, prompt: Prompt, tokens: Sequence[int], policy: str) -> NDArray[np.float32]:
        found: NDArray[np.float32] = self.engine.score(prompt, tokens, policy=policy).numpy()
        return found

    def _gold_nll(self, prompt: Prompt, policy: str, gold: tuple[int, ...]) -> float | None:
        if not gold:
            return None
        return float(negative_log_likelihood(self._predictions(prompt, gold, policy), gold).mean())

    @staticmethod
    def _result(
        context: str, done: Completion, logits: NDArray[np.float32], nll: float | None, target: Target
    ) -> ArmResult:
        agree = top1_agreement(target.logits, logits)
        example, stats = target.example, done.stats
        return ArmResult(
            policy=stats.policy,
            context=context,
            answer=done.text.strip(),
            score=score_answer(example.scorer, done.text, example.answers) if example.answers else None,
            kl=float(kl_divergence(target.logits, logits).mean()),
            agreement=float(agree.mean()),
            first_token=bool(agree[0]),
            nll=nll,
            prompt=stats.prompt,
            rows=stats.rows,
            recomputed=stats.recomputed,
            ttft_s=stats.times.first_token,
        )
