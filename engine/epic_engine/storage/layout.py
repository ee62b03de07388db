"""Where a store keeps which file.

::

    DIR/catalogue.sqlite            what is not in here does not exist
    DIR/segments/<32 hex>.seg       records of many chunks
    DIR/segments/<32 hex>.lock      held by the process that appends to the segment
    DIR/segments/compaction.lock    held by the process that rewrites segments
    DIR/owners/<32 hex>.lock        held by a process that holds leases
    DIR/kv/ab/….safetensors         files of format 1, one chunk each
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from .schema import SEGMENT

__all__ = ["Layout"]


class Layout:
    """Paths of one store."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.segments = root / "segments"
        self.kv = root / "kv"
        self.owners = root / "owners"
        self.scratch = root / "tmp"
        self.compaction_lock = self.segments / "compaction.lock"

    def file(self, name: str, kind: int = SEGMENT) -> Path:
        """The file of a segment."""
        return self.segments / f"{name}.seg" if kind == SEGMENT else self.kv / name

    def lock(self, name: str) -> Path:
        """The lock of a segment that may be appended to."""
        return self.segments / f"{name}.lock"

    def segment_names(self) -> Iterator[str]:
        """Names of the segments that are there as files."""
        return (path.stem for path in self.segments.glob("*.seg"))

    def raw_files(self) -> Iterator[Path]:
        """Files of format 1."""
        return self.kv.glob("*/*.safetensors")

    def relative(self, path: Path) -> str:
        """A path as reports name it."""
        return path.relative_to(self.root).as_posix()
