"""Adapters in the engine: mixed batches against transformers with PEFT, and whatever else the engine does beside them."""

from __future__ import annotations

import shutil
from types import SimpleNamespace

import pytest

from slipstream import LLM, LoRARequest, SamplingParams
from slipstream.costs.memory import adapter_bytes
from slipstream.errors import AdapterError, ConfigError, EngineOverloadedError, RequestError
from slipstream.messages.beams import BeamsRequest
from slipstream.messages.requests import EngineRequest
from slipstream.params.answer_forms import StructuredOutputsParams
from slipstream.params.search import BeamSearchParams
from tests.support import adapters, tiny_models

GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
PROMPTS = [[5, 9, 200, 31, 7], list(range(3, 43)), [17], [(7 * i) % 250 + 3 for i in range(45)]]
SETTINGS = dict(
    dtype="float32",
    device="cpu",
    num_threads=1,
    max_model_len=96,
    max_num_seqs=8,
    max_num_batched_tokens=24,  # prompts are cut into chunks
    enable_lora=True,
    max_lora_rank=8,
)


def build(folder, family="llama"):
    """A base model, three adapters, and what transformers answers: by the adapter's number (0: none) and the prompt's."""
    hf = tiny_models.build_with_tokenizer(folder / "base", family)
    answers = {(0, i): adapters.greedy(hf, p, 10) for i, p in enumerate(PROMPTS)}
    for n in (1, 2, 3):
        peft = adapters.write(hf, folder / f"lora{n}", seed=n, r=2 * n)
        answers |= {(n, i): adapters.greedy(peft, p, 10) for i, p in enumerate(PROMPTS)}
        hf = peft.unload()
    return answers


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    return folder, build(folder)


@pytest.fixture(scope="module")
def llm(made):
    return make(made)


def make(made, **settings):
    return LLM(str(made[0] / "base"), **{**SETTINGS, **settings})


def adapter(made, n):
    return LoRARequest(f"a{n}", n, made[0] / f"lora{n}") if n else None


def check(llm, made, pairs, **more):
    """Each (adapter, prompt) is answered as transformers does."""
    prompts = [{"prompt_token_ids": PROMPTS[i]} for _, i in pairs]
    outputs = llm.generate(
        prompts, GREEDY, lora_request=[adapter(made, n) for n, _ in pairs], progress=False, **more
    )
    for pair, output in zip(pairs, outputs, strict=True):
        assert output.outputs[0].token_ids == made[1][pair], pair
    return outputs


ALL = [(n, i) for i in range(len(PROMPTS)) for n in (1, 0, 2, 3)]


def test_each_adapter_changes_the_answer(made):
    """The adapters change the answers; if not, the other tests would show nothing."""
    assert len({tuple(made[1][n, 0]) for n in range(4)}) == 4


@pytest.mark.parametrize(
    "family", ["llama", "gpt2", "gpt_neox", "phi3", "deepseek_v3", "qwen2_moe"]
)
def test_mixed_batches_equal_merged_weights(family, tmp_path):
    own = tmp_path, build(tmp_path, family)
    check(make(own), own, ALL)


def test_the_ledger_has_the_slots(llm, made):
    core = llm.core
    assert core.ledger.adapter_bytes == core.executor.runner.adapters.num_bytes > 0
    assert core.ledger.adapter_bytes == adapter_bytes(core.config, core.executor.description)
    assert "adapters    " in "\n".join(core.ledger.describe())


def test_fewer_slots_than_adapters(made):
    """One adapter runs at a time: slots are evicted, requests pass others by, and nothing starves."""
    llm = make(made, max_loras=1, max_cpu_loras=3)
    check(llm, made, ALL)
    stats = llm.stats().adapters
    assert stats.num_on_device == 1
    assert stats.num_on_host == 3
    assert stats.reads_total == 3
    assert stats.placements_total >= 3


def test_the_host_forgets_the_least_recently_used(made):
    llm = make(made, max_loras=1, max_cpu_loras=2)
    for n in (1, 2, 1, 3, 1, 2):
        check(llm, made, [(n, 0)])
    stats = llm.stats().adapters
    assert stats.num_on_host == 2
    assert stats.reads_total == 4  # 1, 2, 3 (for 2), 2 (for 3)
    check(llm, made, [(1, 0), (2, 0), (3, 0)])  # the third waits for a place
    assert not llm.core.has_work
    check(llm, made, [(1, 0), (2, 0)])


def test_graphs_are_told_of_adapters_before_the_step(made):
    llm, told = make(made), []
    runner = llm.core.executor.runner
    graphs = SimpleNamespace(
        adapters_changed=lambda: told.append(runner.adapters.parts), capture_next=lambda: False
    )
    runner.adapter_graphs = graphs
    llm.generate(["a", "a"], GREEDY, lora_request=[adapter(made, 1), None], progress=False)
    assert told
    assert all(told)


def test_prefixes_are_kept_apart(made):
    """A prompt's blocks are found again with the same adapter only."""
    llm = make(made)
    hits = []
    for n in (0, 1, 2, 1, 0, 2):
        hits.append(check(llm, made, [(n, 3)])[0].num_cached_tokens)
    assert hits == [0, 0, 0, 32, 32, 32]


def test_files_that_changed_are_another_adapter(made, tmp_path):
    """Unloaded, written anew, loaded under the same id: no prefix of the old one is used."""
    llm, folder = make(made), tmp_path / "lora"
    prompt, answers = [{"prompt_token_ids": PROMPTS[3]}], []
    for n in (1, 2):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(made[0] / f"lora{n}", folder)
        own = LoRARequest("own", 9, str(folder))
        answers.append(
            llm.generate(prompt, GREEDY, lora_request=own, progress=False)[0].outputs[0].token_ids
        )
        llm.unload_adapter(own)
    assert answers == [made[1][1, 3], made[1][2, 3]]


def test_preempted_requests_keep_their_adapters(made):
    """Blocks run out, requests are computed again, their adapters come back with them."""
    llm = make(made, kv_cache_bytes=11 * 2 * 2 * 2 * 16 * 8 * 4, max_loras=2, block_size=16)
    check(llm, made, [(1, 3), (2, 3), (0, 3)])
    assert llm.stats().num_preemptions > 0


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_drafts_change_no_answer_with_adapters(made, method):
    check(make(made, speculative_config={"method": method, "num_speculative_tokens": 3}), made, ALL)


def test_choices_and_samples(llm, made):
    """n answers of one prompt share it; a seed draws the same alone and among others."""
    drawn = SamplingParams(temperature=1.0, seed=3, max_tokens=8, n=3, ignore_eos=True)
    prompt = {"prompt_token_ids": PROMPTS[1]}
    alone = llm.generate([prompt], drawn, lora_request=adapter(made, 2), progress=False)[0]
    mixed = llm.generate(
        [prompt] * 3, drawn, lora_request=[adapter(made, n) for n in (1, 2, 0)], progress=False
    )
    tokens = [[c.token_ids for c in output.outputs] for output in (alone, *mixed)]
    assert tokens[0] == tokens[2]
    assert len({str(t) for t in tokens[1:]}) == 3


def test_grammars_hold_with_adapters(llm, made):
    sampling = SamplingParams(
        temperature=0,
        max_tokens=8,
        structured_outputs=StructuredOutputsParams(choice=["abc", "xyz"]),
    )
    outputs = llm.generate(
        ["a", "a"], sampling, lora_request=[adapter(made, 1), None], progress=False
    )
    assert {o.outputs[0].text for o in outputs} <= {"abc", "xyz"}


def test_stream_and_chat(llm, made):
    parts = llm.stream({"prompt_token_ids": PROMPTS[0]}, GREEDY, lora_request=adapter(made, 1))
    assert [t for part in parts for t in part.outputs[0].token_ids] == made[1][1, 0]
    said = [{"role": "user", "content": "hello"}]
    plain, with_adapter = (
        llm.chat(said, GREEDY, lora_request=adapter(made, n), progress=False)[0] for n in (0, 3)
    )
    assert plain.outputs[0].token_ids != with_adapter.outputs[0].token_ids


def test_adapters_change_answers_of_a_quantized_base(made):
    """An int8 base rounds both answers alike: the adapter's part of it stays exact enough to change the answer."""
    llm = make(made, quantization="int8", dtype="float32")
    prompt = {"prompt_token_ids": PROMPTS[0]}
    outputs = llm.generate(
        [prompt] * 3, GREEDY, lora_request=[adapter(made, n) for n in (0, 1, 2)], progress=False
    )
    assert len({tuple(o.outputs[0].token_ids) for o in outputs}) == 3


@pytest.mark.parametrize(
    "sampling", [GREEDY, SamplingParams(temperature=1.0, seed=1, max_tokens=10, ignore_eos=True)]
)
def test_each_adapter_changes_the_answer_in_bfloat16(made, sampling):
    llm = make(made, dtype="bfloat16")
    prompts = [{"prompt_token_ids": PROMPTS[0]}] * 4
    outputs = llm.generate(
        prompts, sampling, lora_request=[adapter(made, n) for n in range(4)], progress=False
    )
    assert [len(o.outputs[0].token_ids) for o in outputs] == [10] * 4
    assert len({tuple(o.outputs[0].token_ids) for o in outputs}) == 4


@pytest.mark.parametrize("kernels", ["reference", "torch", "cpu"])
def test_every_op_set_computes_adapters(made, kernels):
    check(make(made, kernels=kernels), made, ALL[:8])


def test_adapters_are_there_again_after_sleep(made):
    llm = make(made)
    check(llm, made, [(1, 0)])
    for level in (1, 2):
        llm.sleep(level)
        llm.wake_up()
        check(llm, made, [(2, 0), (1, 1)])


def test_from_the_start(made):
    llm = make(made, lora_modules={"one": str(made[0] / "lora1")})
    assert llm.stats().adapters.num_on_host == 1
    check(llm, made, [(1, 0), (2, 0)])


def test_wrong_adapters_are_refused_by_name(made, llm, tmp_path):
    prompt = {"prompt_token_ids": [5]}
    with pytest.raises(AdapterError, match="not an adapter saved by PEFT"):
        llm.generate(
            prompt, GREEDY, lora_request=LoRARequest("none", 7, str(tmp_path)), progress=False
        )
    check(llm, made, [(1, 0)])
    with pytest.raises(AdapterError, match="take another id"):
        llm.generate(
            prompt, GREEDY, lora_request=LoRARequest("other", 1, str(tmp_path)), progress=False
        )
    with pytest.raises(RequestError, match="2 lora_request for 1 prompts"):
        llm.generate(prompt, GREEDY, lora_request=[None, None], progress=False)
    small = make(made, max_lora_rank=4)
    with pytest.raises(AdapterError, match="rank 6"):
        check(small, made, [(3, 0)])
    check(small, made, [(1, 0), (2, 0)])  # and nothing of it is left
    assert small.stats().adapters.num_on_host == 2
    for bad in (0, -1, True, 2**31, "1"):
        with pytest.raises(AdapterError, match="id"):
            LoRARequest("a", bad, "p")
    with pytest.raises(AdapterError, match="name"):
        LoRARequest("", 1, "p")


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"enable_lora": False, "max_loras": 2, "max_lora_rank": None}, "max_loras"),
        ({"enable_lora": False}, "max_lora_rank"),
        ({"max_loras": 0}, "max_loras"),
        ({"max_loras": 4, "max_cpu_loras": 3}, "max_cpu_loras"),
        ({"max_lora_rank": 1000}, "max_lora_rank"),
        ({"lora_modules": {"a": ""}}, "lora_modules"),
        ({"lora_modules": {"a": "/nowhere"}}, "lora_modules"),
    ],
)
def test_settings_that_are_refused(made, settings, named):
    with pytest.raises(ConfigError) as caught:
        make(made, **settings)
    assert caught.value.field == named


def test_adapters_without_the_setting_are_refused(made):
    llm = make(made, enable_lora=False, max_lora_rank=None)
    with pytest.raises(AdapterError, match="enable_lora"):
        check(llm, made, [(1, 0)])
    assert llm.stats().adapters is None


def test_requests_wait_for_a_place_on_the_host(made, tmp_path):
    """One call has more adapters than places; each is answered as alone. What is wrong with one is its
    request's error, a cancelled one is gone, and those without adapters pass."""
    llm = make(made, max_loras=1, max_cpu_loras=1)
    check(llm, made, [(1, 0), (2, 1), (0, 2), (3, 0), (1, 1), (2, 0)])
    core = llm.core
    sampling = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    for i, lora in enumerate(
        (adapter(made, 1), LoRARequest("none", 9, str(tmp_path)), adapter(made, 2))
    ):
        core.add(
            [
                EngineRequest(
                    request_id=f"r{i}",
                    prompt_token_ids=(5, 6, 7),
                    sampling=sampling,
                    max_tokens=30,
                    lora=lora,
                )
            ]
        )
    ends = {o.request_id: (o.finish_reason, o.error) for o in core.abort(["r2"])}
    while core.has_work:
        ends |= {o.request_id: (o.finish_reason, o.error) for o in core.step() if o.finish_reason}
    assert [ends[f"r{i}"][0] for i in range(3)] == ["length", "invalid", "abort"]
    assert "adapter_config.json" in ends["r1"][1]


def asked(made, n, request_id, max_tokens=4, **more):
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    given = dict(
        prompt_token_ids=(5, 6, 7), sampling=sampling, max_tokens=max_tokens, lora=adapter(made, n)
    )
    return EngineRequest(request_id=request_id, **given, **more)


def ends_of(core):
    """The requests in the order in which they end."""
    ends = []
    while core.has_work:
        ends += [o.request_id for o in core.step() if o.finish_reason]
    return ends


def test_a_request_without_a_place_counts_in_the_queue_and_outlives_a_full_one(made):
    """Requests without adapters fill the queue when the place is free; the request keeps waiting."""
    core = make(made, max_loras=1, max_cpu_loras=1, max_num_seqs=1, max_queue=2).core
    core.add([asked(made, 1, "runs")])
    core.step()
    core.add([asked(made, 2, "waits")])
    core.add([asked(made, 0, "fills")])
    with pytest.raises(EngineOverloadedError, match="2 requests are waiting"):
        core.add([asked(made, 0, "too many")])
    assert sorted(ends_of(core)) == ["fills", "runs", "waits"]


def test_those_with_a_place_go_before_one_without(made, monkeypatch):
    """The scheduler's bound of requests pass it, then its turn comes. Further choices of a request
    go with its first."""
    monkeypatch.setattr("slipstream.core.scheduler.MAX_OVERTAKES", 2)
    core = make(made, max_loras=1, max_cpu_loras=1).core
    core.add([asked(made, 1, "a0", 8)])
    core.add([asked(made, 2, "b0")])
    core.add([asked(made, 1, "a1"), asked(made, 1, "a1.1", fork_of="a1")])
    core.add([asked(made, 2, "b1"), asked(made, 1, "a2"), asked(made, 1, "a3")])
    core.add([asked(made, 1, "a3.1", fork_of="a3")])
    ends = ends_of(core)
    assert set(ends[:4]) == {"a0", "a1", "a1.1", "a2"}
    assert set(ends[4:6]) == {"b0", "b1"}
    assert set(ends[6:]) == {"a3", "a3.1"}
    assert core.stats().adapters.reads_total == 3


def test_those_behind_one_without_a_place_do_not_keep_theirs(made, monkeypatch):
    """A request that waits behind it has the adapter in its place: the place is free when no running request needs it."""
    monkeypatch.setattr("slipstream.core.scheduler.MAX_OVERTAKES", 0)
    core = make(made, max_loras=1, max_cpu_loras=1).core
    core.add([asked(made, 1, "a0")])
    core.add([asked(made, 2, "b0"), asked(made, 1, "a1")])
    assert ends_of(core) == ["a0", "b0", "a1"]
    assert core.stats().adapters.reads_total == 3


def test_a_search_that_waits_for_a_place_is_cancelled(made):
    core = make(made, max_loras=1, max_cpu_loras=1).core
    core.add([asked(made, 1, "r")])
    params = BeamSearchParams(beam_width=2, max_tokens=4)
    core.add_beams(
        BeamsRequest(
            request_id="b", prompt_token_ids=(5, 6, 7), params=params, lora=adapter(made, 2)
        )
    )
    assert core.stats().num_waiting == 2
    core.abort(["b"])
    assert core.stats().num_waiting == 1
    while core.has_work:
        core.step()
    stats = core.stats()
    assert stats.num_free_blocks == stats.num_blocks
