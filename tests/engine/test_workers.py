"""Who has threads of torch's for CPU operators, and who has none."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from epic_engine import Engine, SamplingParams, workers

from tests.engine.models import tiny

pytestmark = pytest.mark.skipif(
    not workers.workers_are_known() or torch.get_num_threads() < 2, reason="torch has no GNU OpenMP, or one thread"
)

Found = TypeVar("Found")

_MARKS = itertools.count()
ROOT = Path(__file__).parents[2]


def _threads() -> set[str]:
    return set(os.listdir("/proc/self/task"))


def _name_of(thread: str) -> str:
    try:
        return Path(f"/proc/self/task/{thread}/comm").read_text().strip()
    except OSError:  # it has ended
        return ""


def _large_operator() -> set[str]:
    """Runs one, and says which threads that started: they inherit the name of the one that runs it.

    Which threads are new would not tell: other tests' helpers come and go.
    """
    mine = str(threading.get_native_id())
    before, mark = _name_of(mine), f"mark {next(_MARKS)}"
    Path("/proc/thread-self/comm").write_text(mark)
    try:
        torch.ones(1 << 20).exp_()
        return {thread for thread in _threads() if _name_of(thread) == mark} - {mine}
    finally:
        Path("/proc/thread-self/comm").write_text(before)


def _in_a_thread(work: Callable[[], Found]) -> Found:
    found: list[Found] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]


def test_workers_are_given_back_and_come_again() -> None:
    workers.give_workers_back()
    started = _large_operator()
    assert len(started) == torch.get_num_threads() - 1
    assert not _large_operator()
    workers.give_workers_back()
    assert not started & _threads()
    assert len(_large_operator()) == len(started)
    workers.give_workers_back()
    workers.give_workers_back()


ALONE = """
import torch
from epic_engine import workers
from tests.engine.test_workers import _in_a_thread, _large_operator

def alone():
    workers.do_without_workers()
    return len(_large_operator()), torch.get_num_threads()

threads = torch.get_num_threads()
print(_in_a_thread(alone), _in_a_thread(torch.get_num_threads) == threads == torch.get_num_threads())
torch.set_num_threads(threads)  # from now on torch tells every new thread, and MKL with it
print(_in_a_thread(alone), _in_a_thread(torch.get_num_threads) == threads == torch.get_num_threads())
"""


def test_a_thread_does_without() -> None:
    # A process of its own: what runs beside other tests may start threads while this looks.
    done = subprocess.run([sys.executable, "-c", ALONE], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["(0, 1) True"] * 2


def test_who_waits_for_the_engine_holds_no_workers() -> None:
    with Engine(tiny("llama"), selftest=False) as engine:
        key = engine.compile(list(range(3, 90)))
        for work in (
            lambda: engine.generate([key, [5, 6]], SamplingParams(max_tokens=2)),
            lambda: engine.compile(list(range(50, 70))),
        ):
            workers.give_workers_back()
            mine = _large_operator()
            assert mine
            work()
            assert not mine & _threads()


def test_an_idle_engine_holds_no_workers() -> None:
    with Engine(tiny("llama"), selftest=False) as engine:
        theirs = engine._loop.call(_large_operator)
        assert theirs
        engine._loop.drain()
        deadline = time.monotonic() + 10
        while theirs & _threads() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not theirs & _threads()
