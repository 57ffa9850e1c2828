"""Prompts on one replica, answers on another, where pools have roles.

A prefill replica computes a prompt and keeps its blocks (`POST /fleet/prefill`). The replica that
answers takes them over, and finds them as a cached prefix. It draws every token of the answer, so a
request that is divided and one that is not look alike to their client.

1. A request is divided if that costs clients fewer seconds. What counts: the time to its first token,
   and the same computing once for each stream that it holds up where it runs. So short prompts,
   prompts that are cached, and prompts of a quiet fleet are computed where they are answered.
2. If anything fails on the way, the request goes on without the blocks, whose tokens are computed.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence
from math import inf

import msgspec

from slipstream.fleet.gateway.members import Replica, Version

LOADING_SHARE = 0.05
"""Time to load a token's blocks over the time to compute it, while nothing is measured."""


class Prefilled(msgspec.Struct):
    """The answer of `POST /fleet/prefill`."""

    address: str
    num_prompt_tokens: int
    num_cached_tokens: int


def answering(version: Version, tried: Collection[str]) -> set[str]:
    """Replicas that answer requests. Those that only compute prompts do so if no other can.

    Those that were `tried` can't.
    """
    own = {r.id for r in version.replicas.values() if r.spec.role != "prefill"}
    if any(version.replicas[id_].serves and id_ not in tried for id_ in own):
        return own
    return set(version.replicas)


def worth_dividing(
    version: Version,
    chains: Sequence[Sequence[bytes]],
    num_tokens: int,
    out: Collection[str],
    now: float,
    *,
    always: bool,
) -> set[str]:
    """Replicas that may compute a prompt for another one; empty if it costs less not to divide.

    None of those that are `out` is chosen.
    """
    size = max((r.block_size for r in version.replicas.values()), default=16)
    costs = version.router.costs(chains, num_tokens, now=now)
    streams = {id_: version.router.state(id_).running for id_ in costs}
    answers = [id_ for id_ in answering(version, ()).difference(out) if costs[id_].wait_s < inf]
    prompts = {
        r.id
        for r in version.replicas.values()
        if r.spec.role != "decode" and r.id not in out and costs[r.id].wait_s < inf
    }
    if not answers or not prompts:
        return set()

    def computing(id_: str) -> float:
        return costs[id_].wait_s + costs[id_].computing_s * (1 + streams[id_])

    def loading(id_: str) -> float:
        cost, each = costs[id_], loading_s(version.replicas[id_])
        return cost.wait_s + (
            LOADING_SHARE * cost.computing_s if each is None else each * cost.num_new
        )

    best = heapq.nsmallest(2, answers, key=loading)  # a prompt goes to another replica

    def divided(id_: str) -> float:
        target = next((one for one in best if one != id_), None)
        if target is None or costs[target].num_new < size:
            return inf
        return computing(id_) + loading(target)

    least = min(map(divided, prompts))
    if least < (inf if always else min(map(computing, answers))):
        return {id_ for id_ in prompts if divided(id_) < inf}
    return set()


def loading_s(replica: Replica) -> float | None:
    """Seconds to load a token's blocks from another replica, as measured there lately."""
    stats = None if replica.load is None else replica.load.stats
    tiers = None if stats is None else stats.tiers
    if tiers is None or not (tiers.peer_hit_tokens and tiers.peer_bytes_per_s):
        return None
    return tiers.loaded_bytes / tiers.peer_hit_tokens / tiers.peer_bytes_per_s
