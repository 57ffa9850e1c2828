"""Shorter prompts: what goes, what stays to the letter, and what is reported."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from slipstream import LLM
from slipstream.engine.context import (
    Compressed,
    ContextSettings,
    PromptPart,
    answer_change,
    compress,
    scorer,
    word_overlap,
)
from slipstream.engine.text.tokenizer import Tokenizer
from slipstream.errors import ConfigError

TEXT = "the the the zebra said the quick thing. the the the! Number 1234 is the code."


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    from tests.support import tiny_models

    folder = tmp_path_factory.mktemp("tokenizer")
    tiny_models.write_tokenizer(folder)
    return Tokenizer.from_pretrained(folder)


def by_letters(tokenizer):
    """A small model that knows the word "the" and little else: its tokens say less."""

    def score(ids):
        return [
            0.1 if tokenizer.token_bytes(i).strip() == b"the" else 2.0 + (i % 7) / 10
            for i in ids[1:]
        ]

    return score


@pytest.mark.parametrize("method", ["selective", "iterative"])
@pytest.mark.parametrize("unit", ["token", "word", "sentence"])
def test_what_says_least_goes(tokenizer, method, unit):
    found = compress(
        TEXT, tokenizer, by_letters(tokenizer), ContextSettings(keep=0.8, method=method, unit=unit)
    )
    assert 0.8 <= found.kept_share < 1
    assert found.text.count("the") < TEXT.count("the")
    assert "zebra" in found.text
    assert found.num_tokens_before == len(tokenizer.encode(TEXT))


@pytest.mark.parametrize("unit", ["token", "word", "sentence"])
def test_protected_text_stays_to_the_letter(tokenizer, unit):
    parts = [
        PromptPart("You are the helper.\n", True),
        PromptPart(TEXT),
        PromptPart("\nWhat is the code?", True),
    ]
    chosen = ContextSettings(keep=0.2, unit=unit, protect=(r"Number \d+",))
    found = compress(parts, tokenizer, by_letters(tokenizer), chosen)
    assert found.parts[0] == parts[0].text
    assert found.parts[2] == parts[2].text
    assert "1234" in found.parts[1]
    assert len(found.parts[1]) < len(TEXT)


@example([("ah", False), ("e", False)], "token", "selective", 0.5)  # one token for two parts
@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.text(alphabet="ab é🙂\n.the ", max_size=40), st.booleans()),
        min_size=1,
        max_size=4,
    ),
    st.sampled_from(["token", "word", "sentence"]),
    st.sampled_from(["selective", "iterative"]),
    st.floats(0.05, 1.0),
)
def test_any_text_keeps_its_order_and_its_protected_parts(tokenizer, parts, unit, method, keep):
    """The kept parts stay in order, and protected ones whole. The share is kept; with keep=1 nothing is left out."""
    given_parts = [PromptPart(text, protected) for text, protected in parts]
    chosen = ContextSettings(keep=keep, unit=unit, method=method, segment=5, context=16)
    found = compress(given_parts, tokenizer, by_letters(tokenizer), chosen)
    for part, text in zip(given_parts, found.parts, strict=True):
        letters = iter(part.text)
        assert all(c in letters for c in text)  # a subsequence
        if part.protected or keep == 1:
            assert text == part.text
    free = sum(len(p.text) for p in given_parts if not p.protected)
    assert found.num_tokens_after >= keep * found.num_tokens_before - 1e-9 or not free


def test_a_small_model_of_ours_scores(tiny_model):
    with LLM(str(tiny_model), device="cpu", kernels="reference") as llm:
        tokenizer = llm.get_tokenizer()
        found = compress(
            "hello hello hello the hello", tokenizer, scorer(llm), ContextSettings(keep=0.5)
        )
        assert isinstance(found, Compressed)
        assert found.num_tokens_after < found.num_tokens_before
        same = answer_change(llm, "hello the", "hello the", max_tokens=4)
        assert same.answer_before == same.answer_after
        assert same.extra_nats == pytest.approx(0, abs=1e-4)
        assert same.overlap == 1.0
        other = answer_change(llm, "hello the hello", "in er", max_tokens=4)
        assert other.extra_nats > 0


def test_scores_are_the_models_own(tiny_model):
    """−ln p of each token, by the logits of transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    tokens = [5, 9, 200, 7, 7]
    with torch.no_grad():
        wanted = -theirs(torch.tensor([tokens])).logits[0].log_softmax(-1)[range(4), tokens[1:]]
    with LLM(str(tiny_model), device="cpu", kernels="reference", dtype="float32") as llm:
        assert scorer(llm)(tokens) == pytest.approx(wanted.tolist(), rel=1e-4)


def test_word_overlap_is_the_share_of_common_words():
    assert word_overlap("a b c", "A b d") == pytest.approx(2 / 3)
    assert word_overlap("", "") == 1.0
    assert word_overlap("a", "") == 0.0


@pytest.mark.parametrize(
    "chosen",
    [{"keep": 0.0}, {"method": "best"}, {"unit": "page"}, {"segment": 2000}, {"protect": ("(",)}],
    ids=str,
)
def test_settings_are_checked(chosen):
    with pytest.raises(ConfigError) as caught:
        ContextSettings(**chosen)
    assert caught.value.field == next(iter(chosen))
