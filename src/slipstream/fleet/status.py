"""What the door's page /status shows: the server's own shape, with a replica for each of the fleet's."""

from __future__ import annotations

from typing import Any

from slipstream.fleet.members import Members
from slipstream.server.metrics import Metrics
from slipstream.server.state import ServerState
from slipstream.server.status import ReplicaStatus, Status, shared_fields

_STATES = {"serving": "ready", "draining": "draining", "silent": "starting", "out": "down"}


def fleet_status(
    members: Members, state: ServerState, metrics: Metrics, autoscale: dict[str, dict[str, Any]]
) -> Status:
    """Latency and responses are those at the door."""
    replicas = []
    for name, versions in members.models.items():
        for version in versions:
            for replica in version.replicas.values():
                seen = version.router.state(replica.id)
                replicas.append(
                    ReplicaStatus(
                        name=f"{name} {version.name} {replica.id}",
                        state=_STATES[version.state_of(replica)],
                        num_running=seen.running,
                        num_waiting=seen.waiting,
                        kv_cache_usage=replica.kv_cache_usage,
                    )
                )
    return Status(
        models=list(members.models),
        num_in_flight=len(state.in_flight),
        replicas=replicas,
        autoscale=autoscale or None,
        **shared_fields(state, metrics),
    )
