"""The bytes that each token of a vocabulary stands for."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from epic_rag.errors import GrammarError

__all__ = ["token_bytes"]

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def token_bytes(tokenizer: PreTrainedTokenizerBase) -> dict[int, bytes]:
    """Bytes of every token, as the tokenizer's decoder spells it inside a text.

    Parameters
    ----------
    tokenizer
        A fast tokenizer: byte-level BPE (GPT-2, Llama 3, Qwen), or SentencePiece's kinds (Llama 2, Mistral, Gemma).

    Raises
    ------
    GrammarError
        If its decoder is of another kind, such as WordPiece's, where a token's text depends on its neighbours.
    """
    backend = tokenizer.backend_tokenizer
    decoder = json.loads(backend.to_str())["decoder"]
    stages = list(_stages(decoder))
    kinds = {stage["type"] for stage in stages}
    spell: Callable[[str], bytes]
    if "ByteLevel" in kinds:
        spell = partial(_byte_level, letters=_byte_level_letters())
    elif kinds & {"Metaspace", "ByteFallback"} and not kinds & {"WordPiece", "BPEDecoder", "CTC"}:
        spaces = {stage["replacement"] for stage in stages if stage["type"] == "Metaspace"}
        replaced = {s["pattern"].get("String"): s["content"] for s in stages if s["type"] == "Replace"}
        spelled = {**dict.fromkeys(spaces, " "), **replaced}
        spell = partial(_sentencepiece, spelled=spelled, byte_fallback="ByteFallback" in kinds)
    else:
        raise GrammarError(
            f"the tokenizer's decoder ({', '.join(sorted(kinds)) or 'none'}) is neither byte-level nor "
            "SentencePiece's, so no grammar can be laid over its tokens: use a model with such a tokenizer."
        )
    return {token_id: spell(token) for token, token_id in backend.get_vocab(with_added_tokens=True).items()}


def _stages(decoder: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    if decoder is None:
        return
    yield decoder
    for child in decoder.get("decoders", ()):
        yield from _stages(child)


def _byte_level_letters() -> dict[str, int]:
    """GPT-2's letters for bytes: the printable ones stand for themselves, the others follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {**{chr(byte): byte for byte in printable}, **{chr(256 + n): byte for n, byte in enumerate(others)}}


def _byte_level(token: str, letters: dict[str, int]) -> bytes:
    # Added tokens, such as a run of spaces, may hold letters that stand for no byte; the decoder leaves those whole.
    known = [letters.get(character) for character in token]
    return token.encode() if None in known else bytes(byte for byte in known if byte is not None)


def _sentencepiece(token: str, spelled: dict[str, str], byte_fallback: bool) -> bytes:
    piece = _BYTE_PIECE.fullmatch(token) if byte_fallback else None
    if piece:
        return bytes([int(piece[1], 16)])
    for written, meant in spelled.items():
        token = token.replace(written, meant)
    return token.encode("utf-8", "surrogatepass")
