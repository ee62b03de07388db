"""Batches of sequences as the engine makes them, what each row of them sees, and attention over that in float64."""

from __future__ import annotations

import ctypes
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from epic_engine.attention.base import PrivateKV, SequenceKV, SequenceRows
from epic_engine.attention.kernels.merge import merge_partials
from epic_engine.attention.kernels.segment import segment_attention
from epic_engine.attention.kernels.tables import Launch, Rotation, Tables
from epic_engine.attention.kernels.write import write_kv
from epic_engine.attention.schedule import Draft, Shape, draft
from epic_engine.linking.layout import Body, Damp, Layout, LinkPlan, whole_runs
from epic_engine.memory.paged_kv import PagedKV
from epic_engine.memory.pages import PagePool
from epic_engine.model.spec import ModelSpec
from hypothesis import strategies as st
from torch import Tensor

from tests.engine.kv_memory import make_spec

from .problems import factors_of, order_of
from .reference import rotated, softmax_average, wide

CPU = torch.device("cpu")
LAYERS = 2
LENGTHS = (1, 2, 15, 16, 17, 40, 64, 90)
Seen = Counter[tuple[int, int, float]]


@dataclass(frozen=True)
class Link:
    """A chunk in a prompt, and its slots that are computed anew."""

    chunk: int
    slots: tuple[int, ...] = ()


@dataclass(frozen=True)
class Request:
    """A sequence of a batch.

    ``parts`` are chunks and counts of plain tokens. ``done`` rows were computed in earlier passes and ``rows`` are in
    this one; with ``done=None`` the whole prompt was, and ``more`` tokens behind it. ``parent`` is an earlier sequence
    of the batch that this one is a fork of, without its last ``cut`` tokens.
    """

    parts: tuple[int | Link, ...]
    done: int | None = None
    rows: int = 1
    more: int = 0
    paged: bool = True
    base: int = 0
    damp: bool = False
    parent: int | None = None
    cut: int = 0


class World:
    """Memory of a batch with random contents.

    Attributes
    ----------
    batch
        The rows of the pass.
    """

    def __init__(self, sequences: Sequence[Request], shape: Shape, device: torch.device = CPU) -> None:
        self.spec = _spec(shape, LAYERS)
        self.shape, self.device = shape, device
        self._random = torch.Generator().manual_seed(len(sequences))
        self.pool = PagePool(
            self.spec,
            2000 * shape.page_size * self.spec.kv_bytes_per_token,
            device,
            page_size=shape.page_size,
            slab_bytes=40 * shape.page_size * self.spec.kv_bytes_per_token,
        )
        self._chunks: dict[int, Tensor] = {}
        plans = [self._plan(s) for s in sequences]
        kvs: list[SequenceKV] = []
        for s, (_, plan) in zip(sequences, plans, strict=True):
            kvs.append(self._private(s, plan))
        # In turns, so that nobody's pages lie next to each other.
        for turn in range(1, 4):
            for s, kv, (_, plan) in zip(sequences, kvs, plans, strict=True):
                if s.parent is None:
                    self._append(kv, _held(s, plan) * turn // 3 - kv.length)
        self.batch: list[SequenceRows] = []
        for index, s in enumerate(sequences):
            layout, plan = plans[index]
            if s.parent is not None:
                parent, family = kvs[s.parent], sequences[s.parent]
                assert isinstance(parent, PagedKV)
                assert family.done is None
                child = kvs[index] = parent.fork()
                cut = min(s.cut, parent.length)
                child.truncate(parent.length - cut)
                layout, plan = plans[s.parent]
                begin = len(layout) + family.more - min(cut, family.more)
                self.batch.append(self._decoding(kvs[index], plan, begin, s.rows))
            elif s.done is None:
                self.batch.append(self._decoding(kvs[index], plan, len(layout) + s.more, s.rows))
            else:
                rows = plan.rows[_held(s, plan) :][: s.rows]
                self.batch.append(SequenceRows(rows, kvs[index], plan.runs))
        for item in self.batch:
            if isinstance(item.private, PagedKV):
                item.private.reserve(len(item.positions))

    def _plan(self, s: Request) -> tuple[Layout, LinkPlan]:
        parts: list[tuple[Sequence[int], Body | None]] = []
        for part in s.parts:
            tokens = part if isinstance(part, int) else LENGTHS[part.chunk]
            parts.append((range(tokens), None if isinstance(part, int) else Body(self.chunk(part.chunk), (1,))))
        layout = Layout(parts)
        slots = {i: part.slots for i, part in enumerate(s.parts) if isinstance(part, Link)}
        return layout, LinkPlan(layout, slots, Damp(0.75, 4) if s.damp else None)

    def _private(self, s: Request, plan: LinkPlan) -> SequenceKV:
        base = min([s.base, *plan.rows[:1]])
        if s.paged:
            return PagedKV(self.pool, base)
        return PrivateKV(self.spec, _held(s, plan) + s.rows + 3, self.device, base)

    def _decoding(self, kv: SequenceKV, plan: LinkPlan, begin: int, rows: int) -> SequenceRows:
        return SequenceRows(range(begin, begin + rows), kv, plan.runs, whole_runs(plan.runs))

    def chunk(self, number: int) -> Tensor:
        """KV of a chunk: on pages of the pool, in memory of its own, or in the middle of that."""
        if number not in self._chunks:
            tokens = LENGTHS[number]
            if number % 2:
                (extent,) = self.pool.allocate(self.pool.pages_for(tokens), contiguous=True)
                kv = self.pool.view(extent, tokens)
            else:
                spec = self.spec
                shape = (spec.num_layers, 2, spec.num_kv_heads, tokens, spec.head_dim)
                kv = torch.empty(shape, dtype=spec.dtype, device=self.device)
                if number % 4:
                    kv = torch.cat([kv] * 3, dim=3)[:, :, :, tokens : 2 * tokens]
            kv.copy_(torch.randn(kv.shape, generator=self._random))
            self._chunks[number] = kv
        return self._chunks[number]

    def _append(self, kv: SequenceKV, tokens: int) -> None:
        if not tokens:
            return
        if isinstance(kv, PagedKV):
            kv.reserve(tokens)
        spec = self.spec
        for layer in range(spec.num_layers):
            shape = (2, spec.num_kv_heads, tokens, spec.head_dim)
            rows = torch.randn(shape, generator=self._random).to(device=self.device, dtype=spec.dtype)
            kv.write(layer, rows[0], rows[1])
        kv.length += tokens


def _spec(shape: Shape, layers: int) -> ModelSpec:
    return replace(
        make_spec(shape.dtype, layers),
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        value_dim=shape.head_dim,
    )


def _held(s: Request, plan: LinkPlan) -> int:
    """Tokens computed before the pass; the last row of a prompt stays for it."""
    return len(plan.rows) + s.more if s.done is None else min(s.done, len(plan.rows) - 1)


# -- what a row sees -------------------------------------------------------------------------------------------


def own_slots(item: SequenceRows) -> list[tuple[Tensor, int]]:
    """Where a sequence's own tokens lie, in order."""
    return [(kv, slot) for kv, start, stop in item.private.memory() for slot in range(start, stop)]


def visible(item: SequenceRows, row: int) -> Iterator[tuple[Tensor, int, int, float]]:
    """Keys that a row sees: memory, slot, distance by which its query is rotated, bias."""
    position = item.positions[row]
    for kv, slot in own_slots(item)[: item.private.length + row + 1]:
        yield kv, slot, position - item.private.base, 0.0
    for run in item.runs:
        if position >= run.after:
            for slot in range(run.start, run.stop):
                yield run.kv, slot, position - run.offset, run.bias


def address(kv: Tensor, slot: int) -> int:
    """Of a key in the first layer and head."""
    return kv.data_ptr() + slot * kv.stride(3) * kv.element_size()


def wanted(batch: Sequence[SequenceRows]) -> list[Seen]:
    """What every row of a pass sees."""
    found = []
    for item in batch:
        for row in range(len(item.positions)):
            found.append(Counter((address(kv, slot), turn, bias) for kv, slot, turn, bias in visible(item, row)))
    return found


def expanded(tables: Tables, launches: Sequence[Launch], shape: Shape) -> list[Seen]:
    """What every row of a pass sees by its tables, which must lie on the host; checks that results have one place."""
    host = {name: table.tolist() for name, table in tables.host.items()}
    seen: list[Seen] = [Counter() for _ in range(tables.rows)]
    results: dict[int, int] = {}
    for launch in launches:
        count = host["counts"][launch.index]
        assert 0 <= count <= launch.items
        for item in host["items"][launch.first_item : launch.first_item + count]:
            reader_at, readers, segment_at, segment_stop, partial_at = item[:5]
            assert 1 <= readers <= launch.config.block_m // shape.group
            assert segment_at < segment_stop
            for index in range(readers):
                row, shift, own, _ = host["readers"][reader_at + index]
                mask = host["masks"][reader_at + index]
                assert launch.masked or not mask
                assert not (shape.turn_keys and shift)
                assert partial_at + index not in results
                results[partial_at + index] = row
                for segment in host["segments"][segment_at:segment_stop]:
                    memory, page_at, start, stop, offset, after, first, bits = segment
                    bias = struct.unpack("<f", struct.pack("<i", bits))[0]
                    turn = host["positions"][row] - offset - shift
                    for j in range(start, stop):
                        if first >= 0 and first + j - start >= own:
                            continue
                        if first < 0 and host["positions"][row] < after + shift:
                            continue
                        if mask and ctypes.c_byte.from_address(mask + j).value:
                            continue
                        page = host["pages"][page_at + j // shape.page_size]
                        slot = page * shape.page_size + j % shape.page_size
                        place = host["memories"][memory][0] + slot * shape.head_dim * shape.dtype.itemsize
                        seen[row][place, turn, bias] += 1
    starts, partials = host["row_starts"], host["row_partials"]
    for row in range(tables.rows):
        assert {results.pop(p) for p in partials[starts[row] : starts[row + 1]]} <= {row}
    assert not results
    return seen


def filled(made: Draft, device: torch.device = CPU) -> tuple[Tables, list[Launch]]:
    """Tables of a draft, as the backend makes them."""
    tables, launches = Tables(made.sizes(), device), made.launches()
    made.fill(tables, launches)
    tables.upload()
    return tables, launches


# -- a whole pass ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layer:
    """What a layer has of the rows: ``(heads, rows, dim)`` each, on the CPU; and its rotation."""

    q: Tensor
    k: Tensor
    v: Tensor
    order: Tensor
    factors: Tensor
    halves: bool


def layer_of(world: World, seed: int, order: str = "halves", rotary: str = "full") -> Layer:
    """Random rows for a pass."""
    shape, random = world.shape, torch.Generator().manual_seed(seed)
    rows = sum(len(item.positions) for item in world.batch)
    q, k, v = (
        torch.randn((rows, heads, shape.head_dim), generator=random).to(shape.dtype).transpose(0, 1)
        for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
    )
    factors = factors_of(shape.head_dim, rotary)
    assert factors is not None
    return Layer(q, k, v, order_of(shape.head_dim, order), factors, order == "halves")


def run_kernels(world: World, rows: Layer, layer: int) -> Tensor:
    """The kernels' attention of a pass: ``(rows, heads, dim)``."""
    shape, device = world.shape, world.device
    tables, launches = filled(draft(world.batch, shape), device)
    factors = rows.factors.to(device)
    turns = factors / torch.linalg.vector_norm(factors, dim=-1, keepdim=True)
    rotation = Rotation(rows.order.to(device), factors, turns, rows.halves)
    q, k, v = (x.to(device) for x in (rows.q, rows.k, rows.v))
    out = torch.full((tables.partials, shape.heads, shape.head_dim), float("nan"), device=device)
    lse = torch.full(out.shape[:2], float("nan"), device=device)
    result = torch.empty((q.shape[1], shape.heads, shape.head_dim), dtype=q.dtype, device=device)
    write_kv(k, v, tables, layer, rotation)
    for launch in launches:
        segment_attention(
            q,
            tables,
            launch,
            layer,
            rotation,
            out,
            lse,
            page_size=shape.page_size,
            kv_heads=shape.kv_heads,
            scale=shape.head_dim**-0.5,
            turn_keys=shape.turn_keys,
        )
    merge_partials(out, lse, tables, result)
    return result.cpu()


def reference_of(world: World, rows: Layer, layer: int) -> Tensor:
    """The same in float64, row by row; memory must be as it was before the pass."""
    shape = world.shape
    found = []
    at = 0
    for item in world.batch:
        first, count, held = at, len(item.positions), item.private.length
        at += count
        # Keys and values, (kv_heads, dim) each, by where they lie: first those of this pass, the rest as they are read.
        known: dict[int, tuple[Tensor, Tensor]] = {}
        for i, (kv, slot) in enumerate(own_slots(item)[held : held + count]):
            key = rotated(rows.k[:, first + i], rows.order, rows.factors, item.positions[i] - item.private.base)
            known[address(kv, slot)] = key, wide(rows.v[:, first + i])
        for row in range(count):
            queries: dict[int, Tensor] = {}
            scores, values = [], []
            for kv, slot, turn, bias in visible(item, row):
                if turn not in queries:
                    queries[turn] = rotated(rows.q[:, first + row], rows.order, rows.factors, turn)
                place = address(kv, slot)
                if place not in known:
                    both = wide(kv[layer, :, :, slot].cpu())
                    known[place] = both[0], both[1]
                key, value = (x.repeat_interleave(shape.group, 0) for x in known[place])
                scores.append((queries[turn] * key).sum(-1) * shape.head_dim**-0.5 + bias)
                values.append(value)
            for score, value in zip(torch.stack(scores, 1), torch.stack(values, 1), strict=True):
                found.append(softmax_average(score, value)[:-1])
    return torch.stack(found).view(-1, shape.heads, shape.head_dim)


# -- random batches --------------------------------------------------------------------------------------------


@st.composite
def batches(draw: st.DrawFn, most: int = 6) -> list[Request]:
    """Sequences that link, decode, go on after a fork; with chunks that several of them read."""
    found: list[Request] = []
    bank = draw(st.lists(st.integers(0, len(LENGTHS) - 1), min_size=1, max_size=3))
    chosen = {n: tuple(sorted(draw(st.frozensets(st.integers(0, LENGTHS[n] - 1), max_size=4)))) for n in bank}
    for _ in range(draw(st.integers(1, most))):
        forkable = [i for i, s in enumerate(found) if s.done is None and s.paged and s.parent is None]
        if forkable and draw(st.booleans()):
            parent = draw(st.sampled_from(forkable))
            found.append(Request((), None, draw(st.integers(1, 2)), parent=parent, cut=draw(st.integers(0, 3))))
            continue
        parts: list[int | Link] = []
        for _ in range(draw(st.integers(0, 4))):
            number = draw(st.sampled_from(bank))
            own = st.frozensets(st.integers(0, LENGTHS[number] - 1), max_size=3).map(lambda s: tuple(sorted(s)))
            # Sequences choose the same slots often, so that they share runs.
            parts.append(Link(number, draw(st.sampled_from((chosen[number], ())) | own)))
        parts.insert(draw(st.integers(0, len(parts))), draw(st.integers(1, 40)))
        links = draw(st.booleans())
        found.append(
            Request(
                tuple(parts),
                draw(st.integers(0, 20)) if links else None,
                draw(st.integers(1, 60)) if links else draw(st.sampled_from((1, 1, 2, 5))),
                0 if links else draw(st.integers(0, 20)),
                draw(st.booleans()),
                draw(st.sampled_from((0, 0, 3))),
                draw(st.booleans()),
            )
        )
    return found


@st.composite
def shapes(draw: st.DrawFn, *, dtypes: tuple[torch.dtype, ...] = (torch.float32,)) -> Shape:
    """Shapes of small models, and more or fewer processors than there is work for."""
    group, kv_heads = draw(st.sampled_from(((1, 2), (2, 1), (3, 2), (4, 1), (16, 1))))
    return Shape(
        group * kv_heads,
        kv_heads,
        draw(st.sampled_from((16, 64))),
        draw(st.sampled_from(dtypes)),
        draw(st.sampled_from((16, 32, 64))),
        draw(st.sampled_from((1, 4, 132))),
        draw(st.booleans()),
    )
