"""The parameters that a `ModelSpec` has, by our names, and where a checkpoint's tensors go in them. No torch.

Query, key and value weights are one parameter (rows q, then k, then v), and so are gate and up (gate first), so that each
is one matrix product. The experts of a layer stand one below the other. A checkpoint that keeps them apart fills slices of
rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from slipstream.spec.model import (
    AttentionSpec,
    BucketSpec,
    DenseSpec,
    LatentAttentionSpec,
    LayerSpec,
    ModelSpec,
    NormSpec,
)

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Transpose:
    """Stored as [in, out] (GPT-2)."""


@dataclass(frozen=True, slots=True)
class Ungroup:
    """The rows of q, k and v stand by kv head: the `group` query heads that read it, its key, its value (GPT-NeoX, Falcon)."""

    num_kv_heads: int
    group: int


@dataclass(frozen=True, slots=True)
class Unpermute:
    """The rows of rotary heads stand in llama.cpp's order: the two halves of each head interleaved."""

    num_heads: int


@dataclass(frozen=True, slots=True)
class MinusOne:
    """Stored with one added (GGUF's Gemma norms)."""


@dataclass(frozen=True, slots=True)
class Untwine:
    """The rows of gate and up stand in turn (gpt-oss); `transposed`: and as [in, out]."""

    transposed: bool


@dataclass(frozen=True, slots=True)
class Swap:
    """The rows of up stand before gate's (GTE)."""


Transform: TypeAlias = Transpose | Ungroup | Unpermute | MinusOne | Untwine | Swap


@dataclass(frozen=True, slots=True)
class Placement:
    """A checkpoint tensor fills rows [start, start + rows) of parameter `target` (all of it if `rows` is None).

    With `copies` it is of all experts, [copies, rows, in], and fills these rows of each.
    """

    target: str
    start: int = 0
    rows: int | None = None
    transform: Transform | None = None
    copies: int | None = None


def parameters(spec: ModelSpec) -> dict[str, Shape]:
    """Every parameter and its shape, in the order of computation. A tied output head is not listed."""
    hidden, width = spec.hidden_size, spec.embed_width
    found: dict[str, Shape] = {"embed.weight": (spec.vocab_size, width)}
    if spec.embed_size is not None:
        found["embed_in.weight"] = (hidden, width)
    if spec.learned_positions is not None:
        found["positions.weight"] = (spec.learned_positions.num_positions, hidden)
    if spec.num_token_types:
        found["token_types.weight"] = (spec.num_token_types, hidden)
    found.update(_norm("embed_norm", spec.embed_norm))
    if spec.encoder is not None:
        found.update(_stack("encoder.", spec.encoder.layers, spec.encoder.final_norm, hidden))
    found.update(_stack("", spec.layers, spec.final_norm, hidden))
    if (c := spec.classifier) is not None:
        if c.activation is not None:
            found.update(_linear("classifier.dense", hidden, hidden, c.bias))
            found.update(_norm("classifier.norm", c.norm))
        found.update(_linear("classifier.out", c.num_labels, hidden, c.activation is not None))
    if spec.embed_size is not None:
        found["embed_out.weight"] = (width, hidden)
    if spec.has_head:
        found["head.weight"] = (spec.vocab_size, width)
    if spec.head_bias:
        found["head.bias"] = (spec.vocab_size,)
    return found


def _stack(prefix: str, layers: tuple[LayerSpec, ...], final_norm: NormSpec | None, hidden: int) -> dict[str, Shape]:
    found: dict[str, Shape] = {}
    position = layers[0].attention.position
    if isinstance(position, BucketSpec) and not position.own:
        found[f"{prefix}distances.weight"] = (position.num_buckets, layers[0].attention.num_heads)
    for i, layer in enumerate(layers):
        found.update({f"{prefix}layers.{i}.{name}": shape for name, shape in _layer(layer, hidden).items()})
    return found | _norm(f"{prefix}final_norm", final_norm)


def _layer(layer: LayerSpec, hidden: int) -> dict[str, Shape]:
    m = layer.mlp
    found: dict[str, Shape] = {}
    for name, norm in layer.norms.items():
        found.update(_norm(name, norm))
    a = layer.attention
    found.update(_latent(a, hidden) if isinstance(a, LatentAttentionSpec) else _attention(a, hidden))
    if (c := layer.cross) is not None:
        found.update(_linear("cross.q", c.q_size, hidden, c.qkv_bias))
        found.update(_linear("cross.kv", 2 * c.kv_size, hidden, c.qkv_bias))
        found.update(_linear("cross.out", hidden, c.q_size, c.out_bias))
    if isinstance(m, DenseSpec):
        return found | _mlp("mlp", m, hidden)
    found.update(_linear("router", m.num_experts, hidden, m.router_bias))
    if m.correction:
        found["correction.weight"] = (m.num_experts,)
    found.update(_mlp("experts", m.expert, hidden, m.num_experts))
    if m.shared is not None:
        found.update(_mlp("shared", m.shared.mlp, hidden))
        if m.shared.weighed:
            found.update(_linear("shared_weight", 1, hidden, False))
    return found


def _attention(a: AttentionSpec, hidden: int) -> dict[str, Shape]:
    found = _linear("attention.qkv", a.q_size + 2 * a.kv_size, hidden, a.qkv_bias)
    for x, size in zip("qk", a.qk_norm_sizes, strict=True):
        if size:
            each = a.qk_norm is not None and a.qk_norm.over == "each"
            found[f"attention.{x}_norm.weight"] = (size // a.head_dim, a.head_dim) if each else (size,)
    if isinstance(a.position, BucketSpec) and a.position.own:
        found["attention.distances.weight"] = (a.position.num_buckets, a.num_heads)
    if a.sinks:
        found["attention.sinks.weight"] = (a.num_heads,)
    return found | _linear("attention.out", hidden, a.q_size, a.out_bias)


def _latent(a: LatentAttentionSpec, hidden: int) -> dict[str, Shape]:
    """`expand` makes of a latent, head by head, the plain part of the key and then the value."""
    found: dict[str, Shape] = {}
    if a.q_rank is not None:
        found.update(_linear("attention.q_latent", a.q_rank, hidden, a.bias))
        found["attention.q_norm.weight"] = (a.q_rank,)
    found.update(_linear("attention.q", a.q_size, a.q_rank or hidden, False))
    found.update(_linear("attention.latent", a.head_dim, hidden, a.bias))
    found["attention.k_norm.weight"] = (a.kv_rank,)
    found.update(_linear("attention.expand", a.num_heads * (a.nope_dim + a.value_dim), a.kv_rank, False))
    return found | _linear("attention.out", hidden, a.out_inner, a.bias)


def _mlp(name: str, mlp: DenseSpec, hidden: int, copies: int = 1) -> dict[str, Shape]:
    up = _linear(f"{name}.up", copies * mlp.up_rows, hidden, mlp.up_bias)
    return up | _linear(f"{name}.down", copies * hidden, mlp.intermediate_size, mlp.down_bias)


def _linear(name: str, out: int, inner: int, bias: bool) -> dict[str, Shape]:
    weight: dict[str, Shape] = {f"{name}.weight": (out, inner)}
    return {**weight, f"{name}.bias": (out,)} if bias else weight


def _norm(name: str, norm: NormSpec | None) -> dict[str, Shape]:
    if norm is None:
        return {}
    weight: dict[str, Shape] = {f"{name}.weight": (norm.size,)}
    return {**weight, f"{name}.bias": (norm.size,)} if norm.bias else weight
