"""ModernBERT (Warner et al. 2024, arXiv:2412.13663) and EuroBERT: encoders with the layers of a decoder, which have pre-norms,
rotary positions and gated MLPs. Most layers of ModernBERT have a window on both sides of a token."""

from __future__ import annotations

from typing import Any

from slipstream.spec.families.base import ConfigReader, Family, GGUFFamily
from slipstream.spec.families.builders import (
    activation,
    attention,
    before,
    gated,
    heads,
    kinds_of_layers,
    layer_norm,
    model,
    num_labels,
    num_token_labels,
    rms,
    rope,
    rope_of_kind,
)
from slipstream.spec.families.encoders.bert import UNREAD
from slipstream.spec.families.metadata import encoder_gguf_config, llama_gguf_config
from slipstream.spec.families.names import LLAMA, Theirs, gguf_table, table
from slipstream.spec.model import ClassifierSpec, LayerSpec, ModelSpec, NormSpec, SequentialBlock


def read_modernbert(c: ConfigReader) -> ModelSpec:
    hidden, bias = c.size("hidden_size"), c.take("attention_bias", bool, False)
    norm = layer_norm(
        hidden, c.take("norm_eps", float, 1e-5), bias=c.take("norm_bias", bool, False)
    )
    h = heads(c, num_kv_heads=None)
    max_position = c.size("max_position_embeddings", 8192)
    every, local = c.size("global_attn_every_n_layers", 3), c.size("local_attention", 128)
    kinds = kinds_of_layers(c, lambda i: "sliding_attention" if i % every else "full_attention")
    c.require("layer_norm_eps", norm.eps)  # the same number again
    c.require("position_embedding_type", "absolute", "rope")  # transformers ignores it
    c.ignore(
        "decoder_bias",
        "sparse_prediction",
        "sparse_pred_ignore_index",
        "mlp_dropout",
        "initializer_cutoff_factor",
    )
    c.ignore(
        "deterministic_flash_attn",
        "reference_compile",
        "repad_logits_with_grad",
        "initializer_factor",
    )
    thetas = {"full_attention": ("global_rope_theta", 160000.0)}
    thetas["sliding_attention"] = ("local_rope_theta", 10000.0)
    positions = {
        kind: rope_of_kind(
            c, kind, h.head_dim, max_position=max_position, theta_key=theta_key, theta=theta
        )
        for kind, (theta_key, theta) in thetas.items()
    }
    mlp = gated(c, "hidden_activation", "gelu", bias=c.take("mlp_bias", bool, False))

    def layer(i: int) -> LayerSpec:
        kind = kinds[i]
        return LayerSpec(
            attention=attention(
                h,
                positions[kind],
                causal=False,
                window=local // 2 + 1 if kind == "sliding_attention" else None,
                qkv_bias=bias,
                out_bias=bias,
            ),
            mlp=mlp,
            block=before(norm)
            if i
            else SequentialBlock(pre_mlp=norm),  # embed_norm serves as the first layer's pre-norm
        )

    return model(
        c, "modernbert", layer, norm, max_position, embed_norm=norm, classifier=_classifier(c, norm)
    )


def gguf_modernbert_config(m: ConfigReader) -> dict[str, Any]:
    """Reads a GGUF file's config. llama.cpp's window counts both sides of a token. The first layer
    of each period has no window."""
    config = encoder_gguf_config(m)
    types = config.pop("type_vocab_size")
    eps = config.pop("layer_norm_eps")
    window = m.maybe("attention.sliding_window", int)
    if types:
        raise m.unsupported("token_types.weight", "ModernBERT's texts have no types")
    count, pattern = config["num_hidden_layers"], "attention.sliding_window_pattern"
    seen = [i % 3 != 0 for i in range(count)]
    if pattern in m:
        given = m.take(pattern, object)
        seen = (
            given if isinstance(given, list) else [i % m.size(pattern) != 0 for i in range(count)]
        )
    m.require("rope.scaling.type", "none")
    m.require("rope.dimension_count", config["hidden_size"] // config["num_attention_heads"])
    return {
        **config,
        "norm_eps": eps,
        "local_attention": window or 0,
        "layer_types": [
            "sliding_attention" if window and narrow else "full_attention" for narrow in seen
        ],
        "global_rope_theta": m.take("rope.freq_base", float, 10000.0),
        "local_rope_theta": m.take("rope.freq_base_swa", float, 10000.0),
        "hidden_activation": m.take("hidden_activation", str, "gelu"),
    }


def gguf_eurobert_config(m: ConfigReader) -> dict[str, Any]:
    return llama_gguf_config(m, causal=False)


def _classifier(c: ConfigReader, norm: NormSpec) -> ClassifierSpec | None:
    act = activation(c, "classifier_activation", "gelu")
    bias = c.take("classifier_bias", bool, False)
    pooling = c.take("classifier_pooling", str, "cls")
    of_tokens = num_token_labels(c)
    if (labels := num_labels(c) if of_tokens is None else of_tokens) is None:
        return None
    if act != "gelu" or pooling not in ("cls", "mean"):
        field = "classifier_pooling" if act == "gelu" else "classifier_activation"
        raise c.unsupported(field, "only 'gelu', and 'cls' or 'mean', are supported")
    return ClassifierSpec(
        num_labels=labels,
        activation="gelu",
        norm=norm,
        bias=bias,
        pooling=pooling if of_tokens is None else "tokens",  # type: ignore[arg-type]
    )


def read_eurobert(c: ConfigReader) -> ModelSpec:
    h, max_position = heads(c), c.size("max_position_embeddings", 8192)
    bias = c.take("attention_bias", bool, False)
    norm = rms(c.size("hidden_size"), c.take("rms_norm_eps", float, 1e-5))
    position = rope(c, h.head_dim, max_position=max_position)
    layer = LayerSpec(
        attention=attention(h, position, causal=False, qkv_bias=bias, out_bias=bias),
        mlp=gated(c, bias=c.take("mlp_bias", bool, False)),
        block=before(norm),
    )
    c.ignore("classifier_pooling", "mask_token", "mask_token_id", "clf_pooling")
    return model(c, "eurobert", layer, norm, max_position)


MODERNBERT: dict[str, Theirs] = {
    "embed": "embeddings.tok_embeddings",
    "embed_norm": "embeddings.norm",
    "final_norm": "final_norm",
    "pre_attention": "attn_norm",
    "attention.qkv": "attn.Wqkv",
    "attention.out": "attn.Wo",
    "pre_mlp": "mlp_norm",
    "mlp.up": "mlp.Wi",
    "mlp.down": "mlp.Wo",
    "classifier.dense": "head.dense",
    "classifier.norm": "head.norm",
    "classifier.out": "classifier",
}
GGUF_MODERNBERT: dict[str, Theirs] = {"attention.qkv": "attn_qkv", "mlp.up": "ffn_up"}
EUROBERT = {
    name: theirs.removeprefix("model.") if isinstance(theirs, str) else theirs
    for name, theirs in LLAMA.items()
}

FAMILIES = (
    Family(
        model_type="modernbert",
        architectures=(
            "ModernBertModel",
            "ModernBertForTokenClassification",
            "ModernBertForMaskedLM",
            "ModernBertForSequenceClassification",
        ),
        read=read_modernbert,
        names=table(MODERNBERT, layer="layers.{i}."),
        prefixes=("", "model."),
        ignored=(*UNREAD, r"head\..*", r"decoder\..*"),
        gguf=GGUFFamily(
            architecture="modern-bert",
            config=gguf_modernbert_config,
            names=gguf_table(GGUF_MODERNBERT),
        ),
    ),
    Family(
        model_type="eurobert",
        architectures=("EuroBertModel", "EuroBertForMaskedLM"),
        read=read_eurobert,
        names=table(EUROBERT, layer="layers.{i}."),
        prefixes=("", "model."),
        ignored=UNREAD,
        gguf=GGUFFamily(architecture="eurobert", config=gguf_eurobert_config, names=gguf_table()),
    ),
)
