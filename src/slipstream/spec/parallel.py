"""The split of a model over the ranks of a group: the one place that says which rank holds what. No
torch.

The split is Megatron-LM's (Shoeybi et al. 2019, arXiv:1909.08053), read from the `ModelSpec`:

| parameters | a rank has |
| --- | --- |
| q, k, v; `up` (gate and up) | the rows of its heads, or of its share of the inner dimension |
| `out`; `down` | the matching columns; its result is a part of a sum |
| a recurrent layer | the rows of its heads (gated delta rule, Mamba-2) or channels (others) |
| experts | its share of each one's inner dimension, or whole experts (`Shard.experts`) |
| a shared expert | its share of the inner dimension; all of it if only experts are split |
| embeddings, output head | its share of the vocabulary |
| norms, routers, latents, position tables | all of them |
| biases of parts of a sum | all of them; they are added on rank 0 |

A query head needs its kv head on the same rank (`heads_of`). If heads don't divide, several ranks
have the same kv head, or the last ranks have heads of zeros, whichever costs less. Inner dimensions
that don't divide end in zeros, too. A head of zeros adds nothing, because its columns of the output
product are zeros.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, TypeAlias

from slipstream.errors import ConfigError
from slipstream.spec.model import (
    AlibiSpec,
    AttentionKind,
    AttentionSpec,
    BucketSpec,
    CompressedAttentionSpec,
    DenseSpec,
    GatedDeltaSpec,
    LatentAttentionSpec,
    LayerSpec,
    LightningSpec,
    Mamba2Spec,
    ModelSpec,
    MoESpec,
    RecurrentSpec,
    Shape,
    ShortConvSpec,
    parameters,
)
from slipstream.spec.parameters import Placement
from slipstream.spec.recurrent import NormPart

Range: TypeAlias = tuple[int, int]
"""Range [begin, end) of rows or columns. (−n, 0) means n zeros that the model does not have."""

VOCAB_MULTIPLE = 16
"""The number of vocabulary rows on a rank is padded to a multiple of this, as 8-bit matrix products
require. Padding rows are zeros."""

COPIED_SUMS_FROM = 2048
"""Minimum tokens of a step for which two GPUs copy partial sums to each other while matrix products
run. In smaller steps the products would be cut into pieces too short to gain from it."""

INNER_MULTIPLE = 16
"""A rank's slice of an inner (K) dimension is padded to a multiple of this."""


class SplitUnits(NamedTuple):
    """Numbers of inputs, of attention's output projection and of an MLP's down projection, that
    share a quantization scale. A rank's slice must be a multiple."""

    attention: int = 1
    mlp: int = 1


ONE_UNIT = SplitUnits()


@dataclass(frozen=True, slots=True)
class Shard:
    """One of `size` ranks that compute a model's layers together.

    - `tensor`: attention, dense MLPs and the vocabulary are split.
    - `experts`: each rank has whole experts; otherwise a slice of every expert. With only
      `experts`, each rank computes its own requests (`deals_requests`).
    - `layers`: the layers of these ranks, if a pipeline's other stages compute the others.
    - `embeds`: a later stage has the embeddings, too, for a draft head.
    """

    rank: int
    size: int
    tensor: bool = True
    experts: bool = False
    units: SplitUnits = ONE_UNIT
    layers: Range | None = None
    embeds: bool = False

    def dealt(self, total: int) -> Range:
        """This rank's range out of `total` indivisible items, such as experts."""
        return self.rank * total // self.size, (self.rank + 1) * total // self.size

    def width(self, total: int) -> int:
        """A rank's share of an inner dimension, including the padding of the last ranks."""
        each, unit = -(-total // self.size), self.units.mlp
        if total % self.size == 0 and each % unit == 0:
            return each
        step = math.lcm(unit, INNER_MULTIPLE)
        return -(-each // step) * step

    def inner(self, total: int, offset: int = 0) -> tuple[Range, ...]:
        """This rank's ranges of an inner dimension of size `total`, padding included. The dimension
        begins at row or column `offset`."""
        each = self.width(total)
        return _filled(
            (min(self.rank * each, total), min((self.rank + 1) * each, total)), each, offset
        )

    @property
    def deals_requests(self) -> bool:
        """Whether each rank computes its own requests, and tokens of all ranks meet only in the
        experts."""
        return self.experts and not self.tensor and self.size > 1

    def vocabulary(self, size: int) -> int:
        """Rows of the embedding table and output head on each rank, including the last rank's
        padding."""
        return -(-size // (VOCAB_MULTIPLE * self.size)) * VOCAB_MULTIPLE if self.tensor else size


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterShard:
    """The part of a parameter that a rank holds.

    It has the rows `rows` and columns `columns` (None: all) of `count` copies (experts) from
    `first` on. `keep` is False for a bias that another rank adds; this rank has zeros.
    """

    rows: tuple[Range, ...] | None = None
    columns: tuple[Range, ...] | None = None
    copies: int = 1
    first: int = 0
    count: int = 1
    keep: bool = True

    def within(self, start: int, stop: int) -> tuple[Range, ...]:
        """Rows [start, stop) of a copy that this rank holds, counted from `start`, with the zeros between them."""
        if self.rows is None:
            return ((0, stop - start),)
        at = [i for i, (a, b) in enumerate(self.rows) if max(a, start) < min(b, stop)]
        own = self.rows[at[0] : at[-1] + 1] if at else ()
        return tuple(
            (a, b) if a < 0 else (max(a, start) - start, min(b, stop) - start) for a, b in own
        )

    def local_rows(self, num_rows: int) -> int:
        """Number of rows, padding included, that this rank holds of a copy with `num_rows` rows."""
        return num_rows if self.rows is None else sum(b - a for a, b in self.rows)

    def _before(self, start: int) -> int:
        """Number of rows on this rank before the first one at or after `start`."""
        count = 0
        for a, b in self.rows or ((0, start),):
            if a >= 0 and b > start:
                return count + max(0, start - a)
            count += b - a
        return count

    def placed(self, place: Placement, num_rows: int) -> tuple[Placement, tuple[Range, ...]] | None:
        """(placement of a tensor's part in this rank's share of a parameter with `num_rows` rows,
        the tensor's rows in that part).

        Rows are counted per copy. None: this rank has nothing of the tensor.
        """
        size = num_rows // self.copies
        held = self.local_rows(size)
        copy, start = (0, place.start) if place.copies is not None else divmod(place.start, size)
        stop = size if place.rows is None else start + place.rows
        own = self.within(start, stop)
        if not own or (place.copies is None and not self.first <= copy < self.first + self.count):
            return None
        before = self._before(start)
        at = before if place.copies is not None else (copy - self.first) * held + before
        copies = None if place.copies is None else self.count
        return Placement(place.target, at, sum(b - a for a, b in own), None, copies), own


def _filled(part: Range, size: int, offset: int = 0) -> tuple[Range, ...]:
    """The range shifted by `offset`, followed by zeros up to `size`."""
    first, last = part
    own = ((first + offset, last + offset),) if first < last else ()
    missing = size - (last - first)
    return (*own, (-missing, 0)) if missing else own


# --- Which heads ---------------------------------------------------------------------


class RankHeads(NamedTuple):
    """A rank's heads: query heads [first, last), and the kv heads that they read, in order.

    The rank holds `num_heads` and `num_kv_heads`, including heads of zeros as padding. All ranks
    together hold each kv head `copies` times.
    """

    query: Range
    kv: tuple[int, ...]
    num_heads: int
    num_kv_heads: int
    copies: int

    def rows(self, width: int, offset: int = 0) -> tuple[Range, ...]:
        """Rows, or columns, of the query heads of `width` each."""
        first, last = self.query
        return _filled((first * width, last * width), self.num_heads * width, offset)

    def kv_rows(self, width: int, offset: int = 0) -> tuple[Range, ...]:
        """Rows, or columns, of the kv heads of `width` each; adjacent ones are one range."""
        found: list[Range] = []
        for begin in (offset + head * width for head in self.kv):
            if found and found[-1][1] == begin:
                found[-1] = found[-1][0], begin + width
            else:
                found.append((begin, begin + width))
        missing = (self.num_kv_heads - len(self.kv)) * width
        return (*found, (-missing, 0)) if missing else tuple(found)


def heads_of(a: AttentionKind, shard: Shard) -> RankHeads:
    """The heads of a rank."""
    if not isinstance(a, LatentAttentionSpec):
        return _heads(a.num_heads, a.num_kv_heads, a.head_dim, shard)
    found = _heads(a.num_heads, 1, a.value_dim, shard)
    if not shard.tensor or shard.size == 1:
        return found
    if isinstance(a, CompressedAttentionSpec):  # only whole output groups (`check_split`)
        each = a.num_heads // shard.size
        own = (shard.rank * each, (shard.rank + 1) * each)
        return RankHeads(own, (0,), each, 1, shard.size)
    return found._replace(kv=(0,), num_kv_heads=1, copies=shard.size)


def recurrent_heads(r: GatedDeltaSpec | Mamba2Spec, shard: Shard) -> RankHeads:
    """The heads of a recurrent layer on a rank: its value heads, and the key heads or groups that
    they share."""
    shared = r.num_key_heads if isinstance(r, GatedDeltaSpec) else r.num_groups
    return _heads(r.num_heads, shared, r.value_dim, shard)


def _heads(num_heads: int, num_kv_heads: int, width: int, shard: Shard) -> RankHeads:
    if not shard.tensor or shard.size == 1:
        return RankHeads((0, num_heads), tuple(range(num_kv_heads)), num_heads, num_kv_heads, 1)
    slots, group = _slots(num_heads, num_kv_heads, width, shard.size, shard.units.attention)
    whole = num_heads // num_kv_heads
    per_kv = -(-whole // group)  # slots for each kv head
    own = range(shard.rank * slots, min((shard.rank + 1) * slots, num_kv_heads * per_kv))
    first, last = own.start // per_kv * whole + own.start % per_kv * group, 0
    if own:
        end = own[-1]
        last = min(end // per_kv * whole + (end % per_kv + 1) * group, (end // per_kv + 1) * whole)
    query = (first, last) if own else (num_heads, num_heads)
    return RankHeads(query, tuple(slot // per_kv for slot in own), slots * group, slots, per_kv)


@lru_cache(maxsize=1024)
def _slots(num_heads: int, num_kv_heads: int, width: int, size: int, unit: int) -> tuple[int, int]:
    """(slots of a rank, query heads of a slot).

    A slot is a kv head with an equal number of its query heads. Chosen so that q, k and v have the
    fewest rows. The elements of a rank's query heads must be a multiple of `unit`.
    """
    whole, found = num_heads // num_kv_heads, []
    for group in range(1, whole + 1):
        slots = -(-num_kv_heads * -(-whole // group) // size)
        while slots * group * width % unit:
            slots += 1
        if whole % group == 0 or slots == 1:  # otherwise there would be zero heads between others
            found.append((slots * (group + 2), slots, group))
    _, slots, group = min(found)
    return slots, group


def uneven_parts(spec: ModelSpec, shard: Shard) -> list[str]:
    """A message for each part whose size is not divisible by the number of ranks."""
    found: dict[str, None] = {}  # in order, each once
    n = shard.size
    for a in (x.attention for x in spec.all_layers) if shard.tensor else ():
        if a is None:
            continue
        heads = heads_of(a, shard)
        if (held := n * heads.num_heads) > a.num_heads:
            found[
                f"{a.num_heads} query heads on {n} ranks: {heads.num_heads} each, {held - a.num_heads} of them zeros"
            ] = None
        if isinstance(a, AttentionSpec):
            if heads.copies > 1:
                found[f"kv heads don't divide by {n}: {heads.copies} copies of each"] = None
            if (missing := n * heads.num_kv_heads - heads.copies * a.num_kv_heads) > 0:
                found[
                    f"{a.num_kv_heads} kv heads on {n} ranks: {heads.num_kv_heads} each, {missing} of them zeros"
                ] = None
    for r in (x.recurrent for x in spec.all_layers) if shard.tensor else ():
        if isinstance(r, GatedDeltaSpec | Mamba2Spec):
            heads = recurrent_heads(r, shard)
            if (missing := n * heads.num_heads - r.num_heads) > 0:
                found[
                    f"{r.num_heads} heads of recurrent layers on {n} ranks: {heads.num_heads} each, {missing} of them zeros"
                ] = None
        elif r is not None and (missing := n * shard.width(r.width) - r.width) > 0:
            found[
                f"{r.width} channels of recurrent layers on {n} ranks: {shard.width(r.width)} each, {missing} of them zeros"
            ] = None
    for layer in spec.all_layers:
        m = layer.mlp
        inner = [m] if isinstance(m, DenseSpec) and shard.tensor else []
        if isinstance(m, MoESpec):
            inner = [m.expert] * (not shard.experts) + (
                [] if m.shared is None or shard.deals_requests else [m.shared.mlp]
            )
            if shard.experts and m.num_experts % n:
                found[
                    f"{m.num_experts} experts on {n} ranks: {m.num_experts // n} or one more each"
                ] = None
        for size, width in ((x.intermediate_size, shard.width(x.intermediate_size)) for x in inner):
            if n * width > size:
                found[
                    f"an inner dimension of {size} on {n} ranks: {width} each, {n * width - size} of them zeros"
                ] = None
    if shard.tensor and (rows := n * shard.vocabulary(spec.vocab_size)) > spec.vocab_size:
        found[f"a vocabulary of {spec.vocab_size:,} on {n} ranks: {rows // n:,} rows each"] = None
    return list(found)


# --- A rank's spec -------------------------------------------------------------------


def split_spec(spec: ModelSpec, shard: Shard) -> ModelSpec:
    """The spec that one rank computes. `vocab_size` stays the model's, because logits are gathered.
    All `layers` stay; `stage` says which of them the rank has."""
    if shard.layers is not None:
        spec = dataclasses.replace(spec, stage=shard.layers, embeds=shard.embeds)
    if shard.size == 1:
        return spec
    encoder = spec.encoder
    if encoder is not None:
        encoder = dataclasses.replace(
            encoder, layers=tuple(_split_layer(x, shard) for x in encoder.layers)
        )
    return dataclasses.replace(
        spec,
        layers=tuple(_split_layer(x, shard) for x in spec.layers),
        encoder=encoder,
        groups=spec.cache_groups,
    )


def _split_layer(layer: LayerSpec, shard: Shard) -> LayerSpec:
    cross = None if layer.cross is None else _split_attention(layer.cross, shard)
    assert not isinstance(cross, LatentAttentionSpec)
    a, r, m = layer.attention, layer.recurrent, layer.mlp
    return dataclasses.replace(
        layer,
        attention=None if a is None else _split_attention(a, shard),
        recurrent=None if r is None else _split_recurrent(r, shard),
        mlp=None if m is None else _split_mlp(m, shard),
        cross=cross,
    )


def _split_attention(a: AttentionKind, shard: Shard) -> AttentionKind:
    if not shard.tensor:
        return a
    heads = heads_of(a, shard)
    if isinstance(a, CompressedAttentionSpec):
        num_groups = a.num_out_groups // shard.size
        return dataclasses.replace(a, num_heads=heads.num_heads, num_out_groups=num_groups)
    if isinstance(a, LatentAttentionSpec):
        return dataclasses.replace(a, num_heads=heads.num_heads)
    position = a.position
    if isinstance(position, AlibiSpec):
        position = dataclasses.replace(position, part=(heads.query[0], a.num_heads))
    whole = a.num_heads, heads.copies * a.num_kv_heads
    part = dataclasses.replace(a, num_heads=heads.num_heads, num_kv_heads=heads.num_kv_heads)
    if a.index is not None:
        own = dataclasses.replace(a.index, num_heads=heads.num_kv_heads)
        part = dataclasses.replace(part, index=own)
    return dataclasses.replace(part, position=position, of_heads=whole)


def _split_recurrent(r: RecurrentSpec, shard: Shard) -> RecurrentSpec:
    if not shard.tensor:
        return r
    if not isinstance(r, GatedDeltaSpec | Mamba2Spec):
        return dataclasses.replace(r, width=shard.width(r.width))
    heads = recurrent_heads(r, shard)
    if isinstance(r, GatedDeltaSpec):
        return dataclasses.replace(r, num_key_heads=heads.num_kv_heads, num_heads=heads.num_heads)
    part = dataclasses.replace(r, num_groups=heads.num_kv_heads, num_heads=heads.num_heads)
    if isinstance(r, LightningSpec) and isinstance(part, LightningSpec):
        own = r.rates[slice(*heads.query)]
        part = dataclasses.replace(part, rates=own + (1.0,) * (heads.num_heads - len(own)))
    if r.norm is None or (heads.copies == 1 and r.norm_groups == r.num_groups):
        return dataclasses.replace(part, norm_groups=heads.num_kv_heads)
    each = r.num_groups // r.norm_groups  # groups normed together
    of = tuple(group // each for group in heads.kv)
    of += (0,) * (heads.num_kv_heads - len(of))
    whole = NormPart(of, r.norm_groups, r.v_size // r.norm_groups)
    return dataclasses.replace(part, norm_groups=1, norm_part=whole)


def _split_mlp(m: DenseSpec | MoESpec, shard: Shard) -> DenseSpec | MoESpec:
    if isinstance(m, DenseSpec):
        return _split_dense(m, shard) if shard.tensor else m
    shared = m.shared
    if shared is not None and not shard.deals_requests:
        shared = dataclasses.replace(shared, mlp=_split_dense(shared.mlp, shard))
    m = dataclasses.replace(m, shared=shared, adds_identity=shard.rank == 0)
    if not shard.experts:
        return dataclasses.replace(m, expert=_split_dense(m.expert, shard))
    first, last = shard.dealt(m.num_experts)
    return dataclasses.replace(m, held=(first, last - first))


def _split_dense(m: DenseSpec, shard: Shard) -> DenseSpec:
    whole = m.intermediate_size if m.sparsity else None
    return dataclasses.replace(m, intermediate_size=shard.width(m.intermediate_size), of_size=whole)


def split_shapes(spec: ModelSpec, shard: Shard) -> dict[str, Shape]:
    """Shapes of a rank's parameters, by the names of `parameters`."""
    found = parameters(split_spec(spec, shard))
    for name in ("embed.weight", "head.weight", "head.bias") if shard.size > 1 else ():
        if name in found:
            found[name] = (shard.vocabulary(spec.vocab_size), *found[name][1:])
    return found


# --- Which part of each parameter ----------------------------------------------------


def cuts(spec: ModelSpec, shard: Shard) -> dict[str, ParameterShard]:
    """The part that the rank holds of each parameter that is split, by name."""
    found: dict[str, ParameterShard] = {}
    if shard.size == 1:
        return found
    if shard.tensor:
        each = shard.vocabulary(spec.vocab_size)
        own = ParameterShard(
            rows=(
                (
                    min(shard.rank * each, spec.vocab_size),
                    min((shard.rank + 1) * each, spec.vocab_size),
                ),
            )
        )
        found |= {
            name: own
            for name in ("embed.weight", "head.weight", "head.bias")
            if name in parameters(spec)
        }
    stacks = [("", spec.layers)] + (
        [] if spec.encoder is None else [("encoder.", spec.encoder.layers)]
    )
    for prefix, layers in stacks:
        a = layers[0].attention
        of_buckets = a is not None and isinstance(a.position, BucketSpec) and not a.position.own
        if shard.tensor and a is not None and of_buckets:
            found[f"{prefix}distances.weight"] = ParameterShard(columns=heads_of(a, shard).rows(1))
        for i, layer in enumerate(layers):
            own_cuts = _of_layer(layer, shard)
            names = layer.shapes(spec.hidden_size)
            found |= {
                f"{prefix}layers.{i}.{name}": cut for name, cut in own_cuts.items() if name in names
            }
    return found


def _of_layer(layer: LayerSpec, shard: Shard) -> dict[str, ParameterShard]:
    """The part that the rank holds of each split parameter of a layer, by name. Some names may not
    exist in the layer."""
    found: dict[str, ParameterShard] = {}
    elsewhere = ParameterShard(keep=shard.rank == 0)

    def product(name: str, cut: ParameterShard) -> None:
        found[f"{name}.weight"] = found[f"{name}.bias"] = cut

    def sum_of_parts(name: str, columns: tuple[Range, ...]) -> None:
        found[f"{name}.weight"], found[f"{name}.bias"] = ParameterShard(columns=columns), elsewhere

    def dense(name: str, m: DenseSpec) -> None:
        product(f"{name}.up", ParameterShard(rows=_inner_rows(m, shard)))
        sum_of_parts(f"{name}.down", shard.inner(m.intermediate_size))

    if shard.tensor:
        if layer.attention is not None:
            found |= _of_attention(layer.attention, shard, sum_of_parts, product)
        if layer.recurrent is not None:
            found |= _of_recurrent(layer.recurrent, shard, sum_of_parts, product)
        if (c := layer.cross) is not None:
            heads, dim = heads_of(c, shard), c.head_dim
            product("cross.q", ParameterShard(rows=heads.rows(dim)))
            product(
                "cross.kv", ParameterShard(rows=heads.kv_rows(dim) + heads.kv_rows(dim, c.kv_size))
            )
            sum_of_parts("cross.out", heads.rows(dim))
        if isinstance(layer.mlp, DenseSpec):
            dense("mlp", layer.mlp)
    if isinstance(layer.mlp, MoESpec):
        m = layer.mlp
        if m.shared is not None and not shard.deals_requests:
            dense("shared", m.shared.mlp)
        if shard.experts:
            first, last = shard.dealt(m.num_experts)
            own = ParameterShard(copies=m.num_experts, first=first, count=last - first)
            product("experts.up", own)
            product("experts.down", own)
        else:
            every = ParameterShard(copies=m.num_experts, count=m.num_experts)
            product("experts.up", dataclasses.replace(every, rows=_inner_rows(m.expert, shard)))
            columns = shard.inner(m.expert.intermediate_size)
            found["experts.down.weight"] = dataclasses.replace(every, columns=columns)
            found["experts.down.bias"] = dataclasses.replace(every, keep=shard.rank == 0)
    return found


def _of_attention(
    a: AttentionKind,
    shard: Shard,
    sum_of_parts: Callable[[str, tuple[Range, ...]], None],
    product: Callable[[str, ParameterShard], None],
) -> dict[str, ParameterShard]:
    """The part that the rank holds of each attention parameter outside linear layers. Records theirs (weight and bias):
    `product` for one split by rows, `sum_of_parts` for one by columns, whose results are summed over ranks."""
    found: dict[str, ParameterShard] = {}
    heads = heads_of(a, shard)
    if isinstance(a, CompressedAttentionSpec):
        product("attention.q", ParameterShard(rows=heads.rows(a.head_dim)))
        found["attention.sinks.weight"] = ParameterShard(rows=heads.rows(1))
        each = a.num_out_groups // shard.size * a.out_rank
        own = ((shard.rank * each, (shard.rank + 1) * each),)
        found["attention.out_parts.weight"] = ParameterShard(rows=own)
        sum_of_parts("attention.out", own)
        return found
    if isinstance(a, LatentAttentionSpec):
        of_heads = heads.rows(a.nope_dim + a.rotary_dim, a.gate_size)
        if a.gated == "each":
            of_heads = (*heads.rows(a.value_dim), *of_heads)
        product("attention.q", ParameterShard(rows=of_heads))
        product("attention.expand", ParameterShard(rows=heads.rows(a.nope_dim + a.value_dim)))
        product("attention.gate", ParameterShard(rows=heads.rows(1)))
        sum_of_parts("attention.out", heads.rows(a.value_dim))
        return found
    dim = a.head_dim
    queries = a.gate_size + a.q_size
    begins = (queries, queries + a.kv_size)[: len(a.qkv_rows) - 1]
    widths = (dim, a.value_width)
    kv_rows = tuple(
        part
        for begin, width in zip(begins, widths, strict=False)
        for part in heads.kv_rows(width, begin)
    )
    gates = heads.rows(1 if a.gated == "head" else dim) if a.gated else ()
    rows = (*gates, *heads.rows(dim, a.gate_size), *kv_rows)
    product("attention.qkv", ParameterShard(rows=rows))
    sum_of_parts("attention.out", heads.rows(a.value_width))
    if (x := a.index) is not None:
        key = (x.rows[0], sum(x.rows))
        product("attention.index", ParameterShard(rows=(*heads.kv_rows(x.head_dim, 0), key)))
    if a.qk_norm is not None and a.qk_norm.over in ("row", "each"):
        width = dim if a.qk_norm.over == "row" else 1
        found["attention.q_norm.weight"] = ParameterShard(rows=heads.rows(width))
        found["attention.k_norm.weight"] = ParameterShard(rows=heads.kv_rows(width))
    found["attention.sinks.weight"] = ParameterShard(rows=heads.rows(1))
    product("attention.position_key", ParameterShard(rows=heads.rows(dim)))
    product("attention.position_query", ParameterShard(rows=heads.rows(dim)))
    found["attention.distances.weight"] = ParameterShard(columns=heads.rows(1))
    return found


def _of_recurrent(
    r: RecurrentSpec,
    shard: Shard,
    sum_of_parts: Callable[[str, tuple[Range, ...]], None],
    product: Callable[[str, ParameterShard], None],
) -> dict[str, ParameterShard]:
    """Records which part of each parameter of a recurrent layer the rank holds, like `_of_attention`."""
    found: dict[str, ParameterShard] = {}

    def rows(*names: str, of: tuple[Range, ...]) -> None:
        found.update({f"recurrent.{name}.weight": ParameterShard(rows=of) for name in names})

    if not isinstance(r, GatedDeltaSpec | Mamba2Spec):
        own = shard.inner(r.width)
        parts = 3 if isinstance(r, ShortConvSpec) else 2
        every = tuple(x for i in range(parts) for x in shard.inner(r.width, i * r.width))
        product("recurrent.in", ParameterShard(rows=every))
        product("recurrent.conv", ParameterShard(rows=own))
        found["recurrent.select.weight"] = ParameterShard(columns=own)
        rows("dt", "decay", "time", "skip", of=own)
        sum_of_parts("recurrent.out", own)
        return found
    heads, v, at = recurrent_heads(r, shard), r.value_dim, r.v_size
    sum_of_parts("recurrent.out", heads.rows(v))
    if isinstance(r, Mamba2Spec):
        size = r.num_groups * r.key_dim

        def channels(begin: int) -> tuple[Range, ...]:
            """The rank's channels of x, B and C."""
            of = (heads.kv_rows(r.key_dim, begin + at + i * size) for i in range(2))
            return (*heads.rows(v, begin), *itertools.chain(*of))

        times = () if isinstance(r, LightningSpec) else heads.rows(1, r.time_at)
        product("recurrent.in", ParameterShard(rows=(*heads.rows(v), *channels(at), *times)))
        product("recurrent.conv", ParameterShard(rows=channels(0)))
        rows("decay", "time", "skip", of=heads.rows(1))
        rows("norm", of=heads.rows(v))
        return found
    keys = (*heads.kv_rows(r.key_dim), *heads.kv_rows(r.key_dim, r.q_size))
    mixed = (*keys, *heads.rows(v, 2 * r.q_size))
    decays = r.decay_size // r.num_heads
    z = () if r.latent is not None else heads.rows(v, r.conv_channels)
    a = () if r.latent is not None else heads.rows(decays, r.num_heads)
    rows("in", of=(*mixed, *z))
    rows("gates", of=(*heads.rows(1), *a))
    rows("conv", of=mixed)
    rows("decay", of=heads.rows(1))
    rows("time", "decay_up", of=heads.rows(decays))
    rows("gate_up", of=heads.rows(v))
    return found


def _inner_rows(m: DenseSpec, shard: Shard) -> tuple[Range, ...]:
    """Rows of `up` on this rank: its gates, then its ups."""
    return tuple(
        part
        for i in range(1 + m.gated)
        for part in shard.inner(m.intermediate_size, i * m.intermediate_size)
    )


# --- Stages --------------------------------------------------------------------------


def even_stages(spec: ModelSpec, count: int) -> tuple[int, ...]:
    """Number of layers in each of `count` stages. The stage that reads the most weights per token
    is made as small as possible. The output head belongs to the last stage."""
    sizes = [_read(layer, spec.hidden_size) for layer in spec.layers]
    sizes[-1] += spec.vocab_size * spec.embed_width if spec.generates else 0
    ends = [0, *itertools.accumulate(sizes)]
    # By number of layers assigned: (cost of the largest stage so far, the stages).
    best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}
    for stage in range(count):
        found: dict[int, tuple[int, tuple[int, ...]]] = {}
        for end in range(stage + 1, len(sizes) - (count - stage) + 2):
            before = [(at, *known) for at, known in best.items() if at < end]
            found[end] = min(
                (max(most, ends[end] - ends[at]), (*own, end - at)) for at, most, own in before
            )
        best = found
    return best[len(sizes)][1]


def _read(layer: LayerSpec, hidden_size: int) -> int:
    """Number of parameters that the layer reads for one token."""
    total, m = layer.num_parameters(hidden_size), layer.mlp
    if isinstance(m, MoESpec):
        one = sum(map(math.prod, m.expert.shapes(hidden_size).values()))
        total -= (m.num_local_experts - min(m.num_local_experts, m.num_experts_per_token)) * one
    return total


# --- What can't be split -------------------------------------------------------------


def check_split(spec: ModelSpec, *, tensor: int, experts: int) -> None:
    """Raise ConfigError if there are more `tensor` ranks than heads, or more `experts` ranks than experts."""
    for layer in spec.all_layers if tensor > 1 else ():
        a, r = layer.attention, layer.recurrent
        if r is not None:
            of = isinstance(r, GatedDeltaSpec | Mamba2Spec)
            what, most = ("heads", r.num_heads) if of else ("channels", r.conv_channels)  # type: ignore[union-attr]
            _check_enough(f"{what} of recurrent layers", most, tensor, "tensor_parallel_size")
        if isinstance(r, Mamba2Spec) and r.norm is not None:
            _check_norm(r, tensor)
        inner = getattr(a, "out_norm", None) or getattr(layer.mlp, "down_norm", None)
        if getattr(a, "differential", None) is not None:
            raise ConfigError(
                f"tensor_parallel_size={tensor}: the model subtracts heads of its second half from those of its first; "
                "use pipeline_parallel_size or replicas",
                field="tensor_parallel_size",
            )
        if inner is not None:
            raise ConfigError(
                f"tensor_parallel_size={tensor}: the model norms what its output products read, over all ranks' "
                "numbers; use pipeline_parallel_size or replicas",
                field="tensor_parallel_size",
            )
        if a is not None:
            _check_enough("num_attention_heads", a.num_heads, tensor, "tensor_parallel_size")
        if isinstance(a, CompressedAttentionSpec) and a.num_out_groups % tensor:
            raise ConfigError(
                f"tensor_parallel_size={tensor} must divide the model's o_groups ({a.num_out_groups})",
                field="tensor_parallel_size",
            )
    mixtures = [layer.mlp for layer in spec.all_layers if isinstance(layer.mlp, MoESpec)]
    if experts > 1 and not mixtures:
        raise ConfigError(
            f"expert_parallel_size={experts}: the model has no experts; use tensor_parallel_size",
            field="expert_parallel_size",
        )
    for m in mixtures if experts > 1 else ():
        _check_enough("num_experts", m.num_experts, experts, "expert_parallel_size")


def _check_norm(r: Mamba2Spec, tensor: int) -> None:
    """Raise ConfigError if the groups of a norm are not whole groups of heads, which ranks hold."""
    if r.num_groups % r.norm_groups:
        raise ConfigError(
            f"tensor_parallel_size={tensor}: the model's mamba_n_groups ({r.num_groups}) are no multiple of the norm's "
            f"{r.norm_groups}; use pipeline_parallel_size or replicas",
            field="tensor_parallel_size",
        )


def _check_enough(name: str, total: int, size: int, setting: str) -> None:
    if total < size:
        raise ConfigError(
            f"{setting}={size} is more than the model's {name} ({total}); lower it", field=setting
        )
