"""Mistral's tekken.json beside Mistral's own library, whose token ids are in tests/data/mistral_tokens.json."""

from __future__ import annotations

import functools
import json
from base64 import b64decode
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slipstream.engine.text.tokenizer import Tokenizer
from slipstream.engine.text.tool_formats import reasoning_markers, tool_format
from slipstream.errors import CheckpointError, RequestError, UnsupportedModelError
from tests.data.make_mistral import CHATS, HERE, NUM_SPECIAL, SPECIALS, VERSIONS, tekken


@functools.lru_cache
def known() -> dict[str, Any]:
    return json.loads((HERE / "mistral_tokens.json").read_text())


def file_of(version: str) -> dict[str, Any]:
    return tekken(version, [b64decode(token) for token in known()["tokens"]])


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory) -> dict[str, Tokenizer]:
    made = {}
    for version in VERSIONS:
        folder = tmp_path_factory.mktemp(version)
        (folder / "tekken.json").write_text(json.dumps(file_of(version)))
        made[version] = Tokenizer.from_pretrained(folder)
    return made


def test_texts_have_the_librarys_ids_and_come_back(tokenizers):
    lines = (HERE / "tokenizer_corpus.txt").read_bytes().decode().split("\n")[:400:9]
    tokenizer = tokenizers["v3"]
    assert len(lines) == len(known()["texts"]) > 40
    for line, ids in zip(lines, known()["texts"], strict=True):
        assert tokenizer.encode(line, add_special_tokens=False) == ids
        assert tokenizer.encode(line) == [SPECIALS.index("<s>"), *ids]
        assert tokenizer.decode(ids) == line
    assert tokenizer.vocab_size == NUM_SPECIAL + len(known()["tokens"])
    assert tokenizer.eos_token_ids == (SPECIALS.index("</s>"),)
    assert not tokenizer.has_time_limit


@pytest.mark.parametrize(
    ("name", "version"), [(name, v) for name, (_, _, versions) in CHATS.items() for v in versions]
)
def test_chats_have_the_librarys_ids(tokenizers, name, version):
    messages, more, _ = CHATS[name]
    tokenizer = tokenizers[version]
    text = tokenizer.apply_chat_template(messages, **more)
    ids = tokenizer.encode(text)
    assert ids == known()["chats"][name][version], text


def test_a_saved_tokenizer_makes_the_same(tokenizers, tmp_path):
    for version in ("v3", "v13"):
        folder = tmp_path / version
        folder.mkdir()
        tokenizers[version].save(folder)
        again = Tokenizer.from_pretrained(folder)
        messages, more, _ = CHATS["calls"]
        assert (
            again.encode(again.apply_chat_template(messages, **more))
            == known()["chats"]["calls"][version]
        )


def test_an_answer_is_continued_without_its_end(tokenizers):
    for version in VERSIONS:
        messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "It is "}]
        text = tokenizers[version].apply_chat_template(
            messages, add_generation_prompt=False, continue_final_message=True
        )
        assert text.endswith("[INST]x[/INST]It is")


def test_the_version_says_how_calls_and_thoughts_are_read(tokenizers):
    found = [tool_format(None, tokenizers[v].tool_template).name for v in VERSIONS]
    assert found == ["mistral", "mistral", *["mistral_args"] * 3]
    thoughts = [reasoning_markers(None, tokenizers[v].chat_template) for v in VERSIONS]
    assert thoughts == [None, None, None, *[("[THINK]", "[/THINK]")] * 2]


def test_ids_of_other_servers_are_shortened_where_they_are_written(tokenizers):
    messages, more, _ = CHATS["call"]
    given = json.loads(json.dumps(messages).replace("abcdefg01", "call_of_another_server"))
    for version in VERSIONS:
        text = tokenizers[version].apply_chat_template(given, **more)
        assert "another" not in text
        assert "7" in text


def test_json_too_deep_to_read_is_written_as_text(tokenizers):
    deep = "[" * 100_000
    call = {"id": "abcdefg01", "function": {"name": "f", "arguments": deep}}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "abcdefg01", "content": deep},
    ]
    for version in VERSIONS:
        assert tokenizers[version].apply_chat_template(messages).count(deep) == 2


@pytest.mark.parametrize(
    ("messages", "what"),
    [
        ([{"role": "developer", "content": "x"}], "not developer"),
        ([{"role": "user", "content": "x"}, {"role": "assistant", "content": ""}], "content or"),
    ],
)
def test_conversations_that_have_no_form_are_refused(tokenizers, messages, what):
    with pytest.raises(RequestError, match=what):
        tokenizers["v7"].apply_chat_template(messages)


@pytest.mark.parametrize("version", ["v3", "v7", "v11"])
def test_a_result_without_its_calls_id_is_refused(tokenizers, version):
    messages = [{"role": "user", "content": "x"}, {"role": "tool", "content": "1"}]
    with pytest.raises(RequestError, match="needs tool_call_id"):
        tokenizers[version].apply_chat_template(messages)


def test_a_result_with_a_picture_is_refused_where_results_are_json(tokenizers):
    call = {"id": "abcdefg01", "function": {"name": "f", "arguments": "{}"}}
    parts = [{"type": "text", "text": "seen"}, {"type": "image"}]
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "abcdefg01", "content": parts},
    ]
    with pytest.raises(RequestError, match="without pictures") as caught:
        tokenizers["v3"].apply_chat_template(messages)
    assert caught.value.field == "messages"
    assert "[IMG]seen" in tokenizers["v7"].apply_chat_template(messages)


def test_an_effort_that_the_model_does_not_know_is_refused(tokenizers):
    with pytest.raises(RequestError, match="none, high"):
        tokenizers["v15"].apply_chat_template(
            [{"role": "user", "content": "x"}], reasoning_effort="low"
        )


def test_the_folders_own_template_and_tokenizer_go_first(tokenizers, tmp_path):
    (tmp_path / "tekken.json").write_text(json.dumps(file_of("v13")))
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert Tokenizer.from_pretrained(tmp_path).chat_template == "{{ messages[0].content }}"
    tokenizers["v3"].save(tmp_path)
    assert Tokenizer.from_pretrained(tmp_path).encode("x") == tokenizers["v3"].encode("x")


def changed(change: Callable[[dict[str, Any]], object]) -> str:
    data = file_of("v13")
    change(data)
    return json.dumps(data)


def of_v15(settings: Any) -> Callable[[dict[str, Any]], object]:
    """The file made one of v15, with these settings."""

    def change(data: dict[str, Any]) -> None:
        data["config"]["version"] = "v15"
        data["model_settings_builder"] = settings

    return change


def of_effort(effort: Any) -> Callable[[dict[str, Any]], object]:
    return of_v15({"reasoning_effort": effort})


BAD = {
    "effort default": (
        of_effort({"values": ["none", "high"], "default": "x"}),
        "among them",
        "reasoning_effort",
    ),
    "effort kinds": (
        of_effort({"values": ["none", None], "default": "none"}),
        "texts",
        "reasoning_effort",
    ),
    "effort token": (
        lambda d: (
            of_effort({"values": ["none"], "default": "none"})(d),
            [
                t.update(token_str=t["token_str"].replace("SETTINGS", "X"))
                for t in d["special_tokens"]
            ],
        ),
        "MODEL_SETTINGS",
        "special_tokens",
    ),
    "no JSON": (lambda d: None, "can't be read as JSON", "tekken.json"),
    "no object": (lambda d: d.clear(), "no config", "config"),
    "version": (lambda d: d["config"].update(version="v99"), "'v99'; v3, v7", "version"),
    "pattern": (lambda d: d["config"].update(pattern="("), "can't be read", "tokenizer"),
    "pattern kind": (lambda d: d["config"].update(pattern=7), "pattern of type str", "pattern"),
    "size": (
        lambda d: d["config"].update(default_vocab_size=10**9),
        "does not fit",
        "default_vocab_size",
    ),
    "count": (
        lambda d: d["config"].update(default_num_special_tokens=3),
        "special tokens",
        "special_tokens",
    ),
    "many": (
        lambda d: d["config"].update(default_num_special_tokens=10**12),
        "special tokens",
        "special_tokens",
    ),
    "specials": (lambda d: d.pop("special_tokens"), "lists none", "special_tokens"),
    "special": (
        lambda d: d["special_tokens"].__setitem__(3, {"rank": 4, "token_str": "x"}),
        "special token 3",
        "special_tokens",
    ),
    "twice": (
        lambda d: d["special_tokens"][3].update(token_str="<s>"),
        "twice",
        "special_tokens",
    ),
    "vocab": (lambda d: d.update(vocab=None), "vocab of type list", "vocab"),
    "rank": (lambda d: d["vocab"][300].update(rank=5), "token 300", "vocab"),
    "bytes": (lambda d: d["vocab"][300].update(token_bytes="?"), "token 300", "vocab"),
    "byte": (lambda d: d["vocab"][65].update(token_bytes="QUFBQUFB"), "a byte", "vocab"),
    "settings": (
        of_v15(7),
        "model_settings_builder of type dict",
        "model_settings_builder",
    ),
    "effort": (
        of_effort([1]),
        "reasoning_effort of type dict",
        "reasoning_effort",
    ),
    "efforts": (
        of_effort({"values": 5}),
        "values of type list",
        "values",
    ),
    "default": (
        of_effort({"values": ["high"]}),
        "default of type str",
        "default",
    ),
    "name": (
        lambda d: d["vocab"][300].update(token_bytes="W0lOU1Rd"),
        "among the vocabulary",
        "vocab",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_named(tmp_path: Path, name):
    change, what, field = BAD[name]
    text = changed(change)
    (tmp_path / "tekken.json").write_text(text[:-1] if name == "no JSON" else text)
    with pytest.raises((CheckpointError, UnsupportedModelError), match=what) as error:
        Tokenizer.from_pretrained(tmp_path)
    assert error.value.field == field
