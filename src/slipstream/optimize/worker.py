"""A process that measures one thing of a candidate: `python -m slipstream.optimize.worker`, a job in JSON on its input,
what was found on what was its output when it began. A process each, so that a crash or a leak is one candidate's."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from slipstream.config import EngineArgs
from slipstream.errors import SlipstreamError


def speed(job: dict[str, Any]) -> dict[str, Any]:
    """The figures of the engine under the traffic; a row as a sweep has them."""
    from slipstream.bench.adapters.slipstream import AsyncSlipstream
    from slipstream.bench.load import parse_arrivals, run_load
    from slipstream.bench.metrics import summarize
    from slipstream.bench.power import EnergyMeter
    from slipstream.bench.sweep.results import figures
    from slipstream.bench.workload import warmup
    from slipstream.optimize.traffic import Traffic

    given = job["traffic"]
    traffic = Traffic(**{**given, "lengths": tuple((a, b) for a, b in given["lengths"])})

    async def measure() -> dict[str, Any]:
        async with await AsyncSlipstream.start(EngineArgs(**job["args"])) as engine:
            work = traffic.workload(engine.engine.description.spec.vocab_size)
            arrivals = parse_arrivals(traffic.arrivals)
            await run_load(engine, warmup(work, min(4, len(work.requests))), arrivals, seed=traffic.seed)
            meter = EnergyMeter()
            before = meter.read()
            summary = summarize(await run_load(engine, work.requests, arrivals, seed=traffic.seed), job["objectives"])
            joules = before.joules_until(meter.read())
            ledger, phases = engine.engine.ledger, engine.engine.phases
        if summary.num_failed:
            raise SlipstreamError("; ".join(summary.errors))
        found = {**figures(summary), "start_s": sum(phases.values()), "weights_bytes": ledger.weights_bytes}
        if joules is not None:
            found |= {"energy_j": joules, "power_w": joules / summary.wall_s}
        return found

    return asyncio.run(measure())


def quality(job: dict[str, Any]) -> dict[str, Any]:
    """How far the candidate's answers are from the original's, with standard errors; the receipt goes to `job["folder"]`."""
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
    }


def main() -> None:
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    job = json.loads(sys.stdin.read())
    try:
        found = {"speed": speed, "quality": quality}[job["kind"]](job)
    except Exception as error:  # whatever goes wrong is the candidate's
        text = str(error) if isinstance(error, SlipstreamError) else f"{type(error).__name__}: {error}"
        found = {"error": text}
    replies.write(json.dumps(found))
    replies.flush()


if __name__ == "__main__":
    main()
