"""Masks that a step does not wait for: their rows come later, with the same tokens; the others go on."""

from __future__ import annotations

import dataclasses
import random
import threading
import time

import pytest

from slipstream import LLM, SamplingParams, StructuredOutputsParams
from slipstream.core.participants import late_masks
from slipstream.engine.grammars import grammar
from slipstream.engine.grammars.grammar import Grammars
from slipstream.engine.grammars.state import GrammarState
from tests.support import tiny_models

LARK = StructuredOutputsParams(
    grammar='start: item+\nitem: "he" | "ll" | /[a-f]{3,9}/ | "[" item "]"'
)
PLAIN = SamplingParams(temperature=0.9, seed=3, max_tokens=24, ignore_eos=True)
SLOW = dataclasses.replace(PLAIN, structured_outputs=LARK)
PROMPTS = [{"prompt_token_ids": [5, 9, 12 + i]} for i in range(4)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("late")
    tiny_models.write_with_tokenizer(folder, "llama")
    return str(folder)


def opened(model):
    return LLM(model, device="cpu", num_threads=1, max_model_len=128, max_num_seqs=4)


def answers(llm, params):
    return [tuple(o.outputs[0].token_ids) for o in llm.generate(PROMPTS, params, progress=False)]


@pytest.fixture
def slow(monkeypatch):
    """All masks count as slow, and a hook runs before each."""
    hook = {"before": lambda: None}
    inner = Grammars._slow_mask

    def mask(self, state, matcher):
        hook["before"]()
        return inner(self, state, matcher)

    monkeypatch.setattr(Grammars, "_slow_mask", mask)
    monkeypatch.setattr(
        GrammarState, "is_slow", property(lambda _: True, lambda *_: None), raising=False
    )
    monkeypatch.setattr(grammar, "PATIENCE_S", 0.0005)
    return hook


def test_answers_are_the_same_however_late_their_masks_come(model, slow, monkeypatch):
    params = [SLOW, PLAIN, dataclasses.replace(SLOW, temperature=0.0, logprobs=2), SLOW]
    taken, take_back = [], late_masks.take_back
    monkeypatch.setattr(late_masks, "take_back", lambda *a: (taken.extend(a[2]), take_back(*a))[1])
    rng = random.Random(0)
    with opened(model) as llm:
        found = []
        for most in (0.0, 0.004):
            slow["before"] = lambda most=most: time.sleep(rng.random() * most)
            found.append(answers(llm, params))
        assert len(taken) > 3  # some 30, more or fewer as threads take turns
        monkeypatch.setattr(late_masks, "may_take_back", lambda *_: False)
        found.append(answers(llm, params))
        assert not llm.core.has_work
    assert found[0] == found[1] == found[2]


def test_a_mask_that_does_not_come_delays_its_own_request_alone(model, slow):
    come, ended = threading.Event(), []
    slow["before"] = lambda: come.wait(20)
    with opened(model) as llm:
        llm.generate(PROMPTS[:1], SLOW, progress=False)  # it is compiled now
        core = llm.core
        take = core._take_results

        def noted(step):
            outputs = take(step)
            ended.extend(o.request_id for o in outputs if o.finish_reason is not None)
            if len(ended) == 2:
                come.set()
            return outputs

        core._take_results = noted
        found = answers(llm, [SLOW, PLAIN, PLAIN, SLOW])
        assert come.is_set()
    assert all(len(tokens) == 24 for tokens in found)


def test_a_request_that_is_aborted_while_its_mask_is_late_leaves_nothing(model, slow, monkeypatch):
    come = threading.Event()
    slow["before"] = lambda: come.wait(20)
    with opened(model) as llm:
        llm.generate(PROMPTS[:1], SLOW, progress=False)  # it is compiled now
        core = llm.core
        take_back, late = late_masks.take_back, []

        def aborted(scheduler, plan, shares):
            take_back(scheduler, plan, shares)
            late.extend(s.request_id for s in shares)

        monkeypatch.setattr(late_masks, "take_back", aborted)
        prepare = core._step

        def step():
            outputs = prepare()
            if late:
                outputs += core.abort([late.pop()])
                come.set()
            return outputs

        core._step = step
        found = llm.generate(PROMPTS[:2], [SLOW, PLAIN], progress=False)
        assert len(found[0].outputs[0].token_ids) < 24
        assert not core.grammars
        assert not core.grammars.is_late
    assert len(found[1].outputs[0].token_ids) == 24
