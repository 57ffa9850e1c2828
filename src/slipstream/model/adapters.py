"""Adapters (LoRA) of a model on the host: reads PEFT checkpoints into slots (`spec.adapter_slots`).

A host copy of an adapter omits the unused parts of a slot (`HostAdapter`). The base weights' table
of names gives each tensor's place: a part of a linear layer, in our order of rows. Where a rank has
columns of `down`, the adapter's result is a partial sum over ranks, as the linear layer's is.
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
from slipstream.kernels.weights.adapters import LoRAWeights
from slipstream.kernels.weights.forms import Linear
from slipstream.model.decoder import Decoder
from slipstream.model.layers.attention import Attention, BlockSparseAttention, CompressedAttention
from slipstream.model.layers.feed_forward import MLP
from slipstream.model.layers.streams import Recall
from slipstream.model.load.sharding import part_of
from slipstream.model.load.weights import transform
from slipstream.spec.adapter_slots import ALONE, SlotLayout, SlotPlace, adapted_stem
from slipstream.spec.adapters import WEIGHTS_NAME, AdapterConfig, read_adapter_config
from slipstream.spec.description import ModelDescription
from slipstream.spec.families.names import canonical
from slipstream.spec.parallel import Shard
from slipstream.spec.parameters import (
    Placement,
    Regroup,
    Scale,
    SwapGateUp,
    Transpose,
    Ungroup,
    Unpermute,
)

_TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")


def adapted_products(decoder: Decoder) -> dict[str, Linear]:
    """The decoder's linear layers that an adapter can change, by the names of their weights."""
    found: dict[str, Linear | None] = {}
    for i, layer in zip(decoder.spec.local_layers, decoder.layers, strict=True):
        a, m, r = layer.attention, layer.mlp, layer.recurrent
        own: dict[str, Linear | None] = {}
        if r is not None:
            own = {f"recurrent.{part}": w for part, w in r.products.items()}
        if isinstance(a, Attention):
            own |= {"attention.qkv": a.qkv, "attention.out": a.out}
            own["attention.index"] = a.index if isinstance(a, BlockSparseAttention) else None
        elif isinstance(a, CompressedAttention):
            parts = {x: getattr(a, x) for x in ("q_latent", "q", "latent", "out", "compress")}
            own |= {f"attention.{key}": w for key, w in parts.items()}
            for key, w in zip(("q", "weights"), a.index or (), strict=False):
                own[f"attention.index_{key}"] = w
        elif a is not None:
            own |= {
                "attention.q_latent": a.q_latent,
                "attention.q": a.q,
                "attention.latent": a.latent,
                "attention.gate": a.gate,
                "attention.out": a.out,
            }
            if (x := a.index) is not None:
                parts = {"q": x.q, "k": x.k, "weights": x.weights}
                own |= {f"attention.index_{key}": w for key, w in parts.items()}
        if isinstance(m, MLP):
            own |= {"mlp.up": m.up, "mlp.down": m.down}
        elif m is not None:
            own |= {"router": m.router, "shared_weight": m.shared_weight}
            own |= (
                {} if m.shared is None else {"shared.up": m.shared.up, "shared.down": m.shared.down}
            )
        if (more := layer.own_input) is not None:
            own |= {"own_input.gate": more.gate, "own_input.project": more.project}
        for part, gate in layer.input_gates.items():
            own |= {f"input_gate.{part}_down": gate.down, f"input_gate.{part}_up": gate.up}
        if isinstance(layer.streams, Recall):
            own |= {"streams.join": layer.streams.join}
        found |= {f"layers.{i}.{stem}.weight": w for stem, w in own.items()}
    return {name: w for name, w in found.items() if w is not None}


@dataclass(frozen=True, slots=True)
class Place:
    """A linear layer and the location of its adapter weights in a slot."""

    linear: Linear
    at: SlotPlace


@dataclass(frozen=True, slots=True)
class HostAdapter:
    """An adapter's weights in one contiguous tensor, with their spans in a slot. All else in the
    slot is zero."""

    numbers: Tensor  # in pinned memory if copies to the device are asynchronous
    spans: tuple[slice, ...]
    parts: frozenset[tuple[str, int]]
    """(name of the linear layer inside its decoder layer, index of its part) of each adapted part.
    Covers all ranks, so every rank has the same set."""

    def copy_to(self, slot: Tensor) -> None:
        """Copies the adapter into `slot` [slot_size], on the stream that runs the step."""
        slot.zero_()
        at = 0
        for span in self.spans:
            size = span.stop - span.start
            slot[span].copy_(self.numbers[at : at + size], non_blocking=True)
            at += size


@dataclass(frozen=True, slots=True)
class _Piece:
    """A checkpoint tensor and its place in a slot: rows of `columns` elements, each padded with
    zeros."""

    name: str
    begin: int
    columns: int
    value: Tensor

    @property
    def size(self) -> int:
        return len(self.value) * self.columns


class AdapterLayout:
    """Positions of the linear layers' adapter weights in a slot, for adapters of rank `max_rank` or
    lower per part.

    `decoder` holds the `shard`'s part of the model.
    """

    def __init__(
        self, description: ModelDescription, decoder: Decoder, max_rank: int, shard: Shard = ALONE
    ) -> None:
        self.max_rank, self.description, self._layout = (
            max_rank,
            description,
            SlotLayout(description, max_rank, shard),
        )
        products = adapted_products(decoder)
        self.places = {name: Place(products[name], at) for name, at in self._layout.places.items()}
        self.slot_size = self._layout.size
        self._shared = dict(description.spec.shared)

    def weights(
        self, slots: Tensor, place: Place, live: Collection[tuple[str, int]] | None = None
    ) -> LoRAWeights:
        """Returns views of one linear layer's adapter weights in `slots` [N, slot_size].

        `live` limits them to the parts that the adapters have (`HostAdapter.parts`).
        """
        at, rank = place.at, self.max_rank
        num = len(at.starts)
        middle = at.begin + num * rank * at.inner
        down = slots[:, at.begin : middle].unflatten(1, (num * rank, at.inner))
        up = slots[:, middle : middle + at.out * rank].unflatten(1, (at.out, rank))
        parts = tuple(
            p for p, number in enumerate(at.numbers) if live is None or (at.stem, number) in live
        )
        return LoRAWeights(down, up, at.starts, parts)

    def read(self, folder: Path, dtype: torch.dtype, *, pinned: bool = False) -> HostAdapter:
        """Reads a PEFT checkpoint. AdapterError for an invalid one."""
        try:
            config = read_adapter_config(folder)
            if config.most_ranks > self.max_rank:
                message = f"the adapter has rank {config.most_ranks} and max_lora_rank is {self.max_rank}; raise max_lora_rank"
                raise AdapterError(message, field="max_lora_rank")
            return self._filled(*self._read(folder, config), dtype, pinned)
        except (CheckpointError, UnsupportedModelError) as error:
            raise AdapterError(error.message, field=error.field) from error

    def _read(
        self, folder: Path, config: AdapterConfig
    ) -> tuple[list[_Piece], frozenset[tuple[str, int]]]:
        """Reads this rank's tensors of the checkpoint. Returns (pieces, `HostAdapter.parts`)."""
        layout = self._layout
        found = list[_Piece]()
        sides = set[tuple[str, str]]()
        parts = set[tuple[str, int]]()
        for name, value in _tensors(folder):
            match = _TENSOR.fullmatch(name)
            if match is None:
                raise AdapterError(
                    f"the adapter has a tensor {name!r}, which is not a LoRA tensor (lora_A, lora_B)",
                    field=name,
                )
            module, side = match[1], match[2]
            part = self._part(module, name)
            rank, (num_rows, inner) = config.rank_of(module), layout.whole[part.target]
            num_rows = num_rows - part.start if part.rows is None else part.rows
            expected = (rank, inner) if side == "A" else (num_rows, rank)
            if tuple(value.shape) != expected:
                raise AdapterError(
                    f"the adapter's tensor {name!r} has shape {list(value.shape)}, but this model with rank {rank} needs "
                    f"{list(expected)}; it was trained for another base model, or its config belongs to another adapter",
                    field=name,
                )
            sides.add((module, side))
            parts.add((adapted_stem(part.target), layout.numbers[part.target, part.start]))
            own, place = layout.own.get(part), layout.places.get(part.target)
            if own is None or place is None:
                continue  # all of it is on another rank
            number = place.starts.index(own.start)
            if side == "A":
                begin, columns = place.begin + number * self.max_rank * place.inner, place.inner
                value = part_of(value, ((0, rank),), own.columns)
            else:
                begin = place.begin + len(place.starts) * self.max_rank * place.inner
                columns = self.max_rank
                begin += own.start * self.max_rank
                value = part_of(
                    _reordered(value, part), own.rows or ((0, num_rows),), None
                ).float() * config.scale_of(module)
            found.append(_Piece(name, begin, columns, value))
        for module, side in sides:
            other = "B" if side == "A" else "A"
            if (module, other) not in sides:
                raise AdapterError(
                    f"the adapter has lora_{side} of {module}, but lacks its lora_{other}",
                    field=module,
                )
        if not sides:
            raise AdapterError(f"{folder / WEIGHTS_NAME} holds no tensors", field=WEIGHTS_NAME)
        return sorted(found, key=lambda piece: piece.begin), frozenset(parts)

    def _filled(
        self,
        pieces: list[_Piece],
        parts: frozenset[tuple[str, int]],
        dtype: torch.dtype,
        pinned: bool,
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
            name = next(
                p.name
                for p, end in zip(pieces, ends, strict=True)
                if not _are_finite(numbers[end - p.size : end])
            )
            raise AdapterError(
                f"the adapter's tensor {name!r} holds numbers that are not finite", field=name
            )
        return HostAdapter(numbers, tuple(spans), parts)

    def _part(self, module: str, name: str) -> Placement:
        """Finds the part of a linear layer to which a module's adapter belongs. AdapterError if
        there is none."""
        key = canonical(f"{module}.weight", self.description.family.prefixes, self._layout.names)
        part = None if key is None else self._layout.names[key]
        if key in self._shared:
            why = "layers share this module; train without it"
            raise AdapterError(f"the adapter has {name!r}: {why}", field=module)
        if part is not None and adapted_stem(part.target) and part.copies is None:
            assert part.transform is None or isinstance(
                part.transform, Transpose | Ungroup | Unpermute | SwapGateUp | Regroup | Scale
            )
            return part
        if part is None:
            why = f"this model ({self.description.spec.family}) has no such module; it was trained for another base model"
        elif part.target.startswith(("head.", "embed", "layer_inputs.")):
            why = "adapters of embeddings and output head are not supported; train without it"
        elif part.target.startswith("media."):
            why = "adapters of the image encoder are not supported; train without it"
        elif ".experts." in part.target:
            why = "adapters of experts are not supported; train without them"
        else:
            why = "it is part of something computed in one piece here; train without it"
        raise AdapterError(f"the adapter has {name!r}: {why}", field=module)


def _reordered(up: Tensor, part: Placement) -> Tensor:
    """lora_B [out, r] in our order of rows. The B of a transposed weight is not transposed."""
    return up if isinstance(part.transform, Transpose) else transform(up, part.transform)


def _are_finite(numbers: Tensor) -> bool:
    """Whether all elements are finite, from their minimum and maximum, which are NaN if any element
    is.

    It takes a sixth of the time of testing each element.
    """
    return not len(numbers) or all(bool(x.isfinite()) for x in numbers.aminmax())


def _tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    from safetensors import SafetensorError, safe_open

    path = folder / WEIGHTS_NAME
    if not path.is_file():
        pickled = (folder / "adapter_model.bin").is_file()
        why = (
            "; adapter_model.bin is a pickle, which is never loaded: save it with safetensors"
            if pickled
            else ""
        )
        raise CheckpointError(f"{folder} holds no {WEIGHTS_NAME}{why}", field=WEIGHTS_NAME)
    try:
        with safe_open(path, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (no dict)
                yield name, opened.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} can't be read: {error}", field=WEIGHTS_NAME) from error
