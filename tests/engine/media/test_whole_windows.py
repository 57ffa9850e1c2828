"""Voxtral against transformers through the whole engine: sounds of several windows, each encoded with the silence after it."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch

from slipstream import AsyncLLM
from slipstream.config import EngineArgs
from slipstream.engine.media.sounds import SoundProcessor
from slipstream.errors import RequestError
from slipstream.spec.description import read_spec
from tests.data.make_mistral import AUDIO, CHATS, NUM_SPECIAL, NUM_TOKENS, SPECIALS
from tests.engine.media.test_sounds import GREEDY, engine
from tests.engine.text.test_tekken import file_of, known
from tests.server.conftest import serving
from tests.support import forked_ranks
from tests.support.sound_models import VOXTRAL, build_voxtral, part, sound, their_windows
from tests.support.vision_models import BYTES

TOKEN = BYTES + VOXTRAL.index("[AUDIO]")
SOUNDS = [sound(1), sound(2, 4.7), sound(3, 2.0), sound(4, 0.01)]
"""Sounds of one window, of three, of a full one, and one of nearly nothing."""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    path = tmp_path_factory.mktemp("voxtral")
    return path, build_voxtral(path, seed=3)


def prompt_of(*sounds, words="ab "):
    text = words + " and ".join("[AUDIO]" for _ in sounds) + " cd?"
    return {"prompt": text, "multi_modal_data": {"audio": list(sounds)}}


def their_greedy(model, ids, sounds):
    given = torch.tensor([ids])
    with torch.no_grad():
        found = model.generate(
            input_ids=given,
            attention_mask=torch.ones_like(given),
            input_features=their_windows(sounds),
            **dict(max_new_tokens=8, do_sample=False, eos_token_id=None),
        )
    return found[0, len(ids) :].tolist()


def largest_difference(model, answer, sounds):
    ids = answer.prompt_token_ids
    with torch.no_grad():
        made = model(input_ids=torch.tensor([ids]), input_features=their_windows(sounds))
    theirs = made.logits[0].log_softmax(-1)
    own = [position.chosen.logprob for position in answer.prompt_logprobs[1:]]
    return max(abs(a - theirs[i, ids[i + 1]].item()) for i, a in enumerate(own))


def test_frames_equal_those_of_transformers(made):
    processor = SoundProcessor(read_spec(made[0]).spec.media, 16)
    pieces = [piece for x in SOUNDS for piece in processor.prepare(x).pieces]
    processor.close()
    theirs = their_windows(SOUNDS).numpy()
    assert len(pieces) == len(theirs) == 6
    for piece, exact in zip(pieces, theirs, strict=True):
        frames = np.frombuffer(piece.data, np.float32).reshape(piece.height, piece.width)
        np.testing.assert_allclose(frames[:-1].T, exact, atol=2e-4)
        assert not frames[-1].any()  # as a convolution pads each window


@pytest.mark.parametrize(
    "kernels", ["auto", *(pytest.param(x, marks=pytest.mark.slow) for x in ("reference", "torch"))]
)
def test_several_sounds_equal_transformers(made, kernels):
    path, model = made
    wanted = dataclasses.replace(GREEDY, prompt_logprobs=0)
    with engine(path, kernels=kernels) as llm:
        (answer,) = llm.generate(prompt_of(*SOUNDS), wanted)
    ids = answer.prompt_token_ids
    assert ids.count(TOKEN) == 6 * 25
    assert ids.count(TOKEN - 1) == 4
    assert largest_difference(model, answer, SOUNDS) < 2e-4
    assert list(answer.outputs[0].token_ids) == their_greedy(model, ids, SOUNDS)


def test_chunks_prefixes_forks_and_drafts_give_the_same(made):
    path, model = made
    prompt, text = prompt_of(*SOUNDS[:2]), {"prompt": "just words, some of them"}
    with engine(path, enable_prefix_caching=False) as llm:
        (whole,) = llm.generate(prompt, GREEDY)
        (words,) = llm.generate(text, GREEDY)
    tokens = list(whole.outputs[0].token_ids)
    assert tokens == their_greedy(model, whole.prompt_token_ids, SOUNDS[:2])
    with engine(path, max_num_batched_tokens=24, image_cache_bytes=0) as llm:
        together = llm.generate([prompt, text, prompt], GREEDY)
        assert [list(a.outputs[0].token_ids) for a in together] == [
            *(tokens, list(words.outputs[0].token_ids), tokens)
        ]
        (again,) = llm.generate(prompt, GREEDY)
        assert again.num_cached_tokens > len(again.prompt_token_ids) - 8
        (forks,) = llm.generate(prompt, dataclasses.replace(GREEDY, n=3))
        assert [list(o.token_ids) for o in forks.outputs] == [tokens] * 3
        # another end of the second sound; two of its windows are the same but for the loudest value
        (different,) = llm.generate(prompt_of(SOUNDS[0], SOUNDS[1][:-9000]), GREEDY)
        assert 0 < different.num_cached_tokens < len(again.prompt_token_ids) - 25
    with engine(path, speculative_model="ngram", num_speculative_tokens=3) as llm:
        (guessed,) = llm.generate(prompt, GREEDY)
    assert list(guessed.outputs[0].token_ids) == tokens


@pytest.mark.parametrize(
    "split",
    ["tensor_parallel_size", pytest.param("pipeline_parallel_size", marks=pytest.mark.slow)],
)
def test_several_ranks_hear_the_same(made, split):
    path, model = made
    with forked_ranks.used(), engine(path, max_num_batched_tokens=24, **{split: 2}) as llm:
        (answer,) = llm.generate(prompt_of(*SOUNDS[:2]), GREEDY)
    exact = their_greedy(model, answer.prompt_token_ids, SOUNDS[:2])
    assert list(answer.outputs[0].token_ids) == exact


def test_preempted_requests_hear_their_sounds_again(made):
    path, _ = made
    prompts = [prompt_of(sound(20 + i, 2.5)) for i in range(4)]
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


@pytest.mark.slow
def test_a_published_folder_chats_as_it_stands(tmp_path):
    """Voxtral's has a tekken.json, no other tokenizer, and no chat template."""
    audio = SPECIALS.index("[AUDIO]")
    model = build_voxtral(tmp_path, seed=3, token=audio, vocab_size=NUM_SPECIAL + NUM_TOKENS)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).unlink()
    (tmp_path / "tekken.json").write_text(json.dumps(file_of("v7")))
    messages, _, _ = CHATS["sound"]
    heard = iter(SOUNDS[:1] + SOUNDS[2:])
    asked = [
        message
        if isinstance(message["content"], str)
        else {
            **message,
            "content": [part(next(heard)) if x == AUDIO else x for x in message["content"]],
        }
        for message in messages
    ]
    ids = []
    for token in known()["chats"]["sound"]["v7"]:
        ids += [SPECIALS.index("[BEGIN_AUDIO]"), *[audio] * 25] if token == audio else [token]
    exact = their_greedy(model, ids, SOUNDS[:1] + SOUNDS[2:])
    args = EngineArgs(model=str(tmp_path), dtype="float32", block_size=4, kv_cache_bytes=2**24)
    with (
        serving(start=lambda: AsyncLLM.start(args), served_model_names=("x",)) as server,
        server.http() as http,
    ):
        body = {"model": "x", "temperature": 0, "max_tokens": 8, "ignore_eos": True}
        more = {"return_token_ids": True}
        answer = http.post("/v1/chat/completions", json={**body, **more, "messages": asked}).json()
        assert answer["prompt_token_ids"] == ids
        assert answer["choices"][0]["token_ids"] == exact
        tool = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}
        call = {"tools": [tool], "tool_choice": "required", "max_tokens": 200, "ignore_eos": False}
        answer = http.post(
            "/v1/chat/completions", json={**body, **call, "messages": asked[:1]}
        ).json()
        (called,) = answer["choices"][0]["message"]["tool_calls"][:1]
        assert called["function"]["name"] == "now"


def test_a_sound_beyond_the_last_window_is_refused(made):
    with engine(made[0]) as llm, pytest.raises(RequestError) as caught:
        llm.generate(prompt_of(np.zeros(161 * 16_000, np.float32)), GREEDY)
    assert caught.value.field == "audio"


@pytest.mark.slow
def test_a_chat_over_http_hears_several_windows(made):
    path, _ = made
    content = [part(SOUNDS[1]), {"type": "text", "text": "what is it?"}]
    messages = [{"role": "user", "content": content}]
    with engine(path) as llm:
        (exact,) = llm.chat(messages, GREEDY)
        assert exact.prompt_token_ids.count(TOKEN) == 75
    args = EngineArgs(model=str(path), dtype="float32", kv_cache_bytes=2**24)
    with (
        serving(start=lambda: AsyncLLM.start(args), served_model_names=("x",)) as server,
        server.http() as http,
    ):
        body = {"model": "x", "messages": messages, "max_tokens": 8, "temperature": 0}
        answer = http.post("/v1/chat/completions", json={**body, "ignore_eos": True}).json()
    assert answer["choices"][0]["message"]["content"] == exact.outputs[0].text
    assert answer["usage"]["prompt_tokens"] == len(exact.prompt_token_ids)
