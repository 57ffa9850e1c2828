"""The loop that scales a running fleet: reads the members and their tallies, and gives orders to
the head."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from typing import Any

from slipstream.fleet.config import Fleet, PoolSpec
from slipstream.fleet.gateway.gateway import Gateway
from slipstream.fleet.gateway.members import Members
from slipstream.fleet.scaling.room import PATIENCE_S, Room, room_of
from slipstream.fleet.scaling.scaler import (
    LOOK_S,
    Change,
    ColdStarts,
    PoolState,
    Scaler,
    Tally,
    autoscaled,
    make,
)

logger = logging.getLogger("slipstream.fleet")


class Scaling:
    """Loop over all scaled pools. `numbers_of` returns a pool's (ready, starting) replicas. `scale`
    requests a number of replicas without waiting; False: not possible now. `held` returns the
    number of replica processes by pool, including those that are ending."""

    def __init__(
        self,
        members: Members,
        gateway: Gateway,
        numbers_of: Callable[[PoolSpec], tuple[int, int]],
        scale: Callable[[PoolSpec, int], bool],
        held: Callable[[], dict[str, int]] = dict,
    ) -> None:
        self.members, self._numbers_of, self._scale = members, numbers_of, scale
        self._held = held
        self.room: Room | None = None
        self.cold_starts = ColdStarts()
        self.scalers: dict[str, Scaler] = {}  # by pool
        self._refreshing: dict[str, asyncio.Task[None]] = {}
        gateway.autoscale_status = self.status

    async def make(self, fleet: Fleet) -> dict[str, Scaler]:
        """Make the scalers for a file; unchanged pools keep theirs. Runs simulations in a thread.
        Raises ConfigError."""
        room = await asyncio.to_thread(room_of, fleet)
        found = {}
        for key, (spec, settings, objectives) in autoscaled(fleet).items():
            known = self.scalers.get(key)
            if known is None or (known.spec, known.settings, known.objectives) != (
                spec,
                settings,
                objectives,
            ):
                known = await asyncio.to_thread(make, spec, settings, objectives)
            found[key] = known
        # pools that are being removed hold memory, too
        if room is not None and self.room is not None:
            room = Room(room.limit, {**self.room.needs, **room.needs})
        self.room = room
        return found

    def take(self, scalers: dict[str, Scaler]) -> None:
        """Use these scalers, for versions that are members. The tally of a version without a scaler
        is not read."""
        self.scalers = {}
        for versions in self.members.models.values():
            for version in versions:
                version.tally = Tally()
        for key, scaler in scalers.items():
            if (found := self.members.version(scaler.spec.model, scaler.spec.version)) is not None:
                self.scalers[key] = scaler
                found.tally.objectives, found.tally.learn = scaler.objectives, scaler.capacity.learn

    async def run(self) -> None:
        """Run until cancelled."""
        try:
            while True:
                for key, scaler in tuple(self.scalers.items()):
                    try:
                        self.look(scaler, time.monotonic())
                    except Exception:  # the next attempt may succeed
                        logger.exception("autoscaler: %s could not be looked at", key)
                await asyncio.sleep(LOOK_S)
        finally:
            await asyncio.gather(*self._refreshing.values(), return_exceptions=True)

    def look(self, scaler: Scaler, at: float) -> None:
        spec = scaler.spec
        version = self.members.version(spec.model, spec.version)
        if version is None:  # a rollout is removing it
            return
        now = self.now(spec)
        if now.has_requests:
            scaler.last_used = at
        if not now.num_at_gateway:
            scaler.waits_since = None
        change = scaler.look(at, now, version.tally)
        if (
            change is not None
            and self._has_room(scaler, change, now)
            and self._scale(spec, change.wanted)
        ):
            scaler.made(change)
        if scaler.began is not None and (
            spec.key not in self._refreshing or self._refreshing[spec.key].done()
        ):
            age = at - scaler.began
            if scaler.capacity.is_due(age):
                self._refreshing[spec.key] = asyncio.create_task(
                    asyncio.to_thread(scaler.capacity.refresh, age)
                )

    def _has_room(self, scaler: Scaler, change: Change, now: PoolState) -> bool:
        """Whether the memory for a change is free. If not, and a request waits for it, others free memory before a later
        attempt."""
        more, spec = change.wanted - change.before, scaler.spec
        if self.room is None or more <= 0:
            return True
        others = [x for x in self.scalers.values() if x is not scaler and x.spec.least == 0]
        is_waited_for = now.num_at_gateway > 0 and not change.before
        if is_waited_for and scaler.waits_since is None:
            scaler.waits_since = change.at
        since = scaler.waits_since or math.inf
        if any(x.waits_since is not None and x.waits_since < since for x in others):
            return False  # freed memory is for the one that waits longest
        held = self._held()
        missing = self.room.missing(held, spec.key, more)
        if missing <= 0:
            scaler.waits_since = None
            return True
        if not is_waited_for:
            return False
        for other in sorted(others, key=lambda x: x.last_used):
            key, state = other.spec.key, self.now(other.spec)
            here = state.num_ready + state.num_starting
            missing -= self.room.needs[key] * (held.get(key, 0) - here)  # those that are ending
            if missing > 0 and here and (not state.has_requests or change.at - since >= PATIENCE_S):
                why = f"{spec.key} needs its memory"
                ended = Change(at=change.at, before=here, wanted=0, why=why)
                if self._scale(other.spec, 0):
                    other.made(ended)
                    missing -= self.room.needs[key] * here
        return False

    def now(self, spec: PoolSpec) -> PoolState:
        version = self.members.version(spec.model, spec.version)
        ready, starting = self._numbers_of(spec)
        if version is None:
            return PoolState(num_ready=ready, num_starting=starting)
        replicas = [r for r in version.replicas.values() if r.heard]
        running, waiting = version.router.load(r.id for r in replicas)
        return PoolState(
            num_at_gateway=version.num_waiting,
            num_running=running,
            num_waiting=waiting,
            num_ready=ready,
            num_starting=starting,
            kv_cache_usage=sum(r.kv_cache_usage for r in replicas) / len(replicas)
            if replicas
            else 0.0,
            cold_start_s=self.cold_starts.median(spec.key),
        )

    def status(self) -> dict[str, dict[str, Any]]:
        at = time.monotonic()
        return {
            key: scaler.status(self.now(scaler.spec), at) for key, scaler in self.scalers.items()
        }
