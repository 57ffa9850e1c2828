"""A layer's operators, added to a program."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.kernels.cpu.arrays import float32
from slipstream.kernels.cpu.program.native_program import Program
from slipstream.kernels.layouts import AttentionParams, NormParams, QKVLayout

if TYPE_CHECKING:
    from slipstream.kernels.cpu.arrays import Array


def add_norm(
    program: Program, x: int, residual: int, out: int, form: int, size: int, norm: NormParams
) -> None:
    """Adds a norm from float32 rows to rows in `form`. If `residual` is a buffer (not -1), x is
    added into it and the sum is normed."""
    how = float32(norm.weight), _floats(norm.bias), norm.eps, norm.offset
    program.add("norm", x, residual, out, form, norm.kind == "layer", size, *how)


def add_norm_parts(
    program: Program, x: int, column: int, parts: int, size: int, norm: NormParams, step: int
) -> None:
    """Adds a norm that overwrites `parts` consecutive pieces of each row, which have `size` numbers
    each and begin at `column`. The weights of a piece begin `step` elements after those of the
    previous piece."""
    how = float32(norm.weight), _floats(norm.bias), step, norm.eps, norm.offset
    program.add("norm_parts", x, column, parts, norm.kind == "layer", size, *how)


def add_rope_and_cache(
    program: Program, qkv: int, layer: int, h: QKVLayout, *, group: int = 0, index: bool = False
) -> None:
    """Adds rotary embedding and the writes to the cache for float32 rows. q is rotated in place; k
    and v go to the step's slots of `group` in the layer's cache, or k alone to its index."""
    norms = [_floats(t) for t in (h.q_norm, h.k_norm)]
    sizes = h.num_heads, h.num_kv_heads, h.head_dim
    turned = h.cos_sin, h.rotary_dim, h.interleaved
    values = -1.0 if h.value_eps is None else h.value_eps, h.has_values and not index
    how = *norms, h.norm_eps, h.norm_offset, *values, h.norm_after, index
    program.add("rope_and_cache", qkv, layer, group, *sizes, *turned, *how)


def add_attention(
    program: Program,
    q: int,
    out: int,
    layer: int,
    sizes: tuple[int, int, int, int],
    s: AttentionParams,
    *,
    group: int = 0,
) -> None:
    """Adds attention of float32 rows that begin with q.

    `sizes` are heads, kv heads, head dim and value dim. `group` is the cache group whose block
    tables are used.
    """
    of_heads = [_floats(t) for t in (s.alibi_slopes, s.sinks, s.distance_bias)]
    masks = s.window or 0, s.softcap or 0.0, *of_heads, s.reach, s.causal
    program.add("attention", q, out, layer, group, *sizes, s.scale, *masks)


def _floats(x: Array | None) -> Array | None:
    return None if x is None else float32(x)
