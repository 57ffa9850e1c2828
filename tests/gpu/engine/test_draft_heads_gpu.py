"""Draft heads and models on a GPU: answers of `deterministic` are the same, and chains run from graphs with the same drafts.

Run: pytest -m gpu tests/gpu/engine/test_draft_heads_gpu.py.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from slipstream import LLM, SamplingParams
from tests.gpu.engine.test_speculation_gpu import PROMPTS, SETTINGS, SIZES
from tests.support import draft_heads, tiny_models
from tests.support.naive_heads import fused

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
SHAPE = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}


def build(folder, kind):
    """(the model's path, a speculative_config)"""
    method, write = draft_heads.BY_KIND.get(kind, (kind, None))
    model = folder / "model"
    head = folder / "head"
    config = {"method": method, "num_speculative_tokens": 3}
    if kind == "mtp":
        dense = tiny_models.FAMILIES["glm4_moe"][
            "num_hidden_layers"
        ]  # `deterministic` covers no experts
        tiny_models.write(
            model, "glm4_moe", hidden_size=256, head_dim=64, first_k_dense_replace=dense
        )
        draft_heads.mtp(model)
        return str(model), config
    tiny_models.write(model, "llama", num_hidden_layers=6, initializer_range=0.1, **SHAPE)
    if kind == "smaller":
        tiny_models.build_near(
            head, num_hidden_layers=6, initializer_range=0.1, noise=0.05, **SHAPE
        )
        return str(model), {**config, "method": "draft", "model": str(head)}
    write(head, sizes=SHAPE)
    return str(model), {**config, "model": str(head)}


def answers(llm):
    return [
        [o.outputs[0].token_ids for o in llm.generate(PROMPTS, sampling)] for sampling in SETTINGS
    ]


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("kind", [*draft_heads.BY_KIND, "mtp", "smaller"])
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


@pytest.mark.parametrize(("quantization", "error"), [("none", 0.03), ("fp8", 0.08)])
@pytest.mark.parametrize("kind", ["eagle3", "eagle31", "joint-norm"])
def test_states_are_those_of_the_published_maths(tmp_path, kind, quantization, error):
    """States of prompts are compared with those of the model in float32 on the CPU. In bfloat16
    the model's own are off by a percent."""
    path, config = build(tmp_path, kind)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    head = SimpleNamespace(
        tensors=load_file(tmp_path / "head" / "model.safetensors"),
        head={"fc_norm": kind == "eagle31"},
    )
    seen = dict[str, float]()
    with LLM(path, speculative_config={**config, "quantization": quantization}, **SIZES) as llm:
        draft = llm.core.executor.runner.draft
        write = draft.write_drafts

        @torch.no_grad()
        def noted(plan, rows):
            for s in (s for s in plan.scheduled if s.drafts and s.request_id not in seen):
                row, places = rows.rows[s.request_id].index, torch.arange(s.num_computed_tokens)
                table, size = rows.block_tables[0][row].cpu().long(), draft.block_size
                states = draft.states.kept.cpu().float()[
                    table[places // size] * size + places % size
                ]
                tokens = rows.tokens[row, : len(places)].cpu().long()
                hidden = model(tokens[None], output_hidden_states=True).hidden_states
                expected = fused(head, [hidden[i][0] for i in (1, 2, 4)])
                seen[s.request_id] = float((states - expected).norm() / expected.norm())
            return write(plan, rows)

        draft.write_drafts = noted
        llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    assert len(seen) == len(PROMPTS)
    assert max(seen.values()) < error, seen


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "eagle31", "joint-norm", "mtp", "smaller"])
def test_chains_run_from_graphs(tmp_path, kind):
    """Chains in graphs give the drafts that are made op by op."""
    path, config = build(tmp_path, kind)
    drafts = []
    for eager in (False, True):
        with LLM(
            path, speculative_config=config, deterministic=True, enforce_eager=eager, **SIZES
        ) as llm:
            draft, own, replayed = llm.core.executor.runner.draft, [], []
            assert (draft.graphs is None) == eager
            write = draft.write_drafts

            def noted(plan, rows, write=write, draft=draft, own=own):
                if drafted := write(plan, rows):
                    own.append(draft.tokens_of(drafted, rows).tolist())
                    if (kept := draft.kept_drafts(drafted, rows)) is not None:
                        assert kept().tolist() == own[-1]
                return drafted

            draft.write_drafts = noted
            if not eager:
                replay = draft.graphs._replay

                def counted(drafted, sampled, depth, replay=replay, replayed=replayed):
                    replayed.extend(sampled)
                    replay(drafted, sampled, depth)

                draft.graphs._replay = counted
            llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
            drafts.append(own)
            num_runs = llm.core.stats().spec_num_drafts
            assert (
                eager or sum(n > 0 for n in replayed) > 0.5 * num_runs
            )  # launched behind the draw before
            assert eager or len(replayed) > 0.8 * num_runs  # the others are behind prompts
    agree = sum(a == b for a, b in zip(*drafts, strict=True))
    assert agree > 0.8 * len(
        drafts[0]
    )  # near ties may fall otherwise: another kernel computes them


@pytest.mark.parametrize("kind", ["eagle3", "smaller"])
def test_requests_that_join_are_preempted_or_hit_a_prefix(tmp_path, kind):
    """Answers equal those without drafts, and drafts made with graphs equal those made without."""
    path, config = build(tmp_path, kind)
    common = [(5 * i) % 250 + 4 for i in range(70)]
    prompts = [{"prompt_token_ids": common + [30 + i, 40, 50 + i][: 1 + i % 3]} for i in range(20)]
    sampling = [
        SamplingParams(temperature=0, max_tokens=20 + 13 * i % 80, ignore_eos=True)
        for i in range(20)
    ]
    sizes = {**SIZES, "deterministic": True}
    with LLM(path, **sizes) as llm:
        expected = [o.outputs[0].token_ids for o in llm.generate(prompts, sampling)]
    drafts = []
    for eager in (False, True):
        small = {
            **sizes,
            "enforce_eager": eager,
            "kv_cache_bytes": 2_000_000 if kind == "eagle3" else 3_000_000,
        }
        with LLM(path, speculative_config=config, **small) as llm:
            draft, own = llm.core.executor.runner.draft, {}
            write = draft.write_drafts

            def noted(plan, rows, write=write, draft=draft, own=own):
                drafted = write(plan, rows)
                found = iter(draft.tokens_of(drafted, rows).tolist() if drafted else ())
                own.update(
                    {
                        (s.request_id, s.num_computed_tokens): [next(found) for _ in s.drafts]
                        for s in plan.scheduled
                    }
                )
                return drafted

            draft.write_drafts = noted
            assert [o.outputs[0].token_ids for o in llm.generate(prompts, sampling)] == expected
            stats = llm.core.stats()
            assert stats.num_preemptions > 0
            assert stats.prefix_hits > 0
            assert stats.num_free_blocks == stats.num_blocks
            assert stats.spec_accepted_tokens > 0
            drafts.append(own)
    both = [
        at
        for at in drafts[0].keys() & drafts[1].keys()
        if len(drafts[0][at]) == len(drafts[1][at]) > 0
    ]
    assert len(both) > 100
    assert sum(drafts[0][at] == drafts[1][at] for at in both) > 0.8 * len(
        both
    )  # near ties may fall otherwise


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
    reason="needs a Hopper GPU",
)
def test_passes_over_one_sequence_run_in_the_one_token_kernel(tmp_path):
    """The model drafts for itself, so drafts are right except where another kernel's sums turn a
    near tie."""
    shape = {
        "hidden_size": 512,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "intermediate_size": 1024,
    }
    tiny_models.write(tmp_path, "llama", initializer_range=0.1, **shape)
    config = {"method": "draft", "model": str(tmp_path), "num_speculative_tokens": 3}
    with LLM(str(tmp_path), speculative_config=config, **SIZES) as llm:
        refused = llm.core.executor.runner.draft.forwards.refused
        assert "one-token" not in refused, refused
        for prompt in PROMPTS:
            llm.generate([prompt], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
        stats = llm.core.stats()
    assert stats.spec_accepted_tokens > 0.7 * stats.spec_draft_tokens > 0
