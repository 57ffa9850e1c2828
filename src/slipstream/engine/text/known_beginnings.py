"""Tokens of long texts that begin as an earlier one, as an agent's conversation does turn after turn: the rest is encoded.

A text may be cut before a special token, since no token reaches over one. Such a token (a *seam*) takes no whitespace
around it, is no part of another added token, and overlaps none, nor itself. So wherever its text stands, it is that token.
A token that stands for something else, too, such as an unknown character, is left out.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import islice
from threading import Lock

import tokenizers

MIN_CHARS = 16_384
"""Shorter texts are encoded as a whole, in about a millisecond."""

MAX_BYTES, MAX_TEXTS = 1 << 26, 256
"""Bytes of the texts and tokens that are remembered, and the texts' number. The one used longest ago goes first."""

MAX_SEAMS = 32
"""Seams of a text, from its end, before which another may go on otherwise. They are of at most so many tokens."""


def seams_of(backend: tokenizers.Tokenizer) -> dict[int, str]:
    """Texts of the tokens before which a text may be cut."""
    added = backend.get_added_tokens_decoder()
    texts = {token.content for token in added.values()}
    ends = sorted(text[n:] for text in texts for n in range(len(text)))
    last = frozenset(ends)

    def is_alone(text: str) -> bool:
        """Whether no token may take a part of `text`: none holds it, and none ends as it begins."""
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
    """Remembers long texts with their tokens."""

    def __init__(self, seams: dict[int, str]) -> None:
        self._seams = seams
        # by salt and text: tokens, and seams (number of tokens before it, where it stands), the last first
        self._known: dict[tuple[str, str], tuple[array[int], list[tuple[int, int]]]] = {}
        self._num_bytes = 0
        self._changes = Lock()

    def encode(self, text: str, salt: str, encode: Callable[[str], list[int]]) -> list[int]:
        """Returns the tokens of a text. Only the part after the longest beginning that was tokenized before is passed
        to `encode`. Beginnings from requests with another salt are not used, because the shorter time would reveal
        them."""
        if len(text) < MIN_CHARS or not self._seams:
            return encode(text)
        begun, at = self._beginning(text, salt)
        ids = [*begun, *encode(text[at:])]
        self._remember(text, salt, ids)
        return ids

    def _beginning(self, text: str, salt: str) -> tuple[Sequence[int], int]:
        """The token ids of a known beginning of `text`, and its length in characters."""
        for key in reversed([*self._known]):  # another thread may add some
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
