"""Chooses the types of a GGUF file's matrices within a budget of bits, for the least KL divergence.

1. A pass over calibration text, forward and backward, gives for each matrix W the second moments H = x xᵀ of its inputs and
   the squared gradients g² of its outputs. The gradients are those of log p of tokens sampled from the model itself.
2. To second order a change D of W costs KL = ½ Σ_r E[g_r²] (D E[H] Dᵀ)_rr nats a token: Fisher's information, with outputs and
   tokens taken as independent (K-FAC, Martens and Grosse 2015).
3. D is measured by quantizing a sample of rows to each type. GPTQ's gain is measured for one type and assumed for all.
4. A knapsack solver (`quantize.mixed`) finds the types with the smallest total cost within the budget.

The cost of tied embeddings includes both the error of the first layer's inputs and that of the logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from slipstream.compress.calibrate import (
    InputStats,
    ObservingOps,
    Stream,
    load_ends,
    load_layer,
    product_weights,
)
from slipstream.compress.gguf.blocks import round_blocks
from slipstream.compress.gguf.mix import GGUF, PlannedBlocks, bits_of
from slipstream.compress.gguf.source import places, read_tensor
from slipstream.compress.gguf.tensors import inputs_of, inside
from slipstream.compress.quantize.mixed import ROWS_AT_ONCE, Option, solve_knapsack
from slipstream.kernels.weights.forms import Activations, Linear
from slipstream.model.decoder import Decoder
from slipstream.model.load.weights import load_parameters
from slipstream.model.save import stored
from slipstream.model.sequences import layer_output
from slipstream.spec.description import ModelDescription
from slipstream.spec.parameters import Placement, orders_rows

PROBE_WINDOWS = 8
"""Number of windows of calibration text for which gradients are computed."""

SAMPLED_ROWS = 48
"""Rows of a matrix that are quantized to each type, as a sample. The experts of a layer divide them, with at least 4
each."""

Costs = dict[str, dict[str, float]]
"""Cost in nats per token, by matrix and type."""


def choose_types(step: GGUF, planned: Iterable[PlannedBlocks], costs: Costs) -> dict[str, str]:
    """Choose the types of the matrices in `costs`. The budget includes the other matrices."""
    assert step.bits is not None
    matrices = [tensor for tensor in planned if tensor.type != "F32"]
    room = int(step.bits * sum(tensor.num_values for tensor in matrices) / 8)
    room -= sum(tensor.num_bytes for tensor in matrices if tensor.name not in costs)
    free = [tensor for tensor in matrices if tensor.name in costs]
    options = [_worthwhile(tensor, costs[tensor.name]) for tensor in free]
    chosen = solve_knapsack(options, room)
    return {tensor.name: own.choice for tensor, own in zip(free, chosen, strict=True)}


def _worthwhile(tensor: PlannedBlocks, costs: Mapping[str, float]) -> list[Option]:
    """Options of a matrix on the convex hull, smallest size first: each saves less per byte than the one before."""
    found = list[Option]()
    for kind, kl in sorted(costs.items(), key=lambda item: (bits_of(item[0]), item[1])):
        new = Option(kind, replace(tensor, type=kind).num_bytes, kl)
        if found and kl >= found[-1].kl:
            continue
        while len(found) > 1 and _gain(found[-2], found[-1]) <= _gain(found[-1], new):
            found.pop()
        found.append(new)
    return found


def _gain(less: Option, more: Option) -> float:
    """Nats saved per additional byte."""
    return (less.kl - more.kl) / max(1, more.num_bytes - less.num_bytes)


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix, and the cost of its errors d: ½ Σ_r `outputs`_r (d_r `inputs` d_rᵀ) / `num_tokens` nats in all."""

    weight: Tensor  # [out, in]
    rounds_by: InputStats | None
    outputs: Tensor  # Σ g² over tokens, [out]
    inputs: Tensor  # Σ x xᵀ [in, in], or its diagonal [in]
    num_tokens: int  # computed by this matrix

    def cost(self, kind: str, damping: float | None, num_rows: int) -> float:
        """Cost in nats of quantizing to this type, estimated on rows sampled in proportion to `outputs`."""
        shares = self.outputs.double().cumsum(0)
        at = (torch.arange(num_rows, device=shares.device) + 0.5) / num_rows * shares[-1]
        rows = self.weight[torch.searchsorted(shares, at).clamp(max=len(shares) - 1)].float()
        d = round_blocks(rows, kind, self.rounds_by, damping=damping)[1] - rows
        along = d @ self.inputs if self.inputs.ndim == 2 else d * self.inputs
        lost = float((along * d).sum(1).mean() * shares[-1])
        return lost / (2 * max(1, self.num_tokens))


class SensitiveOps(ObservingOps):
    """Ops that also sum the squared gradients of the outputs of the watched linear layers, in `squares`."""

    def __init__(self, watch: Mapping[str, Callable[[Tensor], None]]) -> None:
        super().__init__(watch)
        self.squares = dict[str, Tensor]()

    def linear(self, x: Activations, w: Linear) -> Tensor:
        made = super().linear(x, w)
        name = self._names.get(w.weight.data_ptr(), "")
        if name in self._watch:
            made.register_hook(partial(self._add, name))
        return made

    def _add(self, name: str, gradient: Tensor) -> None:
        own = gradient.float().square().sum(0)
        self.squares[name] = self.squares[name] + own if name in self.squares else own


def measure_types(
    source: ModelDescription,
    step: GGUF,
    planned: Iterable[PlannedBlocks],
    windows: Sequence[Sequence[int]],
    *,
    device: torch.device,
    dtype: torch.dtype,
    progress: Callable[[int], None],
) -> Costs:
    """Measure the cost of each matrix not fixed by `types`, in each type that fits it."""
    stream = Stream(source, windows[:PROBE_WINDOWS], device=device, dtype=dtype)
    spec, table, costs = source.spec, places(source), Costs()
    free = [t for t in planned if t.type not in ("F32", "F16") and step.fixed(t.name) is None]
    first, before = stream.states, list[list[Tensor]]()
    for index in range(spec.num_layers):
        before.append(stream.states)
        stream.states = stream.run(index, load_layer(source, index, device), ObservingOps())
    ends = load_ends(source, device=device, dtype=dtype)
    hidden = InputStats.empty(spec.hidden_size, device)
    answers = torch.zeros(spec.vocab_size, device=device)
    draws = torch.Generator(device).manual_seed(0)
    gradients = [
        _from_logits(ends, state.to(device), hidden, answers, draws) for state in stream.states
    ]
    for index in reversed(range(spec.num_layers)):
        values, prefix = load_layer(source, index, device), f"layers.{index}."
        own = [t for t in free if table[t.name].target.startswith(prefix)]
        targets = {table[t.name].target.removeprefix(prefix) for t in own}
        stats = {
            name: InputStats.empty(weight.shape[1], device)
            for name, weight in product_weights(stream.layer(index, values, ObservingOps()))
            if f"{name.partition('@')[0]}.weight" in targets
        }
        ops = SensitiveOps({name: partial(_see, found) for name, found in stats.items()})
        layer = stream.layer(index, values, ops)
        for i, batch in enumerate(stream.batches):
            state = before[index][i].to(device).detach().requires_grad_()
            with torch.enable_grad():
                made = layer_output(layer, ops, state, batch)
            (gradients[i],) = torch.autograd.grad(made, state, gradients[i])
        named = {prefix + name: value for name, value in values.items()}
        for tensor in own:
            at, value = (
                table[tensor.name],
                read_tensor(source, tensor.name, table[tensor.name], named),
            )
            parts = _matrices(inside(at, index), value, values, stats, ops.squares)
            costs[tensor.name] = _costs(step, parts, stream.num_tokens)
        progress(spec.num_layers - index)
    values = load_parameters(
        source,
        dtype=torch.float32,
        device=device,
        wanted=lambda name: not name.startswith("layers."),
    )
    for tensor in free:
        at = table[tensor.name]
        if at.target.startswith("layers."):
            continue
        value, parts = read_tensor(source, tensor.name, at, values), list[Matrix]()
        is_head = at.target == ("embed.weight" if spec.tied_embeddings else "head.weight")
        rounds_by = hidden if is_head and spec.embed_size is None else None
        if rounds_by is not None:
            parts.append(Matrix(value, rounds_by, answers, hidden.hessian, hidden.num_rows))
        if at.target == "embed.weight":
            parts.append(_table(value, rounds_by, stream, first, gradients))
        costs[tensor.name] = _costs(step, parts, stream.num_tokens)
    progress(spec.num_layers + 1)
    return costs


def _see(stats: InputStats, x: Tensor) -> None:
    stats.add(x.detach(), 0.0)


@torch.no_grad()
def _from_logits(
    ends: Decoder, state: Tensor, hidden: InputStats, answers: Tensor, draws: torch.Generator
) -> Tensor:
    """Gradient of log p of sampled tokens with respect to the last layer's output [T, E]. Adds the head's
    inputs to `hidden`, and p (1 − p) of each token, the mean squared gradient of its logit, to `answers`."""
    state = state.detach().requires_grad_()
    with torch.enable_grad():
        last = ends.finished(state, None)
    found = list[Tensor]()
    for rows in last.detach().split(ROWS_AT_ONCE):
        hidden.add(rows, 0.0)
        rows.requires_grad_()
        with torch.enable_grad():
            logs = ends.logits(rows).float().log_softmax(-1)
            p = logs.detach().exp()
            drawn = torch.multinomial(p, 1, generator=draws)
            total = logs.gather(1, drawn).sum()
        answers += (p - p.square()).sum(0)
        found += torch.autograd.grad(total, rows)
    return torch.autograd.grad(last, state, torch.cat(found))[0]


def _table(
    value: Tensor,
    rounds_by: InputStats | None,
    stream: Stream,
    first: Sequence[Tensor],
    gradients: Sequence[Tensor],
) -> Matrix:
    """The embedding table as a matrix that computes the first layer's inputs: each token reads one row, which the model may
    scale."""
    tokens = torch.cat([batch.token_ids for batch in stream.batches])
    counts = torch.bincount(tokens, minlength=len(value)).float()
    made = sum(float(state.float().square().sum()) for state in first)
    scale = made / max(1e-30, float(value[tokens].float().square().sum()))
    squares = torch.stack([g.float().square().sum(0) for g in gradients]).sum(0)
    if len(squares) != value.shape[1]:  # a projection follows the embedding table
        squares = squares.sum().expand(value.shape[1]) / value.shape[1]
    return Matrix(value, rounds_by, counts, squares * scale, len(tokens))


def _matrices(
    at: Placement,
    value: Tensor,
    values: Mapping[str, Tensor],
    stats: Mapping[str, InputStats],
    squares: Mapping[str, Tensor],
) -> list[Matrix]:
    """Matrices of a layer's tensor: itself, or its experts. Gradients are reordered like the file's rows."""
    product, shape = at.target.removesuffix(".weight"), values[at.target].shape
    names = [name for name in stats if name.partition("@")[0] == product]
    rows = shape[:-1].numel() // len(names)
    by_row = torch.cat([squares.get(name, value.new_zeros(rows)) for name in names])
    is_ordered = orders_rows(at.transform)
    if is_ordered:
        spread = by_row.reshape(*shape[:-1], 1).expand(shape)
        by_row = stored(spread, at)[..., 0]
    else:
        by_row = by_row.mean().expand(value.shape[:-1])
    found = list[Matrix]()
    parts = value.unbind(0) if value.ndim == 3 else (value,)
    for i, (part, outputs) in enumerate(zip(parts, by_row.reshape(len(parts), -1), strict=True)):
        seen, own = stats[names[i]], inputs_of(stats, at, value, i)
        metric = (
            seen.hessian
            if own is not None
            else seen.hessian.trace().expand(part.shape[1]) / seen.hessian.shape[0]
        )
        found.append(Matrix(part, own, outputs, metric, seen.num_rows))
    return found


def _costs(step: GGUF, parts: Sequence[Matrix], num_tokens: int) -> dict[str, float]:
    """Cost in nats per token, by type."""
    num_rows = max(4, SAMPLED_ROWS // len(parts))

    def cost(kind: str, damping: float | None) -> float:
        return sum(part.cost(kind, damping, num_rows) for part in parts) / num_tokens

    kinds = step.options(parts[0].weight.shape[1])
    found = {kind: cost(kind, None) for kind in kinds}
    if step.rounding == "gptq":
        average = step.bits or 0.0
        near = max(0.5, min(abs(bits_of(kind) - average) for kind in kinds))
        within = [kind for kind in kinds if abs(bits_of(kind) - average) <= near]
        # A matrix may already lie on the grid of one type, which then has no error by which to measure GPTQ.
        probe = max(within, key=lambda kind: found[kind])
        gain = cost(probe, step.damping) / max(found[probe], 1e-30)
        found = {kind: gain * kl for kind, kl in found.items()}
    return found
