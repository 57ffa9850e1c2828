"""Layout of a LoRA adapter's slot: where each linear layer's weights begin, and the slot's size in
bytes. No torch.

A slot is one flat buffer with room for every linear layer that an adapter can change. With several
ranks, a rank's slot has the part of an adapter that its shard needs: rows of `up` where their
outputs are split, columns of `down` where their inputs are.
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
        *("attention.index", "attention.index_q", "attention.index_k", "attention.index_weights"),
        *(f"input_gate.{part}_{x}" for part in ("attention", "mlp") for x in ("down", "up")),
    )
)
"""Linear layers, by their name inside a decoder layer, that can have an adapter."""


def adapted_stem(name: str) -> str:
    """Name of the linear layer inside its decoder layer if an adapter can change it; otherwise
    ""."""
    match = _LAYER.fullmatch(name)
    return match[1] if match is not None and match[1] in _STEMS else ""


@dataclass(frozen=True, slots=True)
class OwnPart:
    """Part of a linear layer that a rank holds. Its rows begin at row `start` of the rank's parameter. `rows`
    and `columns` select rows and input columns of the whole layer; None selects all."""

    start: int
    rows: tuple[Range, ...] | None
    columns: tuple[Range, ...] | None


@dataclass(frozen=True, slots=True)
class SlotPlace:
    """Position of a linear layer's adapter weights in a slot. `starts`: first row of each stacked
    part (such as q, k, v). `numbers`: index of each part in the whole, unsharded layer."""

    stem: str  # name of the linear layer inside its decoder layer
    inner: int
    out: int
    starts: tuple[int, ...]
    numbers: tuple[int, ...]
    begin: int  # offset of `down` in the slot; `up` follows it


class SlotLayout:
    """Positions of all linear layers in a slot, for adapters of rank `max_rank` or lower in each
    part. The layers are the whole model's, or those of the tensor-parallel `shard`."""

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
        parts = dict[str, dict[int, int]]()  # parts' indices by their first rows on this rank
        for place, own in self.own.items():
            parts.setdefault(place.target, {})[own.start] = self.numbers[place.target, place.start]
        self.places: dict[str, SlotPlace] = {}
        self.size = 0
        for name, (out, inner) in (
            (name, shape) for name, shape in shapes.items() if adapted_stem(name)
        ):
            if name not in parts:  # this rank holds only padding of the layer
                continue
            own_starts, numbers = zip(*sorted(parts[name].items()), strict=True)
            self.places[name] = SlotPlace(
                adapted_stem(name), inner, out, own_starts, numbers, self.size
            )
            # Triton loads 16 bytes at once only if the stride between slots is a multiple of 16.
            self.size += -(-(len(own_starts) * inner + out) * max_rank // 16) * 16


def _part_of(
    place: Placement, cut: ParameterShard | None, whole: dict[str, Shape]
) -> OwnPart | None:
    """The rank's share of one part of a linear layer; None if the rank holds nothing of it."""
    if cut is None:
        return OwnPart(place.start, None, None)
    found = cut.placed(place, whole[place.target][0])
    return None if found is None else OwnPart(found[0].start, found[1], cut.columns)
