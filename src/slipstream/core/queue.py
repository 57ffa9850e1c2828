"""The queue of waiting requests, and which of them is next.

1. The request with the lowest `priority` number is next, whoever its owner is.
2. Within a priority it is the turn of the owner with the fewest served tokens divided by its weight. The tokens of an answer
   count as served, and those of a prompt that were computed; tokens found in the prefix cache do not.
3. An owner's own requests go in order of arrival.

This is the virtual token counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024). An owner who comes
back after a pause is set to the lowest counter of those who are there, so that nobody saves up turns. While two owners both
have requests waiting, their served tokens by weight differ by a bounded number: twice what can be in flight at once.

It is here, not in the front ends, since this is the one place where the requests of all of them wait.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import TypeAlias

from slipstream.core.request import Request, Status
from slipstream.types import Share

_MOST_IDLE = 1024
"""So many owners without requests are remembered before the list is cleaned."""

_NOBODY = Share("")
_Heap: TypeAlias = list[tuple[tuple[int, float, int], Request]]


class Account:
    """What an owner was served, and how many requests it has."""

    __slots__ = ("num_requests", "served", "waiting", "weight")

    def __init__(self, weight: float) -> None:
        self.weight, self.served, self.num_requests = weight, 0.0, 0
        self.waiting: _Heap = []  # those that have ended are dropped when they come first

    def charge(self, num_tokens: int) -> None:
        self.served += num_tokens / self.weight


class WaitingQueue:
    def __init__(self) -> None:
        self._accounts: dict[str, Account] = {}
        self._asking: dict[
            Account, None
        ] = {}  # those with requests that wait, and maybe some whose last has gone since
        self._next: Account | None = None  # of the request that `first` found

    def enter(self, request: Request) -> None:
        """A new request. It has its owner's account from now on."""
        share = request.spec.share or _NOBODY
        account = self._accounts.get(share.owner)
        if account is None:
            account = self._accounts[share.owner] = Account(share.weight)
        account.weight = share.weight  # it may have been changed
        if not account.num_requests and len(self._accounts) > 1:
            here = [other.served for other in self._accounts.values() if other.num_requests]
            if here:
                account.served = max(account.served, min(here))
            else:  # no owner waits, so none was left behind
                for other in self._accounts.values():
                    other.served = 0.0
            if len(self._accounts) > _MOST_IDLE:
                self._forget_idle(account)
        account.num_requests += 1
        request.account = account

    def leave(self, request: Request) -> None:
        """It has ended."""
        assert request.account is not None
        request.account.num_requests -= 1

    def push(self, request: Request) -> None:
        assert request.account is not None
        heapq.heappush(request.account.waiting, (request.order, request))
        self._asking[request.account] = None

    def first(self) -> Request | None:
        """The next request."""
        found, best = None, None
        for account in list(self._asking):
            heap = account.waiting
            while heap and heap[0][1].status is not Status.WAITING:
                heapq.heappop(heap)
            if not heap:
                del self._asking[account]
                continue
            order = heap[0][0]
            rank = (order[0], account.served, order)
            if best is None or rank < best:
                found, best, self._next = heap[0][1], rank, account
        return found

    def pop(self) -> Request:
        """Take out the request that `first` has just found."""
        assert self._next is not None
        return heapq.heappop(self._next.waiting)[1]

    def oldest_arrival(self) -> float | None:
        """Of the first in line, for policies that wait for a batch."""
        request = self.first()
        return None if request is None else request.spec.arrival

    def __iter__(self) -> Iterator[Request]:
        for account in self._asking:
            yield from (request for _, request in account.waiting)

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
