"""Leases between processes: a chunk is compiled by one of them, and nobody waits for the dead."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from epic_engine import ChunkKey, FileStore
from epic_engine.chunks import content_digest
from epic_engine.compile_turns import compile_in_turns

from tests.engine.test_engine import CHUNKS, make
from tests.engine.test_store import entry

FORK = multiprocessing.get_context("fork")
KEYS = [entry(n)[0].key for n in range(12)]


def _hold(path: Path, pipe: Any) -> None:
    store = FileStore(path)
    pipe.send(sorted(k.hex for k in store.lease(KEYS, 3600)))
    threading.Event().wait()


def test_the_leases_of_a_killed_process_are_free_at_once(tmp_path: Path) -> None:
    here, there = FORK.Pipe()
    process = FORK.Process(target=_hold, args=(tmp_path, there))
    process.start()
    assert here.recv() == sorted(k.hex for k in KEYS)
    store = FileStore(tmp_path)
    assert store.lease(KEYS, 1.0) == set()
    assert store.gc().leases == 0
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    assert store.lease(KEYS[:3], 1.0) == set(KEYS[:3])
    assert store.gc().leases == len(KEYS) - 3
    assert len(list(tmp_path.glob("owners/*.lock"))) == 1


def _compile(path: Path, pipe: Any) -> None:
    store = FileStore(path)
    made: list[int] = []

    def compile_batch(indices: list[int]) -> None:
        time.sleep(0.02)
        made.extend(indices)
        store.put([entry(i) for i in indices])

    seen: list[int] = []
    compile_in_turns(store, KEYS, [5] * len(KEYS), 10, compile_batch, lambda tokens: 60.0, seen.extend)
    assert all(store.info(key) is not None for key in KEYS)
    pipe.send((made, seen))
    store.close()


def test_processes_share_the_work_and_do_nothing_twice(tmp_path: Path) -> None:
    pipes = [FORK.Pipe() for _ in range(3)]
    processes = [FORK.Process(target=_compile, args=(tmp_path, there)) for _, there in pipes]
    for process in processes:
        process.start()
    done = [here.recv() for here, _ in pipes]
    for process in processes:
        process.join()
    assert sorted(i for made, _ in done for i in made) == list(range(len(KEYS)))
    assert all(sorted(seen) == list(range(len(KEYS))) for _, seen in done)  # and each of them is told of everything


def test_who_does_not_finish_is_taken_over(tmp_path: Path) -> None:
    slow, quick = FileStore(tmp_path), FileStore(tmp_path)
    assert slow.lease(KEYS[:2], 0.3) == set(KEYS[:2])
    begin = time.monotonic()
    made: list[list[int]] = []

    def compile_batch(indices: list[int]) -> None:
        made.append(indices)
        quick.put([entry(i) for i in indices])

    compile_in_turns(quick, KEYS[:4], [5] * 4, 100, compile_batch, lambda tokens: 60.0, lambda indices: None)
    assert time.monotonic() - begin >= 0.25
    assert made == [[2, 3], [0, 1]]


def test_what_another_one_finishes_is_not_compiled(tmp_path: Path) -> None:
    other, mine = FileStore(tmp_path), FileStore(tmp_path)
    assert other.lease(KEYS[:2], 60) == set(KEYS[:2])

    def finish() -> None:
        time.sleep(0.2)
        other.put([entry(0), entry(1)])
        other.release(KEYS[:2])

    thread = threading.Thread(target=finish)
    thread.start()

    def refused(indices: list[int]) -> None:
        raise AssertionError("it was compiled twice")

    seen: list[int] = []
    compile_in_turns(mine, KEYS[:2], [5, 5], 100, refused, lambda tokens: 60.0, seen.extend)
    thread.join()
    assert sorted(seen) == [0, 1]


def test_an_interrupted_engine_gives_its_leases_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = FileStore(tmp_path)
    with make(store=tmp_path) as engine:
        keys = [engine.key_of(ids) for ids in CHUNKS]
        held: list[set[ChunkKey]] = []

        def interrupted(*_: object) -> None:
            held.append(other.lease(keys, 60))
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(engine._compiler, "compile", interrupted)
            with pytest.raises(KeyboardInterrupt):
                engine.compile_many(CHUNKS)
        assert held == [set()]
        assert other.lease(keys, 60) == set(keys)
        other.release(keys)
        assert engine.compile_many(CHUNKS) == keys
        assert other.lease(keys, 60) == set(keys)


def test_an_engine_says_what_a_chunk_cost(tmp_path: Path) -> None:
    with make(store=tmp_path) as engine:
        engine.compile_many(CHUNKS)
        infos = {info.content: info for info in engine.store.entries()}
    costs = [infos[content_digest(ids)].cost for ids in CHUNKS]
    assert all(cost is not None and 0 < cost < 60 for cost in costs)
    assert costs[0] / len(CHUNKS[0]) == pytest.approx(costs[1] / len(CHUNKS[1]))  # type: ignore[operator]
