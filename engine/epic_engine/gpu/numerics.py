"""Are the kernels right on this card? Each one against float64 in plain torch."""

from __future__ import annotations

import math

import torch

from epic_engine.attention.kernels.merge import merge_partials
from epic_engine.attention.kernels.segment import segment_attention
from epic_engine.attention.kernels.tables import Tables
from epic_engine.attention.kernels.write import write_kv

from .kernel_cases import CASES, KernelCase, make_problem, make_tables, rotation_of, unit_factors
from .reference import largest, merged, partial, relative_error, rotated
from .report import Report

__all__ = ["run_kernels", "segment_error"]

# The first launch of a variant compiles it.
_CASE_SECONDS = 5.0
_FP8_SINCE = (8, 9)
_LIMITS = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-2}


def run_kernels(report: Report, device: torch.device, *, tiny: bool) -> None:
    """Check every kernel.

    Parameters
    ----------
    report
        Receives a check per problem.
    device
        A GPU, or the CPU in Triton's interpreter.
    tiny
        Fewer problems, because the interpreter is slow.
    """
    needs = _CASE_SECONDS * (not tiny)
    for number, case in enumerate(_chosen(tiny)):
        name = f"segment attention: {case.name}"
        reason = _not_here(case, device)
        if reason is not None:
            report.skip(name, reason)
            continue

        def check(case: KernelCase = case, number: int = number, name: str = name) -> None:
            report.check(name, segment_error(case, device, number), case.tolerance)

        report.step(name, needs, check, numeric=True)
    for sinks in (False, True):
        name = f"merge{' with sinks' if sinks else ''}"

        def check_merge(sinks: bool = sinks, name: str = name) -> None:
            report.check(name, _merge_error(device, sinks), _LIMITS[torch.float32])

        report.step(name, needs, check_merge, numeric=True)
    for dtype in _LIMITS:
        name = f"write: {str(dtype).removeprefix('torch.')}"

        def check_write(dtype: torch.dtype = dtype, name: str = name) -> None:
            report.check(name, _write_error(device, dtype), _LIMITS[dtype])

        report.step(name, needs, check_write, numeric=True)


def _chosen(tiny: bool) -> list[KernelCase]:
    if not tiny:
        return list(CASES)
    # The interpreter takes the bits of bfloat16 for an integer where 8-bit integers become bfloat16.
    able = [c for c in CASES if c.readers <= 12 and not (c.stored == torch.int8 and c.dtype == torch.bfloat16)]
    plain = [c for c in able if not (c.masked or c.turn_keys or c.window or c.softcap or c.stored) and c.rotates]
    return plain[::4] + [c for c in able if c not in plain]


def _not_here(case: KernelCase, device: torch.device) -> str | None:
    """Why a case cannot run; None if it can."""
    if case.stored == torch.float8_e4m3fn and device.type == "cuda":
        found = torch.cuda.get_device_capability(device)
        if found < _FP8_SINCE:
            return (
                f"8-bit floats need compute capability {_FP8_SINCE[0]}.{_FP8_SINCE[1]}, this is {found[0]}.{found[1]}"
            )
    return None


def segment_error(case: KernelCase, device: torch.device, seed: int) -> float:
    """Largest relative error of partial results, of what their log-sum-exps stand for, and of the merged rows.

    Parameters
    ----------
    case
        The problem.
    device
        A GPU, or the CPU in Triton's interpreter.
    seed
        Of its random numbers.

    Returns
    -------
    float
        Not a number if results are none, or if rows see something where they should see nothing.
    """
    problem, rotation = make_problem(case, device, seed)
    tables, launch, kept = make_tables(problem, case, device)
    heads, rows, dim = problem.q.shape
    out = torch.full((tables.partials, heads, dim), torch.nan, device=device)
    lse = torch.full((tables.partials, heads), torch.nan, device=device)
    segment_attention(
        problem.q,
        tables,
        launch,
        problem.layer,
        rotation,
        out,
        lse,
        page_size=problem.page_size,
        kv_heads=problem.kv.shape[2],
        scale=problem.scale,
        window=problem.window,
        softcap=problem.softcap,
        turn_keys=case.turn_keys,
    )
    result = torch.full((rows, heads, dim), torch.nan, dtype=problem.q.dtype, device=device)
    merge_partials(out, lse, tables, result)
    readers = [(item, reader) for item in problem.items for reader in item.readers]
    wanted = [partial(problem, item, reader) for item, reader in readers]
    want_out, want_lse = (torch.stack(part) for part in zip(*wanted, strict=True))
    of_row: dict[int, list[int]] = {}
    for place, (_, reader) in enumerate(readers):
        of_row.setdefault(reader.row, []).append(place)
    want = torch.stack([merged(want_out[of_row[row]].unbind(), want_lse[of_row[row]].unbind()) for row in range(rows)])
    del kept  # the kernel has read it: what follows waits for its results
    nothing = want_lse == -torch.inf
    if not torch.equal(lse == -torch.inf, nothing):
        return math.nan
    # A log-sum-exp is compared as the sum that it stands for.
    sums = (lse.double() - want_lse)[~nothing].expm1().abs().max()
    return largest(relative_error(out, want_out), float(sums), relative_error(result, want))


def _merge_error(device: torch.device, with_sinks: bool) -> float:
    heads, dim = 6, 80
    counts = [0, 1, 2, 40, 3, 1]
    total, rows = sum(counts), len(counts)
    generator = torch.Generator().manual_seed(1)
    out = torch.randn(total, heads, dim, generator=generator)
    lse = 8 * torch.randn(total, heads, generator=generator)
    places = torch.randperm(total, generator=generator).tolist()
    of_row = [[places.pop() for _ in range(count)] for count in counts]
    for place in [*of_row[2][:1], *of_row[4]]:  # one of two saw nothing, and all of three
        out[place], lse[place] = 0, -torch.inf
    sinks = torch.randn(heads, generator=generator) if with_sinks else None
    sizes = dict.fromkeys(("memories", "masks", "pages", "segments", "readers", "items", "counts", "targets"), 0)
    tables = Tables({**sizes, "positions": rows, "row_starts": rows + 1, "row_partials": total}, device)
    tables.host["row_partials"][:] = [place for row in of_row for place in row]
    tables.host["row_starts"][1:] = torch.tensor(counts).cumsum(0).numpy()
    tables.upload()
    result = torch.full((rows, heads, dim), torch.nan, device=device)
    merge_partials(out.to(device), lse.to(device), tables, result, None if sinks is None else sinks.to(device))
    want = torch.zeros(rows, heads, dim, dtype=torch.float64)
    for row, mine in enumerate(of_row):
        if mine:
            want[row] = merged([out[i] for i in mine], [lse[i] for i in mine], sinks)
    return relative_error(result.cpu(), want)


def _write_error(device: torch.device, dtype: torch.dtype) -> float:
    """Error of written keys; not a number if values or other slots are not exactly what they should be."""
    kv_heads, dim, rows, slots, layer = 3, 80, 21, 64, 1
    generator = torch.Generator().manual_seed(2)
    k, v = (torch.randn(rows, kv_heads, dim, generator=generator).to(dtype).transpose(0, 1) for _ in range(2))
    kv = torch.randn(2, 2, kv_heads, slots, dim, generator=generator).to(dtype)
    order = torch.randperm(dim, generator=generator)
    factors = unit_factors(100, dim, dim // 4)
    slot = torch.randperm(slots, generator=generator)[:rows]
    place = torch.randint(0, 100, (rows,), generator=generator)
    used = torch.arange(rows) % 5 != 3
    sizes = dict.fromkeys(("masks", "pages", "segments", "readers", "items", "counts", "row_partials"), 0)
    tables = Tables({**sizes, "memories": 1, "targets": rows, "positions": rows, "row_starts": rows + 1}, device)
    memory = kv.to(device)
    strides = [memory.stride(i) * memory.element_size() for i in range(3)]
    tables.host["memories"][0] = [memory.data_ptr(), *strides, 0, 0, 0, 0]
    tables.host["targets"][:, 0] = torch.where(used, 0, -1).numpy()
    tables.host["targets"][:, 1] = slot.numpy()
    tables.host["targets"][:, 2] = place.numpy()
    tables.upload()
    write_kv(k.to(device), v.to(device), tables, layer, rotation_of(order, factors, None, device))
    got = memory.cpu()
    keys = rotated(k, order, factors, place)
    want = kv.double()
    want[layer, 0][:, slot[used]] = keys[:, used]
    want[layer, 1][:, slot[used]] = v.double()[:, used]
    others = torch.ones(slots, dtype=torch.bool)
    others[slot[used]] = False
    exact = torch.equal(got[0].double(), want[0]) and torch.equal(got[layer, 1].double(), want[layer, 1])
    if not exact or not torch.equal(got[layer, 0][:, others].double(), want[layer, 0][:, others]):
        return math.nan
    return relative_error(got[layer, 0], want[layer, 0])
