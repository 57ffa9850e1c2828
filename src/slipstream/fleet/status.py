"""What the door's page /status shows: the server's own shape, with a replica for each of the fleet's."""

from __future__ import annotations

import time
from typing import Any

from slipstream import __version__
from slipstream.fleet.members import Members
from slipstream.server.metrics import Metrics
from slipstream.server.state import ServerState
from slipstream.server.status import Latency, ReplicaStatus, Status, replica_status

_STATES = {"serving": "ready", "draining": "draining", "silent": "starting", "out": "down"}


def fleet_status(
    members: Members, state: ServerState, metrics: Metrics, autoscale: dict[str, dict[str, Any]]
) -> Status:
    """Responses and latency are those at the door. Of the time between tokens the replicas tell, every few seconds: the door
    passes tokens on unread."""
    replicas, told = [], Metrics("")
    for versions in members.models.values():
        for version in versions:
            for replica in version.replicas.values():
                seen, load = version.router.state(replica.id), replica.load
                doing = _STATES[version.state_of(replica)]
                if load is None:
                    one = ReplicaStatus(name=replica.id, state=doing)
                else:
                    assert load.stats is not None  # `Replica.load` is the last that has them
                    one = replica_status(replica.id, doing, load.stats, canary_ok=load.canary_ok)
                one.num_running, one.num_waiting = seen.running, seen.waiting  # with what is on its way there
                replicas.append(one)
                if replica.counts is not None:
                    told.add(replica.counts)
            replicas += [ReplicaStatus(name=name, state="starting") for name in sorted(version.starting)]
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
            for name, histogram in (("ttft_s", metrics.ttft), ("itl_s", told.itl), ("e2e_s", metrics.e2e))
        },
        responses=responses,
        findings=None if state.watch is None else state.watch.findings,
        autoscale=autoscale or None,
    )
