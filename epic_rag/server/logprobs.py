"""Log-probabilities of tokens as OpenAI's objects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from epic_engine import TokenLogprob
from epic_engine.detokenizer import Detokenizer

__all__ = ["TextLogprobs", "chat_logprobs"]

_PART = "\ufffd"

Decode = Callable[[int], str]


def chat_logprobs(tokens: Sequence[TokenLogprob], decode: Decode) -> dict[str, Any]:
    """As chats have them.

    Parameters
    ----------
    tokens
        In the order of the answer.
    decode
        Text of one token, control tokens included.
    """

    def shown(token: int, value: float) -> dict[str, Any]:
        text = decode(token)
        # A token may be a part of a character, whose bytes no text has.
        return {"token": text, "logprob": value, "bytes": None if _PART in text else list(text.encode())}

    return {
        "content": [
            {**shown(one.token_id, one.logprob), "top_logprobs": [shown(*other) for other in one.top]} for one in tokens
        ]
    }


class TextLogprobs:
    """As completions have them, with each token's place in the answer; one for each answer.

    Parameters
    ----------
    tokenizer
        The engine's.
    decode
        Text of one token, control tokens included.
    """

    def __init__(self, tokenizer: Any, decode: Decode) -> None:
        self._text = Detokenizer(tokenizer)
        self._decode = decode

    def shown(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        """The next tokens of the answer."""
        offsets = []
        for one in tokens:
            offsets.append(len(self._text.text))
            self._text.push(one.token_id)
        return {
            "tokens": [self._decode(one.token_id) for one in tokens],
            "token_logprobs": [one.logprob for one in tokens],
            "top_logprobs": [{self._decode(token): value for token, value in one.top} for one in tokens],
            "text_offset": offsets,
        }
