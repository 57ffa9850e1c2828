"""The op set for training: plain torch that autograd differentiates, over whole sequences.

1. It computes the same as `reference.py`, with products in the type of their operands (under
   autocast: its type).
2. It needs a *flat* cache: one block per sequence, as long as the longest of the step, new for each
   layer and each pass (`model.sequences` makes them). Such a cache is this pass's keys and values
   in the layout of attention.
3. It has no steps that read an earlier step's cache, and no quantized weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.errors import ConfigError
from slipstream.kernels.metadata import AttentionMetadata, LayerKV
from slipstream.kernels.ops import AttentionParams, NormParams
from slipstream.kernels.plain import autograd_recurrent
from slipstream.kernels.plain.reference import ReferenceOps, attend
from slipstream.kernels.states import (
    ConvParams,
    GatedDeltaParams,
    LayerState,
    Mamba2Params,
    MambaParams,
)
from slipstream.kernels.weights.forms import Activations, Linear
from slipstream.spec.scheme import Scheme


class AutogradOps(ReferenceOps):
    """`ReferenceOps` with differentiable linear layers and attention."""

    name = "autograd"

    def quantize_weight(
        self, weight: Tensor, bias: Tensor | None, scheme: Scheme | None = None
    ) -> Linear:
        if scheme is not None:
            raise ConfigError(
                f"{scheme.name} weights have no gradient; train the dense ones",
                field="quantization",
            )
        return Linear(weight=weight, bias=bias)

    def linear(self, x: Activations, w: Linear) -> Tensor:
        assert isinstance(x, Tensor)
        return F.linear(x, w.weight, w.bias)

    def attention(
        self, q: Tensor, kv: LayerKV, meta: AttentionMetadata, params: AttentionParams
    ) -> Tensor:
        s = params
        if s.distance_bias is not None or not s.causal:
            raise ConfigError(
                "the autograd op set runs decoder-only models; encoders and T5 can't be trained",
                field="kernels",
            )
        length = kv.block_size
        if (
            meta.block_table.shape[1] != 1
            or length != meta.max_seq_len
            or meta.max_query_len != meta.max_seq_len
        ):
            raise ConfigError(
                "the autograd op set runs whole sequences over a flat cache (model.sequences)",
                field="kernels",
            )
        if s.softcap is not None or s.sinks is not None:
            return _each(q, kv, meta, s)
        group = q.shape[1] // kv.k.shape[1]
        k, v = (t.to(q.dtype).repeat_interleave(group, dim=1) for t in (kv.k, kv.v))
        rows = meta.slot_mapping // length, meta.slot_mapping % length
        is_full = len(q) == len(k) * length  # sequences of one length need no copies
        if is_full:
            padded = q.unflatten(0, (len(k), length))
        else:
            # [S, L, H, D]; results of rows beyond a sequence's end are not used
            padded = q.new_zeros(len(k), length, *q.shape[1:])
            padded[rows] = q
        mask = _mask(length, s.window, s.alibi_slopes, q)
        seen = F.scaled_dot_product_attention(
            padded.transpose(1, 2), k, v, mask, is_causal=mask is None, scale=s.scale
        )
        return seen.transpose(1, 2).flatten(0, 1) if is_full else seen.transpose(1, 2)[rows]

    @staticmethod
    def _float32(x: Tensor) -> torch.autocast:
        """Context manager that turns autocast off inside. Recurrences are computed in float32,
        because their states collect the errors of all tokens."""
        return torch.autocast(x.device.type, enabled=False)

    def gated_delta(
        self,
        x: Tensor,
        gates: Tensor,
        state: LayerState,
        meta: AttentionMetadata,
        params: GatedDeltaParams,
        decay: Tensor | None = None,
        z: Tensor | None = None,
    ) -> Tensor:
        with self._float32(x):
            return autograd_recurrent.gated_delta(x, gates, meta, params, decay, z)

    def mamba2(
        self, x: Tensor, state: LayerState, meta: AttentionMetadata, params: Mamba2Params
    ) -> Tensor:
        with self._float32(x):
            return autograd_recurrent.mamba2(x, meta, params)

    def short_conv(
        self, x: Tensor, state: LayerState, meta: AttentionMetadata, params: ConvParams
    ) -> Tensor:
        with self._float32(x):
            return autograd_recurrent.short_conv(x, meta, params)

    def causal_conv(
        self, x: Tensor, state: LayerState, meta: AttentionMetadata, params: ConvParams
    ) -> Tensor:
        with self._float32(x):
            rows = x[:, : len(params.weight)]
            return autograd_recurrent.convolved(rows, meta, params).to(x.dtype)

    def selective_scan(
        self,
        x: Tensor,
        dt: Tensor,
        b: Tensor,
        c: Tensor,
        xz: Tensor,
        state: LayerState,
        meta: AttentionMetadata,
        params: MambaParams,
    ) -> Tensor:
        with self._float32(x):
            return autograd_recurrent.selective_scan(x, dt, b, c, xz, meta, params)


class WatchedOps(AutogradOps):
    """Calls `watch(weight, x)` with the input [T, E] of every product and norm.

    The weight identifies the product. An expert's weight is a view of all experts' weights.
    """

    def __init__(self, watch: Callable[[Tensor, Tensor], None]) -> None:
        self.watch = watch

    def linear(self, x: Activations, w: Linear) -> Tensor:
        assert isinstance(x, Tensor)
        self.watch(w.weight, x)
        return super().linear(x, w)

    def norm(self, x: Tensor, norm: NormParams, **options: Any) -> tuple[Activations, Tensor]:
        normed, total = super().norm(x, norm, **options)
        self.watch(norm.weight, total)
        return normed, total


def _mask(length: int, window: int | None, slopes: Tensor | None, q: Tensor) -> Tensor | None:
    """Returns the attention mask [1 or H, L, L]. None means plain causal: a token sees itself and
    all before it."""
    if slopes is None and (window is None or window >= length):
        return None
    at = torch.arange(length, device=q.device)
    distance = at[:, None] - at[None, :]
    seen = distance >= 0
    if window is not None:
        seen &= distance < window
    if slopes is None:
        return seen[None]
    return (-slopes.float()[:, None, None] * distance).masked_fill(~seen, -torch.inf).to(q.dtype)


def _each(q: Tensor, kv: LayerKV, meta: AttentionMetadata, s: AttentionParams) -> Tensor:
    """Computes attention for each sequence separately. This supports soft caps and sinks, which
    torch's fused op does not."""
    found = [
        attend(part, kv.k[i, :, : len(part)], kv.v[i, :, : len(part)], s)
        for i, part in enumerate(q.split(meta.seq_lens.tolist()))
    ]
    return torch.cat(found)
