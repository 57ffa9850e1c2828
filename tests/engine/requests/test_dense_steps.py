"""Dense steps of sentence-transformers (EmbeddingGemma's) behind the pooling."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from slipstream import LLM
from slipstream.errors import CheckpointError, RequestError, UnsupportedModelError
from slipstream.spec.description import read_spec
from tests.support import tiny_models

SETTINGS = dict(device="cpu", dtype="float32", num_threads=1)
TEXTS = ["the cat", "sing the song of the road .", "a"]
SIZES = (32, 48, 20)


def write(path, *, activations=("Tanh", "Identity"), order=("Pooling", "Dense", "Dense", "Normalize"), **changes):  # fmt: skip
    """The steps' files. Returns their linear modules."""
    tiny_models.write_sentence_transformers(path)
    kinds, made = ["Transformer", *order], []
    modules = [
        {"path": f"{i}_{k}" if i else "", "type": f"sentence_transformers.models.{k}"}
        for i, k in enumerate(kinds)
    ]
    (path / "modules.json").write_text(json.dumps(modules))
    for i, kind in enumerate(kinds):
        if kind != "Dense":
            continue
        n = len(made)
        linear = torch.nn.Linear(SIZES[n], SIZES[n + 1], bias=n == 0)
        folder = path / f"{i}_Dense"
        folder.mkdir()
        name = activations[n]
        where = "linear" if name == "Identity" else "activation"
        config = {
            "in_features": SIZES[n], "out_features": SIZES[n + 1], "bias": n == 0,
            "activation_function": f"torch.nn.modules.{where}.{name}", **changes,
        }  # fmt: skip
        (folder / "config.json").write_text(json.dumps(config))
        save_file({f"linear.{k}": v for k, v in linear.state_dict().items()}, folder / "model.safetensors")  # fmt: skip
        made.append(linear)
    return made


@pytest.fixture(params=["bert", "gemma3-encoder"])
def encoder(request, tmp_path):
    theirs = tiny_models.build_encoder(tmp_path, request.param)
    writes = tiny_models.write_wordpiece if request.param == "bert" else tiny_models.write_tokenizer
    writes(tmp_path)
    return tmp_path, theirs


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_vectors_pass_the_dense_steps(encoder, kernels):
    path, theirs = encoder
    first, second = write(path)
    with LLM(str(path), kernels=kernels, **SETTINGS) as llm:
        own = llm.embed(TEXTS)
        for output in own:
            with torch.no_grad():
                states = theirs(torch.tensor([output.prompt_token_ids])).last_hidden_state[0]
                exact = second(torch.tanh(first(states.mean(0))))
            exact = exact / exact.norm()
            assert np.abs(np.array(output.embedding) - exact.numpy()).max() <= 1e-5
            assert len(output.embedding) == 20
        with pytest.raises(RequestError, match="20 dimensions") as caught:
            llm.embed(TEXTS, dimensions=8)
        assert caught.value.field == "dimensions"
        bytes_of_all = llm.ledger.weights_bytes
    (path / "modules.json").unlink()
    with LLM(str(path), kernels=kernels, **SETTINGS) as plain:
        assert bytes_of_all - plain.ledger.weights_bytes == 4 * (32 * 48 + 48 + 48 * 20)


@pytest.mark.parametrize(
    ("how", "field"),
    [
        ({"activations": ("GELU", "Identity")}, "activation_function"),
        ({"order": ("Pooling", "Normalize", "Dense")}, "modules.json"),
        ({"order": ("Pooling", "Dense", "Dense"), "in_features": 31}, "in_features"),
        ({"module_input_name": "token_embeddings"}, "module_input_name"),
        ({"out_features": 0}, "in_features"),
    ],
)
def test_a_step_that_is_not_understood_is_refused(tmp_path, how, field):
    tiny_models.build_encoder(tmp_path)
    write(tmp_path, **how)
    with pytest.raises((UnsupportedModelError, CheckpointError)) as caught:
        read_spec(tmp_path)
    assert caught.value.field == field


def test_missing_weights_of_a_step_are_named(tmp_path):
    tiny_models.build_encoder(tmp_path)
    tiny_models.write_wordpiece(tmp_path)
    write(tmp_path)
    save_file({"linear.weight": torch.zeros(48, 31)}, tmp_path / "2_Dense" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"2_Dense has linear.weight \[48, 31\]"):
        LLM(str(tmp_path), **SETTINGS)
    (tmp_path / "2_Dense" / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="2_Dense"):
        LLM(str(tmp_path), **SETTINGS)
