"""How long a forward pass will take, learnt from the passes before it."""

from __future__ import annotations

import copy

from epic_engine.model.spec import ModelSpec

__all__ = ["PassCost"]

# What is known before the first pass: a slow processor.
_FIRST_RATE = 5e10
# Weight of a pass against the one after it: about the last fifty count.
_DECAY = 0.98


class PassCost:
    """Seconds of a pass as a fixed part (reading the weights) and a part in proportion to the arithmetic.

    Least squares over past passes, older ones counting less.

    Parameters
    ----------
    spec
        Model shapes.
    parameters
        Weights that a row is multiplied with.
    """

    def __init__(self, spec: ModelSpec, parameters: int) -> None:
        self._row = 2.0 * parameters
        self._pair = 4.0 * spec.num_heads * spec.head_dim * spec.num_layers
        self._forget()

    def _forget(self) -> None:
        self._n = self._x = self._y = self._xx = self._xy = 0.0
        self._fixed = 0.0
        self._slope = 1 / _FIRST_RATE

    def fresh(self) -> PassCost:
        """One for the same model that has seen no pass."""
        new = copy.copy(self)
        new._forget()
        return new

    def seconds(self, rows: int, pairs: int) -> float:
        """Predicted duration.

        Parameters
        ----------
        rows
            Tokens computed.
        pairs
            (row, key) pairs of attention.
        """
        return self._fixed + self._slope * self._work(rows, pairs)

    def rows_within(self, seconds: float, keys: int) -> int:
        """Rows that read ``keys`` keys each and fit a duration; at least 1."""
        return max(int((seconds - self._fixed) / (self._slope * self._work(1, keys))), 1)

    def observe(self, rows: int, pairs: int, seconds: float) -> None:
        """Learn from a pass that has run."""
        x = self._work(rows, pairs)
        self._n = self._n * _DECAY + 1
        self._x = self._x * _DECAY + x
        self._y = self._y * _DECAY + seconds
        self._xx = self._xx * _DECAY + x * x
        self._xy = self._xy * _DECAY + x * seconds
        spread = self._n * self._xx - self._x * self._x
        slope = (self._n * self._xy - self._x * self._y) / spread if spread > 1e-6 * self._xx * self._n else 0.0
        fixed = (self._y - slope * self._x) / self._n
        if slope <= 0 or fixed < 0:  # too few or too equal passes to tell the two apart
            slope, fixed = self._y / self._x, 0.0
        self._slope, self._fixed = slope, fixed

    def _work(self, rows: int, pairs: int) -> float:
        return rows * self._row + pairs * self._pair
