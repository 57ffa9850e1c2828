"""Requests dealt out to two real processes, which share only a mixture's experts: the same answers as one device.

Weights are float32 and random, so that sums in another order leave greedy tokens as they are.
"""

from __future__ import annotations

import pytest

from slipstream import LLM, BeamSearchParams, SamplingParams
from slipstream.core.cache.prefix_cache import KEY_BYTES
from slipstream.errors import ConfigError
from slipstream.messages.requests import EngineRequest
from tests.support import tiny_models
from tests.worker.ranks.test_ranks import SAMPLINGS

pytestmark = pytest.mark.usefixtures("forked_ranks")

SETTINGS = dict(
    device="cpu",
    dtype="float32",
    kernels="torch",
    max_model_len=256,
    kv_cache_bytes=2**20,
    block_size=16,
)
SIZES = dict(max_num_seqs=8, max_num_batched_tokens=48)
PROMPTS = [
    "The capital of France is",
    "in the hour " * 20,
    "hello",
    "in the hour " * 20 + "of",
    "he",
    "the other",
]
OWN = [
    SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=2),
    *SAMPLINGS[1:],
    SamplingParams(temperature=0.8, seed=3, max_tokens=8, ignore_eos=True, n=3),
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixture")
    tiny_models.write_with_tokenizer(folder, "qwen3_moe", max_position_embeddings=1024)
    return folder


@pytest.fixture(scope="module")
def one(mixture):
    with LLM(str(mixture), **SETTINGS, **SIZES) as llm:
        yield llm


@pytest.fixture
def two(mixture, forked_ranks):
    with LLM(str(mixture), expert_parallel_size=2, **SETTINGS, **SIZES) as llm:
        yield llm


def answers(llm, samplings=OWN):
    texts, logprobs = [], []
    for sampling in samplings:
        for output in llm.generate(PROMPTS, sampling, progress=False):
            told = [p for p in output.prompt_logprobs or () if p is not None]
            for choice in output.outputs:
                told += choice.logprobs or ()
                texts.append((choice.text, choice.token_ids, choice.finish_reason))
            texts.append(len(told))
            logprobs += [p.chosen.logprob for p in told]
    return texts, logprobs


def free(llm):
    return [pool.num_usable - pool.num_free for pool in llm.core.scheduler.pools]


def test_two_ranks_answer_as_one_device(one, two):
    """Chunked prompts, a cached prefix, draws, penalties, grammars, log-probabilities, several choices."""
    wanted = answers(one)
    for _ in range(2):
        found = answers(two)
        assert found[0] == wanted[0]
        assert found[1] == pytest.approx(wanted[1], abs=5e-4)
    assert two.core.stats().prefix_hits > 0
    assert free(two) == [0, 0]
    mixed = [
        GREEDY,
        *OWN[1:4],
        GREEDY,
        OWN[3],
    ]  # in one step: with a grammar on one rank, on both, on none
    for _ in range(2):
        found = [o.outputs[0].token_ids for o in two.generate(PROMPTS, mixed, progress=False)]
        assert found == [
            o.outputs[0].token_ids for o in one.generate(PROMPTS, mixed, progress=False)
        ]


def test_one_request_alone(one, two):
    """One rank has nothing but padding."""
    wanted = [o.outputs[0].token_ids for o in one.generate(PROMPTS[:1], GREEDY, progress=False)]
    assert [
        o.outputs[0].token_ids for o in two.generate(PROMPTS[:1], GREEDY, progress=False)
    ] == wanted


def test_the_caches_hold_twice_as_much(one, two):
    stats = two.core.stats()
    assert stats.num_blocks == 2 * one.core.stats().num_blocks
    assert two.core.ledger.num_kv_tokens == 2 * one.core.ledger.num_kv_tokens
    first, second = two.core.executor.ledgers
    assert first.block_bytes == second.block_bytes == one.core.ledger.block_bytes


def test_experts_count_each_token_once(mixture, forked_ranks):
    """Each rank its own, and no padding."""
    found = []
    for how in ({}, {"expert_parallel_size": 2}):
        with LLM(str(mixture), enable_prefix_caching=False, **SETTINGS, **SIZES, **how) as llm:
            llm.generate(PROMPTS[:3], GREEDY, progress=False)
            found.append(llm.core.stats(experts=True).expert_load)
    assert found[0] == found[1]
    assert found[0]


def test_more_than_fits_and_what_is_cancelled(mixture, one, forked_ranks):
    """Requests are preempted, and come back to another rank. Those that are cancelled leave nothing."""
    prompts = [
        {"prompt_token_ids": [(7 * i + s) % 250 + 4 for i in range(20 + s)]} for s in range(10)
    ]
    wanted = [o.outputs[0].token_ids for o in one.generate(prompts, GREEDY, progress=False)]
    small = {
        **SETTINGS,
        "max_model_len": 64,
        "kv_cache_bytes": one.core.ledger.block_bytes * 8,
        "enable_prefix_caching": False,
    }
    with LLM(str(mixture), expert_parallel_size=2, **small, **SIZES) as llm:
        assert [
            o.outputs[0].token_ids for o in llm.generate(prompts, GREEDY, progress=False)
        ] == wanted
        assert llm.stats().num_preemptions > 0
        core = llm.core
        for i in range(6):
            core.add(
                [
                    EngineRequest(
                        request_id=f"c{i}",
                        prompt_token_ids=(5, 6, 7),
                        sampling=GREEDY,
                        max_tokens=16,
                    )
                ]
            )
        for _ in range(4):
            core.step()
        core.abort([f"c{i}" for i in range(0, 6, 2)])
        while core.has_work:
            core.step()
        assert free(llm) == [0, 0]
        assert [
            o.outputs[0].token_ids for o in llm.generate(prompts, GREEDY, progress=False)
        ] == wanted


def run_on(core):
    while True:
        core.step()


def test_a_step_that_was_interrupted_leaves_nothing(one, two, monkeypatch):
    core = two.core
    for name in "ab":
        core.add(
            [
                EngineRequest(
                    request_id=name, prompt_token_ids=(5, 6, 7), sampling=GREEDY, max_tokens=16
                )
            ]
        )
    core.step()
    monkeypatch.setattr(core.scheduler, "update", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run_on(core)
    monkeypatch.undo()
    assert answers(two, [GREEDY])[0] == answers(one, [GREEDY])[0]


def test_beams_and_drafts(mixture, one, forked_ranks):
    wanted = one.beam_search(PROMPTS, BeamSearchParams(beam_width=3, max_tokens=6))
    greedy = [o.outputs[0].token_ids for o in one.generate(PROMPTS, GREEDY, progress=False)]
    speculation = {"method": "suffix", "num_speculative_tokens": 3}
    with LLM(
        str(mixture), expert_parallel_size=2, speculative_config=speculation, **SETTINGS, **SIZES
    ) as llm:
        found = llm.beam_search(PROMPTS, BeamSearchParams(beam_width=3, max_tokens=6))
        assert [[b.tokens for b in o.sequences] for o in found] == [
            [b.tokens for b in o.sequences] for o in wanted
        ]
        for _ in range(2):
            assert [
                o.outputs[0].token_ids for o in llm.generate(PROMPTS, GREEDY, progress=False)
            ] == greedy
        assert llm.stats().spec_draft_tokens > 0
        assert (
            answers(llm, OWN[2:4])[0] == answers(one, OWN[2:4])[0]
        )  # guesses under a grammar, too
        assert free(llm) == [0, 0]


def test_vectors_of_dealt_ranks_equal_those_of_one(one, two):
    wanted = [output.outputs.embedding for output in one.embed(PROMPTS, progress=False)]
    for ours, theirs in zip(two.embed(PROMPTS, progress=False), wanted, strict=True):
        assert ours.outputs.embedding == pytest.approx(theirs, abs=1e-4)


def test_who_routes_requests_sees_the_prefixes_of_all_ranks(two):
    core = two.core
    core.cache_news.listen(on=True)
    two.generate([PROMPTS[1], PROMPTS[3]], GREEDY, progress=False)
    two.generate([PROMPTS[1], PROMPTS[3]], GREEDY, progress=False)
    first, second = (set(pool.cached_keys()) for pool in core.scheduler.pools)
    assert first & second
    came, went = core.cache_news.changes()
    assert (keys(came), went) == (first | second, b"")
    assert keys(core.cache_news.keys()) == first | second
    core.scheduler.pools[0].forget_all()
    assert keys(core.cache_news.changes()[1]) == first - second
    core.scheduler.reset_prefix_cache()
    assert keys(core.cache_news.changes()[1]) == second
    assert core.cache_news.changes() is None


def keys(joined):
    return {joined[i : i + KEY_BYTES] for i in range(0, len(joined), KEY_BYTES)}


def test_draws_without_a_seed_differ_between_ranks(two):
    drawn = SamplingParams(temperature=1.0, max_tokens=16, ignore_eos=True)
    first, second = two.generate(["hello", "hello"], drawn, progress=False)
    assert first.outputs[0].token_ids != second.outputs[0].token_ids


@pytest.mark.slow
def test_stages_of_ranks(mixture, one, monkeypatch, forked_ranks):
    """Two stages of two ranks: each passes on its own requests' rows."""
    monkeypatch.setattr("slipstream.worker.ranks.process_executor.available_cores", lambda: 4)
    wanted = answers(one)
    with LLM(
        str(mixture), expert_parallel_size=2, pipeline_parallel_size=2, **SETTINGS, **SIZES
    ) as llm:
        for _ in range(2):
            found = answers(llm)
            assert found[0] == wanted[0]
            assert found[1] == pytest.approx(wanted[1], abs=5e-4)
        alone = llm.generate(PROMPTS[:1], GREEDY, progress=False)[0]
        assert (
            alone.outputs[0].token_ids
            == one.generate(PROMPTS[:1], GREEDY, progress=False)[0].outputs[0].token_ids
        )


@pytest.mark.parametrize(
    ("settings", "field", "says"),
    [
        (
            {"enable_chunked_prefill": False, "max_num_batched_tokens": 256},
            "max_num_batched_tokens",
            "on each of 2 ranks",
        ),
    ],
    ids=str,
)
def test_what_is_not_covered_is_refused_before_a_process_starts(
    mixture, monkeypatch, settings, field, says
):
    monkeypatch.setattr(
        "slipstream.worker.ranks.process_executor.spawn",
        lambda number: pytest.fail("a process was started"),
    )
    with pytest.raises(ConfigError, match=says) as error:
        LLM(str(mixture), expert_parallel_size=2, **{**SETTINGS, **SIZES, **settings})
    assert error.value.field == field
