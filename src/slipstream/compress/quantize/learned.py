"""Learned rounding: whether each weight goes up or down, and each scale, by gradient, so that a layer's output stays as it was.

After AutoRound (Cheng et al. 2023): a code is round(w / s + v) with an offset v in [−½, ½] of its own, and s the fitted scale
times a factor near 1. All products of a layer are learned together from the squared error of the layer's output on
calibration text, by the sign of the gradient, with a step that falls to 0; rounding passes gradients through as if it were not
there. Inputs in 8 bits are rounded meanwhile. Of floats v is in units of the distance between codes there. Learning begins at
rounding to nearest, or at GPTQ's result: then w is what GPTQ met when a weight's turn came, which v = 0 rounds as it did; the
scales stay, since GPTQ's codes answer each other's errors on these scales alone, and offsets go half as far in a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.compress.calibrate import FakeInputs, ObservingOps, Stream, Through
from slipstream.compress.quantize.rounding import Grid, Rounded, bounds, fit
from slipstream.model.layers import build_layer
from slipstream.model.sequences import SequenceBatch, run_layer
from slipstream.spec.scheme import WeightFormat

REACH = 0.25
"""How far a scale's factor may go from 1."""

PACE = 0.5
"""Of a step from GPTQ's result, as a share of one from rounding to nearest."""


@dataclass(slots=True)
class Offsets:
    """What is learned of one weight. `scales` and `zeros` are the fitted grid's."""

    weight: Tensor  # float32 [out, in]
    grid: Grid
    offset: Tensor  # [out, in]
    factor: Tensor  # as the scales
    pace: float = 1.0  # of its steps

    @classmethod
    def of(cls, met: Tensor, grid: Grid) -> Offsets:
        """Beginning at GPTQ's result: what it met, to nearest on its grid, which stays."""
        offset = torch.zeros_like(met, requires_grad=True)
        return cls(met, grid, offset, torch.ones_like(grid.scales, dtype=torch.float32), PACE)

    @classmethod
    def fitted(cls, weight: Tensor, fmt: WeightFormat, dtype: torch.dtype, *, clip: bool) -> Offsets:
        """Beginning at the weight to nearest."""
        grid = fit(weight, fmt, dtype, clip=clip)
        offset, factor = torch.zeros_like(weight), torch.ones_like(grid.scales, dtype=torch.float32)
        return cls(weight, grid, offset.requires_grad_(), factor.requires_grad_())

    @property
    def fmt(self) -> WeightFormat:
        return self.grid.fmt

    def numbers(self) -> Tensor:
        """The rounded weight, with gradients for offset and factor."""
        codes, scales, zeros = self._codes()
        if self.fmt.kind == "float":
            inside = codes.clamp(-448, 448)
            floats: Tensor = (inside + (inside.to(torch.float8_e4m3fn).float() - inside).detach()) * scales
            return floats.view(self.weight.shape)
        rounded = codes + (codes.round() - codes).detach()
        lowest, highest = bounds(self.fmt)
        return ((rounded.clamp(lowest, highest) - zeros) * scales).view(self.weight.shape)

    def rounded(self) -> Rounded:
        with torch.no_grad():
            codes, scales, _ = self._codes()
            grid = Grid(self.fmt, scales[..., 0].to(self.grid.scales.dtype), self.grid.zeros)
            codes = codes.view(self.weight.shape)
            if self.fmt.kind == "float":
                return Rounded(grid, codes.clamp(-448, 448).to(torch.float8_e4m3fn))
            lowest, highest = bounds(self.fmt)
            return Rounded(grid, codes.round().clamp(lowest, highest).to(torch.int8))

    def step(self, rate: float) -> None:
        """Against the sign of the gradient."""
        with torch.no_grad():
            for value, low, high in ((self.offset, -0.5, 0.5), (self.factor, 1 - REACH, 1 + REACH)):
                if value.grad is not None:
                    value.sub_(value.grad.sign(), alpha=rate * self.pace).clamp_(low, high)
                    value.grad = None

    def _codes(self) -> tuple[Tensor, Tensor, Tensor | float]:
        """(codes before rounding, scales as they are written, zeros), each [out, groups, size or 1]."""
        scales = self.grid.scales.float() * self.factor
        written = (scales + (scales.to(self.grid.scales.dtype).float() - scales).detach())[..., None]
        zeros = 0.0 if self.grid.zeros is None else self.grid.zeros.float()[..., None]
        shape = (written.shape[0], written.shape[1], -1) if not self.fmt.whole else (1, 1, -1)
        codes = self.weight.view(shape) / written
        offset = self.offset.view(shape)
        if self.fmt.kind == "float":
            # frexp: |x| in [2^(e-1), 2^e) has codes 2^(e-4) apart, below 2^-6 all of 2^-9.
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
    seed: int = 0,
) -> tuple[dict[str, Rounded], float]:
    """The products in `learned` (by name in the layer) of layer `index`, which has `values` but for them. The output to come
    near to is that of `exact`, the layer before rounding, on `states` or on what the layer reads; `inputs` of products are
    rounded in what is learned. The plain squared error: tokens that are far larger than the others are those that all others
    look at, and count accordingly. Each step takes `step_tokens`, whole windows of them, drawn at random. Beside
    the products, the share of the squared error that is left of where they began; it is 1, and they are as they began, where
    what was learned is no better."""
    targets = _windows(stream, stream.run(index, exact, ObservingOps(), states))
    texts = _windows(stream, stream.states)
    start = {name: own.rounded() for name, own in learned.items()}
    through = {name: Through(fake) for name, fake in inputs.items()}
    rng = torch.Generator().manual_seed(seed)
    per_step = max(1, step_tokens // max(len(x) for x in texts))
    spec = stream.spec.layers[index]
    with torch.enable_grad():
        for step in range(num_steps):
            chosen = torch.randperm(len(texts), generator=rng)[:per_step].tolist()
            batch = SequenceBatch.of([torch.zeros(len(texts[i]), dtype=torch.int64) for i in chosen], stream.device)
            weights = {f"{name}.weight": own.numbers() for name, own in learned.items()}
            ops = ObservingOps(inputs=through)
            own_values = {name: value.to(stream.dtype) for name, value in {**values, **weights}.items()}
            layer = build_layer(spec, own_values, ops, stream.tables)
            ops.meets(layer)
            x = torch.cat([texts[i] for i in chosen]).to(stream.device)
            pending, residual = run_layer(layer, ops, x, None, batch)
            out = pending if residual is None else pending + residual
            loss = (out.float() - torch.cat([targets[i] for i in chosen]).to(stream.device).float()).square().mean()
            loss.backward()
            for own in learned.values():
                own.step((1 - step / num_steps) / num_steps)
    found = {name: own.rounded() for name, own in learned.items()}
    before, after = (_error(stream, index, values, made, inputs, targets) for made in (start, found))
    return (found, after / before) if after < before else (start, 1.0)


def _error(
    stream: Stream,
    index: int,
    values: Mapping[str, Tensor],
    made: Mapping[str, Rounded],
    inputs: Mapping[str, FakeInputs],
    targets: list[Tensor],
) -> float:
    """Of the layer's output over all of the text."""
    weights = {f"{name}.weight": rounded.numbers() for name, rounded in made.items()}
    found = _windows(stream, stream.run(index, {**values, **weights}, ObservingOps(inputs=inputs)))
    return sum(float((a.float() - b.float()).square().sum()) for a, b in zip(found, targets, strict=True))


def _windows(stream: Stream, states: list[Tensor]) -> list[Tensor]:
    return [part for batch, state in zip(stream.batches, states, strict=True) for part in state.split(batch.lengths)]
