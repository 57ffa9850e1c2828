"""The canary: it sings where the model is the same, and is heard where it is not."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream import LLM
from slipstream.config import EngineArgs
from slipstream.config.engine_folder import ENGINE_NAME
from slipstream.engine.async_llm import AsyncLLM
from slipstream.errors import CheckpointError, ConfigError, ModelError
from slipstream.evals.scorer import Scorer
from slipstream.params.sampling import SamplingParams
from slipstream.worker.start.canary import CANARY_NAME, read_canary, run_canary, write_canary
from tests.support import tiny_models
from tests.support.waiting import PATIENCE_S

SETTINGS = {
    "dtype": "float32",
    "device": "cpu",
    "num_threads": 1,
    "max_model_len": 64,
    "max_num_seqs": 2,
}
TOKENS = [7 + i * 13 % 200 for i in range(60)]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A checkpoint with its canary."""
    folder = tmp_path_factory.mktemp("made")
    tiny_models.write_with_tokenizer(folder)
    scorer = load(folder)
    write_canary(scorer.canary(TOKENS), folder)
    return folder


@pytest.fixture
def copy(made, tmp_path):
    shutil.copytree(made, tmp_path / "copy")
    return tmp_path / "copy"


def load(folder, **settings):
    return Scorer.load(
        EngineArgs(model=str(folder), dtype="float32", device="cpu", num_threads=1, **settings),
        context=64,
    )


def damage(folder):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.mlp.down_proj.weight"
    save_file({**tensors, name: -tensors[name]}, file, metadata={"format": "pt"})


def test_the_same_model_gives_the_same(made):
    canary = read_canary(made, tiny_models.VOCAB)
    assert canary.token_ids == tuple(TOKENS[:48])
    scorer = load(made)
    found = run_canary(scorer.forwards, scorer.kv, canary, context=64)
    assert found.ok
    assert abs(found.kl_mean) < 1e-5
    assert found.top1_agreement == 1.0
    assert found.num_tokens == 48


def test_an_engine_folder_of_a_gguf_file_has_its_canary(made, tmp_path):
    """`optimize` puts it there. Of a GGUF file anywhere else nobody knows whose a canary beside it is."""
    shutil.copy(made / CANARY_NAME, tmp_path)
    (tmp_path / "model.gguf").touch()
    assert read_canary(tmp_path / "model.gguf", tiny_models.VOCAB) is None
    (tmp_path / ENGINE_NAME).touch()
    assert read_canary(tmp_path / "model.gguf", tiny_models.VOCAB) == read_canary(
        made, tiny_models.VOCAB
    )


def test_stored_values_are_the_models(made):
    canary, scorer = read_canary(made, tiny_models.VOCAB), load(made)
    with torch.inference_mode():
        logits = scorer.logits(scorer.hidden(TOKENS[:48])).log_softmax(
            -1
        )  # all at once: decodes give the same
    best = logits.topk(16)
    torch.testing.assert_close(torch.tensor(canary.top_logprobs), best.values, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "settings", [{"kernels": "reference"}, {"kernels": "torch"}, {"kv_cache_dtype": "int8"}]
)
def test_kernels_and_caches_pass(made, settings):
    scorer = load(made, **settings)
    found = run_canary(scorer.forwards, scorer.kv, read_canary(made, tiny_models.VOCAB), context=64)
    assert found.ok, found


def test_kl_is_that_of_the_likeliest_and_the_rest(made, copy):
    damage(copy)
    canary, right, wrong = read_canary(made, tiny_models.VOCAB), load(made), load(copy)
    found = run_canary(wrong.forwards, wrong.kv, canary, context=64)
    with torch.inference_mode():
        p = right.logits(right.hidden(TOKENS[:48])).softmax(-1)
        q = wrong.logits(wrong.hidden(TOKENS[:48])).softmax(-1)
    ids = p.topk(16).indices
    p16, q16 = p.gather(-1, ids), q.gather(-1, ids)
    p_rest, q_rest = 1 - p16.sum(-1), 1 - q16.sum(-1)
    kl = (p16 * (p16 / q16).log()).sum(-1) + p_rest * (p_rest / q_rest).log()
    assert found.kl_mean == pytest.approx(kl.mean().item(), rel=1e-3)
    assert (
        found.kl_mean <= (p * (p / q).log()).sum(-1).mean().item()
    )  # never more than over the whole vocabulary
    assert not found.ok


def test_what_is_no_number_is_not_ok(made):
    scorer = load(made, kernels="reference")
    scorer.decoder.final_norm.weight.data = torch.full_like(
        scorer.decoder.final_norm.weight, math.nan
    )
    found = run_canary(scorer.forwards, scorer.kv, read_canary(made, tiny_models.VOCAB), context=64)
    assert math.isnan(found.kl_mean)
    assert not found.ok


def test_a_start_warns_or_refuses(made, copy, caplog):
    with LLM(str(made), canary="refuse", **SETTINGS) as llm:
        assert llm.canary.ok
        assert "canary" in llm.phases
        before = (
            llm.generate("hello", SamplingParams(temperature=0, max_tokens=8))[0]
            .outputs[0]
            .token_ids
        )
    with LLM(str(made), canary="off", **SETTINGS) as llm:
        assert llm.canary is None
        assert (
            llm.generate("hello", SamplingParams(temperature=0, max_tokens=8))[0]
            .outputs[0]
            .token_ids
            == before
        )
    damage(copy)
    with caplog.at_level(logging.WARNING), LLM(str(copy), **SETTINGS) as llm:
        assert not llm.canary.ok
    assert "canary is dead" in caplog.text
    with pytest.raises(ModelError, match="canary is dead"):
        LLM(str(copy), canary="refuse", **SETTINGS)


def test_without_a_canary(tiny_model, config_only):
    with LLM(str(tiny_model), **SETTINGS) as llm:
        assert llm.canary is None
    with pytest.raises(ConfigError, match=f"no {CANARY_NAME}"):
        LLM(str(tiny_model), canary="refuse", **SETTINGS)
    with pytest.raises(ConfigError, match="random weights"):
        LLM(
            str(config_only),
            canary="refuse",
            load_format="dummy",
            skip_tokenizer_init=True,
            **SETTINGS,
        )
    with pytest.raises(ConfigError, match="off, warn, refuse"):
        LLM(str(tiny_model), canary="sing", **SETTINGS)


@pytest.mark.parametrize("build", [tiny_models.build_encoder, tiny_models.build_t5])
def test_what_is_no_decoder_has_no_canary(made, build, tmp_path, caplog):
    build(tmp_path)
    tiny_models.write_tokenizer(tmp_path)
    with caplog.at_level(logging.WARNING), LLM(str(tmp_path), **SETTINGS) as llm:
        assert llm.canary is None
    assert CANARY_NAME not in caplog.text  # there is none
    shutil.copy(made / CANARY_NAME, tmp_path)
    with caplog.at_level(logging.WARNING), LLM(str(tmp_path), **SETTINGS) as llm:
        assert llm.canary is None
    assert f"its {CANARY_NAME} is ignored" in caplog.text
    with pytest.raises(ConfigError, match=r"is an encoder.*only decoders have canaries"):
        LLM(str(tmp_path), canary="refuse", **SETTINGS)


def test_its_tokens_are_no_load_of_experts(tmp_path):
    tiny_models.write_with_tokenizer(tmp_path, "qwen3_moe")
    write_canary(load(tmp_path).canary(TOKENS), tmp_path)
    with LLM(str(tmp_path), canary="refuse", **SETTINGS) as llm:
        assert llm.canary.ok
        counts = [sum(tokens) for _, tokens in llm.stats().expert_load]
        assert counts
        assert set(counts) == {0}
        llm.generate("hello", SamplingParams(temperature=0, max_tokens=4))
        assert all(sum(tokens) > 0 for _, tokens in llm.stats().expert_load)


def test_a_short_context_cuts_it(made):
    with LLM(str(made), canary="refuse", **{**SETTINGS, "max_model_len": 20}) as llm:
        assert llm.canary.num_tokens == 20


async def test_the_engine_process_tells(made):
    engine = await AsyncLLM.start(EngineArgs(model=str(made), canary="refuse", **SETTINGS))
    try:
        assert engine.canary.ok
        assert engine.canary.num_tokens == 48
    finally:
        await engine.shutdown()


async def test_the_engine_process_refuses(copy):
    damage(copy)
    with pytest.raises(ModelError, match="canary is dead"):
        await asyncio.wait_for(
            AsyncLLM.start(EngineArgs(model=str(copy), canary="refuse", **SETTINGS)), PATIENCE_S
        )


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"format": 2}, "format"),
        ({"token_ids": [5000] * 48}, "none of the 288"),
        ({"token_ids": [1]}, "do not fit"),
        ({"top_ids": [[]] * 48, "top_logprobs": [[]] * 48}, "do not fit"),
        ({"max_kl": 0}, "max_kl"),
        ({"max_kl": "much"}, "'>' not supported"),
        ({"song": 1}, "song"),
        ({"top_logprobs": [[0.5] * 16] * 48}, "log-probabilities"),
    ],
)
def test_a_damaged_file_is_named(copy, change, told):
    file = copy / CANARY_NAME
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(CheckpointError, match=told) as error:
        read_canary(copy, tiny_models.VOCAB)
    assert error.value.field == "canary"
    file.write_text("[1")
    with pytest.raises(CheckpointError, match="delete it"):
        read_canary(copy, tiny_models.VOCAB)
