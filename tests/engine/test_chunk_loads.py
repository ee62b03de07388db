"""How chunks come into memory: in which order, from where, and what ends it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from epic_engine import ChunkInfo, ChunkKey, EngineClosedError, FileStore, MemoryStore
from epic_engine.errors import StoreError
from epic_engine.memory import maps
from epic_engine.memory.loader import Job, Loader
from epic_engine.memory.paged_kv import PagedKV
from torch import Tensor

from .kv_memory import DIM, HEADS, LAYERS, PAGE, TIMEOUT, chunk, keys_in_memory, make_pool, settled, store_of

PLACEMENTS = ["map", "pool"]


class Gate:
    """KV whose layers can be read one by one, as they are let through."""

    def __init__(self, kv: Tensor, log: Callable[[int], None] = lambda layer: None) -> None:
        self.kv = kv
        self.nbytes, self.shape, self.dtype = kv.nbytes, kv.shape, kv.dtype
        self.open = [threading.Event() for _ in kv]
        self._log = log

    device = torch.device("cpu")

    def is_contiguous(self) -> bool:
        return False

    def __getitem__(self, layer: int) -> Tensor:
        assert self.open[layer].wait(TIMEOUT)
        self._log(layer)
        return self.kv[layer]


class GatedStore(MemoryStore):
    """A store whose loads begin and go on only when a test lets them."""

    def __init__(self, *chunks: tuple[ChunkInfo, Tensor]) -> None:
        super().__init__()
        self.put(chunks)
        self.order: list[tuple[ChunkKey, int]] = []
        self.gates = {info.key: self._gate(info.key, kv) for info, kv in chunks}
        self.may_load, self.loading = threading.Event(), threading.Event()

    def _gate(self, key: ChunkKey, kv: Tensor) -> Gate:
        return Gate(kv, lambda layer: self.order.append((key, layer)))

    def let_through(self, layers: range) -> None:
        for gate in self.gates.values():
            for layer in layers:
                gate.open[layer].set()

    def load(self, key: ChunkKey) -> Tensor:
        self.loading.set()
        assert self.may_load.wait(TIMEOUT)
        super().load(key)
        return self.gates[key]  # type: ignore[return-value]


def test_the_first_layer_can_be_read_while_others_are_loaded(opened: Any) -> None:
    info, kv = chunk(1, layers=3)
    store = GatedStore((info, kv))
    residency = opened(make_pool(8, layers=3), store, placement="pool")
    lease = residency.acquire([info.key])
    body = lease.body(info.key)
    assert not body.ready(0)
    store.may_load.set()
    for layer in range(3):
        assert not body.ready(layer)
        store.gates[info.key].open[layer].set()
        body.wait(layer)
        assert torch.equal(body.kv[layer], kv[layer])
    settled(residency)


def test_a_prompts_chunks_are_loaded_breadth_first_and_prompts_in_turn(opened: Any) -> None:
    parts = [chunk(i, layers=3) for i in range(6)]
    keys = [info.key for info, _ in parts]
    store = GatedStore(*parts)
    store.let_through(range(3))
    residency = opened(make_pool(20, layers=3), store, placement="pool", threads=1)
    blocker = residency.acquire(keys[5:])  # occupies the only thread until all is queued
    residency.prefetch(keys[3:5])
    first, second = residency.acquire(keys[:2]), residency.acquire(keys[2:3])
    store.may_load.set()
    for lease, wanted in ((first, keys[:2]), (second, keys[2:3])):
        for key in wanted:
            lease.body(key).complete()
    settled(residency)
    a, b, c, d, e, f = keys
    assert store.order == [
        *((f, layer) for layer in range(3)),
        *((key, layer) for layer in range(3) for key in (a, b)),
        *((c, layer) for layer in range(3)),
        *((d, layer) for layer in range(3)),
        *((e, layer) for layer in range(3)),
    ]
    blocker.release()


def test_a_prefetched_chunk_that_is_asked_for_jumps_the_queue(opened: Any) -> None:
    parts = [chunk(i) for i in range(4)]
    keys = [info.key for info, _ in parts]
    store = GatedStore(*parts)
    store.let_through(range(LAYERS))
    residency = opened(make_pool(20), store, placement="pool", threads=1)
    residency.prefetch(keys)
    lease = residency.acquire(keys[3:])
    store.may_load.set()
    lease.body(keys[3]).complete()
    settled(residency)
    assert [key for key, layer in store.order if layer == 1] == [keys[3], *keys[:3]]
    assert residency.stats()["hits"]["device"] == 1
    assert residency.stats()["prefetched"] == 4


def in_thread(call: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    return thread, found


def test_a_load_that_nobody_wants_is_given_up_for_others(opened: Any) -> None:
    running, queued, other = parts = [chunk(i, layers=3) for i in range(3)]
    store = GatedStore(*parts)
    store.may_load.set()
    residency = opened(make_pool(4, layers=3), store, placement="pool", threads=1)
    residency.prefetch([running[0].key, queued[0].key])
    with residency.acquire([running[0].key]) as unwanted:
        body = unwanted.body(running[0].key)
        store.gates[running[0].key].open[0].set()
        body.wait(0)
    # One load stands in the queue and ends at once; the pages of the other are written to until its step has ended.
    assert residency.reclaim(1) == 2
    thread, found = in_thread(lambda: residency.acquire([other[0].key, queued[0].key]))
    while not next(iter(residency._loads.values()))._stopped:
        threading.Event().wait(0.001)
    assert thread.is_alive()
    assert keys_in_memory(residency) == set(), "what is not sure to be loaded must not be found"
    store.let_through(range(3))
    thread.join(TIMEOUT)
    (lease,) = found
    for info, kv in (other, queued):
        assert torch.equal(lease.body(info.key).complete(), kv)
    with pytest.raises(StoreError, match="given up"):
        body.wait(2)
    assert (running[0].key, 2) not in store.order
    settled(residency)
    residency.check_integrity([])
    lease.release()


def test_a_sequence_waits_for_the_step_of_a_load_that_nobody_wants(opened: Any) -> None:
    info, kv = chunk(1)
    store = GatedStore((info, kv))
    residency = opened(make_pool(2), store)
    residency.prefetch([info.key])
    assert store.loading.wait(TIMEOUT)  # one that has not begun is given up at once
    sequence = PagedKV(residency._pool)
    thread, _ = in_thread(lambda: sequence.reserve(2 * PAGE))
    while not next(iter(residency._loads.values()))._stopped:
        threading.Event().wait(0.001)
    store.may_load.set()
    store.let_through(range(LAYERS))
    thread.join(TIMEOUT)
    assert sequence.capacity == 2 * PAGE
    residency.check_integrity(sequence.extents)


def test_closing_ends_loads_and_waits(opened: Any) -> None:
    parts = [chunk(i, layers=3) for i in range(3)]
    keys = [info.key for info, _ in parts]
    store = GatedStore(*parts)
    store.let_through(range(2))
    residency = opened(make_pool(8, layers=3), store, placement="pool", threads=1)
    lease = residency.acquire(keys)
    store.may_load.set()
    for key in keys:
        lease.body(key).wait(1)
    waiting = threading.Barrier(2)
    caught: list[BaseException] = []

    def wait() -> None:
        waiting.wait(TIMEOUT)
        try:
            lease.body(keys[2]).wait(2)
        except EngineClosedError as error:
            caught.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    waiting.wait(TIMEOUT)
    closer = threading.Thread(target=residency.close)
    closer.start()
    while not residency._loader._closed:
        threading.Event().wait(0.001)
    store.gates[keys[0]].open[2].set()  # the step that was running ends, no other begins
    closer.join(TIMEOUT)
    waiter.join(TIMEOUT)
    assert len(caught) == 1
    with pytest.raises(EngineClosedError):
        residency.acquire(keys)
    residency.prefetch(keys)
    residency.check_integrity([])
    lease.release()
    residency.close()
    assert residency._pool.stats()["pages"]["free"] == 8


# -- load or compile again -------------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_what_compiles_faster_than_it_loads_is_compiled(opened: Any, placement: str) -> None:
    first, second, third = parts = [chunk(1), chunk(2), chunk(3, depends=("other",))]
    seconds = 1e9
    made: list[ChunkInfo] = []

    def recompile(info: ChunkInfo) -> Tensor:
        made.append(info)
        return torch.full((LAYERS, 2, HEADS, 2 * PAGE, DIM), 7.0)

    residency = opened(
        make_pool(16), store_of(*parts), placement=placement, recompile=recompile, token_seconds=lambda: seconds
    )
    residency.acquire([first[0].key]).body(first[0].key).complete()  # loads, and is measured
    settled(residency)
    assert made == []
    seconds = 0.0
    with residency.acquire([second[0].key, third[0].key]) as lease:
        assert bool((lease.body(second[0].key).complete() == 7).all())
        assert torch.equal(lease.body(third[0].key).complete(), third[1])  # saw another chunk: never compiled alone
    settled(residency)
    assert made == [second[0]]
    assert residency.stats()["hits"] == {"device": 0, "host": 2, "disk": 0, "recomputed": 1}
    # Now and then it loads all the same, to notice when loading has become quicker.
    for _ in range(16):
        residency.forget([second[0].key])
        residency.acquire([second[0].key]).body(second[0].key).complete()
        settled(residency)
    assert 1 < len(made) < 17


def test_compiling_never_takes_the_last_thread_from_loads(opened: Any) -> None:
    """A pass that waits for a chunk's later layers must not wait for compiling, which waits for the pass."""
    measured, loaded, *others = [chunk(i, 2 * PAGE, layers=3) for i in range(5)]
    store = GatedStore(measured, loaded, *others)
    store.may_load.set()
    seconds, passed, compiling = 1e9, threading.Event(), threading.Event()

    def recompile(info: ChunkInfo) -> Tensor:
        compiling.set()
        assert passed.wait(TIMEOUT)  # until the pass is over
        return next(kv for other, kv in others if other.key == info.key)

    residency = opened(
        make_pool(20, layers=3), store, placement="pool", recompile=recompile, token_seconds=lambda: seconds
    )
    for layer in range(3):
        store.gates[measured[0].key].open[layer].set()
    residency.acquire([measured[0].key]).body(measured[0].key).complete()
    gate = store.gates[loaded[0].key]
    gate.open[0].set()
    residency.prefetch([loaded[0].key])
    while (loaded[0].key, 0) not in store.order:
        time.sleep(0.001)
    seconds = 0.0
    waiting = residency.acquire([info.key for info, _ in others])  # goes before what nobody waits for
    assert compiling.wait(TIMEOUT)
    for info, _ in others:
        for layer in range(3):
            store.gates[info.key].open[layer].set()
    gate.open[1].set()
    time.sleep(0.05)  # the other thread takes what is most urgent now
    with residency.acquire([loaded[0].key]) as lease:
        body = lease.body(loaded[0].key)
        body.wait(0)  # a pass begins
        gate.open[2].set()
        assert _within(body.complete, TIMEOUT / 4)
        passed.set()
        for info, kv in others:
            assert torch.equal(waiting.body(info.key).complete(), kv)
    settled(residency)
    assert residency.stats()["hits"]["recomputed"] >= 1
    waiting.release()


def _within(work: Callable[[], object], seconds: float) -> bool:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


# -- maps ------------------------------------------------------------------------------------------------------


def test_advice_changes_no_contents(tmp_path: Path) -> None:
    info, kv = chunk(1, 4096)
    store = FileStore(tmp_path)
    store.put([(info, kv)])
    for tensor in (store.load(info.key), kv.clone(), kv[:, :, :, 5:9], torch.empty(0)):
        want = tensor.clone()
        maps.advise_need(tensor)
        maps.advise_cold(tensor)
        assert torch.equal(tensor, want)
    store.close()


@pytest.mark.skipif(maps.disk_bytes_read() is None, reason="the system does not say")
def test_memory_in_use_is_in_memory() -> None:
    tensor = torch.ones(1 << 16)
    assert maps.in_memory(tensor) == 1.0
    assert maps.in_memory(tensor[::2]) is None
    assert maps.in_memory(torch.empty(0)) is None


def test_hits_and_loads_are_counted_by_source(opened: Any, tmp_path: Path) -> None:
    parts = [chunk(i) for i in range(3)]
    store = FileStore(tmp_path)
    store.put(parts)
    residency = opened(make_pool(4), store)
    for number in (0, 0, 1, 2, 0):
        residency.acquire([parts[number][0].key]).release()
        settled(residency)
    stats = residency.stats()
    assert stats["hits"]["device"] == 1
    assert stats["hits"]["host"] + stats["hits"]["disk"] == 4
    loads = stats["loads"]
    assert sum(source["count"] for source in loads.values()) == 4
    assert sum(source["bytes"] for source in loads.values()) == 4 * parts[0][1].nbytes
    assert stats["evictions"] == 2
    assert set(stats["rates"]) == {"first", "again"}
    residency.close()
    store.close()


# -- loader ----------------------------------------------------------------------------------------------------


def test_a_loader_runs_as_many_steps_at_once_as_it_has_threads() -> None:
    together = threading.Barrier(3)

    class Meeting(Job):
        def step(self) -> bool:
            together.wait(TIMEOUT)
            return True

        def stopped(self) -> None:
            raise AssertionError("nobody stopped it")

    loader = Loader(3)
    loader.submit([Meeting() for _ in range(6)], urgent=True)
    while loader._active:
        threading.Event().wait(0.001)
    loader.close()
    assert not together.broken
    with pytest.raises(RuntimeError, match="closed"):
        loader.submit([], urgent=True)
