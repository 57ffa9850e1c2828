"""Proposes draft tokens from a request's own tokens or from recent answers, without a model.

A proposer finds the longest run of tokens at the end of the text that occurred before. It proposes
the tokens that followed it there.

    ngram     prompt look-up: runs of a few tokens, in the request's own prompt and answer
    suffix    runs of any length, in prompt and answer and in recently ended answers

Both find earlier runs like LZ77 compressors (Ziv and Lempel 1977). A table has the last place of
each pair of tokens, and each place links to the previous place of the same pair. A token costs well
under a microsecond and about 150 bytes. A suffix automaton in Python costs ten times as much. Only
the latest `MAX_PLACES` places are compared.

A draft model's tokens are drawn by the worker (`worker/draft/drafter.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from typing import NamedTuple

MAX_PLACES = 32
"""Maximum number of earlier positions of a pair that are compared."""

MAX_MATCH = 32
"""Maximum tokens of a run that are compared. Longer runs predict no better."""

MAX_INDEXED = 32_768
"""Maximum tokens of a request that are searched: the latest ones at its first proposal."""

MAX_TRAFFIC = 65_536
"""Maximum tokens of ended answers that are searched, per cache salt."""

SEPARATOR = -1
"""Separates two answers. No request has this token."""


class Proposal(NamedTuple):
    """Proposed tokens. `match` is the length of the run found; longer runs predict better."""

    tokens: tuple[int, ...] = ()
    match: int = 0


class Proposer(ABC):
    """Proposes drafts for one request. `tokens` must always be the same list, which only grows."""

    @abstractmethod
    def propose(self, tokens: Sequence[int], most: int) -> Proposal:
        """Propose up to `most` tokens that may follow `tokens`."""


class PairIndex:
    """Index of each pair of adjacent tokens in a growing sequence.

    The place of a pair is the position of its second token.
    """

    __slots__ = ("_before", "_begin", "_end", "_latest")

    def __init__(self, begin: int = 0) -> None:
        self._begin = begin  # the first place in `_before`
        self._end = begin + 1  # pairs that end before this place are indexed
        self._latest: dict[int, int] = {}
        self._before = array("i", [-1])  # for each place, the previous place of the same pair

    def add(self, tokens: Sequence[int], end: int) -> None:
        """Index the pairs that end before `end`."""
        latest, before = self._latest, self._before
        for i in range(self._end, end):
            pair = tokens[i - 1] << 32 | tokens[i]
            before.append(latest.get(pair, -1))
            latest[pair] = i
        self._end = max(self._end, end)

    def longest(self, own: Sequence[int], tokens: Sequence[int], most: int) -> tuple[int, int]:
        """Find the longest suffix of `own` in the indexed `tokens`; the latest among equals.

        Returns (place, length), or (−1, 0) if not even the last pair occurs. Lengths are counted up
        to `most`.
        """
        place, found = self._latest.get(own[-2] << 32 | own[-1], -1), (-1, 0)
        last = len(own) - 1
        for _ in range(MAX_PLACES):
            if place < 0:
                break
            length, limit = 2, min(most, place - self._begin + 1, last + 1)
            while length < limit and own[last - length] == tokens[place - length]:
                length += 1
            if length > found[1]:
                found = place, length
                if length >= most:
                    break
            place = self._before[place - self._begin]
        return found


class RecentAnswers:
    """Recently ended answers of requests with the same salt.

    There are two generations. When the newer is full, it replaces the older.
    """

    def __init__(self) -> None:
        self.generations: list[tuple[list[int], PairIndex]] = [([], PairIndex())]

    def add(self, answer: Sequence[int]) -> None:
        tokens, index = self.generations[0]
        if len(tokens) > MAX_TRAFFIC // 2:
            tokens, index = [], PairIndex()
            self.generations = [(tokens, index), self.generations[0]]
        tokens += [*answer[-MAX_TRAFFIC // 2 :], SEPARATOR]
        index.add(tokens, len(tokens))


class LookUp(Proposer):
    """Finds runs of `least` to `most_match` tokens, also in `text`, which an encoder reads."""

    __slots__ = ("_index", "_least", "_most_match", "_text", "_traffic")

    def __init__(
        self,
        *,
        least: int = 2,
        most_match: int = MAX_MATCH,
        text: Sequence[int] = (),
        traffic: RecentAnswers | None = None,
    ) -> None:
        self._least, self._most_match, self._traffic = least, most_match, traffic
        self._index: PairIndex | None = None
        self._text: tuple[Sequence[int], PairIndex] | None = None
        if len(text) > 1:
            self._text = text, PairIndex()
            self._text[1].add(text, len(text))

    def propose(self, tokens: Sequence[int], most: int) -> Proposal:
        if self._index is None:
            self._index = PairIndex(max(0, len(tokens) - MAX_INDEXED))
        if len(tokens) < 2:
            return Proposal()
        self._index.add(tokens, len(tokens) - 1)  # without the last pair, which would find itself
        source, (place, match) = tokens, self._index.longest(tokens, tokens, self._most_match)
        others = [] if self._text is None else [self._text]
        others += self._traffic.generations if self._traffic is not None else []
        for other, index in others:
            if match >= self._most_match:
                break
            at, length = index.longest(tokens, other, self._most_match)
            if length > match and at + 1 < len(other):
                source, place, match = other, at, length
        if match < self._least:
            return Proposal()
        drafts = list(source[place + 1 : place + 1 + most])
        if source is tokens:  # a run that reaches the end repeats itself
            period = len(tokens) - 1 - place
            while len(drafts) < most:
                drafts.append(drafts[len(drafts) - period])
        elif SEPARATOR in drafts:
            drafts = drafts[: drafts.index(SEPARATOR)]
        return Proposal(tuple(drafts), match)
