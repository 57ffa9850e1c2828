"""Decode steps on Hopper with its own products of few tokens (`hopper_linear`), and without them (`linear`, cuBLAS).

    python benchmarks/steps.py --study products [--config llama-3-8b] [--quantization fp8] [--tokens 2,6,8,16,24,32,48,64]
    python benchmarks/steps.py --study products --config llama-3-70b --ranks 2 --layers 20 --quantization fp8 --tokens 4 \
        --tiles 5120x8192:64/2,8192x4096:64/1     # other tiles of a weight [outputs, inputs]: outputs a thread block / parts

Random weights of the true shape, 300 tokens in the cache of each sequence. A step's graph is captured both ways, and both are
replayed in turns: medians of the GPU's time. `difference`: of the hidden states, relative to their length. Where it is 0 both
ways add up in one order. Elsewhere rounding to 8 bits turns the last bit of a sum into another number, layer after layer.
`--ranks`: a rank's share of the layers, without the sums; `--layers`: the first ones alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import common

from slipstream import LLM

ROUNDS, REPLAYS, CONTEXT = 4, 25, 300


RECORD = "step_products"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", default="llama-3-8b")
    parser.add_argument("--quantization")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--tokens", default="2,6,8,16,24,32,48,64")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--tiles", default="")


def shared_out(args: argparse.Namespace, folder: str) -> str:
    """A folder with the configuration of a rank's share."""
    config = json.loads((common.CONFIGS / args.config / "config.json").read_text())
    config["head_dim"] = (
        config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    )
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"):
        config[name] //= args.ranks
    config["num_hidden_layers"] = args.layers or config["num_hidden_layers"]
    config["bos_token_id"] = config["eos_token_id"] = 0
    (Path(folder) / "config.json").write_text(json.dumps(config))
    return folder


def tiled(text: str, tile: Callable[..., tuple[int, int]]) -> Callable[..., tuple[int, int]]:
    """`hopper_linear._tile` with another tile for one shape: OUTPUTSxINPUTS:OUTPUTS/PARTS, of inputs of a byte."""
    shape, chosen = text.split(":")
    outer, inner = map(int, shape.split("x"))
    block_n, parts = map(int, chosen.split("/"))
    return lambda n, row_bytes, block_m: (
        (block_n, parts) if (n, row_bytes) == (outer, inner) else tile(n, row_bytes, block_m)
    )


def run(args: argparse.Namespace, save: Callable[..., None]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        measure(args, save, shared_out(args, folder))


def measure(args: argparse.Namespace, save: Callable[..., None], model: str) -> None:
    import torch
    from cases.steps_mixed import plans

    from slipstream.kernels.triton import hopper_linear, linear
    from slipstream.worker.graphs.step_graphs import StepGraphs

    options = dict(
        load_format="dummy",
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_model_len=4096,
    )
    llm = LLM(
        model,
        quantization=args.quantization,
        kv_cache_dtype=args.kv_cache_dtype,
        max_num_seqs=64,
        **options,
    )
    runner = llm.core.executor.runner
    others = [path for path in runner.forwards.paths if not isinstance(path, StepGraphs)]
    own, tile = linear._on_hopper, hopper_linear._tile
    ways: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
        "without": (lambda *_: None, tile),
        "with": (own, tile),
    }
    ways |= {text: (own, tiled(text, tile)) for text in filter(None, args.tiles.split(","))}
    rows = []
    for num_seqs in map(int, args.tokens.split(",")):
        graphs, hidden, times = {}, {}, {way: list[float]() for way in ways}
        for way, (product, tiles) in ways.items():
            patched = (
                patch.object(linear, "_on_hopper", product),
                patch.object(hopper_linear, "_tile", tiles),
            )
            with patched[0], patched[1], torch.inference_mode():
                graphs[way] = StepGraphs(runner.forwards, runner.kv, runner.rows, runner.config)
                captured = graphs[way]._decode_graph(num_seqs)
            runner.forget_rows()
            runner.forwards.paths = [graphs[way], *others]
            first, again = plans(num_seqs, CONTEXT, (), runner.config.cache.block_size)
            for plan in (first, again):  # the graph keeps this step's inputs
                runner.launch(plan).result()
            hidden[way] = captured.output[:num_seqs].float().clone()
        for _ in range(ROUNDS):
            for way, held in graphs.items():
                times[way] += runner.platform.timed_replays(
                    held._captured[num_seqs, 0].graph, REPLAYS
                )
        found: dict[str, Any] = {way: statistics.median(values) for way, values in times.items()}
        found["ratio"] = found["with"] / found["without"]
        found["difference"] = float(
            (hidden["with"] - hidden["without"]).norm() / hidden["without"].norm()
        )
        rows.append({"tokens": num_seqs, **found})
        print(json.dumps(rows[-1], indent=1 if args.tiles else None), flush=True)
    settings = {
        name: getattr(args, name)
        for name in ("config", "quantization", "kv_cache_dtype", "ranks", "layers", "tiles")
    }
    save(settings=settings, rows=rows)
