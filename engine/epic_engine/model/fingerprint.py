"""Which model a chunk's KV belongs to.

The fingerprint covers the weights as they are in memory (so merged adapters, quantisation and data type are part
of it), the configuration (activation, norms, rotary scaling) and, where the rotary embedding depends on it, the
length at which it was frozen. Nothing is read from file names or dates.
"""

from __future__ import annotations

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

__all__ = ["model_fingerprint"]

# Where a model came from and who wrote the file say nothing about what it computes.
_IRRELEVANT = {
    "_name_or_path",
    "_model_name_or_path",
    "_attn_implementation",
    "_attn_implementation_internal",
    "_attn_implementation_autoset",
    "architectures",
    "attn_implementation",
    "auto_map",
    "dtype",
    "torch_dtype",
    "gguf_file",
    "transformers_version",
    "use_cache",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "id2label",
    "label2id",
    "problem_type",
    "attention_dropout",
}


def _tensor_digest(tensor: Tensor) -> bytes:
    flat = tensor.detach().contiguous().cpu().flatten()
    digest = hashlib.sha256(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    if flat.numel():
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.digest()


def model_fingerprint(model: Any, max_model_len: int) -> str:
    """SHA-256 over weights and everything else that shapes a chunk's KV, in hex.

    Parameters
    ----------
    model
        A Hugging Face model.
    max_model_len
        Counts only where the rotary scaling depends on the length (``dynamic``, ``longrope``).
    """
    state = {k: v for k, v in model.state_dict().items() if isinstance(v, Tensor)}
    names = sorted(state)
    # hashlib releases the interpreter lock, so a few threads hash at memory speed.
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        digests = list(pool.map(lambda name: _tensor_digest(state[name]), names))
    config = {k: v for k, v in model.config.to_dict().items() if k not in _IRRELEVANT}
    rope = json.dumps(config.get("rope_parameters") or config.get("rope_scaling"), default=str)
    total = hashlib.sha256()
    total.update(type(model).__name__.encode())
    total.update(json.dumps(config, sort_keys=True, default=str).encode())
    if "dynamic" in rope or "longrope" in rope:
        total.update(f"frozen at {max_model_len}".encode())
    for name, digest in zip(names, digests, strict=True):
        total.update(name.encode() + b"\0" + digest)
    return total.hexdigest()
