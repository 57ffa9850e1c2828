"""Voxtral (arXiv:2507.13264): Whisper's encoder over whole windows of 30 seconds, an MLP that maps four states to a token,
and a Llama."""

from __future__ import annotations

from functools import partial

from slipstream.spec.families import llama
from slipstream.spec.families.base import ConfigReader, Family
from slipstream.spec.families.builders import activation, layer_norm
from slipstream.spec.families.encoders.whisper import stack_layer
from slipstream.spec.families.names import LLAMA, table
from slipstream.spec.families.pictures.images import AS_LLAVA
from slipstream.spec.families.sounds.qwen2_audio import SOUND, read_processing, with_audio
from slipstream.spec.media.audio import AudioSpec
from slipstream.spec.media.prompts import FramedFormat
from slipstream.spec.media.sound import SoundSpec
from slipstream.spec.model import ModelSpec

MOST_WINDOWS = 80
"""Maximum windows of 30 seconds per audio input: 40 minutes, the limit that the model was made for."""

KEYS = {
    "d_model": "hidden_size",
    "encoder_layers": "num_hidden_layers",
    "encoder_attention_heads": "num_attention_heads",
    "encoder_ffn_dim": "intermediate_size",
}
PROMPT = FramedFormat(placeholder="[AUDIO]", token="[AUDIO]", begin="[BEGIN_AUDIO]")


def read_text(c: ConfigReader) -> ModelSpec:
    c.require("model_type", "llama")
    c.assume(hidden_size=3072, intermediate_size=8192, num_hidden_layers=30, vocab_size=131072)
    c.assume(num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=131072)
    c.assume(rms_norm_eps=1e-5, head_dim=128)
    if "rope_parameters" not in c:
        c.assume(rope_theta=1e8)
    c.require("sliding_window")
    return llama.read(c)


def read_sound(c: ConfigReader, text: ModelSpec) -> SoundSpec:
    a = c.part("audio_config")
    a.require("model_type", "voxtral_encoder")
    a.alias(KEYS)
    a.assume(d_model=1280, encoder_layers=32, encoder_attention_heads=20, encoder_ffn_dim=5120)
    hidden, inner = a.size("d_model"), a.size("encoder_ffn_dim")
    norm = layer_norm(hidden, 1e-5)
    layer = stack_layer(a, "encoder", activation(a, "activation_function", "gelu"), norm)
    a.require("num_key_value_heads", a.size("encoder_attention_heads"))
    a.ignore("layerdrop", "encoder_layerdrop", "scale_embedding", "vocab_size")  # without effect
    num_states = a.size("max_source_positions", 1500)
    if inner % hidden or num_states % (inner // hidden):
        raise a.unsupported(
            "intermediate_size",
            f"must be a multiple of hidden_size ({hidden}) that divides the states",
        )
    made = SoundSpec(
        hidden_size=hidden,
        audio=AudioSpec(num_mel_bins=a.size("num_mel_bins", 128), num_states=num_states),
        layers=(layer,) * a.size("encoder_layers"),
        final_norm=norm,
        pool=inner // hidden,
        token_id=c.take("audio_token_id", int, 24),
        prompt=PROMPT,
        activation=activation(c, "projector_hidden_act", "gelu"),
        most_windows=MOST_WINDOWS,
    )
    a.finish()
    c.ignore("text_config", "tie_word_embeddings", "hidden_size", "vocab_size")
    c.finish()
    return made


_table = table(
    {
        **LLAMA,
        **SOUND,
        "media.connector.up": "multi_modal_projector.linear_1",
        "media.connector.out": "multi_modal_projector.linear_2",
    },
    media_layer="audio_tower.layers.{i}.",
)


FAMILIES = (
    Family(
        model_type="voxtral",
        architectures=("VoxtralForConditionalGeneration",),
        read=read_text,
        names=partial(with_audio, _table),
        **AS_LLAVA,
        media=read_sound,
        processing=read_processing,
    ),
)
