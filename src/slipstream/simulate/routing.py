"""Chooses the replica for a request in simulations, from the open requests and the prefixes sent to
each. No torch, no clock.

  round-robin    each replica in turn
  least-loaded   the one with the fewest open requests
  rendezvous     the highest hash of (first block of the prompt, replica) among those that are not
                 overfull (Thaler and Ravishankar 1998; bounded loads: Mirrokni, Thorup and
                 Zadimoghaddam 2018)
  longest-hit    the one that was sent the longest part of the prompt before, among those that are
                 not overfull

The last two keep requests with one prefix together, where its blocks are cached. A replica is
overfull with more than `BALANCE` times the mean of open requests, plus one. A request without a
shared prefix goes to the least loaded replica.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from hashlib import blake2b
from itertools import count
from typing import Literal, TypeAlias

RouterName: TypeAlias = Literal["round-robin", "least-loaded", "rendezvous", "longest-hit"]
Router: TypeAlias = Callable[[Sequence[int], Sequence[int]], int]
"""Function that chooses a replica: (numbers of the prompt's first blocks, open requests of each
replica) → index of the replica."""

BALANCE = 1.25


def make_router(name: RouterName, num_replicas: int, num_blocks: int) -> Router:
    """Make a router. A replica's cache is assumed to hold `num_blocks` blocks of prefixes."""
    if name == "round-robin":
        turn = count()
        return lambda prefix, num_open: next(turn) % num_replicas
    if name == "rendezvous":
        return rendezvous
    if name == "longest-hit":
        return LongestHit(num_replicas, num_blocks)
    return least_loaded


def least_loaded(prefix: Sequence[int], num_open: Sequence[int]) -> int:
    return min(range(len(num_open)), key=num_open.__getitem__)


def not_overfull(num_open: Sequence[int]) -> list[int]:
    most = BALANCE * sum(num_open) / len(num_open) + 1
    return [i for i, number in enumerate(num_open) if number <= most]


def rendezvous(prefix: Sequence[int], num_open: Sequence[int]) -> int:
    if not prefix:
        return least_loaded(prefix, num_open)
    return max(
        not_overfull(num_open),
        key=lambda i: blake2b(f"{prefix[0]} {i}".encode(), digest_size=8).digest(),
    )


class LongestHit:
    """Routes to the replica with the longest cached prefix.

    It remembers the latest `num_blocks` prefix blocks sent to each replica.
    """

    def __init__(self, num_replicas: int, num_blocks: int) -> None:
        self._sent: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(num_replicas)]
        self._num_blocks = max(1, num_blocks)

    def __call__(self, prefix: Sequence[int], num_open: Sequence[int]) -> int:
        keys, key = [], 0
        for number in prefix:
            key = hash((key, number))
            keys.append(key)
        chosen = max(not_overfull(num_open), key=lambda i: (self._hit(i, keys), -num_open[i]))
        sent = self._sent[chosen]
        for key in reversed(keys):  # the first block is touched last, so it is evicted last
            sent[key] = None
            sent.move_to_end(key)
        while len(sent) > self._num_blocks:
            sent.popitem(last=False)
        return chosen

    def _hit(self, replica: int, keys: Sequence[int]) -> int:
        sent = self._sent[replica]
        return next((i for i, key in enumerate(keys) if key not in sent), len(keys))
