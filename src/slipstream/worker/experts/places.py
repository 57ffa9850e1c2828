"""Moves experts of a mixture between ranks, where each rank holds some of them.

`expert_balance` decides which. Two experts exchange their places in the router's output: every rank
swaps the router's rows, biases and corrections, and the two ranks that hold the experts exchange
their weights. Everything is written in place, after the queued steps, so graphs stay valid and no
step needs a lookup table.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from slipstream.kernels.experts.rows import (
    can_swap_outputs,
    expert_rows,
    layout,
    swap_outputs,
    swap_rows,
)
from slipstream.model.layers.feed_forward import MoE
from slipstream.model.layers.layer import Partition
from slipstream.worker.experts.balance import LayerSwap, rank_of_places

if TYPE_CHECKING:
    from torch import Tensor

    from slipstream.kernels.weights.forms import Linear
    from slipstream.model.decoder import Decoder
    from slipstream.worker.experts.load import ExpertLoad


@dataclass(frozen=True, slots=True)
class _Mixture:
    router: Linear
    numbers: list[Tensor]  # a correction, scales: [all experts] each
    weights: list[Tensor]  # [local experts, …] each


class ExpertPlaces:
    def __init__(self, decoder: Decoder, load: ExpertLoad, partition: Partition) -> None:
        """Collect the layers whose experts can move.

        All ranks of the group must construct this at the same time. A layer is left out unless its
        weights have the same layout on all ranks.
        """
        self._load, self._group = load, partition.group
        self.expert_at = load.expert_at
        own = {
            i: x.mlp
            for i, x in zip(decoder.spec.local_layers, decoder.layers, strict=True)
            if isinstance(x.mlp, MoE)
        }
        found = {i: _mixture(mlp) for i, mlp in own.items()}
        digests = [
            0 if found[i] is None else zlib.crc32(_layout(mlp).encode()) + 1
            for i, mlp in own.items()
        ]
        least = partition.group.least(*digests, *(-digest for digest in digests))
        agreed = [a == -b for a, b in zip(least[: len(own)], least[len(own) :], strict=True)]
        self._mixtures = {
            i: m
            for (i, m), same in zip(found.items(), agreed, strict=True)
            if same and m is not None
        }
        self._rank_of = {
            i: rank_of_places(own[i].spec.num_experts, partition.group.size).tolist()
            for i in self._mixtures
        }
        self.expert_bytes = max(
            (sum(x[0].nbytes for x in m.weights) for m in self._mixtures.values()), default=0
        )
        self._meet()

    @property
    def layers(self) -> frozenset[int]:
        """Layers whose experts can move."""
        return frozenset(self._mixtures)

    @torch.inference_mode()
    def swap(self, swaps: Sequence[LayerSwap]) -> None:
        """Swap experts between places. Layers of other stages are skipped.

        All ranks must do this between the same two steps.
        """
        for layer, a, b in swaps:
            if (mixture := self._mixtures.get(layer)) is None:
                continue
            swap_outputs(mixture.router, a, b)
            for numbers in mixture.numbers:
                swap_rows(numbers, a, b)
            self._load.swap(layer, a, b)
            self._swap_weights(mixture, self._rank_of[layer], a, b)

    def _swap_weights(self, mixture: _Mixture, rank_of: list[int], a: int, b: int) -> None:
        own, first = self._group.rank, rank_of.index(self._group.rank)
        if rank_of[a] == rank_of[b] == own:
            for x in mixture.weights:
                swap_rows(x, a - first, b - first)
        elif own in (rank_of[a], rank_of[b]):
            mine, other = (a, rank_of[b]) if rank_of[a] == own else (b, rank_of[a])
            for x in mixture.weights:
                self._group.swap(x[mine - first], other)

    def _meet(self) -> None:
        """Exchange one number with every rank.

        The communication library then sets up its connections, which takes time and memory.
        """
        rank, size = self._group.rank, self._group.size
        x = torch.zeros(1, device=self._group.device)
        for a in range(size if self._mixtures else 0):
            for b in range(a):
                if rank in (a, b):
                    self._group.swap(x, a + b - rank)


def _mixture(mlp: MoE) -> _Mixture | None:
    """Views of a mixture's weights through which experts can be exchanged; None if some weight does
    not allow it."""
    parts = [expert_rows(w, mlp.spec.num_local_experts) for w in (mlp.up, mlp.down)]
    if not can_swap_outputs(mlp.router) or any(part is None for part in parts):
        return None
    numbers = [x for x in (mlp.experts.correction, mlp.experts.scales) if x is not None]
    return _Mixture(mlp.router, numbers, [x for part in parts for x in part or ()])


def _layout(mlp: MoE) -> str:
    return "".join(layout(w, mlp.spec.num_local_experts) for w in (mlp.up, mlp.down))
