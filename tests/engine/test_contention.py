"""What workers do while others want the cores."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from epic_engine import Engine, contention, workers
from epic_engine.contention import ContentionWatch, times_of_threads, waits_for_cores

from tests.engine.models import tiny

pytestmark = pytest.mark.skipif(
    not workers.workers_are_known() or not times_of_threads(),
    reason="torch has no GNU OpenMP, or the system does not tell",
)

SECOND = 1_000_000_000


@pytest.mark.parametrize(
    ("ran", "waited", "expected"),
    [
        (SECOND, 0, False),
        (SECOND // 2, SECOND // 2, True),
        (SECOND // 2, SECOND // 10, False),
        (SECOND // 10, SECOND // 2, False),  # hardly worked
    ],
)
def test_who_waits_for_cores(ran: int, waited: int, expected: bool) -> None:
    before = {"1": (7, 9), "2": (3, 4)}
    assert waits_for_cores(before, {"1": (7, 9), "2": (3 + ran, 4 + waited)}, 1.0) is expected


def test_a_thread_that_is_new_says_nothing() -> None:
    assert not waits_for_cores({}, {"1": (SECOND, SECOND)}, 1.0)


def test_times_are_those_of_the_system() -> None:
    me = str(threading.get_native_id())
    before, spent = times_of_threads(), time.thread_time_ns()
    while time.thread_time_ns() - spent < SECOND // 20:
        pass
    own = times_of_threads()[me][0] - before[me][0]
    # The file is as old as the last tick of the scheduler.
    assert own == pytest.approx(time.thread_time_ns() - spent, abs=SECOND // 25)


def _named(name: str) -> int:
    """Threads with a name that the system knows."""
    found = 0
    for thread in Path("/proc/self/task").iterdir():
        try:
            found += (thread / "comm").read_text().strip() == name
        except OSError:
            continue
    return found


def _until(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


@pytest.fixture
def crowded(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """While it is set, threads wait for cores."""
    found = threading.Event()
    monkeypatch.setattr(contention, "waits_for_cores", lambda *_: found.is_set())
    monkeypatch.setattr(contention, "_LOOK_EVERY", 0.01)
    monkeypatch.setattr(contention, "_SLEEP_FOR", 0.05)
    crowd = ContentionWatch._crowd

    def named(self: ContentionWatch) -> None:
        Path("/proc/thread-self/comm").write_text("crowd")  # its workers inherit that
        crowd(self)
        Path("/proc/thread-self/comm").write_text("watch")

    monkeypatch.setattr(ContentionWatch, "_crowd", named)
    return found


def test_there_are_more_workers_than_cores_while_threads_wait(crowded: threading.Event) -> None:
    cores = len(os.sched_getaffinity(0))
    watch = ContentionWatch()
    watch.resume()
    assert not watch.contended
    crowded.set()
    assert _until(lambda: watch.contended)
    assert _named("crowd") == cores  # and the one that runs the passes has at least itself
    assert torch.equal(torch.ones(1 << 20).exp_(), torch.full((1 << 20,), torch.e))
    crowded.clear()
    assert _until(lambda: not watch.contended)
    assert _named("crowd") == 0
    crowded.set()
    assert _until(lambda: watch.contended)
    watch.pause()
    assert _until(lambda: not watch.contended)
    assert _named("crowd") == 0
    watch.resume()
    assert _until(lambda: watch.contended)
    watch.close()
    assert _named("crowd") == 0


def test_an_engine_answers_the_same_while_threads_wait(crowded: threading.Event) -> None:
    with Engine(tiny("llama"), selftest=False) as engine:
        prompt = [engine.compile(list(range(3, 90))), [5, 6]]
        want = engine.generate(prompt).token_ids
        crowded.set()
        for _ in range(20):
            assert engine.generate(prompt).token_ids == want
        watch = engine._loop._watch
        assert watch._thread is not None
    assert not watch._thread.is_alive()
    assert _named("crowd") == 0
