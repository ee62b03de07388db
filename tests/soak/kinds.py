"""Every kind of fault, how often it comes, and what it is called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from . import catalogues, damages, exchanges, interruptions, models, surroundings
from .trial import Trial

__all__ = ["KINDS", "Kind", "kind_of"]


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    Attributes
    ----------
    name
        In tables.
    inflict
        Does the harm to a trial's store and has it judged.
    share
        Of the trials, relative to the others.
    """

    name: str
    inflict: Callable[[Trial], None]
    share: int = 1


KINDS = (
    Kind("`kill -9` at a named point", interruptions.kill, 2),
    Kind("`kill -9` at any moment", interruptions.any_moment),
    Kind("two writers, one killed", interruptions.two_writers),
    Kind("killed with locks and leases held", interruptions.holder_killed),
    Kind("I/O error at a named point", interruptions.point_fails, 2),
    Kind("a system call fails or writes less", interruptions.call_fails),
    Kind("disk full", interruptions.disk_full),
    Kind("file size limit", interruptions.file_limit),
    Kind("read-only disk", surroundings.unwritable),
    Kind("clock jumps", surroundings.clock_jumps),
    Kind("torn, cut or lost files", damages.torn, 2),
    Kind("bit flips in payloads", damages.flipped_payload),
    Kind("bit flips in record headers, metadata", damages.flipped_header),
    Kind("bit flips in segment headers", damages.flipped_segment),
    Kind("bit flips in dead space and tails", damages.flipped_dead),
    Kind("bit flips in the catalogue", catalogues.flipped_catalogue, 2),
    Kind("bit flips in the catalogue's log", catalogues.flipped_log),
    Kind("garbage in lock files", damages.flipped_lock),
    Kind("damaged export", exchanges.damaged_export, 2),
    Kind("`kill -9` of an export", exchanges.killed_export),
    Kind("damaged published objects", exchanges.damaged_remote, 2),
    Kind("`kill -9` of a publication", exchanges.killed_publication),
    Kind("model replaced in place", models.upgraded),
)
_WHEEL = [(kind, nth) for kind in KINDS for nth in range(kind.share)]


def kind_of(seed: int) -> tuple[Kind, int]:
    """The kind of fault of a trial, and how many of its kind were before it, counted from seed 0."""
    kind, nth = _WHEEL[seed % len(_WHEEL)]
    return kind, seed // len(_WHEEL) * kind.share + nth
