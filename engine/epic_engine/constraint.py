"""What limits which tokens an answer may consist of."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor

from .config import SamplingParams
from .errors import ConfigError

__all__ = ["TokenConstraint", "check_constraint"]


@runtime_checkable
class TokenConstraint(Protocol):
    """Limits which tokens may come next.

    It has state: one object serves one generation. It must allow end tokens (the model's own, and the request's
    ``stop_token_ids``) where the text may end and nowhere else, so it has to know their ids from the start.
    """

    def mask(self, logits: Tensor) -> Tensor:
        """Forbid what may not come next.

        Parameters
        ----------
        logits
            ``(vocab,)`` float on the CPU, with penalties and biases applied.

        Returns
        -------
        Tensor
            The same, with forbidden tokens at minus infinity; may be the argument itself.
        """
        ...

    def advance(self, token_id: int) -> None:
        """Take note of the token that was drawn, end tokens included."""
        ...

    @property
    def finished(self) -> bool:
        """Whether nothing but an end token may follow; generation then ends without computing one."""
        ...


def check_constraint(constraint: object, params: SamplingParams) -> None:
    """Refuse what cannot constrain a generation with these settings.

    Raises
    ------
    ConfigError
        If it is no constraint, or comes with ``ignore_eos``.
    """
    if constraint is None:
        return
    if isinstance(constraint, type) or not isinstance(constraint, TokenConstraint):
        name = constraint.__name__ if isinstance(constraint, type) else type(constraint).__name__
        raise ConfigError(f"constraint is no TokenConstraint but {name}: give an object made for this generation.")
    if params.ignore_eos:
        raise ConfigError("ignore_eos goes on past the end, and a constraint sets the end: leave one of them out.")
