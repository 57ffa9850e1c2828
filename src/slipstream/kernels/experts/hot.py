"""Holds the most often chosen experts of a host's mixture on a device as well.

Their weights are dense on the device. The set follows the measured load, a few experts at a time.
All tensors stay in place, so graphs stay valid.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slipstream.kernels.arrays import to_tensor
from slipstream.kernels.cpu.program.moe import NativeExperts
from slipstream.kernels.cpu.unpack import unpack
from slipstream.kernels.layouts import Experts
from slipstream.kernels.weights.forms import Linear
from slipstream.platform import Platform

MAX_MOVES = 4
"""Maximum experts swapped at a time, which takes some milliseconds of copying."""

GAIN = 1.25
"""Minimum ratio of load for an expert to replace another, so that similar ones don't alternate."""

KEPT = 0.5
"""Share of the earlier load that is kept at each update, so that recent load counts more."""


class HotExperts:
    """The `count` experts of a layer on the device. `experts` has them, numbered by place.

    `place_of`, int32 [X], is each expert's place, or `count` if only the host has it.
    """

    def __init__(self, source: Experts, count: int, platform: Platform, dtype: torch.dtype) -> None:
        up, down = source.up, source.down
        assert isinstance(up, NativeExperts)
        assert isinstance(down, NativeExperts)
        self._source, self._platform, self.count = (up, down), platform, count
        num_experts = source.spec.num_experts
        self.held: list[int] = [-1] * count  # by place
        self.place_of = torch.full(
            (source.spec.num_choices,), count, dtype=torch.int32, device=platform.device
        )
        self._weights = [
            torch.zeros(count, w.rows, w.inner, dtype=dtype, device=platform.device)
            for w in (up, down)
        ]
        self._biases = [
            None
            if w.bias is None
            else torch.zeros(count, w.rows, dtype=dtype, device=platform.device)
            for w in (up, down)
        ]
        own = [
            Linear(weight=weight.flatten(0, 1), bias=None if bias is None else bias.flatten())
            for weight, bias in zip(self._weights, self._biases, strict=True)
        ]
        self.experts = Experts(own[0], own[1], dataclasses.replace(source.spec, held=(0, count)))
        self._seen = np.zeros(num_experts, np.int64)
        self._load = np.zeros(num_experts)
        self._move({place: place for place in range(count)})

    @property
    def num_bytes(self) -> int:
        return sum(x.nbytes for x in (*self._weights, *self._biases) if x is not None)

    def follow(self, counts: Sequence[int]) -> int:
        """Replaces experts on the device by others that were chosen more often lately. `counts` are
        those since the start. Returns the number of replaced experts."""
        now = np.asarray(counts[: len(self._seen)], np.int64)
        # if smaller, the counts were reset
        fresh = now - self._seen if (now >= self._seen).all() else now
        self._seen, self._load = now, KEPT * self._load + fresh
        moves = best_moves(self._load, self.held)
        self._move(moves)
        return len(moves)

    def split(self, weights: Tensor, chosen: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Splits a choice of experts [T, k]: the host's (−1 for others), and the device's as
        (weights, places in `experts`)."""
        places = self.place_of[chosen.long()]
        here = places < self.count
        return chosen.masked_fill(here, -1), (weights.masked_fill(~here, 0.0), places)

    def _move(self, moves: dict[int, int]) -> None:
        """Copies experts to places on the device. `moves` is {place: expert}."""
        if not moves:
            return
        for place, expert in moves.items():
            self.held[place] = expert
            for w, weight, bias in zip(self._source, self._weights, self._biases, strict=True):
                start = 0
                for part in w.parts:
                    own = part.of(expert).data
                    data = to_tensor(own).to(self._platform.device, non_blocking=True)
                    unpack(data[None], part, weight[place : place + 1, start : start + part.rows])
                    start += part.rows
                if bias is not None:
                    assert w.bias is not None
                    bias[place].copy_(
                        torch.as_tensor(w.bias)[expert * w.rows : (expert + 1) * w.rows]
                    )
        places: npt.NDArray[np.int32] = np.full(len(self.place_of), self.count, np.int32)
        places[self.held] = np.arange(self.count)
        self.place_of.copy_(self._platform.upload(places))


def best_moves(load: npt.NDArray[np.float64], held: Sequence[int]) -> dict[int, int]:
    """Returns the swaps as {place: new expert}: the most chosen experts outside `held` replace the
    least chosen ones inside. There are at most `MAX_MOVES`, each with a load ratio above `GAIN`.
    """
    outside = np.delete(np.arange(len(load)), held)
    coming = outside[np.argsort(-load[outside], kind="stable")]
    leaving = np.argsort(load[list(held)], kind="stable")
    pairs = list(zip(coming.tolist(), leaving.tolist(), strict=False))[:MAX_MOVES]
    return {place: expert for expert, place in pairs if load[expert] > GAIN * load[held[place]]}
