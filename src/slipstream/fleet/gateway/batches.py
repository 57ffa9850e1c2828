"""Scheduling of batch lines at a fleet's gateway: lines run on replicas without client requests
(`server.batches.runner`)."""

from __future__ import annotations

import time
from collections.abc import Sequence

from starlette.types import Scope

from slipstream.fleet.gateway.members import Members, Replica
from slipstream.server.state import ServerState


class FleetLineRunner:
    """Runs batch lines. When a client's request is sent to a replica that runs lines, those lines
    are cancelled and run again on an unused replica. If a model is scaled to zero, one line starts
    a replica."""

    def __init__(self, members: Members, state: ServerState) -> None:
        self.members, self.state = members, state

    def look(self, running: Sequence[Scope]) -> tuple[int, Sequence[Scope]]:
        if self.state.draining:
            return 0, running[::-1]
        free = 0
        surplus: list[Scope] = []
        for replica, lines in self._lines(running).items():
            room = replica.room_for_lines(self.members.fleet.batch_beside)
            surplus += lines[::-1][: max(0, -room)]
            free += max(0, room) if self._is_able(replica) else 0
        waiting = [scope for scope in running if "replica" not in scope]
        if (
            not free
            and not waiting
            and any(v.is_asleep for versions in self.members.models.values() for v in versions)
        ):
            free = 1
        most = self.members.fleet.batch_max_concurrent
        if most is not None:
            free = min(free, most - len(running))
        return max(0, free - len(waiting)), surplus

    def _lines(self, running: Sequence[Scope]) -> dict[Replica, list[Scope]]:
        """Running lines, grouped by replica."""
        found: dict[Replica, list[Scope]] = {replica: [] for replica in self.members.all_replicas()}
        for scope in running:
            if (replica := scope.get("replica")) in found:
                found[replica].append(scope)
        return found

    @staticmethod
    def _is_able(replica: Replica) -> bool:
        watched = replica.version.guard.replicas.get(replica.id)
        return (
            replica.serves
            and not replica.draining
            and watched is not None
            and watched.out_until <= time.monotonic()
        )
