"""Requests whose masks are late: the tokens that the latest step samples for them are discarded."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from slipstream.core.request import Status
from slipstream.messages.steps import ScheduledRequest, StepPlan

if TYPE_CHECKING:
    from slipstream.core.scheduler import Scheduler


def may_take_back(scheduler: Scheduler, share: ScheduledRequest) -> bool:
    """Whether a request may compute the last token of its share of a step again. It may not after a
    prompt or drafts, nor if a step changes more than the cache's blocks."""
    request = scheduler.requests.by_id.get(share.request_id)
    return (
        request is not None
        and request.status is Status.RUNNING
        and request.kv.may_rewind
        and not scheduler.max_drafts
        and not request.spec.sampling.by_chain
        and share.num_tokens == share.num_sampled == 1
        and share.num_computed_tokens >= request.num_prompt_tokens
        # A completed block is shared by then.
        and all((share.num_computed_tokens + 1) % kv.block_size for kv in scheduler.kvs)
    )


def take_back(scheduler: Scheduler, plan: StepPlan, shares: Iterable[ScheduledRequest]) -> None:
    """Discard the tokens that the latest step samples for these requests, which `may_take_back`
    must allow. They wait until they are released, and then compute their last token again.
    """
    for share in shares:
        request = scheduler.requests.by_id[share.request_id]
        request.num_computed_tokens -= 1
        request.num_pending -= 1
        request.held = True
        scheduler.in_flight.by_id[plan.step_id].dropped.add(request)
