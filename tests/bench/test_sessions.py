"""Generated sessions: lengths, sums, seeds, prefixes and the bound of hits; traces as sessions."""

from __future__ import annotations

import itertools
import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.bench.session_run import TokenText
from slipstream.bench.sessions import (
    AgentLoad,
    Draw,
    PromptPiece,
    SeenPrefixes,
    of_rows,
    parse_draw,
    parse_load,
    planned_turns,
)
from slipstream.bench.traces import read_rows
from slipstream.errors import ConfigError

LOADS = st.builds(
    AgentLoad,
    sessions=st.integers(1, 5),
    max_context=st.integers(60, 4000),
    turns=st.integers(1, 6).map(lambda n: Draw("uniform", n, 2 * n)),
    system_tokens=st.integers(0, 50),
    task_tokens=st.builds(Draw, st.just("lognormal"), st.integers(1, 90), st.floats(0, 1.5)),
    turn_tokens=st.builds(Draw, st.just("exponential"), st.integers(1, 300)),
    answer_tokens=st.builds(Draw, st.just("fixed"), st.integers(1, 200)),
    subagent_rate=st.sampled_from((0.0, 0.3, 1.0)),
)


@given(LOADS, st.integers(0, 99))
def test_sessions_stay_within_their_limits(load, seed):
    sessions = load.generate(seed)
    assert len(sessions) == load.sessions
    for session in sessions:
        assert 1 <= len(session.turns) <= load.turns.b
        assert session.context_lengths[-1] <= load.max_context
        for turn in session.all_turns():
            assert turn.output_tokens >= 1
            assert turn.pause_s >= 0
            assert all(part.num_tokens >= 1 for part in turn.new)
            assert all(s.context_lengths[-1] <= load.max_context for s in turn.subagents)
            assert len(turn.subagents) <= load.subagents.b


@given(LOADS, st.integers(0, 99))
def test_a_seed_gives_the_same_sessions_however_many(load, seed):
    more = AgentLoad(**{n: getattr(load, n) for n in load.__slots__} | {"sessions": 7})
    assert load.generate(seed) == more.generate(seed)[: load.sessions]


@given(LOADS)
def test_a_turns_prompt_begins_with_the_prompt_and_answer_before(load):
    turns = planned_turns(load.generate(1))
    assert len(turns) == sum(1 for s in load.generate(1) for _ in s.all_turns())
    for i, turn in enumerate(turns):
        if turn.turn:
            (last, *_) = (j for j, _ in turn.after)
            old = turns[last]
            assert turn.parts[: len(old.parts)] == old.parts
            assert turn.parts[len(old.parts)].num_tokens == old.output_tokens
        assert all(j < i for j, _ in turn.after)
        assert turn.input_tokens + turn.output_tokens <= load.max_context
    assert sum(t.ends_session for t in turns) == load.sessions


@given(LOADS)
def test_a_parent_gets_what_its_subagents_said_last(load):
    turns = planned_turns(load.generate(2))
    for turn in turns:
        for j, pause_s in turn.after[1:] if turn.turn else ():
            assert turns[j].is_subagent
            assert pause_s == 0.0
            assert (
                PromptPiece(turns_answer(turns, j), turns[j].output_tokens, "answer") in turn.parts
            )


def turns_answer(turns, index):
    """The key of an answer: it is in the prompt of no turn before it."""
    from slipstream.bench.sessions import ANSWER_KEYS

    return ANSWER_KEYS + index


@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), min_size=1, max_size=5),
        min_size=1,
        max_size=8,
    )
)
def test_the_bound_is_the_longest_common_prefix_with_an_earlier_prompt(prompts):
    seen, known = SeenPrefixes(), []
    for prompt in prompts:
        parts = [PromptPiece(key, n) for key, n in prompt]
        tokens = [(key, i) for key, n in prompt for i in range(n)]
        common = (
            sum(
                1
                for _ in itertools.takewhile(
                    lambda pair: pair[0] == pair[1], zip(tokens, old, strict=False)
                )
            )
            for old in known
        )
        # A part that begins again after a shorter one of its key is another place of the trie.
        assert seen.longest(parts) <= min(max(common, default=0), len(tokens) - 1)
        seen.add(parts)
        known.append(tokens)
        assert seen.longest(parts) == len(tokens) - 1


def test_tokens_of_a_shorter_part_begin_those_of_a_longer_one():
    text = TokenText(300, 5)
    assert text.tokens(PromptPiece(3, 40))[:10] == text.tokens(PromptPiece(3, 10))
    assert text.tokens(PromptPiece(3, 40)) != text.tokens(PromptPiece(4, 40))
    assert TokenText(300, 6).tokens(PromptPiece(3, 40)) != text.tokens(PromptPiece(3, 40))


def test_means_are_those_asked_for():
    rng = random.Random(0)
    for draw in (
        Draw("lognormal", 444, 0.8),
        Draw("uniform", 20, 60),
        Draw("exponential", 30),
        Draw("fixed", 9),
    ):
        mean = sum(draw.count(rng) for _ in range(20_000)) / 20_000
        assert mean == pytest.approx(draw.mean, rel=0.03)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("30", Draw("uniform", 15, 45)),
        ("fixed:3", Draw("fixed", 3)),
        ("uniform:2-9", Draw("uniform", 2, 9)),
        ("exponential:4", Draw("exponential", 4)),
        ("lognormal:4:0.5", Draw("lognormal", 4, 0.5)),
    ],
)
def test_distributions_are_parsed(text, found):
    assert parse_draw(text, Draw("uniform", 20, 60), "turns") == found
    assert parse_draw(str(found), Draw("fixed", 1), "turns") == found


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "0",
        "-1",
        "nan",
        "inf",
        "fixed:",
        "fixed:0",
        "uniform:5",
        "uniform:5-2",
        "uniform:1.2-1.8",
        "lognormal:3",
        "lognormal:3:x",
        "gauss:3:1",
        "uniform:1-2-3",
        "fixed:1:2",
    ],
)
def test_wrong_distributions_are_refused_by_name(text):
    with pytest.raises(ConfigError, match="turns=") as caught:
        parse_load({"turns": text})
    assert caught.value.field == "turns"


@pytest.mark.parametrize(
    ("given_", "field"),
    [
        ({"sessions": 0}, "sessions"),
        ({"max_context": 2}, "max_context"),
        ({"subagent_rate": 1.5}, "subagent_rate"),
        ({"subagent_rate": float("nan")}, "subagent_rate"),
        ({"system_tokens": -1}, "system_tokens"),
        ({"system_tokens": 500, "max_context": 400}, "system_tokens"),
        ({"pause": "-1"}, "pause"),
    ],
)
def test_wrong_loads_are_refused_by_name(given_, field):
    with pytest.raises(ConfigError) as caught:
        parse_load(given_)
    assert caught.value.field == field


def test_a_load_is_fitted_to_the_models_context():
    fitted = AgentLoad().fitted(8192)
    assert (fitted.max_context, fitted.system_tokens) == (8192, 819)
    assert AgentLoad().fitted(None).max_context == 142_000
    assert AgentLoad(max_context=8192).fitted(8192).max_context == 8192
    with pytest.raises(ConfigError, match="8192") as caught:
        AgentLoad(max_context=8193).fitted(8192)
    assert caught.value.field == "max_context"


def trace(tmp_path, *rows):
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_a_mooncake_trace_is_sessions_of_a_turn_with_common_blocks(tmp_path):
    path = trace(
        tmp_path,
        {"timestamp": 4000, "input_length": 1000, "output_length": 5, "hash_ids": [3, 4]},
        {"timestamp": 1000, "input_length": 700, "output_length": 6, "hash_ids": [3, 9]},
        {"timestamp": 5000, "input_length": 520, "output_length": 0},
    )
    sessions = of_rows(read_rows(path))
    assert [s.start_s for s in sessions] == [0.0, 3.0, 4.0]
    assert [t.new for s in sessions for t in s.turns] == [
        (PromptPiece(3, 512), PromptPiece(9, 188)),
        (PromptPiece(3, 512), PromptPiece(4, 488)),
        (PromptPiece(-1, 520),),
    ]
    turns, seen = planned_turns(sessions), SeenPrefixes()
    seen.add(turns[0].parts)
    assert seen.longest(turns[1].parts) == 512


def test_rows_of_a_session_are_its_turns(tmp_path):
    path = trace(
        tmp_path,
        {
            "session_id": "a",
            "timestamp": 2000,
            "input_length": 600,
            "output_length": 7,
            "hash_ids": [1, 2],
        },
        {
            "session_id": "b",
            "timestamp": 1000,
            "input_length": 10,
            "output_length": 1,
            "hash_ids": [8],
        },
        {"session_id": "a", "delay": 1500, "input_length": 30, "output_length": 2, "hash_ids": [5]},
        {
            "session_id": "b",
            "timestamp": 3000,
            "input_length": 20,
            "output_length": 3,
            "hash_ids": [6],
        },
        {"session_id": "b", "timestamp": 3500, "input_length": 1, "output_length": 1},
    )
    b, a = of_rows(read_rows(path))
    assert (b.start_s, a.start_s) == (0.0, 1.0)
    assert [(t.num_new_tokens, t.output_tokens, t.pause_s) for t in a.turns] == [
        (600, 7, 0.0),
        (30, 2, 1.5),
    ]
    assert [t.pause_s for t in b.turns] == [0.0, 2.0, 0.5]


@pytest.mark.parametrize(
    "row",
    [
        {"session_id": "a", "input_length": 6, "output_length": 7},
        {"session_id": "a", "delay": -5, "input_length": 6, "output_length": 7},
        {"timestamp": "x", "input_length": 6, "output_length": 7},
        {"timestamp": 1e999, "input_length": 6, "output_length": 7},
        {"timestamp": 1, "input_length": 0, "output_length": 7},
        {"timestamp": 1, "input_length": 6, "output_length": 7, "hash_ids": 5},
    ],
)
def test_wrong_rows_are_refused_by_their_line(tmp_path, row):
    path = trace(tmp_path, {"timestamp": 1, "input_length": 6, "output_length": 7}, row)
    with pytest.raises(ConfigError, match="line 2") as caught:
        read_rows(path, field="trace_file")
    assert caught.value.field == "trace_file"


def test_a_trace_may_have_prompts_of_one_token_and_no_others_that_are_short(tmp_path):
    file = tmp_path / "t.jsonl"
    row = {"timestamp": 0, "input_length": 1, "output_length": 0}
    file.write_text(json.dumps(row) + "\n")
    (found,) = read_rows(file, "trace")
    assert (found.input_tokens, found.output_tokens) == (1, 1)
    file.write_text(json.dumps(row | {"input_length": 0}) + "\n")
    with pytest.raises(ConfigError, match="a length below 1"):
        read_rows(file, "trace")
