"""What tests of several parts share."""

from __future__ import annotations

import shutil
import sys

import pytest
from hypothesis import settings

# A gate gives the same verdict on the same code, so its examples are the same every time. New ones are looked for with
# `./check --hypothesis-profile=explore`; what they find becomes a test of its own.
settings.register_profile("gate", derandomize=True, database=None)
settings.register_profile("explore", derandomize=False)
settings.load_profile("gate")


def pytest_addoption(parser):
    whose = "the interpreter that other programs' clients are installed for"
    parser.addoption("--clients-python", default=sys.executable, metavar="PYTHON", help=whose)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """The folder of a tiny model with random weights, a tokenizer and a chat template; its context is 1,024 tokens."""
    from tests import tiny_models  # here, since it takes torch and transformers

    folder = tmp_path_factory.mktemp("tiny-model")
    tiny_models.build_with_tokenizer(folder, max_position_embeddings=1024)
    return folder


@pytest.fixture
def model_copy(tiny_model, tmp_path):
    """A copy of the tiny model's folder, to be spoilt."""
    return shutil.copytree(tiny_model, tmp_path / "model")


@pytest.fixture(scope="session")
def tiny_encoder(tmp_path_factory):
    """The folder of a tiny encoder with random weights, a tokenizer, and the files that say how it pools."""
    from tests import tiny_models

    folder = tmp_path_factory.mktemp("tiny-encoder")
    tiny_models.build_encoder(folder)
    tiny_models.write_wordpiece(folder)
    tiny_models.write_sentence_transformers(folder)
    return folder


@pytest.fixture
def config_only(tmp_path):
    """The folder of a model that is a config.json and nothing else, for load_format="dummy"."""
    import json

    from tests import tiny_models

    folder = tmp_path / "config-only"
    folder.mkdir()
    config = {**tiny_models.FAMILIES["llama"], "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 512}
    more = {"rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps({**config, **more}))
    return folder
