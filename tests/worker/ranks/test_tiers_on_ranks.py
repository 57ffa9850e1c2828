"""A disk below the caches of several ranks, next to drafts, adapters and pictures: a second engine finds the first one's blocks
and answers as one device does. Beams, several choices and vectors on ranks."""

from __future__ import annotations

import pytest

from slipstream import LLM, BeamSearchParams
from tests.engine.drafts.test_draft_heads import Setup
from tests.engine.media.test_vision import prompt_of
from tests.engine.test_adapters import ALL, adapter, build
from tests.engine.test_adapters import PROMPTS as SHORT
from tests.engine.test_adapters import SETTINGS as ADAPTED
from tests.support import tiny_models
from tests.support.vision_models import build_vision, mixed_prompts, picture
from tests.support.waiting import wait_for
from tests.worker.ranks.test_context_extras import DRAWN, GREEDY, PROMPTS, SEVERAL, answers
from tests.worker.ranks.test_context_ranks import SETTINGS

pytestmark = [pytest.mark.usefixtures("forked_ranks"), pytest.mark.slow]

FORMS = {
    "tensor": {"tensor_parallel_size": 2},
    "stages": {"pipeline_parallel_size": 2},
    "context": {"context_parallel_size": 2},
}
DEALT = {"expert_parallel_size": 2, "max_num_seqs": 16}
"""Requests dealt out, which takes a mixture."""
SAMPLINGS = [GREEDY, DRAWN, SEVERAL]


def check_disk(path, folder, how, given, prompts=PROMPTS, **more):
    """One device's answers, of blocks from the disk as well."""
    with LLM(str(path), **given) as llm:
        wanted = answers(llm, SAMPLINGS, prompts, **more)
    disk = {"kv_disk_bytes": 2**26, "kv_disk_path": str(folder)}
    for turn in range(2):
        with LLM(str(path), **{**given, **disk, **how}) as llm:
            assert answers(llm, SAMPLINGS, prompts, **more) == wanted
            wait_for(lambda llm=llm: not llm.core.tend(), "blocks are not stored")
            tiers, stats = llm.stats().tiers, llm.stats()
            assert tiers.stored_blocks > 8 or turn
            assert tiers.failed_blocks == 0
            assert (tiers.disk_hit_tokens > 0) == bool(turn)
            assert (stats.spec_draft_tokens > 20) == ("speculative_config" in how)
            assert all(pool.num_free == pool.num_usable for pool in llm.core.scheduler.pools)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["eagle3", "mtp-hybrid"])
def test_blocks_of_a_disk_have_the_states_that_a_head_reads(tmp_path, form, kind):
    setup = Setup(tmp_path, kind, max_position_embeddings=256)
    given = {**SETTINGS, "skip_tokenizer_init": True}
    if "hybrid" in kind:
        given |= {"state_slots": 96, "kv_cache_bytes": 2**22}
    how = {**FORMS[form], "speculative_config": setup.config}
    check_disk(setup.path, tmp_path / "kv", how, given)


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_blocks_of_a_rank_have_the_states_that_a_head_reads(tmp_path, kind):
    sizes = {} if kind == "mtp" else {"num_hidden_layers": 6}
    setup = Setup(tmp_path, kind, family="qwen3_moe", max_position_embeddings=256, **sizes)
    given = {**SETTINGS, "skip_tokenizer_init": True}
    how = {**DEALT, "speculative_config": setup.config}
    check_disk(setup.path, tmp_path / "kv", how, given)


def test_blocks_of_a_rank_are_those_of_an_adapter(tmp_path):
    made = tmp_path, build(tmp_path, "qwen2_moe")
    prompts = [{"prompt_token_ids": SHORT[i]} for _, i in ALL]
    loras = [adapter(made, n) for n, _ in ALL]
    given = {**ADAPTED, "block_size": 4, "max_num_batched_tokens": 72}
    check_disk(tmp_path / "base", tmp_path / "kv", DEALT, given, prompts, lora_request=loras)


def test_blocks_of_a_rank_are_those_of_a_picture(tmp_path):
    """Next to recurrent states, of which a rank stores the checkpoints."""
    build_vision(tmp_path / "model", "qwen3_5_moe", seed=3)
    given = {**SETTINGS, "kv_cache_bytes": 2**24, "max_model_len": 512, "block_size": 4}
    prompts = mixed_prompts("qwen3_5_moe")
    check_disk(tmp_path / "model", tmp_path / "kv", DEALT, given, prompts)


@pytest.mark.parametrize("form", FORMS)
def test_blocks_of_a_disk_are_those_of_an_adapter(tmp_path, form):
    made = tmp_path, build(tmp_path, "llama")
    prompts = [{"prompt_token_ids": SHORT[i]} for _, i in ALL]
    loras = [adapter(made, n) for n, _ in ALL]
    given = {**ADAPTED, "block_size": 4, "max_num_batched_tokens": 72}
    check_disk(tmp_path / "base", tmp_path / "kv", FORMS[form], given, prompts, lora_request=loras)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", ["gemma3", "qwen2_5_vl"])
def test_blocks_of_a_disk_are_those_of_a_picture(tmp_path, form, family):
    build_vision(tmp_path / "model", family, seed=3)
    prompts = [
        prompt_of(family, picture(1), picture(2, 30, 61)),
        prompt_of(family, picture(3)),
        {"prompt_token_ids": [*range(5, 45)]},
    ]
    given = {**SETTINGS, "kv_cache_bytes": 2**24, "max_model_len": 512, "max_num_seqs": 4}
    check_disk(tmp_path / "model", tmp_path / "kv", FORMS[form], given, prompts)


@pytest.mark.parametrize("form", FORMS)
def test_beams_and_vectors_are_those_of_one_device(tmp_path, form):
    tiny_models.write_with_tokenizer(tmp_path, "llama", num_hidden_layers=3)
    beams = BeamSearchParams(beam_width=3, max_tokens=6)
    found = []
    for how in ({}, FORMS[form]):
        with LLM(str(tmp_path), **SETTINGS, **how) as llm:
            searched = llm.beam_search(PROMPTS, beams)
            vectors = [x.outputs.embedding for x in llm.embed(PROMPTS, progress=False)]
            found.append(([[b.tokens for b in x.sequences] for x in searched], vectors))
    assert found[0][0] == found[1][0]
    for ours, theirs in zip(found[1][1], found[0][1], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)
