"""Latent attention in the C++ kernels (csrc/cpu): a layer's operators between the products before
it and the one after it.

A small product per head (`heads` below) expands latents to keys and values. These weights are
packed like those of experts, in float32 or bfloat16, and one operator multiplies all heads. The
cache is read in place: a token's row is read once, as key and value of all heads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream.kernels.cpu import arrays, native
from slipstream.kernels.cpu.native import Arena
from slipstream.kernels.cpu.program.moe import NativeExperts, pack_expert_weight
from slipstream.kernels.cpu.program.native_program import Program
from slipstream.kernels.cpu.program.operators import add_rope_and_cache
from slipstream.kernels.layouts import IndexParams, MLAParams
from slipstream.kernels.weights.forms import Linear

NewBuffer = Callable[[str, int, int], int]
"""(name, form, size) → a buffer of the program."""


def pack_head_weight(weight: npt.NDArray[Any], arena: Arena) -> NativeExperts:
    """Packs a weight [H, in, out]: one matrix for each head."""
    below: Any = np.ascontiguousarray(weight.swapaxes(1, 2)).reshape(-1, weight.shape[1])
    return pack_expert_weight(Linear(weight=below), len(weight), arena)


def add_latent_queries(
    p: Program, q: int, row: int, queries: int, layer: int, params: MLAParams, new: NewBuffer
) -> None:
    """Adds the operator of `OpSet.mla_queries`. It reads float32 rows q [H · (P + R)] and row [C +
    R], and writes queries [H · (R + C)] and `layer`'s cache."""
    keys, cos_sin, rotary = params.keys, params.cos_sin, params.rotary_dim
    num_heads, nope_dim = _num_heads(keys), keys.inner
    plain = new("plain", keys.form, num_heads * nope_dim)
    sizes = num_heads, nope_dim, keys.rows
    how = arrays.float32(params.norm.weight), params.norm.eps, cos_sin, rotary, params.interleaved
    p.add("latent_queries", q, row, queries, plain, keys.form, layer, *sizes, *how)
    _add_heads(p, plain, queries, rotary, rotary + keys.rows, keys)


def add_choose_keys(
    p: Program,
    q: int,
    k: int,
    weights: int,
    out: int,
    layer: int,
    params: IndexParams,
    new: NewBuffer,
) -> None:
    """Adds the operator of `OpSet.choose_keys`. It reads float32 rows q [H · D], k [D] and weights [H], and writes
    int32 rows [top_k] and `layer`'s index."""
    heads = params.heads
    q_size = heads.num_heads * heads.head_dim
    rows = new("index rows", native.FORM_F32, q_size + heads.head_dim)
    p.add("place", q, 0, rows, 0, q_size)
    p.add("place", k, 0, rows, q_size, heads.head_dim)
    add_rope_and_cache(p, rows, layer, heads, index=True)
    p.add("choose", rows, weights, out, layer, heads.num_heads, heads.head_dim, params.top_k)


def add_latent_attention(
    p: Program,
    queries: int,
    out: int,
    layer: int,
    params: MLAParams,
    new: NewBuffer,
    chosen: tuple[int, int] | None = None,
) -> None:
    """Adds `OpSet.mla_paged_attention`: float32 rows [H · (R + C)] → [H · V], over `layer`'s
    cache. `chosen`: the buffer of `add_choose_keys`, and its size."""
    values = params.values
    num_heads, rank = _num_heads(values), values.inner
    seen = new("seen latents", native.FORM_F32, num_heads * rank)
    width = params.rotary_dim + rank
    if chosen is None:
        masks = 0, 0.0, None, None, None, 0, True
        p.add("attention", queries, seen, layer, 0, num_heads, 1, width, rank, params.scale, *masks)
    else:
        buffer, top_k = chosen
        sizes = num_heads, width, rank, top_k
        p.add("sparse_attention", queries, buffer, seen, layer, *sizes, params.scale)
    add_latent_values(p, seen, out, params, new)


def add_latent_values(p: Program, seen: int, out: int, params: MLAParams, new: NewBuffer) -> None:
    """Adds `OpSet.mla_values`: float32 rows [H · C] → [H · V]."""
    values, size = params.values, _num_heads(params.values) * params.values.inner
    if values.form != native.FORM_F32:
        wide, seen = seen, new("seen latents", values.form, size)
        p.add("convert", wide, seen, values.form, size, 1)
    _add_heads(p, seen, out, 0, values.rows, values)


def _num_heads(heads: NativeExperts) -> int:
    return heads.parts[0].num_experts


def _add_heads(p: Program, x: int, out: int, column: int, step: int, heads: NativeExperts) -> None:
    (part,) = heads.parts
    sizes = part.num_experts, part.kind, part.rows, part.inner
    p.add("head_linear", x, out, column, step, *sizes, part.data, part.stride, weights=part)
