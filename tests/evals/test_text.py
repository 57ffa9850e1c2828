"""Text for calibration and evaluation: what is read, on which side of the split it lands, and how it is cut."""

from __future__ import annotations

import json
import sys
import types

import pytest

from slipstream.engine.text.tokenizer import Tokenizer
from slipstream.errors import ConfigError
from slipstream.evals import text
from slipstream.evals.text import (
    Document,
    TextSettings,
    calibration_text,
    check_text,
    cut,
    read_documents,
    read_windows,
)


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    return Tokenizer.from_pretrained(tiny_model)


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_the_split_is_whole_disjoint_and_by_content(tmp_path):
    rows = [{"text": f"document {i} " * 3} for i in range(200)]
    path = write_lines(tmp_path / "a.jsonl", rows)
    turned = write_lines(tmp_path / "b.jsonl", rows[::-1])
    parts = {
        part: [d.text for d in read_documents(path, part)]
        for part in ("calibration", "evaluation", "all")
    }
    assert parts["all"] == [row["text"] for row in rows]
    assert sorted(parts["calibration"] + parts["evaluation"]) == sorted(parts["all"])
    assert 70 < len(parts["calibration"]) < 130
    assert set(parts["calibration"]) == {d.text for d in read_documents(turned, "calibration")}
    longer = Document(text=parts["calibration"][0] + "x" * 300 + " and more")
    other = Document(text=parts["calibration"][0] + "x" * 300 + " and less")
    assert longer.part == other.part  # they open alike


def test_forms_of_objects(tmp_path):
    turns = (("user", "Hi"), ("assistant", "Hello"))
    rows = [
        {"text": "plain"},
        {
            "messages": [
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "content": "Hello"},
            ]
        },
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
        {"prompt": "Hi", "completion": "Hello"},
        {"prompt": "Hi", "response": "Hello"},
    ]
    wanted = [Document(text="plain"), *[Document(turns=turns)] * 4]
    assert list(read_documents(write_lines(tmp_path / "a.jsonl", rows), "all")) == wanted
    (tmp_path / "a.json").write_text(json.dumps(rows))
    assert list(read_documents(str(tmp_path / "a.json"), "all")) == wanted


def test_turns_end_where_a_template_would_refuse():
    def turns(*given):
        return text._turns([{"role": role, "content": content} for role, content in given])

    whole = (("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "c"))
    assert turns(*whole) == whole
    assert turns(("human", "a"), ("gpt", "b"), ("gpt", "c")) == (("user", "a"), ("assistant", "b"))
    assert turns(("user", "a"), ("assistant", "b"), ("user", " ")) == (
        ("user", "a"),
        ("assistant", "b"),
    )
    for broken in (
        [],
        [("gpt", "b"), ("human", "a")],
        [("user", "a")],
        [("bard", "a"), ("gpt", "b")],
    ):
        assert turns(*broken) == ()


def test_plain_text_is_cut_at_empty_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "SECTION", 40)
    whole = "".join(f"paragraph {i}\nof two lines\n\n" for i in range(50))
    (tmp_path / "a.txt").write_text(whole)
    path = str(tmp_path / "a.txt")
    assert [d.text for d in read_documents(path, "all")] == [whole]
    assert "".join(text.sections(whole)) == whole
    both = [d.text for part in ("calibration", "evaluation") for d in read_documents(path, part)]
    assert sorted(both) == sorted(text.sections(whole))
    assert all(section.startswith("paragraph") and section.endswith("\n\n") for section in both)
    assert {section.count("paragraph") for section in both} == {2}, "one alone is too short"


def test_sharegpt_takes_whole_conversations_only(tmp_path, monkeypatch, tokenizer):
    def row(name, *values):
        turns = zip(("human", "gpt"), values, strict=False)
        return {
            "id": name,
            "conversations": [{"from": who, "value": value} for who, value in turns],
        }

    rows = [
        row("a_0", "one", "1"),
        row("a_7", "later", "2"),
        row("b_0"),
        row("c_0", "three", "3"),
        row("d_0", "cut", "4"),
    ]
    (tmp_path / "s.json").write_text(json.dumps(rows)[:-12])
    folders = []
    monkeypatch.setattr(
        text,
        "resolve_dataset",
        lambda name, download_dir: folders.append(download_dir) or tmp_path / "s.json",
    )
    assert [d.turns[0][1] for d in read_documents("sharegpt", "all")] == ["one", "three"]
    settings = TextSettings(source="sharegpt", part="all")
    check_text(settings, download_dir="own")
    assert read_windows(settings, tokenizer, download_dir="own")
    assert folders == [None, "own", "own"]


def test_hub_data_sets(monkeypatch):
    asked = []

    def load_dataset(*args, **more):
        asked.append((args, more))
        return [{"text": "a"}, {"text": ""}, {"text": "b"}]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    assert [d.text for d in read_documents("hf:org/name:config:test", "all")] == ["a", "b"]
    assert [d.text for d in read_documents("hf:org/name", "all")] == ["a", "b"]
    streamed = {"streaming": True}
    assert asked == [
        (("org/name", "config"), {"split": "test", **streamed}),
        (("org/name", None), {"split": "train", **streamed}),
    ]
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"\[eval\]"):
        list(read_documents("hf:org/name", "all"))


def test_every_token_is_scored_once(tokenizer):
    ids = tokenizer.encode("hello the world " * 40)
    document = Document(text="hello the world " * 40)
    for context, stride in ((16, 16), (16, 5), (16, 1), (1000, 1000), (2, 2), (len(ids), 3)):
        found = list(cut([document], tokenizer, context=context, stride=stride))
        scored = []
        for i, window in enumerate(found):
            begin = i * stride
            assert list(window.token_ids) == ids[begin : begin + context]
            assert window.num_context >= 1
            scored += range(begin + window.num_context, begin + len(window.token_ids))
        if stride < context:
            assert scored == list(range(1, len(ids)))
        else:  # a window's first token has nothing before it
            assert scored == [i for i in range(len(ids)) if i % context]


def test_windows_keep_to_documents(tokenizer):
    documents = [Document(text="a" * 10), Document(text="b" * 5), Document(text="c")]
    found = list(cut(documents, tokenizer, context=8, stride=8))
    assert [len(w.token_ids) for w in found] == [8, 2, 5]  # one token can't be scored


def test_conversations_go_through_the_chat_template(tokenizer):
    rendered = Document(turns=(("user", "Hi"), ("assistant", "Hello"))).render(tokenizer)
    assert rendered == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n"
    bare = types.SimpleNamespace(chat_template=None)
    assert (
        Document(turns=(("user", "Hi"), ("assistant", "Hello"))).render(bare)
        == "User: Hi\n\nAssistant: Hello"
    )


def test_calibration_windows_are_whole_and_never_evaluate(tmp_path, tokenizer):
    path = write_lines(
        tmp_path / "a.jsonl", [{"text": f"{i} hello " * (i % 7 + 1)} for i in range(60)]
    )
    found = calibration_text(path, tokenizer=tokenizer, num_windows=5, context=12)
    assert [len(ids) for ids in found] == [12] * 5
    scored = read_windows(TextSettings(source=path, num_windows=None), tokenizer)
    texts = {tokenizer.decode(w.token_ids) for w in scored}
    assert not [ids for ids in found if any(tokenizer.decode(ids) in t for t in texts)]
    with pytest.raises(ConfigError, match="windows of 12 tokens, not 500"):
        calibration_text(path, tokenizer=tokenizer, num_windows=500, context=12)


def test_the_number_of_windows_is_kept(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text("hello " * 500)
    settings = TextSettings(
        source=str(tmp_path / "a.txt"), part="all", context=32, stride=32, num_windows=3
    )
    assert len(read_windows(settings, tokenizer)) == 3


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"part": "some"}, "part"),
        ({"context": 1}, "context"),
        ({"stride": 0}, "stride"),
        ({"context": 8, "stride": 9}, "stride"),
        ({"num_windows": 0}, "num_windows"),
    ],
)
def test_settings_that_make_no_sense(settings, field):
    with pytest.raises(ConfigError) as error:
        TextSettings(**{"context": 512, "stride": 1, **settings})
    assert error.value.field == field


def test_errors_name_what_is_wrong(tmp_path, tokenizer):
    def read(name, content, part="all"):
        (tmp_path / name).write_bytes(content)
        return read_windows(TextSettings(source=str(tmp_path / name), part=part), tokenizer)

    with pytest.raises(ConfigError, match="no file"):
        read_windows(TextSettings(source=str(tmp_path / "none")), tokenizer)
    with pytest.raises(ConfigError, match="holds no text"):
        read("empty.txt", b"")
    with pytest.raises(ConfigError, match="UTF-8"):
        read("bad.txt", b"\xff\xfe\xff")
    with pytest.raises(ConfigError, match="line 2 is no JSON"):
        read("bad.jsonl", b'{"text": "hello"}\n{"text": ')
    with pytest.raises(ConfigError, match="object 0: has body, id"):
        read("other.jsonl", b'{"body": "x", "id": 1}\n')
    with pytest.raises(ConfigError, match="object 0: has int"):
        read("number.jsonl", b"5\n")
    with pytest.raises(ConfigError, match="not a JSON array"):
        read("object.json", b'{"text": "x"}')
    with pytest.raises(ConfigError, match="damaged at character 15"):
        read("cut.json", b'[{"text": "x"},{"text')
    with pytest.raises(ConfigError, match=r"hf:ORG/NAME"):
        list(read_documents("hf:a:b:c:d", "all"))
