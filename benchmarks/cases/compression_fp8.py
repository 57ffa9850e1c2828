"""Where FP8's loss comes from: the decoder's products with weights, inputs or both rounded, in many ways.

    python benchmarks/compression.py --study fp8 [--rows "inputs;weights"] [--windows 10] [--layers]

Some of the ways no kernel computes. Each is compared with the exact model on held-out text, all in float32. Weights are
rounded on statistics of the exact model, each layer alone; a recipe rounds each layer on what the ones before it give.
Beside perplexity, KL and top-1 agreement stand the tokens whose likeliest token changed, by the original's margin: the
difference of the log-probabilities of its two likeliest. Rows are kept as they come.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from slipstream.bench.report import print_table
from slipstream.compress.calibrate import InputStats, ObservingOps, Stream, load_ends, load_layer
from slipstream.compress.quantize.rounding import gptq, nearest
from slipstream.engine.tokenizer import Tokenizer
from slipstream.evals.text import TextSettings, calibration_windows, read_windows
from slipstream.hub import resolve_model
from slipstream.spec.description import ModelDescription, read_spec
from slipstream.spec.scheme import FORMATS

CPU = torch.device("cpu")
PRODUCTS = ("attention.qkv", "attention.out", "mlp.up", "mlp.down")
MARGINS = (0.0, 0.05, 0.1, 0.2, 0.4, 0.8)
CALIBRATION = {"num_windows": 32, "context": 512}
Rounding = Callable[[Tensor], Tensor]
Weights = Callable[[int], Mapping[str, Tensor]]
Inputs = Mapping[str, Rounding] | Callable[[int], Mapping[str, Rounding]]
"""By product, in all layers alike or by the layer's number."""


def e4m3(x: Tensor, scales: Tensor) -> Tensor:
    floats: Tensor = (x / scales).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scales
    return floats


def reach(x: Tensor) -> Tensor:
    """The scale that puts a row's largest magnitude on 448."""
    return x.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448


def by_token(x: Tensor) -> Tensor:
    return e4m3(x, reach(x))


def by_power_of_two(x: Tensor) -> Tensor:
    return e4m3(x, reach(x).log2().ceil().exp2())


def by_group(size: int) -> Rounding:
    return lambda x: by_token(x.reshape(-1, size)).view(x.shape)


def mantissa(bits: int) -> Rounding:
    """Floats with so many bits after the point, and exponents without end: nothing is cut off and nothing is subnormal."""

    def rounded(x: Tensor) -> Tensor:
        part, exponent = x.frexp()
        return torch.ldexp((part * 2 ** (bits + 1)).round() / 2 ** (bits + 1), exponent)

    return rounded


class Study:
    """The model's layers in float32, the text they are measured on, and, once asked for, statistics of their inputs."""

    def __init__(self, source: ModelDescription, tokenizer: Tokenizer, text: TextSettings) -> None:
        self.source, self.tokenizer = source, tokenizer
        self.values = [load_layer(source, i, CPU) for i in range(source.spec.num_layers)]
        windows = [w.token_ids for w in read_windows(text, tokenizer)]
        self.stream = Stream(source, windows, device=CPU, dtype=torch.float32)
        self.start, self.ends = (
            self.stream.states,
            load_ends(source, device=CPU, dtype=torch.float32),
        )
        self.exact = self.hidden(lambda i: self.values[i], {})
        self._stats: list[dict[str, InputStats]] | None = None
        self._made: dict[str, list[dict[str, Tensor]]] = {}

    @property
    def stats(self) -> list[dict[str, InputStats]]:
        if self._stats is None:
            windows = calibration_windows(tokenizer=self.tokenizer, **CALIBRATION)
            stream, self._stats = Stream(self.source, windows, device=CPU, dtype=torch.float32), []
            for i, own in enumerate(self.values):
                self._stats.append(stream.observe(i, own, PRODUCTS, inputs={}))
                stream.states = stream.run(i, own, ObservingOps())
        return self._stats

    def rounded(self, how: str) -> list[dict[str, Tensor]]:
        """All layers' weights: "plain" to nearest, "searched" on scales that the inputs weigh, "searched without text",
        "gptq"."""
        if how not in self._made:
            fmt, dtype = FORMATS["fp8"], torch.bfloat16
            self._made[how] = []
            for i, own in enumerate(self.values):
                layer = dict(own)
                for name in PRODUCTS:
                    weight = own[f"{name}.weight"]
                    stats = (
                        None if how in ("plain", "searched without text") else self.stats[i][name]
                    )
                    make = (
                        gptq(weight, fmt, dtype, stats)
                        if how == "gptq" and stats is not None
                        else None
                    )
                    made = make or nearest(weight, fmt, dtype, clip=how != "plain", stats=stats)
                    layer[f"{name}.weight"] = made.dequantized()
                self._made[how].append(layer)
        return self._made[how]

    def weights(self, how: str, products: tuple[str, ...] = PRODUCTS) -> Weights:
        changed = {f"{name}.weight" for name in products}
        return lambda i: {
            n: self.rounded(how)[i][n] if n in changed else v for n, v in self.values[i].items()
        }

    def exact_columns(self, count: int) -> Callable[[int], Mapping[str, Rounding]]:
        """By token, but so many columns not at all: those whose squares, times those of the weights they meet, are largest."""

        def of(i: int) -> Mapping[str, Rounding]:
            return {
                name: keeping(self.stats[i][name], self.values[i][f"{name}.weight"])
                for name in PRODUCTS
            }

        def keeping(stats: InputStats, weight: Tensor) -> Rounding:
            at = (stats.mean_square * weight.square().sum(0)).topk(count).indices
            return lambda x: by_token(x.index_fill(1, at, 0.0)).index_copy(1, at, x[:, at])

        return of

    @torch.no_grad()
    def hidden(self, weights: Weights, inputs: Inputs) -> list[Tensor]:
        states = self.start
        for i in range(len(self.values)):
            ops = ObservingOps(inputs=inputs(i) if callable(inputs) else inputs)
            states = self.stream.run(i, weights(i), ops, states)
        return states

    @torch.no_grad()
    def measure(self, weights: Weights, inputs: Inputs) -> dict[str, Any]:
        kl, lost, same, margin = [], 0.0, [], []
        for batch, a, b in zip(
            self.stream.batches, self.exact, self.hidden(weights, inputs), strict=True
        ):
            scored = (batch.meta.positions.roll(-1) != 0).nonzero()[
                :, 0
            ]  # the next token is of the same window
            rows, targets = (
                (self.ends.finished(x, None)[scored] for x in (a, b)),
                batch.token_ids.roll(-1)[scored],
            )
            for x, y, wanted in zip(*(r.split(256) for r in rows), targets.split(256), strict=True):
                p, q = (self.ends.logits(h).float().log_softmax(-1) for h in (x, y))
                kl.append((p.exp() * (p - q)).sum(-1))
                lost += float((p - q).gather(-1, wanted[:, None]).sum())
                best = p.topk(2)
                same.append(best.indices[:, 0] == q.argmax(-1))
                margin.append(best.values[:, 0] - best.values[:, 1])
        every, agree, apart = torch.cat(kl), torch.cat(same), torch.cat(margin)
        bins = torch.bucketize(apart, torch.tensor(MARGINS), right=True) - 1
        return {
            "perplexity_ratio": math.exp(lost / len(every)),
            "kl_mean": float(every.mean()),
            "kl_p99": float(every.double().quantile(0.99)),
            "top1_agreement": float(agree.float().mean()),
            "num_tokens": len(every),
            "margins": [
                {
                    "from": low,
                    "tokens": float(here.float().mean()),
                    "changed": float((here & ~agree).float().mean()),
                }
                for i, low in enumerate(MARGINS)
                for here in (bins == i,)
            ],
        }


def rows(study: Study) -> dict[str, tuple[Weights, Inputs]]:
    exact: Weights = lambda i: study.values[i]
    token = dict.fromkeys(PRODUCTS, by_token)
    every = lambda how: dict.fromkeys(PRODUCTS, how)
    return {
        "both, plain": (study.weights("plain"), token),
        "both, searched": (study.weights("searched"), token),
        "both, gptq": (study.weights("gptq"), token),
        "both, searched without text": (study.weights("searched without text"), token),
        "weights, plain": (study.weights("plain"), {}),
        "weights, searched": (study.weights("searched"), {}),
        "weights, gptq": (study.weights("gptq"), {}),
        "inputs": (exact, token),
        "inputs, scales of two's powers": (exact, every(by_power_of_two)),
        "inputs by 64": (exact, every(by_group(64))),
        "inputs by 32": (exact, every(by_group(32))),
        "inputs, 16 columns exact": (exact, study.exact_columns(16)),
        "inputs, 64 columns exact": (exact, study.exact_columns(64)),
        "inputs in bfloat16": (exact, every(lambda x: x.bfloat16().float())),
        **{
            f"inputs, {bits} bits of mantissa, any exponent": (exact, every(mantissa(bits)))
            for bits in (3, 4, 5)
        },
        **{
            f"both, plain, {name} alone": (study.weights("plain", (name,)), {name: by_token})
            for name in PRODUCTS
        },
        **{f"inputs, {name} alone": (exact, {name: by_token}) for name in PRODUCTS},
        **{f"both, gptq, but {name}": _without(study, name) for name in PRODUCTS},
        "both, gptq, inputs by 64": (study.weights("gptq"), every(by_group(64))),
    }


def _without(study: Study, product: str) -> tuple[Weights, Inputs]:
    rest = tuple(name for name in PRODUCTS if name != product)
    return study.weights("gptq", rest), dict.fromkeys(rest, by_token)


def layers(study: Study) -> dict[str, tuple[Weights, Inputs]]:
    """Each layer alone."""

    def alone(at: int) -> tuple[Weights, Inputs]:
        return (
            lambda i: study.rounded("gptq")[i] if i == at else study.values[i],
            lambda i: dict.fromkeys(PRODUCTS, by_token) if i == at else {},
        )

    return {f"both, gptq, layer {i} alone": alone(i) for i in range(len(study.values))}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rows", help="names, with semicolons")
    parser.add_argument("--windows", type=int, default=10, help="of 512 tokens (default: 10)")
    parser.add_argument("--layers", action="store_true", help="also each layer alone")


def run(args: argparse.Namespace, save: Callable[..., None]) -> None:
    torch.set_num_threads(1)
    text = TextSettings(context=512, stride=512, num_windows=args.windows)
    settings = {"model": args.model, "text": dataclasses.asdict(text), "calibration": CALIBRATION}
    kept = json.loads(args.output.read_text()) if args.output.is_file() else {}
    results: dict[str, Any] = kept.get("results", {}) if kept.get("settings") == settings else {}
    source = read_spec(resolve_model(args.model))
    study = Study(source, Tokenizer.from_pretrained(source.path), text)
    known = {**rows(study), **(layers(study) if args.layers else {})}
    for name in args.rows.split(";") if args.rows else known:
        if name not in results:
            results[name] = study.measure(*known[name])
            save(settings=settings, results=results)
    print_table(
        f"{args.model}, {args.windows} windows of 512 tokens",
        ("", "perplexity", "KL mean", "KL p99", "top-1"),
        [
            (
                name,
                f"{r['perplexity_ratio'] - 1:+.2%}",
                *(f"{r[k]:.4f}" for k in ("kl_mean", "kl_p99", "top1_agreement")),
            )
            for name, r in results.items()
        ],
    )
