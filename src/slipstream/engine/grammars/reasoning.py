"""Counts reasoning tokens, and ends reasoning when a budget is used up.

A position in an answer is a `Spot`, a plain value, and `after` gives the next one. So drafts can be
tried on a copy, and tokens are undone by returning to an earlier spot. Markers are found in the
text, as in the parser of answers (`text/tool_formats/base.py`): a marker may be one special token,
several tokens, or part of one.

With a budget the first N tokens of reasoning are free. After them, only the tokens of the end
marker are allowed, one after another. Marker tokens don't count.

The answer's grammar doesn't see reasoning; for it the end marker follows at once. So a budget may
end inside a character, which a grammar could not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from slipstream.engine.text.tool_formats.harmony import CHANNEL, ENDS, MESSAGE, START
from slipstream.errors import RequestError
from slipstream.params.answer_forms import ReasoningMarkers

WAITING, OPENED, REASONING, ENDING, DONE = range(5)
"""Phases. WAITING: only whitespace or part of the begin marker so far. OPENED: the prompt has begun
reasoning, and the marker may be repeated. REASONING. ENDING: the end marker is forced. DONE: no
more reasoning."""

HEAD, ANALYSIS_HEAD, OTHER = range(5, 8)
"""Further phases of harmony: within a message's header, within the header of reasoning, and within
the body of another message."""

Bits: TypeAlias = npt.NDArray[np.int32]


class Spot(NamedTuple):
    """A position in an answer. `pieces`: bytes of the last tokens, in which a marker may have
    begun. `num_forced`: tokens of the end marker so far."""

    phase: int
    num_tokens: int = 0  # reasoning tokens so far
    pieces: tuple[bytes, ...] = ()
    num_forced: int = 0


class MarkerTokenizer(Protocol):
    """Interface of the tokenizer for markers of reasoning."""

    @property
    def special_ids(self) -> Collection[int]: ...
    def encode(self, text: str, /, *, add_special_tokens: bool = ...) -> list[int]: ...
    def token_bytes(self, token_id: int, /) -> bytes: ...


class ReasoningCounter:
    """Follows reasoning between two markers at the beginning of an answer."""

    def __init__(
        self, markers: ReasoningMarkers, tokenizer: MarkerTokenizer, budget: int | None = None
    ) -> None:
        """Counts reasoning, and forces its end if there is a `budget`. RequestError if the
        tokenizer can't encode the marker."""
        self.budget = budget
        self._bytes = _spelling(markers, tokenizer)
        self._begin = markers.begin.encode()
        self.ends = _Markers((markers.end, *markers.interrupts))
        self.closing: tuple[int, ...] = ()
        if budget is not None:
            self.closing = _tokens_of(markers.end, tokenizer)
        self.marker = self.closing  # the part of it that ends the reasoning
        self.forced = frozenset(self.closing)
        self.start = self._limited(Spot(OPENED if markers.opened else WAITING))

    def after(self, spot: Spot, token: int) -> Spot:
        phase, num_tokens, pieces, num_forced = spot
        if phase == DONE:
            return spot
        if phase == ENDING:
            return self._forced(num_tokens, num_forced + 1)
        pieces = (*pieces, self._bytes(token))
        if phase == REASONING:
            return self._limited(self._reasoning(num_tokens + 1, pieces))
        text = _stripped(b"".join(pieces))
        if text.startswith(self._begin):
            return self._limited(Spot(REASONING, 0, (text[len(self._begin) :],)))
        is_begun = self._begin.startswith(text)
        if phase == WAITING:
            return Spot(WAITING, 0, (text,)) if is_begun else Spot(DONE)
        if is_begun:
            return self._limited(Spot(OPENED, num_tokens + 1, pieces if text else ()))
        return self._limited(self._reasoning(num_tokens + 1, pieces))

    def allowed(self, spot: Spot) -> tuple[int, ...]:
        """The only tokens allowed next; () if the budget doesn't restrict them."""
        return self.closing[spot.num_forced : spot.num_forced + 1] if spot.phase == ENDING else ()

    def is_free(self, spot: Spot, num_tokens: int) -> bool:
        """Whether the budget restricts none of the next `num_tokens` tokens, whatever they are, nor
        the one after them."""
        budget = self.budget
        return budget is None or spot.phase == DONE or spot.num_tokens + num_tokens < budget

    def _reasoning(self, num_tokens: int, pieces: tuple[bytes, ...]) -> Spot:
        found, rest, num_marker = self.ends.find(pieces)
        if not found:
            return Spot(REASONING, num_tokens, rest)
        return self._ended(max(0, num_tokens - num_marker), rest)

    def _ended(self, num_tokens: int, rest: tuple[bytes, ...]) -> Spot:
        return Spot(DONE, num_tokens)

    def _forced(self, num_tokens: int, num_forced: int) -> Spot:
        if num_forced < len(self.closing):
            return Spot(ENDING, num_tokens, (), num_forced)
        return Spot(DONE, num_tokens)

    def _limited(self, spot: Spot) -> Spot:
        """The same spot, or the one at which the end marker is forced if the budget is used up. If
        the model has begun the marker, only the rest is forced."""
        if (
            self.budget is None
            or spot.phase not in (OPENED, REASONING)
            or spot.num_tokens < self.budget
        ):
            return spot
        written = tuple(map(self._bytes, self.closing))
        most = min(len(written) - 1, spot.num_tokens)
        num_forced = next((k for k in range(most, 0, -1) if spot.pieces[-k:] == written[:k]), 0)
        return Spot(ENDING, spot.num_tokens - num_forced, (), num_forced)


class ChannelCounter(ReasoningCounter):
    """Counts reasoning in harmony's messages, any of which may be reasoning. All messages of an answer share a budget.

    After the budget the message is ended, the next one's header is begun, and its channel is one of
    `markers.channels`.
    """

    def __init__(
        self, markers: ReasoningMarkers, tokenizer: MarkerTokenizer, budget: int | None = None
    ) -> None:
        self.budget, self._bytes = budget, _spelling(markers, tokenizer)
        self.ends, self._message = _Markers((*ENDS, START)), _Markers((MESSAGE,))
        self._heads = _Markers((CHANNEL + "analysis", MESSAGE))
        self.closing: tuple[int, ...] = ()
        self.marker: tuple[int, ...] = ()
        self._channels: tuple[int, ...] = ()
        if budget is not None:
            self.closing = _tokens_of(f"{ENDS[0]}{START}assistant{CHANNEL}", tokenizer)
            self.marker = self.closing[:1]
            self._channels = tuple(_tokens_of(name, tokenizer)[0] for name in markers.channels)
        self.forced = frozenset((*self.closing, *self._channels))
        self.start = Spot(HEAD)

    def after(self, spot: Spot, token: int) -> Spot:
        phase, num_tokens, pieces, num_forced = spot
        if phase == ENDING:
            return self._forced(num_tokens, num_forced + 1)
        pieces = (*pieces, self._bytes(token))
        if phase == REASONING:
            return self._limited(self._reasoning(num_tokens + 1, pieces))
        if phase == OTHER:
            found, rest, _ = self.ends.find(pieces)
            return Spot(HEAD if found else OTHER, num_tokens, rest)
        found, rest, _ = (self._heads if phase == HEAD else self._message).find(pieces)
        if found == MESSAGE.encode():
            body = OTHER if phase == HEAD else REASONING
            return self._limited(Spot(body, num_tokens, rest))
        return Spot(ANALYSIS_HEAD if found else phase, num_tokens, rest)

    def allowed(self, spot: Spot) -> tuple[int, ...]:
        if spot.phase != HEAD or self.is_free(spot, 0):
            return super().allowed(spot)
        return self._channels if b"".join(spot.pieces).endswith(CHANNEL.encode()) else ()

    def _ended(self, num_tokens: int, rest: tuple[bytes, ...]) -> Spot:
        return Spot(HEAD, num_tokens, rest)

    def _forced(self, num_tokens: int, num_forced: int) -> Spot:
        if num_forced < len(self.closing):
            return Spot(ENDING, num_tokens, (), num_forced)
        return Spot(HEAD, num_tokens, (CHANNEL.encode(),))


def counter(
    markers: ReasoningMarkers, tokenizer: MarkerTokenizer, budget: int | None = None
) -> ReasoningCounter:
    kind = ChannelCounter if markers.channels else ReasoningCounter
    return kind(markers, tokenizer, budget)


class ReasoningBudget:
    """State of one answer's reasoning budget. `vocabulary` is given if the answer also has a
    grammar."""

    def __init__(
        self,
        counter: ReasoningCounter,
        vocabulary: ReasoningVocabulary | None = None,
        spots: Sequence[Spot] = (),
    ) -> None:
        self._counter, self._vocabulary = counter, vocabulary
        self._spots = [*spots] or [counter.start]
        # tokens passed to the grammar between one spot and the next
        self._num_given: list[int] = []

    def copy(self) -> ReasoningBudget:
        return ReasoningBudget(self._counter, self._vocabulary, self._spots[-1:])

    @property
    def is_over(self) -> bool:
        """Whether the reasoning has ended and none can follow."""
        return self._spots[-1].phase == DONE

    @property
    def is_reasoning(self) -> bool:
        return self._spots[-1].phase in (OPENED, REASONING)

    @property
    def allowed(self) -> tuple[int, ...]:
        """The only tokens allowed next; () if the budget doesn't restrict them."""
        return self._counter.allowed(self._spots[-1])

    def is_free(self, num_tokens: int) -> bool:
        return self._counter.is_free(self._spots[-1], num_tokens)

    def accept(self, token: int) -> tuple[int, ...] | None:
        """Advance by a token. Returns the tokens for the answer's grammar: none within reasoning,
        the end marker once at its end. None, without advancing, if the token is not allowed."""
        before, counter = self._spots[-1], self._counter
        if (only := counter.allowed(before)) and token not in only:
            return None
        after = counter.after(before, token)
        given: tuple[int, ...] = (token,)
        if before.phase in (OPENED, REASONING):
            given = () if after.phase in (OPENED, REASONING) else counter.marker
            if after.phase == ENDING:
                given = counter.closing[: after.num_forced]
        self._spots.append(after)
        self._num_given.append(len(given))
        return given

    def rollback(self, num_tokens: int) -> int:
        """Undo the last tokens. Returns how many of the grammar's tokens are undone with them."""
        if not num_tokens:
            return 0
        num_given = sum(self._num_given[-num_tokens:])
        del self._spots[-num_tokens:], self._num_given[-num_tokens:]
        return num_given

    def settle(self) -> None:
        """Drop the data for `rollback`, since no token so far will be undone."""
        del self._spots[:-1]
        self._num_given.clear()

    def write_mask(self, into: Bits) -> None:
        """Write the mask of tokens allowed in reasoning."""
        assert self._vocabulary is not None
        into[:] = self._vocabulary.mask(b"".join(self._spots[-1].pieces))

    def narrow(self, mask: Bits) -> bool:
        """Remove from a mask the tokens that the budget forbids. Returns whether it forbids some."""
        if not (only := self.allowed):
            return False
        mask &= _bits(only, len(mask))
        return True


class ReasoningVocabulary:
    """Tokens allowed in reasoning before an answer with a grammar: all text, and the end marker.
    Text that only looks like a marker is forbidden, since the answer's parser would end reasoning
    there, but the grammar would not."""

    def __init__(
        self, counter: ReasoningCounter, tokens: Sequence[bytes], special: Collection[int]
    ) -> None:
        first, written = counter.marker[0], b"".join(tokens[t] for t in counter.marker).lstrip()
        self._by_text = b"" if first in special else written
        self._texts, self._special = counter.ends.texts, set(special)
        self._tokens, self._words = tokens, -(-len(tokens) // 32)
        text = [i for i, t in enumerate(tokens) if t and i not in self._special]
        self._base = _bits([*text, first], self._words)
        self._base &= ~_bits([t for t in text if self._looks_like_end(tokens[t])], self._words)
        self._masks: dict[tuple[bytes, ...], Bits] = {}

    def _looks_like_end(self, token: bytes) -> bool:
        return any(t in token and (t, token) != (self._by_text,) * 2 for t in self._texts)

    def mask(self, before: bytes) -> Bits:
        """Mask of the tokens that may follow the bytes `before`, in which a marker may have
        begun."""
        rests = tuple(
            text[k:]
            for text in self._texts
            for k in range(1, min(len(text) - 1, len(before)) + 1)
            if before.endswith(text[:k])
        )
        if not rests:
            return self._base
        if rests not in self._masks:
            whole = {text[k:] for text in (self._by_text,) for k in range(1, len(text))}
            found = [
                i
                for i, token in enumerate(self._tokens)
                if token.startswith(rests) and i not in self._special and token not in whole
            ]
            self._masks[rests] = self._base & ~_bits(found, self._words)
        return self._masks[rests]


def _bits(tokens: Iterable[int], words: int) -> Bits:
    """Returns the bit mask that allows these tokens."""
    flags = np.zeros(words * 32, np.bool_)
    flags[list(tokens)] = True
    return np.packbits(flags, bitorder="little").view("<i4").astype(np.int32)


class _Markers:
    """Search for several marker texts in the bytes of the latest tokens."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = tuple(text.encode() for text in texts)
        self._search = re.compile(b"|".join(map(re.escape, self.texts))).search
        self._kept = max(map(len, self.texts)) - 1

    def find(self, pieces: tuple[bytes, ...]) -> tuple[bytes, tuple[bytes, ...], int]:
        """(first marker in the pieces, pieces to keep, number of pieces from the marker's beginning
        on). Without a marker: (b"", the last pieces, in which one may have begun, 0)."""
        text = b"".join(pieces)
        if (found := self._search(text)) is not None:
            begins = accumulate(map(len, pieces), initial=0)
            num_before = sum(
                begin < found.start() or (begin == found.start() and not piece)
                for begin, piece in zip(begins, pieces, strict=False)
            )
            return found[0], (text[found.end() :],), len(pieces) - num_before
        size, first = len(text), 0
        while first < len(pieces) and size - len(pieces[first]) >= self._kept:
            size -= len(pieces[first])
            first += 1
        return b"", pieces[first:], 0


def _spelling(markers: ReasoningMarkers, tokenizer: MarkerTokenizer) -> Callable[[int], bytes]:
    """Function from a token to the bytes that it adds to the text in which markers are searched."""
    if markers.shows_special:
        return tokenizer.token_bytes
    return lambda token: b"" if token in tokenizer.special_ids else tokenizer.token_bytes(token)


def _stripped(data: bytes) -> bytes:
    """Bytes without leading whitespace."""
    try:
        return data.decode().lstrip().encode()
    except UnicodeDecodeError:  # incomplete character
        return data.lstrip()


def _tokens_of(text: str, tokenizer: MarkerTokenizer) -> tuple[int, ...]:
    """The tokens that encode a marker. RequestError if there are none."""
    tokens = tuple(tokenizer.encode(text, add_special_tokens=False))
    if b"".join(map(tokenizer.token_bytes, tokens)).lstrip() != text.encode():
        raise RequestError(
            f"this model's tokenizer can't write {text!r}, which ends its reasoning; leave thinking_token_budget out",
            field="thinking_token_budget",
        )
    return tokens
