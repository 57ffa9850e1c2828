"""One answer's position in its grammar, and its masks.

1. `GrammarState` tracks an answer: by an `llguidance` matcher, the states of an expression or a schema, the
   lengths of strings, and its reasoning budget. `Grammars` (`grammar.py`) has one for each request.
2. `Lanes` is a pool of matchers of one grammar, of which each state has a copy.
3. `SharedMasks` adds end tokens to masks that several answers share.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from slipstream.engine.grammars.reasoning import ReasoningBudget
from slipstream.engine.grammars.regex_states import RegexState, RegexStates
from slipstream.engine.grammars.schema_states import Run, SchemaSpot, SchemaStates
from slipstream.engine.grammars.string_lengths import CountedStrings, StringLengths
from slipstream.engine.threads.bounded_threads import start_thread
from slipstream.errors import EngineOverloadedError
from slipstream.params.sampling import SamplingParams

if TYPE_CHECKING:
    from llguidance import LLMatcher

PARALLEL_ROWS = 8
"""Minimum number of masks that are computed by several threads."""

MAX_COMPLETE = 256
"""Maximum number of complete masks that are kept for requests with the same end tokens."""

MAX_LANE_AT_ONCE_S, MAX_LANE_S = 0.005, 1.0
"""(seconds up to which another matcher of a grammar is made at once, seconds up to which it is made in a thread). One that
takes longer is not made."""

Bits = npt.NDArray[np.int32]
ByLength: TypeAlias = "tuple[LLMatcher, CountedStrings] | None"
Spot: TypeAlias = RegexState | SchemaSpot
Lane: TypeAlias = "tuple[LLMatcher, ByLength]"


class Lanes:
    """Pool of matchers of one grammar, each with its own lexer. A lexer serves one thread at a
    time, so parallel masks need several."""

    def __init__(self, first: Lane, make: Callable[[], Lane], seconds: float) -> None:
        """`make` builds another matcher, in about `seconds` of CPU time."""
        self._made, self._make, self._seconds = [first], make, seconds
        self._counts = [0]
        self._is_growing = seconds > MAX_LANE_S

    def take(self, most: int) -> tuple[int, Lane]:
        """Assigns a matcher to a new request: (its index, the matcher). If all are busy, more are
        made, up to `most`."""
        least = min(range(len(self._made)), key=self._counts.__getitem__)
        if self._counts[least] >= PARALLEL_ROWS and len(self._made) < most and not self._is_growing:
            self._is_growing = True
            if self._seconds <= MAX_LANE_AT_ONCE_S:
                self._grow()
            else:
                try:
                    start_thread(self._grow, name="grammar")
                except EngineOverloadedError:  # try again with a later request
                    self._is_growing = False
            least = min(range(len(self._made)), key=self._counts.__getitem__)
        self._counts[least] += 1
        return least, self._made[least]

    def give(self, number: int) -> None:
        self._counts[number] -= 1

    def _grow(self) -> None:
        with contextlib.suppress(ValueError):
            made = self._make()
            if not made[0].is_error():
                self._counts.append(0)
                self._made.append(made)
                self._is_growing = False


Compute: TypeAlias = "Callable[[list[tuple[LLMatcher, int]], Bits], None]"
"""Computes the masks of matchers, and writes each into its row."""


class GrammarError(Exception):
    """The grammar can't continue: it became too complex, or no token of the vocabulary fits."""


class SharedMasks:
    """Completed masks for requests with the same end tokens. `ends`: tokens that end an answer; `never`: tokens forbidden
    everywhere."""

    def __init__(self, ends: Collection[int], never: Collection[int]) -> None:
        self.ends, self.never = tuple(ends), tuple(set(never) - set(ends))
        # by id of the matcher's mask, which is stored too so that the id stays unique
        self._complete: dict[tuple[int, bool], tuple[Bits, Bits | None]] = {}

    def complete(self, mask: Bits, *, accepts: bool) -> Bits | None:
        """The mask, with end tokens added if the answer may end. None if no token is left."""
        found = self._complete.get((id(mask), accepts))
        if found is None:
            found = mask, self.made(mask, accepts=accepts)
            if len(self._complete) >= MAX_COMPLETE:
                self._complete.clear()
            self._complete[id(mask), accepts] = found
        return found[1]

    def made(self, mask: Bits, *, accepts: bool) -> Bits | None:
        """`complete` without caching. A mask that is already complete is returned unchanged."""
        complete = mask.copy()
        self.write_ends(complete, accepts=accepts)
        if is_empty(complete):
            return None
        return mask if (complete == mask).all() else complete

    def write_ends(self, into: Bits, *, accepts: bool) -> None:
        for token in self.never:
            into[token >> 5] &= ~bit_of(token)
        for token in self.ends:
            word = into[token >> 5]
            into[token >> 5] = word | bit_of(token) if accepts else word & ~bit_of(token)


class GrammarState:
    """Position of one answer in its grammar and its reasoning budget. Without a `matcher` there is
    only the budget. `shared` has the tokens that end the answer. `sampling`: further restrictions
    of the request, so that an answer without any allowed token is detected here. `lengths` tracks
    the answer by string lengths, and `regex` by its expression's states, where these suffice.

    `known`: mask of this position, if it is shared with other answers. Tokens that it allows are
    queued as `untaken` until the matcher is needed.
    """

    def __init__(
        self,
        matcher: LLMatcher | None,
        shared: SharedMasks,
        sampling: SamplingParams = SamplingParams(),  # noqa: B008 - it is frozen
        lengths: StringLengths | None = None,
        budget: ReasoningBudget | None = None,
        regex: RegexStates | SchemaStates | None = None,
    ) -> None:
        self._matcher, self._sampling, self.lengths = matcher, sampling, lengths
        self.budget, self.shared = budget, shared
        self._limited = sampling.allowed_token_ids is not None or bool(sampling.bad_words_token_ids)
        self.is_plain = matcher is not None and budget is None and not self._limited
        self.regex = regex if self.is_plain else None
        self.spot: Spot | None = None if self.regex is None else self.regex.start
        self.known: Bits | None = None
        # mask that the matcher would write, without end tokens
        self._incomplete: Bits | None = None
        self.untaken: list[int] = []
        self._spots: list[Spot | None] = []  # the spot before each token since the last `settle`
        self._is_borrowed = False
        self.is_slow = False  # its last mask took long to compute
        self.lane: tuple[Lanes, int] | None = None  # pool and index of the matcher
        self._answer: list[int] = []
        self._allowed: Bits | None = None  # `allowed_token_ids` as a mask

    @property
    def has_matcher(self) -> bool:
        return self._matcher is not None

    @property
    def matcher(self) -> LLMatcher:
        """The matcher, after it has consumed all tokens. GrammarError if it can't."""
        matcher = self._own
        if self._is_borrowed:
            self._matcher, self._is_borrowed = (matcher := matcher.deep_copy()), False
        if self.untaken:
            tokens, self.untaken = self.untaken, []
            if not matcher.consume_tokens(tokens):
                self.check()
                raise GrammarError("a token was drawn that the grammar does not allow")
        return matcher

    @property
    def _own(self) -> LLMatcher:
        """The matcher itself. Only states with a grammar have one."""
        if self._matcher is None:
            raise GrammarError("the answer has a budget of reasoning alone, and no grammar")
        return self._matcher

    def take_one(self) -> tuple[LLMatcher, int]:
        """The matcher and the one token that it has not consumed yet. The caller must make it
        consume the token."""
        assert not self._is_borrowed
        [token], self.untaken = self.untaken, []
        return self._own, token

    def copy(self, *, borrow: bool = False) -> GrammarState:
        """A copy. With `borrow` it uses this state's matcher until it needs its own; this state must not change before."""
        budget = None if self.budget is None else self.budget.copy()
        matcher = self._matcher if borrow or self._matcher is None else self._matcher.deep_copy()
        other = GrammarState(matcher, self.shared, self._sampling, budget=budget, regex=self.regex)
        other._is_borrowed = borrow and matcher is not None
        other.spot, other.known, other.untaken = self.spot, self.known, self.untaken.copy()
        other._answer[:] = self._answer
        return other

    def mask(self, into: Bits) -> bool:
        """Write the mask of next tokens into int32 [words]. False if the answer is complete, so
        that none may follow. GrammarError if it can't continue."""
        if (known := self.look(alone=True)) is not None:
            into[:] = known
            return True
        if not self.write_free(into):
            self.matcher.unsafe_compute_mask_ptr(into.ctypes.data, into.nbytes)
        return self.finish_mask(into)

    def look(self, *, alone: bool = False) -> Bits | None:
        """The shared mask of this position, if there is one. `alone`: it may be computed for this answer only."""
        if self.known is not None:
            return self.known
        spot, lengths = self.spot, self.lengths
        if spot is not None:
            if alone and not spot.is_known:
                find_masks([self], _compute_each)
            if isinstance(spot, SchemaSpot):
                self.known = spot.complete(self.shared)
            elif spot.mask is not None:
                self.known = self.shared.complete(spot.mask, accepts=spot.accepts)
        elif alone and lengths is not None and self.is_plain and lengths.may_be_inside:
            if lengths.settle():
                own = np.zeros(lengths.vocabulary.num_words, np.int32)
                lengths.matcher.unsafe_compute_mask_ptr(own.ctypes.data, own.nbytes)
                self.look_inside(own)
            else:
                self.lengths = None
        return self.known

    def look_inside(self, own: Bits) -> Bits | None:
        """The mask of a position inside a string, from a mask over the vocabulary of lengths. None
        if the answer is not at such a position."""
        assert self.lengths is not None
        mask = self.lengths.expand(own)
        if mask is not None and self.is_plain:  # an answer can't end inside a string
            self.known = self.shared.complete(mask, accepts=False)
        self._incomplete = mask
        return mask

    @property
    def needs_matcher(self) -> bool:
        """Whether the matcher must compute the mask of this position."""
        is_free = self.budget is not None and self.budget.is_reasoning
        return self.has_matcher and not is_free and self.known is self._incomplete is None

    def take_mask(self, mask: Bits) -> None:
        """Store the mask that the matcher computed for this position."""
        self._incomplete = mask

    def write_free(self, into: Bits) -> bool:
        """Write the mask of a position that the grammar doesn't restrict: within reasoning, or
        without a grammar. False, without writing, elsewhere."""
        if self._matcher is None:
            into.fill(-1)
        elif self.budget is not None and self.budget.is_reasoning:
            self.budget.write_mask(into)
        else:
            return False
        return True

    def write_known(self, into: Bits) -> bool:
        """Write the mask if it is known without the matcher. Otherwise returns False and writes
        nothing."""
        if self.write_free(into):
            return True
        mask = self._incomplete if self.known is None else self.known
        if mask is not None:
            into[:] = mask
        return mask is not None

    def finish_mask(self, into: Bits) -> bool:
        """Complete a mask that the matcher has computed. Returns and raises like `mask`.

        1. End tokens are allowed where the answer may end. The grammar has no rule for them.
        2. Tokens that the model or the request forbids are removed, except a marker that a budget
           forces.
        """
        if self._matcher is None:
            if self.budget is not None:
                self.budget.narrow(into)
            return True
        self.check()
        accepts = self.matcher.is_accepting()
        self.shared.write_ends(into, accepts=accepts)
        is_forced = self.budget is not None and self.budget.narrow(into)
        limited = self._limited and not is_forced
        fits = not limited or not is_empty(into)
        if limited:
            self._rule_out(into)
        if is_empty(into):
            if accepts:
                return False
            what = (
                "what allowed_token_ids and bad_words leave"
                if limited and fits
                else "the model's vocabulary"
            )
            raise GrammarError(f"no token of {what} can follow here")
        return True

    def _rule_out(self, into: Bits) -> None:
        """Clear tokens that the request's `allowed_token_ids` and bad words forbid."""
        sampling, answer = self._sampling, self._answer
        if sampling.allowed_token_ids is not None:
            if self._allowed is None:
                tokens = np.array(sampling.allowed_token_ids)
                self._allowed = np.zeros_like(into)
                np.bitwise_or.at(
                    self._allowed.view(np.uint32),
                    tokens >> 5,
                    np.uint32(1) << (tokens & 31).astype(np.uint32),
                )
            into &= self._allowed
        for *before, last in sampling.bad_words_token_ids:
            if not before or answer[-len(before) :] == before:
                into[last >> 5] &= ~bit_of(last)

    def accept(self, tokens: Sequence[int]) -> None:
        """Advance by tokens that its masks allowed. GrammarError if it can't."""
        if self.advance(tokens):
            _ = self.matcher  # makes it consume them

    def advance(self, tokens: Sequence[int]) -> bool:
        """Advance like `accept`, but without the matcher. Returns whether the matcher must consume
        the tokens now, because they may be invalid or complete the answer."""
        given = tokens
        if self.budget is not None:
            given = []
            for token in tokens:
                if (own := self.budget.accept(token)) is None:
                    raise GrammarError("a token was drawn that the budget of reasoning rules out")
                given += own
        must = False
        if self._matcher is not None:
            self.untaken += given
            must = bool(given) and not self._follow(given)
        self.known = self._incomplete = None
        if self.lengths is not None:
            self.lengths.accept(given)
        if self._sampling.bad_words_token_ids:
            self._answer += tokens
        return must

    def _follow(self, tokens: Sequence[int]) -> bool:
        """Advance through the shared states, without the matcher. Returns whether the tokens are
        certainly allowed and don't complete the answer."""
        certain = self.is_plain
        for token in tokens:
            if isinstance(spot := self.spot, SchemaSpot):
                assert isinstance(self.regex, SchemaStates)
                self._spots.append(spot)
                self.spot = self.regex.after(spot, token)
                certain = certain and self.spot is not None
                self.known = None
                continue
            mask = self.look()
            certain = certain and mask is not None and bool(mask[token >> 5] >> (token & 31) & 1)
            if self.regex is not None:
                self._spots.append(spot)
                if spot is not None:
                    assert isinstance(self.regex, RegexStates)
                    self.spot = self.regex.after(spot, token)
                certain = certain and self.spot is not None  # it can continue
            else:  # it stays inside a string
                inside = self.lengths is not None and not self.lengths.vocabulary.has_quote(token)
                certain = certain and inside
            certain = certain and token not in self.shared.ends
            self.known = None
        return certain

    def forced(self, num_pending: int = 0) -> tuple[int, ...]:
        """Tokens that must follow `num_pending` forced ones, without one that completes the answer.
        () if even the pending ones are unknown."""
        if not self.is_plain:
            return ()  # forced tokens may be forbidden by the request
        if isinstance(spot := self.spot, SchemaSpot):
            if not spot.state.is_forced:
                return ()
            if (run := spot.state.runs.get((spot.last, self.shared))) is None:
                run = self._run()
                assert isinstance(self.regex, SchemaStates)
                self.regex.keep_run(spot, self.shared, run)
        elif self.look(alone=True) is not None:
            return ()  # a shared mask allows several
        else:
            run = self._run()
        return run[0][num_pending:] if run[1] > num_pending else ()

    def _run(self) -> Run:
        """(forced tokens, without one that completes the answer; their number, with it)."""
        matcher = self.matcher
        tokens: list[int] = matcher.compute_ff_tokens()
        ends, never = self.shared.ends, self.shared.never
        taken = next(
            (i for i, token in enumerate(tokens) if token in ends or token in never), len(tokens)
        )
        if not taken:
            return (), 0
        if not matcher.consume_tokens(tokens[:taken]):
            self.check()
            raise GrammarError("a forced token can't follow")
        complete = matcher.is_stopped() and matcher.is_accepting()
        matcher.rollback(taken)
        return tuple(tokens[: taken - complete]), taken

    def rollback(self, num_tokens: int) -> None:
        """Undo the last tokens."""
        num_given = num_tokens if self.budget is None else self.budget.rollback(num_tokens)
        untaken = min(num_given, len(self.untaken))
        del self.untaken[len(self.untaken) - untaken :]
        if num_given > untaken:
            self.matcher.rollback(num_given - untaken)
        if self.lengths is not None:
            self.lengths.rollback(num_given)
        if self.regex is not None and num_given:
            first = len(self._spots) - num_given
            self.spot = self._spots[first] if first >= 0 else None
            del self._spots[max(0, first) :]
        self.known = self._incomplete = None
        del self._answer[len(self._answer) - num_tokens :]

    def mask_drafts(self, masks: Bits, drafts: Sequence[int]) -> None:
        """Write the masks after each draft into int32 [1 + drafts, words]. The first row is already
        written. Rows after an invalid draft are not written: tokens sampled there are discarded."""
        assert len(masks) == 1 + len(drafts), "drafts are not known"
        # a draft may be invalid, and a matcher in error stays in error
        ahead = self.copy(borrow=True) if drafts else self
        for i, token in enumerate(drafts):
            if (
                ahead.is_finished
                or not masks[i][token >> 5] & bit_of(token)
                or token in self.shared.ends
            ):
                break
            try:
                ahead.accept([token])
                if not ahead.is_finished:
                    ahead.mask(masks[i + 1])
            except GrammarError:  # only an error if the draft is accepted
                masks[i + 1] = -1
                break

    @property
    def is_finished(self) -> bool:
        """Whether the answer is complete, so that nothing can follow."""
        if self._matcher is None:
            return False
        if (spot := self.spot) is not None:  # a tracked state of an expression can always continue
            return isinstance(spot, SchemaSpot) and spot.is_end
        matcher = self.matcher
        return bool(matcher.is_stopped() and matcher.is_accepting())

    def is_free(self, num_tokens: int) -> bool:
        """Whether the grammar and the budget allow any next `num_tokens` tokens, and any token after them."""
        return self._matcher is None and (self.budget is None or self.budget.is_free(num_tokens))

    def settle(self) -> None:
        """Drop the data for undoing tokens, since none so far will be undone. A used-up budget is
        dropped, too."""
        self._spots.clear()
        if self.budget is not None:
            self.budget.settle()
            if self.budget.is_over:
                self.budget = None

    def check(self) -> None:
        """Raise GrammarError if the matcher is in error."""
        if self._matcher is not None and self._matcher.is_error():
            raise GrammarError(self._matcher.get_error().splitlines()[0])


def find_masks(rows: Sequence[GrammarState], compute: Compute) -> None:
    """Compute the masks that rows share by the states of their expression or schema, which is the same for all."""
    states = rows[0].regex
    if isinstance(states, RegexStates):
        states.find([row.spot for row in rows if isinstance(row.spot, RegexState)])
    if not isinstance(states, SchemaStates):
        return
    chosen: list[tuple[SchemaSpot, LLMatcher]] = []
    for spot, row in states.choose(rows):
        with contextlib.suppress(GrammarError):  # reported by its own mask
            chosen.append((spot, row.matcher))
    if not chosen:
        return
    bits = np.zeros((len(chosen), states.num_words), np.int32)
    compute([(matcher, i) for i, (_, matcher) in enumerate(chosen)], bits)
    for (spot, matcher), own in zip(chosen, bits, strict=True):
        if not matcher.is_error():
            states.keep(spot, own.copy(), accepts=matcher.is_accepting())


def _compute_each(matchers: list[tuple[LLMatcher, int]], bits: Bits) -> None:
    for matcher, row in matchers:
        matcher.unsafe_compute_mask_ptr(bits[row].ctypes.data, bits[row].nbytes)


@lru_cache(maxsize=4096)
def bit_of(token: int) -> np.int32:
    return np.uint32(1 << (token & 31)).astype(np.int32)


def is_empty(mask: Bits) -> bool:
    return mask.tobytes() == bytes(mask.nbytes)  # several times faster than `any`
