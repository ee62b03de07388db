"""The engine's compiling, keys, look-ups, refusals of bad input, and counts."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from epic_engine import (
    ChunkKey,
    ChunkNotFoundError,
    CompileContext,
    ConfigError,
    ContextLengthError,
    Engine,
    EngineClosedError,
    FileStore,
    InsufficientResourcesError,
    MemoryStore,
    SamplingParams,
)
from epic_engine.memory.budget import available_memory

from tests.engine.models import KINDS, LLAMA3, build, tiny
from tests.engine.oracle import plain_logits, untouched

HEAD = (44, 91, 17, 130, 61)


def _ids(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 199) for _ in range(count)]


CHUNKS = [_ids(n, 10 + n) for n in (9, 4, 12, 7, 1)]
QUESTION = _ids(6, 3)
SHORT = SamplingParams(max_tokens=2)


def make(**options: Any) -> Engine:
    return Engine(options.pop("model", tiny("llama")), selftest=False, **options)


class Passes:
    """Counts forward passes and the rows they run."""

    def __init__(self, engine: Engine) -> None:
        self.rows: list[int] = []
        for name in ("run", "logits"):
            setattr(engine.decoder, name, self._counted(getattr(engine.decoder, name)))

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(ids: Sequence[int], *arguments: Any, **options: Any) -> Any:
            self.rows.append(len(ids))
            return function(ids, *arguments, **options)

        return run


# -- compiling -------------------------------------------------------------------------------------------------


def test_chunks_are_compiled_in_batches_and_known_ones_cost_nothing() -> None:
    with make(rows_per_step=16) as engine:
        passes = Passes(engine)
        progress: list[tuple[int, int]] = []
        keys = engine.compile_many(CHUNKS, progress=lambda *p: progress.append(p))
        assert passes.rows == [13, 12, 8]  # consecutive chunks, at most 16 tokens each pass
        assert progress == [(0, 33), (13, 33), (25, 33), (33, 33)]
        passes.rows.clear()
        progress.clear()
        assert engine.compile_many(CHUNKS, progress=lambda *p: progress.append(p)) == keys
        assert engine.compile(CHUNKS[2]) == keys[2]
        assert passes.rows == []
        assert progress == [(0, 0)]


def test_keys_come_in_order_and_duplicates_are_compiled_once() -> None:
    with make() as engine:
        passes = Passes(engine)
        a, b, c = CHUNKS[:3]
        keys = engine.compile_many([a, b, a, c, tuple(b)])
        assert passes.rows == [25]
        assert keys[0] == keys[2]
        assert keys[1] == keys[4]
        assert [engine.chunk(k).token_ids for k in keys[:4]] == [tuple(x) for x in (a, b, a, c)]
        assert keys == [engine.key_of(x) for x in (a, b, a, c, b)]
        assert engine.compile_many([]) == []


@pytest.mark.backends
def test_batching_does_not_change_the_kv() -> None:
    forms = []
    for rows in (1, 16, 2048):
        with make(rows_per_step=rows) as engine:
            forms.append([engine.chunk(k).kv for k in engine.compile_many(CHUNKS, CompileContext("x", HEAD))])
    for form in forms[1:]:
        assert all((a - b).abs().max() < 1e-5 for a, b in zip(form, forms[0], strict=True))


def test_an_interrupted_call_goes_on_where_it_stopped() -> None:
    def stop(done: int, total: int) -> None:
        if done >= 13:
            raise KeyboardInterrupt

    with make(rows_per_step=16) as engine:
        passes = Passes(engine)
        with pytest.raises(KeyboardInterrupt):
            engine.compile_many(CHUNKS, progress=stop)
        assert engine.find(CHUNKS[1]) is not None
        assert engine.find(CHUNKS[2]) is None
        engine.compile_many(CHUNKS)
        assert passes.rows == [13, 12, 8]


def test_a_second_engine_on_the_same_directory_compiles_nothing(tmp_path: Path) -> None:
    with make(store=tmp_path / "store") as engine:
        keys = engine.compile_many(CHUNKS)
        want = engine.score([HEAD, *keys, QUESTION], [5])
    with make(store=str(tmp_path / "store"), model=build("Llama", {})) as again:
        passes = Passes(again)
        assert again.compile_many(CHUNKS) == keys
        assert passes.rows == []
        assert torch.equal(again.score([HEAD, *keys, QUESTION], [5]), want)


def test_a_store_that_was_passed_in_stays_open(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    with make(store=store) as engine:
        key = engine.compile(CHUNKS[0])
    assert store.info(key) is not None


@pytest.mark.backends
def test_a_context_is_seen_while_compiling_and_named_in_the_entry() -> None:
    with make(head=HEAD) as engine:
        for name, ids in (("isolated", ()), ("sink:3", (1, 1, 1)), ("head", HEAD)):
            chunk = engine.chunk(engine.compile(CHUNKS[0], name))
            assert chunk.context_ids == ids
            assert engine.store.info(chunk.key).context == name  # type: ignore[union-attr]
            # Compiled behind these tokens, the chunk continues them exactly.
            got = engine.score([*([ids] if ids else []), chunk.key, QUESTION], [5], policy="naive")
            want = plain_logits(untouched(tiny("llama")), [*ids, *CHUNKS[0], *QUESTION])[-1:]
            assert (got - want).abs().max() < 1e-4


def test_find_prefers_the_default_context_then_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(100))
    monkeypatch.setattr("epic_engine.engine.time.time", lambda: float(next(now)))
    with make(head=HEAD, context="sink:2") as engine:
        assert engine.find(CHUNKS[0]) is None
        old = engine.compile(CHUNKS[0], "isolated")
        assert engine.find(CHUNKS[0]) == old
        newer = engine.compile(CHUNKS[0], "head")
        assert engine.find(CHUNKS[0]) == newer
        default = engine.compile(CHUNKS[0])
        assert default == engine.key_of(CHUNKS[0], "sink:2")
        engine.compile(CHUNKS[0], "sink:9")
        assert engine.find(CHUNKS[0]) == default
        assert engine.find(CHUNKS[0][:-1]) is None


def test_estimate_counts_what_is_missing() -> None:
    with make() as engine:
        engine.compile(CHUNKS[0])
        estimate = engine.estimate(CHUNKS)
        per_token = sum(k.nbytes for k in [engine.chunk(engine.key_of(CHUNKS[0])).kv]) // 9
        assert (estimate.chunks, estimate.tokens, estimate.disk_bytes) == (4, 24, 24 * per_token)
        assert estimate.seconds > 0
        assert estimate.memory_bytes >= estimate.disk_bytes
        assert "4 chunks, 24 tokens" in str(estimate)
        assert engine.estimate(CHUNKS[:1]).seconds == 0


def test_forgotten_chunks_are_gone() -> None:
    store = MemoryStore()
    with make(store=store) as engine, make(store=store, namespace="other") as other:
        mine, theirs = engine.compile(CHUNKS[0]), other.compile(CHUNKS[0])
        assert engine.forget([mine, theirs, mine]) == 1
        assert engine.find(CHUNKS[0]) is None
        assert other.find(CHUNKS[0]) == theirs


# -- keys ------------------------------------------------------------------------------------------------------


def _changed_weight() -> Any:
    model = copy.deepcopy(tiny("llama"))
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, 5] += 1e-3
    return model


def test_whatever_shapes_the_kv_is_part_of_the_key() -> None:
    variants: dict[str, Engine] = {
        "plain": make(),
        "namespace": make(namespace="other"),
        "architecture": make(model=tiny("qwen2")),
        "dtype": make(model=tiny("llama", torch.bfloat16)),
        "one weight": make(model=_changed_weight()),
        "rope scaling": make(model=tiny("llama-llama3")),
        "rope factor": make(model=build("Llama", {"rope_parameters": {**LLAMA3, "factor": 8.0}})),
        "norm epsilon": make(model=build("Llama", {"rms_norm_eps": 1e-3})),
        "frozen scaling": make(model=tiny("llama-dynamic"), max_model_len=400),
        "frozen elsewhere": make(model=tiny("llama-dynamic"), max_model_len=300),
    }
    keys = {name: engine.key_of(CHUNKS[0]) for name, engine in variants.items()}
    keys |= {c: variants["plain"].key_of(CHUNKS[0], c) for c in ("sink:1", "sink:2")}
    keys["head"] = make(head=HEAD).key_of(CHUNKS[0], "head")
    keys["other head"] = make(head=HEAD[1:]).key_of(CHUNKS[0], "head")
    keys["tokens"] = variants["plain"].key_of([*CHUNKS[0], 5])
    assert len(set(keys.values())) == len(keys)


def test_names_of_files_and_of_contexts_are_not(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    key = make().key_of(CHUNKS[0])
    for name in ("one", "two"):
        tiny("llama").save_pretrained(tmp_path / name)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32)
        assert make(model=loaded).key_of(CHUNKS[0]) == key
    assert make(max_model_len=100).key_of(CHUNKS[0]) == key
    sink = make().key_of(CHUNKS[0], "sink:2")
    assert make(head=(1, 1)).key_of(CHUNKS[0], "head") == sink  # the same tokens under another name


def test_another_tenants_key_is_unknown() -> None:
    store = MemoryStore()
    with make(store=store, namespace="a") as one, make(store=store, namespace="b") as two:
        key = one.compile(CHUNKS[0])
        assert two.find(CHUNKS[0]) is None
        for use in (lambda: two.chunk(key), lambda: two.generate([key, QUESTION], SHORT)):
            with pytest.raises(ChunkNotFoundError, match=f"no compiled chunk {key} .*'b': compile its tokens"):
                use()
        assert two.forget([key]) == 0
        assert one.chunk(key).key == key


@pytest.mark.parametrize("text", ["", "xyz", "A" * 64, "a" * 63, "../" * 21 + "a"])
def test_what_is_no_key_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="64 lower-case hexadecimal digits"):
        ChunkKey(text)


# -- bad input, before any work --------------------------------------------------------------------------------


def test_bad_prompts_are_refused_before_any_work() -> None:
    with make(max_model_len=40) as engine:
        key = engine.compile(_ids(30, 1))
        passes = Passes(engine)
        for run in (engine.generate, engine.stream):
            with pytest.raises(ConfigError, match="the prompt is empty"):
                run([])
            with pytest.raises(ConfigError, match="the prompt is empty"):
                run([[], []])
            with pytest.raises(ConfigError, match=r"segment 1 has token ids 5…199, the vocabulary is 0…198"):
                run([[5], [5, 199]])
            with pytest.raises(ConfigError, match=r"token ids -1…5"):
                run([[5, -1]])
            with pytest.raises(ConfigError, match="list of segments"):
                run(QUESTION)
            with pytest.raises(ConfigError, match="unknown link policy 'x'"):
                run([QUESTION], policy="x")
            with pytest.raises(ConfigError, match="stop strings need a tokenizer"):
                run([QUESTION], SamplingParams(stop="x"))
            with pytest.raises(ConfigError, match="logit_bias names tokens outside"):
                run([QUESTION], SamplingParams(logit_bias={199: 1.0}))
            with pytest.raises(ContextLengthError) as caught:
                run([key, QUESTION], SamplingParams(max_tokens=5))
            for number in ("36 tokens", "5 more", "41 in all", "max_model_len=40", "max_tokens to 4"):
                assert number in str(caught.value)
            with pytest.raises(ChunkNotFoundError):
                run([engine.key_of([8, 9])])
        with pytest.raises(ContextLengthError):
            engine.score([key, QUESTION], [3] * 5)
        with pytest.raises(ConfigError, match="continuation has no tokens"):
            engine.score([QUESTION], [])
        assert passes.rows == []
        assert len(engine.generate([key, QUESTION], SamplingParams(max_tokens=4, ignore_eos=True)).token_ids) == 4


def test_bad_chunks_are_refused_before_any_work() -> None:
    with make(max_model_len=40, head=HEAD) as engine:
        passes = Passes(engine)
        for bad, message in (([], "chunk 1 has no tokens"), ([3, 500], r"chunk 1 has token ids 3…500")):
            with pytest.raises(ConfigError, match=message):
                engine.compile_many([CHUNKS[0], bad])
        with pytest.raises(ContextLengthError, match=r"chunk 0 has 36 tokens and its compile context 5, .*=40"):
            engine.compile(_ids(36, 1), "head")
        for context, message in (
            ("sinks", "unknown compile context"),
            ("sink:0", "at least 1"),
            ("sink:x", "at least"),
        ):
            with pytest.raises(ConfigError, match=message):
                engine.compile(CHUNKS[0], context)
        assert passes.rows == []
        assert list(engine.store.entries()) == []
        engine.compile(_ids(35, 1), "head")
    with pytest.raises(ConfigError, match="needs the head's token ids"):
        make(context="head")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_len": 40}, "max_len.*Known options: tokenizer, store, head.*max_model_len"),
        ({"attention": "flash"}, "attention='flash' is not available"),
        ({"device": "tpu"}, "device='tpu' cannot be used"),
        ({"dtype": "int8"}, "dtype='int8' cannot be used: pick one of"),
        ({"max_model_len": 1}, "max_model_len=1"),
        ({"namespace": ""}, "namespace"),
        ({"rows_per_step": 0}, "rows_per_step=0"),
        ({"prefix_cache_bytes": -1}, "prefix_cache_bytes"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(**options)


def test_too_little_disk_or_memory_is_noticed_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    with make() as engine:
        passes = Passes(engine)
        need = sum(map(len, CHUNKS)) * engine.spec.kv_bytes_per_token
        monkeypatch.setattr(engine.store, "free_bytes", lambda: need - 1)
        with pytest.raises(InsufficientResourcesError, match=r"5 chunks \(33 tokens\) take .* GiB of KV"):
            engine.compile_many(CHUNKS)
        monkeypatch.setattr(engine.store, "free_bytes", lambda: 1 << 40)
        monkeypatch.setattr("epic_engine.chunk_library.available_memory", lambda: 10)
        with pytest.raises(InsufficientResourcesError, match="lower rows_per_step=2048"):
            engine.compile_many(CHUNKS)
        assert passes.rows == []
        monkeypatch.setattr("epic_engine.chunk_library.available_memory", available_memory)
        monkeypatch.setattr(engine.store, "free_bytes", lambda: need)
        engine.compile_many(CHUNKS)


def test_a_closed_engine_says_so() -> None:
    engine = make()
    key = engine.compile(CHUNKS[0])
    running = engine.stream([QUESTION])
    engine.close()
    engine.close()
    for use in (
        lambda: engine.compile(CHUNKS[1]),
        lambda: engine.find(CHUNKS[0]),
        lambda: engine.generate([QUESTION]),
        lambda: engine.score([QUESTION], [5]),
        lambda: engine.forget([key]),
        lambda: engine.estimate(CHUNKS),
        lambda: next(running),
    ):
        with pytest.raises(EngineClosedError, match="was closed"):
            use()


# -- counts ----------------------------------------------------------------------------------------------------


def test_statistics_and_times() -> None:
    with make(head=HEAD, rows_per_step=4) as engine:
        a, b = engine.compile_many([CHUNKS[0], CHUNKS[1]])
        passes = Passes(engine)
        done = engine.generate(
            [HEAD, a, b, a, QUESTION], SamplingParams(max_tokens=3, ignore_eos=True), policy="legolink:6"
        )
        stats = done.stats
        assert (stats.prompt, stats.linked, stats.recomputed, stats.reused) == (33, 22, 16, 6)
        assert (stats.rows, stats.generated, stats.reuse, stats.policy) == (27, 3, "composed", "legolink:6")
        assert stats.reused_spans == ((11, 14), (24, 27))
        assert passes.rows == [4, 4, 4, 4, 4, 4, 3, 1, 1]  # the last token drawn is not run
        shown = stats.as_dict()
        assert (shown["prompt"], shown["reused"], shown["reuse"], shown["rows"]) == (33, 6, "composed", 27)
        times = stats.times
        assert 0 < times.link < times.first_token < times.total
        assert times.first_token + 2 * times.per_token == pytest.approx(times.total)


def test_a_loaded_model_stays_untouched() -> None:
    model = build(*KINDS["llama-dynamic"])
    rotary, implementation = model.model.rotary_emb, model.config._attn_implementation
    want = plain_logits(model, CHUNKS[2])
    frequencies = rotary.inv_freq.clone()
    with make(model=model) as engine:
        engine.generate([engine.compile(CHUNKS[2]), QUESTION], SHORT)
        assert model.model.rotary_emb is rotary
        assert model.config._attn_implementation == implementation == "eager"
        assert torch.equal(rotary.inv_freq, frequencies)
        assert torch.equal(plain_logits(model, CHUNKS[2]), want)
    ours, theirs = dict(engine.decoder._model.named_parameters()), dict(model.named_parameters())
    assert all(ours[name] is theirs[name] for name in theirs)  # the weights are not copied


@pytest.mark.backends
def test_prompts_extended_together_predict_what_they_predict_alone() -> None:
    """Ragged continuations in passes too small for them, against the untouched model on the joined ids."""
    model = tiny("llama")
    with make(model=model, rows_per_step=7, context="head", head=HEAD) as engine:
        keys = engine.compile_many(CHUNKS)
        prompts = [[HEAD, keys[0], QUESTION], [HEAD, *CHUNKS[:2], QUESTION], [QUESTION], [HEAD, keys[0], CHUNKS[1]]]
        whole = [[*HEAD, *CHUNKS[0], *QUESTION], [*HEAD, *CHUNKS[0], *CHUNKS[1], *QUESTION], QUESTION]
        whole.append([*HEAD, *CHUNKS[0], *CHUNKS[1]])
        linked = [engine.link(prompt, policy="naive", room=12) for prompt in prompts]
        tails = [_ids(n, 50 + n) for n in (9, 0, 12, 4)]
        for _ in range(2):  # the second time after rewinding
            halves = [engine.extend([(one, t[a:b]) for one, t in zip(linked, tails, strict=True)]) for a, b in HALVES]
            assert [len(one.appended_ids) for one in linked] == [9, 0, 12, 4]
            for one, before, tail, first, second in zip(linked, whole, tails, *halves, strict=True):
                want = plain_logits(untouched(model), [*before, *tail])[len(before) - 1 :]
                got = torch.cat([one.logits, first, second])
                assert got.shape == want.shape
                assert (got - want).abs().max() < 1e-4
                one.rewind()
        with pytest.raises(ConfigError, match="twice"):
            engine.extend([(linked[0], [3]), (linked[0], [4])])
        with pytest.raises(ConfigError, match="larger room"):
            engine.extend([(linked[0], [3] * 13)])
        with pytest.raises(ConfigError, match="another model's tokenizer"):
            engine.extend([(linked[0], [10**6])])


HALVES = ((0, 4), (4, None))
