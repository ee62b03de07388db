"""Rotary embeddings as tables of unit complex numbers.

RoPE turns pairs of dimensions by an angle proportional to the position, so a pair is a complex number and the
rotation a multiplication (Su et al. 2021, section 3.2). The engine keeps queries and keys in one canonical order,
*pair-adjacent* (dimension 2i holds the real part of pair i, 2i + 1 the imaginary part), whatever order the model
uses: scores do not depend on the order, and one complex product replaces the usual six real operations.

How the model pairs its dimensions is not read from its configuration but observed: the model's own
``apply_rotary_pos_emb`` is applied to unit vectors. Frequencies and scaling come from the model's own rotary
module's forward, so Llama-3, linear and YaRN scaling, partial rotary and interleaved pairs need no code here.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from epic_engine.errors import UnsupportedModelError

__all__ = ["IdentityRotary", "PairLayout", "RotaryTable", "build_table", "observe_pairs"]

_ApplyRotary = Callable[..., tuple[Tensor, Tensor]]


class IdentityRotary(nn.Module):
    """Stands in for a model's rotary module: every angle is 0, so attention receives unrotated q and k.

    ``scale`` other than 1 multiplies rotated dimensions, which shows which layers rotate at all.
    """

    def __init__(self, width: int, scale: float = 1.0) -> None:
        super().__init__()
        self.width = width
        self.scale = scale

    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> tuple[Tensor, Tensor]:
        """Return cos = ``scale`` and sin = 0 of shape (batch, tokens, width), in the dtype of ``x``."""
        shape = (*position_ids.shape, self.width)
        return x.new_full(shape, self.scale), x.new_zeros(shape)


@dataclass(frozen=True)
class PairLayout:
    """How a model pairs the dimensions of one attention head.

    Attributes
    ----------
    order
        ``(head_dim,)`` int64: canonical dimension j is the model's dimension ``order[j]``. Rotated pairs come
        first, then dimensions that pass unrotated.
    cos_index, sin_index
        ``(pairs,)`` int64: which column of the rotary module's cos and sin turns each rotated pair.
    pairs
        Number of rotated pairs (fewer than ``head_dim / 2`` with partial rotary).
    """

    order: Tensor
    cos_index: Tensor
    sin_index: Tensor
    pairs: int

    @property
    def half_split(self) -> bool:
        """Whether pair i is dimensions i and i + head_dim / 2: the order a reshape alone can produce."""
        half = self.order.numel() // 2
        want = torch.stack([torch.arange(half), torch.arange(half) + half], dim=1).flatten()
        return bool(torch.equal(self.order.cpu(), want))

    @property
    def adjacent(self) -> bool:
        """Whether the model's own order is the canonical one already."""
        return bool(torch.equal(self.order.cpu(), torch.arange(self.order.numel())))


def find_apply_rotary(attention: nn.Module) -> _ApplyRotary:
    """The ``apply_rotary_pos_emb`` of the module's own modelling file.

    Raises
    ------
    UnsupportedModelError
        If there is none with the usual signature (q, k, cos, sin).
    """
    module = sys.modules[type(attention).__module__]
    function = getattr(module, "apply_rotary_pos_emb", None)
    if function is None:
        raise UnsupportedModelError(
            f"{type(attention).__name__} does not rotate queries and keys through apply_rotary_pos_emb, "
            "so its positions cannot be moved exactly. Models with rotary embeddings of the Llama kind are supported."
        )
    names = list(inspect.signature(function).parameters)[:4]
    if names != ["q", "k", "cos", "sin"]:
        raise UnsupportedModelError(
            f"{type(attention).__name__}'s rotary function takes ({', '.join(names)}, …) instead of (q, k, cos, sin): "
            "this kind of rotary embedding is not supported."
        )
    return function


def observe_pairs(apply_rotary: _ApplyRotary, head_dim: int, width: int) -> PairLayout:
    """Find pairs and frequencies by applying the model's rotation to unit vectors.

    Parameters
    ----------
    apply_rotary
        ``(q, k, cos, sin) -> (q', k')`` on tensors (batch, heads, tokens, dim).
    head_dim
        Dimensions of a head.
    width
        Last dimension of the rotary module's cos and sin.

    Raises
    ------
    UnsupportedModelError
        If the map is not a rotation of disjoint pairs.
    """
    eye = torch.eye(head_dim, dtype=torch.float32)[None, None]  # one token per unit vector
    ramp = torch.arange(1, width + 1, dtype=torch.float32).expand(1, head_dim, width)
    zero = torch.zeros(1, head_dim, width)
    diagonal = apply_rotary(eye, eye, ramp, zero)[0][0, 0]
    turned = apply_rotary(eye, eye, zero, ramp)[0][0, 0]
    problem = UnsupportedModelError(
        "the model's rotary function does not rotate disjoint pairs of dimensions, so it cannot be served exactly."
    )
    if not torch.equal(diagonal, torch.diag(diagonal.diagonal())):
        raise problem
    real, imaginary, cos_index, sin_index = [], [], [], []
    for a in range(head_dim):
        # Row a is where unit vector a goes under a quarter turn: to +b if a is the real part of a pair (a, b).
        images = torch.nonzero(turned[a]).flatten().tolist()
        if len(images) > 1:
            raise problem
        if images in ([], [a]) or turned[a, images[0]] < 0:  # passes, or is the imaginary part
            continue
        b = images[0]
        back = torch.nonzero(turned[b]).flatten().tolist()
        if back != [a] or turned[b, a] >= 0:
            raise problem
        real.append(a)
        imaginary.append(b)
        cos_index.append(int(diagonal[a, a]) - 1)
        sin_index.append(int(turned[a, b]) - 1)
    used = set(real) | set(imaginary)
    passing = [d for d in range(head_dim) if d not in used]
    if len(used) != 2 * len(real) or len(passing) % 2 or not real:
        raise problem
    # Without sin a passing dimension must come out as it went in, whatever cos is.
    if any(diagonal[d, d] != 1 or turned[d, d] != 1 for d in passing):
        raise problem
    pairs = torch.tensor(real), torch.tensor(imaginary)
    order = torch.cat([torch.stack(pairs, dim=1).flatten(), torch.tensor(passing, dtype=torch.int64)])
    return PairLayout(order, torch.tensor(cos_index), torch.tensor(sin_index), len(real))


@dataclass(frozen=True)
class RotaryTable:
    """Rotation of every position, for layers that share one set of frequencies.

    Attributes
    ----------
    factors
        ``(max_len, head_dim / 2)`` complex: ``scale * exp(i * angle)`` per position and pair; 1 where the
        dimensions pass unrotated. YaRN's attention factor is part of it, so it enters a score once through q
        and once through k, as in the model.
    """

    factors: Tensor

    def rows(self, positions: Tensor) -> Tensor:
        """Factors of the given positions, ``(n, head_dim / 2)``."""
        return self.factors.index_select(0, positions)


def build_table(
    rotary: nn.Module,
    layout: PairLayout,
    apply_rotary: _ApplyRotary,
    max_len: int,
    device: torch.device,
    dtype: torch.dtype,
    layer_type: str | None = None,
) -> RotaryTable:
    """Tabulate the model's own rotary module over positions 0 … ``max_len - 1``.

    The module is called once with all positions, which freezes length-dependent scaling (``dynamic``,
    ``longrope``) at ``max_len``.

    Raises
    ------
    UnsupportedModelError
        If the table does not reproduce the model's own rotation.
    """
    buffer = next(iter(rotary.buffers()), None)
    at = buffer.device if buffer is not None else device
    positions = torch.arange(max_len, device=at)[None]
    probe = torch.zeros(1, 1, 1, dtype=torch.float32, device=at)
    extra = {} if layer_type is None else {"layer_type": layer_type}
    with torch.no_grad():
        cos, sin = (t[0].float().cpu() for t in rotary(probe, positions, **extra))
    wide = torch.complex128 if dtype == torch.float64 else torch.complex64
    real = torch.float64 if dtype == torch.float64 else torch.float32
    head_dim = layout.order.numel()
    factors = torch.ones(max_len, head_dim // 2, dtype=wide)
    factors[:, : layout.pairs] = torch.complex(cos[:, layout.cos_index].to(real), sin[:, layout.sin_index].to(real))
    # The last word has the model's own function: rotate random vectors at a few positions both ways.
    sample = torch.linspace(0, max_len - 1, steps=min(max_len, 16)).long()
    x = torch.randn(1, 1, len(sample), head_dim, generator=torch.Generator().manual_seed(0))
    want = apply_rotary(x, x, cos[sample][None], sin[sample][None])[0][0, 0, :, layout.order]
    canonical = torch.view_as_complex(x[0, 0][:, layout.order].reshape(len(sample), -1, 2).to(real))
    got = torch.view_as_real(canonical * factors[sample]).flatten(1)
    error = (got - want).abs().max().item()
    if error > 1e-5 * max(1.0, want.abs().max().item()):
        raise UnsupportedModelError(
            f"the tabulated rotary embedding differs from the model's own by {error:.1e}: not supported."
        )
    return RotaryTable(factors.to(device))
