"""Interface between the cache manager and cache kinds other than blocks (`SlotKind`). A kind is a
subclass of `Slots`, listed in `KINDS`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from slipstream.config import CacheConfig
from slipstream.core.cache.block_pool import BlockPool
from slipstream.core.cache.cache_value import ValueOrder
from slipstream.core.cache.sessions import Sessions
from slipstream.core.request import Request
from slipstream.messages.steps import StateMark, TableUpdate


class Slots(ABC):
    """The slots of one kind on one rank. Slot 0 is the null slot.

    `send` stores slots that the worker doesn't know yet in `Request.slot_updates`: the one to read,
    then those to write. With `sessions`, checkpoints are evicted by value, each as a whole.
    """

    def __init__(
        self,
        number: int,
        num_slots: int,
        cache: CacheConfig,
        max_drafts: int,
        sessions: Sessions | None = None,
    ) -> None:
        """`number`: the kind's. `max_drafts`: maximum drafts of a request that a step verifies."""
        self.number, self.block_size, self.max_drafts = number, cache.block_size, max_drafts
        self.pool = BlockPool(num_slots)
        self.order: ValueOrder | None = None
        if sessions is not None:
            self.order = ValueOrder(sessions, self.pool, cache.block_size, is_whole=True)
            self.pool.order = self.order
        self.offered: list[tuple[int, bytes]] = []
        """(checkpoint, key of the block that it follows) of checkpoints that may be stored in lower tiers."""

    def send(self, request: Request, slots: tuple[int, ...]) -> None:
        """Send the request's `slots` to the worker, for the next step on."""
        others = tuple(update for update in request.slot_updates if update.group != -self.number)
        request.slot_updates = (*others, TableUpdate(-self.number, 0, slots))

    def has(self, key: bytes) -> bool:
        """Whether a checkpoint follows the block with this key. A prefix hit must end where every kind has one."""
        return self.pool.lookup(key) is not None

    @abstractmethod
    def has_room(self, request: Request) -> bool:
        """Whether there are slots for a new request, and one for the checkpoint from which it
        continues."""

    @abstractmethod
    def start(self, request: Request, computed: int) -> None:
        """Give a request its slots, and begin it at the checkpoint after `computed` tokens, which
        `has` found."""

    @abstractmethod
    def place(self, request: Request, computed: int, end: int, num_drafts: int) -> bool:
        """Choose the slots that a step reads and writes.

        It computes tokens [computed, end), the last `num_drafts` of them drafts. True if the next
        step may use the same slots, so that the request may decode under a lease.
        """

    @abstractmethod
    def may_write(self, request: Request) -> bool:
        """Whether there is a slot for the state that the request's next step writes."""

    @abstractmethod
    def next_mark(self, request: Request) -> int:
        """The token position at which a lease must end, because a checkpoint may be kept there."""

    @abstractmethod
    def verified(self, request: Request, num_right: int) -> None:
        """Continue after the first `num_right` drafts, which the model confirmed."""

    @abstractmethod
    def planned(self) -> tuple[StateMark, ...]:
        """The checkpoints that the newly planned step makes between its tokens. They can be found
        from now on, and slots that the step only reads may be released."""

    @abstractmethod
    def may_share(self, parent: Request) -> bool:
        """Whether the state before the prompt's last token is stored, so that other requests can
        continue from it."""

    @abstractmethod
    def share(self, parent: Request, children: Sequence[Request]) -> None:
        """Let `children` continue from that state."""

    @abstractmethod
    def take_over(self, request: Request, source: Request) -> None:
        """Let a request continue from the state of another."""

    @abstractmethod
    def release(self, request: Request) -> None:
        """Release the request's slots. The checkpoints that it made stay cached."""
