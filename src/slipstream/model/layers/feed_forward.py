"""A layer's MLP and its mixture of experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slipstream.kernels.layouts import Experts, NormParams
from slipstream.spec.model import DenseSpec, MoESpec
from slipstream.spec.scheme import InputFormat

if TYPE_CHECKING:
    from torch import Tensor

    from slipstream.kernels.ops import OpSet
    from slipstream.kernels.weights.forms import Activations, Linear
    from slipstream.platform.collectives import RankGroup


@dataclass(frozen=True, slots=True)
class MLP:
    spec: DenseSpec
    up: Linear
    down: Linear
    group: RankGroup | None = None  # ranks with the other gates, if `spec.sparsity`
    down_norm: NormParams | None = None

    def __call__(self, ops: OpSet, x: Activations) -> Tensor:
        """[T, E] → [T, E]."""
        s, up = self.spec, ops.linear(x, self.up)
        if s.sparsity:
            up = ops.sparse_gates(up, spec=s, group=self.group)
        if self.down_norm is not None:
            gates: Any = ops.activation(up, s.activation, gated=s.gated, inputs=None)
            rows = ops.norm(gates, self.down_norm, inputs=self.down.inputs)[0]
        else:
            rows = ops.activation(up, s.activation, gated=s.gated, inputs=self.down.inputs)
        return ops.linear(rows, self.down)

    @property
    def inputs(self) -> InputFormat | None:
        """Format of its input rows."""
        return self.up.inputs


@dataclass(frozen=True, slots=True)
class InputGate:
    """The gate of what a layer's branch reads (`InputGateSpec`)."""

    down: Linear
    up: Linear

    def __call__(self, ops: OpSet, x: Tensor) -> Tensor:
        """Normed rows [T, E] → [T, E]."""
        latent: Any = ops.activation(ops.linear(x, self.down), "silu", inputs=None)
        return x * ops.sigmoid(ops.linear(latent, self.up))


@dataclass(frozen=True, slots=True)
class MoE:
    spec: MoESpec
    router: Linear
    experts: Experts
    shared: MLP | None
    shared_weight: Linear | None
    latent: tuple[Linear, Linear] | None = None  # to `spec.latent` elements, and back
    table: Tensor | None = None  # float32 [V, k]: experts of each token id, if `spec.hashed`
    # int16 [T, k]: where a step's choice is recorded, if wanted
    routed_experts: Tensor | None = None
    # with several ranks, the router reads only this rank's tokens, which have adapters
    routes_own: bool = False

    def __call__(self, ops: OpSet, x: Any, load: Any = None, step: Any = None) -> Tensor:
        """[T, E] → [T, E]. `load`: counters from `OpSet.expert_load`, if tokens are counted. A `table` needs `step`."""
        logits = ops.linear(x, self.router)
        if self.table is not None:
            logits = ops.hashed_logits(logits, meta=step, table=self.table)
        if self.shared is None or self.latent is not None or self.routed_experts is not None:
            return self._with_shared(ops, x, self._chosen(ops, x, logits, load))
        expert, always = self.spec.expert, self.shared.spec
        if self.shared_weight is None and (expert.activation, expert.gated) == (
            always.activation,
            always.gated,
        ):
            return ops.moe_and_shared(
                x, logits, self.experts, (self.shared.up, self.shared.down), load
            )
        return self._with_shared(ops, x, ops.moe(x, logits, self.experts, load))

    def over_ranks(
        self,
        ops: OpSet,
        x: Tensor,
        ranks: RankGroup,
        num_tokens: int,
        load: Any = None,
        step: Any = None,
    ) -> Tensor:
        """Computes a mixture whose experts are split over `ranks`, each with its own tokens, at
        most `num_tokens`.

        1. This rank's experts process the tokens of all ranks.
        2. The outputs are summed over ranks, and each rank gets the sums for its own tokens.

        `load` counts only this rank's tokens. Shared experts process only these.
        """
        return self._with_shared(ops, x, self.routed(ops, x, x, ranks, num_tokens, load, step))

    def routed(
        self,
        ops: OpSet,
        x: Tensor,
        by: Tensor,
        ranks: RankGroup,
        num_tokens: int,
        load: Any,
        step: Any = None,
    ) -> Tensor:
        """Computes `over_ranks` without shared experts. `by`: the router's input, which may be x
        itself."""
        rows = ops.gather_tokens(ops.filled_up(x, num_tokens), ranks, ranks.size * num_tokens)
        # only this rank's tokens have logits
        is_own = by is not x or self.table is not None or self.routes_own
        logits = ops.linear(by if is_own else rows, self.router)
        if self.table is not None:
            logits = ops.hashed_logits(logits, meta=step, table=self.table)
        if is_own:
            every = ranks.size * num_tokens
            logits = ops.gather_tokens(ops.filled_up(logits, num_tokens), ranks, every)
        load = None if load is None else ops.own_expert_load(load, ranks, num_tokens)
        return ops.scatter_tokens(self._chosen(ops, rows, logits, load), ranks)[: len(x)]

    def _chosen(self, ops: OpSet, x: Any, logits: Tensor, load: Any) -> Tensor:
        if self.latent is None:
            return self._mixed(ops, x, logits, load)
        into, back = self.latent
        return ops.linear(self._mixed(ops, ops.linear(x, into), logits, load), back)

    def _mixed(self, ops: OpSet, x: Any, logits: Tensor, load: Any) -> Tensor:
        if self.routed_experts is None:
            return ops.moe(x, logits, self.experts, load)
        e = self.experts
        is_whole = not e.spec.skips
        counted = load if is_whole else None  # `moe` chooses the experts again, and counts them
        weights, chosen = ops.route(logits, e.spec, e.correction, counted, e.scales)
        count = min(len(chosen), len(self.routed_experts))  # padding tokens are last
        self.routed_experts[:count].copy_(chosen[:count])
        if not is_whole:  # `moe_of_choice` numbers only the experts of one rank
            return ops.moe(x, logits, e, load)
        return ops.moe_of_choice(x, weights, chosen.int(), e)

    def _with_shared(self, ops: OpSet, x: Any, routed: Tensor) -> Tensor:
        if self.shared is None:
            return routed
        added = self.shared(ops, x)
        return routed + (
            added
            if self.shared_weight is None
            else added * ops.sigmoid(ops.linear(x, self.shared_weight))
        )

    @property
    def up(self) -> Linear:
        return self.experts.up

    @property
    def down(self) -> Linear:
        return self.experts.down

    @property
    def inputs(self) -> InputFormat | None:
        return None  # the router reads unquantized rows
