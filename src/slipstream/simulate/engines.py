"""A planned engine: its settings, memory ledger and step times, on a device that need not be
present."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from slipstream.config import DTYPE_BYTES, KV_BYTES, DeviceInfo, EngineArgs, EngineConfig, resolve
from slipstream.config.forms import (
    ContextParallel,
    DraftSettings,
    HeadDrafts,
    ModelDrafts,
    MTPDrafts,
    NoDrafts,
    SpeculationConfig,
    one_or_tensor,
)
from slipstream.costs.analytic import AnalyticCost, launch_s
from slipstream.costs.devices import FALLBACKS, Hardware, find_device, known_devices
from slipstream.costs.estimate import (
    bytes_by_part,
    config_of_draft,
    estimate,
    resident_weights_bytes,
    this_device,
)
from slipstream.costs.graph_sizes import padding
from slipstream.costs.memory import MemoryLedger
from slipstream.costs.offload import estimate_offload
from slipstream.costs.operators import products
from slipstream.costs.step_cost import HostCost, Label, StepCost, StepCounts, StepTable
from slipstream.costs.tables import find_table, identity, read_ceilings
from slipstream.errors import ConfigError
from slipstream.hub import resolve_model
from slipstream.simulate.drafts import AcceptanceRates, Drafts
from slipstream.simulate.simulator import SimulatedEngine
from slipstream.spec.description import ModelDescription, read_spec
from slipstream.spec.scheme import SCHEMES

RUN_AHEAD = 8
"""Copy of `worker.in_flight.RUN_AHEAD`: maximum sequences of a CPU step for which the host does not
wait."""


def run_ahead(*, is_gpu: bool, num_threads: int) -> int | None:
    """Returns `SimulatedEngine.run_ahead` for a device. With one CPU thread the host waits for
    every step."""
    return None if is_gpu else RUN_AHEAD if num_threads > 1 else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledTable:
    """Step times of several GPUs: the measured time of one GPU, times the ratio of the two analytic
    times for that step."""

    table: StepTable
    one: AnalyticCost
    several: AnalyticCost

    @property
    def host(self) -> HostCost:
        return self.table.host

    def seconds(self, shape: StepCounts) -> float:
        return self.table.seconds(shape) * self.several.seconds(shape) / self.one.seconds(shape)

    def label(self, shape: StepCounts) -> Label:
        return "estimated"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedEngine:
    """A planned engine. Its `num_gpus` GPUs share the model by tensor parallelism and are treated
    as one device with the memory of all.
    """

    args: EngineArgs
    description: ModelDescription
    config: EngineConfig
    ledger: MemoryLedger
    hardware: Hardware
    num_gpus: int
    analytic: AnalyticCost
    table: StepTable | None
    drafts: Drafts | None = None

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
        has_graphs, spec = is_gpu and not self.config.device.enforce_eager, self.description.spec
        of_ranks = dataclasses.replace(self.config, parallel=one_or_tensor(self.num_gpus))
        return SimulatedEngine(
            scheduling=self.config.scheduling,
            cache=self.config.cache,
            max_model_len=self.config.model.max_model_len,
            num_blocks=self.ledger.num_blocks,
            cost=cost,
            run_ahead=run_ahead(is_gpu=is_gpu, num_threads=threads),
            padded=padding(of_ranks, spec) if has_graphs else None,
            drafts=self.drafts,
        )

    def with_settings(self, **settings: Any) -> PlannedEngine:
        """Returns the engine planned again with other engine settings."""
        args = dataclasses.replace(self.args, **settings)
        acceptance = None if self.drafts is None else self.drafts.acceptance
        return plan_engine(
            args, self.description, self.hardware, num_gpus=self.num_gpus, acceptance=acceptance
        )

    def with_blocks(self, num_blocks: int) -> PlannedEngine:
        return dataclasses.replace(
            self, ledger=dataclasses.replace(self.ledger, num_blocks=num_blocks)
        )


def this_hardware(device: str, num_threads: int | None = None) -> Hardware:
    """This machine's rates: measured ones, or else those of a similar known machine.

    An unknown GPU is treated as an H200 with its own memory size until its limits are measured; its
    title says so.
    """
    info = this_device(device)
    if info.is_cuda:
        try:
            known, title = find_device(info.name), info.name
        except ConfigError:
            known, title = find_device("h200"), f"{info.name}, with an H200's rates"
            known = dataclasses.replace(
                known, name="this GPU", watts=None, idle_watts=None, label="estimated"
            )
        ceilings = read_ceilings(info.name, 0)
        known = dataclasses.replace(
            known, title=info.name if ceilings else title, memory_bytes=info.memory_bytes
        )
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
        read_bytes_s=box.read_bytes_s * share**0.5,  # the cores share memory
        operations_s={kind: rate * share for kind, rate in box.operations_s.items()},
        num_threads=info.num_threads,
        label="estimated",
    )
    return measured(machine, read_ceilings(info.name, info.num_threads))


CPU_REACHED = {"read": 0.86, "float32": 0.71, "bfloat16": 0.61, "int8": 0.54, "int6": 0.54}
"""Fractions of the measured limits that steps reach on a two-core AVX-512 machine
(benchmarks/results/roofline_cpu.json)."""


def measured(hardware: Hardware, ceilings: dict[str, float]) -> Hardware:
    """Copy of the hardware with the limits that `slipstream plan --measure` measured."""
    if not ceilings:
        return hardware
    share = dict.fromkeys(ceilings, 1.0) if hardware.is_gpu else CPU_REACHED
    types = hardware.operations_s.keys() | FALLBACKS.keys()
    rates = {kind: value * share[kind] for kind, value in ceilings.items() if kind in types}
    return dataclasses.replace(
        hardware,
        read_bytes_s=ceilings.get("read", hardware.read_bytes_s / share.get("read", 1.0))
        * share.get("read", 1.0),
        operations_s={**hardware.operations_s, **rates},
        disk_bytes_s=ceilings.get("disk", hardware.disk_bytes_s),
        watts=ceilings.get("watts", hardware.watts),
        idle_watts=ceilings.get("idle_watts", hardware.idle_watts),
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
    acceptance: AcceptanceRates | None = None,
) -> PlannedEngine:
    """Plans an engine of `num_gpus` GPUs.

    `table` overrides the step table found on disk. `acceptance` is required with speculative
    decoding. OutOfMemoryError if the model does not fit; ConfigError if it can't be planned.
    """
    spec = description.spec
    if spec.kind != "a decoder":
        raise ConfigError(
            f"plan is for models that write text, and this is {spec.kind}", field="model"
        )
    num_gpus = max(num_gpus, args.context_parallel_size)
    by_context = args.context_parallel_size > 1
    if not num_gpus >= 1 or (
        not by_context and any(a.num_heads % num_gpus for a in spec.attentions)
    ):
        raise ConfigError(
            f"{num_gpus} GPUs can't share the heads of {spec.family} evenly", field="max_gpus"
        )
    if args.cpu_layers is not None:
        raise ConfigError(
            "cpu_layers: plan has no rates of a GPU's host; leave it out", field="cpu_layers"
        )
    if args.host_experts is not None:
        raise ConfigError(
            "host_experts: plan has no rates of a GPU's host; leave it out (`slipstream info` says what a token reads there)",
            field="host_experts",
        )
    if args.expert_parallel_size > 1 and args.tensor_parallel_size == 1:
        raise ConfigError(
            "expert_parallel_size: plan supports only tensor parallelism, not requests divided over ranks; "
            "leave it at 1",
            field="expert_parallel_size",
        )
    if args.pipeline_parallel_size > 1:
        raise ConfigError(
            "pipeline_parallel_size: plan has no times of stages; leave it at 1, or share layers with tensor_parallel_size",
            field="pipeline_parallel_size",
        )
    info = info or hardware.device_info()
    draft = _draft_model(args, resolve(args, description, info).speculation, acceptance)
    all_gpus = dataclasses.replace(
        info, memory_bytes=info.memory_bytes * num_gpus, free_bytes=info.free_bytes * num_gpus
    )
    config, ledger = estimate(
        args, description, all_gpus, with_steps=True, draft=draft, num_gpus=num_gpus
    )
    drafts = None
    if isinstance(config.speculation, DraftSettings):
        assert acceptance is not None
        cost: StepCost | None = None
        if draft is not None:
            own = config_of_draft(config)
            cost = _table(own, draft, hardware) or _analytic(own, draft, hardware, 1)
        drafts = Drafts(config=config.speculation, acceptance=acceptance, cost=cost)
    return PlannedEngine(
        args=args,
        description=description,
        config=config,
        ledger=ledger,
        hardware=hardware,
        num_gpus=num_gpus,
        analytic=_analytic(config, description, hardware, num_gpus),
        table=table or _table(config, description, hardware),
        drafts=drafts,
    )


def _analytic(
    config: EngineConfig, description: ModelDescription, hardware: Hardware, num_gpus: int
) -> AnalyticCost:
    spec, parts, dtype = description.spec, bytes_by_part(config, description), config.model.dtype
    scheme = None if config.model.quantization is None else SCHEMES[config.model.quantization]
    in_8_bits = description.stored or (scheme is not None and scheme.weight_bits <= 4)
    product_type: str = dtype
    if scheme is not None and scheme.inputs is not None:
        product_type = scheme.inputs.removesuffix("-block")
    elif in_8_bits and not hardware.is_gpu:
        product_type = "int6"  # CPU kernels quantize inputs to 8 bits; weights have up to 6
    # On a GPU, a linear layer of several tokens takes as long with a 4-bit weight as with its dense
    # copy (kernels_cuda_linear).
    by_groups = hardware.is_gpu and scheme is not None and scheme.name == "int4"
    held = {part: float(num_bytes) for part, num_bytes in parts.items()}
    # a GGUF file has mixed types, of which only the total size is known
    if description.stored and not hardware.is_gpu:
        share = resident_weights_bytes(config, description) / sum(parts.values())
        held = {part: num_bytes * share for part, num_bytes in held.items()}
    multiplied = products(spec, held)
    if product_type == "int6" and multiplied[0].weight_bytes > 0.9 * multiplied[0].num_weights:
        product_type = "int8"  # Q8_0: 8.5 bits with scales; Q6_K has 6.6
    return AnalyticCost(
        spec=spec,
        products=multiplied,
        hardware=hardware,
        dtype=dtype,
        dtype_bytes=DTYPE_BYTES[dtype],
        product_type=product_type,
        cache_bytes=KV_BYTES[config.cache.dtype],
        num_gpus=num_gpus,
        context=isinstance(config.parallel, ContextParallel),
        read_s=_read_s(config, description, hardware),
        dense_bytes=DTYPE_BYTES[dtype] if by_groups else None,
        host=HostCost(
            step_s=hardware.host_step_s,
            sequence_s=hardware.host_sequence_s,
            request_s=hardware.host_request_s,
            launch_s=launch_s(spec, multiplied) if hardware.is_gpu else 0.0,
            label=hardware.label,
        ),
    )


def _read_s(config: EngineConfig, description: ModelDescription, hardware: Hardware) -> float:
    """Seconds per step to read the layers that are not stored on the device. ConfigError if the
    rate is unknown."""
    offload = estimate_offload(config, description)
    if offload is None:
        return 0.0
    rate = hardware.host_bytes_s if hardware.is_gpu else hardware.disk_bytes_s
    if rate is None:
        where = "copies from its host" if hardware.is_gpu else "reads from its disk"
        raise ConfigError(
            f"weights_bytes: how fast {hardware.title} {where} is not known; leave it out",
            field="weights_bytes",
        )
    return offload.read_bytes / rate


def _table(
    config: EngineConfig, description: ModelDescription, hardware: Hardware
) -> StepTable | None:
    """Measured step table of such an engine, or None."""
    if estimate_offload(config, description) is not None:
        return None
    info = config.device.info
    name = this_device("auto").name if hardware.name == "this machine" else info.name
    named = dataclasses.replace(
        config, device=dataclasses.replace(config.device, info=dataclasses.replace(info, name=name))
    )
    return find_table(
        identity(named, description.spec, sum(bytes_by_part(config, description).values()))
    )


def _draft_model(
    args: EngineArgs, speculation: SpeculationConfig, acceptance: AcceptanceRates | None
) -> ModelDescription | None:
    """Describe the draft model; None without one. ConfigError if the cost of drafts can't be
    planned."""
    if isinstance(speculation, NoDrafts):
        return None
    if acceptance is None:
        what = "drafts need --draft-acceptance: how often a draft is right, by position, such as 0.8,0.6,0.5"
        raise ConfigError(what, field="draft_acceptance")
    if isinstance(speculation, HeadDrafts | MTPDrafts):
        what = f"the cost of a {speculation.method!r} head is not known; plan with ngram, suffix or draft"
        raise ConfigError(what, field="speculative_config")
    if not isinstance(speculation, ModelDrafts):
        return None
    return read_spec(resolve_model(speculation.model, download_dir=args.download_dir))
