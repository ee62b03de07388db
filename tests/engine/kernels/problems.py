"""Work for the segment kernel as plain objects, and the tables that say the same, packed by hand."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from epic_engine.attention.kernels.configs import SegmentConfig, segment_config
from epic_engine.attention.kernels.segment import segment_attention
from epic_engine.attention.kernels.tables import Launch, Rotation, Tables
from hypothesis import strategies as st
from torch import Tensor

ALWAYS = -(1 << 30)
PLACES = 4096
MEMORIES = 3
ORDERS = ("halves", "half", "interleaved", "arbitrary")  # the kernel is told of "halves"
ROTARIES = ("full", "partial", "yarn", "none")
EIGHT_BITS = (torch.int8, torch.float8_e4m3fn)


@dataclass(frozen=True)
class Keys:
    """A segment. ``start`` is counted from its first page; ``first`` numbers its first key among the own ones."""

    count: int
    start: int = 0
    memory: int = 0
    offset: int = 0
    after: int = ALWAYS
    first: int = -1
    bias: float = 0.0


@dataclass(frozen=True)
class Row:
    """A reader; ``hidden`` are keys of the only segment of its item, counted from the first."""

    position: int
    shift: int = 0
    own: int = 0
    low: int = 0
    hidden: frozenset[int] | None = None


@dataclass(frozen=True)
class Item:
    """A tile of rows and what it walks through."""

    rows: tuple[Row, ...]
    segments: tuple[Keys, ...]


@dataclass(frozen=True)
class Problem:
    """One launch; ``readers`` chooses the tile, ``spare`` programs find nothing to do."""

    items: tuple[Item, ...]
    dim: int = 16
    group: int = 2
    kv_heads: int = 1
    page: int = 16
    dtype: torch.dtype = torch.float32
    stored: torch.dtype | None = None
    layer: int = 0
    order: str = "halves"
    rotary: str = "full"
    window: int = 0
    softcap: float = 0.0
    turn_keys: bool = False
    readers: int = 1
    spare: int = 0
    seed: int = 0

    @property
    def heads(self) -> int:
        return self.group * self.kv_heads

    @property
    def scale(self) -> float:
        return float(self.dim**-0.5)

    @property
    def config(self) -> SegmentConfig:
        return segment_config(self.dim, self.group, self.readers, self.dtype)


@lru_cache(maxsize=8)
def factors_of(dim: int, rotary: str) -> Tensor | None:
    """``(PLACES, dim / 2, 2)`` float32."""
    if rotary == "none":
        return None
    pairs = dim // 2
    angles = torch.arange(PLACES).double()[:, None] * 10000.0 ** (-torch.arange(pairs).double() / pairs)
    turns = torch.polar(torch.ones_like(angles), angles)
    if rotary == "yarn":
        turns *= 1.21
    if rotary == "partial":
        turns[:, max(1, pairs // 3) :] = 1
    return torch.view_as_real(turns).float().contiguous()


def order_of(dim: int, kind: str) -> Tensor:
    """``(dim,)`` int32: the model's dimension behind each canonical one."""
    if kind in ("half", "halves"):
        return torch.arange(dim, dtype=torch.int32).view(2, -1).t().flatten()
    if kind == "interleaved":
        return torch.arange(dim, dtype=torch.int32)
    return torch.randperm(dim, generator=torch.Generator().manual_seed(dim)).int()


@dataclass
class Inputs:
    """Tensors of a problem.

    ``kvs`` and ``scales`` are those of each memory, ``pages[i][s]`` the pages of a segment of an item, ``rows[i]`` the
    rows of the pass that the item's readers are.
    """

    q: Tensor
    kvs: list[Tensor]
    scales: list[Tensor] | None
    pages: list[list[list[int]]]
    rows: list[list[int]]
    order: Tensor
    factors: Tensor | None

    def on(self, device: torch.device) -> Inputs:
        """The same on a device."""
        scales = None if self.scales is None else [s.to(device) for s in self.scales]
        factors = None if self.factors is None else self.factors.to(device)
        kvs = [kv.to(device) for kv in self.kvs]
        return replace(self, q=self.q.to(device), kvs=kvs, scales=scales, order=self.order.to(device), factors=factors)


def inputs_of(p: Problem) -> Inputs:
    """Random tensors: pages lie in any order, and what no segment names is not a number."""
    random = torch.Generator().manual_seed(p.seed)
    lengths = [[-(-(s.start + s.count) // p.page) for s in item.segments] for item in p.items]
    wanted = [0] * MEMORIES
    for item, counts in zip(p.items, lengths, strict=True):
        for keys, count in zip(item.segments, counts, strict=True):
            wanted[keys.memory] += count
    free = [torch.randperm(n + 2, generator=random).tolist() for n in wanted]
    pages = [
        [[free[s.memory].pop() for _ in range(n)] for s, n in zip(item.segments, counts, strict=True)]
        for item, counts in zip(p.items, lengths, strict=True)
    ]
    stored = p.stored or p.dtype
    layers = p.layer + 1
    kvs, scales = [], []
    for n in wanted:
        shape = (layers, 2, p.kv_heads, (n + 2) * p.page, p.dim)
        content = torch.randn(shape, generator=random)
        scale = 0.5 + torch.rand((*shape[:3], n + 2), generator=random)
        if stored == torch.int8:
            content = (content * 40).clamp(-127, 127).round()
            scale = scale / 40
        content = content.to(stored)
        kvs.append((content.clone() if stored == torch.int8 else torch.full_like(content, math.nan), content))
        scales.append(scale)
    for item, lists in zip(p.items, pages, strict=True):
        for keys, found in zip(item.segments, lists, strict=True):
            for j in range(keys.start, keys.start + keys.count):
                slot = found[j // p.page] * p.page + j % p.page
                kv, content = kvs[keys.memory]
                kv[:, :, :, slot] = content[:, :, :, slot]
    total = sum(len(item.rows) for item in p.items)
    places = torch.randperm(total + 1, generator=random).tolist()
    rows = [[places.pop() for _ in item.rows] for item in p.items]
    # As a model gives it: the heads of a row lie next to each other.
    q = torch.randn((total + 1, p.heads, p.dim), generator=random).to(p.dtype).transpose(0, 1)
    return Inputs(
        q,
        [kv for kv, _ in kvs],
        scales if stored in EIGHT_BITS else None,
        pages,
        rows,
        order_of(p.dim, p.order),
        factors_of(p.dim, p.rotary),
    )


def rotation_of(p: Problem, inputs: Inputs) -> Rotation:
    """The layer's rotation; unit factors only where keys are turned."""
    turns = None
    if p.turn_keys and inputs.factors is not None:
        turns = inputs.factors / torch.linalg.vector_norm(inputs.factors, dim=-1, keepdim=True)
    return Rotation(inputs.order, inputs.factors, turns, p.order == "halves")


def bits(value: float) -> int:
    """A float32 as the integer that has its bits."""
    return int(struct.unpack("<i", struct.pack("<f", value))[0])


def tables_of(p: Problem, inputs: Inputs, device: torch.device) -> tuple[Tables, Launch, list[Tensor]]:
    """The tables and the launch of a problem, and masks that must outlive them."""
    memories: list[list[int]] = []
    segments: list[list[int]] = []
    readers: list[list[int]] = []
    masks: list[int] = []
    items: list[list[int]] = []
    pages: list[int] = []
    keep: list[Tensor] = []
    for index, kv in enumerate(inputs.kvs):
        scale = None if inputs.scales is None else inputs.scales[index]
        more = [0] * 4 if scale is None else [scale.data_ptr(), *(scale.stride(i) * 4 for i in range(3))]
        memories.append([kv.data_ptr(), *(kv.stride(i) * kv.element_size() for i in range(3)), *more])
    positions = [0] * inputs.q.shape[1]
    partials = 1
    for number, item in enumerate(p.items):
        items.append(
            [len(readers), len(item.rows), len(segments), len(segments) + len(item.segments), partials, 0, 0, 0]
        )
        partials += len(item.rows) + 1  # with gaps between them, which must stay as they are
        for row, at in zip(item.rows, inputs.rows[number], strict=True):
            positions[at] = row.position
            readers.append([at, row.shift, row.own, row.low])
            masks.append(0)
            if row.hidden is not None:
                (keys,) = item.segments
                mask = torch.zeros(keys.count, dtype=torch.bool)
                mask[sorted(row.hidden)] = True
                keep.append(mask.to(device))
                masks[-1] = keep[-1].data_ptr() - keys.start
        for keys, found in zip(item.segments, inputs.pages[number], strict=True):
            stop = keys.start + keys.count
            segments.append(
                [keys.memory, len(pages), keys.start, stop, keys.offset, keys.after, keys.first, bits(keys.bias)]
            )
            pages.extend(found)
    # Another launch's items stand before these, and programs that are not needed behind them.
    first = 2
    sizes = {
        "memories": len(memories),
        "masks": len(masks),
        "pages": len(pages),
        "segments": len(segments),
        "readers": len(readers),
        "items": first + len(items) + p.spare,
        "counts": 2,
        "targets": 0,
        "positions": len(positions),
        "row_starts": len(positions) + 1,
        "row_partials": partials,
    }
    tables = Tables(sizes, device)
    host = tables.host
    host["memories"][:] = memories
    host["masks"][:] = masks
    host["pages"][:] = pages
    host["segments"][:] = segments
    host["readers"][:] = readers
    host["items"][:] = -1
    host["items"][first : first + len(items)] = items
    host["counts"][:] = [0, len(items)]
    host["positions"][:] = positions
    tables.upload()
    stored = p.stored or p.dtype
    launch = Launch(1, first, len(items) + p.spare, p.config, stored, stored in EIGHT_BITS, any(masks))
    return tables, launch, keep


def computed(p: Problem, inputs: Inputs, device: torch.device) -> list[list[Tensor]]:
    """What the kernel gives each item's rows: ``(heads, dim + 1)``, the log-sum-exp last.

    What belongs to no row must be left alone.
    """
    inputs = inputs.on(device)
    tables, launch, keep = tables_of(p, inputs, device)
    out = torch.full((tables.partials, p.heads, p.dim), math.nan, device=device)
    lse = torch.full((tables.partials, p.heads), math.nan, device=device)
    segment_attention(
        inputs.q,
        tables,
        launch,
        p.layer,
        rotation_of(p, inputs),
        out,
        lse,
        page_size=p.page,
        kv_heads=p.kv_heads,
        scale=p.scale,
        window=p.window,
        softcap=p.softcap,
        turn_keys=p.turn_keys,
    )
    both = torch.cat([out, lse[:, :, None]], dim=2).double().cpu()
    del keep
    found: list[list[Tensor]] = []
    at = 1
    for item in p.items:
        found.append([both[at + i] for i in range(len(item.rows))])
        assert both[at - 1].isnan().all()
        at += len(item.rows) + 1
    assert not torch.cat([torch.stack(f) for f in found]).isnan().any()
    return found


# -- random ones -----------------------------------------------------------------------------------------------


@st.composite
def problems(
    draw: st.DrawFn,
    *,
    dtypes: tuple[torch.dtype, ...] = (torch.float32,),
    stored: tuple[torch.dtype | None, ...] = (None,),
    turn_keys: bool = False,
    most_keys: int = 150,
) -> Problem:
    """Any problem, its rows and keys near a place that may be anywhere in the tables."""
    dim = draw(st.sampled_from((16, 32, 64, 80, 96, 128, 256)))
    group = draw(st.sampled_from((1, 2, 3, 4, 7, 8, 16)))
    dtype = draw(st.sampled_from(dtypes))
    readers = draw(st.sampled_from((1, 6, 100)))
    tile = segment_config(dim, group, readers, dtype).block_m // group
    window = draw(st.sampled_from((0, 0, 1, 7, 64)))
    centre = draw(st.sampled_from((0, 300, PLACES - 1)))
    masked = draw(st.booleans())

    def near(before: int, behind: int) -> int:
        return min(max(centre + draw(st.integers(-before, behind)), 0), PLACES - 1)

    items = []
    for _ in range(draw(st.integers(1, 2))):
        rows = []
        count = draw(st.sampled_from((1, min(tile, 12), draw(st.integers(1, min(tile, 12))))))
        segments = 1 if masked else draw(st.integers(1, 3))
        for _ in range(count):
            position = near(100, 60)
            shift = 0 if turn_keys else draw(st.integers(0, min(position, 40)))
            own = draw(st.integers(0, 220))
            low = draw(st.integers(0, own))
            rows.append(Row(position, shift, own, low))
        lowest = max(0, min(row.position - row.shift for row in rows))
        spans = []
        for _ in range(segments):
            keys = draw(st.integers(1, most_keys))
            start = draw(st.integers(0, 15))
            memory = draw(st.integers(0, MEMORIES - 1))
            bias = draw(st.sampled_from((0.0, 0.0, -2.5, 1.25)))
            if draw(st.booleans()):
                offset = max(0, lowest - draw(st.integers(0, 200)))
                spans.append(Keys(keys, start, memory, offset, first=draw(st.integers(0, 150)), bias=bias))
            else:
                offset = near(160, 30)
                spans.append(Keys(keys, start, memory, offset, offset + draw(st.integers(0, 90)), bias=bias))
        if masked:
            some = st.frozensets(st.integers(0, spans[0].count - 1))
            hidden = st.none() | some | st.just(frozenset(range(spans[0].count)))
            rows = [Row(r.position, r.shift, r.own, r.low, draw(hidden)) for r in rows]
        items.append(Item(tuple(rows), tuple(spans)))
    return Problem(
        tuple(items),
        dim,
        group,
        draw(st.integers(1, 2)) if group < 8 else 1,
        draw(st.sampled_from((16, 32, 64, 128))),
        dtype,
        draw(st.sampled_from(stored)),
        draw(st.integers(0, 2)),
        draw(st.sampled_from(ORDERS)),
        draw(st.sampled_from(ROTARIES)),
        window,
        draw(st.sampled_from((0.0, 0.0, 3.0))),
        turn_keys,
        readers,
        draw(st.integers(0, 2)),
        draw(st.integers(0, 1000)),
    )
