"""Speculative decoding in a simulation. No torch.

A simulation computes no tokens, so whether a draft is correct is sampled from measured rates. The
engine's own `Speculation` chooses how many drafts a step verifies. This module has the rest: a
proposer that has drafts always, or in a fraction of the steps; the sampling of how many are
correct; and the time of a draft model's own steps. A running engine's metrics give the rates:
`spec_decode_num_accepted_tokens_per_pos` over `spec_decode_num_drafts`, each position divided by
the one before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from slipstream.config.forms import DraftSettings
from slipstream.core.drafts.proposer import Proposal, Proposer
from slipstream.core.participants.speculation import Speculation
from slipstream.core.request import Request
from slipstream.costs.step_cost import Label, StepCost, StepCounts, attention_pairs, worst
from slipstream.errors import ConfigError
from slipstream.messages.steps import ScheduledRequest

DRAFT = 7
"""Placeholder for every drafted token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceRates:
    """Acceptance rates by draft position.

    `rates[i]` is the probability that draft i is correct if all before it are. The last rate also
    applies to later positions. `found` is the fraction of steps in which a request has a proposal.
    """

    rates: tuple[float, ...]
    found: float = 1.0

    def num_accepted(self, num_drafts: int, draw: float) -> int:
        """Number of correct drafts among `num_drafts`, from a uniform sample `draw` in [0, 1)."""
        survival = 1.0
        for i in range(num_drafts):
            survival *= self.rates[min(i, len(self.rates) - 1)]
            if draw >= survival:
                return i
        return num_drafts


def parse_acceptance(text: str) -> AcceptanceRates:
    """Parses `0.8`, `0.8,0.6,0.5` (by position) or `0.8,0.6@0.3` (a proposal in 30 % of the steps).

    ConfigError if a number is not between 0 and 1.
    """
    given, _, found = text.partition("@")
    try:
        made = AcceptanceRates(
            rates=tuple(float(part) for part in given.split(",")), found=float(found or 1)
        )
        if all(0 <= rate <= 1 for rate in (*made.rates, made.found)):
            return made
    except ValueError:
        pass  # not numbers: the error is raised below
    raise ConfigError(
        f"draft_acceptance={text!r} must be shares between 0 and 1 by position, such as 0.8,0.6,0.5, and after an @ the share "
        "of steps with a proposal",
        field="draft_acceptance",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafts:
    """Settings of speculation in a simulated engine. `cost` is the cost of the draft model's steps;
    None without a draft model."""

    config: DraftSettings
    acceptance: AcceptanceRates
    cost: StepCost | None = None


MATCH = 8
"""Match length that the proposer reports, which determines how many drafts `Speculation` trusts."""


class _Drafts(Proposer):
    def propose(self, tokens: Sequence[int], most: int) -> Proposal:
        return Proposal((DRAFT,) * most, MATCH)


class SimulatedSpeculation(Speculation):
    def __init__(self, drafts: Drafts) -> None:
        super().__init__(drafts.config)
        self._rates = drafts.acceptance

    def _most_drafts(self, request: Request, limit: int) -> int:
        """Maximum number of drafts: 0 unless sampling gives the request a proposal at its position.

        The scheduler asks again after the step in flight. The position, pending tokens included, is
        the same then, and so is the result.
        """
        if drawn(request.request_id, -request.num_tokens) >= self._rates.found:
            return 0
        return super()._most_drafts(request, limit)

    def _proposer(self, request: Request) -> Proposer:
        return _Drafts()

    def _remember(self, request: Request) -> None:
        """Does nothing: a simulated answer contains no text to draft from."""


def drawn(name: str, number: int) -> float:
    """Pseudo-random number in [0, 1), hashed from a request and a position. Neighboring positions
    are independent."""
    return (
        int.from_bytes(blake2b(f"{name} {number}".encode(), digest_size=6).digest(), "big") / 2**48
    )


class DraftSteps:
    """Time of the draft model's own steps, which run before the model's step.

    The first one computes the tokens of a request that the draft model has not seen. Each further
    draft takes one more step.
    """

    def __init__(self, cost: StepCost) -> None:
        self._cost = cost
        self._seen: dict[str, int] = {}
        self.label: Label = "measured"
        """Least reliable label among the steps of the latest `seconds` call."""

    def seconds(self, drafted: Sequence[ScheduledRequest]) -> float:
        """Seconds of drafting in a step; `drafted` are its requests with drafts."""
        context = sum(s.num_computed_tokens + 1 for s in drafted)
        missed = pairs = num_prompts = 0
        for s in drafted:
            seen = self._seen.get(s.request_id, 0)
            seen = seen if seen <= s.num_computed_tokens else s.num_computed_tokens
            if (count := s.num_computed_tokens - seen) > 1:
                missed = missed + count
                pairs = pairs + attention_pairs(seen, count)
                num_prompts = num_prompts + 1
            else:
                missed += count
            self._seen[s.request_id] = s.num_computed_tokens + len(s.drafts)
        num = len(drafted)
        shape = StepCounts(num, context, missed, num_prompts, pairs, num)
        total, self.label = self._cost.seconds(shape), self._cost.label(shape)
        for i in range(1, max(len(s.drafts) for s in drafted)):
            going = [s for s in drafted if len(s.drafts) > i]
            context = sum(s.num_computed_tokens + 1 + i for s in going)
            shape = StepCounts(len(going), context, num_sampled=len(going))
            total = total + self._cost.seconds(shape)
            self.label = worst(self.label, self._cost.label(shape))
        return total

    def forget(self, request_id: str) -> None:
        self._seen.pop(request_id, None)
