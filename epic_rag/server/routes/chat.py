"""``/v1/chat/completions`` and ``/v1/completions``."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from typing import Any

from epic_engine import ConfigError
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel

from epic_rag.server.answering import Answers, begin_chat, begin_completion
from epic_rag.server.errors import ApiError
from epic_rag.server.events import EventStream, first_of, while_connected
from epic_rag.server.responses import ChatResponse, CompletionResponse
from epic_rag.server.schemas.answers import ChatCompletion, ChatCompletionChunk, TextCompletion
from epic_rag.server.schemas.chat import AnswerRequest, ChatRequest, CompletionRequest
from epic_rag.server.state import CallerDep, Gateway, GatewayDep

__all__ = ["router"]

router = APIRouter(prefix="/v1", tags=["answers"])
logger = logging.getLogger(__name__)


def _events(model: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    content = {"schema": {"type": "string", "description": f"Events, each a {model.__name__}; [DONE] at the end."}}
    return {200: {"content": {"text/event-stream": content}, "description": "The answers; in pieces with stream."}}


@router.post("/chat/completions", response_model=ChatCompletion, responses=_events(ChatCompletionChunk))
async def chat_completions(body: ChatRequest, request: Request, gateway: GatewayDep, caller: CallerDep) -> Response:
    """Answer a conversation; compiled chunks in it are linked."""
    _check_model(body, gateway)
    answers = await _begun(lambda: [begin_chat(body, caller.tenant, gateway.settings)])
    response = ChatResponse(answers[0], gateway.settings.shown_model, logprobs=bool(body.logprobs or body.top_logprobs))
    return await _respond(response, body, request, gateway)


@router.post("/completions", response_model=TextCompletion, responses=_events(TextCompletion))
async def completions(body: CompletionRequest, request: Request, gateway: GatewayDep, caller: CallerDep) -> Response:
    """Continue a text; compiled chunks in it are linked."""
    _check_model(body, gateway)
    prompts = _prompts(body, gateway)

    def begin() -> list[Answers]:
        begun: list[Answers] = []
        try:
            for prompt in prompts:
                begun.append(begin_completion(body, prompt, caller.tenant, gateway.settings))
        except BaseException:
            _close(begun)
            raise
        return begun

    return await _respond(CompletionResponse(await _begun(begin), gateway.settings.shown_model), body, request, gateway)


def _check_model(body: AnswerRequest, gateway: Gateway) -> None:
    if body.model not in ("", gateway.settings.shown_model, gateway.settings.model):
        raise ApiError(
            404,
            f"this gateway runs {gateway.settings.shown_model!r}, not {body.model[:200]!r}.",
            code="model_not_found",
            param="model",
        )


def _prompts(body: CompletionRequest, gateway: Gateway) -> list[str | list[int]]:
    prompt = body.prompt
    if isinstance(prompt, str):
        found: list[str | list[int]] = [prompt]
    elif prompt and all(isinstance(p, int) for p in prompt):
        found = [[p for p in prompt if isinstance(p, int)]]
    else:
        found = [p for p in prompt if not isinstance(p, int)]
    if not found or not all(found):
        raise ApiError(400, "the prompt is empty: give at least one token.", code="invalid_value", param="prompt")
    if len(found) * (body.n or 1) > gateway.settings.max_answers:
        raise ApiError(
            400,
            f"{len(found)} prompts with n={body.n or 1} are more than this gateway's "
            f"{gateway.settings.max_answers} answers to a request.",
            param="prompt",
        )
    return found


async def _begun(begin: Callable[[], list[Answers]]) -> list[Answers]:
    """Begin in a thread; a request that is cancelled meanwhile leaves nothing running."""
    work = asyncio.ensure_future(asyncio.to_thread(begin))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        work.add_done_callback(lambda done: None if done.cancelled() or done.exception() else _close(done.result()))
        raise


def _close(begun: Sequence[Answers]) -> None:
    for answers in begun:
        for stream in answers.streams:
            with suppress(Exception):
                stream.close()


async def _respond(
    response: ChatResponse | CompletionResponse, body: AnswerRequest, request: Request, gateway: Gateway
) -> Response:
    usage = bool(body.stream_options and body.stream_options.include_usage)
    pieces = _noted(response, response.pieces(usage=usage), body, request, gateway)
    if body.stream:
        return EventStream(await while_connected(request, first_of(pieces)))
    return JSONResponse(await while_connected(request, _whole(response, pieces)))


async def _whole(response: ChatResponse | CompletionResponse, pieces: AsyncGenerator[dict[str, Any]]) -> dict[str, Any]:
    async with aclosing(pieces):
        async for _ in pieces:
            pass
    return response.whole()


async def _noted(
    response: ChatResponse | CompletionResponse,
    pieces: AsyncGenerator[dict[str, Any]],
    body: AnswerRequest,
    request: Request,
    gateway: Gateway,
) -> AsyncGenerator[dict[str, Any]]:
    """The same pieces; what was computed for them is counted, and logged if that is wanted, however they end."""
    try:
        async with aclosing(pieces):
            async for piece in pieces:
                yield piece
    finally:
        with suppress(ConfigError):  # a gateway that is made to end at once does not wait for their ends
            request.state.tally.usage(response.usage)
            if gateway.settings.log_texts:
                asked = body.model_dump(include={"messages", "prompt"}, exclude_defaults=True)
                said = {"asked": asked, "answers": response.texts, "request_id": request.state.request_id}
                logger.info("answered", extra=said)
