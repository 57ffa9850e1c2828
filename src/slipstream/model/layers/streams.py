"""Layers with several residual streams, and per-layer inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slipstream.kernels.layouts import HyperParams, NormParams
from slipstream.model.layers.residual import normed, whole
from slipstream.spec.model import HyperSpec, OwnInputSpec, RecallSpec, ShortcutSpec, StreamsSpec

if TYPE_CHECKING:
    from torch import Tensor

    from slipstream.kernels.metadata import AttentionMetadata
    from slipstream.kernels.ops import OpSet
    from slipstream.kernels.weights.forms import Linear
    from slipstream.model.layers.layer import Layer
    from slipstream.model.layers.residual import Pending


@dataclass(frozen=True, slots=True)
class OwnInput:
    """The addition of a per-layer input (`OwnInputSpec`). `step.layer_inputs` has those of all
    layers."""

    spec: OwnInputSpec
    gate: Linear
    project: Linear
    norm: NormParams

    def __call__(self, ops: OpSet, h: Tensor, step: AttentionMetadata) -> Tensor:
        """[T, E] → [T, E]."""
        s, inputs = self.spec, step.layer_inputs
        assert inputs is not None
        rows = ops.gated_by(ops.linear(h, self.gate), inputs, s.activation, column=s.first)
        return normed(ops, self.norm, ops.linear(rows, self.project))


@dataclass(frozen=True, slots=True)
class Streams:
    """Reads and writes the residual streams of a layer that has several (`StreamsSpec`)."""

    spec: StreamsSpec
    router: Linear
    predict: Linear
    correct: Linear
    norm: NormParams
    narrow: Linear
    wide: Linear
    low_rank_norm: NormParams
    scale: Tensor
    opening: Sequence[Linear] = ()
    closing: Sequence[Linear] = ()

    def opened(self, ops: OpSet, h: Tensor) -> Tensor:
        """Embeddings [T, E] → streams [T, N · E], each scaled to the magnitude of the first."""
        made = (ops.as_large_as(ops.linear(h, w), h) for w in self.opening)
        return ops.side_by_side(h, *made)

    def closed(self, ops: OpSet, h: Tensor, width: int) -> Tensor:
        """Streams [T, N · E] → their mean [T, E], each scaled to the magnitude of the first."""
        first, *others = (self.part(ops, h, i, width) for i in range(self.spec.count))
        made = (
            ops.as_large_as(ops.linear(x, w), first)
            for x, w in zip(others, self.closing, strict=True)
        )
        return ops.mean_of(first, *made)

    def part(self, ops: OpSet, h: Tensor, i: int, width: int) -> Tensor:
        return ops.columns(h, start=i * width, stop=(i + 1) * width)

    def coefficients(self, ops: OpSet, x: Tensor, product: Linear) -> Tensor:
        return ops.linear(ops.tanh(ops.linear(normed(ops, self.norm, x), self.router)), product)

    def run(
        self,
        ops: OpSet,
        h: Tensor,
        layer: Layer,
        attend: Callable[[Any], Pending],
        feed: Callable[[Any], Pending],
        step: AttentionMetadata,
    ) -> Tensor:
        """Runs the layer on streams [T, N · E] → [T, N · E]; [T, E] before the first layer and after the last."""
        s, n = self.spec, layer.norms
        width = n["pre_attention"].weight.shape[0]
        h = self.opened(ops, h) if self.opening else h
        now = self.part(ops, h, s.active, width)
        h = ops.mixed_streams(h, self.coefficients(ops, now, self.predict))
        now = self.part(ops, h, s.active, width)
        rows = normed(ops, n["pre_attention"], now)
        low = normed(ops, self.low_rank_norm, ops.linear(ops.linear(rows, self.narrow), self.wide))
        attended = normed(ops, n["post_attention"], whole(ops, attend(rows)))
        now = ops.added(now + attended, rows + low, 2**-0.5)
        fed = normed(ops, n["post_mlp"], whole(ops, feed(normed(ops, n["pre_mlp"], now))))
        now = now + fed
        h = ops.corrected_streams(
            h, now, self.coefficients(ops, now, self.correct), active=s.active
        )
        now = self.part(ops, h, s.active, width)
        now = ops.times(now, weight=self.scale) if s.scaled else now
        assert layer.own_input is not None
        h = ops.widened(h, layer.own_input(ops, now, step))
        return self.closed(ops, h, width) if self.closing else h


@dataclass(frozen=True, slots=True)
class HyperStreams:
    """Hyper-connections of a layer (`HyperSpec`): coefficients for attention, for the MLP, and
    after the last layer."""

    spec: HyperSpec
    attention: HyperParams
    mlp: HyperParams
    last: HyperParams | None = None

    def run(
        self,
        ops: OpSet,
        h: Tensor,
        layer: Layer,
        attend: Callable[[Any], Pending],
        feed: Callable[[Any], Pending],
        step: AttentionMetadata,
    ) -> Tensor:
        """Runs the layer on streams [T, N · E] → [T, N · E]; [T, E] before the first layer and after the last."""
        n = self.spec.count
        h = ops.side_by_side(*[h] * n) if self.spec.opens else h
        for params, norm, branch in (
            (self.attention, "pre_attention", attend),
            (self.mlp, "pre_mlp", feed),
        ):
            factors = ops.stream_coefficients(h, params=params)
            rows = normed(ops, layer.norms[norm], ops.collapsed_streams(h, factors, count=n))
            h = ops.merged_streams(h, whole(ops, branch(rows)), factors, count=n)
        if self.last is None:
            return h
        return ops.collapsed_streams(h, ops.stream_coefficients(h, params=self.last), count=n)


@dataclass(frozen=True, slots=True)
class Recall:
    """A layer with the embeddings next to the residual (`RecallSpec`), and the part that it adds to its recurrent input."""

    spec: RecallSpec
    norm: NormParams
    join: Linear | None = None

    def run(
        self,
        ops: OpSet,
        h: Tensor,
        layer: Layer,
        attend: Callable[..., Pending],
        feed: Callable[[Any], Pending],
        step: AttentionMetadata,
    ) -> Tensor:
        """Runs the layer on [h, e], [T, 2 · E] → [T, 2 · E]; [T, E] before the first layer and after the last."""
        n, width = layer.norms, self.norm.weight.shape[0]
        h = ops.side_by_side(h, h) if self.spec.opens else h
        now = ops.columns(h, start=0, stop=width)
        rows = now
        if self.join is not None:
            seen = whole(ops, attend(normed(ops, n["pre_attention"], h), layer.by_attention))
            made = whole(ops, feed(normed(ops, n["pre_mlp"], seen)))
            rows = now + ops.linear(made, self.join)
        now = now + whole(ops, attend(normed(ops, self.norm, rows), layer.by_recurrence))
        if self.spec.closes:
            return now
        return ops.side_by_side(now, ops.columns(h, start=width, stop=2 * width))


@dataclass(frozen=True, slots=True)
class Shortcut:
    """One of two layers over which a mixture's output is kept next to the residual (`ShortcutSpec`)."""

    spec: ShortcutSpec

    def run(
        self,
        ops: OpSet,
        h: Tensor,
        layer: Layer,
        attend: Callable[..., Pending],
        feed: Callable[..., Pending],
        step: AttentionMetadata,
    ) -> Tensor:
        """Runs the layer that opens, [T, E] → [T, 2 · E], or the next one, [T, 2 · E] → [T, E]."""
        n, width = layer.norms, layer.norms["pre_mlp"].weight.shape[0]
        now = h if self.spec.opens else ops.columns(h, start=0, stop=width)
        now = now + whole(ops, attend(normed(ops, n["pre_attention"], now)))
        rows = normed(ops, n["pre_mlp"], now)
        if self.spec.opens:
            kept = whole(ops, feed(rows, layer.by_experts))
            return ops.side_by_side(now + whole(ops, feed(rows, layer.by_shared)), kept)
        return now + whole(ops, feed(rows)) + ops.columns(h, start=width, stop=2 * width)
