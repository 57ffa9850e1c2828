"""The layout of an adapter's slot: the place of each product's numbers, and the slot's size in
bytes. No torch.

A slot is one flat piece of memory with space for all products that can have an adapter. With
several ranks, a rank's slot has the part of an adapter that its products need: rows of `up` where
their outputs are split, columns of `down` where their inputs are.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from slipstream.spec.description import ModelDescription
from slipstream.spec.parallel import ParameterShard, Range, Shard, cuts, split_shapes
from slipstream.spec.parameters import Placement, Shape, parameters

ALONE = Shard(0, 1, tensor=False)
_LAYER = re.compile(r"layers\.\d+\.(.+)\.weight")
RECURRENT_PRODUCTS = (
    *("in", "out", "gates", "decay_latent", "decay_up", "gate_latent", "gate_up"),
    *("select", "dt"),
)
_STEMS = frozenset(
    (
        *(
            "attention.qkv",
            "attention.q_latent",
            "attention.q",
            "attention.latent",
            "attention.gate",
            "attention.out",
            "mlp.up",
            "mlp.down",
        ),
        *("router", "shared_weight", "shared.up", "shared.down"),
        *("own_input.gate", "own_input.project", "streams.join"),
        *(f"recurrent.{part}" for part in RECURRENT_PRODUCTS),
        *("attention.index_q", "attention.index_k", "attention.index_weights"),
    )
)
"""Products of a layer that can have an adapter."""


def adapted_stem(name: str) -> str:
    """The part of a weight's name inside its layer, if that product can have an adapter; otherwise
    ""."""
    match = _LAYER.fullmatch(name)
    return match[1] if match is not None and match[1] in _STEMS else ""


@dataclass(frozen=True, slots=True)
class OwnPart:
    """A rank's share of a part of a product. Its rows begin at `start` of the rank's parameter.
    They are `rows` of the whole part, and have `columns` of its inputs. None: all."""

    start: int
    rows: tuple[Range, ...] | None
    columns: tuple[Range, ...] | None


@dataclass(frozen=True, slots=True)
class SlotPlace:
    """The place of a product's numbers in a slot. `starts` are the first rows of its parts, and
    `numbers` the numbers of these parts in the whole product."""

    stem: str  # the product's name in its layer
    inner: int
    out: int
    starts: tuple[int, ...]
    numbers: tuple[int, ...]
    begin: int  # offset of `down` in the slot; `up` follows it


class SlotLayout:
    """The places of all products in a slot, for adapters of up to `max_rank` ranks in each part.
    The products are the whole model's, or the `shard`'s part of them."""

    def __init__(self, description: ModelDescription, max_rank: int, shard: Shard = ALONE) -> None:
        self.names = description.family.names(description.spec)
        self.whole = parameters(description.spec)
        shapes, cut = split_shapes(description.spec, shard), cuts(description.spec, shard)
        self.own = {
            place: own
            for place in self.names.values()
            if place.target in shapes
            and (own := _part_of(place, cut.get(place.target), self.whole)) is not None
        }
        starts = dict[str, set[int]]()
        for place in self.names.values():
            starts.setdefault(place.target, set()).add(place.start)
        self.numbers = {
            (target, start): number
            for target, found in starts.items()
            for number, start in enumerate(sorted(found))
        }
        parts = dict[str, dict[int, int]]()  # numbers by the first rows on this rank
        for place, own in self.own.items():
            parts.setdefault(place.target, {})[own.start] = self.numbers[place.target, place.start]
        self.places: dict[str, SlotPlace] = {}
        self.size = 0
        for name, (out, inner) in (
            (name, shape) for name, shape in shapes.items() if adapted_stem(name)
        ):
            if name not in parts:  # this rank has only zeros of it
                continue
            own_starts, numbers = zip(*sorted(parts[name].items()), strict=True)
            self.places[name] = SlotPlace(
                adapted_stem(name), inner, out, own_starts, numbers, self.size
            )
            # Triton reads 16 bytes at a time only where 16 divides the distance of slots.
            self.size += -(-(len(own_starts) * inner + out) * max_rank // 16) * 16


def _part_of(
    place: Placement, cut: ParameterShard | None, whole: dict[str, Shape]
) -> OwnPart | None:
    """A rank's share of a part of a product; None if it has nothing of it."""
    if cut is None:
        return OwnPart(place.start, None, None)
    found = cut.placed(place, whole[place.target][0])
    return None if found is None else OwnPart(found[0].start, found[1], cut.columns)
