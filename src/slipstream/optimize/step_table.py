"""Measures this machine's step times for a model, and its hardware limits, and stores them for later plans."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from slipstream.bench.adapters.slipstream import AsyncSlipstream
from slipstream.bench.host_costs import ANSWER, PROMPT, USERS, measure_host
from slipstream.bench.power import EnergyMeter
from slipstream.config import EngineArgs
from slipstream.costs.environment import environment
from slipstream.costs.estimate import bytes_by_part, this_device
from slipstream.costs.step_cost import HostCost, StepTable, fit_steps
from slipstream.costs.tables import identity, keep_table, write_ceilings
from slipstream.errors import ConfigError
from slipstream.simulate.engines import run_ahead
from slipstream.spec.description import ModelDescription
from slipstream.worker.local_executor import LocalExecutor
from slipstream.worker.start.ceilings import device_ceilings, disk_rate
from slipstream.worker.start.step_costs import ROUNDS, grid, measure_steps

MEASURED_CACHE_BYTES = 2**30
IDLE_S = 1.0
"""Seconds in which the idle power is measured, if the device reports it."""

BUSY_S = 3.0
"""Seconds in which the power under load is measured."""

LONGEST_MEASURED = 4096
"""Maximum context, in tokens, whose steps are measured. Beyond it attention is extrapolated."""

OnPhase = Callable[[str], None]
OnStep = Callable[[int, int], None]


def _ignore(*_: object) -> None:
    """Ignore progress reports."""


def measure(
    settings: EngineArgs,
    description: ModelDescription,
    *,
    on_phase: OnPhase = _ignore,
    on_step: OnStep = _ignore,
) -> dict[str, Any]:
    """Measure this machine's steps of the model and its limits, and store them for later plans."""
    table, ceilings = measure_table(settings, description, on_phase=on_phase, on_step=on_step)
    if (disk := disk_rate(description.path)) is not None:
        ceilings["disk"] = disk
    of = table.identity
    write_ceilings(of["device"], of["num_threads"] or 0, ceilings)
    return {
        "path": keep_table(table).name,
        "num_steps": len(table.points),
        "fit_error": table.error,
        "host": dataclasses.asdict(table.host),
        "ceilings": ceilings,
    }


def measure_table(
    settings: EngineArgs,
    description: ModelDescription,
    *,
    longest: int = LONGEST_MEASURED,
    rounds: int | None = None,
    on_phase: OnPhase = _ignore,
    on_step: OnStep = _ignore,
) -> tuple[StepTable, dict[str, float]]:
    """Measure steps with contexts up to `longest` tokens, the additional times of host and front
    end, and the device's limits."""
    start = dataclasses.replace(settings, skip_tokenizer_init=True, enable_prefix_caching=False)
    if settings.kv_cache_bytes is None:
        device = this_device(settings.device)
        share = device.memory_bytes // 4 if device.is_cuda else MEASURED_CACHE_BYTES
        start = dataclasses.replace(start, kv_cache_bytes=share)
    executor = LocalExecutor.build(start, progress=on_phase)
    on_phase("graphs")
    while executor.capture_next():
        pass
    config, spec, scheduling = executor.config, description.spec, executor.config.scheduling
    info, context = config.device.info, config.model.max_model_len
    if context < PROMPT + ANSWER:
        raise ConfigError(
            f"--measure needs a max_model_len of at least {PROMPT + ANSWER}", field="max_model_len"
        )
    limits = scheduling.max_num_seqs, scheduling.max_num_batched_tokens, context
    steps = grid(*limits, executor.ledger.num_kv_tokens, longest)
    meter = EnergyMeter(devices=[info.device])
    power: dict[str, float | None] = {}
    if meter.sources:
        power |= _power(meter, "idle_", lambda: time.sleep(IDLE_S))
    on_phase("steps")
    points = measure_steps(executor, steps, rounds=rounds or ROUNDS, progress=on_step)
    if meter.sources:  # under load: the largest batch without a pause
        full = max(steps, key=lambda step: (len(step.decodes), not step.prompts, sum(step.decodes)))
        busy = partial(measure_steps, executor, [full], rounds=1, least_s=BUSY_S)
        power |= _power(meter, "", busy)
    ceilings = device_ceilings(executor.runner)
    ceilings |= {name: value for name, value in power.items() if value is not None}
    of = identity(config, spec, sum(bytes_by_part(config, description).values()))
    made_by = {name: value for name, value in environment().items() if name != "command"}
    table = fit_steps(points, identity=of, made_by=made_by)
    platform = executor.runner.platform
    del executor  # the next engine needs its memory
    gc.collect()
    platform.release_unused()

    async def host() -> HostCost:
        async with await AsyncSlipstream.start(start) as engine:
            ahead = run_ahead(is_gpu=info.is_cuda, num_threads=config.device.num_threads)
            users = [n for n in USERS if n <= scheduling.max_num_seqs]
            return await measure_host(
                engine, table, vocab_size=spec.vocab_size, run_ahead=ahead, users=users
            )

    on_phase("the host")
    return table.with_host(asyncio.run(host())), ceilings


def _power(meter: EnergyMeter, state: str, work: Callable[[], object]) -> dict[str, float | None]:
    """Mean power in watts of the device and the CPU while `work` runs; empty if they are not reported."""
    before, begin = meter.read(), time.monotonic()
    work()
    energy = meter.energy(before, meter.read(), time.monotonic() - begin, 0)
    if energy is None:
        return {}
    return {f"{state}watts": energy.watts, f"cpu_{state}watts": energy.cpu_watts}
