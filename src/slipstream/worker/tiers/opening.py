"""Opens the KV cache's tiers below the device, and computes the digest of everything that blocks depend on.

No torch on a CPU.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from slipstream import __version__
from slipstream.config import EngineConfig
from slipstream.config.forms import HeadDrafts, LearnedDrafts, ModelDrafts
from slipstream.costs.hardware import host_memory
from slipstream.costs.memory import host_slots, staged_blocks
from slipstream.errors import ConfigError
from slipstream.model.load.packed_cache import checkpoint_stamps
from slipstream.spec.description import ModelDescription
from slipstream.spec.positions import LongRopeScaling
from slipstream.worker.tiers.block_store import HostBlockStore
from slipstream.worker.tiers.disk_tier import IDENTITY_BYTES, DiskTier

if TYPE_CHECKING:
    from slipstream.worker.runner import Runner


def open_tiers(
    config: EngineConfig, description: ModelDescription, runner: Runner, sizes: Sequence[int]
) -> HostBlockStore | None:
    """Open the tiers that the settings ask for; None if there are none. `sizes` are the bytes of a
    block, and of a slot of each kind. Each of several ranks gets its fraction of the configured
    bytes, and a folder of its own.

    ConfigError if the folder can't be used, or the host's memory is too small.
    """
    cache, disk = config.cache, None
    if not cache.has_tiers:
        return None
    partition, ranks = runner.loaded.partition, config.parallel.num_ranks
    rank = 0 if partition is None else partition.all_ranks.rank
    free = host_memory()[1]
    if cache.host_bytes is not None:
        if cache.host_bytes > free:
            raise ConfigError(
                f"kv_host_bytes={cache.host_bytes} is more than the {free} bytes of the host's memory that are free; lower it",
                field="kv_host_bytes",
            )
        least = max(sizes) * sum(map(bool, sizes))
        if cache.host_bytes < (least := least * ranks):
            raise ConfigError(
                f"kv_host_bytes={cache.host_bytes} is too small for a block or a state, for which it takes {least} bytes; "
                "raise it",
                field="kv_host_bytes",
            )
        free -= cache.host_bytes
    if cache.handover is not None and cache.handover.limit_bytes > free:
        raise ConfigError(
            f"kv_handover_bytes={cache.handover.limit_bytes} is more than the {max(free, 0)} bytes of the host's memory that "
            "are left for it; lower it",
            field="kv_handover_bytes",
        )
    if cache.disk_bytes is not None:
        assert cache.disk_path is not None
        path = Path(cache.disk_path)
        if partition is not None:
            with contextlib.suppress(OSError):  # raised below, with the folder's name
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
            path /= f"rank-{rank + 1}-of-{ranks}"
        disk = DiskTier(
            path, cache.disk_bytes // ranks, identity(config, description, runner), max(sizes)
        )
    staged = [staged_blocks(config, size) for size in sizes]
    exchange, layout = None, None
    if cache.handover is not None:
        layout = block_layout(config, description, runner, sizes)
        from slipstream.worker.tiers.exchange import BlockExchange  # it needs msgspec

        asked = cache.handover
        exchange = BlockExchange(asked.limit_bytes, sizes, layout, asked.address, of=(rank, ranks))
    slots = host_slots(config, sizes)
    if cache.host_bytes is not None and partition is not None:
        # a pipeline stage with fewer layers has memory for more slots, but all ranks must have the same number
        slots = list(partition.all_ranks.least(*slots))
    return runner.open_store(disk, slots, staged, exchange, layout)


def block_layout(
    config: EngineConfig, description: ModelDescription, runner: Runner, sizes: Sequence[int]
) -> dict[str, str]:
    """Settings that must be equal in two engines that share blocks, by the names that a refusal shows.

    Unlike in `identity`, the processors may differ.
    """
    model, cache = config.model, config.cache
    dummy = model.load_format == "dummy"
    weights = str(description.spec) if dummy else json.dumps(checkpoint_stamps(description))
    found = {
        "version of Slipstream": __version__,
        "model": str(description.path),  # block keys begin with it
        "version of the weights": f"{_digest(weights)} seed {model.seed}"
        if dummy
        else _digest(weights),
        "dtype": model.dtype,
        "quantization": str(model.quantization),
        "kv_cache_dtype": cache.dtype,
        "block_size": str(cache.block_size),
        "layers": _digest(str(cache.groups)),
        "bytes of a block and of a state": " and ".join(map(str, sizes)),
        "runner": type(runner.loaded).__name__,
        "kind of device": runner.platform.kind,
        "speculative_model": _digest(str(_draft_identity(config, runner))),
    }
    if (partition := runner.loaded.partition) is not None:
        found["ranks"] = str(config.parallel.num_ranks)
        found["part of each rank"] = _digest(str((partition.shard, cache.context_ranks)))
    positions = (getattr(a.position, "scaling", None) for a in description.spec.attentions)
    scalings = [s for s in positions if isinstance(s, LongRopeScaling)]
    if scalings:
        used = {"long" if s.is_long(model.max_model_len) else "short" for s in scalings}
        found["LongRoPE's factors, which follow max_model_len,"] = " and ".join(sorted(used))
    if runner.loaded.kv_scales:
        found["scales of the cache"] = _digest(
            str([scale.tolist() for pair in runner.loaded.kv_scales for scale in pair])
        )
    return found


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _draft_identity(config: EngineConfig, runner: Runner) -> list[Any]:
    """Settings that the draft's part of a block depends on; empty if blocks have none. MTP layers belong to the
    model's checkpoint. A head changed on a hub under its old name would only make drafts worse, never answers."""
    drafts, own = config.speculation, list[Any]()
    if runner.loaded.draft is None or not isinstance(drafts, LearnedDrafts):
        return own
    if isinstance(drafts, ModelDrafts | HeadDrafts):
        files = [(file.name, file.stat()) for file in sorted(Path(drafts.model).glob("*"))]
        own = [drafts.model, *((name, x.st_size, x.st_mtime_ns) for name, x in files)]
    return [drafts.method, drafts.quantization, runner.loaded.draft.block_bytes, *own]


def identity(config: EngineConfig, description: ModelDescription, runner: Runner) -> bytes:
    """Digest of everything a block's contents depend on, except what its key covers.

    The key covers the block's tokens, adapter and salt.
    """
    model, cache, device = config.model, config.cache, config.device
    dummy = model.load_format == "dummy"
    known = [
        __version__,
        str(description.spec) if dummy else checkpoint_stamps(description),
        [
            model.dtype,
            model.quantization,
            model.load_format,
            model.seed if dummy else 0,
            model.max_model_len,
        ],
        [cache.dtype, cache.block_size, str(cache.groups)],
        [
            device.info.name,
            device.info.isa,
            device.kernels,
            device.deterministic,
            device.dense_copies,
        ],
        [type(runner.loaded).__name__, runner.ops.describe()],
        str(
            None
            if runner.loaded.partition is None
            else (runner.loaded.partition.shard, cache.context_ranks)
        ),
        _draft_identity(config, runner),
    ]
    digest = hashlib.sha256(json.dumps(known).encode())
    for pair in runner.loaded.kv_scales or ():
        for scale in pair:
            digest.update(np.asarray(scale.tolist(), np.float32).tobytes())
    return digest.digest()[:IDENTITY_BYTES]
