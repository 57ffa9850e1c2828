"""An engine that is not there: its settings, its memory ledger and what its steps take, on a device that need not be here."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from slipstream.config import DTYPE_BYTES, DeviceInfo, EngineArgs, EngineConfig
from slipstream.errors import ConfigError
from slipstream.plan.analytic import AnalyticCost
from slipstream.plan.devices import Hardware, find_device, known_devices
from slipstream.plan.estimate import bytes_by_part, estimate, this_device
from slipstream.plan.graph_sizes import padding
from slipstream.plan.memory import MemoryLedger
from slipstream.plan.operators import products
from slipstream.plan.simulate import SimulatedEngine
from slipstream.plan.step_cost import HostCost, Label, StepShape, StepTable
from slipstream.plan.tables import find_table, identity, kept_ceilings
from slipstream.spec.description import ModelDescription
from slipstream.spec.scheme import SCHEMES

RUN_AHEAD = 8
"""`worker.model_runner.RUN_AHEAD`: the most sequences of a CPU's step that the host does not wait for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledTable:
    """A measured table of one GPU, for several: each step by the factor that the analytic model has for it."""

    table: StepTable
    one: AnalyticCost
    several: AnalyticCost

    @property
    def host(self) -> HostCost:
        return self.table.host

    def seconds(self, shape: StepShape) -> float:
        return self.table.seconds(shape) * self.several.seconds(shape) / self.one.seconds(shape)

    def label(self, shape: StepShape) -> Label:
        return "estimated"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedEngine:
    """`num_gpus` share the model by tensor parallelism, and count as one device with all their memory."""

    args: EngineArgs
    description: ModelDescription
    config: EngineConfig
    ledger: MemoryLedger
    hardware: Hardware
    num_gpus: int
    analytic: AnalyticCost
    table: StepTable | None

    @property
    def simulated(self) -> SimulatedEngine:
        cost: Any = self.analytic
        if self.table is not None:
            cost = (
                self.table
                if self.num_gpus == 1
                else ScaledTable(table=self.table, one=self.analytic.on(1), several=self.analytic)
            )
        is_gpu, threads = self.hardware.is_gpu, self.config.device.num_threads
        return SimulatedEngine(
            scheduling=self.config.scheduling,
            cache=self.config.cache,
            max_model_len=self.config.model.max_model_len,
            num_blocks=self.ledger.num_blocks,
            cost=cost,
            run_ahead=None if is_gpu else RUN_AHEAD if threads > 1 else 0,
            padded=padding(self.config) if is_gpu and not self.config.device.enforce_eager else None,
        )

    def with_settings(self, **settings: Any) -> PlannedEngine:
        """The same with other engine settings."""
        args = dataclasses.replace(self.args, **settings)
        return plan_engine(args, self.description, self.hardware, num_gpus=self.num_gpus)

    def with_blocks(self, num_blocks: int) -> PlannedEngine:
        return dataclasses.replace(self, ledger=dataclasses.replace(self.ledger, num_blocks=num_blocks))


def this_hardware(device: str, num_threads: int | None = None) -> Hardware:
    """The machine that this runs on, by what is known of such machines. A GPU that is not known counts as an H200 with its own
    memory until its ceilings are measured: its title says so."""
    info = this_device(device)
    if info.is_cuda:
        try:
            known, title = find_device(info.name), info.name
        except ConfigError:
            known, title = find_device("h200"), f"{info.name}, with an H200's rates"
            known = dataclasses.replace(known, name="this GPU", watts=None, idle_watts=None, label="estimated")
        ceilings = kept_ceilings(info.name, 0)
        known = dataclasses.replace(known, title=info.name if ceilings else title, memory_bytes=info.memory_bytes)
        return measured(known, ceilings)
    if num_threads is not None:
        info = dataclasses.replace(info, num_threads=num_threads)
    box = known_devices()["cpu-2-avx512"]
    share = info.num_threads / box.num_threads
    machine = dataclasses.replace(
        box,
        name="this machine",
        title=f"{info.name}, {info.num_threads} threads",
        memory_bytes=info.memory_bytes,
        read_bytes_s=box.read_bytes_s * share**0.5,  # memory is shared by the cores
        operations_s={kind: rate * share for kind, rate in box.operations_s.items()},
        num_threads=info.num_threads,
        label="estimated",
    )
    return measured(machine, kept_ceilings(info.name, info.num_threads))


CPU_REACHED = {"read": 0.86, "float32": 0.71, "bfloat16": 0.61, "int8": 0.54}
"""Shares of measured ceilings that the steps of a two-core AVX-512 machine reached (benchmarks/results/roofline_cpu.json)."""


def measured(hardware: Hardware, ceilings: dict[str, float]) -> Hardware:
    """With the ceilings that `slipstream plan --measure` found."""
    if not ceilings:
        return hardware
    share = dict.fromkeys(ceilings, 1.0) if hardware.is_gpu else CPU_REACHED
    rates = {kind: value * share[kind] for kind, value in ceilings.items() if kind in hardware.operations_s}
    return dataclasses.replace(
        hardware,
        read_bytes_s=ceilings.get("read", hardware.read_bytes_s / share.get("read", 1.0)) * share.get("read", 1.0),
        operations_s={**hardware.operations_s, **rates},
        disk_bytes_s=ceilings.get("disk", hardware.disk_bytes_s),
        label="measured",
    )


def plan_engine(
    args: EngineArgs,
    description: ModelDescription,
    hardware: Hardware,
    *,
    num_gpus: int = 1,
    info: DeviceInfo | None = None,
    table: StepTable | None = None,
) -> PlannedEngine:
    """OutOfMemoryError if the model does not fit. `table`: what steps take, instead of what is found on disk."""
    spec = description.spec
    if spec.kind != "a decoder":
        raise ConfigError(f"plan is for models that write text, and this is {spec.kind}", field="model")
    if not num_gpus >= 1 or any(layer.attention.num_heads % num_gpus for layer in spec.layers):
        raise ConfigError(f"{num_gpus} GPUs can't share the heads of {spec.family} evenly", field="max_gpus")
    info = info or hardware.device_info()
    all_gpus = dataclasses.replace(info, memory_bytes=info.memory_bytes * num_gpus, free_bytes=info.free_bytes * num_gpus)
    config, ledger = estimate(args, description, all_gpus, with_steps=True)
    parts, dtype = bytes_by_part(config, description), config.model.dtype
    scheme = None if config.model.quantization is None else SCHEMES[config.model.quantization]
    in_8_bits = description.stored or (scheme is not None and scheme.weight_bits <= 4)
    product_type: str = dtype
    if scheme is not None and scheme.inputs is not None:
        product_type = scheme.inputs.removesuffix("-block")
    elif in_8_bits and not hardware.is_gpu:
        product_type = "int8"  # a CPU's kernels round inputs to 8 bits
    held = {part: float(num_bytes) for part, num_bytes in parts.items()}
    if description.stored and not hardware.is_gpu:  # a GGUF file's types, of which the ledger knows the sum
        held = {part: num_bytes * ledger.weights_bytes / sum(parts.values()) for part, num_bytes in held.items()}
    host = HostCost(
        step_s=hardware.host_step_s,
        sequence_s=hardware.host_sequence_s,
        request_s=hardware.host_request_s,
        label=hardware.label,
    )
    analytic = AnalyticCost(
        spec=spec,
        products=products(spec, held),
        hardware=hardware,
        dtype=dtype,
        dtype_bytes=DTYPE_BYTES[dtype],
        product_type=product_type,
        cache_bytes=DTYPE_BYTES[config.cache.dtype],
        num_gpus=num_gpus,
        host=host,
    )
    if table is None:
        named = this_device("auto") if hardware.name == "this machine" else info
        own = dataclasses.replace(config.device, info=dataclasses.replace(info, name=named.name))
        table = find_table(identity(dataclasses.replace(config, device=own), spec, sum(parts.values())))
    return PlannedEngine(
        args=args,
        description=description,
        config=config,
        ledger=ledger,
        hardware=hardware,
        num_gpus=num_gpus,
        analytic=analytic,
        table=table,
    )
