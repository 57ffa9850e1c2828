"""Chooses the replica for a request. Pure policy: no I/O, and no clock but the argument `now`.

    decision = router.choose(chains, num_tokens, session=…, now=…)   # counted as waiting at decision.replica
    router.began(decision, now)                                      # its first token came
    router.ended(decision, now)                                      # it finished or failed; also without `began`

The policy `prefix` chooses the replica with the lowest cost in seconds:

    predicted TTFT + thrift · time to compute the new tokens + balance · (recent work − the fleet's mean)

The predicted TTFT is half a step, the wait for a free sequence slot, and the computing time of
prompt tokens there: of the queue, and of this request's uncached tokens. `thrift` weighs the cost
of computing for other requests: a request whose prefix is being computed rather waits for it than
computes it again. Each second of TTFT beyond `patience_s` counts `1 + IMPATIENCE` times, so that
only longer waits outweigh cache hits. Rates are the planner's at first
(`ReplicaState.prefill_tokens_per_s`, `step_s`), then learned from requests.

A replica reports numbered changes of its prefix cache (`apply`). After a gap it must report
everything again. A report arrives a step or more after a decision. Until then the router assumes
that the request's blocks will be there, so that simultaneous requests with a common prefix go to
one replica.

`least_loaded`, `power_of_two` and `round_robin` are for comparison."""

from __future__ import annotations

import dataclasses
import math
import random
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from slipstream.fleet.gateway.prefixes import PrefixStore, fill

Policy = Literal["prefix", "least_loaded", "power_of_two", "round_robin"]
POLICIES: tuple[Policy, ...] = ("prefix", "least_loaded", "power_of_two", "round_robin")

WORK_S = 30.0
"""Time constant with which recent work decays."""

IMPATIENCE = 30.0
"""Additional weight of a second of predicted TTFT beyond `patience_s`."""

_EXPECTED_S = 10.0  # how long the router expects a request's blocks before a report
_EXPECTED_TOKENS = 1024  # distance of a chain's keys under which an expectation is found
_MAX_SESSIONS = 100_000
_LEARN = 0.1  # weight of a new measurement
_SESSION_SLACK_S = 0.25  # a session returns to its replica unless that costs more than this


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaState:
    """A replica as the router sees it. Rates are per replica; `weight` is its capacity relative to
    the others."""

    id: str
    weight: float = 1.0
    block_size: int = 16
    max_num_seqs: int = 256
    max_in_flight: int = 4096  # requests; at this number it gets no more
    prefill_tokens_per_s: float = 10_000.0
    step_s: float = 0.02
    healthy: bool = True
    draining: bool = False
    # requests that have their first token: this router's own, and others' by the replica's report
    running: int = 0
    waiting: int = 0
    queued_tokens: int = 0  # prompt tokens queued before a new request
    service_s: float = 1.0  # mean time from a request's first token to its last


class Decision(msgspec.Struct, frozen=True, gc=False):
    """The replica chosen for a request, and the prediction."""

    replica: str
    num_cached_tokens: int
    num_new_tokens: int
    predicted_ttft_s: float
    number: int  # of the decision


class PromptCost(NamedTuple):
    """(seconds before a replica begins with a prompt (inf: it gets none), seconds to compute its uncached tokens)."""

    wait_s: float
    num_new: int
    computing_s: float


@dataclass(slots=True, eq=False)
class _ReplicaCounts:
    """Counts of one replica: this router's own requests, and those of other routers."""

    state: ReplicaState
    slot: int  # in the prefix store, and in the router's arrays
    own_running: int = 0
    own_waiting: int = 0
    own_queued: int = 0
    others_running: int = 0  # the replica's report minus our own
    others_waiting: int = 0
    others_queued: int = 0
    # of the last reported change; None: it must report everything
    sequence: int | None = None

    @property
    def running(self) -> int:
        return self.own_running + self.others_running

    @property
    def waiting(self) -> int:
        return self.own_waiting + self.others_waiting

    @property
    def queued(self) -> int:
        return self.own_queued + self.others_queued


class _RoutedRequest(msgspec.Struct, gc=False):
    replica: _ReplicaCounts
    num_new: int
    chosen: float
    queued_before: int
    began: float | None = None


class _Expected(msgspec.Struct, frozen=True, eq=False):
    """Expectation that a request's blocks will be cached at a replica."""

    replica: _ReplicaCounts
    chain: Sequence[bytes]
    until: float


class Router:
    """Router for the replicas of one model. Not thread-safe."""

    def __init__(
        self,
        policy: Policy = "prefix",
        *,
        balance: float = 0.1,
        thrift: float = 1.5,
        patience_s: float | None = None,
        learn_rates: bool = True,
        seed: int = 0,
    ) -> None:
        """Creates an empty router. Without `learn_rates` the rates of ReplicaStates stay as given."""
        self.policy, self.balance, self.thrift, self._learns = policy, balance, thrift, learn_rates
        self.patience_s = patience_s
        self.store = PrefixStore()
        self._replicas: dict[str, _ReplicaCounts] = {}
        self._by_slot: dict[int, _ReplicaCounts] = {}
        # Arrays by slot. A slot without a replica has _wait inf and 0 elsewhere. _wait: seconds of
        # TTFT before a new request's own prompt; inf: gets none
        self._wait = np.zeros(0)
        self._per_token = np.zeros(0)  # seconds
        self._per_block = np.zeros(0)  # tokens
        self._work = np.zeros(0)  # decayed work in seconds, divided by the weight
        self._work_at = 0.0
        self._with_states = 0  # mask of the slots of replicas with recurrent states
        self._under_way: dict[int, _RoutedRequest] = {}
        # by the chain's first block, its first new block, and every `_stride`th block after that:
        # finds chains that continue where reports end, and chains that diverge earlier
        self._expected: dict[bytes, _Expected] = {}
        self._expiring: deque[tuple[set[bytes], _Expected]] = deque()
        self._block_sizes: set[int] = set()
        self._sessions: OrderedDict[str, str] = OrderedDict()
        self._numbers = 0
        self._turn = 0
        self._random = random.Random(seed)

    # --- Replicas -----------------------------------------------------------------------------------------------------

    @property
    def replicas(self) -> tuple[str, ...]:
        return tuple(self._replicas)

    def state(self, replica: str) -> ReplicaState:
        """The replica's current state."""
        known = self._replicas[replica]
        return dataclasses.replace(
            known.state, running=known.running, waiting=known.waiting, queued_tokens=known.queued
        )

    def load(self, replicas: Iterable[str]) -> tuple[int, int]:
        """(running requests, waiting requests) of these replicas together."""
        known = [self._replicas[name] for name in replicas]
        return sum(r.running for r in known), sum(r.waiting for r in known)

    def add(self, state: ReplicaState) -> None:
        """Add a replica whose cache is empty, or will be reported. ValueError if it exists already."""
        if state.id in self._replicas:
            raise ValueError(f"replica {state.id!r} is there already")
        replica = _ReplicaCounts(state, 0)
        self._replicas[state.id] = replica
        self._block_sizes.add(state.block_size)
        replica.others_running, replica.others_waiting = state.running, state.waiting
        replica.others_queued = state.queued_tokens
        self._take_slot(replica, self._mean_work())

    def remove(self, replica: str) -> None:
        """Remove a replica; an unknown one is ignored. Its requests under way may still be ended."""
        gone = self._replicas.pop(replica, None)
        if gone is not None:
            self._leave_slot(gone)

    def update(
        self,
        replica: str,
        *,
        running: int | None = None,
        waiting: int | None = None,
        queued_tokens: int | None = None,
        healthy: bool | None = None,
        draining: bool | None = None,
        weight: float | None = None,
        prefill_tokens_per_s: float | None = None,
        step_s: float | None = None,
    ) -> None:
        """Update a replica's state. `running`, `waiting` and `queued_tokens` are the replica's own
        counts, with the requests of every router."""
        known = self._replicas[replica]
        given = {
            "healthy": healthy,
            "draining": draining,
            "weight": weight,
            "prefill_tokens_per_s": prefill_tokens_per_s,
            "step_s": step_s,
        }
        if changed := {name: value for name, value in given.items() if value is not None}:
            known.state = dataclasses.replace(known.state, **changed)  # type: ignore[arg-type]
        if running is not None:
            known.others_running = max(0, running - known.own_running)
        if waiting is not None:
            known.others_waiting = max(0, waiting - known.own_waiting)
        if queued_tokens is not None:
            known.others_queued = max(0, queued_tokens - known.own_queued)
        self._refresh(known)

    # --- What they hold -----------------------------------------------------------------------------------------------

    def reset(
        self, replica: str, sequence: int, stored: Iterable[bytes], *, has_states: bool = False
    ) -> None:
        """Replaces all keys that the replica holds; the report has this sequence number. With
        `has_states` the replica continues only from checkpoints of recurrent states, which are
        among its keys."""
        known = self._replicas[replica]
        if known.sequence is not None:
            self._take_slot(known, self._leave_slot(known))
        known.sequence = sequence
        self._with_states &= ~(1 << known.slot)
        self._with_states |= has_states << known.slot
        self.store.stored(known.slot, stored)

    def apply(
        self, replica: str, sequence: int, stored: Iterable[bytes], removed: Iterable[bytes]
    ) -> bool:
        """Apply a reported change. False if an earlier change is missing: the replica must then
        report everything (`reset`)."""
        known = self._replicas[replica]
        if known.sequence is None or sequence != known.sequence + 1:
            return False
        known.sequence = sequence
        self.store.removed(known.slot, removed)
        self.store.stored(known.slot, stored)
        return True

    # --- Requests -----------------------------------------------------------------------------------------------------

    def choose(
        self,
        chains: Sequence[Sequence[bytes]],
        num_tokens: int,
        *,
        now: float,
        session: str | None = None,
        exclude: Collection[str] = (),
    ) -> Decision | None:
        """Choose a replica; None if none can take the request. `chains` are the keys of the
        prompt's whole blocks, one chain for each root key among the replicas (one, if all have the
        same model and type)."""
        if not self._replicas:
            return None
        held = self._held(chains, num_tokens, now)
        self._age(now)
        computing = num_tokens - held
        computing *= self._per_token
        score = self._wait + computing
        for name in exclude:
            if (known := self._replicas.get(name)) is not None:
                score[known.slot] = np.inf
        chosen = self._pick(score, computing, session)
        if chosen is None:
            return None
        return self._count(
            chosen,
            chains,
            num_tokens,
            int(held[chosen.slot]),
            float(score[chosen.slot]),
            session,
            now,
        )

    def costs(
        self, chains: Sequence[Sequence[bytes]], num_tokens: int, *, now: float
    ) -> dict[str, PromptCost]:
        """Predicted cost of a prompt by replica."""
        new = num_tokens - self._held(chains, num_tokens, now)
        wait, each = self._wait, self._per_token
        return {
            name: PromptCost(
                float(wait[r.slot]), int(new[r.slot]), float(new[r.slot] * each[r.slot])
            )
            for name, r in self._replicas.items()
        }

    def began(self, decision: Decision, now: float) -> None:
        """Record the first token. Its time tells how fast the replica computes prompt tokens."""
        under_way = self._under_way.get(decision.number)
        if under_way is None or under_way.began is not None:
            return
        under_way.began = now
        replica = under_way.replica
        replica.own_waiting -= 1
        replica.own_running += 1
        replica.own_queued -= under_way.num_new
        tokens, seconds = under_way.queued_before + under_way.num_new, now - under_way.chosen
        if (
            self._learns
            and tokens >= 64
            and seconds > 0
            and replica.running <= replica.state.max_num_seqs
        ):
            old = replica.state.prefill_tokens_per_s
            rate = tokens / max(seconds - replica.state.step_s / 2, seconds / 4)
            rate = min(max(rate, old / 2), old * 2)  # limits the effect of one outlier
            replica.state = dataclasses.replace(
                replica.state, prefill_tokens_per_s=old + _LEARN * (rate - old)
            )
        self._refresh(replica)

    def ended(self, decision: Decision, now: float) -> None:
        """Record the end of a request, also of a failed or cancelled one. A second call is ignored."""
        under_way = self._under_way.pop(decision.number, None)
        if under_way is None:
            return
        replica = under_way.replica
        if under_way.began is None:
            replica.own_waiting -= 1
            replica.own_queued -= under_way.num_new
        else:
            replica.own_running -= 1
            if self._learns:
                old = replica.state.service_s
                service_s = old + _LEARN * (now - under_way.began - old)
                replica.state = dataclasses.replace(replica.state, service_s=service_s)
        self._refresh(replica)

    # --- Inside -------------------------------------------------------------------------------------------------------

    def _take_slot(self, replica: _ReplicaCounts, work: float) -> None:
        replica.slot = slot = self.store.new_slot()
        self._by_slot[slot] = replica
        while slot >= len(self._wait):
            self._wait = np.append(self._wait, np.inf)
            self._per_token, self._per_block = (
                np.append(self._per_token, 0.0),
                np.append(self._per_block, 0),
            )
            self._work = np.append(self._work, 0.0)
        self._per_block[slot], self._work[slot] = replica.state.block_size, work
        self._refresh(replica)

    def _leave_slot(self, replica: _ReplicaCounts) -> float:
        """Free the replica's slot. Returns its recent work."""
        slot = replica.slot
        work = float(self._work[slot])
        del self._by_slot[slot]
        self._with_states &= ~(1 << slot)
        self.store.free_slot(slot)
        self._wait[slot], self._per_token[slot], self._work[slot] = np.inf, 0.0, 0.0
        return work

    def _mean_work(self) -> float:
        return float(self._work.sum()) / max(1, len(self._by_slot))

    def _held(self, chains: Sequence[Sequence[bytes]], num_tokens: int, now: float) -> np.ndarray:
        """Number of prompt tokens that each replica has cached or soon will, as an array by slot.
        At most `num_tokens` − 2, because a hit leaves two tokens to compute (`longest_hit`)."""
        blocks = np.zeros(len(self._wait))
        while self._expiring and self._expiring[0][1].until <= now:
            keys, expected = self._expiring.popleft()
            for key in keys:
                if self._expected.get(key) is expected:
                    del self._expected[key]
        for chain in chains:
            deepest = 0
            for count, mask in self.store.match(chain):
                deepest = max(deepest, count)
                fill(blocks, mask & ~self._with_states, count)
                for end, own in self.store.checkpoints(chain, count, mask & self._with_states):
                    fill(blocks, own, end)
            each = _stride(self._block_size(chain, num_tokens))
            for place in self._expected_at(chain, deepest, each):
                found = self._expected.get(chain[place])
                if (
                    found is not None
                    and self._by_slot.get(slot := found.replica.slot) is found.replica
                ):
                    known = max(place, int(blocks[slot]))  # fewer common ones change nothing
                    blocks[slot] = max(blocks[slot], _common(chain, found.chain, known))
        blocks *= self._per_block
        return np.minimum(blocks, max(0, num_tokens - 2), out=blocks)

    def _block_size(self, chain: Sequence[bytes], num_tokens: int) -> int:
        """Block size of a prompt's chain, which contains all complete blocks."""
        sizes = sorted(self._block_sizes)
        return next((size for size in sizes if num_tokens // size == len(chain)), sizes[0])

    def _expected_at(self, chain: Sequence[bytes], deepest: int, each: int) -> set[int]:
        """Indices of the blocks under which a chain may be expected, if replicas report its first
        `deepest` blocks: the first block, the first unknown one, and the last expected one."""
        if deepest >= len(chain):
            return set()
        low, high = deepest // each, (len(chain) - 1) // each  # below `low` the reports suffice
        while low < high:
            middle = (low + high + 1) // 2
            if chain[middle * each] in self._expected:
                low = middle
            else:
                high = middle - 1
        return {0, deepest, low * each}

    def _pick(
        self, score: np.ndarray, computing: np.ndarray, session: str | None
    ) -> _ReplicaCounts | None:
        if self.policy == "prefix":
            costs = self.balance * self._work  # without the fleet's mean, which is the same for all
            costs += score
            computing *= self.thrift
            costs += computing
            if self.patience_s is not None:
                late = np.subtract(score, self.patience_s, out=computing)
                np.maximum(late, 0.0, out=late)
                late *= IMPATIENCE
                costs += late
            best = int(costs.argmin())
            if score[best] == np.inf:
                return None
            known = None if session is None else self._replicas.get(self._sessions.get(session, ""))
            if known is not None and costs[known.slot] <= costs[best] + _SESSION_SLACK_S:
                return known
            return self._by_slot[best]
        able = [r for r in self._replicas.values() if score[r.slot] != np.inf]
        if not able:
            return None
        if self.policy == "round_robin":
            self._turn += 1
            return able[self._turn % len(able)]
        if self.policy == "power_of_two" and len(able) > 2:
            able = self._random.sample(able, 2)
        return min(
            able, key=lambda r: ((r.running + r.waiting) / r.state.weight, self._work[r.slot])
        )

    def _count(
        self,
        replica: _ReplicaCounts,
        chains: Sequence[Sequence[bytes]],
        num_tokens: int,
        cached: int,
        ttft_s: float,
        session: str | None,
        now: float,
    ) -> Decision:
        num_new = num_tokens - cached
        self._numbers += 1
        self._under_way[self._numbers] = _RoutedRequest(replica, num_new, now, replica.queued)
        replica.own_waiting += 1
        replica.own_queued += num_new
        self._work[replica.slot] += (
            num_new / replica.state.prefill_tokens_per_s + replica.state.step_s
        ) / replica.state.weight
        self._refresh(replica)
        size = replica.state.block_size
        first, each = cached // size, _stride(size)
        for chain in chains:
            if first < len(chain) and self._block_size(chain, num_tokens) == size:
                expected = _Expected(replica, chain, now + _EXPECTED_S)
                keys = {chain[0], chain[first], *chain[first + each - first % each :: each]}
                self._expected.update(dict.fromkeys(keys, expected))
                self._expiring.append((keys, expected))
        if session is not None:
            self._sessions[session] = replica.state.id
            self._sessions.move_to_end(session)
            if len(self._sessions) > _MAX_SESSIONS:
                self._sessions.popitem(last=False)
        return Decision(replica.state.id, cached, num_new, ttft_s, self._numbers)

    def _age(self, now: float) -> None:
        if now > self._work_at:
            self._work *= math.exp((self._work_at - now) / WORK_S)
            self._work_at = now

    def _refresh(self, replica: _ReplicaCounts) -> None:
        """Recompute the replica's array entries after a change of its state."""
        state, slot = replica.state, replica.slot
        if self._by_slot.get(slot) is not replica:
            return  # it was removed
        in_flight = replica.running + replica.waiting
        self._per_token[slot] = 1 / state.prefill_tokens_per_s
        if not state.healthy or state.draining or in_flight >= state.max_in_flight:
            self._wait[slot] = np.inf
            return
        # requests that must end before this one can run
        behind = in_flight + 1 - state.max_num_seqs
        for_place = behind * state.service_s / state.max_num_seqs if behind > 0 else 0.0
        self._wait[slot] = (
            state.step_s / 2 + for_place + replica.queued / state.prefill_tokens_per_s
        )


def _stride(block_size: int) -> int:
    return max(1, _EXPECTED_TOKENS // block_size)


def _common(one: Sequence[bytes], other: Sequence[bytes], known: int) -> int:
    """Number of common leading keys, given that keys before `known` are equal. Keys are chained, so
    equal keys have equal predecessors."""
    low, high = known, min(len(one), len(other)) - 1
    if high < known or one[known] != other[known]:
        return 0
    while low < high:
        middle = (low + high + 1) // 2
        if one[middle] == other[middle]:
            low = middle
        else:
            high = middle - 1
    return low + 1
