"""Time to first token, measured: policies interleaved in one process on the same token ids.

Absolute times depend on the machine and the moment; ratios within one run are what to compare. Two floors say how
far a policy is from what the machine could do at best: a plain forward pass of just the rows that the policy
computes, and that plus one flash-attention product a layer of these rows over the whole context, once as transformers
calls the kernel and once with grouped heads folded into rows, which is faster.
"""

from __future__ import annotations

import datetime
import math
import platform
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from epic_engine import ChunkKey, Engine, SamplingParams, __version__

from epic_rag.evaluation.example import EvalExample
from epic_rag.prompt import PromptComposer

__all__ = ["HF", "Timer", "bench_scaling", "bench_ttft", "machine"]

HF = "huggingface"
"""Name of the baseline in results: the untouched model's forward pass with ``logits_to_keep=1``."""

Progress = Callable[[int, int], None]


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    cpu = platform.processor()
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                cpu = line.partition(":")[2].strip()
                break
    except OSError:
        pass
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": cpu,
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "epic_rag": __version__,
    }


class Timer:
    """Times the things that are compared, on one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._reference = engine.decoder.reference
        self._device = engine.device
        self._kv: torch.Tensor | None = None

    def _clock(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def linked(self, prompt: Sequence[tuple[int, ...] | ChunkKey], policy: str) -> tuple[float, int, int]:
        """TTFT in seconds, rows computed and prompt tokens of one request."""
        done = self._engine.generate(prompt, SamplingParams(max_tokens=1, ignore_eos=True), policy=policy)
        return done.stats.times.first_token, done.stats.rows, done.stats.prompt

    @torch.inference_mode()
    def plain(self, ids: Sequence[int]) -> float:
        """Seconds of the untouched model's forward pass up to the first token."""
        start = self._clock()
        row = torch.tensor([list(ids)], device=self._device)
        logits = self._reference(input_ids=row, use_cache=True, logits_to_keep=1).logits
        int(logits[0, -1].argmax())
        return self._clock() - start

    @torch.inference_mode()
    def attention(self, rows: int, context: int, *, folded: bool = False) -> float:
        """Seconds of dense attention of ``rows`` over ``context`` keys, all layers, torch's own flash kernel.

        Every layer has keys and values of its own, as a model has. ``folded`` treats grouped query heads as further
        rows of their KV head, the kernel's fastest form; otherwise the heads are expanded, as transformers does it.
        """
        spec = self._engine.spec
        group = spec.num_heads // spec.num_kv_heads
        kind: dict[str, Any] = {"dtype": spec.dtype, "device": self._device}
        if self._kv is None or self._kv.shape[-2] < context:
            self._kv = torch.randn(spec.num_layers, 2, spec.num_kv_heads, context, spec.head_dim, **kind)
        kv = self._kv[..., :context, :]
        shape = (spec.num_kv_heads, rows * group) if folded else (spec.num_heads, rows)
        q = torch.randn(1, *shape, spec.head_dim, **kind)
        start = self._clock()
        for layer in range(spec.num_layers):
            keys, values = kv[layer, 0][None], kv[layer, 1][None]
            if not folded and group > 1:
                keys, values = (x.repeat_interleave(group, dim=1) for x in (keys, values))
            torch.nn.functional.scaled_dot_product_attention(q, keys, values)
        return self._clock() - start


def _summary(seconds: Sequence[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {"median_s": statistics.median(ordered), "p95_s": ordered[math.ceil(0.95 * len(ordered)) - 1]}


def bench_ttft(
    engine: Engine,
    examples: Sequence[EvalExample],
    policies: Sequence[str],
    *,
    context: str = "isolated",
    repeats: int = 1,
    seed: int = 0,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Measure TTFT of several policies and of the untouched model.

    Every document is compiled first. Then each example is asked with every policy in turn (in an order that rotates),
    its documents shuffled; one example runs before as a warm-up and is not counted.

    Parameters
    ----------
    engine
        With a tokenizer.
    examples
        Questions with documents.
    policies
        String forms. ``prefix`` keeps a radix cache over all earlier prompts of the run.
    context
        Compile context.
    repeats
        Times each example is asked with each policy.
    seed
        Of the shuffles.
    progress
        Called with prompts done and their total.

    Returns
    -------
    dict
        ``machine``, ``tokens``, ``compile`` (seconds of compiling, and of plain forward passes of the same tokens),
        ``policies`` (per policy median and p95 TTFT, rows, ratios, floors) and ``records``.
    """
    composer = PromptComposer(engine.tokenizer)
    timer = Timer(engine)
    rng = random.Random(seed)
    compiled, compile_times = _compile(engine, composer, examples, context, timer)
    head = engine.compile(composer.head_ids, "isolated")
    records: list[dict[str, Any]] = []
    rounds = [examples[0], *(e for _ in range(repeats) for e in examples)]
    for number, example in enumerate(rounds):
        documents = list(example.documents)
        rng.shuffle(documents)
        parts = [composer.encode_chunk(text) for text in documents]
        keys = [compiled[part] for part in parts]
        tail = composer.tail_ids(example.question)
        plain_ids = [t for part in (composer.head_ids, *parts, tail) for t in part]
        names = [HF, *policies]
        for name in names[number % len(names) :] + names[: number % len(names)]:
            record: dict[str, Any] = {"example": example.example_id, "policy": name}
            if name == HF:
                record |= {"ttft_s": timer.plain(plain_ids), "rows": len(plain_ids)}
            else:
                seconds, rows, _ = timer.linked([head, *keys, tail], name)
                record |= {"ttft_s": seconds, "rows": rows}
                record["floor_rows_s"] = timer.plain(plain_ids[-rows:])
                record["floor_attention_s"] = timer.attention(rows, len(plain_ids))
                record["floor_folded_s"] = timer.attention(rows, len(plain_ids), folded=True)
            record["prompt"] = len(plain_ids)
            if number:
                records.append(record)
        if progress:
            progress(number, len(rounds) - 1)
    return {
        "machine": machine(),
        "model": engine.spec.architecture,
        "dtype": str(engine.spec.dtype).removeprefix("torch."),
        "examples": len(examples),
        "repeats": repeats,
        "context": context,
        "prompt_tokens": statistics.median(r["prompt"] for r in records),
        "compile": compile_times,
        "policies": _table(records, policies),
        "records": records,
    }


def _compile(
    engine: Engine, composer: PromptComposer, examples: Sequence[EvalExample], context: str, timer: Timer
) -> tuple[dict[tuple[int, ...], ChunkKey], dict[str, float]]:
    """Keys of all documents by their token ids, and what compiling took."""
    parts = list(dict.fromkeys(composer.encode_chunk(t) for e in examples for t in e.documents))
    sample = parts[: min(12, len(parts))]
    engine.compile(sample[0], context)  # warm-up
    for part in sample[:2]:
        timer.plain(part)
    plain, own = [], []
    engine.forget([k for p in sample if (k := engine.find(p, context)) is not None])
    for part in sample:  # alternating, so that both see the same machine
        plain.append(timer.plain(part))
        start = time.perf_counter()
        engine.compile(part, context)
        own.append(time.perf_counter() - start)
    start = time.perf_counter()
    keys = engine.compile_many(parts, context)
    times = {
        "chunks": len(parts),
        "tokens": sum(map(len, parts)),
        "sample_tokens": sum(map(len, sample)),
        "compile_s": sum(own),
        "plain_forward_s": sum(plain),
        "ratio": statistics.median(o / p for o, p in zip(own, plain, strict=True)),
        "rest_s": time.perf_counter() - start,
    }
    return dict(zip(parts, keys, strict=True)), times


def _table(records: Sequence[Mapping[str, Any]], policies: Sequence[str]) -> dict[str, dict[str, Any]]:
    by_policy: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for record in records:
        by_policy[record["policy"]].append(record)
    table: dict[str, dict[str, Any]] = {}
    for name in (HF, *policies):
        rows = by_policy[name]
        entry: dict[str, Any] = _summary([r["ttft_s"] for r in rows])
        entry["rows"] = statistics.median(r["rows"] for r in rows)
        for base in (HF, "full", "prefix"):
            if base in by_policy:
                # Pair by pair on the same prompt, so that a machine that slows down meanwhile does not count.
                pairs = zip(by_policy[base], rows, strict=True)
                entry[f"speedup_vs_{base}"] = statistics.median(b["ttft_s"] / r["ttft_s"] for b, r in pairs)
        if name != HF:
            for floor, parts in {
                "floor_rows": ("floor_rows_s",),
                "floor": ("floor_rows_s", "floor_attention_s"),
                "floor_folded": ("floor_rows_s", "floor_folded_s"),
            }.items():
                seconds = [sum(r[p] for p in parts) for r in rows]
                entry[f"{floor}_s"] = statistics.median(seconds)
                entry[f"over_{floor}"] = statistics.median(r["ttft_s"] / s for r, s in zip(rows, seconds, strict=True))
        table[name] = entry
    return table


def bench_scaling(
    engine: Engine,
    counts: Sequence[int] = (8, 16, 32, 64),
    *,
    chunk_tokens: int | None = None,
    policies: Sequence[str] = ("naive", "legolink:16"),
    repeats: int = 5,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Measure how cost grows with the number of equal chunks in a prompt.

    Parameters
    ----------
    engine
        Any.
    counts
        Numbers of chunks.
    chunk_tokens
        Tokens a chunk; None lets the largest number just fit the context.
    policies
        String forms.
    repeats
        Measurements per point; medians are reported.
    progress
        Called with measurements done and their total.

    Returns
    -------
    dict
        ``points``: per count and policy the median TTFT, the floors, their ratio and the peak of extra memory.
    """
    question = 24
    size = chunk_tokens or (engine.max_model_len - question - 1) // max(counts)
    rng = random.Random(0)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(engine.spec.vocab_size) for _ in range(count))

    keys = engine.compile_many([tokens(size) for _ in range(max(counts))])
    tail = tokens(question)
    timer = Timer(engine)
    samples: dict[tuple[int, str], list[tuple[float, float, float, int]]] = defaultdict(list)
    steps = (repeats + 1) * len(counts) * len(policies)
    done = 0
    for repeat in range(repeats + 1):
        for count in counts:
            for policy in policies:
                prompt: list[tuple[int, ...] | ChunkKey] = [*keys[:count], tail]
                seconds, rows, length = timer.linked(prompt, policy)
                plain = timer.plain(tokens(rows))
                floor = plain + timer.attention(rows, length)
                folded = plain + timer.attention(rows, length, folded=True)
                if repeat:  # the first round warms up
                    samples[count, policy].append((seconds, floor, folded, rows))
                done += 1
                if progress:
                    progress(done, steps)
    points = []
    for (count, policy), found in samples.items():
        rows = found[0][3]
        points.append(
            {
                "chunks": count,
                "policy": policy,
                "rows": rows,
                "ttft_s": statistics.median(f[0] for f in found),
                "floor_s": statistics.median(f[1] for f in found),
                "over_floor": statistics.median(f[0] / f[1] for f in found),
                "over_floor_folded": statistics.median(f[0] / f[2] for f in found),
                "peak_bytes": _peak(engine, [*keys[:count], tail], policy),
            }
        )
    return {
        "machine": machine(),
        "model": engine.spec.architecture,
        "dtype": str(engine.spec.dtype).removeprefix("torch."),
        "chunk_tokens": size,
        "points": points,
    }


def _peak(engine: Engine, prompt: Sequence[tuple[int, ...] | ChunkKey], policy: str) -> int:
    """Peak bytes that torch allocated during one request, beyond what was there before."""
    sampling = SamplingParams(max_tokens=1, ignore_eos=True)
    if engine.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(engine.device)
        before = torch.cuda.memory_allocated(engine.device)
        engine.generate(prompt, sampling, policy=policy)
        return torch.cuda.max_memory_allocated(engine.device) - before
    activity = torch.profiler.ProfilerActivity.CPU
    profile = torch.profiler.profile(activities=[activity], profile_memory=True)
    # A profiler sees the thread that starts it.
    engine.call(profile.start)
    try:
        engine.generate(prompt, sampling, policy=policy)
    finally:
        engine.call(profile.stop)
    held = peak = 0
    for size in _allocations(profile):
        held += size
        peak = max(peak, held)
    return peak


def _allocations(profile: torch.profiler.profile) -> Iterator[int]:
    """Bytes allocated (positive) and freed (negative), in order of time."""
    results: Any = profile.profiler
    events = [e for e in results.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        yield event.nbytes()
