"""Queue of waiting requests with fair sharing between owners.

The next request is chosen in this order:

1. The lowest `priority` number, whoever the owner is.
2. The owner with the fewest served tokens divided by its weight. Answer tokens and computed prompt
   tokens count as served. Tokens found in the prefix cache do not count.
3. The earliest arrival among the owner's requests.

This is the virtual token counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024). An owner
who returns after a pause starts at the lowest counter of the active owners, so nobody saves up turns. While two owners
both have requests waiting, their weighted served tokens differ by at most twice what can be in flight at once.

A heap has an entry for each owner with the rank of its first request. Ranks only grow, except by a
push, which adds a new entry. So an entry is corrected when it reaches the top, and a step's time
does not depend on the number of waiting owners.

The queue is in the engine, not in the front ends, because requests of all front ends meet only here.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import count
from typing import TypeAlias

from slipstream.core.request import Request, Status
from slipstream.params.options import Share

_MAX_IDLE = 1024
"""Number of accounts from which accounts without requests are removed."""

_NOBODY = Share("")
_Heap: TypeAlias = list[tuple[tuple[int, float, int], Request]]
_Rank: TypeAlias = tuple[int, float, tuple[int, float, int]]


class Account:
    """Served tokens and open requests of one owner."""

    __slots__ = ("entry", "num_requests", "served", "waiting", "weight")

    def __init__(self, weight: float) -> None:
        self.weight, self.served, self.num_requests = weight, 0.0, 0
        self.waiting: _Heap = []  # may contain ended requests; `rank` drops them
        self.entry: tuple[_Rank, int, Account] | None = None  # its valid entry in the queue's heap

    def charge(self, num_tokens: int) -> None:
        self.served += num_tokens / self.weight

    def rank(self) -> _Rank | None:
        """Rank of the first waiting request. None if there is none."""
        heap = self.waiting
        while heap and heap[0][1].status is not Status.WAITING:
            heapq.heappop(heap)
        return (heap[0][0][0], self.served, heap[0][0]) if heap else None


class WaitingQueue:
    def __init__(self) -> None:
        self._accounts: dict[str, Account] = {}
        # accounts with waiting requests, and possibly some without, which `first` drops
        self._asking: dict[Account, None] = {}
        # heap of their entries, including outdated ones
        self._ranked: list[tuple[_Rank, int, Account]] = []
        self._number = count()
        self.num_pushed = 0  # number of requests ever queued

    def enter(self, request: Request) -> None:
        """Attach a new request to its owner's account."""
        share = request.spec.share or _NOBODY
        account = self._accounts.get(share.owner)
        if account is None:
            account = self._accounts[share.owner] = Account(share.weight)
        account.weight = share.weight  # the weight may have changed
        if not account.num_requests and len(self._accounts) > 1:
            here = [other.served for other in self._accounts.values() if other.num_requests]
            if here:
                account.served = max(account.served, min(here))
            else:  # no owner is active, so all counters restart at 0
                for other in self._accounts.values():
                    other.served = 0.0
            if len(self._accounts) > _MAX_IDLE:
                self._forget_idle(account)
        account.num_requests += 1
        request.account = account

    def leave(self, request: Request) -> None:
        """Detach a request that has ended."""
        assert request.account is not None
        request.account.num_requests -= 1

    def push(self, request: Request) -> None:
        assert request.account is not None
        account = request.account
        account.rank()
        heapq.heappush(account.waiting, (request.order, request))
        self._asking[account] = None
        self.num_pushed += 1
        if account.waiting[0][1] is request or account.entry is None:
            self._enter_rank(account)
            if len(self._ranked) > 64 + 2 * len(self._asking):
                self._ranked[:] = [entry for entry in self._ranked if entry[2].entry is entry]
                heapq.heapify(self._ranked)

    def _enter_rank(self, account: Account) -> None:
        rank = account.rank()
        if rank is None:
            account.entry = None
            del self._asking[account]
        else:
            account.entry = rank, next(self._number), account
            heapq.heappush(self._ranked, account.entry)

    def _first(self) -> Account | None:
        """The account whose turn it is; its entry is the top of the heap."""
        while self._ranked:
            entry = self._ranked[0]
            account = entry[2]
            if account.entry is entry and account.rank() == entry[0]:
                return account
            heapq.heappop(self._ranked)
            if account.entry is entry:
                self._enter_rank(account)
        return None

    def first(self) -> Request | None:
        """Return the next request without removing it."""
        account = self._first()
        return None if account is None else account.waiting[0][1]

    def heads(self, most: int) -> list[Request]:
        """The first requests of at most `most` owners, in the order of their turns."""
        found: list[Account] = []
        while len(found) < most and (account := self._first()) is not None:
            heapq.heappop(self._ranked)
            found.append(account)
        for account in found:
            assert account.entry is not None
            heapq.heappush(self._ranked, account.entry)
        return [account.waiting[0][1] for account in found]

    def beside(self, request: Request, most: int) -> list[Request]:
        """Waiting requests with the owner and priority of `request`, among the owner's first `most`."""
        assert request.account is not None
        return [
            other
            for order, other in request.account.waiting[:most]
            if other.status is Status.WAITING and order[0] == request.order[0]
        ]

    def pop(self, request: Request) -> Request:
        """Remove a waiting request, and return it."""
        assert request.account is not None
        heap = request.account.waiting
        if heap[0][1] is request:
            return heapq.heappop(heap)[1]
        heap.remove((request.order, request))
        heapq.heapify(heap)
        return request

    def oldest_arrival(self) -> float | None:
        """Arrival time of the next request, for policies that wait for a batch."""
        request = self.first()
        return None if request is None else request.spec.arrival

    def __iter__(self) -> Iterator[Request]:
        for account in self._asking:
            yield from (one for _, one in account.waiting if one.status is Status.WAITING)

    def _forget_idle(self, new: Account) -> None:
        here = [account.served for account in self._accounts.values() if account.num_requests]
        lowest = min(here, default=0.0)
        idle = [
            name
            for name, a in self._accounts.items()
            if not a.num_requests and a is not new and a.served <= lowest
        ]
        for name in idle:
            del self._accounts[name]
