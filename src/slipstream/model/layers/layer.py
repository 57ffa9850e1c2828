"""A decoder layer, written once. The plain loop, the C++ program and the one-token kernel are all derived from this code.

1. Nothing in this folder imports torch. All maths goes through an `OpSet` or is `+`, `*`, `flatten` or
   `unflatten` of values. So the same code runs on tensors and on the symbolic values of
   `kernels.tracing.recording`.
2. The residual is passed next to the activations (`residual.py`).

Shapes: T tokens in the step, E hidden size.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any

from slipstream.kernels.layouts import NormParams
from slipstream.kernels.weights.forms import Pair
from slipstream.model.layers.attention import (
    Attention,
    CompressedAttention,
    CrossAttention,
    LatentAttention,
)
from slipstream.model.layers.feed_forward import MLP, InputGate, MoE
from slipstream.model.layers.residual import (
    SUMS,
    PartialSum,
    PendingSum,
    norm_pending,
    normed,
    of_ranks,
    scaled,
    total_of,
    whole,
)
from slipstream.model.layers.streams import HyperStreams, OwnInput, Recall, Shortcut, Streams
from slipstream.model.recurrent import Recurrent
from slipstream.spec.model import LayerSpec, ParallelBlock, PostNormBlock, TwinBlock
from slipstream.spec.parallel import Shard
from slipstream.spec.scheme import InputFormat

if TYPE_CHECKING:
    from torch import Tensor

    from slipstream.kernels.metadata import AttentionMetadata, ExpertCounters, LayerKV
    from slipstream.kernels.ops import OpSet
    from slipstream.kernels.weights.forms import Activations
    from slipstream.model.layers.residual import Pending
    from slipstream.platform.collectives import Pipe, RankGroup


SEQUENCE_TOKENS = 64
"""Minimum tokens of a step with sequence parallelism. In a smaller step one kernel for the
all-reduce beats two."""


@dataclass(frozen=True, slots=True)
class Partition:
    """The ranks that compute the layers together, and this rank's part.

    `pipe` connects the previous and the next pipeline stage. `every`: all ranks, if there are more
    than those of `group`.
    """

    shard: Shard
    group: RankGroup
    pipe: Pipe | None = None
    every: RankGroup | None = None
    context: RankGroup | None = None
    """The ranks over which keys and values are divided by tokens (context parallelism). With
    `sequence` the tokens of long steps are divided, too."""
    sequence: bool = False
    """Sequence parallelism for long steps (Korthikanti et al. 2022, arXiv:2205.05198).

    In steps of at least `SEQUENCE_TOKENS` tokens, the residual and its norms are split by tokens. A
    reduce-scatter leaves each rank its own tokens, and the next linear layers gather all. That
    moves as many bytes as an all-reduce, and each rank norms 1/n of the tokens.
    """

    def shares_tokens(self, num_tokens: int) -> bool:
        """Whether a step of `num_tokens` tokens is split by tokens."""
        return self.sequence and num_tokens >= max(SEQUENCE_TOKENS, self.group.size)

    @property
    def all_ranks(self) -> RankGroup:
        return self.every or self.group


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer: attention or a recurrent part, optional cross attention, and MLP with their norms.

    If it has attention and a recurrent part, both read the same input, and their outputs are added.

    With `attention_ranks` or `mlp_ranks`, the output of attention or MLP is a partial sum over
    these ranks. With `expert_ranks`, only a mixture's experts process tokens of other ranks.
    """

    spec: LayerSpec
    attention: Attention | LatentAttention | CompressedAttention | None
    mlp: MLP | MoE | None
    norms: Mapping[str, NormParams]
    cross: CrossAttention | None = None
    recurrent: Recurrent | None = None
    own_input: OwnInput | None = None
    input_gates: Mapping[str, InputGate] = field(default_factory=dict)  # by branch: attention, mlp
    scalar: Tensor | None = None  # [1]: factor of the residual after the layer
    streams: Streams | HyperStreams | Recall | Shortcut | None = None
    expert_counts: Tensor | None = None  # int64 [X]: tokens by expert, if counted
    group: int = 0  # index into the step's metadata, from `ModelSpec.group_of_layer`
    cross_group: int = 0
    attention_ranks: RankGroup | None = None
    mlp_ranks: RankGroup | None = None
    expert_ranks: RankGroup | None = None  # ranks with other experts and other requests
    shares_tokens: bool = False  # sequence parallelism in long steps
    context: RankGroup | None = None  # ranks with other tokens' keys and, in long steps, their rows

    def __call__(
        self,
        ops: OpSet,
        pending: Pending,
        residual: Tensor | None,
        kv: LayerKV,
        meta: AttentionMetadata,
    ) -> tuple[Pending, Tensor | None]:
        """Runs the layer and returns (pending, the residual). `meta`: the whole step's, from which
        the layer takes its cache group's.

        If the input has fewer rows than the step has tokens, it holds this rank's tokens
        (`Partition.sequence`), as do norms and residual. Linear layers read all tokens; their
        outputs are summed over ranks, and each rank gets its own tokens.
        """
        step, meta = meta, meta.of_group(self.group)
        if pieces := self._pieces(ops, pending):
            return self._in_pieces(ops, pending, residual, kv, meta, pieces)
        shared = (
            self.shares_tokens
            and not isinstance(pending, SUMS)
            and len(pending) < len(meta.positions)
        )
        n, scale = self.norms, self.spec.residual_scale
        # All linear layers of a layer have the same scheme, except a router. Rows are gathered
        # before they are quantized.
        to_attention, to_mlp = (None, None) if shared else self.inputs

        def summed(branch: Callable[[Any], Tensor], x: Any, ranks: RankGroup | None) -> Pending:
            if not shared:
                return of_ranks(branch(x), ranks)
            assert ranks is not None
            return ops.scatter_tokens(
                branch(ops.gather_tokens(x, ranks, len(meta.positions))), ranks
            )

        def attend(x: Any, by: Callable[..., Tensor] = self._mixed) -> Pending:
            return summed(lambda rows: by(ops, rows, kv, meta, step), x, self.attention_ranks)

        def feed(x: Any, by: Callable[..., Tensor] = self._fed) -> Pending:
            return summed(lambda rows: by(ops, rows, kv, meta, step), x, self.mlp_ranks)

        if self.streams is not None:
            return self.streams.run(ops, whole(ops, pending), self, attend, feed, step), None
        if isinstance(self.spec.block, PostNormBlock):
            x = total_of(ops, pending, residual)
            x = normed(ops, n["attention_norm"], scaled(ops, attend(x), scale), x)
            if self.cross is not None:
                seen = self.cross(ops, x, kv, step.of_group(self.cross_group))
                x = normed(ops, n["cross_norm"], of_ranks(seen, self.attention_ranks), x)
            return normed(ops, n["mlp_norm"], scaled(ops, feed(x), scale), x), None
        if isinstance(self.spec.block, ParallelBlock):  # the branches share a norm, or each has one
            rows, residual = self._before(
                "norm", ops, pending, residual, to_attention if "mlp_norm" in n else to_mlp
            )
            for_mlp = (
                ops.norm(residual, n["mlp_norm"], inputs=to_mlp)[0] if "mlp_norm" in n else rows
            )
            if self.attention_ranks is self.mlp_ranks and not shared:  # one sum for both
                attended, fed = (
                    self._mixed(ops, rows, kv, meta, step),
                    self._fed(ops, for_mlp, kv, meta, step),
                )
                both = (
                    ops.joined(attended, fed)
                    if self.mlp_ranks is None
                    else PartialSum(attended + fed, self.mlp_ranks)
                )
                return scaled(ops, both, scale), residual
            return scaled(
                ops, whole(ops, attend(rows)) + whole(ops, feed(for_mlp)), scale
            ), residual
        rows, residual = self._before("pre_attention", ops, pending, residual, to_attention)
        h = self._after("post_attention", ops, attend(rows))
        if self.cross is not None:
            rows, residual = self._before("pre_cross", ops, h, residual, self.cross.q.inputs)
            h = of_ranks(
                self.cross(ops, rows, kv, step.of_group(self.cross_group)), self.attention_ranks
            )
        if self.mlp is None:
            return scaled(ops, h, scale), residual
        twin = isinstance(self.spec.block, TwinBlock)
        rows, residual = self._before(
            "pre_mlp", ops, scaled(ops, h, scale), residual, None if twin else to_mlp
        )
        if twin:
            made: Pending = self._twins(ops, rows, residual, kv, meta, step, summed)
        else:
            made = self._after("post_mlp", ops, feed(rows))
        return self._ended(ops, scaled(ops, made, scale), residual, step)

    def _ended(
        self, ops: OpSet, h: Pending, residual: Tensor, step: AttentionMetadata
    ) -> tuple[Pending, Tensor | None]:
        """Adds the per-layer input's projection and scales the residual, if the layer has these."""
        if self.own_input is not None:
            residual = ops.added(whole(ops, h), residual)
            h = self.own_input(ops, residual, step)
        if self.scalar is None:
            return h, residual
        return ops.added(whole(ops, h), residual, self.scalar), None

    def _twins(
        self,
        ops: OpSet,
        rows: Any,
        h: Tensor,
        kv: LayerKV,
        meta: AttentionMetadata,
        step: AttentionMetadata,
        summed: Callable[..., Pending],
    ) -> Tensor:
        """Runs the shared expert on `rows` and the mixture on norms of the residual `h`, and norms
        the sum of their outputs."""
        n, mlp = self.norms, self.mlp
        assert isinstance(mlp, MoE)
        assert mlp.shared is not None
        load = self._load(ops, kv, meta, rows)

        def mixture(x: Tensor) -> Tensor:
            by, rows = normed(ops, n["pre_router"], x), normed(ops, n["pre_experts"], x)
            if self.expert_ranks is None:
                return ops.moe(rows, ops.linear(by, mlp.router), mlp.experts, load)
            most = len(x) if step.most_tokens is None else step.most_tokens
            return mlp.routed(ops, rows, by, self.expert_ranks, most, load)

        always = summed(partial(mlp.shared, ops), rows, self.mlp_ranks)
        chosen = summed(mixture, h, self.mlp_ranks)
        always, chosen = (
            normed(ops, n["post_shared"], always),
            normed(ops, n["post_experts"], chosen),
        )
        return normed(ops, n["post_mlp"], always, chosen)

    @property
    def inputs(self) -> tuple[InputFormat | None, InputFormat | None]:
        """(format of the input rows of attention or the recurrent part, that of the MLP's)."""
        attention, recurrent = self.attention, self.recurrent
        first = None if attention is None else attention.inputs
        if recurrent is not None:
            own = recurrent.inputs
            first = own if attention is None or own == first else None
        second = None if self.mlp is None else self.mlp.inputs
        gates = self.input_gates  # they read unquantized rows
        return None if "attention" in gates else first, None if "mlp" in gates else second

    def _mixed(
        self, ops: OpSet, x: Any, kv: LayerKV, meta: AttentionMetadata, step: AttentionMetadata
    ) -> Tensor:
        """This rank's part of the output of attention, of the recurrent part, or of both."""
        if "attention" in self.input_gates:
            x = self.input_gates["attention"](ops, x)
        if self.recurrent is None:
            return self.by_attention(ops, x, kv, meta, step)
        mixed = self.by_recurrence(ops, x, kv, meta, step)
        return mixed if self.attention is None else mixed + self.attention(ops, x, kv, meta)

    def by_attention(
        self, ops: OpSet, x: Any, kv: LayerKV, meta: AttentionMetadata, step: AttentionMetadata
    ) -> Tensor:
        assert self.attention is not None
        return self.attention(ops, x, kv, meta)

    def by_recurrence(
        self, ops: OpSet, x: Any, kv: LayerKV, meta: AttentionMetadata, step: AttentionMetadata
    ) -> Tensor:
        assert self.recurrent is not None
        return self.recurrent(ops, x, kv, step)

    def _pieces(self, ops: OpSet, pending: Pending) -> Sequence[slice]:
        """The slices of tokens for `_in_pieces`; empty if the layer is unsuitable or the step too
        short."""
        ranks = self.attention_ranks
        if (
            ranks is None
            or ranks is not self.mlp_ranks
            or self.shares_tokens
            or isinstance(pending, PartialSum | Pair)
        ):
            return ()
        pieces = pending.pieces if isinstance(pending, PendingSum) else ops.pieces(pending, ranks)
        return pieces if pieces and self.spec.is_plain else ()

    def _in_pieces(
        self,
        ops: OpSet,
        pending: Pending,
        residual: Tensor | None,
        kv: LayerKV,
        meta: AttentionMetadata,
        pieces: Sequence[slice],
    ) -> tuple[Pending, Tensor]:
        """Overlaps sums over ranks with matrix products: while one slice of tokens is summed, the
        next one is multiplied.

        Attention waits for all tokens.
        """
        assert self.attention_ranks is not None
        assert self.attention is not None
        assert self.mlp is not None
        begin = partial(ops.begin_sum, group=self.attention_ranks)
        x, residual = self._before("pre_attention", ops, pending, residual, self.attention.inputs)
        mixed, sums = self.attention.mixed(ops, x, kv, meta), []
        for i, rows in enumerate(pieces):
            sums.append(
                begin(ops.linear(mixed[rows], self.attention.out), place=0, index=i, rows=rows)
            )
        for i, rows in enumerate(pieces):
            part = residual[rows]
            x, _ = ops.norm_arriving(
                sums[i : i + 1], self.norms["pre_mlp"], residual=part, inputs=self.mlp.inputs
            )
            # Reuses the memory of attention's sum, which is free now.
            sums[i] = begin(
                self._fed(ops, x, kv, meta.of_tokens(rows), meta), place=1, index=i, rows=rows
            )
        return PendingSum(sums, pieces), residual

    def _fed(
        self, ops: OpSet, x: Any, kv: LayerKV, meta: AttentionMetadata, step: AttentionMetadata
    ) -> Tensor:
        """This rank's part of the MLP's output. `meta` belongs to the tokens `x` in this layer's
        cache group."""
        assert self.mlp is not None
        if "mlp" in self.input_gates:
            x = self.input_gates["mlp"](ops, x)
        if not isinstance(self.mlp, MoE):
            return self.mlp(ops, x)
        load = self._load(ops, kv, meta, x)
        if self.expert_ranks is None:
            return self.mlp(ops, x, load, step)
        most_tokens = len(x) if step.most_tokens is None else step.most_tokens
        return self.mlp.over_ranks(ops, x, self.expert_ranks, most_tokens, load, step)

    def by_shared(
        self, ops: OpSet, x: Any, kv: LayerKV, meta: AttentionMetadata, step: AttentionMetadata
    ) -> Tensor:
        """This rank's part of the shared expert's output alone."""
        assert isinstance(self.mlp, MoE)
        assert self.mlp.shared is not None
        return self.mlp.shared(ops, x)

    def by_experts(
        self, ops: OpSet, x: Any, kv: LayerKV, meta: AttentionMetadata, step: AttentionMetadata
    ) -> Tensor:
        """This rank's part of the mixture's output without the shared expert."""
        assert isinstance(self.mlp, MoE)
        alone = dataclasses.replace(self, mlp=dataclasses.replace(self.mlp, shared=None))
        return alone._fed(ops, x, kv, meta, step)

    def _load(
        self, ops: OpSet, kv: LayerKV, meta: AttentionMetadata, x: Any
    ) -> ExpertCounters | None:
        """Counters of tokens by expert for the rows `x`, if counted. In context parallelism each
        token is counted once."""
        if self.expert_counts is None:
            return None
        if (ranks := self.context) is None:
            return ops.expert_load(self.expert_counts, kv, meta)
        if self.attention_ranks is not None:  # only rank 0's counters are reported
            pass
        elif len(x) < len(meta.positions):
            own = ops.own_tokens(meta.slot_mapping, ranks)
            meta = dataclasses.replace(meta, slot_mapping=own)
        elif ranks.rank:
            return None
        load = ops.expert_load(self.expert_counts, kv, meta)
        return dataclasses.replace(load, block_size=kv.block_size * ranks.size)

    def _before(
        self,
        name: str,
        ops: OpSet,
        pending: Pending,
        residual: Tensor | None,
        inputs: InputFormat | None,
    ) -> tuple[Activations, Tensor]:
        """(input of attention or MLP, the residual). The input is normed if there is a norm."""
        if name in self.norms:
            return norm_pending(ops, self.norms[name], pending, residual, inputs)
        total = total_of(ops, pending, residual)
        return total, total

    def _after(self, name: str, ops: OpSet, h: Pending) -> Pending:
        return normed(ops, self.norms[name], h) if name in self.norms else h


def run_layers(
    ops: OpSet,
    layers: Sequence[Layer],
    h: Tensor,
    caches: Iterable[LayerKV],
    meta: AttentionMetadata,
    before: Callable[[int, Pending, Tensor | None], None] = lambda *_: None,
) -> tuple[Pending, Tensor | None]:
    """Runs the layers and returns (pending, the residual) after the last one. `caches` has one
    entry per layer.

    `before(i, pending, residual)` is called before layer i, and at the end with i = the number of
    layers.
    """
    pending: Pending = h
    residual: Tensor | None = None
    for i, (layer, kv) in enumerate(zip(layers, caches, strict=True)):
        before(i, pending, residual)
        pending, residual = layer(ops, pending, residual, kv, meta)
    before(len(layers), pending, residual)
    return pending, residual


def one_of_each_kind(layers: Sequence[Layer]) -> list[int]:
    """The index of the first layer of each kind. Layers of the same kind run the same kernels on
    different weights."""
    kinds: dict[Any, int] = {}
    for i, layer in enumerate(layers):
        kinds.setdefault(_kind_of(layer), i)
    return list(kinds.values())


def one_of_each_passage(layers: Sequence[Layer]) -> set[int]:
    """Indices of layers that together run every kernel: one pair for each combination of kinds that
    follow each other, the first layer and the last."""
    kinds = [_kind_of(layer) for layer in layers]
    kept, passages = {0, len(layers) - 1}, set[Any]()
    for i, passage in enumerate(itertools.pairwise(kinds)):
        if passage not in passages:
            passages.add(passage)
            kept |= {i, i + 1}
    return kept


def _kind_of(part: Any) -> Any:
    """A hashable key of a layer or a part of one: its structure, with the shapes and dtypes of its tensors.

    Parts in host memory, such as experts that the host computes, have a different key.
    """
    if hasattr(part, "dtype") and hasattr(part, "stride"):
        return tuple(part.shape), part.stride(), part.dtype
    if dataclasses.is_dataclass(part):
        return type(part), *(_kind_of(getattr(part, f.name)) for f in dataclasses.fields(part))
    if isinstance(part, Mapping):
        return tuple((name, _kind_of(x)) for name, x in part.items())
    if isinstance(part, list | tuple):
        return tuple(map(_kind_of, part))
    return part if part is None or isinstance(part, str | int | float | Enum) else id(part)
