"""Hooks of a feature in scheduling, called by the scheduler and the table of steps in flight.

They have a list of participants and know none of them by name. A new feature is a new file here, a
line in `core/make.py`, and nothing in the scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from slipstream.messages.outputs import EngineOutput
from slipstream.messages.steps import StepPlan, StepResult

if TYPE_CHECKING:
    from slipstream.core.extras import Extras
    from slipstream.core.in_flight import StepsInFlight
    from slipstream.core.request import Request
    from slipstream.core.request_table import RequestTable


class Participant:
    """Base class with hooks that do nothing; a feature overrides those it needs.

    `Request.participants` are those that a request concerns. Hooks with a request are only called
    for these, so a plain request costs nothing. Hooks without one are called once per step.
    """

    guides: ClassVar[bool] = False
    """True if the participant decides about each step of its requests. Such a request never has a decode lease."""

    adds: ClassVar[bool] = False
    """True if it sometimes returns tokens from `certain`."""

    requests: RequestTable
    """The scheduler's requests, set when the scheduler is made."""

    def concerns(self, request: Request) -> bool:
        """Whether this participant's hooks are called for the request."""
        return False

    # --- Before a request runs ----------------------------------------------------------------------------------------

    def entered(self, request: Request) -> None:
        """Prepare a request that is about to be queued. An error refuses it."""

    def admits(self, request: Request) -> bool:
        """Whether resources other than rows and blocks allow the request to run now.

        If not, others may overtake it. A SlipstreamError ends it.
        """
        return True

    def stays(self, request: Request) -> bool:
        """Whether the request must run on its current rank."""
        return False

    def started(self, request: Request) -> None:
        """Called when the request begins to run."""

    def stopped(self, request: Request) -> None:
        """Called when the request stops running: it was preempted or has ended."""

    def ended(self, request: Request) -> None:
        """Forget a request that has ended."""

    # --- Before a step ------------------------------------------------------------------------------------------------

    def is_ready(self, running: Sequence[Request], in_flight: StepsInFlight) -> bool:
        """Prepare the next step. False if it must wait for the steps in flight."""
        return True

    def certain(self, request: Request) -> tuple[int, ...]:
        """Tokens known to follow the last one of a request that it guides.

        The step computes as many of them with that token as it has room for.
        """
        return ()

    def placed(
        self, request: Request, computed: int, end: int, num_sampled: int
    ) -> tuple[int, ...]:
        """Called when a step will compute positions [computed, end) of a request that this
        participant guides.

        Returns the last of these tokens that the worker does not have.
        """
        return ()

    def chunk(self, request: Request, computed: int, count: int, room: int) -> int:
        """Number of prompt tokens to compute after `computed` ones where `count` would split the prompt.

        `room` is the number of tokens that a step without decodes could still take.
        """
        return count

    def make_way(self) -> bool:
        """Resolve a deadlock: nothing runs and nothing can be scheduled. True if that may help."""
        return False

    # --- After a step -------------------------------------------------------------------------------------------------

    def takes(self, request: Request) -> bool:
        """Whether it processes the result of a request that it guides, instead of the sampled token."""
        return False

    def arrived(self, plan: StepPlan, extras: Extras | None) -> None:
        """Take a finished step's extras, before its tokens are processed."""

    def verified(self, request: Request, num_drafts: int, num_right: int) -> None:
        """Called with the number of accepted drafts."""

    def step_done(
        self, plan: StepPlan, result: StepResult, extras: Extras | None, now: float
    ) -> list[EngineOutput]:
        """Process a finished step. Returns the outputs of the requests whose results it took."""
        return []

    def reset(self) -> None:
        """Forget all data of ended requests."""

    def use_weights(self) -> None:
        """Forget all data that the old weights computed; they are being replaced."""

    def stats(self) -> dict[str, Any]:
        """The participant's fields of `SchedulerStats`."""
        return {}
