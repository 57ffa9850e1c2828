"""The requests of a simulated fleet: many copies of a workload at once, with the keys of their
prompts' blocks.

A trace has few users, a fleet many: `copies` of the trace run at the same time, each with another
starting point, wrapping around at the end. Copies have different prefixes, except those with which
a fraction `COMMON` of the trace's requests begin, such as a service's instructions. Workloads
without recorded arrivals are drawn at random and arrive at random.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from slipstream.errors import ConfigError
from slipstream.simulate.traffic import PREFIX_TOKENS, SessionWorkload, Workload

COMMON = 0.05
"""Fraction of a trace's requests that must share a prefix for it to be the same in all copies of
the trace."""

KEY_BYTES = 8
"""Bytes of a block's key that the router's table compares."""

_MASK = 2**64 - 1


def _mixed(value: int) -> int:
    """64-bit hash (SplitMix64: Steele, Lea and Flood 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetTraffic:
    """Requests in order of arrival. Request i is row `rows[i]` of the workload, in copy
    `copies[i]`."""

    times: npt.NDArray[np.float64]
    rows: npt.NDArray[np.int64]
    copies: npt.NDArray[np.int64]
    input_tokens: Sequence[int]  # by row
    output_tokens: Sequence[int]
    num_copies: int
    duration_s: float
    num_blocks: int  # number of distinct complete blocks of a copy
    blocks: Sequence[npt.NDArray[np.int64]]  # by row: numbers of the prompt's complete blocks
    _chains: Sequence[npt.NDArray[np.uint64]]  # by row: keys of the prompt's complete blocks
    common: Sequence[int]  # by row: how many of these are shared by all copies
    _salts: npt.NDArray[np.uint64]  # by copy

    def __len__(self) -> int:
        return len(self.times)

    def keys(self, index: int) -> list[bytes]:
        """Keys of the whole blocks of `PREFIX_TOKENS` tokens of a request's prompt."""
        row = int(self.rows[index])
        chain, common = self._chains[row], self.common[row]
        if common < len(chain):
            chain = chain.copy()
            chain[common:] ^= self._salts[self.copies[index]]
        packed = chain.tobytes()
        return [packed[i : i + KEY_BYTES] for i in range(0, len(packed), KEY_BYTES)]


class EndlessCache:
    """One unlimited cache for all replicas: an upper bound of hits under any placement."""

    def __init__(self, traffic: FleetTraffic) -> None:
        self._traffic = traffic
        self._seen = np.zeros((traffic.num_copies, traffic.num_blocks), np.bool_)

    def take(self, index: int) -> int:
        """Number of a request's prompt tokens that earlier requests had. All of the prompt is then cached."""
        traffic = self._traffic
        row = int(traffic.rows[index])
        blocks, common = traffic.blocks[row], traffic.common[row]
        own, shared = self._seen[traffic.copies[index]], self._seen[0]
        # At least two tokens are left to compute, as by the engine's `longest_hit`.
        most = max(0, traffic.input_tokens[row] - 2) // PREFIX_TOKENS
        known = np.concatenate((shared[blocks[:common]], own[blocks[common:]]))[:most]
        count = len(known) if known.all() else int(known.argmin())
        shared[blocks[:common]] = True
        own[blocks[common:]] = True
        return count * PREFIX_TOKENS


def fleet_traffic(
    workload: Workload,
    rates: Sequence[float],
    num_requests: int,
    *,
    copies: int | None = None,
    seed: int = 0,
) -> FleetTraffic:
    """Make `num_requests` requests. Each of the `rates` (requests/s) applies for an equal part of the time.
    `copies` of the trace run at the same time; None: as many as use each row of a trace once."""
    if isinstance(workload, SessionWorkload):
        raise ConfigError(
            f"{workload.name} has sessions, which a fleet's simulation does not cover; give a trace without session_id",
            field="workload",
        )
    rng = np.random.default_rng(seed)
    requests = workload.requests
    mean = sum(rates) / len(rates)
    duration_s = num_requests / mean
    if not workload.recorded:
        if copies is not None:
            raise ConfigError(
                f"copies are of a trace, and {workload.name} is none; leave it out", field="copies"
            )
        spread = np.sort(rng.random(num_requests)) * duration_s
        rows = rng.integers(len(requests), size=num_requests)
        of_copy = np.zeros(num_requests, np.int64)
        num_copies = 1
    else:
        num_copies = copies or max(1, -(-num_requests // len(requests)))
        last = requests[-1].arrival
        if last <= 0:
            raise ConfigError(
                f"all requests of {workload.name} arrive at once, so they can't be scaled to a rate",
                field="workload",
            )
        lap_s = len(requests) * num_copies / mean  # duration of the trace at a copy's rate
        if lap_s < duration_s * (1 - 1e-9):
            raise ConfigError(
                f"{num_copies} copies of {len(requests)} requests are fewer than {num_requests}; give more copies",
                field="copies",
            )
        scaled = np.array([r.arrival for r in requests]) * (lap_s * (1 - 1 / len(requests)) / last)
        begins = rng.random(num_copies) * lap_s
        at = (scaled[None, :] - begins[:, None]) % lap_s
        order = np.argsort(at, axis=None, kind="stable")[:num_requests]
        of_copy, rows = np.divmod(order, len(requests))
        spread = at.reshape(-1)[order]
    chains, common = _chains(workload)
    names, numbers = np.unique(np.concatenate(chains), return_inverse=True)
    blocks = np.split(numbers, np.cumsum([len(chain) for chain in chains])[:-1])
    return FleetTraffic(
        times=_warped(spread, rates, duration_s),
        rows=rows,
        copies=of_copy,
        input_tokens=[r.input_tokens for r in requests],
        output_tokens=[max(1, r.output_tokens) for r in requests],
        num_copies=num_copies,
        duration_s=duration_s,
        num_blocks=len(names),
        blocks=blocks,
        _chains=chains,
        common=common,
        _salts=np.array([_mixed(seed * 2**32 + i) for i in range(num_copies)], np.uint64),
    )


def _warped(
    times: npt.NDArray[np.float64], rates: Sequence[float], duration_s: float
) -> npt.NDArray[np.float64]:
    """Warp evenly spaced times so that each of the `rates` applies for an equal part of the time."""
    ends = np.linspace(0.0, duration_s, len(rates) + 1)
    share = np.concatenate(([0.0], np.cumsum(rates))) / sum(rates)
    return np.interp(times, share * duration_s, ends)


def _chains(workload: Workload) -> tuple[list[npt.NDArray[np.uint64]], list[int]]:
    """(chained keys of each row's complete blocks, how many of them are common)."""
    chains: list[list[int]] = []
    counts: Counter[int] = Counter()
    for request in workload.requests:
        key, chain = 0, []
        for number in request.prefix[: request.input_tokens // PREFIX_TOKENS]:
            key = _mixed(key ^ _mixed(number & _MASK))
            chain.append(key)
        counts.update(chain)
        chains.append(chain)
    least = max(2.0, COMMON * len(chains))
    common = [sum(counts[key] >= least for key in chain) for chain in chains]
    return [np.array(chain, np.uint64) for chain in chains], common
