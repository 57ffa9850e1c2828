"""The simulator against the engine on a busy machine: both are told the processor's time, which other programs don't take.

    python benchmarks/plan.py --study processor-time [--num-loads 4] [--by-torch]

The engine computes on one thread in this process. Its clock is the processor's time of the process; where nothing is to be done
it jumps to the next arrival. The table of steps is measured by the same clock, before and after the loads. So the study tells
what the model of steps and host gets wrong, and nothing of a second process, of HTTP and of several threads. Caches and memory
that others use still count. `--by-torch` measures the table with torch's runner, which this engine does not use.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import random
import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from cases.plan_prediction import TARGETS, arrivals_of, draw, errors, figures, means, predicted

from slipstream.bench.load import ClosedLoop
from slipstream.bench.report import print_table
from slipstream.config import EngineArgs
from slipstream.costs.metrics import RequestRecord, summarize
from slipstream.costs.step_cost import (
    HostCost,
    StepShape,
    StepTable,
    fit_steps,
    non_negative_least_squares,
)
from slipstream.engine.engine_core import EngineCore
from slipstream.simulate.engines import plan_engine, this_hardware
from slipstream.simulate.traffic import Traffic, of_lengths
from slipstream.types import EngineRequest, SamplingParams, TokenOutput
from slipstream.worker.local_executor import LocalExecutor
from slipstream.worker.start.step_costs import grid, measure_steps

CAPACITY = 200.0  # tokens a second of one thread, about
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
BURSTS, PROMPT, ANSWER = (2, 6, 12), 16, 12


class Replay:
    """A load through the engine core, by the processor's time."""

    def __init__(self, core: EngineCore, traffic: Traffic, seed: int) -> None:
        self.core, self.requests, rng = core, traffic.requests, random.Random(seed)
        vocab = core.description.spec.vocab_size
        self.prompts = [
            tuple(rng.randrange(vocab) for _ in range(r.input_tokens)) for r in self.requests
        ]
        self.sent, self.times = [0.0] * len(self.requests), [list[float]() for _ in self.requests]
        self.users, self.skipped, self.begin = traffic.users, 0.0, time.process_time()

    @property
    def now(self) -> float:
        return time.process_time() - self.begin + self.skipped

    def run(self) -> list[RequestRecord]:
        waiting, num_open = deque(range(len(self.requests))), 0
        while waiting or num_open:
            while waiting and self._is_due(waiting[0], num_open):
                self._add(waiting.popleft())
                num_open += 1
            if not num_open:
                self.skipped += max(0.0, self.requests[waiting[0]].arrival - self.now)
                continue
            outputs = self.core.step()
            now = self.now
            for output in outputs:
                assert isinstance(output, TokenOutput)
                self.times[int(output.request_id)] += [now] * len(output.token_ids)
                num_open -= output.finish_reason is not None
        return [
            RequestRecord(
                input_tokens=r.input_tokens,
                output_tokens=len(t),
                sent=sent,
                first_token=t[0],
                last_token=t[-1],
            )
            for r, t, sent in zip(self.requests, self.times, self.sent, strict=True)
        ]

    def _is_due(self, index: int, num_open: int) -> bool:
        return (
            num_open < self.users
            if self.users is not None
            else self.requests[index].arrival <= self.now
        )

    def _add(self, index: int) -> None:
        self.sent[index] = self.now if self.users is not None else self.requests[index].arrival
        of = EngineRequest(
            request_id=str(index),
            prompt_token_ids=self.prompts[index],
            sampling=GREEDY,
            max_tokens=self.requests[index].output_tokens,
            arrival=time.monotonic(),
        )
        self.core.add([of])


def host_of(core: EngineCore, table: StepTable) -> HostCost:
    """What a step takes beyond the table's, as `bench.host_costs` finds it."""
    rows, targets = [], []
    for count in BURSTS:
        traffic = of_lengths("burst", [(PROMPT, ANSWER)] * count).traffic(
            ClosedLoop(concurrency=count), count
        )
        replay = Replay(core, traffic, count)
        replay.run()
        gap = statistics.median(
            b - a for times in replay.times for a, b in itertools.pairwise(times)
        )
        rows.append([1.0, float(count)])
        targets.append(max(0.0, gap - table.seconds(StepShape.of((PROMPT + ANSWER // 2,) * count))))
    step_s, sequence_s = non_negative_least_squares(rows, targets)
    return HostCost(step_s=step_s, sequence_s=sequence_s, label="measured")


RECORD = "prediction_processor_time"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--num-loads", type=int, default=4)
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--by-torch", action="store_true", help="the table by torch's runner")


def run(args: argparse.Namespace, save: Callable[..., None]) -> None:
    settings = EngineArgs(
        model=args.model,
        num_threads=1,
        max_num_seqs=16,
        max_num_batched_tokens=128,
        max_model_len=512,
        kv_cache_bytes=256 * 2**20,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
    )
    core = EngineCore.build(settings)
    assert isinstance(core.executor, LocalExecutor)
    config, ledger = core.config, core.ledger
    executor = LocalExecutor.build(settings, by_torch=True) if args.by_torch else core.executor
    steps = [s for s in grid(16, 128, 512, ledger.num_kv_tokens, 300) if not s.verified]

    def measured() -> list[Any]:
        return measure_steps(executor, steps, rounds=1, least_s=0.01, clock=time.process_time)

    Replay(core, of_lengths("warm", [(16, 4)] * 2).traffic(ClosedLoop(concurrency=2), 2), 0).run()
    before = measured()
    host = host_of(core, fit_steps(before, identity={}, made_by={}))
    rng, loads, found = random.Random(args.seed), [], []
    for number in range(args.num_loads):
        load = draw(rng, CAPACITY, 1)
        load["lengths"] = [(min(a, 96), min(b, 24)) for a, b in load["lengths"][:10]]
        traffic = of_lengths("drawn", load["lengths"]).traffic(
            arrivals_of(load), len(load["lengths"]), seed=number
        )
        found.append(figures(summarize(Replay(core, traffic, number).run())))
        loads.append(load)
        print(json.dumps({k: v for k, v in load.items() if k != "lengths"} | found[-1]), flush=True)
    after = measured()
    table = fit_steps([*before, *after], identity={}, made_by={}, host=host)
    planned = plan_engine(
        settings, core.description, this_hardware("cpu", 1), info=config.device.info, table=table
    )
    planned = dataclasses.replace(planned.with_blocks(ledger.num_blocks), config=config)
    rows, shown = [], []
    for number, (load, measured_here) in enumerate(zip(loads, found, strict=True)):
        expected = figures(predicted(planned, load, number))
        of = {k: v for k, v in load.items() if k != "lengths"} | {
            "mean_lengths": means(load["lengths"])
        }
        signed = {name: expected[name] / measured_here[name] - 1 for name in TARGETS}
        rows.append({
            "load": of, "measured": measured_here, "predicted": expected, "signed": signed,
            "errors": errors(expected, measured_here),
        })  # fmt: skip
        shown.append(
            (
                str(of),
                *(
                    f"{measured_here[n]:.4g} · {expected[n]:.4g} · {signed[n]:+.0%}"
                    for n in TARGETS
                ),
            )
        )
    print_table("processor's time: measured · predicted · error", ("load", *TARGETS), shown)
    mean = {name: statistics.mean(row["errors"][name] for row in rows) for name in TARGETS}
    drift = statistics.mean(b.seconds / a.seconds for a, b in zip(before, after, strict=True))
    print(
        {name: f"{value:.1%}" for name, value in mean.items()},
        f"fit {table.error:.1%}, table after over before {drift:.2f}",
    )
    print(host)
    shown_settings = {**vars(args), "output": args.output.name}
    save(
        settings=shown_settings, mean_errors=mean, fit_error=table.error, table_after_over_before=drift,
        host=dataclasses.asdict(host), load_average=os.getloadavg()[0], rows=rows,
    )  # fmt: skip
