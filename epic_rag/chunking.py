"""Chunking: a document's text is cut at its own borders into pieces the model reads as at most n tokens.

The borders come from `semantic-text-splitter <https://github.com/benbrandt/text-splitter>`_: sections,
paragraphs, sentences, words; for Python sources the syntax tree, where the grammar is installed.
"""

import hashlib
import importlib
import importlib.metadata
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Final, Protocol

import semantic_text_splitter
from epic_engine.errors import ConfigError
from tokenizers import Tokenizer

from epic_rag.documents import Document, DocumentKind
from epic_rag.errors import DocumentError

__all__ = ["Chunker", "ChunkingConfig", "TextTokenizer"]

_FORMAT: Final = 1
"""Raised when this file begins to cut differently, so that indexed documents are chunked again."""

_ENDLESS_WORD: Final = re.compile(r"\S{20000}")


class TextTokenizer(Protocol):
    """The part of a Hugging Face tokenizer that chunking needs: the call."""

    def __call__(self, text: str, **kwargs: Any) -> Any:
        """Return a mapping with ``input_ids``."""
        ...


@dataclass(frozen=True)
class ChunkingConfig:
    """How long chunks are.

    Parameters
    ----------
    max_tokens
        Most tokens in a chunk, counted alone and without special tokens.
    overlap_tokens
        Most tokens that a chunk repeats from the end of the one before it, in whole sentences or words. 0
        keeps every text once, which is also what makes equal passages compile once.

    Raises
    ------
    ConfigError
        If a value is no whole number or out of range.
    """

    max_tokens: int = 384
    overlap_tokens: int = 0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not isinstance(value, int) or isinstance(value, bool):
                raise ConfigError(f"{name} is {value!r}: pass a whole number")
        if self.max_tokens < 1:
            raise ConfigError(f"max_tokens is {self.max_tokens}: pass at least 1; 128 to 512 is usual")
        if not 0 <= self.overlap_tokens < self.max_tokens:
            raise ConfigError(
                f"overlap_tokens is {self.overlap_tokens}: pass 0 to {self.max_tokens - 1}, "
                f"less than max_tokens ({self.max_tokens})"
            )


class Chunker:
    """Splits documents into chunks that fit a token budget.

    Safe to use from several threads.

    Parameters
    ----------
    config
        The budget.
    tokenizer
        The *served model's* Hugging Face tokenizer. A fast one is copied: its own settings stay as they are.
    count_tokens
        Returns the length of a text as it will be compiled, where that is not how `tokenizer` itself encodes
        it. Chunks are then cut by `tokenizer` and held to the budget by this.
    """

    def __init__(
        self,
        config: ChunkingConfig,
        tokenizer: TextTokenizer,
        *,
        count_tokens: Callable[[str], int] | None = None,
    ) -> None:
        self.config = config
        self._count_tokens = count_tokens
        self._tokenizer = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._plain = _plain_tokenizer(backend) if isinstance(backend, Tokenizer) else None
        self._splitters: dict[DocumentKind, Callable[[str], list[str]]] = {}

    def count_tokens(self, text: str) -> int:
        """Return the length of `text` in tokens: alone, special tokens read as plain text and none added.

        Equals ``len(tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"])``, or
        what the `count_tokens` given to the chunker returns.
        """
        if self._count_tokens is not None:
            return self._count_tokens(text)
        if self._plain is not None:
            return len(self._plain.encode(text, add_special_tokens=False).ids)
        encoded = self._tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False)
        return len(encoded["input_ids"])

    def split(self, document: Document) -> list[str]:
        """Split a document.

        Parameters
        ----------
        document
            Its kind selects the borders.

        Returns
        -------
        list of str
            Chunk texts in reading order, without space around them, none empty, each of 1 to ``max_tokens``
            tokens. Without overlap they hold every character of the text once except for space between chunks
            (and what the tokenizer maps to no token at all). An empty document has none.

        Raises
        ------
        DocumentError
            If a single character is longer than ``max_tokens``.
        """
        splitter = self._splitters.get(document.kind)
        if splitter is None:
            # Two threads may both build one; either serves.
            splitter = self._splitters[document.kind] = self._make_splitter(document.kind)
        return [
            chunk
            for passage in _passages(document.text)
            for piece in splitter(passage)
            for chunk in self._fit(piece.strip(), document)
        ]

    @cached_property
    def _settings_hash(self) -> str:
        described = {
            "format": _FORMAT,
            "config": asdict(self.config),
            "splitter": importlib.metadata.version("semantic-text-splitter"),
            "python_grammar": _grammar_version(),
            "tokenizer": self._tokenizer_digest(),
        }
        return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()

    def settings_hash(self) -> str:
        """Return a SHA-256 over everything but the document that decides where chunks end.

        Covers the configuration, the splitter's and the Python grammar's version and the tokenizer, so that
        documents are chunked again when one of them changes.

        Returns
        -------
        str
            64 hexadecimal digits.
        """
        return self._settings_hash

    def _tokenizer_digest(self) -> str:
        if self._plain is not None:
            described = self._plain.to_str()
        else:
            vocabulary: dict[str, int] = getattr(self._tokenizer, "get_vocab", dict)()
            described = json.dumps([type(self._tokenizer).__qualname__, sorted(vocabulary.items())])
        return hashlib.sha256(described.encode()).hexdigest()

    def _make_splitter(self, kind: DocumentKind) -> Callable[[str], list[str]]:
        # One number and not a range as the capacity: a range ends chunks early (620 instead of 368 for the
        # 465 kB of pydoc's topics) and was not faster.
        capacity, overlap = self.config.max_tokens, self.config.overlap_tokens
        if kind == "python" and (language := _python_grammar()) is not None:
            code = semantic_text_splitter.CodeSplitter
            if self._plain is not None:
                return code.from_huggingface_tokenizer(language, self._plain, capacity, overlap).chunks
            return code.from_callback(language, self.count_tokens, capacity, overlap).chunks
        plain = semantic_text_splitter.MarkdownSplitter if kind == "markdown" else semantic_text_splitter.TextSplitter
        if self._plain is not None:
            return plain.from_huggingface_tokenizer(self._plain, capacity, overlap).chunks
        return plain.from_callback(self.count_tokens, capacity, overlap).chunks

    def _fit(self, piece: str, document: Document) -> Iterator[str]:
        # The splitter gives up on a character longer than the budget, and taking off the space around a piece
        # can lengthen it by a token. Neither may pass: the budget is a promise.
        while piece:
            length = self.count_tokens(piece)
            if length == 0:
                return  # Nothing a model could read, e.g. a lone zero-width space.
            if length <= self.config.max_tokens:
                yield piece
                return
            end = self._longest_prefix(piece, document)
            head, piece = piece[:end].rstrip(), piece[end:].lstrip()
            if self.count_tokens(head):
                yield head

    def _longest_prefix(self, piece: str, document: Document) -> int:
        """Return how many characters of `piece` fit, preferably up to a space."""

        def fits(end: int) -> bool:
            return self.count_tokens(piece[:end].rstrip()) <= self.config.max_tokens

        low, high = 0, len(piece)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        # Token counts do not strictly grow with the text: the end found fits, but may not be the last.
        if low == 0:
            raise DocumentError(
                f"{document.doc_id}: the character {piece[0]!r} is longer than "
                f"max_tokens ({self.config.max_tokens}): raise max_tokens"
            )
        for end in range(low, low // 2, -1):
            if piece[end].isspace() and fits(end):
                return end
        return low


def _passages(text: str) -> Iterator[str]:
    """Cut a text inside words of absurd length, such as embedded base64, and nowhere else.

    The splitter's time grows with the square of a word's length: 6 s for one of 100,000 characters.
    """
    start = 0
    for word in _ENDLESS_WORD.finditer(text):
        yield text[start : word.end()]
        start = word.end()
    if start < len(text):
        yield text[start:]


def _plain_tokenizer(backend: Tokenizer) -> Tokenizer:
    """Copy a tokenizer so that it neither knows special tokens nor cuts or pads.

    The splitter counts special tokens' names in a text as one token each, and the model is later given the
    tokens of their letters: user text must not be able to write ``<|im_end|>``. Dropping those tokens from
    the serialised tokenizer gives what ``encode_special_tokens`` does, a flag that is not serialised.
    """
    described = json.loads(backend.to_str())
    described.update(truncation=None, padding=None, post_processor=None)
    described["added_tokens"] = [token for token in described["added_tokens"] if not token["special"]]
    return Tokenizer.from_str(json.dumps(described))


def _python_grammar() -> object | None:
    # By name, as the grammar is no dependency: without it Python is split like any other text.
    try:
        grammar = importlib.import_module("tree_sitter_python")
    except ImportError:
        return None
    language: object = grammar.language()
    return language


def _grammar_version() -> str | None:
    try:
        return importlib.metadata.version("tree-sitter-python")
    except importlib.metadata.PackageNotFoundError:
        return None
