"""Quantization-aware training of quantized weights and their scales.

The model computes with round(w / s) · s. Gradients pass straight through rounding to w, except where w is
clipped, and to s as in LSQ (Esser et al. 2020). Training begins at the quantized weights. The loss is
KL(original‖rounded) of the next token on calibration text. The optimizer is AdamW without weight decay; the
learning rate rises linearly, then falls to 0 along a cosine. Norms, embeddings and the head do not change.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from slipstream.compress.calibrate import (
    HELD_BYTES,
    FakeInputs,
    ObservingOps,
    StraightThrough,
    load_ends,
    load_layer,
)
from slipstream.compress.quantize.rounding import QuantGrid, Rounded, bounds, straight_through
from slipstream.compress.recipe import QAT
from slipstream.compress.steps import warmup_cosine
from slipstream.compress.training.objective import LOGITS_BYTES
from slipstream.errors import ConfigError
from slipstream.kernels.positions import PositionTables
from slipstream.model.building import build_layer
from slipstream.model.sequences import SequenceBatch, layer_output
from slipstream.spec.description import ModelDescription

MAX_GRAD_NORM = 1.0


@dataclass(slots=True)
class Trained:
    """A weight in training."""

    grid: QuantGrid
    weight: Tensor  # float32 [out, in]
    step: Tensor  # [out, groups], the logarithm of the scales, so that these stay positive

    @classmethod
    def of(cls, weight: Tensor, grid: QuantGrid) -> Trained:
        """Start the training of a weight at `weight`, which is on the grid."""
        return cls(
            grid, weight.clone().requires_grad_(), grid.scales.float().log().requires_grad_()
        )

    def dequantized(self) -> Tensor:
        """Dequantized weight, with gradients."""
        scales = self.step.exp()
        scales = straight_through(scales, scales.to(self.grid.scales.dtype).float())[..., None]
        if self.grid.fmt.kind == "float":
            inside = (self.weight.unflatten(1, (scales.shape[1], -1)) / scales).clamp(-448, 448)
            return (
                straight_through(inside, inside.to(torch.float8_e4m3fn).float()) * scales
            ).flatten(1)
        zeros: Tensor | float = (
            0.0 if self.grid.zeros is None else self.grid.zeros.float()[..., None]
        )
        lowest, highest = bounds(self.grid.fmt)
        exact = (self.weight.unflatten(1, (scales.shape[1], -1)) / scales + zeros).clamp(
            lowest, highest
        )
        return ((straight_through(exact, exact.round()) - zeros) * scales).flatten(1)

    @torch.no_grad()
    def rounded(self) -> Rounded:
        grid = QuantGrid(self.grid.fmt, self.step.exp().to(self.grid.scales.dtype), self.grid.zeros)
        return Rounded(grid, grid.codes(self.weight.detach().clone()))


def train(
    source: ModelDescription,
    values: Sequence[Mapping[str, Tensor]],
    grids: Mapping[str, QuantGrid],
    windows: Sequence[Sequence[int]],
    settings: QAT,
    *,
    inputs: Sequence[Mapping[str, FakeInputs]],
    device: torch.device,
    dtype: torch.dtype,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Rounded]:
    """Train the quantized weights of all layers; returns them by parameter name. `values` are the written parameters
    of each layer, and `grids` the grids of the quantized ones. `inputs` says for each layer how the inputs of its
    linear layers are quantized. The model computes in `dtype`. ConfigError if the loss becomes infinite or NaN."""
    spec = source.spec
    longest = max(len(w) for w in windows)
    tables = PositionTables(longest, device)
    ends = load_ends(source, device=device, dtype=dtype)
    original = [
        {n: v.to(dtype) for n, v in load_layer(source, i, device).items()}
        for i in range(spec.num_layers)
    ]
    learned = {n: Trained.of(v, grids[n]) for own in values for n, v in own.items() if n in grids}

    def run(
        index: int,
        own: Mapping[str, Tensor],
        h: Tensor,
        batch: SequenceBatch,
        *,
        exact: bool = True,
    ) -> Tensor:
        ops = ObservingOps(
            inputs={}
            if exact
            else {name: StraightThrough(fake) for name, fake in inputs[index].items()}
        )
        layer = build_layer(
            spec.layers[index], {n: v.to(dtype) for n, v in own.items()}, ops, tables
        )
        ops.bind(layer)
        return layer_output(layer, ops, h, batch)

    def student(index: int, h: Tensor, batch: SequenceBatch) -> Tensor:
        prefix = f"layers.{index}."
        own = {
            n.removeprefix(prefix): learned[n].dequantized() if n in learned else v
            for n, v in values[index].items()
        }
        return run(index, own, h, batch, exact=False)

    known: dict[int, Tensor] = {}  # the original model's final hidden states by window, [tokens, E]
    room = HELD_BYTES // (spec.hidden_size * dtype.itemsize)  # capacity of the cache, in tokens

    @torch.no_grad()
    def original_hidden(chosen: Sequence[int]) -> Tensor:
        """The original model's final hidden states of these windows [T, E]. They are cached, because each window is used
        many times."""
        if missing := [i for i in chosen if i not in known]:
            batch = SequenceBatch.of([list(windows[i]) for i in missing], device)
            h = ends.embedded(batch.token_ids, batch.meta)
            for i in range(spec.num_layers):
                h = run(i, original[i], h, batch)
            known.update(zip(missing, ends.finished(h, None).split(batch.lengths), strict=True))
        found = torch.cat([known[i] for i in chosen])
        while sum(len(states) for states in known.values()) > room:
            known.pop(next(iter(known)))
        return found

    def backward(chosen: Sequence[int]) -> Tensor:
        """Add the gradients of the loss on these windows. Returns the loss in nats."""
        batch = SequenceBatch.of([list(windows[i]) for i in chosen], device)
        target = original_hidden(chosen)
        h = ends.embedded(batch.token_ids, batch.meta)
        # activations within a layer are recomputed in the backward pass
        for i in range(spec.num_layers):
            h = checkpoint(student, i, h, batch, use_reentrant=False)
        hidden = ends.finished(h, None)
        # The head is not trained, so the gradient of its inputs is computed a few rows at a time, without storing all
        # logits.
        at_once = max(1, LOGITS_BYTES // (4 * spec.vocab_size))
        loss, gradients = torch.zeros((), device=device), []
        for rows, theirs in zip(hidden.detach().split(at_once), target.split(at_once), strict=True):
            rows.requires_grad_()
            found = ends.logits(rows).float().log_softmax(-1)
            with torch.no_grad():
                exact = ends.logits(theirs).float().log_softmax(-1)
            part = F.kl_div(found, exact, reduction="sum", log_target=True) / batch.num_tokens
            gradients += torch.autograd.grad(part, rows)
            loss += part.detach()
        hidden.backward(torch.cat(gradients))
        return loss

    steps = [own.step for own in learned.values()]
    optimizer = torch.optim.AdamW(
        [*(own.weight for own in learned.values()), *steps], lr=1.0, weight_decay=0.0
    )
    rng = torch.Generator().manual_seed(settings.seed)
    per_step = max(1, settings.step_tokens // longest)
    order: list[int] = []
    losses: list[Tensor] = []
    with torch.enable_grad():
        begin, number, done = time.monotonic(), 0, 0.0
        while done < 1:
            while len(order) < per_step:
                order += torch.randperm(len(windows), generator=rng).tolist()
            chosen, order = order[:per_step], order[per_step:]
            losses.append(backward(chosen))
            for group in optimizer.param_groups:
                group["lr"] = settings.learning_rate * rate(done, settings)
            torch.nn.utils.clip_grad_norm_(
                [p for group in optimizer.param_groups for p in group["params"]], MAX_GRAD_NORM
            )
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if number:  # the previous step's loss: waiting for this one's would let the device idle
                check_loss(number - 1, losses[number - 1])
            number += 1
            done = share_done(number, time.monotonic() - begin, settings)
            progress(number, settings.num_steps)
        check_loss(number - 1, losses[-1])
    return {name: own.rounded() for name, own in learned.items()}


def check_loss(number: int, loss: Tensor) -> None:
    """Raises ConfigError if a step's loss is infinite or NaN."""
    if not math.isfinite(found := float(loss)):
        raise ConfigError(
            f"the loss of step {number} is {found}: lower learning_rate", field="learning_rate"
        )


def share_done(number: int, seconds: float, settings: QAT) -> float:
    """Fraction of the training that is over after this many steps and seconds."""
    limit = math.inf if settings.minutes is None else 60 * settings.minutes
    return max(number / settings.num_steps, seconds / limit)


def rate(done: float, settings: QAT) -> float:
    """Learning rate after a fraction of the training, as a fraction of its maximum."""
    rising = max(1, round(settings.warmup * settings.num_steps))
    return warmup_cosine(done * settings.num_steps, settings.num_steps, rising)
