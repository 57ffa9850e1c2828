"""Plans a model and a load on several kinds of devices; the result is data.

`prepare` checks the options; `PlanStudy.run` simulates and returns one JSON-like document.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from slipstream.bench.sessions import AgentLoad
from slipstream.config import EngineArgs
from slipstream.costs.devices import Hardware, find_device
from slipstream.costs.environment import versions
from slipstream.costs.metrics import parse_objectives
from slipstream.errors import ConfigError, OutOfMemoryError
from slipstream.hub import resolve_model
from slipstream.simulate.capacity import LatencyObjectives
from slipstream.simulate.drafts import AcceptanceRates, parse_acceptance
from slipstream.simulate.engines import this_hardware
from slipstream.simulate.recommend import (
    OfferedLoad,
    as_data,
    balancer_weights,
    check_load,
    plan_device,
)
from slipstream.simulate.routing import RouterName
from slipstream.simulate.traffic import SessionWorkload, Workload, parse_workload
from slipstream.spec.description import ModelDescription, read_spec


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """Options of `slipstream plan`. Options with a syntax of their own are stored as text."""

    workload: str = "sharegpt"
    rate: float | None = None
    concurrency: int | None = None
    slo: str = ""
    attainment: float = 0.95
    router: RouterName = "least-loaded"
    draft_acceptance: str | None = None
    gpu: str | None = None  # None: this machine's device
    max_gpus: int = 8
    price: str | None = None
    no_search: bool = False
    agents: AgentLoad | None = None  # sessions of `workload` "agents"

    def check(self, settings: EngineArgs) -> None:
        """Raise ConfigError for an option with an impossible value, or for two that conflict."""
        if self.rate is not None and self.concurrency is not None:
            raise ConfigError(
                "--rate and --concurrency are two ways to say the load; give one",
                field="concurrency",
            )
        for name in ("tensor_parallel_size", "expert_parallel_size"):
            if getattr(settings, name) > 1:
                raise ConfigError(
                    f"{name}: plan chooses it; leave it out, and bound the devices with --max-gpus",
                    field=name,
                )
        if self.max_gpus < 1:
            raise ConfigError("max_gpus must be above 0", field="max_gpus")
        if settings.context_parallel_size > self.max_gpus:
            raise ConfigError(
                f"context_parallel_size={settings.context_parallel_size} needs as many devices; raise --max-gpus",
                field="context_parallel_size",
            )
        if self.draft_acceptance is not None and not (
            settings.speculative_config or settings.speculative_model
        ):
            raise ConfigError(
                "draft_acceptance has an effect only with --speculative-config",
                field="draft_acceptance",
            )

    def load(self, seed: int, max_model_len: int | None) -> OfferedLoad:
        """Load to plan for. ConfigError if the options describe no possible load."""
        if self.agents is not None:
            workload: Workload = SessionWorkload.agents(self.agents.fitted(max_model_len), seed)
        else:
            workload = parse_workload(self.workload, seed=seed)
        as_recorded = self.rate is None and self.concurrency is None and workload.recorded
        limits = parse_objectives(self.slo)
        load = OfferedLoad(
            workload=workload,
            objectives=LatencyObjectives(limits=limits, attainment=self.attainment),
            rate=workload.traffic(None, len(workload.requests)).rate if as_recorded else self.rate,
            users=self.concurrency,
            seed=seed,
            router=self.router,
        )
        check_load(load)
        return load


def parse_prices(text: str | None, count: int) -> list[float | None]:
    """Parse prices: one price per hour for each of `count` devices."""
    if text is None:
        return [None] * count
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if len(found) == 1:
        found *= count
    if len(found) != count or any(not 0 <= price < float("inf") for price in found):
        what = f"price={text!r} is not a number of at least 0, or one for each of the {count} devices of --gpu"
        raise ConfigError(what, field="price")
    return [*found]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanStudy:
    """A checked plan that is ready to be simulated."""

    settings: EngineArgs
    options: PlanOptions
    description: ModelDescription
    load: OfferedLoad
    acceptance: AcceptanceRates | None
    others: list[Hardware]  # devices of --gpu; empty: this machine's
    prices: list[float | None]

    def run(
        self, *, measured: dict[str, Any] | None = None, on_phase: Callable[[str], None]
    ) -> dict[str, Any]:
        """Simulate, and return the plan as data. OutOfMemoryError if the model fits on no device.

        `measured` is the result of `optimize.step_table.measure`.
        """
        options, own = self.options, self.settings
        devices = self.others or [this_hardware(own.device, own.num_threads)]
        plans, refused, rows = [], [], []
        for hardware, price in zip(devices, self.prices, strict=True):
            try:
                plan = plan_device(
                    own,
                    self.description,
                    hardware,
                    self.load,
                    max_gpus=options.max_gpus,
                    search=not options.no_search,
                    acceptance=self.acceptance,
                    on_run=partial(_count, hardware.name, itertools.count(1), on_phase),
                )
            except OutOfMemoryError as error:
                if len(devices) == 1:
                    raise
                refused.append(
                    {"device": hardware.name, "title": hardware.title, "error": str(error)}
                )
                continue
            plans.append(plan)
            rows.append(as_data(plan, self.load, price))
        if not plans:
            raise OutOfMemoryError("; ".join(str(r["error"]) for r in refused), field="max_gpus")
        for row, weight in zip(rows, balancer_weights(plans), strict=True):
            row["balancer_weight"] = weight
        return {**self._head(), "devices": rows, "refused": refused, "measured": measured}

    def _head(self) -> dict[str, Any]:
        """First part of the document, which repeats the options."""
        load, spec = self.load, self.description.spec
        n_in, n_out = load.workload.mean_lengths
        return {
            "kind": "plan",
            "model": self.settings.model,
            "family": spec.family,
            "num_parameters": spec.num_parameters,
            "quantization": self.settings.quantization,
            "kv_cache_dtype": self.settings.kv_cache_dtype,
            "workload": {
                "name": load.workload.name,
                "mean_input_tokens": n_in,
                "mean_output_tokens": n_out,
                "num_sessions": len(load.workload.sessions)
                if isinstance(load.workload, SessionWorkload)
                else None,
                **({"settings": self.options.agents.describe()} if self.options.agents else {}),
            },
            "rate": load.rate,
            "concurrency": load.users,
            "objectives": load.objectives.limits,
            "attainment": load.objectives.attainment,
            "max_gpus": self.options.max_gpus,
            "versions": versions(),
        }


def _count(device: str, runs: itertools.count[int], on_phase: Callable[[str], None]) -> None:
    on_phase(f"{device}, simulation {next(runs)}")


def prepare(settings: EngineArgs, options: PlanOptions) -> PlanStudy:
    """Check the options. ConfigError names one that is not possible."""
    options.check(settings)
    given = options.draft_acceptance
    acceptance = None if given is None else parse_acceptance(given)
    others = [find_device(name) for name in options.gpu.split(",")] if options.gpu else []
    prices = parse_prices(options.price, len(others) or 1)
    description = read_spec(resolve_model(settings.model, download_dir=settings.download_dir))
    return PlanStudy(
        settings=settings,
        options=options,
        description=description,
        load=options.load(settings.seed, settings.max_model_len or description.spec.max_position),
        acceptance=acceptance,
        others=others,
        prices=prices,
    )
