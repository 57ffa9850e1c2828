"""Steps in flight, from launch to result, and the effects of a result.

A result has the tokens of each request that sampled. For each request, in this order:

1. If the request has ended meanwhile, its tokens are dropped.
2. If the step had drafts, tokens are taken up to the first wrong one. Later positions were
   computed with wrong tokens. They are computed again, in the same blocks.
3. Tokens after one that ends the request are dropped.
4. A participant may take a request's result instead.
5. Blocks that are now full are offered to the prefix cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from slipstream.core.extras import Extras, outputs_without_tokens
from slipstream.core.pace import Pace
from slipstream.core.participants.base import Participant
from slipstream.core.request import Request, Status
from slipstream.core.request_table import RequestTable
from slipstream.core.step import StepBuilder, new_tuple
from slipstream.messages.finish_reason import FinishReason
from slipstream.messages.outputs import StepOutput, TokenOutput
from slipstream.messages.steps import StepPlan, StepResult


class InFlight(NamedTuple):
    """A scheduled step: the requests that sample, the number of drafts and the certain tokens of
    each. The results of `dropped` requests are ignored."""

    requests: Sequence[Request]
    drafts: Mapping[Request, int]
    certain: Mapping[Request, tuple[int, ...]]
    dropped: set[Request]


NOTHING = InFlight((), {}, {}, set())


class StepsInFlight:
    """All steps in flight.

    `by_id` has the steps, and `last_id` is the number of the last scheduled step. The parts that
    learn step times (`pace`, the tiers' `rates`, the participants) are notified when a step begins and ends.
    """

    def __init__(
        self,
        requests: RequestTable,
        participants: Sequence[Participant],
        pace: Pace | None,
        clock: Callable[[], float],
    ) -> None:
        self.by_id: dict[int, InFlight] = {}
        self.last_id = 0
        self.num_certain = 0  # certain tokens in all results so far
        self.participants = participants
        self._requests = requests
        tiers = requests.kv.tiers
        self._rates = None if tiers is None else tiers.rates  # of all ranks
        self._block_size = requests.kv.block_size
        self._pace, self._clock = pace, clock

    @property
    def unverified(self) -> set[Request]:
        """Requests with drafts that are not verified yet."""
        return set().union(*[step.drafts for step in self.by_id.values() if step.drafts])

    @property
    def last_ended(self) -> int:
        """Number of the last step up to which all steps have ended."""
        return min(self.by_id, default=self.last_id + 1) - 1

    def sampling(self, newest: int) -> set[Request]:
        """Requests that sample in the last `newest` steps, as far as these are still in flight."""
        known = (self.by_id.get(self.last_id - i, NOTHING) for i in range(newest))
        return set[Request]().union(*[step.requests for step in known])

    def launched(self, step: StepBuilder, now: float) -> None:
        """Register a step as launched. Its number is the new `last_id`."""
        self.last_id += 1
        if self._pace is not None:
            self._pace.launched(self.last_id, now, len(step.decodes), step.prompts)
        if self._rates is not None:
            prompts, share = sum(s.num_tokens for s in step.prompts), step.budget.busiest_share
            tokens = prompts + len(step.decodes)
            self._rates.launched(self.last_id, now, prompts, tokens, share)
        self.by_id[self.last_id] = InFlight(
            step.sampled_decodes + step.sampled_prompts, step.drafts, step.certain, set()
        )

    def forget(self) -> None:
        """Drop all steps in flight. Their results are not expected any more."""
        self.by_id.clear()
        if self._pace is not None:
            self._pace.forget_steps()

    def ended(self, plan: StepPlan, result: StepResult) -> list[StepOutput]:
        """Process a step's result. Returns the outputs of its requests."""
        if self._pace is not None:
            self._pace.ended(plan.step_id, self._clock(), is_cold=result.is_cold)
        if self._rates is not None:
            self._rates.ended(plan.step_id, self._clock())
        outputs: list[StepOutput] = []
        step = self.by_id.pop(plan.step_id, NOTHING)
        extras = Extras(result.extras) if result.extras else None
        for part in self.participants:
            part.arrived(plan, extras)
        size, finish, now = self._block_size, self._requests.finish, self._clock()
        is_plain = extras is None and not step.drafts and not step.certain
        dropped = step.dropped
        for request, tokens in zip(step.requests, result.tokens_of_each, strict=True):
            if request.status is Status.FINISHED or (dropped and request in dropped):
                continue
            known, request_id = request.token_ids, request.request_id
            before = len(known)
            num_cached = request.num_cached_tokens if before == request.num_given else 0
            if is_plain and before + 1 < request.end and request.stops.isdisjoint(tokens):
                # Fast path for one token of a request that continues: the code below without the
                # inapplicable parts. Large batches wait for this loop.
                request.num_pending -= 1
                known.append(tokens[0])
                if (account := request.account) is not None:
                    account.served += 1 / account.weight
                outputs.append(
                    new_tuple(
                        TokenOutput,
                        (request_id, tokens, None, None, num_cached, (), None, None, 0, 0, None),
                    )
                )
                if (before + 1) // size > request.num_registered:
                    request.kv.register(request, self.last_id)
                continue
            if extras is not None:
                if request_id in extras.failed:
                    outputs.append(finish(request, FinishReason.INVALID, extras.failed[request_id]))
                    continue
                if request.guide is not None and request.guide.takes(request):
                    continue
            num_drafts = num_right = 0
            if step.drafts and (num_drafts := step.drafts.get(request, 0)):
                num_right = len(tokens) - 1
                request.num_pending -= num_drafts
                if request.status is Status.RUNNING:  # else it was preempted and has nothing
                    request.kv.verified(request, num_drafts, num_right)
                for part in request.participants:
                    part.verified(request, num_drafts, num_right)
            elif step.certain and (certain := step.certain.get(request, ())):
                tokens = (*certain, *tokens)
                request.num_pending -= 1 + len(certain)
                self.num_certain += len(certain)
            else:
                request.num_pending -= 1
            known.extend(tokens)
            reason = stop = None
            if len(known) >= request.end or not request.stops.isdisjoint(tokens):
                reason, stop = _end(request, before)
                tokens = tokens[: len(known) - before]
            if (account := request.account) is not None:
                account.served += len(tokens) / account.weight
            if num_right > len(tokens):
                num_right = len(tokens)
            output = TokenOutput(
                request_id, tokens, reason, stop, num_cached, (), None, None, num_drafts, num_right
            )
            outputs.append(output if extras is None else extras.joined(output))
            if reason is not None:
                finish(request, reason)
            elif len(known) // size > request.num_registered:
                request.kv.register(request, self.last_id)
        if extras is not None:
            outputs += outputs_without_tokens(extras, self._requests)
        for part in self.participants:
            outputs += part.step_done(plan, result, extras, now)
        return outputs


def _end(request: Request, before: int) -> tuple[FinishReason | None, int | None]:
    """Find the first token from position `before` on that ends the request.

    Later tokens are dropped. Returns (reason, stop token); both are None if the request continues. A stop token among the
    first `min_tokens` answer tokens ends nothing.
    """
    known = request.token_ids
    least = request.num_prompt_tokens + request.spec.sampling.min_tokens
    for i in range(before, len(known)):
        if known[i] in request.stops and i + 1 >= least:
            del known[i + 1 :]
            return FinishReason.STOP, known[i]
        if i + 1 >= request.end:
            del known[i + 1 :]
            return FinishReason.LENGTH, None
    return None, None
