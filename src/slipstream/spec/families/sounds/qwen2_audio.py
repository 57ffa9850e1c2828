"""Qwen2-Audio (arXiv:2407.10759): Whisper's encoder, whose states are averaged in pairs, and a Qwen 2."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from slipstream.spec.families import qwen
from slipstream.spec.families.base import ConfigReader, Family, Names
from slipstream.spec.families.builders import activation, layer_norm
from slipstream.spec.families.encoders.whisper import LAYER, of_audio, stack_layer
from slipstream.spec.families.names import LLAMA, Theirs, table
from slipstream.spec.families.pictures.images import AS_LLAVA
from slipstream.spec.media.audio import HOP, SAMPLE_RATE, WINDOW, AudioSpec
from slipstream.spec.media.prompts import PromptFormat
from slipstream.spec.media.sound import SoundSpec
from slipstream.spec.model import ModelSpec


def read_text(c: ConfigReader) -> ModelSpec:
    c.require("model_type", "qwen2")
    c.require("use_mrope", False)
    c.assume(hidden_size=4096, intermediate_size=22016, num_hidden_layers=32, vocab_size=151936)
    c.assume(num_attention_heads=32, num_key_value_heads=32)
    return qwen.read_qwen2(c)


def read_sound(c: ConfigReader, text: ModelSpec) -> SoundSpec:
    a = c.part("audio_config")
    a.require("model_type", "qwen2_audio_encoder")
    a.assume(d_model=1280, encoder_layers=32, encoder_attention_heads=20, encoder_ffn_dim=5120)
    hidden = a.size("d_model")
    norm = layer_norm(hidden, 1e-5)
    layer = stack_layer(a, "encoder", activation(a, "activation_function", "gelu"), norm)
    # transformers ignores these
    a.ignore("encoder_layerdrop", "scale_embedding", "num_hidden_layers")
    c.alias({"audio_token_index": "audio_token_id"})
    made = SoundSpec(
        hidden_size=hidden,
        audio=AudioSpec(
            num_mel_bins=a.size("num_mel_bins", 128),
            num_states=a.size("max_source_positions", 1500),
        ),
        layers=(layer,) * a.size("encoder_layers"),
        final_norm=norm,
        pool=2,
        token_id=c.take("audio_token_index", int, 151646),
        prompt=PromptFormat(placeholder="<|AUDIO|>", token="<|AUDIO|>"),
    )
    a.finish()
    c.ignore("text_config", "tie_word_embeddings", "ignore_index", "vocab_size")
    c.finish()
    return made


def read_processing(c: ConfigReader, sound: SoundSpec) -> None:
    """Checks the preprocessing, which is Whisper's feature extractor."""
    audio = sound.audio
    c.require_all(feature_size=audio.num_mel_bins, chunk_length=int(audio.window_s), n_fft=WINDOW)
    c.require_all(n_samples=audio.num_samples, nb_max_frames=audio.num_frames, hop_length=HOP)
    c.require_all(sampling_rate=SAMPLE_RATE, padding_value=0.0, padding_side="right")
    c.require_all(dither=0.0, do_normalize=False)
    c.ignore("processor_class", "feature_extractor_type", "return_attention_mask", "mel_filters")
    c.finish()


SOUND: dict[str, Theirs] = {
    "media.audio.first": "audio_tower.conv1",
    "media.audio.second": "audio_tower.conv2",
    "media.positions": "audio_tower.embed_positions",
    **{f"media.{name}": theirs for name, theirs in LAYER.items()},
    "media.final_norm": "audio_tower.layer_norm",
    "media.connector.out": "multi_modal_projector.linear",
}
_table = table({**LLAMA, **SOUND}, media_layer="audio_tower.layers.{i}.")


def with_audio(table: Callable[[ModelSpec], Names], spec: ModelSpec) -> Names:
    """The names of `table`, plus those of the audio tower's convolutions and positions."""
    found, sound = table(spec), spec.media
    if not isinstance(sound, SoundSpec):
        return found
    return of_audio(found, "audio_tower.", sound.audio, sound.hidden_size)


FAMILIES = (
    Family(
        model_type="qwen2_audio",
        architectures=("Qwen2AudioForConditionalGeneration",),
        read=read_text,
        names=partial(with_audio, _table),
        **AS_LLAVA,
        media=read_sound,
        processing=read_processing,
    ),
)
