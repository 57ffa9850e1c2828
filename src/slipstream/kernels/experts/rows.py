"""Views of one expert's elements in the stacked weights of all, in every layout, so that two
experts can swap places.

All writing is in place, because graphs and programs hold the addresses.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import Tensor

from slipstream.kernels.arrays import to_tensor
from slipstream.kernels.cpu import native
from slipstream.kernels.cpu.arrays import Array
from slipstream.kernels.cpu.packed import NativeLinear
from slipstream.kernels.cpu.program.moe import NativeExperts
from slipstream.kernels.cpu.torch_ops import PACK_BATCH, PackedLinear
from slipstream.kernels.weights.forms import Linear


def swap_rows(x: Tensor, a: int, b: int) -> None:
    """Swaps x[a] and x[b] without synchronizing with the host."""
    kept = x[a].clone()
    x[a].copy_(x[b])
    x[b].copy_(kept)


def expert_rows(w: Linear, num_experts: int) -> list[Tensor] | None:
    """Returns all elements of a stacked weight as views [num_experts, …]; row i belongs to expert
    i.

    None if an expert's elements can't be separated from others' or can't be written.
    """
    if isinstance(w, NativeExperts):
        arrays = [part.data for part in w.parts] + ([] if w.bias is None else [w.bias])
        found = [_writable(x) for x in arrays]
        return (
            None
            if any(x is None for x in found)
            else [x.view(num_experts, -1) for x in found if x is not None]
        )
    each = w.out_features // num_experts
    if not w.ROWS or w.sparse is not None or any(each % size for _, size in w.ROWS.values()):
        return None  # also if an element, such as a tile's scale, is of two experts
    tensors = ((getattr(w, name), dim) for name, (dim, _) in w.ROWS.items())
    return [
        x.unflatten(dim, (num_experts, -1)).movedim(dim, 0) for x, dim in tensors if x is not None
    ]


def layout(w: Linear, num_experts: int) -> str:
    """Returns a description of the weight's format. Two weights may exchange experts only if their
    descriptions are equal, because then the bytes have the same meaning."""
    kinds = [part.kind for part in w.parts] if isinstance(w, NativeExperts | NativeLinear) else []
    own = {f.name: getattr(w, f.name) for f in dataclasses.fields(w)}
    said = [(name, x) for name, x in own.items() if isinstance(x, int | float | str)]
    rows = [(tuple(x.shape[1:]), str(x.dtype)) for x in expert_rows(w, num_experts) or ()]
    return repr((type(w).__name__, kinds, said, rows))


def can_swap_outputs(w: Linear) -> bool:
    """Tells whether `swap_outputs` supports the layout of a router."""
    if isinstance(w, NativeLinear):
        return len(w.parts) == 1 and w.parts[0].kind in (native.F32, native.BF16)
    return isinstance(w, PackedLinear) or expert_rows(w, w.out_features) is not None


def swap_outputs(w: Linear, a: int, b: int) -> None:
    """Swaps two outputs of a router."""
    if isinstance(w, NativeLinear):
        (part,) = w.parts
        rows = part.rows_of(np.arange(part.rows))
        rows[[a, b]] = rows[[b, a]]
        part.put_dense(rows)  # exact, as the values were of its type
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
    """Returns a tensor over the same memory, or None if it is read-only."""
    return None if isinstance(x, np.ndarray) and not x.flags.writeable else _tensor(x)


def _tensor(x: Array) -> Tensor:
    return to_tensor(x) if isinstance(x, np.ndarray) else x
