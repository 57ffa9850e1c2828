"""Masks that requests share are those of each request's own matcher, and answers stay the same."""

from __future__ import annotations

import random
import re
import time

import numpy as np
import pytest

from slipstream import SamplingParams, StructuredOutputsParams
from slipstream.engine.grammars.grammar import Grammars
from slipstream.engine.grammars.regex_states import MAX_NODES, automaton_of
from slipstream.engine.grammars.state import GrammarState
from slipstream.engine.text.tokenizer import Tokenizer
from slipstream.messages.requests import EngineRequest
from slipstream.messages.steps import ScheduledRequest, StepPlan
from slipstream.spec.description import read_spec
from tests.engine.grammars.test_structured import PARAMS, make
from tests.support.waiting import wait_for

EXPRESSIONS = (
    "[a-z ]{5,}",
    "(he(llo|n)+|[0-9]{2}-[A-F]{1,3})*",
    r"\d+(\.\d{1,3})?( [a-z]+)*",
    r"[^\n,]*,[\w.-]+@[a-z]+",
    ".{3,9}",
    r"(ab|a)(c|bcd)(d*)",
    r"([a-c]|[b-d]){0,6}e?",
    "hello there",
    "né[a-z]*",
)
UNKNOWN = (
    r"(?i)a",
    r"\bword\b",
    "^a$",
    r"\p{L}+",
    "[[:alpha:]]",
    "[a&&b]",
    "a*?b",
    "(a{200}){200}",
    "",
)


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    return Tokenizer.for_model(read_spec(tiny_model))


@pytest.fixture(scope="module")
def grammars(tokenizer):
    return Grammars(lambda: tokenizer, 288, lambda tokenizer: tokenizer.eos_token_ids)


def begin(grammars, names, params, **more):
    for name in names:
        sampling = SamplingParams(structured_outputs=params, **more)
        grammars.begin(
            EngineRequest(
                request_id=name,
                prompt_token_ids=(5,),
                sampling=sampling,
                eos_token_ids=(1,),
                max_tokens=9,
            )
        )
    while grammars.is_compiling:
        time.sleep(0.001)
        assert all(error is None for _, error in grammars.compiled())


def masks_of(grammars, names, drafts=None):
    drafts = drafts or {}
    counts = [1 + len(drafts.get(name, ())) for name in names]
    scheduled = [
        ScheduledRequest(name, 3, n, n, drafts.get(name, ()))
        for name, n in zip(names, counts, strict=True)
    ]
    mask, ended = grammars.masks(StepPlan(step_id=1, scheduled=tuple(scheduled)), drafts)
    bits = np.frombuffer(mask.bits, np.int32).reshape(max(mask.which) + 1, -1)
    return mask, bits[list(mask.which)], ended


def own_mask(state, words):
    """The mask of the request's own matcher."""
    bits = np.zeros(words, np.int32)
    state.matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
    assert state.finish_mask(bits)
    return bits


def allowed(bits):
    return np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist()


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_shared_masks_are_those_of_each_matcher(grammars, expression):
    grammars.clear()
    names = [str(i) for i in range(6)]
    begin(grammars, names, StructuredOutputsParams(regex=expression))
    rng, left = random.Random(expression), names
    plain = {name: begin_alone(grammars, name) for name in names}
    for _ in range(12):
        _, bits, ended = masks_of(grammars, left)
        left_now, given = [], []
        for name, row in zip(left, bits, strict=True):
            if name in ended:
                assert ended[name] is None
                continue
            assert (row == own_mask(plain[name], bits.shape[1])).all(), (expression, name)
            token = rng.choice([t for t in allowed(row) if t != 1] or [1])
            if token != 1:
                plain[name].accept([token])
                given.append((name, [token]))
                left_now.append(name)
        counts = grammars.accept_all(given)
        finished = {name for (name, _), count in zip(given, counts, strict=True) if count}
        assert finished == {name for name, _ in given if plain[name].is_finished}
        left = [name for name in left_now if name not in finished]
        if not left:
            break
    grammars.clear()


def begin_alone(grammars, name):
    """A request's state again, which shares nothing."""
    state = grammars._states[name].copy()
    state.regex = state.spot = None
    return state


def test_requests_at_one_state_share_one_row_of_bits(grammars, tokenizer):
    grammars.clear()
    names = [str(i) for i in range(40)]
    begin(grammars, names, StructuredOutputsParams(regex="[a-z ]{5,}"))
    mask, _, _ = masks_of(grammars, names)
    assert set(mask.which) == {0}
    assert len(mask.bits) == 9 * 4
    tokens = [tokenizer.encode(c, add_special_tokens=False) for c in "ab"]
    grammars.accept_all([(name, tokens[i % 2]) for i, name in enumerate(names)])
    mask, _, _ = masks_of(grammars, names)
    assert set(mask.which) == {0}  # after "a" follows what follows after "b"
    assert all(state.untaken for state in grammars._states.values())  # no matcher was needed
    grammars.clear()


@pytest.mark.parametrize("expression", EXPRESSIONS[:7])
def test_masks_after_guesses_are_those_one_by_one(grammars, expression):
    grammars.clear()
    begin(grammars, ["a", "b"], StructuredOutputsParams(regex=expression))
    rng, one = random.Random(1), begin_alone(grammars, "a")
    drafts: list[int] = []
    expected = []
    for _ in range(4):
        expected.append(own_mask(one, 9))
        tokens = [t for t in allowed(expected[-1]) if t != 1]
        if not tokens or one.is_finished:
            break
        drafts.append(rng.choice(tokens))
        one.accept(drafts[-1:])
        if one.is_finished:
            break
    drafts = drafts[: len(expected) - 1]
    for _ in range(2):  # the second time the states are known
        _, bits, ended = masks_of(grammars, ["a", "b"], {"a": tuple(drafts)})
        assert not ended
        for row, own in zip(bits, expected, strict=False):
            assert (row == own).all()
    assert grammars.accept_all([("a", drafts)]) == [None]
    state = grammars._states["a"]
    state.rollback(0)
    _, bits, _ = masks_of(grammars, ["a"])
    assert (bits[0] == expected[-1]).all()
    grammars.clear()


def test_states_go_back_with_the_tokens(grammars, tokenizer):
    grammars.clear()
    begin(grammars, ["a"], StructuredOutputsParams(regex="[0-9]{2}[a-z]*"))
    state, digit = grammars._states["a"], tokenizer.encode("7", add_special_tokens=False)
    first = np.zeros(9, np.int32)
    state.mask(first)
    state.accept(digit)
    second = np.zeros(9, np.int32)
    state.mask(second)
    state.accept(digit)
    state.rollback(1)
    again = np.zeros(9, np.int32)
    state.mask(again)
    assert (again == second).all()
    state.rollback(1)
    state.mask(again)
    assert (again == first).all()
    grammars.clear()


@pytest.mark.parametrize("expression", UNKNOWN)
def test_unknown_syntax_has_no_states(expression):
    assert automaton_of(expression) is None
    assert MAX_NODES < 200 * 200


@pytest.mark.parametrize("expression", EXPRESSIONS[:-1])
def test_an_automaton_matches_what_python_matches(expression):
    automaton, rng = automaton_of(expression), random.Random(0)
    for _ in range(300):
        nodes, text = automaton.start, ""
        for _ in range(rng.randint(0, 9)):
            chars = [c for c in "abcdehlno 0129-AF.,@_\n" if automaton.after(nodes, ord(c))]
            if not chars:
                break
            text += rng.choice(chars)
            nodes = automaton.after(nodes, ord(text[-1]))
        assert bool(re.fullmatch(expression, text)) == (automaton._last in nodes)


@pytest.fixture(scope="module")
def llm(tiny_model):
    return make(tiny_model)


SETTINGS = {
    "drawn": {},
    "greedy": {"temperature": 0},
    "several": {"n": 3},
    "penalised": {"repetition_penalty": 1.5, "logit_bias": {70: 5.0}},
    "log-probabilities": {"logprobs": 2},
    "stopped": {"stop": "b"},
    "bad words": {"bad_words": ["q", "zz"]},
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("more", [{}, {"speculative_model": "ngram", "num_speculative_tokens": 3}])
def test_answers_are_those_without_shared_masks(tiny_model, monkeypatch, name, more):
    llm = make(tiny_model, **more)
    kinds = [
        *[StructuredOutputsParams(regex=expression) for expression in EXPRESSIONS],
        PARAMS,
        PARAMS,
    ]
    params = [
        SamplingParams(**{"max_tokens": 24, "seed": i, "structured_outputs": k, **SETTINGS[name]})
        for i, k in enumerate(kinds)
    ]
    prompts = [f"hello the {i % 3}" for i in range(len(kinds))]

    def answers():
        found = llm.generate(prompts, params, progress=False)
        return [
            (c.text, c.token_ids, c.finish_reason, c.logprobs) for r in found for c in r.outputs
        ]

    shared = [answers(), answers()]  # the second time the states are known
    monkeypatch.setattr(GrammarState, "look", lambda self, *, alone=False: None)
    monkeypatch.setattr(Grammars, "_find", lambda self, states: None)
    alone = answers()
    assert shared == [alone, alone]
    for params_of, (text, *_, reason, _) in zip(params, alone, strict=False):
        if name == "drawn" and reason == "stop" and params_of.structured_outputs.regex:
            assert re.fullmatch(params_of.structured_outputs.regex, text)


def test_many_requests_of_a_grammar_have_several_lexers(tokenizer, monkeypatch):
    """Copies of a matcher share its lexer, which one thread at a time can use."""
    grammars = Grammars(lambda: tokenizer, 288, lambda tokenizer: tokenizer.eos_token_ids)
    monkeypatch.setattr(grammars, "_num_threads", 3)
    names = [str(i) for i in range(40)]
    begin(grammars, names, PARAMS)
    lanes = grammars._compiled["", PARAMS].lanes

    def again():
        grammars.forget(names)
        begin(grammars, names, PARAMS)
        return len(lanes._made) == 3

    wait_for(again, "another thread makes no lexer")
    again()
    counts = [sum(state.lane[1] == i for state in grammars._states.values()) for i in range(3)]
    assert min(counts) >= 8
    rng = random.Random(0)
    for _ in range(20):  # they are the same grammar
        _, bits, ended = masks_of(grammars, names)
        assert not ended
        assert all((row == bits[0]).all() for row in bits)
        token = rng.choice(allowed(bits[0]))
        if any(grammars.accept_all([(name, [token]) for name in names])):
            break
    grammars.clear()
    assert grammars._compiled["", PARAMS].lanes._counts == [0, 0, 0]
