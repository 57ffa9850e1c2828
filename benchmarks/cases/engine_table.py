"""One GPU, one model shape, one scheme: start, decode of one sequence, time to first token, throughput of several loads.

    python benchmarks/engine.py --study table [--quantization fp8] [--kv-cache-dtype fp8] [--loads 128/128x1024,…] [--profile]
    python benchmarks/engine.py --study table --engine transformers --loads 128/128x1,128/128x512

Random weights and token ids, greedy, no end-of-sequence, no prefix cache, all requests of a load submitted at once. A load
is IN/OUTxREQUESTS or sharegptxREQUESTS, with *TIMES behind it where that is not `--repeat`. Each figure is printed and
written as it comes. `--profile` adds the kernels of prefill and decode steps and the share of a run in which the GPU was busy.
With `--engine transformers`, `transformers.generate` takes each load as one static batch in bfloat16.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import common

from slipstream.costs.hardware import seconds_since_process_start

Lengths = list[tuple[int, int]]


def lengths_of(load: str) -> Lengths:
    kind, _, count = load.partition("x")
    if kind == "sharegpt":
        return [(a, b) for a, b in json.loads(common.SHAREGPT.read_text())["lengths"][: int(count)]]
    n_in, n_out = map(int, kind.split("/"))
    return [(n_in, n_out)] * int(count)


class Slipstream:
    def __init__(self, args: argparse.Namespace) -> None:
        begin = time.perf_counter()
        from slipstream import LLM, SamplingParams

        imports = time.perf_counter() - begin
        self.sampling = SamplingParams
        self.llm = LLM(
            str(common.CONFIGS / args.config),
            load_format="dummy",
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            max_num_seqs=args.seqs,
            max_num_batched_tokens=args.budget,
            max_model_len=args.max_model_len,
            quantization=args.quantization,
            kv_cache_dtype=args.kv_cache_dtype,
            deterministic=args.deterministic,
            device=args.device,
        )
        from slipstream.spec.description import read_spec

        self.vocab_size, self.seed = read_spec(common.CONFIGS / args.config).spec.vocab_size, 0
        self.generate([(min(128, self.llm.config.model.max_model_len - 1), 1)])
        self.start = {
            "start_to_first_token_s": seconds_since_process_start(),
            "phases_s": {"imports": imports, **self.llm.phases},
            "ledger": self.llm.ledger.describe(),
        }

    def generate(self, lengths: Lengths) -> tuple[list[Any], float]:
        """Answers, and seconds from submission to the last token."""
        self.seed += 1
        given = common.prompts([n for n, _ in lengths], self.vocab_size, self.seed)
        sampling = [self.sampling(temperature=0, max_tokens=n, ignore_eos=True) for _, n in lengths]
        begin = time.perf_counter()
        answers = self.llm.generate(given, sampling, progress=False)
        return answers, time.perf_counter() - begin

    def run(self, lengths: Lengths) -> float:
        return self.generate(lengths)[1]

    def single(self, n_in: int, n_out: int) -> tuple[float, float]:
        """(time to first token, time a token after it) in ms, of one request alone."""
        ((answer,), _) = self.generate([(n_in, n_out)])
        times = answer.times
        first, rest = times.first_token - times.arrival, times.last_token - times.first_token
        return first * 1e3, rest / max(1, n_out - 1) * 1e3

    def singles(self, note: Callable[[str, Any], None], n_in: int, n_out: int) -> None:
        self.single(n_in, n_out)
        note("decode_batch_1_ms", sorted(self.single(n_in, n_out)[1] for _ in range(3))[1])
        for length in (n for n in (128, 2048) if n < self.llm.config.model.max_model_len):
            note(f"ttft_{length}_ms", sorted(self.single(length, 1)[0] for _ in range(7))[3])

    def profile(self, note: Callable[[str, Any], None], num_seqs: int) -> None:
        for n, prompt in ((1, 128), (num_seqs, 128), (8, 2048)):
            note(f"profile_{n}x{prompt}", common.kernels_of(self.llm, n, prompt))
        note("gpu_busy", self.busy(num_seqs))

    def busy(self, num_seqs: int) -> float:
        """Share of a 128/128 run in which a kernel ran, from the profiler's trace."""
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            self.run([(128, 128)] * num_seqs)
        spans = sorted(
            (e.time_range.start, e.time_range.end)
            for e in trace.events()
            if e.time_range.end > e.time_range.start
        )
        covered, reached = 0.0, spans[0][0]
        for start, end in spans:
            covered += max(0.0, end - max(start, reached))
            reached = max(reached, end)
        return covered / (reached - spans[0][0])


class Transformers:
    """Static batches of `generate`, in bfloat16."""

    def __init__(self, args: argparse.Namespace) -> None:
        import torch
        import transformers

        self.start: dict[str, Any] = {"transformers": transformers.__version__}
        self.torch, self.device = torch, "cuda" if args.device == "auto" else args.device
        self.config = transformers.AutoConfig.from_pretrained(common.CONFIGS / args.config)
        with torch.device(self.device):
            self.model = transformers.AutoModelForCausalLM.from_config(
                self.config, dtype=torch.bfloat16
            ).eval()

    def run(self, lengths: Lengths) -> float:
        torch, (n_in, n_out) = self.torch, lengths[0]
        if set(lengths) != {lengths[0]}:
            raise SystemExit(
                "--engine transformers takes loads of equal requests, such as 128/128x512"
            )
        prompt = torch.randint(0, self.config.vocab_size, (len(lengths), n_in), device=self.device)
        length = {
            "max_new_tokens": n_out,
            "min_new_tokens": n_out,
            "do_sample": False,
            "pad_token_id": 0,
        }
        begin = time.perf_counter()
        with torch.inference_mode():
            self.model.generate(prompt, attention_mask=torch.ones_like(prompt), **length).tolist()
        return time.perf_counter() - begin


RECORD = "llama_table"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--engine", choices=("slipstream", "transformers"), default="slipstream")
    parser.add_argument("--config", default="llama-3-8b")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--quantization")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--seqs", type=int, default=1024, help="max_num_seqs (default: 1024)")
    parser.add_argument(
        "--budget", type=int, default=16384, help="max_num_batched_tokens (default: 16384)"
    )
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument(
        "--single",
        default="128/256",
        help="the request whose decode is timed; '' for none (default: 128/256)",
    )
    parser.add_argument("--loads", default="128/128x1024")
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--profile", action="store_true")


def run(args: argparse.Namespace, save: Callable[..., None]) -> None:
    engine = Slipstream(args) if args.engine == "slipstream" else Transformers(args)
    found: dict[str, Any] = {"engine": args.engine, **engine.start}

    def note(name: str, value: Any) -> None:
        found[name] = value
        print(f"{name}: {json.dumps(value)}", flush=True)
        save(**found)

    if isinstance(engine, Slipstream) and args.single:
        ((n_in, n_out),) = lengths_of(f"{args.single}x1")
        engine.singles(note, n_in, n_out)
    for load in filter(None, args.loads.split(",")):
        name, _, times = load.partition("*")
        lengths = lengths_of(name)
        seconds = [engine.run(lengths) for _ in range(int(times or args.repeat))]
        tokens = sum(n for _, n in lengths)
        note(name, {"output_tokens_per_s": [tokens / s for s in seconds], "seconds": seconds})
    if args.profile and isinstance(engine, Slipstream):
        engine.profile(note, args.seqs)
