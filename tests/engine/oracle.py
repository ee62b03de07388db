"""An independent oracle for linked prompts: one forward pass of the untouched Hugging Face model.

Works from a plain description of the prompt, without any of the engine's layout code. Stale copies of chunks and the
tokens that are computed stand as separate tokens in one sequence, told apart by a 4-D mask and explicit positions.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Piece:
    """A segment of a prompt: plain tokens (``recompute=None``) or a chunk with the slots that are recomputed."""

    ids: tuple[int, ...]
    recompute: frozenset[int] | None = None
    context: tuple[int, ...] = ()


def untouched(model: Any, dtype: torch.dtype | None = None, freeze_at: int | None = None) -> Any:
    """A copy of the model with eager attention; length-dependent rotary scaling seen once at ``freeze_at``."""
    twin = copy.deepcopy(model).eval()
    twin.set_attn_implementation("eager")
    if dtype is not None:
        twin = twin.to(dtype)
    if freeze_at is not None:
        rotary = next(m for n, m in twin.named_modules() if n.endswith("rotary_emb"))
        places = torch.arange(freeze_at)[None]
        cos, sin = rotary(torch.zeros(1, 1, 1), places)

        def tabulated(x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return cos[0][position_ids].to(x.dtype), sin[0][position_ids].to(x.dtype)

        rotary.forward = tabulated
    return twin


@torch.no_grad()
def plain_logits(model: Any, ids: list[int]) -> torch.Tensor:
    """Logits of an ordinary forward pass, ``(tokens, vocab)``."""
    return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


def linked_logits(model: Any, pieces: list[Piece], damp: tuple[float, int] = (0.0, 0)) -> torch.Tensor:
    """Logits of the computed tokens, in order of position; the prompt's last token is always computed.

    ``damp`` lowers what computed tokens give to the first slots of stale copies that are not the prompt's first token.
    """
    return _one_forward(model, pieces, damp)[0]


@torch.no_grad()
def stale_attention(model: Any, pieces: list[Piece], voters: int, layers: range) -> dict[int, torch.Tensor]:
    """Most that a head of the last ``voters`` computed tokens pays to each stale slot, by piece; summed over layers."""
    _, attentions, groups, contexts = _one_forward(model, pieces, (0.0, 0), attentions=True)
    mass = sum(attentions[layer][0, :, -voters:].amax(dim=(0, 1)) for layer in layers)
    found = {}
    for number in sorted(set(groups) - {-1}):
        at = [i for i, group in enumerate(groups) if group == number][contexts[number] :]
        found[number] = mass[at]
    return found


@torch.no_grad()
def _one_forward(model: Any, pieces: list[Piece], damp: tuple[float, int], attentions: bool = False) -> Any:
    total = sum(len(p.ids) for p in pieces)
    ids: list[int] = []
    places: list[int] = []
    groups: list[int] = []  # which stale copy a token belongs to; -1 for computed tokens
    live: list[bool] = []  # whether computed tokens may read it
    lowered: list[bool] = []
    computed: list[tuple[int, int]] = []
    at = 0
    for number, piece in enumerate(pieces):
        chosen = set(range(len(piece.ids))) if piece.recompute is None else set(piece.recompute)
        if at + len(piece.ids) == total:
            chosen.add(len(piece.ids) - 1)
        if piece.recompute is not None:
            # The context stands right before the chunk, as far as distances go; only the chunk itself sees it.
            for back, token in enumerate(reversed(piece.context), start=1):
                ids.append(token)
                places.append(at - back)
                groups.append(number)
                live.append(False)
                lowered.append(False)
            for slot, token in enumerate(piece.ids):
                ids.append(token)
                places.append(at + slot)
                groups.append(number)
                live.append(slot not in chosen)
                lowered.append(slot < damp[1] and at + slot > 0)
        computed += [(at + slot, token) for slot, token in enumerate(piece.ids) if slot in chosen]
        at += len(piece.ids)
    for place, token in computed:
        ids.append(token)
        places.append(place)
        groups.append(-1)
        live.append(True)
        lowered.append(False)
    shift = -min(0, *places)  # RoPE sees distances only, so all may move together
    where, group, alive = torch.tensor(places), torch.tensor(groups), torch.tensor(live)
    before = where[None, :] <= where[:, None]
    stale = (group[:, None] >= 0) & (group[None, :] == group[:, None])
    fresh = (group[:, None] < 0) & alive[None, :]
    visible = before & (stale | fresh)
    dtype = next(model.parameters()).dtype
    mask = torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, torch.finfo(dtype).min)
    mask -= damp[0] * ((group[:, None] < 0) & torch.tensor(lowered)[None, :] & visible).to(dtype)
    out = model(
        input_ids=torch.tensor([ids]),
        position_ids=(where + shift)[None],
        attention_mask=mask[None, None],
        use_cache=False,
        output_attentions=attentions,
    )
    logits = out.logits[0, -len(computed) :]
    return logits, out.attentions, groups, [len(p.context) for p in pieces]
