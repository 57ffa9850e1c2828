"""Several features in one batch: each answer equals the one that its request has alone."""

from __future__ import annotations

import pytest

from slipstream import LLM, BeamSearchParams, SamplingParams, StructuredOutputsParams
from slipstream.core.participants.beams import Beams
from slipstream.core.participants.forced_tokens import ForcedTokens
from slipstream.engine.listeners import MaskingGrammars, Searching
from slipstream.worker.start import probe_steps
from tests.support import tiny_models

SIZES = dict(
    device="cpu",
    dtype="float32",
    max_model_len=96,
    max_num_seqs=16,
    block_size=4,
    kv_cache_bytes=2**20,
)
REGEX = StructuredOutputsParams(regex="(a|b|hello|the){4,9}")
PROMPT = "the other in the hour the other in the hour"
BATCH = [
    SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=12, structured_outputs=REGEX),
    SamplingParams(
        n=2, temperature=0.8, seed=5, max_tokens=20, structured_outputs=REGEX, bad_words=["hello"]
    ),
    SamplingParams(n=3, temperature=0.7, seed=3, max_tokens=20, ignore_eos=True),
    SamplingParams(
        temperature=0, max_tokens=24, ignore_eos=True, allowed_token_ids=[20, 21, 22, 40]
    ),
    SamplingParams(
        temperature=0,
        max_tokens=24,
        min_tokens=9,
        repetition_penalty=1.3,
        stop_token_ids=list(range(40)),
    ),
    SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=2, prompt_logprobs=1),
    SamplingParams(
        temperature=0,
        max_tokens=20,
        logit_bias={20: 100.0, 21: 100.0},
        ignore_eos=True,
        bad_words=["a b", "b"],
    ),
]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("together")
    tiny_models.write_with_tokenizer(folder)
    return folder


def prompts(count):
    return [f"{'abc'[i % 3]} {PROMPT}" for i in range(count)]


def answers(outputs):
    return [[(c.token_ids, c.finish_reason, c.stop_reason) for c in o.outputs] for o in outputs]


@pytest.fixture(scope="module")
def alone(path):
    with LLM(str(path), num_threads=1, **SIZES) as llm:
        made = [
            llm.generate(p, s, progress=False)[0]
            for p, s in zip(prompts(len(BATCH)), BATCH, strict=True)
        ]
    return answers(made), made[6]


NGRAM = {"method": "ngram", "num_speculative_tokens": 3}
MODES = {
    "ngram": {"speculative_config": NGRAM},
    "suffix": {"speculative_config": {"method": "suffix", "num_speculative_tokens": 5}},
    "paced": {
        "speculative_config": {"method": "suffix"},
        "target_itl_ms": 5.0,
        "max_num_batched_tokens": 48,
    },
    "draft": {"speculative_config": {"method": "draft", "num_speculative_tokens": 3}},
    "few blocks": {"speculative_config": NGRAM, "kv_cache_bytes": 50 * 2**11},
}


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("mode", MODES)
def test_one_batch_answers_as_each_alone(path, alone, mode, num_threads):
    settings = {**SIZES, **MODES[mode], "num_threads": num_threads}
    if mode == "draft":
        settings["speculative_config"] = {**settings["speculative_config"], "model": str(path)}
    with LLM(str(path), **settings) as llm:
        for _ in range(2):  # the second with cached prefixes and the first's answers to guess from
            outputs = llm.generate(prompts(len(BATCH)), BATCH, progress=False)
            assert answers(outputs) == alone[0]
        assert mode == "paced" or llm.core.stats().spec_accepted_tokens > 0
        given, expected = (
            [x.chosen.logprob for x in o.outputs[0].logprobs] for o in (outputs[6], alone[1])
        )
        assert given == pytest.approx(expected, abs=1e-4)
        stats = llm.core.stats()
        assert (stats.num_running, stats.num_waiting, stats.num_free_blocks) == (
            0,
            0,
            stats.num_blocks,
        )


@pytest.mark.parametrize(
    ("config", "rows"), [(None, 4), (NGRAM, 16), ({"method": "suffix"}, 48)], ids=str
)
def test_memory_is_kept_for_all_that_a_step_samples(path, monkeypatch, config, rows):
    """Room is kept for the logits of all sequences and their drafts, if one step can have so many."""
    measured, dummy = [], probe_steps.dummy_sampling
    noted = lambda num_rows, device: measured.append(num_rows) or dummy(num_rows, device)
    monkeypatch.setattr(probe_steps, "dummy_sampling", noted)
    sizes = {**SIZES, "max_num_seqs": 4, "max_num_batched_tokens": 48, "speculative_config": config}
    with LLM(str(path), kernels="torch", num_threads=1, **sizes) as llm:
        assert max(measured) == rows
        launch, sampled = llm.core.executor.launch, []
        llm.core.executor.launch = lambda plan: (
            sampled.append(sum(s.num_sampled for s in plan.scheduled)) or launch(plan)
        )
        llm.generate(prompts(4), BATCH[0], progress=False)
    assert (4 if config is None else 5) <= max(sampled) <= rows


def test_a_draft_model_beside_steps_under_way(path):
    """A step of greedy requests that check drafts is still under way when its launch returns."""
    prompt = {"prompt_token_ids": [5, 9, 30, 7]}
    greedy = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    with LLM(str(path), **SIZES, num_threads=2) as llm:
        expected = llm.generate(prompt, greedy, progress=False)[0].outputs[0].token_ids
    drafts = {"method": "draft", "model": str(path), "num_speculative_tokens": 4}
    with LLM(str(path), **SIZES, num_threads=2, speculative_config=drafts) as llm:
        for _ in range(20):
            assert llm.generate(prompt, greedy, progress=False)[0].outputs[0].token_ids == expected


def test_a_feature_joins_the_loop_with_its_first_request_and_in_the_features_order(path):
    with LLM(path, **SIZES) as llm:
        llm.generate(prompts(3), BATCH[0], progress=False)
        assert llm.core._listeners == ()
        assert llm.core.scheduler.participants == []
        llm.beam_search(prompts(1), BeamSearchParams(beam_width=2, max_tokens=3))
        llm.generate(prompts(1), BATCH[1], progress=False)
        llm.generate(prompts(1), BATCH[1], progress=False)
        assert [type(x) for x in llm.core._listeners] == [MaskingGrammars, Searching]
        assert [type(x) for x in llm.core.scheduler.participants] == [Beams, ForcedTokens]
