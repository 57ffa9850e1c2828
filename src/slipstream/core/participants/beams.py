"""Requests that are beams of a search, which chooses their next tokens.

A beam's step returns its most likely tokens, but appends none of them: the search chooses tokens
for all its beams, and reports them through `Beams.go_on`. Until then the beam is held. A beam stays
on its rank, because the beams of a search take over each other's blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.core.cache.shared_blocks import take_over
from slipstream.core.extras import Extras
from slipstream.core.participants.base import Participant
from slipstream.core.request import Request, Status
from slipstream.messages.beams import BeamStep
from slipstream.messages.outputs import EngineOutput
from slipstream.messages.steps import StepPlan, StepResult


class Beams(Participant):
    guides = True

    def __init__(self) -> None:
        self._taken: list[Request] = []  # beams with results in the step that is being processed

    def concerns(self, request: Request) -> bool:
        return request.spec.beam_of is not None

    def entered(self, request: Request) -> None:
        request.held = request.held or request.spec.parent is not None

    def stays(self, request: Request) -> bool:
        return bool(request.num_preemptions) or request.spec.parent is not None

    def placed(
        self, request: Request, computed: int, end: int, num_sampled: int
    ) -> tuple[int, ...]:
        request.held = num_sampled > 0  # until `go_on` is called
        return (
            tuple(request.token_ids[computed:end]) if computed >= request.num_prompt_tokens else ()
        )

    def takes(self, request: Request) -> bool:
        request.num_pending -= 1
        if request.account is not None:
            request.account.charge(1)
        self._taken.append(request)
        return True

    def step_done(
        self, plan: StepPlan, result: StepResult, extras: Extras | None, now: float
    ) -> list[EngineOutput]:
        if not self._taken:
            return []
        taken, self._taken = self._taken, []
        assert extras is not None
        return [extras.likeliest(taken)]  # type: ignore[list-item]  # its search takes it

    def go_on(self, steps: Sequence[BeamStep]) -> None:
        """Continue the beams that have their logits, and add new ones.

        A beam that others branch from also continues itself.
        """
        by_id = self.requests.by_id
        for beam, source, _ in steps:
            if beam != source:
                self._take_over(by_id[beam], by_id[source])
        for beam, _, token in steps:
            request = by_id[beam]
            request.token_ids.append(token)
            request.held = False
            if request.status is Status.WAITING:
                self.requests.wait(request)

    def _take_over(self, beam: Request, source: Request) -> None:
        beam.token_ids[beam.num_prompt_tokens :] = source.token_ids[beam.num_prompt_tokens :]
        # keys of its own answer tokens
        del beam.block_keys[beam.num_prompt_tokens // beam.kv.block_size :]
        beam.kv = source.kv  # changes only for a new beam
        if source.holds_blocks:
            updates = take_over(beam.kv, beam, source)
            if updates and beam.in_worker:
                self.requests.table_updates.setdefault(beam.request_id, []).extend(updates)
        elif beam.status is Status.RUNNING:  # everything must be computed again
            self.requests.preempt(beam)
        else:  # blocks that it still holds contain its old tokens
            beam.kv.release(beam)

    def make_way(self) -> bool:
        """Move held beams out of the worker if they occupy all of its rows or blocks while they
        wait for other beams. They keep their blocks until others need them. Returns whether a
        request is waiting.
        """
        requests = self.requests
        if requests.waiting.first() is None:
            return False
        beams = [r for r in requests.running if r.held]
        for request in beams:
            requests.suspend(request)
        return bool(beams)
