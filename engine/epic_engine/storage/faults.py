"""Named points between two durable states, at which tests raise, kill or wait.

Outside tests a point costs one comparison.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

__all__ = ["POINTS", "install", "point"]

POINTS = (
    "segment.locked",
    "segment.created",
    "segment.entered",
    "put.appending",
    "put.appended",
    "put.synced",
    "put.committing",
    "put.committed",
    "indices.merging",
    "indices.merged",
    "delete.committing",
    "delete.committed",
    "quarantine.committing",
    "quarantine.committed",
    "compact.appended",
    "compact.synced",
    "compact.committing",
    "compact.committed",
    "compact.retiring",
    "compact.retired",
    "compact.unlinked",
    "compact.forgetting",
    "compact.forgotten",
    "collect.committing",
    "collect.committed",
    "collect.unlinking",
    "migrate.copied",
    "migrate.committing",
    "migrate.committed",
    "rebuild.written",
    "rebuild.copied",
    "rebuild.replaced",
    "export.writing",
    "export.written",
    "export.renamed",
)

_hook: Callable[[str], None] | None = None


def point(name: str) -> None:
    """Tell the installed hook, if there is one, that this point is passed."""
    if _hook is not None:
        _hook(name)


@contextlib.contextmanager
def install(hook: Callable[[str], None]) -> Iterator[None]:
    """Have every point of this process call a hook until the context ends.

    Parameters
    ----------
    hook
        Called with the point's name, on the thread that passes it; what it raises goes on from there.
    """
    global _hook
    before, _hook = _hook, hook
    try:
        yield
    finally:
        _hook = before
