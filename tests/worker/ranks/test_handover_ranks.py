"""Blocks that an engine of several ranks computes and another one takes over, each rank its own part."""

from __future__ import annotations

import os
import signal
from collections import deque

import pytest

from slipstream import SamplingParams
from slipstream.core.cache.invariants import check_pool
from slipstream.errors import ConfigError
from slipstream.messages.tiers import BlockCopy
from slipstream.params.answer_forms import StructuredOutputsParams
from slipstream.params.options import RequestOptions
from slipstream.worker.ranks.block_store import RankBlockStore
from slipstream.worker.ranks.messages import CopyBlocks, RankTiers, ReportTiers
from tests.engine.cache.test_handover import (  # noqa: F401
    PROMPTS,
    answers,
    engine,
    free_port,
    here,
    made,
    prefill,
)
from tests.engine.drafts.test_draft_heads import Setup
from tests.support import tiny_models
from tests.support.waiting import wait_for

pytestmark = pytest.mark.usefixtures("forked_ranks")

FORMS = {
    "tensor": {"tensor_parallel_size": 2},
    "stages": {"pipeline_parallel_size": 2},
    "context": {"context_parallel_size": 2},
}
HITS = 32 + 96 + 128


def nothing_is_held(*engines):
    for llm in engines:
        wait_for(lambda llm=llm: not llm.core.tend(), "copies do not end")
        for pool in [llm.core.scheduler.kv.pool, *llm.core.scheduler.slot_pools]:
            check_pool(pool)
            assert pool.num_free == pool.num_usable


def check_goes_on(model, address=None, **how):
    """The second engine's answers are those of one device, after a prompt of the first one."""
    with engine(model, **{k: v for k, v in how.items() if "parallel" not in k}) as alone:
        expected = answers(alone)
    with engine(model, address, **how) as first, engine(model, **how) as second:
        address = prefill(first)
        assert answers(second, handover_from=address) == expected
        stats = second.stats()
        assert stats.tiers.peer_hit_tokens == stats.prefix_hits == HITS
        assert stats.tiers.failed_blocks == stats.tiers.late_loads == 0
        nothing_is_held(first, second)
        assert first.stats().tiers.exchange_bytes == first.stats().tiers.handed_bytes > 0
        second.reset_prefix_cache()
        first.reset_prefix_cache()
        assert answers(second, handover_from=address) == expected
        assert second.stats().tiers.peer_hit_tokens == HITS, "forgotten blocks were given"
        nothing_is_held(first, second)


@pytest.mark.parametrize(
    ("family", "form"),
    [
        ("llama", "tensor"),
        ("llama", "stages"),
        ("llama", "context"),
        *(
            pytest.param(family, form, marks=pytest.mark.slow)
            for family in ("gemma3_text", "deepseek_v3", "granitemoehybrid", "qwen3_moe")
            for form in ("tensor", "stages", "context")
        ),
    ],
)
def test_another_engine_of_ranks_goes_on_from_the_prompt(tmp_path, family, form):
    tiny_models.write(tmp_path, family)
    check_goes_on(tmp_path, **FORMS[form])


def test_experts_of_ranks_with_whole_requests(tmp_path):
    tiny_models.write(tmp_path, "qwen3_moe")
    check_goes_on(tmp_path, tensor_parallel_size=2, expert_parallel_size=2)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["tensor", "stages", "context"])
def test_blocks_have_the_states_that_a_head_reads(tmp_path, form):
    setup = Setup(tmp_path, "eagle3", max_position_embeddings=256)
    check_goes_on(setup.path, speculative_config=setup.config, **FORMS[form])


def test_blocks_of_ranks_come_over_tcp(made):  # noqa: F811
    check_goes_on(made, f"tcp://127.0.0.1:{free_port()}", **FORMS["tensor"])


def test_every_rank_has_a_slot_for_what_was_given_to_the_exchange():
    """Another engine may ask for the blocks at once, of any rank: steps that a rank still computes are waited for."""
    sent, coming = [], {0: deque([RankTiers([], [64], [0])]), 1: deque[RankTiers]()}

    def wait_for(find):
        if (found := find()) is None:  # rank 1 answers late, and has already copied the block
            coming[1].append(RankTiers([(7, True)], [64], [0]))
            found = find()
        return found

    def next_report(rank):
        return coming[rank].popleft() if coming[rank] else None

    latest = {rank: RankTiers([], [64], [0]) for rank in (0, 1)}
    store = RankBlockStore(sent.append, next_report, wait_for, latest)
    store.submit([BlockCopy(7, "device", "peer", b"key", 3)])
    assert [type(message) for message in sent] == [CopyBlocks, ReportTiers]
    assert not any(coming.values())
    assert store.finished() == []
    coming[0].append(RankTiers([(7, True)], [64], [0]))
    assert store.finished() == [(7, True)]


def test_a_prompt_is_handed_over_while_a_step_awaits_a_mask(tmp_path):
    """Ranks tell that they have a slot for each block between a masked step's forward and its mask."""
    tiny_models.write_with_tokenizer(tmp_path, "llama")
    with_tokenizer = {"skip_tokenizer_init": False, **FORMS["tensor"]}
    bound = StructuredOutputsParams(regex="[ab]{24}")
    masked = SamplingParams(temperature=0, max_tokens=40, structured_outputs=bound)
    with engine(tmp_path, **with_tokenizer) as first, engine(tmp_path, **with_tokenizer) as second:
        samplings = [masked, *[SamplingParams(temperature=0, max_tokens=n) for n in (2, 4, 6)]]
        options = [RequestOptions(), *[RequestOptions(hands_over=True)] * 3]
        found = first._run([PROMPTS[0], *PROMPTS], samplings, options, progress=False)
        assert set(found[0].outputs[0].text) <= {"a", "b"}
        address = first.config.cache.handover.address
        assert answers(second, handover_from=address) == answers(first)
        assert second.stats().tiers.peer_hit_tokens == HITS
        nothing_is_held(first, second)


def test_an_engine_of_another_form_computes_the_prompt(made, capfd):  # noqa: F811
    with engine(made, **FORMS["tensor"]) as first, engine(made, **FORMS["stages"]) as second:
        address = prefill(first)
        expected = answers(second)
        second.reset_prefix_cache()
        assert answers(second, handover_from=address) == expected
        assert "part of each rank is " in capfd.readouterr().err
        assert second.stats().tiers.peer_hit_tokens == 0
        nothing_is_held(first, second)


def test_the_prompt_is_computed_after_a_giving_rank_s_death(made):  # noqa: F811
    with engine(made, **FORMS["tensor"]) as second:
        with engine(made, **FORMS["tensor"]) as first:
            address = prefill(first)
            expected = answers(first)
            os.kill(first.core.executor.processes[-1], signal.SIGKILL)
            assert answers(second, handover_from=address) == expected
            assert second.stats().tiers.peer_hit_tokens == 0
        nothing_is_held(second)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (dict(expert_parallel_size=2), "tensor_parallel_size"),
        (dict(rank_address="0.0.0.0:0", local_ranks=1, **FORMS["tensor"]), "several hosts"),
        (dict(kv_handover_address="tcp://127.0.0.1:65535", **FORMS["tensor"]), "a lower one"),
    ],
)
def test_forms_without_hand_overs_are_refused_by_name(tmp_path, more, why):
    tiny_models.write(tmp_path, "qwen3_moe")
    given = {"kv_handover_address": here(), **more}
    with pytest.raises(ConfigError, match=why) as error:
        engine(tmp_path, given.pop("kv_handover_address"), **given)
    assert error.value.field == "kv_handover_address"
