"""DeepSeek V3.2 and GLM-5: DeepSeek V3's layers, whose tokens attend to the keys that an index chooses (`IndexSpec`).

GLM-5's layers may attend to the keys that a layer before them chose (arXiv:2603.12201)."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from slipstream.spec.families.base import ConfigReader, Family, GGUFFamily, Names
from slipstream.spec.families.deepseek import (
    GGUF_NAMES,
    NAMES,
    corrected_mixture,
    dense_layers,
    gguf_config,
    gguf_latent_names,
    read_latent,
)
from slipstream.spec.families.mtp import DEEPSEEK, Config
from slipstream.spec.families.names import Theirs, table
from slipstream.spec.model import IndexSpec, LatentAttentionSpec, LayerSpec, ModelSpec, RopeSpec

FULL, SHARED = "full", "shared"


def read_v32(c: ConfigReader) -> ModelSpec:
    c.assume_missing(
        **dict(num_key_value_heads=128, n_group=8, topk_group=4, index_n_heads=64),
        **dict(rms_norm_eps=1e-6, max_position_embeddings=163840),
    )
    count = c.size("num_hidden_layers")
    return read_indexed(c, "deepseek_v32", [FULL] * count, "half")


def read_glm(c: ConfigReader) -> ModelSpec:
    c.assume_missing(
        **dict(num_key_value_heads=64, n_group=1, topk_group=1, index_n_heads=32),
        **dict(qk_nope_head_dim=192, v_head_dim=256, q_lora_rank=2048, rms_norm_eps=1e-5),
        **dict(max_position_embeddings=202752),
    )
    return read_indexed(c, "glm_moe_dsa", _layers_with_index(c), "interleaved")


def _layers_with_index(c: ConfigReader) -> list[str]:
    """Kind of each layer, given as a list, as a pattern of letters, or as a period and an offset."""
    count = c.size("num_hidden_layers")
    every, offset = c.take("index_topk_freq", int, 1), c.take("index_skip_topk_offset", int, 2)
    kinds: Any = [SHARED if max(i - offset + 1, 0) % max(every, 1) else FULL for i in range(count)]
    pattern = c.value("index_topk_pattern")
    if pattern is not None:
        kinds = [{"F": FULL, "S": SHARED}.get(x, x) for x in pattern]
    key = "indexer_types" if c.value("indexer_types") is not None else "index_topk_pattern"
    kinds = c.take("indexer_types", list, kinds)
    if len(kinds) != count or not set(kinds) <= {FULL, SHARED} or kinds[0] != FULL:
        raise c.unsupported(key, f"must be {count} of full and shared, the first of them full")
    return list(kinds)


def read_indexed(
    c: ConfigReader, family: str, kinds: list[str], style: Literal["half", "interleaved"]
) -> ModelSpec:
    c.assume_missing(
        **dict(n_routed_experts=256, n_shared_experts=1, num_experts_per_tok=8),
        **dict(moe_intermediate_size=2048, kv_lora_rank=512, q_lora_rank=1536),
        **dict(qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128),
        **dict(index_head_dim=128, index_topk=2048),
    )
    c.require("scoring_func", "sigmoid")
    c.require("topk_method", "noaux_tc")
    c.require("rope_interleave", True)
    if set(c.take("layer_types", list, [])) - {"indexed_attention"}:
        raise c.unsupported("layer_types", "only indexed_attention is supported")
    c.size("q_lora_rank")  # the index's queries are projected from the queries' latent
    sizes = {
        "num_heads": c.size("index_n_heads"),
        "head_dim": c.size("index_head_dim"),
        "top_k": c.size("index_topk"),
    }
    if sizes["head_dim"] < c.size("qk_rope_head_dim"):
        raise c.unsupported("index_head_dim", "must be at least qk_rope_head_dim, which is rotated")

    def index(i: int, position: RopeSpec) -> IndexSpec | Literal["previous"]:
        own = dataclasses.replace(position, style=style)
        return IndexSpec(**sizes, position=own) if kinds[i] == FULL else "previous"

    dense, moe = dense_layers(c, 3), corrected_mixture(c, weight_scale=2.5)
    return read_latent(c, family, moe, interleaved=True, dense=dense, index=index)


NAMES_WITH_INDEX: dict[str, Theirs] = {
    **NAMES,
    "attention.q": "self_attn.q_b_proj",
    "attention.index_q": "self_attn.indexer.wq_b",
    "attention.index_k": "self_attn.indexer.wk",
    "attention.index_weights": "self_attn.indexer.weights_proj",
    "attention.index_norm": "self_attn.indexer.k_norm",
}


def glm_gguf_config(m: ConfigReader) -> dict[str, Any]:
    m.require("nextn_predict_layers", 0)
    m.require("expert_gating_func", 2)
    return {
        **gguf_config(m),
        "num_key_value_heads": m.size("attention.head_count"),
        "index_n_heads": m.size("attention.indexer.head_count"),
        "index_head_dim": m.size("attention.indexer.key_length"),
        "index_topk": m.size("attention.indexer.top_k"),
    }


def glm_gguf_names(spec: ModelSpec) -> Names:
    return gguf_latent_names(
        spec,
        {
            **GGUF_NAMES,
            "attention.index_q": "indexer.attn_q_b",
            "attention.index_k": "indexer.attn_k",
            "attention.index_weights": "indexer.proj",
            "attention.index_norm": "indexer.k_norm",
        },
    )


def drafting(spec: ModelSpec, config: Config) -> tuple[LayerSpec, ...]:
    """The MTP layer: like the last layer, with its own index."""
    first, last = spec.layers[0].attention, spec.layers[-1]
    assert isinstance(first, LatentAttentionSpec)
    assert isinstance(last.attention, LatentAttentionSpec)
    own = dataclasses.replace(last.attention, index=first.index)
    return (dataclasses.replace(last, attention=own),)


MTP = dataclasses.replace(DEEPSEEK, layers=drafting)

FAMILIES = (
    Family(
        model_type="deepseek_v32",
        architectures=("DeepseekV32ForCausalLM",),
        read=read_v32,
        names=table(NAMES_WITH_INDEX),
        mtp=MTP,
    ),
    Family(
        model_type="glm_moe_dsa",
        architectures=("GlmMoeDsaForCausalLM",),
        read=read_glm,
        names=table(NAMES_WITH_INDEX),
        mtp=MTP,
        gguf=GGUFFamily(architecture="glm-dsa", config=glm_gguf_config, names=glm_gguf_names),
    ),
)
