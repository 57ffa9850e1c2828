"""Models that take pictures against transformers, through the whole engine: prompts, chunks, prefixes, preemption, the cache of
embeddings."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream import LLM, SamplingParams
from slipstream.engine.media.prepared import PreparedMedia
from slipstream.errors import ConfigError, RequestError
from slipstream.model.media import pass_ends
from slipstream.params.lora_request import LoRARequest
from tests.model.formats.test_compressed import compress_gptq
from tests.support import forked_ranks
from tests.support.vision_models import (
    IMAGE,
    PALIGEMMA,
    build_vision,
    largest_difference,
    picture,
    prompt_of,
    their_inputs,
    token_id,
)

FAMILIES = (
    "smolvlm",
    "gemma3",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_5",
    "gemma4",
    "gemma4_large",
    "mistral3",
    "internvl",
    "llava",
    "llava_next",
    "glm4v",
    "kimi_k25",
    "lfm2_vl",
    "aya_vision",
    "cohere2_vision",
    "paligemma2",
    "llava_onevision",
    "exaone4_5",
    "cohere_compass",
)
LIKE_OTHERS = (
    "qwen3_vl_moe",
    "qwen3_5_moe",
    "qwen2_vl",
    "glm4v_moe",
    "glm46v",
    "glm_ocr",
    "paligemma",
)
"""Families of which a part alone differs from one above."""
HYBRIDS = ("qwen3_5", "lfm2_vl")
STEP = {"gemma4_large": 80, "paligemma": 1024, "paligemma2": 1024}
"""Tokens of a step that must hold a whole picture, or a whole prompt; 24 of others."""
NOT_SPLIT = (("qwen3_5", "tensor_parallel_size"), ("gemma4", "pipeline_parallel_size"))
"""Recurrent layers, and layers that read others' keys and values."""
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, tuple[Path, Any]]:
    made = {}
    for family in FAMILIES + LIKE_OTHERS:
        path = tmp_path_factory.mktemp(family)
        made[family] = path, build_vision(path, family, seed=3)
    return made


@contextmanager
def engine(path: Path, **settings: Any) -> Iterator[LLM]:
    given = {"dtype": "float32", "block_size": 4, "max_num_seqs": 4, "kv_cache_bytes": 2**24}
    with LLM(str(path), **{**given, **settings}) as llm:
        yield llm


def their_logprobs(family: str, model: Any, tokens: list[int], pictures: list[Any]) -> torch.Tensor:
    with torch.no_grad():
        return model(**their_inputs(family, tokens, pictures)).logits[0].log_softmax(-1)


def their_greedy(family, model, ids, pictures):
    with torch.no_grad():
        given = their_inputs(family, ids, pictures)
        found = model.generate(**given, max_new_tokens=8, do_sample=False, eos_token_id=None)
    return found[0, len(ids) :].tolist()


@pytest.mark.parametrize(
    "kernels",
    [
        "auto",
        pytest.param("reference", marks=pytest.mark.slow),
        pytest.param("torch", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("family", FAMILIES + LIKE_OTHERS)
def test_several_pictures_equal_transformers(models, family, kernels):
    path, model = models[family]
    pictures = [picture(1), picture(2, 30, 61), picture(3, 97, 20)]
    wanted = dataclasses.replace(GREEDY, prompt_logprobs=0, logprobs=0)
    with engine(path, kernels=kernels) as llm:
        (answer,) = llm.generate(prompt_of(family, *pictures), wanted)
    ids = answer.prompt_token_ids
    # float32 on both sides: the tolerance is that of the families' other tests, on log-probabilities of some −20 to 0
    # transformers' own error, beside float64, is 1.2e-4 in qwen3_5_moe
    most = 5e-4 if family in LIKE_OTHERS else 2e-4
    assert largest_difference(answer, their_logprobs(family, model, ids, pictures)) < most
    assert list(answer.outputs[0].token_ids) == their_greedy(family, model, ids, pictures)


def test_one_picture_of_a_prompt_is_seen_in_squares(models):
    """LLaVA-OneVision's, whose tokens are scaled where they are many. Of several pictures each is one square."""
    path, model = models["llava_onevision"]
    wanted, lengths = dataclasses.replace(GREEDY, prompt_logprobs=0), []
    with engine(path) as llm:
        shapes = [(50, 37), (97, 20), (9, 70), (300, 1)]
        for given in (*([picture(i, *x)] for i, x in enumerate(shapes, 1)), [picture(1)] * 2):
            (answer,) = llm.generate(prompt_of("llava_onevision", *given), wanted)
            ids = answer.prompt_token_ids
            theirs = their_logprobs("llava_onevision", model, ids, given)
            assert largest_difference(answer, theirs) < 2e-4
            lengths.append(ids.count(token_id("llava_onevision", "<image>")))
    assert min(lengths[:3]) > lengths[4] - 37 == lengths[3] + 1 == 37


def test_logits_of_cohere_are_scaled(models, tmp_path):
    """transformers' class forgets `logit_scale`, so its logits are multiplied here."""
    path, model = models["aya_vision"]
    shutil.copytree(path, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"]["logit_scale"] = 0.25
    (tmp_path / "config.json").write_text(json.dumps(config))
    with engine(tmp_path) as llm:
        wanted = dataclasses.replace(GREEDY, prompt_logprobs=0)
        (answer,) = llm.generate(prompt_of("aya_vision", picture(1)), wanted)
    with torch.no_grad():
        given = their_inputs("aya_vision", answer.prompt_token_ids, [picture(1)])
        theirs = (model(**given).logits[0] * 0.25).log_softmax(-1)
    assert largest_difference(answer, theirs) < 2e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_prefixes_forks_and_batches_give_the_same(models, family):
    path, _ = models[family]
    pictures = [picture(4), picture(5, 64, 64)]
    prompt = prompt_of(family, *pictures)
    text = {"prompt": "just words, some of them"}
    wanted = dataclasses.replace(GREEDY, logprobs=0)
    with engine(path, enable_prefix_caching=False) as llm:
        (whole,) = llm.generate(prompt, wanted)
        (words,) = llm.generate(text, wanted)
    tokens = list(whole.outputs[0].token_ids)
    with engine(path, max_num_batched_tokens=STEP.get(family, 24), max_num_seqs=4) as llm:
        together = llm.generate([prompt, text, prompt], wanted)
        assert [list(a.outputs[0].token_ids) for a in together] == [
            tokens,
            list(words.outputs[0].token_ids),
            tokens,
        ]
        for a, b in zip(together[0].outputs[0].logprobs, whole.outputs[0].logprobs, strict=True):
            assert a.chosen.logprob == pytest.approx(b.chosen.logprob, abs=2e-4)
        (again,) = llm.generate(prompt, wanted)
        assert again.num_cached_tokens > len(again.prompt_token_ids) - 8
        assert list(again.outputs[0].token_ids) == tokens
        (forks,) = llm.generate(prompt, dataclasses.replace(wanted, n=3))
        assert [list(o.token_ids) for o in forks.outputs] == [tokens] * 3
        if family in HYBRIDS:  # where prompts part, a state is kept for the third
            llm.generate(prompt_of(family, pictures[0], picture(12, 64, 64)), wanted)
        other = prompt_of(family, pictures[0], picture(6, 64, 64))
        (different,) = llm.generate(other, dataclasses.replace(wanted, prompt_logprobs=None))
        last = max(
            i for i, t in enumerate(whole.prompt_token_ids) if t == token_id(family, IMAGE[family])
        )
        if family in PALIGEMMA:  # all tokens have seen the second picture
            assert different.num_cached_tokens == 0
        else:  # the words and the first picture, and nothing behind the last piece of the second
            assert 0 < different.num_cached_tokens < last - 3
    with engine(path, enable_prefix_caching=False) as llm:
        (alone,) = llm.generate(other, wanted)
    assert list(alone.outputs[0].token_ids) == list(different.outputs[0].token_ids)


@pytest.mark.parametrize("split", ["tensor_parallel_size", "pipeline_parallel_size"])
@pytest.mark.parametrize("family", FAMILIES)
def test_several_ranks_see_the_same(models, family, split):
    """Each rank of the first stage encodes all pictures; later stages turn by their places, and look among their tokens."""
    if (family, split) in NOT_SPLIT:
        pytest.skip("refused by name")
    path, model = models[family]
    pictures = [picture(4), picture(5, 64, 64)]
    prompt, text = prompt_of(family, *pictures), {"prompt": "just words, some of them"}
    wanted = dataclasses.replace(GREEDY, prompt_logprobs=0)
    with (
        forked_ranks.used(),
        engine(path, max_num_batched_tokens=STEP.get(family, 24), **{split: 2}) as llm,
    ):
        together = llm.generate([prompt, text, prompt], wanted)
        (again,) = llm.generate(prompt, GREEDY)
    ids = together[0].prompt_token_ids
    for answer in (together[0], together[2]):
        assert largest_difference(answer, their_logprobs(family, model, ids, pictures)) < 2e-4
        assert answer.outputs[0].token_ids == again.outputs[0].token_ids
    assert list(again.outputs[0].token_ids) == their_greedy(family, model, ids, pictures)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_small_cache_of_embeddings_only_costs_time(models, family):
    path, _ = models[family]
    pictures = [picture(7), picture(8, 40, 40)]
    with engine(path, image_cache_bytes=64 * 2**20) as llm:
        (kept,) = llm.generate(prompt_of(family, *pictures), GREEDY)
        encoder = llm.core.executor.runner.media
        assert encoder.num_bytes > 0
        encoder._pixels = None  # no picture is read again
        llm.core.scheduler.reset_prefix_cache()
        llm.generate(prompt_of(family, *pictures, words="other "), GREEDY)
    with engine(path, image_cache_bytes=0, max_num_batched_tokens=STEP.get(family, 24)) as llm:
        (bare,) = llm.generate(prompt_of(family, *pictures), GREEDY)
        assert llm.core.executor.runner.media.num_bytes == 0
        assert llm.ledger.image_cache_bytes == 0
    assert list(bare.outputs[0].token_ids) == list(kept.outputs[0].token_ids)


@pytest.mark.parametrize("family", FAMILIES)
def test_preempted_requests_see_their_pictures_again(models, family):
    path, _ = models[family]
    prompts = [prompt_of(family, picture(20 + i)) for i in range(4)]
    wanted = dataclasses.replace(GREEDY, max_tokens=24)
    with engine(path) as llm:
        alone = [list(llm.generate(p, wanted)[0].outputs[0].token_ids) for p in prompts]
        length = len(llm.generate(prompts[0], GREEDY)[0].prompt_token_ids)
        groups = len(llm.config.cache.groups)
        block, states = llm.ledger.block_bytes, llm.ledger.state_bytes
        if states:
            size, slots = states // llm.ledger.num_states, 14
    blocks = groups * (2 * -(-length // 4) + 3)  # room for two prompts, or one with its answer
    more = {"state_slots": slots, "kv_cache_bytes": block * blocks + size * slots} if states else {}
    room = {"kv_cache_bytes": block * blocks, "max_model_len": length + 25, **more}
    with engine(path, enable_prefix_caching=False, **room) as llm:
        answers = llm.generate(prompts, wanted)
        # Gemma's windows give back what they have passed, and its answers fit.
        assert llm.stats().num_preemptions > 0 or family == "gemma3"
    assert [list(a.outputs[0].token_ids) for a in answers] == alone


@pytest.mark.parametrize("family", FAMILIES)
def test_speculation_changes_nothing(models, family):
    path, _ = models[family]
    prompt, wanted = prompt_of(family, picture(9)), dataclasses.replace(GREEDY, max_tokens=30)
    with engine(path) as llm:
        (plain,) = llm.generate(prompt, wanted)
    with engine(path, speculative_model="ngram", num_speculative_tokens=3) as llm:
        (guessed,) = llm.generate(prompt, wanted)
    assert list(plain.outputs[0].token_ids) == list(guessed.outputs[0].token_ids)


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma4"])
def test_rounded_checkpoints_keep_their_encoders_dense(family, tmp_path):
    path = tmp_path
    build_vision(path, family, seed=3, text={"hidden_size": 64})
    prompt = prompt_of(family, picture(1), picture(2, 30, 61))
    with engine(path, quantization="int8") as llm:
        llm.generate(prompt, GREEDY)
        tower = llm.core.executor.runner.model.tower.num_bytes
    with engine(path) as llm:
        assert llm.core.executor.runner.model.tower.num_bytes == tower
        llm.generate(prompt, GREEDY)
    with engine(path, quantization="int4-g32", kernels="reference") as llm:
        (rounded,) = llm.generate(prompt, GREEDY)
    compress_gptq(path, "language_model")
    with engine(path, kernels="reference") as llm:
        (stored,) = llm.generate(prompt, GREEDY)
    assert stored.outputs[0].token_ids == rounded.outputs[0].token_ids


def test_adapters_and_pictures_go_together(models, tmp_path):
    import peft

    path, model = models["smolvlm"]
    target = r".*text_model.*\.(q_proj|v_proj|down_proj)"
    tuned = peft.get_peft_model(
        model, peft.LoraConfig(r=4, target_modules=target, init_lora_weights=False)
    )
    try:
        tuned.save_pretrained(tmp_path)
        with engine(path, enable_lora=True) as llm:
            given = prompt_of("smolvlm", picture(10))
            plain, adapted = (
                llm.generate(given, GREEDY, lora_request=lora)[0]
                for lora in (None, LoRARequest("a", 1, str(tmp_path)))
            )
        theirs = their_inputs("smolvlm", plain.prompt_token_ids, [picture(10)])
        with torch.no_grad():
            wanted = tuned.generate(**theirs, max_new_tokens=8, do_sample=False, eos_token_id=None)
        assert (
            list(adapted.outputs[0].token_ids) == wanted[0, len(plain.prompt_token_ids) :].tolist()
        )
        assert adapted.num_cached_tokens == 0  # the plain prompt's keys are another model's
    finally:
        tuned.unload()


def test_prompts_that_do_not_go_with_their_pictures_are_refused(models):
    path, _ = models["smolvlm"]
    with engine(path, max_images=2) as llm:
        for prompt, field in (
            ({"prompt": "no place", "multi_modal_data": {"image": picture(1)}}, "image"),
            (prompt_of("smolvlm", *[picture(1)] * 3), "image"),
            ({"prompt": "<image>", "multi_modal_data": {"audio": b""}}, "audio"),
            ({"prompt": "<image>", "multi_modal_data": {"image": "a.png"}}, "image"),
            (
                {"prompt_token_ids": [1, 2], "multi_modal_data": {"image": picture(1)}},
                "prompt_token_ids",
            ),
        ):
            with pytest.raises(RequestError) as caught:
                llm.generate(prompt, GREEDY)
            assert caught.value.field == field
        token = token_id("smolvlm", "<image>")
        (by_text,) = llm.generate(prompt_of("smolvlm", picture(1)), GREEDY)
        short = [
            x
            for i, x in enumerate(by_text.prompt_token_ids)
            if x != token or by_text.prompt_token_ids[i - 1] != token
        ]
        assert short  # whole prompts of tokens are taken, too
        given = {
            "prompt_token_ids": by_text.prompt_token_ids,
            "multi_modal_data": {"image": picture(1)},
        }
        (by_tokens,) = llm.generate(given, GREEDY)
        assert by_tokens.outputs[0].token_ids == by_text.outputs[0].token_ids
        one = {
            "prompt_token_ids": [97, 98, 32, token, 63],
            "multi_modal_data": {"image": picture(1)},
        }
        (expanded,) = llm.generate(one, GREEDY)
        assert expanded.prompt_token_ids.count(token) == by_text.prompt_token_ids.count(token)


def test_without_pictures_the_decoder_is_served_alone(models):
    path, _ = models["gemma3"]
    with engine(path) as with_encoder, engine(path, max_images=0) as text_only:
        answers = [llm.generate("some words", GREEDY)[0] for llm in (with_encoder, text_only)]
        assert answers[0].outputs[0].token_ids == answers[1].outputs[0].token_ids
        assert text_only.ledger.weights_bytes < with_encoder.ledger.weights_bytes
        with pytest.raises(RequestError, match="max_images=0"):
            text_only.generate(prompt_of("gemma3", picture(1)), GREEDY)


def test_settings_that_do_not_go_with_pictures(models):
    path, _ = models["gemma3"]
    for settings, field in (
        ({"max_num_batched_tokens": 18}, "max_num_batched_tokens"),
        ({"max_images": -1}, "max_images"),
        ({"max_images": "3"}, "max_images"),
    ):
        with pytest.raises(ConfigError) as caught, engine(path, **settings):
            pass
        assert caught.value.field == field


def test_a_chat_with_pictures(models):
    import base64
    import io

    for family in FAMILIES:
        path, _ = models[family]
        file = io.BytesIO()
        picture(11).save(file, "PNG")
        url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
        parts = [
            {"type": "text", "text": "what "},
            {"type": "image_url", "image_url": {"url": url}},
        ]
        pil = [parts[0], {"type": "image_pil", "image_pil": picture(11)}]
        with engine(path) as llm:
            one, two = (llm.chat([{"role": "user", "content": c}], GREEDY)[0] for c in (parts, pil))
            (words,) = llm.chat([{"role": "user", "content": "hello"}], GREEDY)
            text = llm.get_tokenizer().decode(words.prompt_token_ids, skip_special_tokens=False)
            assert "hello" in text
            with pytest.raises(RequestError, match="only a user"):
                llm.chat([{"role": "system", "content": parts}], GREEDY)
            heard = {"type": "audio", "audio": [0.0] * 800}
            with pytest.raises(RequestError, match="takes no audio"):
                llm.chat([{"role": "user", "content": [*pil, heard]}], GREEDY)
            with pytest.raises(RequestError, match="nothing is fetched"):
                llm.chat(
                    [
                        {
                            "role": "user",
                            "content": [{"type": "image_url", "image_url": {"url": "http://x/"}}],
                        }
                    ],
                    GREEDY,
                )
            short = [parts[0], {"type": "image_url", "image_url": url}]
            assert (
                llm.chat([{"role": "user", "content": short}], GREEDY)[0].prompt_token_ids
                == one.prompt_token_ids
            )
            low = [
                {
                    "role": "user",
                    "content": [{"type": "image_url", "image_url": {"url": url, "detail": "low"}}],
                }
            ]
            if family == "smolvlm":  # which reads it as one tile
                assert (
                    len(llm.chat(low, GREEDY)[0].prompt_token_ids) < len(one.prompt_token_ids) - 50
                )
            elif family == "gemma3":
                with pytest.raises(RequestError, match="no smaller size"):
                    llm.chat(low, GREEDY)
            for wrong, why in (
                ({"detail": "lowest"}, "auto, low or high"),
                ({"detial": "low"}, "detial"),
            ):
                said = [
                    {
                        "role": "user",
                        "content": [{"type": "image_url", "image_url": {"url": url, **wrong}}],
                    }
                ]
                with pytest.raises(RequestError, match=why):
                    llm.chat(said, GREEDY)
        assert one.prompt_token_ids == two.prompt_token_ids
        assert one.outputs[0].token_ids == two.outputs[0].token_ids
        assert token_id(family, IMAGE[family]) in one.prompt_token_ids


def test_prepared_pictures_are_plain_values(models):
    path, _ = models["smolvlm"]
    with engine(path) as llm:
        assert llm._input.prompts.media.processor is not None
        prepared = llm._input.prompts.media.processor.prepare(picture(1))
        assert isinstance(prepared, PreparedMedia)
        (answer,) = llm.generate(prompt_of("smolvlm", prepared), GREEDY)
        (direct,) = llm.generate(prompt_of("smolvlm", picture(1)), GREEDY)
    assert answer.outputs[0].token_ids == direct.outputs[0].token_ids


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 60))
def test_passes_over_pictures(counts, most):
    """All pictures in order, none too large unless a picture is, and about as many as are needed."""
    ends = pass_ends(counts, most)
    assert ends == sorted(set(ends))
    assert ends[-1:] == [len(counts)][: len(ends)]
    passes = [counts[a:b] for a, b in itertools.pairwise([0, *ends])]
    assert [n for own in passes for n in own] == counts
    assert all(len(own) == 1 or sum(own) <= most for own in passes)
    assert not counts or len(ends) <= 2 * -(-sum(counts) // most) + 1
    assert pass_ends([1564] * 16, 8192) == [4, 8, 12, 16]
    assert pass_ends([50] * 4, 100) == [2, 4]
