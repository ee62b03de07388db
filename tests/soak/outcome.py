"""What came of one injected fault."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self

__all__ = ["VIOLATIONS", "Outcome"]

VIOLATIONS = ("wrong_hits", "lost_intact", "unreported", "false_alarms", "other")


@dataclass
class Outcome:
    """Counts, and a line for everything that must not be.

    Attributes
    ----------
    detail
        What was done.
    damaged
        Chunks whose bytes differ from what was written, or whose catalogue row does.
    reported
        Something said so: an error, a check, a chunk set aside.
    misses
        Chunks that should have been there and were a miss, when first asked for.
    rebuilt
        The catalogue had to be made anew.
    wrong_hits
        Chunks that came back with other bytes or another description than any that was put.
    lost_intact
        Chunks that were durable and whose bytes are as written, but which cannot be had any more.
    unreported
        Damage that nothing reported.
    false_alarms
        Reports of damage where there is none.
    other
        What else must not happen: the store does not work afterwards, a process died or hung, ...
    """

    detail: str = ""
    damaged: int = 0
    reported: bool = False
    misses: int = 0
    rebuilt: bool = False
    wrong_hits: list[str] = field(default_factory=list)
    lost_intact: list[str] = field(default_factory=list)
    unreported: list[str] = field(default_factory=list)
    false_alarms: list[str] = field(default_factory=list)
    other: list[str] = field(default_factory=list)

    @property
    def violations(self) -> list[str]:
        """Every line of every list, with the list's name."""
        return [f"{name}: {line}" for name in VIOLATIONS for line in getattr(self, name)]

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> Self:
        """The inverse of :meth:`as_dict`; other fields are left out."""
        return cls(**{field.name: found[field.name] for field in fields(cls)})

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)
