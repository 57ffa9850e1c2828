"""What the C++ kernels of a CPU reach, by weights' precision, and where a step goes, operator by operator, against its floor.

    python benchmarks/cpu_native.py [--forms 'as stored' int8] [--isa avx2]

SmolLM2-135M-Instruct from its packaged GGUF file: `as stored` (Q4_1, head Q8_0), rounded to int8 at load, and blown up to
bfloat16 and float32. First the decoder alone, best of many steps (a busy neighbour only ever adds): one token, 16 and 64
sequences, a prompt of 512. Then the engine: one stream, 16 and 64 requests of 128/128 tokens, greedy, prefill in the time,
median of the rounds. The floor of an operator is the bytes of its weights over what this machine reads per second, measured
here by the largest product. Fidelity stands beside it: perplexity on the text of a file (default: the GPL-3 as Debian has
it), windows of 512 tokens. """

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import common
import torch

from slipstream import LLM, SamplingParams
from slipstream.engine.tokenizer import Tokenizer
from slipstream.hub import resolve_model
from slipstream.kernels import native
from slipstream.kernels.cpu import NativeOps
from slipstream.kernels.metadata import AttentionMetadata, LayerKV
from slipstream.model.decoder import Decoder
from slipstream.model.loader import LoadedModel, load_model
from slipstream.model.program import CpuProgram, compile_program
from slipstream.plan.hardware import available_cores
from slipstream.spec.scheme import SCHEMES

BLOCK = 16
FORMS: dict[str, dict[str, Any]] = {
    "as stored": {},
    "int8": {"quantization": "int8"},
    "bfloat16": {"kernels": "dense"},
    "float32": {"kernels": "dense", "dtype": "float32"},
}


class DenseOps(NativeOps):
    """Blocks are blown up to the model's type."""

    block_types = frozenset()


def load(path: Path, form: str, threads: int, isa: str | None) -> LoadedModel:
    settings = FORMS[form]
    ops = (DenseOps if settings.get("kernels") == "dense" else NativeOps)(threads, isa)
    dtype = torch.float32 if settings.get("dtype") == "float32" else torch.bfloat16
    scheme = SCHEMES["int8"] if "quantization" in settings else None
    return load_model(path, ops=ops, device=torch.device("cpu"), dtype=dtype, max_model_len=2048, scheme=scheme)


def cache(model: LoadedModel, num_blocks: int, dtype: torch.dtype) -> list[LayerKV]:
    a = model.spec.layers[0].attention
    shape = (num_blocks, a.num_kv_heads, BLOCK, a.head_dim)
    return [
        LayerKV(torch.full(shape, 0.01, dtype=dtype), torch.full(shape, 0.01, dtype=dtype)) for _ in model.spec.layers
    ]


def way_of(model: LoadedModel) -> CpuProgram | Decoder:
    """As an engine runs it: as one program where the kernels have such."""
    program = compile_program(model.decoder)
    return program if isinstance(program, CpuProgram) else model.decoder


@torch.inference_mode()
def decoder_part(model: LoadedModel, dtype: torch.dtype, seconds: float) -> dict[str, Any]:
    """Tokens per second of whole steps (hidden states and logits of each sequence's last token), and one step's operators."""
    kv, found, way = cache(model, 64 * 13 + 1, dtype), {}, way_of(model)
    for name, shape in {
        "decode 1": (1, 1, 128),
        "decode 16": (16, 1, 192),
        "decode 64": (64, 1, 192),
        "prefill 512": (1, 512, 512),
    }.items():
        num_seqs, num_new, _ = shape
        meta, tokens = (
            AttentionMetadata.uniform(*shape, block_size=BLOCK),
            torch.randint(0, model.spec.vocab_size, (num_seqs * num_new,), dtype=torch.int32),
        )
        best, until = float("inf"), time.perf_counter() + seconds
        while time.perf_counter() < until or best == float("inf"):
            begin = time.perf_counter()
            way.logits(way.forward(tokens, kv, meta)[num_new - 1 :: num_new])
            best = min(best, time.perf_counter() - begin)
        found[name] = {"step_ms": best * 1e3, "tokens_per_s": num_seqs * num_new / best}
    return found


@torch.inference_mode()
def operators(model: LoadedModel, dtype: torch.dtype) -> list[dict[str, Any]]:
    """One token's step by operator, averaged over many, with the rate at which weights are read."""
    step = compile_program(model.decoder)
    assert isinstance(step, CpuProgram), step
    program = step.programs[0]
    kv, meta, rounds = cache(model, 16, dtype), AttentionMetadata.uniform(1, 1, 128, block_size=BLOCK), 100
    tokens = torch.zeros(1, dtype=torch.int32)
    step.forward(tokens, kv, meta)
    program.profile("wall")
    for _ in range(rounds):
        step.forward(tokens, kv, meta)
    times = program.profile(None)
    rows: dict[tuple[str, int], list[float]] = {}
    for op, ns in zip(program.operators, times, strict=True):
        rows.setdefault((op.name, op.weights.data.numel() if op.weights else 0), []).append(ns / rounds / 1e3)
    return [
        {
            "operator": name,
            "weight_bytes": size,
            "count": len(us),
            "us_each": sum(us) / len(us),
            "gb_per_s": size * len(us) / sum(us) / 1e3,
        }
        for (name, size), us in rows.items()
    ]


@torch.inference_mode()
def perplexity(model: LoadedModel, ids: list[int], dtype: torch.dtype) -> float:
    kv, meta, total, count = cache(model, 33, dtype), AttentionMetadata.uniform(1, 512, 512, block_size=BLOCK), 0.0, 0
    way = way_of(model)
    for i in range(0, len(ids) - 511, 512):
        window = torch.tensor(ids[i : i + 512], dtype=torch.int32)
        logits = way.logits(way.forward(window, kv, meta)).float()
        total += torch.nn.functional.cross_entropy(logits[:-1], window[1:].long(), reduction="sum").item()
        count += 511
    return float(torch.tensor(total / count).exp())


@contextmanager
def engine(path: Path, form: str, threads: int) -> Iterator[LLM]:
    settings = {"quantization": "int8"} if form == "int8" else {}
    with LLM(
        str(path), device="cpu", num_threads=threads, max_model_len=512, enable_prefix_caching=False, **settings
    ) as llm:
        yield llm


def engine_part(path: Path, form: str, threads: int, rounds: int) -> dict[str, float]:
    found = {}
    with engine(path, form, threads) as llm:
        for name, (num_requests, prompt, output) in {
            "1 stream": (1, 32, 256),
            "16 at once": (16, 128, 128),
            "64 at once": (64, 128, 128),
        }.items():
            rates = []
            for seed in range(rounds + 1):
                pick = random.Random(seed)
                prompts = [
                    {"prompt_token_ids": [pick.randrange(100, 49_000) for _ in range(prompt)]}
                    for _ in range(num_requests)
                ]
                begin = time.perf_counter()
                llm.generate(prompts, SamplingParams(temperature=0, max_tokens=output, ignore_eos=True))
                rates.append(num_requests * output / (time.perf_counter() - begin))
            found[name] = common.median(rates[1:])
    return found


def main() -> None:
    parser = common.parser(__doc__, "cpu_native")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--forms", nargs="+", default=list(FORMS), choices=list(FORMS))
    parser.add_argument("--isa", choices=native.instruction_sets())
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--seconds", type=float, default=2.0, help="for each shape of step (default: 2)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--text", type=Path, default=Path("/usr/share/common-licenses/GPL-3"))
    args = parser.parse_args()
    path = resolve_model(args.model)
    ids = Tokenizer.from_pretrained(path).encode(args.text.read_text(encoding="utf-8"))
    result: dict[str, Any] = {}
    for form in args.forms:
        dtype = torch.float32 if form == "float32" else torch.bfloat16
        model = load(path, form, args.threads, args.isa)
        part: dict[str, Any] = {
            "weights_bytes": model.weights_bytes,
            "perplexity": perplexity(model, ids, dtype),
            "decoder": decoder_part(model, dtype, args.seconds),
            "operators": operators(model, dtype),
        }
        del model
        if form in ("as stored", "int8") and args.isa is None:
            part["engine_tokens_per_s"] = engine_part(path, form, args.threads, args.rounds)
        result[form] = part
        print(f"{form}: {part['weights_bytes'] / 1e6:.0f} MB, perplexity {part['perplexity']:.2f}")
        for name, row in part["decoder"].items():
            print(f"  {name:<12} {row['step_ms']:8.2f} ms {row['tokens_per_s']:8.0f} tokens/s")
        for row in part["operators"]:
            print(
                f"    {row['operator']:<16} × {row['count']:<3} {row['us_each']:7.1f} µs  {row['gb_per_s']:6.1f} GB/s"
            )
        for name, rate in part.get("engine_tokens_per_s", {}).items():
            print(f"  engine, {name:<12} {rate:8.0f} output tokens/s")
    isa = args.isa or native.instruction_sets()[-1]
    common.save(args.output, "cpu_native", threads=args.threads, instruction_set=isa, results=result)


if __name__ == "__main__":
    main()
