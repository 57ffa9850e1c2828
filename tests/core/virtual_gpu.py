"""The scheduler in virtual time, on a GPU whose steps take what an H200 took for Llama-3-8B in FP8 with an EAGLE-3 head.

No token is computed. What a step takes follows from its rows, which are padded to those of a graph, and from its longest chain
of drafts. A pass of the head takes about as long for one sequence as for many. Behind a step runs a chain as long as each
request's last, so the next step runs its chain anew where it wants a longer one.
"""

from __future__ import annotations

import itertools
import math
import random
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from typing import Any

from slipstream.config.forms import NO_DRAFTS, HeadDrafts
from slipstream.core.make import make_scheduler
from slipstream.core.participants.speculation import Speculation
from slipstream.messages.requests import EngineRequest
from slipstream.messages.steps import StepPlan, StepResult, StepTime
from slipstream.params.sampling import SamplingParams
from tests.core.configs import config

PLAIN = {1: 2.319, 4: 2.879, 16: 3.133, 64: 3.797, 256: 6.851}
"""ms of a plain step, by sequences (`speculation_adaptive.json`)."""

_ROWS = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
_MS = (3.18, 3.14, 3.26, 3.5, 3.65, 3.8, 4.08, 4.18, 4.9, 5.5, 6.64, 6.86, 9.5, 12.5, 19.6, 26.0)
VERIFY = dict(zip(_ROWS, _MS, strict=True))
"""ms of a verification without its chain, by rows of graphs and, from 513 on, of tokens. Those of 2 to 16, 48, 64, 192, 256 and
768 are the record's, less some ms for the chain's passes; the others are guessed."""

PASS = {1: 0.11, 4: 0.159, 16: 0.16, 64: 0.2, 256: 0.3}
"""ms of a pass of the head, by sequences."""

DEPTHS = (1, 2, 3, 5, 8)
HOST = 0.2
"""ms that the GPU waits where a chain can't run ahead."""

OP_BY_OP, CATCH_UP = 0.5, 0.002
"""ms of a pass without a graph, and of each token that the head has not seen, beyond those that a graph has room for."""


def between(table: dict[int, float], at: int) -> float:
    """Interpolated, and beyond the ends in proportion to the last two."""
    keys = sorted(table)
    i = min(max(1, bisect_left(keys, at)), len(keys) - 1)
    (a, b), share = (keys[i - 1], keys[i]), (at - keys[i - 1]) / (keys[i] - keys[i - 1])
    return table[a] + share * (table[b] - table[a])


def padded(rows: int) -> int:
    sizes = [n for n in VERIFY if n <= 512]
    return sizes[bisect_left(sizes, rows)] if rows <= 512 else rows


class Steady:
    """A draft's chance follows a pattern: `length` tokens a verification on average, of each request in turns."""

    def __init__(self, length: float) -> None:
        self.length, self.left = length - 1, dict[str, float]()

    def num_right(self, request_id: str, num_drafts: int) -> int:
        left = self.left.get(request_id, len(self.left) * 0.37 % 1) + self.length
        self.left[request_id] = left - int(left)
        return min(int(left), num_drafts)


class Rates:
    """Each draft is right by chance, independent of those before."""

    def __init__(self, rate: float) -> None:
        self.rate, self.rng = rate, random.Random(1)

    def num_right(self, request_id: str, num_drafts: int) -> int:
        return next((i for i in range(num_drafts) if self.rng.random() >= self.rate), num_drafts)


class Mixed(Rates):
    """Each third request's drafts are right more often."""

    def __init__(self, high: float, low: float) -> None:
        super().__init__(low)
        self.rates = (high, low, low)

    def num_right(self, request_id: str, num_drafts: int) -> int:
        self.rate = self.rates[int(request_id) % 3]
        return super().num_right(request_id, num_drafts)


class VirtualGPU:
    """`num_drafts`: None for plain steps, "auto" or a number. `noise`: the most by which a step is off, as a share.
    `is_known`: steps were measured beforehand; those with drafts took a tenth less then."""

    def __init__(
        self,
        num_drafts: Any,
        max_num_seqs: int,
        right: Any,
        *,
        noise: float = 0.01,
        is_known: bool = False,
    ) -> None:
        speculation = NO_DRAFTS
        if num_drafts is not None:
            fixed = None if num_drafts == "auto" else num_drafts
            speculation = HeadDrafts(method="eagle3", model="head", num_speculative_tokens=fixed)
        self.now = self.free = 0.0
        sizes = config(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=8192,
            max_model_len=4096,
            num_blocks=40_000,
            enable_prefix_caching=False,
            speculation=speculation,
        )
        self.scheduler = make_scheduler(**sizes, drafts_ahead=True, clock=lambda: self.now)
        if is_known:
            self.scheduler.part(Speculation).costs.expect(list(self._known(max_num_seqs)), padded)
        self.right, self.noise, self.rng = right, noise, random.Random(0)
        self.seen: dict[str, int] = {}  # tokens that the head has computed
        self.ahead: dict[str, int] = {}  # drafts that the chain behind the last step made
        self.num_tokens = self.num_steps = 0
        self.steps: list[tuple[int, int, int, float]] = []  # sequences, rows, longest chain, ms
        self._in_flight: deque[tuple[StepPlan, float, StepResult]] = deque()
        self._names = itertools.count()

    def _known(self, max_num_seqs: int) -> Iterator[StepTime]:
        for n in (*(n for n in (1, 4, 16, 32, 64, 128) if n < max_num_seqs), max_num_seqs):
            for drafts in (0, *DEPTHS):
                if (rows := n * (1 + drafts)) <= 1024:
                    ms = (
                        0.9 * (between(VERIFY, padded(rows)) + self._chain_ms(n, drafts))
                        if drafts
                        else between(PLAIN, n)
                    )
                    yield StepTime(n, rows, ms / 1e3)

    def add(self, max_tokens: int) -> None:
        name = str(next(self._names))
        sampling = SamplingParams(temperature=0, ignore_eos=True)
        spec = EngineRequest(
            request_id=name,
            prompt_token_ids=tuple(range(64)),
            sampling=sampling,
            max_tokens=max_tokens,
            arrival=self.now,
        )
        self.scheduler.add(spec)

    def step(self) -> bool:
        """Runs one step as `EngineCore` does, with up to two plain steps in flight. Returns False
        if there is nothing to do."""
        plan = self.scheduler.schedule() if len(self._in_flight) < 2 else None
        if plan is not None:
            self._launch(plan)
            if len(self._in_flight) < 2:
                return True
        if not self._in_flight:
            return False
        plan, end, result = self._in_flight.popleft()
        self.now = max(self.now, end)
        for output in self.scheduler.update(plan, result):
            self.num_tokens += len(output.token_ids)
        return True

    def _launch(self, plan: StepPlan) -> None:
        drafted = [s for s in plan.scheduled if s.drafts]
        decodes = [s for s in plan.scheduled if s.num_tokens == s.num_sampled]
        rows = sum(s.num_tokens for s in decodes)
        num_prompt = sum(s.num_tokens for s in plan.scheduled if s not in decodes)
        ms, behind, is_cold = 0.03 * num_prompt, 0.0, False
        ms += between(VERIFY, padded(rows)) if drafted else between(PLAIN, max(1, rows))
        for s in plan.scheduled:
            if not s.drafts:
                self.ahead.pop(s.request_id, None)
        if drafted:
            missed = {
                s.request_id: s.num_computed_tokens - self.seen.get(s.request_id, 0)
                for s in drafted
            }
            is_cold = max(missed.values()) > 1 + max(len(s.drafts) for s in drafted)
            left = [s for s in drafted if self.ahead.get(s.request_id, 0) < len(s.drafts)]
            if left:
                depth = max(len(s.drafts) for s in left)
                most = max(missed[s.request_id] for s in left)
                ms += HOST + self._chain_ms(
                    len(left), max(depth, most) if most <= DEPTHS[-1] else DEPTHS[-1] + depth
                )
                ms += CATCH_UP * sum(n for n in missed.values() if n > DEPTHS[-1])
            depth = max(len(s.drafts) for s in drafted)
            behind = self._chain_ms(len(drafted), depth)
            for s in drafted:
                self.ahead[s.request_id] = len(s.drafts)
                self.seen[s.request_id] = s.num_computed_tokens + 1
        if drafted or not decodes:  # prompts go through the head behind their step
            for s in plan.scheduled:
                if s.num_tokens > 1 and not s.drafts:
                    self.seen[s.request_id] = s.num_computed_tokens + s.num_tokens
                    behind += OP_BY_OP + CATCH_UP * s.num_tokens
        ms *= 1 + self.rng.uniform(-self.noise, self.noise)
        begin = max(self.now, self.free)
        end = begin + ms / 1e3
        self.free = end + behind / 1e3
        counts = [
            1 + self.right.num_right(s.request_id, len(s.drafts)) if s.drafts else 1
            for s in plan.scheduled
            if s.num_sampled
        ]
        self.num_steps += 1
        self.steps.append(
            (len(decodes), rows, max((len(s.drafts) for s in drafted), default=0), ms + behind)
        )
        self._in_flight.append(
            (plan, end, StepResult(plan.step_id, [1] * sum(counts), counts, is_cold=is_cold))
        )

    @staticmethod
    def _chain_ms(num_seqs: int, depth: int) -> float:
        graph = next((d for d in DEPTHS if d >= depth), None)
        return between(PASS, num_seqs) * graph if graph is not None else OP_BY_OP * depth


def tokens_a_second(
    gpu: VirtualGPU, num_seqs: int, *, rounds: int = 4, max_tokens: int = 256, warm: int = 2
) -> float:
    """Batches of `num_seqs` answers in turns, the first ones not counted."""
    begin = tokens = 0.0
    for round_ in range(rounds + warm):
        if round_ == warm:
            begin, tokens = gpu.now, gpu.num_tokens
        for _ in range(num_seqs):
            gpu.add(max_tokens)
        while gpu.step():
            pass
    return (gpu.num_tokens - tokens) / (gpu.now - begin)


def poisson(
    gpu: VirtualGPU, rate: float, seconds: float, *, max_tokens: int = 200, seed: int = 0
) -> float:
    """Mean seconds from a request's arrival to its end over requests that come at random, `rate` a second."""
    rng, arrivals, at = random.Random(seed), list[tuple[float, int]](), gpu.now
    seconds += gpu.now
    while at < seconds:
        at += rng.expovariate(rate)
        arrivals.append((at, math.ceil(max_tokens * rng.uniform(0.5, 1.5))))
    spent, index = 0.0, 0
    last = gpu.now
    while index < len(arrivals) or gpu.scheduler.requests.by_id:
        while index < len(arrivals) and arrivals[index][0] <= gpu.now:
            gpu.add(arrivals[index][1])
            index += 1
        if not gpu.step():
            assert index < len(arrivals), "requests wait and nothing can run"
            last = gpu.now = max(gpu.now, arrivals[index][0])
            continue
        spent += len(gpu.scheduler.requests.by_id) * (gpu.now - last)
        last = gpu.now
    return spent / len(arrivals)
