"""A.X K2: DeepSeek V3.2's layers, in which gates follow the norms and attention's output is gated, too. No torch."""

from __future__ import annotations

import dataclasses

from slipstream.spec.families.base import ConfigReader, Family, Names
from slipstream.spec.families.experts import sparse
from slipstream.spec.families.names import Theirs, table
from slipstream.spec.model import InputGateSpec, LatentAttentionSpec, LayerSpec, ModelSpec, MoESpec
from slipstream.spec.parameters import Regroup, Transform


def read(c: ConfigReader) -> ModelSpec:
    c.assume_missing(
        **dict(num_key_value_heads=32, n_routed_experts=128, moe_intermediate_size=512),
        **dict(kv_lora_rank=128, q_lora_rank=384, qk_nope_head_dim=64, qk_rope_head_dim=32),
        **dict(v_head_dim=64, index_n_heads=16, rms_norm_eps=1e-6, max_position_embeddings=131072),
        **dict(first_k_dense_replace=1) if "mlp_layer_types" not in c else {},
    )
    if ("n_group" in c) != ("topk_group" in c):
        raise c.unsupported("n_group", "n_group and topk_group must both be there, or neither")
    c.assume(n_group=1, topk_group=1)  # null: a token's experts may be any
    rank = c.size("gated_norm_rank", 16)
    spec = sparse.read_indexed(c, "axk2", [sparse.FULL] * c.size("num_hidden_layers"), "half")
    return dataclasses.replace(spec, layers=tuple(_gated(layer, rank) for layer in spec.layers))


def _gated(layer: LayerSpec, rank: int) -> LayerSpec:
    a = layer.attention
    assert isinstance(a, LatentAttentionSpec)
    return dataclasses.replace(
        layer,
        attention=dataclasses.replace(a, gated="each", both_latents=True),
        input_gate=InputGateSpec(rank=rank, of_mlp=isinstance(layer.mlp, MoESpec)),
    )


def _gates_first(layer: LayerSpec, part: int) -> Transform:
    """Reorders stored rows, where query and gate alternate by head, to all gates, then all queries."""
    a = layer.attention
    assert isinstance(a, LatentAttentionSpec)
    return Regroup(a.num_heads, (a.nope_dim + a.rotary_dim, a.value_dim), (1, 0))


NAMES: dict[str, Theirs] = {
    **sparse.NAMES_WITH_INDEX,
    "pre_attention": "input_layernorm.norm",
    "input_gate.attention_down": "input_layernorm.W_down",
    "input_gate.attention_up": "input_layernorm.W_up",
    "pre_mlp": "post_attention_layernorm.norm",
    "input_gate.mlp_down": "post_attention_layernorm.W_down",
    "input_gate.mlp_up": "post_attention_layernorm.W_up",
}


def names(spec: ModelSpec) -> Names:
    found = table(NAMES, changes={"attention.q": _gates_first})(spec)
    for i, layer in enumerate(spec.layers):
        if layer.input_gate is not None and not layer.input_gate.of_mlp:
            norm = f"model.layers.{i}.post_attention_layernorm"
            found[f"{norm}.weight"] = found.pop(f"{norm}.norm.weight")
    return found


FAMILIES = (Family(model_type="axk2", architectures=("AXK2ForCausalLM",), read=read, names=names),)
