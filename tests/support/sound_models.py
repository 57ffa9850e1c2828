"""Tiny random models that take sounds, written by transformers, with a tokenizer, a template and a feature extractor each."""

from __future__ import annotations

import base64
import io
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.vision_models import _TEXT, BYTES, write_tokenizer

SPECIAL = ("<|im_start|>", "<|im_end|>", "<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>")
PLACEHOLDER = "<|AUDIO|>"
TOKEN = BYTES + SPECIAL.index(PLACEHOLDER)
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['content'] is string %}"
    "{{ message['content'] }}<|im_end|>\n{% else %}{% for content in message['content'] %}"
    "{% if content['type'] == 'audio' %}<|audio_bos|><|AUDIO|><|audio_eos|>\n{% else %}{{ content['text'] }}{% endif %}"
    "{% endfor %}<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WINDOW_S = 2
"""Seconds of the model's window."""


def build_hearing(path: Path, *, seed: int = 0, **more: Any) -> Any:
    import torch
    import transformers as t

    torch.manual_seed(seed)
    audio = dict(d_model=48, encoder_layers=2, encoder_attention_heads=2, encoder_ffn_dim=80)
    audio |= dict(num_mel_bins=80, max_source_positions=50 * WINDOW_S)
    text = {**_TEXT, "model_type": "qwen2", "use_sliding_window": False, "initializer_range": 0.3}
    config = t.Qwen2AudioConfig(
        audio_config=audio, text_config=text, audio_token_index=TOKEN, **more
    )
    model = t.Qwen2AudioForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(path)
    (path / "generation_config.json").unlink(missing_ok=True)
    write_tokenizer(path, special=SPECIAL, template=TEMPLATE)
    (path / "preprocessor_config.json").write_text(json.dumps(extractor().to_dict()))
    return model


def extractor() -> Any:
    from transformers import WhisperFeatureExtractor

    return WhisperFeatureExtractor(feature_size=80, chunk_length=WINDOW_S)


def sound(seed: int, seconds: float = 0.7) -> Any:
    """Noise and tones, at 16 kHz."""
    rng = np.random.default_rng(seed)
    at = np.arange(int(seconds * 16_000)) / 16_000
    tones = sum(np.sin(2 * np.pi * hz * at) for hz in rng.uniform(100, 4000, 3))
    return (0.2 * tones + 0.05 * rng.standard_normal(len(at))).astype(np.float32)


def wav(samples: Any) -> bytes:
    """A WAV file of floats."""
    data = np.asarray(samples, "<f4").tobytes()
    head = struct.pack("<4sI4s4sIHHIIHH4sI", b"RIFF", 36 + len(data), b"WAVE", b"fmt ", 16, 3, 1,
                       16_000, 64_000, 4, 32, b"data", len(data))  # fmt: skip
    return io.BytesIO(head + data).getvalue()


def part(samples: Any) -> dict[str, Any]:
    """OpenAI's content part."""
    data = base64.b64encode(wav(samples)).decode()
    return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}


def their_inputs(tokens: list[int], sounds: list[Any]) -> dict[str, Any]:
    """Inputs of transformers' model for a prompt that has all placeholders."""
    import torch

    ids = torch.tensor([tokens])
    given: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if sounds:
        how = dict(padding="max_length", return_tensors="pt", return_attention_mask=True)
        made = extractor()(sounds, sampling_rate=16_000, **how)
        given["input_features"] = made["input_features"]
        given["feature_attention_mask"] = made["attention_mask"]
    return given


VOXTRAL = ("<s>", "</s>", "[INST]", "[/INST]", "[BEGIN_AUDIO]", "[AUDIO]")
VOXTRAL_TEMPLATE = (
    "<s>{% for message in messages %}{% if message['role'] == 'user' %}[INST]{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for content in message['content'] %}{% if content['type'] == 'audio' %}[AUDIO]"
    "{% else %}{{ content['text'] }}{% endif %}{% endfor %}{% endif %}[/INST]{% else %}{{ message['content'] }}</s>"
    "{% endif %}{% endfor %}"
)


def build_voxtral(
    path: Path, *, seed: int = 0, token: int = BYTES + VOXTRAL.index("[AUDIO]"), **more: Any
) -> Any:
    import torch
    import transformers as t

    torch.manual_seed(seed)
    audio = dict(hidden_size=24, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2)
    audio |= dict(num_mel_bins=80, max_source_positions=50 * WINDOW_S)
    text = {**_TEXT, "model_type": "llama", "head_dim": 8, **more}
    model = t.VoxtralForConditionalGeneration(
        t.VoxtralConfig(audio_config=audio, text_config=text, audio_token_id=token)
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(path)
    (path / "generation_config.json").unlink(missing_ok=True)
    write_tokenizer(path, special=VOXTRAL, template=VOXTRAL_TEMPLATE)
    (path / "preprocessor_config.json").write_text(json.dumps(extractor().to_dict()))
    return model


def their_windows(sounds: list[Any]) -> Any:
    """`VoxtralProcessor`'s features of sounds: windows [N, mels, frames]."""
    import torch
    from transformers import VoxtralProcessor

    theirs = VoxtralProcessor.__new__(VoxtralProcessor)
    theirs.feature_extractor = extractor()
    how = {**VoxtralProcessor.audio_kwargs, "pad_to_multiple_of": WINDOW_S * 16_000}
    made = theirs._retrieve_input_features(
        sounds, **{**how, "max_source_positions": 100 * WINDOW_S}
    )
    assert isinstance(made, torch.Tensor)
    return made
