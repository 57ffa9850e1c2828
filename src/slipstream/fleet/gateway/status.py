"""The data of the gateway's page /status, in the server's own format, with an entry for each
replica."""

from __future__ import annotations

from typing import Any

from slipstream.fleet.gateway.members import Members
from slipstream.server.operations.metrics import Metrics
from slipstream.server.operations.status import (
    ReplicaStatus,
    ServerStatus,
    replica_status,
    shared_fields,
)
from slipstream.server.state import ServerState

_STATES = {"serving": "ready", "draining": "draining", "silent": "starting", "out": "down"}


def fleet_status(
    members: Members, state: ServerState, metrics: Metrics, autoscale: dict[str, dict[str, Any]]
) -> ServerStatus:
    """The fleet's status. Responses and latencies are the gateway's. The time between tokens comes
    from the replicas' reports, every few seconds, because the gateway forwards tokens without
    reading them."""
    replicas, told = [], Metrics("")
    for versions in members.models.values():
        for version in versions:
            for replica in version.replicas.values():
                seen, load = version.router.state(replica.id), replica.load
                doing = _STATES[version.state_of(replica)]
                if load is None:
                    one = ReplicaStatus(name=replica.id, state=doing)
                else:
                    assert load.stats is not None  # `Replica.load` is the last report that has them
                    one = replica_status(replica.id, doing, load.stats, canary_ok=load.canary_ok)
                # includes requests on their way there
                one.num_running = seen.running
                one.num_waiting = seen.waiting
                replicas.append(one)
                if replica.counts is not None:
                    told.add(replica.counts)
            replicas += [
                ReplicaStatus(name=name, state="starting") for name in sorted(version.starting)
            ]
    return ServerStatus(
        models=list(members.models),
        num_in_flight=len(state.in_flight),
        replicas=replicas,
        autoscale=autoscale or None,
        **shared_fields(state, metrics, itl=told.itl),
    )
