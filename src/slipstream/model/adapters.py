"""Adapters of a model on the host: where each product's numbers stand in a slot, and reading PEFT's checkpoints into one.

A slot is one flat piece of memory with room for all products that can have an adapter. On the host an adapter is kept without
the gaps that it leaves there (`HostAdapter`). A tensor of the checkpoint finds its place by the table of names that the base
weights have: a part of a product in our order of rows.

A rank of several has of an adapter what its products need: rows of `up` where their outputs are shared out, columns of `down`
where their inputs are. In the latter case the adapter's result is a part of the sum over ranks, as the product's is.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from slipstream.errors import AdapterError, CheckpointError, UnsupportedModelError
from slipstream.kernels.adapters import LoRAWeights
from slipstream.kernels.weights import Linear
from slipstream.model.checkpoint import canonical
from slipstream.model.decoder import Decoder
from slipstream.model.layers import MLP, Attention, MoE
from slipstream.model.sharding import part_of
from slipstream.model.weights import transform
from slipstream.spec.adapters import WEIGHTS_NAME, AdapterConfig, read_adapter_config
from slipstream.spec.description import ModelDescription
from slipstream.spec.parallel import Cut, Range, Shard, cuts, split_shapes
from slipstream.spec.parameters import Placement, Swap, Transpose, Ungroup, Unpermute, parameters

_TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_LAYER = re.compile(r"layers\.\d+\.(.+)\.weight")
_STEMS = frozenset(
    (
        *("attention.qkv", "attention.q_latent", "attention.q", "attention.latent", "attention.out", "mlp.up", "mlp.down"),
        *("router", "shared_weight", "shared.up", "shared.down"),
    )
)
"""Of products that can have an adapter."""
ALONE = Shard(0, 1, tensor=False)


def adapted_products(decoder: Decoder) -> dict[str, Linear]:
    """The decoder's products that can have an adapter, by the names of their weights."""
    found: dict[str, Linear | None] = {}
    for i, layer in zip(decoder.spec.held, decoder.layers, strict=True):
        a, m = layer.attention, layer.mlp
        own: dict[str, Linear | None]
        if isinstance(a, Attention):
            own = {"attention.qkv": a.qkv, "attention.out": a.out}
        else:
            own = {"attention.q_latent": a.q_latent, "attention.q": a.q, "attention.latent": a.latent, "attention.out": a.out}
        if isinstance(m, MLP):
            own |= {"mlp.up": m.up, "mlp.down": m.down}
        else:
            assert isinstance(m, MoE)
            own |= {"router": m.router, "shared_weight": m.shared_weight}
            own |= {} if m.shared is None else {"shared.up": m.shared.up, "shared.down": m.shared.down}
        found |= {f"layers.{i}.{stem}.weight": w for stem, w in own.items()}
    return {name: w for name, w in found.items() if w is not None}


@dataclass(frozen=True, slots=True)
class Place:
    """Where a product's numbers stand in a slot. `starts` are its parts' first rows, and `numbers` say which of the whole
    product's parts they are."""

    stem: str  # of the product in its layer
    linear: Linear
    inner: int
    out: int
    starts: tuple[int, ...]
    numbers: tuple[int, ...]
    begin: int  # of `down` in the slot; `up` follows it


@dataclass(frozen=True, slots=True)
class HostAdapter:
    """An adapter's numbers, side by side, with where they stand in a slot. Everything else there is zero."""

    numbers: Tensor  # pinned where copies to the device are asynchronous
    spans: tuple[slice, ...]
    parts: frozenset[tuple[str, int]]
    """Stems of products, and the numbers of their parts, that it has weights for: on whatever rank, so all ranks know the
    same."""

    def copy_to(self, slot: Tensor) -> None:
        """Into `slot` [slot_size], on the stream of the step."""
        slot.zero_()
        at = 0
        for span in self.spans:
            size = span.stop - span.start
            slot[span].copy_(self.numbers[at : at + size], non_blocking=True)
            at += size


@dataclass(frozen=True, slots=True)
class _Piece:
    """A tensor of a checkpoint, and where it stands in a slot: rows of `columns` numbers, zeros behind the tensor's own."""

    name: str
    begin: int
    columns: int
    value: Tensor

    @property
    def size(self) -> int:
        return len(self.value) * self.columns


@dataclass(frozen=True, slots=True)
class _Own:
    """What this rank has of a part of a product: its rows from `start` on, which are `rows` of the whole part, and `columns` of
    its inputs. None: all."""

    start: int
    rows: tuple[Range, ...] | None
    columns: tuple[Range, ...] | None


class Layout:
    """The places of all products in a slot, for adapters of up to `max_rank` ranks a part. `decoder` is the `shard`'s part of
    the model."""

    def __init__(self, description: ModelDescription, decoder: Decoder, max_rank: int, shard: Shard = ALONE) -> None:
        self.max_rank = max_rank
        self.description = description
        self.names = description.family.names(description.spec)
        self._whole = parameters(description.spec)
        shapes, cut = split_shapes(description.spec, shard), cuts(description.spec, shard)
        self._own = {
            place: own
            for place in self.names.values()
            if place.target in shapes and (own := self._part_of(place, cut.get(place.target))) is not None
        }
        starts = dict[str, set[int]]()
        for place in self.names.values():
            starts.setdefault(place.target, set()).add(place.start)
        self._numbers = {
            (target, start): number for target, found in starts.items() for number, start in enumerate(sorted(found))
        }
        parts = dict[str, dict[int, int]]()  # numbers by the first rows here
        for place, own in self._own.items():
            parts.setdefault(place.target, {})[own.start] = self._numbers[place.target, place.start]
        self.places: dict[str, Place] = {}
        end = 0
        for name, linear in adapted_products(decoder).items():
            if name not in parts:  # this rank has nothing of it but zeros
                continue
            out, inner = shapes[name]
            own_starts, numbers = zip(*sorted(parts[name].items()), strict=True)
            self.places[name] = Place(_stem(name), linear, inner, out, own_starts, numbers, end)
            # Triton reads 16 bytes at a time only where 16 divides the distance of slots.
            end += -(-(len(own_starts) * inner + out) * max_rank // 16) * 16
        self.slot_size = end

    def weights(self, slots: Tensor, place: Place, live: Collection[tuple[str, int]] | None = None) -> LoRAWeights:
        """Of one product, the adapters in `slots` [N, slot_size]. `live`: the parts that they have (`HostAdapter.parts`)."""
        num, rank = len(place.starts), self.max_rank
        middle = place.begin + num * rank * place.inner
        down = slots[:, place.begin : middle].unflatten(1, (num * rank, place.inner))
        up = slots[:, middle : middle + place.out * rank].unflatten(1, (place.out, rank))
        parts = tuple(p for p, number in enumerate(place.numbers) if live is None or (place.stem, number) in live)
        return LoRAWeights(down, up, place.starts, parts)

    def read(self, folder: Path, dtype: torch.dtype, *, pinned: bool = False) -> HostAdapter:
        """A PEFT checkpoint. AdapterError says what is wrong with it."""
        try:
            config = read_adapter_config(folder)
            if config.most_ranks > self.max_rank:
                message = f"the adapter has rank {config.most_ranks} and max_lora_rank is {self.max_rank}; start with more"
                raise AdapterError(message, field="max_lora_rank")
            return self._filled(*self._read(folder, config), dtype, pinned)
        except (CheckpointError, UnsupportedModelError) as error:
            raise AdapterError(error.message, field=error.field) from error

    def _read(self, folder: Path, config: AdapterConfig) -> tuple[list[_Piece], frozenset[tuple[str, int]]]:
        """What is here of it, and `HostAdapter.parts`."""
        found, sides, parts = list[_Piece](), set[tuple[str, str]](), set[tuple[str, int]]()
        for name, value in _tensors(folder):
            match = _TENSOR.fullmatch(name)
            if match is None:
                raise AdapterError(f"the adapter has a tensor {name!r}, which is none of a LoRA's (lora_A, lora_B)", field=name)
            module, side = match[1], match[2]
            part = self._part(module, name)
            rank, (num_rows, inner) = config.rank_of(module), self._whole[part.target]
            num_rows = num_rows - part.start if part.rows is None else part.rows
            expected = (rank, inner) if side == "A" else (num_rows, rank)
            if tuple(value.shape) != expected:
                raise AdapterError(
                    f"the adapter's tensor {name!r} has shape {list(value.shape)}, and this model with rank {rank} asks for "
                    f"{list(expected)}; it was trained for another base model, or its config is not its own",
                    field=name,
                )
            sides.add((module, side))
            parts.add((_stem(part.target), self._numbers[part.target, part.start]))
            own, place = self._own.get(part), self.places.get(part.target)
            if own is None or place is None:
                continue  # another rank has it
            number = place.starts.index(own.start)
            if side == "A":
                begin, columns = place.begin + number * self.max_rank * place.inner, place.inner
                value = part_of(value, ((0, rank),), own.columns)
            else:
                begin, columns = place.begin + len(place.starts) * self.max_rank * place.inner, self.max_rank
                begin += own.start * self.max_rank
                value = part_of(_reordered(value, part), own.rows or ((0, num_rows),), None).float() * config.scale_of(module)
            found.append(_Piece(name, begin, columns, value))
        for module, side in sides:
            other = "B" if side == "A" else "A"
            if (module, other) not in sides:
                raise AdapterError(f"the adapter has lora_{side} of {module}, and lacks its lora_{other}", field=module)
        if not sides:
            raise AdapterError(f"{folder / WEIGHTS_NAME} holds no tensors", field=WEIGHTS_NAME)
        return sorted(found, key=lambda piece: piece.begin), frozenset(parts)

    def _filled(
        self, pieces: list[_Piece], parts: frozenset[tuple[str, int]], dtype: torch.dtype, pinned: bool
    ) -> HostAdapter:
        numbers = torch.empty(sum(p.size for p in pieces), dtype=dtype, pin_memory=pinned)
        spans, at = list[slice](), 0
        for piece in pieces:
            into = numbers[at : at + piece.size].view(-1, piece.columns)
            rank = piece.value.shape[1]
            into[:, :rank], into[:, rank:] = piece.value, 0
            at += piece.size
            joins = bool(spans) and spans[-1].stop == piece.begin
            begin = spans.pop().start if joins else piece.begin
            spans.append(slice(begin, piece.begin + piece.size))
        if not _are_finite(numbers):
            ends = itertools.accumulate(p.size for p in pieces)
            name = next(p.name for p, end in zip(pieces, ends, strict=True) if not _are_finite(numbers[end - p.size : end]))
            raise AdapterError(f"the adapter's tensor {name!r} holds numbers that are not finite", field=name)
        return HostAdapter(numbers, tuple(spans), parts)

    def _part_of(self, place: Placement, cut: Cut | None) -> _Own | None:
        """This rank's of a part of a product; None: it has nothing of it."""
        if cut is None:
            return _Own(place.start, None, None)
        found = cut.placed(place, self._whole[place.target][0])
        return None if found is None else _Own(found[0].start, found[1], cut.columns)

    def _part(self, module: str, name: str) -> Placement:
        """The part of a product that a module's adapter belongs to."""
        key = canonical(f"{module}.weight", self.description.family.prefixes, self.names)
        part = None if key is None else self.names[key]
        if part is not None and _stem(part.target) in _STEMS and part.copies is None:
            assert part.transform is None or isinstance(part.transform, Transpose | Ungroup | Unpermute | Swap)
            return part
        if part is None:
            why = f"this model ({self.description.spec.family}) has no such module; it was trained for another base model"
        elif part.target.startswith(("head.", "embed")):
            why = "adapters of embeddings and output head are not built; train without it"
        elif part.target.startswith("vision."):
            why = "adapters of the image encoder are not built; train without it"
        elif ".experts." in part.target:
            why = "adapters of experts are not built; train without them"
        else:
            why = "it is part of something computed in one piece here; train without it"
        raise AdapterError(f"the adapter has {name!r}: {why}", field=module)


def _stem(name: str) -> str:
    """Of a product of a layer; empty: it is none."""
    match = _LAYER.fullmatch(name)
    return "" if match is None else match[1]


def _reordered(up: Tensor, part: Placement) -> Tensor:
    """lora_B [out, r] with our order of rows. What is stored transposed has B in the usual form."""
    return up if isinstance(part.transform, Transpose) else transform(up, part.transform)


def _are_finite(numbers: Tensor) -> bool:
    """By the lowest and the highest, which are no numbers if any is none: a sixth of the time of asking each."""
    return not len(numbers) or all(bool(x.isfinite()) for x in numbers.aminmax())


def _tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    from safetensors import SafetensorError, safe_open

    path = folder / WEIGHTS_NAME
    if not path.is_file():
        pickled = (folder / "adapter_model.bin").is_file()
        why = "; adapter_model.bin is a pickle, which is never loaded: save it with safetensors" if pickled else ""
        raise CheckpointError(f"{folder} holds no {WEIGHTS_NAME}{why}", field=WEIGHTS_NAME)
    try:
        with safe_open(path, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (no dict)
                yield name, opened.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} can't be read: {error}", field=WEIGHTS_NAME) from error
