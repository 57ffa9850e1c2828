"""`check-model` against transformers: every kind of block, and faults in known places."""

from __future__ import annotations

import dataclasses
import json
import sys
import types

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from slipstream.bench.adapters import transformers as transformers_adapter
from slipstream.bench.adapters.transformers import load_folder
from slipstream.cli.main import main
from slipstream.compress.recipe import parse
from slipstream.compress.run import compress
from slipstream.errors import ConfigError, install_command
from slipstream.model.check import compare
from slipstream.model.stored.packing import tensor_numbers
from slipstream.model.stored.parts import expanded
from slipstream.spec.description import read_spec
from tests.model.formats.test_gguf_models import converted, write
from tests.model.harness import load
from tests.support import tiny_models

TOKENS = list(range(7, 40))


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {}),
        ("gpt_neox", {}),
        ("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 16}),
        ("bloom", {}),
        ("mpt", {}),
        ("falcon", {}),
        ("gemma2", {}),
        ("olmo2", {}),
        ("granite", {}),
        ("cohere2", {}),
        ("zamba2", {}),
    ],
    ids=str,
)
def test_the_same_model_is_the_same_everywhere(tmp_path, capsys, family, overrides):
    theirs = tiny_models.build(tmp_path, family, **overrides)
    report = compare(load(tmp_path), theirs, TOKENS, tolerance=1e-4)
    assert report.same, report
    assert [d.where for d in report.differences][:3] == ["embeddings", "layer 0", "layer 1"]
    assert (
        report.differences[-1].where == "logits"
    )  # the reference's kernels make no program of a step
    assert report.top1_agreement == 1.0
    assert main(["check-model", str(tmp_path), "--json", "--num-tokens=1"]) == 0
    assert json.loads(capsys.readouterr().out)["same"]


@pytest.mark.parametrize("number", ["0", "-1", "100000"])
def test_a_length_that_the_model_has_not_is_refused(tmp_path, capsys, number):
    """The refusal comes before transformers loads the model."""
    tiny_models.build(tmp_path, "llama")
    assert main(["check-model", str(tmp_path), "--num-tokens", number]) == 2
    assert f"got {number}" in capsys.readouterr().err


def test_of_layers_with_several_residuals_only_the_logits_are_compared(tmp_path):
    theirs = tiny_models.build(tmp_path, "gemma3n_text")
    report = compare(load(tmp_path), theirs, TOKENS, tolerance=1e-4)
    assert report.same, report
    assert [d.where for d in report.differences] == ["logits"]


@pytest.mark.parametrize(
    ("family", "end"),
    [
        *(
            (family, "states")
            for family in ("bert", "modernbert", "mpnet", "distilbert", "eurobert")
        ),
        *((family, "scores") for family in ("roberta", "modernbert", "nomic_bert")),
        *((family, "logits") for family in ("t5", "flan-t5", "umt5")),
    ],
)
def test_encoders_and_encoder_decoders(tmp_path, capsys, family, end):
    if end == "logits":
        theirs = tiny_models.build_t5(tmp_path, family)
    else:
        theirs = tiny_models.build_encoder(
            tmp_path, family, num_labels=3 if end == "scores" else None
        )
    report = compare(load(tmp_path), theirs, TOKENS, tolerance=1e-4)
    assert report.same, report
    expected = ["embeddings", "layer 0", "layer 1"]
    assert [d.where for d in report.differences][:3] == [
        ("encoder: " if end == "logits" else "") + x for x in expected
    ]
    assert report.differences[-1].where == end
    assert (report.top1_agreement is None) is (end != "logits")
    assert main(["check-model", str(tmp_path), "--kernels=cpu"]) == 0
    out = capsys.readouterr().out
    assert "as one program" in out
    assert ("likeliest" in out) is (end == "logits")


def test_a_fault_in_an_encoder_is_found(tmp_path):
    theirs = tiny_models.build_t5(tmp_path, "umt5")
    file = tmp_path / "model.safetensors"
    name = "encoder.block.1.layer.0.SelfAttention.relative_attention_bias.weight"
    tensors = load_file(file)
    save_file(
        {**tensors, name: tensors[name] + 1.0 * torch.arange(8)[:, None]},
        file,
        metadata={"format": "pt"},
    )
    assert (
        compare(load(tmp_path), theirs, TOKENS, tolerance=1e-4).first_divergence
        == "encoder: layer 1"
    )


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("model.embed_tokens.weight", "embeddings"),
        ("model.layers.0.mlp.down_proj.weight", "layer 0"),
        ("model.layers.1.self_attn.q_proj.weight", "layer 1"),
        ("model.norm.weight", "logits"),
    ],
)
def test_the_first_place_at_fault_is_named(tmp_path, name, where):
    theirs = tiny_models.build(tmp_path, "llama")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, name: tensors[name] * 1.1}, file, metadata={"format": "pt"})
    report = compare(load(tmp_path), theirs, TOKENS, tolerance=1e-4)
    assert report.first_divergence == where


def test_what_is_no_number_is_a_divergence(tmp_path):
    theirs = tiny_models.build(tmp_path, "llama")
    ours = load(tmp_path)
    ours.decoder.final_norm = dataclasses.replace(
        ours.decoder.final_norm, weight=torch.full((32,), torch.nan)
    )
    assert compare(ours, theirs, TOKENS, tolerance=1e-4).first_divergence == "logits"


def test_the_command_says_where(tmp_path, capsys):
    tiny_models.write(tmp_path, "llama")
    assert main(["check-model", str(tmp_path), "--kernels=reference"]) == 0
    assert "the same: no difference is more than 1e-04" in capsys.readouterr().out
    assert main(["check-model", str(tmp_path), "--tolerance=0"]) == 1
    out = capsys.readouterr().out
    assert out.count("< they part here") == 1
    assert "they part at: " in out
    assert "layer 1" in out
    assert main(["check-model", str(tmp_path / "nothing")]) == 3


class Rounding(torch.nn.Module):
    """A product whose inputs are rounded while its `quantization_scheme` says so, as compressed-tensors makes them."""

    def __init__(self, linear):
        super().__init__()
        self.linear = linear
        self.quantization_scheme = types.SimpleNamespace(input_activations="int8")

    def forward(self, x):
        if self.quantization_scheme.input_activations is not None:
            scale = x.abs().amax(-1, keepdim=True) / 127.5
            x = (x / scale).round().clamp(-128, 127) * scale
        return self.linear(x)


@pytest.mark.parametrize("recipe", ["int8", "fp8-static"])
def test_inputs_that_transformers_rounds_otherwise_are_compared_as_they_are(
    tmp_path, capsys, monkeypatch, recipe
):
    tiny_models.write(tmp_path / "model", "llama", hidden_size=64, intermediate_size=128)
    steps = {"bits": 8, "kind": "float", "inputs": "fp8", "static_inputs": True}
    steps = steps if recipe == "fp8-static" else {"bits": 8, "inputs": "int8"}
    source, path = read_spec(tmp_path / "model"), tmp_path / "rounded"
    windows = [list(range(5, 37))] * 2
    options = dict(windows=windows, device=torch.device("cpu"), dtype=torch.float32)
    compress(source, parse([{"quantize": steps}]), path, **options)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    config = json.loads((path / "config.json").read_text())
    held = read_spec(path)
    dense = held.native_formats(frozenset())
    assert not dense
    stored = dict(expanded_weights(path, held))
    for name, module in list(theirs.named_modules()):
        if name in stored:
            module.weight.data = stored[name]
            parent, _, last = name.rpartition(".")
            setattr(theirs.get_submodule(parent), last, Rounding(module))
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    monkeypatch.setattr(transformers_adapter, "load_folder", lambda *_: theirs)
    assert main(["check-model", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["same"]
    assert found["rounded_inputs"] is False


def expanded_weights(path, description):
    """(module, weight) of a folder's rounded products, as numbers."""
    formats = description.quantization.formats
    stored = (
        (n, tuple(t.shape), lambda t=t: t) for n, t in load_file(path / "model.safetensors").items()
    )
    for name, _, read in expanded(
        stored, formats, lambda module: "_proj" in module, tensor_numbers
    ):
        if "_proj" in name and name.endswith(".weight"):
            yield name.removesuffix(".weight"), read().float()


@pytest.mark.parametrize("pad", [0, 1, 5])
def test_padding_is_not_among_the_tokens(tmp_path, capsys, pad):
    tiny_models.build_encoder(tmp_path, "roberta", pad_token_id=pad, vocab_size=16)
    for seed in range(3):
        assert main(["check-model", str(tmp_path), "--json", f"--seed={seed}"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["same"]


def test_mpnet_counts_positions_from_two_whatever_its_padding_is(tmp_path, capsys):
    tiny_models.build_encoder(tmp_path, "mpnet", pad_token_id=0)
    assert main(["check-model", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["same"]


def test_what_transformers_cannot_load(tmp_path, capsys):
    tiny_models.write(tmp_path, "llama")
    (tmp_path / "model.safetensors").unlink()
    assert main(["check-model", str(tmp_path), "--json"]) == 2
    assert "transformers can't load" in json.loads(capsys.readouterr().out)["error"]["message"]


def test_rounded_weights_are_compared_exactly(tmp_path, capsys, monkeypatch):
    """The CPU's kernels round the inputs of such products as well, which is no fault of a description."""
    theirs = tiny_models.build(tmp_path / "hf", "qwen2", use_sliding_window=False)
    tensors = converted(tmp_path / "hf", gguf.MODEL_ARCH.QWEN2, 2)
    rounded = {
        name: (value, "Q8_0" if value.ndim == 2 else "F32") for name, (value, _) in tensors.items()
    }
    metadata = {
        "block_count": 2,
        "context_length": 256,
        "embedding_length": 32,
        "feed_forward_length": 64,
    }
    metadata |= {
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 1e-6,
    }
    write(
        tmp_path / "model.gguf",
        rounded,
        "qwen2",
        **{f"qwen2.{key}": value for key, value in metadata.items()},
    )
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.ndim == 2:
                blocks = gguf.quants.quantize(parameter.numpy(), gguf.GGMLQuantizationType.Q8_0)
                parameter.copy_(
                    torch.from_numpy(gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.Q8_0))
                )
    monkeypatch.setattr("slipstream.bench.adapters.transformers.load_folder", lambda *args: theirs)
    assert main(["check-model", str(tmp_path / "model.gguf"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kernels"] == "reference"
    assert main(["check-model", str(tmp_path / "model.gguf"), "--kernels=cpu"]) == 1
    assert "they part at: layer 0" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["folder", "model.gguf"])
def test_without_transformers_it_says_what_to_install(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, "transformers", None)
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ConfigError, match=r"pip install .*\[dev\]"):
        load_folder(tmp_path / name, "float32")


def test_a_checkpoint_that_is_not_its_configs_is_no_internal_error(tmp_path):
    tiny_models.write(tmp_path, "llama")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps({**config, "vocab_size": config["vocab_size"] + 1})
    )
    with pytest.raises(ConfigError, match=r"transformers can't load") as error:
        load_folder(tmp_path, "float32")
    assert "pip install" not in str(error.value)


@pytest.mark.parametrize(
    ("lacks", "told"), [("gguf", f"x: {install_command('dev')}"), ("compressed-tensors", "x")]
)
def test_the_extra_is_advised_for_what_it_has(monkeypatch, tmp_path, lacks, told):
    def load(*args, **more):
        raise ImportError(f"{lacks}>=0.15 is required. Please install x.\n")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", load)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError) as error:
        load_folder(tmp_path, "float32")
    assert str(error.value).endswith(f"is required. Please install {told}")


def test_transformers_that_is_not_there(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "transformers", None)
    for name in ("config.json", "x.gguf"):
        (tmp_path / name).touch()
    for path in (tmp_path, tmp_path / "x.gguf"):
        with pytest.raises(ConfigError, match=r"transformers is missing: pip install .*\[dev\]"):
            load_folder(path, "float32")
