"""Chooses the drafts that a step verifies: how many, and for which requests.

A draft is a proposed token after a request's last one. The step computes it and samples at each
position as always. A draft is accepted if it equals the token sampled at the previous position. The
first wrong draft ends the run.

With `num_speculative_tokens="auto"`, the choice maximises the expected tokens per second of a step:

1. A draft's survival probability is the product of the acceptance rates up to it. A rate is the
   request's own, shrunk towards the engine's rate while the request has few drafts. Rates are kept
   by match length, which grows along a proposal, and for drafts of a model by position.
2. Step times are measured by number of sequences and tokens (`StepCosts`), on a GPU also before the
   first request.
3. Drafts are added in order of falling survival. Drafts of a model are added one position of all
   requests at a time (`core/drafts/chains.py`). The number with the most tokens per second is taken, if it
   beats a step without drafts.

A step without drafts may be scheduled before the previous step's tokens are known. A step with
drafts needs them. So while a request has a proposal that pays, nothing is scheduled until the step
in flight is done, and all requests of the step lose the overlap. The measured times include this:
plain steps are timed with overlap, steps with drafts without it. Delaying only requests with drafts
would cost more, since they would miss every second step.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from slipstream.config.forms import (
    MAX_DRAFTS,
    MAX_STEP_DRAFTS,
    DraftSettings,
    LearnedDrafts,
    NgramDrafts,
    SuffixDrafts,
)
from slipstream.core.drafts.chains import Chains
from slipstream.core.drafts.proposer import LookUp, Proposal, Proposer, RecentAnswers
from slipstream.core.participants.base import Participant
from slipstream.core.request import Request
from slipstream.core.step_times import (
    MARGIN,
    MIN_SURVIVAL,
    STALE,
    SURE,
    SURE_STALE,
    StepCosts,
    seconds_from,
)
from slipstream.messages.outputs import EngineOutput
from slipstream.messages.steps import FROM_MODEL, StepPlan, StepResult

if TYPE_CHECKING:
    from slipstream.core.extras import Extras
    from slipstream.core.in_flight import StepsInFlight

MAX_SALTS = 64
"""Number of cache salts whose recent answers are kept."""

LEVELS: tuple[int, ...] = (3, 4, 5, 7, 9, 13, 17, 25)
"""Match lengths at which the next acceptance rate begins."""

FROM_MODEL_TIMES = tuple((FROM_MODEL,) * n for n in range(MAX_DRAFTS + 1))


class Acceptance:
    """Tried and accepted drafts by match length. Above `memory` tries, both are halved."""

    __slots__ = ("_accepted", "_memory", "_tried")

    def __init__(self, memory: int) -> None:
        self._memory = memory
        self._tried, self._accepted = [0.0] * (len(LEVELS) + 1), [0.0] * (len(LEVELS) + 1)

    def add(self, match: int, num_drafts: int, num_accepted: int) -> None:
        for i in range(min(num_drafts, num_accepted + 1)):
            level = bisect_right(LEVELS, match + i)
            self._tried[level] += 1
            self._accepted[level] += i < num_accepted
            if self._tried[level] > self._memory:
                self._tried[level] /= 2
                self._accepted[level] /= 2

    def rate(self, level: int, expected: float, weight: float = 4.0) -> float:
        """Acceptance rate at `level`; the prior `expected` counts as `weight` tries."""
        return (self._accepted[level] + weight * expected) / (self._tried[level] + weight)


class Drafting:
    """Drafting state of one request."""

    __slots__ = ("acceptance", "match", "proposer")

    def __init__(self, proposer: Proposer) -> None:
        self.proposer = proposer
        self.acceptance = Acceptance(memory=32)
        self.match = 0  # match length of the drafts being verified


class Speculation(Participant):
    def __init__(self, config: DraftSettings) -> None:
        self.config = config
        self.costs = StepCosts()
        self.num_drafts = self.num_tokens = 0  # runs of drafts, and drafts in them
        self.accepted_by_position: list[int] = []  # how often the i-th draft of a run was accepted
        self._chains = Chains() if isinstance(config, LearnedDrafts) else None
        self._acceptance = Acceptance(memory=1024)  # over all requests
        self._traffic: dict[str, RecentAnswers] = {}
        # when the last step ended; None if the engine has been idle since
        self._last: float | None = None
        self._was_plain = False
        self.drafting: dict[Request, Drafting] = {}  # of requests with proposals

    def concerns(self, request: Request) -> bool:
        """All requests but those with Mirostat, whose state advances token by token."""
        spec = request.spec
        return not (spec.pooled or spec.beam_of is not None or spec.sampling.mirostat_mode)

    def is_ready(self, running: Sequence[Request], in_flight: StepsInFlight) -> bool:
        if unverified := in_flight.unverified:
            self.prepare(running, unverified)
            return False
        return not self.choose(running)

    def choose(self, running: Iterable[Request]) -> bool:
        """Set drafts on the running requests for which they pay.

        True means that nothing may be scheduled until the step in flight is done, because the
        drafts need its tokens.
        """
        decodes = _decodes(running)
        if not decodes:
            return False
        for request in decodes:
            request.drafts = ()
        if self._chains is not None:
            return self._choose_chains(self._chains, decodes)
        plain = self._plain(len(decodes))
        if plain is None and self.config.num_speculative_tokens is None:
            return False
        proposals = [self._propose(request) for request in decodes]
        counts = [len(p.tokens) for p in proposals]
        if plain is not None and any(counts):
            counts = self._best(decodes, proposals, plain)
        chosen = [(r, p, n) for r, p, n in zip(decodes, proposals, counts, strict=True) if n]
        if any(request.num_pending for request, *_ in chosen):
            return True
        for request, proposal, count in chosen:
            request.draft(proposal.tokens[:count])
            self.drafting[request].match = proposal.match
        return False

    def prepare(self, running: Iterable[Request], in_flight: Collection[Request] = ()) -> None:
        """Choose ahead for the step after the one in flight, which verifies drafts of `in_flight`."""
        if self._chains is None or self.config.num_speculative_tokens is not None:
            return
        decodes = _decodes(running, in_flight)
        if decodes and (plain := self._plain(len(decodes))) is not None:
            limit = min(self.config.limit, self._chains.reach)
            line = self.costs.line(len(decodes), plain)
            self._chains.prepare([r.request_id for r in decodes], limit, line)

    def _plain(self, num_seqs: int) -> float | None:
        """Predicted time of a step without drafts (`StepCosts.plain`); None with a fixed number of
        drafts."""
        if self.config.num_speculative_tokens is not None:
            return None
        is_sure = self._chains is not None and self._chains.gain > SURE
        return self.costs.plain(num_seqs, SURE_STALE if is_sure else STALE)

    def _choose_chains(self, chains: Chains, decodes: Sequence[Request]) -> bool:
        """Set the number of drafts of each request; the worker's draft model fills them in.

        Returns the same as `choose`.
        """
        is_auto = self.config.num_speculative_tokens is None
        limit = min(self.config.limit, chains.reach) if is_auto else self.config.limit
        counts = [self._most_drafts(request, limit) for request in decodes]
        if is_auto:
            ids = [request.request_id for request in decodes]
            if (prepared := chains.prepared(ids)) is not None:
                counts = list(map(min, prepared, counts))
            elif (plain := self._plain(len(decodes))) is not None:
                counts = chains.best(ids, counts, self.costs.line(len(decodes), plain))
            else:
                return False
        if any(
            request.num_pending for request, count in zip(decodes, counts, strict=True) if count
        ):
            return True
        for request, count in zip(decodes, counts, strict=True):
            if count:
                request.draft(FROM_MODEL_TIMES[count])
        return False

    def _most_drafts(self, request: Request, limit: int) -> int:
        room = request.end - len(request.token_ids) - request.num_pending - 1
        if room <= 0 or self not in request.participants:
            return 0
        return limit if limit < room else room

    def _propose(self, request: Request) -> Proposal:
        most = self._most_drafts(request, self.config.limit)
        if not most:
            return Proposal()
        own = self.drafting.get(request)
        if own is None:
            own = self.drafting[request] = Drafting(self._proposer(request))
        return own.proposer.propose(request.token_ids, most)

    def _proposer(self, request: Request) -> Proposer:
        config, text = self.config, () if request.spec.audio else request.spec.encoder_token_ids
        if isinstance(config, NgramDrafts):
            return LookUp(
                least=config.prompt_lookup_min, most_match=config.prompt_lookup_max, text=text
            )
        return LookUp(text=text, traffic=self._traffic_of(request))

    def _traffic_of(self, request: Request) -> RecentAnswers:
        salt = request.spec.cache_salt
        # moved to the end: most recently used last
        found = self._traffic[salt] = self._traffic.pop(salt, RecentAnswers())
        if len(self._traffic) > MAX_SALTS:
            del self._traffic[next(iter(self._traffic))]
        return found

    def reset(self) -> None:
        """Forget the answers of ended requests. Running requests keep what they have seen."""
        self._traffic.clear()

    def _best(
        self, decodes: Sequence[Request], proposals: Sequence[Proposal], plain: float
    ) -> list[int]:
        """Number of drafts taken from each proposal that maximises the step's tokens per second."""
        survivals = self._survivals(decodes, proposals)
        num_seqs, most = len(decodes), min(sum(map(len, survivals)), MAX_STEP_DRAFTS)
        seconds = seconds_from(
            self.costs.line(num_seqs, plain), np.arange(num_seqs + 1, num_seqs + 1 + most)
        ).tolist()
        best, counts = MARGIN * num_seqs / plain, [0] * num_seqs
        ranked = sorted(
            (-survival, j, i) for i, own in enumerate(survivals) for j, survival in enumerate(own)
        )
        tokens, num_best = float(num_seqs), 0
        for n, (survival, _, _) in enumerate(ranked[:most]):
            tokens -= survival
            if tokens / seconds[n] > best:
                best, num_best = tokens / seconds[n], n + 1
        for _, _, i in ranked[:num_best]:
            counts[i] += 1
        return counts

    def _survivals(
        self, decodes: Sequence[Request], proposals: Sequence[Proposal]
    ) -> list[list[float]]:
        """Survival probabilities of each request's drafts, down to `MIN_SURVIVAL`."""
        found: list[list[float]] = []
        of_all: dict[int, tuple[int, float]] = {}  # (level, rate over all requests) by match length
        for request, proposal in zip(decodes, proposals, strict=True):
            own, survival = list[float](), 1.0
            first = request.num_pending  # the step in flight samples the drafts before this one
            drafting = self.drafting.get(request)
            rate = None if drafting is None else drafting.acceptance.rate
            for j, match in enumerate(range(proposal.match, proposal.match + len(proposal.tokens))):
                if match not in of_all:
                    level = bisect_right(LEVELS, match)
                    of_all[match] = level, self._acceptance.rate(level, match / (match + 2))
                level, expected = of_all[match]
                survival *= expected if rate is None else rate(level, expected)
                if survival < MIN_SURVIVAL:
                    break
                if j >= first:
                    own.append(survival)
            found.append(own)
        return found

    def stats(self) -> dict[str, Any]:
        """Fields of `SchedulerStats`."""
        counts = tuple(self.accepted_by_position)
        return {
            "spec_num_drafts": self.num_drafts,
            "spec_draft_tokens": self.num_tokens,
            "spec_accepted_tokens": sum(counts),
            "spec_accepted_by_position": counts,
        }

    # --- Results --------------------------------------------------------------------------------------------------------

    def verified(self, request: Request, num_drafts: int, num_right: int) -> None:
        self.num_drafts += 1
        self.num_tokens += num_drafts
        counts = self.accepted_by_position
        if len(counts) < num_drafts:
            counts += [0] * (num_drafts - len(counts))
        for i in range(num_right):
            counts[i] += 1
        if self._chains is not None:
            if self.config.num_speculative_tokens is None:
                self._chains.verified(request.request_id, num_drafts, num_right)
        elif (own := self.drafting.get(request)) is not None:
            for acceptance in (own.acceptance, self._acceptance):
                acceptance.add(own.match, num_drafts, num_right)

    def step_done(
        self, plan: StepPlan, result: StepResult, extras: Extras | None, now: float
    ) -> list[EngineOutput]:
        self.add_time(
            now,
            len(plan.scheduled),
            plan.num_tokens,
            only_decodes=all(s.num_tokens == s.num_sampled for s in plan.scheduled),
            idle=not self.requests.running,
            is_cold=result.is_cold,
        )
        return []

    def add_time(
        self,
        now: float,
        num_seqs: int,
        num_tokens: int,
        *,
        only_decodes: bool,
        idle: bool,
        is_cold: bool = False,
    ) -> None:
        """Record a finished step, whose tokens arrived at `now`.

        `idle` means that no request is left to compute. `is_cold` is the same as in `StepResult`.
        The time of a cold step is not kept, since it would prevent later tries of its size.
        """
        is_plain = num_tokens == num_seqs
        # The first plain step after one with drafts was not launched ahead.
        if (
            only_decodes
            and not is_cold
            and self._last is not None
            and (self._was_plain or not is_plain)
        ):
            self.costs.add(num_seqs, num_tokens, now - self._last)
        self._last = None if idle else now
        self._was_plain = only_decodes and is_plain

    def ended(self, request: Request) -> None:
        if self._chains is not None:
            self._chains.ended(request.request_id)
        if self.drafting.pop(request, None) is not None and isinstance(self.config, SuffixDrafts):
            self._remember(request)

    def _remember(self, request: Request) -> None:
        """Remember the request's answer, which may help others with the same salt."""
        self._traffic_of(request).add(request.token_ids[request.num_prompt_tokens :])


def _decodes(running: Iterable[Request], in_flight: Collection[Request] = ()) -> list[Request]:
    """Requests whose next step has one token besides drafts, after everything in flight."""
    return [
        r
        for r in running
        if (r.num_tokens - r.num_computed_tokens == 1 or r in in_flight)
        and r.num_computed_tokens < r.end - 1
    ]
