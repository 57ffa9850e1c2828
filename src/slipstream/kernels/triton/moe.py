"""Mixtures of experts: routing, grouping by expert, two products over all experts at once, and the weighed sum.

An *entry* is a token's place in one of its experts: T · k of them, entry t · k + j being token t's j-th choice. Entries are
sorted by expert, and each expert's are cut into tiles; a program multiplies one tile with some rows of its expert's weight, so
that one launch covers all experts whatever their load. How many tiles there are is known on the device alone: as many programs
start as there can be at most, and those without a tile end at once. All sums have a fixed order. Of so few entries that hardly
two meet in one expert nothing is sorted: each is a tile, or with dense weights `few_experts` takes them.

| weights | as `kernels.weights` holds them, the experts one below the other |
| --- | --- |
| dense, fp8, int8 | `_experts_kernel`, K in blocks |
| fp8-block | the same, a block's sum scaled before it is added |
| int4, mxfp4 | `_experts_kernel`, K in chunks, codes made numbers of the model's type first |
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.metadata import ExpertLoad
from slipstream.kernels.ops import Experts
from slipstream.kernels.triton.device import shared_bytes
from slipstream.kernels.triton.few_experts import few_experts
from slipstream.kernels.triton.overlap import follow, overlapped
from slipstream.kernels.triton.pointwise import activation, quantize
from slipstream.kernels.weights import Activations, BlockScaledLinear, GroupedLinear, Linear, Quantized, ScaledLinear
from slipstream.model.scheme import BLOCK
from slipstream.model.spec import MoESpec

SORTED_AT_ONCE = 2048
"""Up to so many entries one program sorts them; more go through torch's sort."""


@dataclass(frozen=True, slots=True)
class Groups:
    """Entries by expert: expert e has order[starts[e] : starts[e + 1]], in tiles up to tile_ends[e] of all experts' tiles.
    `single`: each entry is a tile of its own, in the tokens' order; then `order` holds the entries' experts."""

    order: Tensor  # int32 [T · k]
    starts: Tensor  # int32 [X + 1]
    tile_ends: Tensor  # int32 [X]
    block: int  # entries in a tile
    max_tiles: int
    single: bool = False


def moe(
    x: Tensor,
    router_logits: Tensor,
    own: Experts,
    load: ExpertLoad | None = None,
    shared: tuple[Linear, Linear] | None = None,
) -> Tensor:
    """`OpSet.moe`; with `shared`, which `takes_shared` has seen, `OpSet.moe_and_shared`."""
    if not x.shape[0]:
        return torch.empty_like(x)
    up, down, spec = own.up, own.down, own.spec
    weights, chosen = route(router_logits, spec, own.correction, load)
    few = hardly_meet(x.shape[0], spec)
    if few and _dense(up, down):
        return few_experts(x.contiguous(), weights, chosen, up, down, spec, shared)
    groups = singles(chosen) if few else group(chosen, spec.num_experts)
    given: Activations = x.contiguous() if up.inputs is None else quantize(x, up.inputs)
    h = experts(given, up, groups, spec, spec.expert.up_rows, x.dtype, gather=True)
    inner = activation(h, spec.expert.activation, spec.expert.gated, down.inputs)
    y = experts(inner, down, groups, spec, x.shape[1], x.dtype, gather=False)
    return combine(y, weights)


def hardly_meet(num_tokens: int, spec: MoESpec) -> bool:
    """So few entries that hardly two of them are in one expert."""
    return num_tokens == 1 or 4 * num_tokens * spec.num_experts_per_token <= spec.num_experts


def takes_shared(num_tokens: int, own: Experts, shared: tuple[Linear, Linear]) -> bool:
    """Whether `moe` takes an expert of all tokens along: few tokens, dense weights, biases as the others have."""
    alike = all((a.bias is None) == (b.bias is None) for a, b in zip((own.up, own.down), shared, strict=True))
    return num_tokens > 0 and hardly_meet(num_tokens, own.spec) and _dense(own.up, own.down, *shared) and alike


def _dense(*products: Linear) -> bool:
    return all(type(w) is Linear and w.weight.is_contiguous() for w in products)


# --- Routing ---------------------------------------------------------------------------------------------------------


@triton.jit
def _route_kernel(
    logits_ptr,
    correction_ptr,
    weights_ptr,
    chosen_ptr,
    counts_ptr,
    slots_ptr,
    weight_scale,
    block_size,
    X: tl.constexpr,
    TOP: tl.constexpr,
    SIGMOID: tl.constexpr,
    CORRECTED: tl.constexpr,
    COUNTED: tl.constexpr,
    NORMALIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_CHOSEN: tl.constexpr,
    BY_TWO: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_TOP: tl.constexpr,
    PDL: tl.constexpr,
):
    """One token: scores [groups, experts of each], the best groups, then the TOP best experts (of equals the first)."""
    EACH: tl.constexpr = X // GROUPS
    token = tl.program_id(0).to(tl.int64)
    gs, es, js = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_TOP)
    ids = gs[:, None] * EACH + es[None, :]
    real = (gs < GROUPS)[:, None] & (es < EACH)[None, :]
    if PDL:
        follow()
    logits = tl.load(logits_ptr + token * X + ids, mask=real, other=float("-inf")).to(tl.float32)
    if SIGMOID:
        scores = tl.sigmoid(logits)
    else:
        scores = tl.exp(logits - tl.max(tl.max(logits, 1), 0))
        scores = scores / tl.sum(tl.sum(scores, 1), 0)
    merits = scores
    if CORRECTED:
        merits += tl.load(correction_ptr + ids, mask=real, other=0.0)
    merits = tl.where(real, merits, float("-inf"))
    if GROUPS > 1:
        best = tl.max(merits, 1)
        if BY_TWO:
            best += tl.max(tl.where(es[None, :] == tl.argmax(merits, 1)[:, None], float("-inf"), merits), 1)
        best = tl.where(gs < GROUPS, best, float("-inf"))
        kept = gs < 0
        for _ in range(GROUPS_CHOSEN):
            group = tl.argmax(best, 0)
            kept = kept | (gs == group)
            best = tl.where(gs == group, float("-inf"), best)
        merits = tl.where(kept[:, None], merits, float("-inf"))
    flat: tl.constexpr = BLOCK_G * BLOCK_E
    merits, scores, ids = tl.reshape(merits, (flat,)), tl.reshape(scores, (flat,)), tl.reshape(ids, (flat,))
    # An expert's rank is how many are better, or as good and ahead of it: all at once, where a search would take TOP in turn.
    # Keys are the merits' bits in a whole number's order, with the place below them: no two are equal, whatever the merits are.
    bits = merits.to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    keys = (order.to(tl.int64) << 32) - tl.arange(0, flat)
    rank = tl.sum((keys[:, None] > keys[None, :]).to(tl.int32), 0)
    taken = rank[:, None] == js[None, :]
    weights = tl.sum(tl.where(taken, scores[:, None], 0.0), 0)
    chosen = tl.sum(tl.where(taken, ids[:, None], 0), 0)
    weights = tl.where(js < TOP, weights, 0.0)
    if NORMALIZE:
        weights = weights / (tl.sum(weights, 0) + 1e-20)
    weights *= weight_scale
    tl.store(weights_ptr + token * TOP + js, weights, mask=js < TOP)
    tl.store(chosen_ptr + token * TOP + js, chosen, mask=js < TOP)
    if COUNTED:
        one = (tl.load(slots_ptr + token) >= block_size).to(tl.int64)
        tl.atomic_add(counts_ptr + chosen, one + tl.zeros((BLOCK_TOP,), tl.int64), mask=js < TOP, sem="relaxed")


def route(
    router_logits: Tensor, spec: MoESpec, correction: Tensor | None = None, load: ExpertLoad | None = None
) -> tuple[Tensor, Tensor]:
    """(weights float32, experts int32), [T, k] each."""
    num_tokens, top = router_logits.shape[0], spec.num_experts_per_token
    weights = torch.empty(num_tokens, top, dtype=torch.float32, device=router_logits.device)
    chosen = torch.empty(num_tokens, top, dtype=torch.int32, device=router_logits.device)
    limit, groups = spec.groups, 1 if spec.groups is None else spec.groups.num_groups
    _route_kernel[(num_tokens,)](
        router_logits.contiguous(),
        weights if correction is None else correction,
        weights,
        chosen,
        chosen if load is None else load.counts,
        chosen if load is None else load.slots,
        spec.weight_scale,
        0 if load is None else load.block_size,
        X=spec.num_experts,
        TOP=top,
        SIGMOID=spec.scores == "sigmoid",
        CORRECTED=correction is not None,
        COUNTED=load is not None,
        NORMALIZE=spec.normalize,
        GROUPS=groups,
        GROUPS_CHOSEN=1 if limit is None else limit.num_chosen,
        BY_TWO=limit is not None and limit.by == "best_two",
        BLOCK_G=triton.next_power_of_2(groups),
        BLOCK_E=triton.next_power_of_2(spec.num_experts // groups),
        BLOCK_TOP=triton.next_power_of_2(top),
        num_warps=1 if spec.num_experts <= 16 else 4 if spec.num_experts <= 128 else 8,
        **overlapped(router_logits),
    )
    return weights, chosen


# --- Grouping --------------------------------------------------------------------------------------------------------


@triton.jit
def _group_kernel(
    chosen_ptr,
    order_ptr,
    starts_ptr,
    ends_ptr,
    N,
    X,
    BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_X: tl.constexpr,
    PDL: tl.constexpr,
):
    """All entries in one program: sorted by (expert, entry), counted, cut into tiles."""
    if PDL:
        follow()
    at, xs = tl.arange(0, BLOCK), tl.arange(0, BLOCK_X)
    expert = tl.load(chosen_ptr + at, mask=at < N, other=X)
    keys = tl.sort(expert * BLOCK + at)
    tl.store(order_ptr + at, keys % BLOCK, mask=at < N)
    counts = tl.histogram(expert, BLOCK_X)  # entries beyond the last count as expert X, which there is not
    counts = tl.where(xs < X, counts, 0)
    tl.store(starts_ptr + xs + 1, tl.cumsum(counts, 0), mask=xs < X)
    tl.store(starts_ptr + xs, xs * 0, mask=xs == 0)
    tl.store(ends_ptr + xs, tl.cumsum((counts + BLOCK_M - 1) // BLOCK_M, 0), mask=xs < X)


def entries_of_a_tile(count: int, num_experts: int) -> int:
    """Tiles grow with the entries that an expert has on average."""
    return next((size for size, most in ((16, 8), (32, 32), (64, 128)) if count <= most * num_experts), 128)


def group(chosen: Tensor, num_experts: int, *, block: int | None = None) -> Groups:
    """chosen int32 [T, k] → its entries by expert, in tiles of `block`."""
    count, device = chosen.numel(), chosen.device
    block = block or entries_of_a_tile(count, num_experts)
    max_tiles = min(count, triton.cdiv(count, block) + num_experts)
    order = torch.empty(count, dtype=torch.int32, device=device)
    starts = torch.empty(num_experts + 1, dtype=torch.int32, device=device)
    tile_ends = torch.empty(num_experts, dtype=torch.int32, device=device)
    if count <= SORTED_AT_ONCE:
        size = max(16, triton.next_power_of_2(count))
        _group_kernel[(1,)](
            chosen,
            order,
            starts,
            tile_ends,
            count,
            num_experts,
            BLOCK_M=block,
            BLOCK=size,
            BLOCK_X=triton.next_power_of_2(num_experts + 1),
            num_warps=min(16, max(1, size // 128)),
            **overlapped(chosen),
        )
        return Groups(order, starts, tile_ends, block, max_tiles)
    by_expert, entries = chosen.flatten().sort(stable=True)
    edges = torch.arange(num_experts + 1, dtype=torch.int32, device=device)
    starts = torch.searchsorted(by_expert, edges, out_int32=True)
    ends = ((starts.diff() + block - 1) // block).cumsum(0, dtype=torch.int32)
    return Groups(entries.int(), starts, ends, block, max_tiles)


def singles(chosen: Tensor) -> Groups:
    """So few entries that hardly two meet in one expert: nothing is sorted."""
    return Groups(chosen.flatten(), chosen, chosen, 16, chosen.numel(), single=True)


# --- Products --------------------------------------------------------------------------------------------------------


@triton.jit
def _e2m1(code):
    """The number that a 4-bit float stands for, / 2^14: its bits, a sign, two of exponent, one of mantissa, where float16 has
    them. Without an exponent both are subnormal."""
    code = code.to(tl.uint16, bitcast=True)
    return ((code & 7) << 9 | (code & 8) << 12).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _experts_kernel(
    x_ptr,
    x_scale_ptr,
    w_ptr,
    w_scale_ptr,
    zero_ptr,
    bias_ptr,
    y_ptr,
    order_ptr,
    starts_ptr,
    ends_ptr,
    N,
    K,
    X,
    TOP: tl.constexpr,
    GATHER: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCKED: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    E2M1: tl.constexpr,
    SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_X: tl.constexpr,
    SINGLE: tl.constexpr,
    PDL: tl.constexpr,
):
    """yᵀ = W · xᵀ for one tile of an expert's entries and BLOCK_N of its N rows. GATHER: x has a row a token and y one a sorted
    entry; otherwise x has a row a sorted entry, and y one an entry in the tokens' order."""
    if PDL:
        follow()
    tile = tl.program_id(1)
    ms = tl.arange(0, BLOCK_M)
    if SINGLE:
        expert = tl.load(order_ptr + tile)
        place, live = tile + ms, ms == 0
        entry = place
    else:
        xs = tl.arange(0, BLOCK_X)
        ends = tl.load(ends_ptr + xs, mask=xs < X, other=2147483647)
        expert = tl.sum((ends <= tile).to(tl.int32), 0)
        before = tl.sum(tl.where(xs == expert - 1, ends, 0), 0)
        start = tl.load(starts_ptr + expert, mask=expert < X, other=0)
        place = start + (tile - before) * BLOCK_M + ms
        live = place < tl.load(starts_ptr + expert + 1, mask=expert < X, other=0)
        entry = tl.load(order_ptr + place, mask=live, other=0)
    if expert < X:
        source = (entry // TOP if GATHER else place).to(tl.int64)
        target = (place if GATHER else entry).to(tl.int64)
        n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        row = expert.to(tl.int64) * N + n
        row_of_blocks = expert.to(tl.int64) * (N // 128) + tl.program_id(0) * BLOCK_N // 128
        acc = tl.zeros((BLOCK_N, BLOCK_M), ACC)
        if CHUNK == 0:
            ks = tl.arange(0, BLOCK_K)
            for k in range(0, K, BLOCK_K):
                inside = ks + k < K
                w = tl.load(w_ptr + row[:, None] * K + (k + ks)[None, :], mask=(n < N)[:, None] & inside[None, :], other=0.0)
                x = tl.load(x_ptr + source[None, :] * K + (k + ks)[:, None], mask=live[None, :] & inside[:, None], other=0.0)
                if BLOCKED:  # BLOCK_K is 128, and the tile's rows have one scale
                    scale = tl.load(w_scale_ptr + row_of_blocks * (K // 128) + k // 128)
                    of_x = tl.load(x_scale_ptr + source * (K // 128) + k // 128, mask=live, other=0.0)
                    acc += tl.dot(w, x, out_dtype=ACC) * (of_x * scale)[None, :]
                else:
                    acc = tl.dot(w, x, acc, out_dtype=ACC, input_precision=PRECISION)
        else:
            QUARTER: tl.constexpr = CHUNK // 4
            js = tl.arange(0, QUARTER)
            for chunk in range(K // CHUNK):
                at = row[:, None] * (K // 4) + (chunk * QUARTER + js)[None, :]
                words = tl.load(w_ptr + at, mask=(n < N)[:, None], other=0)
                for i in tl.static_range(4):
                    scales = (chunk * (CHUNK // SIZE) + i * QUARTER // SIZE) * X * N + row
                    scale = tl.load(w_scale_ptr + scales, mask=n < N, other=0.0).to(tl.float32)[:, None]
                    zero = 8.0
                    if HAS_ZEROS:
                        zero = tl.load(zero_ptr + scales, mask=n < N, other=0.0).to(tl.float32)[:, None]
                    code = (words >> (4 * i)) & 0xF
                    if E2M1:
                        w = _e2m1(code) * (scale * 16384.0)
                    else:
                        w = (code.to(tl.float32) - zero) * scale
                    k = chunk * CHUNK + i * QUARTER + js
                    x = tl.load(x_ptr + source[None, :] * K + k[:, None], mask=live[None, :], other=0.0)
                    acc = tl.dot(w.to(x.dtype), x, acc, input_precision=PRECISION)
        y = acc.to(tl.float32)
        if SCALED:
            y *= tl.load(w_scale_ptr + row, mask=n < N, other=0.0)[:, None]
            y *= tl.load(x_scale_ptr + source, mask=live, other=0.0)[None, :]
        if HAS_BIAS:
            y += tl.load(bias_ptr + row, mask=n < N, other=0.0).to(tl.float32)[:, None]
        tl.store(y_ptr + target[None, :] * N + n[:, None], y.to(y_ptr.dtype.element_ty), mask=live[None, :] & (n < N)[:, None])


def experts(
    x: Activations,
    w: Linear,
    groups: Groups,
    spec: MoESpec,
    rows: int,
    dtype: torch.dtype,
    *,
    gather: bool,
    tile: tuple[int, int, int, int] | None = None,
) -> Tensor:
    """[T or T · k, K] → [T · k, rows], each entry by its expert's weight; `gather` as in `_experts_kernel`. `tile`: (BLOCK_N,
    BLOCK_K, warps, stages)."""
    values = x.values if isinstance(x, Quantized) else x
    inner = values.shape[1]
    scaled, packed, blocked = (isinstance(w, kind) for kind in (ScaledLinear, GroupedLinear, BlockScaledLinear))
    scales = w.scales if isinstance(w, (ScaledLinear, BlockScaledLinear, GroupedLinear)) else values
    zeros = w.zeros if isinstance(w, GroupedLinear) else None
    y = torch.empty(groups.order.numel(), rows, dtype=dtype, device=values.device)
    block_n, block_k, warps, stages = tile or _tile(groups.block, values.element_size(), packed=packed, blocked=blocked)
    if isinstance(w, GroupedLinear):  # a chunk's four pieces of the inputs are under way at once
        taken, each = block_n * w.chunk, groups.block * w.chunk * values.element_size()
        stages = max(1, min(stages, (shared_bytes(values.device) - taken) // each))
    _experts_kernel[(triton.cdiv(rows, block_n), groups.max_tiles)](
        values,
        x.scales if isinstance(x, Quantized) else values,
        w.weight,
        scales,
        scales if zeros is None else zeros,
        values if w.bias is None else w.bias,
        y,
        groups.order,
        groups.starts,
        groups.tile_ends,
        rows,
        inner,
        spec.num_experts,
        TOP=spec.num_experts_per_token,
        GATHER=gather,
        SCALED=scaled,
        BLOCKED=blocked,
        HAS_ZEROS=zeros is not None,
        HAS_BIAS=w.bias is not None,
        E2M1=isinstance(w, GroupedLinear) and w.codes == "e2m1",
        SIZE=w.group_size if isinstance(w, GroupedLinear) else 1,
        CHUNK=w.chunk if isinstance(w, GroupedLinear) else 0,
        ACC=tl.int32 if w.inputs == "int8" else tl.float32,
        PRECISION="ieee" if dtype == torch.float32 else "tf32",
        BLOCK_M=groups.block,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        BLOCK_X=triton.next_power_of_2(spec.num_experts),
        SINGLE=groups.single,
        num_warps=warps,
        num_stages=stages,
        **overlapped(values),
    )
    return y


def _tile(block: int, element_size: int, *, packed: bool, blocked: bool) -> tuple[int, int, int, int]:
    if blocked:  # a taller tile's sums do not fit the registers
        return 64, BLOCK, 4, 4
    block_k = 64 if packed or element_size == 4 else (256 if block < 128 else 128) // element_size
    return (64, block_k, 4, 3) if block < 64 else (128, block_k, 8, 3)


# --- The sum ---------------------------------------------------------------------------------------------------------


@triton.jit
def _combine_kernel(y_ptr, weights_ptr, out_ptr, size, TOP: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        follow()
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for j in range(TOP):
        entry = token * TOP + j
        y = tl.load(y_ptr + entry * size + at, mask=at < size, other=0.0).to(tl.float32)
        total += y * tl.load(weights_ptr + entry)
    tl.store(out_ptr + token * size + at, total.to(out_ptr.dtype.element_ty), mask=at < size)


def combine(y: Tensor, weights: Tensor) -> Tensor:
    """y [T · k, E], weights [T, k] → [T, E]"""
    (num_tokens, top), size = weights.shape, y.shape[1]
    out = torch.empty(num_tokens, size, dtype=y.dtype, device=y.device)
    block = min(1024, triton.next_power_of_2(size))
    _combine_kernel[(num_tokens, triton.cdiv(size, block))](
        y, weights, out, size, TOP=top, BLOCK=block, **overlapped(y)
    )
    return out
