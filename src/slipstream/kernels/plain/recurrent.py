"""Ops of recurrent layers in plain torch, token by token: the oracle (`spec/recurrent.py` has the equations)."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from slipstream.kernels.metadata import AttentionMetadata
from slipstream.kernels.states import (
    ConvParams,
    GatedDeltaParams,
    LayerState,
    Mamba2Params,
    MambaParams,
)

L2_EPS = 1e-6


def _sequences(meta: AttentionMetadata) -> list[tuple[int, int, int]]:
    """Returns (first token, end, slot to read) of each sequence with tokens."""
    assert meta.states is not None
    starts, read = meta.query_start_loc.tolist(), meta.states.read.tolist()
    return [(a, b, s) for a, b, s in zip(starts, starts[1:], read, strict=False) if b > a]


def _convolved(x: Tensor, state: LayerState, meta: AttentionMetadata, params: ConvParams) -> Tensor:
    """Convolves the sequences x [T, C] and keeps their last inputs → float32 [T, C]."""
    assert meta.states is not None
    write, (channels, width) = meta.states.write.tolist(), params.weight.shape
    weight, out = params.weight.float(), x.new_zeros(x.shape, dtype=x.dtype).float()
    for begin, end, slot in _sequences(meta):
        before = state.conv[slot] if slot else x.new_zeros(width - 1, channels)
        rows = before.to(x.dtype).new_empty(end - begin + width - 1, channels)
        rows[: width - 1], rows[width - 1 :] = before, x[begin:end]
        wide = rows.float()
        out[begin:end] = sum(wide[j : j + end - begin] * weight[:, j] for j in range(width))
        for t in range(begin, end):
            if write[t]:
                state.conv[write[t]] = rows[t - begin + 1 : t - begin + width].to(state.conv.dtype)
    if params.bias is not None:
        out = out + params.bias.float()
    return F.silu(out) if params.silu else out


def causal_conv(
    x: Tensor, state: LayerState, meta: AttentionMetadata, params: ConvParams
) -> Tensor:
    """Mamba-1's convolution of the first C columns of `x` [T, 2 · C] → [T, C]. It reads and keeps `state.conv`
    alone."""
    channels = params.weight.shape[0]
    return _convolved(x[:, :channels], state, meta, params).to(x.dtype)


def short_conv(x: Tensor, state: LayerState, meta: AttentionMetadata, params: ConvParams) -> Tensor:
    """LFM2's gated convolution: x [T, 3 · C] of b, c and x → c · conv(b · x) [T, C]."""
    b, c, inner = x.chunk(3, dim=1)
    return (c.float() * _convolved(b * inner, state, meta, params)).to(x.dtype)


def decay_logs(raw: Tensor, params: GatedDeltaParams) -> Tensor:
    """Returns the logarithms of the factors by which each token decays the state, float32 [T, H, K]
    or [T, H, 1]."""
    s, rate = params.spec, params.decay.float().exp()[:, None]
    raw = (raw.float() + params.time.float()).unflatten(1, (s.num_heads, -1))
    return -rate * F.softplus(raw) if s.bound is None else s.bound * (rate * raw).sigmoid()


def gated_delta(
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
    s, states = params.spec, state.recurrent
    assert meta.states is not None
    assert states is not None
    heads, channels = s.num_heads, s.conv_channels
    mixed = _convolved(x[:, :channels], state, meta, params.conv)
    q, k, v = mixed.split([s.q_size, s.q_size, s.v_size], dim=1)
    q, k = (
        y.unflatten(1, (s.num_key_heads, s.key_dim)).repeat_interleave(heads // s.num_key_heads, 1)
        for y in (q, k)
    )
    q, k = (y * (y.square().sum(-1, keepdim=True) + L2_EPS).rsqrt() for y in (q, k))
    q, v = q * s.key_dim**-0.5, v.unflatten(1, (heads, s.value_dim))
    if decay is None:
        decay = gates[:, heads:]
    if z is None:
        z = x[:, channels:]
    beta = gates[:, :heads].float().sigmoid() * (2 if s.negative_eigenvalues else 1)
    kept = decay_logs(decay, params).exp()
    out, write = v.new_empty(v.shape), meta.states.write.tolist()
    for begin, end, slot in _sequences(meta):
        now = states[slot].clone() if slot else states.new_zeros(states.shape[1:])
        for t in range(begin, end):
            now = now * kept[t][..., None]
            delta = beta[t][:, None] * (v[t] - (now * k[t][..., None]).sum(1))
            now = now + k[t][..., None] * delta[:, None]
            out[t] = (now * q[t][..., None]).sum(1)
            if write[t]:
                states[write[t]] = now
    out = out * (out.square().mean(-1, keepdim=True) + s.eps).rsqrt() * params.norm.float()
    gate = z.float().unflatten(1, (heads, -1))
    out = out * (F.silu(gate) if s.gate == "silu" else gate.sigmoid())
    result: Tensor = out.flatten(1).to(x.dtype)
    return result


def mamba2(x: Tensor, state: LayerState, meta: AttentionMetadata, params: Mamba2Params) -> Tensor:
    """A Mamba-2 recurrence with its convolution, gate and norm: x [T, H · V + C + H] → [T, H · V]."""
    s, states = params.spec, state.recurrent
    assert meta.states is not None
    assert states is not None
    heads, size = s.num_heads, s.num_groups * s.key_dim
    z, channels = x[:, : s.v_size], x[:, s.v_size : s.v_size + s.conv_channels]
    dt = x[:, s.time_at : s.time_at + heads]
    v, b, c = _convolved(channels, state, meta, params.conv).split([s.v_size, size, size], dim=1)
    b, c = (
        y.unflatten(1, (s.num_groups, -1)).repeat_interleave(heads // s.num_groups, 1)
        for y in (b, c)
    )
    v = v.unflatten(1, (heads, -1))
    dt = F.softplus(dt.float() + params.time).clamp(*s.time_limit)
    kept = (-params.decay.exp() * dt).exp()
    out, write = v.new_empty(v.shape), meta.states.write.tolist()
    for begin, end, slot in _sequences(meta):
        now = states[slot].clone() if slot else states.new_zeros(states.shape[1:])
        for t in range(begin, end):
            added = (dt[t][:, None] * b[t])[..., None] * v[t][:, None]
            now = now * kept[t][:, None, None] + added
            out[t] = (now * c[t][..., None]).sum(1)
            if write[t]:
                states[write[t]] = now
    y: Tensor = (out + params.skip[:, None] * v).flatten(1)
    if not params.gated:
        return y.to(x.dtype)
    gate = F.silu(z.float()) if s.gate == "silu" else z.float().sigmoid()
    if s.norm == "gate_first":
        y = y * gate
    if params.norm is not None:
        groups = y.unflatten(1, (s.norm_groups, -1))
        groups = groups * (groups.square().mean(-1, keepdim=True) + s.eps).rsqrt()
        y = groups.flatten(1) * params.norm.float()
    result: Tensor = (y if s.norm == "gate_first" else y * gate).to(x.dtype)
    return result


def selective_scan(
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
    s, states = params.spec, state.recurrent
    assert meta.states is not None
    assert states is not None
    dt, rows, b, c = F.softplus(dt.float() + params.time), x.float(), b.float(), c.float()
    rate, write, out = -params.decay.exp(), meta.states.write.tolist(), x.new_empty(x.shape).float()
    for begin, end, slot in _sequences(meta):
        now = states[slot].clone() if slot else states.new_zeros(states.shape[1:])
        for t in range(begin, end):
            now = now * (rate * dt[t][:, None]).exp() + (dt[t] * rows[t])[:, None] * b[t]
            out[t] = (now * c[t]).sum(1)
            if write[t]:
                states[write[t]] = now
    return ((out + params.skip * rows) * F.silu(xz[:, s.width :].float())).to(x.dtype)
