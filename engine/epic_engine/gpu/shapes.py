"""What is measured: the shapes of models and problems, as on a real card and as toys for Triton's interpreter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from epic_engine.model.spec import ModelSpec

__all__ = ["REAL", "TINY", "ModelShape", "Sizes", "weights_bytes"]


@dataclass(frozen=True)
class ModelShape:
    """A Llama by its numbers.

    Attributes
    ----------
    name
        For tables.
    hidden, layers, heads, kv_heads, head_dim, intermediate, vocab, tied
        As in its configuration.
    rope_factor
        Of Llama-3 scaling.
    spread
        Standard deviation of random weights.
    """

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool = False
    rope_factor: float = 8.0
    spread: float = 0.02

    def build(self, device: torch.device, dtype: torch.dtype, *, seed: int = 0) -> Any:
        """A model with random weights, made on its device."""
        limit = 131072 if self.vocab > 1000 else 2048
        config = LlamaConfig(
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            max_position_embeddings=limit,
            tie_word_embeddings=self.tied,
            initializer_range=self.spread,
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": self.rope_factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": limit // 16,
            },
        )
        torch.manual_seed(seed)
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        return model.eval()

    def spec(self, layers: int, dtype: torch.dtype) -> ModelSpec:
        """Shapes of some of its layers' attention, for memory without a model."""
        return ModelSpec(
            architecture=self.name,
            num_layers=layers,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            value_dim=self.head_dim,
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            scaling=(self.head_dim**-0.5,) * layers,
            rotates=(True,) * layers,
            layer_types=(None,) * layers,
            max_positions=131072,
            end_ids=frozenset(),
            dtype=dtype,
        )


def weights_bytes(shape: ModelShape, dtype: torch.dtype) -> int:
    """Bytes of a model's weights."""
    attention = shape.hidden * shape.head_dim * 2 * (shape.heads + shape.kv_heads)
    layer = attention + 3 * shape.hidden * shape.intermediate
    return (shape.layers * layer + shape.vocab * shape.hidden * (1 if shape.tied else 2)) * dtype.itemsize


@dataclass(frozen=True)
class Sizes:
    """Sizes of one run.

    Attributes
    ----------
    tiny
        Toys: times mean nothing.
    small
        Model of the comparisons in float32.
    models
        Models that are timed, the one with a target first.
    dtype
        Of those, and of single layers.
    copy_bytes
        Of the copy that memory bandwidth is measured with.
    repeats
        Of a short measurement.
    chunk
        Tokens a chunk.
    requests, contexts
        Decoding over one layer; tokens that each request reads. The second number of requests has a target at the
        longest context, the last one has one for shared chunks.
    link_chunks, link_chunk, link_rows
        Chunks of a link phase, tokens of each, and how many of these are computed anew.
    write_rows
        Rows of a pass that writes keys and values.
    prompts, question
        Tokens of the chunks of timed prompts, and of the question behind them.
    prompt_repeats
        Timed prompts of each kind.
    decode_requests, decode_context, decode_tokens
        Requests that generate together, tokens that each one reads, and that it generates.
    compare_tokens, compare_rows
        Tokens of a text whose logits are compared with float32, and how many of the last ones.
    """

    tiny: bool
    small: ModelShape
    models: tuple[ModelShape, ...]
    dtype: torch.dtype
    copy_bytes: int
    repeats: int
    chunk: int
    requests: tuple[int, ...]
    contexts: tuple[int, ...]
    link_chunks: int
    link_chunk: int
    link_rows: int
    write_rows: int
    prompts: tuple[int, ...]
    question: int
    prompt_repeats: int
    decode_requests: tuple[int, ...]
    decode_context: int
    decode_tokens: int
    compare_tokens: int
    compare_rows: int


_LLAMA_8B = ModelShape("8B", 4096, 32, 32, 8, 128, 14336, 128256)
_LLAMA_1B = ModelShape("1B", 2048, 16, 32, 8, 64, 8192, 128256, tied=True, rope_factor=32.0)
_SMALL = ModelShape("small", 512, 4, 8, 2, 64, 1024, 1999, spread=0.1)
# The interpreter's time goes by programs, of which the merge has one a row and head.
_TOY = ModelShape("toy", 48, 2, 2, 1, 16, 64, 199, tied=True, spread=0.3)

REAL = Sizes(
    tiny=False,
    small=_SMALL,
    models=(_LLAMA_8B, _LLAMA_1B),
    dtype=torch.bfloat16,
    copy_bytes=4 << 30,
    repeats=20,
    chunk=512,
    requests=(1, 8, 64),
    contexts=(8192, 32768),
    link_chunks=16,
    link_chunk=2048,
    link_rows=64,
    write_rows=8192,
    prompts=(8192, 32768),
    question=32,
    prompt_repeats=3,
    decode_requests=(1, 8, 32),
    decode_context=8192,
    decode_tokens=64,
    compare_tokens=512,
    compare_rows=128,
)
TINY = Sizes(
    tiny=True,
    small=_TOY,
    models=(_TOY,),
    dtype=torch.float16,  # the interpreter cuts bfloat16 off instead of rounding it
    copy_bytes=1 << 20,
    repeats=1,
    chunk=24,
    requests=(1, 2, 4),
    contexts=(48, 96),
    link_chunks=2,
    link_chunk=64,
    link_rows=4,
    write_rows=32,
    prompts=(24, 48),
    question=4,
    prompt_repeats=1,
    decode_requests=(1, 2),
    decode_context=24,
    decode_tokens=3,
    compare_tokens=20,
    compare_rows=6,
)
