"""Replicas that Ray Serve runs, as members of the fleet: which ones exist, how many are wanted, and when a
rollout is complete.

Serve starts and stops replicas, so the head has no tasks for them (`fleet.replicas.on_ray` sends the commands
to Serve). A replica is a member from its first report that it serves until its reports stop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
import time
from collections import defaultdict, deque
from collections.abc import Callable, Coroutine
from typing import Any

from slipstream.fleet.config import Fleet, PoolSpec, pools
from slipstream.fleet.gateway.members import Members, Replica
from slipstream.fleet.replicas.on_ray import RayCluster

logger = logging.getLogger("slipstream.fleet")

_FOLLOW_S = 0.25


class RayReplicas:
    """Tracks the replicas on Ray. `started` is called with a pool and the seconds that a replica
    took to start. `spawn` starts a task in the background."""

    def __init__(
        self,
        fleet: Fleet,
        members: Members,
        cluster: RayCluster,
        tls: Callable[[], ssl.SSLContext | None],
        key: str,
        started: Callable[[str, float], None],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self.fleet, self._members, self._cluster = fleet, members, cluster
        self._tls, self._key, self._started, self._spawn = tls, key, started, spawn
        self.followed: dict[str, Replica] = {}
        self._counts: dict[str, int] = {}  # wanted number, by pool
        # by pool: when each replica that does not serve yet was ordered
        self._ordered: dict[str, deque[float]] = {}
        self._ordering: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    # --- Who is there -------------------------------------------------------------------------------------------------

    async def follow(self) -> None:
        """Track replicas as they appear and disappear, until cancelled."""
        while True:
            try:
                await self._look()
            except (
                Exception
            ):  # the cluster may be unreachable for a while; serving replicas continue
                logger.exception("Ray does not tell which replicas there are")
            await asyncio.sleep(_FOLLOW_S)

    async def _look(self) -> None:
        found = await self._cluster.replicas()
        specs = {spec.key: spec for spec in pools(self.fleet)}
        for name, (pool, address) in found.items():
            spec = specs.get(pool)
            version = None if spec is None else self._members.version(spec.model, spec.version)
            if name not in self.followed and spec is not None and version is not None:
                self.followed[name] = Replica(name, spec, address, version, self._tls(), self._key)
                version.add(self.followed[name])
                self._spawn(self._until_heard(self.followed[name]))
        for name in self.followed.keys() - found.keys():
            self._spawn(self._let_end(self.followed.pop(name)))
        for versions in self._members.models.values():
            for version in versions:
                version.starting.clear()
        for spec in specs.values():
            if (version := self._members.version(spec.model, spec.version)) is not None:
                version.starting |= {
                    f"{spec.key}/{i + 1} to come" for i in range(self.numbers_of(spec)[1])
                }

    async def _until_heard(self, replica: Replica) -> None:
        while not replica.heard:
            if replica.id not in self.followed:
                return
            await asyncio.sleep(0.01)
        if ordered := self._ordered.get(replica.spec.key):
            seconds = time.monotonic() - ordered.popleft()
            logger.info("replica %s serves after %.1f s", replica.id, seconds)
            self._started(replica.spec.key, seconds)

    async def _let_end(self, replica: Replica) -> None:
        """Wait for the replica's requests to finish. A replica that died has none."""
        replica.version.drain(replica.id)
        until = time.monotonic() + self.fleet.drain_timeout_s
        while replica.num_in_flight and time.monotonic() < until:
            await asyncio.sleep(0.05)
        await replica.version.remove(replica.id)

    def numbers_of(self, spec: PoolSpec) -> tuple[int, int]:
        """(ready, starting) replicas of a pool, without those that Serve is about to end."""
        wanted = self._counts.get(spec.key, 0)
        ready = sum(
            r.spec.key == spec.key and r.heard and not r.draining for r in self.followed.values()
        )
        return min(ready, wanted), max(0, wanted - ready)

    # --- How many there shall be --------------------------------------------------------------------------------------

    def _want(self, spec: PoolSpec, number: int) -> None:
        before, self._counts[spec.key] = self._counts.get(spec.key, 0), number
        ordered = self._ordered.setdefault(spec.key, deque())
        ordered.extend([time.monotonic()] * (number - before))
        for _ in range(min(len(ordered), before - number)):
            ordered.pop()
        if not number:
            for replica in self.followed.values():
                if replica.spec.key == spec.key:
                    replica.version.drain(replica.id)

    def scale(self, spec: PoolSpec, number: int) -> Coroutine[Any, Any, None]:
        """Set the number of replicas. The returned coroutine passes it to Serve without waiting for
        replicas."""
        self._want(spec, number)
        return self._order(spec, number)

    async def _order(self, spec: PoolSpec, number: int) -> None:
        async with self._ordering[spec.key]:  # keeps the orders in sequence
            await self._cluster.scale(spec, number)

    async def apply(self, fleet: Fleet) -> None:
        """Deploy a file; a pool keeps its number within `min` and `max`. Returns when the gateway
        has reports of the new replicas and of no old ones. Pools that are not in the file stay
        until `end_others`. SlipstreamErrors of a start are raised."""
        self.fleet = fleet
        wanted = {spec.key: spec for spec in pools(fleet)}
        for spec in wanted.values():
            self._want(
                spec, min(max(self._counts.get(spec.key, spec.least), spec.least), spec.most)
            )
        async with contextlib.AsyncExitStack() as stack:
            for key in sorted(wanted):
                await stack.enter_async_context(self._ordering[key])
            await self._cluster.deploy(fleet, {key: self._counts[key] for key in wanted})
        fingerprints = {key: spec.fingerprint for key, spec in wanted.items()}

        def is_old(replica: Replica) -> bool:
            return replica.spec.fingerprint != fingerprints.get(
                replica.spec.key, replica.spec.fingerprint
            )

        while any(self.numbers_of(spec)[1] for spec in wanted.values()) or any(
            map(is_old, self.followed.values())
        ):
            await asyncio.sleep(0.05)
        for replica in self.followed.values():
            replica.spec = wanted.get(replica.spec.key, replica.spec)

    async def end_others(self) -> None:
        """End the replicas of pools that are not in the file."""
        wanted = {spec.key for spec in pools(self.fleet)}
        others = self._counts.keys() - wanted
        for replica in self.followed.values():
            if replica.spec.key in others:
                replica.version.drain(replica.id)
        await self._cluster.remove(others)
        for key in others:
            del self._counts[key]
        while any(replica.spec.key in others for replica in self.followed.values()):
            await asyncio.sleep(0.05)

    async def close(self) -> None:
        await asyncio.gather(*(replica.close() for replica in self.followed.values()))
        await self._cluster.close()
