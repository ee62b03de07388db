"""Small shapes for tests of KV memory."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch
from epic_engine import ChunkInfo, ChunkKey, MemoryStore
from epic_engine.chunks import content_digest
from epic_engine.memory.paged_kv import PagedKV
from epic_engine.memory.pages import PagePool
from epic_engine.memory.residency import Residency
from epic_engine.model.spec import ModelSpec
from torch import Tensor

CPU = torch.device("cpu")
PAGE = 4
LAYERS, HEADS, DIM = 2, 3, 8
TIMEOUT = 30


def make_spec(dtype: torch.dtype = torch.float32, layers: int = LAYERS) -> ModelSpec:
    """A decoder of tiny shapes."""
    return ModelSpec(
        architecture="Tiny",
        num_layers=layers,
        num_heads=HEADS,
        num_kv_heads=HEADS,
        head_dim=DIM,
        value_dim=DIM,
        vocab_size=100,
        hidden_size=HEADS * DIM,
        scaling=(1.0,) * layers,
        rotates=(True,) * layers,
        layer_types=(None,) * layers,
        max_positions=1000,
        end_ids=frozenset(),
        dtype=dtype,
    )


def make_pool(pages: int, dtype: torch.dtype = torch.float32, layers: int = LAYERS, **options: Any) -> PagePool:
    """A pool of as many pages of four tokens."""
    spec = make_spec(dtype, layers)
    return PagePool(spec, pages * PAGE * spec.kv_bytes_per_token, CPU, page_size=PAGE, **options)


def rows_of(tokens: int, seed: int, kv: PagedKV) -> Tensor:
    """Random rows ``(layers, 2, heads, tokens, dim)`` for a sequence."""
    spec = kv._pool.spec
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(spec.num_layers, 2, HEADS, tokens, DIM, generator=generator).to(spec.dtype)


def append(kv: PagedKV, tokens: int, seed: int) -> Tensor:
    """Write random rows, count them, and return them."""
    rows = rows_of(tokens, seed, kv)
    for layer, (keys, values) in enumerate(rows):
        kv.write(layer, keys, values)
    kv.length += tokens
    return rows


def contents(kv: PagedKV) -> Tensor:
    """What a sequence holds, gathered from its pieces."""
    spec = kv._pool.spec
    empty = torch.empty(spec.num_layers, 2, HEADS, 0, DIM, dtype=spec.dtype)
    return torch.cat([empty, *(memory[:, :, :, start:stop] for memory, start, stop in kv.pieces())], dim=3)


def chunk(
    number: int, tokens: int = 2 * PAGE, version: int = 0, depends: tuple[str, ...] = (), layers: int = LAYERS
) -> tuple[ChunkInfo, Tensor]:
    """A chunk of the store; versions have equal keys and different KV."""
    ids = (number,) * tokens
    generator = torch.Generator().manual_seed(1000 * version + number)
    kv = torch.randn(layers, 2, HEADS, tokens, DIM, generator=generator)
    key = ChunkKey.of("f", "one", "isolated", ids)
    return ChunkInfo(key, "one", "f", content_digest(ids), "isolated", ids, (), kv.nbytes, 0.0, depends), kv


def store_of(*chunks: tuple[ChunkInfo, Tensor]) -> MemoryStore:
    store = MemoryStore()
    store.put(chunks)
    return store


def settled(residency: Residency) -> None:
    """Wait until no load is under way."""
    until = time.monotonic() + TIMEOUT
    while residency.stats()["loading"]:
        assert time.monotonic() < until, "a load never ended"
        threading.Event().wait(0.001)


def keys_in_memory(residency: Residency) -> set[ChunkKey]:
    return set(residency._ledger.keys())
