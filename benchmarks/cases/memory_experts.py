"""A mixture whose experts the host computes beside a GPU: tokens a second beside what the memories allow.

    python benchmarks/memory.py --study experts                                    # the shape of Qwen3 30B-A3B, int8
    python benchmarks/memory.py --study experts --quantization int4 --layers 12

For each number of sequences:

1. `step_ms`: milliseconds of a decode step, the median of three runs (a long run less a short one).
2. `host_bytes`: the experts' bytes that a step reads, by the experts that one decode step chose.
3. `gpu_ms`: the GPU's kernels and copies of a decode step, by the profiler.
4. `bound_ms`: `host_bytes` over the rate at which all threads read the host's memory (measured here), and `gpu_ms`, one after
   the other as a layer has them. `share` is `bound_ms` over `step_ms`.
5. `host_alone_bytes_a_second`: the experts' bytes that the host's products read in a second without the GPU, for the last
   layer's choice in all layers.

And for prompts: milliseconds until the first token, and of one layer's experts, computed by the host and copied to the GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common

ROUNDS = 3


RECORD = "host_experts"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config",
        default="qwen3-30b-a3b",
        help="a folder of benchmarks/configs (default: qwen3-30b-a3b)",
    )
    parser.add_argument("--quantization", default="int8", help="int8, int4 or none (default: int8)")
    parser.add_argument("--layers", type=int, default=None, help="instead of the config's number")
    parser.add_argument("--host-experts", default="all", help="as the engine has it (default: all)")
    parser.add_argument(
        "--hot-expert-bytes", type=int, default=None, help="as the engine has it (default: none)"
    )
    parser.add_argument("--batches", default="1,8,64", help="sequences at once (default: 1,8,64)")
    parser.add_argument(
        "--prompts", default="128,2048", help="tokens of prompts (default: 128,2048)"
    )
    parser.add_argument("--tokens", type=int, default=24, help="tokens of an answer (default: 24)")
    parser.add_argument(
        "--threads",
        type=int,
        default=None,
        help="of the host (default: a core fewer than there are)",
    )


def run(args: argparse.Namespace, save: Callable[..., None]) -> None:
    config = json.loads((common.CONFIGS / args.config / "config.json").read_text())
    config["num_hidden_layers"] = args.layers or config["num_hidden_layers"]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        found = measure(Path(folder), args)
    save(config=args.config, layers=config["num_hidden_layers"], **found)


def measure(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    from slipstream import LLM
    from slipstream.worker.start.roofline import measure_ceilings

    batches = [int(text) for text in args.batches.split(",")]
    lengths = [int(text) for text in args.prompts.split(",") if text]
    settings: dict[str, Any] = dict(
        load_format="dummy", skip_tokenizer_init=True, enable_prefix_caching=False
    )
    settings |= dict(
        max_model_len=max(lengths, default=0) + 512,
        max_num_seqs=max(batches),
        kv_cache_bytes=4 * 2**30,
    )
    settings |= dict(
        num_threads=args.threads,
        host_experts=args.host_experts,
        hot_expert_bytes=args.hot_expert_bytes,
    )
    settings["quantization"] = None if args.quantization == "none" else args.quantization
    begin = time.perf_counter()
    with LLM(str(folder), device="cuda", **settings) as llm:
        runner, ledger = llm.core.executor.runner, llm.core.ledger
        ops = runner.ops
        start_s = time.perf_counter() - begin
        print(
            f"start {start_s:.0f} s; {ops.describe()}; {ledger.host_expert_bytes / 2**30:.1f} GiB on the host",
            flush=True,
        )
        print("phases", {name: round(s, 1) for name, s in runner.phases.items()}, flush=True)
        read = measure_ceilings(ops.host.pool).read
        print(
            f"the host reads {read / 1e9:.0f} GB/s with {ops.host.pool.num_threads} threads",
            flush=True,
        )
        rows = {}
        for batch in batches:
            rows[batch] = decode(llm, ops, batch, args.tokens, read)
            print(f"{batch} sequences: {rows[batch]}", flush=True)
        times = {}
        for length in lengths:
            times[length] = {"first_token_ms": prompt(llm, length), **layer_ms(llm, ops, length)}
            print(f"prompt of {length}: {times[length]}", flush=True)
        return {
            "quantization": args.quantization,
            "host_experts": args.host_experts,
            "hot_expert_bytes": args.hot_expert_bytes,
            "kernels": ops.describe(),
            "copied_from_tokens": ops.copy_from,
            "threads": ops.host.pool.num_threads,
            "host_read_bytes_a_second": read,
            "host_expert_bytes": ledger.host_expert_bytes,
            "gpu_weights_bytes": ledger.weights_bytes,
            "start_s": start_s,
            "phases_s": runner.phases,
            "load_average": os.getloadavg(),
            "sequences": rows,
            "prompts": times,
        }


def decode(llm: Any, ops: Any, batch: int, tokens: int, read: float) -> dict[str, float]:
    chosen = experts_of_a_step(llm, batch)
    layers = [
        x.mlp.experts
        for x in llm.core.executor.runner.model.decoder.layers
        if hasattr(x.mlp, "experts")
    ]
    held = [layer for layer in layers if id(layer.up) in ops._layers]
    hot = [ops._hot[id(layer.up)].held if id(layer.up) in ops._hot else [] for layer in held]
    numbers = [len(own.difference(there)) for own, there in zip(chosen, hot, strict=False)]
    each = [sum(part.stride for w in (layer.up, layer.down) for part in w.parts) for layer in held]
    host_bytes = sum(size * number for size, number in zip(each, numbers, strict=False))
    rounds = [step_seconds(llm, batch, tokens) for _ in range(ROUNDS)]
    host = host_rate(ops, held, batch)
    gpu_ms = common.kernels_of(llm, batch, 3)["decode step"]["ms"]
    step_ms, bound_ms = 1e3 * common.median(rounds), 1e3 * host_bytes / read + gpu_ms
    return {
        "tokens_a_second": 1e3 * batch / step_ms,
        "step_ms": step_ms,
        "experts_a_layer": sum(map(len, chosen)) / len(chosen),
        "of_the_host": sum(numbers) / len(numbers),
        "host_bytes": host_bytes,
        "gpu_ms": gpu_ms,
        "bound_ms": bound_ms,
        "share": bound_ms / step_ms,
        "host_alone_bytes_a_second": host,
    }


def experts_of_a_step(llm: Any, batch: int) -> list[set[int]]:
    """By layer, the experts that one decode step chooses: what a run with one such step counts more than one without."""
    import torch

    counts = llm.core.executor.runner._experts._counts

    def counted(tokens: int) -> list[Any]:
        before = [c.clone() for c in counts.values()]
        generate(llm, batch, tokens)
        torch.cuda.synchronize()
        return [c - b for c, b in zip(counts.values(), before, strict=True)]

    without, one = counted(1), counted(2)
    return [
        set((more - less > 0).nonzero().flatten().tolist())
        for more, less in zip(one, without, strict=True)
    ]


def step_seconds(llm: Any, batch: int, tokens: int) -> float:
    """Of a decode step, by the difference of a long run and a short one."""
    return (generate(llm, batch, tokens + 1) - generate(llm, batch, 1)) / tokens


def generate(llm: Any, batch: int, tokens: int, length: int = 3) -> float:
    from slipstream import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    given = common.prompts([length] * batch, 5000)
    begin = time.perf_counter()
    llm.generate(given, sampling, progress=False)
    return time.perf_counter() - begin


def prompt(llm: Any, length: int) -> float:
    """Milliseconds until a prompt's first token, the least of three."""
    return 1e3 * min(generate(llm, 1, 1, length) for _ in range(ROUNDS))


def layer_ms(llm: Any, ops: Any, num_tokens: int) -> dict[str, float]:
    """Of one layer's experts, in a step of so many tokens, by the host and on the GPU with copied weights."""
    import torch

    decoder, copy_from, found = llm.core.executor.runner.model.decoder, ops.copy_from, {}
    experts = next(x.mlp.experts for x in decoder.layers if hasattr(x.mlp, "experts"))
    x = torch.randn(
        num_tokens, decoder.spec.hidden_size, device=decoder.device, dtype=decoder.dtype
    )
    logits = torch.randn(num_tokens, experts.spec.num_experts, device=decoder.device)
    with torch.inference_mode():
        for way, least in (("host_layer_ms", None), ("copied_layer_ms", 0)):
            ops.copy_from = least
            found[way] = 1e3 * min(
                ops._timed(lambda: ops.moe(x, logits, experts)) for _ in range(ROUNDS)
            )
    ops.copy_from = copy_from
    return found


def host_rate(ops: Any, held: list[Any], batch: int) -> float:
    """Bytes a second of all layers' products on the host, one after the other, with the choice that lies in the memory."""
    from slipstream.kernels.cpu.native import StepInputs

    first, spec = ops._layers[id(held[0].up)], held[0].spec
    chosen = first.given[
        :batch, -2 * spec.num_experts_per_token : -spec.num_experts_per_token
    ].unique()
    number = int((chosen >= 0).sum())
    num_bytes = sum(
        number * part.stride for layer in held for w in (layer.up, layer.down) for part in w.parts
    )
    times = []
    for _ in range(ROUNDS + 1):
        begin = time.perf_counter()
        for layer in held:
            ops._layers[id(layer.up)].program.run(StepInputs(num_tokens=batch))
        times.append(time.perf_counter() - begin)
    return num_bytes / common.median(times[1:])
