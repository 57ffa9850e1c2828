"""Jamba: most layers are Mamba, some have attention, and some have experts in the place of their MLP. No torch."""

from __future__ import annotations

from typing import Any

from slipstream.spec.families.base import ConfigReader, Family, GGUFFamily
from slipstream.spec.families.builders import attention, before, gated, heads, model, rms
from slipstream.spec.families.hybrids.bamba import BAMBA
from slipstream.spec.families.hybrids.mamba import GGUF, GGUF_CHANGES, mamba_1_names, rank
from slipstream.spec.families.metadata import kv_heads, llama_gguf_config
from slipstream.spec.families.names import Theirs, gguf_table, of_conv, table
from slipstream.spec.model import LayerSpec, MambaSpec, MLPSpec, ModelSpec, MoESpec


def read(c: ConfigReader) -> ModelSpec:
    c.assume(hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, vocab_size=65536)
    c.assume(intermediate_size=14336, num_hidden_layers=32)
    eps, hidden = c.take("rms_norm_eps", float, 1e-6), c.size("hidden_size")
    norm, mlp = rms(hidden, eps), gated(c)
    recurrent = MambaSpec(
        width=c.size("mamba_expand", 2) * hidden,
        key_dim=c.size("mamba_d_state", 16),
        rank=rank(c, "mamba_dt_rank"),
        conv_width=c.size("mamba_d_conv", 4),
        eps=eps,
        conv_bias=c.take("mamba_conv_bias", bool, True),
        bias=c.take("mamba_proj_bias", bool, False),
        normed=True,
    )
    c.require("hidden_act", "silu")
    c.require("mamba_inner_layernorms", True)
    c.ignore("use_mamba_kernels", "use_mambapy", "use_associative_scan", "num_logits_to_keep")
    c.ignore("output_router_logits", "router_aux_loss_coef", "sliding_window")
    attended = _every(c, "attn_layer_period", 8, "attn_layer_offset", 4)
    mixed = _every(c, "expert_layer_period", 2, "expert_layer_offset", 1)
    num_experts, per_token = c.size("num_experts", 16), c.size("num_experts_per_tok", 2)
    of = attention(heads(c), None)
    moe = MoESpec(
        num_experts=num_experts,
        num_experts_per_token=min(per_token, num_experts),
        expert=mlp,
        normalize=False,
    )

    def layer(i: int) -> LayerSpec:
        mixer: dict[str, Any] = {"attention": of} if attended(i) else {"recurrent": recurrent}
        fed: MLPSpec = moe if mixed(i) and num_experts > 1 else mlp
        return LayerSpec(**mixer, mlp=fed, block=before(norm))

    return model(c, "jamba", layer, norm, c.size("max_position_embeddings", 262144))


def _every(c: ConfigReader, period: str, each: int, offset: str, first: int) -> Any:
    """Function that tells whether a layer's index is the config's `offset` plus a multiple of its
    `period`."""
    every, start = c.size(period, each), c.take(offset, int, first)
    if not 0 <= start < every:
        raise c.unsupported(offset, f"must be from 0 to {period} - 1")
    return lambda i: i % every == start


NAMES: dict[str, Theirs] = {
    **BAMBA,
    **mamba_1_names("mamba"),
    "router": "feed_forward.router",
    "experts.up": ("feed_forward.experts.{e}.gate_proj", "feed_forward.experts.{e}.up_proj"),
    "experts.down": "feed_forward.experts.{e}.down_proj",
}


def gguf_config(m: ConfigReader) -> dict[str, Any]:
    """Reads a GGUF file's config. The file does not say which layers have experts: every second
    one, as in all of Jamba's models."""
    config = llama_gguf_config(m, experts=True, by_layer=True)
    attended = [i for i, n in enumerate(kv_heads(m)) if n]
    first = attended[0]
    period = attended[1] - first if len(attended) > 1 else m.size("block_count")
    if attended != list(range(first, m.size("block_count"), period)):
        raise m.unsupported("attention.head_count_kv", "attention must be in every nth layer")
    for key in ("head_dim", "rope_theta"):
        config.pop(key, None)
    return {
        **config,
        "attn_layer_period": period,
        "attn_layer_offset": first,
        "num_experts": m.size("expert_count"),
        "num_experts_per_tok": m.size("expert_used_count"),
        "mamba_d_state": m.size("ssm.state_size"),
        "mamba_d_conv": m.size("ssm.conv_kernel"),
        "mamba_expand": m.size("ssm.inner_size") // m.size("embedding_length"),
        "mamba_dt_rank": m.size("ssm.time_step_rank"),
    }


FAMILIES = (
    Family(
        model_type="jamba",
        architectures=("JambaForCausalLM", "JambaForSequenceClassification"),
        read=read,
        names=table(NAMES, changes={"recurrent.conv": of_conv}),
        gguf=GGUFFamily(
            architecture="jamba", config=gguf_config, names=gguf_table(GGUF, changes=GGUF_CHANGES)
        ),
    ),
)
