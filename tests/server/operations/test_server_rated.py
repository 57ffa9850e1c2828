"""Rated answers as data: what the audit log keeps if it is asked to, and what an export makes of it."""

import json
from dataclasses import replace

import pytest

from slipstream.cli.main import main
from slipstream.errors import ConfigError
from slipstream.evals.text import read_documents
from slipstream.messages.finish_reason import FinishReason
from slipstream.server.operations.audit import records
from slipstream.server.operations.rated import Skipped, rows
from slipstream.server.state import ServerSettings
from tests.server.conftest import *  # noqa: F403 - servers
from tests.server.fake_engine import FakeEngine
from tests.support import tiny_models

TEXTS = {"audit_prompts": True, "audit_answers": True}
CHAT = {"model": "fake", "messages": [{"role": "user", "content": "why?"}], "max_tokens": 4}


class Ending(FakeEngine):
    """Answers that end by themselves, and not by max_tokens."""

    def _delta(self, *given):
        made = super()._delta(*given)
        return replace(made, finish_reason=made.finish_reason and FinishReason.STOP)


def exported(capsys, log, out, *words):
    assert main(["audit", "export", *words, str(log), str(out), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    return told, [json.loads(line) for line in out.read_text().splitlines()]


@pytest.mark.parametrize("stream", [False, True])
def test_a_rated_answer_is_exported_as_it_was_given(serve, tmp_path, capsys, stream):
    log = tmp_path / "audit.log"
    client = serve(Ending(), audit_log=str(log), **TEXTS).client()
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


def record(id_, body, answers=("it is",), **more):
    return {
        "kind": "request",
        "id": id_,
        **more,
        "model": "m",
        "body": json.dumps(body),
        "answers": answers,
    }


def rated(id_, rating, key=None, **more):
    return {"kind": "feedback", "request": id_, "rating": rating, "key": key, **more}


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def test_each_keys_last_rating_counts_and_ties_are_left_out():
    said = {"messages": [{"role": "user", "content": "a"}]}
    log = [record(id_, said, key="x") for id_ in "abc"]
    log += [
        rated("a", "down", "x"),
        rated("a", "up", "x", score=1.0),
        rated("a", "up", "y", score=0.5),
    ]
    log += [rated("b", "up", "x"), rated("b", "down", "y")]
    log += [rated("c", "down", "x")]
    skipped = Skipped()
    found = list(rows(log, skipped, raters=["y"]))
    assert [(r["id"], r["rating"]) for r in found] == [("a", "up"), ("c", "down")]
    assert (found[0]["ratings"], found[0]["score"]) == ({"up": 2, "down": 0}, 0.75)
    assert skipped == {"rated up as often as down": 1}
    assert [r["id"] for r in rows(log, skipped, rating="down", raters=["y"])] == ["c"]


OTHERS = "ratings with another key than the request's"


@pytest.mark.parametrize(
    ("raters", "found", "others"),
    [
        ([], {"up": 1, "down": 0}, 2),
        (["operator"], None, 1),  # a tie
        (["any"], {"up": 1, "down": 2}, 0),
    ],
)
def test_ratings_count_of_the_requests_own_key_and_of_named_raters(raters, found, others):
    said = {"messages": [user("q")]}
    log = [record("a", said, key="reader"), rated("a", "up", "reader")]
    log += [rated("a", "down", "stranger"), rated("a", "down", "operator-17")]
    skipped = Skipped()
    made = [row["ratings"] for row in rows(log, skipped, raters=raters)]
    assert made == ([] if found is None else [found])
    assert skipped[OTHERS] == others


def test_an_answer_that_only_strangers_rated_is_no_data():
    log = [record("a", {"messages": [user("q")]}, key="reader"), rated("a", "up", "stranger")]
    skipped = Skipped()
    assert list(rows([*log, rated("a", "up")], skipped)) == []
    assert skipped == {OTHERS: 2}  # one had no key at all


def test_a_rater_whom_the_log_does_not_know_is_refused():
    log = [record("a", {"messages": [user("q")]}), rated("a", "up", "reader")]
    for rater in ("nobody", "re", "operator"):
        with pytest.raises(ConfigError, match=f"no rating in the log has the key '{rater}'"):
            list(rows(log, Skipped(), raters=[rater]))


def test_another_keys_rating_of_an_answer_is_logged_and_not_exported(serve, tmp_path, capsys):
    log = tmp_path / "audit.log"
    server = serve(Ending(), audit_log=str(log), api_keys=("reader", "stranger"), **TEXTS)
    id_ = server.client(api_key="reader").chat.completions.create(**CHAT).id
    given = {"request_id": id_, "rating": "up"}
    server.client(api_key="stranger").post("/feedback", body=given, cast_to=object)
    told, found = exported(capsys, log, tmp_path / "none.jsonl")
    assert (found, told["skipped"]) == ([], {OTHERS: 1})
    key = next(r["key"] for r in records(log) if r["kind"] == "feedback")
    assert len(exported(capsys, log, tmp_path / "all.jsonl", "--raters", key[:8])[1]) == 1
    server.client(api_key="reader").post("/feedback", body=given, cast_to=object)
    assert len(exported(capsys, log, tmp_path / "good.jsonl")[1]) == 1


@pytest.mark.parametrize(
    ("body", "answers", "messages"),
    [
        ({"system": "s", "messages": [{"role": "user", "content": [{"type": "text", "text": "p"}]}]}, ["a"],
         [("system", "s"), ("user", "p")]),
        ({"instructions": "s", "input": "p"}, ["a"], [("system", "s"), ("user", "p")]),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, ["a"], None),
        ({"messages": [{"role": "tool", "content": "p"}]}, ["a"], None),
        ({"messages": [user("p")]}, ["a", "b"], None),
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


def test_without_keys_each_rating_counts():
    ratings = [rated("a", r) for r in ("up", "up", "up", "down")]
    (row,) = rows([record("a", {"messages": [user("q")]}), *ratings], Skipped())
    assert (row["rating"], row["ratings"]) == ("up", {"up": 3, "down": 1})


def test_an_answer_that_continues_others_is_exported_with_all_of_them(serve, tmp_path, capsys):
    log = tmp_path / "audit.log"
    client = serve(Ending(), audit_log=str(log), **TEXTS).client()
    before, said = None, []
    for text in ("My name is Ann.", "I live in Rome.", "What is my name?"):
        asked = {"input": text, "instructions": f"To {text}", "max_output_tokens": 9}
        more = {} if before is None else {"previous_response_id": before}
        made = client.responses.create(model="fake", **asked, **more)
        before = made.id
        said += [user(text), assistant(made.output_text)]
    client.post("/feedback", body={"request_id": before, "rating": "up"}, cast_to=object)
    told, (row,) = exported(capsys, log, tmp_path / "good.jsonl")
    system = {"role": "system", "content": "To What is my name?"}  # only the last request's
    assert row["messages"] == [system, *said]
    assert told["skipped"] == {}


@pytest.mark.parametrize(
    "body",
    [
        {"input": "What is my name?", "previous_response_id": f"resp_{'b' * 32}"},
        {"input": [{"type": "item_reference", "id": "msg_1"}, user("What is my name?")]},
    ],
)
def test_an_answer_whose_earlier_turns_are_not_in_the_log_is_left_out(body):
    skipped = Skipped()
    assert list(rows([record("a", body), rated("a", "up")], skipped)) == []
    assert skipped == {"earlier turns are elsewhere": 1}


@pytest.mark.parametrize(
    ("route", "more"),
    [("/v1/messages", {}), ("/v1/chat/completions", {"continue_final_message": True})],
)
def test_an_answer_that_the_request_began_is_one_turn(route, more):
    body = {"messages": [user("q"), assistant("It ")], **more}
    (row,) = rows([record("a", body, ["is."], route=route), rated("a", "up")], Skipped())
    assert row["messages"] == [user("q"), assistant("It is.")]


ASKED = {"messages": [user("q")]}


@pytest.mark.parametrize(
    ("body", "more", "why"),
    [
        ({"prompt": "def f("}, {"route": "/v1/completions"}, "raw prompt"),
        ({"prompt": "def f(", "suffix": "return"}, {}, "raw prompt"),
        ({"prompt": [1, 2]}, {}, "raw prompt"),
        ({"prompt": "p", "raw": True}, {"route": "/api/generate"}, "raw prompt"),
        ({"prompt": "p", "images": ["aa"]}, {"route": "/api/generate"}, "more than texts"),
        ({"messages": [{**user("q"), "images": ["aa"]}]}, {}, "more than texts"),
        ({**ASKED, "tools": [{"type": "function", "function": {"name": "f"}}]}, {}, "tools"),
        (ASKED, {"finish_reasons": ["length"]}, "cut off by max_tokens"),
        (ASKED, {"finish_reasons": ["deadline"]}, "cut off by deadline"),
        ({"messages": [user("p"), user("q")]}, {}, "don't alternate"),
        ({"messages": [user("p"), assistant("a")]}, {}, "don't alternate"),
        ({"messages": [user(" ")]}, {}, "empty"),
    ],
)  # fmt: skip
def test_what_would_teach_something_else_is_left_out_by_reason(body, more, why):
    skipped = Skipped()
    assert list(rows([record("a", body, **more), rated("a", "up")], skipped)) == []
    (reason,) = skipped
    assert why in reason


def test_an_ollama_prompt_is_a_users_turn():
    made = record("a", {"prompt": "p", "system": "s"}, ["x"], route="/api/generate")
    (row,) = rows([made, rated("a", "up")], Skipped())
    assert row["messages"] == [{"role": "system", "content": "s"}, user("p"), assistant("x")]


def test_the_log_says_that_max_tokens_cut_an_answer(serve, tmp_path, capsys):
    log = tmp_path / "audit.log"
    client = serve(audit_log=str(log), **TEXTS).client()
    made = client.chat.completions.create(**CHAT)
    client.post("/feedback", body={"request_id": made.id, "rating": "up"}, cast_to=object)
    assert made.choices[0].finish_reason == "length"
    told, _ = exported(capsys, log, tmp_path / "good.jsonl")
    assert told == {"rows": 0, "skipped": {"cut off by max_tokens or the context's end": 1}}


@pytest.mark.parametrize("part", ["audit.log", "audit.log.1", "link"])
def test_an_export_over_the_log_is_refused_and_the_log_kept(tmp_path, capsys, part):
    log = tmp_path / "audit.log"
    for path in (log, tmp_path / "audit.log.1"):
        path.write_text("{}\n")
    (tmp_path / "link").symlink_to(log)
    assert main(["audit", "export", str(log), str(tmp_path / part)]) == 2
    assert "name another file" in capsys.readouterr().err
    assert log.read_text() == (tmp_path / "audit.log.1").read_text() == "{}\n"


def test_an_export_is_for_its_owner_alone(tmp_path, capsys):
    log, out = tmp_path / "audit.log", tmp_path / "good.jsonl"
    log.touch()
    exported(capsys, log, out)
    assert out.stat().st_mode & 0o077 == 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_distillation_draft_heads_and_evaluation_take_the_rows(tmp_path, capsys):
    model = tmp_path / "model"
    tiny_models.write_with_tokenizer(model, max_position_embeddings=1024)
    log = []
    for number in range(80):
        question = f"Question {number}: what is a lighthouse for, and who keeps it at night?"
        answer = f"It is answer {number}: a light for ships, which a keeper lights each evening."
        body = json.dumps({"messages": [{"role": "user", "content": question}]})
        request = {"kind": "request", "id": f"{number:032x}", "model": "m", "key": None}
        rating = "up" if number % 3 else "down"
        log.append({**request, "body": body, "answers": [answer]})
        log.append({"kind": "feedback", "request": request["id"], "rating": rating, "key": None})
    for name, rating in (("good", "up"), ("rated", None)):
        made = rows(log, Skipped(), rating=rating)
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))

    def compressed(name, *steps, more=()):
        recipe = tmp_path / f"{name}.json"
        recipe.write_text(json.dumps(list(steps)))  # which is YAML too
        words = ["compress", str(model), "--recipe", str(recipe), "--out", str(tmp_path / name)]
        assert main([*words, *more]) == 0, capsys.readouterr().err
        return tmp_path / name

    good = {"text": str(tmp_path / "good.jsonl"), "context": 64}
    trained = {"num_windows": 8, "num_steps": 2, "batch_size": 2, "micro_batch": 1}
    distilled = compressed(
        "distilled",
        {"calibrate": {**good, "num_windows": 2}},
        {"prune": {"drop_layers": [1]}},
        {"distill": {**good, **trained}},
        more=["--allow-any-quality"],  # two steps teach a tiny model little
    )
    assert json.loads((distilled / "config.json").read_text())["num_hidden_layers"] == 1
    asked = {"num_places": 2, "num_answers": 8, "max_tokens": 12, "context": 256}
    head = compressed("head", {"draft_head": {**good, **asked, "kind": "medusa", "minutes": 0.05}})
    assert (head / "slipstream-draft.json").exists()
    rated = str(tmp_path / "rated.jsonl")
    words = ["eval", str(model), "--tasks", rated, "--windows", "1", "--context", "64", "--json"]
    capsys.readouterr()
    assert main(words) == 0
    assert "auc" in capsys.readouterr().out
