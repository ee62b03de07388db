"""Who has threads of torch's for CPU operators, and who has none."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import pytest
import torch
from epic_engine import Engine, SamplingParams, workers

from tests.engine.models import tiny

pytestmark = pytest.mark.skipif(
    workers._openmp() is None or torch.get_num_threads() < 2, reason="torch has no GNU OpenMP, or one thread"
)


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _large_operator() -> int:
    """Runs one, and says how many threads that started."""
    before = _threads()
    torch.ones(1 << 20).exp_()
    return _threads() - before


def _in_a_thread(work: Callable[[], int]) -> int:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]


def test_workers_are_given_back_and_come_again() -> None:
    workers.give_workers_back()
    others = torch.get_num_threads() - 1
    assert _large_operator() == others
    assert _large_operator() == 0
    before = _threads()
    workers.give_workers_back()
    assert before - _threads() == others
    assert _large_operator() == others
    workers.give_workers_back()
    workers.give_workers_back()


def test_a_thread_does_without() -> None:
    def alone() -> int:
        workers.do_without_workers()
        return _large_operator() * 10 + torch.get_num_threads()

    threads = torch.get_num_threads()
    assert _in_a_thread(alone) == 1
    assert torch.get_num_threads() == threads
    assert _in_a_thread(torch.get_num_threads) == threads


def test_who_waits_for_the_engine_holds_no_workers() -> None:
    workers.give_workers_back()
    with Engine(tiny("llama"), selftest=False) as engine:
        keys = [engine.compile(list(range(3, 90)))]
        engine.generate([*keys, [5, 6]], SamplingParams(max_tokens=2))
        engine._loop.drain()
        before = _threads()
        others = _large_operator()
        assert others == torch.get_num_threads() - 1
        engine.generate([*keys, [5, 6]], SamplingParams(max_tokens=2))
        engine.compile(list(range(50, 70)))
        engine._loop.drain()
        assert _threads() <= before
