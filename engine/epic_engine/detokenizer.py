"""Text of generated tokens as it grows: whole characters only, cut at stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["Detokenizer"]

_INCOMPLETE = "\ufffd"


class Detokenizer:
    """Turns one request's tokens into text pieces.

    A piece is held back while it may be half a multi-byte character or the beginning of a stop string.

    Parameters
    ----------
    tokenizer
        A Hugging Face tokenizer; None gives no text.
    stop
        Strings that end the text; they are not part of it.
    visible
        Ids of special tokens that stay in the text; all others are left out of it.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = (), visible: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._hidden: frozenset[int] | None = None  # None: what the tokenizer itself leaves out
        if visible and tokenizer is not None:
            special = (token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special)
            self._hidden = frozenset(special) - frozenset(visible)
        self._stop = tuple(stop)
        self._ids: list[int] = []
        self._from = 0  # tokens before this are only context for the decoder's spacing
        self._done = 0  # tokens before this are in the text
        self._held = ""
        self.text = ""
        self.stopped = False

    def _decode(self, ids: Sequence[int]) -> str:
        shown = [i for i in ids if self._hidden is None or i not in self._hidden]
        skip = self._hidden is None
        return str(self._tokenizer.decode(shown, skip_special_tokens=skip, clean_up_tokenization_spaces=False))

    def push(self, token_id: int) -> str:
        """Add a token; returns the text that is now certain (often empty)."""
        if self._tokenizer is None or self.stopped:
            return ""
        self._ids.append(token_id)
        before = self._decode(self._ids[self._from : self._done])
        now = self._decode(self._ids[self._from :])
        if now.endswith(_INCOMPLETE):
            return ""
        if now != before:  # a token without text (a special one) is no context: a space after it would be lost
            self._from = self._done
        self._done = len(self._ids)
        return self._release(now[len(before) :], final=False)

    def finish(self) -> str:
        """No more tokens: returns what was held back, without an unfinished character."""
        if self._tokenizer is None or self.stopped:
            return ""
        before = self._decode(self._ids[self._from : self._done])
        rest = self._decode(self._ids[self._from :])[len(before) :]
        return self._release(rest.rstrip(_INCOMPLETE), final=True)

    def _release(self, piece: str, *, final: bool) -> str:
        text = self._held + piece
        # The stop string that is complete first ends the text, however the text was cut into tokens.
        cuts = [(at + len(s), at) for s in self._stop if (at := text.find(s)) >= 0]
        if cuts:
            self.stopped = True
            text, self._held = text[: min(cuts)[1]], ""
        elif final:
            self._held = ""
        else:
            keep = self._possible_stop(text)
            text, self._held = text[: len(text) - keep], text[len(text) - keep :]
        self.text += text
        return text

    def _possible_stop(self, text: str) -> int:
        """Length of the longest end of ``text`` that begins a stop string."""
        longest = 0
        for stop in self._stop:
            for n in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:n]):
                    longest = n
                    break
        return longest
