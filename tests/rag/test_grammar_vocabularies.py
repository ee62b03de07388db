"""Grammars over vocabularies of every kind: bytes, control tokens, ends, padding."""

from __future__ import annotations

import random
import sys

import pytest
import torch
from epic_engine import ConfigError
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from epic_rag._token_bytes import token_bytes
from epic_rag.errors import GrammarError, MissingDependencyError, RagError
from epic_rag.structured import Grammars
from tests.rag.grammar_walks import KINDS, PADDING, end_ids, grammars, legal, tokenizer
from tests.rag.tokenizers_for_tests import byte_level, sentencepiece


@pytest.mark.parametrize(
    "made",
    [byte_level(), sentencepiece(), sentencepiece(scheme="first"), sentencepiece(scheme="unigram")],
    ids=["bytes", "normalizer", "first", "unigram"],
)
def test_tokens_bytes_are_what_the_decoder_makes_of_them(made: PreTrainedTokenizerFast) -> None:
    spelled = token_bytes(made)
    assert sorted(spelled) == sorted(made.get_vocab().values())
    rng = random.Random(3)
    anchor = made.convert_tokens_to_ids("a")  # the decoder drops the first space
    for _ in range(200):
        ids = [anchor, *(rng.choice(sorted(spelled)) for _ in range(8))]
        text = b"".join(spelled[i] for i in ids)
        try:
            text.decode()
        except UnicodeDecodeError:
            continue  # how many replacement characters stand for broken bytes is the decoder's own affair
        assert made.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False) == text.decode()


def test_a_prepended_space_does_not_matter() -> None:
    prefixed = byte_level(add_prefix_space=True)
    constraint = Grammars(prefixed, len(prefixed), [2]).json_schema({"const": [1]})
    assert constraint.mask(torch.zeros(len(prefixed)))[prefixed.convert_tokens_to_ids("[")] == 0


@pytest.mark.parametrize("kind", KINDS)
def test_padding_and_ends_inside_the_text_are_never_legal(kind: str) -> None:
    known = set(token_bytes(tokenizer(kind)))
    text = '{"a": 12}'
    constraint = grammars(kind).json_object()
    spelled = token_bytes(tokenizer(kind))
    for at in range(len(text)):
        found = legal(constraint, kind)
        assert found <= known
        assert not found & set(end_ids(kind))
        byte = text[at].encode()
        constraint.advance(next(i for i in sorted(found) if spelled[i] == byte))
    assert constraint.finished
    assert legal(constraint, kind) == set(end_ids(kind))


def test_an_ordinary_token_may_be_the_end() -> None:
    brace, full_stop = tokenizer("bytes").convert_tokens_to_ids(["}", "."])
    made = Grammars(tokenizer("bytes"), len(tokenizer("bytes")) + PADDING, [full_stop])
    inside = made.json_schema({"type": "string"})
    inside.advance(tokenizer("bytes").convert_tokens_to_ids('"'))
    assert brace in legal(inside, "bytes")
    assert full_stop not in legal(inside, "bytes")
    constraint = made.regex("a.*")
    constraint.advance(tokenizer("bytes").convert_tokens_to_ids("a"))
    assert {brace, full_stop} <= legal(constraint, "bytes")
    constraint.advance(full_stop)
    assert constraint.finished


def test_without_end_tokens_a_text_ends_where_nothing_can_follow() -> None:
    constraint = Grammars(tokenizer("bytes"), len(tokenizer("bytes")) + PADDING, []).choice(["ab"])
    for token in tokenizer("bytes")("ab", add_special_tokens=False)["input_ids"]:
        assert not constraint.finished
        constraint.advance(token)
    assert constraint.finished
    assert legal(constraint, "bytes") == set()


def test_the_empty_text_is_finished_at_once() -> None:
    assert grammars("bytes").regex("").finished
    assert not grammars("bytes").regex("a?").finished


def test_a_model_with_fewer_logits_than_tokens_draws_what_it_has() -> None:
    width = 200
    constraint = Grammars(tokenizer("bytes"), width, [2, 10_000]).json_object()
    masked = constraint.mask(torch.zeros(width))
    assert masked[tokenizer("bytes").convert_tokens_to_ids("{")] == 0


def test_a_text_that_the_vocabulary_cannot_spell_is_told() -> None:
    backend = Tokenizer(models.BPE({"<s>": 0, "a": 1, "▁": 2}, [], unk_token="<s>"))
    backend.decoder = decoders.Metaspace()
    poor = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<s>")
    made = Grammars(poor, 3, [0])
    assert made.choice(["a"]).mask(torch.zeros(3)).tolist() == [-torch.inf, 0, -torch.inf]
    with pytest.raises(GrammarError, match="vocabulary cannot spell"):
        made.choice(["b"])


def test_other_tokenizers_are_refused() -> None:
    backend = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(GrammarError, match="WordPiece"):
        Grammars(PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]"), 2, [0])
    with pytest.raises(RagError, match="slow tokenizer"):
        Grammars(object(), 2, [0])  # type: ignore[arg-type]


def test_a_missing_library_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(MissingDependencyError, match=r'pip install "epic-rag\[structured\]"'):
        Grammars(tokenizer("bytes"), len(tokenizer("bytes")), [2])


def test_misuse_is_told() -> None:
    constraint = grammars("bytes").choice(["ab"])
    with pytest.raises(ConfigError, match="vocabulary size"):
        constraint.mask(torch.zeros(5))
    with pytest.raises(ConfigError, match="does not fit"):
        constraint.advance(tokenizer("bytes").convert_tokens_to_ids("x"))
    ended = grammars("bytes").regex("a*")
    ended.advance(2)
    assert ended.finished
    with pytest.raises(ConfigError, match="needs a new one"):
        ended.advance(2)
