"""Nomic Embed (Nussbaum et al. 2024, arXiv:2402.01613) and GTE (Zhang et al. 2024, arXiv:2407.19669): BERT with rotary
positions and gated MLPs. Their authors' own model types are read too, without the authors' code. Jina's embeddings v3
(arXiv:2409.10173), as transformers has them: RoBERTa with rotary positions."""

from __future__ import annotations

import dataclasses
from typing import Any

from slipstream.spec.families.base import ConfigReader, Family, GGUFFamily
from slipstream.spec.families.builders import (
    activation,
    attention,
    called,
    gated,
    heads,
    layer_norm,
    model,
    plain,
    rope,
)
from slipstream.spec.families.encoders.bert import GGUF_BERT, UNREAD, bert_classifier, encoder_table
from slipstream.spec.families.metadata import encoder_gguf_config
from slipstream.spec.families.names import Theirs, gguf_table, table
from slipstream.spec.model import DenseSpec, LayerSpec, ModelSpec, PostNormBlock


def read_nomic(c: ConfigReader) -> ModelSpec:
    """Reads a Nomic encoder. The authors' config has GPT-2's keys and many switches, of which only
    the setting that makes a BERT is supported."""
    if "n_embd" not in c:
        c.size("head_dim", c.size("hidden_size") // c.size("num_attention_heads"))
        return _read(c, "nomic_bert", gated(c), theta=1000.0)
    for name in (
        *(
            "causal",
            "parallel_block",
            "parallel_block_tied_norm",
            "prenorm",
            "use_rms_norm",
            "reorder_and_upcast_attn",
        ),
        *(
            "qkv_proj_bias",
            "mlp_fc1_bias",
            "mlp_fc2_bias",
            "rotary_emb_interleaved",
            "scale_attn_by_inverse_layer_idx",
        ),
    ):
        c.require(name, False)
    c.require("scale_attn_weights", True)
    c.require("rotary_emb_fraction", 1.0, 1)
    c.require("rotary_emb_scale_base")
    c.require("rotary_scaling_factor")
    c.require("activation_function", "swiglu")
    c.ignore(
        "dense_seq_output",
        "fused_bias_fc",
        "fused_dropout_add_ln",
        "use_flash_attn",
        "use_xentropy",
        "use_rms_norm",
    )
    c.ignore("last_layer_subset", "max_trained_positions", "pad_vocab_size_multiple")
    mlp = DenseSpec(intermediate_size=c.size("n_inner"), activation="silu")
    theta = c.take("rotary_emb_base", float, 10000.0)
    return _read(
        c, "nomic_bert", mlp, theta=theta, keys=("n_embd", "n_layer", "n_head", "n_positions")
    )


def gguf_nomic_config(m: ConfigReader) -> dict[str, Any]:
    m.require("rope.scaling.type", "none")
    return {
        **encoder_gguf_config(m),
        "hidden_act": "silu",
        "rope_theta": m.take("rope.freq_base", float),
    }


def read_gte(c: ConfigReader) -> ModelSpec:
    c.require("layer_norm_type", "layer_norm")
    c.require("position_embedding_type", "rope")
    c.require("pack_qkv", True)
    c.require("logn_attention_scale", False)
    c.ignore(
        "logn_attention_clip1", "unpad_inputs", "use_memory_efficient_attention", "rotary_emb_dim"
    )
    mlp = dataclasses.replace(gated(c, default="gelu"), bias="down")
    return _read(c, "gte", mlp, theta=160000.0, biased=True)


def read_jina(c: ConfigReader) -> ModelSpec:
    c.assume(layer_norm_eps=1e-5)
    mlp = plain(c.size("intermediate_size"), activation(c, "hidden_act", "gelu"))
    return _read(c, "jina_embeddings_v3", mlp, theta=20000.0, biased=True)


def _read(
    c: ConfigReader,
    family: str,
    mlp: DenseSpec,
    *,
    theta: float,
    biased: bool = False,
    keys: tuple[str, ...] = (
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "max_position_embeddings",
    ),
) -> ModelSpec:
    hidden, num_layers, num_heads, positions = keys
    norm = layer_norm(
        c.size(hidden), c.take(called(c, "layer_norm_eps", "layer_norm_epsilon"), float, 1e-12)
    )
    h = heads(c, hidden=hidden, num_heads=num_heads, num_kv_heads=None)
    max_position = c.size(positions)
    position = rope(c, h.head_dim, max_position=max_position, theta=theta)
    layer = LayerSpec(
        attention=attention(h, position, causal=False, qkv_bias=biased, out_bias=biased),
        mlp=mlp,
        block=PostNormBlock(attention_norm=norm, mlp_norm=norm),
    )
    more: dict[str, Any] = {
        "num_token_types": c.take("type_vocab_size", int, 1),
        "classifier": bert_classifier(c, "tanh"),
    }
    return model(
        c,
        family,
        layer,
        None,
        max_position,
        hidden=hidden,
        num_layers=num_layers,
        embed_norm=norm,
        **more,
    )


EMBEDDINGS: dict[str, Theirs] = {
    "embed": "embeddings.word_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "classifier.dense": "pooler.dense",
    "classifier.out": "classifier",
}
NOMIC: dict[str, Theirs] = {
    **EMBEDDINGS,
    "embed_norm": "emb_ln",
    "attention.qkv": "attn.Wqkv",
    "attention.out": "attn.out_proj",
    "attention_norm": "norm1",
    "mlp.up": ("mlp.fc12", "mlp.fc11"),
    "mlp.down": "mlp.fc2",
    "mlp_norm": "norm2",
}
GTE: dict[str, Theirs] = {
    **EMBEDDINGS,
    "embed_norm": "embeddings.LayerNorm",
    "attention.qkv": "attention.qkv_proj",
    "attention.out": "attention.o_proj",
    "attention_norm": "attn_ln",
    "mlp.up": "mlp.up_gate_proj",
    "mlp.down": "mlp.down_proj",
    "mlp_norm": "mlp_ln",
}
JINA: dict[str, Theirs] = {
    **EMBEDDINGS,
    "embed_norm": "emb_ln",
    "attention.qkv": "mixer.Wqkv",
    "attention.out": "mixer.out_proj",
    "attention_norm": "norm1",
    "mlp.up": "mlp.fc1",
    "mlp.down": "mlp.fc2",
    "mlp_norm": "norm2",
    "classifier.dense": "classifier.dense",
    "classifier.out": "classifier.out_proj",
}
GGUF_NOMIC: dict[str, Theirs] = {**GGUF_BERT, "attention.qkv": "attn_qkv"}
ENDINGS = ("Model", "ForMaskedLM", "ForPreTraining", "ForSequenceClassification")

FAMILIES = (
    Family(
        model_type="nomic_bert",
        architectures=tuple("NomicBert" + end for end in ENDINGS),
        read=read_nomic,
        names=table(NOMIC, layer="encoder.layers.{i}."),
        prefixes=("", "bert.", "nomic_bert."),
        ignored=UNREAD,
        gguf=GGUFFamily(
            architecture="nomic-bert", config=gguf_nomic_config, names=gguf_table(GGUF_NOMIC)
        ),
    ),
    Family(
        model_type="jina_embeddings_v3",
        architectures=tuple(
            "JinaEmbeddingsV3" + end for end in (*ENDINGS, "ForTokenClassification")
        ),
        read=read_jina,
        names=encoder_table(JINA, "encoder.layers.{i}."),
        prefixes=("", "roberta."),
        ignored=UNREAD,
    ),
    *(
        Family(
            model_type=kind,
            architectures=tuple(name + end for end in ENDINGS),
            read=read_gte,
            names=table(GTE, layer="encoder.layer.{i}.", changes={"mlp.up": "swap"}),
            prefixes=("", f"{kind}.", "new."),
            ignored=(
                *UNREAD,
                r"classifier\..*",
            ),  # the multilingual model also has token-type weights
        )
        for kind, name in (("gte", "Gte"), ("new", "New"))
    ),
)
