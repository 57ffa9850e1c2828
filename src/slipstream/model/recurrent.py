"""Recurrent parts of a layer: linear layers around one recurrent op (`spec/recurrent.py` has the equations). No torch.

Each maps [T, E] → [T, E]. States are in `LayerKV.state`; `meta.states` says which of them a step reads and writes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from slipstream.kernels.layouts import NormParams
from slipstream.kernels.states import (
    ConvParams,
    GatedDeltaParams,
    LayerState,
    Mamba2Params,
    MambaParams,
)
from slipstream.kernels.tracing.recording import NamedWeight
from slipstream.spec.model import (
    GatedDeltaSpec,
    LightningSpec,
    Mamba2Spec,
    MambaSpec,
    RecurrentSpec,
    ShortConvSpec,
)
from slipstream.spec.scheme import InputFormat

if TYPE_CHECKING:
    from torch import Tensor

    from slipstream.kernels.metadata import AttentionMetadata, LayerKV
    from slipstream.kernels.ops import OpSet
    from slipstream.kernels.weights.forms import Activations, Linear
    from slipstream.platform.collectives import RankGroup


def _state(kv: LayerKV) -> LayerState:
    assert kv.state is not None
    return kv.state


def _gathered(ops: OpSet, x: Tensor, meta: AttentionMetadata, ranks: RankGroup | None) -> Tensor:
    """Gathers the rows of all tokens if x only has this rank's tokens of a long step: the recurrence needs all."""
    if ranks is None or len(x) == len(meta.positions):
        return x
    return ops.gather_tokens(x, ranks, len(meta.positions))


def _own(ops: OpSet, x: Tensor, like: Any, ranks: RankGroup | None) -> Tensor:
    """This rank's rows of x, if `like` only has these."""
    return x if ranks is None or len(x) == len(like) else ops.own_tokens(x, ranks)


@dataclass(frozen=True, slots=True)
class GatedDelta:
    spec: GatedDeltaSpec
    into: Linear
    gates: Linear
    out: Linear
    params: GatedDeltaParams
    latents: tuple[Linear, Linear, Linear, Linear] | None = None
    """Linear layers with `spec.latent`: decay to its latent and back, output gate to its latent and back."""

    inputs: InputFormat | None = None  # the gates' linear layer reads unquantized rows
    context: RankGroup | None = None  # ranks with other tokens' rows, in long steps

    @property
    def products(self) -> dict[str, Linear]:
        """The linear layers by their names in the layer."""
        own = {"in": self.into, "gates": self.gates, "out": self.out}
        parts = ("decay_latent", "decay_up", "gate_latent", "gate_up")
        return own | dict(zip(parts, self.latents or (), strict=False))

    def __call__(self, ops: OpSet, x: Any, kv: LayerKV, meta: AttentionMetadata) -> Tensor:
        rows, gates = ops.linear(x, self.into), ops.linear(x, self.gates)
        decay = z = None
        if self.latents is not None:
            decay_latent, decay_up, gate_latent, gate_up = self.latents
            decay = ops.linear(ops.linear(x, decay_latent), decay_up)
            z = ops.linear(ops.linear(x, gate_latent), gate_up)
        own, context = rows, self.context
        rows, gates = (_gathered(ops, part, meta, context) for part in (rows, gates))
        if decay is not None and z is not None:
            decay, z = (_gathered(ops, part, meta, context) for part in (decay, z))
        mixed = ops.gated_delta(
            rows, gates, state=_state(kv), meta=meta, params=self.params, decay=decay, z=z
        )
        return ops.linear(_own(ops, mixed, own, context), self.out)


@dataclass(frozen=True, slots=True)
class Mamba2:
    spec: Mamba2Spec
    into: Linear
    out: Linear
    params: Mamba2Params
    norm: Tensor | None = None  # weights of the norm that `params` lacks, with `spec.norm_part`
    group: RankGroup | None = None  # ranks with the other parts
    context: RankGroup | None = None

    def __call__(self, ops: OpSet, x: Activations, kv: LayerKV, meta: AttentionMetadata) -> Tensor:
        own = ops.linear(x, self.into)
        rows = _gathered(ops, own, meta, self.context)
        mixed = ops.mamba2(rows, state=_state(kv), meta=meta, params=self.params)
        if self.group is not None:
            mixed = ops.norm_groups_part(mixed, spec=self.spec, weight=self.norm, group=self.group)
        if not self.params.gated:
            gate = ops.columns(rows, start=0, stop=self.spec.v_size)
            if self.spec.gate == "silu":
                mixed = mixed * gate
            mixed = mixed * ops.sigmoid(gate)
        return ops.linear(_own(ops, mixed, own, self.context), self.out)

    @property
    def products(self) -> dict[str, Linear]:
        return {"in": self.into, "out": self.out}

    @property
    def inputs(self) -> InputFormat | None:
        return self.into.inputs


@dataclass(frozen=True, slots=True)
class Mamba:
    spec: MambaSpec
    into: Linear
    select: Linear
    dt: Linear
    out: Linear
    conv: ConvParams
    params: MambaParams
    norms: tuple[NormParams, NormParams, NormParams] | None = None  # of dt's latent, B and C
    group: RankGroup | None = None  # ranks with the other channels
    context: RankGroup | None = None

    def __call__(self, ops: OpSet, x: Activations, kv: LayerKV, meta: AttentionMetadata) -> Tensor:
        s, state = self.spec, _state(kv)
        own = ops.linear(x, self.into)
        xz = _gathered(ops, own, meta, self.context)
        rows = ops.causal_conv(xz, state=state, meta=meta, params=self.conv)
        chosen = ops.linear(rows, self.select)
        if self.group is not None:
            chosen = ops.all_reduce(chosen, group=self.group)
        ends = (0, s.rank, s.rank + s.key_dim, s.rank + 2 * s.key_dim)
        parts: list[Any] = [ops.columns(chosen, start=a, stop=b) for a, b in pairwise(ends)]
        if self.norms is not None:
            parts = [ops.norm(p, n)[0] for p, n in zip(parts, self.norms, strict=True)]
        latent, b, c = parts
        dt = ops.linear(latent, self.dt)
        mixed = ops.selective_scan(rows, dt, b, c, xz, state=state, meta=meta, params=self.params)
        return ops.linear(_own(ops, mixed, own, self.context), self.out)

    @property
    def products(self) -> dict[str, Linear]:
        return {"in": self.into, "select": self.select, "dt": self.dt, "out": self.out}

    @property
    def inputs(self) -> InputFormat | None:
        return self.into.inputs


@dataclass(frozen=True, slots=True)
class ShortConv:
    spec: ShortConvSpec
    into: Linear
    out: Linear
    conv: ConvParams
    context: RankGroup | None = None

    def __call__(self, ops: OpSet, x: Activations, kv: LayerKV, meta: AttentionMetadata) -> Tensor:
        own = ops.linear(x, self.into)
        rows = _gathered(ops, own, meta, self.context)
        mixed = ops.short_conv(rows, state=_state(kv), meta=meta, params=self.conv)
        return ops.linear(_own(ops, mixed, own, self.context), self.out)

    @property
    def products(self) -> dict[str, Linear]:
        return {"in": self.into, "out": self.out}

    @property
    def inputs(self) -> InputFormat | None:
        return self.into.inputs


Recurrent: TypeAlias = GatedDelta | Mamba2 | Mamba | ShortConv


def constant(like: Any, values: Any, *, own_type: bool = False) -> Any:
    """Constants that no checkpoint has, as a tensor, an array or a shape like `like`; with `own_type` in its dtype."""
    if isinstance(like, NamedWeight):
        return NamedWeight("constant", values.shape)
    if not hasattr(like, "new_tensor"):
        return values.astype(like.dtype) if own_type else values
    made = like.new_tensor(values.tolist(), dtype=like.new_ones(1).float().dtype)
    return made.to(like.dtype) if own_type else made


def build_recurrent(
    spec: RecurrentSpec,
    parameters: MutableMapping[str, Tensor],
    name: str,
    linear: Callable[..., Linear],
    group: RankGroup | None = None,
    context: RankGroup | None = None,
) -> Recurrent:
    """Builds a layer's recurrent part from the parameters named `{name}recurrent.…`, and removes them from the mapping.

    `linear(stem, scheme)` builds a linear layer; with None it is not quantized. `group`: ranks whose parts are summed;
    `context`: ranks with other tokens' rows.
    """

    def take(part: str) -> Any:
        return parameters.pop(f"{name}recurrent.{part}.weight", None)

    def dense(part: str) -> Linear:
        return linear(f"recurrent.{part}", None)

    into, out = linear("recurrent.in"), linear("recurrent.out")
    bias = parameters.pop(f"{name}recurrent.conv.bias", None)
    conv = ConvParams(weight=take("conv"), bias=bias, silu=not isinstance(spec, ShortConvSpec))
    match spec:
        case GatedDeltaSpec():
            latents = None
            if spec.latent is not None:
                latents = (
                    dense("decay_latent"),
                    dense("decay_up"),
                    dense("gate_latent"),
                    dense("gate_up"),
                )
            delta = GatedDeltaParams(
                spec=spec, conv=conv, decay=take("decay"), time=take("time"), norm=take("norm")
            )
            return GatedDelta(spec, into, dense("gates"), out, delta, latents, context=context)
        case Mamba2Spec():
            norm, of_ranks = take("norm"), spec.norm_part is not None
            decay, time, skip = take("decay"), take("time"), take("skip")
            if isinstance(spec, LightningSpec):
                taps = np.ones((spec.conv_channels, 1), np.float32)
                conv = ConvParams(weight=constant(norm, taps, own_type=True))
                decay = constant(norm, np.log(np.array(spec.rates)).astype(np.float32))
                time = skip = constant(norm, np.zeros(spec.num_heads, np.float32))
            mamba2 = Mamba2Params(
                spec=dataclasses.replace(spec, norm=None) if of_ranks else spec,
                conv=conv,
                decay=decay,
                time=time,
                skip=skip,
                norm=None if of_ranks else norm,
                gated=not (of_ranks and spec.norm == "norm_first"),
            )
            of_parts = norm if of_ranks else None
            return Mamba2(spec, into, out, mamba2, of_parts, group if of_ranks else None, context)
        case MambaSpec():
            select, dt = dense("select"), dense("dt")
            norms = None
            if spec.normed:
                parts = {"time_norm": spec.rank, "b_norm": spec.key_dim, "c_norm": spec.key_dim}
                norms = tuple(
                    NormParams(
                        kind="rms",
                        weight=take(part)
                        if spec.normed is True
                        else constant(conv.weight, np.ones(size, np.float32), own_type=True),
                        eps=spec.eps,
                    )
                    for part, size in parts.items()
                )
            mamba = MambaParams(
                spec=spec, decay=take("decay"), time=take("time"), skip=take("skip")
            )
            return Mamba(spec, into, select, dt, out, conv, mamba, norms, group, context)  # type: ignore[arg-type]
        case ShortConvSpec():
            return ShortConv(spec, into, out, conv, context)
