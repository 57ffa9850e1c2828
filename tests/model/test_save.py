"""Checkpoints written: every tensor of every family as transformers wrote it, in folders that are whole or not there."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from slipstream.cli.main import main
from slipstream.engine.text.tokenizer import Tokenizer
from slipstream.errors import ConfigError
from slipstream.hub import list_cached, resolve_model
from slipstream.model.save import (
    copy_surroundings,
    new_folder,
    stored_tensors,
    write_config,
    write_tensors,
)
from slipstream.model.weights import load_parameters
from slipstream.spec.description import huggingface_config, read_spec
from tests import tiny_models
from tests.model.test_families import CASES, TOKENS

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


@pytest.mark.parametrize("name", CASES)
def test_what_is_read_is_written_again(name, tmp_path):
    family, overrides = CASES[name]
    theirs = tiny_models.build(tmp_path / "model", family, **overrides)
    save(tmp_path / "model", tmp_path / "again")
    before, after = (
        load_file(tmp_path / which / "model.safetensors") for which in ("model", "again")
    )
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
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
