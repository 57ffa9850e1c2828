"""Reads a model's tensors by GGUF's names, from a GGUF file or a folder."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from slipstream.errors import UnsupportedModelError
from slipstream.kernels.arrays import to_tensor
from slipstream.model.load.checkpoint import place, placed_shape, stored_shape
from slipstream.model.save import stored
from slipstream.model.stored.gguf_quants import dequantize_tensor
from slipstream.spec.description import ModelDescription
from slipstream.spec.families import find_gguf_family
from slipstream.spec.families.base import GGUFFamily
from slipstream.spec.parameters import Placement, parameters

WRITTEN_AS = {"mistral": "llama"}
"""llama.cpp's architecture for model types that it does not distinguish."""


def gguf_family_of(source: ModelDescription) -> GGUFFamily:
    """Description of the family in GGUF. UnsupportedModelError if llama.cpp has no such family."""
    found, name = source.family.gguf, source.family.model_type
    if found is None and name in WRITTEN_AS:
        found = find_gguf_family(WRITTEN_AS[name]).gguf
    if found is None:
        raise UnsupportedModelError(
            f"{name} has no form in GGUF; take another recipe", field="model_type"
        )
    return found


def places(source: ModelDescription) -> Mapping[str, Placement]:
    """Placements of tensors, by their names in the file."""
    return gguf_family_of(source).names(source.spec)


def stored_shapes(source: ModelDescription) -> dict[str, tuple[str, tuple[int, ...]]]:
    """(parameter, shape in the file) of each tensor, by its name in the file."""
    if source.gguf is not None:
        held = source.gguf.tensors
        return {name: (at.target, held[name].shape) for name, at in places(source).items()}
    shapes = parameters(source.spec)
    return {
        name: (at.target, tuple(stored_shape(placed_shape(shapes[at.target], at), at.transform)))
        for name, at in places(source).items()
    }


def read_tensor(
    source: ModelDescription, name: str, at: Placement, values: Mapping[str, Tensor]
) -> Tensor:
    """A tensor in the file's layout, float32. `values` are the model's parameters, by their own
    names."""
    device = values[at.target].device
    if source.gguf is not None:
        return to_tensor(dequantize_tensor(source.gguf, name, "float32")).to(device)
    return stored(values[at.target], at).float().contiguous()


def put(values: dict[str, Tensor], at: Placement, tensor: Tensor) -> None:
    """Write a tensor of the file into its parameter."""
    from slipstream.model.load.weights import transform

    place(values[at.target], at).copy_(transform(tensor, at.transform))


@torch.no_grad()
def unpacked(blocks: Tensor, kind: str, shape: tuple[int, ...]) -> Tensor:
    """Dequantize a tensor's bytes to float32, with our own reader."""
    from slipstream.model.stored.gguf_quants import dequantize
    from slipstream.spec.stored.gguf_types import BY_NAME

    raw = blocks.cpu().view(torch.uint8).numpy().reshape(-1, BY_NAME[kind].block_bytes)
    return to_tensor(dequantize(raw, kind, "float32")).view(shape)
