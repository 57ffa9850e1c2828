"""Adapters of a model whose ranks are processes: transformers' answers, one device's errors, and the same adapters on all."""

from __future__ import annotations

import pytest

from slipstream import LLM, LoRARequest
from slipstream.errors import AdapterError, ConfigError
from slipstream.messages.start import Failed
from slipstream.worker.ranks.messages import Reply, UnloadRankAdapter
from tests.engine.test_adapters import ALL, GREEDY, SETTINGS, adapter, build, check
from tests.support import forked_ranks


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    return folder, build(folder)


@pytest.fixture(scope="module", params=["tensor_parallel_size", "pipeline_parallel_size"])
def llm(made, request):
    sizes = {
        "max_loras": 1,
        "max_cpu_loras": 2,
        "lora_modules": {"one": str(made[0] / "lora1")},
        request.param: 2,
    }
    with forked_ranks.used(), LLM(str(made[0] / "base"), **SETTINGS, **sizes) as llm:
        yield llm


def test_answers_are_those_of_transformers(llm, made):
    """There are fewer places than adapters, on the device and on the host."""
    assert llm.stats().adapters.num_on_host == 1  # from the start
    check(llm, made, ALL)
    stats = llm.stats().adapters
    assert (stats.num_on_device, stats.num_on_host) == (1, 2)
    assert stats.reads_total >= 3


def test_a_refusal_harms_no_rank(llm, made, tmp_path):
    prompt = {"prompt_token_ids": [5]}
    with pytest.raises(AdapterError, match="not an adapter saved by PEFT"):
        llm.generate(
            prompt, GREEDY, lora_request=LoRARequest("none", 7, str(tmp_path)), progress=False
        )
    check(llm, made, [(2, 0)])
    with pytest.raises(AdapterError, match="take another id"):
        llm.generate(
            prompt, GREEDY, lora_request=LoRARequest("other", 2, str(tmp_path)), progress=False
        )
    check(llm, made, [(2, 1), (3, 0)])
    llm.unload_adapter(adapter(made, 2))
    check(llm, made, [(2, 0), (0, 1)])


def test_what_one_rank_cant_read_no_rank_has(llm, made, monkeypatch):
    executor, told = llm.core.executor, []
    answers = [
        Reply(version="1"),
        Reply(refused=Failed.of(AdapterError("its disk is gone", field="a"))),
    ]
    monkeypatch.setattr(executor, "_ask", lambda question, count: answers)
    monkeypatch.setattr(executor, "_broadcast", told.append)
    with pytest.raises(AdapterError, match="its disk is gone"):
        executor.load_adapter(LoRARequest("a", 40, "somewhere"), tuple)
    assert told[-1] == UnloadRankAdapter(40)


def test_ranks_are_not_asked_about_an_adapter_that_they_have(llm, made, monkeypatch):
    """A request of such a one waits for no rank: a step that is being launched would hold it up."""
    check(llm, made, [(1, 0)])
    executor, asked = llm.core.executor, []
    version, ask = executor.load_adapter(adapter(made, 1), tuple), executor._ask
    monkeypatch.setattr(
        executor, "_ask", lambda question, *count: asked.append(question) or ask(question, *count)
    )
    assert executor.load_adapter(adapter(made, 1), tuple) == version
    check(llm, made, [(1, 0), (1, 2)])
    assert not asked
    check(llm, made, [(2, 0), (3, 0)])
    assert 3 in [question.request.id for question in asked]
    assert llm.stats().adapters.num_on_host == 2


def test_the_version_of_files_on_several_hosts_is_that_of_all(llm, monkeypatch):
    executor = llm.core.executor
    for order in (("b", "a"), ("a", "b")):
        monkeypatch.setattr(
            executor, "_ask", lambda question, count, order=order: [Reply(version=v) for v in order]
        )
        assert executor.load_adapter(LoRARequest("x", 50, "somewhere"), tuple) == "a,b"
        executor.unload_adapter(50)


def test_what_the_start_refuses(made, tmp_path):
    with forked_ranks.used(), pytest.raises(ConfigError, match="lora_modules: two") as caught:
        LLM(
            str(made[0] / "base"),
            **SETTINGS,
            tensor_parallel_size=2,
            lora_modules={"two": str(tmp_path)},
        )
    assert caught.value.field == "lora_modules"


def test_adapters_without_the_setting_are_refused_on_ranks(tiny_model, made):
    sizes = dict(max_model_len=64, kv_cache_bytes=2**20, tensor_parallel_size=2)
    with forked_ranks.used(), LLM(str(tiny_model), device="cpu", **sizes) as llm:
        with pytest.raises(AdapterError, match="start with enable_lora"):
            llm.generate("a", GREEDY, lora_request=adapter(made, 1), progress=False)
        assert llm.stats().adapters is None
