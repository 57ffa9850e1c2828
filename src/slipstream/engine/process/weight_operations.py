"""A front end's operations on an engine core's weights and pauses, by vLLM's names."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from functools import partial
from typing import Any

from slipstream.engine.process.core_operations import CoreOperations
from slipstream.engine.process.operation_messages import (
    ChangeWeights,
    FinishWeights,
    FlushCache,
    GetWeights,
    PauseGeneration,
    ResumeGeneration,
)
from slipstream.engine.threads.fair_threads import FairThreads
from slipstream.engine.weight_calls import as_message, declared, joining, piece_of
from slipstream.errors import EngineError
from slipstream.messages.weight_ops import (
    JOIN_S,
    BeginWeights,
    DropWeights,
    JoinWeightGroup,
    LeaveWeightGroup,
    WeightsOp,
)
from slipstream.messages.weights import PauseMode, WeightsInfo

# threads that write pieces to files for the engine's process
_pieces = FairThreads("weights", 1, per_client=1)


class WeightOperations(CoreOperations):
    """Weight updates while the engine serves. After a RequestError or CheckpointError nothing has
    changed; after an EngineError something may have."""

    async def init_weight_transfer_engine(self, request: Any = None) -> WeightsInfo:
        """Join the group in which a trainer broadcasts, and return when all have joined. Steps continue until
        the trainer listens. `init_info` has `master_address`, `master_port`, `world_size`, `rank_offset` (the
        engine's first rank; 1), `backend` ("nccl", "gloo") and `group_name`. Without them, or with the
        backend "ipc", "tensors" or "folder", no group is joined."""
        group = joining(request)
        if group is None:
            return await self.weights()
        await _listens(group)
        return await self._change_weights(group)

    async def leave_weight_group(self, name: str) -> WeightsInfo:
        return await self._change_weights(LeaveWeightGroup(name))

    async def start_weight_update(self, request: Any = None) -> WeightsInfo:
        """Begin an update. If `names`, `dtype_names` and `shapes` of all tensors are given, one
        that doesn't fit the model raises now."""
        return await self._change_weights(BeginWeights(declared(request)))

    async def update_weights(self, request: Any) -> WeightsInfo:
        """Send a piece of the update (forms: `engine/weight_calls.py`). Returns when the core has received it."""
        with ExitStack() as stack:
            message = as_message(piece_of(request))
            piece = await _pieces.run(partial(stack.enter_context, message))
            return await self._change_weights(piece)

    async def finish_weight_update(self, weight_version: str | None = None) -> WeightsInfo:
        """Write the update in place, between two steps. Later tokens have the version `weight_version`, by default the next
        number."""
        info: WeightsInfo = await self._ask_for(lambda t: FinishWeights(weight_version, t))
        return info

    async def abort_weight_update(self) -> WeightsInfo:
        """Discard an unfinished update. The old weights stay in use."""
        return await self._change_weights(DropWeights())

    async def pause_generation(
        self, *, mode: PauseMode = "abort", clear_cache: bool = False
    ) -> WeightsInfo:
        """Make no step until `resume_generation`, and return when none runs. `mode`: requests "keep" their
        blocks, are computed again ("retract"), end first ("wait"), or end now ("abort"). `clear_cache` also
        forgets cached prefixes, which requires one of the last two modes; an update does so anyway."""
        info: WeightsInfo = await self._ask_for(lambda t: PauseGeneration(mode, t))
        if clear_cache:
            await self.reset_prefix_cache()
        return info

    async def resume_generation(self) -> WeightsInfo:
        info: WeightsInfo = await self._ask_for(ResumeGeneration)
        return info

    async def is_paused(self) -> bool:
        return (await self.weights()).is_paused

    async def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes. RequestError while requests run."""
        await self._ask_for(FlushCache)

    async def weights(self, *, checksums: bool = False) -> WeightsInfo:
        """State of the current weights. With `checksums`, checksums of all parameters are
        computed."""
        info: WeightsInfo = await self._ask_for(lambda t: GetWeights(checksums, t))
        return info

    async def _change_weights(self, op: WeightsOp) -> WeightsInfo:
        info: WeightsInfo = await self._ask_for(lambda t: ChangeWeights(op, t))
        return info


async def _listens(group: JoinWeightGroup) -> None:
    """Wait until the group's rank 0 listens. Called before joining, because the engine makes no
    steps while it joins, and most of that time would be spent waiting for the trainer. EngineError
    after `JOIN_S`."""
    try:
        async with asyncio.timeout(JOIN_S):
            while True:
                try:
                    _, writer = await asyncio.open_connection(group.address, group.port)
                except OSError:
                    await asyncio.sleep(0.1)
                else:
                    writer.close()
                    return
    except TimeoutError:
        raise EngineError(
            f"no trainer of the group {group.name!r} listened at {group.address}:{group.port} for {JOIN_S:.0f} s"
        ) from None
