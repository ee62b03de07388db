"""How a request is served, beyond what it asks and how tokens are drawn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

from .errors import ConfigError
from .linking.linked import LinkedPrompt

__all__ = ["Options", "RequestOptions"]


class RequestOptions(TypedDict, total=False):
    """How a request is served.

    Attributes
    ----------
    priority
        Higher goes first; 0 by default.
    timeout
        Seconds after which the answer ends with what there is, ``finish_reason="timeout"``; None waits.
    after
        Continue this linked prompt (a :attr:`Stream.linked <epic_engine.stream.Stream.linked>`, or what
        :meth:`Engine.link` gave): the new prompt stands behind it and its answer, whose KV is shared.
    keep
        Keep the prompt and its answer for another turn: :attr:`Stream.linked <epic_engine.stream.Stream.linked>`.
    """

    priority: int
    timeout: float | None
    after: LinkedPrompt | None
    keep: bool


@dataclass(frozen=True)
class Options:
    """A request's options with their defaults.

    Raises
    ------
    ConfigError
        If ``timeout`` is not above 0.
    """

    priority: int = 0
    timeout: float | None = None
    after: LinkedPrompt | None = None
    keep: bool = False

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        if self.timeout is not None and not self.timeout > 0:
            raise ConfigError(f"timeout={self.timeout} must be above 0 seconds, or None.")
