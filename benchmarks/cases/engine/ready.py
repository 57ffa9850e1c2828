"""Starts on a GPU with no compiled kernels, with a built folder's, and warm; and the longest steps of a first load.

    python benchmarks/engine.py --study ready --quantization fp8 --kv-cache-dtype fp8      about 4 minutes on an H200
    python benchmarks/engine.py --study ready --config tiny --device cpu --seqs 16 --output ready.json

Each start is a process of its own: cold (an empty Triton cache), warm (the same again), built (a folder with kernels, and
another empty cache). `built_s`: the engine answers from here on; `first_s`: the first token of a prompt of 128, sent then;
`ready_s`: graphs that are captured while there is nothing to do are there, too (at most two seconds). `late` are the kernels
that were met only after that. A start's seconds are of `phases_s`; `parts` have the number and the seconds of the C modules
that it compiled for Triton, of kernels read from a cache and loaded onto the GPU (with those modules), and of its waiting for
the process that finds and compiles kernels; `compiled` are the kernels that the start itself compiled.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common

RECORD = "ready_h200"

ONE = r"""
import json, subprocess, sys, time
begin = float(sys.argv[1])
from triton import knobs
from triton.compiler.compiler import CompiledKernel
from triton.runtime import build
from slipstream import LLM, SamplingParams as S
from slipstream.config import EngineArgs
from slipstream.kernels.triton.variants import KernelVariant, noting_new_kernels

marks, steps_ms, parts, compiled = {}, [], {}, []
knobs.compilation.listener = lambda *, src, cache_hit, **_: None if cache_hit else compiled.append(src.name)
imported_s = time.time() - begin


def timed_part(owner, name, label):
    inner = getattr(owner, name)

    def outer(*args, **more):
        start = time.perf_counter()
        try:
            return inner(*args, **more)
        finally:
            count, seconds = parts.get(label, (0, 0.0))
            parts[label] = count + 1, seconds + time.perf_counter() - start

    setattr(owner, name, outer)


timed_part(build, "_build", "c_modules")
timed_part(CompiledKernel, "_init_handles", "kernels_loaded")
timed_part(KernelVariant, "load", "kernels_read")
timed_part(subprocess.Popen, "communicate", "kernels_awaited")
with noting_new_kernels() as met:
    args = EngineArgs(model=sys.argv[2], load_format="dummy", skip_tokenizer_init=True, **json.loads(sys.argv[3]))
    llm = LLM.from_engine_args(args, progress=lambda phase: marks.update({phase: len(met)}))
    built_s = time.time() - begin
    llm.generate({"prompt_token_ids": [*range(3, 131)]}, S(temperature=0, max_tokens=1), progress=False)
    first_s = time.time() - begin
    llm.core.warm(2.0)
    ready_s, ready = time.time() - begin, len(met)
    if sys.argv[4] == "load":
        step = llm.core.step

        def timed():
            start = time.perf_counter()
            made = step()
            steps_ms.append((time.perf_counter() - start) * 1e3)
            return made

        llm.core.step = timed
        longest = llm.config.model.max_model_len - 80
        ways = [S(temperature=0, max_tokens=32, ignore_eos=True), S(temperature=0.8, max_tokens=32)]
        ways += [S(temperature=0.8, top_p=0.95, max_tokens=32)]
        ways += [S(temperature=0.8, top_k=50, min_p=0.02, top_p=0.9, max_tokens=16)]
        ways += [S(temperature=0, logprobs=5, max_tokens=16), S(temperature=0.7, presence_penalty=0.4, max_tokens=16)]
        ways += [S(temperature=0, prompt_logprobs=1, max_tokens=2)]

        def prompt(length, first=0):
            return {"prompt_token_ids": [(first + j) % 250 + 3 for j in range(max(1, min(length, longest)))]}

        for n in (1, 2, 3, 5, 8, 16, 17, 33, 64, 65, 128, 200):
            for way in ways:
                llm.generate([prompt((37 * i + 11 * n) % 300 + 1, 7 * i) for i in range(n)], way, progress=False)
        for length in (1000, 4000, longest):
            llm.generate([prompt(length)] * 2, ways[0], progress=False)
print(json.dumps({"imported_s": imported_s, "built_s": built_s, "first_s": first_s, "ready_s": ready_s, "parts": parts,
    "compiled": compiled,
    "phases_s": llm.phases, "num_met_before_cache": marks.get("cache"),
    "met_by_start": met[marks.get("cache", 0):ready], "late": met[ready:], "steps": len(steps_ms),
    "worst_steps_ms": sorted(steps_ms)[-8:]}))
"""
BUILD = """
import json, sys
from pathlib import Path
from slipstream.config import EngineArgs
from slipstream.config.engine_folder import EngineFolder, write_engine_folder
from slipstream.engine.folder import this_machine
from slipstream.optimize.folder import _compile_kernels, described_gpu

path = Path(sys.argv[1])
empty = {name: {} for name in ("settings", "chosen", "versions", "measured")}
write_engine_folder(EngineFolder(path=path, machine=this_machine(), **empty))
args = EngineArgs(model=str(path), load_format="dummy", skip_tokenizer_init=True, **json.loads(sys.argv[2]))
_compile_kernels(args, path, [described_gpu("sm_90")], print)
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", default="llama-3-8b")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--quantization")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--seqs", type=int, default=1024, help="max_num_seqs (default: 1024)")
    parser.add_argument("--no-load", action="store_true", help="starts only")


def run(args: argparse.Namespace, save: Callable[..., None]) -> None:
    settings: dict[str, Any] = {"quantization": args.quantization, "device": args.device}
    settings |= {"kv_cache_dtype": args.kv_cache_dtype, "max_num_seqs": args.seqs}
    found: dict[str, Any] = {"settings": settings}
    with tempfile.TemporaryDirectory() as work:

        def python(program: str, *words: str, cache: str) -> subprocess.CompletedProcess[str]:
            folders = {
                "XDG_CACHE_HOME": f"{work}/{cache}",
                "TRITON_CACHE_DIR": f"{work}/{cache}/triton",
            }
            env = {**common.with_source(), **folders}
            command = [sys.executable, "-c", program, *words]
            return subprocess.run(command, env=env, capture_output=True, text=True, check=False)

        def start(name: str, model: Path, cache: str, load: str = "no") -> None:
            begin = time.time()
            ran = python(ONE, str(begin), str(model), json.dumps(settings), load, cache=cache)
            row = (
                {"error": ran.stderr[-2000:]}
                if ran.returncode
                else json.loads(ran.stdout.splitlines()[-1])
            )
            warned = [line for line in ran.stderr.splitlines() if "kernel" in line][:20]
            found[name] = {**row, "wall_s": time.time() - begin, "warnings": warned}
            shown = {k: v for k, v in found[name].items() if k not in ("late", "met_by_start")}
            print(name, json.dumps(shown), flush=True)
            save(**found)

        model, built = common.CONFIGS / args.config, Path(work) / "built"
        load = "no" if args.no_load else "load"
        start("cold", model, "a", load)
        start("warm", model, "a")
        if args.device == "cpu":
            return
        shutil.copytree(model, built)
        begin = time.time()
        ran = python(BUILD, str(built), json.dumps(settings), cache="b")
        files = [f for f in (built / "kernels").rglob("*") if f.is_file()]
        size = sum(os.path.getsize(f) for f in files) / 2**20
        found["build"] = {"s": time.time() - begin, "mib": size, "stderr": ran.stderr[-1500:]}
        if ran.returncode:
            raise SystemExit(ran.stderr)
        start("built", built, "c", load)
