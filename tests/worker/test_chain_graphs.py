"""What a captured chain of drafts does, computed without a GPU: the drafts that the head makes op by op."""

from __future__ import annotations

import pytest
import torch

from slipstream import LLM, SamplingParams
from slipstream.worker.chain_graphs import ChainGraphs
from tests import draft_heads, tiny_models
from tests.engine.test_speculation import PROMPTS, SIZES


@pytest.mark.parametrize("num_drafts", [1, 3])
def test_a_chain_is_what_the_head_does_step_by_step(tmp_path, num_drafts):
    """For several requests, behind runs of any length, beside padding, and where one wants fewer drafts."""
    tiny_models.build(tmp_path / "model", "llama", num_hidden_layers=6)
    draft_heads.eagle(tmp_path / "head")
    config = {"method": "eagle3", "model": str(tmp_path / "head"), "num_speculative_tokens": num_drafts}
    with LLM(str(tmp_path / "model"), speculative_config=config, **{**SIZES, "kernels": "torch"}) as llm:
        runner = llm.core.executor.runner
        draft, compared = runner.draft, []
        eager = draft.draft

        @torch.inference_mode()
        def noted(drafted, rows):
            graphs = ChainGraphs(draft, rows, (num_drafts,), max_model_len=128, max_num_seqs=4)
            seen = {s.request_id: rows.rows[s.request_id].num_drafted for s in drafted}
            eager(drafted, rows)
            made = [rows.tokens[rows.rows[s.request_id].index, s.num_computed_tokens + 1 :].tolist() for s in drafted]
            states = draft.ends.clone()
            for s in drafted:  # as it was before
                rows.rows[s.request_id].num_drafted = seen[s.request_id]
            graphs._captured[4, num_drafts] = None
            if graphs.covers(drafted):
                inputs = graphs.idle(4, num_drafts)
                inputs[0, : len(drafted)] = [rows.rows[s.request_id].index for s in drafted]
                inputs[1, : len(drafted)] = [s.num_computed_tokens for s in drafted]
                inputs[2, : len(drafted)] = [len(s.drafts) for s in drafted]
                for s in drafted:
                    rows.tokens[rows.rows[s.request_id].index, s.num_computed_tokens + 1 :] = 0
                found = graphs.chain(torch.from_numpy(inputs), 4, num_drafts)
                for i, s in enumerate(drafted):
                    count = len(s.drafts)
                    assert found[i, :count].tolist() == made[i][:count]
                    at = rows.tokens[rows.rows[s.request_id].index, s.num_computed_tokens + 1 :].tolist()
                    assert at == [*made[i][:count], *[0] * (len(at) - count)]
                    compared.append(count)
            draft.ends.copy_(states)
            for s in drafted:
                rows.rows[s.request_id].num_drafted = s.num_computed_tokens + 1

        draft.draft = noted
        lengths = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (30, 17, 24)]
        llm.generate(PROMPTS[:3], lengths)
    assert len(compared) > 25
    assert set(compared) == set(range(1, num_drafts + 1))


def test_what_a_chain_does_not_cover(tmp_path):
    tiny_models.build(tmp_path / "model", "llama", num_hidden_layers=6)
    draft_heads.eagle(tmp_path / "head")
    config = {"method": "eagle3", "model": str(tmp_path / "head"), "num_speculative_tokens": 2}
    with LLM(str(tmp_path / "model"), speculative_config=config, **SIZES) as llm:
        draft, found = llm.core.executor.runner.draft, []
        eager = draft.draft

        def noted(drafted, rows):
            graphs = ChainGraphs(draft, rows, (1, 3), max_model_len=128, max_num_seqs=4)
            graphs._captured = dict.fromkeys([(n, k) for n in (1, 2, 4) for k in (1, 3)])
            found.append(graphs.covers(drafted))
            eager(drafted, rows)

        draft.draft = noted
        llm.generate(PROMPTS[:1], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
        assert found[0] is False  # a prompt that it has not seen
        assert all(found[1:])
        found.clear()
        llm.generate(PROMPTS[:1], SamplingParams(temperature=1, seed=1, max_tokens=8, ignore_eos=True))
        assert not any(found)
