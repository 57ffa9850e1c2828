"""Several replicas of the chosen engine under the traffic, arranged in two ways: all compute prompts and
answer them, or some compute prompts and hand them over to the others (prefill and decode apart).

`arrangements` lists what is measured, `verdict` interprets the measurements. `Replicas` runs in the process
that measures (`optimize.worker`)."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, Self

from slipstream.config import EngineArgs
from slipstream.costs.hardware import available_cores
from slipstream.params.options import RequestOptions
from slipstream.simulate.apart import DIVISIONS

if TYPE_CHECKING:
    from slipstream.bench.adapters.slipstream import AsyncSlipstream
    from slipstream.bench.load import MeasuredAnswer
    from slipstream.bench.workload import BenchRequest

MORE = 1.05
"""Minimum ratio of the throughput to that of replicas that do both, for which separation is worthwhile. A smaller gain is
treated as noise."""


def arrangements(replicas: int) -> list[tuple[int, int]]:
    """Pairs to measure: (replicas that only compute prompts, the other replicas). (0, N) means that
    all are alike. Empty without replicas."""
    if not replicas:
        return []
    parts = sorted({max(1, replicas // part) for part in DIVISIONS})
    return [(0, replicas), *((part, replicas - part) for part in parts if part < replicas)]


def verdict(found: Sequence[Mapping[str, Any]], objectives: Mapping[str, float]) -> str:
    """Report, as text, whether separating prefill and decode is worthwhile. The first of `found` is that of replicas that
    are all alike.

    It is if only the separation meets all objectives, or else if it has 5 % more output tokens per second. Nothing is
    concluded if an objective was not measured, such as TPOT for answers of one token.
    """
    best = max(found[1:], key=lambda row: (keeps(row, objectives), row["output_throughput"]))
    together, more = found[0], best["output_throughput"] / found[0]["output_throughput"]
    how = f"prefill and decode apart ({best['prompts']} for prompts, {best['answers']} for answers)"
    rate = f"{how} give {more:.2f} x the output tokens/s of {together['answers']} replicas that do both"
    if unknown := sorted(
        name for name in objectives if any(row.get(f"{name}_p99") is None for row in found)
    ):
        return f"{rate}; whether that keeps {', '.join(unknown)} was not measured"
    kept = keeps(best, objectives), keeps(together, objectives)
    if objectives and kept == (True, False):
        return f"{how} keep the objectives, and {together['answers']} replicas that do both don't: that pays"
    if objectives and kept == (False, True):
        return f"{how} miss the objectives, which {together['answers']} replicas that do both keep: that does not pay"
    return f"{rate}: that {'pays' if more > MORE else 'does not pay'}"


def keeps(row: Mapping[str, Any], objectives: Mapping[str, float]) -> bool:
    """Whether 99 % of the requests meet all objectives. An objective that was not measured counts as missed."""
    measured = ((row.get(f"{name}_p99"), most) for name, most in objectives.items())
    return all(value is not None and value <= most for value, most in measured)


class Replicas:
    """A `StreamingEngine` over `prompts` engines that only compute prompts, and `answers` others.

    A request goes to the engine with the fewest requests. On a CPU the engines divide its cores
    evenly.
    """

    def __init__(
        self, engines: Sequence[AsyncSlipstream], num_prompts: int, stack: AsyncExitStack
    ) -> None:
        self.engines, self._stack = engines, stack
        self._prompts, self._answers = range(num_prompts), range(num_prompts, len(engines))
        self._running = [0] * len(engines)

    @classmethod
    async def start(cls, args: EngineArgs, *, prompts: int, answers: int) -> Self:
        from slipstream.bench.adapters.slipstream import AsyncSlipstream

        count, stack, engines = prompts + answers, AsyncExitStack(), list[AsyncSlipstream]()
        threads = max(1, (args.num_threads or available_cores()) // count)
        try:
            for i in range(count):
                address = f"unix:slipstream-optimize-{os.getpid()}-{i}"
                own = dataclasses.replace(
                    args, num_threads=threads, kv_handover_address=address if prompts else None
                )
                started = await AsyncSlipstream.start(own)
                engines.append(await stack.enter_async_context(started))
        except BaseException:
            await stack.aclose()
            raise
        return cls(engines, prompts, stack)

    async def ask(self, request: BenchRequest, answer: MeasuredAnswer, /) -> None:
        options = RequestOptions()
        if self._prompts:
            source = await self._prefill(request)
            options = RequestOptions(handover_from=source)
        at = self._least(self._answers)
        self._running[at] += 1
        try:
            await self.engines[at].ask(request, answer, options)
        finally:
            self._running[at] -= 1

    async def _prefill(self, request: BenchRequest) -> str:
        """Let a replica for prompts compute the prompt. Returns the address from which its blocks
        can be fetched."""
        from slipstream.bench.adapters.slipstream import greedy, prompt_of

        at = self._least(self._prompts)
        engine = self.engines[at].engine
        self._running[at] += 1
        try:
            options = RequestOptions(hands_over=True)
            async for _ in engine.generate(prompt_of(request), greedy(1), options):
                pass
        finally:
            self._running[at] -= 1
        handover = engine.config.cache.handover
        assert handover is not None
        return handover.address

    async def handed_tokens(self) -> int:
        """Number of prompt tokens so far whose keys and values came from another engine."""
        stats = [await self.engines[i].engine.stats() for i in self._answers]
        return sum(0 if own.tiers is None else own.tiers.peer_hit_tokens for own in stats)

    def _least(self, engines: range) -> int:
        return min(engines, key=self._running.__getitem__)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()
