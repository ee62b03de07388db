"""Segment-wise tokenisation: pieces of a prompt are encoded apart; only templates yield control tokens."""

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from epic_rag.errors import RagError

__all__ = ["SegmentTokenizer"]

# Holds U+10FFFF, which is no character in Unicode, so that text does not spell the unknown token's name.
_UNKNOWN = "\U0010ffffunknown\U0010ffff"
_INSIDE_BYTE_PIECE = re.compile(r"(?<=<)(?=0x[0-9A-Fa-f]{2}>)")


class SegmentTokenizer:
    """Encode and decode the segments of a prompt independently of each other.

    Two private backends are derived from the tokenizer when this object is made; later changes to the
    tokenizer (truncation, padding, added tokens) have no effect here. In both, everything that makes a
    segment's ids depend on where it starts (a prepended space, stripping) and everything that adds tokens
    on its own (BOS, EOS, padding) is switched off. All methods are deterministic and may be called from
    several threads.

    A token is a *control token* if it is flagged special, or if it is an added token that looks like a
    marker (``<think>``, ``[TOOL_CALLS]``) or that the chat template uses. Control tokens do not exist in the
    backend that encodes text, neither as added tokens nor in its vocabulary, so text can spell them but
    never produce them. The token for unknown characters is the exception: a vocabulary without byte
    fallback has nothing else to give. Other added tokens (runs of spaces, user-added words) stay ordinary.

    Parameters
    ----------
    tokenizer : transformers.PreTrainedTokenizerBase
        A fast tokenizer, i.e. one with a ``backend_tokenizer``.

    Raises
    ------
    RagError
        If the tokenizer has no ``tokenizers`` backend.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, Tokenizer):
            raise RagError(
                f"{type(tokenizer).__name__} is a slow tokenizer, without a `tokenizers` backend: "
                "load a fast one with AutoTokenizer.from_pretrained(...), or pass "
                "PreTrainedTokenizerFast(tokenizer_object=convert_slow_tokenizer(tokenizer))"
            )
        self._digest = hashlib.sha256(backend.to_str().encode()).hexdigest()
        spec = _position_independent(json.loads(backend.to_str()))
        self._template = Tokenizer.from_str(json.dumps(spec))
        added: list[dict[str, Any]] = spec["added_tokens"]
        special = set(tokenizer.all_special_tokens)
        used_by_template = _template_source(tokenizer)
        control = {token["content"]: token for token in added if _is_control(token, special, used_by_template)}
        control_ids = {token["id"] for token in control.values()}
        for content in special - control.keys():
            token_id = backend.token_to_id(content)
            if token_id is not None:
                control_ids.add(token_id)
        self._control_ids = frozenset(control_ids)
        self._control = control
        # The longest first: the same precedence as the backend's own matcher.
        names = sorted(control, key=lambda name: (-len(name), name))
        self._control_pattern = re.compile("|".join(map(re.escape, names))) if names else None

        never_text = self._control_ids - self._unknown_id(spec["model"], tokenizer)
        text_spec, self._ids = _without_tokens(spec, never_text)
        self._text = Tokenizer.from_str(json.dumps(text_spec))
        self._hides_bytes = spec["model"]["type"] == "Unigram" and bool(spec["model"].get("byte_fallback"))

    @staticmethod
    def _unknown_id(model: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
        unknown = _unknown_token(model)
        if unknown is None or unknown in (tokenizer.bos_token, tokenizer.eos_token):
            return frozenset()
        return frozenset([_vocabulary(model)[unknown]])

    @property
    def digest(self) -> str:
        """What token ids depend on: the backend's whole definition."""
        return self._digest

    @property
    def control_ids(self) -> frozenset[int]:
        """Ids of the tokens that text never produces."""
        return self._control_ids

    def encode_template(self, text: str) -> list[int]:
        """Encode template text: control tokens are recognised, nothing (BOS, EOS, space) is added.

        Parameters
        ----------
        text : str
            Text from the chat template or from this package, never from a user or a document.

        Returns
        -------
        list of int

        Raises
        ------
        RagError
            If the text holds lone surrogates.
        """
        return _encode(self._template, text)

    def encode_text(self, text: str) -> list[int]:
        """Encode the text of a document or a user: control tokens inside it are plain characters.

        Parameters
        ----------
        text : str
            Any text.

        Returns
        -------
        list of int
            Holds none of :attr:`control_ids`, save the token for unknown characters where the vocabulary
            cannot spell a character.

        Raises
        ------
        RagError
            If the text holds lone surrogates.
        """
        # A Unigram model's byte pieces, such as <0x0A>, match the same letters in the text, which would then
        # be decoded as a byte.
        parts = _INSIDE_BYTE_PIECE.split(text) if self._hides_bytes else [text]
        return [self._ids[token] for part in parts for token in _encode(self._text, part)]

    def encode_rendered(self, pieces: Iterable[tuple[str, bool]]) -> list[int]:
        """Encode one segment that mixes template and user text.

        Plain text of the template next to user text is encoded together with it, so that a word keeps the
        space before it, as it would if the whole segment were encoded at once.

        Parameters
        ----------
        pieces : iterable of (str, bool)
            Text, and whether it comes from the template (see :meth:`encode_template`) or not.

        Returns
        -------
        list of int

        Raises
        ------
        RagError
            If a text holds lone surrogates.
        """
        ids: list[int] = []
        plain: list[str] = []
        for text, is_template in pieces:
            if not is_template:
                plain.append(text)
                continue
            before, controls, after = self._split_at_control(text)
            plain.append(before)
            if controls:
                ids += self.encode_text("".join(plain)) + self.encode_template(controls)
                plain = [after]
        return ids + self.encode_text("".join(plain))

    def _split_at_control(self, text: str) -> tuple[str, str, str]:
        """Split into the plain text before the first control token, up to the last one, and the rest."""
        matches = list(self._control_pattern.finditer(text)) if self._control_pattern else []
        if not matches:
            return text, "", ""
        first, last = matches[0], matches[-1]
        before, after = text[: first.start()], text[last.end() :]
        # Some tokens swallow the white space beside them (Phi-3's <|end|>); the model was trained without it.
        if self._control[first.group()]["lstrip"]:
            before = before.rstrip()
        if self._control[last.group()]["rstrip"]:
            after = after.lstrip()
        return before, text[first.start() : last.end()], after

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids to text; control tokens are kept, spaces are not cleaned up.

        Parameters
        ----------
        ids : sequence of int
            Ids of one or several joined segments.

        Returns
        -------
        str
            ``decode(encode_text(a) + encode_text(b)) == a + b`` if the vocabulary spells every character.
        """
        return str(self._template.decode(list(ids), skip_special_tokens=False))


def _encode(backend: Tokenizer, text: str) -> list[int]:
    try:
        return list(backend.encode(text, add_special_tokens=False).ids)
    except TypeError:
        if not isinstance(text, str):
            raise
        raise RagError(
            "the text holds lone surrogates, which are not Unicode text: "
            'clean it with text.encode("utf-8", "replace").decode("utf-8")'
        ) from None


def _is_control(token: dict[str, Any], special: set[str], template: str) -> bool:
    content: str = token["content"]
    if token["special"] or content in special:
        return True
    if not content.replace("▁", " ").strip():
        return False
    looks_like_marker = len(content) > 2 and (content[0], content[-1]) in {("<", ">"), ("[", "]")}
    return looks_like_marker or content in template


def _template_source(tokenizer: PreTrainedTokenizerBase) -> str:
    template = tokenizer.chat_template
    if isinstance(template, dict):
        return "".join(template.values())
    return template or ""


def _position_independent(spec: dict[str, Any]) -> dict[str, Any]:
    """Copy a tokenizer's JSON with all that depends on the start of the text, or on chance, switched off."""
    return {
        **spec,
        "truncation": None,
        "padding": None,
        "post_processor": None,
        "normalizer": _plain_stage(spec["normalizer"], "normalizers"),
        "pre_tokenizer": _plain_stage(spec["pre_tokenizer"], "pretokenizers"),
        "decoder": _plain_stage(spec["decoder"], "decoders"),
        "model": {**spec["model"], "dropout": None} if spec["model"]["type"] == "BPE" else spec["model"],
    }


def _plain_stage(stage: dict[str, Any] | None, children: str) -> dict[str, Any] | None:
    match stage:
        case None | {"type": "Prepend" | "Strip"}:
            return None
        case {"type": "Sequence"}:
            kept = [plain for child in stage[children] if (plain := _plain_stage(child, children))]
            return {**stage, children: kept} if kept else None
        case {"type": "Metaspace"}:
            return {**stage, "prepend_scheme": "never"}
        case {"type": "ByteLevel"}:
            return {**stage, "add_prefix_space": False}
        case {"type": "WordPiece"}:
            return {**stage, "cleanup": False}
        case _:
            return stage


def _vocabulary(model: dict[str, Any]) -> dict[str, int]:
    """Token to id; a Unigram model keeps a list of (piece, score), all others a mapping."""
    if model["type"] == "Unigram":
        return {piece: index for index, (piece, _) in enumerate(model["vocab"])}
    vocabulary: dict[str, int] = model["vocab"]
    return vocabulary


def _unknown_token(model: dict[str, Any]) -> str | None:
    if model["type"] == "Unigram":
        return None if model["unk_id"] is None else str(model["vocab"][model["unk_id"]][0])
    token: str | None = model.get("unk_token")
    return token if token in model["vocab"] else None


def _without_tokens(spec: dict[str, Any], removed: frozenset[int]) -> tuple[dict[str, Any], list[int]]:
    """Copy a tokenizer's JSON in which the removed ids do not exist.

    Returns
    -------
    spec : dict
        Its ids are renumbered without gaps: the backend numbers added tokens from the size of the vocabulary,
        where a gap would let two tokens share an id.
    ids : list of int
        The original id of every new one.
    """
    model = spec["model"]
    vocabulary = _vocabulary(model)
    unknown = _unknown_token(model)
    added = [token for token in spec["added_tokens"] if token["id"] not in removed]
    # An unknown token that is an added token would be recognised by its name in the text.
    added = [token for token in added if token["content"] != unknown]
    controls = {token["content"] for token in spec["added_tokens"]} - {token["content"] for token in added}
    kept = sorted(
        (index, token)
        for token, index in vocabulary.items()
        if token == unknown or (index not in removed and token not in controls)
    )
    if unknown is not None and vocabulary[unknown] in removed:
        kept = [(index, token) for index, token in kept if token != unknown]
        unknown = None
    ids = [index for index, _ in kept]
    names = [_UNKNOWN if token == unknown else token for _, token in kept]
    ids += [token["id"] for token in added if token["content"] not in vocabulary]
    numbers = {token: number for number, token in enumerate(names)}
    added = [{**token, "id": numbers.setdefault(token["content"], len(numbers))} for token in added]
    return {**spec, "added_tokens": added, "model": _with_vocabulary(model, names, unknown is not None)}, ids


def _with_vocabulary(model: dict[str, Any], names: list[str], has_unknown: bool) -> dict[str, Any]:
    if model["type"] == "Unigram":
        scores = dict(model["vocab"])
        unknown_score = 0.0 if model["unk_id"] is None else model["vocab"][model["unk_id"]][1]
        return {
            **model,
            "vocab": [[name, scores.get(name, unknown_score)] for name in names],
            "unk_id": names.index(_UNKNOWN) if has_unknown else None,
        }
    vocabulary = {name: number for number, name in enumerate(names)}
    model = {**model, "vocab": vocabulary, "unk_token": _UNKNOWN if has_unknown else None}
    if model["type"] == "BPE":
        prefix = model.get("continuing_subword_prefix") or ""
        pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
        model["merges"] = [
            [left, right]
            for left, right in pairs
            if left in vocabulary and right in vocabulary and left + right.removeprefix(prefix) in vocabulary
        ]
    elif not has_unknown:
        raise RagError(
            f"this {model['type']} tokenizer uses its BOS or EOS token for unknown words, "
            "so text could end the prompt: give it an unk_token of its own"
        )
    return model
