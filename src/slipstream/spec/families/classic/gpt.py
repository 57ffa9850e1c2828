"""GPT (norms after additions), GPT-2 (learned positions, transposed weights), GPT-J (parallel attention and MLP, interleaved
rotary embedding of a part of each head), CodeGen (a GPT-J whose q, k and v are in parts), GPT-Neo (a GPT-2 with windows), and
StarCoder (GPT-BigCode: GPT-2 with one kv head)."""

from __future__ import annotations

import dataclasses
from typing import Any

from slipstream.spec.families.base import ConfigReader, Family, GGUFFamily
from slipstream.spec.families.builders import (
    HeadCounts,
    activation,
    attention,
    before,
    heads,
    layer_norm,
    model,
    plain,
)
from slipstream.spec.families.metadata import gguf_config
from slipstream.spec.families.names import Theirs, gguf_table, table
from slipstream.spec.model import (
    AttentionSpec,
    DenseSpec,
    LayerSpec,
    LearnedPositionSpec,
    ModelSpec,
    NormSpec,
    ParallelBlock,
    PostNormBlock,
    RopeSpec,
)
from slipstream.spec.parameters import Regroup


def _norm(c: ConfigReader) -> NormSpec:
    return layer_norm(c.size("n_embd"), c.take("layer_norm_epsilon", float, 1e-5))


def _mlp(c: ConfigReader) -> DenseSpec:
    return plain(
        c.size("n_inner", 4 * c.size("n_embd")), activation(c, "activation_function", "gelu_new")
    )


def _heads(c: ConfigReader) -> HeadCounts:
    return heads(c, hidden="n_embd", num_heads="n_head", num_kv_heads=None)


def _model(
    c: ConfigReader, family: str, layer: LayerSpec, max_position: int, **more: Any
) -> ModelSpec:
    if family != "codegen":  # transformers ignores it in CodeGen
        c.require("n_ctx", max_position)
    return model(
        c, family, layer, _norm(c), max_position, hidden="n_embd", num_layers="n_layer", **more
    )


def _learned(c: ConfigReader, family: str, h: HeadCounts) -> ModelSpec:
    """Reads GPT-2 or StarCoder, which have learned positions."""
    c.require("add_cross_attention", False)
    scale = h.head_dim**-0.5 if c.take("scale_attn_weights", bool, True) else 1.0
    layer = LayerSpec(
        attention=attention(h, None, scale=scale, qkv_bias=True, out_bias=True),
        mlp=_mlp(c),
        block=before(_norm(c)),
    )
    max_position = c.size("n_positions", 1024)
    return _model(
        c,
        family,
        layer,
        max_position,
        learned_positions=LearnedPositionSpec(num_positions=max_position),
        tied=True,
    )


def read_gpt2(c: ConfigReader) -> ModelSpec:
    c.ignore("n_special", "predict_special_tokens")  # from OpenAI's original release
    c.require("scale_attn_by_inverse_layer_idx", False)
    c.require("reorder_and_upcast_attn", False)
    return _learned(c, "gpt2", _heads(c))


def read_gpt1(c: ConfigReader) -> ModelSpec:
    """Reads the first GPT: a GPT-2 with a norm after each addition to the residual and no final norm."""
    norm, mlp = _norm(c), plain(4 * c.size("n_embd"), activation(c, "afn", "gelu_new"))
    if c.value("afn") == "gelu":  # transformers means the tanh approximation by "gelu" here
        mlp = dataclasses.replace(mlp, activation="gelu_tanh")
    layer = LayerSpec(
        attention=attention(_heads(c), None, qkv_bias=True, out_bias=True),
        mlp=mlp,
        block=PostNormBlock(attention_norm=norm, mlp_norm=norm),
    )
    longest = c.size("n_positions", 512)
    positions = LearnedPositionSpec(num_positions=longest)
    c.require("n_ctx", longest)
    c.ignore("n_special", "predict_special_tokens")
    sizes: dict[str, Any] = {"hidden": "n_embd", "num_layers": "n_layer", "tied": True}
    return model(c, "openai-gpt", layer, None, longest, learned_positions=positions, **sizes)


def read_bigcode(c: ConfigReader) -> ModelSpec:
    h = _heads(c)
    if c.take("multi_query", bool, True):
        h = h._replace(num_kv_heads=1)
    c.require("num_key_value_heads", h.num_kv_heads)
    # Both ask for a softmax in float32, which is always used here.
    c.ignore("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32")
    c.ignore(
        "inference_runner",
        "max_batch_size",
        "max_sequence_length",
        "pad_key_length",
        "pre_allocate_kv_cache",
    )
    c.ignore("validate_runner_input")
    return _learned(c, "gpt_bigcode", h)


def read_gpt_neo(c: ConfigReader) -> ModelSpec:
    """Reads GPT-Neo. Scores are not scaled, and every other layer has a window."""
    h = heads(c, num_heads="num_heads", num_kv_heads=None)
    count, window = c.size("num_layers", 24), c.size("window_size", 256)
    groups = c.take("attention_types", list, [[["global", "local"], 12]])
    kinds = [
        kind for kind_of_group, times in groups for _ in range(times) for kind in kind_of_group
    ]
    if len(kinds) != count or not set(kinds) <= {"global", "local"}:
        raise c.unsupported("attention_types", f"must make {count} of global or local")
    c.require("attention_layers", kinds)
    c.ignore("resid_dropout")
    max_position, hidden = c.size("max_position_embeddings", 2048), c.size("hidden_size")
    norm = layer_norm(hidden, c.take("layer_norm_epsilon", float, 1e-5))
    mlp = plain(
        c.size("intermediate_size", 4 * hidden), activation(c, "activation_function", "gelu_new")
    )

    def layer(i: int) -> LayerSpec:
        seen = window if kinds[i] == "local" else None
        of = attention(h, None, scale=1.0, out_bias=True, window=seen)
        return LayerSpec(attention=of, mlp=mlp, block=before(norm))

    return model(
        c,
        "gpt_neo",
        layer,
        norm,
        max_position,
        num_layers="num_layers",
        learned_positions=LearnedPositionSpec(num_positions=max_position),
        tied=True,
    )


def read_codegen(c: ConfigReader) -> ModelSpec:
    c.ignore("n_ctx")
    return read_gptj(c, "codegen")


def read_gptj(c: ConfigReader, family: str = "gptj") -> ModelSpec:
    h = _heads(c)
    rotary_dim = c.size("rotary_dim", h.head_dim if family == "gptj" else 64)
    if rotary_dim > h.head_dim or rotary_dim % 2:
        raise c.unsupported(
            "rotary_dim", f"must be even and at most the head's {h.head_dim} dimensions"
        )
    position = RopeSpec(theta=10000.0, rotary_dim=rotary_dim, style="interleaved")
    layer = LayerSpec(
        attention=attention(h, position), mlp=_mlp(c), block=ParallelBlock(norm=_norm(c))
    )
    # Old checkpoints have these two keys from the training code.
    c.require("rotary", True)
    c.require("scale_attn_weights", True)
    return _model(c, family, layer, c.size("n_positions", 2048), head_bias=True)


GPT2 = {
    "embed": "wte",
    "positions": "wpe",
    "final_norm": "ln_f",
    "head": "lm_head",
    "pre_attention": "ln_1",
    "attention.qkv": "attn.c_attn",
    "attention.out": "attn.c_proj",
    "pre_mlp": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}
GPT1 = {
    **GPT2,
    "embed": "tokens_embed",
    "positions": "positions_embed",
    "attention_norm": "ln_1",
    "mlp_norm": "ln_2",
}
GPTJ: dict[str, Theirs] = {
    "embed": "transformer.wte",
    "final_norm": "transformer.ln_f",
    "head": "lm_head",
    "norm": "ln_1",
    "attention.qkv": ("attn.q_proj", "attn.k_proj", "attn.v_proj"),
    "attention.out": "attn.out_proj",
    "mlp.up": "mlp.fc_in",
    "mlp.down": "mlp.fc_out",
}


def _parts(layer: LayerSpec, part: int) -> Regroup:
    """Reorders the rows of CodeGen's q, k and v. They are stored in four parts, one for each device
    of the training, with q, then v, then k in each."""
    a = layer.attention
    assert isinstance(a, AttentionSpec)
    return Regroup(num_groups=4, sizes=(a.q_size // 4,) * 3, order=(0, 2, 1))


CODEGEN: dict[str, Theirs] = {**GPTJ, "attention.qkv": "attn.qkv_proj"}
GPT_NEO: dict[str, Theirs] = {
    **{name: f"transformer.{theirs}" for name, theirs in list(GPT2.items())[:3]},
    **dict(list(GPT2.items())[3:]),
    "attention.qkv": tuple(f"attn.attention.{x}_proj" for x in "qkv"),
    "attention.out": "attn.attention.out_proj",
}
TRANSPOSED = ("attention.qkv", "attention.out", "mlp.up", "mlp.down")


def gguf_learned_config(m: ConfigReader) -> dict[str, Any]:
    read = gguf_config(m)
    return {
        "n_embd": read["hidden_size"],
        "n_layer": read["num_hidden_layers"],
        "n_head": read["num_attention_heads"],
        "n_inner": read["intermediate_size"],
        "n_positions": read["max_position_embeddings"],
        "layer_norm_epsilon": m.take("attention.layer_norm_epsilon", float),
        "multi_query": None
        if read["num_key_value_heads"] is None
        else read["num_key_value_heads"] == 1,
    }


def gguf_gpt2_config(m: ConfigReader) -> dict[str, Any]:
    config = gguf_learned_config(m)
    m.require("attention.head_count_kv", config["n_head"])
    return {**config, "multi_query": None, "activation_function": "gelu_new"}


def gguf_starcoder_config(m: ConfigReader) -> dict[str, Any]:
    # values of StarCoder, which the file lacks
    return {**gguf_learned_config(m), "activation_function": "gelu"}


MASKS = (r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)",)

FAMILIES = (
    Family(
        model_type="openai-gpt",
        architectures=("OpenAIGPTLMHeadModel",),
        read=read_gpt1,
        names=table(GPT1, layer="h.{i}.", changes=dict.fromkeys(TRANSPOSED, "transpose")),
        prefixes=("", "transformer."),
    ),
    Family(
        model_type="gpt2",
        architectures=("GPT2LMHeadModel",),
        read=read_gpt2,
        names=table(GPT2, layer="h.{i}.", changes=dict.fromkeys(TRANSPOSED, "transpose")),
        prefixes=("", "transformer."),
        ignored=MASKS,
        gguf=GGUFFamily(architecture="gpt2", config=gguf_gpt2_config, names=gguf_table(fused=True)),
    ),
    Family(
        model_type="gpt_bigcode",
        architectures=("GPTBigCodeForCausalLM",),
        read=read_bigcode,
        names=table(GPT2, layer="h.{i}.", changes={"attention.qkv": "ungroup"}),
        prefixes=("", "transformer."),
        ignored=MASKS,
        gguf=GGUFFamily(
            architecture="starcoder", config=gguf_starcoder_config, names=gguf_table(fused=True)
        ),
    ),
    Family(
        model_type="gptj",
        architectures=("GPTJForCausalLM",),
        read=read_gptj,
        names=table(GPTJ, layer="transformer.h.{i}."),
        ignored=MASKS,
    ),
    Family(
        model_type="codegen",
        architectures=("CodeGenForCausalLM",),
        read=read_codegen,
        names=table(CODEGEN, layer="transformer.h.{i}.", changes={"attention.qkv": _parts}),
        ignored=(*MASKS, r"transformer\.h\.\d+\.attn\.causal_mask"),
    ),
    Family(
        model_type="gpt_neo",
        architectures=("GPTNeoForCausalLM",),
        read=read_gpt_neo,
        names=table(GPT_NEO, layer="transformer.h.{i}."),
        ignored=(r"transformer\.h\.\d+\.attn\.attention\.(bias|masked_bias)",),
    ),
)
