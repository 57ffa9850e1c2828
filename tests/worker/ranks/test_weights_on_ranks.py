"""Weights that change in place on several ranks (CPU processes): versions, checksums, pauses, log-probabilities."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from slipstream import LLM, AsyncLLM, EngineArgs, SamplingParams
from slipstream.errors import CheckpointError
from slipstream.worker.ranks.messages import SwapExperts
from tests.engine.test_weights import BOUND, GREEDY
from tests.support import tiny_models

pytestmark = pytest.mark.usefixtures("forked_ranks")

FORMS = {
    "tensor": {"tensor_parallel_size": 2},
    "whole experts": {"tensor_parallel_size": 2, "expert_parallel_size": 2},
    "dealt requests": {"expert_parallel_size": 2},
    "stages": {"pipeline_parallel_size": 2},
    "context": {"context_parallel_size": 2},
}
SIZES = dict(device="cpu", dtype="float32", max_model_len=256, max_num_seqs=4, kv_cache_bytes=2**21)
PROMPTS = [{"prompt_token_ids": [5 + i, 9, 200, 31, *range(40, 40 + 9 * i)]} for i in range(4)]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Two checkpoints of one mixture, and the second as a trainer has it."""
    folder = tmp_path_factory.mktemp("two")
    tiny_models.build_with_tokenizer(folder / "old", "qwen3_moe", seed=0)
    policy = tiny_models.build_with_tokenizer(folder / "new", "qwen3_moe", seed=1)
    return folder / "old", folder / "new", policy


@pytest.fixture(scope="module")
def expected(two):
    """The tokens of each checkpoint, on one device."""
    found = []
    for path in two[:2]:
        with LLM(str(path), **SIZES) as llm:
            found.append(tokens_of(llm))
    assert found[0] != found[1]
    return found


def tokens_of(llm):
    return [x.outputs[0].token_ids for x in llm.generate(PROMPTS, GREEDY, progress=False)]


def update(llm, tensors, version=None):
    names = list(tensors)
    llm.start_weight_update()
    for i in range(3):
        llm.update_weights({"tensors": {name: tensors[name] for name in names[i::3]}})
    return llm.finish_weight_update(version)


def farthest(llm, policy) -> float:
    """The largest distance of drawn tokens' log-probabilities from the trainer's."""
    sampling = SamplingParams(temperature=0.8, top_k=50, max_tokens=12, logprobs=0, seed=1)
    found = 0.0
    for answer in llm.generate(PROMPTS, sampling, progress=False):
        (output,) = answer.outputs
        ids = torch.tensor([answer.prompt_token_ids + output.token_ids])
        with torch.no_grad():
            logits = policy(ids).logits[0, len(answer.prompt_token_ids) - 1 : -1].float()
        theirs = logits.log_softmax(-1).gather(1, torch.tensor(output.token_ids)[:, None])[:, 0]
        ours = torch.tensor([p.chosen.logprob for p in output.logprobs])
        found = max(found, (ours - theirs).abs().max().item())
    return found


@pytest.mark.parametrize("form", FORMS)
def test_an_update_on_ranks_is_a_fresh_load_and_the_trainers(two, expected, form):
    old, new, policy = two
    with LLM(str(new), **SIZES, **FORMS[form]) as llm:
        sums = llm.weights(checksums=True).checksums
    assert {name.partition(".")[0] for name in sums} == {"rank0", "rank1"}
    tensors = load_file(new / "model.safetensors")
    with LLM(str(old), **SIZES, **FORMS[form]) as llm:
        assert tokens_of(llm) == expected[0]
        assert farthest(llm, policy) > 100 * BOUND
        missing = {name: x for name, x in tensors.items() if "layers.1.mlp" not in name}
        with pytest.raises(CheckpointError, match="lacks"):
            update(llm, missing)
        llm.abort_weight_update()
        assert tokens_of(llm) == expected[0]
        info = update(llm, tensors, "step-1")
        assert (info.weight_version, info.broken) == ("step-1", "")
        assert llm.weights(checksums=True).checksums == sums
        answers = llm.generate(PROMPTS, GREEDY, progress=False)
        assert [x.outputs[0].token_ids for x in answers] == expected[1]
        assert {v for x in answers for v in x.outputs[0].token_weight_versions} == {"step-1"}
        assert all(x.num_cached_tokens == 0 for x in answers)  # of what the old weights computed
        assert farthest(llm, policy) < BOUND
        llm.start_weight_update()
        llm.update_weights({"path": str(old)})
        assert llm.finish_weight_update().checksum != info.checksum
        assert tokens_of(llm) == expected[0]


def test_experts_that_have_changed_ranks_are_updated_where_they_belong(two, expected):
    old, new, _ = two
    form = FORMS["dealt requests"]
    with LLM(str(new), **SIZES, **form) as llm:
        sums = llm.weights(checksums=True).checksums
    with LLM(str(old), **SIZES, **form) as llm:
        before = llm.weights(checksums=True).checksums
        executor, moved = llm.core.executor, [(0, 0, 5), (0, 3, 5), (1, 1, 4)]

        def move():
            for layer, a, b in moved:
                at = executor._balancer._layer(layer).expert_at
                at[[a, b]] = at[[b, a]]
            executor._broadcast(SwapExperts(moved))

        move()
        assert tokens_of(llm) == expected[0]
        assert llm.weights(checksums=True).checksums == before
        move()
        update(llm, load_file(new / "model.safetensors"))
        assert llm.weights(checksums=True).checksums == sums
        assert tokens_of(llm) == expected[1]
        move()
        assert tokens_of(llm) == expected[1]


@pytest.mark.parametrize("mode", ["keep", "retract", "wait"])
@pytest.mark.parametrize("form", ["tensor", "dealt requests", "stages"])
async def test_streams_on_ranks_outlive_a_pause_and_say_their_versions(two, form, mode):
    old, new, _ = two
    engine = await AsyncLLM.start(
        EngineArgs(str(old), skip_tokenizer_init=True, **SIZES, **FORMS[form])
    )
    try:
        sampling = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
        runs, tokens, updated = [], [], False
        async for delta in engine.generate(PROMPTS[2], sampling):
            runs += delta.outputs[0].weight_versions
            tokens += delta.outputs[0].token_ids
            if not updated:
                updated = True
                await engine.pause_generation(mode=mode)
                assert await engine.is_paused()
                assert await engine.is_paused()
                await engine.start_weight_update()
                await engine.update_weights({"path": str(new)})
                info = await engine.finish_weight_update("next")
                await engine.resume_generation()
        assert len(tokens) == sum(n for _, n in runs) == 60
        assert {version for version, _ in runs} == ({"0"} if mode == "wait" else {"0", "next"})
        assert info.weight_version == "next"
        again = [delta async for delta in engine.generate(PROMPTS[2], sampling)]
        assert {v for d in again for v, _ in d.outputs[0].weight_versions} == {"next"}
    finally:
        await engine.shutdown()
