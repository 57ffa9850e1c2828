"""Recurrences of linear attention and state-space models, whose states `meta.states` names."""

from __future__ import annotations

from torch import Tensor

from slipstream.kernels.metadata import AttentionMetadata
from slipstream.kernels.plain import recurrent
from slipstream.kernels.states import (
    ConvParams,
    GatedDeltaParams,
    LayerState,
    Mamba2Params,
    MambaParams,
)


class RecurrentOps:
    """Ops of recurrent layers."""

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
        """The gated delta rule with its convolution and its gated norm (`GatedDeltaSpec`) → [T, H · V].

        `x` [T, C + H · V] has q, k and v before the convolution, and z; `gates` [T, 2 · H] has b and a. If `decay`
        [T, H · K] and `z` [T, H · V] are given, `x` is [T, C] and `gates` [T, H]. `meta.states` says which states are
        read and kept.
        """
        return recurrent.gated_delta(x, gates, state, meta, params, decay, z)

    def mamba2(
        self, x: Tensor, state: LayerState, meta: AttentionMetadata, params: Mamba2Params
    ) -> Tensor:
        """A Mamba-2 recurrence with its convolution, gate and norm: x [T, H · V + C + H] → [T, H · V]."""
        return recurrent.mamba2(x, state, meta, params)

    def short_conv(
        self, x: Tensor, state: LayerState, meta: AttentionMetadata, params: ConvParams
    ) -> Tensor:
        """LFM2's gated convolution: x [T, 3 · C] of b, c and x → c · conv(b · x) [T, C]."""
        return recurrent.short_conv(x, state, meta, params)

    def causal_conv(
        self, x: Tensor, state: LayerState, meta: AttentionMetadata, params: ConvParams
    ) -> Tensor:
        """Mamba-1's convolution of the first C columns of `x` [T, 2 · C] → [T, C]. It reads and keeps `state.conv`
        alone."""
        return recurrent.causal_conv(x, state, meta, params)

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
        """Mamba-1's recurrence and gate → [T, width].

        `x` [T, width] comes from the convolution, `dt` [T, width] has no bias yet, `b` and `c` are [T, K], and the last
        `width` columns of `xz` are the gate.
        """
        return recurrent.selective_scan(x, dt, b, c, xz, state, meta, params)
