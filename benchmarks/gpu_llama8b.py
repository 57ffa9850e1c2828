"""One GPU, the shape of Llama-3-8B, random weights and token ids, greedy, no end-of-sequence, no prefix cache.

    python benchmarks/gpu_llama8b.py OUT.json [--profile] [--requests 1024]

Measures: process start to first token by phases; decode at batch 1; time to first token; 128/128 throughput with all
requests submitted at once; KV memory wasted at saturation; and with --profile where the GPU's time goes in decode steps.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path


def process_age() -> float:
    """Seconds since this process was started."""
    import os

    ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--requests", type=int, default=1024)
    parser.add_argument("--budget", type=int, default=16384)
    parser.add_argument("--seqs", type=int, default=1024)
    parser.add_argument("--config", default=str(Path(__file__).parent / "configs" / "llama-3-8b"))
    parser.add_argument("--repeat", type=int, default=2)
    args = parser.parse_args()
    phases = {"interpreter": process_age()}
    begin = time.perf_counter()
    import torch

    from slipstream import LLM, SamplingParams

    phases["imports"] = time.perf_counter() - begin
    begin = time.perf_counter()
    llm = LLM(
        args.config,
        load_format="dummy",
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_num_seqs=args.seqs,
        max_num_batched_tokens=args.budget,
    )
    phases.update(llm.phases)
    phases["engine in all"] = time.perf_counter() - begin
    rng = random.Random(0)

    def prompts(count: int, length: int) -> list[dict[str, list[int]]]:
        return [{"prompt_token_ids": [rng.randrange(128000) for _ in range(length)]} for _ in range(count)]

    def sampling(n: int) -> SamplingParams:
        return SamplingParams(temperature=0, max_tokens=n, ignore_eos=True)

    begin = time.perf_counter()
    llm.generate(prompts(1, 128), sampling(1))
    phases["first token"] = time.perf_counter() - begin
    result: dict[str, object] = {
        "command": " ".join(sys.argv),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": __import__("triton").__version__,
        "start_to_first_token_s": process_age(),
        "phases_s": phases,
        "ledger": llm.ledger.describe(),
    }
    print(json.dumps(result, indent=1), flush=True)

    def first_and_rest(length: int, count: int) -> tuple[float, float]:
        """(TTFT, TPOT) in ms of one request alone."""
        begin = time.perf_counter()
        times = [time.perf_counter() for _ in llm.stream(prompts(1, length)[0], sampling(count))]
        return (times[0] - begin) * 1e3, (times[-1] - times[0]) / max(1, len(times) - 1) * 1e3

    first_and_rest(128, 64)
    singles = [first_and_rest(128, 256) for _ in range(3)]
    result["batch1_decode_ms"] = sorted(s[1] for s in singles)[1]
    result["ttft_128_ms"] = sorted(s[0] for s in singles)[1]
    long = [first_and_rest(2048, 2)[0] for _ in range(4)]
    result["ttft_2048_ms"] = sorted(long)[1]
    print({k: result[k] for k in ("batch1_decode_ms", "ttft_128_ms", "ttft_2048_ms")}, flush=True)

    runs = []
    for _ in range(args.repeat):
        batch = prompts(args.requests, 128)
        core, waste = llm.core, []
        begin, steps = time.perf_counter(), llm.stats().num_steps
        requests = [llm._input.prepare(p, sampling(128)) for p in batch]
        for r in requests:
            llm._output.add(r)
            core.add(r.engine_requests)
        while llm._output:
            llm._step()
            if core._num_steps % 17 == 0:
                s = core.scheduler.stats()
                if s.num_running == min(args.requests, args.seqs):
                    waste.append(s.kv_wasted_tokens / s.kv_allocated_tokens)
        seconds = time.perf_counter() - begin
        runs.append(
            {
                "output_tokens_per_s": args.requests * 128 / seconds,
                "total_tokens_per_s": args.requests * 256 / seconds,
                "seconds": seconds,
                "steps": llm.stats().num_steps - steps,
                "kv_wasted_mean": sum(waste) / max(1, len(waste)),
            }
        )
        print(runs[-1], flush=True)
    result[f"128/128, {args.requests} requests"] = runs

    if args.profile:
        from torch.profiler import ProfilerActivity, profile

        for r in (llm._input.prepare(p, sampling(128)) for p in prompts(args.seqs, 128)):
            llm._output.add(r)
            llm.core.add(r.engine_requests)
        while llm.core.scheduler.num_waiting or any(
            r.num_computed_tokens < r.num_prompt_tokens for r in llm.core.scheduler._running
        ):
            llm._step()
        for _ in range(4):
            llm._step()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as trace:
            for _ in range(6):
                llm._step()
            torch.cuda.synchronize()
        print("6 decode steps under the profiler:", time.perf_counter() - begin)
        table = trace.key_averages().table(sort_by="self_cuda_time_total", row_limit=16, max_name_column_width=60)
        print(table)
        result["profile"] = table
        import cProfile
        import pstats

        profiler = cProfile.Profile()
        profiler.enable()
        for _ in range(10):
            llm._step()
        profiler.disable()
        pstats.Stats(profiler).sort_stats("cumulative").print_stats(25)
    Path(args.out).write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
