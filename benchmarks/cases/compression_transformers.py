"""Whether transformers reads a compressed checkpoint as Slipstream does: the same tokens, both in float32.

    python benchmarks/compression.py --study transformers [--windows 4]        # needs compressed-tensors

Each recipe is carried out with weights rounded to nearest, since the reading is compared and not the rounding. Both load the
result. Compared are the next token's distributions: KL(Slipstream‖transformers), the largest difference of two logits, and
the share of tokens with the same likeliest one. Slipstream runs its reference kernels. The original, read by both, is the
yardstick.

Where inputs are rounded too, a last bit becomes another code, and the difference grows from layer to layer. So each product
is also compared alone, on the inputs that it has in transformers: the relative error of all outputs.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.bench.report import print_table
from slipstream.compress.dense import load_dense
from slipstream.compress.recipe import parse
from slipstream.compress.run import compress
from slipstream.config import EngineArgs
from slipstream.engine.text.tokenizer import Tokenizer
from slipstream.evals.divergence import token_kl
from slipstream.evals.scorer import Scorer
from slipstream.evals.text import TextSettings, read_windows
from slipstream.hub import resolve_model
from slipstream.spec.description import read_spec

CPU, CONTEXT = torch.device("cpu"), 256
PARTS = {
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.out": ("self_attn.o_proj",),
    "mlp.up": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down": ("mlp.down_proj",),
}
RECIPES: dict[str, list[Any]] = {
    "fp8": [{"quantize": {"bits": 8, "kind": "float", "inputs": "fp8"}}],
    "int8": [{"quantize": {"bits": 8, "inputs": "int8"}}],
    "int8 weights by 64": [{"quantize": {"bits": 8, "group_size": 64}}],
    "int4 by 64": [{"quantize": {"bits": 4, "group_size": 64}}],
    "int4 by 128 where it divides": [{"quantize": {"bits": 4, "group_size": "auto"}}],
    "int3 by 64": [{"quantize": {"bits": 3, "group_size": 64}}],
    "int2 by 32": [{"quantize": {"bits": 2, "group_size": 32}}],
    "int4, down in 8": [
        {"quantize": {"bits": 4, "group_size": 64, "overrides": {"layers.*.mlp.down": {"bits": 8}}}}
    ],
    "2:4": [{"sparsify": {"method": "magnitude", "pattern": "2:4"}}],
}


@torch.no_grad()
def compared(ours: Scorer, path: Path, windows: list[tuple[int, ...]]) -> dict[str, float]:
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    for name, module in theirs.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(
                lambda _, given, out, name=name: seen.__setitem__(name, (given[0][0], out[0]))
            )
    kl, largest, same, count = 0.0, 0.0, 0, 0
    for window in windows:
        a, b = ours.logits(ours.hidden(window)), theirs(torch.tensor([window])).logits[0]
        kl += float(token_kl(a, b).double().sum())
        largest = max(largest, float((a - b).abs().max()))
        same += int((a.argmax(-1) == b.argmax(-1)).sum())
        count += len(window)
    error = total = 0.0
    for i, layer in enumerate(ours.decoder.layers):
        for product, parts in PARTS.items():
            part, _, name = product.partition(".")
            both = [seen[f"model.layers.{i}.{module}"] for module in parts]
            exact = torch.cat([y for _, y in both], dim=-1)
            error += float(
                (ours.decoder.ops.linear(both[0][0], getattr(getattr(layer, part), name)) - exact)
                .square()
                .sum()
            )
            total += float(exact.square().sum())
    return {
        "product_error": (error / total) ** 0.5,
        "kl_mean": kl / count,
        "max_logit_difference": largest,
        "top1_agreement": same / count,
        "num_tokens": count,
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument(
        "--recipes", nargs="+", default=list(RECIPES), choices=list(RECIPES), metavar="NAME"
    )


def run(args: argparse.Namespace, save: Callable[..., None]) -> None:
    torch.set_num_threads(1)
    path = resolve_model(args.model)
    source = read_spec(path)
    text = TextSettings(context=CONTEXT, stride=CONTEXT, num_windows=args.windows)
    windows = [w.token_ids for w in read_windows(text, Tokenizer.from_pretrained(path))]
    results: dict[str, Any] = {}

    def measure(name: str, folder: Path) -> None:
        given = EngineArgs(model=str(folder), device="cpu", dtype="float32", kernels="reference")
        results[name] = compared(Scorer.load(given, context=CONTEXT), folder, windows)
        print(name, json.dumps(results[name]), flush=True)
        save(model=args.model, windows=args.windows, results=results)

    with tempfile.TemporaryDirectory() as temporary:
        dense = Path(temporary) / "dense"
        load_dense(path, dtype=torch.float32, device=CPU).write(dense, dtype=torch.bfloat16)
        measure("as it was, in bfloat16", dense)
        for name in args.recipes:
            out = Path(temporary) / name
            compress(source, parse(RECIPES[name]), out, windows=(), device=CPU, dtype=torch.float32)
            measure(name, out)
    rows = [
        (
            name,
            f"{r['product_error']:.1e}",
            f"{r['kl_mean']:.1e}",
            f"{r['max_logit_difference']:.4f}",
            f"{r['top1_agreement']:.2%}",
        )
        for name, r in results.items()
    ]
    print_table(
        "Slipstream and transformers",
        ("checkpoint", "products", "KL", "largest difference", "same likeliest"),
        rows,
    )
