"""Keys and values shared out by tokens over real processes: the same answers as one device, with n times the room.

Weights are float32 and random, so that sums in another order leave greedy tokens as they are.
"""

from __future__ import annotations

import pytest

from slipstream import LLM, BeamSearchParams, SamplingParams
from slipstream.errors import ConfigError
from slipstream.params.answer_forms import StructuredOutputsParams
from tests.support import tiny_models
from tests.worker.ranks.test_dealt_ranks import PROMPTS

pytestmark = pytest.mark.usefixtures("forked_ranks")

SETTINGS = dict(
    device="cpu",
    dtype="float32",
    max_model_len=256,
    kv_cache_bytes=2**20,
    block_size=4,
    max_num_seqs=8,
    max_num_batched_tokens=72,  # steps of 64 and more share rows out, shorter ones don't
)
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
SAMPLINGS = [
    SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=2),
    SamplingParams(
        temperature=0.9, seed=7, top_p=0.9, max_tokens=12, ignore_eos=True, presence_penalty=0.5
    ),
    SamplingParams(temperature=0.9, max_tokens=12, ignore_eos=True),  # seeds of the engine
    SamplingParams(temperature=0.0, max_tokens=6, prompt_logprobs=2, min_tokens=2),
    SamplingParams(
        temperature=0.0,
        max_tokens=12,
        structured_outputs=StructuredOutputsParams(regex="[ab]{3,6}"),
    ),
    SamplingParams(temperature=0.8, seed=3, max_tokens=8, ignore_eos=True, n=3),
]
FAMILIES = {
    "llama": {},
    "one kv head": {"num_key_value_heads": 1},
    "deepseek_v3": {},
}


def tokens(llm, sampling=GREEDY, prompts=PROMPTS):
    found = llm.generate(prompts, sampling, progress=False)
    return [choice.token_ids for output in found for choice in output.outputs]


def logprobs(llm):
    told = []
    for output in llm.generate(PROMPTS, SAMPLINGS[3], progress=False):
        told += [p.chosen.logprob for p in output.prompt_logprobs if p is not None]
    return told


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}
    for name, sizes in FAMILIES.items():
        folder = tmp_path_factory.mktemp("model")
        family = name if name in tiny_models.FAMILIES else "llama"
        tiny_models.write_with_tokenizer(folder, family, **sizes)
        made[name] = str(folder)
    return made


@pytest.mark.parametrize(
    "family", ["llama", *(pytest.param(f, marks=pytest.mark.slow) for f in list(FAMILIES)[1:])]
)
def test_two_ranks_answer_as_one_device(folders, family):
    """Chunked prompts next to decodes, a cached prefix, draws, penalties, grammars, several choices, beams."""
    beams = BeamSearchParams(beam_width=3, max_tokens=6)
    with LLM(folders[family], **SETTINGS) as llm:
        wanted, one = [tokens(llm, s) for s in SAMPLINGS], llm.core.ledger
        told, searched = logprobs(llm), llm.beam_search(PROMPTS[:2], beams)
    with LLM(folders[family], context_parallel_size=2, **SETTINGS) as llm:
        assert [tokens(llm, s) for s in SAMPLINGS] == wanted
        assert llm.core.stats().prefix_hits > 0
        assert logprobs(llm) == pytest.approx(told, abs=5e-4)
        found = llm.beam_search(PROMPTS[:2], beams)
        assert [[b.tokens for b in o.sequences] for o in found] == [
            [b.tokens for b in o.sequences] for o in searched
        ]
        first, second = llm.core.executor.ledgers
        assert first.block_bytes == second.block_bytes == one.block_bytes
        assert first.num_kv_tokens == 2 * one.num_kv_tokens
        (pool,) = llm.core.scheduler.pools
        assert pool.num_free == pool.num_usable


@pytest.mark.parametrize("family", ["one kv head", "deepseek_v3"])
def test_tensor_ranks_answer_as_one_device_with_twice_the_room(folders, family):
    with LLM(folders[family], **SETTINGS) as llm:
        wanted, one = [tokens(llm, s) for s in SAMPLINGS[:2]], llm.core.ledger
    split = dict(tensor_parallel_size=2, context_parallel_size=2)
    with LLM(folders[family], **split, **SETTINGS) as llm:
        assert [tokens(llm, s) for s in SAMPLINGS[:2]] == wanted
        assert llm.core.stats().prefix_hits > 0
        own = llm.core.ledger
        assert own.num_kv_tokens == 2 * one.num_kv_tokens
        assert own.weights_bytes < 0.7 * one.weights_bytes


def test_three_ranks_preempt_and_guess_as_one_device(folders, monkeypatch):
    monkeypatch.setattr("slipstream.worker.ranks.process_executor.available_cores", lambda: 3)
    prompts = [
        {"prompt_token_ids": [(7 * i + s) % 250 + 4 for i in range(20 + s)]} for s in range(10)
    ]
    with LLM(folders["llama"], **SETTINGS) as llm:
        wanted, block = tokens(llm, prompts=prompts), llm.core.ledger.block_bytes
    drafts = {"method": "suffix", "num_speculative_tokens": 3}
    small = dict(max_model_len=48, kv_cache_bytes=8 * block, speculative_config=drafts)
    with LLM(folders["llama"], context_parallel_size=3, **{**SETTINGS, **small}) as llm:
        for _ in range(2):
            assert tokens(llm, prompts=prompts) == wanted
        assert llm.stats().num_preemptions > 0
        assert llm.stats().spec_draft_tokens > 0
        (pool,) = llm.core.scheduler.pools
        assert pool.num_free == pool.num_usable


def test_latents_and_experts_answer_as_one_device_and_count_each_token_once(folders):
    found = []
    for how in ({}, {"context_parallel_size": 2}):
        with LLM(folders["deepseek_v3"], enable_prefix_caching=False, **SETTINGS, **how) as llm:
            answers = tokens(llm, prompts=PROMPTS[:3])
            found.append((answers, llm.core.stats(experts=True).expert_load))
    assert found[0] == found[1]
    assert found[0][1]


@pytest.mark.parametrize(
    ("family", "settings", "field", "says"),
    [
        ("llama", {"kv_cache_dtype": "int4"}, "kv_cache_dtype", "does not cover a cache of 4 bits"),
        ("llama", {"tensor_parallel_size": 2}, "context_parallel_size", "2 kv heads 1 times"),
        ("llama", {"tensor_parallel_size": 3}, "context_parallel_size", "must divide that"),
        ("llama", {"pipeline_parallel_size": 2}, "context_parallel_size", "does not go with"),
        ("qwen3_moe", {"expert_parallel_size": 2}, "context_parallel_size", "does not go with"),
        ("llama", {"weights_bytes": 2**20}, "weights_bytes", "context_parallel_size at 1"),
        ("gemma2", {"kernels": "triton"}, "context_parallel_size", "attention windows on GPUs"),
        ("mamba2", {}, "context_parallel_size", "recurrent layers alone"),
        ("bloom", {}, "context_parallel_size", "scores by distance"),
        ("deepseek_v32", {}, "context_parallel_size", "sparse attention"),
        ("minimax_m3_vl_text", {}, "context_parallel_size", "sparse attention to blocks"),
    ],
    ids=str,
)
def test_what_is_not_covered_is_refused_before_a_process_starts(
    tmp_path, monkeypatch, family, settings, field, says
):
    monkeypatch.setattr(
        "slipstream.worker.ranks.process_executor.spawn",
        lambda *_: pytest.fail("a process was started"),
    )
    tiny_models.write(tmp_path, family)
    with pytest.raises(ConfigError, match=says) as error:
        LLM(str(tmp_path), context_parallel_size=2, skip_tokenizer_init=True, **SETTINGS | settings)
    assert error.value.field == field
