"""A worker's adapters: some in slots on the device, more in host memory. Both are bounded.

1. `load` reads an adapter into host memory. It may evict the least recently used adapter that no
   request needs.
2. `place` copies the adapters of a step into slots. The least recently used slots are reused.
   Copies are queued on the step's stream before the step. Pinned memory belongs to torch's
   allocator, which reuses it only after its copies have ended.
3. Linear layers for which no loaded adapter has weights run as without adapters; so do parts of
   linear layers without weights (`parts`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

import torch

from slipstream.config import LoRASettings
from slipstream.errors import AdapterError
from slipstream.kernels.weights.adapters import LoRAWeights
from slipstream.messages.stats import AdapterStats
from slipstream.model.adapters import AdapterLayout, HostAdapter
from slipstream.model.decoder import Decoder
from slipstream.params.lora_request import LoRARequest
from slipstream.platform import platform_of
from slipstream.spec.adapter_slots import ALONE
from slipstream.spec.adapters import CONFIG_NAME, WEIGHTS_NAME
from slipstream.spec.description import ModelDescription
from slipstream.spec.parallel import Shard
from slipstream.worker.adapter_places import AdapterPlaces


class Adapters:
    def __init__(
        self,
        settings: LoRASettings,
        description: ModelDescription,
        decoder: Decoder,
        shard: Shard = ALONE,
    ) -> None:
        """Allocate the slots. With a `shard`, `decoder` is a rank's part of the model.

        Ranks that make the same calls assign the same slots.
        """
        self.settings = settings
        self.decoder = decoder
        self.layout = AdapterLayout(description, decoder, settings.max_lora_rank, shard)
        device = decoder.device
        self._platform = platform_of(device)
        self._slots = torch.zeros(
            settings.max_loras, self.layout.slot_size, dtype=decoder.dtype, device=device
        )
        self._places = AdapterPlaces(settings.max_cpu_loras)
        self._host: dict[int, HostAdapter] = {}  # by adapter id
        # id → slot, the least recently used first
        self._placed: OrderedDict[int, int] = OrderedDict()
        self._free = list(range(settings.max_loras - 1, -1, -1))
        self._num_reads = self._num_placements = 0
        self.parts: frozenset[tuple[str, int]] = frozenset()
        """(name of the linear layer in its decoder layer, part) for which some adapter so far has weights."""
        self.weights: dict[int, LoRAWeights] = {}
        """Weights of the linear layers that some adapter changes, by the `id` of their `Linear`.
        """

    @property
    def num_bytes(self) -> int:
        """Bytes of device memory that the slots take."""
        return self._slots.nbytes

    def load(self, request: LoRARequest, keep: Callable[[], Collection[int]] = tuple) -> str:
        """Load an adapter into host memory. Returns the version of its files.

        `keep` returns the ids of adapters that must stay. AdapterError if it can't be read, or its
        id belongs to another adapter. EngineOverloadedError if all loaded adapters must stay.
        """
        if (known := self._places.use(request)) is not None:
            return known
        if (victim := self._places.giving_way(keep)) is not None:
            self.unload(victim)
        folder = Path(request.path)
        version = _version(folder)
        adapter = self.layout.read(folder, self._slots.dtype, pinned=self._platform.pins_memory)
        self._num_reads += 1
        self._host[request.id] = adapter
        self._places.add(request, version)
        self._take_parts(adapter)
        return version

    def replace(self, request: LoRARequest) -> str:
        """Read an adapter again, from new files or from the same ones. All requests with its id continue with the new
        weights.

        Returns their version. AdapterError, without any change, if they can't be read or no adapter has this id.
        """
        if request.id not in self._host:
            message = f"no adapter {request.name!r} is loaded that could be replaced in place"
            raise AdapterError(message, field="lora_name")
        folder = Path(request.path)
        version = _version(folder)
        adapter = self.layout.read(folder, self._slots.dtype, pinned=self._platform.pins_memory)
        self._num_reads += 1
        self._host[request.id] = adapter
        self._places.replace(request, version)
        self._take_parts(adapter)
        if (slot := self._placed.get(request.id)) is not None:
            adapter.copy_to(self._slots[slot])
        return version

    def _take_parts(self, adapter: HostAdapter) -> None:
        if not adapter.parts <= self.parts:
            self.parts |= adapter.parts
            found = [
                (p.linear, self.layout.weights(self._slots, p, self.parts))
                for p in self.layout.places.values()
            ]
            self.weights = {id(linear): w for linear, w in found if w.live}

    def unload(self, adapter_id: int) -> None:
        """Drop an adapter, which no request may need. Unknown ids are ignored."""
        self._places.forget(adapter_id)
        self._host.pop(adapter_id, None)
        if (slot := self._placed.pop(adapter_id, None)) is not None:
            self._free.append(slot)

    def place(self, wanted: Iterable[LoRARequest], in_use: Collection[int]) -> dict[int, int]:
        """Place the `wanted` adapters in slots. Returns their slots by id.

        Adapters in the slots `in_use` stay. There must be enough other slots.
        """
        found = dict[int, int]()
        for request in wanted:
            slot = self._placed.get(request.id)
            if slot is None:
                slot = self._free.pop() if self._free else self._evict({*in_use, *found.values()})
                self.load(request)  # reads it again only if it was unloaded
                self._host[request.id].copy_to(self._slots[slot])
                self._placed[request.id] = slot
                self._num_placements += 1
            self._placed.move_to_end(request.id)
            self._places.use(request)
            found[request.id] = slot
        return found

    def _evict(self, in_use: Collection[int]) -> int:
        """Take the least recently used slot that no request uses."""
        victim = next(i for i, slot in self._placed.items() if slot not in in_use)
        return self._placed.pop(victim)

    def stats(self) -> AdapterStats:
        return AdapterStats(
            num_on_device=len(self._placed),
            num_on_host=len(self._host),
            reads_total=self._num_reads,
            placements_total=self._num_placements,
            max_on_device=len(self._placed) + len(self._free),
            names_on_device=tuple(map(self._places.name, self._placed)),
        )


def _version(folder: Path) -> str:
    """Returns a string that changes when the files are rewritten. It is made of their times, sizes
    and inodes."""
    try:
        found = [(folder / name).stat() for name in (CONFIG_NAME, WEIGHTS_NAME)]
    except OSError:
        return ""  # reading them will report the error
    return ":".join(f"{s.st_mtime_ns}.{s.st_size}.{s.st_ino}" for s in found)
