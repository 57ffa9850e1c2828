"""BERT (Devlin et al. 2019), MiniLM, RoBERTa, ELECTRA, DistilBERT and MPNet (Song et al. 2020).

They are encoders with post-norms, learned positions and token types. MPNet has relative position biases too. With a classifier
they score pairs of texts (cross-encoders)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from slipstream.spec.families.base import ConfigReader, Family, GGUFFamily, Names
from slipstream.spec.families.builders import (
    activation,
    attention,
    before,
    heads,
    layer_norm,
    model,
    num_labels,
    num_token_labels,
    plain,
)
from slipstream.spec.families.metadata import encoder_gguf_config
from slipstream.spec.families.names import Theirs, gguf_table, table
from slipstream.spec.model import (
    Activation,
    BucketSpec,
    ClassifierSpec,
    LayerSpec,
    LearnedPositionSpec,
    ModelSpec,
    NormSpec,
    PostNormBlock,
    RopeSpec,
)


def bert_classifier(c: ConfigReader, act: Literal["tanh", "relu", "gelu"]) -> ClassifierSpec | None:
    if (of_tokens := num_token_labels(c)) is not None:
        return ClassifierSpec(num_labels=of_tokens, activation=None, pooling="tokens")
    labels = num_labels(c)
    return None if labels is None else ClassifierSpec(num_labels=labels, activation=act)


def _layer(
    c: ConfigReader,
    norm: NormSpec,
    inner: int,
    act: Activation,
    *,
    hidden: str = "hidden_size",
    num_heads: str = "num_attention_heads",
    position: BucketSpec | RopeSpec | None = None,
) -> LayerSpec:
    h = heads(c, hidden=hidden, num_heads=num_heads, num_kv_heads=None)
    return LayerSpec(
        attention=attention(h, position, causal=False, qkv_bias=True, out_bias=True),
        mlp=plain(inner, act),
        block=PostNormBlock(attention_norm=norm, mlp_norm=norm),
    )


def read_encoder(
    c: ConfigReader,
    family: str,
    offset: int | None = 0,
    *,
    position: BucketSpec | RopeSpec | None = None,
    types: bool = True,
    act_of_scores: Literal["tanh", "relu", "gelu"] = "tanh",
    embed_size: int | None = None,
    pre_norm: bool = False,
    same: Callable[[int], int] = lambda i: i,
) -> ModelSpec:
    """Reads a BERT or a similar encoder.

    `offset`: the row of the first position in the table of positions; None: there is no table. `embed_size`: width of the
    embeddings, if a projection to the hidden size follows. `pre_norm`: norms come before attention and MLP, and after the
    last layer, not after the embeddings. `same`: for each layer's index, the index of the layer whose weights it shares."""
    hidden, eps = c.size("hidden_size"), c.take("layer_norm_eps", float, 1e-12)
    norm = layer_norm(hidden, eps)
    layer = _layer(
        c, norm, c.size("intermediate_size"), activation(c, "hidden_act", "gelu"), position=position
    )
    layer = replace(layer, block=before(norm)) if pre_norm else layer
    rows = c.size("max_position_embeddings", 512)
    c.require("position_embedding_type", "absolute")
    c.require("is_decoder", False)
    c.require("add_cross_attention", False)
    learned = None if offset is None else LearnedPositionSpec(num_positions=rows, offset=offset)
    return model(
        c,
        family,
        lambda i: layer if same(i) == i else replace(layer, same_as=same(i)),
        norm if pre_norm else None,
        rows - (offset or 0),
        learned_positions=learned,
        embed_size=embed_size,
        embed_norm=None if pre_norm else layer_norm(embed_size or hidden, eps),
        num_token_types=c.size("type_vocab_size", 2) if types else 0,
        classifier=bert_classifier(c, act_of_scores),
    )


def read_bert(c: ConfigReader) -> ModelSpec:
    c.ignore(
        "directionality", "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers"
    )  # keys of Google's release
    c.ignore("pooler_size_per_head", "pooler_type")
    return read_encoder(c, "bert")


def read_roberta(c: ConfigReader) -> ModelSpec:
    # the first position follows the padding token's row
    return read_encoder(c, "roberta", c.take("pad_token_id", int, 1) + 1)


def read_electra(c: ConfigReader) -> ModelSpec:
    """Reads an ELECTRA. The small model has narrower embeddings. The config's default is 128."""
    c.ignore("summary_last_dropout")
    return read_encoder(c, "electra", act_of_scores="gelu", embed_size=narrow(c, 128))


def narrow(c: ConfigReader, default: int | None = None) -> int | None:
    """Width of the embeddings if it differs from that of the layers, otherwise None."""
    width = c.size("embedding_size", default or c.size("hidden_size"))
    return None if width == c.size("hidden_size") else width


def read_mpnet(c: ConfigReader) -> ModelSpec:
    c.require("relative_attention_num_buckets", 32)
    position = BucketSpec(num_buckets=32, max_distance=128, both_directions=True)
    return read_encoder(c, "mpnet", 2, position=position, types=False)


def read_distilbert(c: ConfigReader) -> ModelSpec:
    c.require("sinusoidal_pos_embds", False, True)  # either way the table is in the checkpoint
    c.ignore("seq_classif_dropout", "qa_dropout", "tie_weights_")
    norm, act = layer_norm(c.size("dim", 768), 1e-12), activation(c, "activation", "gelu")
    layer = _layer(c, norm, c.size("hidden_dim", 3072), act, hidden="dim", num_heads="n_heads")
    rows = c.size("max_position_embeddings", 512)
    return model(
        c,
        "distilbert",
        layer,
        None,
        rows,
        hidden="dim",
        num_layers="n_layers",
        learned_positions=LearnedPositionSpec(num_positions=rows),
        embed_norm=norm,
        classifier=bert_classifier(c, "relu"),
    )


BERT: dict[str, Theirs] = {
    "embed": "embeddings.word_embeddings",
    "positions": "embeddings.position_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "embed_norm": "embeddings.LayerNorm",
    "embed_in": "embeddings_project",
    "attention.qkv": ("attention.self.query", "attention.self.key", "attention.self.value"),
    "attention.out": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "mlp.up": "intermediate.dense",
    "mlp.down": "output.dense",
    "mlp_norm": "output.LayerNorm",
    "classifier.dense": "pooler.dense",
    "classifier.out": "classifier",
}
ROBERTA: dict[str, Theirs] = {
    **BERT,
    "classifier.dense": "classifier.dense",
    "classifier.out": "classifier.out_proj",
}
MPNET: dict[str, Theirs] = {
    **{name: theirs for name, theirs in ROBERTA.items() if name != "token_types"},
    "distances": "encoder.relative_attention_bias",
    "attention.qkv": ("attention.attn.q", "attention.attn.k", "attention.attn.v"),
    "attention.out": "attention.attn.o",
    "attention_norm": "attention.LayerNorm",
}
GGUF_BERT: dict[str, Theirs] = {
    "token_types": "token_types",
    "attention_norm": "attn_output_norm",
    "mlp_norm": "layer_output_norm",
}
"""Differences from `GGUF`. RoBERTa has the same names, but its table lacks the rows before the
first position."""
DISTILBERT: dict[str, Theirs] = {
    "embed": "embeddings.word_embeddings",
    "positions": "embeddings.position_embeddings",
    "embed_norm": "embeddings.LayerNorm",
    "attention.qkv": ("attention.q_lin", "attention.k_lin", "attention.v_lin"),
    "attention.out": "attention.out_lin",
    "attention_norm": "sa_layer_norm",
    "mlp.up": "ffn.lin1",
    "mlp.down": "ffn.lin2",
    "mlp_norm": "output_layer_norm",
    "classifier.dense": "pre_classifier",
    "classifier.out": "classifier",
}

# Heads for masked words and next sentences, the unused projection of the first token, and buffers.
UNREAD = (
    r"cls\..*",
    r"lm_head\..*",
    r"vocab_\w+\..*",
    r"pooler\..*",
    r"embeddings\.(position_ids|token_type_ids)",
)


def encoder_architectures(name: str) -> tuple[str, ...]:
    return tuple(
        name + end
        for end in (
            "Model",
            "ForMaskedLM",
            "ForPreTraining",
            "ForSequenceClassification",
            "ForTokenClassification",
        )
    )


def encoder_table(theirs: dict[str, Theirs], layer: str) -> Callable[[ModelSpec], Names]:
    """Function that makes the table of names. A token classifier is called `classifier` in all families."""

    def names(spec: ModelSpec) -> Names:
        of_tokens = spec.classifier is not None and spec.classifier.pooling == "tokens"
        own = {**theirs, "classifier.out": "classifier"} if of_tokens else theirs
        return table(own, layer=layer)(spec)

    return names


FAMILIES = (
    Family(
        model_type="bert",
        architectures=(*encoder_architectures("Bert"), "HF_ColBERT"),
        read=read_bert,
        names=table(BERT, layer="encoder.layer.{i}."),
        prefixes=("", "bert."),
        ignored=UNREAD,
        gguf=GGUFFamily(
            architecture="bert",
            config=encoder_gguf_config,
            names=gguf_table(GGUF_BERT, gated=False),
        ),
    ),
    *(
        Family(
            model_type=kind,
            architectures=encoder_architectures(name),
            read=read,
            names=encoder_table(theirs, layer),
            prefixes=("", prefix),
            ignored=(*UNREAD, r"(generator|discriminator)_\w+\..*")
            if kind == "electra"
            else UNREAD,
        )
        for kind, name, read, theirs, layer, prefix in (
            ("roberta", "Roberta", read_roberta, ROBERTA, "encoder.layer.{i}.", "roberta."),
            ("xlm-roberta", "XLMRoberta", read_roberta, ROBERTA, "encoder.layer.{i}.", "roberta."),
            ("camembert", "Camembert", read_roberta, ROBERTA, "encoder.layer.{i}.", "roberta."),
            ("electra", "Electra", read_electra, ROBERTA, "encoder.layer.{i}.", "electra."),
            ("mpnet", "MPNet", read_mpnet, MPNET, "encoder.layer.{i}.", "mpnet."),
            (
                "distilbert",
                "DistilBert",
                read_distilbert,
                DISTILBERT,
                "transformer.layer.{i}.",
                "distilbert.",
            ),
        )
    ),
)
