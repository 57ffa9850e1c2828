"""Time of the scheduler for a step of decodes: schedule() and update(), without a model.

    python benchmarks/steps.py --study scheduler [--num-seqs 1024] [--windows 0]

Prompts of different lengths are admitted, then steps of one token each are timed. The median of a step is printed in
microseconds. Compare two versions in turns, since the machine's speed changes from minute to minute.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable

from slipstream.config import CacheConfig, SchedulingConfig
from slipstream.core.make import make_scheduler as make_scheduler_of
from slipstream.core.scheduler import Scheduler
from slipstream.messages.requests import EngineRequest
from slipstream.messages.steps import StepResult
from slipstream.params.sampling import SamplingParams
from slipstream.spec.model import CacheGroup

STEPS = 200


def make_scheduler(
    num_seqs: int,
    num_windows: int,
    *,
    max_num_seqs: int | None = None,
    num_blocks: int | None = None,
) -> Scheduler:
    """A scheduler with `num_seqs` requests, for which there is room."""
    groups = (
        CacheGroup(kind="full"),
        *(CacheGroup(kind="window", window=128) for _ in range(num_windows)),
    )
    scheduling = SchedulingConfig(
        policy="inflight",
        max_num_seqs=max_num_seqs or num_seqs,
        max_num_batched_tokens=65536,
        max_num_mixed_tokens=65536,
        enable_chunked_prefill=True,
        batch_window_s=0.0,
        max_queue=None,
    )
    cache = CacheConfig(
        dtype="bfloat16",
        block_size=16,
        gpu_memory_utilization=0.9,
        kv_cache_bytes=None,
        enable_prefix_caching=True,
        groups=groups,
    )
    num_blocks = num_blocks or num_seqs * 80 * (1 + num_windows)
    scheduler = make_scheduler_of(scheduling, cache, max_model_len=4096, num_blocks=num_blocks)
    for i in range(num_seqs):
        prompt = tuple((7 * i + j) % 1000 for j in range(100 + i % 64))
        sampling = SamplingParams(max_tokens=1000)
        scheduler.add(
            EngineRequest(
                request_id=f"request-{i}",
                prompt_token_ids=prompt,
                sampling=sampling,
                max_tokens=1000,
            )
        )
    return scheduler


def step(scheduler: Scheduler) -> int:
    plan = scheduler.schedule()
    assert plan is not None
    count = sum(s.num_sampled for s in plan.scheduled)
    scheduler.update(plan, StepResult(plan.step_id, [5] * count))
    return count


RECORD = "scheduler_steps"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--num-seqs", type=int, default=1024)
    parser.add_argument(
        "--windows", type=int, default=0, help="groups with a window beside the full one"
    )


def run(args: argparse.Namespace, save: Callable[..., None]) -> None:
    scheduler = make_scheduler(args.num_seqs, args.windows)
    while step(scheduler) < args.num_seqs:
        pass
    times = []
    gc.disable()  # as the engine has it while it works
    for _ in range(STEPS):
        begin = time.perf_counter()
        plan = scheduler.schedule()
        middle = time.perf_counter()
        assert plan is not None
        result = StepResult(plan.step_id, [5] * args.num_seqs)
        begin += time.perf_counter() - middle
        scheduler.update(plan, result)
        times.append(time.perf_counter() - begin)
    median, least = statistics.median(times) * 1e6, min(times) * 1e6
    print(f"{args.num_seqs} decodes: {median:.0f} us a step, {least:.0f} at best")
    save(num_seqs=args.num_seqs, windows=args.windows, median_us=median, least_us=least)
