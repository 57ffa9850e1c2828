"""Ops on rows of activations that few models need, in plain torch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.kernels.plain import compressed
from slipstream.platform.collectives import RankGroup
from slipstream.spec.model import AttentionSpec, DenseSpec


class RowOps:
    """Ops on rows, streams and columns."""

    def added(self, x: Tensor, y: Tensor, factor: Tensor | float = 1.0) -> Tensor:
        """(x + y) · factor for x, y [T, E], rounded once. y may be overwritten. A `factor` that is
        a tensor has one element."""
        if isinstance(factor, float) and factor == 1.0:
            return x + y
        return ((x.float() + y.float()) * factor).to(x.dtype)

    def mixed_streams(self, h: Tensor, coefficients: Tensor) -> Tensor:
        """Mixes streams: h [T, N · E] and coefficients [T, N · N] → h, where each stream j gets Σᵢ
        coefficients[:, j · N + i] · stream i added."""
        n = math.isqrt(coefficients.shape[1])
        mixed = coefficients.view(-1, n, n) @ h.view(len(h), n, -1)
        return h + mixed.view_as(h)

    def corrected_streams(
        self, h: Tensor, made: Tensor, coefficients: Tensor, *, active: int
    ) -> Tensor:
        """Corrects streams by a layer's result `made`: each stream of h [T, N · E] gets (1 + its
        coefficient [T, N]) · (made − stream `active`) added."""
        streams = h.view(len(h), coefficients.shape[1], -1)
        change = made - streams[:, active]
        return (streams + change[:, None] * (coefficients + 1)[..., None]).view_as(h)

    stream_coefficients = staticmethod(compressed.coefficients)
    collapsed_streams = staticmethod(compressed.collapsed)
    merged_streams = staticmethod(compressed.merged)
    grouped_linear = staticmethod(compressed.grouped_linear)

    def widened(self, h: Tensor, x: Tensor) -> Tensor:
        """Adds x [T, E] to all streams of h [T, N · E] but the first."""
        streams = h.view(len(h), -1, x.shape[1])
        return torch.cat((streams[:, :1], streams[:, 1:] + x[:, None]), dim=1).view_as(h)

    def side_by_side(self, *x: Tensor) -> Tensor:
        return torch.cat(x, dim=1)

    def mean_of(self, *x: Tensor) -> Tensor:
        return torch.stack(x).mean(dim=0)

    def as_large_as(self, x: Tensor, y: Tensor) -> Tensor:
        """Scales each row of x to the root mean square of y's row: x · rms(y) / rms(x)."""
        size = y.square().mean(dim=-1, keepdim=True).sqrt()
        return x * size / x.square().mean(dim=-1, keepdim=True).clamp(min=1e-5).sqrt()

    def times(self, x: Tensor, *, weight: Tensor) -> Tensor:
        return x * weight

    def tanh(self, x: Tensor) -> Tensor:
        return x.float().tanh().to(x.dtype)

    def sparse_gates(self, x: Tensor, *, spec: DenseSpec, group: RankGroup | None) -> Tensor:
        """Sparsifies the gates in x [T, 2F] (gates, then ups) as `DenseSpec.sparsity` says. Each
        rank of `group` has a part of them. Padding gates are 0 and do not count."""
        gates, ups = x.chunk(2, dim=1)
        normal = torch.distributions.Normal(0.0, 1.0)
        deviations = normal.icdf(torch.tensor(spec.sparsity)).item()
        if group is None or spec.of_size is None:
            mean, std = gates.mean(-1, keepdim=True), gates.std(-1, keepdim=True, unbiased=False)
        else:
            wide = gates.float()
            sums = group.all_reduce(torch.stack((wide.sum(1), wide.square().sum(1))))
            mean, squares = (total[:, None] / spec.of_size for total in sums)
            std = (squares - mean.square()).clamp(min=0).sqrt()
        least = (mean + std * deviations).to(x.dtype)
        return torch.cat((torch.relu(gates - least), ups), dim=1)

    def columns(self, x: Tensor, start: int, stop: int) -> Tensor:
        """Returns columns [start, stop) of x [T, N] as a tensor of their own."""
        return x[:, start:stop].contiguous()

    def resized_heads(self, x: Tensor, *, start: int, count: int, old: int, new: int) -> Tensor:
        """Changes the width of heads: x [T, start + count · old] → [T, start + count · new]. Each
        of the last `count` parts is padded with zeros or cut."""
        parts = x[:, start:].unflatten(1, (count, old))
        parts = torch.nn.functional.pad(parts, (0, new - old)).flatten(1)
        return torch.cat((x[:, :start], parts), 1) if start else parts

    def paired_heads(self, x: Tensor, *, spec: AttentionSpec) -> Tensor:
        """x [T, q, k, v] of the product of `DifferentialSpec` → the same of twice the heads: each kv
        head with the first half of its values, then with the second, next to its query heads."""
        tokens, count, dim = len(x), spec.num_kv_heads // 2, spec.head_dim
        q, k, v = x.split(spec.qkv_rows, dim=1)
        q, k = (part.reshape(tokens, count, 1, -1).expand(-1, -1, 2, -1) for part in (q, k))
        v = v.reshape(tokens, 1, 2, count // 2, dim).transpose(2, 3).expand(-1, 2, -1, -1, -1)
        return torch.cat([part.reshape(tokens, -1) for part in (q, k, v)], dim=1)

    def head_differences(
        self, x: Tensor, *, spec: AttentionSpec, lambdas: Sequence[Tensor]
    ) -> Tensor:
        """Results x [T, H · D] of `paired_heads` → [T, H · D / 2], normed (`DifferentialSpec`).
        `lambdas`: q1, k1, q2, k2 [D]."""
        assert spec.differential is not None
        base, eps = spec.differential.base, spec.differential.eps
        q1, k1, q2, k2 = (w.float() for w in lambdas)
        factor = (q1 * k1).sum().exp() - (q2 * k2).sum().exp() + base
        group = spec.num_heads // spec.num_kv_heads
        each = x.unflatten(1, (spec.num_kv_heads // 2, 2, group, spec.head_dim)).transpose(2, 3)
        first, second = each.reshape(len(x), 2, -1, 2 * spec.head_dim).float().unbind(1)
        found = first - factor * second
        size = found.square().mean(dim=-1, keepdim=True).add(eps).rsqrt()
        rows: Tensor = (found * size * (1 - base)).flatten(1).to(x.dtype)
        return rows

    def sigmoid(self, x: Tensor) -> Tensor:
        return x.sigmoid()

    def softplus(self, x: Tensor) -> Tensor:
        return F.softplus(x.float()).to(x.dtype)

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        """Limits x smoothly to ±cap: tanh(x / cap) · cap, in float32."""
        return (x.float() / cap).tanh().mul(cap).to(x.dtype)
