"""From the start of a process to the first token of its answer, and the memory that one stream takes, on a CPU.

    python benchmarks/cpu_start.py [--model smollm2] [--llamacpp PYTHON] [--openvino PYTHON] [--rounds 5]

Each engine in a process of its own, taking turns; the model's file is in the page cache. The clock is the process's age when
the first of 32 tokens comes, imports included (for Slipstream also without torch's, timed by itself); the memory is the
most that the process ever held. Medians.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from slipstream.plan.hardware import available_cores, seconds_since_process_start

PROMPT, ANSWER = 16, 32


def child(name: str, path: Path, threads: int) -> None:
    found: dict[str, float] = {}
    if name == "slipstream":
        begin = time.perf_counter()
        import torch  # noqa: F401

        found["torch_import_s"] = time.perf_counter() - begin
        from slipstream import LLM, SamplingParams

        llm = LLM(str(path), max_num_seqs=1, max_model_len=1024, num_threads=threads)
        prompt = {"prompt_token_ids": list(range(100, 100 + PROMPT))}
        for _ in llm.stream(prompt, SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True)):
            found.setdefault("first_token_s", seconds_since_process_start() or 0.0)
        found |= {f"phase_{phase}_s": seconds for phase, seconds in llm.core.phases.items()}
        found["without_torch_s"] = found["first_token_s"] - found["torch_import_s"]
    else:
        from cpu_peers import make, requests

        engine = make(name, path, threads)
        age, begin = seconds_since_process_start() or 0.0, time.perf_counter()
        (record,) = engine.run(requests(1, PROMPT, ANSWER))
        found["first_token_s"] = age + record.first_token - begin
    found["peak_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps(found))


def main(arguments: Sequence[str] | None = None) -> None:
    if "--child" in sys.argv:
        parser = argparse.ArgumentParser()
        for option, kind in (("--child", str), ("--model", Path), ("--threads", int)):
            parser.add_argument(option, type=kind)
        args = parser.parse_args(arguments)
        child(args.child, args.model, args.threads)
        return
    import common

    from slipstream.bench.report import print_table
    from slipstream.hub import resolve_model

    parser = common.parser(__doc__, "cpu_start")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--llamacpp", metavar="PYTHON")
    parser.add_argument("--openvino", metavar="PYTHON")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args(arguments)
    path, threads = resolve_model(args.model), available_cores()
    path.read_bytes()
    engines = {"slipstream": sys.executable}
    engines |= {n: p for n, p in (("llamacpp", args.llamacpp), ("openvino", args.openvino)) if p}
    rounds: list[dict[str, dict[str, float]]] = []
    for _ in range(args.rounds):
        rounds.append({})
        for name, python in engines.items():
            command = [python, __file__, "--child", name, "--model", str(path), "--threads", str(threads)]
            done = subprocess.run(command, capture_output=True, text=True, check=False, env=common.with_source())
            if done.returncode:
                raise SystemExit(f"{name}: {done.stderr[-2000:]}")
            rounds[-1][name] = json.loads(done.stdout.splitlines()[-1])
    medians = {n: {k: statistics.median(r[n][k] for r in rounds) for k in rounds[0][n]} for n in engines}
    columns = sorted({k for m in medians.values() for k in m})
    rows = [[n, *(f"{m[c]:.2f}" if c in m else "–" for c in columns)] for n, m in medians.items()]
    print_table("medians", ["", *columns], rows)
    common.save(args.output, "cpu_start", medians=medians, rounds=rounds, threads=threads)


if __name__ == "__main__":
    main()
