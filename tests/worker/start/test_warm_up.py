"""Steps before the first request: each way to sample is run, and nothing of them stays."""

from __future__ import annotations

import pytest

from slipstream import LLM, SamplingParams
from slipstream.worker.start import warm_up as module
from slipstream.worker.start.warm_up import warm_up
from tests.support import draft_heads, tiny_models

pytestmark = pytest.mark.usefixtures("by_torch")

PROMPT = {"prompt_token_ids": [7, 8, 9, 10, 11, 12]}
SIZES = dict(
    device="cpu",
    dtype="float32",
    skip_tokenizer_init=True,
    block_size=4,
    max_model_len=32,
    max_num_seqs=4,
)


@pytest.mark.parametrize(
    ("family", "method"),
    [
        ("llama", None),
        ("gemma3_text", None),
        ("mixtral", None),
        ("llama", "draft"),
        ("mixtral", "ngram"),
    ],
)
def test_warm_up_leaves_nothing_behind(tmp_path, monkeypatch, family, method):
    tiny_models.write(tmp_path, family)
    config = {"method": method, "num_speculative_tokens": 2} if method else None
    if method == "draft":
        config["model"] = str(tmp_path)
    sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=2)
    with LLM(str(tmp_path), num_threads=1, speculative_config=config, **SIZES) as llm:
        runner = llm.core.executor.runner
        before = llm.generate([PROMPT], sampling)[0].outputs[0]
        load = llm.core.executor.expert_load()
        launched = []
        monkeypatch.setattr(type(runner.platform), "is_asynchronous", True)
        launch = type(runner).launch
        monkeypatch.setattr(
            type(runner), "launch", lambda self, plan: launched.append(plan) or launch(self, plan)
        )
        warm_up(runner)
        monkeypatch.undo()
        assert {len(plan.scheduled) for plan in launched} == {
            1,
            3,
        }  # sixteen are more than this engine takes
        assert len(launched) == 2 * (4 if method else 2) * len(module.SAMPLINGS)
        assert not runner.rows.rows
        assert all(not any(counts) for _, counts in llm.core.executor.expert_load()) or not load
        after = llm.generate([PROMPT], sampling)[0].outputs[0]
        assert (before.token_ids, before.logprobs) == (after.token_ids, after.logprobs)


@pytest.mark.parametrize("method", ["eagle3", "dflash", "medusa"])
def test_heads_draft_before_the_first_request(tmp_path, monkeypatch, method):
    tiny_models.write(tmp_path / "model", "llama", num_hidden_layers=6)
    draft_heads.BY_METHOD[method](tmp_path / "head")
    config = {"method": method, "model": str(tmp_path / "head"), "num_speculative_tokens": 3}
    sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(str(tmp_path / "model"), num_threads=1, speculative_config=config, **SIZES) as llm:
        runner = llm.core.executor.runner
        before = llm.generate([PROMPT], sampling)[0].outputs[0].token_ids
        drafted, draft = [], runner.draft.draft
        runner.draft.draft = lambda shares, rows: drafted.append(len(shares)) or draft(shares, rows)
        monkeypatch.setattr(type(runner.platform), "is_asynchronous", True)
        warm_up(runner)
        monkeypatch.undo()
        assert sorted(set(drafted)) == [1, 3]
        assert len(drafted) == 2 * 2 * len(module.SAMPLINGS)
        assert not runner.rows.rows
        assert llm.generate([PROMPT], sampling)[0].outputs[0].token_ids == before


def test_nothing_is_run_where_nothing_is_compiled(tmp_path, monkeypatch):
    tiny_models.write(tmp_path, "llama")
    with LLM(str(tmp_path), num_threads=1, **SIZES) as llm:
        runner = llm.core.executor.runner
        monkeypatch.setattr(
            type(runner), "launch", lambda *given: pytest.fail("a step was launched")
        )
        warm_up(runner)
