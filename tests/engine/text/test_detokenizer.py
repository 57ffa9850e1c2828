"""Text as it comes: any split of the ids gives the same text, and stop strings end it where a naive search says."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from slipstream.engine.text.detokenizer import IncrementalDetokenizer
from slipstream.engine.text.tokenizer import Tokenizer
from tests.data.make_tokens import golden_tokens

GOLDEN = golden_tokens()
KINDS = ("bytes", "spaces", "no_prefix")
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁"), max_size=40)
"""SentencePiece can't tell ▁ from a space."""


def draw_ids(data: st.DataObject, tokenizer: Tokenizer) -> list[int]:
    """Tokens at random, many of them bytes that are no character and special tokens; or those of a text."""
    if data.draw(st.booleans()):
        return tokenizer.encode(data.draw(st.text(max_size=20)))
    ids = st.integers(0, tokenizer.vocab_size - 1) | st.integers(0, 262)
    return data.draw(st.lists(ids, max_size=25))


def draw_pieces(data: st.DataObject, ids: list[int]) -> list[list[int]]:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    return [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=120)
@given(data=st.data())
def test_any_split_gives_what_decoding_at_once_gives(small, kind, data):
    tokenizer = small[kind]
    ids, skip = draw_ids(data, tokenizer), data.draw(st.booleans())
    stop = data.draw(st.sampled_from([(), ("never in the text",), ("\x00\x01\x02",)]))
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip, stop=stop)
    text = (
        "".join(detokenizer.push(piece) for piece in draw_pieces(data, ids)) + detokenizer.finish()
    )
    assert text == tokenizer.decode(ids, skip_special_tokens=skip)
    assert detokenizer.num_tokens == detokenizer.num_tokens_used == len(ids)
    assert detokenizer.stop_reason is None


def continued(tokenizer: Tokenizer, prompt: list[int], answer: list[int], skip: bool = True) -> str:
    detokenizer = IncrementalDetokenizer(
        tokenizer, prompt_token_ids=prompt, skip_special_tokens=skip
    )
    return "".join(detokenizer.push([i]) for i in answer) + detokenizer.finish()


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=80)
@given(data=st.data())
def test_prompt_and_answer_are_what_decoding_both_gives(small, kind, data):
    tokenizer = small[kind]
    prompt, answer = (
        tokenizer.encode(data.draw(TEXTS), data.draw(st.booleans())) for _ in range(2)
    )
    skip = data.draw(st.booleans())
    begin = tokenizer.decode(prompt, skip_special_tokens=skip)
    both = tokenizer.decode(prompt + answer, skip_special_tokens=skip)
    assert begin + continued(tokenizer, prompt, answer, skip) == both


def test_the_space_between_prompt_and_answer_stays(small):
    tokenizer = small["spaces"]
    prompt = tokenizer.encode("France is")
    answer = tokenizer.encode("Paris", add_special_tokens=False)
    assert tokenizer.token_bytes(answer[0])[:1] == b" "
    assert continued(tokenizer, prompt, answer) == " Paris"
    assert (
        continued(tokenizer, [tokenizer.bos_token_id], answer) == "Paris"
    )  # here the space begins the text
    assert continued(tokenizer, [tokenizer.bos_token_id], answer, skip=False) == " Paris"


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=80)
@given(text=TEXTS, data=st.data())
def test_what_is_given_out_is_never_half_a_character(small, kind, text, data):
    tokenizer = small[kind]
    names = [tokenizer.decode([i], skip_special_tokens=False) for i in tokenizer.special_ids]
    assume(
        not any(name in text for name in names)
    )  # a special token's name is that token, and special tokens are skipped
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=True)
    given_out = ""
    for token in tokenizer.encode(text):
        given_out += detokenizer.push([token])
        assert text.startswith(given_out)
    assert given_out == text  # whole characters are not held back


def naive(tokenizer, ids, skip, stops, include, min_tokens):
    """(text, stop string, tokens used), by decoding every beginning of the ids anew, a token at a time."""

    def decoded(count: int, final: bool) -> str:
        text = tokenizer.decode(ids[:count], skip_special_tokens=skip)
        # An unfinished character at the end is not there yet; decode writes it as a replacement character.
        kept = [i for i in ids[:count] if not (skip and i in tokenizer.special_ids)]
        data = b"".join(tokenizer.token_bytes(i) for i in kept)
        if not final and len(data) > 1 and data[-2] == 0xED and 0xA0 <= data[-1] <= 0xBF:
            return text[
                :-2
            ]  # half of a surrogate is wrong already, but Python's decoder waits for its last byte
        for cut in range(1, 4):
            tail = data[-cut:]
            if len(tail) == cut and tail[0] >= 0xC2 and not final:
                try:
                    tail.decode()
                except UnicodeDecodeError as error:
                    if error.reason == "unexpected end of data":
                        return text[:-1]
        return text

    begin = len(decoded(min(min_tokens, len(ids)), False)) if min_tokens else 0
    for count in [*range(min_tokens + 1, len(ids) + 1), None]:
        final = count is None
        text = decoded(len(ids) if final else count, final)
        if final and len(ids) <= min_tokens:
            break
        for end in range(begin + 1, len(text) + 1):
            found = [s for s in stops if text[begin:end].endswith(s)]
            if found:
                best = max(found, key=len)
                return (
                    text[: end if include else end - len(best)],
                    best,
                    len(ids) if final else count,
                )
    return tokenizer.decode(ids, skip_special_tokens=skip), None, len(ids)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=200)
@given(data=st.data())
def test_stops_where_a_naive_search_stops(small, kind, data):
    tokenizer = small[kind]
    if data.draw(
        st.booleans()
    ):  # few characters, so that stop strings overlap themselves and each other
        ids = tokenizer.encode(data.draw(st.text(alphabet="aab é", min_size=1, max_size=25)))
        stops = data.draw(
            st.lists(st.text(alphabet="aab é", min_size=1, max_size=5), min_size=1, max_size=3)
        )
    else:  # pieces of the text itself
        ids = draw_ids(data, tokenizer)
        whole = tokenizer.decode(ids) or "x"
        at = data.draw(st.integers(0, len(whole) - 1))
        stops = [whole[at : at + data.draw(st.integers(1, 6))], "zz"]
    skip, include = data.draw(st.booleans()), data.draw(st.booleans())
    min_tokens = data.draw(st.integers(0, 6))
    expected, reason, used = naive(tokenizer, ids, skip, stops, include, min_tokens)
    detokenizer = IncrementalDetokenizer(
        tokenizer,
        skip_special_tokens=skip,
        stop=tuple(stops),
        include_stop=include,
        min_tokens=min_tokens,
    )
    text = ""
    for piece in draw_pieces(data, ids):
        text += detokenizer.push(piece)
        assert expected.startswith(text)  # nothing is ever taken back
    text += detokenizer.finish()
    assert (text, detokenizer.stop_reason, detokenizer.num_tokens_used) == (expected, reason, used)
    assert detokenizer.num_tokens == len(ids)


def letters(tokenizer: Tokenizer, text: str) -> list[int]:
    """One token a character."""
    return [
        next(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == c.encode())
        for c in text
    ]


def test_stops_step_by_step(small):
    tokenizer = small["bytes"]
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=True, stop=("abcd", "bx"))
    assert [detokenizer.push([i]) for i in letters(tokenizer, "zabcabx!!")] == [
        "z",
        "",
        "",
        "",
        "abc",
        "",
        "a",
        "",
        "",
    ]
    assert (detokenizer.stop_reason, detokenizer.num_tokens_used, detokenizer.num_tokens) == (
        "bx",
        7,
        9,
    )
    assert detokenizer.finish() == ""
    assert detokenizer.push(letters(tokenizer, "a")) == ""


def test_what_a_stop_string_might_claim_comes_at_the_end(small):
    tokenizer = small["bytes"]
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=True, stop=("abcd",))
    assert detokenizer.push(letters(tokenizer, "xabc")) == "x"
    assert detokenizer.finish() == "abc"
    assert detokenizer.finish() == ""


def test_the_first_tokens_are_not_searched(small):
    tokenizer = small["bytes"]
    detokenizer = IncrementalDetokenizer(
        tokenizer, skip_special_tokens=True, stop=("ab",), min_tokens=3
    )
    assert detokenizer.push(letters(tokenizer, "ababab")) == "abab"
    assert (detokenizer.stop_reason, detokenizer.num_tokens_used) == ("ab", 6)


def test_a_long_stop_string_costs_no_more_per_token(small):
    """Work is counted, not timed: comparisons of characters, with a stop string that always almost matches."""
    tokenizer = small["bytes"]
    (a,), n = letters(tokenizer, "a"), 2000
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=True, stop=("a" * n + "b",))
    steps = 0
    matcher = detokenizer._stops[0]
    shorter = matcher._shorter

    class Counting(list):
        def __getitem__(self, i):
            nonlocal steps
            steps += 1
            return shorter[i]

    matcher._shorter = Counting()
    text = detokenizer.push([a] * (3 * n)) + detokenizer.finish()
    assert text == "a" * 3 * n
    assert steps <= 3 * n
