r"""Beam search of many prompts at once: summaries a second, and where a step's time goes.

    python benchmarks/engine.py --study beams [--config gpt-j-6b] [--requests 128] [--beams 4] [--prompt 1919] [--answer 128]
                               [--quantization fp8] [--kv-cache-dtype fp8] [--no-share] [--profile] [--output FILE]

Random weights of the true shape and prompts of random tokens; answers end at `--answer` tokens. The same load runs once with
short answers, so that graphs are captured and kernels compiled, and then once under the clock. `--profile` adds the kernels
of some decode steps and of some with prompts, from two more runs with short answers.

The host's stages are CPU time between the calls that they are named after. `wait` is time in which the host waits for the
GPU: without it the GPU was kept waiting. Two steps are in flight, each with half of the beams, since the beams of one half are
chosen while the other half is computed. `gpu` of a step is from the moment the GPU begins it until it has sampled: the sum
over `wall` is the share of time in which the GPU was busy.

The floor counts products at 1,450 TFLOP/s (FP8, dense) and 780 (16 bits), attention of prompts at 780, and bytes at 4.45 TB/s,
all measured (GPU_NOTES.md). Of GPT-J-6B with 4 beams, 1,919 and 128 tokens, FP8 weights and cache, a summary takes:

    prompt          2 · 5.64e9 · 1,919 FLOPs, and 0.84 TFLOP of attention         16.0 ms
    decodes         2 · 5.64e9 · 127 · 4 FLOPs, weights once a step               4.0
    output head     2 · 206e6 · 128 · 4 FLOPs in 16 bits                          0.3
    prompt's keys   127 · 1,919 · 229,376 bytes, once for all four beams          12.6
    beams' keys     127 · 64 · 4 · 229,376 bytes, if the beams share nothing      1.7
    together                                                                      34.5 ms, 29 summaries/s

Reading the prompt's keys once a beam adds 37.7 ms: then 13.8 summaries/s are the most.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import common
import torch

from slipstream import LLM, BeamSearchParams
from slipstream.worker.graphs.step_graphs import SharedPrefixGraphs
from slipstream.worker.host_runner import HostRunner
from slipstream.worker.in_flight import InFlightStep

FP8, DENSE, READ = 1450e12, 780e12, 4.45e12
SHORT = 24
"""Tokens of the answers that warm up."""
PROFILED = 8
"""Steps of a kind."""
DECODES, PROMPTS = "decodes", "with prompts"
"""Kinds of steps."""


class Clock:
    """CPU time by stage, from wrapped methods. A stage inside another is not counted in the outer one."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.calls: Counter[str] = Counter()
        self._inner = [0.0]

    def wrap(self, holder: Any, method: str, stage: str) -> None:
        call: Callable[..., Any] = getattr(holder, method)

        def timed(*args: Any, **named: Any) -> Any:
            self._inner.append(0.0)
            begin = time.perf_counter()
            try:
                return call(*args, **named)
            finally:
                taken = time.perf_counter() - begin
                inner = self._inner.pop()
                self._inner[-1] += taken
                self.seconds[stage] += taken - inner
                self.calls[stage] += 1

        setattr(holder, method, timed)

    def reset(self) -> None:
        self.seconds.clear()
        self.calls.clear()


class Steps:
    """What was launched: (sequences, tokens), and on a GPU the events around it."""

    def __init__(self, runner: Any, on_gpu: bool) -> None:
        self.found: list[tuple[int, int, Any, Any]] = []
        self.profile: Any = None  # of the steps of a kind
        self.profiled_kind = DECODES
        self.num_profiled = 0
        self._launch, self._on_gpu = runner.launch, on_gpu
        runner.launch = self.launch

    def launch(self, plan: Any) -> Any:
        num_tokens = sum(s.num_tokens for s in plan.scheduled)
        kind = DECODES if num_tokens == len(plan.scheduled) else PROMPTS
        profiled = self.profile is not None and kind == self.profiled_kind
        if profiled and self.num_profiled == 0:
            torch.cuda.synchronize()
            self.profile.start()
        self.num_profiled += profiled
        begin = end = None
        if self._on_gpu:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
        step = self._launch(plan)
        if end is not None:
            end.record()
        if profiled and self.num_profiled == PROFILED:
            torch.cuda.synchronize()
            self.profile.stop()
        self.found.append((len(plan.scheduled), num_tokens, begin, end))
        return step

    def table(self) -> list[dict[str, Any]]:
        """By kind: how many steps, their sequences and tokens, and on a GPU their time."""
        if self._on_gpu:
            torch.cuda.synchronize()
        kinds: dict[str, list[tuple[int, int, float]]] = defaultdict(list)
        for seqs, tokens, begin, end in self.found:
            ms = 0.0 if begin is None else begin.elapsed_time(end)
            kinds[DECODES if seqs == tokens else PROMPTS].append((seqs, tokens, ms))
        rows = []
        for kind, steps in kinds.items():
            row: dict[str, Any] = {"kind": kind, "steps": len(steps)}
            row |= {
                name: sum(step[i] for step in steps) / len(steps)
                for i, name in enumerate(("sequences", "tokens"))
            }
            if self._on_gpu:
                row |= {
                    "gpu_ms": common.median([step[2] for step in steps]),
                    "gpu_s": sum(step[2] for step in steps) / 1e3,
                }
            rows.append(row)
        return rows


def watch(llm: LLM) -> tuple[Clock, Steps]:
    core, clock = llm.core, Clock()
    runner, on_gpu = core.executor.runner, core.config.device.info.is_cuda
    steps = Steps(runner, on_gpu)
    clock.wrap(core, "step", "rest of a step")
    clock.wrap(core, "_searched", "choice of beams")
    clock.wrap(core.scheduler, "schedule", "schedule")
    clock.wrap(core.scheduler, "update", "take results")
    clock.wrap(core, "add_beams", "queue")
    clock.wrap(runner, "launch", "rest of a launch")
    clock.wrap(InFlightStep, "result", "results on the host")
    by_torch = not isinstance(runner, HostRunner)
    clock.wrap(runner, "prepare" if by_torch else "_prepared", "rows and uploads")
    clock.wrap(runner.forwards, "run" if by_torch else "hidden", "forward")
    clock.wrap(runner, "sample" if by_torch else "_sample", "sample")
    if on_gpu:
        clock.wrap(torch.cuda.Event, "synchronize", "wait")
    return clock, steps


def floor_s(spec: Any, args: argparse.Namespace) -> dict[str, float]:
    """Seconds of a summary by what takes them, see above. All prompts run at once."""
    numbers = sum(
        p.rows * p.inner for layer in spec.layers for p in layer.weight_shapes(spec.hidden_size)
    )
    heads = sum(layer.attention.num_heads * layer.attention.head_dim for layer in spec.layers)
    width = 1 if args.quantization == "fp8" else 2
    rate = FP8 if width == 1 else DENSE
    token_bytes = spec.kv_bytes_per_token(1 if args.kv_cache_dtype == "fp8" else 2)
    steps, rows = args.answer - 1, args.beams * args.requests
    products = max(2 * numbers * rows / rate, numbers * width / READ) / args.requests
    return {
        "prompt": 2 * numbers * args.prompt / rate + 2 * heads * args.prompt**2 / DENSE,
        "decodes": steps * products,
        "output head": 2 * spec.vocab_size * spec.embed_width * args.beams * args.answer / DENSE,
        "prompt's keys": steps * args.prompt * token_bytes / READ,
        "beams' keys": steps * args.answer / 2 * args.beams * token_bytes / READ,
    }


def profiled(steps: Steps, kind: str, search: Callable[[int], Any]) -> list[dict[str, Any]]:
    """Kernels of a step, the longest first."""
    from torch.profiler import ProfilerActivity, profile

    steps.num_profiled, steps.profiled_kind, steps.profile = (
        0,
        kind,
        profile(activities=[ProfilerActivity.CUDA]),
    )
    search(SHORT)
    found, steps.profile = steps.profile, None
    rows = [
        {
            "kernel": e.key[:80],
            "calls": e.count / PROFILED,
            "ms": e.self_device_time_total / 1e3 / PROFILED,
        }
        for e in found.key_averages()
    ]
    return sorted((row for row in rows if row["ms"] > 0.005), key=lambda row: -row["ms"])[:24]


RECORD = "beams"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", default="gpt-j-6b")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--beams", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=1919)
    parser.add_argument("--answer", type=int, default=128)
    parser.add_argument("--quantization", default="fp8", help="none: the model's own type")
    parser.add_argument("--kv-cache-dtype", default="fp8")
    parser.add_argument("--max-num-seqs", type=int, help="(default: all beams)")
    parser.add_argument("--max-num-batched-tokens", type=int)
    parser.add_argument(
        "--no-share", action="store_true", help="read the prompt's keys once a beam"
    )
    parser.add_argument("--profile", action="store_true")


def run(args: argparse.Namespace, save: Callable[..., None]) -> None:
    began = time.perf_counter()
    llm = LLM(
        str(common.CONFIGS / args.config), load_format="dummy", skip_tokenizer_init=True, device=args.device,
        quantization=None if args.quantization == "none" else args.quantization, kv_cache_dtype=args.kv_cache_dtype,
        max_model_len=args.prompt + args.answer, max_num_seqs=args.max_num_seqs or args.requests * args.beams,
        max_num_batched_tokens=args.max_num_batched_tokens,
    )  # fmt: skip
    runner = llm.core.executor.runner
    if args.no_share and llm.core.config.device.info.is_cuda:
        runner.ops.shares_prefixes = False
        runner.forwards.paths = [
            path for path in runner.forwards.paths if not isinstance(path, SharedPrefixGraphs)
        ]
    spec = llm.core.description.spec
    started = time.perf_counter() - began
    print(
        f"started in {started:.1f} s; the cache holds {llm.ledger.num_kv_tokens:,} tokens",
        flush=True,
    )

    def search(num_tokens: int, seed: int) -> float:
        prompts = common.prompts([args.prompt] * args.requests, spec.vocab_size, seed)
        params = BeamSearchParams(beam_width=args.beams, max_tokens=num_tokens, ignore_eos=True)
        begin = time.perf_counter()
        outputs = llm.beam_search(prompts, params)
        taken = time.perf_counter() - begin
        assert all(len(s.tokens) == args.prompt + num_tokens for o in outputs for s in o.sequences)
        return taken

    print(f"first run: {search(min(SHORT, args.answer), 1):.1f} s", flush=True)
    clock, steps = watch(llm)
    wall = search(args.answer, 2)
    table = steps.table()
    floor = floor_s(spec, args)
    num_steps = len(steps.found)
    found: dict[str, Any] = {
        "summaries_per_s": args.requests / wall,
        "wall_s": wall,
        "share_of_floor": args.requests * sum(floor.values()) / wall,
        "floor_ms_a_summary": {name: 1e3 * s for name, s in floor.items()},
        "host_ms_a_step": {name: 1e3 * s / num_steps for name, s in clock.seconds.items()},
        "steps": table,
        "preemptions": llm.stats().num_preemptions,
    }
    gpu = sum(row.get("gpu_s", 0.0) for row in table)
    print(
        f"\n{found['summaries_per_s']:.2f} summaries/s, {found['share_of_floor']:.0%} of the floor; {wall:.2f} s"
    )
    print(f"{num_steps} steps; ms a step by stage of the host:")
    for name, ms in sorted(found["host_ms_a_step"].items(), key=lambda item: -item[1]):
        print(f"  {name:20} {ms:8.3f}")
    for row in table:
        print(
            "  ".join(
                f"{k} {v:.2f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()
            )
        )
    if gpu:
        waited = clock.seconds["wait"]
        print(
            f"GPU busy for {gpu:.2f} s of {wall:.2f}; the host worked for {wall - waited:.2f} s, waited for {waited:.2f} s"
        )
    if args.profile and gpu:
        found["kernels"] = {  # prompts of their own: those of a run before are in the cache
            kind: profiled(steps, kind, lambda n, seed=seed: search(n, seed))
            for seed, kind in ((3, DECODES), (4, PROMPTS))
        }
        for kind, rows in found["kernels"].items():
            print(f"\nkernels of a step, {kind}, ms")
            for row in rows:
                print(f"  {row['ms']:7.3f}  {row['calls']:5.1f} ×  {row['kernel']}")
    settings = {k: str(v) for k, v in vars(args).items() if k != "output"}
    save(settings=settings, started_s=started, **found)
