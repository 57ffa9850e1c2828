"""Training an adapter: what is written is what was trained, here and in PEFT; answers alone are learned; an interrupted run."""

from __future__ import annotations

import json

import pytest
import torch

from slipstream import LLM, LoRARequest, SamplingParams
from slipstream.cli.main import main
from slipstream.compress.recipe import parse, preset
from slipstream.compress.steps import LoRA
from slipstream.compress.training import lora
from slipstream.compress.training.lora import (
    LoraTraining,
    adapted_modules,
    frozen_base,
    read_samples,
    train_adapter,
)
from slipstream.engine.text.tokenizer import Tokenizer
from slipstream.errors import ConfigError
from slipstream.model.sequences import SequenceBatch
from slipstream.spec.description import read_spec
from tests.model.harness import load, run
from tests.model.test_adapters import adapted, layout_of
from tests.support import tiny_models

CPU = torch.device("cpu")
TOKENS = [5, 9, 200, 31, 7, 250, 11, 90, 3, 4, 77]
SMALL = dict(
    num_steps=4,
    batch_size=3,
    micro_batch=2,
    context=32,
    rank=4,
    learning_rate=0.05,
    dropout=0.1,
    held_out=2,
)


@pytest.fixture
def texts(tmp_path):
    path = tmp_path / "texts.jsonl"
    rows = [{"text": f"The number {n} comes after {n - 1}, and before {n + 1}."} for n in range(30)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def settings(text, **more):
    step = LoRA(**{**SMALL, "text": text, **more})
    step.check()
    return step


def logits(model, folder):
    return run(adapted(model, layout_of(model), folder), TOKENS)


def difference(ours, theirs):
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


@pytest.mark.parametrize(
    "family", ["llama", "qwen2", "gemma3_text", "gpt2", "gptj", "gpt_neox", "qwen3_5_text", "bamba"]
)
def test_what_is_trained_is_what_peft_and_we_load(family, tmp_path, texts, monkeypatch):
    from peft import PeftModel

    monkeypatch.setattr(lora, "in_bfloat16", lambda device: False)
    hf = tiny_models.build_with_tokenizer(tmp_path / "model", family)
    source = read_spec(tmp_path / "model")
    kept = {}
    monkeypatch.setattr(
        lora, "LoraTraining", lambda *a: kept.setdefault("training", LoraTraining(*a))
    )
    receipt = train_adapter(source, settings(texts, rslora=True), tmp_path / "out", device=CPU)
    assert receipt["training"]["num_steps"] == 4
    assert receipt["held_out"]["perplexity_after"] < receipt["held_out"]["perplexity_before"]
    assert receipt["data"]["num_held_out"] >= 2
    with torch.inference_mode():
        without = hf(torch.tensor([TOKENS])).logits[0]
        theirs = (
            PeftModel.from_pretrained(hf, tmp_path / "out").eval()(torch.tensor([TOKENS])).logits[0]
        )
        trained = kept["training"].model(SequenceBatch.of([TOKENS], CPU))
    assert difference(without, theirs) > 1e-3
    assert difference(trained, theirs) < 1e-5
    assert difference(logits(load(tmp_path / "model"), tmp_path / "out"), theirs) < 1e-5
    assert not [*tmp_path.glob(".out*")]


def test_targets_and_ranks(tmp_path, texts):
    from peft import PeftModel

    hf = tiny_models.build_with_tokenizer(tmp_path / "model", "llama")
    chosen = settings(texts, targets=("q_proj", "down_proj"), ranks={"q_proj": 2}, alpha=3.0)
    train_adapter(read_spec(tmp_path / "model"), chosen, tmp_path / "out", device=CPU)
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["target_modules"] == ["down_proj", "q_proj"]
    with torch.inference_mode():
        theirs = (
            PeftModel.from_pretrained(hf, tmp_path / "out").eval()(torch.tensor([TOKENS])).logits[0]
        )
    assert difference(logits(load(tmp_path / "model"), tmp_path / "out"), theirs) < 1e-5
    for wrong in ({"targets": ("lm_head",)}, {"ranks": {"w_proj": 3}}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            adapted_modules(read_spec(tmp_path / "model"), settings(texts, **wrong))


def test_an_interrupted_run_goes_on(tmp_path, texts, monkeypatch):
    tiny_models.write_with_tokenizer(tmp_path / "model", "llama")
    source, chosen = read_spec(tmp_path / "model"), settings(texts)
    whole = train_adapter(source, chosen, tmp_path / "whole", device=CPU)
    monkeypatch.setattr(lora, "SAVE_S", 0.0)
    steps = []

    def stop(phase, done, total):
        steps.append(phase)
        if len([s for s in steps if s.startswith("training")]) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_adapter(source, chosen, tmp_path / "part", device=CPU, progress=stop)
    assert not (tmp_path / "part").exists()
    with pytest.raises(ConfigError, match="interrupted"):
        train_adapter(source, settings(texts, rank=2), tmp_path / "part", device=CPU)
    rest = train_adapter(source, chosen, tmp_path / "part", device=CPU)
    assert rest["training"]["loss"] == whole["training"]["loss"]
    assert rest["held_out"] == whole["held_out"]
    first, second = (
        (tmp_path / name / "adapter_model.safetensors").read_bytes() for name in ("whole", "part")
    )
    assert first == second
    with pytest.raises(ConfigError, match="exists"):
        train_adapter(source, chosen, tmp_path / "part", device=CPU)


def test_of_conversations_the_answers_are_learned(tmp_path):
    tiny_models.write_with_tokenizer(tmp_path / "model", "llama")
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"what is {n}"},
                {"role": "assistant", "content": f"number {n}"},
                {"role": "user", "content": "and then"},
                {"role": "assistant", "content": f"it is {n + 1}"},
            ]
        }
        for n in range(12)
    ]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)))
    tokenizer = Tokenizer.for_model(read_spec(tmp_path / "model"))
    train, held_out, skipped = read_samples(
        settings(str(tmp_path / "chats.jsonl"), context=400), tokenizer, 400, None
    )
    assert (len(train) + len(held_out), skipped) == (12, 0)
    for sample in (*train, *held_out):
        learned = tokenizer.decode(
            [t for t, flag in zip(sample.token_ids, sample.learned, strict=True) if flag], False
        )
        asked = tokenizer.decode(
            [t for t, flag in zip(sample.token_ids, sample.learned, strict=True) if not flag], False
        )
        assert "number" in learned
        assert "it is" in learned
        assert "what" not in learned
        assert "number" not in asked
    with pytest.raises(ConfigError, match="text"):
        read_samples(settings(str(tmp_path / "chats.jsonl"), context=4), tokenizer, 400, None)


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_on_a_base_that_is_rounded_at_load(tmp_path, texts, scheme):
    """The base is what an engine with this scheme computes with, and the adapter goes with it."""
    tiny_models.write_with_tokenizer(
        tmp_path / "model", "llama", hidden_size=128, intermediate_size=256
    )
    source = read_spec(tmp_path / "model")
    dense = frozen_base(source, settings(texts), torch.float32, CPU)
    rounded = frozen_base(source, settings(texts, quantization=scheme), torch.float32, CPU)
    assert not torch.equal(dense["layers.0.mlp.up.weight"], rounded["layers.0.mlp.up.weight"])
    assert torch.equal(dense["embed.weight"], rounded["embed.weight"])
    train_adapter(source, settings(texts, quantization=scheme), tmp_path / "out", device=CPU)
    sizes = dict(
        device="cpu", max_model_len=64, kv_cache_bytes=2**20, enable_lora=True, quantization=scheme
    )
    with LLM(str(tmp_path / "model"), **sizes) as llm:
        sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        mine = LoRARequest("mine", 1, str(tmp_path / "out"))
        answers = llm.generate(
            ["The number 3"] * 2, sampling, lora_request=[mine, None], progress=False
        )
    assert answers[0].outputs[0].token_ids != answers[1].outputs[0].token_ids


def test_the_command_shows_its_plan_and_trains_an_adapter(tmp_path, texts, capsys):
    tiny_models.write_with_tokenizer(tmp_path / "model", "llama")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps([{"lora": {**SMALL, "text": texts}}]))
    command = ["compress", str(tmp_path / "model"), "--recipe", str(recipe), "--device", "cpu"]
    assert main([*command, "--dry-run"]) == 0
    assert "rank 4 for 14 products" in capsys.readouterr().out
    assert main([*command, "--out", str(tmp_path / "out"), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["receipt"] == json.loads((tmp_path / "out" / "slipstream-lora.json").read_text())
    assert main([*command, "--out", str(tmp_path / "other"), "--speed"]) == 2
    assert "an adapter has a receipt of its own" in capsys.readouterr().err


def test_the_preset_and_what_is_refused():
    assert parse(preset("lora")).one(LoRA) == LoRA()
    for wrong in (
        {"rank": 0},
        {"dropout": 1.0},
        {"ranks": {"q_proj": "a"}},
        {"quantization": "fp8"},
        {"targets": "q_proj"},
    ):
        with pytest.raises(ConfigError, match=rf"steps\[0\]\.lora\.{next(iter(wrong))}"):
            parse([{"lora": wrong}])
    with pytest.raises(ConfigError, match="only step"):
        parse([{"lora": {}}, {"quantize": {"bits": 8}}])
