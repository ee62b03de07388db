"""The correctness gate: the engine against the untouched model, before it may serve.

Two prompts are compared, both with the plain Hugging Face model and its eager attention as the oracle:

1. ``full``: everything computed by the engine, against a plain forward pass.
2. ``linked``: two compiled chunks at new places with some tokens recomputed, against *one* forward pass of the
   untouched model over a longer list of tokens: stale copies of the chunks (each sees only its own chunk) and the
   computed tokens (they see what the link policy says) stand apart in it, told apart by a 4-D mask and explicit
   positions.

In 16-bit types two correct programs differ by rounding, so there the tolerance follows what the untouched model
itself shows between its eager and its fused attention.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import uuid
from dataclasses import asdict, dataclass
from typing import Any

import torch
import transformers
from torch import Tensor

from epic_engine import _version
from epic_engine.attention.base import AttentionBackend, PrivateKV, SequenceRows
from epic_engine.compiler import Compiler
from epic_engine.contexts import CompileContext
from epic_engine.errors import SelfTestError
from epic_engine.linking.layout import Body, Layout, LinkPlan
from epic_engine.paths import cache_dir

from .decoder import Decoder, share_weights

__all__ = ["SelfTestReport", "gate", "run_selftest"]

logger = logging.getLogger(__name__)

# Relative error of centred logits that rounding explains, by data type.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 2e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}
_NOISE_FACTOR = 4.0


@dataclass(frozen=True)
class SelfTestReport:
    """What the gate measured.

    Attributes
    ----------
    full_error, linked_error
        Relative error of the centred logits against the untouched model.
    tolerance
        Largest error allowed.
    noise
        The untouched model's own difference between two attention implementations (0 in float32).
    cached
        Whether this is an earlier result for the same model, versions, backend and device.
    """

    full_error: float
    linked_error: float
    tolerance: float
    noise: float
    cached: bool = False

    @property
    def passed(self) -> bool:
        """Whether both errors are within the tolerance (not if one is not a number)."""
        return self.full_error <= self.tolerance and self.linked_error <= self.tolerance


def _relative(got: Tensor, want: Tensor) -> float:
    got, want = (x.double() - x.double().mean(dim=-1, keepdim=True) for x in (got, want))
    return float((got - want).norm() / want.norm().clamp_min(1e-12))


class _Oracle:
    """The untouched model with one chosen attention implementation."""

    def __init__(self, decoder: Decoder, implementation: str) -> None:
        self._model = share_weights(decoder.reference)
        self._model.set_attn_implementation(implementation)
        # Length-dependent rotary scaling is frozen in the engine; it must not move under the oracle either.
        for name, module in self._model.named_modules():
            if name.rsplit(".", 1)[-1] == "rotary_emb":
                module.load_state_dict(decoder.frozen_rotary.state_dict())
                for buffer in ("inv_freq", "long_inv_freq"):
                    if hasattr(decoder.frozen_rotary, buffer):
                        setattr(module, buffer, getattr(decoder.frozen_rotary, buffer))
                if getattr(module, "rope_type", None) in ("dynamic", "longrope"):
                    module.rope_type = "default"
                    module.attention_scaling = decoder.frozen_rotary.attention_scaling
        self._device, self._dtype = decoder.device, decoder.dtype

    @torch.inference_mode()
    def logits(self, ids: list[int], positions: list[int], visible: Tensor) -> Tensor:
        """Logits ``(tokens, vocab)`` where token i sees the tokens j with ``visible[i, j]``."""
        mask = torch.zeros(visible.shape, dtype=self._dtype).masked_fill_(~visible, torch.finfo(self._dtype).min)
        output = self._model(
            input_ids=torch.tensor([ids], device=self._device),
            position_ids=torch.tensor([positions], device=self._device),
            attention_mask=mask[None, None].to(self._device),
            use_cache=False,
        )
        return output.logits[0]


def _sample_ids(decoder: Decoder, count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, decoder.spec.vocab_size, (count,), generator=generator).tolist()


def run_selftest(decoder: Decoder, backend: AttentionBackend) -> SelfTestReport:
    """Compare the engine with the untouched model; takes two forward passes of about a hundred tokens each."""
    length = min(64, decoder.max_model_len)
    size = max(1, min(16, length // 4))
    ids = _sample_ids(decoder, length, seed=0)
    eager = _Oracle(decoder, "eager")
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    want = eager.logits(ids, list(range(length)), causal)

    def engine_logits(layout: Layout, recompute: dict[int, list[int]]) -> Tensor:
        plan = LinkPlan(layout, recompute)
        private = PrivateKV(decoder.spec, len(plan.rows), decoder.device)
        step = backend.plan([SequenceRows(plan.rows, private, plan.runs)])
        return decoder.logits(plan.row_ids, plan.rows, step, len(plan.rows))

    full = engine_logits(Layout([(ids, None)]), {})
    noise = 0.0
    if decoder.dtype in (torch.float16, torch.bfloat16):
        noise = _relative(_Oracle(decoder, "sdpa").logits(ids, list(range(length)), causal), want)

    # Linked: [plain][chunk A][chunk B][A again][plain], slots 0, 1 and one in the middle recomputed.
    a, b, plain = ids[:size], ids[size : 2 * size], ids[2 * size : 2 * size + max(1, size // 2)]
    kv_a, kv_b = Compiler(decoder, backend).compile([a, b], CompileContext("isolated"))
    layout = Layout([(plain, None), (a, Body(kv_a, ())), (b, Body(kv_b, ())), (a, Body(kv_a, ())), (plain, None)])
    chosen = sorted({0, min(1, size - 1), size // 2})
    linked = engine_logits(layout, dict.fromkeys((1, 2, 3), chosen))
    want_linked = eager.logits(*_stale_and_computed(layout, chosen))[-len(linked) :]
    return SelfTestReport(
        full_error=_relative(full, want),
        linked_error=_relative(linked, want_linked),
        tolerance=max(_TOLERANCE[decoder.dtype], _NOISE_FACTOR * noise),
        noise=noise,
    )


def _stale_and_computed(layout: Layout, chosen: list[int]) -> tuple[list[int], list[int], Tensor]:
    """Tokens, positions and visibility of the one-pass oracle: stale copies first, computed tokens behind."""
    tokens: list[tuple[int, int, int, bool]] = []  # id, position, instance (-1: computed), read by others
    computed: list[tuple[int, int, int, bool]] = []
    for index, segment in enumerate(layout.segments):
        for slot, token in enumerate(segment.token_ids):
            position = segment.start + slot
            if segment.body is not None:
                tokens.append((token, position, index, slot not in chosen))
            if segment.body is None or slot in chosen:
                computed.append((token, position, -1, True))
    tokens += computed
    visible = torch.zeros(len(tokens), len(tokens), dtype=torch.bool)
    for i, (_, at, instance, _) in enumerate(tokens):
        for j, (_, where, owner, read) in enumerate(tokens):
            if where > at:
                continue
            # A stale token saw its own chunk while it was compiled; a computed one sees computed tokens and the
            # stale tokens that were not replaced.
            visible[i, j] = owner == instance if instance >= 0 else (owner < 0 or read)
    return [t[0] for t in tokens], [t[1] for t in tokens], visible


def gate(decoder: Decoder, backend: AttentionBackend, *, use_cache: bool = True) -> SelfTestReport:
    """Run the self-test, or take the result it gave for the same model, versions, backend and device.

    Raises
    ------
    SelfTestError
        If the engine's numbers differ from the untouched model's by more than rounding.
    """
    identity = json.dumps(
        [
            decoder.fingerprint,
            decoder.max_model_len,
            _version.__version__,
            torch.__version__,
            transformers.__version__,
            backend.identity,
            str(decoder.device),
            torch.get_num_threads(),
        ]
    )
    path = cache_dir() / "selftest" / f"{hashlib.sha256(identity.encode()).hexdigest()}.json"
    if use_cache and (found := _read(path)) is not None:
        return found
    report = run_selftest(decoder, backend)
    if not report.passed:
        raise SelfTestError(
            f"{decoder.spec.architecture} does not pass the correctness gate: relative error {report.full_error:.2e} "
            f"(everything computed) and {report.linked_error:.2e} (linked chunks), allowed {report.tolerance:.1e}. "
            "It will not be served, for its answers would be wrong. Please report the model and the versions of torch "
            "and transformers; selftest=False serves it at your own risk."
        )
    _write(path, report)
    return report


def _read(path: Any) -> SelfTestReport | None:
    try:
        report = SelfTestReport(**{**json.loads(path.read_text()), "cached": True})
    except (OSError, ValueError, TypeError):
        return None
    return report if report.passed else None


def _write(path: Any, report: SelfTestReport) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{uuid.uuid4().hex}.tmp")
        temporary.write_text(json.dumps(asdict(report)))
        os.replace(temporary, path)
    except OSError as error:
        logger.debug("the self-test's result is not kept: %s", error)
