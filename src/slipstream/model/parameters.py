"""The parameters that a `ModelSpec` has, by our names, and where a checkpoint's tensors go in them. No torch.

Query, key and value weights are one parameter (rows q, then k, then v), and so are gate and up (gate first), so that each
is one matrix product. A checkpoint that keeps them apart fills slices of rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from slipstream.model.spec import DenseSpec, LayerSpec, ModelSpec, NormSpec, SequentialBlock

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Placement:
    """A checkpoint tensor fills rows [start, start + rows) of parameter `target` (all of it if `rows` is None).

    `transpose`: stored as [in, out] (GPT-2). `unpermute`: rows of rotary heads in llama.cpp's order. `minus_one`: stored with
    one added (GGUF's Gemma norms).
    """

    target: str
    start: int = 0
    rows: int | None = None
    transform: Literal["none", "transpose", "unpermute", "minus_one"] = "none"
    num_heads: int = 1


def parameters(spec: ModelSpec) -> dict[str, Shape]:
    """Every parameter and its shape, in the order of computation. A tied output head is not listed."""
    hidden = spec.hidden_size
    found: dict[str, Shape] = {"embed.weight": (spec.vocab_size, hidden)}
    if spec.learned_positions is not None:
        found["positions.weight"] = (spec.learned_positions.num_positions, hidden)
    for i, layer in enumerate(spec.layers):
        found.update({f"layers.{i}.{name}": shape for name, shape in _layer(layer, hidden).items()})
    found.update(_norm("final_norm", spec.final_norm))
    if not spec.tied_embeddings:
        found["head.weight"] = (spec.vocab_size, hidden)
    if spec.head_bias:
        found["head.bias"] = (spec.vocab_size,)
    return found


def block_norms(layer: LayerSpec) -> dict[str, NormSpec]:
    """The norms of a layer's block by name."""
    block = layer.block
    if isinstance(block, SequentialBlock):
        named = {
            "pre_attention": block.pre_attention,
            "post_attention": block.post_attention,
            "pre_mlp": block.pre_mlp,
            "post_mlp": block.post_mlp,
        }
    else:
        named = {"norm": block.norm, "mlp_norm": block.mlp_norm}
    return {name: norm for name, norm in named.items() if norm is not None}


def _layer(layer: LayerSpec, hidden: int) -> dict[str, Shape]:
    a, m = layer.attention, layer.mlp
    found: dict[str, Shape] = {}
    norms = block_norms(layer)
    for name, norm in norms.items():
        found.update(_norm(name, norm))
    found.update(_linear("attention.qkv", a.q_size + 2 * a.kv_size, hidden, a.qkv_bias))
    if a.qk_norm is not None:
        found["attention.q_norm.weight"] = found["attention.k_norm.weight"] = (a.head_dim,)
    found.update(_linear("attention.out", hidden, a.q_size, a.out_bias))
    found.update(_linear("mlp.up", _up_rows(m), hidden, m.bias))
    found.update(_linear("mlp.down", hidden, m.intermediate_size, m.bias))
    return found


def _up_rows(mlp: DenseSpec) -> int:
    return mlp.intermediate_size * (2 if mlp.gated else 1)


def _linear(name: str, out: int, inner: int, bias: bool) -> dict[str, Shape]:
    weight: dict[str, Shape] = {f"{name}.weight": (out, inner)}
    return {**weight, f"{name}.bias": (out,)} if bias else weight


def _norm(name: str, norm: NormSpec) -> dict[str, Shape]:
    weight: dict[str, Shape] = {f"{name}.weight": (norm.size,)}
    return {**weight, f"{name}.bias": (norm.size,)} if norm.bias else weight
