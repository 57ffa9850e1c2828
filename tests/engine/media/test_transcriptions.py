"""Whisper through the whole engine: encoder, logits and answers are transformers', and what is refused."""

from __future__ import annotations

import io
import json
import shutil
import sys
import wave
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import WhisperConfig, WhisperFeatureExtractor
from transformers.generation import WhisperTimeStampLogitsProcessor

from slipstream import LLM, SamplingParams
from slipstream.engine.audio.sound import _filters, as_samples, decode_audio, resampled
from slipstream.engine.audio.spectrogram import log_mel, mel_bands
from slipstream.engine.audio.transcription import Transcription, TranscriptionOptions
from slipstream.errors import CheckpointError, ConfigError, RequestError, UnsupportedModelError
from slipstream.kernels.cpu.sampling import samplers
from slipstream.messages.media import AudioWindow
from slipstream.spec.description import read_spec
from slipstream.spec.families import find_family
from slipstream.spec.families.base import ConfigReader
from slipstream.spec.media.speech_rules import SpeechRules
from tests.model.harness import load
from tests.support import tiny_models
from tests.support.tiny_models import whisper_id

SETTINGS = dict(device="cpu", dtype="float32", num_threads=1, block_size=4, max_num_seqs=4)


def sound(seconds, seed=0):
    t, rng = np.arange(int(16_000 * seconds)) / 16_000, np.random.default_rng(seed)
    waves = sum(np.sin(2 * np.pi * f * t * (1 + 0.1 * t)) for f in rng.uniform(100, 3000, 5))
    return (0.1 * waves + 0.02 * rng.standard_normal(len(t))).astype(np.float32)


def wav(samples, rate=16_000, channels=1, width=2):
    data, scale = io.BytesIO(), 2 ** (8 * width - 1) - 1
    with wave.open(data, "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        values = np.repeat(np.round(samples * scale).astype(np.int64), channels)
        if width == 1:
            values = values + 128
        raw = values.astype("<i8").view(np.uint8).reshape(-1, 8)[:, :width]
        file.writeframes(raw.tobytes())
    return data.getvalue()


@pytest.fixture(scope="module")
def whisper(tmp_path_factory):
    path = tmp_path_factory.mktemp("whisper")
    return path, tiny_models.build_whisper(path)


@pytest.fixture(scope="module")
def llm(whisper):
    with LLM(str(whisper[0]), **SETTINGS) as made:
        yield made


def features(samples):
    extractor = WhisperFeatureExtractor(feature_size=16, chunk_length=1)
    return extractor(samples, sampling_rate=16_000, return_tensors="pt").input_features


@pytest.mark.parametrize("mels", [80, 128])
def test_spectrograms_equal_transformers(mels):
    extractor = WhisperFeatureExtractor(feature_size=mels)
    assert np.abs(mel_bands(mels) - extractor.mel_filters.T).max() <= 1e-9
    quiet = np.zeros(480_000, np.float32)
    quiet[:90_000] = 1e-3 * sound(5.625)
    for samples in (sound(30), quiet, np.pad(sound(1.77), (0, 451_680))):
        own = log_mel(samples, mels)
        exact = extractor._np_extract_fbank_features(samples[None], "cpu")[0]
        assert own.shape == exact.shape == (mels, 3000)
        assert np.abs(own - exact).max() <= 1e-5
        # With torch it computes in float32: its own error depends on the processor, and is all that may differ.
        by_torch = extractor(samples, sampling_rate=16_000, return_tensors="np").input_features[0]
        assert np.abs(own - by_torch).max() <= np.abs(exact - by_torch).max() + 1e-5
        assert np.abs(exact - by_torch).max() <= 1e-3


@pytest.mark.parametrize(("channels", "width"), [(1, 1), (1, 2), (2, 2), (1, 3), (1, 4)])
def test_wav_files_are_decoded(channels, width):
    samples = sound(0.3)
    found = decode_audio(wav(samples, channels=channels, width=width), max_s=1.0)
    assert found.shape == samples.shape
    assert np.abs(found - samples).max() <= 1.01 / 2 ** (8 * width - 1) + 1e-7


def test_float_wav_with_a_longer_header_is_decoded():
    samples = sound(0.1)
    form = np.array([0xFFFE, 1], "<u2").tobytes() + np.array([16_000, 64_000], "<u4").tobytes()
    form += np.array([4, 32, 22, 32], "<u2").tobytes() + bytes(4) + b"\x03\0" + bytes(14)
    data = (
        b"RIFF\xff\xff\xff\xffWAVELIST\x03\0\0\0abc\0fmt " + np.uint32(len(form)).tobytes() + form
    )
    data += b"data\xff\xff\xff\xff" + samples.astype("<f4").tobytes()
    assert np.array_equal(decode_audio(data, max_s=1.0), samples)


def test_a_rate_without_a_common_divisor_takes_a_small_table():
    """A WAV of 64 bytes may name any rate."""
    filters, half = _filters(16_000, 767_999)
    assert filters.nbytes < 8 << 20
    assert half < 1300


@pytest.mark.parametrize("rate", [8_000, 11_025, 12_345, 44_100, 48_000, 96_001])
def test_other_rates_are_resampled(rate):
    t = np.arange(rate) / rate
    own = resampled((0.5 * np.sin(2 * np.pi * 440 * t)).astype(np.float32), rate)
    assert len(own) == 16_000
    exact = 0.5 * np.sin(2 * np.pi * 440 * np.arange(16_000) / 16_000)
    assert np.abs(own - exact)[300:-300].max() <= 1e-4
    if rate > 40_000:  # what 16 kHz can't hold is gone
        assert np.abs(resampled(np.sin(2 * np.pi * 9_000 * t).astype(np.float32), rate)[300:-300]).max() <= 1e-4  # fmt: skip


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "is empty"),
        (b"hello, this is no audio at all", "soundfile|can't be read"),
        (b"RIFF\0\0\0\0WAVE", "without data"),
        (b"RIFF\0\0\0\0WAVEdata\4\0\0\0abcd", "without a format"),
        (wav(sound(0.1))[:44], "no samples"),
        (wav(sound(0.1)).replace(b"\x80>\0\0", b"\0\0\0\0"), "rate of 0 Hz"),
        (wav(sound(1.2)), r"1\.2 s long, and at most 1 s are taken"),
        (wav(sound(0.1)).replace(b"\1\0\1\0", b"\7\0\1\0"), "format 7"),
    ],
)
def test_a_file_that_can_not_be_read_is_refused_by_name(data, why):
    with pytest.raises(RequestError, match=why) as caught:
        decode_audio(data, max_s=1.0)
    assert caught.value.field == "file"


@pytest.mark.parametrize("kernels", ["reference", "cpu", "torch"])
def test_encoder_input_equals_transformers(whisper, kernels):
    path, theirs = whisper
    x = torch.cat([features(sound(1, i)) for i in range(3)])
    decoder = load(path, kernels=kernels).decoder
    rows = [AudioWindow(num_mel_bins=16, data=one.numpy().tobytes()).frames() for one in x]
    own = decoder.encoder.audio(decoder.ops, torch.from_numpy(np.concatenate(rows)))
    encoder, gelu = theirs.model.encoder, torch.nn.functional.gelu
    with torch.no_grad():
        exact = gelu(encoder.conv2(gelu(encoder.conv1(x)))).transpose(1, 2)
        exact = exact + encoder.embed_positions.weight
    assert (own.view_as(exact) - exact).abs().max() <= 1e-4 * exact.abs().max()


def test_logits_equal_transformers(whisper, llm):
    _, theirs = whisper
    x = features(sound(0.7))
    head = [whisper_id(n) for n in ("startoftranscript", "de", "transcribe")]
    sampling = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=20)
    prompt = {"prompt_token_ids": head, "multi_modal_data": {"audio": sound(0.7)}}
    (output,) = llm.generate([prompt], sampling)
    assert output.prompt_token_ids == head
    own = output.outputs[0]
    with torch.no_grad():
        logits = theirs(
            input_features=x, decoder_input_ids=torch.tensor([[*head, *own.token_ids[:-1]]])
        ).logits[0, len(head) - 1 :]
    assert own.token_ids == logits.argmax(-1).tolist()
    exact = logits.log_softmax(-1)
    for position, row in zip(own.logprobs, exact, strict=True):
        for one in position.top:
            assert abs(one.logprob - row[one.token_id]) <= 1e-4 * row.abs().max()


@pytest.mark.parametrize("timestamps", [False, True])
@pytest.mark.parametrize("language", ["en", None])
def test_greedy_transcriptions_equal_transformers(whisper, llm, timestamps, language):
    _, theirs = whisper
    sounds = [sound(s, i) for i, s in enumerate((1.0, 0.4, 0.9, 0.77, 0.2, 1.0))]
    found = llm.transcribe(sounds, language=language, timestamps=timestamps)
    for samples, own in zip(sounds, found, strict=True):
        expected = theirs.generate(
            features(samples), language=language, task="transcribe", return_timestamps=timestamps,
            max_new_tokens=60, num_beams=1, do_sample=False, return_segments=timestamps,
        )  # fmt: skip
        found = expected["segments"][0] if timestamps else [{"tokens": expected[0]}]
        tokens = [t for s in found for t in s["tokens"].tolist()]
        assert text_of(t for s in own.segments for t in s.tokens) == text_of(tokens)


@pytest.mark.parametrize("seconds", [1.3, 3.7])
def test_long_sounds_equal_transformers(whisper, llm, seconds):
    """Windows begin at the last time of the one before, and the spectrogram is that of the whole sound."""
    _, theirs = whisper
    samples = sound(seconds, 9)
    extractor = WhisperFeatureExtractor(feature_size=16, chunk_length=1)
    x = extractor(
        samples, sampling_rate=16_000, return_tensors="pt", truncation=False, padding="longest"
    ).input_features
    words = llm.get_tokenizer().encode(" $%", add_special_tokens=False)
    prompt = [whisper_id("startofprev"), *words]
    expected = theirs.generate(
        x, language="fr", task="translate", return_timestamps=True, max_new_tokens=61 - len(prompt),
        return_segments=True, condition_on_prev_tokens=False, prompt_ids=torch.tensor(prompt),
    )  # fmt: skip
    (own,) = llm.transcribe([samples], language="fr", task="translate", prompt="$%")
    tokens = [t for s in expected["segments"][0] for t in s["tokens"].tolist()]
    assert text_of(t for s in own.segments for t in s.tokens) == text_of(tokens)
    assert len({s.seek for s in own.segments}) > 1
    assert own.language == "french"
    assert own.duration_s == pytest.approx(seconds)
    assert all(a.start <= a.end <= seconds for a in own.segments)


def test_an_english_model_equals_transformers(tmp_path):
    theirs = tiny_models.build_whisper(tmp_path, english=True, seed=3)
    with LLM(str(tmp_path), **SETTINGS) as llm:
        (own,) = llm.transcribe(sound(0.8))
        expected = theirs.generate(features(sound(0.8)), max_new_tokens=62)
        assert text_of(t for s in own.segments for t in s.tokens) == text_of(expected[0].tolist())
        assert own.language == "english"
        for wrong, field in (({"language": "de"}, "language"), ({"task": "translate"}, "model")):
            with pytest.raises(RequestError) as caught:
                llm.transcribe(sound(0.1), **wrong)
            assert caught.value.field == field


def text_of(tokens):
    return [t for t in tokens if t < whisper_id("endoftext")]


def test_rules_of_times_equal_transformers():
    """Random logits after random answers, with and without forced tokens before them."""
    end, none, first, size = 20, 30, 31, 51
    ends = dict(eos_token_id=end, bos_token_id=end)
    told = SimpleNamespace(no_timestamps_token_id=none, max_initial_timestamp_index=5, **ends)
    rng = np.random.default_rng(0)
    for _ in range(300):
        answer = []
        for _ in range(rng.integers(0, 7)):
            latest = max([t for t in answer if t >= first], default=first)
            answer.append(int(rng.integers(latest, size) if rng.random() < 0.5 else rng.integers(0, end)))  # fmt: skip
        logits = rng.normal(0, 4, size).astype(np.float32)
        theirs = WhisperTimeStampLogitsProcessor(told, begin_index=2)
        exact = theirs(torch.tensor([[1, 2, *answer]]), torch.from_numpy(logits[None].copy()))[0]
        for forced in ((), ((3,), (4, 5))):
            rules = SpeechRules(end=end, no_timestamps=none, first_timestamp=first, max_first=5, forced=forced)  # fmt: skip
            own = logits.copy()
            samplers.speech(own, np.array([3, 4][: len(forced)] + answer, np.int64), rules)
            assert np.array_equal(own, exact.numpy())
    own = logits.copy()
    samplers.speech(own, np.array([3], np.int64), rules)
    assert np.flatnonzero(own > -np.inf).tolist() == [4, 5]


def test_details_have_log_probabilities_and_the_same_text(llm):
    sounds = [sound(0.9, 4), sound(2.2, 5)]
    plain = llm.transcribe(sounds, timestamps=True)
    for own, one in zip(llm.transcribe(sounds, timestamps=True, details=True), plain, strict=True):
        assert own.text == one.text
        for segment in own.segments:
            assert segment.avg_logprob < 0
            assert 0 <= segment.no_speech_prob <= 1
            assert segment.compression_ratio > 0


def test_drawn_answers_depend_on_the_seed_alone(llm):
    how = dict(temperature=0.8, seed=3, timestamps=True)
    (alone,) = llm.transcribe(sound(0.9, 4), **how)
    beside = llm.transcribe([sound(0.5, 6), sound(0.9, 4), sound(2.0)], **how)
    assert beside[1] == alone
    assert llm.transcribe(sound(0.9, 4), **{**how, "seed": 4})[0].text != alone.text


def test_preempted_sounds_are_encoded_again(whisper, llm):
    sounds = [sound(1, i) for i in range(6)]
    expected = [own.text for own in llm.transcribe(sounds, language="en")]
    block = 3 * 2 * 32 * 4 * 4  # layers, keys and values, numbers, tokens, bytes
    per_request = 13 + 16  # blocks of 50 states and of 64 tokens
    with LLM(str(whisper[0]), **SETTINGS, kv_cache_bytes=block * (2 * per_request + 9)) as tight:
        found = [own.text for own in tight.transcribe(sounds, language="en")]
        stats = tight.stats()
        assert found == expected
        assert stats.num_preemptions > 0
        assert stats.num_free_blocks == stats.num_blocks
        assert tight.ledger.num_full_sequences == 2
    assert "50 states of audio" in llm.ledger.describe_capacity()


def test_what_a_speech_model_does_not_take_is_refused(whisper, llm):
    for call, field in (
        (lambda: llm.generate("hello"), "prompt"),
        (lambda: llm.generate({"prompt": "a", "multi_modal_data": {"audio": sound(1.2)}}), "audio"),
        (lambda: llm.generate({"prompt": "a", "multi_modal_data": {"audio": "x"}}), "audio"),
        (lambda: llm.transcribe(sound(1), language="klingon"), "language"),
        (lambda: llm.transcribe(b"no audio"), "file"),
        (lambda: llm.transcribe("nowhere.wav"), "audio"),
        (lambda: llm.embed("hello"), "model"),
    ):
        with pytest.raises(RequestError) as caught:
            call()
        assert caught.value.field == field
    for setting, value in (
        ("tensor_parallel_size", 2),
        ("pipeline_parallel_size", 2),
        ("weights_bytes", 2**20),
    ):
        with pytest.raises(ConfigError) as caught:  # so nothing but times of words could fail later
            LLM(str(whisper[0]), **SETTINGS, **{setting: value})
        assert caught.value.field == setting
    description = read_spec(whisper[0])
    with pytest.raises(RequestError, match="tokenizer"):
        Transcription.begin(description, None, sound(1), TranscriptionOptions(), 64)


def test_whole_numbers_are_scaled_by_their_type_or_refused():
    samples = sound(0.2)
    for dtype, tolerance in ((np.int16, 2.0**-14), (np.int32, 2.0**-20)):
        largest = float(np.iinfo(dtype).max) + 1
        whole = (samples.astype(np.float64) * largest * 0.99).astype(dtype)
        for given in (whole, (whole, np.int64(16_000)), list(whole)):
            found = as_samples(given, max_s=1.0)
            assert found.dtype == np.float32
            np.testing.assert_allclose(found, samples * 0.99, atol=tolerance)
    assert not as_samples(np.zeros(800, np.int64), max_s=1.0).any()
    for given, why in (
        (np.full(800, 3, np.int64), "int64, whose range"),
        (np.full(800, 128, np.uint8), "uint8, whose range"),
        ([3] * 800, "whose range"),
        (np.full(800, np.nan, np.float32), "no finite numbers"),
        (np.zeros(17_000), "1.1 s long, and at most 1 s"),
        ((samples, 5), "a rate of 5 Hz"),
        (np.zeros((2, 800)), "array of samples"),
        (samples.astype(complex), "array of samples"),
    ):
        with pytest.raises(RequestError, match=why) as caught:
            as_samples(given, max_s=1.0)
        assert caught.value.field == "audio"
        assert "file" not in caught.value.message.replace("a file's bytes", "")


def test_a_text_model_refuses_audio(tmp_path):
    tiny_models.build_t5(tmp_path)
    tiny_models.write_tokenizer(tmp_path)
    with LLM(str(tmp_path), **SETTINGS) as llm:
        with pytest.raises(RequestError) as caught:
            llm.generate({"prompt": "a", "multi_modal_data": {"audio": sound(1)}})
        assert caught.value.field == "audio"
        with pytest.raises(RequestError) as caught:
            llm.transcribe(sound(1))
        assert caught.value.field == "model"


class SoundFile:
    """soundfile's reader of a file that says it has `frames` frames."""

    samplerate, frames = 8_000, 800

    def __init__(self, file):
        if file.read(4) != b"fLaC":
            raise RuntimeError("Error opening <file>: Format not recognised.")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def read(self, most, dtype, always_2d):
        assert (dtype, always_2d) == ("float32", True)
        return np.repeat(sound(0.1)[::2, None], 2, axis=1)[:most]


def test_other_formats_are_read_by_soundfile(monkeypatch):
    monkeypatch.setitem(sys.modules, "soundfile", SimpleNamespace(SoundFile=SoundFile))
    assert len(decode_audio(b"fLaC and so on", max_s=1.0)) == 1600
    for data, max_s, why in ((b"fLaC", 0.05, "at most 0.05 s"), (b"MThd", 1.0, r"can't be read \(Error opening")):  # fmt: skip
        with pytest.raises(RequestError, match=why) as caught:
            decode_audio(data, max_s=max_s)
        assert caught.value.field == "file"
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(RequestError, match="the extra audio"):
        decode_audio(b"fLaC", max_s=1.0)


def test_published_configs_have_their_parameters():
    """The sizes that OpenAI published, and the biases of keys, which are zeros."""
    for size, layers, heads, mels, vocabulary, published in (
        (384, 4, 6, 80, 51865, 37_760_640),
        (1280, 32, 20, 128, 51866, 1_543_490_560),
    ):
        config = WhisperConfig(
            d_model=size, encoder_layers=layers, decoder_layers=layers, encoder_attention_heads=heads,
            decoder_attention_heads=heads, encoder_ffn_dim=4 * size, decoder_ffn_dim=4 * size, num_mel_bins=mels,
            vocab_size=vocabulary, decoder_start_token_id=50258,
        )  # fmt: skip
        spec = find_family("whisper", None).read(ConfigReader(config.to_dict()))
        assert spec.num_parameters - 3 * layers * size == published
        cross = spec.cache_groups[-1]
        assert (cross.kind, cross.num_read, cross.max_blocks(448, 16, 8192)) == ("cross", 1500, 94)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"scale_embedding": True}, "scale_embedding"),
        ({"use_weighted_layer_sum": True}, "use_weighted_layer_sum"),
        ({"decoder_attention_heads": 2}, "decoder_attention_heads"),
        ({"dither_layers": 3}, "dither_layers"),
    ],
)
def test_a_config_that_is_not_understood_is_refused(change, field):
    small = WhisperConfig(d_model=32, encoder_attention_heads=4, decoder_attention_heads=4)
    config = {**small.to_dict(), **change}
    with pytest.raises(UnsupportedModelError) as caught:
        find_family("whisper", None).read(ConfigReader(config))
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("file", "change", "field"),
    [
        ("generation_config.json", {"no_timestamps_token_id": None}, "no_timestamps_token_id"),
        ("generation_config.json", {"no_timestamps_token_id": 340}, "no_timestamps_token_id"),
        ("generation_config.json", {"suppress_tokens": [999]}, "suppress_tokens"),
        ("preprocessor_config.json", {"sampling_rate": 8000}, "sampling_rate"),
        ("preprocessor_config.json", {"feature_size": 80}, "feature_size"),
    ],
)
def test_files_that_are_not_understood_are_refused(whisper, tmp_path, file, change, field):
    shutil.copytree(whisper[0], tmp_path / "copy")
    path = tmp_path / "copy" / file
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises((UnsupportedModelError, CheckpointError)) as caught:
        read_spec(tmp_path / "copy")
    assert caught.value.field == field
