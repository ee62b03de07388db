"""Prompts as segments: a head, the documents, and a tail, each encoded apart."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from epic_rag.call_syntax import CallSyntax, marker_texts
from epic_rag.errors import RagError
from epic_rag.rendering import render_template
from epic_rag.slots import DOCUMENTS_SLOT, Piece, Slots
from epic_rag.tokenization import SegmentTokenizer
from epic_rag.tool_prompts import ToolPrompts, has_tools

__all__ = ["DEFAULT_DOCUMENTS_HEADER", "DEFAULT_SYSTEM_PROMPT", "PromptComposer", "TextPart"]

DEFAULT_SYSTEM_PROMPT = "Answer the question in one short sentence, using only the facts in the documents."
DEFAULT_DOCUMENTS_HEADER = "Documents:\n\n"

_PLAIN_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ message['content'] + '\n\n' }}"
    "{% else %}{{ message['role'] | capitalize + ': ' + message['content'] + '\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)

_Message = Mapping[str, str]


@dataclass(frozen=True)
class TextPart:
    """A piece of a prompt's text.

    Attributes
    ----------
    text
        The text.
    name
        Of the compiled text that it is; None for text that was not compiled.
    """

    text: str
    name: str | None = None


class PromptComposer:
    """Lay out chat prompts as ``[head][chunk]…[tail]``, following the model's chat template.

    The documents stand at the head of the first user turn, before the question::

        <system> system prompt <user> Documents:⏎⏎ │ chunk │ chunk │ Question: … <assistant>
        └──────────────── head ──────────────────┘                 └───────── tail ────────┘

    A segment's ids never depend on its neighbours. The template's own text is the only source of control
    tokens; whatever comes from users or documents is encoded as plain text. A template that refuses or drops
    the system role has the system prompt folded into the first user turn. A tokenizer without chat template
    gets a plain ``User: … Assistant:`` layout, with BOS if the tokenizer itself adds one.

    Parameters
    ----------
    tokenizer : transformers.PreTrainedTokenizerBase
        A fast tokenizer.
    system_prompt : str
        Used where the messages hold no system turn; empty for none.
    documents_header : str
        Stands before the first document.
    question_prefix : str
        Stands before the question that follows the documents.
    template_options : mapping, optional
        Passed to the chat template, such as ``{"enable_thinking": False}``.

    Raises
    ------
    RagError
        If the tokenizer is a slow one, or its chat template cannot be used.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        system_prompt: str = DEFAULT_SYSTEM_PROMPT,
        documents_header: str = DEFAULT_DOCUMENTS_HEADER,
        question_prefix: str = "Question: ",
        template_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.tokenizer = SegmentTokenizer(tokenizer)
        self.system_prompt = system_prompt
        self.documents_header = documents_header
        self.question_prefix = question_prefix
        self._hf_tokenizer = tokenizer
        self._options = dict(template_options or {})
        if tokenizer.chat_template is None:
            self._template = ("{{ bos_token }}" if _adds_bos(tokenizer) else "") + _PLAIN_TEMPLATE
            self._tool_template = self._template
        else:
            self._template = tokenizer.get_chat_template()
            # Some models have a template of its own for tools.
            self._tool_template = tokenizer.get_chat_template(tools=[])
        self._folds_system = not self._accepts_system()
        head, _, self._head_slots = self._split([{"role": "user", "content": "Q"}], with_documents=True)
        self._head_ids = self._encode(head)
        self._stop_token_ids = self._find_stop_tokens()

    @property
    def head_ids(self) -> tuple[int, ...]:
        """Ids of the prompt up to the first document: BOS as the template gives it, system prompt, header."""
        return self._head_ids

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end an answer: EOS, and the token with which the template closes the assistant's turn."""
        return self._stop_token_ids

    def frame(self, text: str, title: str = "") -> str:
        """Put a document into the frame in which it stands in every prompt.

        Parameters
        ----------
        text : str
            The document's or chunk's text, kept as it is.
        title : str
            Put on a line of its own before the text; runs of white space become one space.

        Returns
        -------
        str
            Title line, text and a blank line, the same at every place in a prompt.
        """
        title = " ".join(title.split())
        return f"{title}\n{text}\n\n" if title else f"{text}\n\n"

    def encode_chunk(self, text: str, title: str = "") -> tuple[int, ...]:
        """Encode a document in its frame, as plain text.

        Parameters
        ----------
        text, title : str
            See :meth:`frame`.

        Returns
        -------
        tuple of int
            Shape (n_tokens,).

        Raises
        ------
        RagError
            If the text holds lone surrogates.
        """
        return tuple(self.tokenizer.encode_text(self.frame(text, title)))

    def tail_ids(self, question: str, history: Sequence[_Message] | None = None) -> tuple[int, ...]:
        """Encode what follows the documents: the question and the opening of the assistant's turn.

        Parameters
        ----------
        question : str
            The question to answer.
        history : sequence of {"role", "content"}, optional
            Earlier turns, the first of them the user's. They stand between the documents and the question.

        Returns
        -------
        tuple of int
            Shape (n_tokens,).

        Raises
        ------
        RagError
            If the question is blank, or the history does not start with a user turn, holds a system turn, or
            makes the chat template change the head; :meth:`compose_messages` composes such prompts.
        """
        messages = [*(history or ()), {"role": "user", "content": question}]
        if messages[0].get("role") != "user" or any(message.get("role") == "system" for message in messages):
            raise RagError(
                "the history must start with a user turn and hold no system turn, since the head of the "
                "prompt is fixed: pass all messages to compose_messages instead"
            )
        _, tail, head_slots = self._split(messages, with_documents=True)
        if head_slots != self._head_slots:
            raise RagError(
                "this chat template moves the system prompt when there is a history, so the head of the "
                "prompt changes: pass all messages to compose_messages instead"
            )
        return self._encode(tail)

    def compose(self, chunks: Sequence[tuple[int, ...]], question: str) -> list[tuple[int, ...]]:
        """Compose the prompt for one question.

        Parameters
        ----------
        chunks : sequence of tuple of int
            From :meth:`encode_chunk`, in prompt order.
        question : str
            The question to answer.

        Returns
        -------
        list of tuple of int
            The segments [head, *chunks, tail].

        Raises
        ------
        RagError
            If the question is blank or holds lone surrogates.
        """
        return [self._head_ids, *chunks, self.tail_ids(question)]

    def compose_messages(
        self, messages: Sequence[_Message], chunks: Sequence[tuple[int, ...]]
    ) -> list[tuple[int, ...]]:
        """Compose the prompt for a conversation, the documents at the head of its first user turn.

        Parameters
        ----------
        messages : sequence of {"role", "content"}
            Roles are "system", "user" and "assistant"; the last turn is the user's. System turns are gathered
            at the top, and turns of one role in a row are merged, joined by a blank line.
        chunks : sequence of tuple of int
            From :meth:`encode_chunk`, in prompt order. Without chunks there is no documents header and no
            question prefix.

        Returns
        -------
        list of tuple of int
            The segments [head, *chunks, tail].

        Raises
        ------
        RagError
            If the last turn is not the user's or is blank, a role is unknown, a content is not a string, or
            the chat template refuses the messages.
        """
        head, tail, _ = self._split(messages, with_documents=bool(chunks))
        return [self._encode(head), *chunks, self._encode(tail)]

    @property
    def call_syntax(self) -> CallSyntax:
        """How the model writes tool calls: as its chat template does, or as it is told in the system message."""
        return self._tool_prompts.template.syntax

    @property
    def call_token_ids(self) -> tuple[int, ...]:
        """Ids of the control tokens that mark tool calls: calls are found in texts that keep them."""
        known = self._hf_tokenizer.added_tokens_encoder
        return tuple(known[text] for text in marker_texts(self.call_syntax) if text in known)

    @cached_property
    def _tool_prompts(self) -> ToolPrompts:
        return ToolPrompts(partial(self._render, template=self._tool_template), self.tokenizer)

    def segments(
        self,
        messages: Sequence[Mapping[str, Any]],
        find: Callable[[str], Sequence[TextPart]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> list[tuple[int, ...] | TextPart]:
        """Compose the prompt for a conversation whose messages may hold compiled texts anywhere.

        Parameters
        ----------
        messages : sequence of {"role", "content"}
            As for :meth:`compose_messages`. Beyond these, a message of the assistant may hold ``"tool_calls"``, a
            sequence of :class:`~epic_rag.tool_calls.ToolCall`, and ``{"role": "tool", "content", "tool_call_id",
            "name"}`` is the result of one; it may come last.
        find : callable
            Cuts a message's text into compiled texts and what stands between them. Compiled texts in a result
            stand as they are where the template makes a JSON string of it.
        tools : sequence of mappings
            Definitions in OpenAI's form, ``{"type": "function", "function": {…}}``.

        Returns
        -------
        list of tuple of int or TextPart
            Token ids, and the compiled texts among them, in order.

        Raises
        ------
        RagError
            As for :meth:`compose_messages`, or if a result follows no call, or a tool or call is not JSON.
        """
        if tools or has_tools(messages):
            return self._cut(self._tool_prompts.pieces(messages, tools, self.system_prompt), find)
        head, tail, _ = self._split(messages, with_documents=False)
        return self._cut([*head, *tail], find)

    def formatted_segments(
        self, text: str, find: Callable[[str], Sequence[TextPart]]
    ) -> list[tuple[int, ...] | TextPart]:
        """As :meth:`segments`, for a prompt that carries its chat template already.

        Control tokens that the text spells are control tokens, save in compiled texts.
        """
        return self._encode_parts((part, True) for part in find(text))

    def _cut(
        self, pieces: Sequence[Piece], find: Callable[[str], Sequence[TextPart]]
    ) -> list[tuple[int, ...] | TextPart]:
        def parts_of(piece: Piece) -> Iterable[TextPart]:
            if piece.is_template or not piece.searched:
                return [TextPart(piece.shown)]
            return [TextPart(piece.escape(p.text)) if p.name is None else p for p in find(piece.text)]

        return self._encode_parts((part, piece.is_template) for piece in pieces for part in parts_of(piece))

    def _encode(self, pieces: Iterable[Piece]) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode_rendered((piece.shown, piece.is_template) for piece in pieces))

    def _encode_parts(self, parts: Iterable[tuple[TextPart, bool]]) -> list[tuple[int, ...] | TextPart]:
        found: list[tuple[int, ...] | TextPart] = []
        pending: list[tuple[str, bool]] = []
        for part, is_template in [*parts, (TextPart("", ""), True)]:
            if part.name is None:
                pending.append((part.text, is_template))
                continue
            ids = tuple(self.tokenizer.encode_rendered(pending))
            pending = []
            found += [ids] if ids else []
            found += [part] if part.name else []
        return found

    def text_of(self, segments: Sequence[Sequence[int]]) -> str:
        """Decode segments and join their texts, control tokens included.

        Parameters
        ----------
        segments : sequence of sequences of int
            From :meth:`compose` or :meth:`compose_messages`.

        Returns
        -------
        str
        """
        return "".join(self.tokenizer.decode(segment) for segment in segments)

    def _split(
        self, messages: Sequence[_Message], with_documents: bool
    ) -> tuple[list[Piece], list[Piece], tuple[int, ...]]:
        """Render the messages and split them where the documents belong.

        Returns the pieces before and after, and the numbers of the placeholders before.
        """
        system, turns = _merge(messages)
        system = system or self.system_prompt
        slots = Slots()
        rendered_turns: list[dict[str, Any]] = []
        if system and not self._folds_system:
            rendered_turns.append({"role": "system", "content": slots.hide(system)})
        first_user = True
        # Without documents the head ends where the user's first words begin.
        cut_slot = 0 if with_documents else None
        for role, content in turns:
            lead = ""
            if role == "user" and first_user:
                first_user = False
                if system and self._folds_system:
                    lead = slots.hide(system) + "\n\n"
                if with_documents:
                    lead += slots.hide(self.documents_header) + DOCUMENTS_SLOT
                    content = self.question_prefix + content
            if role == "user" and cut_slot is None and content.strip():
                cut_slot = len(slots.texts)
            rendered_turns.append({"role": role, "content": lead + slots.hide(content)})
        pieces, numbers = slots.pieces(self._render(rendered_turns))
        if sorted(numbers) != list(range(0 if with_documents else 1, len(slots.texts))):
            raise RagError(
                "the chat template drops, repeats or rewrites a message's content, so the prompt cannot be "
                "split into segments: pass a tokenizer with another chat_template"
            )
        before = numbers[: numbers.index(cut_slot)] if cut_slot is not None else numbers
        cut = 2 * len(before) + 1
        return pieces[:cut], pieces[cut + with_documents :], tuple(before)

    def _render(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        template: str | None = None,
    ) -> str:
        chosen = self._template if template is None else template
        return render_template(self._hf_tokenizer, chosen, messages, add_generation_prompt, tools, self._options)

    def _accepts_system(self) -> bool:
        slots = Slots()
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": slots.hide("S")},
            {"role": "user", "content": slots.hide("Q")},
        ]
        try:
            rendered = self._render(messages)
        except RagError:
            return False
        # Some templates ignore the system turn without a word.
        return messages[0]["content"] in rendered

    def _find_stop_tokens(self) -> tuple[int, ...]:
        stops: list[int] = []
        eos = self._hf_tokenizer.eos_token_id
        if eos is not None:
            stops.append(int(eos))
        slots = Slots()
        messages = [
            {"role": "user", "content": slots.hide("Q")},
            {"role": "assistant", "content": slots.hide("A")},
        ]
        try:
            rendered = self._render(messages, add_generation_prompt=False)
        except RagError:
            return tuple(stops)
        ending = self.tokenizer.encode_template(rendered.rpartition(messages[1]["content"])[2].lstrip())
        if ending and ending[0] in self.tokenizer.control_ids and ending[0] not in stops:
            stops.append(ending[0])
        return tuple(stops)


def _adds_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    bos = tokenizer.bos_token_id
    return bos is not None and list(tokenizer("a", add_special_tokens=True)["input_ids"])[:1] == [bos]


def _merge(messages: Sequence[_Message]) -> tuple[str, list[tuple[str, str]]]:
    """Gather the system turns, and merge turns of one role in a row."""
    system: list[str] = []
    turns: list[tuple[str, list[str]]] = []
    for message in messages:
        role, content = message.get("role"), message.get("content")
        if role not in ("system", "user", "assistant"):
            raise RagError(f"unknown role {role!r}: use system, user or assistant")
        if not isinstance(content, str):
            raise RagError(
                f"the content of a message must be a string, not {type(content).__name__}: "
                "join the text parts of the message first"
            )
        if role == "system":
            system.append(content)
        elif turns and turns[-1][0] == role:
            turns[-1][1].append(content)
        else:
            turns.append((role, [content]))
    if not turns or turns[-1][0] != "user" or not "".join(turns[-1][1]).strip():
        raise RagError("there is nothing to answer: the last message must be the user's and hold a text")
    return "\n\n".join(system), [(role, "\n\n".join(contents)) for role, contents in turns]
