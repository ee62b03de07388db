"""What the engine needs to know about a model, and the reasons for which it refuses one.

This is the one place that reads Hugging Face configuration attributes. Where a fact can be observed it is
observed instead: :func:`observe` runs the decoder a few times with attention switched off and looks at what each
layer hands to its attention function.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from epic_engine.errors import UnsupportedModelError

__all__ = ["AttentionCall", "ModelSpec", "check_architecture", "end_token_ids", "observe", "position_limit"]

_ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}


@dataclass(frozen=True)
class ModelSpec:
    """A decoder as the engine sees it.

    Attributes
    ----------
    architecture
        Class name of the model.
    num_layers, num_heads, num_kv_heads, head_dim, value_dim, vocab_size, hidden_size
        Shapes.
    scaling
        Factor on attention scores, one per layer.
    rotates
        Whether queries and keys are rotated, one per layer (False for NoPE layers).
    layer_types
        The rotary module's ``layer_type`` argument per layer; None where it takes none.
    max_positions
        Longest context the model was made for, in tokens.
    end_ids
        Token ids that end generation.
    dtype
        Data type of weights and KV.
    """

    architecture: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    vocab_size: int
    hidden_size: int
    scaling: tuple[float, ...]
    rotates: tuple[bool, ...]
    layer_types: tuple[str | None, ...]
    max_positions: int
    end_ids: frozenset[int]
    dtype: torch.dtype

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes that one token's keys and values take over all layers."""
        return self.num_layers * self.num_kv_heads * (self.head_dim + self.value_dim) * self.dtype.itemsize


@dataclass
class AttentionCall:
    """One layer's call of its attention function, as recorded by :func:`observe`."""

    query: Tensor
    key: Tensor
    value: Tensor
    scaling: float
    options: dict[str, Any] = field(default_factory=dict)


class Recorder:
    """Takes the place of attention: records each call and returns zeros, so no token sees another."""

    def __init__(self) -> None:
        self.calls: dict[int, AttentionCall] = {}
        self.repeated = False

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float, options: dict[str, Any]) -> Tensor:
        """Record the call of one layer; shapes are (1, heads, rows, dim)."""
        self.repeated |= layer in self.calls
        self.calls[layer] = AttentionCall(q.detach().clone(), k.detach().clone(), v, scaling, options)
        return q.new_zeros(1, q.shape[2], q.shape[1], v.shape[-1])


def position_limit(config: Any) -> int:
    """Longest context of the model in tokens."""
    limit = getattr(config, "max_position_embeddings", None)
    if not isinstance(limit, int) or limit < 1:
        raise UnsupportedModelError(
            "the model's configuration states no max_position_embeddings: models without rotary positions "
            "(ALiBi, learned positions, recurrent) are not supported."
        )
    return limit


def end_token_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Ids that end generation, from the generation config, the model config and the tokenizer."""
    found: set[int] = set()
    sources = (getattr(model, "generation_config", None), model.config, tokenizer)
    for source in sources:
        ids = getattr(source, "eos_token_id", None)
        if isinstance(ids, int):
            found.add(ids)
        elif ids is not None:
            found.update(int(i) for i in ids)
    return frozenset(found)


def check_architecture(model: Any) -> None:
    """Refuse, by configuration, what cannot be served exactly.

    Raises
    ------
    UnsupportedModelError
        Names the reason.
    """
    config = model.config
    name = type(model).__name__

    def refuse(reason: str) -> None:
        raise UnsupportedModelError(f"{name} is not supported: {reason}")

    if getattr(config, "is_encoder_decoder", False):
        refuse("it is an encoder-decoder, whose cross-attention has no document KV to reuse.")
    if getattr(config, "kv_lora_rank", None) is not None:
        refuse("multi-head latent attention (MLA) keeps a compressed KV with its own rotary call.")
    alibi = getattr(config, "alibi", False) or getattr(getattr(config, "attn_config", None), "alibi", False)
    if alibi or getattr(config, "position_embedding_type", "") == "alibi":
        refuse("ALiBi positions enter the scores as a bias instead of a rotation.")
    if len(getattr(config, "sub_configs", {}) or {}) > 0:
        refuse("it has several sub-models (vision, audio, …); load its text model alone.")
    types = set(getattr(config, "layer_types", None) or ()) - _ATTENTION_LAYERS
    if types:
        refuse(f"layers of type {', '.join(sorted(types))} carry state that is not KV of attention.")
    if getattr(model, "_hf_peft_config_loaded", False) or hasattr(model, "peft_config"):
        refuse("it carries an unmerged adapter. Merge it first (PEFT: merge_and_unload()) and pass the result.")
    if type(model).__name__.startswith("Peft"):
        refuse("it is a PEFT wrapper. Call merge_and_unload() and pass the result.")
    devices = {str(v) for v in (getattr(model, "hf_device_map", None) or {}).values()}
    if len(devices) > 1 or devices & {"cpu_offload", "disk"}:
        refuse("its weights are spread over several devices (device_map); load it on one.")
    if any(p.is_meta for p in model.parameters()):
        refuse("some of its weights are not in memory (meta device); load it completely.")
    if not getattr(model, "_supports_attention_backend", False):
        refuse("its code does not take a custom attention function (transformers' attention interface).")


def windows_of(config: Any, call: AttentionCall) -> int | None:
    """Sliding window of one layer in tokens, from its own call; None if it attends to everything."""
    window = call.options.get("sliding_window")
    if window is None and call.options.get("attention_chunk_size") is not None:
        window = call.options["attention_chunk_size"]
    return int(window) if window else None


def observe(
    run: Callable[[list[int], list[int], float, Recorder], Tensor],
    attention_modules: dict[int, nn.Module],
    model: Any,
    max_model_len: int,
) -> dict[int, AttentionCall]:
    """Run the decoder with attention switched off and check that it is one the engine can serve exactly.

    Parameters
    ----------
    run
        ``(token ids, positions, rotary scale, recorder) -> hidden states (1, tokens, hidden)`` of the decoder with
        an :class:`~epic_engine.model.rope.IdentityRotary` in place.
    attention_modules
        Filled by the runs: layer index to the module that called the attention function.
    model
        For names and the configuration in error messages.
    max_model_len
        Longest context that will be served, in tokens.

    Returns
    -------
    dict
        Per layer, the call with unrotated queries and keys; ``options["rotates"]`` says whether it rotates.

    Raises
    ------
    UnsupportedModelError
        If tokens are mixed outside attention, positions enter outside the rotary embedding, layers are missing,
        or an attention option is not implemented.
    """
    name = type(model).__name__
    layers = int(model.config.num_hidden_layers)
    vocab = int(model.config.vocab_size)
    far = max(max_model_len - 5, 3)
    last = vocab // 3

    def record(ids: list[int], positions: list[int], scale: float = 1.0) -> tuple[Tensor, Recorder]:
        recorder = Recorder()
        hidden = run(ids, positions, scale, recorder)
        return hidden[0, -1].float(), recorder

    base, seen = record([vocab // 2, vocab // 5, last], [0, 1, 2])
    if seen.repeated or sorted(seen.calls) != list(range(layers)):
        raise UnsupportedModelError(
            f"{name} is not supported: {layers} layers made {len(seen.calls)} distinct calls of the attention "
            "function; layers without attention (hybrid, recurrent) or with several attentions cannot be linked."
        )

    def differs(a: Tensor, b: Tensor) -> bool:
        return bool((a - b).abs().max() > 0.02 * max(a.abs().max().item(), 1e-6))

    other, _ = record([vocab // 4, vocab // 7, last], [0, 1, 2])
    if differs(base, other):
        raise UnsupportedModelError(
            f"{name} is not supported: it mixes tokens outside attention (convolution, recurrent state), "
            "which a chunk's KV does not carry."
        )
    moved, moved_seen = record([vocab // 2, vocab // 5, last], [far, far + 1, far + 2])
    if differs(base, moved) or any(
        differs(seen.calls[i].query[0, :, -1].float(), moved_seen.calls[i].query[0, :, -1].float())
        for i in range(layers)
    ):
        raise UnsupportedModelError(
            f"{name} is not supported: positions enter it outside the rotary embedding (learned positions, "
            "position-dependent scaling)."
        )
    _, doubled = record([vocab // 2, vocab // 5, last], [0, 1, 2], 2.0)
    for index, call in seen.calls.items():
        window = windows_of(model.config, call)
        if window is not None and window < max_model_len:
            raise UnsupportedModelError(
                f"{name} is not supported with max_model_len={max_model_len}: layer {index} attends to a sliding "
                f"window of {window} tokens. Pass max_model_len={window} (or less)."
            )
        if call.options.get("softcap"):
            raise UnsupportedModelError(f"{name} is not supported: attention soft-capping is not implemented.")
        if call.options.get("s_aux") is not None:
            raise UnsupportedModelError(f"{name} is not supported: attention-sink logits are not implemented.")
        if call.query.shape[1] % call.key.shape[1]:
            raise UnsupportedModelError(f"{name} is not supported: query heads are no multiple of KV heads.")
        call.options["rotates"] = differs(call.key.float(), doubled.calls[index].key.float())
    return seen.calls
