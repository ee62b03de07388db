"""The demonstration: real documents, several questions, and the time to the first token three ways."""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from epic_engine import SamplingParams

from epic_rag.answers import Answer
from epic_rag.benchmarks.ttft import HF, Timer
from epic_rag.documents import Document, iter_documents
from epic_rag.errors import DocumentError
from epic_rag.pipeline import EpicRAG

__all__ = ["DemoAnswer", "corpus", "demo_questions", "run_question", "total"]

TOKENS_BY_DEFAULT = 30_000
# About a section of the handbook, which a small model can still find a fact in.
CHUNK_TOKENS = 128


@dataclass(frozen=True)
class DemoAnswer:
    """One question of the demonstration.

    Attributes
    ----------
    question
        In words.
    answer
        With the default policy.
    expected
        Accepted substrings (lower case); empty where nothing is expected.
    linked_s, prefix_s, full_s
        Seconds to the first token: linked, with a prefix cache of all earlier prompts, and with a full prefill by
        the untouched model. All three on the same token ids.
    """

    question: str
    answer: Answer
    expected: tuple[str, ...]
    linked_s: float
    prefix_s: float
    full_s: float

    @property
    def found(self) -> bool:
        """Whether the answer holds what was expected."""
        return any(e in self.answer.text.lower() for e in self.expected)


def corpus(folder: Path, *, everything: bool, count: Callable[[str], int]) -> list[Document]:
    """The handbook, and Python's own language reference as distraction.

    Parameters
    ----------
    folder
        Where the handbook's Markdown files are.
    everything
        Take all of the language reference instead of about 30,000 tokens in all.
    count
        Length of a text in tokens.

    Raises
    ------
    DocumentError
        If the folder holds no documents.
    """
    if not folder.is_dir():
        raise DocumentError(
            f"the demonstration's handbook {folder} is not there: run it from a checkout, or pass --corpus DIR."
        )
    documents = [
        Document(d.doc_id.rsplit("/", 1)[-1], d.text, source=d.source, metadata=d.metadata, kind=d.kind)
        for d in iter_documents(folder)
    ]
    if not documents:
        raise DocumentError(f"{folder} holds no documents: pass --corpus DIR with text, Markdown, HTML or PDF files.")
    budget = TOKENS_BY_DEFAULT - sum(count(d.text) for d in documents)
    topics = _language_reference()
    random.Random(0).shuffle(topics)
    for document in topics:
        size = count(document.text)
        if everything or size <= budget:
            documents.append(document)
            budget -= size
    return documents


def _language_reference() -> list[Document]:
    from pydoc_data.topics import topics

    return [
        Document(f"python-reference/{name}", text, source=f"Python language reference: {name}")
        for name, text in sorted(topics.items())
    ]


def demo_questions(folder: Path, limit: int = 6) -> list[tuple[str, tuple[str, ...]]]:
    """Questions with accepted answers from ``questions.json``."""
    raw = json.loads((folder / "questions.json").read_text(encoding="utf-8"))
    return [(q["question"], tuple(q["answers"])) for q in raw[:limit]]


def run_question(rag: EpicRAG, question: str, expected: Sequence[str], *, k: int) -> DemoAnswer:
    """Ask, and time the first token of the same prompt three ways."""
    timer = Timer(rag.engine)
    answer = rag.ask(question, k=k, sampling=SamplingParams(max_tokens=60))
    records = rag.registry.chunks_by_id([s.chunk_id for s in answer.sources])
    parts = [r.token_ids for r in records]
    head, tail = rag.composer.head_ids, rag.composer.tail_ids(question)
    keys = [rag.key_of(record) for record in records]
    prompt: list[Any] = [rag.head_key(), *keys, tail]
    ids = [t for part in (head, *parts, tail) for t in part]
    linked = statistics.median(timer.linked(prompt, str(rag.policy))[0] for _ in range(3))
    prefix = timer.linked([tuple(ids)], "prefix")[0]
    full = timer.plain(ids)
    return DemoAnswer(question, answer, tuple(expected), linked, prefix, full)


def total(answers: Sequence[DemoAnswer]) -> dict[str, float]:
    """Median seconds and ratios over all questions."""
    return {
        "linked_s": statistics.median(a.linked_s for a in answers),
        "prefix_s": statistics.median(a.prefix_s for a in answers),
        f"{HF}_s": statistics.median(a.full_s for a in answers),
        "speedup_vs_full": statistics.median(a.full_s / a.linked_s for a in answers),
        "speedup_vs_prefix": statistics.median(a.prefix_s / a.linked_s for a in answers),
    }
