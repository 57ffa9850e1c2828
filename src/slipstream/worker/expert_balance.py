"""Which experts change ranks so that no rank has much more to compute than others. No torch.

An expert's *place* is its number in the router's output. Rank r has the places that `Shard.dealt` gives it. Two experts change
ranks by exchanging their places, in the router as well as in the memory of the ranks, so a step costs nothing more.

With R ranks a step waits in each layer for the rank whose experts were chosen for most tokens. From there the best exchange is
searched for: the one after which the larger of the two ranks' loads is smallest. (DeepSeek's EPLB packs experts anew, and
holds copies of some; here they move one by one, and there are no copies.)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from slipstream.spec.model import ModelSpec, MoESpec
from slipstream.spec.parallel import Shard
from slipstream.stats import ExpertBalance, ExpertTokens

LOOK_EVERY = 128
"""Steps after which the load is looked at."""

KEPT = 0.5
"""Of the load seen before, at each look: what counts is the recent load."""

LEAST_CHOICES = 4096
"""Of experts, for each rank, in the recent load of a layer that is to be balanced. With fewer, ranks differ by chance."""

UNEVEN = 1.05
"""A layer is balanced from here on: the largest rank's load over the mean."""

GAIN = 0.01
"""An exchange lowers its rank's load by so much of the mean at least, lest near ones go to and fro."""

LAYERS_AT_ONCE = 8
"""In which exchanges are searched for at a look, in turns: 0.1 ms each, for which the next step's plan waits."""

MOVED_BYTES = 2**26
"""Of weights that a rank sends, and gets, at a look: a fraction of a millisecond between GPUs with NVLink, three over PCIe. One
exchange is made though it be larger."""

Floats: TypeAlias = npt.NDArray[np.float64]
Swap: TypeAlias = tuple[int, int]
"""Two places."""

LayerSwap: TypeAlias = tuple[int, int, int]
"""A layer, and two places of it."""


class Exchange(NamedTuple):
    """Places that are exchanged at once, and by how much less the rank with the most load has then, or the other one if that
    has more."""

    gain: float
    swaps: tuple[Swap, ...]


NO_EXCHANGE = Exchange(0.0, ())


def rank_of_places(num_experts: int, num_ranks: int) -> npt.NDArray[np.int64]:
    counts = [
        last - first
        for first, last in (Shard(r, num_ranks).dealt(num_experts) for r in range(num_ranks))
    ]
    return np.repeat(np.arange(num_ranks), counts)


def loads_of_ranks(load: Floats, rank_of: npt.NDArray[np.int64]) -> Floats:
    """Of the load by place."""
    return np.asarray(np.bincount(rank_of, load), np.float64)


def best_exchange(load: Floats, rank_of: npt.NDArray[np.int64], num_groups: int = 1) -> Exchange:
    """Of a layer with `load` by place. The places of a group are chosen together (`GroupLimit`), so experts stay with their
    group: two of one group are exchanged, or two whole groups."""
    by_rank, group_of = (
        loads_of_ranks(load, rank_of),
        np.arange(len(load)) * num_groups // len(load),
    )
    most = int(by_rank.argmax())
    own, others = np.flatnonzero(rank_of == most), np.flatnonzero(rank_of != most)
    given = load[own][:, None] - load[others][None, :]
    after = np.maximum(by_rank[most] - given, by_rank[rank_of[others]] + given)
    after[group_of[own][:, None] != group_of[others][None, :]] = np.inf
    i, j = np.unravel_index(after.argmin(), after.shape)
    gain, best = float(by_rank[most] - after[i, j]), NO_EXCHANGE
    if gain > 0:
        best = Exchange(gain, ((int(own[i]), int(others[j])),))
    if num_groups > 1:
        of_groups, is_on = (
            load.reshape(num_groups, -1),
            np.eye(len(by_rank))[rank_of].reshape(num_groups, -1, len(by_rank)),
        )
        brought = np.einsum(
            "bi,air->abr", of_groups, is_on
        )  # to each rank, if group b had the places of group a
        own_load = np.einsum("aar->ar", brought)
        both = (
            by_rank - own_load[:, None] - own_load[None, :] + brought + brought.transpose(1, 0, 2)
        )
        after = both.max(-1) + np.where(np.eye(num_groups), np.inf, 0.0)
        a, b = divmod(int(after.argmin()), num_groups)
        gain = float(by_rank[most] - after[a, b])
        if gain > best.gain:
            places = np.arange(len(load)).reshape(num_groups, -1)
            best = Exchange(gain, tuple(zip(places[a].tolist(), places[b].tolist(), strict=True)))
    return best


@dataclass(slots=True)
class _Layer:
    num_groups: int
    rank_of: npt.NDArray[np.int64]  # by place
    expert_at: npt.NDArray[np.int64]  # by place
    seen: npt.NDArray[np.int64]  # by expert, since the start
    load: Floats  # by expert, the recent one
    searched_at: int = 0  # the step at which an exchange was searched for last

    def by_rank(self) -> Floats:
        return loads_of_ranks(self.load[self.expert_at], self.rank_of)

    def take(self, counts: npt.NDArray[np.int64]) -> None:
        fresh = counts - self.seen if (counts >= self.seen).all() else counts  # they began anew
        self.seen, self.load = counts, KEPT * self.load + fresh

    @property
    def is_uneven(self) -> bool:
        """So much so, by enough tokens, that experts should move."""
        by_rank = self.by_rank()
        return bool(
            by_rank.sum() >= LEAST_CHOICES * len(by_rank)
            and by_rank.max() > UNEVEN * by_rank.mean()
        )

    def best(self) -> Exchange:
        """None whose gain is too small."""
        if not self.is_uneven:
            return NO_EXCHANGE
        found = best_exchange(self.load[self.expert_at], self.rank_of, self.num_groups)
        return found if found.gain > GAIN * self.by_rank().mean() else NO_EXCHANGE


@dataclass(slots=True)
class ExpertBalancer:
    """Knows where every expert is. It is told the load, and says which experts change places; it takes them as moved then."""

    spec: ModelSpec
    num_ranks: int
    stats: ExpertBalance = field(default_factory=ExpertBalance)  # as of the last look
    _steps: int = 0
    _layers: dict[int, _Layer] = field(default_factory=dict)

    def step(self) -> bool:
        """A step begins. Whether the load is to be looked at."""
        self._steps += 1
        return self._steps % LOOK_EVERY == 0

    def follow(self, load: ExpertTokens, expert_bytes: int) -> list[LayerSwap]:
        """By the tokens of each expert since the start, in some of the layers. `expert_bytes`: of one's weights."""
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
