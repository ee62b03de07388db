"""What the kernels compile to, without a GPU: ``python -m epic_engine.gpu.kernel_report``.

Every default configuration of every kernel is compiled for each architecture. The report says how many registers and
how much memory a program takes, how many programs fit a multiprocessor, and how fast a card could be at best. The exit
status is 1 if something does not compile, does not fit, or keeps registers in memory without a reason.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import TYPE_CHECKING, Any

from epic_engine.attention.select import interpreted

from .cards import CARDS
from .kernel_record import JUSTIFIED_SPILLS, Build, complaints

if TYPE_CHECKING:
    from .kernel_build import Case

__all__ = ["main"]

_COMMAND = "python -m epic_engine.gpu.kernel_report"
Table = tuple[Sequence[str], list[list[str]]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile, print the report, and say with the exit status whether all is well."""
    options = _options(arguments)
    if interpreted():
        print("TRITON_INTERPRET is set, so that nothing would be compiled: unset it.", file=sys.stderr)
        return 2
    if importlib.util.find_spec("triton") is None:
        print("Triton is not installed (pip install triton).", file=sys.stderr)
        return 2
    import triton

    from .kernel_build import default_cases

    cases = [case for case in default_cases() if not options.only or any(text in case.name for text in options.only)]
    if not cases:
        print(f"No configuration is called {' or '.join(options.only)}.", file=sys.stderr)
        return 2
    tasks = [(case, arch) for arch in options.arch for case in cases if case.supported(arch)]
    builds = list(_compiled(tasks, options.jobs))
    order = {(case.name, arch): index for index, (case, arch) in enumerate(tasks)}
    builds.sort(key=lambda build: order[build.name, build.arch])
    wrong = complaints(builds)

    sections = [(f"sm_{arch} ({CARDS[arch].name})", _resources(builds, arch)) for arch in options.arch]
    sections.append(("What a card could do at best", _rooflines(cases, options.arch)))
    for title, table in sections:
        print(f"\n{title}\n\n{_plain(table)}")
    print(f"\n{_legend(options.arch)}")
    for line in wrong:
        print(f"WRONG: {line}", file=sys.stderr)
    print(f"\n{len(builds)} compiled, {len(wrong)} complaints.")
    if options.json:
        report = {
            "triton": triton.__version__,
            "builds": [build.as_json() for build in builds],
            "complaints": wrong,
        }
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if options.markdown:
        options.markdown.write_text(_document(sections, options.arch, triton.__version__, wrong), encoding="utf-8")
    return 1 if wrong else 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=_COMMAND, description="Compile every kernel and report what it needs.")
    parser.add_argument("--arch", type=int, nargs="+", choices=sorted(CARDS), default=sorted(CARDS))
    parser.add_argument("--only", nargs="+", default=[], metavar="TEXT", help="configurations whose names contain this")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one a core)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    return parser.parse_args(arguments)


# -- compiling -------------------------------------------------------------------------------------------------------


def _compiled(tasks: Sequence[tuple[Case, int]], jobs: int) -> Iterator[Build]:
    """Results in the order in which they are ready, with a line of progress."""
    from .kernel_build import compile_case

    if jobs <= 1:
        for done, task in enumerate(tasks, 1):
            build = compile_case(*task)
            _progress(done, len(tasks), build)
            yield build
        return
    # LLVM has threads by the time a process would be forked.
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        futures: list[Future[Build]] = [pool.submit(compile_case, *task) for task in tasks]
        for done, future in enumerate(as_completed(futures), 1):
            build = future.result()
            _progress(done, len(tasks), build)
            yield build


def _progress(done: int, total: int, build: Build) -> None:
    if sys.stderr.isatty():
        filled = 30 * done // total
        bar = f"[{'#' * filled}{'.' * (30 - filled)}]"
        print(f"\r{bar} {done}/{total} {build.name[:50]:50}", end="\n" if done == total else "", file=sys.stderr)
    else:
        print(f"{done}/{total} sm_{build.arch} {build.name} ({build.seconds:.1f} s)", file=sys.stderr)


# -- tables ----------------------------------------------------------------------------------------------------------


def _resources(builds: Iterable[Build], arch: int) -> Table:
    head = (
        "configuration",
        "warps",
        "stages",
        "registers",
        "local bytes",
        "in the loop",
        "shared KiB",
        "programs",
        "limit",
        "copies of 16 B",
        "smaller",
    )
    rows = []
    for build in builds:
        if build.arch != arch:
            continue
        if build.error:
            rows.append([build.name, f"{build.warps}", f"{build.stages}", "does not compile", *["-"] * 7])
            continue
        whole = build.copies.get(16, 0)
        cells: list[Any] = [build.name, build.warps, build.stages, build.registers, build.spilled, build.reloads]
        cells += [f"{build.shared / 1024:.1f}", build.fit.programs, build.fit.limit]
        cells += [whole, sum(build.copies.values()) - whole]
        rows.append([str(cell) for cell in cells])
    return head, rows


def _rooflines(cases: Iterable[Case], archs: Sequence[int]) -> Table:
    from .roofline import demand

    cards = [CARDS[arch] for arch in archs]
    head = ["configuration", "problem", "MB moved", "MB loaded", "GFLOP", "FLOP/byte"]
    head += [f"{card.name} µs (bound)" for card in cards]
    rows = []
    for case in cases:
        problem, need = demand(case)
        row = [case.name, problem, f"{need.moved / 1e6:.1f}", f"{need.loaded / 1e6:.1f}", f"{need.flops / 1e9:.1f}"]
        row.append(f"{need.intensity:.1f}")
        for card in cards:
            seconds, bound = card.least_time(need)
            row.append(f"{seconds * 1e6:.1f} ({bound})" if case.supported(card.arch) else "-")
        rows.append(row)
    return head, rows


def _legend(archs: Sequence[int]) -> str:
    from .roofline import PROBLEMS

    cards = [CARDS[arch] for arch in archs]
    figures = "; ".join(
        f"{c.name} {c.bandwidth / 1e12:.1f} TB/s, {c.tensor_flops / 1e12:.0f} TFLOP/s in bfloat16 and "
        f"{c.float_flops / 1e12:g} in float32"
        for c in cards
    )
    lines = [
        "Registers and local memory (spilled registers) are a thread's, and so are the instructions in the loop over "
        "keys that use local memory; shared memory is a program's; programs are how many fit a multiprocessor, and "
        "what keeps it from being more. Copies count the instructions that bring keys and values to shared memory "
        "asynchronously, by size; smaller ones bring page numbers, and 8-bit keys in some tiles. 8-bit floats need "
        "sm_89.",
        "Problems, one layer, 32 query heads and 8 of keys: " + "; ".join(PROBLEMS.values()) + ".",
        "Moved is what a card's memory must deliver or take if every key is read from it once; loaded is what programs "
        "ask for, and caches have to serve what is above. FLOPs are those of matrix products, empty rows of a tile "
        "included. Times are the least that these figures allow, by data sheets, not measurements: " + figures + ".",
    ]
    if JUSTIFIED_SPILLS:
        reasons = "; ".join(
            f"{name}: {s.most} bytes, {s.reloads} in the loop ({s.reason})" for name, s in JUSTIFIED_SPILLS.items()
        )
        lines.append(f"Accepted at most, by how a configuration's name begins: {reasons}.")
    return "\n\n".join(lines)


def _plain(table: Table) -> str:
    head, rows = table
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    lines = []
    for row in (list(head), ["-" * width for width in widths], *rows):
        first, *others = map(str.rjust, row, widths)
        lines.append("  ".join((first.strip().ljust(widths[0]), *others)))
    return "\n".join(lines)


def _markdown(table: Table) -> str:
    head, rows = table
    marks = ["---"] + ["---:"] * (len(head) - 1)
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, marks, *rows))


def _document(sections: Iterable[tuple[str, Table]], archs: Sequence[int], version: str, wrong: Sequence[str]) -> str:
    state = "Nothing is wrong with them." if not wrong else "Wrong: " + " ".join(wrong)
    parts = [
        "# What the kernels compile to",
        "Every default configuration of the Triton kernels, compiled without a GPU by Triton "
        f"{version} for {', '.join(f'sm_{arch}' for arch in archs)} "
        f"(`make kernels`, that is `{_COMMAND} --markdown docs/kernels.md`). {state}",
    ]
    for title, table in sections:
        parts += [f"## {title}", _markdown(table)]
    parts += ["## How to read this", _legend(archs)]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    sys.exit(main())
