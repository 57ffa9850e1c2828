"""Simulates prefill and decode on different replicas, and reports whether that is worthwhile.

First `num_prompts` replicas are simulated that compute only prompts. Then `num_answers` other replicas are simulated, where
each prompt arrives after the time of its hand-over and is found in the cache. The runs are separate because no prompt waits
for an answer. This holds for requests with arrival times, not for users who wait for answers, nor for the turns of sessions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from slipstream.config import num_ranks
from slipstream.config.handover import check_handover
from slipstream.errors import ConfigError
from slipstream.simulate.engines import PlannedEngine
from slipstream.simulate.simulator import SimulatedEngine, Simulation, simulate
from slipstream.simulate.traffic import Traffic

if TYPE_CHECKING:
    from slipstream.simulate.recommend import OfferedLoad

MEMORY_SHARE = 0.25
"""Assumed rate of a hand-over, as a fraction of the device's memory bandwidth, if the link between
hosts is unknown. Each byte is read and written at both ends."""


DIVISIONS = (2, 3, 4, 8)
"""Divisors of the number of replicas that are tried for prefill: a half, a third, …"""


def simulate_apart(
    engine: SimulatedEngine,
    traffic: Traffic,
    *,
    num_prompts: int,
    num_answers: int,
    transfer_s: Callable[[int], float],
    objectives: dict[str, float] | None = None,
) -> Simulation:
    """Simulates `num_prompts` replicas for prompts and `num_answers` for answers. Step figures in
    the result are those of the replicas for answers.

    `transfer_s` maps a prompt's tokens to the seconds of its hand-over.
    """
    if traffic.users is not None or any(r.after for r in traffic.requests):
        raise ConfigError(
            "prefill and decode apart are simulated for requests that wait for no other"
        )
    alone = tuple(r._replace(output_tokens=1) for r in traffic.requests)
    prompts = simulate(
        engine, replace(traffic, requests=alone), num_replicas=num_prompts, router="least-loaded"
    )
    arrivals = tuple(
        r if p.last_token is None else r._replace(arrival=p.last_token + transfer_s(r.input_tokens))
        for r, p in zip(traffic.requests, prompts.records, strict=True)
    )
    recent = replace(engine.cache, eviction="lru")  # blocks that were just received are not evicted
    run = simulate(
        replace(engine, cache=recent),
        replace(traffic, requests=arrivals),
        num_replicas=num_answers,
        router="least-loaded",
        objectives=objectives,
        with_prompts=True,
    )
    records = tuple(
        replace(a, sent=p.sent) if p.error is None else p
        for a, p in zip(run.records, prompts.records, strict=True)
    )
    return replace(
        run,
        records=records,
        num_replicas=num_prompts + num_answers,
        seconds=run.seconds + prompts.seconds,
    )


def handover_s(engine: PlannedEngine) -> Callable[[int], float]:
    """Seconds to hand over a prompt of this number of tokens, from the bytes of its blocks."""
    ledger, hardware = engine.ledger, engine.hardware
    rate = hardware.host_bytes_s or MEMORY_SHARE * hardware.read_bytes_s
    each = ledger.block_bytes * len(ledger.groups) / ledger.block_size / rate
    return lambda num_tokens: num_tokens * each


def note_apart(engine: PlannedEngine, load: OfferedLoad, replicas: int | None) -> str | None:
    """Report whether separate prefill and decode replicas serve the load with fewer than `replicas` combined ones.

    None for a load without a rate, for one replica, with speculative decoding or several ranks, which are not simulated
    here, and for engines that do not support hand-overs.
    """
    if load.rate is None or replicas in (None, 1) or engine.drafts is not None:
        return None
    asked = replace(engine.args, kv_handover_address="tcp://0.0.0.0:0")
    try:
        check_handover(asked, engine.description.spec)
    except ConfigError:
        return None
    if engine.num_gpus > 1 or num_ranks(asked) > 1:
        return None
    assert replicas is not None
    for total in range(max(2, replicas - 1), replicas + 1):
        for prompts in sorted({max(1, total // part) for part in DIVISIONS}):
            run = simulate_apart(
                engine.simulated,
                load.at_rate(total),
                num_prompts=prompts,
                num_answers=total - prompts,
                transfer_s=handover_s(engine),
                objectives=load.objectives.limits,
            )
            if load.objectives.met_by(run):
                answers = total - prompts
                how = f"prefill and decode apart ({prompts} for prompts, {answers} for answers)"
                if total < replicas:
                    return f"{how} meet the objectives with fewer replicas: that pays (pools with a role, in a fleet's file)"
                return f"{how} meet the objectives, with no fewer replicas: that does not pay"
    return (
        f"prefill and decode apart: no division of {replicas} replicas that was tried meets the objectives, so it does "
        "not pay"
    )
