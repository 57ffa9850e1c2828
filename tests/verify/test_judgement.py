"""Judgements from estimates and counts, without a server: fault, pass or undecided."""

import json
from types import SimpleNamespace

import httpx
import pytest
import torch

from slipstream.errors import SlipstreamError
from slipstream.verify import judging, probes
from slipstream.verify.asking import Asking
from slipstream.verify.checks import Verification
from slipstream.verify.judging import Judge, Verdict
from slipstream.verify.measures import ScoredAnswer
from slipstream.verify.report import EXIT_CODES, document
from slipstream.verify.seen import NUM_FORMED, WARM, Evidence, VerifyPlan
from slipstream.verify.served import NotOfferedError, Served, ServedAnswer


def verification(replies=(), **plan):
    left, asked = iter(replies), []
    served = SimpleNamespace(asked=asked, ask=lambda *a, **k: asked.append(k) or next(left))
    return Verification(served, SimpleNamespace(token_id=None, has_tools=True), VerifyPlan(**plan))


def test_prompt_tokens_are_counted_where_the_server_says_them():
    made = verification([SimpleNamespace(num_prompt_tokens=n) for n in (5, None, 7)])
    made.asking._answers([[]] * 3, range(3), {})
    assert (made.asking.seen.num_answers, made.asking.seen.num_prompt_tokens) == (3, 12)


@pytest.mark.parametrize(
    ("counts", "why"),
    [
        ([(6, 5), (8, 7)], "+1 token in every prompt: a BOS more or less"),
        ([(4, 5), (6, 7)], "-1 token in every prompt: a BOS more or less"),
        ([(4, 5), (7, 7)], "prompts differ by -1 tokens: another chat template"),
    ],
)
def test_prompts_of_another_length_tell_their_likely_cause(counts, why):
    made = verification()
    made.asking.seen.counts.extend(counts)
    assert made.judge._prompts() == Verdict(check="prompt", outcome="fault", why=why)


def test_seeds_begin_at_other_questions_and_turns_go_on():
    one, other = verification(seed=1), verification(seed=2)
    asked = [*one.asking._numbers(), *one.asking._numbers()]
    assert asked == list(range(asked[0], asked[0] + 2 * one.plan.turn))
    assert set(asked).isdisjoint(other.asking._numbers())


def test_short_conversations_have_one_turn_or_three_with_or_without_a_system_message():
    found = {tuple(m["role"] for m in probes.short(number)) for number in range(12)}
    turns = [("user",), ("user", "assistant", "user")]
    assert found == {(*system, *rest) for system in ((), ("system",)) for rest in turns}


def answers_of(kind, at, num=80, seed=0):
    """Samples of a model that was drawn from at a temperature."""
    chance = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(num):
        logprobs = (2 * torch.randn(24, 64, generator=chance)).log_softmax(-1)
        ids = torch.multinomial((logprobs / at).softmax(-1), 1, generator=chance)[:, 0].tolist()
        found.append(ScoredAnswer(token_ids=ids, tokens=[], logprobs=logprobs))
    return {kind: found}


@pytest.mark.parametrize(
    ("values", "outcome"),
    [
        ([0.0001, 0.0002] * 19, "pass"),
        ([0.0001, 0.0002] * 16, "undecided"),  # one of the next may be a fault
        ([0.009, 0.011, 0.008, 0.01], "undecided"),  # it may be above the limit
        ([0.05] * 12, "fault"),
        ([0.2] * 3, "undecided"),  # far above, but its cause is told by more
        ([0.2] * 12, "fault"),
    ],
)
def test_a_divergence_is_judged_by_its_error(values, outcome, monkeypatch):
    monkeypatch.setattr(Evidence, "short", lambda self: [[v] for v in values])
    assert verification(max_kl=0.01).judge._distribution("plain", "x").outcome == outcome


def test_few_answers_leave_a_temperature_open():
    made = verification()
    made.asking.seen.drawn.update(answers_of("warm", WARM, num=2))
    outcomes = {made.judge._temperature().outcome for _ in range(40)}
    assert outcomes == {"undecided"}  # each answer counts once
    made = verification()
    made.asking.seen.drawn.update(
        answers_of("plain", 1.0)
    )  # a server that ignores the field would draw these
    assert made.judge._temperature().outcome == "undecided"


@pytest.mark.parametrize("warm", ["refused", "as asked for", "hotter", "not asked", "partly"])
def test_a_temperature_that_explains_a_fault_is_one_itself_or_leaves_the_fault(warm, monkeypatch):
    made = verification()
    made.asking.seen.counts.append((5, 5))
    made.asking.seen.drawn.update(answers_of("plain", 1.3, num=24))
    for sample in made.asking.seen.drawn["plain"]:
        object.__setattr__(sample, "kl", [0.06])
    left = 0.02 if warm == "partly" else 0.001
    monkeypatch.setattr(
        judging.measures, "divergences", lambda s, ids, at=1.0, **cut: [0.06 if at == 1 else left]
    )
    if warm == "refused":
        made.asking.seen.refused["warm"] = "at most 1"
    elif warm == "as asked for":  # by these draws: too little to tell, or a plain one alone
        monkeypatch.setattr(
            Judge,
            "_temperature",
            lambda self: Verdict(check="temperature", outcome="pass", why=""),
        )
    elif warm == "hotter":
        made.asking.seen.drawn.update(answers_of("warm", 1.3 * WARM, num=24, seed=1))
    found = {f.check: f.outcome for f in made.judge.judged()}
    if warm == "hotter":
        assert found == {"prompt": "pass", "temperature": "fault"}
    elif warm == "partly":
        assert found == {"prompt": "pass", "distribution": "fault"}
    else:
        assert found["distribution"] == "fault"
        assert "temperature" in found  # asked on, if it is undecided


@pytest.mark.parametrize(
    ("found", "outcome"),
    [
        ([(True, True)] * 8, "pass"),
        ([(True, True)] * 4, "undecided"),
        ([(False, True)] * 4, "fault"),
        ([(True, True)] * 2 + [(False, False)] * 8, "undecided"),  # two tell too little
        ([(True, False)] * 8, "not offered"),  # the model itself finds none
        ([(False, False)] * 8, "not offered"),
        ([(False, False)] * 4, "undecided"),
    ],
)
def test_code_words_count_where_the_model_itself_finds_them(found, outcome):
    made = verification()
    made.asking.seen.needles[800] = found
    assert made.judge._needle().outcome == outcome


@pytest.mark.parametrize(
    ("spread", "is_cut", "outcome"),
    [
        (0.04, False, "fault"),  # 4 % of tokens outside: a peaked model
        (0.04, True, "pass"),
        (0.0001, True, "undecided"),  # cut and uncut are alike
    ],
)
@pytest.mark.parametrize("kind", ["top_k", "top_p", "greedy"])
def test_a_cut_is_judged_by_what_the_model_leaves_outside(kind, spread, is_cut, outcome):
    chance = torch.Generator().manual_seed(0)
    first = {"top_k": [0.5, 0.5 - spread], "top_p": [1 - spread], "greedy": [1 - spread]}[kind]
    rest = [spread / 8] * 8
    row = torch.tensor([*first, *rest])
    served = torch.tensor([*first, *([0.0] * 8 if is_cut else rest)])
    made = verification()
    for _ in range(32):
        ids = torch.multinomial(served, 24, replacement=True, generator=chance).tolist()
        logprobs = row.log().log_softmax(-1).expand(24, -1)
        made.asking.seen.drawn.setdefault(kind, []).append(
            ScoredAnswer(token_ids=ids, tokens=[], logprobs=logprobs)
        )
    found = {f.check: f.outcome for f in made.judge._cuts()}
    assert found["temperature 0" if kind == "greedy" else kind] == outcome


def test_a_long_conversation_of_fewer_tokens_was_cut():
    made = verification()
    made.asking.seen.counts.append((5, 5))
    made.asking.seen.long_counts.extend([(90, 90), (89, 90)])  # a BOS less
    assert made.judge._long().outcome == "undecided"
    made.asking.seen.long_counts.append((60, 90))
    found = made.judge._long()
    assert (found.outcome, "30 tokens" in found.why) == ("fault", True)


def called(name):
    arguments = json.dumps({"city": "Oslo", "days": 2, "unit": "celsius"})
    calls = ({"function": {"name": name, "arguments": arguments}},)
    return ServedAnswer(text="", tokens=(), num_prompt_tokens=1, tool_calls=calls)


def test_calls_keep_to_the_tool_by_their_name_too(monkeypatch):
    monkeypatch.setattr(probes, "keeps_to_tool", lambda arguments: True)
    made = verification([called(probes.TOOL_NAME)] * NUM_FORMED)
    assert made._tools().outcome == "pass"
    for given in made.served.asked:  # a server that may answer without a call proves nothing
        assert (given["tools"], given["tool_choice"]) == ([probes.TOOL], "required")
    assert verification([called("other")] * NUM_FORMED)._tools().outcome == "fault"
    made = verification([called("other")] * NUM_FORMED)
    made.reference.has_tools = False  # the model itself calls none
    assert made._tools().outcome == "not offered"


def test_answers_that_are_cut_prove_nothing_and_the_others_count():
    whole, cut = (
        ServedAnswer(text=said, tokens=(), num_prompt_tokens=1, finish_reason=reason)
        for said, reason in (("right", "stop"), ("", "length"))
    )
    for answers, outcome in (([whole, cut] * 4, "pass"), ([cut] * 8, "undecided")):
        found = verification(answers)._rate("x", lambda a: a.text == "right", "ask")
        assert found.outcome == outcome
    late = ServedAnswer(text="right", tokens=(), num_prompt_tokens=1, finish_reason="length")
    why = verification([late] * NUM_FORMED)._rate("x", lambda a: True, "ask").why
    assert why == "8 of 8 valid: 44 % or more broken ones are excluded"


@pytest.mark.parametrize(("forms", "share"), [(8, 0.44), (90, 0.05), (919, 0.005)])
def test_answers_of_a_form_exclude_the_share_that_is_stated(forms, share):
    right = ServedAnswer(text="", tokens=(), num_prompt_tokens=1, finish_reason="stop")
    made = verification([right] * forms, forms=forms)
    assert made._rate("x", lambda a: True, "ask").outcome == "pass"
    assert made.counts()["excluded"]["broken_share"]["x"] == pytest.approx(share, rel=0.01)
    assert (1 - share) ** forms < 1.1 * made.plan.rates.beta


def test_one_broken_answer_of_many_is_a_fault_and_ends_the_check():
    answers = [
        ServedAnswer(text=str(i), tokens=(), num_prompt_tokens=1, finish_reason="stop")
        for i in range(40)
    ]
    made = verification(answers, forms=40, concurrency=1)
    found = made._rate("x", lambda a: a.text != "12", "ask")
    assert (found.outcome, found.why) == ("fault", "1 of 16 broken: '12'")
    assert "x" not in made.counts()["excluded"]["broken_share"]


@pytest.mark.parametrize(
    ("outcomes", "drawn", "then"),
    [
        ({"prompt": "pass", "temperature 0": "undecided"}, 0, ["greedy"] * 3),
        ({"prompt": "pass", "temperature 0": "pass"}, 0, []),
        ({"prompt": "fault", "temperature 0": "fault"}, 0, []),
        (
            {"distribution": "undecided", "temperature 0": "undecided"},
            judging.NAMED_BY - 1,
            ["plain", "greedy", "plain", "greedy", "greedy"],
        ),
        (  # greedy answers count for the distribution, too
            {"distribution": "undecided", "temperature 0": "undecided"},
            judging.NAMED_BY,
            ["greedy", "greedy", "greedy", "plain", "plain"],
        ),
    ],
)
def test_turns_go_on_for_what_is_undecided(outcomes, drawn, then, monkeypatch):
    asked = []
    monkeypatch.setattr(Asking, "ask", lambda self, kind: asked.append(kind))
    found = [Verdict(check=check, outcome=outcome, why="") for check, outcome in outcomes.items()]
    monkeypatch.setattr(Judge, "judged", lambda self: found)
    for name in ("_schemas", "_tools"):
        monkeypatch.setattr(Verification, name, lambda self: found[0])
    made = verification(answers=10, turn=4)
    made.asking.seen.drawn["plain"] = [None] * drawn
    assert len(made.run()) == 4
    assert asked == ["plain", *then]


def test_wrong_weights_end_the_verification():
    made = verification(max_kl=0.01)
    made.asking.seen.counts.append((5, 5))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Evidence, "short", lambda self: [[0.5]] * 12)
        assert [f.check for f in made.judge.judged()] == ["prompt", "distribution"]
        patch.setattr(Evidence, "short", lambda self: [[0.0001], [0.0002]] * 4)
        assert [f.check for f in made.judge.judged()] == ["prompt", "distribution"]  # too few yet
        patch.setattr(Evidence, "short", lambda self: [[0.0001], [0.0002]] * 6)
        assert [f.check for f in made.judge.judged()][-1] == "temperature 0"


@pytest.mark.parametrize(("causes", "opens", "code"), [(1, 1, 1), (0, 1, 4), (0, 0, 0)])
def test_a_verdict_has_an_exit_code(causes, opens, code):
    findings = [Verdict(check="x", outcome="fault", why="it is cut")] * causes
    findings += [Verdict(check="y", outcome="undecided", why="")] * opens
    assert EXIT_CODES[document({}, findings)["verdict"]] == code


def test_a_server_that_fails_does_not_refuse():
    failing = httpx.MockTransport(lambda request: httpx.Response(500, text="no"))
    with pytest.raises(SlipstreamError, match="HTTP 500"):
        Served.connect("http://x", model="m", transport=failing).ask([])


@pytest.mark.parametrize(("ends", "counted"), [(0.001, 1), (0.5, 0)])
def test_an_empty_answer_is_a_fault_where_the_model_would_not_end(ends, counted):
    made = verification(max_kl=0.01)
    made.reference.answer_ids = lambda tokens: []
    made.reference.tokenizer = SimpleNamespace(encode=lambda text, **more: [])
    made.reference.never = torch.tensor([False, True])
    made.reference.logprobs = lambda *asked: torch.tensor([[1 - ends, ends]]).log()
    empty = ServedAnswer(text="", tokens=(), num_prompt_tokens=1, finish_reason="stop")
    assert made.asking._sample([1], empty, "plain") is None
    made.asking.seen.drawn["plain"] = [
        ScoredAnswer(token_ids=[0], tokens=[], logprobs=torch.zeros(1, 2), kl=[0.0])
    ]
    assert made.asking.seen.short() == [[0.0], *[[0.08]] * counted]


def test_log_probabilities_after_temperature_and_cuts_say_nothing_of_the_distribution():
    made = verification()
    row = {"token_ids": [0], "tokens": [], "logprobs": torch.zeros(1, 2)}
    made.asking.seen.drawn["plain"] = [ScoredAnswer(**row, kl=[0.3], kl_cut=[0.0])]
    made.asking.seen.drawn["warm"] = [
        ScoredAnswer(**row, kl=[0.3], kl_cut=[0.0]),
        ScoredAnswer(**row, kl=[0.0]),
    ]
    made.asking.seen.drawn["greedy"] = [
        ScoredAnswer(**row, kl=[0.5], kl_cut=[9.0]),
        ScoredAnswer(**row, kl=[0.0]),
    ]
    assert made.asking.seen.short() == [[0.3], [0.5], [0.0]]


def test_a_log_probability_that_is_no_number_is_a_very_small_one():
    tokens = '[{"token": "a", "logprob": NaN, "top_logprobs": [{"token": "a", "logprob": NaN}]}]'
    text = (
        f'{{"choices": [{{"message": {{"content": "a"}}, "logprobs": {{"content": {tokens}}}}}]}}'
    )
    replies = httpx.MockTransport(lambda request: httpx.Response(200, text=text))
    (token,) = Served.connect("http://x", model="m", transport=replies).ask([]).tokens
    assert (token.logprob, token.likeliest) == (-9999, ((b"a", -9999),))


@pytest.mark.parametrize(
    "body",
    ['{"error": {"message": "no such field"}}', '{"detail": "no such field"}', "no such field"],
)
def test_a_refusal_is_told_in_the_servers_words(body):
    refusing = httpx.MockTransport(lambda request: httpx.Response(400, text=body))
    with pytest.raises(NotOfferedError, match=r"^HTTP 400: no such field$"):
        Served.connect("http://x", model="m", transport=refusing).ask([])
