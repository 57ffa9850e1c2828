"""Beam search against transformers, in float32, on tiny random models."""

from __future__ import annotations

import functools
import itertools
import random

import numpy as np
import pytest
import torch

from slipstream import LLM, BeamSearchParams
from slipstream.engine.beams import BeamSearches
from slipstream.errors import RequestError
from slipstream.messages.beams import BeamsRequest, BeamStep, LikeliestTokens
from tests.support import adapters, tiny_models

PROMPTS = [[5, 9, 200, 31, 7], list(range(3, 43)), [17, 4]]
SETTINGS = dict(
    dtype="float32",
    device="cpu",
    num_threads=1,
    max_model_len=128,
    max_num_seqs=16,
    max_num_batched_tokens=64,
)
WAYS = list(itertools.product((2, 3, 5), (0.0, 1.0, -0.7, 2.5), (True, False, "never")))  # 36
FAMILIES = ("llama", "gpt2", "gpt_neox", "qwen3", "gemma2", "deepseek_v2")


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request, tmp_path_factory):
    """(ours, transformers' model, the ways to try with it)"""
    folder = tmp_path_factory.mktemp("beams")
    hf = tiny_models.build_with_tokenizer(folder, request.param, initializer_range=0.1)
    at = FAMILIES.index(request.param)
    return LLM(str(folder), **SETTINGS), hf, WAYS[6 * at : 6 * at + 6]


@torch.inference_mode()
def transformers_beams(hf, prompt, ends, width, penalty, early, max_tokens):
    out = hf.generate(
        input_ids=torch.tensor([prompt]),
        num_beams=width,
        num_return_sequences=width,
        length_penalty=penalty,
        early_stopping=early,
        max_new_tokens=max_tokens,
        do_sample=False,
        eos_token_id=ends or None,
        pad_token_id=287,
        return_dict_in_generate=True,
        output_scores=True,
    )
    found = []
    for tokens in out.sequences.tolist():
        own = tokens[len(prompt) :]
        stop = next((i for i, t in enumerate(own) if t in ends), None)
        found.append(
            prompt + own[:stop]
        )  # what does not stop has all of its tokens, and no padding
    return found, out.sequences_scores.tolist()


def test_beams_equal_transformers(pair):
    llm, hf, ways = pair
    ends = adapters.greedy(hf, PROMPTS[0], 4)[2:]  # tokens that likely answers end with
    llm._input.eos_token_ids = tuple(ends)
    lengths = set()
    for width, penalty, early in ways:
        params = BeamSearchParams(
            beam_width=width, max_tokens=9, length_penalty=penalty, early_stopping=early
        )
        outputs = llm.beam_search([{"prompt_token_ids": p} for p in PROMPTS], params)
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            sequences, scores = transformers_beams(hf, prompt, ends, width, penalty, early, 9)
            assert [s.tokens for s in output.sequences] == sequences, (width, penalty, early)
            assert [s.score for s in output.sequences] == pytest.approx(scores, rel=1e-4)
            lengths |= {len(s) - len(prompt) for s in sequences}
    assert not llm.core.has_work
    assert len(lengths) > 1  # some end early


def test_ignore_eos_and_text(tmp_path):
    hf = tiny_models.build_with_tokenizer(tmp_path)
    llm = LLM(str(tmp_path), **SETTINGS)
    params = BeamSearchParams(beam_width=4, max_tokens=6, ignore_eos=True)
    (output,) = llm.beam_search("hello", params)
    sequences, _ = transformers_beams(hf, output.prompt_token_ids, [], 4, 1.0, False, 6)
    assert [s.tokens for s in output.sequences] == sequences
    assert {s.finish_reason for s in output.sequences} == {"length"}
    best = output.sequences[0]
    assert best.text == llm.get_tokenizer().decode(best.tokens[len(output.prompt_token_ids) :])
    assert output.sequences[0].score == best.cum_logprob / 6


def test_a_beam_of_one_is_greedy(tmp_path):
    from slipstream import SamplingParams

    tiny_models.write_with_tokenizer(tmp_path)
    llm = LLM(str(tmp_path), **SETTINGS)
    (beam,) = llm.beam_search(
        "hello", BeamSearchParams(beam_width=1, max_tokens=6, ignore_eos=True)
    )
    (greedy,) = llm.generate(
        "hello", SamplingParams(temperature=0, max_tokens=6, ignore_eos=True), progress=False
    )
    assert beam.sequences[0].tokens == greedy.prompt_token_ids + greedy.outputs[0].token_ids


def took(searches, *found, num_cached=0):
    """Results of searches for a step (or several) in which beams, given by name, have found their
    likeliest next tokens."""
    outputs = []
    for of_each in found:
        tokens, values = zip(*[zip(*pairs, strict=True) for pairs in of_each.values()], strict=True)
        arrays = np.array(tokens, np.int64), np.array(values, np.float32)
        outputs.append(LikeliestTokens([*of_each], [num_cached] * len(of_each), *arrays))
    return searches.take(outputs)


def test_the_search_by_hand():
    """Two beams over three tokens, of which 0 ends."""
    searches = BeamSearches()
    params = BeamSearchParams(beam_width=2, max_tokens=3, length_penalty=0.0)
    first = searches.begin(
        BeamsRequest(request_id="s", prompt_token_ids=(5, 6), params=params, eos_token_ids=(0,))
    ).request_id
    taken = took(searches, {first: ((1, -0.5), (2, -1.5), (0, -2.0))})
    (second,) = taken.new
    assert taken.steps == [BeamStep(first, first, 1), BeamStep(second.request_id, first, 2)]
    assert not taken.outputs  # the end was third of three, and two count
    taken = took(
        searches,
        {
            first: ((0, -0.1), (1, -3.0), (2, -4.0)),
            second.request_id: ((0, -0.2), (2, -3.0), (1, -4.0)),
        },
    )
    (output,) = taken.outputs  # the best open beam, at -3.5, can't beat -1.7
    assert [(a.token_ids, round(a.score, 3)) for a in output.answers] == [
        ((1,), -0.6),
        ((2,), -1.7),
    ]
    assert sorted(taken.ended) == sorted([first, second.request_id])


def test_a_search_ends_in_a_step_in_which_no_beam_does():
    """The search has its answers, and a step brings the open beams below them."""
    searches, params = BeamSearches(), BeamSearchParams(beam_width=2, max_tokens=9)
    first = searches.begin(
        BeamsRequest(request_id="s", prompt_token_ids=(5, 6), params=params, eos_token_ids=(0,))
    ).request_id
    (second,) = took(searches, {first: ((1, -0.1), (0, -0.5), (2, -0.9))}).new
    others = {second.request_id: ((1, -9.0), (2, -9.0), (3, -9.0))}
    assert not took(searches, {first: ((1, -0.2), (0, -0.9), (2, -9.0)), **others}).outputs
    (output,) = took(searches, {first: ((1, -2.5), (2, -2.9), (3, -9.0)), **others}).outputs
    assert [a.token_ids for a in output.answers] == [(1,), ()]


def test_groups_that_have_the_same_beam_share_its_request():
    """One token is so likely that two groups take it, whatever its second use costs. Then they part."""
    params = BeamSearchParams(beam_width=2, max_tokens=3, num_beam_groups=2, diversity_penalty=1.0)
    searches = BeamSearches()
    first = searches.begin(
        BeamsRequest(request_id="s", prompt_token_ids=(5, 6), params=params)
    ).request_id

    taken = took(searches, {first: ((1, -0.1), (2, -9.0), (3, -9.5))})
    assert (taken.steps, taken.new, taken.ended) == ([BeamStep(first, first, 1)], [], [])
    taken = took(
        searches, {first: ((4, -0.5), (2, -0.9), (3, -9.5))}
    )  # the second group is turned away from 4 by its penalty
    (second,) = taken.new
    assert taken.steps == [BeamStep(first, first, 4), BeamStep(second.request_id, first, 2)]
    taken = took(
        searches,
        {second.request_id: ((8, -0.2), (7, -4.0), (9, -5.0))},
        {
            first: ((7, -0.1), (8, -2.0), (9, -3.0), (2, -9.0))
        },  # in another step, with another request that wants more
    )
    assert sorted(taken.ended) == sorted([first, second.request_id])
    assert {answer.token_ids for answer in taken.outputs[0].answers} == {(1, 4, 7), (1, 2, 8)}
    assert not searches


def in_python(params, ends, tables):
    """The plain search, a list at a time. `tables[length](tokens)` are the likeliest next tokens of a beam."""
    width, answers, beams = params.beam_width, [], [((), 0.0)]
    for length in range(1, params.max_tokens + 1):
        found = [((*t, token), total + value) for t, total in beams for token, value in tables(t)]
        found.sort(key=lambda candidate: -candidate[1])  # of equals the first stays first
        for tokens, total in found[:width]:
            if tokens[-1] in ends or length == params.max_tokens:
                answers.append(
                    (
                        total / length**params.length_penalty,
                        tokens[:-1] if tokens[-1] in ends else tokens,
                    )
                )
        answers = sorted(answers, key=lambda answer: -answer[0])[:width]
        beams = [beam for beam in found if beam[0][-1] not in ends][:width]
        longest = (
            params.max_tokens
            if params.early_stopping == "never" and params.length_penalty > 0
            else length
        )
        attainable = beams[0][1] / longest**params.length_penalty
        if len(answers) == width and (
            params.early_stopping is True or attainable <= answers[-1][0]
        ):
            break
    return answers


@pytest.mark.parametrize("seed", range(12))
def test_searches_that_are_chosen_for_together(seed):
    """Searches of several kinds, begun in different steps, with many equal log-probabilities: each as if it were alone."""
    chance, searches, running, answers = random.Random(seed), BeamSearches(), {}, {}
    kinds = [(chance.randint(1, 5), tuple(range(chance.randint(0, 3)))) for _ in range(3)]
    histories, expected = {}, {}

    def table(name, wanted, tokens):
        rng = random.Random(f"{seed} {name} {tokens}")
        values = rng.choices([-0.5, -1, -2, -3], k=wanted)
        scale = (1, 1, 4, 4, 0.125)[
            min(len(tokens), 4)
        ]  # some searches end while no beam does, and would find better later
        return list(
            zip(
                rng.sample(range(wanted + 2), wanted),
                sorted((scale * v for v in values), reverse=True),
                strict=True,
            )
        )

    for step in range(60):
        for i in range(chance.randint(0, 6) if step < 40 else 0):
            (width, ends), name = chance.choice(kinds), f"s{step}.{i}"
            params = BeamSearchParams(
                beam_width=width, max_tokens=chance.randint(1, 9), length_penalty=chance.choice([0.0, 1.0, -0.7, 2.5]),
                early_stopping=chance.choice([True, False, "never"]),
            )  # fmt: skip
            first = searches.begin(
                BeamsRequest(
                    request_id=name, prompt_token_ids=(5,), params=params, eos_token_ids=ends
                )
            )
            histories[first.request_id], running[first.request_id] = (), (name, width + len(ends))
            expected[name] = in_python(
                params, ends, functools.partial(table, name, width + len(ends))
            )
        if chance.random() < 0.1 and running:
            name = chance.choice(list(running.values()))[0]
            for beam in searches.forget([name]):
                del histories[beam], running[beam]
            expected.pop(name)
        num_top = max([wanted for _, wanted in running.values()], default=0)
        found = {beam: table(*of, histories[beam]) for beam, of in running.items()}
        found = {beam: own + [(99, -9.0)] * (num_top - len(own)) for beam, own in found.items()}
        taken = took(searches, found) if found else searches.take([])
        before = dict(histories)
        for request in taken.new:
            running[request.request_id] = running[request.beam_of]
        for beam, source, token in taken.steps:
            histories[beam] = (*before[source], token)
        for beam in taken.ended:
            del histories[beam], running[beam]
        answers |= {
            output.request_id: [(a.score, a.token_ids) for a in output.answers]
            for output in taken.outputs
        }
    assert not searches
    assert answers == expected


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"beam_width": 0}, "beam_width"),
        ({"beam_width": 20}, "beam_width"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"length_penalty": float("nan")}, "length_penalty"),
        ({"length_penalty": -100}, "length_penalty"),
        ({"early_stopping": 1}, "early_stopping"),
        ({"early_stopping": "soon"}, "early_stopping"),
    ],
)
def test_params_that_are_refused(values, named):
    with pytest.raises(RequestError) as caught:
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 4, **values})
    assert caught.value.field == named


def test_a_checkpoint_that_bans_words_has_no_beams(tmp_path):
    """Banned words are applied to drawn answers alone."""
    tiny_models.build(tmp_path, vocab_size=512)
    (tmp_path / "generation_config.json").write_text('{"suppress_tokens": [7]}')
    with (
        LLM(str(tmp_path), skip_tokenizer_init=True, **SETTINGS) as llm,
        pytest.raises(RequestError, match="suppress_tokens"),
    ):
        llm.beam_search(
            [{"prompt_token_ids": [5, 6]}], BeamSearchParams(beam_width=2, max_tokens=2)
        )
