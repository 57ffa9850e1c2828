"""ALBERT (Lan et al. 2020), RemBERT (Chung et al. 2021), RoFormer (Su et al. 2021), Megatron-BERT (Shoeybi et al. 2019).

They differ from BERT in a few points: layers that share weights, embeddings narrower than layers, rotated queries and keys,
norms before attention and MLP."""

from __future__ import annotations

from typing import Literal

from slipstream.spec.families.base import ConfigReader, Family, Names
from slipstream.spec.families.builders import heads
from slipstream.spec.families.encoders.bert import (
    BERT,
    ROBERTA,
    UNREAD,
    encoder_architectures,
    encoder_table,
    narrow,
    read_encoder,
)
from slipstream.spec.families.names import Theirs, table
from slipstream.spec.model import ModelSpec, RopeSpec


def read_albert(c: ConfigReader) -> ModelSpec:
    """Reads an ALBERT. Its layers are in groups, each of which has one layer's weights."""
    c.assume(vocab_size=30000, hidden_size=4096, num_hidden_layers=12)
    c.assume(num_attention_heads=64, intermediate_size=16384, hidden_act="gelu_new")
    c.require("inner_group_num", 1)
    # Keys of Google's release.
    c.ignore("net_structure_type", "gap_size", "num_memory_blocks", "down_scale_factor")
    count, num_groups = c.size("num_hidden_layers"), c.size("num_hidden_groups", 1)
    if num_groups > count:
        raise c.unsupported("num_hidden_groups", f"must be at most num_hidden_layers ({count})")
    groups = [int(i / (count / num_groups)) for i in range(count)]
    width = c.size("embedding_size", 128)
    return read_encoder(c, "albert", embed_size=width, same=lambda i: groups.index(groups[i]))


def read_rembert(c: ConfigReader) -> ModelSpec:
    c.assume(vocab_size=250300, hidden_size=1152, num_hidden_layers=32)
    c.assume(num_attention_heads=18, intermediate_size=4608)
    c.ignore("output_embedding_size")  # size of the masked-word head
    return read_encoder(c, "rembert", embed_size=c.size("input_embedding_size", 256))


def read_roformer(c: ConfigReader) -> ModelSpec:
    c.assume(vocab_size=50000, hidden_size=768, num_hidden_layers=12, max_position_embeddings=1536)
    c.assume(num_attention_heads=12, intermediate_size=3072, hidden_act="gelu")
    c.require("rotary_value", False)
    size = heads(c, num_kv_heads=None).head_dim
    position = RopeSpec(theta=10000.0, rotary_dim=size, style="interleaved")
    act: Literal["gelu", "relu"] = "relu" if c.value("hidden_act") == "relu" else "gelu"
    if any(str(x).endswith("ForSequenceClassification") for x in c.value("architectures") or ()):
        c.require("hidden_act", "gelu", "relu")  # activation of the classifier, too
    return read_encoder(
        c, "roformer", None, position=position, act_of_scores=act, embed_size=narrow(c)
    )


def read_megatron_bert(c: ConfigReader) -> ModelSpec:
    c.assume(vocab_size=29056, hidden_size=1024, num_hidden_layers=24)
    c.assume(num_attention_heads=16, intermediate_size=4096)
    return read_encoder(c, "megatron-bert", pre_norm=True)


ALBERT: dict[str, Theirs] = {
    **BERT,
    "embed_in": "encoder.embedding_hidden_mapping_in",
    "attention.qkv": ("attention.query", "attention.key", "attention.value"),
    "attention.out": "attention.dense",
    "attention_norm": "attention.LayerNorm",
    "mlp.up": "ffn",
    "mlp.down": "ffn_output",
    "mlp_norm": "full_layer_layer_norm",
    "classifier.dense": "pooler",
}
REMBERT: dict[str, Theirs] = {**BERT, "embed_in": "encoder.embedding_hidden_mapping_in"}
ROFORMER: dict[str, Theirs] = {**ROBERTA, "embed_in": "embeddings_project"}
MEGATRON_BERT: dict[str, Theirs] = {
    **BERT,
    "final_norm": "encoder.ln",
    "pre_attention": "attention.ln",
    "pre_mlp": "ln",
}


def albert_names(spec: ModelSpec) -> Names:
    """Table of names. The tensors of a group of layers belong to its first layer."""
    found = table(ALBERT, layer="{i}:")(spec)
    owners = [i for i, layer in enumerate(spec.layers) if layer.same_as is None]
    groups = {
        str(i): f"encoder.albert_layer_groups.{g}.albert_layers.0." for g, i in enumerate(owners)
    }
    parts = ((name.rpartition(":"), place) for name, place in found.items())
    return {groups.get(i, "") + rest: place for (i, _, rest), place in parts}


FAMILIES = tuple(
    Family(
        model_type=kind,
        architectures=encoder_architectures(name),
        read=read,
        names=names,
        prefixes=("", prefix),
        ignored=(*UNREAD, r"(predictions|sop_classifier)\..*", r"encoder\.embed_positions\.weight"),
    )
    for kind, name, read, names, prefix in (
        ("albert", "Albert", read_albert, albert_names, "albert."),
        (
            "rembert",
            "RemBert",
            read_rembert,
            table(REMBERT, layer="encoder.layer.{i}."),
            "rembert.",
        ),
        (
            "roformer",
            "RoFormer",
            read_roformer,
            encoder_table(ROFORMER, "encoder.layer.{i}."),
            "roformer.",
        ),
        (
            "megatron-bert",
            "MegatronBert",
            read_megatron_bert,
            table(MEGATRON_BERT, layer="encoder.layer.{i}."),
            "bert.",
        ),
    )
)
