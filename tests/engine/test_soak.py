"""An hour of arrivals, ten a minute, as fast as they can be served: memory stays under its budget and comes back."""

from __future__ import annotations

import random
from collections import deque

import pytest
from epic_engine import ChunkKey, Engine, MemoryStore, SamplingParams, Stream

from tests.engine.models import tiny

CHUNKS, TOKENS, PAGE = 72, 32, 16


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["map", "pool"])
def test_an_hour_of_arrivals(placement: str) -> None:
    rng = random.Random(7)
    store = MemoryStore()
    with Engine(tiny("llama"), selftest=False, store=store) as compiler:
        keys = compiler.compile_many([[rng.randrange(3, 199) for _ in range(TOKENS)] for _ in range(CHUNKS)])
        budget = CHUNKS * TOKENS * compiler.spec.kv_bytes_per_token // 3  # a third of the chunks, and nothing else
    popular = [1 / (rank + 1) for rank in range(CHUNKS)]
    running: deque[Stream] = deque()
    served: list[int] = []
    with Engine(tiny("llama"), selftest=False, store=store, memory=budget, chunk_placement=placement) as engine:
        for number in range(600):
            chosen: list[ChunkKey] = list(dict.fromkeys(rng.choices(keys, popular, k=3)))
            question = [rng.randrange(3, 199) for _ in range(rng.randrange(1, 12))]
            params = SamplingParams(rng.choice([1, 2, 4, 16]), ignore_eos=True)
            if rng.random() < 0.1:
                engine.prefetch(rng.sample(keys, 4))
            running.append(
                engine.stream(
                    [*chosen, question],
                    params,
                    policy=rng.choice(["naive", "legolink:16", "query_aware:0.1"]),
                    priority=rng.randrange(2),
                )
            )
            if rng.random() < 0.05:
                running[rng.randrange(len(running))].close()
            while len(running) > rng.randrange(1, 24):
                served.append(len(list(running.popleft())))
            if number % 50 == 0:
                engine.check_integrity()
        served += [len(list(stream)) for stream in running]
        engine.drain()
        engine.check_integrity()
        stats = engine.stats()
        memory, outcomes = stats["memory"], stats["requests"]["outcomes"]
        assert budget / 2 < memory["peak_bytes"] <= memory["budget_bytes"] <= budget
        assert memory["private_bytes"] == 0
        assert memory["residency"]["chunks"]["leased"] == 0
        assert memory["residency"]["evictions"] > 100
        assert outcomes["length"] + outcomes["cancelled"] == 600
        assert outcomes["length"] > 530
        assert sum(served) > 600
