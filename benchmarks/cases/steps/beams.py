"""Host time of a step of beam search: the scheduler, its results and the choice of beams, without
a model and a worker.

    python benchmarks/steps.py --study beams [--searches 64] [--beams 4] [--groups 1] [--prompt 1919] [--answer 100]

The searches' beams find tokens and log-probabilities at random. The median of a step in which all beams are computed is printed
in microseconds of processor time, by part. Compare two versions in turns, since the machine's speed changes from minute to
minute.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections import defaultdict
from collections.abc import Callable

import numpy as np
from cases.steps.scheduler import make_scheduler

from slipstream.core.participants.beams import Beams
from slipstream.engine.beams import BeamSearches
from slipstream.messages.beams import BeamsRequest
from slipstream.messages.logprobs import SampledLogprobs
from slipstream.messages.steps import StepPlan, StepResult
from slipstream.params.checks import MAX_LOGPROBS
from slipstream.params.search import BeamSearchParams

VOCAB, MAX_SAMPLED = 50_400, 4096


class Found:
    """Likeliest next tokens at random: runs of a table of them."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._ids = (
            np.argsort(self._rng.random((2 * MAX_SAMPLED, 4 * MAX_LOGPROBS)), axis=1)[
                :, :MAX_LOGPROBS
            ]
            + VOCAB // 2
        )
        self._values = -np.sort(self._rng.exponential(2.0, self._ids.shape), axis=1).astype(
            np.float32
        )

    def result(self, plan: StepPlan, num_top: int) -> StepResult:
        names = tuple([s.request_id for s in plan.scheduled if s.num_sampled])
        num, first = len(names), int(self._rng.integers(MAX_SAMPLED))
        ids, values = (x[first : first + num, :num_top] for x in (self._ids, self._values))
        arrays = values[:, 0], np.ones(num, np.int64), ids, values
        logprobs = SampledLogprobs(
            names, (5,) * num, (num_top,) * num, *(x.tobytes() for x in arrays)
        )
        return StepResult(plan.step_id, (5,) * num, None, (logprobs,) if names else ())


RECORD = "beam_steps"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--searches", type=int, default=64)
    parser.add_argument("--beams", type=int, default=4)
    parser.add_argument("--groups", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=1919)
    parser.add_argument("--answer", type=int, default=100)


def run(args: argparse.Namespace, save: Callable[..., None]) -> None:
    num_beams, searches, found = args.searches * args.beams, BeamSearches(), Found(0)
    scheduler = make_scheduler(
        0,
        0,
        max_num_seqs=num_beams,
        num_blocks=num_beams * (args.prompt + args.answer + 32) // 16 + 2,
    )
    scheduler.join(Beams())
    params = BeamSearchParams(
        beam_width=args.beams,
        max_tokens=args.answer,
        num_beam_groups=args.groups,
        diversity_penalty=0.5 * (args.groups > 1),
    )
    for i in range(args.searches):
        prompt = tuple((7 * i + j) % 1000 for j in range(args.prompt))
        scheduler.add(
            searches.begin(
                BeamsRequest(request_id=f"search-{i}", prompt_token_ids=prompt, params=params)
            )
        )
    steps = defaultdict[str, list[float]](list)
    gc.disable()  # as the engine has it while it works
    while searches:
        at = [time.thread_time()]
        plan = scheduler.schedule()
        at.append(time.thread_time())
        assert plan is not None
        result, made_s = found.result(plan, args.beams), time.thread_time() - at[-1]
        outputs = scheduler.update(plan, result)
        at.append(time.thread_time() - made_s)
        taken = searches.take(outputs)
        at.append(time.thread_time() - made_s)
        for request in taken.new:
            scheduler.add(request)
        scheduler.part(Beams).go_on(taken.steps)
        scheduler.abort(taken.ended)
        at.append(time.thread_time() - made_s)
        if len(plan.scheduled) == num_beams:
            for name, begin, end in zip(
                ("schedule", "take results", "choose", "go on"), at, at[1:], strict=False
            ):
                steps[name].append(end - begin)
            steps["together"].append(at[-1] - at[0])
    print(f"{args.searches} searches of {args.beams} beams, us a step:")
    found_us = {
        name: (statistics.median(seconds) * 1e6, min(seconds) * 1e6)
        for name, seconds in steps.items()
    }
    for name, (median, least) in found_us.items():
        print(f"  {name:14} {median:6.0f}  ({least:.0f} at best)")
    rows = {
        name: {"median_us": median, "least_us": least} for name, (median, least) in found_us.items()
    }
    save(searches=args.searches, beams=args.beams, groups=args.groups, steps=rows)
