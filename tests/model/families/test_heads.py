"""Output heads that the config ties to the embeddings, and the checkpoint stores: transformers 5 keeps one that is another."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from slipstream.errors import CheckpointError, UnsupportedModelError
from slipstream.spec.description import read_spec
from slipstream.spec.stored import safetensors
from slipstream.spec.stored.safetensors import find_tensor, safetensors_files, same_numbers
from tests.model.harness import load, run, written
from tests.model.load.test_save import save
from tests.model.ranks.parallel_ranks import on_ranks
from tests.support import tiny_models

TOKENS = list(range(5, 28))
HEADS = {"gpt_neox": ("embed_out.weight", "gpt_neox.embed_in.weight")}
UNTIED = ("nemotron_h", "kimi_linear", "bailing_hybrid")
FAMILIES = [f for f in tiny_models.FAMILIES if f not in UNTIED]
"""Families of the test. transformers ties no head of those left out, whatever the config says."""


def tied(path, family, **more):
    """A tied checkpoint without a stored head: (the head's name, its embeddings')."""
    tiny_models.write(path, family, tie_word_embeddings=True, **more)
    head, embed = HEADS.get(family, ("lm_head.weight", None))
    tensors = load_file(path / "model.safetensors")
    ends = (
        "embed_tokens.weight",
        "wte.weight",
        "word_embeddings.weight",
        "tokens_embed.weight",
        "backbone.embeddings.weight",
    )
    embed = embed or next(n for n in tensors if n.endswith(ends))
    assert head not in tensors
    return head, embed


def store(path, name, like, change):
    """Store `change` of the tensor `like` as another one."""
    file = path / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, name: change(tensors[like].clone())}, file, metadata={"format": "pt"})


def other(table):
    table[-1, -1] += 0.5
    return table.roll(1, 0)


def shard(path):
    """The embeddings in the first of two shards, all else in the second."""
    tensors = load_file(path / "model.safetensors")
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    where = {n: names["embed" not in n] for n in tensors}
    for file in names:
        part = {n: t for n, t in tensors.items() if where[n] == file}
        save_file(part, path / file, metadata={"format": "pt"})
    (path / "model.safetensors").unlink()
    (path / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": where})
    )


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5 * float(theirs.abs().max()))


# transformers ties none of DBRX, and does not reload LongCat Flash: it wants weights of experts that have none
TYING = [family for family in FAMILIES if family not in ("dbrx", "longcat_flash")]


@torch.inference_mode()
def logits(path):
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    return theirs(torch.tensor([TOKENS])).logits[0]


@pytest.mark.parametrize("family", TYING)
def test_a_head_that_is_not_the_embeddings_is_kept(tmp_path, family):
    head, embed = tied(tmp_path, family)
    assert read_spec(tmp_path).spec.tied_embeddings
    plain = logits(tmp_path)
    store(tmp_path, head, embed, other)
    assert not read_spec(tmp_path).spec.tied_embeddings
    expected = logits(tmp_path)
    assert not torch.allclose(expected, plain, rtol=0.1)
    close(run(load(tmp_path), TOKENS), expected)


@pytest.mark.parametrize("family", TYING)
def test_a_head_that_is_the_embeddings_stays_tied(tmp_path, family):
    head, embed = tied(tmp_path, family)
    store(tmp_path, head, embed, lambda table: table)
    assert read_spec(tmp_path).spec.tied_embeddings
    close(run(load(tmp_path), TOKENS), logits(tmp_path))


@pytest.mark.parametrize("change", [other, lambda table: table])
def test_shards_are_compared_like_one_file(tmp_path, change):
    head, embed = tied(tmp_path, "qwen2")
    store(tmp_path, head, embed, change)
    shard(tmp_path)
    assert read_spec(tmp_path).spec.tied_embeddings == (change is not other)
    close(run(load(tmp_path), TOKENS), logits(tmp_path))


def test_ranks_share_out_a_stored_head(tmp_path):
    head, embed = tied(tmp_path, "llama")
    store(tmp_path, head, embed, other)
    expected = logits(tmp_path)
    for found in on_ranks(tmp_path, lambda model: run(model, TOKENS)):
        close(found, expected)


def test_a_checkpoint_written_again_says_that_its_head_is_another(tmp_path):
    head, embed = tied(tmp_path / "model", "gemma")
    store(tmp_path / "model", head, embed, other)
    save(tmp_path / "model", tmp_path / "again")
    assert (
        json.loads((tmp_path / "again" / "config.json").read_text())["tie_word_embeddings"] is False
    )
    close(logits(tmp_path / "again"), logits(tmp_path / "model"))


def test_a_rounded_head_of_a_tied_config_is_not_dropped(tmp_path):
    tied(tmp_path, "llama")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for part in ("weight_packed", "weight_scale", "weight_shape"):
        tensors[f"lm_head.{part}"] = torch.zeros(4)
    save_file(tensors, file, metadata={"format": "pt"})
    assert not read_spec(tmp_path).spec.tied_embeddings
    with pytest.raises(CheckpointError, match="lm_head"):
        load(tmp_path)


def test_different_heads_are_told_apart_without_reading_them_in_full(tmp_path, monkeypatch):
    monkeypatch.setattr(safetensors, "_CHUNK", 64)
    head, embed = tied(tmp_path, "llama")
    reads = []
    real = safetensors.os.pread
    monkeypatch.setattr(safetensors.os, "pread", lambda *a: reads.append(a) or real(*a))
    for change, most in ((other, 2), (lambda table: table, 10**6)):
        store(tmp_path, head, embed, change)
        reads.clear()
        pair = (find_tensor(tmp_path, head), find_tensor(tmp_path, embed))
        same_numbers.cache_clear()
        assert same_numbers(*pair) == (change is not other)
        assert 0 < len(reads) <= most
        reads.clear()
        same_numbers(*pair)
        assert not reads  # a process compares a pair once


# --- Encoder-decoders -------------------------------------------------------------------------------------------------


@torch.inference_mode()
def answers(path):
    theirs = AutoModelForSeq2SeqLM.from_pretrained(path, dtype=torch.float32).eval()
    inputs = {"input_ids": torch.tensor([TOKENS]), "decoder_input_ids": torch.tensor([TOKENS[:7]])}
    return theirs(**inputs).logits[0]


def configure(path, **changes):
    config = json.loads((path / "config.json").read_text())
    config = {k: v for k, v in {**config, **changes}.items() if v != "absent"}
    (path / "config.json").write_text(json.dumps(config))


V4 = [
    {"tie_word_embeddings": tie, "scale_decoder_outputs": "absent"}
    for tie in (True, False, "absent")
]
V5 = [{"tie_word_embeddings": True, "scale_decoder_outputs": scale} for scale in (True, False)]


@pytest.mark.parametrize("says", [*V4, *V5], ids=str)
@pytest.mark.parametrize("stored", ["no head", "the embeddings", "another head"])
@pytest.mark.parametrize("family", [*tiny_models.T5S, "mt5"])
def test_encoder_decoders_scale_and_tie_like_transformers(tmp_path, family, stored, says):
    tiny_models.build_t5(tmp_path, "flan-t5" if family == "mt5" else family)
    if family == "mt5":
        configure(tmp_path, model_type="mt5", architectures=["MT5ForConditionalGeneration"])
    file = tmp_path / "model.safetensors"
    tensors = {n: t for n, t in load_file(file).items() if n != "lm_head.weight"}
    save_file(tensors, file, metadata={"format": "pt"})
    if stored != "no head":
        change = other if stored == "another head" else lambda table: table
        store(tmp_path, "lm_head.weight", "shared.weight", change)
    configure(tmp_path, **says)
    if family == "mt5" and says["scale_decoder_outputs"] is True:  # transformers passes over it
        with pytest.raises(UnsupportedModelError, match="scale_decoder_outputs"):
            read_spec(tmp_path)
        return
    assert read_spec(tmp_path).spec.tied_embeddings == (stored != "another head")
    close(written(load(tmp_path), [TOKENS], [TOKENS[:7]])[0], answers(tmp_path))


def test_a_stack_with_embeddings_of_its_own_is_refused(tmp_path):
    tiny_models.build_t5(tmp_path, "t5")
    store(tmp_path, "encoder.embed_tokens.weight", "shared.weight", lambda table: table)
    close(written(load(tmp_path), [TOKENS], [TOKENS[:7]])[0], answers(tmp_path))
    store(tmp_path, "encoder.embed_tokens.weight", "shared.weight", other)
    with pytest.raises(UnsupportedModelError, match=r"encoder\.embed_tokens\.weight"):
        read_spec(tmp_path)


# --- Files ------------------------------------------------------------------------------------------------------------

OTHERS = [
    "consolidated.safetensors",
    "consolidated-00001-of-00001.safetensors",
    "adapter_model.safetensors",
]
COPIES = ["model.fp16.safetensors", "model.bf16.safetensors", "pytorch_model.safetensors"]


def test_only_the_models_own_file_is_read(tmp_path):
    tiny_models.write(tmp_path, "llama")
    expected = run(load(tmp_path), TOKENS)
    for name in (*OTHERS, *COPIES):
        save_file({"layers.0.attention.wq.weight": torch.zeros(3)}, tmp_path / name)
    close(run(load(tmp_path), TOKENS), expected)
    shard(tmp_path)
    close(run(load(tmp_path), TOKENS), expected)
    (tmp_path / "model.safetensors.index.json").unlink()
    close(run(load(tmp_path), TOKENS), expected)  # the shards are known by their names


def test_one_file_goes_before_an_index(tmp_path):
    tiny_models.write(tmp_path, "llama")
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"x": "model-00001-of-00002.safetensors"}})
    )
    assert [f.name for f in safetensors_files(tmp_path)] == ["model.safetensors"]
    close(run(load(tmp_path), TOKENS), logits(tmp_path))


def test_a_file_of_any_name_is_read_if_it_is_the_only_one(tmp_path):
    tiny_models.write(tmp_path, "llama")
    expected = run(load(tmp_path), TOKENS)
    for name in ("gptq_model-4bit-128g.safetensors", "model.fp16.safetensors"):
        file = next(tmp_path.glob("*.safetensors"))
        file.rename(tmp_path / name)
        save_file({"wq.weight": torch.zeros(3)}, tmp_path / "consolidated.safetensors")
        close(run(load(tmp_path), TOKENS), expected)
        (tmp_path / "consolidated.safetensors").unlink()


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (COPIES[:2], r"model\.bf16\.safetensors, model\.fp16\.safetensors"),
        (OTHERS[:1], r"consolidated\.safetensors is not a model"),
        (OTHERS[2:], r"adapter_model\.safetensors is not a model"),
    ],
)
def test_files_of_which_none_is_the_models_are_refused_by_name(tmp_path, names, message):
    tiny_models.write(tmp_path, "llama")
    for name in names:
        (tmp_path / name).write_bytes((tmp_path / "model.safetensors").read_bytes())
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)
