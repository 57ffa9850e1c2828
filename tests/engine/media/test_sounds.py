"""A model that hears against transformers, through the whole engine: prompts, chunks, prefixes, ranks, preemption, the cache of
embeddings, and what is refused."""

from __future__ import annotations

import base64
import dataclasses
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream import LLM, SamplingParams
from slipstream.engine.media.parts import AUDIO_FORMATS, from_base64
from slipstream.errors import RequestError
from tests.support import forked_ranks, tiny_models
from tests.support.sound_models import (
    PLACEHOLDER,
    TOKEN,
    build_hearing,
    part,
    sound,
    their_inputs,
    wav,
)
from tests.support.vision_models import largest_difference, picture

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("ears")
    return path, build_hearing(path, seed=3)


@contextmanager
def engine(path: Path, **settings: Any) -> Iterator[LLM]:
    given = {"dtype": "float32", "block_size": 4, "max_num_seqs": 4, "kv_cache_bytes": 2**24}
    with LLM(str(path), **{**given, **settings}) as llm:
        yield llm


def prompt_of(*sounds: Any, words: str = "ab ") -> dict[str, Any]:
    text = words + " and ".join(PLACEHOLDER for _ in sounds) + " cd?"
    return {"prompt": text, "multi_modal_data": {"audio": list(sounds)}}


def their_logprobs(model: Any, ids: list[int], sounds: list[Any]) -> torch.Tensor:
    with torch.no_grad():
        return model(**their_inputs(ids, sounds)).logits[0].log_softmax(-1)


def their_greedy(model: Any, ids: list[int], sounds: list[Any]) -> list[int]:
    with torch.no_grad():
        given = their_inputs(ids, sounds)
        found = model.generate(**given, max_new_tokens=8, do_sample=False, eos_token_id=None)
    return found[0, len(ids) :].tolist()


def assert_theirs(answer: Any, model: Any, sounds: list[Any]) -> None:
    """The prompt's log-probabilities and the answer are transformers'."""
    ids = answer.prompt_token_ids
    assert largest_difference(answer, their_logprobs(model, ids, sounds)) < 2e-4
    assert list(answer.outputs[0].token_ids) == their_greedy(model, ids, sounds)


@pytest.mark.parametrize(
    "kernels",
    [
        "auto",
        pytest.param("reference", marks=pytest.mark.slow),
        pytest.param("torch", marks=pytest.mark.slow),
    ],
)
def test_several_sounds_equal_transformers(made, kernels):
    """Sounds of odd lengths, of one token, and of the whole window."""
    path, model = made
    sounds = [sound(1), sound(2, 0.033), sound(3, 2.0), sound(4, 1.2345)]
    wanted = dataclasses.replace(GREEDY, prompt_logprobs=0)
    with engine(path, kernels=kernels) as llm:
        (answer,) = llm.generate(prompt_of(*sounds), wanted)
    assert_theirs(answer, model, sounds)


def test_chunks_prefixes_forks_and_drafts_give_the_same(made):
    path, model = made
    sounds = [sound(4), sound(5, 1.0)]
    prompt, text = prompt_of(*sounds), {"prompt": "just words, some of them"}
    with engine(path, enable_prefix_caching=False) as llm:
        (whole,) = llm.generate(prompt, GREEDY)
        (words,) = llm.generate(text, GREEDY)
    tokens = list(whole.outputs[0].token_ids)
    assert tokens == their_greedy(model, whole.prompt_token_ids, sounds)
    with engine(path, max_num_batched_tokens=24) as llm:
        together = llm.generate([prompt, text, prompt], GREEDY)
        assert [list(a.outputs[0].token_ids) for a in together] == [
            *(tokens, list(words.outputs[0].token_ids), tokens)
        ]
        (again,) = llm.generate(prompt, GREEDY)
        assert again.num_cached_tokens > len(again.prompt_token_ids) - 8
        assert list(again.outputs[0].token_ids) == tokens
        (forks,) = llm.generate(prompt, dataclasses.replace(GREEDY, n=3))
        assert [list(o.token_ids) for o in forks.outputs] == [tokens] * 3
        other = prompt_of(sounds[0], sound(6, 1.0))
        (different,) = llm.generate(other, GREEDY)
        last = max(i for i, t in enumerate(whole.prompt_token_ids) if t == TOKEN)
        assert 0 < different.num_cached_tokens < last - 3
    with engine(path, speculative_model="ngram", num_speculative_tokens=3) as llm:
        (alone,) = llm.generate(other, GREEDY)
        (guessed,) = llm.generate(prompt, GREEDY)
    assert list(alone.outputs[0].token_ids) == list(different.outputs[0].token_ids)
    assert list(guessed.outputs[0].token_ids) == tokens


@pytest.mark.parametrize("split", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_several_ranks_hear_the_same(made, split):
    path, model = made
    sounds = [sound(4), sound(5, 1.0)]
    wanted = dataclasses.replace(GREEDY, prompt_logprobs=0)
    with forked_ranks.used(), engine(path, max_num_batched_tokens=24, **{split: 2}) as llm:
        (answer,) = llm.generate(prompt_of(*sounds), wanted)
    assert_theirs(answer, model, sounds)


def test_preempted_requests_hear_their_sounds_again(made):
    path, _ = made
    prompts = [prompt_of(sound(20 + i)) for i in range(4)]
    wanted = dataclasses.replace(GREEDY, max_tokens=24)
    with engine(path) as llm:
        alone = [list(llm.generate(p, wanted)[0].outputs[0].token_ids) for p in prompts]
        length = len(llm.generate(prompts[0], GREEDY)[0].prompt_token_ids)
        block = llm.ledger.block_bytes
    room = {"kv_cache_bytes": block * (2 * -(-length // 4) + 3), "max_model_len": length + 25}
    with engine(path, enable_prefix_caching=False, image_cache_bytes=0, **room) as llm:
        answers = llm.generate(prompts, wanted)
        assert llm.stats().num_preemptions > 0
    assert [list(a.outputs[0].token_ids) for a in answers] == alone


def test_a_chat_hears(made):
    path, _ = made
    said = [part(sound(11)), {"type": "text", "text": "what is it?"}]
    short = [{"type": "audio", "audio": wav(sound(11))}, said[1]]
    with engine(path) as llm:
        one, two = (llm.chat([{"role": "user", "content": c}], GREEDY)[0] for c in (said, short))
        assert one.prompt_token_ids == two.prompt_token_ids
        assert one.outputs[0].token_ids == two.outputs[0].token_ids
        assert TOKEN in one.prompt_token_ids
        seen = {"type": "image_pil", "image_pil": picture(1)}
        with pytest.raises(RequestError, match="sounds, not pictures"):
            llm.chat([{"role": "user", "content": [*said, seen]}], GREEDY)
        with pytest.raises(RequestError, match="only a user"):
            llm.chat([{"role": "system", "content": said}], GREEDY)
        for wrong, field in (
            ({"format": "mp3"}, "messages[0].content[0].input_audio.format"),
            ({"format": "aiff"}, "messages[0].content[0].input_audio.format"),
            ({"data": "%"}, "messages[0].content[0].input_audio.data"),
        ):
            broken = {"type": "input_audio", "input_audio": {**said[0]["input_audio"], **wrong}}
            with pytest.raises(RequestError) as caught:
                llm.chat([{"role": "user", "content": [broken]}], GREEDY)
            assert caught.value.field == field


def test_a_template_of_texts_gets_the_placeholder(made, tmp_path):
    shutil.copytree(made[0], tmp_path, dirs_exist_ok=True)
    config = tmp_path / "tokenizer_config.json"
    said = json.loads(config.read_text())
    said["chat_template"] = (
        "{% for m in messages %}{{ m['role'] + ': ' + m['content'] }}{% endfor %}"
    )
    config.write_text(json.dumps(said))
    content = [part(sound(11)), {"type": "text", "text": "what is it?"}]
    with engine(tmp_path) as llm:
        (one,) = llm.chat([{"role": "user", "content": content}], GREEDY)
        prompt = {"prompt": f"user: {PLACEHOLDER}\nwhat is it?"}
        (two,) = llm.generate({**prompt, "multi_modal_data": {"audio": sound(11)}}, GREEDY)
        assert TOKEN in one.prompt_token_ids
        assert one.prompt_token_ids == two.prompt_token_ids
        assert one.outputs[0].token_ids == two.outputs[0].token_ids


@pytest.mark.parametrize(
    "template", ["{{ m['content'] }}", "{% for c in m['content'] %}{{ c['text'] }}{% endfor %}"]
)
def test_a_model_of_texts_refuses_a_sound_in_a_chat(tmp_path, template):
    tiny_models.build(tmp_path)
    tiny_models.write_tokenizer(tmp_path)
    config = tmp_path / "tokenizer_config.json"
    said = json.loads(config.read_text()) if config.is_file() else {}
    said["chat_template"] = "{% for m in messages %}" + template + "{% endfor %}"
    config.write_text(json.dumps(said))
    content = [part(sound(11)), {"type": "text", "text": "what is it?"}]
    with (
        engine(tmp_path) as llm,
        pytest.raises(RequestError, match=r"pictures and no sounds|no audio"),
    ):
        llm.chat([{"role": "user", "content": content}], GREEDY)


def test_what_is_no_sound_of_the_model_is_refused(made):
    path, _ = made
    with engine(path, max_images=2) as llm:
        for prompt, field in (
            (prompt_of(*[sound(1)] * 3), "audio"),
            (prompt_of(sound(1, 2.5)), "audio"),  # longer than the window
            (prompt_of(sound(1, 0.02)), "audio"),  # no token
            (prompt_of(b"RIFFnoise"), "file"),
            ({"prompt": "no place", "multi_modal_data": {"audio": sound(1)}}, "audio"),
            ({"prompt": PLACEHOLDER, "multi_modal_data": {"audio": []}}, "audio"),
            ({"prompt_token_ids": [5, TOKEN], "multi_modal_data": {"audio": []}}, "audio"),
            ({"prompt": PLACEHOLDER, "multi_modal_data": {"image": sound(1)}}, "image"),
        ):
            with pytest.raises(RequestError) as caught:
                llm.generate(prompt, GREEDY)
            assert caught.value.field == field
        (words,) = llm.generate({"prompt": "words", "multi_modal_data": {"audio": []}}, GREEDY)
        assert words.outputs[0].token_ids == llm.generate("words", GREEDY)[0].outputs[0].token_ids
        samples = sound(1)
        forms = [samples, (samples, 16_000), wav(samples), samples.tolist(), list(samples)]
        given = [{"prompt": PLACEHOLDER, "multi_modal_data": {"audio": x}} for x in forms]
        answers = llm.generate(given, GREEDY)
        assert len({tuple(a.outputs[0].token_ids) for a in answers}) == 1
    with engine(path, max_images=0) as llm:
        llm.generate("words alone", GREEDY)
        with pytest.raises(RequestError, match="max_images=0"):
            llm.generate(prompt_of(sound(1)), GREEDY)


TAG = b"ID3\x04\0\0\0\0\0\x05" + bytes(5)


@pytest.mark.parametrize(
    ("data", "form"),
    [
        (wav(sound(1, 0.1)), "wav"),
        (b"fLaC" + bytes(60), "flac"),
        (TAG + b"fLaC" + bytes(60), "flac"),
        (b"OggS" + bytes(60), "ogg"),
        (TAG + bytes(60), "mp3"),
        (b"\xff\xfb\x90\x00" + bytes(60), "mp3"),
        (b"\0\0\0\x20ftypM4A " + bytes(60), None),
        (b"#!AMR", None),
    ],
)
def test_a_format_is_what_the_file_begins_as(data, form):
    """Every other declared format is refused by name, before anything is decoded."""
    text = base64.b64encode(data).decode()
    for said in AUDIO_FORMATS:
        if said == form:
            assert from_base64(text, said, "input_audio") == data
            continue
        with pytest.raises(RequestError, match=said) as caught:
            from_base64(text, said, "input_audio")
        assert caught.value.field == "input_audio.format"
