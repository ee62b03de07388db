"""What a gateway's answers ought to be: the engine's own, for prompts that are rendered and cut without our code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from epic_engine import Completion, SamplingParams

from tests.rag.stack import tokenizer
from tests.server.running import Running

__all__ = ["engines_own", "plain_ids", "rendered"]


def plain_ids(text: str) -> list[int]:
    """Token ids, by the tokenizer alone."""
    return tokenizer()(text, add_special_tokens=False)["input_ids"]  # type: ignore[no-any-return]


def rendered(messages: Sequence[Mapping[str, str]]) -> str:
    """A conversation, by the tokenizer's own template."""
    return str(tokenizer().apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True))


def engines_own(
    gateway: Running, prompt: str | Sequence[int], chunks: Sequence[str] = (), policy: str = "naive", **sampling: Any
) -> Completion:
    """The engine's greedy answer to a prompt that is cut at some texts, each compiled alone."""
    stop = (tokenizer().convert_tokens_to_ids("<|im_end|>"),)
    params = SamplingParams(**{"max_tokens": 8, "stop_token_ids": stop, **sampling})
    if not isinstance(prompt, str):
        return gateway.engine.generate([list(prompt)], params, policy=policy)
    left, parts = prompt, list[Any]()
    for chunk in chunks:
        before, _, left = left.partition(chunk)
        parts += [plain_ids(before), gateway.engine.compile(plain_ids(chunk), "isolated")]
    return gateway.engine.generate([*parts, plain_ids(left)], params, policy=policy)
