"""Chooses how a model is loaded: without torch if one C++ program covers it, otherwise with torch.

`load_runner` finds the model and the device, resolves the settings, and loads the weights. A cache is not part of it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from slipstream.base.priority import leave_low_priority
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
from slipstream.config.forms import (
    ContextParallel,
    LearnedDrafts,
    ModelDrafts,
    MTPDrafts,
    TensorParallel,
)
from slipstream.costs.fit import check_weights_fit
from slipstream.costs.memory import peer_copy_tokens
from slipstream.errors import CheckpointError, ConfigError, UnsupportedModelError, install_command
from slipstream.hub import machine_folder, resolve_model, tiles_folder, weights_folder
from slipstream.model.layers.layer import Partition
from slipstream.spec.description import ModelDescription, read_spec
from slipstream.spec.devices.autotune_table import NO_TILES, TileTable, load_tiles
from slipstream.spec.drafts.head_readers import read_head
from slipstream.spec.drafts.heads import HeadDescription, HeadMethod
from slipstream.spec.model import ModelSpec, MoESpec
from slipstream.spec.reason import NotCovered
from slipstream.worker.device import detect
from slipstream.worker.forward.forward_paths import host_refusal
from slipstream.worker.host_loading import HostLoaded
from slipstream.worker.loaded_runner import LoadedRunner

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
        """Connect with the other ranks, and return their group."""


def load_runner(
    args: EngineArgs,
    *,
    progress: Callable[[str], None] = lambda phase: None,
    by_torch: bool = False,
    ranks: Ranks | None = None,
    device: DeviceInfo | None = None,
    known: ModelDescription | None = None,
) -> tuple[ModelDescription, LoadedRunner, TileTable]:
    """Load the model that `args` describe, without a cache. With `ranks`, load one rank's part.

    The engine configuration is `loaded.config`. `by_torch`: see `LocalExecutor.build`. `device`:
    the device, if already chosen. `known`: the model's description, if already read; used if a GGUF
    file, whose header is slow to read, is unchanged. ConfigError if the model is to be split and
    there are no `ranks`.
    """
    size = 1 if ranks is None else ranks.size
    rank, num_local = (0, 1) if ranks is None else (ranks.local_rank, ranks.local_size)
    if size != num_ranks(args):
        field = split_setting(args)
        raise ConfigError(f"this works on one device: leave {field} at 1", field=field)
    begin = time.perf_counter()
    progress("model")
    path = resolve_model(args.model, download_dir=args.download_dir)
    if known is not None and known.gguf is not None and known.gguf.is_current:
        description = known
    else:
        description = read_spec(path).taking_media(args.max_images)
    progress("device")
    once = partial(progress, "how fast this CPU is, once a machine")
    folder, threads = machine_folder(), args.num_threads
    info = device or detect(
        args.device, folder, num_threads=threads, rank=rank, num_ranks=num_local, measuring=once
    )
    config = resolve(args, description, info).of_rank
    # otherwise, the process that started the ranks has checked
    if ranks is None or (info.is_cuda and not ranks.mixed):
        check_weights_fit(config, description)
    found = time.perf_counter() - begin
    progress("weights")
    kept = packed_folder(path) or weights_folder(args.download_dir)

    def load_draft(loaded: LoadedRunner) -> None:
        how = config.speculation
        if not isinstance(how, LearnedDrafts):
            return
        pipe = None if loaded.partition is None else loaded.partition.pipe
        proposes = pipe is None or loaded.model.spec.has_last
        if pipe is not None and loaded.model.spec.has_first:
            loaded.receive_drafts(pipe)
        if proposes:
            progress("draft model")
        if isinstance(how, ModelDrafts):
            if proposes:
                folder = resolve_model(how.model, download_dir=args.download_dir)
                loaded.load_draft(read_spec(folder), how, weights_folder(args.download_dir))
            return
        folder = path
        if not isinstance(how, MTPDrafts):
            folder = resolve_model(how.model, download_dir=args.download_dir)
        head = _read_head(how.method, folder, description)
        if pipe is not None:  # all stages pass on the states of these layers
            loaded.model.decoder.relays = head.spec.read_layers
        if proposes:
            loaded.load_head(head, how)

    if not by_torch and (host := _host_loaded(config, description, kept, load_draft)) is not None:
        host.phases["resolve"] = found
        return description, host, NO_TILES
    leave_low_priority()  # torch's threads inherit the priority of the thread that starts them
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
    """Start preparing a GPU's kernels. None if Triton is not used."""
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
    """Load the model without torch. None if that is not possible for the model, its drafts or a
    setting; the reason is logged.
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
    every.in_order = config.device.deterministic
    group, pipe = every.stages(config.parallel.num_stages)
    how = config.parallel.stage
    context = None
    if config.cache.context_ranks > 1:
        context = group.part(group.size // config.cache.context_ranks)
    if device.type == "cuda" and group.size > 1:
        from slipstream.kernels.triton.peer_collectives import try_peer_collectives

        row_bytes = spec.hidden_size * DTYPE_BYTES[config.model.dtype]
        try_peer_collectives(group, row_bytes)
        if context is not None and context is not group:
            try_peer_collectives(context, row_bytes)
        if isinstance(how, TensorParallel) and (tokens := peer_copy_tokens(config, spec)):
            dtype = getattr(torch, config.model.dtype)
            is_mixture = any(isinstance(x.mlp, MoESpec) for x in spec.layers)
            try_peer_copies(group, platform, tokens, spec.hidden_size, dtype, is_mixture)
    return Partition(
        config.parallel.shard(ranks.rank),
        group,
        pipe,
        every,
        context,
        isinstance(how, ContextParallel) or (isinstance(how, TensorParallel) and how.sequence),
    )


def _read_head(method: HeadMethod, folder: Path, target: ModelDescription) -> HeadDescription:
    try:
        return read_head(method, folder, target)
    except (UnsupportedModelError, CheckpointError) as error:
        raise ConfigError(f"speculative_config: {error}", field="speculative_config") from error
