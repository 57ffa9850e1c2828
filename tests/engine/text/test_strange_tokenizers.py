"""Tokenizers from strangers: ids without a row in the embedding, panics of the library, normalisers that explode, patterns
that take hours."""

from __future__ import annotations

import contextlib
import json
import threading

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from slipstream import LLM, SamplingParams
from slipstream.engine.text import tokenizer_parts
from slipstream.engine.text.tokenizer import Tokenizer
from slipstream.engine.threads.fair_threads import client
from slipstream.errors import CheckpointError, EngineOverloadedError, ModelError, RequestError
from slipstream.spec.description import read_spec
from tests.support.waiting import PATIENCE_S, wait_for

ONE = SamplingParams(max_tokens=1, temperature=0)


def change(path, edit, name="tokenizer.json"):
    data = json.loads((path / name).read_text())
    edit(data)
    (path / name).write_text(json.dumps(data))


def rows(path):
    return read_spec(path).spec.vocab_size


# --- Ids without a row ------------------------------------------------------------------------------------------------


def test_a_tokenizer_of_another_model_is_refused_when_it_is_loaded(model_copy):
    n = rows(model_copy)

    def more_words(data):
        vocab = data["model"]["vocab"]
        vocab |= {f"word{i}": i for i in range(len(vocab), n + 5)}

    change(model_copy, more_words)
    with pytest.raises(CheckpointError, match=f"{n + 4}.* has {n} rows") as caught:
        LLM(str(model_copy), device="cpu", max_model_len=64)
    assert caught.value.field == "tokenizer"


def test_so_is_one_with_a_gap(model_copy):
    change(model_copy, lambda data: data["model"]["vocab"].update({"far": 10**6}))
    with pytest.raises(CheckpointError, match="1000000"):
        Tokenizer.for_model(read_spec(model_copy))


@pytest.mark.parametrize("special", [True, False])
def test_an_added_token_without_a_row_is_refused_where_a_text_holds_it(model_copy, special):
    backend = Backend.from_file(str(model_copy / "tokenizer.json"))
    n = rows(model_copy)
    size = backend.get_vocab_size()
    tokens = [
        AddedToken(f"<more{i}>", special=special, normalized=False) for i in range(n - size + 2)
    ]
    backend.add_special_tokens(tokens) if special else backend.add_tokens(tokens)
    backend.save(str(model_copy / "tokenizer.json"))
    last = tokens[-1].content
    with LLM(str(model_copy), device="cpu", max_model_len=64, kv_cache_bytes=2**20) as llm:
        assert llm.generate("hello", ONE, progress=False)[0].finished
        for ask in (
            lambda: llm.generate(f"hello {last}", ONE, progress=False),
            lambda: llm.chat([{"role": "user", "content": last}], ONE, progress=False),
        ):
            with pytest.raises(RequestError, match="embedding has only"):
                ask()
        tokenizer = llm.get_tokenizer()
        for encode in (
            lambda: tokenizer.encode_batch(["a", last]),
            lambda: tokenizer.encode_pairs([("a", last)]),
        ):
            with pytest.raises(RequestError, match="embedding has only"):
                encode()
        assert llm.generate("hello", ONE, progress=False)[0].finished


def test_an_end_token_without_a_row_is_none(model_copy):
    n = rows(model_copy)
    change(model_copy, lambda config: config.update(eos_token_id=[1, n + 7]), "config.json")
    (model_copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [n, 10**9]}))
    with LLM(str(model_copy), device="cpu", max_model_len=64, kv_cache_bytes=2**20) as llm:
        answer = llm.generate("hello", SamplingParams(max_tokens=4, min_tokens=4), progress=False)[
            0
        ]
        assert len(answer.outputs[0].token_ids) == 4


# --- Panics and errors of the library ---------------------------------------------------------------------------------


def test_a_panic_over_a_text_is_a_request_error(model_copy, monkeypatch):
    monkeypatch.setattr(
        tokenizer_parts, "MAX_SECONDS", PATIENCE_S
    )  # with RUST_BACKTRACE a panic takes seconds

    def slow(data):
        data["pre_tokenizer"] = {
            "type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False,
        }  # fmt: skip

    change(model_copy, slow)
    tokenizer = Tokenizer.from_pretrained(model_copy)
    for encode in (lambda t: tokenizer.encode(t), lambda t: tokenizer.encode_batch(["b", t])):
        with pytest.raises(RequestError, match="can't take this text") as caught:
            encode("a" * 40 + "b")
        assert caught.value.field == "prompt"
    assert tokenizer.encode("b")


@pytest.mark.parametrize(
    "edit",
    [
        lambda d: d.update(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
        lambda d: d.update(
            normalizer={"type": "Precompiled", "precompiled_charsmap": "/////////w=="}
        ),
        lambda d: d["model"]["vocab"].update(x=2**32 - 1, y=2**32),
        lambda d: d["model"]["vocab"].update(x=-1),
        lambda d: d["model"].update(merges=[["no", "such"]]),
        lambda d: d["model"].update(type="Unigram", vocab=[], unk_id=5),
        lambda d: d["added_tokens"].append({"id": 2**32 - 1, "content": "x" * 10}),
        lambda d: d["added_tokens"].append({"id": "3", "content": 5}),
        lambda d: d.update(
            post_processor={
                "type": "TemplateProcessing",
                "single": [],
                "pair": [],
                "special_tokens": {},
            }
        ),
        lambda d: d.update(decoder={"type": "CTC"}),
        lambda d: d.update(version="9"),
        lambda d: d.clear(),
    ],
)
def test_a_broken_tokenizer_json_is_no_internal_error(model_copy, edit):
    change(model_copy, edit)
    try:
        tokenizer = Tokenizer.for_model(read_spec(model_copy))
    except ModelError:
        return
    with contextlib.suppress(RequestError):
        tokenizer.encode("hello there")


@pytest.mark.parametrize(
    "config",
    [
        {"added_tokens_decoder": {"x": {"content": "<a>"}}},
        {"added_tokens_decoder": {"1": 5}},
        {"added_tokens_decoder": {"99999999999": {"content": "<a>"}}},
        {"added_tokens_decoder": [1, 2]},
        {"additional_special_tokens": 5},
        {"chat_template": {"a": 1}, "bos_token": ["x"]},
    ],
)
def test_a_broken_tokenizer_config_is_no_internal_error(model_copy, config):
    change(model_copy, lambda data: data.update(config), "tokenizer_config.json")
    with contextlib.suppress(ModelError):
        Tokenizer.for_model(read_spec(model_copy)).encode("hello")


def test_files_that_are_not_utf8(model_copy):
    (model_copy / "chat_template.jinja").write_bytes(b"{{ '\xff\xfe' }}")
    with pytest.raises(CheckpointError):
        Tokenizer.from_pretrained(model_copy)
    (model_copy / "chat_template.jinja").unlink()
    (model_copy / "tokenizer_config.json").write_bytes(b'{"a": ' + b"[" * 100_000)
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json"):
        Tokenizer.from_pretrained(model_copy)


# --- Normalisers ------------------------------------------------------------------------------------------------------


def replace(content, **pattern):
    return {"type": "Replace", "pattern": pattern, "content": content}


@pytest.mark.parametrize(
    "steps",
    [
        [replace("a" * 10, String="a")] * 10,
        [replace("a" * 10_000, String="a")],
        [replace("xxxxxxxxx", Regex="")],
        [{"type": "Sequence", "normalizers": [replace("aaaa", Regex=".")] * 2}],
    ],
)
def test_a_normaliser_that_explodes_is_refused(model_copy, steps):
    change(
        model_copy, lambda data: data.update(normalizer={"type": "Sequence", "normalizers": steps})
    )
    with pytest.raises(CheckpointError, match="times longer") as caught:
        Tokenizer.from_pretrained(model_copy)
    assert caught.value.field == "normalizer"


def test_usual_normalisers_pass(model_copy):
    usual = [
        {"type": "NFKC"},
        {"type": "Prepend", "prepend": "▁"},
        replace("▁", String=" "),
        replace(" ", Regex=" {2,}"),
    ]
    change(
        model_copy, lambda data: data.update(normalizer={"type": "Sequence", "normalizers": usual})
    )
    Tokenizer.from_pretrained(model_copy)


# --- Patterns ---------------------------------------------------------------------------------------------------------


def test_a_pattern_that_takes_hours_is_given_up(model_copy, monkeypatch):
    """Each start of a match stays within the library's limit of tries, and the text has many. This thread runs meanwhile."""
    pattern = {
        "type": "Split",
        "pattern": {"Regex": "a*a*a*b"},
        "behavior": "Isolated",
        "invert": False,
    }
    change(
        model_copy,
        lambda data: data.update(pre_tokenizer={"type": "Sequence", "pretokenizers": [pattern]}),
    )
    tokenizer = Tokenizer.from_pretrained(model_copy)
    assert tokenizer.encode("aab") == tokenizer.encode_batch(["aab", "b"])[0]
    monkeypatch.setattr(tokenizer_parts, "MAX_SECONDS", 0.1)
    for encode in (tokenizer.encode, lambda text: tokenizer.encode_pairs([(text, "b")])):
        with pytest.raises(RequestError, match=r"longer than 0\.1 s") as caught:
            encode(("a" * 200 + "c") * 2 + "b")  # most of a second of a core
        assert caught.value.field == "prompt"
    with pytest.raises(EngineOverloadedError, match="stuck"):  # they still run, beside this thread
        tokenizer.encode("b")
    wait_for(lambda: tokenizer_parts._texts.num_stuck == 0, "the texts that were given up")
    assert tokenizer.encode("b")


def test_a_client_with_a_stuck_text_is_refused_and_others_are_not(monkeypatch):
    monkeypatch.setattr(tokenizer_parts, "MAX_SECONDS", 0.1)
    release = threading.Event()
    for name in ("slow", "another"):
        token = client.set(name)
        try:
            if name == "slow":
                with pytest.raises(RequestError, match="longer than"):
                    tokenizer_parts.in_time(release.wait, PATIENCE_S)
                with pytest.raises(EngineOverloadedError, match="you sent before"):
                    tokenizer_parts.in_time(str, 5)
            else:
                assert tokenizer_parts.in_time(str, 5) == "5"
        finally:
            client.reset(token)
    release.set()
    wait_for(lambda: tokenizer_parts._texts.num_stuck == 0, "the text that was given up")


@pytest.mark.parametrize("size", [100, 20_000])
def test_a_long_text_is_tokenised_without_pythons_lock(model_copy, size):
    """The library holds it in `encode`, and lets other threads run in `encode_batch_fast`."""
    tokenizer = Tokenizer.from_pretrained(model_copy)
    backend, text = tokenizer._backend, "a b " * (size // 4)
    expected = backend.encode(text, add_special_tokens=False).ids
    used = []

    class Spy:
        def __getattr__(self, name):
            used.append(name)
            return getattr(backend, name)

    tokenizer._backend = Spy()
    assert tokenizer.encode(text, add_special_tokens=False) == expected
    assert used[0] == ("encode_batch_fast" if size > tokenizer_parts.MAX_LOCKED_CHARS else "encode")


STEPS = {
    "pre_tokenizer": ("pretokenizers", {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}),
    "normalizer": ("normalizers", {"type": "NFC"}),
}  # fmt: skip


@pytest.mark.parametrize("part", STEPS)
@pytest.mark.parametrize("is_nested", [False, True])
def test_a_tokenizer_of_very_many_steps_is_refused(model_copy, part, is_nested):
    key, step = STEPS[part]
    made = {"type": "Sequence", key: [step] * 100}
    if is_nested:
        made = {"type": "Sequence", key: [step] * 40}
        made = {"type": "Sequence", key: [made, made]}
    change(model_copy, lambda data: data.update({part: made}))
    with pytest.raises(CheckpointError, match=r"steps|times longer"):
        Tokenizer.from_pretrained(model_copy)


def test_patterns_of_known_models_need_no_thread(model_copy):
    for pattern in tokenizer_parts.PATTERNS:
        cut = {
            "type": "Split",
            "pattern": {"Regex": pattern},
            "behavior": "Isolated",
            "invert": False,
        }
        change(model_copy, lambda data, cut=cut: data.update(pre_tokenizer=cut))
        tokenizer = Tokenizer.from_pretrained(model_copy)
        assert not tokenizer_parts.has_own_patterns(tokenizer._backend)
        assert tokenizer.encode("Hello, world's 1234  \n\n é")
