"""What the door's page /status shows: the server's own shape, with a replica for each of the fleet's."""

from __future__ import annotations

import time
from typing import Any

from slipstream import __version__
from slipstream.fleet.members import Members
from slipstream.server.metrics import Metrics
from slipstream.server.state import ServerState
from slipstream.server.status import Latency, ReplicaStatus, Status

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
    responses: dict[str, int] = {}
    for (_, _, status), count in metrics.responses.items():
        responses[str(status)] = responses.get(str(status), 0) + count
    return Status(
        version=__version__,
        time=time.time(),
        models=list(members.models),
        num_in_flight=len(state.in_flight),
        replicas=replicas,
        latency={
            name: Latency.of(histogram)
            for name, histogram in (("ttft_s", metrics.ttft), ("itl_s", metrics.itl), ("e2e_s", metrics.e2e))
        },
        responses=responses,
        findings=None if state.watch is None else state.watch.findings,
        autoscale=autoscale or None,
    )
