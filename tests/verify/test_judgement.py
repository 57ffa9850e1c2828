"""Judgements from estimates and counts, without a server: fault, pass or undecided."""

import json
from types import SimpleNamespace

import httpx
import pytest

from slipstream.errors import SlipstreamError
from slipstream.verify import checks, probes
from slipstream.verify.checks import Finding, Plan, Verification
from slipstream.verify.measures import Estimate
from slipstream.verify.served import Answer, Served


def verification(answers=(), **plan):
    left = iter(answers)
    served = SimpleNamespace(ask=lambda *a, **k: next(left))
    return Verification(served, SimpleNamespace(), Plan(**plan))


@pytest.mark.parametrize(
    ("counts", "outcome", "why"),
    [
        ([(5, 5), (7, 7)], "pass", "as many tokens"),
        ([(6, 5), (8, 7)], "fault", "a BOS more or less"),
        ([(6, 5), (7, 7)], "fault", "another chat template"),
        ([], "not offered", "no usage"),
    ],
)
def test_counts_of_prompts(counts, outcome, why):
    made = verification()
    made._counts.extend(counts)
    found = made._prompts()
    assert (found.outcome, why in found.why) == (outcome, True)


@pytest.mark.parametrize(
    ("kl", "outcome"),
    [
        (Estimate(value=0.001, stderr=0.01, count=9), "pass"),
        (Estimate(value=0.005, stderr=0.001, count=9), "pass"),
        (Estimate(value=0.008, stderr=0.001, count=9), "undecided"),  # it may be above the limit
        (Estimate(value=0.05, stderr=0.001, count=9), "fault"),
        (Estimate(value=0.2, stderr=0.1, count=6), "fault"),  # far above, however uncertain
        (Estimate(value=0.2, stderr=0.1, count=5), "undecided"),
    ],
)
def test_a_divergence_is_judged_by_its_error(kl, outcome, monkeypatch):
    monkeypatch.setattr(Verification, "_kl", lambda *a: kl)
    assert verification(max_kl=0.01)._distribution("plain", "x").outcome == outcome


@pytest.mark.parametrize(
    ("value", "asked", "outcome", "why"),
    [
        (1 + checks.SLACK / 2, 1.0, "pass", "drawn at"),  # sure, and too little to matter
        (1 + 2 * checks.SLACK, 1.0, "fault", "another temperature"),
        (1.0, 0.5, "fault", "the field is ignored"),
    ],
)
def test_a_temperature_that_is_hardly_off_is_no_fault(value, asked, outcome, why, monkeypatch):
    estimate = Estimate(value=value, stderr=1e-5, count=9)
    monkeypatch.setattr(checks.measures, "temperature", lambda *a: estimate)
    found = verification()._temperature("plain", asked)
    assert (found.outcome, why in found.why) == (outcome, True)


def test_a_long_conversation_of_fewer_tokens_was_cut():
    made = verification()
    made._drawn["long"] = [None]
    made._counts.append((5, 5))
    made._long_counts.extend([(90, 90), (60, 90)])
    found = made._long(Finding(check="x", outcome="pass", why=""))
    assert (found.outcome, "30 tokens" in found.why) == ("fault", True)


def called(name):
    arguments = json.dumps({"city": "Oslo", "days": 2, "unit": "celsius"})
    calls = ({"function": {"name": name, "arguments": arguments}},)
    return Answer(text="", tokens=(), num_prompt_tokens=1, tool_calls=calls)


def test_calls_keep_to_the_tool_by_their_name_too(monkeypatch):
    monkeypatch.setattr(probes, "keeps_to_tool", lambda arguments: True)
    assert verification([called(probes.TOOL_NAME)] * 4)._tools().outcome == "pass"
    assert verification([called("other")] * 4)._tools().outcome == "fault"


def test_answers_that_are_cut_prove_nothing_and_the_others_count():
    whole, cut = (
        Answer(text=said, tokens=(), num_prompt_tokens=1, finish_reason=reason)
        for said, reason in (("right", "stop"), ("", "length"))
    )
    for answers, outcome in (([whole, cut] * 2, "pass"), ([cut] * 4, "undecided")):
        found = verification(answers)._rate("x", lambda a: a.text == "right", "ask")
        assert found.outcome == outcome
    late = Answer(text="right", tokens=(), num_prompt_tokens=1, finish_reason="length")
    assert verification([late] * 4)._rate("x", lambda a: True, "ask").why == "4 of 4 valid"


@pytest.mark.parametrize(("outcomes", "rounds"), [(["pass", "undecided"], 3), (["pass"] * 2, 1)])
def test_rounds_go_on_until_all_is_decided(outcomes, rounds, monkeypatch):
    asked = []
    monkeypatch.setattr(Verification, "_round", lambda self: asked.append(1))
    found = [Finding(check="x", outcome=outcome, why="") for outcome in outcomes]
    monkeypatch.setattr(Verification, "_judged", lambda self: found)
    for name in ("_schemas", "_tools"):
        monkeypatch.setattr(Verification, name, lambda self: found[0])
    assert len(verification(rounds=3).run()) == 4
    assert len(asked) == rounds


def test_a_server_that_fails_does_not_refuse():
    failing = httpx.MockTransport(lambda request: httpx.Response(500, text="no"))
    with pytest.raises(SlipstreamError, match="HTTP 500"):
        Served.connect("http://x", model="m", transport=failing).ask([])
