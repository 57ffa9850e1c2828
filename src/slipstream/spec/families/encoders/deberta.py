"""DeBERTa v2 and v3 (He et al. 2021, arXiv:2006.03654 and 2111.09543): BERT's layers with disentangled attention, mostly
without positions in the embeddings. Their classifiers judge pairs (NLI, rerankers) and prompts."""

from __future__ import annotations

from slipstream.spec.families.base import ConfigReader, Family
from slipstream.spec.families.builders import (
    activation,
    attention,
    heads,
    layer_norm,
    model,
    num_labels,
    num_token_labels,
    plain,
)
from slipstream.spec.families.encoders.bert import BERT, UNREAD
from slipstream.spec.families.names import Theirs, table
from slipstream.spec.model import (
    ClassifierSpec,
    DisentangledSpec,
    LayerSpec,
    LearnedPositionSpec,
    ModelSpec,
    NormSpec,
    PostNormBlock,
)


def read_deberta(c: ConfigReader) -> ModelSpec:
    hidden, eps = c.size("hidden_size", 1536), c.take("layer_norm_eps", float, 1e-7)
    norm, longest = layer_norm(hidden, eps), c.size("max_position_embeddings", 512)
    terms, position = _terms(c), None
    if c.take("relative_attention", bool, False):
        position = _distances(c, terms, longest, norm)
    c.require("embedding_size", hidden)
    c.require("attention_head_size", hidden // c.size("num_attention_heads"))
    c.require("conv_kernel_size", 0)
    c.ignore("conv_act", "conv_groups", "pooler_dropout", "cls_dropout", "legacy")
    h = heads(c, num_kv_heads=None)
    layer = LayerSpec(
        attention=attention(
            h,
            position,
            scale=(h.head_dim * (1 + len(terms))) ** -0.5,
            causal=False,
            qkv_bias=True,
            out_bias=True,
        ),
        mlp=plain(c.size("intermediate_size"), activation(c, "hidden_act", "gelu")),
        block=PostNormBlock(attention_norm=norm, mlp_norm=norm),
    )
    learned = c.take("position_biased_input", bool, True)
    return model(
        c,
        "deberta-v2",
        layer,
        None,
        longest,
        learned_positions=LearnedPositionSpec(num_positions=longest) if learned else None,
        embed_norm=norm,
        num_token_types=c.take("type_vocab_size", int, 0),
        classifier=_classifier(c, hidden),
    )


def _terms(c: ConfigReader) -> set[str]:
    said = c.take("pos_att_type", object, None) or []
    named = said.lower().split("|") if isinstance(said, str) else said
    terms = {str(x).strip() for x in named} if isinstance(named, list) else {str(named)}
    if unknown := sorted(terms - {"c2p", "p2c"}):
        raise c.unsupported("pos_att_type", f"{unknown[0]!r} is neither 'c2p' nor 'p2c'")
    return terms


def _distances(c: ConfigReader, terms: set[str], longest: int, norm: NormSpec) -> DisentangledSpec:
    reach, buckets = c.take("max_relative_positions", int, -1), c.take("position_buckets", int, -1)
    norms = {x.strip() for x in c.take("norm_rel_ebd", str, "none").lower().split("|")}
    if not terms:
        raise c.unsupported("pos_att_type", "relative attention needs 'c2p' or 'p2c'")
    if norms - {"none", "layer_norm"}:
        raise c.unsupported("norm_rel_ebd", "only 'none' and 'layer_norm' are supported")
    reach = reach if reach >= 1 else longest
    if 0 < buckets < 4 or buckets // 2 >= reach - 1:
        raise c.unsupported(
            "position_buckets",
            f"{buckets} must be at least 4, and half of it below max_relative_positions - 1 ({reach - 1})",
        )
    return DisentangledSpec(
        num_buckets=buckets if buckets > 0 else None,
        max_distance=reach,
        has_keys="c2p" in terms,
        has_queries="p2c" in terms,
        own=not c.take("share_att_key", bool, False),
        norm=norm if "layer_norm" in norms else None,
    )


def _classifier(c: ConfigReader, hidden: int) -> ClassifierSpec | None:
    act = activation(c, "pooler_hidden_act", "gelu")
    c.require("pooler_hidden_size", hidden)
    if (of_tokens := num_token_labels(c)) is not None:
        return ClassifierSpec(num_labels=of_tokens, activation=None, pooling="tokens")
    if (labels := num_labels(c)) is None:
        return None
    if act not in ("gelu", "tanh", "relu"):
        raise c.unsupported("pooler_hidden_act", "only 'gelu', 'tanh' and 'relu' are supported")
    return ClassifierSpec(num_labels=labels, activation=act)


NAMES: dict[str, Theirs] = {
    **BERT,
    "distances": "encoder.rel_embeddings",
    "distances_norm": "encoder.LayerNorm",
    "attention.qkv": tuple(f"attention.self.{x}_proj" for x in ("query", "key", "value")),
    "attention.position_key": "attention.self.pos_key_proj",
    "attention.position_query": "attention.self.pos_query_proj",
}

FAMILIES = (
    Family(
        model_type="deberta-v2",
        architectures=tuple(
            f"DebertaV2{end}"
            for end in (
                "Model",
                "ForMaskedLM",
                "ForSequenceClassification",
                "ForTokenClassification",
            )
        ),
        read=read_deberta,
        names=table(NAMES, layer="encoder.layer.{i}."),
        prefixes=("", "deberta."),
        ignored=(*UNREAD, r"(lm_predictions|mask_predictions)\..*"),
    ),
)
