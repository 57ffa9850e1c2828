"""Decoders that AutoModel wrote, as sentence-transformers does: architectures called …Model, names without their prefix, and no
head. Such a model gives vectors; it generates only where the config ties the head to the embeddings, like in transformers."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from slipstream import LLM, SamplingParams
from slipstream.errors import SlipstreamError, UnsupportedModelError
from slipstream.spec.description import read_spec
from tests.model.harness import load, run
from tests.support import tiny_models

TOKENS = list(range(5, 28))


def build(path, family, **more):
    """The model of transformers, without its head."""
    settings = {**tiny_models.settings_of(family), **more}
    settings = {k: v for k, v in settings.items() if v is not None or k == "pad_token_id"}
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    torch.manual_seed(0)
    model = AutoModel.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
        tiny_models.shake_buffers(model)
    model.save_pretrained(path)
    return model


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=0, atol=5e-5 * float(theirs.abs().max()))


@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_states_of_a_model_without_a_head_are_those_of_transformers(tmp_path, family):
    theirs = build(tmp_path, family, tie_word_embeddings=False)
    named = json.loads((tmp_path / "config.json").read_text())["architectures"]
    assert named[0].endswith("Model")
    spec = read_spec(tmp_path).spec
    assert not spec.generates
    with torch.inference_mode():
        expected = theirs(torch.tensor([TOKENS])).last_hidden_state[0]
    close(run(load(tmp_path), TOKENS, [7, 1, 4]), expected)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2", "qwen3", "bloom"])
def test_a_tied_head_is_that_of_transformers(tmp_path, family):
    build(tmp_path, family, tie_word_embeddings=True)
    assert read_spec(tmp_path).spec.generates
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = theirs(torch.tensor([TOKENS])).logits[0]
    close(run(load(tmp_path), TOKENS), expected)


@pytest.mark.parametrize("kernels", ["reference", "auto"])
def test_an_engine_gives_vectors_and_says_that_it_generates_nothing(tmp_path, kernels):
    theirs = build(tmp_path, "mistral", tie_word_embeddings=False)
    with LLM(str(tmp_path), kernels=kernels, dtype="float32", skip_tokenizer_init=True) as llm:
        (found,) = llm.embed([{"prompt_token_ids": TOKENS}])
        with torch.inference_mode():
            states = theirs(torch.tensor([TOKENS])).last_hidden_state[0]
        expected = torch.nn.functional.normalize(states[-1], dim=0)
        torch.testing.assert_close(torch.tensor(found.embedding), expected, rtol=0, atol=1e-4)
        with pytest.raises(SlipstreamError, match="decoder without a head"):
            llm.generate([{"prompt_token_ids": TOKENS}], SamplingParams(max_tokens=2))


def test_a_stored_head_is_used_whatever_the_architecture_is_called(tmp_path):
    tiny_models.write(tmp_path, "llama")
    expected = run(load(tmp_path), TOKENS)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaModel"]}))
    close(run(load(tmp_path), TOKENS), expected)


@pytest.mark.parametrize("name", ["QwenModel", "LlamaForTokenClassification", "Model", "T5Model"])
def test_other_architectures_are_refused_by_name(tmp_path, name):
    tiny_models.write(tmp_path, "llama")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": [name]}))
    with pytest.raises(UnsupportedModelError, match=name):
        read_spec(tmp_path)
