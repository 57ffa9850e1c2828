"""Distribution of requests over ranks that compute different requests, and over the steps of a pipeline."""

from __future__ import annotations

from array import array
from operator import itemgetter
from typing import TYPE_CHECKING

from slipstream.core.request import Request

if TYPE_CHECKING:
    from slipstream.core.cache.kv_cache_manager import KVCacheManager
    from slipstream.core.scheduler import Scheduler
    from slipstream.core.step import StepBuilder

UNEVEN_SHARE = 8
"""Tolerated imbalance of ranks for a prefix hit.

A cached prefix decides a request's rank unless that rank runs more requests than another by over
1/`UNEVEN_SHARE`.
"""


def deal(scheduler: Scheduler, step: StepBuilder, request: Request) -> tuple[list[array[int]], int]:
    """Choose a request's rank. Returns (block tables of its cached prefix, number of cached tokens).

    The criteria, in order:

    1. It has room now.
    2. It does not run many more requests than another (`UNEVEN_SHARE`).
    3. It has the longest prefix, in its cache and the tiers below.
    4. It runs the fewest requests.

    What a tier had loaded for the request on another rank is let go.
    """
    before = request.kv
    least = min(kv.num_running for kv in scheduler.kvs)
    most = least + max(1, least // UNEVEN_SHARE)
    found = []
    for kv in scheduler.kvs:
        request.kv = kv  # to look up its prefix there
        cached, computed = kv.cached_prefix(request)
        wanted = min(request.num_tokens - computed, request.most_at(computed))
        count = scheduler.prompt_tokens(step, request, computed, wanted)
        fits = count > 0 and kv.num_running < scheduler.scheduling.seqs_of_rank
        fits = fits and kv.has_room(
            request, cached, computed + count, 0, scheduler.watermark if kv.num_running else 0
        )
        merits = (
            fits,
            kv.num_running <= most,
            _prefix(kv, request, computed),
            -kv.num_running,
            kv.pool.num_free,
            -kv.rank,
        )
        found.append((merits, kv, cached, computed))
    _, request.kv, cached, computed = max(found, key=itemgetter(0))
    if before is not request.kv and before.tiers is not None:
        before.tiers.let_go(request)
    return cached, computed


def _prefix(kv: KVCacheManager, request: Request, computed: int) -> int:
    """Number of tokens of a request's prompt in a rank's cache, `computed`, and in the tiers below."""
    if kv.tiers is None or not kv.may_begin_cached(request):
        return computed
    return kv.tiers.available_tokens(request, computed)


def share_of_step(scheduler: Scheduler) -> list[Request]:
    """The running requests that join this step of a pipeline, so that all steps get equally many.

    With fewer requests than stages, each is in a separate step, in turn.
    """
    running, found = scheduler.requests.running, list[Request]()
    slots = [-(-kv.num_running // scheduler.pipeline_steps) for kv in scheduler.kvs]
    busy = scheduler.in_flight.sampling(min(scheduler.pipeline_steps, len(running)) - 1)
    for request in running:
        if request.num_pending and (request in busy or request.guide is not None):
            continue
        if request.num_tokens - request.num_computed_tokens == 1:
            slots[request.kv.rank] -= 1
            if slots[request.kv.rank] < 0:
                continue
        found.append(request)
    return found
