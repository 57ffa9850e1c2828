"""Base of the runners of all models: the cache's memory, tiers, counts of experts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from slipstream.kernels.cache.tensors import cache_parts
from slipstream.kernels.metadata import LayerKV
from slipstream.messages.stats import ExpertTokens
from slipstream.worker.device_cache import slot_parts
from slipstream.worker.in_flight import InFlightStep
from slipstream.worker.sampling.constrained import AwaitingMask
from slipstream.worker.tiers.block_store import HostBlockStore, block_arrays
from slipstream.worker.tiers.disk_tier import DiskTier

if TYPE_CHECKING:
    from slipstream.worker.experts.balance import LayerSwap
    from slipstream.worker.experts.places import ExpertPlaces
    from slipstream.worker.loaded_runner import LoadedRunner
    from slipstream.worker.tiers.exchange import BlockExchange


class Runner(ABC):
    """A loaded model with its cache. `release` frees the cache."""

    graph_bytes = 0
    graph_sizes: tuple[int, ...] = ()
    """Sizes of captured steps."""

    def __init__(self, loaded: LoadedRunner, kv: list[LayerKV]) -> None:
        self.loaded, self.kv = loaded, kv
        self.config = loaded.config
        self.partition = loaded.partition
        self.platform = loaded.platform
        self.device = loaded.platform.device
        self.ops = loaded.ops
        self.model = loaded.model
        self.forwards = loaded.forwards
        self.adapters = loaded.adapters
        self.media = loaded.media
        self.draft = loaded.draft
        self.phases = loaded.phases
        self._block_rows = loaded.ops.block_rows(cache_parts(kv))
        self._slot_rows = [loaded.ops.block_rows(parts) for parts in slot_parts(kv)]

    @abstractmethod
    def launch(self, plan: Any) -> InFlightStep | AwaitingMask:
        """Queue one step."""

    @abstractmethod
    def max_in_flight(self, plan: Any) -> int:
        """Number of steps that may be in flight once `plan` is launched.

        1 means that `launch` computes the step before it returns, so the previous step's tokens
        would be delayed.
        """

    @abstractmethod
    def capture(self) -> None:
        """Capture graphs, on a GPU."""

    def capture_next(self) -> bool:
        """Capture one more graph that steps may need. False if there is none left."""
        return False

    def forget_rows(self) -> None:  # noqa: B027 (texts have no rows)
        """Drop every sequence after a step failed. Results of steps that the device still computes
        are ignored.
        """

    def settle(self) -> None:  # noqa: B027 (texts are done when launched)
        """Finish a step that a CPU still computes."""

    def release(self) -> LoadedRunner:
        """Free the cache. No step may be in flight, and the runner can't be used afterwards."""
        self.settle()
        self.kv.clear()  # in place, because the program holds the same list
        if self.draft is not None:
            self.draft.release()
        return self.loaded

    def open_store(
        self,
        disk: DiskTier | None,
        slots: Sequence[int],
        staged: Sequence[int],
        exchange: BlockExchange | None = None,
        layout: Mapping[str, str] | None = None,
    ) -> HostBlockStore:
        """Open the tiers below the cache: host memory (GPU only) with `slots` slots for each kind
        of cache, and disk. `staged`: how many of each kind are copied at once. A block includes the
        draft model's keys and values. `exchange` and `layout` are for hand-overs between
        engines."""
        blocks = self._block_rows
        if self.draft is not None:
            blocks = self.ops.block_rows([*cache_parts(self.kv), *self.draft.block_parts()])
        rows = blocks, *self._slot_rows
        if not any(slots) and (exchange is None or not self.platform.is_asynchronous):
            arrays = [block_arrays(part.arrays) for part in rows]
            return HostBlockStore(arrays, disk, self.settle, exchange, layout)
        from slipstream.worker.tiers.device_blocks import DeviceBlocks

        return DeviceBlocks(rows, self.ops, slots, staged, disk, self.platform, exchange, layout)

    def expert_load(self) -> ExpertTokens:
        """Tokens per expert since the start, for each layer with experts."""
        return self.loaded.experts.read()

    def reset_expert_load(self) -> None:
        """Reset the counts, to leave out dummy steps before the first request."""
        self.loaded.experts.reset()

    def movable_load(self) -> tuple[ExpertTokens, int]:
        """`expert_load` of layers whose experts can change ranks, and an expert's weight bytes."""
        places = self._places
        load = tuple(own for own in self.loaded.experts.read() if own[0] in places.layers)
        return load, places.expert_bytes

    def swap_experts(self, swaps: Sequence[LayerSwap]) -> None:
        """Swap experts between places before the next step. All ranks must make this call."""
        self.settle()
        self._places.swap(swaps)

    @property
    def _places(self) -> ExpertPlaces:
        assert self.loaded.places is not None, "the experts are not distributed over ranks"
        return self.loaded.places
