"""Model files from strangers: sizes that are not true, numbers that are none. Each is told by its field."""

from __future__ import annotations

import json
import math
import shutil
import time

import pytest

from slipstream.cli.main import main
from slipstream.errors import CheckpointError, ModelError
from slipstream.model.load.checkpoint import safetensors_files
from slipstream.spec.description import read_spec
from tests.model.formats.test_gguf_models import LEAST, write


def refused(path, capsys, *words):
    """Asserts that `info` ends soon with the exit code of a model's error, and says each of `words`.

    The path is taken out of the message first: pytest's folders have the test's name, and with it most words.
    """
    begin = time.process_time()  # which a busy machine does not stretch
    assert main(["info", str(path)]) == 3
    assert time.process_time() - begin < 10
    said = capsys.readouterr().err.replace(str(path), "PATH")
    assert "internal error" not in said
    assert len(said) < 5000
    for word in words:
        assert word in said


HUGE = [2**31 - 1, 2**31, 2**62, 10**30]
LLAMA3 = {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize("value", HUGE)
@pytest.mark.parametrize(
    "key", ["num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size", "head_dim"]
)
def test_huge_sizes_of_a_config(model_copy, capsys, key, value):
    change(model_copy, {key: value})
    refused(model_copy, capsys)


def change(model, values):
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, **values}))


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"num_hidden_layers": 2**31}, "num_hidden_layers"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers"),
        ({"num_attention_heads": 2**31}, "num_attention_heads"),
        ({"max_position_embeddings": 2**40}, "max_position_embeddings"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps"),
        ({"rms_norm_eps": -1e-5}, "epsilon"),
        ({"rope_theta": math.inf, "rope_parameters": None}, "rope_theta"),
        ({"rope_theta": -1.0, "rope_parameters": None}, "rope_theta"),
        ({"rope_scaling": {**YARN, "factor": -1}, "rope_parameters": None}, "factor"),
        ({"rope_scaling": {**YARN, "factor": math.nan}, "rope_parameters": None}, "factor"),
        ({"rope_scaling": {**YARN, "beta_fast": 0}, "rope_parameters": None}, "beta_fast"),
        ({"rope_scaling": {**LLAMA3, "factor": 0}, "rope_parameters": None}, "factor"),
        (
            {"rope_scaling": {**LLAMA3, "low_freq_factor": 0}, "rope_parameters": None},
            "low_freq_factor",
        ),
        (
            {"rope_scaling": {**LLAMA3, "high_freq_factor": 0.5}, "rope_parameters": None},
            "high_freq_factor",
        ),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}, "rope_parameters": None}, "factor"),
        ({"rope_scaling": "x", "rope_parameters": None}, "rope_scaling"),
        ({"head_dim": 7}, ""),
        ({"architectures": 5}, ""),
        ({"model_type": ["llama"]}, "model_type"),
        ({"quantization_config": {"quant_method": {"a": 1}}}, ""),
        ({"hidden_act": "x" * 5_000_000}, "hidden_act"),
        ({"anything": "x" * 5_000_000}, "anything"),
    ],
)
def test_a_config_that_is_not_true(model_copy, capsys, values, word):
    change(model_copy, values)
    refused(model_copy, capsys, word)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("top_k", 2**70),
        ("temperature", 10**400),
        ("temperature", math.nan),
        ("eos_token_id", "x"),
        ("eos_token_id", [1.5]),
    ],
)
def test_a_generation_config_that_is_not_true(model_copy, capsys, key, value):
    (model_copy / "generation_config.json").write_text(json.dumps({"do_sample": True, key: value}))
    assert main(["run", str(model_copy), "hi", "--max-tokens", "1", "--device", "cpu"]) == 3
    said = capsys.readouterr().err
    assert key in said
    assert "internal error" not in said


def test_no_architectures_is_as_none_named(model_copy):
    change(model_copy, {"architectures": []})
    assert read_spec(model_copy).spec.generates


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_json_nested_without_end(model_copy, capsys, name):
    (model_copy / name).write_text('{"a":' + "[" * 100_000)
    if name == "tokenizer_config.json":
        assert main(["run", str(model_copy), "hi", "--max-tokens", "1", "--device", "cpu"]) == 3
        assert name in capsys.readouterr().err
    else:
        refused(model_copy, capsys, name)


@pytest.mark.parametrize(
    "key", ["block_count", "embedding_length", "feed_forward_length", "attention.head_count"]
)
@pytest.mark.parametrize("value", [2**31 - 1, 2**32 - 1])
def test_huge_sizes_of_a_gguf_file(tmp_path, capsys, key, value):
    import numpy as np

    path = tmp_path / "x.gguf"
    metadata = {f"llama.{k}": v for k, v in {**LEAST, key: value}.items()}
    write(path, {"token_embd.weight": (np.zeros((4, 32)), "F32")}, **metadata)
    refused(path, capsys)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention.layer_norm_rms_epsilon", math.nan),
        ("rope.freq_base", math.inf),
        ("rope.freq_base", 0.0),
    ],
)
def test_numbers_of_a_gguf_file_that_are_none(tmp_path, capsys, key, value):
    import numpy as np

    metadata = {f"llama.{k}": v for k, v in {**LEAST, key: value}.items()}
    write(tmp_path / "x.gguf", {"token_embd.weight": (np.zeros((4, 32)), "F32")}, **metadata)
    refused(tmp_path / "x.gguf", capsys)


@pytest.mark.parametrize("value", [math.nan, 0.0, -1.0, math.inf])
def test_frequencies_of_a_gguf_file_that_are_none(tmp_path, capsys, value):
    import numpy as np

    metadata = {f"llama.{k}": v for k, v in LEAST.items()}
    tensors = {
        "token_embd.weight": (np.zeros((4, 32)), "F32"),
        "rope_freqs.weight": (np.full(4, value), "F32"),
    }
    write(tmp_path / "x.gguf", tensors, **metadata)
    refused(tmp_path / "x.gguf", capsys, "factor")


def test_tensors_that_overlap(tmp_path, capsys):
    import numpy as np

    path = tmp_path / "x.gguf"
    tensors = {f"t{i}": (np.zeros((64, 64)), "F32") for i in range(4)}
    write(path, tensors, **{f"llama.{k}": v for k, v in LEAST.items()})
    data = path.read_bytes()
    for i in range(1, 4):  # all begin where the first does, and the file ends with it
        at = data.index(b"t%d" % i) + 2 + 4 + 16 + 4
        data = data[:at] + bytes(8) + data[at + 8 :]
    path.write_bytes(data[: len(data) - 3 * 64 * 64 * 4])
    refused(path, capsys, "overlap")


@pytest.mark.parametrize(
    "named", ["../outside.safetensors", "/etc/passwd", "sub/x.safetensors", "config.json", "..", ""]
)
def test_an_index_names_files_beside_it(model_copy, named):
    (model_copy / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": named}})
    )
    shutil.copy(model_copy / "model.safetensors", model_copy.parent / "outside.safetensors")
    with pytest.raises(CheckpointError, match="next to it"):
        safetensors_files(model_copy)


@pytest.mark.parametrize(
    "index",
    ['{"weight_map": {"a": 5}}', '{"weight_map": 5}', '{"weight_map":' + "[" * 100_000, "[]"],
)
def test_a_broken_index(model_copy, index):
    (model_copy / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=r"index\.json"):
        safetensors_files(model_copy)


def test_errors_quote_no_more_than_a_page():
    assert len(str(ModelError("a" * 5_000_000, field="b" * 5_000_000))) < 2000
