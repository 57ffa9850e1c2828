"""Mixture of experts: y[t] = Σ_j weight[t, j] · expert_j(x[t]) over a token's k chosen experts.

A *pair* is a token and one of its experts; there are T · k. Steps: route, sort pairs by expert
(`moe_permute`), the experts' two products, weighted sum. One launch covers all experts, whatever
their load:

1. many pairs: products fed by TMA, of rows in sorted order (`grouped_gemm`);
2. fewer pairs: products that gather rows (`gathered`; `mxfp4` for MXFP4 weights);
3. so few pairs that experts are hardly shared: nothing is sorted; dense weights go to
   `moe_small_batch`.

All sums have a fixed order. `invariant` (`deterministic`): every number of tokens goes the way of 2,
where a pair's product is one sum along K in the tensor core's steps, however many pairs share its
tile, and rounding comes at one place. 4-bit floats and GGUF's types have one tile."""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.metadata import ExpertCounters
from slipstream.kernels.ops import Experts
from slipstream.kernels.plain import reference
from slipstream.kernels.thresholds import Thresholds
from slipstream.kernels.triton.experts import grouped_gemm
from slipstream.kernels.triton.experts.gathered import expert_gemm
from slipstream.kernels.triton.experts.moe_permute import ExpertTiles, sort_pairs, unsorted_pairs
from slipstream.kernels.triton.experts.moe_small_batch import moe_small_batch
from slipstream.kernels.triton.experts.mxfp4 import mxfp4_mlp
from slipstream.kernels.triton.pdl import pdl_options, pdl_wait
from slipstream.kernels.triton.pointwise import activation, quantize
from slipstream.kernels.triton.products import gguf
from slipstream.kernels.weights.forms import Activations, CodedLinear, Float4Linear, Linear
from slipstream.spec.model import MoESpec

SERIAL_TOKENS = 512
"""Number of tokens above which one warp routes each token, because they fill the GPU."""
THRESHOLDS = Thresholds(tokens=(SERIAL_TOKENS,))


def moe(
    x: Tensor,
    router_logits: Tensor,
    experts: Experts,
    load: ExpertCounters | None = None,
    shared: tuple[Linear, Linear] | None = None,
    added: Tensor | None = None,
    *,
    invariant: bool = False,
) -> Tensor:
    """`OpSet.moe`; with `shared` (see `fuses_shared`), or with a shared expert's output `added` [T,
    E], `OpSet.moe_and_shared`."""
    if not x.shape[0]:
        return torch.empty_like(x)
    spec = experts.spec
    by = replace(spec, held=None) if spec.identity else spec
    numbers = experts.correction, load, experts.scales
    weights, chosen = route(router_logits, by, *numbers, invariant=invariant)
    if spec.identity:
        if spec.adds_identity:
            kept = reference.identity_part(x, weights, chosen, spec)
            added = (kept if added is None else kept + added).to(x.dtype)
        weights, chosen = reference.local_choice(weights, chosen, spec)
    return moe_of_choice(x, weights, chosen, experts, shared, added, invariant=invariant)


def moe_of_choice(
    x: Tensor,
    weights: Tensor,
    chosen: Tensor,
    experts: Experts,
    shared: tuple[Linear, Linear] | None = None,
    added: Tensor | None = None,
    *,
    invariant: bool = False,
) -> Tensor:
    """`OpSet.moe_of_choice`: `moe` after the choice of experts."""
    up, down, spec = experts.up, experts.down, experts.spec
    if spec.scales_input:  # a token's choices become rows of their own
        rows = (x[:, None] * weights[..., None].to(x.dtype)).flatten(0, 1)
        each = replace(spec, num_experts_per_token=1, scales_input=False)
        one = torch.ones(len(rows), 1, dtype=torch.float32, device=x.device)
        flat = chosen.reshape(-1, 1)
        y = moe_of_choice(rows, one, flat, replace(experts, spec=each), invariant=invariant)
        y = y.view(*chosen.shape, -1).sum(dim=1, dtype=torch.float32).to(x.dtype)
        return y if added is None else y + added
    small_batch = is_small_batch(x.shape[0], spec)
    if small_batch and _are_dense(up, down) and not spec.skips and not invariant:
        y = moe_small_batch(x.contiguous(), weights, chosen, up, down, spec, shared)
        return y if added is None else y + added
    # Pairs of experts without weights here come after all others and belong to no expert.
    num_bins = spec.num_local_experts + spec.skips
    if isinstance(up, Float4Linear) and isinstance(down, Float4Linear):
        y, inverse = mxfp4_mlp(
            x.contiguous(),
            up,
            down,
            chosen,
            spec,
            num_bins,
            small_batch=small_batch,
            invariant=invariant,
        )
        return combine(y, weights, inverse, added, x.dtype)
    coded = isinstance(up, CodedLinear) or isinstance(down, CodedLinear)
    one_tile = gguf.ONE_TILE_PAIRS if coded and invariant else None
    if small_batch and one_tile is None:
        tiles = unsorted_pairs(chosen)
    else:
        tiles = sort_pairs(chosen, num_bins, tile_m=one_tile)
    if coded:
        expert = spec.expert
        h = _one_product(x.contiguous(), up, tiles, spec, expert.up_rows, gather=True)
        inner = activation(h, expert.activation, gated=expert.gated)
        y = _one_product(inner, down, tiles, spec, x.shape[1], gather=False)
        return combine(y, weights, tiles.inverse, added)
    inputs: Activations = x.contiguous() if up.inputs is None else quantize(x, up.inputs)
    if not invariant and grouped_gemm.covers(inputs, up, down, tiles):
        y = grouped_gemm.grouped_mlp(inputs, up, down, tiles, spec, x.dtype)
    else:
        h = expert_gemm(inputs, up, tiles, spec, spec.expert.up_rows, x.dtype, gather=True)
        inner = activation(h, spec.expert.activation, gated=spec.expert.gated, inputs=down.inputs)
        y = expert_gemm(inner, down, tiles, spec, x.shape[1], x.dtype, gather=False)
    return combine(y, weights, tiles.inverse, added)


def _one_product(
    x: Activations, w: Linear, tiles: ExpertTiles, spec: MoESpec, num_rows: int, *, gather: bool
) -> Tensor:
    """Compute one linear layer in which some experts' weights have a GGUF type."""
    assert isinstance(x, Tensor)
    if isinstance(w, CodedLinear):
        return gguf.expert_gemm(x, w, tiles, spec, num_rows, gather=gather)
    return expert_gemm(x, w, tiles, spec, num_rows, x.dtype, gather=gather)


def is_small_batch(num_tokens: int, spec: MoESpec) -> bool:
    """Whether there are so few (token, expert) pairs that hardly two share an expert."""
    return num_tokens == 1 or 4 * num_tokens * spec.num_experts_per_token <= spec.num_experts


def fuses_shared(num_tokens: int, experts: Experts, shared: tuple[Linear, Linear]) -> bool:
    """Whether `moe` also computes a shared expert: few tokens, dense weights, and biases like the
    other experts'."""
    alike = all(
        (a.bias is None) == (b.bias is None)
        for a, b in zip((experts.up, experts.down), shared, strict=True)
    )
    dense = _are_dense(experts.up, experts.down, *shared)
    if experts.spec.scales_input:
        return False
    few = num_tokens > 0 and is_small_batch(num_tokens, experts.spec) and not experts.spec.skips
    return few and dense and alike


def _are_dense(*products: Linear) -> bool:
    return all(type(w) is Linear and w.weight.is_contiguous() for w in products)


# --- Routing ----------------------------------------------------------------------------------------------------------


@triton.jit
def _route_kernel(
    logits_ptr, correction_ptr, expert_scales_ptr, weights_ptr, chosen_ptr, counts_ptr, slots_ptr, weight_scale, block_size,
    X: tl.constexpr, TOP_K: tl.constexpr, SIGMOID: tl.constexpr, CORRECTED: tl.constexpr, SCALED: tl.constexpr,
    COUNTED: tl.constexpr, NORMALIZE: tl.constexpr, SERIAL: tl.constexpr, NUM_GROUPS: tl.constexpr, GROUPS_CHOSEN: tl.constexpr,
    BY_TWO: tl.constexpr, FIRST: tl.constexpr, HELD: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_X: tl.constexpr,
    BLOCK_TOP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Route one token: scores [groups, experts per group], the best groups, then the TOP_K best
    experts (the first of equals). Only HELD experts, from FIRST on, are on this rank: they are
    counted from 0. Any other expert becomes number HELD with weight 0."""
    PER_GROUP: tl.constexpr = X // NUM_GROUPS
    token = tl.program_id(0).to(tl.int64)
    gs, es, js = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_X), tl.arange(0, BLOCK_TOP)
    ids = gs[:, None] * PER_GROUP + es[None, :]
    real = (gs < NUM_GROUPS)[:, None] & (es < PER_GROUP)[None, :]
    if PDL:
        pdl_wait()
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
    if NUM_GROUPS > 1:
        best = tl.max(merits, 1)
        if BY_TWO:
            best += tl.max(
                tl.where(es[None, :] == tl.argmax(merits, 1)[:, None], float("-inf"), merits), 1
            )
        best = tl.where(gs < NUM_GROUPS, best, float("-inf"))
        kept = gs < 0
        for _ in range(GROUPS_CHOSEN):
            group = tl.argmax(best, 0)
            kept = kept | (gs == group)
            best = tl.where(gs == group, float("-inf"), best)
        merits = tl.where(kept[:, None], merits, float("-inf"))
    flat: tl.constexpr = BLOCK_G * BLOCK_X
    merits = tl.reshape(merits, (flat,))
    scores = tl.reshape(scores, (flat,))
    ids = tl.reshape(ids, (flat,))
    # Keys: the merits' bits in integer order, minus the index. No two are equal, whatever the merits.
    bits = merits.to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    keys = (order.to(tl.int64) << 32) - tl.arange(0, flat)
    if SERIAL:  # fewest operations
        weights = tl.zeros((BLOCK_TOP,), tl.float32)
        chosen = tl.zeros((BLOCK_TOP,), tl.int32)
        for j in tl.static_range(TOP_K):
            hit = keys == tl.max(keys, 0)
            weights = tl.where(js == j, tl.sum(tl.where(hit, scores, 0.0), 0), weights)
            chosen = tl.where(js == j, tl.sum(tl.where(hit, ids, 0), 0), chosen)
            keys = tl.where(hit, -0x7FFFFFFFFFFFFFFF, keys)
    else:  # shortest chain: an expert's rank is the number of better ones, or equals before it
        rank = tl.sum((keys[:, None] > keys[None, :]).to(tl.int32), 0)
        taken = rank[:, None] == js[None, :]
        weights = tl.sum(tl.where(taken, scores[:, None], 0.0), 0)
        chosen = tl.sum(tl.where(taken, ids[:, None], 0), 0)
    weights = tl.where(js < TOP_K, weights, 0.0)
    if NORMALIZE:
        weights = weights / (tl.sum(weights, 0) + 1e-20)
    weights *= weight_scale
    if SCALED:
        weights *= tl.load(expert_scales_ptr + chosen, mask=js < TOP_K, other=0.0)
    if COUNTED:
        one = (tl.load(slots_ptr + token) >= block_size).to(tl.int64)
        tl.atomic_add(
            counts_ptr + chosen,
            one + tl.zeros((BLOCK_TOP,), tl.int64),
            mask=js < TOP_K,
            sem="relaxed",
        )
    if HELD < X:
        here = (chosen >= FIRST) & (chosen < FIRST + HELD)
        weights = tl.where(here, weights, 0.0)
        chosen = tl.where(here, chosen - FIRST, HELD)
    tl.store(weights_ptr + token * TOP_K + js, weights, mask=js < TOP_K)
    tl.store(chosen_ptr + token * TOP_K + js, chosen, mask=js < TOP_K)


def route(
    router_logits: Tensor,
    spec: MoESpec,
    correction: Tensor | None = None,
    load: ExpertCounters | None = None,
    scales: Tensor | None = None,
    *,
    invariant: bool = False,
) -> tuple[Tensor, Tensor]:
    """(weights float32, experts int32), [T, k] each. With `spec.held`, held experts are counted
    from the first one; others are the number after the last one, with weight 0."""
    num_tokens, top_k = router_logits.shape[0], spec.num_experts_per_token
    if spec.nearness or not spec.has_usual_choice:
        weights, chosen = reference.route(router_logits, spec, correction, scales)
        reference.count_experts(chosen, load)
        if spec.held is not None:
            weights, chosen = reference.local_choice(weights, chosen, spec)
        return weights, chosen.int()
    weights = torch.empty(num_tokens, top_k, dtype=torch.float32, device=router_logits.device)
    chosen = torch.empty(num_tokens, top_k, dtype=torch.int32, device=router_logits.device)
    limit, num_groups = spec.groups, 1 if spec.groups is None else spec.groups.num_groups
    serial = num_tokens > SERIAL_TOKENS and not invariant
    parallel_warps = 1 if spec.num_choices <= 16 else 4 if spec.num_choices <= 128 else 8
    _route_kernel[(num_tokens,)](
        router_logits.contiguous(), weights if correction is None else correction, weights if scales is None else scales,
        weights, chosen,
        chosen if load is None else load.counts, chosen if load is None else load.slots, spec.weight_scale,
        0 if load is None else load.block_size,
        X=spec.num_choices, TOP_K=top_k, SIGMOID=spec.scores == "sigmoid", CORRECTED=correction is not None,
        SCALED=scales is not None, COUNTED=load is not None, NORMALIZE=spec.normalize, SERIAL=serial, NUM_GROUPS=num_groups,
        GROUPS_CHOSEN=1 if limit is None else limit.num_chosen, BY_TWO=limit is not None and limit.by == "best_two",
        FIRST=0 if spec.held is None else spec.held[0],
        HELD=spec.num_choices if spec.held is None else spec.held[1], BLOCK_G=triton.next_power_of_2(num_groups),
        BLOCK_X=triton.next_power_of_2(spec.num_choices // num_groups),
        BLOCK_TOP=triton.next_power_of_2(top_k), num_warps=1 if serial else parallel_warps, **pdl_options(router_logits),
    )  # fmt: skip
    return weights, chosen


# --- The sum ---------------------------------------------------------------------------------------------------------


@triton.jit
def _combine_kernel(
    y_ptr, weights_ptr, inverse_ptr, added_ptr, out_ptr, size,
    TOP_K: tl.constexpr, PARTS: tl.constexpr, SORTED: tl.constexpr, ADDED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        pdl_wait()
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    if ADDED:
        total = tl.load(added_ptr + token * size + at, mask=at < size, other=0.0).to(tl.float32)
    for j in tl.static_range(TOP_K):
        pair = token * TOP_K + j
        position = pair
        if SORTED:
            position = tl.load(inverse_ptr + pair).to(tl.int64)
        weight = tl.load(weights_ptr + pair)
        # The result of an expert on another rank was not written here.
        end = tl.where(weight != 0.0, size, 0)
        y = tl.load(y_ptr + position * PARTS * size + at, mask=at < end, other=0.0).to(tl.float32)
        for part in tl.static_range(1, PARTS):
            y += tl.load(y_ptr + (position * PARTS + part) * size + at, mask=at < end, other=0.0)
        total += y * weight
    tl.store(out_ptr + token * size + at, total.to(out_ptr.dtype.element_ty), mask=at < size)


def combine(
    y: Tensor,
    weights: Tensor,
    inverse: Tensor | None,
    added: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """y [T · k, E] with pair i in row inverse[i] (None: i), weights [T, k], added [T, E] → [T, E].
    Or y is float32 [T · k · parts, E], one row for each part of a sum, and the result has `dtype`.
    """
    (num_tokens, top_k), size = weights.shape, y.shape[1]
    out = torch.empty(num_tokens, size, dtype=dtype or y.dtype, device=y.device)
    block = min(1024, triton.next_power_of_2(size))
    _combine_kernel[(num_tokens, triton.cdiv(size, block))](
        y, weights, weights if inverse is None else inverse, out if added is None else added, out, size,
        TOP_K=top_k, PARTS=len(y) // weights.numel(), SORTED=inverse is not None, ADDED=added is not None, BLOCK=block,
        **pdl_options(y),
    )  # fmt: skip
    return out
