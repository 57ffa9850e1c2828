"""Sessions sent to servers: real answers in the next prompt, pauses, subagents, early ends, failures."""

from __future__ import annotations

import asyncio
import time

import pytest

from slipstream.bench.adapters.openai import Endpoint, OpenAIEndpoint
from slipstream.bench.load import Burst, ClosedLoop, MeasuredAnswer
from slipstream.bench.session_metrics import TurnRecord, summarize_turns
from slipstream.bench.session_run import (
    USUAL_RATIO,
    ChatDialogue,
    SessionRun,
    TokenText,
    WordText,
    dialogue_of,
    tokens_per_word,
)
from slipstream.bench.sessions import (
    AgentLoad,
    AgentSession,
    PromptPiece,
    Turn,
    parse_load,
    planned_turns,
)
from slipstream.costs.metrics import RequestTiming
from slipstream.errors import EngineError
from tests.server.conftest import serving
from tests.server.fake_engine import FakeEngine

LOAD = {
    "max_context": 600,
    "turns": "uniform:2-5",
    "system_tokens": 40,
    "task_tokens": "30",
    "turn_tokens": "40",
    "answer_tokens": "10",
    "pause": "0",
    "subagent_rate": 0.4,
    "summary_tokens": "fixed:9",
}


class Scripted:
    """Answers with `says(request)`, a list of token ids, each a token; keeps the requests."""

    def __init__(self, says=lambda request: [900 + i for i in range(request.output_tokens)]):
        self.says, self.requests = says, []
        self.in_flight = self.most = 0

    async def ask(self, request, answer, /):
        self.requests.append(request)
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        try:
            await asyncio.sleep(0)
            said = self.says(request)
            for token in said:
                answer.add(time.monotonic(), 1)
                answer.token_ids.append(token)
            answer.usage = len(request.prompt_token_ids), len(said)
        finally:
            self.in_flight -= 1


def run_of(engine, text=None):
    text = text or TokenText(800, 3)
    return SessionRun(engine, lambda: dialogue_of(text))


async def test_prompts_are_as_long_as_planned_and_hold_the_servers_answers():
    sessions = parse_load({**LOAD, "sessions": 6}).generate(0)
    engine, planned = Scripted(), planned_turns(sessions)
    records = await run_of(engine).run(sessions, ClosedLoop(concurrency=2), 0)
    assert sorted(len(r.prompt_token_ids) for r in engine.requests) == sorted(
        t.input_tokens for t in planned
    )
    assert any(t.is_subagent for t in planned)
    assert len(records) == len(planned)
    # Each later turn's prompt begins with an earlier prompt and its answer.
    said = {r.prompt_token_ids + tuple(engine.says(r)) for r in engine.requests}
    later = [r.prompt_token_ids for r in engine.requests if max(r.prompt_token_ids) >= 900]
    assert len(later) >= sum(t.turn > 0 for t in planned)
    for prompt in later:
        assert any(prompt[: len(old)] == old for old in said)
    summary = summarize_turns(records)
    assert (summary.num_sessions, summary.num_complete) == (6, 6)
    assert summary.num_subagent_turns == sum(t.is_subagent for t in planned)
    assert (summary.num_short, summary.hit_rate) == (0, None)  # it counts no cached tokens
    assert 0 < summary.cacheable_rate < 1


async def test_so_many_sessions_run_at_once():
    load = parse_load({**LOAD, "sessions": 6, "subagent_rate": 0.0})
    for arrivals, most in ((ClosedLoop(concurrency=2), 2), (Burst(), 6)):
        engine = Scripted()
        await run_of(engine).run(load.generate(0), arrivals, 0)
        assert engine.most == most


async def test_a_turn_comes_after_its_pause_and_its_subagents():
    sub = AgentSession(turns=(Turn(new=(PromptPiece(5, 4),), output_tokens=3),))
    turns = (
        Turn(new=(PromptPiece(1, 6),), output_tokens=2),
        Turn(new=(PromptPiece(2, 3),), output_tokens=2, pause_s=0.05, subagents=(sub, sub)),
    )
    engine = Scripted()
    records = await run_of(engine).run([AgentSession(turns=turns)], Burst(), 0)
    first, *subs, last = records
    assert [r.is_subagent for r in records] == [False, True, True, False]
    assert last.timing.sent >= first.timing.last_token + 0.05
    assert all(r.timing.sent < last.timing.sent for r in subs)
    prompt = engine.requests[-1].prompt_token_ids
    assert prompt[-6:] == (900, 901, 902) * 2  # the summaries
    assert len(prompt) == 6 + 2 + 3 + 6


async def test_the_next_prompt_makes_up_for_an_answer_that_ended_early():
    """A server that does not know `ignore_eos` stops when it likes."""
    engine = Scripted(says=lambda request: [900])
    sessions = parse_load({**LOAD, "sessions": 2, "subagent_rate": 0.0}).generate(0)
    records = await run_of(engine).run(sessions, ClosedLoop(concurrency=1), 0)
    assert sorted(len(r.prompt_token_ids) for r in engine.requests) == sorted(
        t.input_tokens for t in planned_turns(sessions)
    )
    summary = summarize_turns(records)
    asked = [t.output_tokens for t in planned_turns(sessions)]
    assert summary.short_tokens == sum(asked) - len(asked)
    assert summary.num_short == sum(n > 1 for n in asked)
    assert summary.num_complete == 2


async def test_an_empty_answer_does_not_end_its_session():
    engine = Scripted(says=lambda request: [] if len(engine.requests) == 1 else [900])
    turns = tuple(Turn(new=(PromptPiece(i, 4),), output_tokens=3) for i in range(3))
    records = await run_of(engine).run([AgentSession(turns=turns)], Burst(), 0)
    summary = summarize_turns(records)
    assert (summary.turns.num_requests, summary.turns.num_failed) == (3, 1)
    assert summary.turns.errors == {"no token came": 1}


async def test_a_failed_turn_ends_its_session_and_no_other():
    def says(request):
        if len(engine.requests) == 2:
            raise EngineError("broken")
        return [900] * request.output_tokens

    engine = Scripted(says)
    sessions = [
        AgentSession(turns=(Turn(new=(PromptPiece(i, 4),), output_tokens=2),) * 3) for i in range(2)
    ]
    records = await run_of(engine).run(sessions, ClosedLoop(concurrency=1), 0)
    summary = summarize_turns(records)
    assert [(r.session, r.turn) for r in records] == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)]
    assert (summary.num_complete, summary.num_sessions) == (1, 2)
    assert summary.turns.errors == {"EngineError: broken": 1}


async def test_answers_without_token_ids_are_refused_where_ids_are_sent():
    class Mute(Scripted):
        async def ask(self, request, answer, /):
            answer.add(time.monotonic(), 1)

    records = await run_of(Mute()).run(AgentLoad(sessions=1).generate(0), Burst(), 0)
    assert [r.timing.error for r in records] == [
        "the server gives no token ids of its answers; use --api chat"
    ]


def test_a_chat_alternates_and_holds_results_of_tools_and_summaries():
    talk = ChatDialogue(WordText(1.3, 0))
    talk.say([PromptPiece(0, 13, "system"), PromptPiece(1, 26)], ())
    talk.hear(MeasuredAnswer(text=["Let me ", "look."], reasoning=["Hm."]))
    talk.say(
        [PromptPiece(2, 13, "tool"), PromptPiece(3, 5, "summary")],
        [MeasuredAnswer(text=["All ", "well."])],
    )
    talk.hear(MeasuredAnswer())
    system, user, answer, results, nothing = talk.request(5).messages
    assert [m["role"] for m in talk.messages] == [
        "system",
        "user",
        "assistant",
        "user",
        "assistant",
    ]
    assert (len(system["content"].split()), len(user["content"].split())) == (10, 20)
    assert answer == {"role": "assistant", "content": "Let me look.", "reasoning_content": "Hm."}
    assert results["content"].startswith('<tool_result name="read_file">')
    assert '<tool_result name="subagent">\nAll well.' in results["content"]
    assert nothing["content"]


async def test_tokens_of_a_word_are_measured():
    class Counting:
        tokens_of_a_word, usage = 1.5, True

        async def ask(self, request, answer, /):
            words = len(request.messages[-1]["content"].split())
            answer.usage = (round(words * self.tokens_of_a_word) + 7, 1) if self.usage else None

    engine = Counting()
    assert await tokens_per_word(engine, 0) == pytest.approx(1.5)
    engine.usage = False
    assert await tokens_per_word(engine, 0) == USUAL_RATIO


async def test_both_forms_against_a_server():
    """The fake engine says the prompt again; it has a token a byte."""
    more = {"sessions": 2, "task_tokens": "fixed:200", "turn_tokens": "fixed:150"}
    sessions = parse_load({**LOAD, **more, "max_context": 700}).generate(0)
    engine = FakeEngine(max_model_len=4000)
    with serving(engine, served_model_names=("tiny",)) as server:
        endpoint = Endpoint(url=server.url, model="tiny", token_ids=True)
        async with OpenAIEndpoint(endpoint) as asked:
            ids = await run_of(asked, TokenText(200, 0)).run(sessions, Burst(), 0)
            lengths = [len(prompt["prompt_token_ids"]) for prompt, _, _ in engine.seen]
            ratio = await tokens_per_word(asked, 0)
            chat = await run_of(asked, WordText(ratio, 0)).run(sessions, Burst(), 0)
    planned = planned_turns(sessions)
    assert sorted(lengths) == sorted(t.input_tokens for t in planned)
    assert ratio == pytest.approx(4.5, rel=0.3)  # letters of a word
    for records in (ids, chat):
        summary = summarize_turns(records)
        assert summary.turns.errors == {}
        assert len(records) == len(planned)
        assert summary.num_complete == 2
    wanted = sum(t.input_tokens for t in planned)
    assert summary.turns.input_tokens == pytest.approx(wanted, rel=0.4)  # with names of roles


def test_failed_turns_and_answers_that_are_too_long_or_too_short_are_told_apart():
    def turn(session, output_tokens, *, error=None, is_subagent=False):
        timing = RequestTiming(
            input_tokens=10,
            output_tokens=output_tokens,
            sent=1.0,
            first_token=2.0,
            last_token=3.0,
            error=error,
        )
        return TurnRecord(session=session, turn=0, is_subagent=is_subagent, is_last=True, timing=timing,
                          cacheable_tokens=4, counts_cached=False, asked_tokens=5)  # fmt: skip

    failed = turn(0, 0, error="it is full")
    records = [failed, turn(0, 5, is_subagent=True), turn(1, 7), turn(2, 3)]
    found = summarize_turns(records, num_gpus=2)
    assert (found.num_sessions, found.num_complete, found.turns.num_failed) == (3, 2, 1)
    assert (found.num_short, found.short_tokens) == (1, 2)
    assert found.output_throughput_per_gpu == found.turns.output_throughput / 2
    assert found.total_throughput_per_gpu == found.turns.total_throughput / 2
    assert (found.session_s.mean, found.cacheable_rate) == (2.0, 0.4)
