"""Which importance and which choice of layers costs least: the model is pruned in memory, without recovery, and its perplexity
measured on held-out text.

    python benchmarks/compression.py --study prune [--model smollm2] [--calibrate 8x256] [--evaluate 4x256]

Layers are ranked in two ways: by block influence, as `prune` does, and by the loss of calibration text without the layer.
"again after each" ranks anew after each layer that was removed.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, get_args

import torch
from cases.compression_recipes import size

from slipstream.bench.report import print_table
from slipstream.compress.dense import DenseModel, load_dense
from slipstream.compress.pipeline import batches
from slipstream.compress.prune import measure, next_token_loss, prune
from slipstream.compress.steps import Importance, PruneSettings
from slipstream.engine.text.tokenizer import Tokenizer
from slipstream.evals.text import TextSettings, calibration_windows, read_windows
from slipstream.hub import resolve_model
from slipstream.model.sequences import SequenceBatch, WholeModel
from slipstream.spec.description import read_spec

CPU = torch.device("cpu")


@torch.no_grad()
def loss(model: DenseModel, text: Sequence[SequenceBatch]) -> float:
    """Nats a token."""
    whole = WholeModel(
        model.spec, model.parameters, max_len=max(b.meta.max_seq_len for b in text)
    ).requires_grad_(False)
    each = [float(next_token_loss(whole.logits(whole.hidden(b)), b)) * b.num_tokens for b in text]
    return sum(each) / sum(b.num_tokens for b in text)


def without(model: DenseModel, layers: Iterable[int]) -> DenseModel:
    chosen = tuple(layers)
    return (
        prune(model, PruneSettings(drop_layers=chosen, importance="magnitude")).model
        if chosen
        else model
    )


def by_influence(
    model: DenseModel, text: Sequence[SequenceBatch], gone: Sequence[int]
) -> list[int]:
    """The layers that are left, least influence first."""
    left = [i for i in range(model.spec.num_layers) if i not in gone]
    smaller = without(model, gone)
    found = measure(smaller.spec, smaller.parameters, text, gradients=False).influence
    return [left[i] for i in sorted(range(len(left)), key=lambda i: found[i])]


def by_loss(model: DenseModel, text: Sequence[SequenceBatch], gone: Sequence[int]) -> list[int]:
    """The layers that are left, the one first whose removal costs least."""
    left = [i for i in range(model.spec.num_layers) if i not in gone]
    found = {i: loss(without(model, [*gone, i]), text) for i in left}
    return sorted(left, key=lambda i: found[i])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument(
        "--calibrate",
        type=size,
        default=(8, 256),
        metavar="NxT",
        help="windows by tokens (default: 8x256)",
    )
    parser.add_argument(
        "--evaluate", type=size, default=(4, 256), metavar="NxT", help="(default: 4x256)"
    )
    parser.add_argument(
        "--parts", nargs="*", default=["channels=0.25", "channels=0.1"], metavar="PART=SHARE"
    )
    parser.add_argument(
        "--layers", nargs="*", type=int, default=[3, 6], metavar="N", help="how many to remove"
    )


def run(args: argparse.Namespace, save: Callable[..., None]) -> None:
    path = resolve_model(args.model)
    model = load_dense(path, dtype=getattr(torch, args.dtype), device=CPU)
    tokenizer = Tokenizer.for_model(read_spec(path))
    num, context = args.calibrate
    calibration = batches(
        calibration_windows(tokenizer=tokenizer, num_windows=num, context=context), CPU
    )
    num, context = args.evaluate
    text = TextSettings(context=context, stride=context, num_windows=num)
    held_out = batches([w.token_ids for w in read_windows(text, tokenizer)], CPU)
    results: dict[str, Any] = {}

    def note(name: str, smaller: DenseModel, begin: float, **more: Any) -> None:
        perplexity = math.exp(min(loss(smaller, held_out), 700.0))
        seconds = time.perf_counter() - begin
        results[name] = {
            "perplexity": perplexity,
            "num_parameters": smaller.spec.num_parameters,
            "seconds": seconds,
            **more,
        }
        save(settings=vars(args), results=results)

    note("dense", model, time.perf_counter())
    for part, share in (given.split("=") for given in args.parts):
        for importance in get_args(Importance):
            begin, settings = (
                time.perf_counter(),
                PruneSettings(importance=importance, **{part: float(share)}),
            )
            note(
                f"{float(share):.0%} of {part}, {importance}",
                prune(model, settings, calibration).model,
                begin,
            )
    for name, rank in (("influence", by_influence), ("loss", by_loss)):
        begin, gone = time.perf_counter(), []
        order = rank(model, calibration, ()) if args.layers else []
        for count in args.layers:
            note(
                f"{count} layers, {name}",
                without(model, order[:count]),
                begin,
                layers=sorted(order[:count]),
            )
        for count in range(1, max(args.layers, default=0) + 1):
            gone.append(rank(model, calibration, gone)[0])
            if count in args.layers:
                note(
                    f"{count} layers, {name} again after each",
                    without(model, gone),
                    begin,
                    layers=sorted(gone),
                )
    rows = [
        (name, f"{r['num_parameters'] / 1e6:.1f}", f"{r['perplexity']:,.2f}")
        for name, r in results.items()
    ]
    print_table(args.model, ("pruned", "million parameters", "perplexity"), rows)
