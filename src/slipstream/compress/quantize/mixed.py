"""Mixed precision: allocates bits to linear layers within a budget, for the least KL divergence.

1. Each linear layer alone is quantized to one bit width, by GPTQ or to nearest as the recipe says.
   The cost is KL(original‖rounded) of the next token on calibration text. Measuring it takes a pass
   over the text, starting at this layer.
2. For other bit widths the cost is scaled by the ratio of the squared output errors with rounding
   to nearest, since KL is quadratic in a small error. This needs no pass through the model.
3. Errors of different linear layers are nearly independent, so their costs nearly add up. The
   allocation with the smallest sum within the budget is a multiple-choice knapsack problem, which
   is solved exactly."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slipstream.compress.calibrate import InputStats, ObservingOps, Stream, load_ends, load_layer
from slipstream.compress.quantize.rounding import nearest, round_weight
from slipstream.compress.quantize_step import Budget, Quantize
from slipstream.errors import ConfigError
from slipstream.model.decoder import Decoder
from slipstream.spec.description import ModelDescription

KEPT_PARAMETERS = 10**9
"""Maximum number of parameters of a model that stays in memory while costs are measured."""

MOST_SUMS = 4000
"""Number of reachable sums of bytes from which on the knapsack is solved nearly exactly: only every second, third, … sum is
considered."""

ROWS_AT_ONCE = 256
"""Number of rows of logits in memory at a time."""


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a weight: size in bytes, and cost in nats, with this number of bits or this type."""

    choice: Any
    num_bytes: int
    kl: float


def solve_knapsack(options: Sequence[Sequence[Option]], budget_bytes: int) -> list[Option]:
    """Choose one option for each linear layer, with the smallest sum of `kl` and at most
    `budget_bytes` in all. ConfigError if even the smallest options exceed it.

    Dynamic programming over the reachable sums of bytes; sums that cost no less than a smaller one
    are dropped (Kellerer, Pferschy and Pisinger 2004, chapter 11)."""
    lightest = sum(min(c.num_bytes for c in each) for each in options)
    if lightest > budget_bytes:
        raise ConfigError(
            f"the budget of {budget_bytes:,} bytes is below the {lightest:,} that the fewest bits need; raise average, or "
            "allow fewer bits in choices",
            field="bits.average",
        )
    rest = lightest
    # (bytes, cost, (the previous entry, the last choice))
    front: list[tuple[int, float, Any]] = [(0, 0.0, None)]
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
        front = front[:: 1 + len(front) // MOST_SUMS]
    chosen: list[Option] = []
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
    """Choose the bits of each linear layer within the budget. `products` are (rows, inner,
    settings) by name; the budget covers those whose settings fix no number of bits."""
    names = [n for n, (_, _, settings) in products.items() if isinstance(settings.bits, Budget)]
    options = []
    for name in names:
        rows, inner, settings = products[name]
        sizes = {
            b: settings.format(inner, b).num_bytes(rows, inner, scale_bytes) for b in budget.choices
        }
        options.append([Option(b, sizes[b], costs[name][b]) for b in sorted(budget.choices)])
    num_weights = sum(products[n][0] * products[n][1] for n in names)
    chosen = solve_knapsack(options, int(budget.average * num_weights / 8))
    return {name: option.choice for name, option in zip(names, chosen, strict=True)}


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
    """Measure the cost in nats of each linear layer in `settings`, by number of bits."""
    probe = budget.nearest
    stream, held = (
        Stream(source, windows, device=device, dtype=dtype),
        dict[int, dict[str, Tensor]](),
    )

    def layer(index: int) -> dict[str, Tensor]:
        """Load a layer's weights. Layers of a small model are cached, because each is read once for
        every linear layer before it."""
        if index in held:
            return held[index]
        values = load_layer(source, index, device)
        if source.spec.num_parameters <= KEPT_PARAMETERS:
            held[index] = values
        return values

    ends, num_layers = load_ends(source, device=device, dtype=dtype), source.spec.num_layers
    before = []  # inputs of each layer
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
            changed = {
                **values,
                f"{name}.weight": _probed(weight, asked, probe, stats.get(name), written),
            }
            stream.states = stream.run(index, changed, ObservingOps(), before[index])
            for i in range(index + 1, num_layers):
                stream.states = stream.run(i, layer(i), ObservingOps())
            kl = _mean_kl(ends, exact, [h.to(device) for h in stream.states])
            found[prefix + name] = {
                b: kl * e / max(errors[probe], 1e-30) for b, e in errors.items()
            }
        progress(index + 1, num_layers)
    return found


def _probed(
    weight: Tensor, asked: Quantize, bits: int, stats: InputStats | None, written: torch.dtype
) -> Tensor:
    """Quantize a weight to this many bits as the recipe says; experts always to nearest."""
    return round_weight(
        weight,
        asked,
        asked.format(weight.shape[1], bits),
        written,
        stats if asked.rounding == "gptq" else None,
    ).dequantized()


def _errors(
    weight: Tensor,
    settings: Quantize,
    choices: Sequence[int],
    stats: Sequence[InputStats],
    written: torch.dtype,
) -> dict[int, float]:
    """Squared error of a linear layer's output, by number of bits: tr(d H dᵀ), summed over experts."""
    found = {}
    for b in choices:
        d = (
            nearest(
                weight, settings.format(weight.shape[1], b), written, clip=settings.clip
            ).dequantized()
            - weight
        )
        parts = d.chunk(len(stats)) if len(stats) > 1 else [d]
        found[b] = sum(own.energy(part) for part, own in zip(parts, stats, strict=True))
    return found


def _log_probabilities(ends: Decoder, hidden: Tensor) -> Tensor:
    """Log-probabilities from a batch's final hidden states. Because they are large, they are stored in 16 bits on the
    host."""
    rows = ends.finished(hidden, None).split(ROWS_AT_ONCE)
    return torch.cat([ends.logits(r).float().log_softmax(-1).half().cpu() for r in rows])


def _mean_kl(ends: Decoder, exact: Sequence[Tensor], hidden: Sequence[Tensor]) -> float:
    total, count = 0.0, 0
    for p, h in zip(exact, hidden, strict=True):
        for a, rows in zip(
            p.split(ROWS_AT_ONCE), ends.finished(h, None).split(ROWS_AT_ONCE), strict=True
        ):
            a = a.to(h.device).float().log_softmax(-1)
            total += float((a.exp() * (a - ends.logits(rows).float().log_softmax(-1))).sum())
            count += len(rows)
    return total / count
