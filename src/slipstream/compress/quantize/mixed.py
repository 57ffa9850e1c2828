"""Bits by budget: which product gets how many, so that the divergence is least.

Each product is rounded alone, as it will be (by GPTQ, or to nearest), the rest as it was, and what that does to the
next token's distribution is measured: KL(original‖rounded) on calibration text. That is done with one number of bits; KL is
quadratic in a small error, so that with others it is this one times the ratio of the errors of the product's output when it is
rounded to nearest, which needs no pass through the model. Costs of
different products nearly add up, their errors being nearly independent, and so the choice is a multiple-choice knapsack: one
number of bits for each product, the bytes together within the budget, the sum of costs least. It is solved exactly.

Measuring takes a pass over the text for each product, from its layer on; what comes before it is kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slipstream.compress.calibrate import InputStats, ObservingOps, Stream, load_ends, load_layer
from slipstream.compress.quantize.rounding import gptq, nearest
from slipstream.compress.recipe import Budget, Quantize
from slipstream.errors import ConfigError
from slipstream.model.decoder import Decoder
from slipstream.spec.description import ModelDescription

KEPT_PARAMETERS = 10**9
"""The most parameters of a model that is kept in memory while bits are chosen."""

ROWS_AT_ONCE = 256
"""Rows of logits that are held at once."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A product with so many bits: its bytes, and its cost in nats."""

    bits: int
    num_bytes: int
    kl: float


def solve(options: Sequence[Sequence[Choice]], budget_bytes: int) -> list[Choice]:
    """One choice of each, with bytes that sum to `budget_bytes` at most and the least sum of `kl`. Exact: dynamic programming
    over the reachable sums, of which those that are heavier and no better than another are dropped (Pareto front; Kellerer,
    Pferschy and Pisinger 2004, chapter 11). ConfigError if even the lightest are too heavy."""
    lightest = sum(min(c.num_bytes for c in each) for each in options)
    if lightest > budget_bytes:
        raise ConfigError(
            f"the budget of {budget_bytes:,} bytes is below the {lightest:,} that the fewest bits need; raise average, or "
            "allow fewer bits in choices",
            field="bits.average",
        )
    rest = lightest
    front: list[tuple[int, float, Any]] = [(0, 0.0, None)]  # bytes, cost, (how it was reached before, the last choice)
    for each in options:
        rest -= min(c.num_bytes for c in each)
        reached = (
            (weight + c.num_bytes, cost + c.kl, i, way)
            for weight, cost, way in front
            for i, c in enumerate(each)
            if weight + c.num_bytes + rest <= budget_bytes
        )
        front, best = [], math.inf
        for weight, cost, i, way in sorted(reached, key=lambda state: state[:2]):
            if cost < best:
                front.append((weight, cost, (way, i)))
                best = cost
    chosen: list[Choice] = []
    way = front[-1][2]
    for each in reversed(options):
        way, i = way
        chosen.append(each[i])
    return chosen[::-1]


def choose_bits(
    products: Mapping[str, tuple[int, int, Quantize]],
    budget: Budget,
    costs: Mapping[str, Mapping[int, float]],
    scale_bytes: int,
) -> dict[str, int]:
    """`products` are (rows, inner, settings) by name; those whose settings say a number of bits keep it, outside the budget."""
    names = [n for n, (_, _, settings) in products.items() if isinstance(settings.bits, Budget)]
    options = []
    for name in names:
        rows, inner, settings = products[name]
        sizes = {b: settings.format(inner, b).num_bytes(rows, inner, scale_bytes) for b in budget.choices}
        options.append([Choice(b, sizes[b], costs[name][b]) for b in sorted(budget.choices)])
    num_weights = sum(products[n][0] * products[n][1] for n in names)
    chosen = solve(options, int(budget.average * num_weights / 8))
    return {name: choice.bits for name, choice in zip(names, chosen, strict=True)}


@torch.no_grad()
def measure(
    source: ModelDescription,
    settings: Mapping[str, Quantize],
    budget: Budget,
    windows: Sequence[Sequence[int]],
    *,
    device: torch.device,
    dtype: torch.dtype,
    written: torch.dtype,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, dict[int, float]]:
    """The KL in nats that each product in `settings` (by our names) with each number of bits costs."""
    probe = budget.nearest
    stream, held = Stream(source, windows, device=device, dtype=dtype), dict[int, dict[str, Tensor]]()

    def layer(index: int) -> dict[str, Tensor]:
        """Each is needed once for every product before it: those of a small model are kept."""
        if index in held:
            return held[index]
        values = load_layer(source, index, device)
        if source.spec.num_parameters <= KEPT_PARAMETERS:
            held[index] = values
        return values

    ends, num_layers = load_ends(source, device=device, dtype=dtype), source.spec.num_layers
    before = []  # what each layer reads
    for index in range(num_layers):
        before.append(stream.states)
        stream.states = stream.run(index, layer(index), ObservingOps())
    exact = [_log_probabilities(ends, h.to(device)) for h in stream.states]
    found: dict[str, dict[int, float]] = {}
    for index in range(num_layers):
        values, prefix = layer(index), f"layers.{index}."
        own = [name.removeprefix(prefix) for name in settings if name.startswith(prefix)]
        stream.states = before[index]
        stats = stream.observe(index, values, own, inputs={})
        for name in own:
            weight, asked = values[f"{name}.weight"], settings[prefix + name]
            each = [stats[key] for key in stats if key.partition("@")[0] == name]
            errors = _errors(weight, asked, budget.choices, each, written)
            changed = {**values, f"{name}.weight": _probed(weight, asked, probe, stats.get(name), written)}
            stream.states = stream.run(index, changed, ObservingOps(), before[index])
            for i in range(index + 1, num_layers):
                stream.states = stream.run(i, layer(i), ObservingOps())
            kl = _mean_kl(ends, exact, [h.to(device) for h in stream.states])
            found[prefix + name] = {b: kl * e / max(errors[probe], 1e-30) for b, e in errors.items()}
        progress(index + 1, num_layers)
    return found


def _probed(weight: Tensor, asked: Quantize, bits: int, stats: InputStats | None, written: torch.dtype) -> Tensor:
    """The product's weight with so many bits, as the recipe rounds it; experts' to nearest."""
    fmt = asked.format(weight.shape[1], bits)
    if asked.rounding == "gptq" and stats is not None:
        made = gptq(weight, fmt, written, stats, damping=asked.damping, act_order=asked.act_order, clip=asked.clip)
    else:
        made = nearest(weight, fmt, written, clip=asked.clip)
    return made.numbers()


def _errors(
    weight: Tensor, settings: Quantize, choices: Sequence[int], stats: Sequence[InputStats], written: torch.dtype
) -> dict[int, float]:
    """The squared error of the product's output by bits: tr(d H dᵀ), over the experts if it is of several."""
    found = {}
    for b in choices:
        d = nearest(weight, settings.format(weight.shape[1], b), written, clip=settings.clip).numbers() - weight
        parts = d.chunk(len(stats)) if len(stats) > 1 else [d]
        found[b] = sum(float(((part @ own.hessian) * part).sum()) for part, own in zip(parts, stats, strict=True))
    return found


def _log_probabilities(ends: Decoder, hidden: Tensor) -> Tensor:
    """Of a batch's last hidden states, in 16 bits on the host: a vocabulary times a text is large."""
    rows = ends.finished(hidden, None).split(ROWS_AT_ONCE)
    return torch.cat([ends.logits(r).float().log_softmax(-1).half().cpu() for r in rows])


def _mean_kl(ends: Decoder, exact: Sequence[Tensor], hidden: Sequence[Tensor]) -> float:
    total, count = 0.0, 0
    for p, h in zip(exact, hidden, strict=True):
        for a, rows in zip(p.split(ROWS_AT_ONCE), ends.finished(h, None).split(ROWS_AT_ONCE), strict=True):
            a = a.to(h.device).float().log_softmax(-1)
            total += float((a.exp() * (a - ends.logits(rows).float().log_softmax(-1))).sum())
            count += len(rows)
    return total / count
