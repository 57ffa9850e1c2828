"""Torch ops that are fast on a CPU, in bfloat16 and float32.

They run where the C++ kernels (`ops.py`) are not built, and for ops that the C++ kernels lack. Ops
that are not here are the reference's, which is as fast.

Choices, measured by the study `kernels_cpu_torch`:

1. Products go through oneDNN, with the weight reordered once: 1.3 to 4 × as fast as `F.linear`, in
   both types. The packed weight replaces the dense one. A tied embedding keeps its table for
   look-ups, and a packed copy serves as the head.
2. Attention is `scaled_dot_product_attention` over gathered blocks. The query heads of a kv head
   are packed as rows, since `enable_gqa` expands the cache. Scores stay in float32: bfloat16 is up
   to 1.6 × as fast and a fifth less exact.
3. The sampler is NumPy's (`sampling/`), which a process without torch also has.
4. Freed temporaries are kept (`keep_freed_memory`), because giving their pages back costs more than
   filling them.

Limits: keys and values beyond a sequence's end are masked, but multiplied by 0. So the cache must
be finite.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.errors import ConfigError
from slipstream.kernels.arrays import to_array
from slipstream.kernels.build import remedy
from slipstream.kernels.cpu.native import has_cpu_kernels
from slipstream.kernels.cpu.sampling import sampling, token_masks
from slipstream.kernels.metadata import AttentionMetadata, ExpertCounters, LayerKV, SamplingTensors
from slipstream.kernels.ops import AttentionParams, Experts, NormParams, OpSet, QKVLayout
from slipstream.kernels.plain.reference import (
    ReferenceOps,
    activate,
    attend,
    biases,
    count_experts,
    gather_sequence,
    identity_part,
    local_choice,
    rms,
    route,
    softmax,
)
from slipstream.kernels.weights.adapters import LoRATokens, LoRAWeights
from slipstream.kernels.weights.forms import NO_ROWS, Activations, GroupedLinear, Linear
from slipstream.kernels.weights.quantize import dequantize, round_linear
from slipstream.spec.model import Activation, OwnNorm
from slipstream.spec.scheme import NATIVE_PRODUCTS, InputFormat, Scheme

MAX_TEMPORARY_BYTES = 4 * 2**20
"""Maximum size of a mask, of scores or of gathered keys. Prefill is split by queries and decodes by
sequences to stay below it."""

PACK_BATCH = 32
"""Number of tokens that oneDNN lays weights out for. The layout works for other numbers too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedLinear(Linear):
    """A dense weight in oneDNN's layout, `packed`. `weight` is on the meta device and only has the
    shape and type."""

    packed: Tensor
    ROWS = NO_ROWS


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeGroup:
    """Decodes of similar length, computed together and padded to the longest: N sequences of n
    gathered blocks each."""

    rows: Tensor | None  # int64 [N]: the sequences; None for all of the step
    lens: Tensor  # int [N, 1]
    num_blocks: int
    blocks: Tensor  # int64 [N · K · n]: rows of a cache seen as [B · K, block_size · D]
    at: Tensor  # int64 [N, n · block_size]: the position of each gathered key
    mask: Tensor  # [N, 1, 1, n · block_size] of the queries' type, added to the scores
    any_empty: bool  # some sequence is padding


def can_pack(dtype: torch.dtype) -> bool:
    """Tells whether this machine's torch has oneDNN for the type. Without it, weights stay dense
    and go through `F.linear`."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def keep_freed_memory() -> bool:
    """Makes glibc reuse this process's freed memory instead of giving it back.

    Blocks under 32 MiB come from the heap, and up to 256 MiB stay at its end. Returns False where
    the C library has no such setting, which only affects speed.
    """
    trim_threshold, mmap_threshold = -1, -3  # names in malloc.h: M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(
        mallopt(trim_threshold, 256 * 2**20) and mallopt(mmap_threshold, 32 * 2**20)
    )


class CpuOps(ReferenceOps):
    name = "torch"
    rounded = NATIVE_PRODUCTS["torch"]

    def __init__(self) -> None:
        keep_freed_memory()

    # --- Layers ---

    packed_attention = OpSet.packed_attention  # torch's own kernel; the reference's is the oracle

    def quantize_weight(
        self, weight: Tensor, bias: Tensor | None, scheme: Scheme | None = None
    ) -> Linear:
        if scheme is not None:
            raise ConfigError(
                f"the torch kernels have no {scheme.name} product: use kernels='reference', or {_native_instead()}",
                field="kernels",
            )
        if not can_pack(weight.dtype):
            return Linear(weight=weight, bias=bias)
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACK_BATCH)
        return PackedLinear(
            weight=torch.empty_like(weight, device="meta"), bias=bias, packed=packed
        )

    def pack_weight(self, w: Linear) -> Linear:
        raise ConfigError(
            f"the torch kernels have no product with rounded weights: use kernels='reference', or {_native_instead()}",
            field="kernels",
        )

    def pack_experts(self, w: Linear, *, num_experts: int) -> Linear:
        """Packs experts. Those in `mxfp4` become dense, as torch has no product with them."""
        if isinstance(w, GroupedLinear) and w.codes == "e2m1":
            return Linear(weight=dequantize(w, w.scales.dtype), bias=w.bias)
        return self.pack_weight(w)

    def quantize_experts(
        self,
        weight: Tensor,
        scheme: Scheme | None = None,
        bias: Tensor | None = None,
        *,
        num_experts: int,
    ) -> Linear:
        if scheme is not None and scheme.name == "mxfp4":
            return self.pack_experts(round_linear(weight, bias, scheme), num_experts=num_experts)
        return (
            Linear(weight=weight, bias=bias)
            if scheme is None
            else self.quantize_weight(weight, bias, scheme)
        )

    def moe(
        self, x: Tensor, router_logits: Tensor, experts: Experts, load: ExpertCounters | None = None
    ) -> Tensor:
        """Computes a mixture. Rows are sorted by expert, so that each product is one call over all
        of them."""
        up, down, spec = experts.up, experts.down, experts.spec
        weights, chosen = route(router_logits, spec, experts.correction, experts.scales)
        count_experts(chosen, load)
        held, kept = spec.num_local_experts, None
        if spec.identity and spec.adds_identity:
            kept = identity_part(x, weights, chosen, spec)
        if spec.skips:  # experts without weights here come after the local ones, and get no product
            weights, chosen = local_choice(weights, chosen, spec)
        by_expert, order = chosen.flatten().sort(stable=True)
        count = int((by_expert < held).sum())
        by_expert, order = by_expert[:count], order[:count]
        ends = by_expert.bincount(minlength=held).cumsum(0).int()
        per_expert = (held, -1, x.shape[1])
        h = F.grouped_mm(
            x[order // chosen.shape[1]], up.weight.view(per_expert).transpose(1, 2), offs=ends
        )
        if up.bias is not None:
            h += up.bias.view(held, -1)[by_expert]
        rows = self.activation(h, spec.expert.activation, gated=spec.expert.gated)
        assert isinstance(rows, Tensor)
        y = F.grouped_mm(rows, down.weight.view(held, x.shape[1], -1).transpose(1, 2), offs=ends)
        if down.bias is not None:
            y += down.bias.view(held, -1)[by_expert]
        back = (
            y.new_zeros(chosen.numel(), x.shape[1])
            .index_copy_(0, order, y)
            .view(*chosen.shape, x.shape[1])
        )
        total = (back.float() * weights[..., None]).sum(dim=1)
        return (total if kept is None else total + kept).to(x.dtype)

    def linear(self, x: Activations, w: Linear) -> Tensor:
        assert isinstance(x, Tensor)
        if isinstance(w, PackedLinear):
            y: Tensor = torch.ops.mkldnn._linear_pointwise(
                x.contiguous(), w.packed, w.bias, "none", [], ""
            )
            return y
        return F.linear(x, w.weight, w.bias)

    def lora(self, y: Tensor, x: Activations, w: LoRAWeights, tokens: LoRATokens) -> Tensor:
        """Adds adapters one after another. A batched product over gathered weights took 1.3 to 30
        times as long."""
        assert isinstance(x, Tensor)
        rank, parts = w.rank, w.parts
        for slot, begin, end in tokens.groups:
            whole = end - begin == len(y)
            at = tokens.order[begin:end]
            inner = (x if whole else x[at]) @ w.down[slot].T
            for p in w.live:
                more = inner[:, p * rank : (p + 1) * rank] @ w.up[slot, parts[p]].T
                if whole:
                    y[:, parts[p]] += more
                else:
                    y[:, parts[p]].index_add_(0, at, more)
        return y

    def norm(
        self,
        x: Tensor,
        norm: NormParams,
        *,
        residual: Tensor | None = None,
        inputs: InputFormat | None = None,
    ) -> tuple[Activations, Tensor]:
        if inputs is not None or norm.offset or isinstance(norm.kind, OwnNorm):
            return super().norm(x, norm, residual=residual, inputs=inputs)
        total = x if residual is None else x + residual
        size = total.shape[-1:]
        if norm.kind == "rms":
            return F.rms_norm(total, size, norm.weight, norm.eps), total
        return F.layer_norm(total, size, norm.weight, norm.bias, norm.eps), total

    def activation(
        self,
        x: Tensor,
        activation: Activation,
        *,
        gated: bool = False,
        inputs: InputFormat | None = None,
    ) -> Activations:
        if gated or inputs is not None or not isinstance(activation, str):
            return super().activation(x, activation, gated=gated, inputs=inputs)
        return activate(x, activation)

    def rope_and_cache(
        self, qkv: Tensor, kv: LayerKV, meta: AttentionMetadata, heads: QKVLayout
    ) -> Tensor:
        if kv.k_scale is not None:
            raise ConfigError(
                f"the torch kernels have no 8-bit cache; use kv_cache_dtype='auto', or {_native_instead()}",
                field="kv_cache_dtype",
            )
        h, cos_sin, num_kv_heads, size = heads, heads.cos_sin, heads.num_kv_heads, kv.block_size
        rows: Tensor = qkv.unflatten(1, (-1, h.head_dim))
        num_turned = h.num_heads + num_kv_heads
        qk, v = rows[:, :num_turned], rows[:, num_turned if h.has_values else h.num_heads :]
        if h.value_eps is not None:
            v = rms(v, v.new_ones(h.head_dim), h.value_eps, 0.0)
        if not h.norm_after:
            qk = _normed_heads(qk, h)
        if cos_sin is not None:
            # The value holds the tensor too, so that its id is not reused within the step.
            _, cos, sin = meta.once(
                (id(cos_sin), h.interleaved),
                lambda: (cos_sin, *_turning(cos_sin[meta.positions], h.interleaved)),
            )
            qk = _rotate(qk.float(), cos, sin, h.interleaved)
        if h.norm_after:
            qk = _normed_heads(qk, h)
        qk = qk.to(qkv.dtype)
        if not num_kv_heads:
            return qk
        slots = meta.once(
            ("slots", num_kv_heads, size),
            lambda: _head_slots(meta.slot_mapping, num_kv_heads, size),
        )
        for cache, new in ((kv.k, qk[:, h.num_heads :]), *(() if kv.latent else ((kv.v, v),))):
            cache.view(-1, h.head_dim).index_copy_(
                0, slots, new.reshape(-1, h.head_dim).to(cache.dtype)
            )
        return qk[:, : h.num_heads]

    # --- Attention ---

    def attention(
        self, q: Tensor, kv: LayerKV, meta: AttentionMetadata, params: AttentionParams
    ) -> Tensor:
        lens, window = meta.once("lens", meta.seq_lens.tolist), params.window
        groups = meta.once(
            (kv.k.shape[1:], window, q.dtype),
            lambda: decode_groups(meta, lens, kv, window, q.dtype),
        )
        if len(groups) == 1 and groups[0].rows is None:
            return _decode(q, kv, groups[0], params)
        out = q.new_empty(*q.shape[:2], kv.v.shape[3])
        for group in groups:
            assert group.rows is not None
            out[group.rows] = _decode(q[group.rows], kv, group, params)
        starts = meta.once("starts", meta.query_start_loc.tolist)
        for i in range(meta.num_decodes, len(lens)):
            begin, end, length = starts[i], starts[i + 1], lens[i]
            if length == 0:
                out[begin:end] = 0
                continue
            keys, values = gather_sequence(kv, meta.block_table[i], length)
            prefill = _prefill if params.scales_only else _tiled
            prefill(out[begin:end], q[begin:end], keys, values, params)
        return out

    # --- Sampling ---

    def mask_logits(
        self, logits: Tensor, rows: Tensor, bits: Tensor, which: Tensor | None = None
    ) -> None:
        places = None if which is None else which.numpy()
        token_masks.mask_logits(to_array(logits), rows.numpy(), bits.numpy(), places)

    def sample(self, logits: Tensor, params: SamplingTensors) -> Tensor:
        return torch.from_numpy(self._sample(logits.float().numpy(), params))

    def _sample(
        self, logits: npt.NDArray[np.float32], params: SamplingTensors
    ) -> npt.NDArray[np.int64]:
        return sampling.sample(logits, params, self._largest)

    def _largest(self, logits: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
        """Returns the first largest of each row [S, V]."""
        found: npt.NDArray[np.int64] = np.argmax(logits, axis=1)
        return found


# --- Rotary ---


def _native_instead() -> str:
    """Words the remedy: how to get the C++ kernels instead."""
    return "leave kernels at 'auto'" if has_cpu_kernels() else f"get the C++ ones: {remedy()}"


def _turning(table: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Splits cos and sin [T, rotary_dim] into the factors of x and of its swapped partner,
    [T, 1, rotary_dim] each."""
    cos, sin = table[:, None].chunk(2, dim=-1)
    if interleaved:
        return cos.repeat_interleave(2, dim=-1), torch.stack((-sin, sin), dim=-1).flatten(-2)
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def _normed_heads(qk: Tensor, h: QKVLayout) -> Tensor:
    """Norms heads of q and k side by side [T, H + K, D], if they have norms."""
    if h.q_norm is None or h.k_norm is None:
        return qk
    normed = ((qk[:, : h.num_heads], h.q_norm), (qk[:, h.num_heads :], h.k_norm))
    return torch.cat([rms(t, w, h.norm_eps, h.norm_offset) for t, w in normed], dim=1)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    rotary = cos.shape[-1]
    turned = x[..., :rotary]
    if interleaved:
        partner = turned.reshape(*turned.shape[:-1], -1, 2).flip(-1).flatten(-2)
    else:
        partner = turned.roll(rotary // 2, dims=-1)
    turned = (turned * cos).addcmul_(partner, sin)
    return turned if rotary == x.shape[-1] else torch.cat((turned, x[..., rotary:]), dim=-1)


def _head_slots(slot_mapping: Tensor, num_kv_heads: int, block_size: int) -> Tensor:
    """Converts slots [T] to rows [T · K] of a cache seen as [B · K · block_size, D]."""
    block, offset = slot_mapping // block_size, slot_mapping % block_size
    return (
        (block[:, None] * num_kv_heads + torch.arange(num_kv_heads)) * block_size + offset[:, None]
    ).flatten()


# --- Decodes ---


def decode_groups(
    meta: AttentionMetadata, lens: list[int], kv: LayerKV, window: int | None, dtype: torch.dtype
) -> list[DecodeGroup]:
    """Groups the step's decodes so that there is little padding. Blocks before the window are not
    gathered."""
    _, num_kv_heads, block_size, _ = kv.k.shape
    count, block_bytes = meta.num_decodes, kv.k[0].nbytes
    firsts = [
        0 if window is None else max(0, length - window) // block_size for length in lens[:count]
    ]
    needed = [
        max(1, -(-length // block_size) - first)
        for length, first in zip(lens, firsts, strict=False)
    ]
    groups = []
    for rows in _alike(needed, MAX_TEMPORARY_BYTES // block_bytes):
        n = max(needed[i] for i in rows)
        index = torch.tensor(rows)
        group_lens = meta.seq_lens[index][:, None]
        first = torch.tensor([firsts[i] for i in rows])[:, None]
        # Blocks beyond a shorter sequence's end are masked, so any will do.
        columns = (first + torch.arange(n)).clamp(max=meta.block_table.shape[1] - 1)
        blocks = meta.block_table[index].gather(1, columns).long()
        at = first * block_size + torch.arange(n * block_size)
        seen = at < group_lens
        if window is not None:
            seen &= at >= group_lens - window
        groups.append(
            DecodeGroup(
                rows=None if len(rows) == len(lens) else index,
                lens=group_lens,
                num_blocks=n,
                blocks=(
                    blocks[:, None] * num_kv_heads + torch.arange(num_kv_heads)[None, :, None]
                ).flatten(),
                at=at,
                mask=torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, -math.inf)[
                    :, None, None
                ],
                any_empty=any(lens[i] == 0 for i in rows),
            )
        )
    return groups


def _alike(needed: list[int], max_blocks: int) -> list[list[int]]:
    """Groups sequences by the number of blocks they need.

    All are together if padding them to the longest costs little. Otherwise none is padded to more
    than twice its own length. A group of several sequences has at most `max_blocks`.
    """
    groups: dict[int, list[int]] = {}
    even = max(needed, default=0) * len(needed) <= 1.5 * sum(needed) + 8 * len(needed)
    for i, count in enumerate(needed):
        groups.setdefault(0 if even else (count - 1).bit_length(), []).append(i)
    cut = []
    for rows in groups.values():
        size = max(1, max_blocks // max(needed[i] for i in rows))
        cut += [rows[i : i + size] for i in range(0, len(rows), size)]
    return cut


def _decode(q: Tensor, kv: LayerKV, group: DecodeGroup, s: AttentionParams) -> Tensor:
    """Computes attention for q [N, H, D], one token of each sequence of the group → [N, H, D]."""
    num_seqs, num_heads, head_dim = q.shape
    num_kv_heads, size = kv.k.shape[1:3]
    # One gather lays a head's blocks end to end. The query heads of a kv head are rows of one
    # product.
    shape = (num_seqs, num_kv_heads, group.num_blocks * size, head_dim)
    gathered = (kv.k,) if kv.latent else (kv.k, kv.v)
    keys, *others = (
        t.view(-1, size * head_dim).index_select(0, group.blocks).view(shape) for t in gathered
    )
    values = others[0] if others else keys[..., -kv.v.shape[3] :]
    rows = q.view(num_seqs, num_kv_heads, -1, head_dim)
    if s.scales_only:
        out = F.scaled_dot_product_attention(
            rows, keys, values, attn_mask=group.mask, scale=s.scale
        )
    else:
        scores = rows.float() @ keys.float().transpose(-1, -2) * s.scale
        if s.softcap is not None:
            scores = s.softcap * torch.tanh(scores / s.softcap)
        if s.alibi_slopes is not None:
            distance = (group.lens - 1 - group.at)[:, None, None]
            scores = scores - s.alibi_slopes.view(1, num_kv_heads, -1, 1) * distance
        if s.distance_bias is not None:
            added = biases(s.distance_bias, group.at - (group.lens - 1))  # [H, N, L]
            scores = scores + added.transpose(0, 1).unflatten(1, (num_kv_heads, -1))
        rest = None if s.sinks is None else s.sinks.view(num_kv_heads, -1, 1)
        out = (softmax(scores + group.mask, rest) @ values.float()).to(q.dtype)
    out = out.reshape(num_seqs, num_heads, -1)
    return torch.where(group.lens[:, :, None] > 0, out, 0.0) if group.any_empty else out


# --- Prefill ---


def _prefill(out: Tensor, q: Tensor, keys: Tensor, values: Tensor, s: AttentionParams) -> None:
    """Computes attention of q [n, H, D] at the end of keys and values [K, L, D] into `out`, for a
    layer that `scales_only`."""
    scale, window, causal = s.scale, s.window, s.causal
    num_queries, num_heads, head_dim = q.shape
    num_kv_heads, length, _ = keys.shape
    # a latent's single kv head is not copied for each of many heads
    group, latent = (num_heads // num_kv_heads, values.shape[2] < head_dim)
    if (not causal or (num_queries == length and not latent)) and (
        window is None or window >= length
    ):
        if group > 1:
            keys, values = (t.repeat_interleave(group, dim=0) for t in (keys, values))
        mixed = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None], keys[None], values[None], is_causal=causal, scale=scale
        )
        out.copy_(mixed[0].transpose(0, 1))
        return
    step = max(1, MAX_TEMPORARY_BYTES // (length * group * q.element_size()))
    if window is not None:  # longer pieces would read far more than the window
        step = min(step, max(window, 64))
    for begin in range(0, num_queries, step):
        end = min(begin + step, num_queries)
        # positions of these queries
        first, last = (length - num_queries + begin, length - num_queries + end)
        low = 0 if window is None else max(0, first - window + 1)
        at = torch.arange(first, last)[:, None]
        last = last if causal else min(length, last + (window or length) - 1)
        ahead = torch.arange(low, last)[None, :] - at
        hidden = ahead > 0 if causal else ahead >= (window or length)
        if window is not None:
            hidden |= ahead <= -window
        mask = (
            torch.zeros(hidden.shape, dtype=q.dtype)
            .masked_fill_(hidden, -math.inf)
            .repeat(group, 1)
        )
        # The query heads of a kv head are rows of one problem: [K, group · n, D].
        rows = (
            q[begin:end].view(-1, num_kv_heads, group, head_dim).permute(1, 2, 0, 3).flatten(1, 2)
        )
        mixed = F.scaled_dot_product_attention(
            rows[None],
            keys[None, :, low:last],
            values[None, :, low:last],
            attn_mask=mask,
            scale=scale,
        )[0]
        out[begin:end] = (
            mixed.reshape(num_kv_heads, group, -1, values.shape[2])
            .permute(2, 0, 1, 3)
            .flatten(1, 2)
        )


def _tiled(out: Tensor, q: Tensor, keys: Tensor, values: Tensor, s: AttentionParams) -> None:
    """Computes the reference's attention a few queries at a time, so that the scores stay small."""
    num_queries, num_heads, _ = q.shape
    length = keys.shape[1]
    step = max(1, MAX_TEMPORARY_BYTES // (length * num_heads * 4))
    for begin in range(0, num_queries, step):
        end = min(begin + step, num_queries)
        first = length - num_queries + begin
        last = length - num_queries + end if s.causal else length
        out[begin:end] = attend(q[begin:end], keys[:, :last], values[:, :last], s, first=first)
