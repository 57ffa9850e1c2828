"""Where the passes of a chain of drafts compute. `worker/chain_graphs.py` runs the chains."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ChainPlaces:
    """A chain of K drafts of S sequences computes tokens [T]: in its first pass [again, S], then padding up to a multiple of 4,
    then [K − 1, room], one a sequence in each pass. `room` is S up to a multiple of 4. Tensors are int32."""

    rows: (
        Tensor  # [T]: the null row for padding, and behind the first pass where no draft is wanted
    )
    positions: Tensor  # [T]
    seq_lens: Tensor  # [T]: tokens that end with each
    draft_rows: Tensor  # [K · S]: where drafts go; the null row where none is wanted
    draft_positions: Tensor  # [K · S]
    begin: int  # where the second pass begins
    room: int


def num_places(size: int, room: int, num_drafts: int, num_again: int) -> tuple[int, int]:
    """(where the second pass begins, T)"""
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
    """`OpSet.chain_places`"""
    rows, known, wanted, sampled = inputs.unbind(0)
    null = tokens.shape[0] - 1
    steps = torch.arange(num_drafts, dtype=torch.int32, device=rows.device)
    # Of the tokens drawn behind the known ones those count that are right drafts, and the one behind them.
    places = (known[:, None] + 1 + steps).clamp(max=tokens.shape[1] - 1)
    right = (tokens[rows[:, None], places] == kept[rows, :num_drafts]) & (
        steps < sampled[:, None] - 1
    )
    last = known + (right.int().cumprod(1).sum(1) + 1).minimum(sampled).int()
    # A sequence has no blocks beyond the drafts that it wants, and their places may be beyond the context.
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
    positions[begin:] = (
        (places[1:] - 1 - first).clamp(min=0).flatten()
    )  # a token's keys stand `first` positions before it
    drafts = own[:, :size].flatten(), places[:, :size].flatten()
    return ChainPlaces(all_rows, positions, positions + 1, *drafts, begin, room)
