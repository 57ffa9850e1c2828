"""One GPU, one model shape, one scheme: start, decode of one sequence, time to first token, throughput of several loads.

    python benchmarks/gpu_table.py OUT.json [--quantization fp8] [--kv-cache-dtype fp8] [--loads 128/128x1024,…] [--profile]

Random weights and token ids, greedy, no end-of-sequence, no prefix cache, all requests of a load submitted at once: as the
peers in the README were measured. Prints and writes each figure as it comes. --profile adds where the GPU's time goes
in decode steps and, by the engine's own steps, what share of a run the GPU was busy.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def process_age() -> float:
    """Seconds since this process was started."""
    ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


class Bench:
    def __init__(self, args: argparse.Namespace) -> None:
        phases = {"interpreter": process_age()}
        begin = time.perf_counter()
        import torch

        from slipstream import LLM, SamplingParams

        self.torch, self.sampling_params = torch, SamplingParams
        phases["imports"] = time.perf_counter() - begin
        self.llm = LLM(
            str(HERE / "configs" / args.config),
            load_format="dummy",
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            max_num_seqs=args.seqs,
            max_num_batched_tokens=args.budget,
            max_model_len=args.max_model_len,
            quantization=args.quantization,
            kv_cache_dtype=args.kv_cache_dtype,
            deterministic=args.deterministic,
        )
        phases.update(self.llm.phases)
        self.rng, self.budget = random.Random(0), args.budget
        self.vocab = self.llm.core.description.spec.vocab_size
        self.result: dict[str, Any] = {
            "command": " ".join(sys.argv),
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "triton": __import__("triton").__version__,
            "tile_table": self.llm.core.tiles.describe(),
        }
        self.run([(128, 1)])
        self.note("start_to_first_token_s", process_age())
        self.note("phases_s", phases)
        self.note("ledger", self.llm.ledger.describe())
        self.out = Path(args.out)

    def note(self, name: str, value: Any) -> None:
        self.result[name] = value
        print(f"{name}: {json.dumps(value)}", flush=True)

    def requests(self, lengths: list[tuple[int, int]]) -> list[Any]:
        made = []
        for n_in, n_out in lengths:
            prompt = {"prompt_token_ids": [self.rng.randrange(self.vocab) for _ in range(n_in)]}
            sampling = self.sampling_params(temperature=0, max_tokens=n_out, ignore_eos=True)
            made.append(self.llm._input.prepare(prompt, sampling))
        return made

    def submit(self, requests: list[Any]) -> None:
        for r in requests:
            self.llm._output.add(r)
            self.llm.core.add(r.engine_requests)

    def run(self, lengths: list[tuple[int, int]]) -> float:
        """Seconds from submission to the last token."""
        prompts = [{"prompt_token_ids": [self.rng.randrange(self.vocab) for _ in range(n)]} for n, _ in lengths]
        sampling = [self.sampling_params(temperature=0, max_tokens=n, ignore_eos=True) for _, n in lengths]
        begin = time.perf_counter()
        self.llm.generate(prompts, sampling, progress=False)
        return time.perf_counter() - begin

    def single(self, n_in: int, n_out: int) -> tuple[float, float]:
        """(time to first token, time per token after it) in ms, of one request alone."""
        (request,) = self.requests([(n_in, n_out)])
        begin = time.perf_counter()
        self.submit([request])
        first = None
        while self.llm._output:
            self.llm._step()
            if first is None and self.llm.core._generated_tokens > self.seen:
                first = time.perf_counter()
        end = time.perf_counter()
        self.seen = self.llm.core._generated_tokens
        assert first is not None
        return (first - begin) * 1e3, (end - first) / max(1, n_out - 1) * 1e3

    def singles(self) -> None:
        self.seen = self.llm.core._generated_tokens
        self.single(128, 32)
        decode = [self.single(128, 256) for _ in range(3)]
        self.note("decode_batch_1_ms", sorted(s[1] for s in decode)[1])
        for length in (n for n in (128, 2048) if n < self.llm.config.model.max_model_len):
            self.note(f"ttft_{length}_ms", sorted(self.single(length, 1)[0] for _ in range(7))[3])

    def load(self, name: str, repeat: int) -> None:
        """`name` is IN/OUTxREQUESTS or sharegptxREQUESTS, and *TIMES behind it if that is not `repeat`."""
        name, _, times = name.partition("*")
        kind, _, count = name.partition("x")
        if kind == "sharegpt":
            rows = json.loads((HERE / "data" / "sharegpt-lengths.json").read_text())["lengths"][: int(count)]
            lengths = [(a, b) for a, b in rows]
        else:
            n_in, n_out = map(int, kind.split("/"))
            lengths = [(n_in, n_out)] * int(count)
        seconds = [self.run(lengths) for _ in range(int(times or repeat))]
        tokens = sum(b for _, b in lengths)
        self.note(name, {"output_tokens_per_s": [tokens / s for s in seconds], "seconds": seconds})

    def busy(self) -> None:
        """Share of a 128/128 run that the GPU computed, from events around each launch."""
        torch, runner = self.torch, self.llm.core.executor.runner
        launch, marks = runner.launch, []

        def timed(plan: Any) -> Any:
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            events[0].record()
            step = launch(plan)
            events[1].record()
            marks.append((sum(s.num_tokens for s in plan.scheduled), *events))
            return step

        runner.launch = timed
        try:
            self.run([(128, 128)] * 1024)
        finally:
            runner.launch = launch
        torch.cuda.synchronize()
        gaps = [a[2].elapsed_time(b[1]) for a, b in itertools.pairwise(marks)]
        total = marks[0][1].elapsed_time(marks[-1][2])
        self.note("gpu_busy", {"share": 1 - sum(gaps) / total, "gaps_over_1_ms": [round(g, 1) for g in gaps if g > 1]})
        steps = [(n, a.elapsed_time(b)) for n, a, b in marks]
        self.note("prefill_steps_ms", [round(t, 1) for n, t in steps if n > 4096])
        self.note("decode_steps_ms", [round(t, 2) for n, t in steps if n == 1024][::16])

    def traced(self, name: str, num_steps: int) -> None:
        """Where the GPU's time goes in that many steps."""
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            for _ in range(num_steps):
                self.llm._step()
            self.torch.cuda.synchronize()
        rows = sorted(trace.key_averages(), key=lambda e: -e.self_device_time_total)[:14]
        total = sum(e.self_device_time_total for e in trace.key_averages())
        table = []
        for e in rows:
            us = e.self_device_time_total
            table.append(f"{us / total:6.1%} {us / e.count:9.1f}us × {e.count / num_steps:g} {e.key[:64]}")
        self.note(name, [f"{total / num_steps / 1e3:.2f} ms a step", *table])
        print("\n".join(table))

    def profile_prefill(self, prompt: int) -> None:
        """Steps of as many prompts as fit the budget, after two that warm the chip."""
        self.submit(self.requests([(prompt, 2)] * (6 * self.budget // prompt)))
        for _ in range(3):
            self.llm._step()
        self.traced(f"profile_prefill_{prompt}", 2)
        while self.llm._output:
            self.llm._step()

    def profile(self, seqs: int, prompt: int) -> None:
        core = self.llm.core
        self.submit(self.requests([(prompt, 64)] * seqs))
        while core.scheduler.num_waiting or any(
            r.num_computed_tokens < r.num_prompt_tokens for r in core.scheduler._running
        ):
            self.llm._step()
        for _ in range(20):
            self.llm._step()
        self.traced(f"profile_{seqs}", 8)
        while self.llm._output:
            self.llm._step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("--config", default="llama-3-8b")
    parser.add_argument("--quantization")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--seqs", type=int, default=1024)
    parser.add_argument("--budget", type=int, default=16384)
    parser.add_argument("--max-model-len", type=int, default=None)
    parser.add_argument("--loads", default="128/128x1024")
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    bench = Bench(args)
    try:
        bench.singles()
        for load in filter(None, args.loads.split(",")):
            bench.load(load, args.repeat)
        if args.profile:
            bench.busy()
            bench.profile(1, 128)
            bench.profile(args.seqs, 128)
            bench.profile_prefill(2048)
    finally:
        bench.out.write_text(json.dumps(bench.result, indent=1) + "\n")


if __name__ == "__main__":
    main()
