"""Qwen2-Audio (arXiv:2407.10759): Whisper's encoder, whose states are averaged in pairs, and a Qwen 2."""

from __future__ import annotations

import dataclasses

from slipstream.spec.families import qwen
from slipstream.spec.families.base import ConfigReader, Family, Names
from slipstream.spec.families.builders import (
    activation,
    attention,
    before,
    heads,
    layer_norm,
    plain,
)
from slipstream.spec.families.encoders.whisper import LAYER
from slipstream.spec.families.names import LLAMA, Theirs, table
from slipstream.spec.media.audio import HOP, SAMPLE_RATE, WINDOW, AudioSpec
from slipstream.spec.media.sound import SoundProcessing, SoundSpec
from slipstream.spec.media.vision import PromptFormat
from slipstream.spec.model import LayerSpec, ModelSpec
from slipstream.spec.parameters import Flatten


def read_text(c: ConfigReader) -> ModelSpec:
    c.require("model_type", "qwen2")
    c.require("use_mrope", False)
    c.assume(hidden_size=4096, intermediate_size=22016, num_hidden_layers=32, vocab_size=151936)
    c.assume(num_attention_heads=32, num_key_value_heads=32)
    return qwen.read_qwen2(c)


def whisper_layer(a: ConfigReader) -> LayerSpec:
    """A layer of Whisper's encoder."""
    h = heads(a, hidden="d_model", num_heads="encoder_attention_heads", num_kv_heads=None)
    act = activation(a, "activation_function", "gelu")
    return LayerSpec(
        attention=attention(h, None, causal=False, qkv_bias=True, out_bias=True),
        mlp=plain(a.size("encoder_ffn_dim"), act),
        block=before(layer_norm(a.size("d_model"), 1e-5)),
    )


def read_sound(c: ConfigReader, text: ModelSpec) -> SoundSpec:
    a = c.part("audio_config")
    a.require("model_type", "qwen2_audio_encoder")
    a.assume(d_model=1280, encoder_layers=32, encoder_attention_heads=20, encoder_ffn_dim=5120)
    layer = whisper_layer(a)
    a.ignore("encoder_layerdrop", "scale_embedding", "num_hidden_layers")  # transformers ignores it
    c.alias({"audio_token_index": "audio_token_id"})
    made = SoundSpec(
        hidden_size=a.size("d_model"),
        audio=AudioSpec(
            num_mel_bins=a.size("num_mel_bins", 128),
            num_states=a.size("max_source_positions", 1500),
        ),
        layers=(layer,) * a.size("encoder_layers"),
        final_norm=layer_norm(a.size("d_model"), 1e-5),
        pool=2,
        token_id=c.take("audio_token_index", int, 151646),
        prompt=PromptFormat(placeholder="<|AUDIO|>", token="<|AUDIO|>", style="plain"),
    )
    a.finish()
    c.ignore("text_config", "tie_word_embeddings", "ignore_index", "vocab_size")
    c.finish()
    return made


def read_processing(c: ConfigReader, sound: SoundSpec) -> SoundProcessing:
    """Reads the preprocessing, which is Whisper's feature extractor."""
    for key, only in (
        ("feature_size", sound.audio.num_mel_bins),
        ("sampling_rate", SAMPLE_RATE),
        ("hop_length", HOP),
        ("n_fft", WINDOW),
        ("chunk_length", int(sound.audio.window_s)),
        ("dither", 0.0),
        ("padding_value", 0.0),
        ("padding_side", "right"),
        ("do_normalize", False),
        ("n_samples", sound.audio.num_samples),
        ("nb_max_frames", sound.audio.num_frames),
    ):
        c.require(key, only)
    c.ignore("processor_class", "feature_extractor_type", "return_attention_mask", "mel_filters")
    c.finish()
    return SoundProcessing()


SOUND: dict[str, Theirs] = {
    "vision.first": "audio_tower.conv1",
    "vision.second": "audio_tower.conv2",
    "vision.positions": "audio_tower.embed_positions",
    **{f"vision.{name}": theirs for name, theirs in LAYER.items()},
    "vision.final_norm": "audio_tower.layer_norm",
    "vision.connector.out": "multi_modal_projector.linear",
}
_table = table({**LLAMA, **SOUND}, vision_layer="audio_tower.layers.{i}.")


def names(spec: ModelSpec) -> Names:
    return of_tower(spec, _table(spec))


def of_tower(spec: ModelSpec, found: Names) -> Names:
    """Keys have no bias: a parameter's rows without a tensor are zeros. Convolutions are products."""
    if isinstance(sound := spec.vision, SoundSpec):
        for i in range(len(sound.layers)):
            del found[f"audio_tower.layers.{i}.self_attn.k_proj.bias"]
        for conv, channels in (("1", sound.audio.num_mel_bins), ("2", sound.hidden_size)):
            name = f"audio_tower.conv{conv}.weight"
            found[name] = dataclasses.replace(found[name], transform=Flatten((channels, 3)))
    return found


FAMILIES = (
    Family(
        model_type="qwen2_audio",
        architectures=("Qwen2AudioForConditionalGeneration",),
        read=read_text,
        names=names,
        nested_config="text_config",
        prefixes=("language_model.", "model.language_model.", "model."),
        ignored=(r"(model\.)?(audio_tower|multi_modal_projector)\..*",),  # with max_images=0
        vision=read_sound,
        processing=read_processing,
    ),
)
