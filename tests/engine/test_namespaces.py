"""One engine for several tenants: what they share is the model, and nothing that was compiled or asked."""

from __future__ import annotations

import pytest
from epic_engine import ChunkNotFoundError, ConfigError, EngineClosedError, MemoryStore, SamplingParams

from tests.engine.test_engine import CHUNKS, QUESTION, make

SHORT = SamplingParams(max_tokens=5)


def test_tenants_of_one_engine_answer_like_engines_of_their_own() -> None:
    store = MemoryStore()
    with make(store=store, namespace="a") as one, make(namespace="b") as alone:
        other = one.for_namespace("b")
        theirs = [one.compile(c) for c in CHUNKS]
        keys = [other.compile(c) for c in CHUNKS]
        assert keys == [alone.compile(c) for c in CHUNKS]
        assert set(keys).isdisjoint(theirs)
        expected = alone.generate([*keys, QUESTION], SHORT)
        assert other.generate([*keys, QUESTION], SHORT).token_ids == expected.token_ids
        for engine, foreign in ((one, keys[0]), (other, theirs[0])):
            with pytest.raises(ChunkNotFoundError):
                engine.generate([foreign, QUESTION], SHORT)
            assert engine.forget([foreign]) == 0
        assert one.generate([*theirs, QUESTION], SHORT).token_ids == expected.token_ids
        one.drain()
        one.check_integrity()


def test_nobody_finds_another_tenants_prompts() -> None:
    prompt = [[*CHUNKS[0], *CHUNKS[1]], QUESTION]
    with make(namespace="a") as one:
        other = one.for_namespace("b")
        first = one.generate(prompt, SHORT, policy="prefix")
        assert first.stats.reused == 0
        again = one.generate(prompt, SHORT, policy="prefix")
        assert again.stats.reused > 0
        theirs = other.generate(prompt, SHORT, policy="prefix")
        assert theirs.stats.reused == 0
        assert first.token_ids == again.token_ids == theirs.token_ids


def test_a_tenants_engine_lives_as_long_as_its_owner() -> None:
    with make(namespace="a") as one:
        other = one.for_namespace("b")
        other.close()
        assert other.generate([QUESTION], SHORT).stats.generated == 5
        with pytest.raises(ConfigError, match="namespace"):
            one.for_namespace("")
    with pytest.raises(EngineClosedError):
        other.generate([QUESTION], SHORT)
    with pytest.raises(EngineClosedError):
        one.for_namespace("c")
