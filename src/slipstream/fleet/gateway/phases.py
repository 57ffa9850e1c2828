"""Divides requests if pools have roles: prompts on one replica, answers on another.

A prefill replica computes a prompt and keeps its blocks (`POST /fleet/prefill`). The answering
replica copies them, and finds them as a cached prefix. It samples every token of the answer, so
that clients can't distinguish divided requests from others.

1. A request is divided if that costs clients fewer seconds: its time to the first token, plus its
   computing time for each stream that it delays where it runs. So short prompts, prompts that are
   cached, and prompts of a quiet fleet are computed where they are answered.
2. If a step fails, the request continues without the blocks, whose tokens are computed again.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence
from math import inf

import msgspec

from slipstream.fleet.gateway.members import Replica, Version

LOADING_SHARE = 0.05
"""Assumed ratio of the time to load a token's blocks and the time to compute it, before any measurement."""


class Prefilled(msgspec.Struct):
    """The answer of `POST /fleet/prefill`."""

    address: str
    num_prompt_tokens: int
    num_cached_tokens: int


def answering(version: Version, tried: Collection[str]) -> set[str]:
    """Replicas that generate answers. Replicas for prompts are included only if no other can.

    Those in `tried` are excluded.
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
    """Replicas that may compute a prompt for another one; empty if dividing costs more.

    Those in `out` are excluded.
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

    best = heapq.nsmallest(2, answers, key=loading)  # the prompt may be computed on another replica

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
    """Seconds to load a token's blocks from another replica, from recent measurements there."""
    stats = None if replica.load is None else replica.load.stats
    tiers = None if stats is None else stats.tiers
    if tiers is None or not (tiers.peer_hit_tokens and tiers.peer_bytes_per_s):
        return None
    return tiers.loaded_bytes / tiers.peer_hit_tokens / tiers.peer_bytes_per_s
