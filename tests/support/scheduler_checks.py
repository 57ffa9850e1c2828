"""Checks of every scheduler that runs in a test's process, whichever harness or engine steps it."""

from __future__ import annotations

import functools

MAX_IDLE_STEPS = 1000
"""Calls of `schedule` that may plan nothing, in a row, while requests could run."""


def check_schedulers(kind) -> None:
    """Check the leases of `kind`, a scheduler's class, before each step, and bound its idle steps."""
    if hasattr(kind.schedule, "__wrapped__"):
        return
    from slipstream.core.cache.invariants import check_leases  # not before a test needs it

    schedule = kind.schedule

    @functools.wraps(schedule)
    def checked(self):
        check_leases(self)
        plan = schedule(self)
        if plan is not None or self.in_flight.by_id or not waits_for_nothing(self):
            self.num_idle_steps = 0
        else:
            self.num_idle_steps = getattr(self, "num_idle_steps", 0) + 1
            assert self.num_idle_steps < MAX_IDLE_STEPS, "requests wait and nothing is scheduled"
        return plan

    kind.schedule = checked


def waits_for_nothing(scheduler) -> bool:
    """True if a request could run now: nothing holds it back, and neither time nor a tier will help it."""
    wakeup = scheduler.next_wakeup()
    if wakeup is not None and wakeup > scheduler._clock():
        return False
    return any(not request.held for request in scheduler.requests.by_id.values())
