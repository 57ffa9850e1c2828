"""Sizes the KV cache by a device's memory next to the weights."""

from __future__ import annotations

from dataclasses import replace

from slipstream.config import DTYPE_BYTES, KV_BYTES, EngineConfig
from slipstream.costs.hardware import host_memory
from slipstream.costs.memory import (
    MemoryLedger,
    block_bytes,
    peer_copy_bytes,
    size_cache,
    staged_blocks,
)
from slipstream.errors import OutOfMemoryError
from slipstream.spec.cache import slot_sizes
from slipstream.worker.inputs.rows import rows_bytes
from slipstream.worker.loaded_runner import LoadedRunner
from slipstream.worker.runner import Runner


def fit_cache(
    config: EngineConfig, loaded: LoadedRunner, activation_bytes: int
) -> tuple[EngineConfig, MemoryLedger, Runner]:
    """Size the KV cache by the remaining memory, allocate it, and account for all memory."""
    spec, ranks = loaded.model.spec, loaded.partition
    one_block = block_bytes(spec, config.cache.rank_block_size, KV_BYTES[config.cache.dtype])
    weights, rows = loaded.model.weights_bytes, 0 if spec.is_encoder else rows_bytes(config)
    if loaded.draft is not None:
        one_block += loaded.draft.block_bytes * loaded.model.spec.block_scales[0]
        weights += loaded.draft.weights_bytes
    sizes = one_block, *slot_sizes(spec, DTYPE_BYTES[config.model.dtype])
    rows += sum(staged_blocks(config, size) * size for size in sizes)
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
        if ranks is None or ranks.group.overlapped is None
        else peer_copy_bytes(config, spec),
        forms=loaded.model.forms,
        agree=(lambda blocks: blocks)
        if ranks is None
        else lambda blocks: ranks.all_ranks.least(blocks)[0],
    )
    if ledger.returned_expert_bytes:
        check_experts(ledger, host_memory()[1], cache_is_there=config.device.info.is_cuda)
    runner = loaded.allocate(config, ledger.num_blocks)
    ledger = replace(
        ledger, graph_bytes=runner.graph_bytes, host_expert_bytes=loaded.model.host_bytes
    )
    return config, ledger, runner


def check_experts(ledger: MemoryLedger, free_bytes: int, *, cache_is_there: bool) -> None:
    """Check that the host's `free_bytes` suffice for the experts of all cached tokens, which are
    returned with answers. On a CPU they must also hold the cache, which is not allocated yet."""
    held, cache = ledger.returned_expert_bytes, 0
    each = held // ledger.num_blocks
    if not cache_is_there:
        cache = ledger.kv_bytes + ledger.state_bytes
        each += ledger.block_bytes
    if held + cache <= free_bytes:
        return
    most = max(0, free_bytes - (ledger.state_bytes if cache else 0)) // each * ledger.block_bytes
    beside = f" next to its {cache}" if cache else ""
    raise OutOfMemoryError(
        f"enable_return_routed_experts: the experts of the cache's {ledger.num_kv_tokens} tokens take {held} bytes of the "
        f"host's memory{beside}, and {free_bytes} are free; set kv_cache_bytes to at most {most}",
        field="kv_cache_bytes",
    )
