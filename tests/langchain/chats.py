"""The tiny chat model, and what its answers ought to be."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from epic_engine import ChunkKey, Engine, SamplingParams
from langchain_epic import ChatEpic

from tests.rag.stack import TEXTS, model, tokenizer

POLICY = "legolink:4"
TOKENS = 8


def tiny_chat(store: Path | None = None, **settings: Any) -> ChatEpic:
    """A chat model on the tiny model."""
    settings = {"context": "isolated", "policy": POLICY, "max_tokens": TOKENS, **settings}
    return ChatEpic.from_loaded(model(), tokenizer(), store=store, engine_options={"selftest": False}, **settings)


def engines_own(
    engine: Engine,
    messages: Sequence[dict[str, str]],
    texts: Sequence[str] = tuple(TEXTS.values()),
    *,
    policy: str = POLICY,
    hf: Any = None,
    **sampling: Any,
) -> tuple[str, int, int]:
    """Straight from the engine: the answer, the prompt's tokens, and how many of them are texts'.

    The prompt is rendered by the tokenizer's own template and cut with ``str.split``.
    """
    hf = hf or tokenizer()
    parts: list[str] = [hf.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)]
    for text in texts:
        own = text.strip()
        parts = [piece for part in parts for piece in (_cut(part, own) if part != own else [part])]
    prompt: list[list[int] | ChunkKey] = []
    linked = length = 0
    for part in parts:
        ids = hf(part, add_special_tokens=False)["input_ids"]
        length += len(ids)
        if part in {t.strip() for t in texts}:
            linked += len(ids)
            prompt.append(engine.compile(ids, "isolated"))
        elif ids:
            prompt.append(ids)
    stop_ids = tuple(hf.convert_tokens_to_ids(["<|im_end|>"]))
    params = SamplingParams(**{"max_tokens": TOKENS, "stop_token_ids": stop_ids, **sampling})
    return engine.generate(prompt, params, policy=policy).text, length, linked


def _cut(part: str, text: str) -> list[str]:
    return [x for piece in part.split(text) for x in (piece, text)][:-1]
