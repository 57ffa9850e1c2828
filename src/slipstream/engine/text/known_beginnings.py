"""Cache of tokenized long texts. A text that begins like an earlier one, as each turn of an agent's conversation does, is
only encoded from there on.

A text may be cut before a special token, since no token spans one. Such a token (a *seam*) strips no whitespace around it,
is no part of another added token, and overlaps neither others nor itself. So its text always means that token. A token with
another meaning, too, such as unknown characters, is not used.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import islice
from threading import Lock

from slipstream.engine.text.tokenizer_parts import TokenizerBackend

MIN_CHARS = 16_384
"""Minimum characters of a text that is cached. Shorter ones are encoded in about a millisecond."""

MAX_BYTES, MAX_TEXTS = 1 << 26, 256
"""Maximum bytes of cached texts and tokens, and maximum number of texts. The least recently used is dropped first."""

MAX_SEAMS = 32
"""Number of seams, counted from a text's end, at which a later text may diverge. Also the maximum number of distinct seam
tokens."""


def seams_of(backend: TokenizerBackend) -> dict[int, str]:
    """Texts of the special tokens before which a text may be cut (seams), by token id."""
    added = backend.get_added_tokens_decoder()
    texts = {token.content for token in added.values()}
    ends = sorted(text[n:] for text in texts for n in range(len(text)))
    last = frozenset(ends)

    def is_alone(text: str) -> bool:
        """Whether no other token's text contains `text`, and no token or prefix of it overlaps its ends."""
        after = bisect_left(ends, text) + 1
        if after < len(ends) and ends[after].startswith(text):
            return False
        return not any(text[:n] in last for n in range(1, len(text)))

    return {
        number: token.content
        for number, token in added.items()
        if not (token.lstrip or token.rstrip or token.single_word or token.normalized)
        and token.content
        and is_alone(token.content)
    }


class KnownBeginnings:
    """Cache of long texts and their tokens."""

    def __init__(self, seams: dict[int, str]) -> None:
        self._seams = seams
        # by salt and text: tokens, and seams (number of tokens before it, character offset), the last first
        self._known: dict[tuple[str, str], tuple[array[int], list[tuple[int, int]]]] = {}
        self._num_bytes = 0
        self._changes = Lock()

    def encode(self, text: str, salt: str, encode: Callable[[str], list[int]]) -> list[int]:
        """Returns a text's tokens. Only the part after the longest cached prefix is passed to
        `encode`. Prefixes of requests with another salt are not used, because the shorter time
        would reveal them."""
        if len(text) < MIN_CHARS or not self._seams:
            return encode(text)
        begun, at = self._beginning(text, salt)
        ids = [*begun, *encode(text[at:])]
        self._remember(text, salt, ids)
        return ids

    def _beginning(self, text: str, salt: str) -> tuple[Sequence[int], int]:
        """(token ids of the longest cached prefix of `text`, its length in characters)."""
        for key in reversed([*self._known]):  # a copy, since another thread may add entries
            of, known = key
            ids, seams = self._known.get(key, (array("i"), []))
            if of != salt or not seams or not text.startswith(known[: seams[-1][1]]):
                continue
            for count, at in seams:
                seam = self._seams[ids[count]]
                if text.startswith(seam, at) and text.startswith(known[:at]):
                    return ids[:count], at
        return [], 0

    def _remember(self, text: str, salt: str, ids: list[int]) -> None:
        seams, at = list[tuple[int, int]](), len(text)
        counts = Counter(ids)
        used = dict.fromkeys(i for i in reversed(ids) if i in self._seams)
        own = {i for i in islice(used, MAX_SEAMS) if text.count(self._seams[i]) == counts[i]}
        found = (i for i in range(len(ids) - 1, -1, -1) if ids[i] in own)
        for i in islice(found, MAX_SEAMS):
            at = text.rfind(self._seams[ids[i]], 0, at)
            seams.append((i, at))
        with self._changes:
            known = self._known
            if (before := known.pop((salt, text), None)) is not None:
                self._num_bytes -= _num_bytes(text, before[0])
            known[salt, text] = array("i", ids), seams
            self._num_bytes += _num_bytes(text, ids)
            while self._num_bytes > MAX_BYTES or len(known) > MAX_TEXTS:
                oldest = next(iter(known))
                self._num_bytes -= _num_bytes(oldest[1], known.pop(oldest)[0])


def _num_bytes(text: str, ids: Sequence[int]) -> int:
    return sys.getsizeof(text) + 4 * len(ids)
