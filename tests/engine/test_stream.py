"""Generating: streams, cancelling, ends, threads, and the KV that must not outlive them."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from epic_engine import ConfigError, Engine, SamplingParams

from tests.engine.models import tiny
from tests.engine.oracle import plain_logits, untouched
from tests.engine.tokenizers_for_tests import TOKENIZERS

TOKENIZER = TOKENIZERS["byte-level"]


def _ids(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 199) for _ in range(count)]


CHUNK, QUESTION = _ids(15, 1), _ids(6, 2)


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine(tiny("llama"), tokenizer=TOKENIZER, selftest=False) as made:
        yield made


def _greedy(count: int) -> list[int]:
    twin, ids = untouched(tiny("llama")), list(QUESTION)
    for _ in range(count):
        logits = plain_logits(twin, ids)[-1]
        ids.append(int(logits.argmax()))
    return ids[len(QUESTION) :]


LONG = SamplingParams(max_tokens=20, ignore_eos=True)


@pytest.mark.backends
@pytest.mark.parametrize("params", [LONG, SamplingParams(max_tokens=20, temperature=1.5, seed=3, ignore_eos=True)])
def test_a_stream_gives_what_generate_gives(engine: Engine, params: SamplingParams) -> None:
    key = engine.compile(CHUNK)
    whole = engine.generate([key, QUESTION], params)
    stream = engine.stream([key, QUESTION], params)
    events = list(stream)
    assert [e.token_id for e in events] == list(whole.token_ids)
    assert "".join(e.text for e in events) == whole.text
    # A character that the answer's end cuts in two is left out.
    assert whole.text == TOKENIZER.decode(whole.token_ids, skip_special_tokens=True).rstrip("\ufffd")
    assert stream.completion.token_ids == whole.token_ids
    assert stream.completion.text == whole.text
    assert stream.completion.finish_reason == whole.finish_reason == "length"
    assert list(stream) == []


def test_completion_comes_at_the_end(engine: Engine) -> None:
    stream = engine.stream([QUESTION], LONG)
    for _ in range(2):
        with pytest.raises(ConfigError, match="has not ended"):
            _ = stream.completion
        next(stream)
    stream.close()
    assert stream.completion.finish_reason == "cancelled"


def held(engine: Engine) -> int:
    """Bytes of KV that requests own."""
    held: int = engine.stats()["memory"]["private_bytes"]
    return held


def test_closing_midway_cancels_and_frees_the_kv(engine: Engine) -> None:
    stream = engine.stream([engine.compile(CHUNK), QUESTION], SamplingParams(max_tokens=400, ignore_eos=True))
    got = [event.token_id for event in itertools.islice(stream, 3)]
    assert held(engine) > 0
    stream.close()
    stream.close()
    assert held(engine) == 0  # though the stream itself is still held
    done = stream.completion
    assert done.finish_reason == "cancelled"
    assert list(done.token_ids)[:3] == got
    assert done.stats.generated == len(done.token_ids) < 400
    assert list(stream) == []


def test_closing_before_the_first_token(engine: Engine) -> None:
    stream = engine.stream([QUESTION], SamplingParams(max_tokens=400, ignore_eos=True))
    stream.close()
    assert list(stream) == []
    assert stream.completion.finish_reason == "cancelled"
    assert len(stream.completion.token_ids) < 400
    engine.drain()
    assert held(engine) == 0


@pytest.mark.parametrize("how", ["with", "end", "generate", "error", "drop"])
def test_no_way_out_keeps_the_kv(how: str, engine: Engine) -> None:
    endless = SamplingParams(max_tokens=400, ignore_eos=True)
    if how == "with":
        with engine.stream([QUESTION], endless) as stream:
            next(stream)
            assert held(engine) > 0
        assert stream.completion.finish_reason == "cancelled"
    elif how == "end":
        stream = engine.stream([QUESTION], LONG)
        assert len(list(stream)) == 20
    elif how == "generate":
        done = engine.generate([QUESTION], LONG)
        assert done.finish_reason == "length"
    elif how == "error":
        stream = engine.stream([QUESTION], endless)
        next(stream)
        engine.decoder.logits = None  # type: ignore[assignment, method-assign]
        with pytest.raises(TypeError):
            list(stream)
    else:
        stream = engine.stream([QUESTION], endless)
        next(stream)
        del stream
    engine.drain()
    assert held(engine) == 0
    engine.check_integrity()


def test_another_thread_may_cancel(engine: Engine) -> None:
    stream = engine.stream([QUESTION], SamplingParams(max_tokens=400, ignore_eos=True))
    first = threading.Event()
    got = []

    def consume() -> None:
        for event in stream:
            got.append(event.token_id)
            first.set()

    thread = threading.Thread(target=consume)
    thread.start()
    assert first.wait(10)
    stream.close()
    thread.join(10)
    assert not thread.is_alive()
    assert stream.completion.finish_reason == "cancelled"
    assert 0 < len(got) < 400
    assert held(engine) == 0


def test_threads_at_once_get_what_they_would_get_alone(engine: Engine) -> None:
    keys = engine.compile_many([_ids(12, n) for n in range(4)])
    jobs = [
        ([keys[n % 4], keys[(n + 1) % 4], _ids(5, 50 + n)], SamplingParams(max_tokens=15, temperature=n % 2, seed=n))
        for n in range(6)
    ]
    alone = [engine.generate(prompt, params) for prompt, params in jobs]
    together: list[Any] = [None] * len(jobs)

    def work(number: int) -> None:
        together[number] = engine.generate(*jobs[number])

    threads = [threading.Thread(target=work, args=(n,)) for n in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [(d.token_ids, d.text, d.finish_reason) for d in together] == [
        (d.token_ids, d.text, d.finish_reason) for d in alone
    ]
    assert len({d.token_ids for d in alone}) == len(jobs)


def test_compiling_while_generating(engine: Engine) -> None:
    want = engine.generate([QUESTION], LONG).token_ids
    stream = engine.stream([QUESTION], LONG)
    got = []
    for number, event in enumerate(stream):
        got.append(event.token_id)
        engine.compile(_ids(8, 70 + number))
    assert tuple(got) == want


# -- how it ends -----------------------------------------------------------------------------------------------


def test_greedy_takes_the_most_likely_token(engine: Engine) -> None:
    want = _greedy(12)
    for params in (SamplingParams(max_tokens=12, ignore_eos=True), SamplingParams(12, temperature=0.0, seed=4)):
        done = engine.generate([QUESTION], params, policy="full")
        assert list(done.token_ids) == want[: len(done.token_ids)]
    assert list(engine.generate([QUESTION], SamplingParams(1, temperature=5.0, top_k=1)).token_ids) == want[:1]


def test_seeds(engine: Engine) -> None:
    def text(seed: int) -> tuple[int, ...]:
        params = SamplingParams(12, temperature=1.0, seed=seed, ignore_eos=True)
        return engine.generate([QUESTION], params).token_ids

    assert text(1) == text(1)
    assert text(1) != text(2)


def test_end_tokens_stop_and_are_not_part_of_the_answer(engine: Engine) -> None:
    end = engine.generate([QUESTION], SamplingParams(logit_bias={2: 1e4}))
    assert (end.token_ids, end.text, end.finish_reason, end.stats.generated) == ((), "", "stop", 0)
    assert end.stats.times.first_token > 0
    ignored = engine.generate([QUESTION], SamplingParams(3, logit_bias={2: 1e4}, ignore_eos=True))
    assert (ignored.token_ids, ignored.finish_reason) == ((2, 2, 2), "length")
    want = _greedy(6)
    stopped = engine.generate([QUESTION], SamplingParams(20, stop_token_ids=(want[4],), ignore_eos=True))
    assert list(stopped.token_ids) == want[: want.index(want[4])]
    assert stopped.finish_reason == "stop"


def test_a_stop_string_ends_the_text_before_it(engine: Engine) -> None:
    free = engine.generate([QUESTION], LONG)
    stop = free.text[7:10]
    at = free.text.index(stop)
    stream = engine.stream([QUESTION], SamplingParams(20, ignore_eos=True, stop=("never", stop)))
    text = "".join(event.text for event in stream)
    done = stream.completion
    assert text == done.text == free.text[:at]
    assert done.finish_reason == "stop"
    assert len(done.token_ids) < 20
    assert done.token_ids == free.token_ids[: len(done.token_ids)]


@pytest.mark.parametrize("end", ["eos", "length"])
def test_text_that_was_held_back_comes_with_the_end(end: str, engine: Engine) -> None:
    """The answer ends within what might have become a stop string."""
    want = engine.generate([QUESTION], SamplingParams(6, ignore_eos=True))
    assert want.text[-1] != "\ufffd"
    stop = want.text[-1] + "\u0001never"
    last = _greedy(7)[6]
    assert last not in want.token_ids
    limit = {"length": {"max_tokens": 6}, "eos": {"max_tokens": 20, "stop_token_ids": (last,)}}[end]
    stream = engine.stream([QUESTION], SamplingParams(ignore_eos=True, stop=stop, **limit))  # type: ignore[arg-type]
    assert "".join(event.text for event in stream) == stream.completion.text == want.text
    assert stream.completion.token_ids == want.token_ids
    assert stream.completion.finish_reason == ("length" if end == "length" else "stop")


def test_logprobs_come_with_every_token(engine: Engine) -> None:
    params = SamplingParams(4, ignore_eos=True, logprobs=3)
    stream = engine.stream([QUESTION], params, policy="full")
    events = list(stream)
    want = torch.log_softmax(plain_logits(untouched(tiny("llama")), [*QUESTION, *_greedy(4)])[5:-1].double(), -1)
    for event, expected in zip(events, want, strict=True):
        assert event.logprob is not None
        assert event.logprob.logprob == pytest.approx(float(expected.max()), abs=1e-4)
        assert [t for t, _ in event.logprob.top] == expected.topk(3).indices.tolist()
    assert stream.completion.logprobs == tuple(e.logprob for e in events)
    assert engine.generate([QUESTION], LONG).logprobs == ()


def test_without_a_tokenizer_there_are_ids_only() -> None:
    with Engine(tiny("llama"), selftest=False) as engine:
        done = engine.generate([QUESTION], SamplingParams(5, ignore_eos=True))
    assert list(done.token_ids) == _greedy(5)
    assert done.text == ""
