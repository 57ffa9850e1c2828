"""Positions, rows and slots of the tokens that each pass of a draft chain computes.
`worker/graphs/chain_graphs.py` runs the chains."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ChainPlaces:
    """Inputs of a chain of K drafts for S sequences, which computes tokens [T].

    1. The first pass has `num_again` tokens of each sequence, [num_again, S], padded to a multiple
       of 4.
    2. The other passes have [K − 1, room], one token per sequence in each pass. `room` is S padded
       to a multiple of 4.

    Tensors are int32.
    """

    rows: Tensor  # [T]; the null row for padding, and after pass 1 where no draft is wanted
    positions: Tensor  # [T]
    seq_lens: Tensor  # [T]: length of the sequence up to and including the token
    # [K · S]: rows that drafts are written to; the null row where none is wanted
    draft_rows: Tensor
    draft_positions: Tensor  # [K · S]
    begin: int  # start of the second pass
    room: int


def num_places(size: int, room: int, num_drafts: int, num_again: int) -> tuple[int, int]:
    """Returns (index of the second pass's first token, number of tokens T of all passes)."""
    begin = -(-num_again * size // 4) * 4
    return begin, begin + (num_drafts - 1) * room


def chain_places(
    tokens: Tensor,
    kept: Tensor,
    inputs: Tensor,
    *,
    num_drafts: int,
    size: int,
    num_again: int,
    first: int,
) -> ChainPlaces:
    """Compute the positions and cache slots of a chain of `num_drafts` drafts for `size` sequences.

    `inputs` int32 [4, room], where room is `size` padded to a multiple of 4, has for each
    sequence: its row, the position of its last known token, its number of drafts, and
    the number of tokens sampled after the known ones. `kept` int32 [R, C] has the last drafts of
    the rows of `tokens` int32 [R, L], the last of which is the null row. The first pass
    computes `num_again` tokens of each sequence. A token's keys and values are `first`
    positions before it.
    """
    rows, known, wanted, sampled = inputs.unbind(0)
    null = tokens.shape[0] - 1
    steps = torch.arange(num_drafts, dtype=torch.int32, device=rows.device)
    # Of the tokens drawn after the known ones, the correct drafts and the token after them count.
    places = (known[:, None] + 1 + steps).clamp(max=tokens.shape[1] - 1)
    right = (tokens[rows[:, None], places] == kept[rows, :num_drafts]) & (
        steps < sampled[:, None] - 1
    )
    last = known + (right.int().cumprod(1).sum(1) + 1).minimum(sampled).int()
    # A sequence has no blocks beyond the drafts that it wants, and further positions may exceed the
    # context.
    idle = wanted <= steps[:, None]
    own = rows.expand_as(idle).masked_fill(idle, null)
    places = (last + 1 + steps[:, None]).masked_fill(idle, 0)

    room = inputs.shape[1]
    begin, total = num_places(size, room, num_drafts, num_again)
    all_rows, positions = (
        torch.zeros(total, dtype=torch.int32, device=rows.device) for _ in range(2)
    )
    again = torch.arange(num_again, dtype=torch.int32, device=rows.device)[:, None]
    count = num_again * size
    all_rows[:count] = rows[:size].repeat(num_again)
    all_rows[count:begin] = null
    positions[:count] = (last[:size] - (num_again - 1 + first) + again).flatten()
    all_rows[begin:] = own[1:].flatten()
    # a token's keys are `first` positions before it
    positions[begin:] = (places[1:] - 1 - first).clamp(min=0).flatten()
    drafts = own[:, :size].flatten(), places[:, :size].flatten()
    return ChainPlaces(all_rows, positions, positions + 1, *drafts, begin, room)
