"""Executor that runs the model in this process.

Plain values go in; plain values and step handles come out. `load_runner` chooses how the model is loaded:
`HostLoaded` where one C++ program on a CPU covers the model (no torch needed), otherwise
`TorchLoaded`, whose forward paths are listed in `forward/forwards.py`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from slipstream.config import (
    DTYPE_BYTES,
    DeviceInfo,
    EngineArgs,
    EngineConfig,
    num_ranks,
    resolve,
    split_setting,
)
from slipstream.config.engine_folder import packed_folder
from slipstream.config.forms import LearnedDrafts, ModelDrafts, MTPDrafts, TensorParallel
from slipstream.costs.fit import check_weights_fit
from slipstream.costs.memory import (
    MemoryLedger,
    block_bytes,
    peer_copy_bytes,
    peer_copy_tokens,
    size_cache,
    staged_blocks,
)
from slipstream.errors import (
    AdapterError,
    CheckpointError,
    ConfigError,
    ModelError,
    UnsupportedModelError,
    install_command,
)
from slipstream.hub import machine_folder, resolve_model, tiles_folder, weights_folder
from slipstream.model.layers import Partition
from slipstream.spec.autotune_table import NO_TILES, TileTable, load_tiles
from slipstream.spec.description import ModelDescription, read_spec
from slipstream.spec.draft_heads import HeadDescription, HeadMethod
from slipstream.spec.head_readers import read_head
from slipstream.spec.model import ModelSpec, MoESpec
from slipstream.spec.reason import NotCovered
from slipstream.stats import AdapterStats, CanaryResult, ExpertTokens
from slipstream.types import LoRARequest, Plan, StepTime, TokenMask
from slipstream.worker.base import Executor, Launched
from slipstream.worker.device import detect
from slipstream.worker.forward.forward_paths import host_refusal
from slipstream.worker.host_loading import HostLoaded
from slipstream.worker.loaded_runner import LoadedRunner
from slipstream.worker.model_runner import ModelRunner, Runner
from slipstream.worker.rows import rows_bytes
from slipstream.worker.sampling.constrained import AwaitingMask
from slipstream.worker.start.canary import CANARY_NAME, log_no_canary, read_canary, run_canary
from slipstream.worker.tiers.block_store import HostBlockStore
from slipstream.worker.tiers.opening import open_tiers

if TYPE_CHECKING:
    import torch

    from slipstream.platform.collectives import RankGroup
    from slipstream.worker.start.prepared_kernels import PreparedKernels

_logger = logging.getLogger("slipstream.engine")


class Ranks(Protocol):
    """The processes that compute a model together, as seen by one of them."""

    rank: int
    size: int
    local_rank: int  # rank among the `local_size` ranks of this host
    local_size: int
    mixed: bool  # some ranks have a CPU and some a GPU

    def join(self, backend: str, device: torch.device) -> RankGroup:
        """Meet the other ranks."""


class LocalExecutor(Executor):
    store: HostBlockStore | None

    def __init__(
        self,
        config: EngineConfig,
        description: ModelDescription,
        loaded: LoadedRunner,
        tiles: TileTable = NO_TILES,
    ) -> None:
        """Measure activations, then size and allocate the cache. `build` does the steps before."""
        self.description, self.phases = description, loaded.phases
        self.tiles = tiles.describe() if config.device.info.is_cuda else ""
        self.config, self.ledger, self.runner = _fit(config, loaded, loaded.profile())
        ledger = self.ledger
        slot = ledger.state_bytes // max(1, ledger.num_states)
        self.store = open_tiers(self.config, description, self.runner, ledger.block_bytes, slot)
        self.canary = None

    @classmethod
    def build(
        cls,
        args: EngineArgs,
        *,
        progress: Callable[[str], None] = lambda phase: None,
        by_torch: bool = False,
        ranks: Ranks | None = None,
        device: DeviceInfo | None = None,
    ) -> LocalExecutor:
        """Find the model and the device, resolve the settings, and load the model.

        `progress` is called as each phase begins. A CPU runs the model without torch where it can
        (`forward_paths.host_refusal`), unless `by_torch`. With `ranks`, this is one rank's executor
        and loads its part of the model. `device`: see `load_runner`.
        """
        description, loaded, tiles = load_runner(
            args, progress=progress, by_torch=by_torch, ranks=ranks, device=device
        )
        progress("cache")
        executor = cls(loaded.config, description, loaded, tiles)
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

    def warm_up(self) -> Sequence[StepTime]:
        loaded, runner = self.runner.loaded, self.runner
        if not loaded.warms_up or not isinstance(runner, ModelRunner):
            return ()
        from slipstream.worker.draft.costs import measure_draft_costs
        from slipstream.worker.start.warm_up import warm_up

        with loaded.without_copies():
            warm_up(runner)
        begin = time.perf_counter()
        found = measure_draft_costs(runner, self.ledger.num_blocks)
        if found:
            self.phases["steps with drafts"] = time.perf_counter() - begin
        return found

    def capture_next(self) -> bool:
        return self.runner.capture_next()

    def expert_load(self) -> ExpertTokens:
        return self.runner.expert_load()

    def load_adapter(self, request: LoRARequest, keep: Callable[[], Collection[int]]) -> str:
        if self.runner.adapters is None:
            raise AdapterError("adapters are off; start with enable_lora", field="enable_lora")
        return self.runner.adapters.load(request, keep)

    def unload_adapter(self, adapter_id: int) -> None:
        if self.runner.adapters is not None:
            self.runner.adapters.unload(adapter_id)

    def adapter_stats(self) -> AdapterStats | None:
        return None if self.runner.adapters is None else self.runner.adapters.stats()

    @property
    def release_unused(self) -> Callable[[], None] | None:
        platform = self.runner.platform
        return platform.release_unused if platform.caches_memory else None

    @property
    def keeps_no_weights(self) -> str | None:
        if self.runner.platform.kind == "cpu":
            return None
        return "level 1 keeps weights in host memory, which is not supported on a GPU"

    def sleep(self, level: int) -> Callable[[], Executor] | None:
        self.shutdown()
        loaded = self.runner.release()
        return partial(_woken, loaded, self.canary) if level == 1 else None

    def shutdown(self) -> None:
        """Stop the tiers' threads. Memory is freed when the process ends."""
        if self.store is not None:
            self.store.close()
            self.store = None

    def _run_canary(self, wanted: str) -> CanaryResult | None:
        """Run the checkpoint's canary, if it has one. Only a decoder can have one.

        ModelError if the result is bad and must be refused.
        """
        if wanted == "off" or self.config.model.load_format == "dummy":
            return None
        path, spec = self.description.path, self.description.spec
        if spec.kind != "a decoder":
            if wanted == "refuse":
                raise ConfigError(
                    f"canary='refuse', but {path} is {spec.kind}, and only decoders have canaries; leave it at "
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
        result = run_canary(
            self.runner.forwards, self.runner.kv, canary, context=self.config.model.max_model_len
        )
        self.runner.reset_expert_load()
        self.phases["canary"] = time.perf_counter() - begin
        if not self.runner.model.spec.has_last:
            return None  # the last stage knows the result
        if wanted == "refuse" and not result.ok:
            raise ModelError(
                f"{result.describe()}; use other kernels or another kv_cache_dtype, or set canary='warn'"
            )
        return result


def _woken(loaded: LoadedRunner, canary: CanaryResult | None) -> LocalExecutor:
    """Make an executor of a model whose cache was given back."""
    executor = LocalExecutor(loaded.config, loaded.model.description, loaded)
    executor.canary = canary
    return executor


def load_runner(
    args: EngineArgs,
    *,
    progress: Callable[[str], None] = lambda phase: None,
    by_torch: bool = False,
    ranks: Ranks | None = None,
    device: DeviceInfo | None = None,
) -> tuple[ModelDescription, LoadedRunner, TileTable]:
    """Load the model that `args` describe, without a cache. With `ranks`, load one rank's part.

    The engine configuration is `loaded.config`. `by_torch`: see `LocalExecutor.build`. `device` is
    the device to use, if it was chosen before. ConfigError if the model is to be split and there
    are no `ranks`.
    """
    size = 1 if ranks is None else ranks.size
    rank, num_local = (0, 1) if ranks is None else (ranks.local_rank, ranks.local_size)
    if size != num_ranks(args):
        field = split_setting(args)
        raise ConfigError(f"this works on one device: leave {field} at 1", field=field)
    begin = time.perf_counter()
    progress("model")
    path = resolve_model(args.model, download_dir=args.download_dir)
    description = read_spec(path).taking_images(args.max_images)
    progress("device")
    once = partial(progress, "how fast this CPU is, once a machine")
    folder, threads = machine_folder(), args.num_threads
    info = device or detect(
        args.device, folder, num_threads=threads, rank=rank, num_ranks=num_local, measuring=once
    )
    config = resolve(args, description, info).of_rank
    # otherwise, whoever started the ranks has checked
    if ranks is None or (info.is_cuda and not ranks.mixed):
        check_weights_fit(config, description)
    found = time.perf_counter() - begin
    progress("weights")
    kept = packed_folder(path) or weights_folder(args.download_dir)

    def load_draft(loaded: LoadedRunner) -> None:
        how = config.speculation
        if not isinstance(how, LearnedDrafts):
            return
        progress("draft model")
        if isinstance(how, MTPDrafts):
            loaded.load_head(_read_head(how.method, path, description), how)
            return
        folder = resolve_model(how.model, download_dir=args.download_dir)
        if isinstance(how, ModelDrafts):
            loaded.load_draft(read_spec(folder), how, weights_folder(args.download_dir))
        else:
            loaded.load_head(_read_head(how.method, folder, description), how)

    if not by_torch and (host := _host_loaded(config, description, kept, load_draft)) is not None:
        host.phases["resolve"] = found
        return description, host, NO_TILES
    try:
        from slipstream.worker.torch_loading import TorchLoaded
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        reason = (
            host_refusal(config, description)
            or "it does not run as one C++ program (`slipstream info` says why)"
        )
        raise ConfigError(
            f"{args.model}: {reason}; {install_command('torch')}", field="model"
        ) from None

    tiles = load_tiles(config.device.tile_table, config.device.info.name, tiles_folder())
    partition = None if ranks is None else _partition(config, ranks, description.spec)
    kernels = None if ranks is not None else _kernels(args, config, description, tiles)
    loaded = TorchLoaded(
        config, description, tiles, weights_folder=kept, partition=partition, kernels=kernels
    )
    loaded.phases["resolve"] = found
    load_draft(loaded)
    return description, loaded, tiles


def _kernels(
    args: EngineArgs, config: EngineConfig, description: ModelDescription, tiles: TileTable
) -> PreparedKernels | None:
    """Begin to prepare a GPU's kernels. None where Triton's are not used."""
    info = config.device.info
    if not info.device.startswith("cuda") or config.device.kernels not in ("auto", "triton"):
        return None
    import torch

    from slipstream.platform import platform_of
    from slipstream.platform.cuda import CudaPlatform
    from slipstream.worker.start.prepared_kernels import PreparedKernels

    platform = platform_of(torch.device(info.device))
    assert isinstance(platform, CudaPlatform)
    return PreparedKernels.begin(args, config, description, tiles, platform)


def _host_loaded(
    config: EngineConfig,
    description: ModelDescription,
    kept: Path,
    load_draft: Callable[[LoadedRunner], None],
) -> HostLoaded | None:
    """Load without torch. None if this does not cover the model, its drafts or a setting.

    The reason is logged.
    """
    reason = host_refusal(config, description)
    if reason is None:
        try:
            loaded = HostLoaded(config, description, weights_folder=kept)
            load_draft(loaded)
            return loaded
        except NotCovered as refused:
            reason = refused.reason
    if not config.device.info.is_cuda:
        _logger.info("torch runs the steps: %s", reason)
    return None


def _partition(config: EngineConfig, ranks: Ranks, spec: ModelSpec) -> Partition:
    """Join the other ranks and describe this rank's part."""
    import torch

    from slipstream.platform import platform_of
    from slipstream.platform.peer_copies import try_peer_copies

    device = torch.device(config.device.info.device)
    platform = platform_of(device)
    platform.activate(config.device.num_threads)
    every = ranks.join(platform.collectives, device)
    group, pipe = every.stages(config.parallel.num_stages)
    how = config.parallel.stage
    if device.type == "cuda" and isinstance(how, TensorParallel):
        from slipstream.kernels.triton.rank_sums import try_rank_sums

        try_rank_sums(group, spec.hidden_size * DTYPE_BYTES[config.model.dtype])
        if tokens := peer_copy_tokens(config, spec):
            dtype, is_mixture = (
                getattr(torch, config.model.dtype),
                any(isinstance(x.mlp, MoESpec) for x in spec.layers),
            )
            try_peer_copies(group, platform, tokens, spec.hidden_size, dtype, is_mixture)
    return Partition(
        config.parallel.shard(ranks.rank),
        group,
        pipe,
        every,
        isinstance(how, TensorParallel) and how.sequence,
    )


def _read_head(method: HeadMethod, folder: Path, target: ModelDescription) -> HeadDescription:
    try:
        return read_head(method, folder, target)
    except (UnsupportedModelError, CheckpointError) as error:
        raise ConfigError(f"speculative_config: {error}", field="speculative_config") from error


def _fit(
    config: EngineConfig, loaded: LoadedRunner, activation_bytes: int
) -> tuple[EngineConfig, MemoryLedger, Runner]:
    """Size the KV cache by the memory that is left, allocate it, and account for all of it."""
    spec, ranks = loaded.model.spec, loaded.partition
    one_block = block_bytes(spec, config.cache.block_size, DTYPE_BYTES[config.cache.dtype])
    weights, rows = loaded.model.weights_bytes, 0 if spec.is_encoder else rows_bytes(config)
    if loaded.draft is not None:
        one_block += loaded.draft.block_bytes
        weights += loaded.draft.weights_bytes
    slot = spec.state_bytes(DTYPE_BYTES[config.model.dtype])
    rows += sum(staged_blocks(config, size) * size for size in (one_block, slot))
    graphs = 0 if config.device.enforce_eager else loaded.graph_reserve_bytes(activation_bytes)
    loaded.platform.release_unused()
    free, total = loaded.platform.memory()  # measured with the weights loaded
    config, ledger = size_cache(
        config,
        spec,
        one_block,
        total_bytes=total,
        free_bytes=free,
        weights_bytes=weights,
        activation_bytes=activation_bytes,
        graph_bytes=graphs,
        rows_bytes=rows,
        taken_bytes=activation_bytes + graphs + rows,
        adapter_bytes=0 if loaded.adapters is None else loaded.adapters.num_bytes,
        peer_copy_bytes=0
        if ranks is None or ranks.group.beside is None
        else peer_copy_bytes(config, spec),
        forms=loaded.model.forms,
        agree=(lambda blocks: blocks)
        if ranks is None
        else lambda blocks: ranks.all_ranks.least(blocks)[0],
    )
    runner = loaded.allocate(config, ledger.num_blocks)
    ledger = replace(
        ledger, graph_bytes=runner.graph_bytes, host_expert_bytes=loaded.model.host_bytes
    )
    return config, ledger, runner
