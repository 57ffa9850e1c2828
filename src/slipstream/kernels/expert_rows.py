"""Where one expert's numbers lie in the weights of all, in every layout, so that two experts can change places.

All writing is in place: graphs and programs hold the addresses.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import Tensor

from slipstream.kernels import native
from slipstream.kernels.arrays import to_tensor
from slipstream.kernels.cpu_moe import NativeExperts
from slipstream.kernels.cpu_torch import PACK_BATCH, PackedLinear
from slipstream.kernels.native import Array, NativeLinear
from slipstream.kernels.weights import (
    GroupedLinear,
    Linear,
    Mxfp4Linear,
    ScaledLinear,
    TileScaledLinear,
)
from slipstream.spec.scheme import FP8_TILE

BY_ROWS = (Linear, ScaledLinear, TileScaledLinear, GroupedLinear, Mxfp4Linear)
"""Layouts whose tensors have a weight's rows in their first dimension, or tiles or slabs of rows; but the scales of groups,
which have them in their second."""


def swap_rows(x: Tensor, a: int, b: int) -> None:
    """x[a] ↔ x[b], without a word to the host."""
    kept = x[a].clone()
    x[a].copy_(x[b])
    x[b].copy_(kept)


def expert_rows(w: Linear, num_experts: int) -> list[Tensor] | None:
    """All numbers of a stacked weight, as views [num_experts, …]: row i has expert i's. None: an expert's can't be told from
    others', or not be written."""
    if isinstance(w, NativeExperts):
        arrays = [part.data for part in w.parts] + ([] if w.bias is None else [w.bias])
        found = [_writable(x) for x in arrays]
        return (
            None
            if any(x is None for x in found)
            else [x.view(num_experts, -1) for x in found if x is not None]
        )
    if type(w) not in BY_ROWS or w.sparse is not None:
        return None
    if isinstance(w, TileScaledLinear) and w.out_features // num_experts % FP8_TILE:
        return None  # a tile has rows of two experts
    views = []
    for field in dataclasses.fields(w):
        if isinstance(x := getattr(w, field.name), Tensor):
            across = isinstance(w, GroupedLinear) and field.name in ("scales", "zeros")
            views.append(
                x.unflatten(1, (num_experts, -1)).transpose(0, 1)
                if across
                else x.unflatten(0, (num_experts, -1))
            )
    return views


def layout(w: Linear, num_experts: int) -> str:
    """What must be the same of two weights if one's expert is to take the place of the other's: the bytes mean the same."""
    kinds = [part.kind for part in w.parts] if isinstance(w, NativeExperts | NativeLinear) else []
    own = {f.name: getattr(w, f.name) for f in dataclasses.fields(w)}
    said = [(name, x) for name, x in own.items() if isinstance(x, int | float | str)]
    rows = [(tuple(x.shape[1:]), str(x.dtype)) for x in expert_rows(w, num_experts) or ()]
    return repr((type(w).__name__, kinds, said, rows))


def can_swap_outputs(w: Linear) -> bool:
    """Whether `swap_outputs` covers the layout of a router."""
    if isinstance(w, NativeLinear):
        return len(w.parts) == 1 and w.parts[0].kind in (native.F32, native.BF16)
    return isinstance(w, PackedLinear) or expert_rows(w, w.out_features) is not None


def swap_outputs(w: Linear, a: int, b: int) -> None:
    """Let two outputs of a router change places."""
    if isinstance(w, NativeLinear):
        (part,) = w.parts
        rows = part.rows_of(np.arange(part.rows))
        rows[[a, b]] = rows[[b, a]]
        part.put_dense(rows)  # exact: the numbers were of its type
    elif isinstance(w, PackedLinear):
        dense = w.packed.to_dense()
        swap_rows(dense, a, b)
        w.packed.copy_(torch.ops.mkldnn._reorder_linear_weight(dense, PACK_BATCH))
    else:
        views = expert_rows(w, w.out_features)
        assert views is not None
        for x in views:
            swap_rows(x, a, b)
        return
    if w.bias is not None:
        swap_rows(_tensor(w.bias), a, b)


def _writable(x: Array) -> Tensor | None:
    """The same memory."""
    return None if isinstance(x, np.ndarray) and not x.flags.writeable else _tensor(x)


def _tensor(x: Array) -> Tensor:
    return to_tensor(x) if isinstance(x, np.ndarray) else x
