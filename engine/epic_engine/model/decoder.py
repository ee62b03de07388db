"""A Hugging Face decoder whose attention and rotary embedding are the engine's.

The model's own modules do everything else: embeddings, projections, norms, MLP, mixture of experts, the output
head. Queries and keys reach :func:`attend` unrotated because the rotary module is replaced by
:class:`~epic_engine.model.rope.IdentityRotary`; the state of a forward pass travels as a keyword argument.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from epic_engine.errors import UnsupportedModelError

from . import spec as model_spec
from .fingerprint import model_fingerprint
from .rope import IdentityRotary, RotaryTable, build_table, find_apply_rotary, observe_pairs

__all__ = ["AttentionStep", "Decoder", "share_weights"]

_IMPLEMENTATION = "epic_segments"


class AttentionStep(Protocol):
    """What a forward pass needs of attention: one call per layer."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float, options: dict[str, Any]) -> Tensor:
        """Attention of one layer.

        Parameters
        ----------
        layer
            Decoder layer index.
        q, k, v
            ``(1, heads, rows, dim)``, unrotated, in the model's own order of dimensions.
        scaling
            Factor on the scores.
        options
            Keyword arguments that the model passed besides.

        Returns
        -------
        Tensor
            ``(1, rows, heads, value_dim)``.
        """
        ...


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    epic_step: AttentionStep | None = None,
    epic_modules: dict[int, nn.Module] | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention function registered with transformers: hands the layer's q, k, v to the step."""
    if epic_step is None:
        raise UnsupportedModelError(
            f"{type(module).__name__} does not forward keyword arguments to its attention function, so the engine "
            "cannot serve it."
        )
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    if epic_modules is not None:
        epic_modules[layer] = module
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    return epic_step.attend(layer, query, key, value, float(scaling), options), None


def share_weights(model: Any) -> Any:
    """A second module tree over the same parameter tensors; configuration and buffers are copied."""
    memo: dict[int, Any] = {id(p): p for p in model.parameters()}
    return copy.deepcopy(model, memo)


def _rotary_of(model: Any) -> tuple[nn.Module, str, nn.Module]:
    found = [
        (name, module)
        for name, module in model.named_modules()
        if name.rsplit(".", 1)[-1] == "rotary_emb" and isinstance(module, nn.Module)
    ]
    if len(found) != 1:
        raise UnsupportedModelError(
            f"{type(model).__name__} is not supported: it has {len(found)} rotary embedding modules where one is "
            "needed. Models without rotary positions (ALiBi, learned positions, recurrent) cannot be linked."
        )
    name, module = found[0]
    parent = model.get_submodule(name.rpartition(".")[0])
    return parent, "rotary_emb", module


class Decoder:
    """One loaded model, ready to run chosen rows.

    Parameters
    ----------
    model
        A Hugging Face causal language model; it is left as it is (the engine works on a second module tree that
        shares its weights).
    tokenizer
        Its tokenizer, for the ids that end generation; may be None.
    max_model_len
        Longest context served, in tokens; None takes the model's limit.

    Attributes
    ----------
    reference
        The untouched model.
    spec
        Its shapes and options.
    fingerprint
        Identity of its weights and configuration.
    tables
        Rotation per layer; None where the layer does not rotate.
    pairs
        How the model pairs dimensions.

    Raises
    ------
    UnsupportedModelError
        If the model cannot be served exactly; the message names the reason.
    """

    def __init__(self, model: Any, tokenizer: Any = None, max_model_len: int | None = None) -> None:
        model_spec.check_architecture(model)
        model.eval()
        self.reference = model
        self.tokenizer = tokenizer
        limit = model_spec.position_limit(model.config)
        self.max_model_len = min(max_model_len or limit, limit)
        parameter = next(model.parameters())
        self.device, self.dtype = parameter.device, parameter.dtype

        ALL_ATTENTION_FUNCTIONS.register(_IMPLEMENTATION, attend)
        self._model = share_weights(model)
        parent, attribute, rotary = _rotary_of(self._model)
        frozen = copy.deepcopy(rotary)  # dynamic scaling changes the module when it is called
        layer_types = self._rotary_layer_types(frozen)
        with torch.no_grad():
            extra = {} if layer_types[0] is None else {"layer_type": layer_types[0]}
            probe = torch.zeros(1, 1, 1, dtype=torch.float32, device=self.device)
            width = frozen(probe, torch.zeros(1, 1, dtype=torch.int64, device=self.device), **extra)[0].shape[-1]
        self._model.set_attn_implementation(_IMPLEMENTATION)
        if self._model.config._attn_implementation != _IMPLEMENTATION:
            raise UnsupportedModelError(
                f"{type(model).__name__} does not accept a custom attention function, so the engine cannot serve it."
            )
        modules: dict[int, nn.Module] = {}

        def run(ids: list[int], positions: list[int], scale: float, recorder: model_spec.Recorder) -> Tensor:
            setattr(parent, attribute, IdentityRotary(width, scale))
            return self._hidden(ids, positions, recorder, modules)

        calls = model_spec.observe(run, modules, model, self.max_model_len)
        setattr(parent, attribute, IdentityRotary(width))
        first = calls[0]
        head_dim = first.query.shape[-1]
        apply_rotary = find_apply_rotary(modules[0])
        self.pairs = observe_pairs(apply_rotary, head_dim, width)
        tables: dict[str | None, RotaryTable] = {
            kind: build_table(
                frozen, self.pairs, apply_rotary, self.max_model_len, self.device, self.dtype, layer_type=kind
            )
            for kind in sorted(set(layer_types), key=str)
        }
        rotates = tuple(bool(calls[i].options["rotates"]) for i in range(len(calls)))
        self.tables = [tables[t] if r else None for t, r in zip(layer_types, rotates, strict=True)]
        self.frozen_rotary = frozen
        self._order = None if self.pairs.adjacent else self.pairs.order.to(self.device)
        self._half_split = self.pairs.half_split
        self.spec = model_spec.ModelSpec(
            architecture=type(model).__name__,
            num_layers=len(calls),
            num_heads=first.query.shape[1],
            num_kv_heads=first.key.shape[1],
            head_dim=head_dim,
            value_dim=first.value.shape[-1],
            vocab_size=int(model.config.vocab_size),
            hidden_size=int(model.config.hidden_size),
            scaling=tuple(calls[i].scaling for i in range(len(calls))),
            rotates=rotates,
            layer_types=tuple(layer_types),
            max_positions=limit,
            end_ids=model_spec.end_token_ids(model, tokenizer),
            dtype=self.dtype,
        )
        self._check_uniform(calls)
        self.fingerprint = model_fingerprint(model, self.max_model_len)

    def _rotary_layer_types(self, rotary: nn.Module) -> list[str | None]:
        import inspect

        layers = int(self.reference.config.num_hidden_layers)
        forward = inspect.signature(rotary.forward)
        if "layer_type" in forward.parameters and isinstance(getattr(rotary, "rope_type", None), dict):
            return list(self.reference.config.layer_types)
        return [None] * layers

    def _check_uniform(self, calls: dict[int, model_spec.AttentionCall]) -> None:
        shapes = {(c.query.shape[1:2], c.key.shape[1:2], c.query.shape[3:], c.value.shape[3:]) for c in calls.values()}
        if len(shapes) > 1:
            raise UnsupportedModelError(
                f"{self.spec.architecture} is not supported: its layers have attention heads of different shapes."
            )
        if self.spec.head_dim != self.spec.value_dim:
            raise UnsupportedModelError(
                f"{self.spec.architecture} is not supported: keys and values have different sizes "
                f"({self.spec.head_dim} and {self.spec.value_dim})."
            )

    def _arguments(self, ids: Any, positions: Any, step: AttentionStep) -> dict[str, Any]:
        def as_row(values: Any) -> Tensor:
            return torch.as_tensor(values, dtype=torch.int64, device=self.device).view(1, -1)

        return {
            "input_ids": as_row(ids),
            "position_ids": as_row(positions),
            "use_cache": False,
            "epic_step": step,
        }

    @torch.inference_mode()
    def _hidden(self, ids: Any, positions: Any, step: AttentionStep, modules: dict[int, nn.Module]) -> Tensor:
        arguments = self._arguments(ids, positions, step)
        output = self._model.base_model(**arguments, epic_modules=modules)
        return output[0]

    @torch.inference_mode()
    def run(self, ids: Any, positions: Any, step: AttentionStep) -> None:
        """Run rows through the decoder for their KV alone; no logits.

        Parameters
        ----------
        ids, positions
            ``(rows,)`` token ids and their places in the prompt.
        step
            Attention of this pass; it keeps the rows' keys and values.
        """
        self._model.base_model(**self._arguments(ids, positions, step))

    @torch.inference_mode()
    def logits(self, ids: Any, positions: Any, step: AttentionStep, wanted: int | Sequence[int] = 1) -> Tensor:
        """Run rows and return the logits of some of them, ``(wanted, vocab)``, in the model's dtype.

        Parameters
        ----------
        ids, positions, step
            As for :meth:`run`.
        wanted
            How many of the last rows, or which ones.
        """
        keep = wanted if isinstance(wanted, int) else torch.tensor(wanted, dtype=torch.int64, device=self.device)
        output = self._model(**self._arguments(ids, positions, step), logits_to_keep=keep)
        return output.logits[0]

    def as_pairs(self, x: Tensor) -> Tensor:
        """Head dimensions as rotary pairs: ``(..., head_dim)`` in the model's order to ``(..., head_dim / 2, 2)``.

        A view where the model's order allows it.
        """
        if self._half_split:
            return x.unflatten(-1, (2, -1)).transpose(-1, -2)
        if self._order is not None:
            x = x.index_select(-1, self._order)
        return x.unflatten(-1, (-1, 2))
