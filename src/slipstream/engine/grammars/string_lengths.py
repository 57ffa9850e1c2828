"""Masks inside JSON strings, without testing each token.

llguidance computes a mask by walking the vocabulary. Near a string's `maxLength` it walks nearly
all of it: milliseconds during which a whole batch waits.

If a schema only limits its strings' lengths, all plain characters (no quote, backslash or control
character) are equivalent. So a second matcher tracks the answer in a `LengthVocabulary`, where the
leading plain characters of each token are replaced by a's. These are a few thousand tokens instead
of 128,000, and most have common prefixes. Inside a string their mask determines the mask of the
model's tokens. There are few different masks for all positions and lengths, and these are cached.

`counts_only` tells for which schemas this holds.
"""

from __future__ import annotations

import enum
import re
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from llguidance import LLMatcher

Bits = npt.NDArray[np.int32]

_MORE = rb"[\x80-\xbf]"
PLAIN = re.compile(
    rb"(?:[\x20-\x21\x23-\x5b\x5d-\x7e]|[\xc2-\xdf]%b|(?:\xe0[\xa0-\xbf]|[\xe1-\xec\xee\xef]%b|\xed[\x80-\x9f])%b"
    rb"|(?:\xf0[\x90-\xbf]|[\xf1-\xf3]%b|\xf4[\x80-\x8f])%b%b)*" % ((_MORE,) * 6)
)
"""The plain characters, as complete UTF-8 characters, with which a token begins."""

SLICED = 10
"""Number of characters by which a string must still be able to grow for llguidance to use
precomputed slices of the vocabulary."""

MAX_MASKS = 1024
"""Maximum number of cached masks of the model's vocabulary."""

_STRUCTURE = {
    "type",
    "properties",
    "required",
    "additionalProperties",
    "items",
    "prefixItems",
    "minItems",
    "maxItems",
    "$ref",
}
_VALUES = {
    "minLength",
    "maxLength",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "multipleOf",
}
_WORDS = {
    "title",
    "description",
    "default",
    "examples",
    "$comment",
    "$schema",
    "$id",
    "$defs",
    "definitions",
}
_LISTED, _COMBINED = {"enum", "const"}, {"anyOf", "oneOf", "allOf"}
KNOWN = _STRUCTURE | _VALUES | _WORDS | _LISTED | _COMBINED


class CountedStrings(enum.Enum):
    """Strings of a schema that are restricted only in their length."""

    # others may be property names, which must stay distinct
    BOUNDED = "those that have a maxLength"
    ALL = "all"


def counts_only(schema: Any) -> CountedStrings | None:
    """Strings of a schema that are restricted only in their length. None if there are none, or if
    it would not help. Enumerated strings (`enum`) are allowed where no other string can occur."""
    keywords: set[str] = set()
    if not _known(schema, keywords) or (keywords & _LISTED and keywords & _COMBINED):
        return None
    if "open" not in keywords and not keywords & _COMBINED:
        return CountedStrings.ALL
    return CountedStrings.BOUNDED if "maxLength" in keywords else None


def _known(schema: Any, keywords: set[str]) -> bool:
    """Whether a schema has only known keywords. They are added to `keywords`; also "open" if the
    schema names properties (in `required`, too) and allows others."""
    if isinstance(schema, bool):
        return True
    if not isinstance(schema, dict) or not schema.keys() <= KNOWN:
        return False
    keywords.update(schema)
    if ("properties" in schema or schema.get("required")) and schema.get(
        "additionalProperties"
    ) is not False:
        keywords.add("open")
    parts: list[Any] = []
    for key in ("properties", "$defs", "definitions"):
        named = schema.get(key, {})
        if not isinstance(named, dict):
            return False
        parts += named.values()
    for key in ("anyOf", "oneOf", "allOf", "prefixItems"):
        parts += schema.get(key, ())
    for key in ("items", "additionalProperties"):
        given = schema.get(key, True)
        parts += given if isinstance(given, list) else [given]
    return all(_known(part, keywords) for part in parts)


class LengthVocabulary:
    """A vocabulary in whose tokens leading plain characters are replaced by a's.

    Token 0 is an end. From 32 on come 256 tokens of one byte each, then "aa", "aaa" and so on, up
    to one more than the longest run of plain characters or `SLICED`, then all others. The model's
    special tokens have no counterpart, since they can't occur in JSON.
    """

    def __init__(self, tokens: Sequence[bytes], special: Sequence[int], num_rows: int) -> None:
        """`tokens` are the model's; `num_rows` is the number of rows of its embedding."""
        self._bytes = tokens
        runs = [PLAIN.match(token).end() for token in tokens]  # type: ignore[union-attr]  # in bytes; it may be empty
        begins = [_characters(token[:run]) for token, run in zip(tokens, runs, strict=True)]
        self._most = max(SLICED, *begins) + 1
        own = [
            b"</s>",
            *[b""] * 31,
            *(bytes([byte]) for byte in range(256)),
            *(b"a" * n for n in range(2, self._most + 1)),
        ]
        places = {token: i for i, token in enumerate(own) if i >= 32}
        # by token of the model; 0: no counterpart
        self._place = np.zeros(-(-num_rows // 32) * 32, np.int64)
        ruled_out = set(special)
        for i in range(len(tokens)):
            if tokens[i] and i not in ruled_out:
                token = b"a" * begins[i] + tokens[i][runs[i] :]
                self._place[i] = places.setdefault(token, len(places) + 32)
        own += [token for token, place in places.items() if place >= len(own)]
        self._is_same = [
            own[place] == token for token, place in zip(tokens, self._place.tolist(), strict=False)
        ]
        self.num_words = -(-len(own) // 32)
        import llguidance  # imported late: it would take a tenth of every start

        self.tokenizer = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(OwnTokens(own)), n_vocab=len(own), eos_token=[0]
        )
        plain = np.zeros(256, bool)
        plain[[byte for byte in range(0x20, 0x7F) if chr(byte) not in '"\\']] = True
        self._plain: Bits = np.packbits(plain, bitorder="little").view(np.int32)  # [8]
        self._masks: OrderedDict[bytes, Bits] = OrderedDict()

    def expand(self, own: Bits, counts: CountedStrings) -> Bits | None:
        """Expands a mask of this vocabulary, int32 [num_words], to one of the model's, int32
        [words]. None if the position is not inside a string restricted only in its length."""
        if ((own[1:9] & self._plain) != self._plain).any():
            # only inside a string that is not enumerated can this many characters follow
            return None
        last = 32 + 256 - 2 + self._most
        if counts is CountedStrings.BOUNDED and own[last >> 5] >> (last & 31) & 1:
            return None
        key = own.tobytes()
        mask = self._masks.get(key)
        if mask is None:
            allowed = np.unpackbits(own.view(np.uint8), bitorder="little")
            allowed[0] = 0
            mask = np.packbits(allowed[self._place], bitorder="little").view(np.int32)
            self._masks[key] = mask
            while len(self._masks) > MAX_MASKS:
                self._masks.popitem(last=False)
        return mask

    def spelled(self, token: int, *, inside: bool) -> list[int]:
        """A token of the model as tokens of this vocabulary. `inside` a string only its length counts."""
        if inside or self._is_same[token]:
            return [int(self._place[token])]
        return [32 + byte for byte in self._bytes[token]]

    def has_quote(self, token: int) -> bool:
        return b'"' in self._bytes[token]


def _characters(text: bytes) -> int:
    """Returns the number of characters in complete UTF-8 bytes."""
    return sum(byte & 0xC0 != 0x80 for byte in text)


class OwnTokens:
    """The interface that llguidance needs of a tokenizer."""

    eos_token_id, bos_token_id, special_token_ids = 0, None, (0,)

    def __init__(self, tokens: list[bytes]) -> None:
        self.tokens = tokens

    def __call__(self, text: bytes) -> list[int]:
        return [32 + byte for byte in text]


class StringLengths:
    """Tracks one answer in a `LengthVocabulary`."""

    def __init__(
        self, vocabulary: LengthVocabulary, matcher: LLMatcher, counts: CountedStrings
    ) -> None:
        self.vocabulary, self.matcher, self._counts = vocabulary, matcher, counts
        self.may_be_inside = False  # the answer may be inside a string
        self._is_inside = False  # the last mask was computed here, and nothing was accepted since
        self._spelled: list[int] = []  # number of tokens here for each token of the answer
        # tokens that the matcher has not consumed, since no mask was needed
        self._pending: list[int] = []

    def expand(self, own: Bits) -> Bits | None:
        """The model's mask that follows from the matcher's; None if it can't be derived."""
        mask = self.vocabulary.expand(own, self._counts)
        self._is_inside = self.may_be_inside = mask is not None
        return mask

    def accept(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            own = self.vocabulary.spelled(token, inside=self._is_inside)
            self._is_inside = False
            self.may_be_inside |= self.vocabulary.has_quote(token)
            self._spelled.append(len(own))
            self._pending += own

    def settle(self) -> bool:
        """Makes the matcher consume the pending tokens. False if it can't continue: llguidance's
        limits may end it before the answer."""
        pending, self._pending = self._pending, []
        return not pending or bool(self.matcher.consume_tokens(pending))

    def rollback(self, num_tokens: int) -> None:
        first = len(self._spelled) - num_tokens
        self._is_inside, self.may_be_inside = False, True
        count = sum(self._spelled[first:])
        del self._spelled[first:]
        taken = max(0, count - len(self._pending))
        if taken:
            self.matcher.rollback(taken)
        del self._pending[max(0, len(self._pending) - count) :]
