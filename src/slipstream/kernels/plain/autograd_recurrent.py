"""Ops of recurrent layers that autograd differentiates, over whole sequences (`model.sequences`).

1. A sequence begins with zeros, and no state is read or kept.
2. The recurrences are computed in chunks in float32: products inside a chunk, states from one to the next
   (`spec/recurrent.py` has the equations). So a backward pass holds a state for each chunk, not for each token.
3. Decays stay logarithms until differences of at most 0 are taken, so nothing overflows.

Shapes: S sequences of up to L tokens, H heads, K key size, V value size, C tokens of a chunk.
"""

from __future__ import annotations

from itertools import repeat

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.kernels.metadata import AttentionMetadata
from slipstream.kernels.plain.recurrent import L2_EPS, decay_logs
from slipstream.kernels.states import ConvParams, GatedDeltaParams, Mamba2Params, MambaParams

CHUNK, CHANNELS_CHUNK = 64, 16
"""Tokens of a chunk if the decay is one number per head, and if it is one per channel. The latter
takes C² · K numbers for each head."""


def _rows(meta: AttentionMetadata) -> tuple[Tensor, Tensor]:
    """Returns (sequence, position in it) of each token."""
    return meta.slot_mapping // meta.max_seq_len, meta.slot_mapping % meta.max_seq_len


def _padded(x: Tensor, meta: AttentionMetadata) -> Tensor:
    """Pads sequences: [T, …] → float32 [S, L, …], with zeros after a sequence's end."""
    made = x.new_zeros(len(meta.seq_lens), meta.max_seq_len, *x.shape[1:], dtype=torch.float32)
    return made.index_put(_rows(meta), x.float())


def convolved(x: Tensor, meta: AttentionMetadata, params: ConvParams) -> Tensor:
    """Applies the causal convolution: [T, C] → float32 [T, C]."""
    weight, bias = params.weight.float(), params.bias
    wide = F.pad(_padded(x, meta).mT, (weight.shape[1] - 1, 0))
    out = F.conv1d(
        wide, weight[:, None], None if bias is None else bias.float(), groups=len(weight)
    )
    rows = out.mT[_rows(meta)]
    return F.silu(rows) if params.silu else rows


def short_conv(x: Tensor, meta: AttentionMetadata, params: ConvParams) -> Tensor:
    b, c, inner = x.chunk(3, dim=1)
    return (c.float() * convolved(b * inner, meta, params)).to(x.dtype)


def _recurrence(
    q: Tensor, k: Tensor, v: Tensor, logs: Tensor, meta: AttentionMetadata, beta: Tensor | None
) -> Tensor:
    """Computes Sᵀ q [T, H, V] at each token, where the state follows S ← exp(logs) · S + k uᵀ.

    q and k are [T, H, K], v [T, H, V], logs [T, H, 1 or K]. u is v, or with `beta` [T, H] the delta rule's
    β (v − Sᵀ k) of the decayed S.
    """
    size = CHUNK if logs.shape[-1] == 1 else CHANNELS_CHUNK
    wide = -meta.max_seq_len % size

    def chunks(x: Tensor) -> list[Tensor]:
        """Cuts sequences into chunks of C tokens: [T, H, N] → [S, H, C, N] for each chunk."""
        return list(torch.split(F.pad(_padded(x, meta).transpose(1, 2), (0, 0, 0, wide)), size, 2))

    betas = repeat(None) if beta is None else chunks(beta[..., None])
    causal = torch.ones(size, size, dtype=torch.bool, device=q.device).tril()
    now = q.new_zeros(len(meta.seq_lens), k.shape[1], k.shape[2], v.shape[2])
    outs = []
    for q_, k_, u, g, b in zip(*map(chunks, (q, k, v, logs)), betas, strict=False):
        g = g.cumsum(2)
        apart = (g[..., :, None, :] - g[..., None, :, :]).masked_fill(
            ~causal[..., None], -torch.inf
        )  # [S, H, C, C, 1 or K]

        def scores(x: Tensor, k_: Tensor = k_, apart: Tensor = apart) -> Tensor:
            """Computes the scores x_t · (decay from j to t) · k_j of a chunk's tokens t and j, [S,
            H, C, C]."""
            if apart.shape[-1] == 1:
                return (x @ k_.mT) * apart[..., 0].exp()
            return torch.einsum("shtk,shtjk,shjk->shtj", x, apart.exp(), k_)

        if b is not None:
            lower = (b * scores(k_)).tril(-1)
            u = b * (u - (g.exp() * k_) @ now)
            u = torch.linalg.solve_triangular(lower, u, upper=False, unitriangular=True)
        outs.append((g.exp() * q_) @ now + scores(q_) @ u)
        last = g[:, :, -1:]
        now = last.mT.exp() * now + ((last - g).exp() * k_).mT @ u
    return torch.cat(outs, 2).transpose(1, 2)[_rows(meta)]


def gated_delta(
    x: Tensor,
    gates: Tensor,
    meta: AttentionMetadata,
    params: GatedDeltaParams,
    decay: Tensor | None,
    z: Tensor | None,
) -> Tensor:
    s, heads, channels = params.spec, params.spec.num_heads, params.spec.conv_channels
    mixed = convolved(x[:, :channels], meta, params.conv)
    q, k, v = mixed.split([s.q_size, s.q_size, s.v_size], dim=1)
    q, k = (
        y.unflatten(1, (s.num_key_heads, -1)).repeat_interleave(heads // s.num_key_heads, 1)
        for y in (q, k)
    )
    q, k = (y * (y.square().sum(-1, keepdim=True) + L2_EPS).rsqrt() for y in (q, k))
    beta = gates[:, :heads].float().sigmoid() * (2 if s.negative_eigenvalues else 1)
    logs = decay_logs(gates[:, heads:] if decay is None else decay, params)
    out = _recurrence(q * s.key_dim**-0.5, k, v.unflatten(1, (heads, -1)), logs, meta, beta)
    out = out * (out.square().mean(-1, keepdim=True) + s.eps).rsqrt() * params.norm.float()
    gate = (x[:, channels:] if z is None else z).float().unflatten(1, (heads, -1))
    return (out * (F.silu(gate) if s.gate == "silu" else gate.sigmoid())).flatten(1).to(x.dtype)


def mamba2(x: Tensor, meta: AttentionMetadata, params: Mamba2Params) -> Tensor:
    s, heads = params.spec, params.spec.num_heads
    size = s.num_groups * s.key_dim
    mixed = convolved(x[:, s.v_size : s.v_size + s.conv_channels], meta, params.conv)
    v, b, c = mixed.split([s.v_size, size, size], dim=1)
    b, c = (
        y.unflatten(1, (s.num_groups, -1)).repeat_interleave(heads // s.num_groups, 1)
        for y in (b, c)
    )
    v = v.unflatten(1, (heads, -1))
    dt = x[:, s.time_at : s.time_at + heads].float()
    dt = F.softplus(dt + params.time.float()).clamp(*s.time_limit)
    logs = (-params.decay.float().exp() * dt)[..., None]
    y = _recurrence(c, dt[..., None] * b, v, logs, meta, None)
    y = (y + params.skip.float()[:, None] * v).flatten(1)
    z = x[:, : s.v_size].float()
    gate = F.silu(z) if s.gate == "silu" else z.sigmoid()
    if s.norm == "gate_first":
        y = y * gate
    if params.norm is not None:
        y = y.unflatten(1, (s.norm_groups, -1))
        y = (y * (y.square().mean(-1, keepdim=True) + s.eps).rsqrt()).flatten(1)
        y = y * params.norm.float()
    result: Tensor = (y if s.norm == "gate_first" else y * gate).to(x.dtype)
    return result


def selective_scan(
    x: Tensor,
    dt: Tensor,
    b: Tensor,
    c: Tensor,
    xz: Tensor,
    meta: AttentionMetadata,
    params: MambaParams,
) -> Tensor:
    """Computes `OpSet.selective_scan` token by token: a chunk's products would be as many as its
    tokens' states."""
    s, rate = params.spec, -params.decay.float().exp()
    dt, rows = F.softplus(dt.float() + params.time.float()), x.float()
    steps = [y.unbind(1) for y in (_padded(z, meta) for z in (dt, dt * rows, b, c))]
    now, outs = rows.new_zeros(len(meta.seq_lens), s.width, s.key_dim), []
    for dt_, added, b_, c_ in zip(*steps, strict=True):
        now = now * (rate * dt_[..., None]).exp() + added[..., None] * b_[:, None]
        outs.append((now * c_[:, None]).sum(-1))
    out = torch.stack(outs, 1)[_rows(meta)] + params.skip.float() * rows
    return (out * F.silu(xz[:, s.width :].float())).to(x.dtype)
