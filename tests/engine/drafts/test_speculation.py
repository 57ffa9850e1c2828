"""Speculative decoding changes no answer: on tiny random models, token by token, against the engine without it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from slipstream import LLM, SamplingParams
from slipstream.config.forms import NgramDrafts
from slipstream.core.drafts.proposer import LookUp, Proposal
from slipstream.core.participants.speculation import Speculation
from slipstream.errors import ConfigError
from tests.support import tiny_models

SIZES = dict(
    dtype="float32", device="cpu", max_model_len=128, max_num_seqs=4, max_num_batched_tokens=48, num_threads=1,
    skip_tokenizer_init=True, block_size=4,
)  # fmt: skip
PROMPTS = [
    {"prompt_token_ids": [(7 * i * (j + 1)) % 50 + 3 for i in range(6 + 5 * j)]} for j in range(7)
]
NGRAM = {"method": "ngram", "num_speculative_tokens": 3}
SUFFIX = {"method": "suffix", "num_speculative_tokens": 6}
AUTO = {"method": "suffix"}
SETTINGS = {
    "greedy": SamplingParams(temperature=0, max_tokens=50),
    "drawn": SamplingParams(temperature=0.7, seed=3, max_tokens=40),
    "filtered": SamplingParams(
        temperature=0.4, top_k=9, top_p=0.8, min_p=0.02, seed=4, max_tokens=40
    ),
    "penalised": SamplingParams(
        temperature=0.3,
        seed=5,
        max_tokens=40,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=0.2,
    ),
    "biased": SamplingParams(
        temperature=0.5, seed=5, max_tokens=40, logit_bias={7: 3.0, 9: -2.0}, min_tokens=30
    ),
    "several": SamplingParams(n=3, temperature=0.4, seed=6, max_tokens=30),
    "stopped": SamplingParams(
        temperature=0, max_tokens=50, stop_token_ids=tuple(range(40)), min_tokens=12
    ),
    "log-probabilities": SamplingParams(
        temperature=0, max_tokens=40, logprobs=2, prompt_logprobs=1
    ),
}


class Told(LookUp):
    """Knows the answers, and errs at every fifth token: long accepted runs, and rejections."""

    answers: ClassVar[dict[tuple[int, ...], list[int]]] = {}

    def propose(self, tokens, most):
        for prompt, answer in self.answers.items():
            done = len(tokens) - len(prompt)
            if done >= 0 and [*prompt, *answer[:done]] == list(tokens):
                rest = answer[done : done + most]
                return Proposal(
                    tuple(t if (done + i) % 5 else t + 1 for i, t in enumerate(rest)), 9
                )
        return Proposal()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    tiny_models.write(folder, "llama")
    return folder


def answers(llm, sampling, prompts=PROMPTS):
    return [
        (c.token_ids, c.finish_reason, c.stop_reason)
        for o in llm.generate(prompts, sampling)
        for c in o.outputs
    ]


@pytest.fixture(scope="module")
def plain(path):
    with LLM(str(path), **SIZES) as llm:
        yield {name: llm.generate(PROMPTS, sampling) for name, sampling in SETTINGS.items()}


@pytest.fixture(scope="module", params=[NGRAM, SUFFIX, AUTO], ids=["ngram", "suffix", "auto"])
def speculating(path, request):
    with LLM(str(path), speculative_config=request.param, **SIZES) as llm:
        yield llm


@pytest.mark.parametrize("name", SETTINGS)
def test_answers_are_the_same(plain, speculating, name):
    """Answers that are drawn with a seed are the same, too: drafts draw nothing more."""
    expected, found = plain[name], speculating.generate(PROMPTS, SETTINGS[name])
    for theirs, ours in zip(expected, found, strict=True):
        for a, b in zip(theirs.outputs, ours.outputs, strict=True):
            assert (a.token_ids, a.finish_reason, a.stop_reason) == (
                b.token_ids,
                b.finish_reason,
                b.stop_reason,
            )
            assert 0 <= b.num_accepted <= b.num_drafted
            if a.logprobs is not None:
                assert [p.chosen.token_id for p in a.logprobs] == [
                    p.chosen.token_id for p in b.logprobs
                ]
                for p, q in zip(a.logprobs, b.logprobs, strict=True):
                    assert p.chosen.logprob == pytest.approx(q.chosen.logprob, abs=1e-4)
    stats = speculating.core.stats()
    assert stats.num_free_blocks == stats.num_blocks


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("greedy", {}),
        ("penalised", {}),
        ("several", {}),
        ("greedy", {"num_threads": 2}),  # a step is under way while the next is planned
        ("greedy", {"kernels": "torch"}),
        ("penalised", {"kernels": "reference"}),
        ("greedy", {"enable_prefix_caching": False}),
        ("penalised", {"kv_cache_dtype": "int8"}),
        ("greedy", {"kv_cache_bytes": 61_440, "max_model_len": 96, "enable_prefix_caching": False}),
        ("several", {"max_num_mixed_tokens": 6, "max_num_batched_tokens": 16}),
    ],
    ids=str,
)
def test_long_accepted_runs(path, monkeypatch, name, more):
    """Drafts of which most are right, with all that the engine can do beside: the same answers in fewer steps."""
    sizes, sampling = {**SIZES, **more}, SETTINGS[name]
    with LLM(str(path), **sizes) as llm:
        expected = llm.generate(PROMPTS, sampling)
        assert (llm.core.stats().num_preemptions > 0) == ("kv_cache_bytes" in more)
        num_steps = llm.core.stats().num_steps
    told = {
        tuple(p["prompt_token_ids"]): o.outputs[0].token_ids
        for p, o in zip(PROMPTS, expected, strict=True)
    }
    monkeypatch.setattr(Told, "answers", told)
    monkeypatch.setattr("slipstream.core.participants.speculation.LookUp", Told)
    with LLM(str(path), speculative_config=SUFFIX, **sizes) as llm:
        found = llm.generate(PROMPTS, sampling)
        stats = llm.core.stats()
    for theirs, ours in zip(expected, found, strict=True):
        assert [c.token_ids for c in theirs.outputs] == [c.token_ids for c in ours.outputs]
    assert stats.spec_accepted_tokens > 0.4 * stats.spec_draft_tokens > 0
    assert sum(c.num_accepted for o in found for c in o.outputs) == stats.spec_accepted_tokens
    if sampling.n == 1:
        assert stats.num_steps < 0.8 * num_steps
    assert stats.num_free_blocks == stats.num_blocks


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_moe", "deepseek_v3"])
def test_drafts_change_no_answer_of_other_families(tmp_path, monkeypatch, family):
    """Windows, experts, latents."""
    tiny_models.write(tmp_path, family)
    sampling = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    sizes = {**SIZES, "max_model_len": 64, "max_num_batched_tokens": 80}
    prompts = [p for p in PROMPTS if len(p["prompt_token_ids"]) < 30]
    with LLM(str(tmp_path), **sizes) as llm:
        expected = answers(llm, sampling, prompts)
    told = {tuple(p["prompt_token_ids"]): e[0] for p, e in zip(prompts, expected, strict=True)}
    monkeypatch.setattr(Told, "answers", told)
    monkeypatch.setattr("slipstream.core.participants.speculation.LookUp", Told)
    with LLM(str(tmp_path), speculative_config=NGRAM, **sizes) as llm:
        assert answers(llm, sampling, prompts) == expected
        assert llm.core.stats().spec_accepted_tokens > 0


def test_an_encoder_decoder(tmp_path):
    tiny_models.build_t5(tmp_path, "t5")
    sampling = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    sizes = {**SIZES, "max_model_len": 64, "max_num_batched_tokens": 80}
    prompts = PROMPTS[:4]
    with LLM(str(tmp_path), **sizes) as llm:
        expected = answers(llm, sampling, prompts)
    with LLM(str(tmp_path), speculative_config=SUFFIX, **sizes) as llm:
        assert answers(llm, sampling, prompts) == expected
        assert llm.core.stats().spec_accepted_tokens > 0


# --- A draft model --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def draft_path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("draft")
    tiny_models.write(folder, "llama", seed=1, num_hidden_layers=1)
    return folder


@pytest.fixture(scope="module")
def undrafted():
    """Answers without drafts, their number of steps and the bytes of a block, kept for each setting."""
    return {}


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("greedy", {}),
        ("drawn", {}),
        ("penalised", {"kernels": "torch"}),
        ("several", {}),
        ("biased", {"num_threads": 2}),
        ("greedy", {"kv_cache_bytes": 72_000, "max_model_len": 96, "enable_prefix_caching": False}),
        ("several", {"max_num_mixed_tokens": 6, "max_num_batched_tokens": 16}),
    ],
    ids=str,
)
@pytest.mark.parametrize("same", [True, False])
def test_a_draft_model(path, draft_path, undrafted, name, more, same):
    """The model itself, whose drafts are all right; and another, whose drafts are mostly wrong. The answers are the same."""
    sizes, sampling = {**SIZES, **more}, SETTINGS[name]
    config = {
        "method": "draft",
        "model": str(path if same else draft_path),
        "num_speculative_tokens": 4,
    }
    if (key := f"{name} {more}") not in undrafted:
        with LLM(str(path), **sizes) as llm:
            undrafted[key] = (
                answers(llm, sampling),
                llm.core.stats().num_steps,
                llm.ledger.block_bytes,
            )
    expected, num_steps, one_block = undrafted[key]
    with LLM(str(path), speculative_config=config, **sizes) as llm:
        assert answers(llm, sampling) == expected
        assert answers(llm, sampling) == expected  # behind prefix hits
        stats = llm.core.stats()
        assert llm.ledger.block_bytes == (2 if same else 1.5) * one_block
    assert stats.num_free_blocks == stats.num_blocks
    if same:
        assert stats.spec_accepted_tokens == stats.spec_draft_tokens
        assert stats.num_steps < 0.8 * 2 * num_steps
    assert stats.spec_draft_tokens > 0


def test_a_draft_model_computes_nothing_twice(path):
    """The draft model sees each token once: the prompt, then the tokens verified since its last proposal."""
    config = {"method": "draft", "model": str(path), "num_speculative_tokens": 3}
    with LLM(str(path), speculative_config=config, **SIZES) as llm:
        draft, seen = llm.core.executor.runner.draft, []
        step = draft.step

        def noted(shares, rows, **more):
            seen.extend((s.num_computed_tokens, s.num_tokens) for s in shares)
            step(shares, rows, **more)

        draft.step = noted
        llm.generate(PROMPTS[1:2], SamplingParams(temperature=0, max_tokens=10, ignore_eos=True))
    # After the first token, of which the target's step made one: 11 tokens and the prompt's answer, two drafts more, and so on.
    assert seen == [(0, 12), (12, 1), (13, 1), (14, 2), (16, 1), (17, 1)]


def test_a_draft_model_forgets_wrong_drafts(path, draft_path, monkeypatch):
    """Steps without drafts may follow wrong ones. What it proposes then is what it proposes with nothing kept."""
    choose = Speculation.choose
    plainly = lambda self, running: (
        bool([r for r in running if len(r.token_ids) % 7 == 0]) and choose(self, running)
    )
    monkeypatch.setattr(Speculation, "choose", plainly)
    config = {"method": "draft", "model": str(draft_path), "num_speculative_tokens": 4}
    found = []
    for kept in (True, False):
        with LLM(str(path), speculative_config=config, enable_prefix_caching=False, **SIZES) as llm:
            draft, drafts = llm.core.executor.runner.draft, []
            write = draft.write_drafts

            def noted(plan, rows, write=write, draft=draft, drafts=drafts, kept=kept):
                for row in rows.rows.values():
                    row.num_drafted = row.num_drafted if kept else 0
                drafted = write(plan, rows)
                drafts.append(draft.tokens_of(drafted, rows).tolist() if drafted else None)
                return drafted

            draft.write_drafts = noted
            llm.generate(PROMPTS[:1], SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
            found.append(drafts)
    assert len([d for d in found[0] if d]) > 5
    assert None in found[0]
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 300}, "has 300 tokens and the model"),
        ({"max_position_embeddings": 64}, "takes up to 64 tokens"),
        (
            {
                "model_type": "gemma2",
                "head_dim": 16,
                "sliding_window": 6,
                "query_pre_attn_scalar": 20,
            },
            "sliding windows",
        ),
    ],
    ids=str,
)
def test_a_draft_model_that_does_not_fit(path, tmp_path, changes, message):
    family = changes.get("model_type", "llama")
    tiny_models.write(tmp_path, family, **{k: v for k, v in changes.items() if k != "model_type"})
    with pytest.raises(ConfigError, match=message) as caught:
        LLM(str(path), speculative_model=str(tmp_path), **SIZES)
    assert caught.value.field == "speculative_config"


# --- The settings ---------------------------------------------------------------------------------------------------------


def test_the_short_form(path):
    with LLM(str(path), speculative_model="ngram", num_speculative_tokens=3, **SIZES) as llm:
        assert llm.config.speculation == NgramDrafts(num_speculative_tokens=3)


# --- The distribution (by itself: tests/worker/draft/test_speculation_distribution.py) ---


NUM_DRAWN = 1000


def drawn(folder, seed, config=None):
    """How often which first four tokens were drawn, and the engine's figures."""
    prompt = [i * i % 11 % 10 for i in range(40)]
    sampling = SamplingParams(
        temperature=0.9, top_p=0.95, min_p=0.02, max_tokens=6, ignore_eos=True
    )
    sizes = {**SIZES, "max_num_seqs": 64, "max_num_batched_tokens": 512, "seed": seed}
    with LLM(folder, speculative_config=config, **sizes) as llm:
        found = llm.generate([{"prompt_token_ids": prompt}] * NUM_DRAWN, sampling)
        return Counter(tuple(answer.outputs[0].token_ids[:4]) for answer in found), llm.core.stats()


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Two models with a vocabulary of ten tokens, and what the first draws without drafts."""
    folders = [str(tmp_path_factory.mktemp("small")) for _ in range(2)]
    for seed, folder in enumerate(folders):
        tiny_models.write(
            Path(folder), "llama", seed=seed, vocab_size=10, bos_token_id=0, eos_token_id=1
        )
    return folders, drawn(folders[0], seed=1)[0]


@pytest.mark.parametrize(
    "config",
    [NGRAM, SUFFIX, {"method": "draft", "num_speculative_tokens": 2}],
    ids=lambda c: c["method"],
)
def test_engines_with_and_without_draw_alike(small, config):
    """Two samples of answers, drawn with other random numbers: chi-squared."""
    folders, without = small
    if config["method"] == "draft":
        config = {**config, "model": folders[1]}
    found, stats = drawn(folders[0], 2, config)
    assert 0 < stats.spec_accepted_tokens < stats.spec_draft_tokens
    counts, total = (without, found), NUM_DRAWN
    both = counts[0] + counts[1]
    common = [answer for answer, n in both.items() if n >= 10]
    pairs = [(counts[0][a], counts[1][a]) for a in common]
    pairs.append((total - sum(a for a, _ in pairs), total - sum(b for _, b in pairs)))
    statistic = sum((a - b) ** 2 / (a + b) for a, b in pairs if a + b)
    half = torch.tensor([(len(pairs) - 1) / 2, statistic / 2], dtype=torch.float64)
    assert float(torch.special.gammaincc(*half)) > 1e-3
