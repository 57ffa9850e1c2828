"""Draft heads on a GPU: the answers of `deterministic` are the same, and chains run from graphs with the same drafts.

Run: pytest -m gpu tests/gpu/test_draft_heads_gpu.py.
"""

from __future__ import annotations

import pytest
import torch

from slipstream import LLM, SamplingParams
from tests import draft_heads, tiny_models
from tests.gpu.test_speculation_gpu import PROMPTS, SETTINGS, SIZES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
SHAPE = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}


def build(folder, kind):
    """(the model's path, a speculative_config)"""
    method, write = draft_heads.BY_KIND.get(kind, (kind, None))
    model, head, config = folder / "model", folder / "head", {"method": method, "num_speculative_tokens": 3}
    if kind == "mtp":
        dense = tiny_models.FAMILIES["glm4_moe"]["num_hidden_layers"]  # `deterministic` covers no experts
        tiny_models.build(model, "glm4_moe", hidden_size=256, head_dim=64, first_k_dense_replace=dense)
        draft_heads.mtp(model)
        return str(model), config
    tiny_models.build(model, "llama", num_hidden_layers=6, initializer_range=0.1, **SHAPE)
    write(head, sizes=SHAPE)
    return str(model), {**config, "model": str(head)}


def answers(llm):
    return [[o.outputs[0].token_ids for o in llm.generate(PROMPTS, sampling)] for sampling in SETTINGS]


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("kind", [*draft_heads.BY_KIND, "mtp"])
def test_answers_are_the_same(tmp_path, kind, eager):
    path, config = build(tmp_path, kind)
    sizes = {**SIZES, "deterministic": True, "enforce_eager": eager}
    with LLM(path, **sizes) as llm:
        expected = answers(llm)
    for more in ({}, {"num_speculative_tokens": 1}, {"num_speculative_tokens": "auto"}):
        with LLM(path, speculative_config={**config, **more}, **sizes) as llm:
            found, stats = answers(llm), llm.core.stats()
        assert found == expected
        assert stats.num_free_blocks == stats.num_blocks
        assert more.get("num_speculative_tokens") == "auto" or stats.spec_draft_tokens > 0


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "eagle31", "mtp"])
def test_chains_run_from_graphs(tmp_path, kind):
    """And give the drafts that the head makes op by op."""
    path, config = build(tmp_path, kind)
    drafts = []
    for eager in (False, True):
        with LLM(path, speculative_config=config, deterministic=True, enforce_eager=eager, **SIZES) as llm:
            draft, own, replayed = llm.core.executor.runner.draft, [], []
            assert (draft.graphs is None) == eager
            propose = draft.propose

            def noted(plan, rows, propose=propose, own=own):
                proposed = propose(plan, rows)
                if proposed is not None:
                    own.append(proposed.tolist())
                return proposed

            draft.propose = noted
            if not eager:
                replay = draft.graphs._replay

                def counted(drafted, sampled, depth, replay=replay, replayed=replayed):
                    replayed.extend(sampled)
                    replay(drafted, sampled, depth)

                draft.graphs._replay = counted
            llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
            drafts.append(own)
            num_runs = llm.core.stats().spec_num_drafts
            assert eager or sum(n > 0 for n in replayed) > 0.5 * num_runs  # launched behind the draw before
            assert eager or len(replayed) > 0.8 * num_runs  # the others are behind prompts
    agree = sum(a == b for a, b in zip(*drafts, strict=True))
    assert agree > 0.8 * len(drafts[0])  # near ties may fall otherwise: another kernel computes them
