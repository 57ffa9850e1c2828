"""The residual and the pending result: an output not yet added to the residual, so that the
addition is fused with the next norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from slipstream.kernels.layouts import NormParams
from slipstream.kernels.weights.forms import Pair
from slipstream.spec.scheme import InputFormat

if TYPE_CHECKING:
    from torch import Tensor

    from slipstream.kernels.ops import OpSet
    from slipstream.kernels.weights.forms import Activations
    from slipstream.platform.collectives import OverlappedSum, RankGroup

    Pending: TypeAlias = "Tensor | PartialSum | PendingSum | Pair"
    """A result still to be added to the residual, before the next norm."""


@dataclass(frozen=True, slots=True)
class PartialSum:
    """This rank's part of a sum over `group`. The all-reduce and the next norm run as one op."""

    x: Tensor
    group: RankGroup


@dataclass(frozen=True, slots=True)
class PendingSum:
    """A sum over ranks whose slices of tokens are still being transferred."""

    sums: Sequence[OverlappedSum]
    pieces: Sequence[slice]


SUMS = (PartialSum, PendingSum, Pair)
"""Pending results that consist of several tensors or need a sum."""


def normed(ops: OpSet, norm: NormParams, h: Pending, residual: Tensor | None = None) -> Tensor:
    """norm(h + residual), in the model's dtype."""
    return norm_pending(ops, norm, h, residual)[0]  # type: ignore[return-value]


def finished(ops: OpSet, norm: NormParams | None, h: Pending, residual: Tensor | None) -> Tensor:
    """The last layer's output → the hidden states [T, E]."""
    return total_of(ops, h, residual) if norm is None else normed(ops, norm, h, residual)


def norm_pending(
    ops: OpSet,
    norm: NormParams,
    pending: Pending,
    residual: Tensor | None,
    inputs: InputFormat | None = None,
) -> tuple[Activations, Tensor]:
    """`OpSet.norm` for a pending result of any kind."""
    if isinstance(pending, PendingSum):
        assert residual is not None
        return ops.norm_arriving(pending.sums, norm, residual=residual, inputs=inputs)
    if isinstance(pending, PartialSum):
        return ops.all_reduce_norm(
            pending.x, norm, group=pending.group, residual=residual, inputs=inputs
        )
    if isinstance(pending, Pair):
        return ops.norm_pair(pending, norm, residual=residual, inputs=inputs)
    return ops.norm(pending, norm, residual=residual, inputs=inputs)


def total_of(ops: OpSet, pending: Pending, residual: Tensor | None) -> Tensor:
    h = whole(ops, pending)
    return h if residual is None else h + residual


def state_of(ops: OpSet, pending: Pending, residual: Tensor | None) -> Tensor:
    """`total_of` for an additional reader. The next layer still reads `pending`."""
    # read only once; sums don't overlap with products if a draft head reads states
    assert not isinstance(pending, PendingSum)
    h = (
        ops.sum_of_parts(pending.x, group=pending.group)
        if isinstance(pending, PartialSum)
        else whole(ops, pending)
    )
    return h if residual is None else h + residual


def of_ranks(h: Tensor, ranks: RankGroup | None) -> Pending:
    return h if ranks is None else PartialSum(h, ranks)


def whole(ops: OpSet, h: Pending) -> Tensor:
    """The complete tensor: the sum over ranks or of two branches, or `h` itself."""
    if isinstance(h, PendingSum):
        return ops.sum_arriving(h.sums)
    if isinstance(h, Pair):
        return h.x + h.y
    return ops.all_reduce(h.x, group=h.group) if isinstance(h, PartialSum) else h


def scaled(ops: OpSet, x: Pending, scale: float) -> Pending:
    return x if scale == 1.0 else whole(ops, x) * scale
