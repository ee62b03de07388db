"""Frozen settings of an engine and of a request."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from .errors import ConfigError

__all__ = ["EngineConfig", "SamplingParams"]

_DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
_DEVICES = ("auto", "cpu", "cuda")
_PLACEMENTS = ("auto", "map", "pool")
_KV_DTYPES = ("auto", "bf16", "int8", "fp8")
_MOST_NAMESPACE = 1024


@dataclass(frozen=True)
class EngineConfig:
    """What an :class:`~epic_engine.Engine` needs to know beyond the model.

    Parameters
    ----------
    device
        ``"auto"`` (CUDA where there is one, else CPU), ``"cpu"``, ``"cuda"`` or ``"cuda:N"``.
    dtype
        ``"auto"`` is bfloat16 on CUDA and on CPUs with AVX512-BF16 or AMX, else float32.
    max_model_len
        Longest prompt plus answer, in tokens; None takes the model's own limit.
    namespace
        Tenant: chunks of one namespace are never linked by a request of another.
    context
        Default compile context: ``"isolated"``, ``"sink:n"`` or ``"head"``.
    policy
        Default link policy, for example ``"legolink:16"``.
    rows_per_step
        Most rows (tokens) run through the model at once while linking or compiling; bounds peak memory.
    prefix_cache_bytes
        Budget of the exact-prefix cache that the ``prefix`` policy fills, in bytes.
    memory
        Budget for KV in memory, compiled chunks in use included: ``"8GiB"``, bytes, a fraction of what is free, or
        None for half of what is free (on CUDA 0.8 of it).
    page_size
        Tokens a page of KV memory.
    chunk_placement
        Where compiled chunks are read from: ``"map"`` (the store's memory map), ``"pool"`` (copied to pages on the
        device) or ``"auto"`` (``map`` on a CPU).
    kv_dtype
        What compiled chunks are kept as: ``"auto"`` (as the model computes them), ``"bf16"``, ``"int8"`` or ``"fp8"``
        (with scales; half of bfloat16's bytes). Chunks kept otherwise are other chunks: they are compiled anew.
    step_seconds
        A forward pass that takes longer is run in the background of shorter ones.
    stall_seconds
        Longest pause of running answers while a long pass goes on. Shorter is smoother, longer serves more requests.
    max_running
        Most requests that hold memory at once; the others wait in line.
    cuda_graphs
        Capture decoding steps when the engine starts (Triton backend only): faster tokens, a few seconds more to start.
    selftest
        Compare the engine with the untouched model at load and refuse to serve above the tolerance.
    """

    device: str = "auto"
    dtype: str = "auto"
    max_model_len: int | None = None
    namespace: str = "default"
    context: str = "isolated"
    policy: str = "legolink:16"
    rows_per_step: int = 2048
    prefix_cache_bytes: int = 2 << 30
    memory: str | int | float | None = None
    page_size: int = 16
    chunk_placement: str = "auto"
    kv_dtype: str = "auto"
    step_seconds: float = 0.1
    stall_seconds: float = 1.0
    max_running: int = 64
    cuda_graphs: bool = True
    selftest: bool = True

    def __post_init__(self) -> None:
        """Refuse values that cannot work, naming those that can."""
        if self.device not in _DEVICES and not self.device.startswith("cuda:"):
            hint = (
                " Apple's MPS backend is not verified against the correctness gate, so it is refused:"
                if self.device.startswith("mps")
                else ""
            )
            raise ConfigError(f"device={self.device!r} cannot be used.{hint} Use 'auto', 'cpu', 'cuda' or 'cuda:N'.")
        if self.dtype not in _DTYPES:
            raise ConfigError(f"dtype={self.dtype!r} cannot be used: pick one of {', '.join(_DTYPES)}.")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ConfigError(f"max_model_len={self.max_model_len} must be at least 2 tokens.")
        _check_namespace(self.namespace)
        if self.rows_per_step < 1:
            raise ConfigError(f"rows_per_step={self.rows_per_step} must be at least 1.")
        if self.prefix_cache_bytes < 0:
            raise ConfigError("prefix_cache_bytes must not be negative; 0 switches the prefix cache off.")
        if self.chunk_placement not in _PLACEMENTS:
            raise ConfigError(f"chunk_placement={self.chunk_placement!r} is unknown: use {' or '.join(_PLACEMENTS)}.")
        if self.kv_dtype not in _KV_DTYPES:
            raise ConfigError(f"kv_dtype={self.kv_dtype!r} cannot be used: pick one of {', '.join(_KV_DTYPES)}.")
        if not 0 < self.step_seconds < math.inf:
            raise ConfigError(f"step_seconds={self.step_seconds} must be above 0 and finite.")
        if not 0 <= self.stall_seconds < math.inf:
            raise ConfigError(f"stall_seconds={self.stall_seconds} must be 0 or above, and finite.")
        if self.max_running < 1:
            raise ConfigError(f"max_running={self.max_running} must be at least 1.")


def _check_namespace(name: str) -> None:
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        size = 0
    if not 0 < size <= _MOST_NAMESPACE or "\0" in name:
        raise ConfigError(
            f"namespace={name[:80]!r} cannot be used: give 1 to {_MOST_NAMESPACE} bytes of UTF-8 text without NUL."
        )


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn and when generation ends.

    Parameters
    ----------
    max_tokens
        Most tokens generated.
    temperature
        0 is greedy; above, logits are divided by it.
    top_k
        Keep the k most likely tokens; 0 keeps all.
    top_p
        Keep the smallest set of tokens whose probability reaches ``top_p``; in (0, 1].
    min_p
        Drop tokens less likely than ``min_p`` times the most likely one; in [0, 1).
    repetition_penalty
        Above 1 makes tokens of the prompt and the answer less likely (Keskar et al. 2019, section 4.1).
    seed
        Same seed, same text; None draws a fresh one.
    stop
        Strings that end generation; the text returned ends before the first of them.
    stop_token_ids
        Token ids that end generation, besides the model's own end tokens.
    visible_token_ids
        Special tokens that stay in the text, such as a mark that opens tool calls; all others are left out of it.
    ignore_eos
        Go on past the model's end tokens; for benchmarks.
    logprobs
        None, or how many alternatives to report for each generated token (0: only the token's own).
    logit_bias
        Token id to a number added to its logit.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    visible_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        """Normalise sequences and refuse values that cannot work."""
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        object.__setattr__(self, "visible_token_ids", tuple(self.visible_token_ids))
        object.__setattr__(self, "logit_bias", MappingProxyType(dict(self.logit_bias)))
        for ok, message in (
            (self.max_tokens >= 1, f"max_tokens={self.max_tokens} must be at least 1"),
            (
                0 <= self.temperature < math.inf,
                f"temperature={self.temperature} must be 0 (greedy) or above, and finite",
            ),
            (self.top_k >= 0, f"top_k={self.top_k} must be 0 (off) or above"),
            (0 < self.top_p <= 1, f"top_p={self.top_p} must lie in (0, 1]"),
            (0 <= self.min_p < 1, f"min_p={self.min_p} must lie in [0, 1)"),
            (
                0 < self.repetition_penalty < math.inf,
                f"repetition_penalty={self.repetition_penalty} must be above 0 and finite",
            ),
            (all(self.stop), "stop strings must not be empty"),
            # -inf bans a token.
            (
                all(b < math.inf for b in self.logit_bias.values()),
                "logit_bias must hold numbers below infinity",
            ),
            (self.logprobs is None or self.logprobs >= 0, f"logprobs={self.logprobs} must be None or >= 0"),
        ):
            if not ok:
                raise ConfigError(message + ".")
