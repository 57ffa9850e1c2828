"""Beam search against transformers, in float32, on tiny random models."""

from __future__ import annotations

import itertools

import pytest
import torch

from slipstream import LLM, BeamSearchParams
from slipstream.engine.beams import BeamSearch, BeamSearches
from slipstream.errors import RequestError
from slipstream.types import BeamsRequest, BeamStep, TokenLogprobs, TokenOutput
from tests import adapters, tiny_models

PROMPTS = [[5, 9, 200, 31, 7], list(range(3, 43)), [17, 4]]
SETTINGS = dict(dtype="float32", device="cpu", num_threads=1, max_model_len=128, max_num_seqs=16, max_num_batched_tokens=64)
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
        found.append(prompt + own[:stop])  # what does not stop has all of its tokens, and no padding
    return found, out.sequences_scores.tolist()


def test_as_transformers(pair):
    llm, hf, ways = pair
    ends = adapters.greedy(hf, PROMPTS[0], 4)[2:]  # tokens that likely answers end with
    llm._input.eos_token_ids = tuple(ends)
    lengths = set()
    for width, penalty, early in ways:
        params = BeamSearchParams(beam_width=width, max_tokens=9, length_penalty=penalty, early_stopping=early)
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
    (beam,) = llm.beam_search("hello", BeamSearchParams(beam_width=1, max_tokens=6, ignore_eos=True))
    (greedy,) = llm.generate("hello", SamplingParams(temperature=0, max_tokens=6, ignore_eos=True), progress=False)
    assert beam.sequences[0].tokens == greedy.prompt_token_ids + greedy.outputs[0].token_ids


def test_the_search_by_hand():
    """Two beams over three tokens, of which 0 ends."""
    search = BeamSearch(BeamSearchParams(beam_width=2, max_tokens=3, length_penalty=0.0), frozenset({0}))
    search.take([[(1, -0.5), (2, -1.5), (0, -2.0)]])
    assert [beam.tokens for beam in search.open] == [(1,), (2,)]
    assert not search.answers  # the end was third of three, and two count
    search.take([[(0, -0.1), (1, -3.0), (2, -4.0)], [(0, -0.2), (2, -3.0), (1, -4.0)]])
    assert [(a.beam.tokens, round(a.score, 3)) for a in search.answers] == [((1, 0), -0.6), ((2, 0), -1.7)]
    assert not search.open  # the best open beam, at -3.5, can't beat -1.7


def test_groups_that_have_the_same_beam_share_its_request():
    """One token is so likely that two groups take it, whatever its second use costs. Then they part."""
    params = BeamSearchParams(beam_width=2, max_tokens=3, num_beam_groups=2, diversity_penalty=1.0)
    searches = BeamSearches()
    first = searches.begin(BeamsRequest(request_id="s", prompt_token_ids=(5, 6), params=params)).request_id

    def take(**likeliest):
        top = {name: TokenLogprobs(found[0][0], found[0][1], 1, found) for name, found in likeliest.items()}
        return searches.take([TokenOutput(name, (t.token_id,), logprobs=(t,)) for name, t in top.items()])

    taken = take(**{first: ((1, -0.1), (2, -9.0), (3, -9.5))})
    assert (taken.steps, taken.new, taken.ended) == ([BeamStep(first, first, 1)], [], [])
    taken = take(**{first: ((4, -0.5), (2, -0.9), (3, -9.5))})  # the second group is turned away from 4 by its penalty
    (second,) = taken.new
    assert taken.steps == [BeamStep(first, first, 4), BeamStep(second.request_id, first, 2)]
    taken = take(**{first: ((7, -0.1), (8, -2.0), (9, -3.0)), second.request_id: ((8, -0.2), (7, -4.0), (9, -5.0))})
    assert sorted(taken.ended) == sorted([first, second.request_id])
    assert {answer.token_ids for answer in taken.outputs[0].answers} == {(1, 4, 7), (1, 2, 8)}
    assert not searches


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
