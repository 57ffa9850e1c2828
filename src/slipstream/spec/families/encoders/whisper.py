"""Whisper (Radford et al. 2022): an audio encoder, and a decoder with learned positions and cross attention to the encoder's
states."""

from __future__ import annotations

import dataclasses

from slipstream.spec.families.base import ConfigReader, Family, Names
from slipstream.spec.families.builders import activation, attention, heads, layer_norm, plain
from slipstream.spec.families.names import Theirs, table
from slipstream.spec.functions import Activation, NormSpec
from slipstream.spec.media.audio import AudioSpec
from slipstream.spec.model import (
    EncoderSpec,
    LayerSpec,
    LearnedPositionSpec,
    ModelSpec,
    PostNormBlock,
    SequentialBlock,
)
from slipstream.spec.parameters import Flatten


def stack_layer(
    c: ConfigReader, side: str, act: Activation, norm: NormSpec, *, norms_first: bool = True
) -> LayerSpec:
    """A layer of the `side` "encoder" or "decoder", with biases. A decoder layer also has cross attention to the encoder's
    states."""
    writes = side == "decoder"
    h = heads(c, hidden="d_model", num_heads=f"{side}_attention_heads", num_kv_heads=None)
    own = attention(h, None, causal=writes, qkv_bias=True, out_bias=True)
    of_cross = norm if writes else None
    return LayerSpec(
        attention=own,
        mlp=plain(c.size(f"{side}_ffn_dim"), act),
        block=SequentialBlock(pre_attention=norm, pre_cross=of_cross, pre_mlp=norm)
        if norms_first
        else PostNormBlock(attention_norm=norm, cross_norm=of_cross, mlp_norm=norm),
        cross=dataclasses.replace(own, causal=False) if writes else None,
    )


def both_layers(
    c: ConfigReader, act: Activation, norm: NormSpec, *, norms_first: bool = True
) -> tuple[LayerSpec, LayerSpec]:
    """(encoder layer, decoder layer). While an encoder layer runs, it uses the decoder's cache as scratch memory."""
    reader, writer = (
        stack_layer(c, side, act, norm, norms_first=norms_first) for side in ("encoder", "decoder")
    )
    num_heads = reader.self_attention.num_heads
    if writer.self_attention.num_heads != num_heads:
        raise c.unsupported(
            "decoder_attention_heads",
            f"only as many as encoder_attention_heads ({num_heads}) are supported",
        )
    return reader, writer


def read(c: ConfigReader) -> ModelSpec:
    c.require("is_encoder_decoder", True)
    c.require("use_weighted_layer_sum", False)
    c.ignore(
        "classifier_proj_size", "apply_spec_augment", "mask_time_prob", "mask_time_length", "mask_time_min_masks",
        "mask_feature_prob", "mask_feature_length", "mask_feature_min_masks", "encoder_layerdrop", "decoder_layerdrop",
        "num_hidden_layers", "max_length", "forced_decoder_ids", "scale_embedding",
    )  # fmt: skip
    if c.value("scale_embedding"):
        raise c.unsupported("scale_embedding", "only False is supported")
    hidden, act = c.size("d_model"), activation(c, "activation_function", "gelu")
    norm = layer_norm(hidden, 1e-5)
    reader, writer = both_layers(c, act, norm)
    longest, median = c.size("max_target_positions", 448), c.size("median_filter_width", 7)
    if median % 2 == 0:
        raise c.unsupported("median_filter_width", "must be odd")
    spec = ModelSpec(
        family="whisper",
        vocab_size=c.size("vocab_size"),
        hidden_size=hidden,
        max_position=longest,
        layers=(writer,) * c.size("decoder_layers"),
        final_norm=norm,
        learned_positions=LearnedPositionSpec(num_positions=longest),
        tied_embeddings=c.take("tie_word_embeddings", bool, True),
        encoder=EncoderSpec(
            layers=(reader,) * c.size("encoder_layers"),
            final_norm=norm,
            start_token_id=c.take("decoder_start_token_id", int, 50257),
            audio=AudioSpec(
                num_mel_bins=c.size("num_mel_bins", 80),
                num_states=c.size("max_source_positions", 1500),
                median_filter=median,
            ),
        ),
    )
    c.finish()
    return spec


def _attention(at: str) -> dict[str, Theirs]:
    q, k, v = (f"{at}.{x}_proj" for x in "qkv")
    return {"qkv": (q, k, v), "q": q, "kv": (k, v), "out": f"{at}.out_proj"}


_SELF, _CROSS = _attention("self_attn"), _attention("encoder_attn")
LAYER: dict[str, Theirs] = {
    "pre_attention": "self_attn_layer_norm",
    **{f"attention.{part}": _SELF[part] for part in ("qkv", "out")},
    "pre_mlp": "final_layer_norm",
    "mlp.up": "fc1",
    "mlp.down": "fc2",
}
WHISPER: dict[str, Theirs] = {
    "embed": "model.decoder.embed_tokens",
    "positions": "model.decoder.embed_positions",
    "final_norm": "model.decoder.layer_norm",
    "head": "proj_out",
    **LAYER,
    "pre_cross": "encoder_attn_layer_norm",
    **{f"cross.{part}": _CROSS[part] for part in ("q", "kv", "out")},
    "encoder.audio.first": "model.encoder.conv1",
    "encoder.audio.second": "model.encoder.conv2",
    "encoder.positions": "model.encoder.embed_positions",
    "encoder.final_norm": "model.encoder.layer_norm",
    **{f"encoder.{name}": part for name, part in LAYER.items()},
}
_table = table(
    WHISPER, layer="model.decoder.layers.{i}.", encoder_layer="model.encoder.layers.{i}."
)


def of_audio(found: Names, side: str, audio: AudioSpec, hidden_size: int) -> Names:
    """Name table of an audio encoder. Convolutions are stored as linear layers. Keys of modules
    under `side` have no biases; parameter rows without a tensor are zeros."""
    channels = {"first": audio.num_mel_bins, "second": hidden_size}
    made: Names = {}
    for name, at in found.items():
        if name.startswith(side) and name.endswith("k_proj.bias"):
            continue
        if at.target.endswith((".first.weight", ".second.weight")):
            size = (channels[at.target.split(".")[-2]], 3)
            at = dataclasses.replace(at, transform=Flatten(size))
        made[name] = at
    return made


def names(spec: ModelSpec) -> Names:
    assert spec.encoder is not None
    assert spec.encoder.audio is not None
    return of_audio(_table(spec), "", spec.encoder.audio, spec.hidden_size)


FAMILIES = (
    Family(
        model_type="whisper",
        architectures=("WhisperForConditionalGeneration",),
        read=read,
        names=names,
        ignored=(r"proj_out\.weight",),
    ),
)
