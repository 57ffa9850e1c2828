"""T5 and Flan-T5 (Raffel et al. 2020): encoder-decoders with relative position biases, RMS norms and unscaled scores.

1. v1.0 has ReLU and tied embeddings. v1.1 and Flan have gated GELU and an untied head.
2. UMT5 (Chung et al. 2023) has position biases in each layer.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from slipstream.spec.families.base import ConfigReader, Family, GGUFFamily, Names
from slipstream.spec.families.builders import ACTIVATIONS, HeadCounts, attention, rms
from slipstream.spec.families.names import Theirs, table
from slipstream.spec.model import (
    Activation,
    AttentionSpec,
    BucketSpec,
    DenseSpec,
    EncoderSpec,
    LayerSpec,
    ModelSpec,
    SequentialBlock,
)


def _activation(c: ConfigReader, default: str) -> tuple[Activation, bool]:
    """The activation that `feed_forward_proj` names (relu, gated-gelu, …), and whether the MLP is gated."""
    said = c.take("feed_forward_proj", str, default)
    name, is_gated = said.removeprefix("gated-"), said.startswith("gated-")
    name = "gelu_new" if said == "gated-gelu" else name  # means the tanh approximation
    if name not in ACTIVATIONS:
        raise c.unsupported(
            "feed_forward_proj",
            f"the activations are {', '.join(ACTIVATIONS)}, each also as gated-…",
        )
    c.require("dense_act_fn", name)
    c.require("is_gated_act", is_gated)
    return ACTIVATIONS[name], is_gated


def read(c: ConfigReader, *, family: str = "t5", own: bool = False) -> ModelSpec:
    """Reads a T5 or a UMT5. `own`: each layer has its own position biases. An architecture named
    …EncoderModel is the encoder alone."""
    alone = str(next(iter(c.take("architectures", list, [])), "")).endswith("EncoderModel")
    if not alone:
        c.require("is_encoder_decoder", True)
    c.ignore("is_encoder_decoder")
    c.require("is_decoder", False)
    c.ignore("dropout_rate", "initializer_factor")
    hidden = c.size("d_model")
    # n · d_kv may differ from d_model
    h = HeadCounts(n := c.size("num_heads"), n, c.size("d_kv", 64))
    norm = rms(hidden, c.take("layer_norm_epsilon", float, 1e-6))
    act, is_gated = _activation(c, "relu" if family == "t5" else "gated-gelu")
    mlp = DenseSpec(intermediate_size=c.size("d_ff"), activation=act, gated=is_gated)
    num_buckets = c.size("relative_attention_num_buckets", 32)
    far = c.size("relative_attention_max_distance", 128)

    def attended(position: BucketSpec | None, **more: Any) -> AttentionSpec:
        return attention(h, position, scale=1.0, **more)

    buckets = partial(BucketSpec, num_buckets=num_buckets, max_distance=far, own=own)
    both, back = buckets(both_directions=True), buckets(both_directions=False)
    block = SequentialBlock(pre_attention=norm, pre_mlp=norm)
    reader = LayerSpec(attention=attended(both, causal=False), mlp=mlp, block=block)
    block = SequentialBlock(pre_attention=norm, pre_cross=norm, pre_mlp=norm)
    writer = LayerSpec(
        attention=attended(back), mlp=mlp, block=block, cross=attended(None, causal=False)
    )
    num_layers = c.size("num_layers")
    start = c.take("decoder_start_token_id", int, 0)
    num_answering = c.size("num_decoder_layers", num_layers)
    # v1.0 ties the embeddings and scales the states, v1.1 does neither. transformers 5 sets `tie_word_embeddings` for all
    # models and adds `scale_decoder_outputs`; `description` looks for a head in the checkpoint. It never scales an mT5.
    tied = c.take("tie_word_embeddings", bool, True)
    if family == "mt5":
        c.require("scale_decoder_outputs", False)
    scaled = family != "mt5" and c.take("scale_decoder_outputs", bool, tied)
    if alone:
        spec = ModelSpec(
            family=family,
            vocab_size=c.size("vocab_size"),
            hidden_size=hidden,
            max_position=c.size("n_positions", 512),
            layers=(reader,) * num_layers,
            final_norm=norm,
        )
        c.finish()
        return spec
    spec = ModelSpec(
        family=family,
        vocab_size=c.size("vocab_size"),
        hidden_size=hidden,
        max_position=c.size("n_positions", 512),
        layers=(writer,) * num_answering,
        final_norm=norm,
        tied_embeddings=tied,
        logit_scale=hidden**-0.5 if scaled else 1.0,
        encoder=EncoderSpec(layers=(reader,) * num_layers, final_norm=norm, start_token_id=start),
    )
    c.finish()
    return spec


def names(spec: ModelSpec) -> Names:
    mlp = spec.layers[0].mlp
    assert isinstance(mlp, DenseSpec)
    up: Theirs = (
        ("DenseReluDense.wi_0", "DenseReluDense.wi_1") if mlp.gated else "DenseReluDense.wi"
    )

    def feed(index: int) -> dict[str, Theirs]:
        at = f"layer.{index}."
        parts: Theirs = at + up if isinstance(up, str) else tuple(at + part for part in up)
        return {"pre_mlp": at + "layer_norm", "mlp.up": parts, "mlp.down": at + "DenseReluDense.wo"}

    theirs = {**T5, **feed(2), **{f"encoder.{name}": part for name, part in feed(1).items()}}
    if spec.is_encoder:  # an encoder stored without its decoder
        own = {
            name.removeprefix("encoder."): part
            for name, part in theirs.items()
            if name.startswith("encoder.")
        }
        return table({"embed": "shared", **own}, layer="encoder.block.{i}.")(spec)
    return table(theirs, layer="decoder.block.{i}.", encoder_layer="encoder.block.{i}.")(spec)


def gguf_t5_config(m: ConfigReader) -> dict[str, Any]:
    eps, num_layers = m.take("attention.layer_norm_rms_epsilon", float), m.size("block_count")
    m.require("attention.layer_norm_epsilon", eps)
    m.require("attention.head_count_kv", m.size("attention.head_count"))
    m.require("attention.value_length", m.size("attention.key_length"))
    return {
        "is_encoder_decoder": True,
        "d_model": m.size("embedding_length"),
        "d_kv": m.size("attention.key_length"),
        "d_ff": m.size("feed_forward_length"),
        "num_heads": m.size("attention.head_count"),
        "num_layers": num_layers,
        "num_decoder_layers": m.size("decoder_block_count", num_layers),
        "n_positions": m.size("context_length"),
        "layer_norm_epsilon": eps,
        "relative_attention_num_buckets": m.size("attention.relative_buckets_count"),
        "decoder_start_token_id": m.take("decoder_start_token_id", int, 0),
        # The file lacks the activation. Like llama.cpp, infer it from whether there is a gate.
        "feed_forward_proj": "relu"
        if m.maybe("enc.blk.0.ffn_gate.weight", list) is None
        else "gated-gelu",
    }


def gguf_names(spec: ModelSpec) -> Names:
    mlp = spec.layers[0].mlp
    assert isinstance(mlp, DenseSpec)
    own = {**GGUF_T5, "mlp.up": ("ffn_gate", "ffn_up") if mlp.gated else "ffn_up"}
    stacks = {f"encoder.{name}": part for name, part in own.items()}
    ends = {
        "final_norm": "dec.output_norm",
        "encoder.final_norm": "enc.output_norm",
        "embed": "token_embd",
        "head": "output",
    }
    tables = {
        f"{side}distances": f"{at}.blk.0.attn_rel_b"
        for side, at in (("", "dec"), ("encoder.", "enc"))
    }
    return table(
        {**own, **stacks, **ends, **tables}, layer="dec.blk.{i}.", encoder_layer="enc.blk.{i}."
    )(spec)


def _attention(at: str) -> dict[str, Theirs]:
    return {
        "qkv": (f"{at}.q", f"{at}.k", f"{at}.v"),
        "q": f"{at}.q",
        "kv": (f"{at}.k", f"{at}.v"),
        "out": f"{at}.o",
    }


_SELF, _CROSS = _attention("layer.0.SelfAttention"), _attention("layer.1.EncDecAttention")
_DISTANCES = "block.0.layer.0.SelfAttention.relative_attention_bias"
T5: dict[str, Theirs] = {
    "embed": "shared",
    "head": "lm_head",
    "final_norm": "decoder.final_layer_norm",
    "distances": f"decoder.{_DISTANCES}",
    "pre_attention": "layer.0.layer_norm",
    **{f"attention.{part}": _SELF[part] for part in ("qkv", "out")},
    "pre_cross": "layer.1.layer_norm",
    **{f"cross.{part}": _CROSS[part] for part in ("q", "kv", "out")},
    "attention.distances": "layer.0.SelfAttention.relative_attention_bias",
    "encoder.attention.distances": "layer.0.SelfAttention.relative_attention_bias",
    "encoder.final_norm": "encoder.final_layer_norm",
    "encoder.distances": f"encoder.{_DISTANCES}",
    "encoder.pre_attention": "layer.0.layer_norm",
    **{f"encoder.attention.{part}": _SELF[part] for part in ("qkv", "out")},
}
GGUF_T5: dict[str, Theirs] = {
    "pre_attention": "attn_norm",
    "attention.qkv": ("attn_q", "attn_k", "attn_v"),
    "attention.out": "attn_o",
    "attention.distances": "attn_rel_b",
    "pre_cross": "cross_attn_norm",
    "cross.q": "cross_attn_q",
    "cross.kv": ("cross_attn_k", "cross_attn_v"),
    "cross.out": "cross_attn_o",
    "pre_mlp": "ffn_norm",
    "mlp.down": "ffn_down",
}
# A copy of the embeddings in each stack, and an unused bias of cross attention that old writers stored.
COPIES = (
    r"(en|de)coder\.embed_tokens\.weight",
    r"decoder\..*\.EncDecAttention\.relative_attention_bias\.weight",
)

FAMILIES = tuple(
    Family(
        model_type=kind,
        architectures=(
            architecture,
            architecture.replace("ForConditionalGeneration", "EncoderModel"),
        ),
        read=partial(read, family=kind, own=kind == "umt5"),
        names=names,
        ignored=COPIES,
        gguf=GGUFFamily(architecture="t5", config=gguf_t5_config, names=gguf_names)
        if kind == "t5"
        else None,
    )
    for kind, architecture in (
        ("t5", "T5ForConditionalGeneration"),
        ("mt5", "MT5ForConditionalGeneration"),
        ("umt5", "UMT5ForConditionalGeneration"),
    )
)
