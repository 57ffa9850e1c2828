r"""Where a speculating step of one sequence spends its time: the GPU by events and by the profiler, the host by its clock.

    python benchmarks/speculation.py --study stages [MODEL] [--quantizations none fp8] [--forced 3.3] \
        [--config '{"method": "eagle3", "model": HEAD, "num_speculative_tokens": 5}']

Weights are random and acceptance is forced (`benchmarks/speculation.py` says why). Medians over the steps of a run, in µs:

| stage | from, to |
| --- | --- |
| drafts | the launch of the drafter → its last kernel |
| forward | → the last kernel of what `forwards.run` launches: the model's layers, and the greedy end of a step in its graph |
| head and sampler | → the copy of the tokens to the host, behind an end that runs op by op |
| what follows | → the last kernel of what is launched behind the draw, if anything is |
| idle | → the first kernel of the next step: the GPU waits for the host |

The host's spans lie beside them: they say how long its part takes, not what the GPU waits for.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import statistics
import time
import unittest.mock
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import common
import torch
from cases import speculation_speed

from slipstream import LLM, SamplingParams
from slipstream.bench.report import print_table

MARKS = ("drafts", "forward", "head and sampler", "what follows", "idle")


class Stages:
    """Marks the stages of an engine's steps by wrapping what computes them."""

    def __init__(self, llm: LLM) -> None:
        self.core: Any = llm.core
        self.runner: Any = llm.core.executor.runner  # type: ignore[attr-defined]
        self.events: list[list[torch.cuda.Event]] = []
        self.host: dict[str, list[float]] = defaultdict(list)

    def mark(self) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self.events[-1].append(event)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        runner, core = self.runner, self.core
        run, sample, launch = runner.forwards.run, runner.sample, runner.launch
        write = None if runner.draft is None else runner.draft.write_drafts

        def proposed(*args: Any) -> Any:
            assert write is not None
            self.mark()
            return write(*args)

        def ran(batch: Any) -> Any:
            self.mark()
            found = self.timed("forward's launch", run)(batch)
            self.mark()
            return found

        def sampled(*args: Any) -> Any:
            found = sample(*args)
            self.mark()
            return found

        def launched(plan: Any) -> Any:
            self.events.append([])
            begin = time.perf_counter()
            step = launch(plan)
            self.mark()
            self.host["launch"].append(time.perf_counter() - begin)
            wait = step.result

            def result() -> Any:
                begin = time.perf_counter()
                step_result = wait()
                self.host["wait for the result"].append(time.perf_counter() - begin)
                return step_result

            return Waited(step, result)

        with contextlib.ExitStack() as stack:
            for owner, name, own in (
                (runner.forwards, "run", ran),
                (runner, "sample", sampled),
                (runner, "launch", launched),
                (core.scheduler, "schedule", self.timed("schedule", core.scheduler.schedule)),
                (core.scheduler, "update", self.timed("update", core.scheduler.update)),
                (runner, "prepare", self.timed("rows", runner.prepare)),
                (core, "step", self.timed("step, in all", core.step)),
            ):
                stack.enter_context(unittest.mock.patch.object(owner, name, own))
            if write is not None:
                own = self.timed("drafts' launch", proposed)
                stack.enter_context(unittest.mock.patch.object(runner.draft, "write_drafts", own))
            yield

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            begin = time.perf_counter()
            found = call(*args)
            self.host[name].append(time.perf_counter() - begin)
            return found

        return run

    def table(self) -> dict[str, Any]:
        """Median microseconds. The steps of the prompt and the last ones are left out."""
        torch.cuda.synchronize()
        found = defaultdict(list)
        steps = [s for s in self.events[3:-2] if len(s) == len(MARKS)]
        for i, step in enumerate(steps[:-1]):
            marks = [*step, steps[i + 1][0]]
            for name, (a, b) in zip(MARKS, itertools.pairwise(marks), strict=True):
                found[name].append(a.elapsed_time(b) * 1e3)
            found["step"].append(marks[0].elapsed_time(marks[-1]) * 1e3)
        host = {name: statistics.median(s[3:] or s) * 1e6 for name, s in self.host.items()}
        return {
            "gpu_us": {k: statistics.median(v) for k, v in found.items() if v},
            "host_us": host,
            "steps": len(steps),
        }


class Waited:
    """A launched step whose `result` is timed."""

    def __init__(self, step: Any, result: Callable[[], Any]) -> None:
        self._step, self.result = step, result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._step, name)


def kernels(llm: LLM, given: Any, sampling: SamplingParams) -> dict[str, Any]:
    """Kernels of a whole call by name: calls and µs a step. `idle`: while none runs, between the first and the last of the
    middle half of the run."""
    from torch.profiler import ProfilerActivity, profile

    before = llm.core.stats().num_steps
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        llm.generate(given, sampling, progress=False)
        torch.cuda.synchronize()
    steps: float = llm.core.stats().num_steps - before
    spans = sorted(
        (e.time_range.start, e.time_range.end, e.name)
        for e in trace.events()
        if e.device_type.name == "CUDA"
    )
    spans = spans[len(spans) // 4 : 3 * len(spans) // 4]
    steps /= 2
    by_name: dict[str, list[float]] = defaultdict(list)
    end, busy = 0.0, 0.0
    for first, last, name in spans:
        by_name[name[:90]].append(last - first)
        busy += max(0.0, last - max(first, end))
        end = max(end, last)
    rows = sorted(
        ((sum(t) / steps, len(t) / steps, name) for name, t in by_name.items()), reverse=True
    )
    whole = (end - spans[0][0]) / steps
    return {
        "us": whole,
        "busy_us": busy / steps,
        "kernels": [{"us": u, "calls": c, "name": n} for u, c, n in rows[:40]],
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", default=str(common.CONFIGS / "llama-3-8b"))
    parser.add_argument(
        "--config", type=json.loads, action="append", help="a speculative_config; may be repeated"
    )
    parser.add_argument("--quantizations", nargs="+", default=["none", "fp8"])
    parser.add_argument("--forced", type=float, default=3.3)
    parser.add_argument("--num-seqs", type=int, default=1)
    parser.add_argument("--prompt-len", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=192)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-kernels", action="store_true", help="leave the profiler out")


def run(args: argparse.Namespace, save: Callable[..., None]) -> None:
    head = str(common.CONFIGS / "llama-3-8b-eagle3")
    configs = args.config or [{"method": "eagle3", "model": head, "num_speculative_tokens": 5}]
    given = common.prompts([args.prompt_len] * args.num_seqs, 250)
    sampling = SamplingParams(temperature=0, max_tokens=args.max_tokens, ignore_eos=True)
    found: dict[str, Any] = {}
    for quantization in args.quantizations:
        for config in configs:
            shown = json.dumps({k: Path(v).name if k == "model" else v for k, v in config.items()})
            found[f"{quantization} {shown}"] = own = one(
                args, quantization, config, given, sampling
            )
            print(
                f"\n{quantization} {shown}: {own['ms_per_token']:.3f} ms a token (acceptance forced)"
            )
            for part in ("gpu_us", "host_us"):
                print_table(
                    part, ("stage", "µs"), [(k, f"{v:.0f}") for k, v in own["stages"][part].items()]
                )
            if "kernels" in own:
                k = own["kernels"]
                print(
                    f"kernels: {k['us']:.0f} µs a step, of which some run for {k['busy_us']:.0f} (under the profiler)"
                )
                rows = [(f"{r['us']:.1f}", f"{r['calls']:.1f}", r["name"]) for r in k["kernels"]]
                print_table("kernels", ("µs a step", "calls", "kernel"), rows)
    settings = {k: v for k, v in vars(args).items() if k != "output"}
    label = f"acceptance is forced to {args.forced} tokens a verification: random weights"
    save(label=label, settings=settings, runs=found)


def one(
    args: argparse.Namespace, quantization: str, config: Any, given: Any, sampling: SamplingParams
) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "max_num_seqs": max(8, args.num_seqs),
        "max_model_len": 2048,
        "dtype": "bfloat16",
    }
    settings |= {"load_format": "dummy", "skip_tokenizer_init": True}
    settings["quantization"] = None if quantization == "none" else quantization
    with (
        speculation_speed.forced_acceptance(args.forced),
        LLM(args.model, speculative_config=config, **settings) as llm,
    ):
        times = []
        for round_ in range(-2, args.rounds):  # the first compile what is left, and capture graphs
            begin = time.perf_counter()
            llm.generate(given, sampling, progress=False)
            times += [time.perf_counter() - begin] * (round_ >= 0)
        stages = Stages(llm)
        with stages.watched():
            llm.generate(given, sampling, progress=False)
        found = {
            "ms_per_token": statistics.median(times) / args.max_tokens * 1e3,
            "stages": stages.table(),
        }
        if not args.no_kernels:
            found["kernels"] = kernels(llm, given, sampling)
        del stages
    del llm
    gc.collect()
    return found
