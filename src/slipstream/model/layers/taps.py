"""Collectors of the states between layers that a draft head reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from slipstream.kernels.layouts import NormParams
from slipstream.model.layers.residual import state_of

if TYPE_CHECKING:
    from torch import Tensor

    from slipstream.kernels.ops import OpSet
    from slipstream.kernels.weights.forms import Linear
    from slipstream.model.layers.residual import Pending


@dataclass(frozen=True, slots=True)
class Tap:
    """Collects the states between layers that a draft head reads.

    The result is the sum of `products[i]` applied to the input of layer i. That equals one linear
    layer on the concatenated states. `norms[i]`, if present, norms the input of layer i.
    """

    products: Mapping[int, Linear]
    norms: Mapping[int, NormParams] = field(default_factory=dict)

    def add(
        self,
        ops: OpSet,
        taken: Tensor | None,
        layer: int,
        pending: Pending,
        residual: Tensor | None,
    ) -> Tensor | None:
        """Returns `taken` plus this layer's term."""
        if layer not in self.products:
            return taken
        state, w = state_of(ops, pending, residual), self.products[layer]
        rows = (
            ops.norm(state, self.norms[layer], inputs=w.inputs)[0] if layer in self.norms else state
        )
        part = ops.linear(rows, w)
        return part if taken is None else taken + part


@dataclass(frozen=True, slots=True)
class JoinedTap:
    """Collects the inputs of `layers` (ascending), concatenated, with an optional norm and linear
    layer on the whole."""

    layers: tuple[int, ...]
    norm: NormParams | None = None
    product: Linear | None = None

    def add(
        self,
        ops: OpSet,
        taken: Tensor | None,
        layer: int,
        pending: Pending,
        residual: Tensor | None,
    ) -> Tensor | None:
        """Returns `taken` with this layer's state filled in. At the last of the layers it returns
        the final result."""
        if layer not in self.layers:
            return taken
        state = state_of(ops, pending, residual)
        size, count = state.shape[-1], len(self.layers)
        rows: Any = ops.place(
            state, taken, column=self.layers.index(layer) * size, width=count * size
        )
        if layer != self.layers[-1]:
            return rows  # type: ignore[no-any-return]
        if self.norm is not None:
            rows = ops.norm(
                rows, self.norm, inputs=None if self.product is None else self.product.inputs
            )[0]
        return rows if self.product is None else ops.linear(rows, self.product)


AnyTap: TypeAlias = Tap | JoinedTap
"""A collector of the states that a draft head reads between layers."""
