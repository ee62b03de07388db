"""Whole models, timed through the engine: time to first token by link policy, and tokens a second."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from epic_engine.chunks import ChunkKey
from epic_engine.config import SamplingParams
from epic_engine.engine import Engine
from epic_engine.errors import InsufficientResourcesError
from epic_engine.storage.memory_store import MemoryStore
from epic_engine.storage.payload import Encoded
from epic_engine.storage.store import ChunkInfo

from .model_numerics import NOT_CAPTURED, captured, token_ids
from .report import Report, tidy
from .shapes import ModelShape, Sizes, weights_bytes
from .timing import free_memory, synchronise

__all__ = ["POLICIES", "run_models"]

POLICIES = ("full", "prefix", "naive", "legolink:16")
# Of these the engine computes plain tokens, and no chunk needs to be in memory.
_COMPUTED = ("full", "prefix")
_OPEN_SECONDS = 40.0
_PROMPT_SECONDS = 12.0
_DECODE_SECONDS = 10.0
_ROOM = 8 << 30


class _HostStore(MemoryStore):
    """Chunks in the host's memory, as a store of files leaves them in the page cache."""

    def put(self, chunks: Sequence[tuple[ChunkInfo, Tensor | Encoded]]) -> None:
        """Keep chunks."""
        super().put([(info, kv.cpu() if isinstance(kv, Tensor) else kv) for info, kv in chunks])


def run_models(report: Report, device: torch.device, sizes: Sizes) -> None:
    """Time models with random weights.

    Parameters
    ----------
    report
        Receives a record per model, prompt length and policy, and per model and number of requests.
    device
        A GPU, or the CPU in Triton's interpreter.
    sizes
        Models, prompts and repetitions.
    """
    for shape in sizes.models:
        needs = _OPEN_SECONDS * (not sizes.tiny)
        report.step(shape.name, needs, partial(_run_model, report, shape, device, sizes))
        tidy()


def _run_model(report: Report, shape: ModelShape, device: torch.device, sizes: Sizes) -> None:
    spec = shape.spec(shape.layers, sizes.dtype)
    pages = spec.kv_bytes_per_token * (3 * max(sizes.prompts) + 4096 * (not sizes.tiny) + 1024)
    need = weights_bytes(shape, sizes.dtype) + 2 * pages + _ROOM * (not sizes.tiny)
    if need > free_memory(device):
        free = free_memory(device) / 2**30
        raise InsufficientResourcesError(f"{shape.name} needs {need / 2**30:.0f} GiB, {free:.0f} GiB are free.")
    model = shape.build(device, sizes.dtype)
    store = _HostStore()
    ids = token_ids(max(sizes.prompts), shape.vocab, 21)
    chunks = [ids[at : at + sizes.chunk] for at in range(0, len(ids), sizes.chunk)]
    options: dict[str, Any] = {
        "store": store,
        "memory": pages,
        "prefix_cache_bytes": pages // 2,
        "max_model_len": max(sizes.prompts) + sizes.question + sizes.decode_tokens + 1,
        "max_running": max(*sizes.decode_requests, 8),
    }
    for graphs in (False, True):
        with Engine(model, attention="triton", selftest=False, cuda_graphs=graphs, **options) as engine:
            begin = time.perf_counter()
            keys = engine.compile_many(chunks)
            synchronise(device)
            if not graphs:
                report.add("compile", model=shape.name, tokens=len(ids), seconds=time.perf_counter() - begin)
                _first_tokens(report, engine, shape, keys, chunks, sizes)
            _decoding(report, engine, shape, keys, sizes, graphs)
        tidy()


def _first_tokens(
    report: Report,
    engine: Engine,
    shape: ModelShape,
    keys: Sequence[ChunkKey],
    chunks: Sequence[Sequence[int]],
    sizes: Sizes,
) -> None:
    """TTFT of prompts whose chunks come in a new order each time, as from a retriever."""
    for context in sorted(sizes.prompts, reverse=True):
        for policy in POLICIES:

            def cell(context: int = context, policy: str = policy) -> None:
                times = _prompt_times(engine, context, policy, keys, chunks, sizes)
                report.add(
                    "ttft",
                    model=shape.name,
                    context=context,
                    policy=policy,
                    seconds=statistics.median(times),
                    all_seconds=times,
                )

            report.step(f"{shape.name}: TTFT at {context}, {policy}", _PROMPT_SECONDS * (not sizes.tiny), cell)


def _prompt_times(
    engine: Engine,
    context: int,
    policy: str,
    keys: Sequence[ChunkKey],
    chunks: Sequence[Sequence[int]],
    sizes: Sizes,
) -> list[float]:
    order = random.Random(context)
    question = token_ids(sizes.question, engine.spec.vocab_size, 22)
    times = []
    warm_ups = 0 if sizes.tiny else 1  # that compiles kernels and brings chunks to the device
    for _ in range(warm_ups + sizes.prompt_repeats):
        chosen = list(range(context // sizes.chunk))
        order.shuffle(chosen)
        if policy in _COMPUTED:
            prompt: list[Any] = [[t for i in chosen for t in chunks[i]] + question]
        else:
            prompt = [*(keys[i] for i in chosen), question]
        synchronise(engine.device)
        begin = time.perf_counter()
        linked = engine.link(prompt, policy=policy, room=1)
        synchronise(engine.device)
        times.append(time.perf_counter() - begin)
        linked.close()
    return times[warm_ups:]


def _decoding(
    report: Report, engine: Engine, shape: ModelShape, keys: Sequence[ChunkKey], sizes: Sizes, graphs: bool
) -> None:
    """Tokens a second of requests that generate together, each over chunks in an order of its own."""
    if graphs and not captured(engine) and not sizes.tiny:
        report.skip(f"{shape.name}: decoding with graphs", NOT_CAPTURED)
        return
    for requests in sizes.decode_requests:

        def cell(requests: int = requests) -> None:
            rate = 0.0
            for tokens in (8, sizes.decode_tokens)[sizes.tiny :]:  # the first round warms up
                rate = _tokens_per_second(engine, requests, tokens, keys, sizes)
            report.add(
                "generation",
                model=shape.name,
                requests=requests,
                context=sizes.decode_context,
                graphs=graphs,
                tokens_per_second=rate,
            )

        name = f"{shape.name}: decoding of {requests}, {'with' if graphs else 'without'} graphs"
        report.step(name, _DECODE_SECONDS * (not sizes.tiny), cell)


def _tokens_per_second(engine: Engine, requests: int, tokens: int, keys: Sequence[ChunkKey], sizes: Sizes) -> float:
    """Of the whole engine, from when the last request has its first token."""
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
    streams, begins = [], []
    for request in range(requests):
        order = random.Random(request)
        chosen = order.sample(keys, sizes.decode_context // sizes.chunk)
        question = token_ids(sizes.question, engine.spec.vocab_size, 30 + request)
        begins.append(time.perf_counter())
        streams.append(engine.stream([*chosen, question], sampling, policy="naive"))
    for stream in streams:
        for _ in stream:
            pass
    times = [stream.completion.stats.times for stream in streams]
    last = max(range(requests), key=lambda i: begins[i] + times[i].first_token)
    return requests / times[last].per_token
