"""What an engine core knows of the device: plain values go in, plain values and handles of steps come out.

`LocalExecutor` runs the model in this process. An executor over several processes takes the same calls and sends them on.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from slipstream.config import DTYPE_BYTES, EngineArgs, EngineConfig, resolve
from slipstream.config.engine_folder import packed_folder
from slipstream.errors import CheckpointError, ConfigError, ModelError, UnsupportedModelError
from slipstream.hub import machine_folder, resolve_model, tiles_folder, weights_folder
from slipstream.plan.memory import MemoryLedger, block_bytes, kv_budget, plan_kv, scratch_blocks
from slipstream.spec.autotune_table import NO_TILES, TileTable, load_tiles
from slipstream.spec.description import ModelDescription, read_spec
from slipstream.spec.draft_heads import HeadDescription, HeadMethod, read_head
from slipstream.types import CanaryResult, ExpertTokens, Plan, StepResult, TokenMask
from slipstream.worker.canary import CANARY_NAME, log_no_canary, read_canary, run_canary
from slipstream.worker.constrained import AwaitingMask
from slipstream.worker.device import detect
from slipstream.worker.model_runner import ModelRunner
from slipstream.worker.warm_up import warm_up


class Launched(Protocol):
    """A step that was launched."""

    plan: Plan

    @property
    def is_done(self) -> bool:
        """The launch itself computed it: `result` does not wait."""

    @property
    def awaits_mask(self) -> bool:
        """It draws nothing, and has no result, before `Executor.constrain`."""

    def proposed(self) -> Sequence[int]:
        """The drafts that a draft model proposed in a step that awaits a mask, in the plan's order."""

    def result(self) -> StepResult:
        """Wait for it. To be called once."""


class Executor(ABC):
    description: ModelDescription
    config: EngineConfig
    """With the context that the cache has room for."""
    ledger: MemoryLedger
    tiles: str
    """Which tiles the kernels take, for a person; empty where there are none to choose."""
    phases: dict[str, float]
    """Seconds of each phase of the start."""
    canary: CanaryResult | None
    """What the checkpoint's canary said at the start."""

    @abstractmethod
    def launch(self, plan: Plan) -> Launched:
        """Queue one step behind those launched before."""

    @abstractmethod
    def constrain(self, step: Launched, mask: TokenMask) -> None:
        """Say what the requests of a step that have a grammar may draw. No other step may be launched before."""

    @abstractmethod
    def max_in_flight(self, plan: Plan) -> int:
        """How many steps may be in flight once `plan` is launched. 1: the launch computes it, so the results of the step before
        should be taken first."""

    @abstractmethod
    def forget(self) -> None:
        """Drop every sequence, after a step failed."""

    @abstractmethod
    def warm_up(self) -> None:
        """Compile what requests will need, before there are any."""

    @abstractmethod
    def capture_next(self) -> bool:
        """Prepare one more size of step, some tens of milliseconds; only while no step is in flight. False: none is left."""

    @abstractmethod
    def expert_load(self) -> ExpertTokens:
        """Tokens by expert since the start, of each layer with experts. It never waits for the device."""


class LocalExecutor(Executor):
    def __init__(
        self, config: EngineConfig, description: ModelDescription, runner: ModelRunner, tiles: TileTable = NO_TILES
    ) -> None:
        """Measure activations, size the cache, allocate it. `build` does what comes before."""
        self.description, self.runner, self.phases = description, runner, runner.phases
        self.tiles = tiles.describe() if config.device.info.is_cuda else ""
        self.config, self.ledger = _fit(config, description, runner, runner.profile())
        self.canary = None

    @classmethod
    def build(cls, args: EngineArgs, *, progress: Callable[[str], None] = lambda phase: None) -> LocalExecutor:
        """Find the model and the device, resolve the settings, load. `progress` is told each phase as it begins."""
        description, runner, tiles = load_runner(args, progress=progress)
        progress("cache")
        executor = cls(runner.config, description, runner, tiles)
        executor.canary = executor._run_canary(args.canary)
        return executor

    def launch(self, plan: Plan) -> Launched:
        return self.runner.launch(plan)

    def constrain(self, step: Launched, mask: TokenMask) -> None:
        assert isinstance(step, AwaitingMask)
        step.constrain(mask)

    def max_in_flight(self, plan: Plan) -> int:
        return self.runner.max_in_flight(plan)

    def forget(self) -> None:
        self.runner.forget_rows()

    def warm_up(self) -> None:
        warm_up(self.runner)

    def capture_next(self) -> bool:
        return self.runner.capture_next()

    def expert_load(self) -> ExpertTokens:
        return self.runner.expert_load()

    def _run_canary(self, wanted: str) -> CanaryResult | None:
        """Run the checkpoint's canary, where it has one. ModelError if it is to be refused. Only a decoder can have one."""
        if wanted == "off" or self.config.model.load_format == "dummy":
            return None
        path, spec = self.description.path, self.description.spec
        if spec.kind != "a decoder":
            if wanted == "refuse":
                raise ConfigError(
                    f"canary='refuse', but {path} is {spec.kind}, for which no canary can tell anything; leave it at "
                    "'warn', or set 'off'",
                    field="canary",
                )
            log_no_canary(path, spec.kind)
            return None
        canary = read_canary(path, spec.vocab_size)
        if canary is None:
            if wanted == "refuse":
                raise ConfigError(
                    f"canary='refuse', but {path} has no {CANARY_NAME}; leave it at 'warn', or let `slipstream compress` "
                    "write one",
                    field="canary",
                )
            return None
        begin = time.perf_counter()
        result = run_canary(self.runner.forwards, self.runner.kv, canary, context=self.config.model.max_model_len)
        self.runner.reset_expert_load()
        self.phases["canary"] = time.perf_counter() - begin
        if wanted == "refuse" and not result.ok:
            raise ModelError(f"{result.describe()}; take other kernels or another kv_cache_dtype, or canary='warn'")
        return result


def load_runner(
    args: EngineArgs, *, progress: Callable[[str], None] = lambda phase: None
) -> tuple[ModelDescription, ModelRunner, TileTable]:
    """The model that `args` describe, loaded on its device, without a cache; its config is `runner.config`."""
    begin = time.perf_counter()
    progress("model")
    path = resolve_model(args.model, download_dir=args.download_dir)
    description = read_spec(path)
    progress("device")
    config = resolve(args, description, detect(args.device, machine_folder(), num_threads=args.num_threads))
    found = time.perf_counter() - begin
    progress("weights")
    tiles = load_tiles(config.device.tile_table, config.device.info.name, tiles_folder())
    kept = packed_folder(path) or weights_folder(args.download_dir)
    runner = ModelRunner(config, description, tiles, weights_folder=kept)
    runner.phases["resolve"] = found
    if (speculation := config.speculation) is not None and speculation.by_model:
        progress("draft model")
        folder = path if speculation.model is None else resolve_model(speculation.model, download_dir=args.download_dir)
        if speculation.method not in ("eagle3", "medusa", "mtp"):
            runner.load_draft(read_spec(folder), weights_folder(args.download_dir))
        else:
            runner.load_head(_read_head(speculation.method, folder, description))
    return description, runner, tiles


def _read_head(method: HeadMethod, folder: Path, target: ModelDescription) -> HeadDescription:
    try:
        return read_head(method, folder, target)
    except (UnsupportedModelError, CheckpointError) as error:
        raise ConfigError(f"speculative_config: {error}", field="speculative_config") from error


def _fit(
    config: EngineConfig, description: ModelDescription, runner: ModelRunner, activation_bytes: int
) -> tuple[EngineConfig, MemoryLedger]:
    """Size the KV cache by what is left, allocate it, and account for all of it."""
    spec, info = description.spec, config.device.info
    element, size = DTYPE_BYTES[config.cache.dtype], config.cache.block_size
    one_block = block_bytes(spec, size, element)
    weights, rows = runner.model.weights_bytes, runner.rows_bytes()
    if runner.draft is not None:
        one_block += runner.draft.block_bytes
        weights += runner.draft.weights_bytes
    graphs = 0 if config.device.enforce_eager else runner.graph_reserve_bytes(activation_bytes)
    runner.platform.release_unused()
    free, total = runner.platform.memory()  # now, with the weights loaded
    taken = activation_bytes + graphs + rows
    allowed, budget = kv_budget(config, one_block, total_bytes=total, free_bytes=free, taken_bytes=taken)
    num_blocks = plan_kv(budget_bytes=budget, block_bytes=one_block)
    if spec.is_encoder:
        num_blocks = min(num_blocks, scratch_blocks(config))
    config = config.with_memory_limits(num_blocks - 1, one_block)  # block 0 is the null block
    measured_graphs = runner.allocate(config, num_blocks)
    ledger = MemoryLedger(
        device=info.name,
        total_bytes=total,
        allowed_bytes=allowed,
        weights_bytes=weights,
        activation_bytes=activation_bytes,
        graph_bytes=measured_graphs,
        kv_bytes=num_blocks * one_block,
        other_bytes=rows,
        block_bytes=one_block,
        num_blocks=num_blocks,
        block_size=size,
        max_model_len=config.model.max_model_len,
        groups=config.cache.groups,
        max_step_tokens=config.scheduling.max_num_batched_tokens,
        forms=runner.model.forms,
    )
    return config, ledger
