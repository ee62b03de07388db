"""What compiling a kernel gave, and whether that is good enough."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from .cards import CARDS, Fit

__all__ = ["DECODE_ROWS", "JUSTIFIED_SPILLS", "Build", "Spills", "complaints"]

DECODE_ROWS = 16
"""Tiles of so many rows serve decoding, where memory must be kept busy by several programs."""
_DECODE_PROGRAMS = 2


class Spills(NamedTuple):
    """Local memory that a configuration may use.

    Attributes
    ----------
    most
        Bytes of a thread.
    reloads
        Instructions in the loop over keys that use it.
    reason
        Why.
    """

    most: int
    reloads: int
    reason: str


_LARGE = "programs with half the rows would load every key twice as often"
JUSTIFIED_SPILLS = {
    "segment": Spills(64, 0, "a few words, used only where a segment is entered"),
    "segment 128 64x64 bf16 masked": Spills(64, 16, "hidden keys have addresses of their own"),
    "segment 128 128x64": Spills(320, 8, _LARGE),
    "segment 128 128x64 bf16 masked": Spills(704, 64, "hidden keys have addresses of their own"),
    "segment 256 64x32": Spills(320, 16, _LARGE),
}
"""By how the names of configurations begin."""


@dataclass(frozen=True)
class Build:
    """A kernel in one configuration for one architecture.

    Attributes
    ----------
    name
        Of the configuration.
    kernel
        ``"segment"``, ``"merge"`` or ``"write"``.
    arch
        Compute capability times ten.
    rows, keys
        Of a tile; 0 for kernels without.
    warps, stages
        Of a program; loads that are under way at once.
    registers
        Of a thread.
    spilled
        Bytes of local memory of a thread.
    reloads
        Instructions in the loop over keys that use local memory.
    shared
        Bytes of shared memory of a program.
    tensor_columns
        Columns of tensor memory of a program.
    copies
        Asynchronous copies to shared memory in the code, by their size in bytes.
    seconds
        That compiling took, or reading an earlier result.
    error
        Why it does not compile; empty if it does.
    """

    name: str
    kernel: str
    arch: int
    rows: int = 0
    keys: int = 0
    warps: int = 4
    stages: int = 1
    registers: int = 0
    spilled: int = 0
    reloads: int = 0
    shared: int = 0
    tensor_columns: int = 0
    copies: Mapping[int, int] = field(default_factory=dict)
    seconds: float = 0.0
    error: str = ""

    @property
    def fit(self) -> Fit:
        """Programs on a multiprocessor; none if it does not compile."""
        if self.error:
            return Fit(0, "error")
        return CARDS[self.arch].fit(self.registers, self.shared, self.warps, self.tensor_columns)

    def as_json(self) -> dict[str, Any]:
        """All of it, with the programs that fit."""
        return {**asdict(self), "programs": self.fit.programs, "limit": self.fit.limit}


def complaints(builds: Iterable[Build]) -> list[str]:
    """What is wrong with these, a sentence each."""
    found = []
    for build in builds:
        what, card = f"{build.name} on sm_{build.arch}", CARDS[build.arch]
        if build.error:
            found.append(f"{what} does not compile: {build.error}")
            continue
        if build.shared > card.shared_most:
            found.append(f"{what} needs {build.shared} bytes of shared memory, a program has {card.shared_most}.")
        accepted = [spills for name, spills in JUSTIFIED_SPILLS.items() if build.name.startswith(name)]
        if build.spilled and not any(build.spilled <= s.most and build.reloads <= s.reloads for s in accepted):
            found.append(f"{what} keeps {build.spilled} bytes of registers of a thread in local memory.")
        if build.kernel == "segment" and build.rows <= DECODE_ROWS and build.fit.programs < _DECODE_PROGRAMS:
            found.append(f"{what} decodes with {build.fit.programs} programs a multiprocessor ({build.fit.limit}).")
    return found
