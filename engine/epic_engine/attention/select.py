"""Which backend computes attention here."""

from __future__ import annotations

import importlib.util
import logging
import os

import torch

from epic_engine.errors import ConfigError
from epic_engine.model.decoder import Decoder

from .base import AttentionBackend
from .torch_backend import TorchBackend

__all__ = ["BACKENDS", "make_backend", "why_not_triton"]

logger = logging.getLogger(__name__)

BACKENDS = ("auto", "torch", "triton")
# Ampere: the first with bfloat16 matrix products and asynchronous copies to shared memory.
_OLDEST = (8, 0)
_OLDEST_TRITON = (3, 6)


def make_backend(name: str, decoder: Decoder, page_size: int) -> AttentionBackend:
    """The attention backend for a model on its device.

    Parameters
    ----------
    name
        ``"torch"``, ``"triton"``, or ``"auto"``: Triton on a GPU that it supports, else torch.
    decoder
        The model.
    page_size
        Tokens a page of KV memory.

    Raises
    ------
    ConfigError
        If the name is unknown, or Triton is asked for where it cannot run.
    """
    if name not in BACKENDS:
        raise ConfigError(f"attention={name!r} is not available: use {', '.join(map(repr, BACKENDS))}.")
    if name == "torch":
        return TorchBackend(decoder)
    reason = why_not_triton(decoder)
    if reason is None and (name == "triton" or decoder.device.type == "cuda"):
        from .triton_backend import TritonBackend

        return TritonBackend(decoder, page_size)
    if name == "triton":
        raise ConfigError(f"attention='triton' cannot be used: {reason} Use attention='auto' or 'torch'.")
    if decoder.device.type == "cuda":
        logger.warning("attention runs on torch's kernels, which is slower: %s", reason)
    return TorchBackend(decoder)


def why_not_triton(decoder: Decoder) -> str | None:
    """What keeps the Triton kernels from serving a model, as a sentence; None if nothing does."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (pip install triton)."
    import triton

    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if version < _OLDEST_TRITON:
        oldest = ".".join(map(str, _OLDEST_TRITON))
        return f"Triton {triton.__version__} is too old, {oldest} or later is needed (pip install -U triton)."
    spec, device = decoder.spec, decoder.device
    if device.type == "cuda":
        found = torch.cuda.get_device_capability(device)
        if found < _OLDEST:
            return f"the GPU's compute capability is {found[0]}.{found[1]}, {_OLDEST[0]}.{_OLDEST[1]} is needed."
    elif not interpreted():
        return f"the model is on {device}, and Triton's kernels run on NVIDIA GPUs."
    if spec.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"the kernels do not compute in {str(spec.dtype).removeprefix('torch.')}."
    if spec.head_dim > 256:
        return f"the kernels' heads have at most 256 dimensions, the model's have {spec.head_dim}."
    if spec.num_heads // spec.num_kv_heads > 16:
        return (
            f"the kernels serve at most 16 query heads a key head, the model has {spec.num_heads // spec.num_kv_heads}."
        )
    return None


def interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels, on a CPU: slow, for tests (``TRITON_INTERPRET=1``)."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on")
