"""Starts on a GPU, stage by stage: cold, warm, and from a folder that was built ahead.

    python benchmarks/engine.py --study cold --quantization fp8 --kv-cache-dtype fp8

Random weights of the true shape. Each start is a process of its own. `cold` has an empty Triton cache and no lists of kernels,
`warm` has what `cold` left, `built` is a folder with the kernels that `slipstream build` makes for these settings, and empty
caches. A start ends with
the first token of a prompt of 128. Beside the engine's own phases stand parts of them, in seconds:

    c_modules    C compiled by this process for Triton (its driver and launchers), and their number
    kernel_wait  waiting for the process that finds and compiles kernels, where one was needed
    kernel_read  taking kernels from a cache
    kernel_load  loading them onto the GPU, with `c_modules` in it

`worst_ms` are the longest steps of a load of 1 to 200 requests after the start, and `late` the kernels that they met first.
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

RECORD = "gpu_start_stages"

START = r"""
import json, subprocess, sys, time
begun = float(sys.argv[1])
spent, count = {}, {}
from slipstream import LLM, SamplingParams
from slipstream.config import EngineArgs
imported = time.time() - begun
def timed(owner, name, label):
    inner = getattr(owner, name)
    def outer(*args, **more):
        begin = time.perf_counter()
        try:
            return inner(*args, **more)
        finally:
            spent[label] = spent.get(label, 0.0) + time.perf_counter() - begin
            count[label] = count.get(label, 0) + 1
    setattr(owner, name, outer)
late = []
if sys.argv[4] == "gpu":
    from triton import knobs
    from triton.compiler.compiler import CompiledKernel
    from triton.runtime import build
    from slipstream.kernels.triton.variants import KernelVariant, noting_new_kernels
    timed(build, "_build", "c_modules")
    timed(CompiledKernel, "_init_handles", "kernel_load")
    timed(KernelVariant, "load", "kernel_read")
    timed(subprocess.Popen, "communicate", "kernel_wait")
libraries = time.time() - begun - imported
args = EngineArgs(model=sys.argv[2], load_format="dummy", skip_tokenizer_init=True, **json.loads(sys.argv[3]))
llm = LLM.from_engine_args(args)
made = time.time() - begun
llm.core.warm(2.0)
ready = time.time() - begun
greedy = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
llm.generate([{"prompt_token_ids": list(range(1, 129))}], [greedy], progress=False)
first = time.time() - begun
parts, steps = {k: (round(v, 3), count[k]) for k, v in spent.items()}, []
if sys.argv[5] == "load":
    core, step = llm.core, llm.core.step
    def one():
        begin = time.perf_counter()
        found = step()
        steps.append(1e3 * (time.perf_counter() - begin))
        return found
    core.step = one
    way = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=16, ignore_eos=True)
    with noting_new_kernels() as late:
        for n in (1, 2, 3, 4, 8, 17, 64, 65, 200):
            for how in (greedy, way):
                lengths = [1 + (37 * i + 11 * n) % 300 for i in range(n)]
                texts = [{"prompt_token_ids": [(7 * i + j) % 250 + 3 for j in range(k)]} for i, k in enumerate(lengths)]
                llm.generate(texts, how, progress=False)
print(json.dumps({"import_s": imported, "libraries_s": libraries, "engine_s": made - imported - libraries,
    "graphs_s": ready - made, "first_token_s": first - ready, "all_s": first,
    "phases_s": llm.phases, "parts": parts, "late": list(late)[:20],
    "worst_ms": [round(x, 1) for x in sorted(steps)[-5:]]}))
"""


BUILD = r"""
import json, sys
from pathlib import Path
from slipstream.config import EngineArgs
from slipstream.config.engine_folder import EngineFolder, write_engine_folder
from slipstream.engine.folder import this_machine
from slipstream.optimize.folder import _compile_kernels, described_gpu, kinds_of_gpus
folder = Path(sys.argv[1])
empty = dict(settings={}, chosen={}, versions={}, measured={})
write_engine_folder(EngineFolder(path=folder, machine=this_machine(), **empty))
if sys.argv[3] == "gpu":
    import torch
    args = EngineArgs(model=sys.argv[1], load_format="dummy", skip_tokenizer_init=True, **json.loads(sys.argv[2]))
    kinds = kinds_of_gpus([torch.cuda.get_device_capability()])
    _compile_kernels(args, folder, [described_gpu(kind) for kind in kinds], print)
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", default="llama-3-8b")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--quantization")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument(
        "--starts", nargs="+", default=["cold", "warm", "built"], choices=["cold", "warm", "built"]
    )


def run(args: argparse.Namespace, save: Callable[..., None]) -> None:
    settings = {
        "device": args.device,
        "quantization": args.quantization,
        "kv_cache_dtype": args.kv_cache_dtype,
        "max_model_len": args.max_model_len,
    }
    on = "cpu" if args.device == "cpu" else "gpu"
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as work:

        def ran(command: list[str], caches: str) -> str:
            """Output of a process whose caches are in a folder of that name."""
            own = Path(work, caches)
            env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
            env |= {"XDG_CACHE_HOME": str(own), "TRITON_CACHE_DIR": str(own / "triton")}
            done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(f"{caches}: {done.stderr[-2000:]}")
            warned = [line for line in done.stderr.splitlines() if "kernel" in line]
            print(*warned[:5], sep="\n", end="\n" if warned else "")
            return done.stdout

        def start(name: str, model: Path, caches: str, load: str = "no") -> None:
            given = [repr(time.time()), str(model), json.dumps(settings), on, load]
            lines = ran([sys.executable, "-c", START, *given], caches).splitlines()
            found[name] = json.loads(lines[-1])
            print(name, json.dumps(found[name]), flush=True)
            save(settings=settings | {"config": args.config}, starts=found)

        model = Path(work, "model")
        shutil.copytree(common.CONFIGS / args.config, model)
        start("imports", model, "imports")  # compiles modules, as pip leaves them; reads the disk
        load = "load" if on == "gpu" else "no"
        for name in args.starts:
            if name == "built":
                begun = time.time()
                folder = Path(work, "built")
                shutil.copytree(model, folder)
                ran([sys.executable, "-c", BUILD, str(folder), json.dumps(settings), on], "build")
                print("build, s:", round(time.time() - begun, 1), flush=True)
                start("built", folder, "built", load)
            else:
                start(name, model, "own", load if name == "cold" else "no")
    columns = [k for k in found["imports"] if k.endswith("_s") and k != "phases_s"]
    print("", *columns, sep="\t")
    for name, own in found.items():
        print(name, *(round(own[k], 2) for k in columns), sep="\t")
