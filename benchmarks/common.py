"""Common code of the benchmark scripts: options, records, medians, and the split of a GPU's time."""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slipstream.bench.report import document
from slipstream.costs.environment import plain
from slipstream.costs.hardware import bound_spinning
from slipstream.simulate.traffic import SHAREGPT as SHAREGPT

bound_spinning()  # before a script imports torch, as the command line does: alike for every engine

HERE = Path(__file__).parent
RESULTS, CONFIGS, DATA = HERE / "results", HERE / "configs", HERE / "data"
ABSOLUTE_PATH = re.compile(r"(?<![\w.:/])/(?:[\w.+-]+/)+([\w.+-]+)?")


def parser(description: str | None, name: str) -> argparse.ArgumentParser:
    """The options of a script whose record is `name`.json."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = RESULTS / f"{name}.json"
    made.add_argument(
        "--output", type=Path, default=default, help=f"(default: benchmarks/results/{name}.json)"
    )
    return made


def save(path: Path, name: str, **parts: Any) -> None:
    """Write a record with versions, machine, commit and command. Of an absolute path only its last part is kept."""
    path.parent.mkdir(parents=True, exist_ok=True)
    made = json.loads(json.dumps(document(name, **parts), default=plain))
    del made["definitions"]  # docs/benchmarking.md has them
    path.write_text(lines(without_folders(made)) + "\n", encoding="utf-8")
    print(f"\nwritten: {path}")


def lines(value: Any, indent: str = "", room: int = 160) -> str:
    """JSON with each list and object on one line where it fits, so that a record reads as a table."""
    short = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, dict | list) or not value or len(indent) + len(short) <= room:
        return short
    deeper = indent + " "
    if isinstance(value, dict):
        parts = [
            f"{json.dumps(key, ensure_ascii=False)}: {lines(item, deeper, room)}"
            for key, item in value.items()
        ]
        return "{\n" + ",\n".join(deeper + part for part in parts) + f"\n{indent}}}"
    if all(isinstance(item, int | float | str) for item in value):  # numbers and words fill lines
        filled, row = [], deeper
        for item in value:
            text = json.dumps(item, ensure_ascii=False) + ","
            if len(row) + len(text) > room and row != deeper:
                filled.append(row.rstrip())
                row = deeper
            row += text + " "
        filled.append(row.rstrip().rstrip(","))
        return "[\n" + "\n".join(filled) + f"\n{indent}]"
    parts = [lines(item, deeper, room) for item in value]
    return "[\n" + ",\n".join(deeper + part for part in parts) + f"\n{indent}]"


def without_folders(value: Any) -> Any:
    """`value` with each absolute path in its strings replaced by the path's last part."""
    if isinstance(value, dict):
        return {without_folders(key): without_folders(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_folders(item) for item in value]
    return (
        ABSOLUTE_PATH.sub(lambda found: found[1] or "", value) if isinstance(value, str) else value
    )


def with_source() -> dict[str, str]:
    """The environment in which another environment's Python finds this source."""
    others = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(HERE.parent / "src"), *([others] if others else [])]),
    }


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def prompts(lengths: Sequence[int], vocab_size: int, seed: int = 0) -> list[dict[str, list[int]]]:
    """Prompts of random tokens."""
    import random

    rng = random.Random(seed)
    return [{"prompt_token_ids": [rng.randrange(vocab_size) for _ in range(n)]} for n in lengths]


def kernels_of(llm: Any, num_seqs: int, prompt: int, num_decodes: int = 8) -> dict[str, Any]:
    """Kernels of the steps that prefill `num_seqs` prompts, and of a decode step of as many.

    Both come from the profiler over whole calls of `generate`. A decode step's kernels are those of a call with
    1 + `num_decodes` tokens an answer, less those of a call with one, over `num_decodes`. Milliseconds; kernels under 0.1 %
    are left out.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    from slipstream import SamplingParams

    on_gpu = torch.cuda.is_available()
    given = prompts([prompt] * num_seqs, 500)

    def traced(num_tokens: int) -> dict[str, tuple[int, float]]:
        sampling = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        llm.generate(given, sampling, progress=False)  # captures what is not captured yet
        with profile(
            activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]
        ) as trace:
            llm.generate(given, sampling, progress=False)
            if on_gpu:
                torch.cuda.synchronize()
        return {e.key: (e.count, e.self_device_time_total / 1e3) for e in trace.key_averages()}

    def table(found: dict[str, tuple[float, float]]) -> dict[str, Any]:
        total = sum(ms for _, ms in found.values())
        rows = sorted(found.items(), key=lambda row: -row[1][1])
        kept = [
            {"kernel": key[:80], "calls": calls, "ms": ms}
            for key, (calls, ms) in rows
            if ms > total / 1000
        ]
        return {"ms": total, "kernels": kept[:24]}

    one, more = traced(1), traced(1 + num_decodes)
    decode = {}
    for key, (calls, ms) in more.items():
        before = one.get(key, (0, 0.0))
        decode[key] = ((calls - before[0]) / num_decodes, (ms - before[1]) / num_decodes)
    return {"prefill": table(dict(one)), "decode step": table(decode)}


def run_case(doc: str | None, script: str, *options: str) -> None:
    """Run the file of `cases/` that the options choose, with that file's own options.

    `options` are those that choose: of kernels.py, `--device cpu --op linear` is cases/kernels/cpu_linear.py. A case has
    `add_arguments(parser)` and `run(args, save)`. `save(**parts)` writes its `RECORD`, or kernels_cpu_linear.
    """
    import importlib
    import sys
    from functools import partial

    cases = {}
    for path in sorted((HERE / "cases" / script).glob("*.py")):
        words = path.stem.split("_", len(options) - 1)
        cases[tuple(word.replace("_", "-") for word in words)] = path.stem
    asked = argparse.ArgumentParser(
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
        allow_abbrev=False,
    )
    for option, values in zip(options, zip(*cases, strict=True), strict=True):
        asked.add_argument(f"--{option}", required=True, choices=sorted(set(values)))
    if not any(word.startswith(f"--{option}") for word in sys.argv for option in options):
        asked.print_help()
        raise SystemExit(0 if {"-h", "--help"} & set(sys.argv) else 2)
    known, rest = asked.parse_known_args()
    chosen = tuple(getattr(known, option) for option in options)
    if chosen not in cases:
        asked.error(f"there is no such benchmark: {' '.join(chosen)}")
    case = importlib.import_module(f"cases.{script}.{cases[chosen]}")
    name = getattr(case, "RECORD", f"{script}_{cases[chosen]}")
    own = parser(case.__doc__, name)
    case.add_arguments(own)
    args = own.parse_args(rest)
    case.run(args, partial(save, args.output, name))


def slipstream(*words: str | Path, may_fail: bool = False) -> dict[str, Any]:
    """Output of `slipstream WORDS --json`, run by this Python in a process of its own. With
    `may_fail` it may end with an error, as a load does of which one request failed."""
    import subprocess
    import sys

    command = [sys.executable, "-m", "slipstream", *map(str, words), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=with_source())
    if done.returncode and not (may_fail and done.stdout):
        raise SystemExit(f"{' '.join(map(str, words))}: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found
