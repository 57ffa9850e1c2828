"""Tracks the positions (places) that a text may have reached in a schema's expression. No torch.

A `SchemaPlace` is a part of the expression with the parts that follow it, like a stack.
`Language.after` computes the places after a byte. Equal places are the same object, so they are
compared by identity.

Items of a list and characters of a string are counted. Counts further from a bound than the longest
token all allow the same tokens; such a count is called far. The exact count is then stored outside
the place, in `slots`. A place whose count exceeds its slot's by n has the count `_far(kind, n)`:
two places with different counts occur where a number may continue or may be over.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeAlias

from slipstream.engine.grammars.schema_expressions import (
    LEADS,
    NARROW,
    Expression,
    SchemaUnknownError,
    expression_of,
)

MAX_PLACES = 64
"""Maximum number of places that a text may be at simultaneously."""

MAX_REACHED = 2048
"""Maximum number of places visited to find those."""

FAR_BELOW, FAR = -1, -2
"""Counts (far below the minimum, not below the minimum and far below the maximum)."""

MAX_DEEP = 1000
"""Maximum depth of a place. Deeper texts are not followed, since their places would cost more than a mask."""

MAX_AHEAD = 8
"""Maximum difference between a place's count and its slot's."""


class SchemaPlace:
    """A position that a text can have reached in the expression, as a stack: the part to match next, and the place
    after that part. `count`: repetitions of a repeated part so far. `depth`: number of places after it."""

    __slots__ = "after", "count", "depth", "number", "part"

    def __init__(
        self, part: Expression, count: int, after: SchemaPlace | None, number: int
    ) -> None:
        self.part, self.count, self.after, self.number = part, count, after, number
        self.depth: int = 0 if after is None else after.depth + 1


Source: TypeAlias = "tuple[SchemaPlace | None, int]"
"""Source of a count: (the slot whose count was before, the number to add), or (None, a new
count)."""

_Begun: TypeAlias = "tuple[tuple[SchemaPlace, int], ...]"
"""Slots where counting begins, each with its first count."""

END = SchemaPlace(Expression("end"), 0, None, 0)
"""Place after a complete text."""


def _far(kind: int, ahead: int) -> int:
    return kind - 2 * ahead


def _kind(count: int) -> int:
    return FAR if count % 2 == 0 else FAR_BELOW


def _ahead(count: int) -> int:
    return (-1 - count) // 2


class Places(NamedTuple):
    """The places that a text can have reached, and the `slots` that count for it. `sources` of their counts are in the
    order of `slots`."""

    places: frozenset[SchemaPlace]
    slots: tuple[SchemaPlace, ...]
    sources: tuple[Source, ...]


class Language:
    """The texts that an expression matches, followed byte by byte. `longest`: bytes of the longest
    token."""

    def __init__(self, whole: Expression, longest: int) -> None:
        self.horizon = longest + MAX_AHEAD + 1
        self._made: dict[tuple[Expression, int, SchemaPlace], SchemaPlace] = {}
        self._whole = whole
        self.num_places = 1

    def start(self) -> Places | None:
        return self._closed([self._place(self._whole, 0, END)])

    def after(self, left: tuple[SchemaPlace, ...]) -> Places | None:
        """The places after a byte. `left`: the places after those that matched the byte (`having`). None if there are
        none."""
        return self._closed(left) if left else None

    def settled(
        self, places: frozenset[SchemaPlace], counts: Mapping[SchemaPlace, int]
    ) -> Places | None:
        """The same places with exact counts for slots that have come near their limit; `sources` then has these
        counts. None if one slot would have two counts."""
        exact = {slot: (None, count) for slot, count in counts.items()}
        return self._renamed(places, dict.fromkeys(counts, 0), exact, settle=True)

    def limit(self, slot: SchemaPlace) -> int:
        """The smallest count near its limit: from this count on, the allowed tokens depend on
        it."""
        most = slot.part.least if slot.count == FAR_BELOW else slot.part.most
        assert most is not None
        return most - self.horizon

    def _place(self, part: Expression, count: int, after: SchemaPlace) -> SchemaPlace:
        key = part, count, after
        if (found := self._made.get(key)) is None:
            found = self._made[key] = SchemaPlace(part, count, after, self.num_places)
            self.num_places += 1
        return found

    def _near(self, part: Expression, count: int) -> int:
        """The count as stored in a place: all counts far from a limit share one value, because they
        allow the same tokens."""
        if count < part.least:
            return FAR_BELOW if part.least - count > self.horizon else count
        if part.most is None:
            return part.least
        return FAR if part.most - count > self.horizon else count

    def _slot(self, place: SchemaPlace) -> SchemaPlace:
        assert place.after is not None
        return self._place(place.part, _kind(place.count), place.after)

    def _slots(self, place: SchemaPlace) -> list[tuple[SchemaPlace, int]]:
        """The slots of a place and of those after it, each with the difference between the place's
        count and the slot's."""
        found: list[tuple[SchemaPlace, int]] = []
        at: SchemaPlace | None = place
        while at is not None:
            if at.count < 0:
                found.append((self._slot(at), _ahead(at.count)))
            at = at.after
        return found

    def _closed(self, places: Iterable[SchemaPlace]) -> Places | None:
        """The places reached from these without a byte at which a byte, or the end, comes next (an epsilon closure).
        None if they are too many or too deep, or if one slot would have two counts."""
        seen: dict[SchemaPlace, _Begun] = {}
        todo: list[tuple[SchemaPlace, _Begun]] = [(place, ()) for place in places]
        found: list[SchemaPlace] = []
        while todo:
            place, begun = todo.pop()
            if (old := seen.get(place)) is not None:
                slots = {slot for slot, _ in self._slots(place)} if old != begun else ()
                if any(slot in slots for slot, _ in set(old) ^ set(begun)):
                    return None
                continue
            seen[place] = begun
            if len(seen) > MAX_REACHED or place.depth > MAX_DEEP:
                return None
            part, after, count = place.part, place.after, place.count
            if after is None or part.kind == "set":
                found.append(place)
            elif part.kind == "all":
                for own in reversed(part.parts):
                    after = self._place(own, 0, after)
                todo.append((after, begun))
            elif part.kind in ("any", "later"):
                todo += [(self._place(own, 0, after), begun) for own in part.parts]
            elif count == 0 and (near := self._near(part, 0)) < 0:
                slot = self._place(part, near, after)
                todo.append((slot, _with(begun, slot, 0)))
            elif count < 0:
                if _kind(count) == FAR:
                    todo.append((after, begun))
                if _ahead(count) == MAX_AHEAD:
                    return None
                again = self._place(part, _far(_kind(count), _ahead(count) + 1), after)
                todo.append((self._place(part.parts[0], 0, again), begun))
            else:
                if count >= part.least:
                    todo.append((after, begun))
                if part.most is None or count < part.most:
                    again = self._place(part, self._near(part, count + 1), after)
                    own_begun = _with(begun, again, count + 1) if again.count < 0 else begun
                    todo.append((self._place(part.parts[0], 0, again), own_begun))
        if len(found) > MAX_PLACES:
            return None
        least, sources = dict[SchemaPlace, int](), dict[SchemaPlace, Source]()
        for place in found:
            counts = dict(seen[place])
            for slot, ahead in self._slots(place):
                source: Source = (None, counts[slot]) if slot in counts else (slot, 0)
                if sources.setdefault(slot, source) != source:
                    return None
                least[slot] = min(ahead, least.get(slot, ahead))
        return self._renamed(found, least, sources)

    def _renamed(
        self,
        places: Iterable[SchemaPlace],
        least: Mapping[SchemaPlace, int],
        sources: Mapping[SchemaPlace, Source],
        *,
        settle: bool = False,
    ) -> Places | None:
        """The places after each slot's count is raised by `least`. With `settle`, counts that came near their limit
        become exact."""
        made: dict[SchemaPlace, SchemaPlace] = {END: END}
        new: dict[SchemaPlace, Source] = {}
        is_twice = False

        def rename(place: SchemaPlace) -> SchemaPlace:
            nonlocal is_twice
            chain, at = list[SchemaPlace](), place
            while at not in made:
                assert at.after is not None
                chain.append(at)
                at = at.after
            found = made[at]
            for own in reversed(chain):
                after, count = found, own.count
                if count < 0:
                    slot = self._slot(own)
                    (of, add), ahead = sources[slot], _ahead(count) - least[slot]
                    add += least[slot]
                    if settle and self._near(own.part, add) >= 0:
                        count, add, ahead = self._near(own.part, add + ahead), add + ahead, 0
                    if count < 0:
                        slot = self._place(own.part, _kind(count), after)
                        is_twice |= new.setdefault(slot, (of, add)) != (of, add)
                        count = _far(_kind(count), ahead)
                found = made[own] = self._place(own.part, count, after)
            return found

        found = frozenset([rename(place) for place in sorted(places, key=lambda each: each.number)])
        if is_twice:
            return None
        in_order = {
            slot: new[slot]
            for place in sorted(found, key=lambda each: each.number)
            for slot, _ in self._slots(place)
        }
        return Places(found, tuple(in_order), tuple(in_order.values()))


def _with(begun: _Begun, slot: SchemaPlace, count: int) -> _Begun:
    return (*[each for each in begun if each[0] is not slot], (slot, count))


def having(places: frozenset[SchemaPlace], byte: int) -> tuple[SchemaPlace, ...]:
    """Returns the places right after those that can match a byte."""
    found = [place.after for place in places if place.part.bits >> byte & 1]
    return tuple([place for place in found if place is not None])


def is_inside(places: frozenset[SchemaPlace]) -> bool:
    """Whether the text is inside a string where all plain characters lead to the same places."""
    narrow = [place.part.bits for place in places if place.part.bits & NARROW]
    leads = [place.part.bits & LEADS for place in places]
    return (
        len(narrow) == 1
        and narrow[0] & NARROW == NARROW
        and following(places) & LEADS == LEADS
        and sum(bits.bit_count() for bits in leads) == LEADS.bit_count()
    )


def following(places: frozenset[SchemaPlace]) -> int:
    """Set of bytes that may follow, as bits."""
    found = 0
    for place in places:
        found |= place.part.bits
    return found


def language_of(grammar: str, longest: int) -> Language | None:
    """The texts that match a schema, given as llguidance's grammar. None if it can't be translated,
    or has a wrong type, which llguidance will report. `longest`: bytes of the longest token."""
    try:
        return Language(expression_of(grammar), longest)
    except (SchemaUnknownError, RecursionError, TypeError, AttributeError, ValueError):
        return None
