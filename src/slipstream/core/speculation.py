"""Chooses the drafts that a step verifies: how many, and for which requests.

A draft is a guessed token behind a request's last one. The step computes it and samples at each position as always. A draft is
accepted if it equals the token sampled at the position before it. The first wrong draft ends the run.

With `num_speculative_tokens="auto"` the choice maximises the tokens that a step is expected to yield per second:

1. A draft survives with the product of the acceptance rates up to it. A rate is the request's own, shrunk towards the engine's
   while the request has few drafts. Rates are kept by the length of the match, which grows along a proposal, and for drafts
   of a model by position.
2. The time of a step is measured, by its number of sequences and tokens (`StepCosts`).
3. Drafts are added in the order of falling survival. The number with the most tokens per second is taken, if it beats a step
   without drafts.

A step without drafts may be scheduled before its predecessor's tokens are known; a step with drafts needs them. So while a
request has a proposal that pays, nothing is scheduled before the step in flight is done. All requests of the step then lose
the overlap. The measured times contain that: plain steps are timed with overlap, steps with drafts without. To delay only
the requests with drafts would cost more, since they would miss every second step.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, pairwise
from math import sqrt
from statistics import median
from typing import Any

from slipstream.config import MOST_DRAFTS, MOST_STEP_DRAFTS, SpeculationConfig
from slipstream.core.proposer import LookUp, ModelDrafts, Proposal, Proposer, Traffic
from slipstream.core.request import Request

MOST_SALTS = 64
"""Salts whose recent answers are kept."""

LEVELS: tuple[int, ...] = (3, 4, 5, 7, 9, 13, 17, 25)
"""Lengths of matches at which the next acceptance rate begins."""

POSITIONS = tuple(range(ModelDrafts.MATCH + 1, ModelDrafts.MATCH + MOST_DRAFTS))
"""`LEVELS` of drafts by a model: each position has a rate."""

MARGIN = 1.05
"""A step with drafts must promise this many times the tokens per second of a plain one."""

STAY = 1.01
"""Another length of chains must promise this many times the tokens per second of the last one."""

LEAST_FIRST = 0.3
"""A request has drafts of a model only if its first is likelier than this to be right."""

REACH = 2
"""So much longer than any chosen before may chains be."""

LEAST_SURVIVAL = 0.02

NUM_TIMES = 15
"""The number of times that are kept for a size of step. Their median counts."""

LEAST_TIMES = 3
"""A size of plain steps counts as measured with this many times."""

SPEED_MEMORY = 0.2
"""The weight of the latest step in the running average of `StepCosts._slowness`."""

SIMILAR = 1.34
"""Until they are measured, steps of a number of sequences are taken to cost what steps of another do that is so near."""

STALE = 256
"""Steps after which a size is measured anew: the machine, or the lengths of the sequences, may have changed."""

GUESSED_SLOPE = 0.04
"""The assumed cost of a further token, as a share of a plain step's time, until it was measured. It is low, so that drafts are
tried."""

COUNTS: tuple[int, ...] = (*range(1, 9), *range(10, 17, 2), *range(20, 33, 4), *range(40, 65, 8))
"""Numbers of sequences, and of tokens, whose steps are timed separately. Beyond 64 they grow by an eighth."""


class Acceptance:
    """The numbers of tried and accepted drafts, by the length of their match. Beyond `memory` tries both are halved."""

    __slots__ = ("_accepted", "_memory", "_tried", "levels")

    def __init__(self, memory: int, levels: tuple[int, ...] = LEVELS) -> None:
        self._memory, self.levels = memory, levels
        self._tried, self._accepted = [0.0] * (len(levels) + 1), [0.0] * (len(levels) + 1)

    def add(self, match: int, num_drafts: int, num_accepted: int) -> None:
        for i in range(min(num_drafts, num_accepted + 1)):
            level = bisect_right(self.levels, match + i)
            self._tried[level] += 1
            self._accepted[level] += i < num_accepted
            if self._tried[level] > self._memory:
                self._tried[level] /= 2
                self._accepted[level] /= 2

    def rate(self, level: int, expected: float, weight: float = 4.0) -> float:
        """The rate at `level`, where `expected` counts like `weight` tries."""
        return (self._accepted[level] + weight * expected) / (self._tried[level] + weight)


class StepCosts:
    """Seconds of steps in which every token is sampled, by their numbers of sequences and of tokens.

    Other work on the machine slows all sizes alike. `_slowness` is the ratio of recent steps' times to the known times of their
    sizes, and times are divided by it. So a burst of other work makes no size look slow.
    """

    def __init__(self) -> None:
        self._slowness = 1.0
        self._times: dict[tuple[int, int], deque[float]] = {}
        self._measured: dict[tuple[int, int], int] = {}  # the step that measured it last
        self._lines: dict[int, list[tuple[int, float]]] = {}  # by sequences: (tokens, seconds), ascending
        self._step = 0

    def add(self, num_seqs: int, num_tokens: int, seconds: float) -> None:
        self._step += 1
        key = (_near(num_seqs), _near(num_tokens))
        if self._step - self._measured.get(key, self._step) > STALE:
            self._times.pop(key, None)
        times = self._times.setdefault(key, deque(maxlen=NUM_TIMES))
        if len(times) >= LEAST_TIMES:
            self._slowness += SPEED_MEMORY * (min(seconds / median(times), 4 * self._slowness) - self._slowness)
        times.append(max(seconds, 1e-6) / self._slowness)
        self._measured[key] = self._step
        self._lines.pop(key[0], None)

    def plain(self, num_seqs: int) -> float | None:
        """Seconds of a step with one token of each sequence. None: it must be measured first."""
        key = self._like(num_seqs)
        return None if key is None else float(median(self._times[key, key]))

    def _like(self, num_seqs: int) -> int | None:
        """The number of sequences whose plain steps are known that is nearest, if it is near enough."""
        first = _near(num_seqs)
        if self._is_known(first):
            return first
        near = [n for n, of in self._times if n == of and max(n, first) <= SIMILAR * min(n, first) and self._is_known(n)]
        return min(near, key=lambda n: abs(n - first), default=None)

    def _is_known(self, first: int) -> bool:
        times = self._times.get((first, first), ())
        if times and self._step - self._measured[first, first] > STALE:
            self._times[first, first].clear()
        return len(times) >= LEAST_TIMES

    def line(self, num_seqs: int, plain: float) -> list[tuple[int, float]]:
        """The measured steps of `num_seqs` sequences, (tokens, seconds), beginning with the plain step."""
        line = self._line(_near(num_seqs))
        if not line and (like := self._like(num_seqs)) is not None:
            line = [(round(n * num_seqs / like), seconds) for n, seconds in self._line(like)]
        return [(num_seqs, plain), *(point for point in line if point[0] > num_seqs)]

    def _line(self, first: int) -> list[tuple[int, float]]:
        line = self._lines.get(first)
        if line is None:
            known = [(n, median(t)) for (s, n), t in self._times.items() if s == first and n > first]
            line = self._lines[first] = sorted(
                (n, t) for n, t in known if self._step - self._measured[first, n] <= STALE
            )
        return line


def seconds_from(line: Sequence[tuple[int, float]], num_tokens: int) -> Iterator[float]:
    """Seconds of steps of `num_tokens`, one more, and so on, interpolated on `line`. Beyond its end the line is extended as it
    rises among steps with drafts, with at least the guessed slope. Before them it rises faster: the first draft of a step costs
    a run of the drafter and the overlap of steps."""
    for (a, first), (b, second) in pairwise(line):
        while num_tokens <= b:
            yield first + (second - first) * (num_tokens - a) / (b - a)
            num_tokens += 1
    (fewest, plain), (last, seconds) = line[0], line[-1]
    slope = GUESSED_SLOPE * plain / sqrt(fewest)
    if len(line) > 2:
        slope = max(slope, (seconds - line[1][1]) / (last - line[1][0]))
    while True:
        yield seconds + slope * (num_tokens - last)
        num_tokens += 1


class Drafting:
    """The state of one request that drafts are proposed for."""

    __slots__ = ("acceptance", "match", "proposer")

    def __init__(self, proposer: Proposer, levels: tuple[int, ...] = LEVELS) -> None:
        self.proposer = proposer
        self.acceptance = Acceptance(memory=32, levels=levels)
        self.match = 0  # length of the match whose drafts are being verified


class Speculation:
    def __init__(self, config: SpeculationConfig) -> None:
        self.config = config
        self.costs = StepCosts()
        self.num_drafts = self.num_tokens = 0  # runs of drafts, and the tokens in them
        self.accepted_by_position: list[int] = []  # how often the i-th draft of a run was accepted
        levels = POSITIONS if config.by_model else LEVELS
        self._acceptance = Acceptance(memory=1024, levels=levels)  # over all requests
        self._traffic: dict[str, Traffic] = {}
        self._last: float | None = None  # when the last step ended; None if the engine was idle since
        self._was_plain = False
        self._length = self._longest = 0  # of the chains that were chosen last; of all

    def choose(self, running: Iterable[Request]) -> bool:
        """Put drafts behind the last tokens of running requests, where that pays. True: nothing may be scheduled before the
        step in flight is done, since the drafts need its tokens."""
        decodes = [
            r for r in running if r.num_tokens - r.num_computed_tokens == 1 and r.num_computed_tokens < r.end - 1
        ]
        for request in decodes:
            request.drafts = ()
        most = self.config.num_speculative_tokens
        plain = None if most is not None else self.costs.plain(len(decodes))
        if not decodes or (most is None and plain is None):
            return False
        limit = self.config.limit
        if plain is not None and self.config.by_model:
            limit = min(limit, self._longest + REACH)
        proposals = [self._propose(request, limit) for request in decodes]
        counts = [len(p.tokens) for p in proposals]
        if plain is not None and any(counts):
            counts = self._best(decodes, proposals, plain)
        chosen = [(r, p, n) for r, p, n in zip(decodes, proposals, counts, strict=True) if n]
        if any(request.num_pending for request, *_ in chosen):
            return True
        for request, proposal, count in chosen:
            request.draft(proposal.tokens[:count])
            assert request.drafting is not None
            request.drafting.match = proposal.match
        return False

    def _propose(self, request: Request, most: int) -> Proposal:
        most = min(most, request.end - request.num_tokens - 1)
        if most <= 0 or request.spec.pooled or request.spec.beam_of is not None:
            return Proposal()
        if request.spec.sampling.mirostat_mode:  # its state follows token by token
            return Proposal()
        if request.drafting is None:
            request.drafting = Drafting(self._proposer(request), self._acceptance.levels)
        return request.drafting.proposer.propose(request.token_ids, most)

    def _proposer(self, request: Request) -> Proposer:
        config, text = self.config, request.spec.encoder_token_ids
        if config.method == "ngram":
            return LookUp(least=config.prompt_lookup_min, most_match=config.prompt_lookup_max, text=text)
        if config.by_model:
            return ModelDrafts()
        return LookUp(text=text, traffic=self._traffic_of(request))

    def _traffic_of(self, request: Request) -> Traffic:
        salt = request.spec.cache_salt
        found = self._traffic[salt] = self._traffic.pop(salt, Traffic())  # now the latest
        if len(self._traffic) > MOST_SALTS:
            del self._traffic[next(iter(self._traffic))]
        return found

    def forget_answers(self) -> None:
        """Of ended requests. Those that run keep what they have seen."""
        self._traffic.clear()

    def _best(self, decodes: Sequence[Request], proposals: Sequence[Proposal], plain: float) -> list[int]:
        """The number of tokens of each proposal with which the step yields the most tokens per second."""
        survivals = self._survivals(decodes, proposals)
        num_seqs, most = len(decodes), min(sum(map(len, survivals)), MOST_STEP_DRAFTS)
        line = seconds_from(self.costs.line(num_seqs, plain), num_seqs + 1)
        seconds = list(islice(line, most))
        best, counts = MARGIN * num_seqs / plain, [0] * num_seqs
        if self.config.by_model:
            return self._best_chain(survivals, seconds, best)
        ranked = sorted((-survival, j, i) for i, own in enumerate(survivals) for j, survival in enumerate(own))
        tokens, num_best = float(num_seqs), 0
        for n, (survival, _, _) in enumerate(ranked[:most]):
            tokens -= survival
            if tokens / seconds[n] > best:
                best, num_best = tokens / seconds[n], n + 1
        for _, _, i in ranked[:num_best]:
            counts[i] += 1
        return counts

    def _best_chain(self, survivals: Sequence[Sequence[float]], seconds: Sequence[float], best: float) -> list[int]:
        """Of drafts of a model: all requests that are worth it have as many. A pass of the drafter takes as long for a few
        requests as for all. The chain that was made ahead is as long as the last one, and there is none for a request without
        drafts, which the drafter would have to catch up on."""
        worth = [own if own and own[0] >= LEAST_FIRST else () for own in survivals]
        chosen, last = 0, self._length
        for length in range(1, max(map(len, worth), default=0) + 1):
            drafts = [own[:length] for own in worth]
            num = sum(map(len, drafts))
            if num > len(seconds):  # more than a step verifies
                break
            rate = (len(worth) + sum(map(sum, drafts))) / seconds[num - 1] * (STAY if length == last else 1.0)
            if rate > best:
                best, chosen = rate, length
        self._length, self._longest = chosen, max(self._longest, chosen)
        return [min(chosen, len(own)) for own in worth]

    def _survivals(self, decodes: Sequence[Request], proposals: Sequence[Proposal]) -> list[list[float]]:
        """Of each request's drafts, as far as they may well survive."""
        found: list[list[float]] = []
        of_all: dict[int, tuple[int, float]] = {}  # by match: its level, and the rate over all requests
        for request, proposal in zip(decodes, proposals, strict=True):
            own, survival = list[float](), 1.0
            # The step in flight samples the ones before. A drafter will begin behind them.
            first = 0 if self.config.by_model else request.num_pending
            rate = request.drafting.acceptance.rate if request.drafting is not None else None
            for j, match in enumerate(range(proposal.match, proposal.match + len(proposal.tokens))):
                if match not in of_all:
                    level = bisect_right(self._acceptance.levels, match)
                    of_all[match] = level, self._acceptance.rate(level, match / (match + 2))
                level, expected = of_all[match]
                survival *= expected if rate is None else rate(level, expected)
                if survival < LEAST_SURVIVAL:
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

    def verified(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        self.num_drafts += 1
        self.num_tokens += num_drafts
        counts = self.accepted_by_position
        counts += [0] * (num_drafts - len(counts))
        for i in range(num_accepted):
            counts[i] += 1
        if (own := request.drafting) is not None:
            for acceptance in (own.acceptance, self._acceptance):
                acceptance.add(own.match, num_drafts, num_accepted)

    def step_done(
        self, now: float, num_seqs: int, num_tokens: int, *, only_decodes: bool, idle: bool, is_cold: bool = False
    ) -> None:
        """A step's tokens came `now`. `idle`: no request is left to compute. `is_cold`: as in `StepResult`. The time of such a
        step is not kept, since it would keep later ones of its size from being tried."""
        is_plain = num_tokens == num_seqs
        # The first plain step behind one with drafts was not launched ahead.
        if only_decodes and not is_cold and self._last is not None and (self._was_plain or not is_plain):
            self.costs.add(num_seqs, num_tokens, now - self._last)
        self._last = None if idle else now
        self._was_plain = only_decodes and is_plain

    def ended(self, request: Request) -> None:
        """Its answer may help others with the same salt."""
        if self.config.method == "suffix" and request.drafting is not None:
            self._traffic_of(request).add(request.token_ids[request.num_prompt_tokens :])


def _near(count: int) -> int:
    """The largest of `COUNTS` up to `count`. Beyond the last, the next lower multiple of an eighth of a power of two."""
    if count <= COUNTS[-1]:
        return COUNTS[bisect_right(COUNTS, count) - 1]
    below = 1 << (count.bit_length() - 4)
    return count // below * below
