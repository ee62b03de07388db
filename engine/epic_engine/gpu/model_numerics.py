"""Is the engine right on this card? Random models against plain transformers and against the torch backend."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor

from epic_engine.chunks import ChunkKey
from epic_engine.config import SamplingParams
from epic_engine.engine import Engine, Prompt
from epic_engine.linking.layout import Layout
from epic_engine.linking.policies import Damped, LegoLink, LinkPolicy, Naive

from .reference import largest, relative_error
from .report import Report, tidy
from .shapes import ModelShape, Sizes, weights_bytes
from .timing import free_memory

__all__ = ["NOT_CAPTURED", "captured", "compare_models", "token_ids"]

NOT_CAPTURED = "the engine could not capture its decoding steps; its warning says why"
_SMALL_SECONDS = 30.0
_COMPARE_SECONDS = 45.0
_LINKED_LIMIT = 1e-4
# Rounding of 16-bit numbers may add up otherwise than in transformers, but not to much more.
_NOISE_LIMIT = 1.5
_PAGES_BYTES = 2 << 30
# Beside weights: activations, logits, the copy of one weight on its way to float32.
_ROOM = 8 << 30


class Scattered(LinkPolicy):
    """Computes single slots anew in the middle of chunks, so that rows behind them read bodies with holes."""

    name: ClassVar[str] = "scattered"
    usage: ClassVar[str] = "scattered"

    def select(self, layout: Layout) -> Mapping[int, Sequence[int]]:
        """Slots 0, 3 and every seventh one."""
        return {
            i: sorted({0, 3, *range(0, len(s.token_ids), 7)})
            for i, s in enumerate(layout.segments)
            if s.body is not None
        }


def token_ids(count: int, vocab: int, seed: int) -> list[int]:
    """Random token ids."""
    generator = torch.Generator().manual_seed(seed)
    found: list[int] = torch.randint(3, vocab, (count,), generator=generator).tolist()
    return found


def captured(engine: Engine) -> bool:
    """Whether an engine decodes through CUDA graphs."""
    return getattr(engine._loop, "_graphs", None) is not None


def compare_models(report: Report, device: torch.device, sizes: Sizes) -> None:
    """Check the whole engine.

    Parameters
    ----------
    report
        Receives the checks.
    device
        A GPU, or the CPU in Triton's interpreter.
    sizes
        Which models.
    """

    def small() -> None:
        model = sizes.small.build(device, torch.float32)
        report.step("greedy text of a float32 model", 0.0, lambda: _same_text(report, model, sizes), numeric=True)
        report.step("linked prompts in float32", 0.0, lambda: _linked(report, model, sizes), numeric=True)

    report.step("a small float32 model", _SMALL_SECONDS * (not sizes.tiny), small, numeric=True)
    tidy()
    for shape in reversed(sizes.models):  # the smaller one first
        needs = _COMPARE_SECONDS * (not sizes.tiny)
        compare = partial(_sixteen_bit, report, shape, device, sizes)
        report.step(f"{shape.name} in 16 bits", needs, compare, numeric=True)
        tidy()


def _engine(model: Any, attention: str, *, graphs: bool = False, **options: Any) -> Engine:
    limit = 16 << 20 if model.device.type == "cpu" else _PAGES_BYTES
    return Engine(model, attention=attention, selftest=False, memory=limit, cuda_graphs=graphs, **options)


def _same_text(report: Report, model: Any, sizes: Sizes) -> None:
    """Greedy tokens of prompts that decode together, everything computed, against a plain loop over the model."""
    prompts = [token_ids(20 if sizes.tiny else 300, model.config.vocab_size, seed) for seed in (1, 2)]
    count = 3 if sizes.tiny else 32
    want = [_plain_text(model, prompt, count) for prompt in prompts]
    sampling = SamplingParams(max_tokens=count, ignore_eos=True)
    limit = 32 if sizes.tiny else 1024
    for graphs in (False, True)[: 1 if sizes.tiny else 2]:
        kind = f"float32, {'with' if graphs else 'without'} graphs"
        with _engine(model, "triton", graphs=graphs, max_model_len=limit, max_running=2) as engine:
            if graphs and not captured(engine):
                report.skip(f"greedy text, {kind}", NOT_CAPTURED)
                continue
            half = len(prompts[0]) // 2
            segments: list[Prompt] = [[engine.compile(prompt[:half]), prompt[half:]] for prompt in prompts]
            streams = [engine.stream(prompt, sampling, policy="full") for prompt in segments]
            got = [[event.token_id for event in stream] for stream in streams]
            gate = engine.run_selftest()
        differing = sum(a != b for a, b in zip(chain(*want), chain(*got), strict=True))
        report.check(f"greedy tokens that differ from plain transformers, {kind}", float(differing), 0.0)
    worst = largest(gate.full_error, gate.linked_error)
    report.check("the engine's own gate, float32", worst, gate.tolerance)


@torch.inference_mode()
def _plain_text(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    found: list[int] = []
    for _ in range(count):
        ids = torch.tensor([[*prompt, *found]], device=model.device)
        found.append(int(model(input_ids=ids, use_cache=False).logits[0, -1].argmax()))
    return found


def _linked(report: Report, model: Any, sizes: Sizes) -> None:
    """Logits of linked prompts and of tokens behind several of them, against the torch backend."""
    policies = (LegoLink(4), Scattered()) if sizes.tiny else (LegoLink(4), Scattered(), Naive(), Damped(1.0))
    found: dict[str, dict[str, Tensor]] = {}
    for attention in ("torch", "triton"):
        with _engine(model, attention, max_model_len=64 if sizes.tiny else 1024) as engine:
            found[attention] = _linked_logits(engine, policies, 12 if sizes.tiny else 150)
    for name, want in found["torch"].items():
        error = relative_error(found["triton"][name], want)
        report.check(f"linked logits against the torch backend, float32, {name}", error, _LINKED_LIMIT)


def _linked_logits(engine: Engine, policies: Sequence[LinkPolicy], tokens: int) -> dict[str, Tensor]:
    vocab = engine.spec.vocab_size
    chunks = [token_ids(tokens, vocab, seed) for seed in (11, 12)]
    first, second = engine.compile_many(chunks)
    head, question = token_ids(5, vocab, 13), token_ids(9, vocab, 14)
    found: dict[str, Tensor] = {}
    for policy in policies:
        found[str(policy)] = engine.score([head, first, second, first, question], question[:3], policy=policy)
        # The same chunks at other places: decoding rows share them.
        orders: tuple[list[list[int] | ChunkKey], ...] = ([first, second, question], [head, second, first, question])
        linked = [engine.link(order, policy=policy, room=2) for order in orders]
        steps = [torch.cat(engine.extend([(one, [token]) for one in linked])) for token in question[:2]]
        found[f"{policy}, decoding together"] = torch.cat(steps)
        for one in linked:
            one.close()
    return found


def _sixteen_bit(report: Report, shape: ModelShape, device: torch.device, sizes: Sizes) -> None:
    """Error of teacher-forced logits, with transformers' own as the measure; float32 weights are the truth."""
    name = f"{str(sizes.dtype).removeprefix('torch.')} error as a multiple of transformers' own, {shape.name}"
    need = weights_bytes(shape, sizes.dtype) + weights_bytes(shape, torch.float32) + _ROOM
    if not sizes.tiny and need > free_memory(device):
        report.skip(name, f"it needs {need / 2**30:.0f} GiB, {free_memory(device) / 2**30:.0f} GiB are free")
        return
    model = shape.build(device, sizes.dtype)
    ids = token_ids(sizes.compare_tokens, shape.vocab, 5)
    rows = sizes.compare_rows
    truth = _plain(_wide(model), ids, rows)
    tidy()
    theirs = _plain(model, ids, rows)
    with _engine(model, "triton", max_model_len=2 * sizes.compare_tokens) as engine:
        at = len(ids) - rows
        ours = engine.score([ids[: at + 1]], [*ids[at + 1 :], ids[0]], policy="full")
        gate = None if sizes.tiny else engine.run_selftest()
    noise, error = (float((x.double() - truth).norm() / truth.norm()) for x in (theirs, ours))
    report.add("sixteen_bit", model=shape.name, transformers_error=noise, engine_error=error)
    report.check(name, error / noise, _NOISE_LIMIT)
    if gate is not None:
        worst = largest(gate.full_error, gate.linked_error)
        report.check(f"the engine's own gate, {shape.name}", worst, gate.tolerance)


def _wide(model: Any) -> Any:
    return copy.deepcopy(model).float()


@torch.inference_mode()
def _plain(model: Any, ids: Sequence[int], rows: int) -> Tensor:
    """Logits of the last rows, float64 on the CPU."""
    output = model(input_ids=torch.tensor([list(ids)], device=model.device), use_cache=False, logits_to_keep=rows)
    logits: Tensor = output.logits[0].double().cpu()
    return logits
