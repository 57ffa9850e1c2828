"""Measures step times of dummy sequences on this device: decodes, prompt chunks, both together.

1. A step is launched through the executor, like the engine does, but without the scheduler. Its
   sequences have blocks filled with ones, without computing tokens first. So any shape is ready
   within milliseconds.
2. Two steps are in flight where the device allows it, as in the engine.
3. Shapes take turns over several rounds, so that other load slows all alike. The result is the
   median of the rounds.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from slipstream.config import EngineConfig
from slipstream.costs.step_cost import MeasuredStep, StepCounts
from slipstream.errors import ConfigError
from slipstream.messages.steps import NewRequest, ScheduledRequest, StepPlan, TableUpdate
from slipstream.params.sampling import SamplingParams
from slipstream.worker.base import Launched
from slipstream.worker.local_executor import LocalExecutor

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
ROUNDS = 5
VERIFIED = (3, 6)
"""Tokens per sequence in steps that verify drafts."""

ONE_IN_8_BITS = 0x38
"""Byte that is 1.0 as float8 e4m3, and a small number as int8."""

MIN_S = 0.03
"""Minimum seconds for which each round repeats a shape (at least twice)."""


class Step(NamedTuple):
    """The sequences of a step.

    `decodes` has each decode's number of computed tokens. `prompts` has (computed, tokens to
    compute) of each prompt. `verified` has (computed, tokens to verify) of each decode with drafts.
    """

    decodes: tuple[int, ...] = ()
    prompts: tuple[tuple[int, int], ...] = ()
    verified: tuple[tuple[int, int], ...] = ()

    @property
    def shape(self) -> StepCounts:
        return StepCounts.of(self.decodes, self.prompts, self.verified)


def grid(
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int,
    num_cached: int,
    largest: int,
) -> list[Step]:
    """Steps that cover the range of an engine with these limits.

    `num_cached` is the cache's capacity in tokens. `largest` is the longest measured context in
    tokens.
    """
    longest = min(max_model_len - 1, largest)
    contexts = [n for n in (32, 256, 1024, 4096, 16384) if n < longest]
    counts = _doubling(max_num_seqs)
    steps = [
        Step(decodes=(c,) * n)
        for n in counts
        for c in contexts
        if n * (c + 64) <= num_cached and n * c <= 2**20
    ]
    sizes = [n for n in _doubling(min(max_num_batched_tokens, 8192)) if n >= 16]
    steps += [Step(prompts=((0, n),)) for n in sizes if n <= longest]
    steps += [
        Step(prompts=((0, each),) * (n // each))
        for n in sizes
        for each in (32, 128)
        if n // each > 1
        and n // each <= max_num_seqs
        and n + 64 * (n // each) <= num_cached
        and n >= 256
    ]
    chunk = min(512, *sizes[-1:])
    steps += [Step(prompts=((c, chunk),)) for c in contexts[1:] if c + chunk <= longest]
    for n, size in itertools.product(counts[2::2], sizes[1::2]):
        if (
            n < max_num_seqs
            and n + size <= max_num_batched_tokens
            and n * 320 + size + 64 <= num_cached
            and size <= longest
        ):
            steps.append(Step(decodes=(256,) * n, prompts=((0, size),)))
    for n, tokens in itertools.product(counts[::2], VERIFIED):
        if n * tokens <= max_num_seqs and n * 320 <= num_cached and 256 + tokens <= longest:
            # the sampler has room
            steps.append(Step(verified=((256, tokens),) * n))
    return steps


def _doubling(most: int) -> list[int]:
    sizes = [n for n in (2**i for i in range(20)) if n < most]
    return [*sizes, most]


def measure_steps(
    executor: LocalExecutor,
    steps: Sequence[Step],
    *,
    rounds: int = ROUNDS,
    least_s: float = MIN_S,
    progress: Callable[[int, int], None] = lambda done, total: None,
    clock: Callable[[], float] = time.perf_counter,
) -> list[MeasuredStep]:
    """Measure `steps` with `clock`.

    ConfigError if the model is no decoder, or a step does not fit into the cache or the context.
    """
    spec, config = executor.description.spec, executor.config
    if not spec.generates or spec.encoder is not None:
        raise ConfigError(
            f"only steps of a decoder can be measured, and {config.model.model} is {spec.kind}",
            field="model",
        )
    most = 1 + max(_num_blocks(step, config) for step in steps)
    for layer in executor.runner.kv:
        # untouched memory is one shared page of zeros, which CPU caches hold
        for held in (layer.k[:most], layer.v[:most]):
            _fill(held)
    timer = _Timer(executor, clock)
    found: list[list[float]] = [[] for _ in steps]
    for done, (_, (i, step)) in enumerate(itertools.product(range(rounds), enumerate(steps))):
        found[i].append(timer.seconds(step, least_s))
        progress(done + 1, rounds * len(steps))
    executor.runner.reset_expert_load()
    return [
        MeasuredStep(step.shape, statistics.median(times))
        for step, times in zip(steps, found, strict=True)
    ]


def _fill(held: Any) -> None:
    """Fill with ones. `held` is a tensor, or an array of a runner without torch."""
    if held.itemsize == 1:
        held.view(np.uint8 if isinstance(held, np.ndarray) else torch.uint8)[...] = ONE_IN_8_BITS
    else:
        held[...] = 1


def _num_blocks(step: Step, config: EngineConfig) -> int:
    lengths = [computed + 1 for computed in step.decodes] + [
        sum(one) for one in (*step.prompts, *step.verified)
    ]
    return len(config.cache.groups) * sum(
        -(-length // config.cache.block_size) for length in lengths
    )


class _Timer:
    def __init__(self, executor: LocalExecutor, clock: Callable[[], float]) -> None:
        self.executor, self._clock = executor, clock
        self._ids = itertools.count()

    def seconds(self, step: Step, least_s: float) -> float:
        """Mean seconds of a step, measured over several equal steps."""
        scheduled, new = self._sequences(step)
        first = StepPlan(next(self._ids), scheduled, new)
        self.executor.launch(first).result()  # captures its graph and compiles its kernels
        again = tuple(s._replace(table_updates=()) for s in scheduled)
        begin = self._clock()
        self._run(again, 1)
        once = self._clock() - begin
        count = max(2, int(least_s / max(once, 1e-6)))
        begin = self._clock()
        self._run(again, count)
        seconds = (self._clock() - begin) / count
        self.executor.forget()
        return seconds

    def _run(self, scheduled: tuple[ScheduledRequest, ...], count: int) -> None:
        in_flight: deque[Launched] = deque()
        for _ in range(count):
            plan = StepPlan(next(self._ids), scheduled)
            in_flight.append(self.executor.launch(plan))
            while len(in_flight) >= self.executor.max_in_flight(plan) or (
                in_flight and in_flight[0].is_done
            ):
                in_flight.popleft().result()
        for step in in_flight:
            step.result()

    def _sequences(self, step: Step) -> tuple[tuple[ScheduledRequest, ...], tuple[NewRequest, ...]]:
        config = self.executor.config
        size, groups = config.cache.block_size, range(len(config.cache.groups))
        blocks = itertools.count(1)
        num_usable = self.executor.ledger.num_blocks - 1
        scheduled, new = [], []
        ones = [(computed, 1, 1) for computed in step.decodes] + [
            (computed, n, 1) for computed, n in step.prompts
        ]
        for i, (computed, count, sampled) in enumerate(
            [*ones, *((computed, n, n) for computed, n in step.verified)]
        ):
            length = computed + count
            if length >= config.model.max_model_len + 1:
                longest = config.model.max_model_len
                raise ConfigError(
                    f"{length} tokens are more than max_model_len={longest}", field="max_model_len"
                )
            need = -(-length // size)
            tables = tuple(TableUpdate(g, 0, tuple(itertools.islice(blocks, need))) for g in groups)
            scheduled.append(
                ScheduledRequest(str(i), computed, count, sampled, tables, (1,) * (sampled - 1))
            )
            new.append(NewRequest(str(i), (1,) * length, length, GREEDY))
        if next(blocks) - 1 > num_usable:
            raise ConfigError(
                f"the cache's {num_usable} blocks do not hold {step}", field="kv_cache_bytes"
            )
        return tuple(scheduled), tuple(new)
