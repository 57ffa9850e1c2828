"""States of a JSON schema, shared by all requests that use it. No torch.

1. `SchemaStates` tracks answers by their places in the schema's `Language`. Answers at the same
   places allow the same continuations, so they share a mask.
2. Masks are computed by llguidance: by the matcher of the first request that reaches a state.
   Others look them up. So the cost depends on the number of states, not of requests.
3. Where only one byte can follow, llguidance forces tokens, and its mask also depends on the
   previous token. There masks and forced tokens are stored for each previous token.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from slipstream.engine.grammars.schema_language import (
    END,
    Language,
    Places,
    SchemaPlace,
    following,
    having,
    is_inside,
)
from slipstream.engine.grammars.string_lengths import PLAIN

Bits: TypeAlias = npt.NDArray[np.int32]

MAX_STATES = 8192
"""Maximum number of stored states of a schema."""

MAX_KEPT_PLACES = 50_000
"""Maximum number of places in all of these states together."""

MAX_STEPS = 32_768
"""Maximum number of stored transitions (state, token) → state of a schema."""

MAX_RUNS = 8192
"""Maximum number of stored masks and forced tokens of states where only one byte can follow."""

Run: TypeAlias = tuple[tuple[int, ...], int]
"""(forced tokens, without one that completes the answer; their number, with it)."""

Sources: TypeAlias = tuple[tuple[int, int], ...] | None
"""Sources of a state's counts, one pair each: (index of the previous count, number to add); index
-1 for a new count. None: all counts are unchanged."""


class SchemaState:
    """A state of a schema's automaton. `slots`: positions in the schema at which items or
    characters are counted. `limits`: smallest count of each slot that affects the mask."""

    __slots__ = (
        *("accepts", "is_end", "is_forced", "is_inside", "limits", "masks", "moves", "next"),
        *("places", "plain", "runs", "slots", "spot", "tokens"),
    )

    def __init__(self, found: Places, limits: tuple[int, ...]) -> None:
        self.places, self.slots, self.limits = found.places, found.slots, limits
        self.accepts = END in found.places
        self.is_end = self.accepts and len(found.places) == 1
        self.is_forced = not self.accepts and following(found.places).bit_count() == 1
        self.is_inside = is_inside(found.places)
        # by number of plain characters
        self.plain: dict[int, tuple[SchemaState, Sources] | None] = {}
        # by the places left after a byte, since many bytes lead to the same
        self.moves: dict[tuple[SchemaPlace, ...], tuple[SchemaState, Sources] | None] = {}
        self.next: dict[int, tuple[SchemaState, Sources] | None] = {}
        self.tokens: dict[int, tuple[SchemaState, Sources] | None] = {}
        self.masks: dict[int, SharedMask | None] = {}  # by previous token, -1 for any
        self.runs: dict[tuple[int, object], Run] = {}
        self.spot = SchemaSpot(self, (), -1)


class Completes(Protocol):
    """Adds the tokens that end an answer to masks."""

    def made(self, mask: Bits, *, accepts: bool) -> Bits | None: ...


class SharedMask:
    """A matcher's mask, whether the answer may end there, and completed masks by end tokens."""

    __slots__ = "accepts", "bits", "complete"

    def __init__(self, bits: Bits, accepts: bool) -> None:
        self.bits, self.accepts = bits, accepts
        self.complete: dict[Completes, Bits | None] = {}


def _composed(
    first: tuple[tuple[int, int], ...], then: tuple[tuple[int, int], ...]
) -> tuple[tuple[int, int], ...]:
    return tuple([(i, n) if i < 0 else (first[i][0], first[i][1] + n) for i, n in then])


class SchemaSpot:
    """An answer's state, its counts, and its last token if that matters."""

    __slots__ = "counts", "last", "state"

    def __init__(self, state: SchemaState, counts: tuple[int, ...], last: int) -> None:
        self.state, self.counts, self.last = state, counts, last

    @property
    def is_known(self) -> bool:
        return self.last in self.state.masks

    @property
    def is_end(self) -> bool:
        return self.state.is_end

    def complete(self, shared: Completes) -> Bits | None:
        """Mask over the model's vocabulary; None if there is no shared one, or not yet."""
        found = self.state.masks.get(self.last)
        if found is None:
            return None
        if shared not in found.complete:
            found.complete[shared] = shared.made(found.bits, accepts=found.accepts)
        return found.complete[shared]


class Followed(Protocol):
    """An answer tracked by the states of a schema. `choose` selects the answers whose matchers
    compute masks."""

    untaken: list[int]

    @property
    def spot(self) -> object: ...


R = TypeVar("R", bound=Followed)


class TokenTexts:
    """The model's tokens as bytes, b"" for those that are not tracked. `plain`: number of
    characters of tokens that are plain inside a string, 0 for others."""

    def __init__(self, tokens: Sequence[bytes], special: Collection[int]) -> None:
        ruled_out = set(special)
        self.bytes = [b"" if i in ruled_out else token for i, token in enumerate(tokens)]
        self.plain = [_num_plain(token) for token in self.bytes]
        self.longest = max(map(len, self.bytes), default=1)


def _num_plain(token: bytes) -> int:
    found = PLAIN.fullmatch(token)
    return 0 if found is None else sum(byte & 0xC0 != 0x80 for byte in token)


class SchemaStates:
    """States of one JSON schema, each with its token mask, shared by requests."""

    def __init__(self, language: Language, texts: TokenTexts, num_words: int) -> None:
        """`num_words` is the number of 32-bit words of a mask."""
        self._language, self.num_words = language, num_words
        self._bytes, self._plain = texts.bytes, texts.plain
        self._states: dict[frozenset[SchemaPlace], SchemaState] = {}
        self._masks: dict[bytes, Bits] = {}
        self._num_steps = self._num_runs = 0
        found = language.start()
        self.start: SchemaSpot | None = None
        if found is not None and (state := self._state(found)) is not None:
            self.start = self._spot(state, tuple([source[1] for source in found.sources]), -1)

    def _state(self, found: Places) -> SchemaState | None:
        state = self._states.get(found.places)
        if state is None:
            if len(self._states) >= MAX_STATES or self._language.num_places > MAX_KEPT_PLACES:
                return None
            limits = tuple([self._language.limit(slot) for slot in found.slots])
            state = self._states[found.places] = SchemaState(found, limits)
        return state

    def _spot(self, state: SchemaState, counts: tuple[int, ...], last: int) -> SchemaSpot:
        if not state.is_forced:
            if not counts:
                return state.spot
            last = -1
        return SchemaSpot(state, counts, last)

    def after(self, spot: SchemaSpot, token: int) -> SchemaSpot | None:
        """The spot after a token of the model; None if it can't be tracked."""
        state = spot.state
        found = None
        if state.is_inside and token < len(self._plain) and (count := self._plain[token]):
            found = state.plain[count] if count in state.plain else self._skip(state, count)
        if found is None:
            found = state.tokens[token] if token in state.tokens else self._after(state, token)
        if found is None:
            return None
        state, sources = found
        counts = spot.counts
        if sources is not None:
            counts = tuple([add if at < 0 else counts[at] + add for at, add in sources])
            if any(count >= limit for count, limit in zip(counts, state.limits, strict=True)):
                near = self._language.settled(
                    state.places, dict(zip(state.slots, counts, strict=True))
                )
                if near is None or (settled := self._state(near)) is None:
                    return None
                state, counts = settled, tuple([source[1] for source in near.sources])
        return self._spot(state, counts, token)

    def _after(self, state: SchemaState, token: int) -> tuple[SchemaState, Sources] | None:
        text = self._bytes[token] if token < len(self._bytes) else b""
        found: tuple[SchemaState, Sources] | None = None
        if text:
            at, sources = state, None
            for byte in text:
                step = at.next[byte] if byte in at.next else self._step(at, byte)
                if step is None:
                    break
                at, own = step
                if own is not None:
                    sources = own if sources is None else _composed(sources, own)
            else:
                found = at, sources
        if self._num_steps < MAX_STEPS:
            self._num_steps += 1
            state.tokens[token] = found
        return found

    def _skip(self, state: SchemaState, count: int) -> tuple[SchemaState, Sources] | None:
        """The state after this number of plain characters of a string. None if they may not all be
        inside it."""
        at, sources = state, None
        for _ in range(count):
            byte = ord("a")
            step = at.next[byte] if byte in at.next else self._step(at, byte)
            if step is None or not at.is_inside:
                break
            at, own = step
            if own is not None:
                sources = own if sources is None else _composed(sources, own)
        else:
            state.plain[count] = at, sources
            return at, sources
        state.plain[count] = None
        return None

    def _step(self, state: SchemaState, byte: int) -> tuple[SchemaState, Sources] | None:
        left = having(state.places, byte)
        if left in state.moves:
            state.next[byte] = state.moves[left]
            return state.next[byte]
        made, found = None, self._language.after(left)
        if found is not None and (after := self._state(found)) is not None:
            at = {slot: i for i, slot in enumerate(state.slots)}
            sources = tuple([(-1 if of is None else at[of], add) for of, add in found.sources])
            stays = sources == tuple([(i, 0) for i in range(len(state.slots))])
            made = after, None if stays else sources
        state.next[byte] = state.moves[left] = made
        return made

    def choose(self, rows: Iterable[R]) -> list[tuple[SchemaSpot, R]]:
        """Chooses the spots whose masks must be computed, each with the row whose matcher has the
        fewest tokens to catch up on."""
        least: dict[tuple[SchemaState, int], tuple[SchemaSpot, R]] = {}
        for row in rows:
            spot = row.spot
            if not isinstance(spot, SchemaSpot) or spot.is_known or spot.is_end:
                continue
            if spot.last >= 0 and self._num_runs >= MAX_RUNS:
                continue
            key = spot.state, spot.last
            if (old := least.get(key)) is not None:
                if len(row.untaken) < len(old[1].untaken):
                    least[key] = spot, row
            elif self._may_share(spot.state):
                least[key] = spot, row
        return list(least.values())

    def _may_share(self, state: SchemaState) -> bool:
        """Whether all answers at a state can share a mask: forced tokens must end before a count
        reaches its limit."""
        at: SchemaState = state
        for _ in range(self._language.horizon if state.slots else 0):
            if not at.is_forced:
                return True
            [byte] = [i for i in range(256) if following(at.places) >> i & 1]
            step = at.next[byte] if byte in at.next else self._step(at, byte)
            if step is None:
                return False
            at = step[0]
        return not state.slots

    def keep(self, spot: SchemaSpot, own: Bits, *, accepts: bool) -> None:
        """Store the mask that a matcher computed at a spot, and whether the answer may end there."""
        self._num_runs += spot.last >= 0
        mask = self._masks.setdefault(own.tobytes(), own)
        spot.state.masks[spot.last] = SharedMask(mask, accepts)

    @property
    def num_bytes(self) -> int:
        """Bytes of the stored masks."""
        return len(self._masks) * self.num_words * 4

    def forget_masks(self) -> None:
        self._masks.clear()
        for state in self._states.values():
            state.masks.clear()
            state.runs.clear()
        self._num_runs = 0

    def keep_run(self, spot: SchemaSpot, shared: object, run: Run) -> None:
        """Store the tokens forced at a spot, for all answers there with the same end tokens
        (`shared`)."""
        if self._num_runs < MAX_RUNS and self._may_share(spot.state):
            self._num_runs += 1
            spot.state.runs[spot.last, shared] = run
