"""Tiny random-weight models of every supported kind, built from configurations."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import transformers as hf

_SHARED: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.35,  # large enough for attention to matter in the logits
    "attn_implementation": "eager",
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}


def _rope(parameters: dict[str, Any]) -> dict[str, Any]:
    return {"rope_parameters": parameters}


def _longrope() -> dict[str, Any]:
    pairs = 4
    return {
        "original_max_position_embeddings": 64,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0] * pairs,
            "long_factor": [1.0 + 0.5 * i for i in range(pairs)],
            "original_max_position_embeddings": 64,
        },
    }


# name -> (configuration class, model class, changes to the shared configuration)
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-llama3": ("Llama", _rope(LLAMA3)),
    "llama-yarn": ("Llama", _rope(YARN)),
    "llama-linear": ("Llama", _rope(LINEAR)),
    "llama-dynamic": ("Llama", _rope(DYNAMIC)),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-yarn": ("Mistral", {"sliding_window": None, **_rope(YARN)}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen2-yarn": ("Qwen2", _rope(YARN)),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3-llama3": ("Qwen3", {"head_dim": 16, **_rope(LLAMA3)}),
    "phi3": ("Phi3", {"sliding_window": None}),
    "phi3-partial": (
        "Phi3",
        {
            "sliding_window": None,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            **_rope({"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}),
        },
    ),
    "phi3-longrope": ("Phi3", {"sliding_window": None, **_longrope()}),
    "olmo2": ("Olmo2", {}),
    "olmo2-yarn": ("Olmo2", _rope(YARN)),
    "granite": ("Granite", {"attention_multiplier": 0.2, "residual_multiplier": 0.7, "logits_scaling": 2.0}),
    "gpt-neox": (
        "GPTNeoX",
        {
            "num_key_value_heads": 6,
            "num_attention_heads": 3,
            **_rope({"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}),
        },
    ),
    "cohere": ("Cohere", {"logit_scale": 1.0}),
    "cohere-llama3": ("Cohere", {"logit_scale": 1.0, **_rope(LLAMA3)}),
    "cohere2": ("Cohere2", {"logit_scale": 1.0, "num_hidden_layers": 4, "sliding_window": 512}),
    "glm": (
        "Glm",
        {
            "head_dim": 8,
            **_rope({"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}),
        },
    ),
    "gemma": ("Gemma", {"head_dim": 8}),
    "smollm3": (
        "SmolLM3",
        {"num_hidden_layers": 4, "no_rope_layer_interval": 2, "use_sliding_window": False},
    ),
}


@lru_cache(maxsize=64)
def tiny(kind: str, dtype: torch.dtype = torch.float32) -> Any:
    """A seeded random model; cached, for the engine leaves it untouched."""
    family, changes = KINDS[kind]
    return build(family, changes, dtype)


def build(family: str, changes: dict[str, Any], dtype: torch.dtype = torch.float32) -> Any:
    """A seeded random model of a family with changes to the shared configuration."""
    config_class = getattr(hf, f"{family}Config")
    model_class = getattr(hf, f"{family}ForCausalLM")
    torch.manual_seed(7)
    model = model_class(config_class(**{**_SHARED, **changes})).to(dtype).eval()
    model.generation_config.eos_token_id = 2
    with torch.no_grad():  # norms start as ones and biases as zeros; random ones show more
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                base = 0.0 if name.endswith("bias") else parameter.mean()
                parameter.copy_(base + 0.2 * torch.randn_like(parameter))
    return model
