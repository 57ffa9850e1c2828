"""Interface of the cache kinds other than blocks, as the cache manager calls them (`SlotKind`). A
kind is a subclass of `Slots`, and one of `KINDS`."""

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

    `send` puts the slots that the worker's row of a request lacks into `Request.slot_updates`: the
    one to read, then those to write. With `sessions`, checkpoints are evicted by value, each as a
    whole.
    """

    def __init__(
        self,
        number: int,
        num_slots: int,
        cache: CacheConfig,
        max_drafts: int,
        sessions: Sessions | None = None,
    ) -> None:
        """`number` is the kind's. A step verifies at most `max_drafts` drafts of a request."""
        self.number, self.block_size, self.max_drafts = number, cache.block_size, max_drafts
        self.pool = BlockPool(num_slots)
        self.order: ValueOrder | None = None
        if sessions is not None:
            self.order = ValueOrder(sessions, self.pool, cache.block_size, is_whole=True)
            self.pool.order = self.order
        self.offered: list[tuple[int, bytes]] = []
        """Checkpoints, with the keys of the blocks that they follow, that the tiers below the device may have."""

    def send(self, request: Request, slots: tuple[int, ...]) -> None:
        """Let the worker's row name `slots` from the next step on."""
        others = tuple(update for update in request.slot_updates if update.group != -self.number)
        request.slot_updates = (*others, TableUpdate(-self.number, 0, slots))

    def has(self, key: bytes) -> bool:
        """True if a checkpoint follows the block with this key. A prefix hit ends where each kind has one."""
        return self.pool.lookup(key) is not None

    @abstractmethod
    def has_room(self, request: Request) -> bool:
        """True if there are slots for a new request, and one for the checkpoint that it begins
        with."""

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
        """True if there is a slot for what the request's next step writes."""

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
        """True if the state before the prompt's last token is kept, so that others may begin with
        it."""

    @abstractmethod
    def share(self, parent: Request, children: Sequence[Request]) -> None:
        """Let `children` begin with that state."""

    @abstractmethod
    def take_over(self, request: Request, source: Request) -> None:
        """Let a request go on from where another one is."""

    @abstractmethod
    def release(self, request: Request) -> None:
        """Take back the request's slots. The checkpoints that it made stay cached."""
