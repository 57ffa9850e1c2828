"""Counting of reasoning: as a naive reading of the whole text has it, with budgets that hold, and back again."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.engine.grammars.reasoning import DONE, ReasoningBudget, ReasoningVocabulary, counter
from slipstream.engine.text.tool_formats.base import Parser, Reasoning
from slipstream.engine.text.tool_formats.harmony import CHANNEL, ENDS, MESSAGE, START, Harmony
from slipstream.errors import RequestError
from slipstream.params.answer_forms import ReasoningMarkers

SPECIAL = ("<think>", "</think>", CHANNEL, MESSAGE, START, *ENDS)
PARTS = (
    *(
        "a",
        "b",
        " ",
        "\n",
        "<",
        ">",
        "/",
        "</",
        "think",
        "</th",
        "ink>",
        "k>x",
        "x<",
        ">\n",
        "\xe9",
    ),
    *(
        "[",
        "]",
        "[/",
        "E",
        "END",
        "D]",
        "]y",
        "BEGIN",
        "[B",
        "GIN]",
        "call",
        "<call>",
        "",
        "analysis",
    ),
    *("final", "assistant", "commentary", "anal", "ysis", "f"),
)


class Words:
    """A tokenizer with these words. A text is written with the longest that fit."""

    words = (*(part.encode() for part in (*SPECIAL, *PARTS)), b"\xc3", b"\xa9")
    special_ids = frozenset(range(len(SPECIAL)))

    def encode(self, text, *, add_special_tokens=True):
        found, rest = [], text.encode()
        while rest:
            fits = [(len(w), -i) for i, w in enumerate(self.words) if w and rest.startswith(w)]
            size, number = max(fits)
            found.append(-number)
            rest = rest[size:]
        return found

    def token_bytes(self, token):
        return self.words[token] if token < len(self.words) else b""


WORDS = Words()
TOKENS = st.integers(0, len(Words.words) - 1)
MARKERS = [
    ReasoningMarkers(begin="<think>", end="</think>"),
    ReasoningMarkers(begin="<think>", end="</think>", opened=True),
    ReasoningMarkers(begin="<think>", end="</think>", opened=True, interrupts=("<call>",)),
    ReasoningMarkers(begin="[BEGIN]", end="[/END]", shows_special=False),
    ReasoningMarkers(begin="[BEGIN]", end="[/END]", opened=True),
]
CHANNELS = ReasoningMarkers(channels=("final", "commentary"))
LIKELY = st.lists(
    st.sampled_from([*WORDS.encode("[/END]</think><think>[BEGIN]<call>"), 0, 1, 9, 10]), max_size=30
)
ANSWERS = (
    st.lists(TOKENS, max_size=40)
    | LIKELY
    | st.tuples(LIKELY, st.lists(TOKENS)).map(lambda p: p[0] + p[1])
)
MESSAGES = st.lists(
    st.sampled_from(
        [CHANNEL, MESSAGE, START, *ENDS, "analysis", "final", "assistant", "a", "anal", "ysis"]
    ),
    max_size=40,
).map(lambda texts: WORDS.encode("".join(texts)))


def spelled(markers, token):
    return (
        b""
        if token in Words.special_ids and not markers.shows_special
        else WORDS.token_bytes(token)
    )


def num_in(counts, tokens):
    """Tokens of reasoning in an answer."""
    spot = counts.start
    for token in tokens:
        spot = counts.after(spot, token)
    return spot.num_tokens


def naive(markers, tokens):
    """Tokens of reasoning, from the text of the whole answer."""
    pieces = [spelled(markers, token) for token in tokens]
    begins = np.cumsum([0, *map(len, pieces)])
    text = b"".join(pieces)
    begin = markers.begin.encode()
    opens = re.match(rb"\s*" + re.escape(begin), text)
    if opens is None and not markers.opened:
        return 0
    start = opens.end() if opens else 0
    ends = re.compile(b"|".join(re.escape(e.encode()) for e in (markers.end, *markers.interrupts)))
    found = ends.search(text, start)
    stop = len(text) if found is None else found.start()
    return sum(
        (first >= start)
        and (first < stop or (first == stop and (found is None or not piece)))
        and not (opens and first == start and not piece and i < _last(begins, start, pieces))
        for i, (first, piece) in enumerate(zip(begins, pieces, strict=False))
    )


def _last(begins, start, pieces):
    """The first token after the one that completed the marker."""
    return next(i + 1 for i, b in enumerate(begins[1:]) if b >= start)


@pytest.mark.parametrize("markers", MARKERS, ids=str)
@given(tokens=ANSWERS)
def test_count_is_that_of_a_naive_reading(markers, tokens):
    assert num_in(counter(markers, WORDS), tokens) == naive(markers, tokens)


@pytest.mark.parametrize("markers", MARKERS, ids=str)
@given(tokens=ANSWERS)
def test_reasoning_ends_where_the_parser_ends_it(markers, tokens):
    counts = counter(markers, WORDS)
    spot = counts.start
    for token in tokens:
        spot = counts.after(spot, token)
    text = b"".join(spelled(markers, token) for token in tokens).decode(errors="replace")
    parser = Parser(
        None, (markers.begin, markers.end), thinking=markers.opened, interrupts=markers.interrupts
    )
    events = parser.feed(text + "!!") + parser.finish()
    is_open = bool(events) and isinstance(events[-1], Reasoning)
    assert is_open == (spot.phase != DONE and (markers.opened or spot.phase != 0))


def naive_messages(tokens):
    pieces = list(map(WORDS.token_bytes, tokens))
    text, place, spans = b"".join(pieces), 0, []
    ends = re.compile(b"|".join(re.escape(end.encode()) for end in (*ENDS, START)))
    while (begin := text.find(MESSAGE.encode(), place)) >= 0:
        body = begin + len(MESSAGE)
        end = ends.search(text, body)
        if f"{CHANNEL}analysis".encode() in text[place:begin]:
            spans.append((body, len(text) if end is None else end.start()))
        if end is None:
            break
        place = end.end()
    begins = np.cumsum([0, *map(len, pieces)])[:-1]
    return sum(any(first <= b < last for first, last in spans) for b in begins)


@given(tokens=MESSAGES)
def test_messages_of_harmony_count_where_the_channel_is_analysis(tokens):
    assert num_in(counter(CHANNELS, WORDS), tokens) == naive_messages(tokens)
    parser = Parser(lambda parser: Harmony().script(parser, ()))
    text = b"".join(map(WORDS.token_bytes, tokens)).decode()
    read = any(isinstance(event, Reasoning) for event in parser.feed(text) + parser.finish())
    assert read == bool(naive_messages(tokens))


@pytest.mark.parametrize("markers", [*MARKERS, CHANNELS], ids=str)
@given(budget=st.integers(0, 6), tokens=ANSWERS | MESSAGES)
def test_budget_holds_and_is_used_up_by_a_model_that_goes_on(markers, budget, tokens):
    limited, counts = counter(markers, WORDS, budget), counter(markers, WORDS)
    spot, drawn, was_forced = limited.start, [], False
    for token in tokens:
        if (only := limited.allowed(spot)) and token not in only:
            token, was_forced = only[0], was_forced or len(only) == 1
        spot = limited.after(spot, token)
        drawn.append(token)
    while limited.allowed(spot):
        was_forced |= len(limited.allowed(spot)) == 1
        drawn.append(limited.allowed(spot)[0])
        spot = limited.after(spot, drawn[-1])
    found = num_in(counts, drawn)
    assert found == spot.num_tokens <= budget
    if was_forced and markers is not CHANNELS and len(limited.closing) == 1:
        assert found == budget


@pytest.mark.parametrize("markers", [*MARKERS, CHANNELS], ids=str)
@given(
    budget=st.integers(0, 6),
    moves=st.lists(st.lists(TOKENS, max_size=5) | st.integers(0, 6), max_size=12),
)
def test_tokens_taken_back_leave_no_trace(markers, budget, moves):
    counts = counter(markers, WORDS, budget)
    state, kept = ReasoningBudget(counts), []
    for move in moves:
        if isinstance(move, int):
            count = min(move, len(kept))
            taken = kept[len(kept) - count :]
            assert state.rollback(count) == sum(len(given) for _, given in taken)
            del kept[len(kept) - count :]
            continue
        guess = state.copy()
        for token in move:
            if (only := state.allowed) and token not in only:
                assert state.accept(token) is None
                token = only[0]
            given = state.accept(token)
            assert guess.accept(token) == given
            kept.append((token, given))
    again = ReasoningBudget(counts)
    assert [again.accept(token) for token, _ in kept] == [given for _, given in kept]
    assert (again.allowed, again.is_over, again._spots[-1]) == (
        state.allowed,
        state.is_over,
        state._spots[-1],
    )
    assert all(state.is_free(n) <= (not state.allowed) for n in range(3))


@pytest.mark.parametrize("markers", [m for m in MARKERS if m.opened and not m.interrupts], ids=str)
@given(budget=st.integers(0, 8), data=st.data())
def test_grammar_sees_no_reasoning_and_one_marker(markers, budget, data):
    """The parser and the grammar find the same end of the reasoning, whatever the masks allow."""
    counts = counter(markers, WORDS, budget)
    vocabulary = ReasoningVocabulary(counts, WORDS.words, WORDS.special_ids)
    state, given, drawn = ReasoningBudget(counts, vocabulary), [], []
    while not state.is_over:
        mask = np.full(-(-len(WORDS.words) // 32), -1, np.int32)
        if state.is_reasoning:
            state.write_mask(mask)
        state.narrow(mask)
        allowed = [t for t in range(len(WORDS.words)) if mask[t >> 5] >> (t & 31) & 1]
        drawn.append(data.draw(st.sampled_from(allowed)))
        given += state.accept(drawn[-1])
    assert tuple(given) == counts.closing
    text = b"".join(map(WORDS.token_bytes, drawn))
    assert text.endswith(markers.end.encode())
    assert text.count(markers.end.encode()) == 1
    assert num_in(counter(markers, WORDS), drawn) <= budget


def test_marker_that_the_tokenizer_cannot_write_is_an_error():
    class Other(Words):
        def token_bytes(self, token):
            return b"?"

    with pytest.raises(RequestError) as error:
        counter(MARKERS[0], Other(), 3)
    assert error.value.field == "thinking_token_budget"


def test_marker_that_the_model_has_begun_is_only_completed():
    markers = MARKERS[4]
    begun = WORDS.encode("[/END]")
    counts = counter(markers, WORDS, 3)
    spot = counts.start
    for token in (*WORDS.encode("ab"), begun[0]):
        spot = counts.after(spot, token)
    assert counts.allowed(spot) == (begun[1],)
    assert spot.num_tokens == 2
