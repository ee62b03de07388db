"""Data sets from files: our own form, LongBench, MuSiQue and 2WikiMultihopQA, told apart by their first record."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Any

from epic_rag.errors import DocumentError
from epic_rag.evaluation.example import EvalExample
from epic_rag.evaluation.metrics import SCORERS

__all__ = ["FORMATS", "detect_format", "read_file"]

CountTokens = Callable[[str], int]
Record = dict[str, Any]

_PASSAGE = re.compile(r"^(?=(?:Passage|Paragraph) \d+:)", re.MULTILINE)
_BLANK_LINE = re.compile(r"\n\s*\n")
_PACK_TOKENS = 512

# LongBench's data sets whose answers are scored otherwise than by F1 over words.
_LONGBENCH_SCORERS = {
    **dict.fromkeys(("gov_report", "qmsum", "multi_news", "samsum"), "rougeL"),
    **dict.fromkeys(("trec", "passage_retrieval_en", "passage_count"), "contains"),
}
# Scored by edit distance of code, or by words of a language without spaces: not this instrument's scores.
_LONGBENCH_REFUSED = frozenset(
    ("lcc", "repobench-p", "multifieldqa_zh", "dureader", "vcsum", "lsht", "passage_retrieval_zh")
)
_LONGBENCH_QUESTIONS = {
    "gov_report": "Write a one-page summary of the report.",
    "multi_news": "Write a one-page summary of all the news.",
    "passage_count": "How many different paragraphs are there, not counting repeats? Answer with a number.",
}
_DEFAULT_QUESTION = "Summarise the documents."


def _generic(raw: Record, number: int, count: CountTokens) -> EvalExample:
    texts = tuple(d if isinstance(d, str) else d["text"] for d in raw.get("documents", ()))
    answers = raw.get("answers", ())
    answers = (answers,) if isinstance(answers, str) else tuple(answers)
    scorer = raw.get("scorer", "f1")
    if scorer not in SCORERS:
        raise DocumentError(f"unknown scorer {scorer!r} in record {number}: use one of {', '.join(SCORERS)}.")
    return EvalExample(str(raw.get("id", number)), texts, raw["question"], answers, scorer=scorer)


def _longbench(raw: Record, number: int, count: CountTokens) -> EvalExample:
    name = str(raw.get("dataset", ""))
    if name.removesuffix("_e") in _LONGBENCH_REFUSED:
        raise DocumentError(
            f"LongBench's {name!r} is scored by edit distance or needs a word segmenter, which this instrument does "
            "not have: take an English question-answering or summarisation set, such as hotpotqa or qmsum."
        )
    name = name.removesuffix("_e")
    context = raw["context"]
    parts = [part.strip() for part in _PASSAGE.split(context) if part.strip()]
    documents = tuple(parts) if len(parts) > 1 else tuple(_packed(_BLANK_LINE.split(context), count))
    return EvalExample(
        str(raw.get("_id") or number),
        documents,
        str(raw["input"]).strip() or _LONGBENCH_QUESTIONS.get(name, _DEFAULT_QUESTION),
        tuple(map(str, raw["answers"])),
        scorer=_LONGBENCH_SCORERS.get(name, "f1"),
        group={"dataset": name} if name else {},
    )


def _packed(paragraphs: Iterable[str], count: CountTokens) -> list[str]:
    """Paragraphs behind each other, in texts of at most about 512 tokens; a longer paragraph is split at lines."""
    pieces: list[tuple[str, int]] = []
    for paragraph in filter(None, map(str.strip, paragraphs)):
        size = count(paragraph)
        whole = size <= _PACK_TOKENS or "\n" not in paragraph
        lines = [paragraph] if whole else [line.strip() for line in paragraph.split("\n") if line.strip()]
        pieces += [(line, size if whole else count(line)) for line in lines]
    packed: list[list[str]] = []
    used = 0
    for text, size in pieces:
        if not packed or used + size > _PACK_TOKENS:
            packed.append([])
            used = 0
        packed[-1].append(text)
        used += size
    return ["\n\n".join(texts) for texts in packed]


def _musique(raw: Record, number: int, count: CountTokens) -> EvalExample:
    texts = tuple(f"{p['title']}\n{p['paragraph_text']}" for p in raw["paragraphs"])
    answers = tuple(dict.fromkeys((raw["answer"], *raw.get("answer_aliases", ()))))
    name = str(raw.get("id", number))
    hops = re.match(r"(\d)hop", name)
    return EvalExample(name, texts, raw["question"], answers, group={"hops": hops[1]} if hops else {})


def _two_wiki(raw: Record, number: int, count: CountTokens) -> EvalExample:
    texts = tuple(f"{title}\n{' '.join(s.strip() for s in sentences)}" for title, sentences in raw["context"])
    group = {"type": str(raw["type"])} if raw.get("type") else {}
    return EvalExample(str(raw.get("_id") or number), texts, raw["question"], (raw["answer"],), group=group)


FORMATS: dict[str, Callable[[Record, int, CountTokens], EvalExample]] = {
    "generic": _generic,
    "longbench": _longbench,
    "musique": _musique,
    "2wikimultihopqa": _two_wiki,
}
"""Readers of one record, by the name of its format."""


def detect_format(raw: Any) -> str | None:
    """Name of the format that a record is in, by its fields; None if it is in none of them."""
    if not isinstance(raw, dict):
        return None
    if {"documents", "question"} <= raw.keys() or ("question" in raw and not {"paragraphs", "context"} & raw.keys()):
        return "generic"
    if {"paragraphs", "question", "answer"} <= raw.keys():
        return "musique"
    if {"input", "context", "answers"} <= raw.keys():
        return "longbench"
    if {"context", "question", "answer"} <= raw.keys() and isinstance(raw["context"], list):
        return "2wikimultihopqa"
    return None


def _records(path: Path) -> Iterable[tuple[str, Any]]:
    """Each record of a file of JSON lines, or of one JSON array, and where it stands."""
    try:
        with path.open(encoding="utf-8") as file:
            start = file.read(1)
            file.seek(0)
            if start == "[":
                yield from ((f"record {n}", raw) for n, raw in enumerate(json.load(file), start=1))
                return
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield f"line {number}", json.loads(line)
    except OSError as error:
        raise DocumentError(f"the data set {path} cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise DocumentError(f"the data set {path} is neither JSON lines nor a JSON array: {error}") from error


def read_file(
    path: str | os.PathLike[str],
    *,
    limit: int | None = None,
    count_tokens: CountTokens,
    format: str | None = None,
    questions_alone: bool = False,
) -> list[EvalExample]:
    """Read a data set's file, in the file's order.

    Parameters
    ----------
    path
        JSON lines, or one JSON array.
    limit
        Examples to take from the beginning; None takes all.
    count_tokens
        Tokens of a text; used where long contexts are packed into documents.
    format
        Name in :data:`FORMATS`; None detects it from the first record.
    questions_alone
        Whether records without documents are welcome: a store will be asked for them.

    Raises
    ------
    DocumentError
        If the file cannot be read or is in no known format; names the line and the fields that are expected.
    """
    path = Path(path).expanduser()
    if format is not None and format not in FORMATS:
        raise DocumentError(f"unknown format {format!r}: use one of {', '.join(FORMATS)}.")
    found: list[EvalExample] = []
    for number, (where, raw) in enumerate(islice(_records(path), limit), start=1):
        format = format or detect_format(raw)
        if format is None:
            raise DocumentError(
                f"{path}, {where} is in none of the known formats {', '.join(FORMATS)}: write "
                '{"id", "documents": [{"text"}], "question", "answers"}, one JSON object a line.'
            )
        try:
            example = FORMATS[format](raw, number, count_tokens)
            if not all(isinstance(text, str) for text in (example.question, *example.documents, *example.answers)):
                raise TypeError("a text that is no string")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, DocumentError):
                raise
            raise DocumentError(
                f"{path}, {where}: expected a record in {format}'s form, found a problem with {error}"
            ) from error
        if not (example.documents or questions_alone) or not example.question.strip():
            raise DocumentError(f"{path}, {where} has no documents or no question: leave it out.")
        found.append(example)
    if not found:
        raise DocumentError(f"the data set {path} has no examples.")
    return found
