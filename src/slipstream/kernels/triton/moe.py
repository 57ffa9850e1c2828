"""Mixtures of experts: routing, the experts' two products, and the weighed sum.

Tokens' places in experts, *entries*, are sorted by expert (`moe_permute`), so that one launch covers all experts whatever their
load: with many entries a TMA-fed product of sorted rows (`grouped_gemm`), else one that gathers them (`experts`, which has
all forms of weights). Of so few entries that hardly two meet in one expert nothing is sorted: each is a tile, or with dense
weights `moe_small_batch` takes them. All sums have a fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.metadata import ExpertLoad
from slipstream.kernels.ops import Experts
from slipstream.kernels.triton import grouped_gemm
from slipstream.kernels.triton.experts import experts
from slipstream.kernels.triton.moe_permute import group, singles
from slipstream.kernels.triton.moe_small_batch import moe_small_batch
from slipstream.kernels.triton.pdl import overlapped, pdl_wait
from slipstream.kernels.triton.pointwise import activation, quantize
from slipstream.kernels.weights import Activations, Linear
from slipstream.spec.model import MoESpec

MANY_TOKENS = 512
"""More fill the chip when each is routed by one warp."""


def moe(
    x: Tensor,
    router_logits: Tensor,
    own: Experts,
    load: ExpertLoad | None = None,
    shared: tuple[Linear, Linear] | None = None,
    added: Tensor | None = None,
) -> Tensor:
    """`OpSet.moe`; with `shared`, which `takes_shared` has seen, or what such an expert gave, `added` [T, E],
    `OpSet.moe_and_shared`."""
    if not x.shape[0]:
        return torch.empty_like(x)
    up, down, spec = own.up, own.down, own.spec
    weights, chosen = route(router_logits, spec, own.correction, load)
    few = hardly_meet(x.shape[0], spec)
    if few and _dense(up, down):
        y = moe_small_batch(x.contiguous(), weights, chosen, up, down, spec, shared)
        return y if added is None else y + added
    groups = singles(chosen) if few else group(chosen, spec.num_experts)
    given: Activations = x.contiguous() if up.inputs is None else quantize(x, up.inputs)
    if grouped_gemm.covers(given, up, down, groups):
        y = grouped_gemm.grouped_gemm(given, up, down, groups, spec, x.dtype)
    else:
        h = experts(given, up, groups, spec, spec.expert.up_rows, x.dtype, gather=True)
        inner = activation(h, spec.expert.activation, spec.expert.gated, down.inputs)
        y = experts(inner, down, groups, spec, x.shape[1], x.dtype, gather=False)
    return combine(y, weights, groups.places, added)


def hardly_meet(num_tokens: int, spec: MoESpec) -> bool:
    """So few entries that hardly two of them are in one expert."""
    return num_tokens == 1 or 4 * num_tokens * spec.num_experts_per_token <= spec.num_experts


def takes_shared(num_tokens: int, own: Experts, shared: tuple[Linear, Linear]) -> bool:
    """Whether `moe` takes an expert of all tokens along: few tokens, dense weights, biases as the others have."""
    alike = all((a.bias is None) == (b.bias is None) for a, b in zip((own.up, own.down), shared, strict=True))
    return num_tokens > 0 and hardly_meet(num_tokens, own.spec) and _dense(own.up, own.down, *shared) and alike


def _dense(*products: Linear) -> bool:
    return all(type(w) is Linear and w.weight.is_contiguous() for w in products)


# --- Routing ----------------------------------------------------------------------------------------------------------


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
    IN_TURN: tl.constexpr,
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
    # Keys are the merits' bits in a whole number's order, with the place below them: no two are equal, whatever the merits are.
    bits = merits.to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    keys = (order.to(tl.int64) << 32) - tl.arange(0, flat)
    if IN_TURN:  # least work
        weights = tl.zeros((BLOCK_TOP,), tl.float32)
        chosen = tl.zeros((BLOCK_TOP,), tl.int32)
        for j in tl.static_range(TOP):
            hit = keys == tl.max(keys, 0)
            weights = tl.where(js == j, tl.sum(tl.where(hit, scores, 0.0), 0), weights)
            chosen = tl.where(js == j, tl.sum(tl.where(hit, ids, 0), 0), chosen)
            keys = tl.where(hit, -0x7FFFFFFFFFFFFFFF, keys)
    else:  # soonest done: an expert's rank is how many are better, or as good and ahead of it
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
    in_turn = num_tokens > MANY_TOKENS
    at_once = 1 if spec.num_experts <= 16 else 4 if spec.num_experts <= 128 else 8
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
        IN_TURN=in_turn,
        GROUPS=groups,
        GROUPS_CHOSEN=1 if limit is None else limit.num_chosen,
        BY_TWO=limit is not None and limit.by == "best_two",
        BLOCK_G=triton.next_power_of_2(groups),
        BLOCK_E=triton.next_power_of_2(spec.num_experts // groups),
        BLOCK_TOP=triton.next_power_of_2(top),
        num_warps=1 if in_turn else at_once,
        **overlapped(router_logits),
    )
    return weights, chosen


# --- The sum ---------------------------------------------------------------------------------------------------------


@triton.jit
def _combine_kernel(
    y_ptr,
    weights_ptr,
    places_ptr,
    added_ptr,
    out_ptr,
    size,
    TOP: tl.constexpr,
    SORTED: tl.constexpr,
    ADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        pdl_wait()
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    if ADDED:
        total = tl.load(added_ptr + token * size + at, mask=at < size, other=0.0).to(tl.float32)
    for j in tl.static_range(TOP):
        entry = token * TOP + j
        place = entry
        if SORTED:
            place = tl.load(places_ptr + entry).to(tl.int64)
        y = tl.load(y_ptr + place * size + at, mask=at < size, other=0.0).to(tl.float32)
        total += y * tl.load(weights_ptr + entry)
    tl.store(out_ptr + token * size + at, total.to(out_ptr.dtype.element_ty), mask=at < size)


def combine(y: Tensor, weights: Tensor, places: Tensor | None, added: Tensor | None = None) -> Tensor:
    """y [T · k, E], entry i in row places[i] (None: i), weights [T, k], and added [T, E] → [T, E]"""
    (num_tokens, top), size = weights.shape, y.shape[1]
    out = torch.empty(num_tokens, size, dtype=y.dtype, device=y.device)
    block = min(1024, triton.next_power_of_2(size))
    _combine_kernel[(num_tokens, triton.cdiv(size, block))](
        y,
        weights,
        weights if places is None else places,
        out if added is None else added,
        out,
        size,
        TOP=top,
        SORTED=places is not None,
        ADDED=added is not None,
        BLOCK=block,
        **overlapped(y),
    )
    return out
