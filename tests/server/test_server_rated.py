"""Rated answers as data: what the audit log keeps if it is asked to, and what an export makes of it."""

import json

import pytest

from slipstream.cli.main import main
from slipstream.errors import ConfigError
from slipstream.evals.text import read_documents
from slipstream.server.operations.audit import records
from slipstream.server.operations.rated import Skipped, rows
from slipstream.server.state import ServerSettings
from tests.server.conftest import *  # noqa: F403 - servers

TEXTS = {"audit_prompts": True, "audit_answers": True}
CHAT = {"model": "fake", "messages": [{"role": "user", "content": "why?"}], "max_tokens": 4}


def exported(capsys, log, out, *words):
    assert main(["audit", "export", str(log), str(out), *words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    return told, [json.loads(line) for line in out.read_text().splitlines()]


@pytest.mark.parametrize("stream", [False, True])
def test_a_rated_answer_is_exported_as_it_was_given(serve, tmp_path, capsys, stream):
    log = tmp_path / "audit.log"
    client = serve(audit_log=str(log), **TEXTS).client()
    made = client.chat.completions.create(**CHAT, stream=stream)
    if stream:
        chunks = list(made)
        id_ = chunks[0].id
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    else:
        id_, text = made.id, made.choices[0].message.content
    given = {"request_id": id_, "rating": "up", "score": 0.8, "comment": "good"}
    client.post("/feedback", body=given, cast_to=object)
    told, (row,) = exported(capsys, log, tmp_path / "good.jsonl")
    assert text
    assert row["messages"] == [*CHAT["messages"], {"role": "assistant", "content": text}]
    assert (row["rating"], row["score"], row["comments"], row["model"]) == (
        *("up", 0.8, ["good"]),
        "fake",
    )
    assert told == {"rows": 1, "skipped": {}}
    (document,) = read_documents(str(tmp_path / "good.jsonl"), "all")
    assert document.turns[-1] == ("assistant", text)


def test_nothing_is_kept_unless_it_is_asked_for(serve, tmp_path, capsys):
    log = tmp_path / "audit.log"
    client = serve(audit_log=str(log), audit_prompts=True).client()
    answer = client.chat.completions.create(**CHAT)
    client.post("/feedback", body={"request_id": answer.id, "rating": "up"}, cast_to=object)
    assert all("answers" not in record for record in records(log))
    told, found = exported(capsys, log, tmp_path / "none.jsonl")
    assert (found, sum(told["skipped"].values())) == ([], 1)
    with pytest.raises(ConfigError, match="audit_prompts"):
        ServerSettings(audit_log=str(log), audit_answers=True)


def record(id_, body, answers=("it is",)):
    return {
        "kind": "request",
        "id": id_,
        "model": "m",
        "body": json.dumps(body),
        "answers": answers,
    }


def rated(id_, rating, key=None, **more):
    return {"kind": "feedback", "request": id_, "rating": rating, "key": key, **more}


def test_each_keys_last_rating_counts_and_ties_are_left_out():
    said = {"messages": [{"role": "user", "content": "a"}]}
    log = [record(id_, said) for id_ in "abc"]
    log += [
        rated("a", "down", "x"),
        rated("a", "up", "x", score=1.0),
        rated("a", "up", "y", score=0.5),
    ]
    log += [rated("b", "up", "x"), rated("b", "down", "y")]
    log += [rated("c", "down", "x")]
    skipped = Skipped()
    found = list(rows(log, skipped))
    assert [(r["id"], r["rating"]) for r in found] == [("a", "up"), ("c", "down")]
    assert (found[0]["ratings"], found[0]["score"]) == ({"up": 2, "down": 0}, 0.75)
    assert skipped == {"rated up as often as down": 1}
    assert [r["id"] for r in rows(log, skipped, rating="down")] == ["c"]


@pytest.mark.parametrize(
    ("body", "answers", "messages"),
    [
        ({"prompt": "p"}, ["a"], [("user", "p")]),
        ({"system": "s", "messages": [{"role": "user", "content": [{"type": "text", "text": "p"}]}]}, ["a"],
         [("system", "s"), ("user", "p")]),
        ({"instructions": "s", "input": "p"}, ["a"], [("system", "s"), ("user", "p")]),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, ["a"], None),
        ({"messages": [{"role": "tool", "content": "p"}]}, ["a"], None),
        ({"prompt": [1, 2]}, ["a"], None),
        ({"prompt": "p"}, ["a", "b"], None),
    ],
)  # fmt: skip
def test_conversations_of_each_protocol_are_read_and_others_left_out(body, answers, messages):
    skipped = Skipped()
    found = list(rows([record("a", body, answers), rated("a", "up")], skipped))
    if messages is None:
        assert not found
        assert sum(skipped.values()) == 1
    else:
        (row,) = found
        assert [(m["role"], m["content"]) for m in row["messages"]] == [
            *messages,
            ("assistant", "a"),
        ]


def test_a_rating_without_its_request_is_counted():
    skipped = Skipped()
    assert list(rows([rated("a", "up")], skipped)) == []
    assert skipped == {"its request is not in the log": 1}
