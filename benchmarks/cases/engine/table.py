"""One GPU, one model shape, one scheme: start, decode of one sequence, time to first token, throughput of several loads.

    python benchmarks/engine.py --study table [--quantization fp8] [--kv-cache-dtype fp8] [--loads 128/128x1024,…] [--profile]
    python benchmarks/engine.py --study table --config gpt-oss-20b --set num_hidden_layers=36 num_local_experts=128
    python benchmarks/engine.py --study table --gguf
    python benchmarks/engine.py --study table --engine transformers --loads 128/128x1,128/128x512

Random weights and token ids, greedy, no end-of-sequence, no prefix cache, all requests of a load submitted at once. A load
is IN/OUTxREQUESTS or sharegptxREQUESTS, with *TIMES behind it where that is not `--repeat`. Each figure is printed and
written as it comes. `--profile` adds the kernels of prefill and decode steps and the share of a run in which the GPU was busy.
`--set` changes the config: with these two, gpt-oss-20b's is 120b's. `--gguf` takes a file of a Llama's shape in Q4_K_M's types.
With `--engine transformers`, `transformers.generate` takes each load as one static batch in bfloat16.
"""

from __future__ import annotations

import argparse
import json
import math
import struct
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
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


def changed(args: argparse.Namespace) -> Path:
    """The model's folder or file, in a new temporary folder if the config is changed."""
    if not args.set and not args.gguf:
        return common.CONFIGS / args.config
    folder = Path(tempfile.mkdtemp())
    config = json.loads((common.CONFIGS / args.config / "config.json").read_text())
    config |= {name: json.loads(value) for name, _, value in (s.partition("=") for s in args.set)}
    if "layer_types" in config:
        kinds, count = config["layer_types"], config["num_hidden_layers"]
        config["layer_types"] = [kinds[i % len(kinds)] for i in range(count)]
    if args.gguf:
        return write_gguf(folder / "llama.gguf", config)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_gguf(path: Path, c: dict[str, Any]) -> Path:
    """A GGUF file of a Llama's shape in Q4_K_M's types: the header, and a hole of the tensors' size."""
    from slipstream.spec.stored.gguf_types import TYPES

    types = {quant.name: (number, quant) for number, quant in TYPES.items()}
    n, hidden, mlp = c["num_hidden_layers"], c["hidden_size"], c["intermediate_size"]
    kv = hidden // c["num_attention_heads"] * c["num_key_value_heads"]
    tensors = [("token_embd", (c["vocab_size"], hidden), "Q4_K"), ("output_norm", (hidden,), "F32")]
    tensors.append(("output", (c["vocab_size"], hidden), "Q6_K"))
    for i in range(n):
        is_high = i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2
        high = "Q6_K" if is_high else "Q4_K"
        tensors += [(f"blk.{i}.{name}_norm", (hidden,), "F32") for name in ("attn", "ffn")]
        tensors += [
            (f"blk.{i}.{name}", shape, kind)
            for name, shape, kind in (
                ("attn_q", (hidden, hidden), "Q4_K"),
                ("attn_k", (kv, hidden), "Q4_K"),
                ("attn_v", (kv, hidden), high),
                ("attn_output", (hidden, hidden), "Q4_K"),
                ("ffn_gate", (mlp, hidden), "Q4_K"),
                ("ffn_up", (mlp, hidden), "Q4_K"),
                ("ffn_down", (hidden, mlp), high),
            )
        ]
    ints = {"block_count": n, "embedding_length": hidden, "feed_forward_length": mlp}
    ints |= {"context_length": c["max_position_embeddings"], "vocab_size": c["vocab_size"]}
    ints |= {"attention.head_count": c["num_attention_heads"]}
    ints |= {"attention.head_count_kv": c["num_key_value_heads"]}
    floats = {"rope.freq_base": c["rope_theta"], "attention.layer_norm_rms_epsilon": 1e-5}

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    out = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), 1 + len(ints) + len(floats))
    out += text("general.architecture") + struct.pack("<I", 8) + text("llama")
    for key, number in ints.items():
        out += text(f"llama.{key}") + struct.pack("<II", 4, number)
    for key, real in floats.items():
        out += text(f"llama.{key}") + struct.pack("<If", 6, real)
    at = 0
    for name, shape, kind in tensors:
        number, quant = types[kind]
        out += text(f"{name}.weight") + struct.pack("<I", len(shape))
        out += b"".join(struct.pack("<Q", size) for size in reversed(shape))
        out += struct.pack("<IQ", number, at)
        size = math.prod(shape) // quant.block_size * quant.block_bytes
        at += -(-size // 32) * 32
    with path.open("wb") as file:
        file.write(out)
        file.truncate(-(-len(out) // 32) * 32 + at + 64)
    return path


class Slipstream:
    def __init__(self, args: argparse.Namespace) -> None:
        begin = time.perf_counter()
        from slipstream import LLM, SamplingParams

        imports = time.perf_counter() - begin
        self.sampling, self.loaded, self.prompts = SamplingParams, {}, args.prompts
        if args.device != "cpu":
            self.watch_load()
        model = changed(args)
        self.llm = LLM(
            str(model),
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

        self.vocab_size, self.seed = read_spec(model).spec.vocab_size, 0
        self.generate([(min(128, self.llm.config.model.max_model_len - 1), 1)])
        self.start = {
            "start_to_first_token_s": seconds_since_process_start(),
            "phases_s": {"imports": imports, **self.llm.phases},
            "ledger": self.llm.ledger.describe(),
            "load": self.loaded,
        }

    def watch_load(self) -> None:
        """Note the GPU's peak while weights are loaded, before the cache is made."""
        import torch

        from slipstream.model.load import loader
        from slipstream.worker import torch_loading

        load = loader.load_model

        def watched(*given: Any, **how: Any) -> Any:
            if not torch.cuda.is_available():
                return load(*given, **how)
            torch.cuda.reset_peak_memory_stats()
            made = load(*given, **how)
            torch.cuda.synchronize()
            self.loaded["peak_bytes"] = torch.cuda.max_memory_allocated()
            self.loaded["weights_bytes"] = made.weights_bytes
            return made

        loader.load_model = torch_loading.load_model = watched

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
        for length in (n for n in self.prompts if n < self.llm.config.model.max_model_len):
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
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=JSON", help="in the config")
    parser.add_argument("--gguf", action="store_true")
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
    parser.add_argument(
        "--prompts",
        type=int,
        nargs="*",
        default=[128, 2048],
        help="lengths whose times to the first token are measured (default: 128 2048)",
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
