"""Everything that only a GPU can tell, in one command of less than eight minutes.

``python -m epic_engine.gpu.check`` compares every kernel and whole models with references, times attention, links and
generation, and holds the figures against their targets. It needs torch, Triton and transformers alone. Exit status: 0,
1 if a numeric check failed, 2 if it cannot run here.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from .report import Report
    from .shapes import Sizes

__all__ = ["PARTS", "main"]

PARTS = ("numerics", "attention", "link", "write", "models")
_BUDGET_SECONDS = 450.0


def _arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m epic_engine.gpu.check", description=__doc__.split("\n\n")[0])
    parser.add_argument("--json", type=Path, help="file that is written after every measurement")
    parser.add_argument("--markdown", type=Path, help="file for the tables, written after every part")
    parser.add_argument("--budget-seconds", type=float, default=_BUDGET_SECONDS, help="what takes longer is skipped")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {','.join(PARTS)}")
    parser.add_argument("--tiny", action="store_true", help="toy sizes, to try this program in Triton's interpreter")
    arguments = parser.parse_args(given)
    arguments.parts = [part for part in arguments.parts.split(",") if part]
    unknown = sorted(set(arguments.parts) - set(PARTS))
    if unknown:
        parser.error(f"unknown parts {', '.join(unknown)}: use {', '.join(PARTS)}")
    return arguments


def _device() -> torch.device | str:
    """Where kernels run here, or why they do not."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed: pip install triton."
    import torch

    from epic_engine.attention.select import interpreted

    if torch.cuda.is_available() and not interpreted():
        return torch.device("cuda")
    if interpreted():
        return torch.device("cpu")
    return "this torch sees no GPU. To try the program without one: TRITON_INTERPRET=1 … --tiny."


def main(given: Sequence[str] | None = None) -> int:
    """Run the check; returns the exit status."""
    arguments = _arguments(given)
    device = _device()
    if isinstance(device, str):
        print(f"gpu-check cannot run: {device}", file=sys.stderr)
        return 2
    if device.type == "cpu" and not arguments.tiny:
        print("gpu-check cannot run: Triton's interpreter is far too slow for anything but --tiny.", file=sys.stderr)
        return 2

    from .report import Report
    from .shapes import REAL, TINY
    from .tables import accept, acceptance_table, markdown, part_tables
    from .timing import environment

    sizes = TINY if arguments.tiny else REAL
    report = Report(environment(device, tiny=sizes.tiny), arguments.budget_seconds, arguments.json)
    for part in PARTS:
        if part not in arguments.parts:
            continue
        report.part(part, _work(part, report, device, sizes))
        accept(report, sizes)
        report.save()
        _write(arguments.markdown, markdown(report))
        print(part_tables(report, part) or f"{part}: nothing measured", end="\n\n", flush=True)
    report.finished = True
    report.save()
    print(acceptance_table(report))
    _write(arguments.markdown, markdown(report))
    for entry in report.skipped:
        print(f"skipped: {entry['part']}: {entry['step']}: {entry['reason']}", file=sys.stderr)
    print(f"{report.elapsed:.0f} s; numeric checks {'passed' if report.passed else 'FAILED'}", file=sys.stderr)
    return 0 if report.passed else 1


def _write(path: Path | None, text: str) -> None:
    if path is not None:
        path.write_text(text, encoding="utf-8")


def _work(part: str, report: Report, device: torch.device, sizes: Sizes) -> Callable[[], None]:
    """A part's work. Its imports are part of it: what cannot be imported fails that part alone."""

    def numerics() -> None:
        from .model_numerics import compare_models
        from .numerics import run_kernels

        run_kernels(report, device, tiny=sizes.tiny)
        compare_models(report, device, sizes)

    def attention() -> None:
        from .bench_attention import run_decode

        run_decode(report, device, sizes)

    def link() -> None:
        from .bench_attention import run_link

        run_link(report, device, sizes)

    def write() -> None:
        from .bench_attention import run_write

        run_write(report, device, sizes)

    def models() -> None:
        from .bench_models import run_models

        run_models(report, device, sizes)

    return {"numerics": numerics, "attention": attention, "link": link, "write": write, "models": models}[part]


if __name__ == "__main__":
    sys.exit(main())
