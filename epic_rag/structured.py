"""Answers that keep to a form: JSON of a schema, a pattern, one of some strings, tool calls.

The grammar's work is done by `llguidance <https://github.com/guidance-ai/llguidance>`_, an optional package.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from epic_engine import ConfigError, TokenConstraint
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from epic_rag._call_grammar import call_grammar, literal
from epic_rag._schemas import check_satisfiable, prepared
from epic_rag._token_bytes import token_bytes
from epic_rag.call_syntax import CallSyntax
from epic_rag.errors import GrammarError, MissingDependencyError
from epic_rag.tokenization import SegmentTokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

__all__ = ["Grammars"]

# One space where models write one, and no other white space: small models tend to go on with it for ever.
_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
_KEPT = 64


class Grammars:
    """Makes constraints for one model's vocabulary, and keeps the grammars that were compiled for them.

    Making one reads the vocabulary, which takes about a second. Any number of threads may use one.

    JSON is written on one line, with at most one space after commas and colons, and properties come in the schema's
    order. Objects that name their properties get no others unless the schema says ``additionalProperties``.

    Parameters
    ----------
    tokenizer
        The model's, a fast one.
    vocab_size
        Width of the model's logits; what lies beyond the tokenizer's vocabulary is never allowed.
    end_ids
        All tokens that end an answer. They are allowed where the text is complete, and nowhere else.
    segments
        A segment tokenizer of the same tokenizer, if there is one already.

    Raises
    ------
    MissingDependencyError
        If llguidance is not installed.
    GrammarError
        If no grammar can be laid over this kind of tokenizer.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        vocab_size: int,
        end_ids: Collection[int],
        *,
        segments: SegmentTokenizer | None = None,
    ) -> None:
        _require_library()
        self._segments = segments or SegmentTokenizer(tokenizer)
        self._width = vocab_size
        self._ends = frozenset(i for i in end_ids if 0 <= i < vocab_size)
        self._spelled = {i: text for i, text in token_bytes(tokenizer).items() if 0 <= i < vocab_size}
        self._controls = frozenset(self._spelled) & self._segments.control_ids
        self._vocabulary = _vocabulary(self._spelled, vocab_size, self._ends, self._controls, self._segments)
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def json_schema(self, schema: Mapping[str, Any] | str | bool) -> TokenConstraint:
        """The text is one JSON value of a schema.

        Parameters
        ----------
        schema
            A JSON schema (draft 2020-12 and earlier), or its JSON text. Formats other than date-time, time, date,
            duration, email, hostname, ipv4, ipv6, uuid and uri are not enforced.

        Raises
        ------
        GrammarError
            If the schema is wrong, nothing fits it, or it uses what cannot be enforced token by token; named.
        """
        whole = _parsed(schema)
        return self._closed_or_open(lambda closed: f"start: %json {json.dumps(_styled(whole, closed))}\n", "the schema")

    def json_object(self) -> TokenConstraint:
        """The text is any JSON object."""
        return self.json_schema({"type": "object"})

    def regex(self, pattern: str) -> TokenConstraint:
        r"""The whole text matches a regular expression.

        Parameters
        ----------
        pattern
            In `Rust's syntax <https://docs.rs/regex/latest/regex/#syntax>`_, which is much like Python's without
            look-around and back-references.

        Raises
        ------
        GrammarError
            If it cannot be compiled.
        """
        return self._made(_as_rule(pattern), f"the pattern {pattern!r}")

    def choice(self, options: Sequence[str]) -> TokenConstraint:
        """The text is one of some strings.

        Raises
        ------
        GrammarError
            If there is none, or one is empty.
        """
        if isinstance(options, str) or not options or not all(isinstance(o, str) and o for o in options):
            raise GrammarError("a choice needs a list of strings, none of them empty.")
        return self._made(_as_rule("|".join(map(literal, options))), "the choice")

    def tool_calls(
        self, syntax: CallSyntax, tools: Mapping[str, Mapping[str, Any]], *, required: bool, parallel: bool
    ) -> TokenConstraint:
        """The text is, or may hold, calls of tools with arguments that fit their parameters.

        A call is a JSON object of the tool's name and the arguments, in that order. Nothing but further calls may
        follow one.

        Parameters
        ----------
        syntax
            How the model writes calls. What opens them may be a control token of the vocabulary; it then stands for
            itself, and its spelling in plain characters is forbidden.
        tools
            Names, and the JSON schemas of the parameters.
        required
            Whether the whole text is calls. If not, it may be free text, and leads to a call wherever the model opens
            one; in Llama 3's syntax a brace as the first character does.
        parallel
            Whether there may be several calls.

        Raises
        ------
        GrammarError
            If there is no tool, or a tool's parameters cannot be enforced; named.
        """
        if not tools:
            raise GrammarError("there are no tools to call: give at least one, or leave the constraint out.")
        for name, schema in tools.items():
            self._check_parameters(name, schema)

        def grammar(closed: bool) -> str:
            schemas = {name: _styled(_arguments(schema), closed) for name, schema in tools.items()}
            return call_grammar(
                *(syntax, schemas, self._segments, self._spelled.keys(), self._controls - self._ends),
                required=required,
                parallel=parallel,
            )

        return self._closed_or_open(grammar, "the tools")

    def _check_parameters(self, name: str, schema: Mapping[str, Any]) -> None:
        if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
            raise GrammarError(f"the parameters of the tool {name!r} must be a JSON schema of type object.")
        try:
            self.json_schema(_arguments(schema))
        except GrammarError as error:
            raise GrammarError(f"the tool {name!r}: {error}") from error

    def _closed_or_open(self, grammar: Callable[[bool], str], what: str) -> TokenConstraint:
        """A grammar whose objects are closed, or left open where closing them contradicts the rest of the schema."""
        try:
            return self._made(grammar(True), what)
        except GrammarError:
            return self._made(grammar(False), what)

    def _made(self, grammar: str, what: str) -> TokenConstraint:
        with self._lock:
            matcher = self._compiled.pop(grammar, None) or self._compile(grammar, what)
            self._compiled[grammar] = matcher
            if len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
            return _Constraint(matcher.deep_copy(), self._ends, self._width)

    def _compile(self, grammar: str, what: str) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(verbose_errors=False)  # or a message holds the whole grammar
        matcher = LLMatcher(self._vocabulary, LLMatcher.grammar_from_lark(grammar), log_level=0, limits=limits)
        if matcher.is_error():
            raise GrammarError(f"{what} cannot be enforced: {_reason(matcher.get_error())}")
        if not _Constraint(matcher.deep_copy(), self._ends, self._width).possible:
            raise GrammarError(f"{what} cannot be enforced: no text fits, or the vocabulary cannot spell one.")
        return matcher


class _Constraint:
    """One generation's place in a grammar."""

    def __init__(self, matcher: LLMatcher, ends: frozenset[int], width: int) -> None:
        self._matcher = matcher
        self._ends = ends
        self._end_index = torch.tensor(sorted(ends), dtype=torch.int64)
        self._width = width
        self._found: Tensor | None = None  # what may come next, once it is known
        self._ended = False

    def _allowed(self) -> Tensor:
        if self._found is None:
            bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
            if self._matcher.is_error():
                raise GrammarError(
                    "the grammar cannot go on here, because the vocabulary cannot spell what must follow or because it "
                    f"grew too complex: {_reason(self._matcher.get_error())}"
                )
            flags = np.unpackbits(bits, count=self._width, bitorder="little").astype(np.bool_)
            self._found = torch.from_numpy(flags)
        return self._found

    def mask(self, logits: Tensor) -> Tensor:
        if logits.shape != (self._width,):
            raise ConfigError(
                f"the logits have the shape {tuple(logits.shape)}, the grammar was made for ({self._width},): make it "
                "with the model's own vocabulary size."
            )
        return logits.masked_fill(~self._allowed(), float("-inf"))

    def advance(self, token_id: int) -> None:
        if self._ended:
            raise ConfigError("this constraint has ended: each generation needs a new one.")
        self._ended = token_id in self._ends
        if self._ended:
            return
        self._found = None
        if not self._matcher.consume_token(token_id):
            raise ConfigError(f"token {token_id} does not fit the grammar here: only what mask() allows may follow.")

    @property
    def finished(self) -> bool:
        if self._ended or self._matcher.is_stopped():
            return True
        return self._matcher.is_accepting() and not self._goes_on()

    @property
    def possible(self) -> bool:
        """Whether any text fits, as far as its first token tells."""
        try:
            return self._matcher.is_accepting() or self._goes_on()
        except GrammarError:
            return False

    def _goes_on(self) -> bool:
        allowed = self._allowed().clone()
        allowed[self._end_index] = False
        return bool(allowed.any())


class _Tokens:
    """A vocabulary as llguidance wants it."""

    def __init__(
        self, tokens: list[bytes], special: list[int], end: int, encode: Callable[[str], list[int]], known: set[int]
    ) -> None:
        self.tokens = tokens
        self.special_token_ids = special
        self.eos_token_id = end
        self.bos_token_id = None
        self._encode = encode
        self._known = known

    def __call__(self, text: str) -> list[int]:
        if not isinstance(text, str):
            raise TypeError("text, not bytes")
        ids = self._encode(text)
        return ids if self._known.issuperset(ids) else []


def _require_library() -> None:
    try:
        import_module("llguidance")
    except ImportError as error:
        raise MissingDependencyError(
            "structured output needs llguidance, which is not installed. "
            'Install it with: pip install "epic-rag[structured]"'
        ) from error


def _vocabulary(
    spelled: Mapping[int, bytes],
    width: int,
    ends: frozenset[int],
    controls: frozenset[int],
    segments: SegmentTokenizer,
) -> LLTokenizer:
    from llguidance import LLTokenizer, TokenizerWrapper

    # Ids without a token have no bytes, so no text leads to them. One more stands in for a missing end token.
    tokens = [spelled.get(i, b"") for i in range(width)] + [b"end"]
    # An end token that text could spell would end it anywhere.
    special = sorted(controls | ends | {width})
    wrapper = TokenizerWrapper(_Tokens(tokens, special, width, segments.encode_text, set(spelled)))
    return LLTokenizer(wrapper, eos_token=sorted(ends) or [width])


def _parsed(schema: Mapping[str, Any] | str | bool) -> Mapping[str, Any]:
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise GrammarError(f"the schema is no JSON: {error}.") from error
    if schema is True:
        return {}
    if schema is False:
        raise GrammarError("the schema false is unsatisfiable: nothing fits it.")
    if not isinstance(schema, Mapping):
        raise GrammarError(f"a JSON schema is an object, true or false, not {type(schema).__name__}.")
    try:
        json.dumps(schema, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise GrammarError(f"the schema is no JSON: {error}.") from error
    return schema


def _styled(schema: Mapping[str, Any], closed: bool) -> dict[str, Any]:
    ready = prepared(schema, closed=closed)
    check_satisfiable(ready)
    return {**ready, "x-guidance": _JSON_STYLE}


def _arguments(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object", **schema}


def _as_rule(pattern: str) -> str:
    """A pattern as a grammar; the slash would end it."""
    from llguidance import regex_to_lark

    return f"start: /{regex_to_lark(pattern, '')}/\n"


def _reason(error: str) -> str:
    """The library's message without the place in the grammar that we wrote."""
    text = error.split("failed to compile JSON schema: ")[-1].split("\n   1 |")[0].strip()
    if text.startswith("oneOf"):
        text = "oneOf is enforced only where its branches exclude each other; use anyOf"
    return text.rstrip(".") + "."
