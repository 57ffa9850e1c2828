r"""Adapters beside none: engines of one process take turns at the same decodes.

    python benchmarks/features.py --study adapters [CONFIG] [--num-seqs 64] [--num-adapters 64] [--rank 16]
                                                   [--targets q_proj v_proj]

Three ways to run the same prompts: an engine without adapters ("off"), one with adapters enabled and requests without any
("unused"), and the same with a different adapter for each request ("used"). Weights and adapters are random. Each round runs
all three, in an order that turns round by round; a ratio is the median over rounds of seconds over those of "off" in the same
round. Answers have a fixed length, and prompts are short, so that nearly all of it is decoding.

Beside the ratio of "used" stands its floor: what reading the adapters once a step adds to reading the weights and cache once.
All modules of an 8B model with 64 adapters of rank 16 are 5.4 GB, two thirds of its FP8 weights: no kernel makes that cheap,
and the default is PEFT's own for Llama, q_proj and v_proj. A load is measured from files that the page cache holds, through
validation, until the adapter is on the device.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import torch
from safetensors.torch import save_file

from slipstream import LLM, LoRARequest, SamplingParams
from slipstream.spec.adapters import CONFIG_NAME, WEIGHTS_NAME
from slipstream.spec.description import read_spec

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PROMPT_TOKENS = 16


def shapes(config: Path, targets: tuple[str, ...]) -> dict[str, tuple[int, int]]:
    """Shapes (out, in) of a Llama's modules, by name."""
    spec = read_spec(config).spec
    found = {}
    for i, layer in enumerate(spec.layers):
        a, m, e = layer.attention, layer.mlp, spec.hidden_size
        sizes = {
            "self_attn.q_proj": (a.q_size, e),
            "self_attn.k_proj": (a.kv_size, e),
            "self_attn.v_proj": (a.kv_size, e),
            "self_attn.o_proj": (e, a.q_size),
            "mlp.gate_proj": (m.intermediate_size, e),
            "mlp.up_proj": (m.intermediate_size, e),
            "mlp.down_proj": (e, m.intermediate_size),
        }
        found |= {
            f"model.layers.{i}.{k}": v for k, v in sizes.items() if k.rpartition(".")[2] in targets
        }
    return found


def write_adapter(folder: Path, modules: dict[str, tuple[int, int]], rank: int, seed: int) -> None:
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    (folder / CONFIG_NAME).write_text(
        json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank})
    )
    tensors = {}
    for name, (out, inner) in modules.items():
        for side, shape in (("A", (rank, inner)), ("B", (out, rank))):
            value = torch.randn(shape, generator=generator).mul_(0.01).to(torch.bfloat16)
            tensors[f"base_model.model.{name}.lora_{side}.weight"] = value
    save_file(tensors, folder / WEIGHTS_NAME)


def measure(
    llm: LLM, prompts: list[Any], sampling: SamplingParams, adapters: list[LoRARequest | None]
) -> float:
    """Seconds a token of a sequence."""
    begin = time.perf_counter()
    llm.generate(prompts, sampling, lora_request=adapters, progress=False)
    return (time.perf_counter() - begin) / (sampling.max_tokens or 1)


def measure_load(llm: LLM, request: LoRARequest) -> float:
    """Seconds until an adapter is on the device."""
    runner = llm.core.executor.runner
    begin = time.perf_counter()
    llm.load_adapter(request)
    runner.adapters.place([request], ())
    runner.platform.synchronize()
    return time.perf_counter() - begin


RECORD = "lora"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", nargs="?", type=Path, default=common.CONFIGS / "llama-3-8b")
    parser.add_argument("--num-seqs", type=int, default=64)
    parser.add_argument("--num-adapters", type=int, default=64)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--targets", nargs="+", choices=ALL, default=["q_proj", "v_proj"])
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quantization", default="fp8")
    parser.add_argument("--device", default="auto")


def run(args: argparse.Namespace, save: Callable[..., None]) -> None:
    modules = shapes(args.config, tuple(args.targets))
    record: dict[str, Any] = {"settings": {k: str(v) for k, v in vars(args).items()}}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for i in range(args.num_adapters + 4):
            write_adapter(folder / str(i), modules, args.rank, i)
        requests = [
            LoRARequest(f"a{i}", i + 1, str(folder / str(i))) for i in range(args.num_adapters + 4)
        ]
        on_gpu = (
            {"gpu_memory_utilization": 0.4}
            if torch.cuda.is_available() and args.device != "cpu"
            else {}
        )
        shared = dict(
            load_format="dummy",
            device=args.device,
            quantization=None if args.quantization == "none" else args.quantization,
            max_num_seqs=args.num_seqs,
            max_model_len=PROMPT_TOKENS + args.max_tokens,
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
        )
        off = LLM(str(args.config), **shared, **on_gpu)
        both = {"gpu_memory_utilization": 0.85} if on_gpu else {}
        lora = dict(
            enable_lora=True,
            max_loras=args.num_adapters,
            max_lora_rank=args.rank,
            max_cpu_loras=args.num_adapters + 4,
        )
        on = LLM(str(args.config), **shared, **lora, **both)
        prompts = [
            {"prompt_token_ids": [(7 * i + 31 * s) % 1000 + 3 for i in range(PROMPT_TOKENS)]}
            for s in range(args.num_seqs)
        ]
        sampling = SamplingParams(temperature=0, max_tokens=args.max_tokens, ignore_eos=True)
        used = [requests[i % args.num_adapters] for i in range(args.num_seqs)]
        none: list[LoRARequest | None] = [None] * args.num_seqs
        ways = {"off": (off, none), "unused": (on, none), "used": (on, used)}
        for llm, adapters in ways.values():  # graphs are captured, kernels compiled
            measure(llm, prompts, sampling, adapters)
        found: dict[str, list[float]] = {name: [] for name in ways}
        names = list(ways)
        for r in range(args.rounds):
            for name in names[r % 3 :] + names[: r % 3]:
                llm, adapters = ways[name]
                found[name].append(measure(llm, prompts, sampling, adapters))
        loads = [measure_load(on, request) for request in requests[args.num_adapters :]]
        numbers = sum(args.rank * (out + inner) for out, inner in modules.values())
        ledger = off.ledger
        adapters_bytes = 2 * numbers * min(args.num_adapters, args.num_seqs)
        cache = (
            args.num_seqs
            * (PROMPT_TOKENS + args.max_tokens // 2)
            * ledger.block_bytes
            / ledger.block_size
        )
        record |= {
            "ms_a_step": {
                name: round(1e3 * statistics.median(values), 4) for name, values in found.items()
            },
            "ratio": {
                name: round(
                    statistics.median(a / b for a, b in zip(values, found["off"], strict=True)), 4
                )
                for name, values in found.items()
            },
            "floor_of_used": round(1 + adapters_bytes / (ledger.weights_bytes + cache), 4),
            "adapter_bytes": 2 * numbers,
            "load_ms": [round(1e3 * s, 1) for s in loads],
            "rounds": found,
        }
    print(json.dumps({k: v for k, v in record.items() if k != "rounds"}, indent=1))
    save(**record)
