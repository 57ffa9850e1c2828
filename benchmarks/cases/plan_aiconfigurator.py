"""AIConfigurator's estimates of the recorded loads on an H200, beside ours and what was measured.

    python -m venv aic && aic/bin/pip install aiconfigurator
    python benchmarks/plan.py --study aiconfigurator --aiconfigurator aic/bin/aiconfigurator [--backends vllm,trtllm]

It estimates other engines (vLLM, TensorRT-LLM) in a steady state of one length, so that it is told a load's mean lengths and
how many requests run at once: the users of a closed loop, and with arrivals in time, by Little's law, the rate times the
latency that it estimates itself. Its databases are its own.
"""

from __future__ import annotations

import argparse
import re
import subprocess
from collections.abc import Callable

import common
from cases.plan_prediction import TARGETS, errors, recorded

from slipstream.bench.report import print_table
from slipstream.simulate.traffic import mean_lengths, parse_workload

USERS = {"1024": 1024, "256": 256, "64": 64}
RATES = {"poisson-40": 40.0, "poisson-90": 90.0}
COUNTS = {"poisson-40": 800, "poisson-90": 1200, "1024": 2000, "256": 768, "64": 256}
FIGURES = {
    "ttft": r"TTFT:\s+([\d.,]+) ms",
    "tpot": r"TPOT:\s+([\d.,]+) ms",
    "throughput": r"tokens/s:\s+([\d.,]+)",
}
LATENCY = r"Request Latency:\s+([\d.,]+) ms"
ROUNDS = 4
"""Of Little's law."""


def lengths_of(load: str) -> tuple[int, int]:
    workload = parse_workload("fixed:512/128" if load == "256" else "sharegpt")
    n_in, n_out = mean_lengths(list(workload.take(COUNTS[load])))
    return round(n_in), round(n_out)


def ask(command: str, backend: str, load: str, batch: int) -> dict[str, float]:
    n_in, n_out = lengths_of(load)
    words = [
        command,
        "cli",
        "estimate",
        "--model-path",
        str(common.CONFIGS / "llama-3-8b"),
        "--system",
        "h200_sxm",
    ]
    words += [
        "--backend",
        backend,
        "--isl",
        str(n_in),
        "--osl",
        str(n_out),
        "--batch-size",
        str(batch),
    ]
    words += [
        "--gemm-quant-mode",
        "fp8",
        "--kvcache-quant-mode",
        "fp8",
        "--no-color",
        "--log-level",
        "ERROR",
    ]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    text = done.stdout + done.stderr
    found = {
        name: re.search(pattern, text) for name, pattern in {**FIGURES, "latency": LATENCY}.items()
    }
    if any(match is None for match in found.values()):
        raise SystemExit(text[-2000:])
    values = {
        name: float(match[1].replace(",", "")) for name, match in found.items() if match is not None
    }
    return {name: value if name == "throughput" else value / 1e3 for name, value in values.items()}


def estimated(command: str, backend: str, load: str) -> dict[str, float]:
    batch = USERS.get(load, 32)
    found = ask(command, backend, load, batch)
    for _ in range(ROUNDS if load in RATES else 0):
        batch = max(1, round(RATES[load] * found["latency"]))
        found = ask(command, backend, load, batch)
    if load in RATES:  # what comes is answered, the last request a latency after it came
        seconds = COUNTS[load] / RATES[load] + found["latency"]
        found["throughput"] = COUNTS[load] * lengths_of(load)[1] / seconds
    return {**{name: found[name] for name in FIGURES}, "batch": batch}


RECORD = "aiconfigurator"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--aiconfigurator", required=True, metavar="COMMAND")
    parser.add_argument("--backends", default="vllm,trtllm")


def run(args: argparse.Namespace, save: Callable[..., None]) -> None:
    rows = recorded()
    for row in rows:
        for backend in args.backends.split(","):
            found = estimated(args.aiconfigurator, backend, row["load"])
            row[backend] = {
                **found,
                "errors": errors({n: found[n] for n in FIGURES}, row["measured"]),
            }
            print(row["load"], backend, row[backend], flush=True)
    names = ("predicted", *args.backends.split(","))
    means = {
        who: {
            n: sum((r if who == "predicted" else r[who])["errors"][n] for r in rows) / len(rows)
            for n in TARGETS
        }
        for who in names
    }
    shown = [
        (who.replace("predicted", "slipstream"), *(f"{m[n]:.1%}" for n in TARGETS))
        for who, m in means.items()
    ]
    print_table("mean error", ("estimates", *TARGETS), shown)
    version = subprocess.run(
        [args.aiconfigurator, "version"], capture_output=True, text=True, check=False
    ).stdout.strip()
    save(aiconfigurator=version.splitlines()[-1:], mean_errors=means, rows=rows)
