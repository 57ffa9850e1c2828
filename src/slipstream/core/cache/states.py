"""Slots of recurrent states: which a request reads and writes, and checkpoints that other requests continue from.

A slot holds one state of every recurrent layer (`kernels/states.py`). Slots come from a `BlockPool`, as blocks do, and slot 0
is the null slot.

1. A running request has slots of its own. A step reads its state from one slot and writes it to one of its own, mostly
   the same. A step with drafts writes the state after each token to a separate slot; the next step reads the one after
   the last accepted draft. So nothing is computed again after a rejected draft.
2. A *checkpoint* is a slot that is cached under the chained key of the block that ends at its position. A prefix hit is as
   long as the keys and values *and* a checkpoint allow. Unused ones are overwritten, the least recently used first.
3. Checkpoints are kept at *marks*: at the end of a prompt, every `interval` tokens of it, where its cached keys and
   values reach further than a checkpoint (where prompts diverge), where the caller requests it, and every
   `ANSWER_INTERVAL` tokens of an answer, of which only the last stays.
4. A request writes only to slots that it alone holds. Nothing is copied: a request goes on from a checkpoint, or from
   another request's state, by reading that slot once and writing to its own.
5. No request reads a slot that another writes in the same step. So a checkpoint is cached after the step that writes
   it is planned, and the slot that a step reads is held until then.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from slipstream.config import CacheConfig
from slipstream.core.cache.block_pool import NULL_BLOCK
from slipstream.core.cache.sessions import Sessions
from slipstream.core.cache.slots import Slots
from slipstream.core.request import Request
from slipstream.messages.steps import StateMark

ANSWER_INTERVAL = 64
"""Tokens between checkpoints of an answer. More saves updates; fewer saves recomputed tokens in the next turn."""


@dataclass(slots=True)
class RequestState:
    """A request's slots."""

    own: list[int] = field(default_factory=list)
    read: int = NULL_BLOCK
    """Slot with the state after its computed tokens; the null slot before the first. If it is not one of its own, the
    request holds it."""
    marks: list[int] = field(default_factory=list)  # positions in its prompt, ascending
    drafted: list[int] = field(default_factory=list)  # slots that a step with drafts writes
    sent: tuple[int, ...] = ()  # slots that the worker knows, once the step being planned is sent
    fork: int = NULL_BLOCK
    """Slot with the state before the last prompt token, for requests that share the prompt."""
    answer_mark: int = NULL_BLOCK  # the last checkpoint of the answer
    answer_key: bytes = b""


class StateSlots(Slots):
    """The slots of one rank's recurrent states, with a checkpoint every `CacheConfig.state_interval` tokens of a prompt.

    Checkpoints of prompts, and the last one of an answer, are offered to the tiers. A session's value is that of its last
    checkpoint.
    """

    def __init__(
        self,
        number: int,
        num_slots: int,
        cache: CacheConfig,
        max_drafts: int,
        sessions: Sessions | None = None,
    ) -> None:
        super().__init__(number, num_slots, cache, max_drafts, sessions)
        size = self.block_size
        self.interval = -(-cache.state_interval // size) * size
        self._answer_interval = -(-ANSWER_INTERVAL // size) * size
        self._of: dict[Request, RequestState] = {}
        self._borrowed: list[int] = []  # held until the step that reads them is planned
        self._made: list[tuple[Request, int, bytes, int]] = []
        """(request, position, key, slot) of the step's checkpoints."""
        self.kept: list[StateMark] = []
        """States between tokens of the step being planned that are kept."""

    # --- Before a request runs ----------------------------------------------------------------------------------------

    def has_room(self, request: Request) -> bool:
        held = self._of.get(request)
        return self._num_own(request) - (0 if held is None else len(held.own)) < self.pool.num_free

    def start(self, request: Request, computed: int) -> None:
        state = self._of.get(request)
        if state is None:
            state = self._of[request] = RequestState()
            if computed:
                slot = self.pool.lookup(request.block_keys[computed // self.block_size - 1])
                assert slot is not None, "the hit was looked up before"
                self._go_on_from(state, slot)
                if self.order is not None:
                    self.order.touch([slot], computed)
        state.own += self.pool.allocate(self._num_own(request) - len(state.own))
        state.marks = self._marks_of(request, computed)
        state.sent = ()

    def _num_own(self, request: Request) -> int:
        """Number of a request's slots: one, and one per draft. A guided request has two, because
        others may take over its state."""
        return max(2 if request.guide is not None else 1, 1 + self.max_drafts)

    def _marks_of(self, request: Request, computed: int) -> list[int]:
        """Positions in the prompt, in tokens, whose states are kept. All are ends of blocks.

        At least two tokens follow the last one, as after any hit (`usable_prefix`).
        """
        size = self.block_size
        last = (len(request.token_ids) - 2) // size * size
        wanted = {last, request.num_hit_tokens}
        wanted.update(range(self.interval, last - self.interval // 2, self.interval))
        wanted.update(p // size * size for p in request.spec.marks)
        return sorted(p for p in wanted if computed < p <= last)

    # --- Steps --------------------------------------------------------------------------------------------------------

    def place(self, request: Request, computed: int, end: int, num_drafts: int) -> bool:
        state = self._of[request]
        if computed:
            self._keep_current(request, state, computed)
        self._keep_inner(request, state, computed, end)
        read = state.read
        if read != NULL_BLOCK and read not in state.own:
            self._borrowed.append(read)
        if num_drafts:
            state.drafted = state.own[: 1 + num_drafts]
            self._send(request, state, (read, *state.drafted))
            return False
        write = self._writable(state)
        self._send(request, state, (read, write))
        state.read = write
        return write == read

    def next_mark(self, request: Request) -> int:
        return (request.num_computed_tokens // self._answer_interval + 1) * self._answer_interval

    def _send(self, request: Request, state: RequestState, wanted: tuple[int, ...]) -> None:
        if wanted != state.sent[: len(wanted)]:
            state.sent = wanted
            self.send(request, wanted)

    @property
    def _may_keep(self) -> bool:
        """Whether a slot is free besides the one that the request may have to write."""
        return self.pool.num_free > 1

    def may_write(self, request: Request) -> bool:
        state = self._of.get(request)
        if self.pool.num_free or state is None:
            return True
        return any(self.pool.ref_counts[slot] == 1 for slot in state.own)

    def _writable(self, state: RequestState) -> int:
        """One of the request's slots with no other holder; if possible the one that it reads."""
        counts = self.pool.ref_counts
        if state.read in state.own and counts[state.read] == 1:
            return state.read
        for slot in state.own:
            if counts[slot] == 1 and slot != state.read:
                return slot
        (new,) = self.pool.allocate(1)
        state.own.append(new)
        return new

    def _keep_current(self, request: Request, state: RequestState, computed: int) -> None:
        """Make a checkpoint of the state at the step's beginning, if that is a mark."""
        of_prompt = False
        while state.marks and state.marks[0] <= computed:
            of_prompt = state.marks.pop(0) == computed
        of_answer = computed > request.num_prompt_tokens and computed % self._answer_interval == 0
        if not (of_prompt or of_answer) or not self._may_keep or state.read not in state.own:
            return
        key = request.key_at(computed, self.block_size)
        if key is None or self.pool.lookup(key) is not None:
            return
        slot = self._give_up(state)
        self._cache(request, computed, key, slot)
        if of_prompt:
            self.offered.append((slot, key))
        if of_answer:
            old, state.answer_mark = state.answer_mark, slot
            if old != NULL_BLOCK and self.pool.hashes[old] == state.answer_key:
                self.pool.drop(old)  # the later one is more useful
            state.answer_key = key

    def _cache(self, request: Request, position: int, key: bytes, slot: int) -> None:
        """Cache a held slot as a checkpoint."""
        session = request.session
        if self.pool.register(slot, key) and self.order is not None and session is not None:
            if session.mark is not None:
                self.order.demote(session.mark)
            session.mark = self.order.apart(session, [slot], position)

    def _give_up(self, state: RequestState) -> int:
        """Gives the slot that the request reads to the cache, so that other requests may continue from it, and returns
        it. The request gets a new slot to write to."""
        state.own.remove(state.read)
        state.own += self.pool.allocate(1)
        return state.read

    def _keep_inner(self, request: Request, state: RequestState, computed: int, end: int) -> None:
        """Keep the states at marks, and the state to fork, between a step's tokens."""
        last = request.num_prompt_tokens - 1
        if request.forks and computed <= last < end and self._may_keep:
            if computed < last:
                (state.fork,) = self.pool.allocate(1)
                self.kept.append(StateMark(request.request_id, last - computed, state.fork))
            else:
                state.fork = self._give_up(state) if state.read in state.own else state.read
                self.pool.hold([state.fork])
        while state.marks and state.marks[0] < end:
            position = state.marks.pop(0)
            key = request.key_at(position, self.block_size)
            if key is not None and self._may_keep and self.pool.lookup(key) is None:
                (slot,) = self.pool.allocate(1)
                self._made.append((request, position, key, slot))
                self.kept.append(StateMark(request.request_id, position - computed, slot))

    def planned(self) -> tuple[StateMark, ...]:
        kept = tuple(self.kept)
        for request, position, key, slot in self._made:
            self._cache(request, position, key, slot)
            self.offered.append((slot, key))
            self.pool.release([slot])
        for slot in reversed(self._borrowed):  # may contain a slot several times
            self.pool.release([slot])
        self._made, self._borrowed, self.kept = [], [], []
        return kept

    def verified(self, request: Request, num_right: int) -> None:
        if (state := self._of.get(request)) is not None and state.drafted:
            state.read, state.drafted = state.drafted[num_right], []

    # --- Others' states -----------------------------------------------------------------------------------------------

    def may_share(self, parent: Request) -> bool:
        state = self._of.get(parent)
        return state is not None and state.fork != NULL_BLOCK

    def share(self, parent: Request, children: Iterable[Request]) -> None:
        state = self._of[parent]
        for child in children:
            own = self._of[child] = RequestState()
            self._go_on_from(own, state.fork)
        # not released at once: the step being planned writes it, even if no child is left
        self._borrowed.append(state.fork)
        state.fork = NULL_BLOCK

    def take_over(self, request: Request, source: Request) -> None:
        state = self._of.setdefault(request, RequestState())
        self._go_on_from(state, self._of[source].read)

    def _go_on_from(self, state: RequestState, slot: int) -> None:
        self._let_go(state)
        state.read = slot
        if slot != NULL_BLOCK:
            self.pool.hold([slot])

    def _let_go(self, state: RequestState) -> None:
        """Release the slot that the request reads, unless it owns it."""
        if state.read != NULL_BLOCK and state.read not in state.own:
            self.pool.release([state.read])
        state.read = NULL_BLOCK

    def release(self, request: Request) -> None:
        state, request.slot_updates = self._of.pop(request, None), ()
        if state is not None:
            self._let_go(state)
            if state.answer_mark != NULL_BLOCK:
                self.offered.append((state.answer_mark, state.answer_key))
            if state.fork != NULL_BLOCK:
                self.pool.release([state.fork])
            self.pool.release(state.own)
