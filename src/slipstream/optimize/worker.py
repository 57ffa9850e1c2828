"""A process that measures one thing about one candidate: `python -m slipstream.optimize.worker`.

It reads a job in JSON from standard input and writes the result to its original standard output.
Each job has its own process, so that a crash or a leak affects one candidate only. With arguments
it runs another Slipstream command instead: `python -m slipstream.optimize.worker slipstream
compress …`. Both end when the search ends, even if that is killed."""

from __future__ import annotations

import asyncio
import ctypes
import json
import math
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.config import EngineArgs
from slipstream.errors import SlipstreamError, missing_torch

if TYPE_CHECKING:
    from slipstream.evals.tasks import TaskResult


def speed(job: dict[str, Any]) -> dict[str, Any]:
    """Measure the engine under the traffic; returns a row in the format of a sweep."""
    from slipstream.bench.adapters.slipstream import AsyncSlipstream
    from slipstream.bench.load import parse_arrivals, run_load
    from slipstream.bench.power import EnergyMeter
    from slipstream.bench.sweep.results import energy_figures, figures
    from slipstream.bench.workload import warmup
    from slipstream.costs.metrics import summarize
    from slipstream.optimize.traffic import RecordedTraffic

    traffic = RecordedTraffic.of(job["traffic"])

    async def measure() -> dict[str, Any]:
        async with await AsyncSlipstream.start(EngineArgs(**job["args"])) as engine:
            work = traffic.workload(engine.engine.description.spec.vocab_size)
            arrivals = parse_arrivals(traffic.arrivals)
            await run_load(
                engine, warmup(work, min(4, len(work.requests))), arrivals, seed=traffic.seed
            )
            config = engine.engine.config
            several = config.device.info.is_cuda and config.parallel.num_ranks > 1
            devices = (
                [f"cuda:{rank}" for rank in range(config.parallel.num_ranks)]
                if several
                else [config.device.info.device]
            )
            meter = EnergyMeter(devices=devices)
            before = meter.read()
            summary = summarize(
                await run_load(engine, work.requests, arrivals, seed=traffic.seed),
                job["objectives"],
            )
            energy = meter.energy(before, meter.read(), summary.wall_s, summary.output_tokens)
            ledger = engine.engine.ledger
            phases = engine.engine.phases
            canary = engine.engine.canary
        if summary.num_failed:
            raise SlipstreamError("; ".join(summary.errors))
        start = {"start_s": sum(phases.values()), "weights_bytes": ledger.weights_bytes}
        found = {**figures(summary), **start, **energy_figures(energy)}
        if canary is not None:
            found["canary"] = {"ok": canary.ok, "kl": canary.kl_mean, "most": canary.limit}
        return found

    return asyncio.run(measure())


def replicas(job: dict[str, Any]) -> dict[str, Any]:
    """Measure several engines together under the traffic (`optimize.replicas`)."""
    from slipstream.bench.load import parse_arrivals, run_load
    from slipstream.bench.sweep.results import figures
    from slipstream.bench.workload import warmup
    from slipstream.costs.metrics import summarize
    from slipstream.optimize.replicas import Replicas
    from slipstream.optimize.traffic import RecordedTraffic

    traffic, counts = RecordedTraffic.of(job["traffic"]), job["arrangement"]

    async def measure() -> dict[str, Any]:
        async with await Replicas.start(EngineArgs(**job["args"]), **counts) as engines:
            work = traffic.workload(engines.engines[0].engine.description.spec.vocab_size)
            arrivals = parse_arrivals(traffic.arrivals)
            first = warmup(work, min(4, len(work.requests)))
            await run_load(engines, first, arrivals, seed=traffic.seed)
            before = await engines.handed_tokens()
            records = await run_load(engines, work.requests, arrivals, seed=traffic.seed)
            handed = await engines.handed_tokens() - before
        summary = summarize(records, job["objectives"])
        if summary.num_failed:
            raise SlipstreamError("; ".join(summary.errors))
        return {**counts, **figures(summary), "handed_tokens": handed}

    return asyncio.run(measure())


def quality(job: dict[str, Any]) -> dict[str, Any]:
    """Measure the loss of quality of the candidate against the original, with standard errors.
    Writes the receipt to `job["folder"]`."""
    from slipstream.compress.report import measure, write_receipt
    from slipstream.evals.text import TextSettings

    folder = Path(job["folder"])
    report = measure(
        EngineArgs(**job["original"]),
        EngineArgs(**job["args"]),
        text=TextSettings(**job["text"]),
        name=job["name"],
        speed=False,
        layers=False,
        num_worst=2,
        recipe=job["recipe"],
        tasks=job["tasks"],
        limit=job["limit"],
    )
    write_receipt(report, folder)
    d = report.divergence
    return {
        "kl": d.kl.mean,
        "kl_stderr": d.kl.stderr,
        "perplexity_ratio": d.perplexity_ratio,
        "perplexity_ratio_stderr": d.perplexity_ratio_stderr,
        "top1_agreement": d.top1_agreement,
        "file_bytes": report.compressed.file_bytes,
        "tasks": {
            name: task_loss(*pair) for name, pair in zip(job["tasks"], report.tasks, strict=True)
        },
    }


HIGHER = frozenset(("acc", "acc_norm", "exact_match", "f1", "bleu", "chrf", "mcc"))
LOWER = frozenset((
    "perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte", "ter", "wer", "brier_score", "mae", "mse",
))  # fmt: skip
"""Metrics for which lower is better, used if a task does not define that."""

OF_100 = frozenset(("bleu", "chrf"))


def task_loss(original: TaskResult, found: TaskResult) -> dict[str, Any]:
    """The loss of a task's score, with the standard error of the difference. Both runs answer the
    same questions, so the true error is smaller than this one, which assumes independence. The loss
    is a fraction of the score's scale, or, if lower is better, of the original's value."""
    metric, better = found.metric, found.higher_is_better
    if better is None:
        better = True if metric in HIGHER else False if metric in LOWER else None
    if better is None:
        raise SlipstreamError(
            f"the task {found.name} does not say whether more or less of {metric} is better: it has no loss"
        )
    scale = 100.0 if metric in OF_100 else 1.0
    if not better:
        scale = original.value
        if not scale > 0:
            raise SlipstreamError(
                f"the task {found.name}: {metric} is {scale:g} of the original: no share can be lost"
            )
    loss = (original.value - found.value if better else found.value - original.value) / scale
    errors = [r.stderr / scale for r in (original, found) if r.stderr is not None]
    if len(errors) < 2:
        raise SlipstreamError(
            f"the task {found.name} has no standard error of {found.metric}: no limit is surely kept"
        )
    return {
        "metric": found.metric,
        "original": original.value,
        "value": found.value,
        "loss": loss,
        "stderr": math.hypot(*errors),
        "num_questions": found.num_questions,
    }


def end_with_parent() -> None:
    """Let the kernel end this process when its parent is killed (prctl(2), PR_SET_PDEATHSIG), so
    that it does not slow the next search down."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))


def main() -> None:
    end_with_parent()
    if sys.argv[1:]:
        os.execv(sys.executable, [sys.executable, "-m", *sys.argv[1:]])
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    job = json.loads(sys.stdin.read())
    try:
        found = {"speed": speed, "quality": quality, "replicas": replicas}[job["kind"]](job)
    except Exception as error:  # every failure is a result of the candidate
        error = missing_torch(error) or error
        text = (
            str(error) if isinstance(error, SlipstreamError) else f"{type(error).__name__}: {error}"
        )
        found = {"error": text}
    replies.write(json.dumps(found))
    replies.flush()


if __name__ == "__main__":
    main()
