"""The chain of samplers through the whole engine: both runners, seeds, choices, preemption, drafts, functions of requests."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch

from slipstream import LLM, SamplingParams
from slipstream.errors import RequestError
from tests.support import naive_samplers, processors
from tests.worker.draft.test_speculation_distribution import chi_squared_p

SETTINGS = dict(
    dtype="float32",
    device="cpu",
    num_threads=1,
    max_model_len=128,
    max_num_seqs=8,
    max_num_batched_tokens=64,
)
PROMPTS = [
    {"prompt_token_ids": ids}
    for ids in ([5, 9, 200, 31, 7], list(range(3, 43)), [17, 4, 17, 4, 17])
]
WAYS = {
    "typical_p": {"typical_p": 0.7},
    "top_n_sigma": {"top_n_sigma": 1.0},
    "xtc": {"xtc_probability": 0.5, "xtc_threshold": 0.01},
    "dry": {"dry_multiplier": 2.0, "dry_breaker_token_ids": (31,)},
    "dry greedy": {"dry_multiplier": 2.0, "temperature": 0.0},
    "no_repeat_ngram": {"no_repeat_ngram_size": 1, "temperature": 0.0},
    "mirostat": {"mirostat_mode": 2, "mirostat_tau": 7.0, "mirostat_eta": 1.0},
    "samplers": {"samplers": ["xtc", "top_k", "temperature"], "xtc_probability": 0.5, "top_k": 20},
    "processors": {"logits_processors": [processors.no_repeats], "logit_bias": {7: 4.0}},
    "with bias": {
        "typical_p": 0.5,
        "logit_bias": {7: 100.0},
        "bad_words_token_ids": [[7, 7]],
        "min_tokens": 5,
    },
}


@pytest.fixture(scope="module")
def folder(tiny_model):
    return str(tiny_model)


def answers(llm, **values):
    sampling = SamplingParams(max_tokens=12, seed=5, ignore_eos=True, **values)
    return [
        [c.token_ids for c in o.outputs] for o in llm.generate(PROMPTS, sampling, progress=False)
    ]


@pytest.fixture(scope="module")
def expected(folder):
    """Each way's answers, one prompt after another."""
    with LLM(folder, **SETTINGS) as llm:
        assert type(llm.core.executor.runner.loaded).__name__ == "HostLoaded"
        found = {}
        for name, values in WAYS.items():
            sampling = SamplingParams(max_tokens=12, seed=5, ignore_eos=True, **values)
            found[name] = [
                [llm.generate(p, sampling, progress=False)[0].outputs[0].token_ids] for p in PROMPTS
            ]
        return found


def test_the_ways_differ(expected):
    assert (
        len({str(tokens) for tokens in expected.values()}) >= len(WAYS) - 1
    )  # random weights repeat little: DRY does nothing
    for (tokens,) in expected["no_repeat_ngram"]:
        assert len(set(tokens)) == 12
    assert all(
        7 in tokens and (7, 7) not in itertools.pairwise(tokens)
        for (tokens,) in expected["with bias"]
    )


@pytest.mark.parametrize("name", WAYS)
def test_together_and_by_torch(folder, expected, name, request):
    with LLM(folder, **SETTINGS) as llm:
        assert answers(llm, **WAYS[name]) == expected[name]
    request.getfixturevalue("by_torch")
    with LLM(folder, **SETTINGS) as llm:
        assert answers(llm, **WAYS[name]) == expected[name]


@pytest.mark.parametrize("name", WAYS)
def test_preemption_changes_nothing(folder, expected, name):
    """Nine blocks of sixteen tokens for four requests that need five each."""
    with LLM(
        folder,
        **SETTINGS,
        block_size=16,
        kv_cache_bytes=10 * block_bytes(folder),
        enable_prefix_caching=False,
    ) as llm:
        together = [{"prompt_token_ids": list(range(3, 43))}] * 4
        sampling = SamplingParams(max_tokens=30, seed=5, ignore_eos=True, **WAYS[name])
        found = [o.outputs[0].token_ids for o in llm.generate(together, sampling, progress=False)]
        assert llm.stats().num_preemptions > 0
        assert llm.stats().num_free_blocks == llm.stats().num_blocks
    assert all(tokens[:12] == expected[name][1][0] for tokens in found)
    assert all(tokens == found[0] for tokens in found)


def block_bytes(folder) -> int:
    with LLM(folder, **SETTINGS, block_size=16) as llm:
        return llm.ledger.kv_bytes // llm.ledger.num_blocks


@pytest.mark.parametrize("name", WAYS)
def test_drafts_change_nothing(folder, expected, name):
    for method in ("ngram", "suffix"):
        with LLM(
            folder, **SETTINGS, speculative_config={"method": method, "num_speculative_tokens": 3}
        ) as llm:
            assert answers(llm, **WAYS[name]) == expected[name]


def test_choices_have_a_state_each(folder):
    with LLM(folder, **SETTINGS) as llm:
        sampling = SamplingParams(max_tokens=6, seed=5, n=4, ignore_eos=True, **WAYS["mirostat"])
        (answer,) = llm.generate(PROMPTS[0], sampling, progress=False)
        alone = []
        for i in range(4):
            one = SamplingParams(max_tokens=6, seed=5 + i, ignore_eos=True, **WAYS["mirostat"])
            alone.append(llm.generate(PROMPTS[0], one, progress=False)[0].outputs[0].token_ids)
        assert [c.token_ids for c in answer.outputs] == alone
        assert len({tuple(tokens) for tokens in alone}) > 1


def test_mirostat_as_plain_python(folder):
    """Chi-squared over answers of two tokens: the state after the first decides on the second."""
    from transformers import AutoModelForCausalLM

    hf = AutoModelForCausalLM.from_pretrained(folder, torch_dtype=torch.float32)
    prompt, total = [5, 9, 200], 600
    # Few tokens, so that answers repeat, of which the likeliest takes much.
    allowed, bias = [7, 8, 9, 10], {7: 2.0, 8: 1.0, 9: -1.0}
    values = dict(mirostat_mode=2, mirostat_tau=1.0, mirostat_eta=0.9, temperature=4.0)

    def logits(tokens):
        with torch.inference_mode():
            row = hf(torch.tensor([tokens])).logits[0, -1].tolist()
        return [row[t] + bias.get(t, 0.0) for t in allowed]

    p, shares = SamplingParams(**values), {}
    for first, (chance, mu) in naive_samplers.mirostat(logits(prompt), 2 * 1.0, p).items():
        for second, (other, _) in naive_samplers.mirostat(
            logits([*prompt, allowed[first]]), mu, p
        ).items():
            shares[allowed[first], allowed[second]] = chance * other
    with LLM(folder, **{**SETTINGS, "max_num_seqs": 64}) as llm:
        sampling = [
            SamplingParams(
                max_tokens=2,
                seed=i,
                ignore_eos=True,
                allowed_token_ids=allowed,
                logit_bias=bias,
                **values,
            )
            for i in range(total)
        ]
        outputs = llm.generate([{"prompt_token_ids": prompt}] * total, sampling, progress=False)
    found = Counter(tuple(o.outputs[0].token_ids) for o in outputs)
    assert len(shares) >= 4
    assert chi_squared_p(found, shares) > 1e-3


def test_functions_of_logits_change_the_answers(folder):
    with LLM(folder, **SETTINGS) as llm:
        seven = answers(
            llm, logits_processors=["tests.support.processors:only_seven"], temperature=0.0
        )
        assert seven == [[[7] * 12]] * 3
        lengths = []

        def seen(prompt_ids, past_ids, logits):
            lengths.append((len(prompt_ids), len(past_ids), logits.shape))
            return logits

        plain = answers(llm, temperature=0.0)
        assert answers(llm, logits_processors=[seen], temperature=0.0) == plain
        assert {(5, k, (288,)) for k in range(12)} <= set(lengths)
        both = [
            SamplingParams(logits_processors=[processors.broken]),
            SamplingParams(max_tokens=3, temperature=0),
        ]
        with pytest.raises(RequestError, match="broken: ValueError: it does not work") as caught:
            llm.generate(PROMPTS[:2], both, progress=False)
        assert caught.value.field == "logits_processors"
        assert not llm.core.has_work
        assert answers(llm, temperature=0.0) == plain  # the engine goes on
        with pytest.raises(RequestError, match="can't be imported"):
            llm.generate(
                "a",
                SamplingParams(logits_processors=["tests.support.processors:nothing"]),
                progress=False,
            )
        with pytest.raises(RequestError, match="returned"):
            llm.generate(
                "a",
                SamplingParams(logits_processors=[lambda a, b, logits: logits[:3]]),
                progress=False,
            )


def test_breakers_are_tokens_that_hold_the_text(folder):
    with LLM(folder, **SETTINGS) as llm:
        tokenizer = llm.get_tokenizer()
        request = llm._input.prepare(
            "hello", SamplingParams(dry_multiplier=1.0, dry_sequence_breakers=["l"])
        )
        ids = request.engine_requests[0].sampling.dry_breaker_token_ids
        assert ids
        assert all(b"l" in tokenizer.token_bytes(i) for i in ids)
        plain = (
            llm._input.prepare("hello", SamplingParams(dry_sequence_breakers=["l"]))
            .engine_requests[0]
            .sampling
        )
        assert not plain.dry_breaker_token_ids  # DRY is off


@pytest.mark.parametrize("min_tokens", [0, 1, 3])
def test_answer_ends_right_after_min_tokens_when_the_end_is_likeliest(folder, min_tokens):
    with LLM(folder, **SETTINGS) as llm:
        end = llm.get_tokenizer().eos_token_ids[0]
        sampling = SamplingParams(
            temperature=0, max_tokens=8, min_tokens=min_tokens, logit_bias={end: 100.0}
        )
        (answer,) = llm.generate("hello", sampling, progress=False)
    tokens = [token for token in answer.outputs[0].token_ids if token != end]
    assert len(tokens) == min_tokens
    assert answer.outputs[0].finish_reason == "stop"
