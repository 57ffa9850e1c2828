"""Checkpoints written: every tensor of every family as transformers wrote it, in folders that are whole or not there."""

from __future__ import annotations

import dataclasses
import json
from functools import partial

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from slipstream.cli.main import main
from slipstream.engine.text.tokenizer import Tokenizer
from slipstream.errors import CheckpointError, ConfigError, UnsupportedModelError
from slipstream.hub import list_cached, resolve_model
from slipstream.model.load.checkpoint import transformed
from slipstream.model.load.weights import load_parameters
from slipstream.model.save import (
    check_writable,
    copy_surroundings,
    new_folder,
    stored,
    stored_tensors,
    write_config,
    write_tensors,
)
from slipstream.spec.description import huggingface_config, read_spec
from slipstream.spec.families.names import canonical
from slipstream.spec.parameters import (
    Deinterleave,
    MinusOne,
    NegatedExp,
    Placement,
    Transpose,
    Ungroup,
    Unpermute,
)
from tests.model.families.test_families import CASES, TOKENS
from tests.support import tiny_models

CPU = torch.device("cpu")


def save(source, out, **options):
    description = read_spec(source)
    values = load_parameters(description, dtype=torch.float32, device=CPU)
    with new_folder(out) as folder:
        write_tensors(
            folder, stored_tensors(description.family, description.spec, values), **options
        )
        write_config(folder, huggingface_config(description))
        copy_surroundings(folder, description)


@pytest.mark.parametrize("name", [name for name, (f, _) in CASES.items() if f != "zamba2"])
def test_what_is_read_is_written_again(name, tmp_path):
    family, overrides = CASES[name]
    theirs = tiny_models.build(tmp_path / "model", family, **overrides)
    save(tmp_path / "model", tmp_path / "again")
    before, after = (
        load_file(tmp_path / which / "model.safetensors") for which in ("model", "again")
    )
    if family in (
        "olmo_hybrid",
        "kimi_linear",
        "bailing_hybrid",
        "deepseek_v4",
    ):  # whose writers have other names
        description = read_spec(tmp_path / "model")
        names = description.family.names(description.spec)
        before = {
            canonical(name, description.family.prefixes, names): x for name, x in before.items()
        }
    if family == "minimax":  # transformers stores what it makes from the config, too
        made = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")
        before = {name: x for name, x in before.items() if not name.endswith(made)}
    assert before.keys() == after.keys()
    for key, value in before.items():  # multipliers were folded into weights, and taken out again
        torch.testing.assert_close(
            after[key], value, rtol=1e-6 if family in ("falcon_h1", "mimo_v2_flash") else 0, atol=0
        )
    if family == "longcat_flash":  # transformers wants weights of experts that return their input
        return
    with torch.no_grad():
        expected = theirs(torch.tensor([TOKENS])).logits
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype=torch.float32)
        torch.testing.assert_close(again(torch.tensor([TOKENS])).logits, expected)


def test_what_makes_vectors_goes_along(tmp_path):
    tiny_models.write_with_tokenizer(tmp_path / "model", "qwen3")
    tiny_models.write_sentence_transformers(tmp_path / "model", mode="lasttoken")
    others = ("config_sentence_transformers.json", "vocab.txt", "spiece.model")
    for name in others:
        (tmp_path / "model" / name).write_text("{}")
    save(tmp_path / "model", tmp_path / "again")
    before, after = (read_spec(tmp_path / which).pooling for which in ("model", "again"))
    assert before == after is not None
    for name in ("modules.json", "1_Pooling/config.json", "sentence_bert_config.json", *others):
        assert (tmp_path / "again" / name).read_text() == (tmp_path / "model" / name).read_text()


@pytest.mark.parametrize("recipe", ["int8", "int4-gptq", "2:4", "draft:1/3"])
@pytest.mark.parametrize(
    ("kind", "build"),
    [
        ("an encoder", tiny_models.build_encoder),
        ("a classifier", partial(tiny_models.build_encoder, num_labels=2)),
        ("an encoder-decoder", tiny_models.build_t5),
    ],
)
def test_what_is_no_decoder_is_refused_before_any_work(kind, build, recipe, tmp_path, capsys):
    build(tmp_path / "model")
    out = tmp_path / "out"
    assert (
        main(
            [
                "compress",
                str(tmp_path / "model"),
                "--recipe",
                recipe,
                "--out",
                str(out),
                "--device",
                "cpu",
                "--json",
            ]
        )
        != 0
    )
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["field"] == "model_type"
    assert f"is {kind};" in error["message"]
    assert [f.name for f in tmp_path.iterdir()] == ["model"]


def test_shards_have_an_index(tmp_path):
    tiny_models.write_with_tokenizer(tmp_path / "model")
    save(tmp_path / "model", tmp_path / "again", shard_bytes=40_000)
    shards = sorted((tmp_path / "again").glob("*.safetensors"))
    assert len(shards) > 2
    assert all(f.stat().st_size < 60_000 for f in shards)
    index = json.loads((tmp_path / "again" / "model.safetensors.index.json").read_text())
    whole = load_file(tmp_path / "model" / "model.safetensors")
    assert index["metadata"]["total_size"] == sum(t.numel() * 4 for t in whole.values())
    for file in shards:
        for name, tensor in load_file(file).items():
            assert index["weight_map"][name] == file.name
            assert torch.equal(tensor, whole.pop(name))
    assert not whole
    before, after = (Tokenizer.from_pretrained(tmp_path / which) for which in ("model", "again"))
    assert before.encode("hello") == after.encode("hello")


def sizes_of_shards(folder, *sizes, shard_bytes=100):
    """Names of each file's tensors, of tensors of so many bytes; and the index, if there is one."""
    folder.mkdir()
    tensors = ((f"t{i}", torch.full((n,), i, dtype=torch.uint8)) for i, n in enumerate(sizes))
    write_tensors(folder, tensors, shard_bytes=shard_bytes)
    files = {f.name: list(load_file(f)) for f in sorted(folder.glob("*.safetensors"))}
    index = folder / "model.safetensors.index.json"
    return files, json.loads(index.read_text()) if index.is_file() else None


def test_shards_are_filled_and_never_above_their_size_but_by_one_tensor(tmp_path):
    assert sizes_of_shards(tmp_path / "one", 60, 40) == ({"model.safetensors": ["t0", "t1"]}, None)
    two, index = sizes_of_shards(tmp_path / "two", 60, 40, 1)
    first, second = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
    assert two == {first: ["t0", "t1"], second: ["t2"]}
    assert index["metadata"]["total_size"] == 101
    assert index["weight_map"] == {"t0": first, "t1": first, "t2": second}
    many, index = sizes_of_shards(tmp_path / "many", 250, 30, 30, 30, 20, 90, 5)
    assert list(many.values()) == [["t0"], ["t1", "t2", "t3"], ["t4"], ["t5", "t6"]]
    assert index["metadata"]["total_size"] == 455
    for file in (tmp_path / "many").glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            assert opened.metadata() == {"format": "pt"}  # transformers asks for it


def test_views_of_one_storage_are_written_as_tensors_of_their_own(tmp_path):
    whole = torch.arange(6.0)
    write_tensors(tmp_path, {"a": whole[:2], "b": whole[2:].view(2, 2).T}.items())
    found = load_file(tmp_path / "model.safetensors")
    assert (found["a"].tolist(), found["b"].tolist()) == ([0, 1], [[2, 4], [3, 5]])
    assert (tmp_path / "model.safetensors").stat().st_size < 400


def test_finished_folder_is_readable_by_others_and_nothing_is_beside_it(tmp_path):
    out = tmp_path / "deep" / "new"
    with new_folder(out) as folder:
        (folder / "1_Pooling").mkdir()
        for name in ("a", "1_Pooling/b"):
            (folder / name).touch(mode=0o600)
    assert oct(out.stat().st_mode & 0o777) == "0o755"
    assert {oct((out / n).stat().st_mode & 0o777) for n in ("a", "1_Pooling/b")} == {"0o644"}
    assert [f.name for f in out.parent.iterdir()] == ["new"]
    with pytest.raises(ConfigError, match="already exists"), new_folder(out / "a"):
        pass


def test_recommended_sampling_goes_along(tmp_path):
    tiny_models.write(tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text('{"top_k": 7}')
    (tmp_path / "again").mkdir()
    copy_surroundings(tmp_path / "again", read_spec(tmp_path / "model"))
    assert (tmp_path / "again" / "generation_config.json").read_text() == '{"top_k": 7}'


@pytest.mark.parametrize(
    ("shape", "transform"),
    [
        ((6, 4), None),
        ((6, 4), Transpose()),
        ((12, 4), Ungroup(num_kv_heads=2, group=1)),
        ((16,), Ungroup(num_kv_heads=2, group=2)),
        ((3, 8, 5), Deinterleave(transposed=False)),
        ((3, 8), Deinterleave(transposed=False)),
        ((8, 5), Unpermute(2)),
        ((5,), MinusOne()),
        ((3, 8, 5), Deinterleave(transposed=True)),
    ],
    ids=str,
)
def test_stored_tensor_is_read_as_the_parameter_it_was(shape, transform):
    parameter = torch.arange(float(torch.Size(shape).numel())).view(shape)
    written = stored(parameter, Placement("x", transform=transform))
    assert torch.equal(transformed(written, transform, torch), parameter)
    if transform is not None:
        assert written.shape != shape or not torch.equal(written, parameter)


def test_layout_of_a_gguf_file_is_not_written():
    with pytest.raises(UnsupportedModelError, match="NegatedExp is a layout of GGUF"):
        stored(torch.zeros(4, 2), Placement("x", transform=NegatedExp()))


@pytest.mark.parametrize(
    ("family", "error"),
    [
        ("llama", None),
        ("qwen3_moe", None),
        ("gpt_oss", "experts with biases"),
        ("deepseek_v3", "latent attention"),
    ],
)
def test_kinds_of_models_that_can_be_written(tmp_path, family, error):
    tiny_models.write(tmp_path, family)
    source = read_spec(tmp_path)
    if error is None:
        check_writable(source)
        quantised = dataclasses.replace(source, quantization="any")
        with pytest.raises(CheckpointError, match="quantised already"):
            check_writable(quantised)
        inside = dataclasses.replace(
            source, family=dataclasses.replace(source.family, nested_config="text_config")
        )
        with pytest.raises(UnsupportedModelError, match="inside another"):
            check_writable(inside)
    else:
        with pytest.raises(UnsupportedModelError, match=error):
            check_writable(source)


def test_an_interrupted_write_leaves_nothing(tmp_path):
    out = tmp_path / "new"

    def interrupted():
        with new_folder(out) as folder:
            (folder / "half").write_text("a")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(tmp_path.iterdir()) == []
    out.mkdir()
    with new_folder(out) as folder:
        (folder / "whole").write_text("a")
    with pytest.raises(ConfigError, match="already exists"), new_folder(out):
        pass
    assert [f.name for f in out.iterdir()] == ["whole"]


@pytest.mark.model
@pytest.mark.skipif(
    "smollm2" not in list_cached(), reason="needs the default model: slipstream pull smollm2"
)
def test_a_gguf_files_config_and_tokenizer_load_in_transformers(tmp_path):
    path = resolve_model("smollm2")
    description = read_spec(path)
    write_config(tmp_path, huggingface_config(description))
    ours = Tokenizer.from_pretrained(path)
    ours.save(tmp_path)
    assert read_spec(tmp_path).spec == description.spec
    assert read_spec(tmp_path).eos_token_ids == ours.eos_token_ids
    theirs, again = AutoTokenizer.from_pretrained(tmp_path), Tokenizer.from_pretrained(tmp_path)
    messages = [{"role": "user", "content": "What is 1234 × 5?\n\tДа 🙂"}]
    text = ours.apply_chat_template(messages)
    assert theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == text
    assert ours.encode(text) == again.encode(text) == theirs.encode(text)
    assert again.eos_token_ids == ours.eos_token_ids
