"""Rotates the residual stream: every hidden state h becomes h Q. Q is a random Hadamard matrix that
is folded into the weights which read and write the residual (QuaRot, Ashkboos et al. 2024;
computational invariance: SliceGPT, Ashkboos et al. 2024).

The model's outputs stay the same, but an outlier in one input is spread over all inputs, which
quantize better. An RMS norm without a weight commutes with a rotation, so the norms' weights are
first folded into the weights that read their outputs. The last norm is folded into the output head,
which is then no longer tied to the embeddings."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from slipstream.errors import ConfigError
from slipstream.spec.description import ModelDescription
from slipstream.spec.model import LayerSpec, ModelSpec, MoESpec, NormSpec, SequentialBlock

READERS = {
    "pre_attention": (
        *("attention.qkv", "recurrent.in", "recurrent.gates"),
        *("recurrent.decay_latent", "recurrent.gate_latent"),
    ),
    "pre_mlp": ("mlp.up", "experts.up", "router", "shared.up", "shared_weight"),
}
WRITERS = ("attention.out", "recurrent.out", "mlp.down", "experts.down", "shared.down")


def check(spec: ModelSpec) -> None:
    """Raise ConfigError if the model can't be rotated."""
    why = None
    for layer in spec.layers:
        norms = layer.norms
        if not isinstance(layer.block, SequentialBlock) or not norms.keys() <= READERS.keys():
            why = "its layers have other norms than one before attention and one before the MLP"
        elif isinstance(layer.mlp, MoESpec) and layer.mlp.latent is not None:
            why = "its experts read a latent"
        elif layer.input_gate is not None:
            why = "gates read what its norms give"
        elif any(n.kind != "rms" or n.bias for n in norms.values()):
            why = "its norms subtract the mean, which a rotation changes"
    if (
        spec.final_norm is None
        or spec.final_norm.kind != "rms"
        or spec.embed_norm is not None
        or spec.embed_size is not None
    ):
        why = "its embeddings or its last norm are of another kind"
    if why is None and hadamard_order(spec.hidden_size) is None:
        why = f"there is no Hadamard matrix here for its hidden size of {spec.hidden_size}"
    if why is not None:
        raise ConfigError(f"this model can't be rotated: {why}; leave rotate out", field="rotate")


def untied(source: ModelDescription) -> ModelDescription:
    """Model spec with an untied output head."""
    return dataclasses.replace(source, spec=dataclasses.replace(source.spec, tied_embeddings=False))


def rotation(size: int, seed: int, device: torch.device) -> Tensor:
    """Random orthogonal matrix, Hadamard with random signs, float32 [size, size]."""
    signs = torch.randint(0, 2, (size,), generator=torch.Generator().manual_seed(seed)) * 2 - 1
    return (hadamard(size) * (signs[:, None] / math.sqrt(size))).to(device)


def rotate_layer(spec: LayerSpec, values: dict[str, Tensor], q: Tensor) -> None:
    """Rotate a layer's parameters in place."""
    for norm, of in spec.norms.items():
        gain, readers = _take_gain(values, norm, of), READERS[norm]
        for name in (f"{reader}.weight" for reader in readers):
            if name in values:
                values[name] = (values[name] * gain) @ q
    for name in WRITERS:
        if (weight := values.get(f"{name}.weight")) is not None:
            values[f"{name}.weight"] = (q.T @ weight.unflatten(0, (-1, len(q)))).flatten(0, 1)
        if (bias := values.get(f"{name}.bias")) is not None:
            values[f"{name}.bias"] = bias @ q


def rotate_ends(spec: ModelSpec, values: dict[str, Tensor], q: Tensor) -> None:
    """Rotate embeddings, last norm and output head in place. A tied head gets a weight of its own."""
    assert spec.final_norm is not None
    head = values.get("head.weight", values["embed.weight"])
    values["head.weight"] = (head * _take_gain(values, "final_norm", spec.final_norm)) @ q
    for name in ("embed.weight", "positions.weight"):
        if name in values:
            values[name] = values[name] @ q


def _take_gain(values: dict[str, Tensor], norm: str, spec: NormSpec) -> Tensor:
    """Return the norm's gain [E] and set it to 1."""
    weight = values[f"{norm}.weight"]
    values[f"{norm}.weight"] = torch.full_like(weight, 1.0 - spec.weight_offset)
    return weight + spec.weight_offset


# --- Hadamard matrices ------------------------------------------------------------------------------------------------


def hadamard_order(size: int) -> int | None:
    """Order m of a Paley matrix, or 1, such that size = m · 2^k; None if there is none."""
    odd = size
    while odd % 2 == 0:
        odd //= 2
    if odd == 1:
        return 1
    orders = (odd << k for k in range(2, size.bit_length()) if size % (odd << k) == 0)
    return next((m for m in orders if _is_prime(m - 1) or _paley_two(m)), None)


def hadamard(size: int) -> Tensor:
    """Matrix of ±1 with orthogonal rows, float32 [size, size]: Paley's (1933) construction, doubled by Sylvester's."""
    m = hadamard_order(size)
    assert m is not None
    found = torch.ones(1, 1) if m == 1 else _paley(m)
    two = torch.tensor([[1.0, 1.0], [1.0, -1.0]])
    while len(found) < size:
        found = torch.kron(two, found)
    return found


def _paley_two(m: int) -> bool:
    """Whether Paley's second construction gives m = 2 (p + 1): p is a prime and p mod 4 = 1. (His first gives m = p + 1, where
    p mod 4 is 3 if 4 divides m.)"""
    p = m // 2 - 1
    return m % 4 == 0 and p % 4 == 1 and _is_prime(p)


def _paley(m: int) -> Tensor:
    p = m - 1 if _is_prime(m - 1) else m // 2 - 1
    squares = {x * x % p for x in range(1, p)}
    character = torch.tensor([0.0, *(1.0 if x in squares else -1.0 for x in range(1, p))])
    at = torch.arange(p)
    jacobsthal = character[(at[:, None] - at[None, :]) % p]
    core = torch.zeros(p + 1, p + 1)
    core[0, 1:], core[1:, 1:] = 1.0, jacobsthal
    if p == m - 1:  # p mod 4 = 3: the core is skew-symmetric
        core[1:, 0] = -1.0
        return core + torch.eye(m)
    core[1:, 0] = 1.0
    eye = torch.eye(p + 1)
    off, on = torch.tensor([[1.0, 1.0], [1.0, -1.0]]), torch.tensor([[1.0, -1.0], [-1.0, -1.0]])
    return torch.kron(core, off) + torch.kron(eye, on)


def _is_prime(n: int) -> bool:
    return n > 2 and n % 2 == 1 and all(n % d for d in range(3, math.isqrt(n) + 1, 2))
