"""DBRX: clamped queries, keys and values, layer norms without biases, and expert weights stacked along the rows."""

from __future__ import annotations

from slipstream.spec.families.base import ConfigReader, Family, Names
from slipstream.spec.families.builders import (
    ACTIVATIONS,
    HeadCounts,
    attention,
    before,
    layer_norm,
    model,
    rope,
)
from slipstream.spec.families.names import Theirs, table
from slipstream.spec.model import DenseSpec, LayerSpec, ModelSpec, MoESpec
from slipstream.spec.parameters import Stacked


def read(c: ConfigReader) -> ModelSpec:
    hidden, num_heads = c.size("d_model", 2048), c.size("n_heads", 16)
    c.assume(n_layers=24)
    if hidden % num_heads:
        raise c.unsupported("d_model", f"is no multiple of n_heads ({num_heads})")
    own = c.part("attn_config")
    h = HeadCounts(num_heads, own.size("kv_n_heads", 1), hidden // num_heads)
    c.require("num_key_value_heads", h.num_kv_heads)
    clip, theta = own.maybe("clip_qkv", float), own.take("rope_theta", float, 10000.0)
    own.ignore("attn_pdrop", *UNUSED)
    own.finish()
    max_position = c.size("max_seq_len", 2048)
    position = rope(c, h.head_dim, max_position=max_position, theta=theta)
    norm, moe = layer_norm(hidden, 1e-5, bias=False), _experts(c.part("ffn_config"), hidden)
    layer = LayerSpec(attention=attention(h, position, clip_qkv=clip), mlp=moe, block=before(norm))
    c.ignore("resid_pdrop", "emb_pdrop", "output_router_logits", "router_aux_loss_coef")
    c.require("tie_word_embeddings", False)
    return model(c, "dbrx", layer, norm, max_position, hidden="d_model", num_layers="n_layers")


UNUSED = ("is_encoder_decoder", "chunk_size_feed_forward")
"""Keys that every transformers config has."""


def _experts(c: ConfigReader, hidden: int) -> MoESpec:
    c.require("hidden_size", hidden)
    named = dict(c.maybe("ffn_act_fn", dict) or {"name": "silu"})
    act = ACTIVATIONS.get(named.pop("name", "silu"))
    if act is None or named:
        raise c.unsupported("ffn_act_fn", f"must be a name alone, one of {', '.join(ACTIVATIONS)}")
    power = c.take("moe_normalize_expert_weights", float, 0.0)
    if "moe_normalize_expert_weights" not in c:
        power = 1.0
    if power not in (0.0, 1.0):
        raise c.unsupported("moe_normalize_expert_weights", "only null and 1 are supported")
    c.ignore("moe_jitter_eps", "moe_loss_weight", "uniform_expert_assignment", *UNUSED)
    experts = MoESpec(
        num_experts=c.size("moe_num_experts", 4),
        num_experts_per_token=c.size("moe_top_k", 1),
        expert=DenseSpec(intermediate_size=c.size("ffn_hidden_size", 3584), activation=act),
        normalize=power == 1.0,
    )
    c.finish()
    return experts


def stacked(layer: LayerSpec, part: int) -> Stacked:
    assert isinstance(layer.mlp, MoESpec)
    return Stacked(layer.mlp.num_experts)


def stacked_down(layer: LayerSpec, part: int) -> Stacked:
    assert isinstance(layer.mlp, MoESpec)
    return Stacked(layer.mlp.num_experts, transposed=True)


NAMES: dict[str, Theirs] = {
    "embed": "transformer.wte",
    "final_norm": "transformer.norm_f",
    "head": "lm_head",
    "pre_attention": "norm_attn_norm.norm_1",
    "attention.qkv": "norm_attn_norm.attn.Wqkv",
    "attention.out": "norm_attn_norm.attn.out_proj",
    "pre_mlp": "norm_attn_norm.norm_2",
    "router": "ffn.router.layer",
    "experts.up": ("ffn.experts.mlp.w1", "ffn.experts.mlp.v1"),
    "experts.down": {"weight": "ffn.experts.mlp.w2"},
}


def names(spec: ModelSpec) -> Names:
    """DBRX's names. Those of expert tensors don't end in `.weight`."""
    changes = {"experts.up": stacked, "experts.down": stacked_down}
    found = table(NAMES, layer="transformer.blocks.{i}.", changes=changes)(spec)
    return {
        name.removesuffix(".weight") if ".experts." in name else name: place
        for name, place in found.items()
    }


FAMILIES = (Family(model_type="dbrx", architectures=("DbrxForCausalLM",), read=read, names=names),)
