"""Decides which experts change ranks, to balance the ranks' load.

No torch. An expert's *place* is its index in the router's output. Rank r has the places in the
range `Shard.dealt`. Two experts change ranks by exchanging places, in the router and in the ranks'
memory, at no additional cost per step.

In each layer, a step waits for the rank whose experts got the most tokens. The search finds the
best exchange with that rank: the one after which the larger of the two ranks' loads is smallest.
(DeepSeek's EPLB repacks all experts and replicates some. Here experts move one at a time, without
replicas.)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from slipstream.messages.stats import ExpertBalance, ExpertTokens
from slipstream.spec.model import ModelSpec, MoESpec
from slipstream.spec.parallel import Shard

LOOK_EVERY = 128
"""Steps between two checks of the load."""

KEPT = 0.5
"""Factor applied to the earlier load at each check, since only the recent load matters."""

MIN_CHOICES = 4096
"""Minimum expert choices per rank in a layer's recent load. With fewer, ranks differ by chance."""

UNEVEN = 1.05
"""Ratio of the largest rank load to the mean above which a layer is unbalanced."""

GAIN = 0.01
"""Minimum gain of an exchange as a fraction of the mean load.

It keeps near-equal experts from swapping forever.
"""

LAYERS_AT_ONCE = 8
"""Layers searched per check, in turns. A search takes 0.1 ms, and the next step's plan waits for it.
"""

MOVED_BYTES = 2**26
"""Maximum bytes of weights that a rank sends and receives per check.

This takes a fraction of a millisecond between GPUs with NVLink, and three over PCIe. One exchange
is made even if it is larger.
"""

Floats: TypeAlias = npt.NDArray[np.float64]
Swap: TypeAlias = tuple[int, int]
"""A pair of places whose experts are exchanged."""

LayerSwap: TypeAlias = tuple[int, int, int]
"""(layer, place, place): the experts at two places of a layer to exchange."""


class PlaceSwap(NamedTuple):
    """Places whose experts are swapped together.

    `gain`: decrease of the larger load of the two ranks.
    """

    gain: float
    swaps: tuple[Swap, ...]


NO_EXCHANGE = PlaceSwap(0.0, ())


def rank_of_places(num_experts: int, num_ranks: int) -> npt.NDArray[np.int64]:
    counts = [
        last - first
        for first, last in (Shard(r, num_ranks).dealt(num_experts) for r in range(num_ranks))
    ]
    return np.repeat(np.arange(num_ranks), counts)


def loads_of_ranks(load: Floats, rank_of: npt.NDArray[np.int64]) -> Floats:
    """Sums the load by place to the load by rank."""
    return np.asarray(np.bincount(rank_of, load), np.float64)


def best_exchange(load: Floats, rank_of: npt.NDArray[np.int64], num_groups: int = 1) -> PlaceSwap:
    """Best exchange in a layer with `load` by place.

    The places of a group are chosen together (`GroupLimit`), so experts stay in their group: either
    two experts of one group are exchanged, or two whole groups.
    """
    by_rank = loads_of_ranks(load, rank_of)
    group_of = np.arange(len(load)) * num_groups // len(load)
    most = int(by_rank.argmax())
    own, others = np.flatnonzero(rank_of == most), np.flatnonzero(rank_of != most)
    given = load[own][:, None] - load[others][None, :]
    after = np.maximum(by_rank[most] - given, by_rank[rank_of[others]] + given)
    after[group_of[own][:, None] != group_of[others][None, :]] = np.inf
    i, j = np.unravel_index(after.argmin(), after.shape)
    gain, best = float(by_rank[most] - after[i, j]), NO_EXCHANGE
    if gain > 0:
        best = PlaceSwap(gain, ((int(own[i]), int(others[j])),))
    if num_groups > 1:
        of_groups = load.reshape(num_groups, -1)
        is_on = np.eye(len(by_rank))[rank_of].reshape(num_groups, -1, len(by_rank))
        # [a, b, rank]: load of each rank if group b had the places of group a
        brought = np.einsum("bi,air->abr", of_groups, is_on)
        own_load = np.einsum("aar->ar", brought)
        both = (
            by_rank - own_load[:, None] - own_load[None, :] + brought + brought.transpose(1, 0, 2)
        )
        after = both.max(-1) + np.where(np.eye(num_groups), np.inf, 0.0)
        a, b = divmod(int(after.argmin()), num_groups)
        gain = float(by_rank[most] - after[a, b])
        if gain > best.gain:
            places = np.arange(len(load)).reshape(num_groups, -1)
            best = PlaceSwap(gain, tuple(zip(places[a].tolist(), places[b].tolist(), strict=True)))
    return best


@dataclass(slots=True)
class _Layer:
    num_groups: int
    rank_of: npt.NDArray[np.int64]  # rank of each place
    expert_at: npt.NDArray[np.int64]  # expert at each place
    seen: npt.NDArray[np.int64]  # tokens by expert since the start
    load: Floats  # recent load by expert
    searched_at: int = 0  # step of the last search for an exchange

    def by_rank(self) -> Floats:
        return loads_of_ranks(self.load[self.expert_at], self.rank_of)

    def take(self, counts: npt.NDArray[np.int64]) -> None:
        counts = counts[: len(self.load)]  # without experts that have no weights
        # otherwise the counts were reset
        fresh = counts - self.seen if (counts >= self.seen).all() else counts
        self.seen, self.load = counts, KEPT * self.load + fresh

    @property
    def is_uneven(self) -> bool:
        """True if the loads differ enough, over enough tokens, to move experts."""
        by_rank = self.by_rank()
        return bool(
            by_rank.sum() >= MIN_CHOICES * len(by_rank) and by_rank.max() > UNEVEN * by_rank.mean()
        )

    def best(self) -> PlaceSwap:
        """Finds a layer's best exchange; `NO_EXCHANGE` if its gain is too small."""
        if not self.is_uneven:
            return NO_EXCHANGE
        found = best_exchange(self.load[self.expert_at], self.rank_of, self.num_groups)
        return found if found.gain > GAIN * self.by_rank().mean() else NO_EXCHANGE


@dataclass(slots=True)
class ExpertBalancer:
    """Tracks where every expert is. Given the load, it decides which experts change places.

    It assumes that the exchanges are then carried out.
    """

    spec: ModelSpec
    num_ranks: int
    stats: ExpertBalance = field(default_factory=ExpertBalance)  # statistics as of the last check
    _steps: int = 0
    _layers: dict[int, _Layer] = field(default_factory=dict)

    def step(self) -> bool:
        """Count a step. True if it is time to check the load."""
        self._steps += 1
        return self._steps % LOOK_EVERY == 0

    def follow(self, load: ExpertTokens, expert_bytes: int) -> list[LayerSwap]:
        """Decide exchanges from the tokens of each expert since the start, given for some layers.

        `expert_bytes` is the size of one expert's weights.
        """
        for i, counts in load:
            self._layer(i).take(np.asarray(counts, np.int64))
        uneven = sorted(
            (i for i, _ in load if self._layers[i].is_uneven),
            key=lambda i: self._layers[i].searched_at,
        )
        best = {i: self._layers[i].best() for i in uneven[:LAYERS_AT_ONCE]}
        for i in best:
            self._layers[i].searched_at = self._steps
        swaps, num_moved = list[LayerSwap](), 0
        room = max(1, MOVED_BYTES // max(1, expert_bytes))
        while best:
            i = max(best, key=lambda layer: best[layer].gain)
            wanted = best[i].swaps
            if not wanted or (swaps and len(swaps) + len(wanted) > room):
                break
            swaps += [(i, a, b) for a, b in wanted]
            layer = self._layers[i]
            for a, b in wanted:
                layer.expert_at[[a, b]] = layer.expert_at[[b, a]]
                num_moved += 2 * int(layer.rank_of[a] != layer.rank_of[b])
            best[i] = layer.best()
        by_rank = [layer.by_rank() for layer in self._layers.values()]
        mean = sum(float(x.mean()) for x in by_rank)
        imbalance = sum(float(x.max()) for x in by_rank) / mean if mean else 1.0
        self.stats = ExpertBalance(
            moved_total=self.stats.moved_total + num_moved, rank_imbalance=imbalance
        )
        return swaps

    def home(self) -> list[LayerSwap]:
        """Swaps that bring every expert back to its original position, whose index is the expert's
        id."""
        swaps = list[LayerSwap]()
        for i, layer in self._layers.items():
            at = layer.expert_at
            for place in range(len(at)):
                if (other := int(np.flatnonzero(at == place)[0])) != place:
                    at[[place, other]] = at[[other, place]]
                    swaps.append((i, place, other))
        return swaps

    def _layer(self, i: int) -> _Layer:
        if i not in self._layers:
            m = self.spec.layers[i].mlp
            assert isinstance(m, MoESpec)
            n, groups = m.num_experts, 1 if m.groups is None else m.groups.num_groups
            unmoved, unseen = np.arange(n), np.zeros(n, np.int64)
            self._layers[i] = _Layer(
                groups, rank_of_places(n, self.num_ranks), unmoved, unseen, np.zeros(n)
            )
        return self._layers[i]
