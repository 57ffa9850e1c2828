"""Bytes and operations of a decode step, estimated from a model's description alone: the roofline's axis. No torch.

A step reads each weight that it needs once and each sequence's cache once, and multiplies and adds for each token and weight
(2 operations), and for each token, head and cached position (4 · head_dim). What is written, norms and activations are
left out: together they are below a few percent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slipstream.plan.memory import weights_bytes
from slipstream.spec.model import MoESpec
from slipstream.spec.parameters import parameters
from slipstream.spec.scheme import SCHEMES, Scheme

if TYPE_CHECKING:
    from slipstream.spec.description import ModelDescription


@dataclass(frozen=True, slots=True)
class StepCost:
    """Of one decode step of all its sequences together."""

    num_bytes: float
    num_flops: float


def decode_step(
    description: ModelDescription, *, batch_size: int, context: float, scheme: str | None = None, kv_bytes: int = 2
) -> StepCost:
    """A step of `batch_size` sequences that hold `context` tokens each. `scheme` rounds the weights at load; None: they are
    held as the checkpoint stores them. `kv_bytes` is the size of a number in the cache."""
    spec = description.spec
    shapes = {name: math.prod(shape) for name, shape in parameters(spec).items()}
    looked_up = 0 if spec.tied_embeddings else sum(size for name, size in shapes.items() if name.startswith("embed."))
    read = active = sum(shapes.values()) - looked_up
    for layer in spec.layers:
        if isinstance(layer.mlp, MoESpec):
            experts = sum(p.copies * p.rows * p.inner for p in layer.weight_shapes(spec.hidden_size) if p.copies > 1)
            share = layer.mlp.num_experts_per_token / layer.mlp.num_experts
            active -= round(experts * (1 - share))
            read -= round(experts * (1 - share) ** batch_size)  # experts that no token of the batch chose
    attention = sum(4 * layer.attention.num_heads * layer.attention.head_dim for layer in spec.layers)
    held = stored_bytes(description) if scheme is None else sum(_rounded_bytes(description, SCHEMES[scheme]).values())
    return StepCost(
        num_bytes=held * read / sum(shapes.values()) + batch_size * context * spec.kv_bytes_per_token(kv_bytes),
        num_flops=batch_size * (2 * active + attention * context),
    )


def _rounded_bytes(description: ModelDescription, scheme: Scheme) -> dict[str, int]:
    return weights_bytes(description.spec, 2, scheme)


def stored_bytes(description: ModelDescription) -> int:
    """The bytes of a checkpoint's weights. One that is a config alone has 2 bytes a parameter."""
    if description.stored:
        return sum(kind.num_bytes for kind in description.stored)
    files = sum(file.stat().st_size for file in description.path.glob("*.safetensors"))
    return files or 2 * description.spec.num_parameters
