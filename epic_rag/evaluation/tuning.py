"""Finds the cheapest way to link a store's own documents that is as faithful as asked for.

Questions are given, or the model writes one about each of some chunks; each is answered from what the store retrieves
for it. Fidelity is measured against full computation of the same prompts, so no right answers are needed.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from epic_engine import SamplingParams

from epic_rag.defaults import LinkDefaults, context_cost
from epic_rag.errors import RagError
from epic_rag.evaluation.example import EvalExample
from epic_rag.evaluation.records import ExampleResult
from epic_rag.evaluation.runner import EvalSettings, Evaluation
from epic_rag.evaluation.stores import CorpusStore
from epic_rag.evaluation.summary import ArmSummary, Summary, summarise
from epic_rag.pipeline import EpicRAG
from epic_rag.prompt import PromptComposer

__all__ = ["CONTEXTS", "POLICIES", "Tuning", "examples_from", "tune", "write_questions"]

Progress = Callable[[int, int], None]

POLICIES = ("naive", "legolink:16", "legolink:32", "query_aware:0.05", "query_aware:0.1", "query_aware:0.2")
"""What is tried by default, besides ``full``."""
CONTEXTS = ("isolated", "neighbours:2")
"""Compile contexts that are tried by default."""

_WRITER = "You write exam questions. Write one short question that is answered by the document."
_ASK = "Write the question, nothing else."
_QUESTION = re.compile(r"[^.!?\n]*\?")


@dataclass(frozen=True)
class Tuning:
    """What was found.

    Attributes
    ----------
    summary
        All arms, ``full`` first.
    results
        Example by example.
    chosen
        The cheapest arm that agrees with full computation often enough; ``full`` itself if none does.
    min_agreement
        What was asked for.
    """

    summary: Summary
    results: tuple[ExampleResult, ...]
    chosen: ArmSummary
    min_agreement: float

    @property
    def curve(self) -> list[ArmSummary]:
        """All arms, the cheapest first."""
        return sorted(self.summary.arms, key=_cost)

    def defaults(self, context: str) -> LinkDefaults:
        """The choice as a store's defaults; ``context`` is kept where the choice has none."""
        return LinkDefaults(self.chosen.policy, self.chosen.context or context, tuned=True)


def _cost(arm: ArmSummary) -> tuple[float, int]:
    """Rows at question time; between equals, what compiling costs."""
    return round(arm.rows, 6), context_cost(arm.context or "isolated")


def write_questions(
    rag: EpicRAG, count: int, *, seed: int = 0, kept: Path | None = None, progress: Progress | None = None
) -> list[str]:
    """Let the store's model write questions about chunks that are drawn at random.

    Parameters
    ----------
    rag
        The store.
    count
        Questions wanted; fewer come back from a small store, and where the model writes the same one twice.
    seed
        Of the draw.
    kept
        File in which questions are kept as they are written, so that a stopped run need not write them again.
    progress
        Called with chunks done and their total.

    Raises
    ------
    RagError
        If the store holds no chunk, or the model writes nothing that is a question.
    """
    ids = sorted(rag.registry.embeddings()[0])
    if not ids:
        raise RagError("the store holds no documents: ingest some first, then tune.")
    drawn = random.Random(seed).sample(ids, min(count, len(ids)))
    known: dict[str, str] = {}
    if kept is not None and kept.exists():
        for line in kept.read_text(encoding="utf-8").splitlines():
            try:
                raw = json.loads(line)
                known[raw["chunk"]] = raw["question"]
            except (ValueError, KeyError, TypeError):
                continue  # a line that was torn by a crash
    composer = PromptComposer(rag.engine.tokenizer, _WRITER, "Document:\n\n", "")
    sampling = SamplingParams(max_tokens=48, stop_token_ids=tuple(composer.stop_token_ids))
    room = rag.engine.max_model_len - sampling.max_tokens - len(composer.head_ids) - len(composer.tail_ids(_ASK))
    for number, chunk in enumerate(drawn):
        if progress:
            progress(number, len(drawn))
        if chunk in known:
            continue
        tokens = rag.registry.chunk(chunk).token_ids[:room]
        written = rag.engine.generate([composer.head_ids, tokens, composer.tail_ids(_ASK)], sampling, policy="full")
        found = _QUESTION.search(written.text)
        known[chunk] = found.group().strip().removeprefix("Question:").strip() if found else ""
        if kept is not None:
            kept.parent.mkdir(parents=True, exist_ok=True)
            with kept.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"chunk": chunk, "question": known[chunk]}, ensure_ascii=False) + "\n")
    if progress:
        progress(len(drawn), len(drawn))
    questions = list(dict.fromkeys(q for chunk in drawn if len(q := known[chunk]) > 1))
    if not questions:
        raise RagError("the model wrote no question about any chunk: give questions of your own with --dataset.")
    return questions


def examples_from(rag: EpicRAG, questions: Sequence[str | EvalExample], k: int) -> list[EvalExample]:
    """Questions with the chunks that the store retrieves for them, in the order of :meth:`EpicRAG.retrieve`.

    Parameters
    ----------
    rag
        The store.
    questions
        In words, or examples whose documents are replaced and whose answers are kept.
    k
        Chunks per question.
    """
    asked = [
        EvalExample(f"q{number}", (), q) if isinstance(q, str) else q for number, q in enumerate(questions, start=1)
    ]
    found = []
    for example in asked:
        texts = tuple(source.text for source in rag.retrieve(example.question, k))
        found.append(replace(example, documents=texts, others=(), corpus="", system=None))
    return found


def tune(
    rag: EpicRAG,
    examples: Sequence[EvalExample],
    *,
    policies: Sequence[str] = POLICIES,
    contexts: Sequence[str] = CONTEXTS,
    min_agreement: float = 0.99,
    max_tokens: int = 16,
    records: Path | None = None,
    progress: Progress | None = None,
) -> Tuning:
    """Measure policies and compile contexts on a store's own documents, and choose the cheapest that is faithful.

    Nothing in the store changes; :meth:`EpicRAG.use` makes the choice its default.

    Parameters
    ----------
    rag
        The store. Neighbours come from all of it.
    examples
        As :func:`examples_from` makes them.
    policies, contexts
        What is tried.
    min_agreement
        Share of the tokens of full computation's answers that must be most likely in the linked prompt, too; 0 to 1.
    max_tokens
        Longest answer.
    records
        Folder in which results are kept as they come, so that a stopped run goes on.
    progress
        Called with examples done and their total.

    Raises
    ------
    RagError
        If no example fits the model.
    """
    if not 0 <= min_agreement <= 1:
        raise RagError(f"min_agreement={min_agreement} must be a share from 0 to 1, such as 0.99.")
    settings = EvalSettings("tune", tuple(policies), tuple(contexts), max_tokens=max_tokens)
    evaluation = Evaluation(rag.engine, settings, store=CorpusStore(rag))
    where = None
    if records is not None:
        facts: list[Any] = [evaluation.fingerprint, [e.digest for e in examples], rag.registry.changes_token()]
        where = records / f"{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]}.jsonl"
    results = evaluation.run(examples, records=where, progress=progress)
    summary = summarise(results)
    if not summary.arms:
        raise RagError(f"no question could be measured: {results[0].skipped if results else 'there are none'}.")
    faithful = [arm for arm in summary.arms if arm.agreement.mean >= min_agreement]
    return Tuning(summary, tuple(results), min(faithful, key=_cost), min_agreement)


def as_dict(tuning: Tuning) -> dict[str, Any]:
    """For JSON."""
    return {
        "chosen": {"policy": tuning.chosen.policy, "context": tuning.chosen.context},
        "min_agreement": tuning.min_agreement,
        **tuning.summary.as_dict(),
        "records": [asdict(r) for r in tuning.results],
    }
