"""The loop that scales a running fleet: from the members and the door's tallies to orders for the head."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from slipstream.fleet.config import Fleet, PoolSpec
from slipstream.fleet.door import Door
from slipstream.fleet.members import Members
from slipstream.fleet.scaler import LOOK_S, ColdStarts, Now, Scaler, autoscaled, make

logger = logging.getLogger("slipstream.fleet")


class Scaling:
    """`numbers_of` gives a pool's (ready, starting) replicas. `scale` makes so many without waiting; False: not now."""

    def __init__(
        self,
        members: Members,
        door: Door,
        numbers_of: Callable[[PoolSpec], tuple[int, int]],
        scale: Callable[[PoolSpec, int], bool],
    ) -> None:
        self.members, self.door, self._numbers_of, self._scale = members, door, numbers_of, scale
        self.cold_starts = ColdStarts()
        self.scalers: dict[str, Scaler] = {}
        self._refreshing: dict[str, asyncio.Task[None]] = {}
        door.autoscale_status = self.status

    async def make(self, fleet: Fleet) -> dict[str, Scaler]:
        """The scalers of a file; those of models that are as they were stay. Simulates in a thread. ConfigError."""
        found = {}
        for name, (spec, settings, objectives) in autoscaled(fleet).items():
            known = self.scalers.get(name)
            if known is None or (known.spec, known.settings, known.objectives) != (spec, settings, objectives):
                known = await asyncio.to_thread(make, spec, settings, objectives)
            found[name] = known
        return found

    def take(self, scalers: dict[str, Scaler]) -> None:
        for name in self.scalers.keys() | scalers.keys():
            self.door.tallies.pop(name, None)
        for name, scaler in scalers.items():
            tally = self.door.tallies[name]
            tally.objectives, tally.learn = scaler.objectives, scaler.capacity.learn
        self.scalers = scalers

    async def run(self) -> None:
        """Until cancelled."""
        try:
            while True:
                for name, scaler in tuple(self.scalers.items()):
                    try:
                        self.look(name, scaler, time.monotonic())
                    except Exception:  # the next look may do better; without the loop the fleet would stay as it is
                        logger.exception("autoscaler: %s could not be looked at", name)
                await asyncio.sleep(LOOK_S)
        finally:
            await asyncio.gather(*self._refreshing.values(), return_exceptions=True)

    def look(self, name: str, scaler: Scaler, at: float) -> None:
        change = scaler.look(at, self.now(scaler.spec), self.door.tallies[name])
        if change is not None and self._scale(scaler.spec, change.wanted):
            scaler.made(change)
        if scaler.began is not None and (name not in self._refreshing or self._refreshing[name].done()):
            age = at - scaler.began
            if scaler.capacity.is_due(age):
                self._refreshing[name] = asyncio.create_task(asyncio.to_thread(scaler.capacity.refresh, age))

    def now(self, spec: PoolSpec) -> Now:
        version = self.members.version(spec.model, spec.version)
        ready, starting = self._numbers_of(spec)
        if version is None:
            return Now(num_ready=ready, num_starting=starting)
        replicas = [r for r in version.replicas.values() if r.heard]
        states = [version.router.state(r.id) for r in replicas]
        return Now(
            num_at_door=version.num_waiting,
            num_running=sum(state.running for state in states),
            num_waiting=sum(state.waiting for state in states),
            num_ready=ready,
            num_starting=starting,
            kv_cache_usage=sum(r.kv_cache_usage for r in replicas) / len(replicas) if replicas else 0.0,
            cold_start_s=self.cold_starts.median(spec.key),
        )

    def status(self) -> dict[str, dict[str, Any]]:
        at = time.monotonic()
        return {name: scaler.status(self.now(scaler.spec), at) for name, scaler in self.scalers.items()}
