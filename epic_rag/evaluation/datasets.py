"""Data sets by name or path: generated ones, or files in our own form, LongBench's, MuSiQue's or 2WikiMultihopQA's."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from epic_rag.errors import DocumentError
from epic_rag.evaluation.example import EvalExample
from epic_rag.evaluation.generated import GENERATED, generate
from epic_rag.evaluation.readers import FORMATS, detect_format, read_file

__all__ = ["FORMATS", "GENERATED", "EvalExample", "detect_format", "load"]

_DEFAULT_LIMIT = 50


def _about(text: str) -> int:
    """Tokens of English text without a tokenizer."""
    return max(1, round(len(text) / 4))


def load(
    name_or_path: str | os.PathLike[str],
    *,
    limit: int | None = None,
    seed: int = 0,
    count_tokens: Callable[[str], int] | None = None,
    format: str | None = None,
) -> list[EvalExample]:
    """Load a data set.

    Parameters
    ----------
    name_or_path
        A generated data set (``needle``, ``needle:500,4000``, ``templated``, ``fewshot``, ``order``, ``tenants``),
        or a file.
    limit
        Examples to take, from a file its first ones; None takes 50 generated ones, or the whole file.
    seed
        Of generated data sets.
    count_tokens
        Tokens of a text; None estimates four characters a token.
    format
        A file's format, a name in :data:`FORMATS`; None detects it.

    Raises
    ------
    DocumentError
        If there is no such data set (lists the known) or a file cannot be read.
    ConfigError
        If a generated data set's argument cannot be used.
    """
    count = count_tokens or _about
    name = os.fspath(name_or_path)
    if limit is not None and limit < 1:
        raise DocumentError(f"limit={limit} takes no examples: give 1 or more.")
    if name.partition(":")[0] in GENERATED:
        return generate(name, limit=_DEFAULT_LIMIT if limit is None else limit, seed=seed, count_tokens=count)
    if not Path(name).expanduser().is_file():
        raise DocumentError(
            f"there is no data set {name!r}: give a file ({', '.join(FORMATS)} form), or one of the generated "
            f"{', '.join(GENERATED)}."
        )
    return read_file(name, limit=limit, count_tokens=count, format=format)
