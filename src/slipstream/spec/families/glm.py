"""ChatGLM 2 and 3, GLM-4 and its kin. Half of each head is rotated, interleaved, and gate and up are one weight.

1. `chatglm` has the authors' names, `glm` those of transformers.
2. `glm4`, of 2025, adds norms after attention and MLP.
3. `glm4_moe` (GLM-4.5) is a mixture of experts. Sarvam 30B and Solar Open have its experts (and Ling 2: `hybrids/ling.py`).
4. GLM-4V's and GLM-OCR's language models; their pictures are in `pictures/glm4v.py`.
"""

from __future__ import annotations

from typing import Any

from slipstream.spec.families.base import ConfigReader, Family, GGUFFamily
from slipstream.spec.families.builders import (
    HeadCounts,
    Sections,
    around,
    attention,
    before,
    decoder,
    gated,
    heads,
    model,
    rms,
    rope,
)
from slipstream.spec.families.deepseek import SARVAM_KEYS, SHARED, corrected_mixture, gguf_experts
from slipstream.spec.families.metadata import llama_gguf_config
from slipstream.spec.families.mtp import DEEPSEEK, LLAMA_CPP
from slipstream.spec.families.names import LLAMA, MEGATRON, Theirs, gguf_table, table
from slipstream.spec.model import DenseSpec, LayerSpec, ModelSpec, QKNormSpec, RopeSpec


def read_glm(c: ConfigReader) -> ModelSpec:
    return _read(c, "glm", sandwich=False)


def read_glm4(c: ConfigReader) -> ModelSpec:
    return _read(c, "glm4", sandwich=True)


THREE_POSITIONS = Sections((8, 12, 12))
"""How GLM-4V's rotary frequencies are distributed over a token's three positions."""


def read_glm4v(c: ConfigReader) -> ModelSpec:
    """The language model of GLM-4.1V; without images it equals GLM-4-0414. As in transformers, whole heads
    are rotated unless the config gives a fraction, the head size is derived, and there are always biases."""
    c.assume(
        **dict(vocab_size=151552, hidden_size=4096, intermediate_size=13696, rms_norm_eps=1e-5),
        **dict(num_hidden_layers=40, num_attention_heads=32, max_position_embeddings=32768),
    )
    c.require("head_dim", c.size("hidden_size") // c.size("num_attention_heads"))
    c.require("attention_bias", True)
    c.assume(head_dim=c.size("hidden_size") // c.size("num_attention_heads"))
    return _read(c, "glm4v", sandwich=True, partial=1.0, sections=THREE_POSITIONS)


def read_glm_ocr(c: ConfigReader) -> ModelSpec:
    """The language model of GLM-OCR: GLM-4.1V's, always without biases. Its MTP layer is not run."""
    c.assume(
        **dict(vocab_size=59392, hidden_size=1024, intermediate_size=4096, num_hidden_layers=16),
        **dict(num_attention_heads=16, num_key_value_heads=8, max_position_embeddings=131072),
        **dict(rms_norm_eps=1e-5, attention_bias=False),
    )
    c.assume(head_dim=c.size("hidden_size") // c.size("num_attention_heads"))
    c.require("attention_bias", False)
    c.ignore("num_nextn_predict_layers")
    return _read(c, "glm_ocr", sandwich=True, partial=1.0, sections=THREE_POSITIONS)


def read_glm4v_moe(c: ConfigReader) -> ModelSpec:
    """The language model of GLM-4.5V."""
    c.assume(
        **dict(vocab_size=151424, hidden_size=4096, intermediate_size=10944, num_hidden_layers=46),
        **dict(num_attention_heads=96, num_key_value_heads=8, max_position_embeddings=65536),
        **dict(attention_bias=True, moe_intermediate_size=1408, n_routed_experts=128),
        **dict(n_shared_experts=1, num_experts_per_tok=8, n_group=1, topk_group=1),
    )
    c.require("use_qk_norm", False)
    return read_glm4_moe(c, "glm4v_moe", sections=THREE_POSITIONS)


def _read(
    c: ConfigReader,
    family: str,
    *,
    sandwich: bool,
    partial: float = 0.5,
    sections: Sections | None = None,
) -> ModelSpec:
    c.assume(head_dim=128, num_key_value_heads=2)
    h = heads(c)
    max_position = c.size("max_position_embeddings", 131072)
    norm = rms(c.size("hidden_size"), c.take("rms_norm_eps", float, 1.5625e-7))
    position = rope(
        c,
        h.head_dim,
        partial=partial,
        max_position=max_position,
        style="interleaved",
        sections=sections,
    )
    layer = LayerSpec(
        attention=attention(h, position, qkv_bias=c.take("attention_bias", bool, True)),
        mlp=gated(c),
        block=around(norm) if sandwich else before(norm),
    )
    return model(c, family, layer, norm, max_position)


def read_chatglm(c: ConfigReader) -> ModelSpec:
    c.require("multi_query_attention", True)  # with this off, q, k and v would be grouped by head
    count = c.size("num_attention_heads")
    h = HeadCounts(count, c.size("multi_query_group_num"), c.size("kv_channels"))
    norm = rms(c.size("hidden_size"), c.take("layernorm_epsilon", float, 1e-5))
    bias = c.take("add_bias_linear", bool, False)
    position = RopeSpec(
        theta=10000.0 * c.take("rope_ratio", float, 1.0),
        rotary_dim=h.head_dim // 2,
        style="interleaved",
    )
    layer = LayerSpec(
        attention=attention(
            h, position, qkv_bias=c.take("add_qkv_bias", bool, False) or bias, out_bias=bias
        ),
        mlp=DenseSpec(intermediate_size=c.size("ffn_hidden_size"), activation="silu", bias=bias),
        block=before(norm),
    )
    c.require_all(rmsnorm=True, post_layer_norm=True, original_rope=True, interleaved_qkv=False)
    c.require_all(apply_residual_connection_post_layernorm=False, pre_seq_len=None)
    c.require_all(quantization_bit=0, vocab_size=c.size("padded_vocab_size"))
    c.require("num_hidden_layers", c.size("num_layers"))
    # Scores are always computed in float32 here.
    c.ignore(
        "apply_query_key_layer_scaling",
        "attention_softmax_in_fp32",
        "fp32_residual_connection",
        "bias_dropout_fusion",
    )
    c.ignore("prefix_projection")
    max_position = c.size("seq_length", 2048)
    return model(
        c, "chatglm", layer, norm, max_position, vocab="padded_vocab_size", num_layers="num_layers"
    )


def read_sarvam_moe(c: ConfigReader) -> ModelSpec:
    """Reads Sarvam 30B: GLM-4.5's layers whose heads are rotated whole. Its authors' config has
    other names for some keys."""
    c.alias({**SARVAM_KEYS, "attention_bias": "use_qkv_bias"})
    c.assume_missing(
        **dict(
            head_dim=64, num_key_value_heads=4, moe_intermediate_size=1024, n_routed_experts=128
        ),
        **dict(n_shared_experts=1, num_experts_per_tok=6, routed_scaling_factor=2.5, n_group=1),
        **dict(topk_group=1, rms_norm_eps=1e-6, use_qk_norm=True, rope_theta=8e6),
    )
    return read_glm4_moe(c, "sarvam_moe", partial=1.0)


def read_glm4_moe(
    c: ConfigReader,
    family: str = "glm4_moe",
    *,
    partial: float = 0.5,
    sections: Sections | None = None,
) -> ModelSpec:
    """GLM-4.5 and 4.6: grouped heads, and DeepSeek V3's experts."""
    h, hidden = heads(c), c.size("hidden_size")
    max_position = c.size("max_position_embeddings", 131072)
    eps = c.take("rms_norm_eps", float, 1e-5)
    norm, dense, moe = rms(hidden, eps), gated(c), corrected_mixture(c, weight_scale=1.0)
    num_dense = c.take("first_k_dense_replace", int, 1)
    of = attention(
        h,
        rope(c, h.head_dim, partial=partial, max_position=max_position, sections=sections),
        qkv_bias=c.take("attention_bias", bool, False),
        qk_norm=QKNormSpec(over="head", eps=eps) if c.take("use_qk_norm", bool, False) else None,
    )

    def layer(i: int) -> LayerSpec:
        return LayerSpec(attention=of, mlp=dense if i < num_dense else moe, block=before(norm))

    return model(c, family, layer, norm, max_position)


def read_solar_open(c: ConfigReader) -> ModelSpec:
    """Solar Open: GLM-4.5's experts in every layer, and Llama's attention."""
    c.assume_missing(
        **dict(head_dim=128, num_key_value_heads=8, n_group=1, topk_group=1, n_routed_experts=128),
        **dict(n_shared_experts=1, num_experts_per_tok=8, moe_intermediate_size=1280),
    )
    c.assume(intermediate_size=c.size("moe_intermediate_size"))  # there is no dense layer
    c.require("first_k_dense_replace", 0)
    c.require("use_qk_norm", False)
    return decoder(
        c,
        "solar_open",
        max_position=131072,
        eps=1e-5,
        bias=(c.take("attention_bias", bool, False), False),
        mlp=corrected_mixture(c, weight_scale=1.0),
        positions={"theta": 1e6, "partial": 1.0},
    )


SARVAM: dict[str, Theirs] = {
    **SHARED,
    "embed": "model.word_embeddings",
    "attention.qkv": "attention.query_key_value",
    "attention.q_norm": "attention.query_layernorm",
    "attention.k_norm": "attention.key_layernorm",
    "attention.out": "attention.dense",
    "correction": {"weight": "mlp.gate.expert_bias"},
}
FUSED = {**LLAMA, "mlp.up": "mlp.gate_up_proj"}
SANDWICH = {**FUSED, "post_attention": "post_self_attn_layernorm", "post_mlp": "post_mlp_layernorm"}
CHATGLM: dict[str, Theirs] = {
    **MEGATRON,
    "embed": "transformer.embedding.word_embeddings",
    "final_norm": "transformer.encoder.final_layernorm",
    "head": "transformer.output_layer",
}


def gguf_config(m: ConfigReader) -> dict[str, Any]:
    return llama_gguf_config(m, partial=True)


def glm4_moe_gguf_config(m: ConfigReader) -> dict[str, Any]:
    """Reads a GGUF file's config. Its layer count includes the MTP layer. There are no groups of
    experts."""
    config = llama_gguf_config(m, partial=True, experts=True)
    m.require("expert_gating_func", 2)
    return {
        **config,
        "num_hidden_layers": config["num_hidden_layers"] - m.take("nextn_predict_layers", int, 0),
        "attention_bias": "blk.0.attn_q.bias" in m,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in m,
        **gguf_experts(m),
        "n_group": 1,
        "topk_group": 1,
    }


GLM4_MOE_GGUF: dict[str, Theirs] = {
    "pre_mlp": "post_attention_norm",
    "correction": {"weight": "exp_probs_b.bias"},
}

FAMILIES = (
    Family(
        model_type="glm",
        architectures=("GlmForCausalLM",),
        read=read_glm,
        names=table(FUSED),
        gguf=GGUFFamily(
            architecture="chatglm", config=gguf_config, names=gguf_table({"mlp.up": "ffn_up"})
        ),
    ),
    Family(
        model_type="glm4",
        architectures=("Glm4ForCausalLM",),
        read=read_glm4,
        names=table(SANDWICH),
        gguf=GGUFFamily(
            architecture="glm4", config=gguf_config, names=gguf_table({"mlp.up": "ffn_up"})
        ),
    ),
    Family(
        model_type="glm4_moe",
        architectures=("Glm4MoeForCausalLM",),
        read=read_glm4_moe,
        names=table(SHARED),
        mtp=DEEPSEEK,
        gguf=GGUFFamily(
            architecture="glm4moe",
            config=glm4_moe_gguf_config,
            names=gguf_table(GLM4_MOE_GGUF),
            mtp=LLAMA_CPP,
        ),
    ),
    Family(
        model_type="sarvam_moe",
        architectures=("SarvamMoEForCausalLM", "Glm4MoeForCausalLM"),
        read=read_sarvam_moe,
        names=table(SARVAM),
    ),
    Family(
        model_type="solar_open",
        architectures=("SolarOpenForCausalLM",),
        read=read_solar_open,
        names=table(SHARED),
    ),
    Family(
        model_type="chatglm",
        architectures=("ChatGLMModel", "ChatGLMForConditionalGeneration"),
        read=read_chatglm,
        names=table(CHATGLM, layer="transformer.encoder.layers.{i}."),
    ),
)
