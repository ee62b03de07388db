"""Random walks through grammars, and whether a text can be written under one."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache

import torch
from epic_engine import TokenConstraint
from transformers import PreTrainedTokenizerFast

from epic_rag._token_bytes import token_bytes
from epic_rag.structured import Grammars
from tests.rag.tokenizers_for_tests import byte_level, sentencepiece

PADDING = 13
ENDS = {"bytes": ["<|endoftext|>", "<|im_end|>"], "pieces": ["</s>"]}
KINDS = sorted(ENDS)


@lru_cache(maxsize=4)
def tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """Byte-level with control tokens for calls, or SentencePiece's kind without."""
    return byte_level() if kind == "bytes" else sentencepiece()


def end_ids(kind: str) -> list[int]:
    return tokenizer(kind).convert_tokens_to_ids(ENDS[kind])


@lru_cache(maxsize=4)
def grammars(kind: str) -> Grammars:
    return Grammars(tokenizer(kind), len(tokenizer(kind)) + PADDING, end_ids(kind))


def legal(constraint: TokenConstraint, kind: str) -> set[int]:
    masked = constraint.mask(torch.zeros(len(tokenizer(kind)) + PADDING))
    assert set(masked.unique().tolist()) <= {0.0, -torch.inf}
    return set(torch.nonzero(masked == 0).flatten().tolist())


def text_of(ids: Sequence[int], kind: str) -> str:
    return b"".join(token_bytes(tokenizer(kind))[i] for i in ids).decode()


def walk(
    constraint: TokenConstraint, kind: str, seed: int, most: int = 300, push: str = '"}],'
) -> tuple[list[int], bool]:
    """Random tokens of those that are legal, more of them such as close something; and whether the text ended."""
    rng = random.Random(seed)
    spelled = token_bytes(tokenizer(kind))
    closing = {i for i, text in spelled.items() if len(text) == 1 and text.decode("latin1") in push}
    ends = set(end_ids(kind))
    ids: list[int] = []
    while len(ids) < most and not constraint.finished:
        found = sorted(legal(constraint, kind))
        weights = [len(found) / 2 if i in closing or i in ends else 1.0 for i in found]
        token = rng.choices(found, weights)[0]
        constraint.advance(token)
        if token in ends:
            return ids, True
        ids.append(token)
    return ids, constraint.finished


def accepts(constraint: TokenConstraint, text: str, kind: str = "bytes") -> bool:
    """Whether a text can be written and can end there, in single bytes and whatever else is forced."""
    rest = text.encode()
    spelled = token_bytes(tokenizer(kind))
    while rest:
        # A grammar may insist on the tokenizer's own way to cut what it forces.
        fitting = [i for i in legal(constraint, kind) if spelled.get(i) and rest.startswith(spelled[i])]
        if not fitting:
            return False
        token = max(fitting, key=lambda i: len(spelled[i]))
        constraint.advance(token)
        rest = rest[len(spelled[token]) :]
    return bool(legal(constraint, kind) & set(end_ids(kind)))
