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

_pieces = FairThreads("weights", 1, per_client=1)  # which write pieces for the engine's process


class WeightOperations(CoreOperations):
    """Weights that change while the engine serves. Errors are RequestError, CheckpointError or EngineError; but of the last,
    nothing has changed."""

    async def init_weight_transfer_engine(self, request: Any = None) -> WeightsInfo:
        """Join the group in which a trainer broadcasts, and return when all have joined. Until the trainer listens, steps
        go on. `init_info` has `master_address`,
        `master_port`, `world_size`, `rank_offset` (the engine's first rank; 1), `backend` ("nccl", "gloo") and `group_name`.
        Without them, or with the backend "ipc", "tensors" or "folder", there is nothing to join."""
        group = joining(request)
        if group is None:
            return await self.weights()
        await _listens(group)
        return await self._change_weights(group)

    async def leave_weight_group(self, name: str) -> WeightsInfo:
        return await self._change_weights(LeaveWeightGroup(name))

    async def start_weight_update(self, request: Any = None) -> WeightsInfo:
        """Begin an update. With `names`, `dtype_names` and `shapes` of all tensors, one that does not fit the model is
        an error now."""
        return await self._change_weights(BeginWeights(declared(request)))

    async def update_weights(self, request: Any) -> WeightsInfo:
        """Send a piece of the update (`engine/weight_calls.py` has the forms). It returns when the piece has come."""
        with ExitStack() as stack:
            message = as_message(piece_of(request))
            piece = await _pieces.run(partial(stack.enter_context, message))
            return await self._change_weights(piece)

    async def finish_weight_update(self, weight_version: str | None = None) -> WeightsInfo:
        """Write the update in place, between two steps. Tokens after it are of `weight_version`, or else the next number."""
        info: WeightsInfo = await self._ask_for(lambda t: FinishWeights(weight_version, t))
        return info

    async def abort_weight_update(self) -> WeightsInfo:
        """Forget an update that is not finished. The old weights go on."""
        return await self._change_weights(DropWeights())

    async def pause_generation(
        self, *, mode: PauseMode = "abort", clear_cache: bool = False
    ) -> WeightsInfo:
        """Make no step until `resume_generation`, and return when none runs. `mode`: requests "keep" their blocks, are
        computed again ("retract"), end first ("wait"), or end now ("abort"). `clear_cache` forgets cached prefixes, which
        needs one of the last two; an update does so by itself."""
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
        """The state of the running weights. With `checksums`, those of all parameters are
        computed."""
        info: WeightsInfo = await self._ask_for(lambda t: GetWeights(checksums, t))
        return info

    async def _change_weights(self, op: WeightsOp) -> WeightsInfo:
        info: WeightsInfo = await self._ask_for(lambda t: ChangeWeights(op, t))
        return info


async def _listens(group: JoinWeightGroup) -> None:
    """Wait until the group's rank 0 listens. Called before joining, because the engine makes no
    step while it joins, and most of that wait is for a trainer that is not there yet. EngineError
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
