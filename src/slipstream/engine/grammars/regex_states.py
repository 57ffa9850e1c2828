"""States of a regular expression, shared by all requests that use it. No torch.

llguidance computes a mask by walking the vocabulary, and each copy of a matcher builds its lexer
states again: 0.4 ms per row for `[a-z ]{400,}` and 128,000 tokens. Two facts avoid that.

1. Answers after which the same texts may follow have the same mask. A `RegexAutomaton` follows an
   answer by sets of positions in the expression: equal sets, equal texts. Most expressions have a
   few hundred sets, whatever the number of requests.
2. Bytes that no character set of the expression distinguishes are equivalent. So each token of the
   model is mapped to a token of a `ClassVocabulary`, in which the lowest byte of a class represents
   all. These are far fewer tokens, and their mask tells which of the model's are allowed.

The masks are computed by llguidance, once for each state, by one matcher. Where llguidance forces a
token, its mask has only that token, and depends on the previous one: such a state has no shared
mask, and each request uses its own matcher.

Non-ASCII characters are not followed: an answer with one continues with its own matcher. So do
expressions with syntax unknown here.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from llguidance import LLMatcher

Bits: TypeAlias = npt.NDArray[np.int32]

MAX_NODES = 20_000
"""Maximum number of nodes of an automaton, with repetitions written out."""

MAX_POSITIONS = 64
"""Maximum number of nodes that an answer may be at simultaneously."""

MAX_STATES = 4096
"""Maximum number of states that are kept for an expression."""

MAX_MASKS = 128
"""Maximum number of different masks kept for an expression, 16 KB each for 128,000 tokens. Further
states have no shared mask."""

WALK_S = 0.002
"""Seconds per step for computing one expression's new states. Others wait for the next step; until
then requests use their own matchers."""

_ALL = (1 << 128) - 1


def _chars(first: int, last: int) -> int:
    return ((1 << (last + 1)) - 1) & ~((1 << first) - 1)


_DIGITS = _chars(48, 57)
_WORD = _DIGITS | _chars(65, 90) | _chars(97, 122) | 1 << 95
_SPACE = _chars(9, 13) | 1 << 32
_ESCAPES = {"d": _DIGITS, "w": _WORD, "s": _SPACE, "n": 1 << 10, "r": 1 << 13, "t": 1 << 9}
_ESCAPES |= {name.upper(): _ALL & ~_ESCAPES[name] for name in "dws"}
_ITEM = re.compile(
    r"\\(?P<escape>.)|\[(?P<negated>\^?)(?P<set>(?:\\.|[^\]\\\[])+)\]|(?P<open>\((?:\?:)?)(?!\?)|(?P<close>\))|(?P<bar>\|)"
    r"|(?P<times>[*+?]|\{\d+(?:,\d*)?\})(?!\?)|(?P<dot>\.)|(?P<literal>[^\\\[\]{}()|*+?.^$])",
    re.DOTALL,
)
_MEMBER = re.compile(r"\\(.)|(.)", re.DOTALL)

Part: TypeAlias = "tuple[str, Any]"
"""("set", bits), ("all", parts in order), ("any", parts), or ("times", (part, least, most or None))."""


class UnknownSyntaxError(Exception):
    pass


def _escaped(char: str) -> int:
    r"""Returns the set of ASCII characters that an escape such as `\d` stands for, as bits. Other
    characters are left out."""
    if char in _ESCAPES:
        return _ESCAPES[char]
    if char.isalnum() or not char.isascii():
        raise UnknownSyntaxError
    return 1 << ord(char)


def _members(text: str) -> int:
    """Character set of a bracket class such as `[a-z]`, as a bit set."""
    if any(operator in text for operator in ("&&", "--", "~~")):
        raise UnknownSyntaxError
    items = list(_MEMBER.finditer(text))
    found, i = 0, 0
    while i < len(items):
        escape, char = items[i].groups()
        if i + 2 < len(items) and items[i + 1][2] == "-":
            ends = [item[1] or item[2] for item in (items[i], items[i + 2])]
            if any(item[1] and item[1].isalnum() for item in (items[i], items[i + 2])):
                raise UnknownSyntaxError
            first, last = map(ord, ends)
            if first < 128:
                found |= _chars(first, min(last, 127))
            i += 3
            continue
        if escape is not None:
            found |= _escaped(escape)
        elif char.isascii():
            found |= 1 << ord(char)
        i += 1
    return found


def parse(text: str) -> Part:
    """Parses a regular expression into parts. `UnknownSyntaxError` if it has syntax that this
    module does not know."""
    stack: list[list[list[Part]]] = [[[]]]  # groups, their alternatives, their parts
    at = 0
    while at < len(text):
        item = _ITEM.match(text, at)
        if item is None:
            raise UnknownSyntaxError
        at, parts = item.end(), stack[-1][-1]
        match item.lastgroup:
            case "escape":
                parts.append(("set", _escaped(item["escape"])))
            case "set":
                bits = _members(item["set"])
                parts.append(("set", _ALL & ~bits if item["negated"] else bits))
            case "open":
                stack.append([[]])
            case "close":
                if len(stack) == 1:
                    raise UnknownSyntaxError
                group = stack.pop()
                stack[-1][-1].append(("any", [("all", own) for own in group]))
            case "bar":
                stack[-1].append([])
            case "times":
                if not parts or (parts[-1][0] == "times" and not item["times"].startswith("{")):
                    raise UnknownSyntaxError
                least, _, most = item["times"].strip("{}").partition(",")
                known = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(item["times"])
                if known is None:
                    known = (
                        int(least),
                        (int(most) if most else None) if "," in item["times"] else int(least),
                    )
                parts.append(("times", (parts.pop(), *known)))
            case "dot":
                parts.append(("set", _ALL & ~(1 << 10)))
            case _:
                char = item["literal"]
                parts.append(("set", 1 << ord(char) if char.isascii() else 0))
    if len(stack) > 1:
        raise UnknownSyntaxError
    return "any", [("all", own) for own in stack[0]]


class RegexAutomaton:
    """An automaton whose states are sets of positions in an expression. An answer is tracked by a
    `closed` set of them."""

    def __init__(self, text: str) -> None:
        self._empty: list[list[int]] = []  # edges without a character (epsilon)
        self._edges: list[list[tuple[int, int]]] = []  # (set of characters, target)
        self.sets: set[int] = set()
        first, self._last = self._node(), self._node()
        self._build(parse(text), first, self._last)
        self.start = self.closed([first])

    def _node(self) -> int:
        if len(self._edges) >= MAX_NODES:
            raise UnknownSyntaxError
        self._empty.append([])
        self._edges.append([])
        return len(self._edges) - 1

    def _build(self, part: Part, first: int, last: int) -> None:
        kind, own = part
        if kind == "set":
            self.sets.add(own)
            self._edges[first].append((own, last))
        elif kind == "any":
            for each in own:
                self._build(each, first, last)
        elif kind == "all":
            for each in own[:-1]:
                self._build(each, first, first := self._node())
            if own:
                self._build(own[-1], first, last)
            else:
                self._empty[first].append(last)
        else:
            inner, least, most = own
            for _ in range(least):
                self._build(inner, first, first := self._node())
            # a separate node, since an edge back to `first` would repeat what precedes it
            if most is None:
                loop = self._node()
                self._empty[first].append(loop)
                self._build(inner, loop, again := self._node())
                self._empty[again].append(loop)
                self._empty[loop].append(last)
            else:
                for _ in range(most - least):
                    self._empty[first].append(last)
                    self._build(inner, first, first := self._node())
                self._empty[first].append(last)

    def closed(self, nodes: Iterable[int]) -> frozenset[int]:
        """Nodes reachable without a character that have edges with characters, or are final."""
        seen, todo = set(nodes), list(nodes)
        while todo:
            for other in self._empty[todo.pop()]:
                if other not in seen:
                    seen.add(other)
                    todo.append(other)
        return frozenset([n for n in seen if self._edges[n] or n == self._last])

    def after(self, nodes: frozenset[int], byte: int) -> frozenset[int] | None:
        """Returns the set of nodes after one more ASCII character. None if the character does not fit, or if the set
        is too large."""
        found = self.closed({to for n in nodes for own, to in self._edges[n] if own >> byte & 1})
        return found if self.can_follow(found) else None

    def can_follow(self, nodes: frozenset[int]) -> bool:
        return len(nodes) <= MAX_POSITIONS and any(self._edges[n] for n in nodes)


class ClassVocabulary:
    """A vocabulary in which the lowest byte of each byte class represents the class. Token 0 is the
    end; 256 single-byte tokens follow from 32 on, then longer ones."""

    def __init__(
        self, tokens: Sequence[bytes], special: Sequence[int], num_rows: int, sets: Iterable[int]
    ) -> None:
        """`tokens` are the model's; `num_rows` is the number of rows of its embedding. `sets` are
        sets of characters, as bits of ASCII."""
        sets, least = sorted(sets), dict[tuple[int, ...], int]()
        table = bytearray(range(256))
        for byte in range(128):
            table[byte] = least.setdefault(tuple([own >> byte & 1 for own in sets]), byte)
        own = [b"</s>", *[b""] * 31, *(bytes([byte]) for byte in range(256))]
        places = {token: i for i, token in enumerate(own) if i >= 32}
        ruled_out = set(special)
        self.place = [0] * (-(-num_rows // 32) * 32)
        translation = bytes(table)
        for i, token in enumerate(tokens):
            if token and i not in ruled_out:
                self.place[i] = places.setdefault(token.translate(translation), len(places) + 32)
        own += [token for token, place in places.items() if place >= len(own)]
        self.bytes, self.num_words = own, -(-len(own) // 32)
        self._places = np.array(self.place)
        self._masks: dict[bytes, Bits] = {}

    def expand(self, own: Bits) -> Bits | None:
        """Converts a mask of this vocabulary to one of the model's. None if fewer than two
        characters can follow, because llguidance may then force a token."""
        if np.unpackbits(own[1:9].view(np.uint8)).sum() < 2:
            return None
        key = own.tobytes()
        if (mask := self._masks.get(key)) is None:
            allowed = np.unpackbits(own.view(np.uint8), bitorder="little")
            allowed[0] = 0
            mask = np.packbits(allowed[self._places], bitorder="little").view(np.int32)
            if len(self._masks) >= 8 * MAX_MASKS:
                self._masks.clear()
            self._masks[key] = mask
        return mask


class RegexState:
    """A state of an expression. `text`: a short answer that leads to it, in representatives of byte
    classes. `mask`: over the model's vocabulary, valid once `is_known`; None if there is no shared
    one. `accepts`: whether the answer may end here."""

    __slots__ = "accepts", "is_known", "mask", "next", "nodes", "text"

    def __init__(self, nodes: frozenset[int], text: bytes) -> None:
        self.nodes, self.text = nodes, text
        self.next: dict[int, RegexState | None] = {}  # by byte; None: not followed
        self.is_known = self.accepts = False
        self.mask: Bits | None = None


class RegexStates:
    """The states of one expression. `matcher`, over `vocabulary`, is moved from state to state."""

    def __init__(
        self, automaton: RegexAutomaton, vocabulary: ClassVocabulary, matcher: LLMatcher
    ) -> None:
        self._automaton, self._vocabulary, self._matcher = automaton, vocabulary, matcher
        self._at = b""  # text after which the matcher is
        self._words = np.zeros(vocabulary.num_words, np.int32)
        self.start = RegexState(automaton.start, b"")
        self._states = {automaton.start: self.start}
        self._masks: dict[int, Bits] = {}  # by state id

    def after(self, state: RegexState, token: int) -> RegexState | None:
        """The state after a token of the model; None if it can't be followed."""
        place = self._vocabulary.place[token]
        if not place:
            return None
        for byte in self._vocabulary.bytes[place]:
            found = state.next[byte] if byte in state.next else self._step(state, byte)
            if found is None:
                return None
            state = found
        return state

    def _step(self, state: RegexState, byte: int) -> RegexState | None:
        found, nodes = None, None if byte > 127 else self._automaton.after(state.nodes, byte)
        if nodes is not None:
            found = self._states.get(nodes)
            if found is None and len(self._states) < MAX_STATES:
                found = RegexState(nodes, state.text + bytes([byte]))
                self._states[nodes] = found
        state.next[byte] = found
        return found

    def find(self, states: Iterable[RegexState]) -> None:
        """Compute the masks of states where they are missing, as far as time allows."""
        until = time.monotonic() + WALK_S
        for state in sorted({s for s in states if not s.is_known}, key=lambda s: s.text):
            self._walk(state)
            if time.monotonic() > until:
                return

    def _walk(self, state: RegexState) -> None:
        matcher, text = self._matcher, state.text
        if matcher.is_error():
            state.is_known = True
            return
        same = next(
            (i for i, (a, b) in enumerate(zip(text, self._at, strict=False)) if a != b),
            min(len(text), len(self._at)),
        )
        if same < len(self._at):
            matcher.rollback(len(self._at) - same)
        if same < len(text):
            matcher.consume_tokens([32 + byte for byte in text[same:]])
        self._at, state.is_known = text, True
        if matcher.is_error() or matcher.is_stopped():
            return
        state.accepts = matcher.is_accepting()
        matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
        mask = None if matcher.is_error() else self._vocabulary.expand(self._words)
        if mask is not None and (len(self._masks) < MAX_MASKS or id(mask) in self._masks):
            state.mask = self._masks[id(mask)] = mask


def automaton_of(text: str) -> RegexAutomaton | None:
    """The automaton of an expression, None if it has unknown syntax, would be too large or is empty."""
    try:
        made = RegexAutomaton(text)
    except (UnknownSyntaxError, RecursionError):
        return None
    return made if made.can_follow(made.start) else None
