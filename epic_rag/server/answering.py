"""From a request for answers to streams of tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from epic_engine import LinkPolicy, SamplingParams, parse_policy

from epic_rag.answer_form import AnswerForm, answer_form
from epic_rag.answers import Source
from epic_rag.defaults import AUTO
from epic_rag.prompt import DEFAULT_DOCUMENTS_HEADER, DEFAULT_SYSTEM_PROMPT, TextPart
from epic_rag.prompt_stream import PromptStream, part_streams, with_call_marks
from epic_rag.server.errors import ApiError
from epic_rag.server.messages import Marks, Named, PlainChat, plain_chat
from epic_rag.server.schemas.chat import AnswerRequest, ChatRequest, CompletionRequest, Retrieve
from epic_rag.server.settings import ServerSettings
from epic_rag.server.tenants import Tenant

__all__ = ["Answers", "LinkedChunk", "begin_chat", "begin_completion", "linked_chunks"]

Part = tuple[int, ...] | TextPart
Parts = Sequence[Part]

# Fields of OpenAI's that would change the answer.
_INSTEAD = {
    "functions": "use tools",
    "function_call": "use tool_choice",
    "frequency_penalty": "leave it out, or use repetition_penalty",
    "presence_penalty": "leave it out, or use repetition_penalty",
    "audio": "the model writes text only",
    "web_search_options": "add documents and use epic.retrieve",
}


@dataclass(frozen=True)
class LinkedChunk:
    """A compiled chunk in a prompt, as a response names it.

    Attributes
    ----------
    id
        Of a chunk that a client made, or of a chunk of a document.
    offset, tokens
        Tokens that stand before it, and its own.
    """

    id: str
    offset: int
    tokens: int


@dataclass
class Answers:
    """Answers on their way to one client.

    Attributes
    ----------
    streams
        One an answer.
    form
        What they may hold.
    tenant
        Whose they are.
    chunks
        Compiled chunks in the prompt, in order.
    sources
        What was retrieved, in the prompt's order.
    """

    streams: list[PromptStream]
    form: AnswerForm
    tenant: Tenant
    chunks: list[LinkedChunk]
    sources: list[Source] = field(default_factory=list)


def begin_chat(request: ChatRequest, tenant: Tenant, settings: ServerSettings) -> Answers:
    """Check a chat, put its prompt together and begin to answer; blocks for as long as that takes.

    Raises
    ------
    ApiError
        If the request cannot be answered; 404 for chunks that are not there.
    EpicError
        As the engine raises them.
    """
    begin = time.perf_counter()
    form = _form(request)
    asked = request.max_completion_tokens or request.max_tokens
    sampling = _sampling(request, settings, asked)
    if request.logprobs or request.top_logprobs:
        sampling = replace(sampling, logprobs=request.top_logprobs or 0)
    texts = tenant.texts
    chat = plain_chat(request.messages, texts, tenant.shelf)
    if form.instructions:
        chat.messages.insert(0, {"role": "system", "content": form.instructions})
    if form.tools:
        sampling = with_call_marks(sampling, texts)

    def cut(plain: PlainChat) -> list[Part]:
        return texts.composer.segments(plain.messages, plain.marks.cut, tools=form.tools)

    sources: list[Source] = []
    if request.options.retrieve is None:
        parts = cut(chat)
    else:
        parts, sources = _with_documents(request.options.retrieve, chat, tenant, sampling.max_tokens, cut)
    chunks = linked_chunks(parts, tenant)
    _check_offsets(chunks, chat.marks.named)
    if asked is None:
        sampling = _fitting(sampling, parts, tenant)
    streams = part_streams(
        texts,
        parts,
        sampling,
        _count(request, settings),
        policy=_policy(request),
        constraint=form.constraint(tenant.compiled),
        priority=request.options.priority,
        timeout=settings.request_seconds,
        begin=begin,
    )
    return Answers(streams, form, tenant, chunks, sources)


def begin_completion(
    request: CompletionRequest, prompt: str | Sequence[int], tenant: Tenant, settings: ServerSettings
) -> Answers:
    """As :func:`begin_chat`, for one prompt of text or token ids."""
    begin = time.perf_counter()
    if request.options.retrieve is not None:
        raise ApiError(400, "a completion retrieves nothing: ask /v1/chat/completions.", param="epic.retrieve")
    if request.echo or request.suffix or (request.best_of or 1) > (request.n or 1):
        raise _unsupported("echo, suffix and best_of above n are not supported: leave them out.")
    sampling = _sampling(request, settings, request.max_tokens)
    if request.logprobs is not None:
        sampling = replace(sampling, logprobs=request.logprobs)
    texts = tenant.texts
    parts: Parts = texts.composer.formatted_segments(prompt, texts.find) if isinstance(prompt, str) else [tuple(prompt)]
    if request.max_tokens is None:
        sampling = _fitting(sampling, parts, tenant)
    streams = part_streams(
        texts,
        parts,
        sampling,
        _count(request, settings),
        policy=_policy(request),
        priority=request.options.priority,
        timeout=settings.request_seconds,
        begin=begin,
    )
    return Answers(streams, AnswerForm(), tenant, linked_chunks(parts, tenant))


# -- what a request says -----------------------------------------------------------------------------------------


def _form(request: ChatRequest) -> AnswerForm:
    choice = request.tool_choice
    if isinstance(choice, Mapping):
        function = choice.get("function")
        if choice.get("type") != "function" or not isinstance(function, Mapping) or not function.get("name"):
            raise ApiError(
                400,
                "tool_choice is auto, none, required or {'type': 'function', 'function': {'name': …}}.",
                code="invalid_value",
                param="tool_choice",
            )
        choice = str(function["name"])
    asked = request.model_dump(include={"tools", "response_format", "parallel_tool_calls"}, exclude_unset=True)
    return answer_form({**asked, "tool_choice": choice})


def _unsupported(message: str, param: str | None = None) -> ApiError:
    return ApiError(400, message, code="unsupported", param=param)


def _sampling(request: AnswerRequest, settings: ServerSettings, max_tokens: int | None) -> SamplingParams:
    for name, instead in _INSTEAD.items():
        if (request.model_extra or {}).get(name):
            raise _unsupported(f"{name} is not supported: {instead}.", name)
    names = ("top_p", "top_k", "min_p", "repetition_penalty", "seed")
    chosen: dict[str, Any] = {name: value for name in names if (value := getattr(request, name)) is not None}
    # OpenAI's own default; greedy decoding is asked for with temperature=0.
    chosen["temperature"] = 1.0 if request.temperature is None else request.temperature
    if request.logit_bias:
        try:
            chosen["logit_bias"] = {int(token): bias for token, bias in request.logit_bias.items()}
        except ValueError:
            raise ApiError(400, "logit_bias maps token ids to numbers.", param="logit_bias") from None
    stop = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())
    return SamplingParams(max_tokens=max_tokens or settings.max_tokens, stop=stop, **chosen)


def _fitting(sampling: SamplingParams, parts: Parts, tenant: Tenant) -> SamplingParams:
    """For a request that names no limit: its answer is as long as the model's context allows, at most."""
    room = tenant.engine.max_model_len - _length(parts, tenant)
    return replace(sampling, max_tokens=min(sampling.max_tokens, max(1, room)))


def _count(request: AnswerRequest, settings: ServerSettings) -> int:
    n = request.n or 1
    if n > settings.max_answers:
        raise ApiError(400, f"n={n} answers are more than this gateway's {settings.max_answers}.", param="n")
    return n


def _policy(request: AnswerRequest) -> LinkPolicy | None:
    name = request.options.policy
    return None if name in (None, AUTO) else parse_policy(name)


# -- chunks and documents ----------------------------------------------------------------------------------------


def linked_chunks(parts: Parts, tenant: Tenant) -> list[LinkedChunk]:
    """The compiled chunks among the parts of a prompt, and where they stand."""
    found: list[LinkedChunk] = []
    at = 0
    for part in parts:
        if isinstance(part, TextPart):
            count = tenant.texts.length(part.name or "")
            found.append(LinkedChunk(tenant.shown_id(part.name or ""), at, count))
            at += count
        else:
            at += len(part)
    return found


def _length(parts: Parts, tenant: Tenant) -> int:
    return sum(tenant.texts.length(p.name or "") if isinstance(p, TextPart) else len(p) for p in parts)


def _check_offsets(chunks: Sequence[LinkedChunk], named: Sequence[Named]) -> None:
    """Refuse a chunk that does not stand where its client says."""
    places: dict[str, list[int]] = {}
    for chunk in chunks:
        places.setdefault(chunk.id, []).append(chunk.offset)
    for one in named:
        if one.offset is not None and one.offset not in places.get(one.shown, ()):
            there = ", ".join(map(str, places.get(one.shown, ())))
            raise ApiError(
                422,
                f"the chunk {one.shown!r} stands behind {there} tokens of this prompt, not behind {one.offset}: "
                "leave its offset out, or give this one.",
                code="offset_mismatch",
                param="chunk_references",
            )


def _with_documents(
    wanted: Retrieve, chat: PlainChat, tenant: Tenant, new: int, cut: Callable[[PlainChat], list[Part]]
) -> tuple[list[Part], list[Source]]:
    """Put documents before the last question, as many as fit."""
    query = wanted.query or chat.question
    if not query.strip():
        raise ApiError(400, "there is nothing to look for: give epic.retrieve.query.", param="epic.retrieve.query")
    sources = tenant.retrieve(query, wanted.k)
    question = max((i for i, m in enumerate(chat.messages) if m["role"] == "user"), default=None)
    if question is None:
        raise ApiError(400, "documents stand before a question: send a message of the user.", param="messages")
    if sources and not any(m["role"] == "system" for m in chat.messages):
        chat.messages.insert(0, {"role": "system", "content": DEFAULT_SYSTEM_PROMPT})
        question += 1
    asked = chat.messages[question]["content"]
    while True:
        marks: Marks = chat.marks
        known = len(marks.named)
        shown = "".join(marks.mark(Named(tenant.document_name(s.chunk_id), s.chunk_id)) for s in sources)
        lead = f"{DEFAULT_DOCUMENTS_HEADER}{shown}Question: " if sources else ""
        chat.messages[question]["content"] = lead + asked
        parts = cut(chat)
        if _length(parts, tenant) <= tenant.engine.max_model_len - new or not sources:
            return parts, sources
        del marks.named[known:]
        worst = min(range(len(sources)), key=lambda i: sources[i].score)
        sources = [s for i, s in enumerate(sources) if i != worst]
