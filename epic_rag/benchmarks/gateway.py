"""Many streaming clients of a gateway at once, over HTTP: requests a second and times to first token per policy."""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from epic_engine import ConfigError, EpicError

from epic_rag.benchmarks.serve_figures import quantiles
from epic_rag.errors import MissingDependencyError
from epic_rag.evaluation.example import EvalExample

if TYPE_CHECKING:
    import httpx

__all__ = ["GatewayLoad", "bench_gateway", "own_gateway"]

Progress = Callable[[str, int, int], None]

BASE = "prefix"
"""The policy that the others are compared with: what a prefix cache alone can do."""

_BATCH = 16
# An answer that waits behind all others may take long; a gateway that hangs is found out all the same.
_LONGEST_S = 3600


@dataclass(frozen=True)
class GatewayLoad:
    """What the clients do.

    Attributes
    ----------
    policies
        Measured one after another.
    clients
        Each sends its next request when its last has ended.
    seconds
        For which new requests are begun, for each policy.
    k
        Chunks that a request names, drawn and ordered anew for each.
    tokens
        Longest answer.
    seed
        Of the draws.
    """

    policies: tuple[str, ...] = ("auto", BASE)
    clients: int = 64
    seconds: float = 120.0
    k: int = 6
    tokens: int = 16
    seed: int = 0


@dataclass
class _Request:
    """One request, as its client saw it."""

    seconds: float = 0.0
    first: float | None = None
    complete: bool = False
    error: str = ""
    prompt: int = 0
    cached: int = 0
    generated: int = 0


def bench_gateway(
    url: str, examples: Sequence[EvalExample], load: GatewayLoad, *, key: str | None = None, progress: Progress
) -> dict[str, Any]:
    """Compile the examples' documents through ``/v1/chunks``, then have clients ask about them.

    Parameters
    ----------
    url
        Of the gateway, such as ``http://127.0.0.1:8000``.
    examples
        Documents and questions.
    load
        What the clients do.
    key
        API key of the gateway.
    progress
        Called with what is being done, how far it is, and how far it goes.

    Returns
    -------
    dict
        ``load``; ``corpus`` (``chunks``, ``tokens``, ``seconds`` to compile); ``policies``: for each ``requests``,
        ``errors`` (refused or failed, with the first as ``error``), ``incomplete`` (streams without an end),
        ``requests_s`` and ``output_tokens_s`` (of complete streams, until the last has ended), ``ttft_s`` (quantiles),
        ``prompt_tokens`` and ``cached_share`` (means); ``ratios``: requests a second of each policy to those of
        ``prefix``, where both were measured.

    Raises
    ------
    ConfigError
        If there are fewer documents than a request names.
    EpicError
        If the gateway cannot be reached or does not compile the documents.
    """
    documents = list(dict.fromkeys(text for example in examples for text in example.documents))
    if len(documents) < load.k:
        raise ConfigError(f"{len(documents)} documents are fewer than k={load.k}: take more examples.")
    questions = [example.question for example in examples]
    return asyncio.run(_measured(url, documents, questions, load, key, progress))


async def _measured(
    url: str, documents: Sequence[str], questions: Sequence[str], load: GatewayLoad, key: str | None, progress: Progress
) -> dict[str, Any]:
    httpx = _httpx()
    async with httpx.AsyncClient(
        base_url=url,
        headers={"Authorization": f"Bearer {key}"} if key else {},
        timeout=_LONGEST_S,
        limits=httpx.Limits(max_connections=load.clients, max_keepalive_connections=load.clients),
    ) as client:
        chunks, corpus = await _compiled(client, documents, progress)
        policies = {
            policy: await _loaded(client, policy, chunks, questions, load, progress) for policy in load.policies
        }
    base = policies.get(BASE, {}).get("requests_s")
    ratios = {name: found["requests_s"] / base for name, found in policies.items() if base and name != BASE}
    return {"load": asdict(load), "corpus": corpus, "policies": policies, "ratios": ratios}


async def _compiled(
    client: httpx.AsyncClient, documents: Sequence[str], progress: Progress
) -> tuple[list[str], dict[str, Any]]:
    httpx = _httpx()
    begin = time.perf_counter()
    ids: list[str] = []
    tokens = 0
    for at in range(0, len(documents), _BATCH):
        progress("compile", at, len(documents))
        body = {"chunks": [{"text": text} for text in documents[at : at + _BATCH]]}
        try:
            answer = await client.post("/v1/chunks", json=body)
        except httpx.HTTPError as error:
            raise EpicError(f"the gateway at {client.base_url} cannot be reached ({error}): is it running?") from error
        if answer.is_error:
            raise EpicError(f"the gateway compiles nothing: {_message(answer.text)}")
        made = answer.json()["data"]
        ids += [chunk["id"] for chunk in made]
        tokens += sum(chunk["tokens"] for chunk in made)
    progress("compile", len(documents), len(documents))
    return ids, {"chunks": len(ids), "tokens": tokens, "seconds": time.perf_counter() - begin}


async def _loaded(
    client: httpx.AsyncClient,
    policy: str,
    chunks: Sequence[str],
    questions: Sequence[str],
    load: GatewayLoad,
    progress: Progress,
) -> dict[str, Any]:
    done: list[_Request] = []
    begin = time.perf_counter()
    end = begin + load.seconds

    async def one(number: int) -> None:
        draws = random.Random(f"{load.seed} {number}")
        while time.perf_counter() < end:
            named = draws.sample(chunks, load.k)
            message = {
                "role": "user",
                "content": draws.choice(questions),
                "chunk_references": [{"id": chunk} for chunk in named],
            }
            body = {
                "messages": [message],
                "max_tokens": load.tokens,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
                "epic": {"policy": policy},
            }
            done.append(await _asked(client, body))
            progress(policy, min(int(time.perf_counter() - begin), int(load.seconds)), int(load.seconds))

    await asyncio.gather(*(one(number) for number in range(load.clients)))
    return _figures(done, time.perf_counter() - begin)


async def _asked(client: httpx.AsyncClient, body: dict[str, Any]) -> _Request:
    """One request; whatever goes wrong is in what is returned."""
    httpx = _httpx()
    found = _Request()
    begin = time.perf_counter()
    try:
        async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            if answer.is_error:
                found.error = _message((await answer.aread()).decode())
                return found
            reason = None
            async for line in answer.aiter_lines():
                if not line.startswith("data: "):
                    continue
                if line == "data: [DONE]":
                    found.complete = reason is not None
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    found.error = event["error"]["message"]
                for choice in event.get("choices", ()):
                    if found.first is None and choice["delta"].get("content"):
                        found.first = time.perf_counter() - begin
                    reason = choice["finish_reason"] or reason
                if event.get("epic", {}).get("timed_out"):
                    found.error = "the gateway's time for an answer was over"
                if usage := event.get("usage"):
                    found.prompt, found.generated = usage["prompt_tokens"], usage["completion_tokens"]
                    found.cached = usage["prompt_tokens_details"]["cached_tokens"]
    except httpx.HTTPError as error:
        found.error = f"{type(error).__name__}: {error}"
    found.seconds = time.perf_counter() - begin
    return found


def _figures(requests: Sequence[_Request], seconds: float) -> dict[str, Any]:
    complete = [request for request in requests if request.complete and not request.error]
    errors = [request.error for request in requests if request.error]
    prompt = sum(request.prompt for request in complete)
    return {
        "requests": len(requests),
        "errors": len(errors),
        **({"error": errors[0]} if errors else {}),
        "incomplete": sum(not request.complete and not request.error for request in requests),
        "seconds": seconds,
        "requests_s": len(complete) / seconds,
        "output_tokens_s": sum(request.generated for request in complete) / seconds,
        "ttft_s": quantiles([request.first for request in complete if request.first is not None]),
        "request_s": quantiles([request.seconds for request in complete]),
        "prompt_tokens": prompt / len(complete) if complete else None,
        "cached_share": sum(request.cached for request in complete) / prompt if prompt else None,
    }


def _message(text: str) -> str:
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text[:200]


@contextmanager
def own_gateway(*options: str, requests: int) -> Iterator[str]:
    """Run ``epic-rag serve`` with a store of its own for a while; gives its URL.

    Parameters
    ----------
    *options
        Of the command.
    requests
        That it must take at once.

    Raises
    ------
    EpicError
        If it does not start; what it wrote has gone to standard error.
    """
    httpx = _httpx()
    try:
        from epic_rag.server.settings import ENVIRONMENT
    except ImportError as error:
        raise MissingDependencyError(
            f"a gateway needs {error.name}, which is not installed: pip install 'epic-rag[serve]'"
        ) from error
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ENVIRONMENT)}
    environment[f"{ENVIRONMENT}MAX_CONCURRENT"] = str(requests + 1)
    environment[f"{ENVIRONMENT}REQUEST_SECONDS"] = str(_LONGEST_S)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="epic-gateway-") as folder:
        command = [sys.executable, "-m", "epic_rag.cli", "serve", "--store", str(Path(folder) / "store")]
        gateway = subprocess.Popen([*command, "--port", str(port), "--log-level", "warning", *options], env=environment)
        url = f"http://127.0.0.1:{port}"
        try:
            while True:
                if gateway.poll() is not None:
                    raise EpicError("the gateway did not start; above it says why.")
                try:
                    if httpx.get(f"{url}/health").is_success:
                        break
                except httpx.HTTPError:
                    time.sleep(0.2)
            yield url
        finally:
            gateway.terminate()
            gateway.wait()


def _httpx() -> Any:
    try:
        import httpx
    except ImportError:
        raise MissingDependencyError("clients of a gateway need httpx: pip install 'epic-rag[serve]'") from None
    return httpx
