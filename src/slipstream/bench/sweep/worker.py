"""A process that loads one engine and measures cases: `python -m slipstream.bench.sweep.worker`,
started by `runner`.

Messages are lines of JSON: an `EngineSetup`, then cases, on standard input; results go to the
original standard output. Output of libraries goes to standard error. It imports nothing that an
engine's own environment may lack."""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any

from slipstream import __version__
from slipstream.bench.adapters import ENGINES, Engine, EngineSetup, Parallel, make_engine
from slipstream.bench.power import EnergyMeter
from slipstream.bench.sweep.results import energy_figures, figures
from slipstream.bench.workload import fixed, warmup
from slipstream.costs.metrics import summarize
from slipstream.errors import SlipstreamError


def measure(
    engine: Engine, meter: EnergyMeter, case: Mapping[str, Any], *, remote: bool = False
) -> dict[str, Any]:
    """Values of the case's row, or the error of one of its requests. The memory of a `remote`
    engine, a server, is unknown."""
    size = case["batch_size"]
    work = fixed(
        size,
        case["input_len"],
        case["output_len"],
        vocab_size=case["vocab_size"],
        seed=case["seed"],
    )
    for _ in range(case["warmup"]):
        engine.run(warmup(work, size))
    before = meter.read()
    records = engine.run(work.requests)
    after = meter.read()
    summary = summarize(records, case["objectives"])
    found = {**figures(summary), **({} if remote else {"peak_memory_bytes": peak_memory()})}
    found |= energy_figures(meter.energy(before, after, summary.wall_s, summary.output_tokens))
    if summary.num_failed:
        found["error"] = "; ".join(summary.errors)
    return found


def _devices(setup: EngineSetup) -> list[str] | None:
    """Devices on which the engine computes; None for a server, whose devices are unknown."""
    if ENGINES[setup.engine].remote:
        return None
    if setup.engine in ("llamacpp", "openvino", "onnxruntime"):
        return ["cpu"]
    if (count := setup.parallel.num_devices) > 1 and setup.setting("device", "auto") != "cpu":
        return [f"cuda:{number}" for number in range(count)]
    return [str(setup.setting("device", "auto"))]


def peak_memory() -> float:
    """Peak memory of this process, in bytes."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def text_of(error: Exception) -> str:
    return str(error) if isinstance(error, SlipstreamError) else f"{type(error).__name__}: {error}"


def version_of(engine: str) -> str | None:
    """Version of the engine's package here; None for a server, whose version may differ."""
    names = {
        "transformers": "transformers",
        "llamacpp": "llama_cpp_python",
        "openvino": "openvino-genai",
        "onnxruntime": "onnxruntime-genai",
        "vllm": "vllm",
    }
    try:
        return __version__ if engine == "slipstream" else version(names[engine])
    except (PackageNotFoundError, KeyError):
        return None


def serve(source: IO[str], replies: IO[str]) -> None:
    def reply(message: Mapping[str, Any]) -> None:
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    given = json.loads(source.readline())
    path = given.pop("path")
    setup = EngineSetup(
        **{
            **given,
            "path": None if path is None else Path(path),
            "parallel": Parallel(**given["parallel"]),
        }
    )
    begin = time.monotonic()
    try:
        engine = make_engine(setup)
    except Exception as error:  # every failure of an engine is an error of its rows
        reply({"error": text_of(error)})
        return
    description = engine.describe()
    config = description.get("config")
    dtype = (
        config.get("dtype")
        if isinstance(config, dict)
        else getattr(getattr(config, "model", None), "dtype", None)
    )
    started = {
        "start_s": time.monotonic() - begin,
        "engine_version": version_of(setup.engine),
        "dtype": dtype,
    }
    reply({name: value for name, value in started.items() if value is not None})
    meter = EnergyMeter(devices=_devices(setup))
    try:
        for line in source:
            try:
                reply(measure(engine, meter, json.loads(line), remote=ENGINES[setup.engine].remote))
            except Exception as error:  # as above
                reply({"error": text_of(error)})
    finally:
        engine.close()


def main() -> None:
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    serve(sys.stdin, replies)


if __name__ == "__main__":
    main()
