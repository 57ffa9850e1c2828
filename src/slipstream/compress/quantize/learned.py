"""Learned rounding, after AutoRound (Cheng et al. 2023): trains how each weight is rounded, and each scale.

A code is round(w / s + v). Each weight has an offset v in [−½, ½]; s is the fitted scale times a factor near
1. For floats v is in units of the distance between codes. All linear layers of a layer are trained together,
by signed gradient descent on the squared error of the layer's output, with a step size that falls to 0.
Gradients pass straight through rounding. 8-bit inputs are quantized during training.

Training begins at rounding to nearest, or at GPTQ's result. For the latter, w is the compensated weight that GPTQ rounded, so
that v = 0 gives GPTQ's codes. Scales then stay fixed, because GPTQ's codes compensate for each other on these scales only, and
steps are half as large.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.compress.calibrate import FakeInputs, ObservingOps, StraightThrough, Stream
from slipstream.compress.quantize.rounding import QuantGrid, Rounded, bounds, fit, straight_through
from slipstream.model.sequences import SequenceBatch, layer_output
from slipstream.spec.scheme import WeightFormat

MAX_SCALE_CHANGE = 0.25
"""Maximum deviation of a scale's factor from 1."""

GPTQ_STEP_SIZE = 0.5
"""Step size when training starts from GPTQ's result, relative to that from rounding to nearest."""


@dataclass(slots=True)
class Offsets:
    """The trained offsets and scale factors of one weight."""

    weight: Tensor  # float32 [out, in]
    grid: QuantGrid
    offset: Tensor  # [out, in]
    factor: Tensor  # in the shape of the scales
    step_size: float = 1.0

    @classmethod
    def of(cls, compensated: Tensor, grid: QuantGrid) -> Offsets:
        """Offsets that start at the result of `gptq_trace`, with a fixed grid."""
        offset = torch.zeros_like(compensated, requires_grad=True)
        return cls(
            compensated,
            grid,
            offset,
            torch.ones_like(grid.scales, dtype=torch.float32),
            GPTQ_STEP_SIZE,
        )

    @classmethod
    def fitted(
        cls, weight: Tensor, fmt: WeightFormat, dtype: torch.dtype, *, clip: bool
    ) -> Offsets:
        """Offsets that start at rounding to nearest."""
        grid = fit(weight, fmt, dtype, clip=clip)
        offset, factor = torch.zeros_like(weight), torch.ones_like(grid.scales, dtype=torch.float32)
        return cls(weight, grid, offset.requires_grad_(), factor.requires_grad_())

    @property
    def fmt(self) -> WeightFormat:
        return self.grid.fmt

    def dequantized(self) -> Tensor:
        """Dequantized weight, with gradients for offset and factor."""
        codes, scales, zeros = self._codes()
        if self.fmt.kind == "float":
            inside = codes.clamp(-448, 448)
            floats = straight_through(inside, inside.to(torch.float8_e4m3fn).float()) * scales
            return floats.view(self.weight.shape)
        rounded = straight_through(codes, codes.round())
        lowest, highest = bounds(self.fmt)
        return ((rounded.clamp(lowest, highest) - zeros) * scales).view(self.weight.shape)

    def rounded(self) -> Rounded:
        with torch.no_grad():
            codes, scales, _ = self._codes()
            grid = QuantGrid(self.fmt, scales[..., 0].to(self.grid.scales.dtype), self.grid.zeros)
            codes = codes.view(self.weight.shape)
            if self.fmt.kind == "float":
                return Rounded(grid, codes.clamp(-448, 448).to(torch.float8_e4m3fn))
            lowest, highest = bounds(self.fmt)
            return Rounded(grid, codes.round().clamp(lowest, highest).to(torch.int8))

    def step(self, rate: float) -> None:
        """Take one step of signed gradient descent."""
        with torch.no_grad():
            limits = (
                (self.offset, -0.5, 0.5),
                (self.factor, 1 - MAX_SCALE_CHANGE, 1 + MAX_SCALE_CHANGE),
            )
            for value, low, high in limits:
                if value.grad is not None:
                    value.sub_(value.grad.sign(), alpha=rate * self.step_size).clamp_(low, high)
                    value.grad = None

    def _codes(self) -> tuple[Tensor, Tensor, Tensor | float]:
        """(codes before rounding, scales as written, zeros), each [out, groups, size or 1]."""
        scales = self.grid.scales.float() * self.factor
        written = straight_through(scales, scales.to(self.grid.scales.dtype).float())[..., None]
        zeros = 0.0 if self.grid.zeros is None else self.grid.zeros.float()[..., None]
        shape = (written.shape[0], written.shape[1], -1) if not self.fmt.whole else (1, 1, -1)
        codes = self.weight.view(shape) / written
        offset = self.offset.view(shape)
        if self.fmt.kind == "float":
            # For |x| in [2^(e-1), 2^e), with e of frexp, codes are 2^(e-4) apart; below 2^-6 they are 2^-9 apart.
            offset = torch.ldexp(offset, (codes.detach().frexp().exponent - 4).clamp(min=-9))
        return codes + offset + zeros, written, zeros


def learn(
    stream: Stream,
    index: int,
    exact: Mapping[str, Tensor],
    values: Mapping[str, Tensor],
    learned: Mapping[str, Offsets],
    *,
    inputs: Mapping[str, FakeInputs],
    num_steps: int,
    step_tokens: int,
    states: Sequence[Tensor] | None = None,
) -> tuple[dict[str, Rounded], float]:
    """Train the rounding of the linear layers in `learned`, by name in layer `index`; the layer's other parameters are in
    `values`.

    The target is the output of `exact`, the layer before rounding, for `states` (None: for the layer's current inputs).
    `inputs` says how inputs are quantized during training. A step takes random windows of `step_tokens` tokens in all. The
    loss is not normalized by token, because the few tokens with far larger states are those that all others attend to.

    Returns the quantized weights, and the fraction of the initial squared error that remains. If training did not lower the
    error, these are the initial weights and 1."""
    targets = _windows(stream, stream.run(index, exact, ObservingOps(), states))
    texts = _windows(stream, stream.states)
    start = {name: own.rounded() for name, own in learned.items()}
    through = {name: StraightThrough(fake) for name, fake in inputs.items()}
    rng = torch.Generator().manual_seed(0)
    per_step = max(1, step_tokens // max(len(x) for x in texts))
    with torch.enable_grad():
        for step in range(num_steps):
            chosen = torch.randperm(len(texts), generator=rng)[:per_step].tolist()
            batch = SequenceBatch.of(
                [torch.zeros(len(texts[i]), dtype=torch.int64) for i in chosen], stream.device
            )
            weights = {f"{name}.weight": own.dequantized() for name, own in learned.items()}
            ops = ObservingOps(inputs=through)
            layer = stream.layer(index, {**values, **weights}, ops)
            out = layer_output(
                layer, ops, torch.cat([texts[i] for i in chosen]).to(stream.device), batch
            )
            loss = (
                (out.float() - torch.cat([targets[i] for i in chosen]).to(stream.device).float())
                .square()
                .mean()
            )
            loss.backward()
            for own in learned.values():
                own.step((1 - step / num_steps) / num_steps)

    def error(made: Mapping[str, Rounded]) -> float:
        weights = {f"{name}.weight": rounded.dequantized() for name, rounded in made.items()}
        outputs = _windows(
            stream, stream.run(index, {**values, **weights}, ObservingOps(inputs=inputs))
        )
        return sum(
            float((a.float() - b.float()).square().sum())
            for a, b in zip(outputs, targets, strict=True)
        )

    found = {name: own.rounded() for name, own in learned.items()}
    before, after = error(start), error(found)
    return (found, after / before) if after < before else (start, 1.0)


def _windows(stream: Stream, states: list[Tensor]) -> list[Tensor]:
    return [
        part
        for batch, state in zip(stream.batches, states, strict=True)
        for part in state.split(batch.lengths)
    ]
