"""Times of words equal those of transformers' `return_timestamps="word"`: attention, warping and words, on a tiny Whisper."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
from tokenizers import Tokenizer

from slipstream import LLM
from slipstream.engine.audio.words import token_times, words_of
from slipstream.errors import CheckpointError, RequestError, UnsupportedModelError
from slipstream.spec.description import read_spec
from tests.engine.media.test_transcriptions import SETTINGS, sound
from tests.support import tiny_models
from tests.support.tiny_models import whisper_id


@pytest.fixture(scope="module")
def whisper(tmp_path_factory):
    """A Whisper that writes letters, spaces and signs."""
    path = tmp_path_factory.mktemp("whisper")
    theirs = tiny_models.build_whisper(path, seed=6, noise=0.3, max_target_positions=40)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    texts = [tokenizer.decode([i]) for i in range(whisper_id("endoftext"))]
    wrong = [i for i, t in enumerate(texts) if not (len(t) < 4 and t.isascii() and t.isprintable())]
    theirs.generation_config.suppress_tokens = wrong
    theirs.generation_config.save_pretrained(path)
    return path, theirs


def transformers_words(*given):
    """The words of tokens and their times, as transformers joins them."""
    from transformers.models.whisper.tokenization_whisper import _collate_word_timestamps

    return _collate_word_timestamps(*given)


def test_paths_equal_transformers():
    from transformers.models.whisper.generation_whisper import _dynamic_time_warping

    rng = np.random.default_rng(0)
    for size in ((1, 1), (1, 9), (7, 3), (12, 40), (30, 30)):
        matrix = rng.normal(size=size).astype(np.float32)
        matrix[:, ::3] = matrix[:, :1]  # with ties
        text, time = _dynamic_time_warping(-matrix.astype(np.float64))
        jumps = np.pad(np.diff(text), (1, 0), constant_values=1).astype(bool)
        exact = time[jumps] * 0.02
        assert token_times(matrix) == pytest.approx([*exact, exact[-1]], abs=1e-9)


def expected_words(theirs, decode, samples, language):
    """Words of transformers' segments, as its pipeline makes them."""
    from transformers import WhisperFeatureExtractor

    extractor = WhisperFeatureExtractor(feature_size=16, chunk_length=1)
    is_long = len(samples) > 16_000
    how = dict(truncation=False, padding="longest") if is_long else {}
    x = extractor(
        samples, sampling_rate=16_000, return_tensors="pt", return_attention_mask=True, **how
    )
    made = theirs.generate(
        x.input_features, attention_mask=x.attention_mask, language=language, task="transcribe",
        return_timestamps=True, return_token_timestamps=True, return_segments=True, max_new_tokens=37,
        condition_on_prev_tokens=False,
    )  # fmt: skip
    end, words, before = whisper_id("endoftext"), [], 0.0
    tokenizer = SimpleNamespace(eos_token_id=end, decode=lambda ids, **_: decode(ids))
    for segment in made["segments"][0]:
        tokens, times = segment["tokens"].tolist(), segment["token_timestamps"].tolist()
        spans = list(zip([before, *times], times, strict=False))
        before = times[-1]
        kept = [i for i, t in enumerate(tokens) if t < end]
        rounded = [(round(spans[i][0], 2), round(spans[i][1], 2)) for i in kept]
        if tokenizer.decode([tokens[i] for i in kept]).strip():
            words += transformers_words(
                tokenizer, [tokens[i] for i in kept], rounded, "english", False
            )
    return [(w["text"], *w["timestamp"]) for w in words]


SOUNDS = [sound(seconds, i) for i, seconds in enumerate((1.0, 1.6))]


@pytest.fixture(scope="module")
def expected(whisper):
    path, theirs = whisper
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    return [expected_words(theirs, tokenizer.decode, samples, "en") for samples in SOUNDS]


@pytest.mark.parametrize("kernels", ["cpu", "torch"])
def test_words_equal_transformers(whisper, expected, kernels):
    with LLM(str(whisper[0]), **SETTINGS, kernels=kernels) as llm:
        for details in (False, True):
            found = llm.transcribe(SOUNDS, language="en", words=True, details=details)
            for own, words in zip(found, expected, strict=True):
                assert [(w.text, w.start, w.end) for s in own.segments for w in s.words] == words
                assert "".join(w[0] for w in words) == "".join(s.text for s in own.segments)
        assert len({words[1:] for words in expected[1]}) >= 4
        (short,) = llm.transcribe(sound(0.033), language="en", words=True)
        times = [t for s in short.segments for w in s.words for t in (w.start, w.end)]
        assert times
        assert all(0 <= t <= 1.0 for t in times)
        plain = llm.transcribe(SOUNDS, language="en", timestamps=True)
        assert [o.text for o in plain] == [o.text for o in found]
        assert not any(s.words for o in plain for s in o.segments)
        assert llm.stats().num_free_blocks == llm.stats().num_blocks


@pytest.mark.parametrize("language", ["english", "japanese"])
def test_words_of_characters_and_punctuation_equal_transformers(language):
    """Tokens are bytes, so that characters have several."""
    text = ' He said "né, it\'s 3.5!" – ¿qué? (日本。語) '
    tokens = list(text.encode())
    tokenizer = SimpleNamespace(
        eos_token_id=300,
        language=None,
        decode=lambda ids, **_: bytes(ids).decode(errors="replace"),
    )
    spans = [(float(i), i + 1.0) for i in range(len(tokens))]
    exact = transformers_words(tokenizer, tokens, spans, language, False)
    own = words_of(tokens, spans, tokenizer.decode, language)
    assert [(w.text, (w.start, w.end)) for w in own] == [(w["text"], w["timestamp"]) for w in exact]
    assert len(own) > 6


def test_what_tells_no_words_is_refused_by_name(whisper, tmp_path):
    shutil.copytree(whisper[0], tmp_path / "copy")
    generation = tmp_path / "copy" / "generation_config.json"
    said = json.loads(generation.read_text())
    for wrong in ([[3, 0]], [[0, 4]], [[-1, 0]], "abc", [3], 7):
        generation.write_text(json.dumps({**said, "alignment_heads": wrong}))
        with pytest.raises(CheckpointError) as caught:
            read_spec(tmp_path / "copy")
        assert caught.value.field == "alignment_heads"
    del said["alignment_heads"]
    generation.write_text(json.dumps(said))
    with LLM(str(tmp_path / "copy"), **SETTINGS) as llm:
        with pytest.raises(RequestError, match="alignment_heads") as caught:
            llm.transcribe(sound(0.5), words=True)
        assert caught.value.field == "timestamp_granularities"
    config = tmp_path / "copy" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "median_filter_width": 4}))
    with pytest.raises(UnsupportedModelError) as caught:
        read_spec(tmp_path / "copy")
    assert caught.value.field == "median_filter_width"
