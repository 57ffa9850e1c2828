"""Engines whose host computes experts: settings, ledger and refusals; and an engine, of which the CPU plays both parts."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from slipstream import LLM, SamplingParams
from slipstream.cli.main import main
from slipstream.config import DeviceInfo, EngineArgs, resolve
from slipstream.config.forms import HostExperts
from slipstream.costs import fit
from slipstream.costs.devices import find_device
from slipstream.costs.estimate import estimate, resident_weights_bytes
from slipstream.errors import ConfigError, OutOfMemoryError
from slipstream.simulate.engines import plan_engine
from slipstream.spec.description import read_spec
from slipstream.worker.start import loading
from tests.support import tiny_models

GIB = 2**30
CONFIGS = Path(__file__).parents[3] / "benchmarks/configs"
QWEN, LLAMA = CONFIGS / "qwen3-30b-a3b", CONFIGS / "llama-3-8b"


def gpu(memory=141 * GIB, free=140 * GIB):
    return DeviceInfo(
        device="cuda:0", name="a GPU", memory_bytes=memory, free_bytes=free, best_dtype="bfloat16"
    )


def resolved(path=QWEN, device=None, **settings):
    return resolve(EngineArgs(model=str(path), **settings), read_spec(path), device or gpu())


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_an_engine_answers_as_one_without(tmp_path, monkeypatch, family):
    tiny_models.write(tmp_path, family)
    how = dict(
        device="cpu", kernels="torch", dtype="float32", max_model_len=128, kv_cache_bytes=2**20
    )
    how |= dict(skip_tokenizer_init=True, num_threads=1)
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    prompts = [{"prompt_token_ids": [(5 * i + n) % 250 + 4 for i in range(n)]} for n in (1, 9, 40)]

    def answers(llm):
        return [a.outputs[0].token_ids for a in llm.generate(prompts, greedy, progress=False)]

    with LLM(str(tmp_path), **how) as llm:
        wanted, weights = answers(llm), llm.core.ledger.weights_bytes
        counts = llm.core.executor.runner.loaded.experts.read()

    def with_host(*given):
        config = resolve(*given)
        own = dataclasses.replace(config.model, offload=HostExperts(99, 2**16))
        return dataclasses.replace(config, model=own)

    monkeypatch.setattr(loading, "resolve", with_host)
    with LLM(str(tmp_path), **how) as llm:
        runner = llm.core.executor.runner
        assert answers(llm) == wanted
        assert runner.ops._layers
        assert runner.ops.holds_experts
        assert sum(hot.follow([0] * len(hot.place_of)) for hot in runner.ops._hot.values()) == 0
        assert runner.loaded.experts.read() == counts
        ledger = llm.core.ledger
        assert ledger.weights_bytes - runner.ops.num_bytes < weights
        assert any("of the host's memory, computed there" in line for line in ledger.describe())
        assert any(form.name.endswith("of the host") for form in ledger.forms)


def test_how_many_layers():
    def mixtures(**settings):
        how = resolved(**settings).model.offload
        return how.mixtures if isinstance(how, HostExperts) else 0

    assert mixtures() == 0
    assert mixtures(host_experts="all") == 48
    assert mixtures(host_experts=7) == mixtures(host_experts="7") == 7
    assert mixtures(host_experts="auto") == 0  # all fits
    half = mixtures(host_experts="auto", device=gpu(40 * GIB, 39 * GIB))
    assert 20 < half < 48
    assert mixtures(host_experts="auto", device=gpu(40 * GIB, 20 * GIB)) > half
    assert mixtures(host_experts="auto", device=gpu(4 * GIB, 4 * GIB)) == 48
    assert resolved(host_experts="all", num_threads=3).device.num_threads == 3


@pytest.mark.parametrize(
    "settings", [dict(hot_expert_bytes=GIB), dict(host_experts="all", hot_expert_bytes=0)]
)
def test_memory_for_hot_experts(settings):
    with pytest.raises(ConfigError, match="hot_expert_bytes"):
        resolved(**settings)
    assert resolved(host_experts="all", hot_expert_bytes=GIB).model.offload == HostExperts(48, GIB)


def test_the_ledger_and_what_fits(monkeypatch):
    description, device = read_spec(QWEN), gpu(24 * GIB, 23 * GIB)
    whole = resolved(device=device)
    with pytest.raises(OutOfMemoryError, match="host_experts='auto'"):
        fit.check_weights_fit(whole, description)
    config, ledger = estimate(EngineArgs(model=str(QWEN), host_experts="all"), description, device)
    assert ledger.host_expert_bytes == 48 * 128 * 3 * 2048 * 768 * 2
    assert (
        ledger.weights_bytes
        == resident_weights_bytes(whole, description) - ledger.host_expert_bytes
    )
    monkeypatch.setattr(fit, "host_memory", lambda: (128 * GIB, 100 * GIB))
    fit.check_weights_fit(config, description)
    monkeypatch.setattr(fit, "host_memory", lambda: (64 * GIB, 50 * GIB))
    with pytest.raises(OutOfMemoryError, match=r"50\.0 GiB of its memory"):
        fit.check_weights_fit(config, description)
    rounded = resolved(device=device, host_experts="all", quantization="int4")
    fit.check_weights_fit(rounded, description)


def test_info_says_what_a_token_reads(monkeypatch, capsys):
    monkeypatch.setattr("slipstream.costs.estimate.this_device", lambda device: gpu())
    assert main(["info", str(QWEN), "--host-experts", "all", "--quantization", "int8"]) == 0
    printed = capsys.readouterr().out
    assert "of 48 of 48 mixtures in the host's memory" in printed
    assert "a token reads" in printed


def test_plan_refuses_it():
    args = EngineArgs(model=str(QWEN), host_experts="all")
    with pytest.raises(ConfigError, match="plan has no rates"):
        plan_engine(args, read_spec(QWEN), find_device("h200"))
