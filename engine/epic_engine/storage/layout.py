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

import re
from collections.abc import Iterator
from pathlib import Path

from .schema import SEGMENT

__all__ = ["Layout", "is_name"]

_SEGMENT_NAME = re.compile("[0-9a-f]{32}")
_RAW_NAME = re.compile(r"[0-9a-f]{2}/[0-9a-f]{64}\.safetensors")


def is_name(name: object, kind: int = SEGMENT) -> bool:
    """Whether this is a name that a store gives: any other would lead who knows where."""
    form = _SEGMENT_NAME if kind == SEGMENT else _RAW_NAME
    return isinstance(name, str) and form.fullmatch(name) is not None


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
        """The file of a segment.

        Raises
        ------
        FileNotFoundError
            If there can be none of that name.
        """
        if not is_name(name, kind):
            raise FileNotFoundError(f"{str(name)[:80]!r} is no name of a segment")
        return self.segments / f"{name}.seg" if kind == SEGMENT else self.kv / name

    def lock(self, name: str) -> Path:
        """The lock of a segment that may be appended to."""
        return self.segments / f"{name}.lock"

    def segment_names(self) -> Iterator[str]:
        """Names of the segments that are there as files."""
        return (path.stem for path in self.segments.glob("*.seg") if is_name(path.stem))

    def raw_files(self) -> Iterator[Path]:
        """Files of format 1."""
        return self.kv.glob("*/*.safetensors")

    def relative(self, path: Path) -> str:
        """A path as reports name it."""
        return path.relative_to(self.root).as_posix()
