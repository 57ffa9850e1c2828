"""A weight update's effect on the scheduler. No step may be in flight."""

from __future__ import annotations

from slipstream.core.request import Status
from slipstream.core.scheduler import Scheduler


def use_weights(scheduler: Scheduler, identity: str) -> None:
    """Make prefixes computed by other weights unfindable.

    Running requests keep their blocks. Later blocks depend on both weights, and are neither cached
    nor offered to a tier. Waiting requests compute their tokens again.
    """
    if not scheduler.has_requests:
        scheduler.reset_prefix_cache()
    requests = scheduler.requests
    for kv in scheduler.kvs:
        kv.use_weights(identity)
        while requests.drop_waiting_blocks(kv):
            pass
    for request in requests.by_id.values():
        if request.status is Status.RUNNING:
            request.is_mixed = True
        elif request.status is not Status.FINISHED:
            request.kv.begin_anew(request)
    for part in scheduler.participants:
        part.use_weights()


def retract_all(scheduler: Scheduler) -> None:
    """Preempt all running requests. They compute their tokens again."""
    for request in reversed(scheduler.requests.running.copy()):
        scheduler.requests.preempt(request)
