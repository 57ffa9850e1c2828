"""Prepares the simulation of a fleet file: its pool's engine on a device, the requests, and the
scaler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from slipstream.costs.devices import find_device
from slipstream.engine.folder import settled
from slipstream.errors import ConfigError
from slipstream.fleet.config import Autoscale, Fleet, PoolSpec, pools
from slipstream.fleet.scaling.scaler import FIRST_COLD_START_S, autoscaled, make
from slipstream.fleet.simulation.report import FleetStudy
from slipstream.fleet.simulation.run import FleetSimulation, ScalerRun
from slipstream.fleet.simulation.traffic import fleet_traffic
from slipstream.hub import resolve_model
from slipstream.simulate.engines import plan_engine, this_hardware
from slipstream.simulate.simulator import SimulatedEngine
from slipstream.simulate.traffic import parse_workload
from slipstream.spec.description import read_spec


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetLoad:
    """Load of a simulated fleet (options of `slipstream fleet simulate`).

    Each of `rates` (requests/s) holds for an equal part of the time. `replicas`: initial number;
    None: the file's. `gpu` None: the file's device, or this machine's.
    """

    rates: tuple[float, ...]
    num_requests: int = 100_000
    workload: str = "sharegpt"
    copies: int | None = None
    model: str | None = None
    gpu: str | None = None
    replicas: int | None = None
    gateways: int = 1
    cold_start_s: float | None = None
    seed: int = 0

    def check(self) -> None:
        """Raise ConfigError for an invalid number."""
        least = {
            "requests": self.num_requests,
            "copies": self.copies,
            "replicas": self.replicas,
            "gateways": self.gateways,
        }
        for name, value in least.items():
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}", field=name)
        if not self.rates or not all(0 < rate < float("inf") for rate in self.rates):
            raise ConfigError("each rate must be a number above 0", field="rate")
        if self.cold_start_s is not None and not 0 < self.cold_start_s < float("inf"):
            raise ConfigError("cold_start must be a number above 0", field="cold_start")


def simulate_fleet(
    fleet: Fleet, load: FleetLoad, *, on_phase: Callable[[str], None] = lambda phase: None
) -> FleetStudy:
    """Simulate one model of a checked fleet file. ConfigError for settings that can't be simulated."""
    load.check()
    spec = _pool_of(fleet, load.model)
    on_phase("capacity")
    settings = fleet.models[spec.model].autoscale
    gpu = load.gpu or (settings.device if settings is not None else None)
    engine = _engine(spec, gpu)
    scaling = _scaling(fleet, spec, gpu, load.cold_start_s)
    if scaling is None and load.cold_start_s is not None:
        raise ConfigError(
            f"cold_start has an effect only with autoscale, which {spec.model} does not have; leave it out",
            field="cold_start",
        )
    on_phase("requests")
    workload = parse_workload(load.workload, seed=load.seed)
    traffic = fleet_traffic(
        workload, load.rates, load.num_requests, copies=load.copies, seed=load.seed
    )
    number = load.replicas or max(1, spec.least)
    simulation = FleetSimulation(
        engine,
        traffic,
        spec,
        fleet.router,
        num_replicas=number,
        num_gateways=load.gateways,
        objectives=fleet.objectives,
        scaling=scaling,
        seed=load.seed,
    )
    on_phase(f"{len(traffic)} requests")
    return FleetStudy(
        model=spec.model,
        pool=spec.key,
        device=gpu or "this machine",
        workload=workload.name,
        rates=load.rates,
        replicas=number,
        seed=load.seed,
        figures=simulation.run(),
    )


def _pool_of(fleet: Fleet, model: str | None) -> PoolSpec:
    if model is None and len(fleet.models) > 1:
        raise ConfigError(
            f"the file has several models; choose one with --model: {', '.join(fleet.models)}",
            field="model",
        )
    name = model or next(iter(fleet.models))
    if name not in fleet.models:
        raise ConfigError(
            f"the file has no model {name!r}; it has {', '.join(fleet.models)}", field="model"
        )
    own = [spec for spec in pools(fleet) if spec.model == name]
    if len(own) > 1:
        field = f"models.{name}"
        raise ConfigError(
            f"{field}: {len(own)} pools or versions can't be simulated together; leave one in the file",
            field=field,
        )
    return own[0]


def _engine(spec: PoolSpec, gpu: str | None) -> SimulatedEngine:
    args = settled(spec.args)
    description = read_spec(resolve_model(args.model, download_dir=args.download_dir))
    hardware = this_hardware(args.device, args.num_threads) if gpu is None else find_device(gpu)
    num_gpus = args.tensor_parallel_size
    engine = plan_engine(args, description, hardware, num_gpus=num_gpus).simulated
    if engine.scheduling.target_itl_ms is not None:
        raise ConfigError(
            "target_itl_ms is not simulated in a fleet; leave it out", field="target_itl_ms"
        )
    return engine


def _scaling(
    fleet: Fleet, spec: PoolSpec, gpu: str | None, cold_start_s: float | None
) -> ScalerRun | None:
    found = autoscaled(fleet).get(spec.key)
    if found is None:
        return None
    _, settings, objectives = found
    on_device: Autoscale = msgspec.structs.replace(settings, device=gpu)
    scaler = make(spec, on_device, objectives)
    return ScalerRun(
        scaler=scaler, cold_start_s=cold_start_s or settings.cold_start_s or FIRST_COLD_START_S
    )
