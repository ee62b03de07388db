"""One question of an evaluation, whatever data set it came from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["EvalExample"]


@dataclass(frozen=True)
class EvalExample:
    """A question over documents, and how its answer is scored.

    Attributes
    ----------
    example_id
        Names it within its data set.
    documents
        Texts in the order in which they stand in the prompt.
    question
        Asked behind the documents.
    answers
        Accepted answers, the first of them the gold answer whose likelihood is measured; may be empty.
    system
        System prompt of this request; None takes the default. Documents are compiled under the default either way.
    corpus
        Names the store that the documents come from. Examples of one store share their documents: a chunk's
        neighbours are sought among them all.
    others
        Further documents of that store, which were not retrieved.
    scorer
        Name in :data:`epic_rag.evaluation.metrics.SCORERS`.
    group
        What results are broken down by, such as ``{"depth": "0.5", "length": "1000"}``. Examples that share
        ``"base"`` are variations of one example and should get the same answer.
    """

    example_id: str
    documents: tuple[str, ...]
    question: str
    answers: tuple[str, ...] = ()
    system: str | None = None
    corpus: str = ""
    others: tuple[str, ...] = ()
    scorer: str = "f1"
    group: Mapping[str, str] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """Digest of everything that a measurement depends on."""
        parts = [self.example_id, self.documents, self.question, self.answers, self.system, self.scorer]
        parts += [self.corpus, self.others] if self.corpus or self.others else []
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
