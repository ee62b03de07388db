"""What a multiprocessor holds and a data sheet promises, and what follows from that for a kernel."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CARDS", "Card", "Demand", "Fit"]

_WARP = 32
# Compute capabilities 8.0, 9.0 and 10.0 agree in these.
_REGISTERS = 65_536
_QUARTERS = 4  # a multiprocessor's registers and warps are split among so many schedulers
_REGISTER_UNIT = 256  # of a warp
_WARPS = 64
_PROGRAMS = 32
_SHARED_RESERVED = 1024  # bytes of each program
_SHARED_UNIT = 128
_TENSOR_COLUMNS = 512


@dataclass(frozen=True)
class Fit:
    """How many programs run on a multiprocessor at once.

    Attributes
    ----------
    programs
        So many.
    limit
        What keeps it from being more.
    """

    programs: int
    limit: str


@dataclass(frozen=True)
class Demand:
    """What a kernel has to do for a problem.

    Attributes
    ----------
    moved
        Bytes to and from the card's memory, each key and value once.
    loaded
        Bytes that programs load, so that caches must serve what is above ``moved``.
    flops
        Of matrix products, rows that only fill a tile included.
    tensor
        Whether tensor cores compute them.
    """

    moved: float
    loaded: float
    flops: float
    tensor: bool = True

    @property
    def intensity(self) -> float:
        """FLOPs a byte moved."""
        return self.flops / self.moved


@dataclass(frozen=True)
class Card:
    """A card and its architecture.

    Attributes
    ----------
    arch
        Compute capability times ten.
    name
        Whose figures these are.
    bandwidth
        Bytes a second, by its data sheet.
    tensor_flops, float_flops
        Dense FLOPs a second in bfloat16 on tensor cores, and in float32 without them, by its data sheet.
    shared
        Bytes of shared memory of a multiprocessor.
    shared_most
        Of one program.
    """

    arch: int
    name: str
    bandwidth: float
    tensor_flops: float
    float_flops: float
    shared: int
    shared_most: int

    def fit(self, registers: int, shared: int, warps: int, tensor_columns: int = 0) -> Fit:
        """Programs that run on a multiprocessor at once.

        Parameters
        ----------
        registers
            Of a thread.
        shared
            Bytes of shared memory of a program.
        warps
            Of a program.
        tensor_columns
            Columns of tensor memory of a program.
        """
        of_warp = -(-registers * _WARP // _REGISTER_UNIT) * _REGISTER_UNIT
        of_program = -(-(shared + _SHARED_RESERVED) // _SHARED_UNIT) * _SHARED_UNIT
        limits = {
            "registers": _REGISTERS // _QUARTERS // of_warp * _QUARTERS // warps,
            "shared memory": self.shared // of_program,
            "threads": min(_WARPS // warps, _PROGRAMS),
        }
        if tensor_columns:
            limits["tensor memory"] = _TENSOR_COLUMNS // tensor_columns
        limit = min(limits, key=lambda name: limits[name])
        return Fit(limits[limit], limit)

    def least_time(self, demand: Demand) -> tuple[float, str]:
        """Seconds that a problem takes at least, and what bounds it."""
        compute = demand.flops / (self.tensor_flops if demand.tensor else self.float_flops)
        memory = demand.moved / self.bandwidth
        return (compute, "compute") if compute > memory else (memory, "memory")


CARDS = {
    80: Card(80, "A100", 2.0e12, 312e12, 19.5e12, 164 * 1024, 163 * 1024),
    90: Card(90, "H200", 4.8e12, 989e12, 67e12, 228 * 1024, 227 * 1024),
    100: Card(100, "B200", 8.0e12, 2250e12, 75e12, 228 * 1024, 227 * 1024),
}
