"""The time of steps with drafts is measured on steps like the engine's."""

from __future__ import annotations

from itertools import pairwise

import pytest

from slipstream import LLM, SamplingParams
from slipstream.messages.steps import FROM_MODEL
from slipstream.worker.draft.costs import NUM_TIMED, measure_draft_costs
from slipstream.worker.in_flight import InFlightStep
from tests.engine.drafts.test_speculation import PROMPTS, SIZES
from tests.support import draft_heads, tiny_models


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    tiny_models.write(folder / "model", "llama", num_hidden_layers=6)
    draft_heads.BY_METHOD["eagle3"](folder / "head")
    return str(folder / "model"), str(folder / "head")


def engine(folders, method, num_drafts, **settings):
    model, head = folders
    config = {
        "method": method,
        "num_speculative_tokens": num_drafts,
        **({"model": head} if method == "eagle3" else {}),
    }
    return LLM(
        model,
        speculative_config=config,
        **{**SIZES, "kernels": "torch", "max_num_seqs": 6, **settings},
    )


@pytest.mark.parametrize(
    ("method", "settings"), [("eagle3", {}), ("eagle3", {"max_model_len": 40}), ("ngram", {})]
)
def test_sizes_and_steps(folders, method, settings, monkeypatch):
    """Each step begins behind what the one before has drawn, has the drafts, and leaves the engine as it was."""
    greedy, steps = SamplingParams(temperature=0, max_tokens=20), []
    with engine(folders, method, "auto", **settings) as llm:
        before = [answer.outputs[0].token_ids for answer in llm.generate(PROMPTS[:3], greedy)]
        runner, result = llm.core.executor.runner, InFlightStep.result

        def noted(step):
            found = result(step)
            steps.append((step.plan.scheduled, [len(tokens) for tokens in found.tokens_of_each]))
            return found

        with monkeypatch.context() as patch:
            patch.setattr(InFlightStep, "result", noted)
            times = measure_draft_costs(runner, llm.core.ledger.num_blocks)
        assert not runner.rows.rows
        llm.reset_prefix_cache()  # its blocks were written
        assert [
            answer.outputs[0].token_ids for answer in llm.generate(PROMPTS[:3], greedy)
        ] == before
    longest = 6 if settings else 9  # six runs of eight drafts do not fit into 40 tokens
    sizes = {
        1: [n for n in (1, 2, 3, 4, 6, 9) if n <= longest],
        4: [4, 8, 12, 16, 24, 36],
        6: [6, 12, 18, 24, 36],
    }
    assert [(t.num_seqs, t.num_tokens) for t in times] == [
        (n, m) for n, of in sizes.items() for m in of if m // n <= longest
    ]
    assert all(t.seconds > 0 for t in times)
    assert len(steps) == len(times) * (2 + NUM_TIMED)
    draft = FROM_MODEL if method == "eagle3" else 1
    for i, size in enumerate(times):
        own = steps[i * (2 + NUM_TIMED) : (i + 1) * (2 + NUM_TIMED)]
        num_drafts = size.num_tokens // size.num_seqs - 1
        assert all(s.num_tokens == s.num_sampled == 1 for s in own[0][0])
        for (scheduled, drawn), (following, _) in pairwise(own):
            assert len(following) == size.num_seqs
            assert [s.num_computed_tokens for s in following] == [
                s.num_computed_tokens + n for s, n in zip(scheduled, drawn, strict=True)
            ]
            assert all(
                s.drafts == (draft,) * num_drafts
                and s.num_sampled == s.num_tokens == 1 + num_drafts
                for s in following
            )


def test_a_fixed_number_of_drafts_is_not_measured(folders):
    with engine(folders, "eagle3", 2) as llm:
        assert measure_draft_costs(llm.core.executor.runner, llm.core.ledger.num_blocks) == []
