"""Bytes and operations of a decode step, *estimated* from a model's description: the roofline's axis. No torch.

They are counted by `costs.operators`, as the planner counts them. Writes, norms and activations are left out: together
they are at most a few percent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from slipstream.costs.memory import weights_bytes
from slipstream.costs.operators import attention_bytes, attention_operations, products, window_of
from slipstream.spec.scheme import SCHEMES
from slipstream.spec.stored.safetensors import weight_bytes

if TYPE_CHECKING:
    from slipstream.spec.description import ModelDescription


@dataclass(frozen=True, slots=True)
class DecodeCost:
    """Cost of one decode step of all sequences together."""

    num_bytes: float
    num_flops: float


def decode_step(
    description: ModelDescription, *, batch_size: int, context: float, scheme: str | None = None
) -> DecodeCost:
    """Cost of a decode step of `batch_size` sequences with `context` tokens each. `scheme` quantizes the
    weights at load; None: they keep the checkpoint's format. The cache has 2 bytes per element."""
    spec = description.spec
    parts = weights_bytes(spec, 2, None if scheme is None else SCHEMES[scheme])
    stored = 1.0 if scheme is not None else stored_bytes(description) / sum(parts.values())
    of_step = products(spec, {part: stored * size for part, size in parts.items()})
    cached = [(a, batch_size * min(context, window_of(a))) for a in spec.attentions]
    states = 2 * batch_size * spec.state_bytes(2)  # read and written
    return DecodeCost(
        num_bytes=sum(p.count * p.read_bytes(batch_size) for p in of_step)
        + sum(attention_bytes(a, num_tokens, 2) for a, num_tokens in cached)
        + states,
        num_flops=sum(p.count * p.operations(batch_size) for p in of_step)
        + sum(attention_operations(a, num_tokens) for a, num_tokens in cached),
    )


def stored_bytes(description: ModelDescription) -> int:
    """Bytes of a checkpoint's weights. For a config without weights, 2 bytes per parameter."""
    if description.stored:
        return sum(kind.num_bytes for kind in description.stored)
    return weight_bytes(description.path) or 2 * description.spec.num_parameters
