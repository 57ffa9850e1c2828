"""Drafts in a simulation. No token is computed there, so whether a draft is right is drawn, by rates that were measured.

The engine's own `Speculation` chooses how many drafts a step verifies. Here stand a proposer that always has some to offer, or
for a share of the steps, the draw of how many are right, and what a draft model's own steps take. The rates of a running engine
are `spec_decode_num_accepted_tokens_per_pos` over `spec_decode_num_drafts` of its metrics, each over the one before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from slipstream.config import SpeculationConfig
from slipstream.core.proposer import Proposal, Proposer
from slipstream.core.request import Request
from slipstream.core.speculation import Speculation
from slipstream.costs.step_cost import Label, StepCost, StepShape, attention_pairs, worst
from slipstream.errors import ConfigError
from slipstream.types import ScheduledRequest

GUESS = 7
"""Stands for every guessed token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """`rates[i]`: how often draft i is right where all before it were; the last one counts for those behind it, too. `found`:
    the share of steps for which a request has a proposal."""

    rates: tuple[float, ...]
    found: float = 1.0

    def num_accepted(self, num_drafts: int, draw: float) -> int:
        """Of `num_drafts`, by a number drawn evenly from [0, 1)."""
        survival = 1.0
        for i in range(num_drafts):
            survival *= self.rates[min(i, len(self.rates) - 1)]
            if draw >= survival:
                return i
        return num_drafts


def parse_acceptance(text: str) -> Acceptance:
    """`0.8`, `0.8,0.6,0.5` (by position), or `0.8,0.6@0.3` where three steps of ten have a proposal."""
    given, _, found = text.partition("@")
    try:
        made = Acceptance(
            rates=tuple(float(part) for part in given.split(",")), found=float(found or 1)
        )
        if all(0 <= rate <= 1 for rate in (*made.rates, made.found)):
            return made
    except ValueError:
        pass  # no numbers: the error is raised below
    raise ConfigError(
        f"draft_acceptance={text!r} is not shares between 0 and 1 by position, such as 0.8,0.6,0.5, and behind an @ the share "
        "of steps with a proposal",
        field="draft_acceptance",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafts:
    """`cost`: what steps of the draft model take; None: it has no model."""

    config: SpeculationConfig
    acceptance: Acceptance
    cost: StepCost | None = None


MATCH = 8
"""What is found is trusted like a match of so many tokens."""


class _Guesses(Proposer):
    def propose(self, tokens: Sequence[int], most: int) -> Proposal:
        return Proposal((GUESS,) * most, MATCH)


class SimulatedSpeculation(Speculation):
    def __init__(self, drafts: Drafts) -> None:
        super().__init__(drafts.config)
        self._rates = drafts.acceptance

    def _most_drafts(self, request: Request, limit: int) -> int:
        """It is asked again when the step in flight is done: the place, pending tokens counted, is the same then."""
        if drawn(request.request_id, -request.num_tokens) >= self._rates.found:
            return 0
        return super()._most_drafts(request, limit)

    def _proposer(self, request: Request) -> Proposer:
        return _Guesses()

    def _remember(self, request: Request) -> None:
        """Its answer is no text that others could go on like."""


def drawn(name: str, number: int) -> float:
    """A number in [0, 1), a hash of a request and a position in it. Neighbouring positions have independent numbers."""
    return (
        int.from_bytes(blake2b(f"{name} {number}".encode(), digest_size=6).digest(), "big") / 2**48
    )


class DraftSteps:
    """The time that a draft model's own steps take, before those of the model. It computes what it has not seen of a request
    first, and one step for each further draft."""

    def __init__(self, cost: StepCost) -> None:
        self._cost = cost
        self._seen: dict[str, int] = {}
        self.label: Label = "measured"
        """The worst of the steps that `seconds` was of last."""

    def seconds(self, drafted: Sequence[ScheduledRequest]) -> float:
        """Of the drafts in a plan; `drafted` are its requests that have some."""
        context = sum(s.num_computed_tokens + 1 for s in drafted)
        missed = pairs = num_prompts = 0
        for s in drafted:
            seen = self._seen.get(s.request_id, 0)
            seen = seen if seen <= s.num_computed_tokens else s.num_computed_tokens
            if (count := s.num_computed_tokens - seen) > 1:
                missed, pairs, num_prompts = (
                    missed + count,
                    pairs + attention_pairs(seen, count),
                    num_prompts + 1,
                )
            else:
                missed += count
            self._seen[s.request_id] = s.num_computed_tokens + len(s.drafts)
        num = len(drafted)
        shape = StepShape(num, context, missed, num_prompts, pairs, num)
        total, self.label = self._cost.seconds(shape), self._cost.label(shape)
        for i in range(1, max(len(s.drafts) for s in drafted)):
            going = [s for s in drafted if len(s.drafts) > i]
            context = sum(s.num_computed_tokens + 1 + i for s in going)
            shape = StepShape(len(going), context, num_sampled=len(going))
            total, self.label = (
                total + self._cost.seconds(shape),
                worst(self.label, self._cost.label(shape)),
            )
        return total

    def forget(self, request_id: str) -> None:
        self._seen.pop(request_id, None)
