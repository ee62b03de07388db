"""Who reads what: every visible key once, shared memory together, enough programs; and whole passes in float64."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from epic_engine.attention import schedule
from epic_engine.attention.base import PrivateKV, Run, SequenceRows
from epic_engine.attention.draft import Stretch
from epic_engine.attention.kernels.tables import Launch, Tables
from epic_engine.attention.schedule import Draft, Shape, draft, targets
from epic_engine.errors import ConfigError
from epic_engine.memory.paged_kv import PagedKV

from tests.engine.kv_memory import make_spec

from .passes import (
    Layer,
    Link,
    Request,
    World,
    address,
    batches,
    expanded,
    filled,
    layer_of,
    own_slots,
    reference_of,
    run_kernels,
    shapes,
    wanted,
)
from .problems import ORDERS

SHAPE = Shape(4, 2, 16, torch.float32, 16, 4)
H200 = 132


@pytest.fixture(autouse=True, scope="module")
def _small_pieces() -> Iterator[None]:
    """Pieces as small as the tests' contexts."""
    with patch.object(schedule, "_SMALLEST_PIECE", 16):
        yield


# Four that decode over the same chunks, one of which stands twice in a prompt; one recomputed other tokens of it.
SHARED = [
    Request((3, Link(6), Link(7, (5,)), 9)),
    Request((11, Link(7, (5,)), Link(6), Link(6))),
    Request((Link(6), 4, Link(7, (5, 6, 60))), rows=2),
    Request((30, Link(6)), paged=False, more=7),
]
FORKS = [
    Request((2, Link(5, (0, 1)), 37), more=5),
    Request((), parent=0),
    Request((), parent=0, cut=2, rows=3),
    Request((80,), more=20),
    Request((), parent=3),
]
# Chunks that begin inside a page, with hidden keys.
CUTS = [Request((4, Link(2, slots), 3, Link(6, slots), 2)) for slots in ((), (3,), (4, 5, 6), (0, 14))]
LINKS = [
    Request((7, Link(7, (0, 1, 2, 50)), Link(6, (63,)), Link(7), 20), done=5, rows=100),
    Request((Link(5, (3,)), 60), done=0, rows=30, base=3),
    Request((Link(7, (10, 20, 30)), Link(6), 5), damp=True),
]


@settings(max_examples=300, deadline=None)
@given(batches(), shapes())
@example(SHARED, SHAPE)
@example(SHARED, replace(SHAPE, turn_keys=True))
@example(FORKS, SHAPE)
@example(FORKS, replace(SHAPE, turn_keys=True))
@example(LINKS, SHAPE)
@example(CUTS, SHAPE)
@example([*LINKS, *SHARED], replace(SHAPE, processors=H200))
def test_every_visible_key_is_read_once(batch: list[Request], shape: Shape) -> None:
    world = World(batch, shape)
    made = draft(world.batch, shape)
    tables, launches = filled(made)
    assert expanded(tables, launches, shape) == wanted(world.batch)
    _check_launches(made, tables, shape)
    _check_targets(made, world.batch)


def _check_launches(made: Draft, tables: Tables, shape: Shape) -> None:
    sizes, launches = made.sizes(), made.launches()
    assert [launch.index for launch in launches] == list(range(sizes["counts"]))
    assert sum(launch.items for launch in launches) == sizes["items"]
    assert tables.host["counts"].tolist() == [launch.items for launch in launches]
    at = 0
    for launch in launches:
        assert launch.first_item == at
        at += launch.items
        masks = []
        for first, count, *_ in tables.host["items"][launch.first_item : at].tolist():
            masks += tables.host["masks"][first : first + count].tolist()
        assert launch.masked == any(masks)
        assert (launch.stored, launch.scaled) == (shape.dtype, False)
    keys = [(launch.config, launch.stored, launch.scaled) for launch in launches]
    assert len(set(keys)) == len(keys)


def _check_targets(made: Draft, batch: Sequence[SequenceRows]) -> None:
    """Each row's key goes to its sequence's next free slot."""
    tables, _ = filled(made)
    size = made.shape.head_dim * made.shape.dtype.itemsize
    found = [
        (int(tables.host["memories"][memory][0]) + slot * size, place)
        for memory, slot, place, _ in tables.host["targets"][: len(made.positions)].tolist()
    ]
    want = []
    for item in batch:
        held, rows = item.private.length, len(item.positions)
        for (kv, slot), position in zip(own_slots(item)[held : held + rows], item.positions, strict=True):
            want.append((address(kv, slot), position - item.private.base))
    assert found == want


@settings(max_examples=100, deadline=None)
@given(batches(), shapes(), st.integers(1, 3))
@example(SHARED, SHAPE, 2)
@example(FORKS, SHAPE, 2)
def test_tables_that_were_made_ahead_serve_the_passes_that_follow(
    batch: list[Request], shape: Shape, passes: int
) -> None:
    world = World([replace(s, done=None, rows=1) for s in batch], shape)
    for item in world.batch:
        if isinstance(item.private, PagedKV):
            item.private.reserve(passes + 1)
    made = draft(world.batch, shape, ahead=True)
    tables, launches = filled(made)
    assert expanded(tables, launches, shape) == wanted(world.batch)
    for _ in range(passes):
        for item in world.batch:
            item.private.length += 1
        world.batch = [replace(item, positions=[item.positions[0] + 1]) for item in world.batch]
        entries = [entry for item in world.batch for entry in targets(made, item)]
        assert made.sizes()["memories"] == tables.sizes["memories"]
        tables.host["targets"][: len(world.batch)] = entries
        tables.host["positions"][: len(world.batch)] = [item.positions[0] for item in world.batch]
        tables.host["readers"][made.own_readers, 2] = [item.private.length + 1 for item in world.batch]
        assert expanded(tables, launches, shape) == wanted(world.batch)


@settings(max_examples=100, deadline=None)
@given(batches(), batches(), shapes())
def test_wider_tables_take_a_smaller_pass(one: list[Request], other: list[Request], shape: Shape) -> None:
    worlds = World(one, shape), World(other, shape)
    drafts = [draft(world.batch, shape) for world in worlds]
    room = {name: sum(d.sizes()[name] for d in drafts) for name in drafts[0].sizes()}
    room["row_starts"] = room["positions"] + 1
    launches, at = [], 0
    found = [launch for made in drafts for launch in made.launches()]
    most = {launch.config: max(f.items for f in found if f.config == launch.config) for launch in found}
    for index, (config, items) in enumerate(most.items()):
        launches.append(Launch(index, at, items, config, shape.dtype, masked=True))
        at += items
    room["counts"], room["items"] = len(launches), at
    tables = Tables(room, torch.device("cpu"))
    for made, world in zip(drafts, worlds, strict=True):
        made.fill(tables, launches)
        seen = expanded(tables, launches, shape)
        rows = len(made.positions)
        assert seen[:rows] == wanted(world.batch)
        assert not any(seen[rows:])
        assert (tables.host["targets"][rows:, 0] == -1).all()


# -- who reads together ----------------------------------------------------------------------------------------


def _items(made: Draft) -> list[tuple[int, int, list[tuple[int, int, int]]]]:
    """Of each item: readers, keys, and its segments as (address of the first page, first key, last key)."""
    tables, launches = filled(made)
    host, shape = tables.host, made.shape
    found = []
    for launch in launches:
        for item in host["items"][launch.first_item : launch.first_item + launch.items].tolist():
            segments = []
            for memory, page_at, start, stop, *_ in host["segments"][item[2] : item[3]].tolist():
                page = int(host["pages"][page_at]) * shape.page_size * shape.head_dim * shape.dtype.itemsize
                segments.append((int(host["memories"][memory][0]) + page, start, stop))
            found.append((item[1], sum(stop - start for _, start, stop in segments), segments))
    return found


@pytest.mark.parametrize("readers", [2, 8, 9, 40])
@pytest.mark.parametrize("turn_keys", [False, True])
def test_a_chunk_of_many_requests_is_read_once_a_tile_and_piece(readers: int, turn_keys: bool) -> None:
    shape = replace(SHAPE, turn_keys=turn_keys, processors=1)
    world = World([Request((i if not turn_keys else 7, Link(7), 3), more=2) for i in range(1, readers + 1)], shape)
    chunk = world.chunk(7)
    config = shape.config(readers)
    tiles = -(-readers // shape.tile(config))
    items = [item for item in _items(draft(world.batch, shape)) if item[2][0][0] == address(chunk, 0)]
    pieces = {item[2][0][1:] for item in items}
    assert sum(stop - start for start, stop in pieces) == chunk.shape[3]
    assert len(items) == tiles * len(pieces)
    assert all(len(item[2]) == 1 for item in items)
    assert sum(item[0] for item in items) == readers * len(pieces)


def test_readers_at_other_places_read_together_unless_keys_are_turned() -> None:
    sequences = [Request((i, Link(6), 3)) for i in (4, 9, 9)]
    for turn_keys, want in ((False, [3]), (True, [1, 2])):
        shape = replace(SHAPE, turn_keys=turn_keys, processors=1)
        world = World(sequences, shape)
        place = address(world.chunk(6), 0)
        with patch.object(schedule, "_SMALLEST_PIECE", 256):
            items = _items(draft(world.batch, shape))
        assert sorted(item[0] for item in items if place in {segment[0] for segment in item[2]}) == want


def test_pages_that_forks_share_are_read_once() -> None:
    sequences = [Request((100,)), *(Request((), parent=0) for _ in range(3))]
    world = World(sequences, SHAPE)
    kv, start, stop = world.batch[0].private.memory()[0]
    assert stop - start >= 16
    items = [item for item in _items(draft(world.batch, SHAPE)) if item[2][0][0] == address(kv, start)]
    assert {item[0] for item in items} == {4}


def test_sequences_that_recomputed_other_tokens_of_a_chunk_read_it_together() -> None:
    sequences = [Request((5, Link(7, slots), 4)) for slots in ((), (3,), (40, 41), (0, 89))]
    world = World(sequences, SHAPE)
    place = address(world.chunk(7), 0)
    items = [item for item in _items(draft(world.batch, SHAPE)) if item[2][0][0] == place]
    assert {item[0] for item in items} == {3, 1}  # one of them reads all but the ends, in one run


# -- enough work for everyone ----------------------------------------------------------------------------------


def _long(kv_heads: int, requests: int, chunk: int, own: int, rows: int, tokens: int = 32768) -> list[SequenceRows]:
    """Requests over so many keys, in chunks of their own (0: none) and in tokens of their own."""
    spec = replace(make_spec(torch.bfloat16, 1), num_kv_heads=kv_heads, head_dim=16)
    batch = []
    for _ in range(requests):
        private = PrivateKV(spec, (own if chunk else tokens) + rows, torch.device("cpu"))
        private.length = own if chunk else tokens
        runs = []
        if chunk:
            kv = torch.empty(1, 2, kv_heads, tokens, 16, dtype=torch.bfloat16)
            for start in range(0, tokens, chunk):
                part = kv[:, :, :, start : start + chunk]
                runs.append(Run(part, 0, part.shape[3], start, start + part.shape[3]))
        batch.append(SequenceRows(range(tokens, tokens + rows), private, runs))
    return batch


@pytest.mark.parametrize("kv_heads", [2, 8])
@pytest.mark.parametrize(
    ("requests", "chunk", "own", "rows"),
    [(1, 0, 0, 1), (1, 512, 100, 1), (1, 511, 1, 1), (8, 512, 100, 1), (1, 512, 0, 1024), (3, 4000, 5000, 7)],
)
def test_there_is_work_for_every_processor(kv_heads: int, requests: int, chunk: int, own: int, rows: int) -> None:
    shape = Shape(4 * kv_heads, kv_heads, 16, torch.bfloat16, 16, H200)
    batch = _long(kv_heads, requests, chunk, own, rows)
    with patch.object(schedule, "_SMALLEST_PIECE", 256):
        items = _items(draft(batch, shape))
    keys = [item[1] for item in items]
    assert len(items) * kv_heads >= H200
    # Four programs a processor are asked for, none below the smallest piece.
    wish = max(256.0, sum(keys) * kv_heads / (4 * H200))
    assert max(keys) <= 2 * wish + 1
    assert len(items) <= 2 * sum(keys) / wish + requests * -(-rows // (16 // 4))


@given(keys=st.integers(1, 500), start=st.integers(0, 15), most=st.integers(1, 300), own=st.booleans())
def test_pieces_are_even_and_say_where_they_end(keys: int, start: int, most: int, own: bool) -> None:
    whole = Stretch(3, 40, start, start + keys, 100, after=900, first=70 if own else -1, bias=0.5)
    pieces = whole.cut(most)
    assert [j for p in pieces for j in range(p.start, p.stop)] == list(range(start, start + keys))
    sizes = [p.keys for p in pieces]
    assert max(sizes) <= most
    assert len(sizes) <= -(-keys // most)
    for p in pieces:
        assert p.after == 900 - (start + keys - p.stop)
        assert p.first == (70 + p.start - start if own else -1)
        assert (p.memory, p.page_at, p.offset, p.bias) == (3, 40, 100, 0.5)


def test_short_contexts_are_not_cut() -> None:
    shape = Shape(8, 2, 16, torch.bfloat16, 16, H200)
    with patch.object(schedule, "_SMALLEST_PIECE", 256):
        items = _items(draft(_long(2, 4, 0, 0, 1, tokens=200), shape))
    assert [item[:2] for item in items] == [(1, 201)] * 4


# -- memory ----------------------------------------------------------------------------------------------------


class CutKV(PrivateKV):
    """Own memory that begins inside a page of something larger."""

    def __init__(self, begin: int, *arguments: Any) -> None:
        super().__init__(*arguments)
        shape = list(self.kv.shape)
        shape[3] += begin + 3
        self.kv = torch.randn(shape, dtype=self.kv.dtype, device=self.kv.device)[:, :, :, begin:-3]


@pytest.mark.parametrize("begin", [0, 1, 5, 16, 21])
@pytest.mark.parametrize("held", [0, 1, 30])
def test_own_memory_may_begin_inside_a_page(begin: int, held: int, device: torch.device) -> None:
    world = World([Request((1,))], SHAPE, device=device)
    private = CutKV(begin, world.spec, held + 20, device)
    private.length = held
    world.batch = [SequenceRows(range(held, held + 20), private, [])]
    if device.type == "cpu":
        assert expanded(*filled(draft(world.batch, SHAPE)), SHAPE) == wanted(world.batch)
    _check_pass(world, layer_of(world, 1), 1e-5)


def test_rows_that_do_not_fit_are_refused() -> None:
    private = PrivateKV(make_spec(), 3, torch.device("cpu"))
    private.length = 2
    with pytest.raises(ConfigError, match="2 rows do not fit a private KV of 3 tokens that holds 2"):
        draft([SequenceRows([2, 3], private, [])], SHAPE)


def test_memory_that_the_kernels_cannot_read_is_refused() -> None:
    made = Draft(SHAPE)
    kv = torch.zeros(2, 2, 2, 40, 16)
    scales = torch.ones(2, 2, 2, 3)
    for wrong in (kv.transpose(3, 4), kv[:, :, :, ::2], kv[..., ::2]):
        with pytest.raises(ConfigError, match="must lie next to each other"):
            made.memory(wrong)
    for wrong in (scales.double(), scales.mT.contiguous().mT):
        with pytest.raises(ConfigError, match="must be float32"):
            made.memory(kv, wrong)
    assert made.sizes()["memories"] == 0


def test_tokens_on_a_gpu_are_aligned(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("no CUDA device")
    flat = torch.zeros(2 * 2 * 2 * 40 * 16 + 1, device=device)
    with pytest.raises(ConfigError, match="multiples of 16 bytes"):
        Draft(SHAPE).memory(flat[1:].view(2, 2, 2, 40, 16))
    with pytest.raises(ConfigError, match="multiples of 16 bytes"):
        Draft(SHAPE).memory(torch.zeros(2, 2, 2, 40, 6, device=device))


def test_cuts_of_one_memory_are_one_entry() -> None:
    made = Draft(SHAPE)
    kv, scales = torch.zeros(2, 2, 2, 40, 16), torch.ones(2, 2, 2, 3)
    assert [made.memory(kv[:, :, :, a:b]) for a, b in ((0, 40), (7, 9), (39, 40))] == [(0, 0), (0, 7), (0, 39)]
    assert made.memory(kv[1:]) == (1, 0)  # layers that are cut off shift everything
    assert made.memory(kv, scales) == (2, 0)
    assert made.memory(kv[:, :, :, 5:], scales) == (2, 5)


# -- whole passes ----------------------------------------------------------------------------------------------


def _check_pass(world: World, rows: Layer, tolerance: float, layer: int = 1) -> None:
    want = reference_of(world, rows, layer)
    got = run_kernels(world, rows, layer).double()
    assert (got - want).abs().amax() <= tolerance * want.abs().amax()


@settings(max_examples=12, deadline=None)
@given(batches(most=4), shapes(), st.sampled_from(ORDERS), st.integers(0, 99))
@example(SHARED, SHAPE, "halves", 1)
@example(SHARED, replace(SHAPE, turn_keys=True), "arbitrary", 1)
@example(FORKS, SHAPE, "halves", 1)
@example(FORKS, replace(SHAPE, turn_keys=True), "halves", 1)
@example(LINKS, SHAPE, "interleaved", 1)
@example(CUTS, SHAPE, "halves", 1)
@example(LINKS, replace(SHAPE, turn_keys=True), "halves", 1)
@example([*LINKS, *SHARED], replace(SHAPE, processors=H200, heads=6), "halves", 1)
def test_a_pass_equals_attention_in_float64(
    device: torch.device, batch: list[Request], shape: Shape, order: str, seed: int
) -> None:
    world = World(batch, shape, device=device)
    _check_pass(world, layer_of(world, seed, order, "yarn" if seed % 2 else "partial"), 1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("batch", [SHARED, FORKS, LINKS], ids=["shared", "forks", "links"])
def test_a_pass_in_two_byte_types(batch: list[Request], dtype: torch.dtype, device: torch.device) -> None:
    world = World(batch, replace(SHAPE, dtype=dtype), device=device)
    _check_pass(world, layer_of(world, 2), 2e-2)


def test_a_pass_writes_where_it_should_and_nowhere_else(device: torch.device) -> None:
    world = World([*FORKS, *LINKS], SHAPE, device=device)
    slabs = [slab.kv for slab in world.pool._slabs.values()]
    before = [kv.clone() for kv in slabs]
    run_kernels(world, layer_of(world, 3), 1)
    free: list[Tensor] = [torch.ones(kv.shape[3], dtype=torch.bool, device=device) for kv in slabs]
    for item in world.batch:
        held = item.private.length
        for kv, slot in own_slots(item)[held : held + len(item.positions)]:
            for index, slab in enumerate(slabs):
                if kv.data_ptr() == slab.data_ptr():
                    free[index][slot] = False
    for kv, old, kept in zip(slabs, before, free, strict=True):
        assert torch.equal(kv[0].view(torch.int32), old[0].view(torch.int32))  # another layer
        assert torch.equal(kv[1][:, :, kept].view(torch.int32), old[1][:, :, kept].view(torch.int32))
        assert not (kv[1][:, :, ~kept] == old[1][:, :, ~kept]).all(-1).any()
