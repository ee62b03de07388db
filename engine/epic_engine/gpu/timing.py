"""Device time of short pieces of work, the machine that it was measured on, and how fast its memory is."""

from __future__ import annotations

import platform
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import torch
import transformers

from epic_engine.attention.select import interpreted
from epic_engine.memory.budget import available_memory

__all__ = ["Timing", "copy_bandwidth", "environment", "free_memory", "l2_bytes", "measure", "synchronise"]

_USUAL_L2 = 64 << 20


@dataclass(frozen=True)
class Timing:
    """Time of one call.

    Attributes
    ----------
    seconds
        Median.
    spread
        Largest minus smallest, as a share of the median.
    how
        ``"graph"`` (CUDA events around a captured graph, so that the host's launches are not part of it),
        ``"events"`` (around the launches themselves) or ``"wall"`` (no GPU).
    """

    seconds: float
    spread: float
    how: str


def synchronise(device: torch.device) -> None:
    """Wait until the device has nothing to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(sweep: Callable[[], None], calls: int, device: torch.device, *, repeats: int = 20) -> Timing:
    """Time of a call.

    Parameters
    ----------
    sweep
        Makes ``calls`` calls, each on other memory than the one before it. Allocates nothing that must outlive it.
    calls
        How many.
    device
        Where they run.
    repeats
        Sweeps that are timed, after one that warms up.
    """
    sweep()  # compiles kernels
    synchronise(device)
    run, how = sweep, "wall"
    if device.type == "cuda":
        run, how = _captured(sweep)
        run()
        synchronise(device)
    times = [_once(run, device) / calls for _ in range(repeats)]
    middle = statistics.median(times)
    return Timing(middle, (max(times) - min(times)) / middle if middle else 0.0, how)


def _captured(sweep: Callable[[], None]) -> tuple[Callable[[], None], str]:
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            sweep()
    except RuntimeError:
        return sweep, "events"
    return graph.replay, "graph"


def _once(run: Callable[[], None], device: torch.device) -> float:
    if device.type != "cuda":
        begin = time.perf_counter()
        run()
        return time.perf_counter() - begin
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) / 1e3


def copy_bandwidth(device: torch.device, nbytes: int) -> float:
    """Bytes a second that a plain copy of as many bytes reads and writes on the device, both counted."""
    source = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def sweep() -> None:
        target.copy_(source)

    return 2 * nbytes / measure(sweep, 1, device).seconds


def l2_bytes(device: torch.device) -> int:
    """Size of the device's cache that a measurement must not be served from."""
    if device.type != "cuda":
        return 0
    return int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)) or _USUAL_L2


def free_memory(device: torch.device) -> int:
    """Bytes that can be allocated on the device now."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return available_memory()


def environment(device: torch.device, *, tiny: bool) -> dict[str, Any]:
    """Machine and versions, for the head of a report."""
    import triton

    found: dict[str, Any] = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "card": "none: Triton's interpreter on a CPU",
        "driver": "none",
        "cuda": torch.version.cuda or "none",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "tiny": tiny,
        "interpreted": interpreted(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found["card"] = (
            f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, {properties.multi_processor_count} "
            f"multiprocessors, compute capability {properties.major}.{properties.minor}"
        )
        found["driver"] = _driver()
    return found


def _driver() -> str:
    program = shutil.which("nvidia-smi")
    if program is None:
        return "unknown"
    command = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return output.strip().splitlines()[0] if output.strip() else "unknown"
