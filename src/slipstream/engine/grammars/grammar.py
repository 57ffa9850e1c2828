"""Answers constrained by a grammar: masks of allowed next tokens, by `llguidance`. No torch.

1. `check.py` validates a request's grammar before it is queued.
2. `Grammars`, in the engine core, has it compiled in a thread (`compiling.py`) while the request is held back, then keeps a
   `GrammarState` for each request (`state.py`).
3. Each step requests masks for the tokens that it samples, while the device runs the forward.
4. The step's tokens advance the states.

A budget of reasoning (`reasoning.py`) is a part of a request's state, with a grammar or alone. An end token
is allowed exactly where the grammar may end. If nothing can follow, the answer ends without one.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from slipstream.costs.hardware import available_cores
from slipstream.engine.grammars.check import CACHED_GRAMMARS, GrammarThreads, too_slow
from slipstream.engine.grammars.compiling import Compiled, GrammarCompiler
from slipstream.engine.grammars.compose import llguidance_library
from slipstream.engine.grammars.reasoning import ReasoningBudget
from slipstream.engine.grammars.regex_states import RegexStates
from slipstream.engine.grammars.schema_states import SchemaStates
from slipstream.engine.grammars.state import (
    PARALLEL_ROWS,
    Bits,
    GrammarError,
    GrammarState,
    SharedMasks,
    find_masks,
)
from slipstream.engine.grammars.string_lengths import StringLengths
from slipstream.engine.text.tokenizer import Tokenizer
from slipstream.errors import EngineOverloadedError
from slipstream.messages.requests import EngineRequest
from slipstream.messages.steps import ScheduledRequest, StepPlan, TokenMask
from slipstream.params.answer_forms import StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

CACHED_ENDS = 16
"""Number of sets of end tokens for which complete masks are cached."""

MAX_MASK_THREADS = 32

SLOW_S, PATIENCE_S = 0.003, 0.002
"""(seconds from which a mask counts as slow, seconds that a step waits for slow masks). After a
slow mask, the answer's next ones are computed in separate threads."""

MAX_SLOW, MAX_SLOW_THREADS = 32, 4
"""(maximum requests whose masks are computed in such threads at once, minimum number of these
threads)."""

MAX_MASK_BYTES = 64 << 20
"""Maximum bytes of cached masks for schemas."""


class Grammars:
    """The grammars of an engine core's requests. `load` returns the tokenizer; it is called once, for the first grammar.
    `num_rows`: rows of the model's embedding; `ends`: the tokens that end an answer of this
    model."""

    def __init__(
        self,
        load: Callable[[], Tokenizer | None],
        num_rows: int,
        ends: Callable[[Tokenizer], Sequence[int]],
    ) -> None:
        self.compiler = GrammarCompiler(load, num_rows, ends)
        self.num_rows = num_rows
        # by the end tokens of the answer and of the model
        self._shared: dict[tuple[tuple[int, ...], ...], SharedMasks] = {}
        self._threads: GrammarThreads[Compiled] = GrammarThreads("grammars", most_small=2)
        self._executor: LLExecutor | None = None
        self._num_threads = min(MAX_MASK_THREADS, max(1, available_cores() - 1))
        # the key includes the request's salt, as in `check`
        self._compiled: OrderedDict[tuple[str, StructuredOutputsParams], Compiled] = OrderedDict()
        self._pending: dict[str, tuple[EngineRequest, Future[Compiled]]] = {}
        self._states: dict[str, GrammarState] = {}
        self.overloaded: set[str] = set()
        self._slow: ThreadPoolExecutor | None = None
        self._late: dict[str, tuple[GrammarState, Future[Bits]]] = {}

    def begin(self, request: EngineRequest) -> bool:
        """Compile the request's grammar. True if it is ready; otherwise `compiled` will report it.
        EngineOverloadedError if too many compilations are stuck. A reasoning budget alone only needs the tokenizer."""
        params = request.sampling.structured_outputs
        key = (request.cache_salt, params)
        ready = None
        if params is not None and (ready := self._compiled.get((request.cache_salt, params))):
            self._compiled.move_to_end((request.cache_salt, params))
        if params is None and self.compiler.tokenizer is not None:
            ready = Compiled(None, None, None, None)
        if ready is not None:
            self._start(request, ready)
            return True
        same = (
            future
            for other, future in self._pending.values()
            if (other.cache_salt, other.sampling.structured_outputs) == key
        )
        future = next(same, None) or self._threads.submit(
            partial(self.compiler.compile, params, request.sampling), params, request.client
        )
        self._pending[request.request_id] = request, future
        return False

    @property
    def is_compiling(self) -> bool:
        return bool(self._pending)

    def compiled(self) -> list[tuple[str, str | None]]:
        """Returns the requests whose compilations have ended since the last call, each with its error or
        None. Requests in `overloaded` may be retried, because their compilation never started."""
        found: list[tuple[str, str | None]] = []
        self.overloaded.clear()
        for request_id, (request, future) in list(self._pending.items()):
            if not future.done():
                continue
            del self._pending[request_id]
            error = None
            if isinstance(failure := future.exception(), TimeoutError):
                error = f"the grammar can't be enforced: {too_slow()}"
            elif failure is not None:  # whatever it is, it concerns this request alone
                error = str(failure) or type(failure).__name__
                if isinstance(failure, EngineOverloadedError):
                    self.overloaded.add(request_id)
            else:
                compiled, params = future.result(), request.sampling.structured_outputs
                if params is not None:
                    self._compiled[request.cache_salt, params] = compiled
                while len(self._compiled) > CACHED_GRAMMARS:
                    self._compiled.popitem(last=False)
                self._start(request, compiled)
            found.append((request_id, error))
        return found

    def close(self) -> None:
        """Cancel masks whose computation has not started, so that the process doesn't wait for them
        at exit."""
        if self._slow is not None:
            self._slow.shutdown(wait=False, cancel_futures=True)

    def forget(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            state = self._states.pop(request_id, None)
            if (late := self._late.pop(request_id, None)) is not None:
                late[1].cancel()  # unless it has started
            if state is not None and state.lane is not None:
                state.lane[0].give(state.lane[1])
            if (pending := self._pending.pop(request_id, None)) is not None and all(
                future is not pending[1] for _, future in self._pending.values()
            ):
                pending[1].cancel()  # unless it has started

    def clear(self) -> None:
        self.forget([*self._pending, *self._states])

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._states

    def __bool__(self) -> bool:
        return bool(self._states)

    def forced(self, request_id: str, num_pending: int) -> tuple[int, ...]:
        """Tokens that must follow a request's accepted tokens and `num_pending` sampled tokens not
        yet accepted. () if unknown."""
        state = self._states.get(request_id)
        try:
            return () if state is None else state.forced(num_pending)
        except GrammarError:  # the matcher stays in error, and the next mask ends this request
            return ()

    def accept(self, request_id: str, tokens: Sequence[int]) -> int | None:
        """Advance a request by its new tokens. Returns how many of them complete its answer; None
        if it continues. Tokens sampled after the end are not part of it. GrammarError if it can't
        continue."""
        [result] = self.accept_all([(request_id, tokens)])
        if isinstance(result, GrammarError):
            raise result
        return result

    def accept_all(
        self, answers: Sequence[tuple[str, Sequence[int]]]
    ) -> list[int | GrammarError | None]:
        """`accept` for several requests at once. Their matchers advance in parallel."""
        results: list[int | GrammarError | None] = [None] * len(answers)
        late: list[int] = []  # those whose single token the matcher must consume
        for i, (request_id, tokens) in enumerate(answers):
            state = self._states[request_id]
            try:
                if len(tokens) == 1:
                    if state.advance(tokens):
                        late.append(i)
                    else:
                        results[i] = 1 if state.is_finished else None
                        state.settle()
                else:
                    results[i] = self._accept_each(state, tokens)
            except GrammarError as error:
                results[i] = error
        states = [self._states[answers[i][0]] for i in late]
        if len(late) >= PARALLEL_ROWS and self._num_threads > 1:
            self._consume([state for state in states if len(state.untaken) == 1])
        for i, state in zip(late, states, strict=True):
            try:
                _ = state.matcher  # consumes the token, unless `_consume` did
                state.check()
                if state.is_finished:
                    results[i] = 1
                state.settle()
            except GrammarError as error:
                results[i] = error
        return results

    def _accept_each(self, state: GrammarState, tokens: Sequence[int]) -> int | None:
        for i, token in enumerate(tokens, 1):
            state.accept([token])
            if state.is_finished:
                return i
        state.settle()
        return None

    @property
    def is_late(self) -> bool:
        """Tells whether late masks, for which steps did not wait, are still being computed."""
        return bool(self._late)

    def arrived(self) -> list[str]:
        """Ids of the requests whose late masks have arrived."""
        found = [name for name, (_, mask) in self._late.items() if mask.done()]
        for name in found:
            state, mask = self._late.pop(name)
            state.take_mask(mask.result())
        return found

    def is_over(self, request_id: str) -> bool:
        """Tells whether the request's remaining tokens are unrestricted."""
        state = self._states.get(request_id)
        return state is not None and not state.has_matcher and state.budget is None

    def masks(
        self,
        plan: StepPlan,
        drafts: Mapping[str, Sequence[int]] = MappingProxyType({}),
        may_wait: Callable[[ScheduledRequest], bool] = lambda s: False,
        late: list[ScheduledRequest] | None = None,
    ) -> tuple[TokenMask, dict[str, str | None]]:
        """(masks of the tokens that a step samples, requests that can't continue with an error or
        None if complete). All tokens of earlier steps must have been accepted.

        Requests that `may_wait` and whose mask takes long are added to `late`: the caller must
        discard the step's tokens for them and hold them back until their mask has `arrived`.

        `drafts` are the forced tokens, then those to verify, of requests that have some. The first
        token is sampled after the last forced one.
        """
        first = itertools.accumulate((s.num_sampled for s in plan.scheduled), initial=0)
        found = [
            (s, i)
            for s, i in zip(plan.scheduled, first, strict=False)
            if s.num_sampled
            and (state := self._states.get(s.request_id)) is not None
            and not state.is_free(len(s.drafts))
        ]
        positions = [i + k for s, i in found for k in range(s.num_sampled)]
        states = [self._states[s.request_id] for s, _ in found]
        forced = [
            drafts.get(s.request_id, ())[: max(0, len(s.drafts) + 1 - s.num_sampled)]
            for s, _ in found
        ]
        for state, tokens in zip(states, forced, strict=True):
            if tokens:
                with contextlib.suppress(GrammarError):  # `finish_mask` reports it below
                    state.accept(tokens)
        self._find(states)
        # A mask shared by several rows is stored once, after the masks of single rows.
        shared = [
            state.known if s.num_sampled == 1 else None
            for state, (s, _) in zip(states, found, strict=True)
        ]
        place = {id(mask): mask for mask in shared if mask is not None}
        counts = [
            s.num_sampled if mask is None else 0 for mask, (s, _) in zip(shared, found, strict=True)
        ]
        num_own, words = sum(counts), -(-self.num_rows // 32)
        memory = bytearray((num_own + len(place)) * words * 4)
        bits = np.frombuffer(memory, np.int32).reshape(num_own + len(place), words)
        at = {}
        for row, (key, kept) in enumerate(place.items(), num_own):
            bits[row], at[key] = kept, row
        rows = list(itertools.accumulate(counts, initial=0))[:-1]
        which: list[int] = []
        for mask, row, count in zip(shared, rows, counts, strict=True):
            which += range(row, row + count) if mask is None else (at[id(mask)],)
        own = [
            (s, state, row, tokens)
            for mask, (s, _), state, row, tokens in zip(
                shared, found, states, rows, forced, strict=True
            )
            if mask is None
        ]
        begun = []
        if late is not None and sum([s.num_sampled > 0 for s in plan.scheduled]) > 1:
            begun = [
                one
                for one in own
                if one[1].is_slow and one[1].needs_matcher and not one[3] and may_wait(one[0])
            ][: max(0, MAX_SLOW - len(self._late))]
        pending = self._begin_slow(begun)
        ended = self._own_masks(
            [one for one in own if one[0].request_id not in pending], bits, drafts
        )
        if pending:
            wait(pending.values(), PATIENCE_S)
            for one in [one for one in begun if one[0].request_id in pending]:
                s, state, row, _ = one
                if (coming := pending[s.request_id]).done():
                    state.take_mask(coming.result())
                    ended |= self._own_masks([one], bits, drafts)
                else:
                    bits[row] = -1
                    self._late[s.request_id] = state, coming
                    late.append(s)  # type: ignore[union-attr]
        for (s, _), state, tokens in zip(found, states, forced, strict=True):
            if tokens and s.request_id not in ended:
                state.rollback(len(tokens))
        return TokenMask(tuple(positions), memory, which=tuple(which)), ended

    def _begin_slow(
        self, own: Iterable[tuple[ScheduledRequest, GrammarState, int, Sequence[int]]]
    ) -> dict[str, Future[Bits]]:
        """Start computing the masks of requests whose latest mask was slow, in separate threads.
        States in error are skipped."""
        found = dict[str, Future[Bits]]()
        for s, state, _, _ in own:
            with contextlib.suppress(GrammarError):
                matcher = state.matcher
                if self._slow is None:
                    threads = max(MAX_SLOW_THREADS, self._num_threads)
                    self._slow = ThreadPoolExecutor(threads, "slow masks")
                found[s.request_id] = self._slow.submit(self._slow_mask, state, matcher)
        return found

    def _slow_mask(self, state: GrammarState, matcher: LLMatcher) -> Bits:
        mask, begin = np.zeros(-(-self.num_rows // 32), np.int32), time.perf_counter()
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        state.is_slow = time.perf_counter() - begin > SLOW_S
        return mask

    def _own_masks(
        self,
        own: Sequence[tuple[ScheduledRequest, GrammarState, int, Sequence[int]]],
        bits: Bits,
        drafts: Mapping[str, Sequence[int]],
    ) -> dict[str, str | None]:
        """Compute the masks of requests without shared ones, and write each from the request's row
        on. Returns errors by request, as `masks` does."""
        ended: dict[str, str | None] = {}
        matchers, asked = list[tuple["LLMatcher", int]](), list[GrammarState]()
        for s, state, row, _ in own:
            bits[row + 1 : row + s.num_sampled].fill(-1)  # after a wrong draft anything is allowed
            try:
                if not state.write_known(bits[row]):
                    matchers.append((state.matcher, row))
                    asked.append(state)
            except GrammarError as error:
                ended[s.request_id] = str(error)
        if matchers:
            begin = time.perf_counter()
            self._compute(matchers, bits)
            at_once = self._num_threads if len(matchers) >= PARALLEL_ROWS else 1
            if time.perf_counter() - begin > SLOW_S * -(-len(matchers) // at_once):
                for state in asked:
                    state.is_slow = True
        for s, state, row, tokens in own:
            try:
                if s.request_id in ended:
                    pass
                elif state.known is not None or state.finish_mask(bits[row]):
                    if s.num_sampled > 1:
                        state.mask_drafts(
                            bits[row : row + s.num_sampled],
                            drafts.get(s.request_id, ())[len(tokens) :],
                        )
                else:
                    ended[s.request_id] = None
            except GrammarError as error:
                ended[s.request_id] = str(error)
            if s.request_id in ended:
                bits[row] = -1  # the sampled token is discarded
        return ended

    def _compute(self, matchers: list[tuple[LLMatcher, int]], bits: Bits) -> None:
        """Computes masks with the matchers, and writes each into its row."""
        size = bits.shape[1] * 4
        if len(matchers) < PARALLEL_ROWS:
            for matcher, row in matchers:
                matcher.unsafe_compute_mask_ptr(bits[row].ctypes.data, size)
            return
        self._threads_of_masks().unsafe_compute_mask_ptr(
            matchers, bits.ctypes.data, size, len(bits)
        )

    def _consume(self, states: Sequence[GrammarState]) -> None:
        """Advance matchers by one token each, in parallel. A matcher that rejects its token is in
        error afterwards."""
        if states:
            self._threads_of_masks().consume_token_par([state.take_one() for state in states])

    def _threads_of_masks(self) -> LLExecutor:
        if self._executor is None:
            self._executor = llguidance_library().LLExecutor(self._num_threads)
        return self._executor

    def _find(self, states: Sequence[GrammarState]) -> None:
        """Look up masks shared by several positions: those of an expression's states, and those inside strings."""
        rows: dict[RegexStates | SchemaStates, list[GrammarState]] = {}
        for state in states:
            spot, of = state.spot, state.regex
            if state.known is None and spot is not None and of is not None and not spot.is_known:
                rows.setdefault(of, []).append(state)
        for new in rows.values():
            find_masks(new, self._compute)
        if any(isinstance(found, SchemaStates) for found in rows):
            self._bound_masks()
        inside = []
        for state in states:
            if state.look() is None and (lengths := state.lengths) is not None:
                if not lengths.may_be_inside:
                    continue
                if lengths.settle():
                    inside.append(state)
                else:
                    state.lengths = None
        if not inside or self.compiler.lengths is None:
            return
        masks = np.zeros((len(inside), self.compiler.lengths.num_words), np.int32)
        self._compute([(state.lengths.matcher, i) for i, state in enumerate(inside)], masks)  # type: ignore[union-attr]
        for state, mask in zip(inside, masks, strict=True):
            state.look_inside(mask)

    def _bound_masks(self) -> None:
        """Drop cached masks of the oldest schemas if there are too many."""
        schemas = [c.regex for c in self._compiled.values() if isinstance(c.regex, SchemaStates)]
        num_bytes = sum(states.num_bytes for states in schemas)
        for states in schemas:
            if num_bytes <= MAX_MASK_BYTES:
                break
            num_bytes -= states.num_bytes
            states.forget_masks()

    def _start(self, request: EngineRequest, compiled: Compiled) -> None:
        matcher, by_length, regex, lanes = compiled
        lengths = number = None
        if lanes is not None:
            number, (matcher, by_length) = lanes.take(self._num_threads)
        if by_length is not None and self.compiler.lengths is not None:
            lengths = StringLengths(self.compiler.lengths, by_length[0].deep_copy(), by_length[1])
        ends = (*request.eos_token_ids, *request.sampling.stop_token_ids)
        if (shared := self._shared.get((ends, self.compiler.ends))) is None:
            if len(self._shared) >= CACHED_ENDS:
                self._shared.clear()
            shared = self._shared[ends, self.compiler.ends] = SharedMasks(ends, self.compiler.ends)
        budget, sampling = None, request.sampling
        if sampling.thinking_token_budget is not None and sampling.reasoning is not None:
            counts = self.compiler.counter(sampling.reasoning, sampling.thinking_token_budget)
            vocabulary = None if matcher is None else self.compiler.texts_of(counts)
            budget = ReasoningBudget(counts, vocabulary)
        own = None if matcher is None else matcher.deep_copy()
        state = GrammarState(own, shared, sampling, lengths, budget, regex)
        if lanes is not None and number is not None:
            state.lane = lanes, number
        self._states[request.request_id] = state
        with contextlib.suppress(GrammarError):  # the next mask reports it
            state.accept(request.answer_token_ids)
            state.settle()
