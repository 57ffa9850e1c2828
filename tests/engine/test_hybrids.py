"""Models with recurrent layers through the whole engine: their answers are transformers', several at once, with prompts
in chunks, requests preempted, and second turns that continue from a kept state."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream import LLM, SamplingParams
from slipstream.core.cache.prefix_cache import announced_state
from slipstream.errors import ConfigError
from slipstream.worker.ranks import process_executor
from tests.support import mtp_layers, tiny_models

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
COMMON = [(7 * i) % 250 + 5 for i in range(60)]
PROMPTS = [COMMON, [*COMMON[:50], 9, 9, 4], [(11 * i) % 250 + 5 for i in range(33)], COMMON[:7]]
SETTINGS = dict(
    device="cpu",
    dtype="float32",
    num_threads=1,
    skip_tokenizer_init=True,
    block_size=4,
    max_model_len=200,
    max_num_seqs=4,
    max_num_batched_tokens=32,
)
KINDS = ["mamba2", "lfm2", "falcon_h1", "minimax", "zamba2"]
"""Families without any attention, with convolutions alone, with attention and a recurrence in each
layer, without convolutions, and with attention before the recurrence."""


def greedy(theirs, prompt, count):
    with torch.no_grad():
        made = theirs.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt)),  # 0 is a token like others
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return made[0, len(prompt) :].tolist()


def run(llm, prompts):
    return llm.generate([{"prompt_token_ids": p} for p in prompts], GREEDY)


def tokens(outputs):
    return [o.outputs[0].token_ids for o in outputs]


@pytest.fixture(scope="module", params=KINDS)
def model(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    theirs = tiny_models.build(path, request.param)
    return path, theirs, [greedy(theirs, prompt, 24) for prompt in PROMPTS]


def test_answers_in_chunks_and_second_turns(model):
    path, theirs, expected = model
    with LLM(str(path), **SETTINGS) as llm:
        assert tokens(run(llm, PROMPTS)) == expected
        assert tokens(run(llm, PROMPTS)) == expected  # from states that were kept
        turns = [
            [*prompt, *answer, 17, 3, 99] for prompt, answer in zip(PROMPTS, expected, strict=True)
        ]
        second = run(llm, turns)
        assert tokens(second) == [greedy(theirs, turn, 24) for turn in turns]
        for output, prompt in zip(second, PROMPTS, strict=True):
            assert output.num_cached_tokens >= (len(prompt) - 2) // 4 * 4
        assert llm.stats().num_free_blocks == llm.stats().num_blocks


def test_preempted_answers_are_the_same(model):
    path, _, expected = model
    with LLM(str(path), **SETTINGS) as roomy:
        ledger = roomy.core.ledger
    more: dict[str, int] = {"state_slots": 14}
    if ledger.block_bytes:
        states = 14 * ledger.state_bytes // ledger.num_states
        more["kv_cache_bytes"] = states + ledger.block_bytes * (ledger.blocks_per_sequence + 2)
    with LLM(str(path), **SETTINGS, **more) as llm:
        for _ in range(2):
            assert tokens(run(llm, PROMPTS)) == expected
        # Without attention no memory runs out: a running request has its state.
        assert (llm.stats().num_preemptions > 0) == bool(ledger.block_bytes)
        assert llm.stats().num_free_blocks == llm.stats().num_blocks


def test_forks_of_a_prompt_each_have_a_state(model):
    path, _, expected = model
    sampling = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, n=3)
    with LLM(str(path), **SETTINGS) as llm:
        outputs = llm.generate([{"prompt_token_ids": PROMPTS[0]}], sampling)
    assert [o.token_ids for o in outputs[0].outputs] == [expected[0]] * 3


RANKS = {
    "stages": dict(pipeline_parallel_size=2),
    "experts": dict(expert_parallel_size=2),
    "tensor": dict(tensor_parallel_size=2),
    "three": dict(tensor_parallel_size=3),
    "both": dict(tensor_parallel_size=2, pipeline_parallel_size=2),
    "drafts": dict(
        tensor_parallel_size=2, speculative_config={"method": "mtp", "num_speculative_tokens": 2}
    ),
}


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("how", RANKS)
def test_ranks_have_the_states_of_their_layers_heads_or_requests(tmp_path, monkeypatch, how):
    monkeypatch.setattr(process_executor, "available_cores", lambda: 4)  # they share what there is
    mtp_layers.build(tmp_path, "qwen3_next")
    with LLM(str(tmp_path), **SETTINGS) as llm:
        expected, ledger = tokens(run(llm, PROMPTS)), llm.core.ledger
    with LLM(str(tmp_path), **SETTINGS, **RANKS[how]) as llm:
        assert tokens(run(llm, PROMPTS)) == expected
        again = run(llm, PROMPTS)
        if how == "tensor":
            own = llm.core.ledger
            assert own.state_bytes * ledger.num_states * 2 == ledger.state_bytes * own.num_states
    assert tokens(again) == expected
    assert again[0].num_cached_tokens > 0


@pytest.mark.usefixtures("forked_ranks")
def test_ranks_with_heads_of_their_own_preempt_as_one_device(model):
    path, _, expected = model
    with LLM(str(path), tensor_parallel_size=2, **SETTINGS) as roomy:
        ledger = roomy.core.ledger
    if not ledger.block_bytes:
        pytest.skip("without attention no memory runs out")
    states = 14 * ledger.state_bytes // ledger.num_states
    small = states + ledger.block_bytes * (ledger.blocks_per_sequence + 2)
    more = dict(state_slots=14, kv_cache_bytes=small, tensor_parallel_size=2)
    with LLM(str(path), **SETTINGS, **more) as llm:
        for _ in range(2):
            assert tokens(run(llm, PROMPTS)) == expected
        assert llm.stats().num_preemptions > 0
        assert llm.stats().num_free_blocks == llm.stats().num_blocks


def test_checkpoints_of_states_are_told_to_a_router(model):
    path, _, _ = model
    with LLM(str(path), **SETTINGS) as llm:
        core, pool = llm.core, llm.core.scheduler.kv.kinds[0].pool
        core.cache_news.listen(on=True)
        run(llm, PROMPTS)
        came, _ = core.cache_news.changes()
        told = {came[i : i + 16] for i in range(0, len(came), 16)}
        states = {announced_state(key) for key in pool.cached_keys()}
        assert states
        assert states <= told
        assert told == {core.cache_news.keys()[i : i + 16] for i in range(0, len(came), 16)}
        llm.reset_prefix_cache()
        assert len(core.cache_news.changes()[1]) == len(came)


def test_a_draft_model_with_recurrent_layers_is_refused_by_name(tmp_path):
    for name in ("model", "draft"):
        tiny_models.write(tmp_path / name, "qwen3_next")
    with pytest.raises(ConfigError, match="recurrent layers"):
        LLM(str(tmp_path / "model"), speculative_model=str(tmp_path / "draft"), **SETTINGS)


@pytest.mark.slow
def test_ling_drafts_with_its_own_layer(tmp_path):
    """The layer after the last one is read by the authors' names. Answers with its drafts are those without."""
    tiny_models.build(tmp_path, "bailing_hybrid")
    file, g = tmp_path / "model.safetensors", torch.Generator().manual_seed(0)
    tensors = load_file(file)
    last = {
        n.replace("layers.2.", "layers.3."): x + 0.01
        for n, x in tensors.items()
        if "layers.2." in n
    }
    norms = {
        f"model.layers.3.{n}.weight": torch.ones(32) for n in ("enorm", "hnorm", "final_layernorm")
    }
    join = {"model.layers.3.eh_proj.weight": torch.randn(32, 64, generator=g) * 0.3}
    save_file({**tensors, **last, **norms, **join}, file, metadata={"format": "pt"})
    assert json.loads((tmp_path / "config.json").read_text())["num_nextn_predict_layers"] == 1
    found = []
    for drafts in (None, {"method": "mtp", "num_speculative_tokens": 2}):
        with LLM(str(tmp_path), **SETTINGS, speculative_config=drafts) as llm:
            found.append(tokens(run(llm, PROMPTS)))
    assert found[0] == found[1]
