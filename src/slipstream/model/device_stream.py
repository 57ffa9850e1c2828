"""Layers whose weights stay in host memory and are copied to the device ahead of use.
`spec.offload` chooses them.

  pinned memory ──copy──> place 0, place 1, place 0, …      while earlier layers are computed

1. A layer's weights are views of its place (a staging buffer), at the same addresses in every step.
   So its `Layer` is made once.
2. The host never waits. On the device a layer runs after its copy, and a copy runs after the layer
   that used the place before. Copies follow each other without a gap, also from one step to the
   next, as long as computing takes less time than copying.
3. Norms and other small tensors stay on the device, and so do the tables that layers share.
4. A copy is cut into pieces, so that a step's own small inputs pass between them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import OutOfMemoryError
from slipstream.kernels.layouts import MLAParams
from slipstream.kernels.weights.forms import JoinedLinear, Linear
from slipstream.model.layer_stream import with_parts
from slipstream.model.layers.layer import Layer
from slipstream.platform import Event, Platform
from slipstream.spec.offload import NUM_SLOTS, PIECE

PINNERS = 4
"""Number of threads that pin memory. Pinning is slow, because the system clears each page first.

With one thread, a start with 23 GiB of random weights took 17.6 s on an H200's host, most of it for
pinning.
"""

ALIGNMENT = 512
"""Alignment in bytes of a tensor in a staging buffer, as torch's allocator aligns."""


def with_tensors(layer: Layer, change: Callable[[Tensor], Tensor]) -> Layer:
    """Returns the layer with each tensor of its weights changed, in order.

    A weight's additional sparse form is dropped, because it would have to be copied too.
    """

    def changed(w: Linear | MLAParams) -> Linear | MLAParams:
        if isinstance(w, JoinedLinear):
            parts: Any = tuple(changed(part) for part in w.parts)
            return JoinedLinear(weight=parts[0].weight, parts=parts)
        own = {f.name: getattr(w, f.name) for f in dataclasses.fields(w)}
        new: dict[str, Any] = {
            n: change(x) for n, x in own.items() if isinstance(x, Tensor) and n != "cos_sin"
        }
        if isinstance(w, Linear):
            new["sparse"] = None
        return dataclasses.replace(w, **new)

    made: Layer = with_parts(layer, (Linear, MLAParams), changed)
    return made


def layer_bytes(layer: Layer) -> int:
    """Bytes that the layer occupies in a staging buffer, alignment included."""
    total = 0

    def count(tensor: Tensor) -> Tensor:
        nonlocal total
        total += _aligned(tensor.nbytes)
        return tensor

    with_tensors(layer, count)
    return total


def without_data(layer: Layer) -> Layer:
    """Returns the layer with its weights' tensors on the meta device, with their shapes and
    types."""
    return with_tensors(
        layer, lambda x: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    )


class DeviceStream:
    """Hands the decoder its streamed layers in order, copied to the device in time. `read_bytes` counts copied bytes."""

    def __init__(self, platform: Platform) -> None:
        self._platform, self._copies = platform, platform.copy_queue()
        self._pinners = ThreadPoolExecutor(PINNERS, thread_name_prefix="pinning")
        self._pinning: dict[int, list[Future[Tensor]]] = {}
        self._host: dict[int, list[Tensor]] = {}  # pinned uint8 pieces by layer
        self._sizes: dict[int, int] = {}
        self._order: list[int] = []
        self._places: list[Tensor] = []  # uint8 staging buffers on the device
        # copies that are done or running, by layer not computed since
        self._arrivals: dict[int, Event | None] = {}
        self._computing: int | None = None  # the layer whose weights the latest queued work reads
        self._layouts: set[tuple[Any, ...]] = set()
        self._idle = False
        self.read_bytes = 0

    # --- At the start ---

    def expect(self, sizes: Mapping[int, int]) -> None:
        """Announces the `layer_bytes` of the layers to keep in host memory, in order, and starts
        pinning memory while loading continues."""
        for index, size in sorted(sizes.items()):
            parts = (min(PIECE, size - begin) for begin in range(0, size, PIECE))
            self._pinning[index] = [
                self._pinners.submit(self._platform.pinned, part) for part in parts
            ]
        self._pinners.shutdown(wait=False)

    def keep(self, index: int, layer: Layer) -> Layer:
        """Copies the weights of an announced layer to the host, and returns the layer
        `without_data`.

        OutOfMemoryError if the host has no pinned memory left.
        """
        size, at = layer_bytes(layer), 0
        try:
            pieces = [part.result() for part in self._pinning.pop(index)]
        except RuntimeError as error:
            self._pinners.shutdown(wait=False, cancel_futures=True)
            raise OutOfMemoryError(
                f"weights_bytes: the host has no pinned memory left for layer {index} ({size / 2**20:,.0f} MiB): {error}; "
                "raise weights_bytes, or take a smaller format of the weights (quantization)",
                field="weights_bytes",
            ) from error

        def copy(tensor: Tensor) -> Tensor:
            nonlocal at
            memory, done = _bytes_of(tensor), 0
            while done < len(memory):
                number, begin = divmod(at + done, PIECE)
                count = min(PIECE - begin, len(memory) - done)
                pieces[number][begin : begin + count].copy_(memory[done : done + count])
                done += count
            at += _aligned(tensor.nbytes)
            return tensor

        with_tensors(layer, copy)
        self._layouts.add(_layout(layer))
        self._host[index], self._sizes[index] = pieces, size
        self._order.append(index)
        return without_data(layer)

    def open(self) -> None:
        """Allocates the staging buffers on the device and starts copying layers. Call it after
        `keep` of all layers."""
        size = max(self._sizes.values())
        for _ in range(min(NUM_SLOTS, len(self._order))):
            self._places.append(torch.empty(size, dtype=torch.uint8, device=self._platform.device))
        self._fill()

    def placed(self, index: int, layer: Layer) -> Layer:
        """Returns a layer from `keep` with its weights as views of its staging buffer on the
        device."""
        place, at = self._places[self._place_of(index)], 0

        def view(tensor: Tensor) -> Tensor:
            nonlocal at
            memory = place[at : at + tensor.nbytes]
            at += _aligned(tensor.nbytes)
            order = _order_of(tensor)
            shape = [tensor.shape[dim] for dim in order]
            return (
                memory.view(tensor.dtype)
                .view(shape)
                .permute([order.index(dim) for dim in range(len(order))])
            )

        return with_tensors(layer, view)

    # --- In a step ---

    @torch.inference_mode()
    def before(self, layer: int) -> None:
        """Makes the work queued next wait for the layer's copy, and starts copying the next layers.

        Call it before each layer, in order, and after the last one with the number of layers.
        """
        if self._idle:
            return
        if self._computing is not None:
            self._begin(self._after(self._computing))
            self._computing = None
        if layer not in self._host:
            return
        self._begin(layer)
        self._platform.run_after(self._arrivals.pop(layer))
        self._computing = layer

    @contextmanager
    def idle(self) -> Iterator[None]:
        """Context manager for steps whose results are unused: no layer is copied, and they compute
        with whatever is in the staging buffers.

        If layers have different layouts, they are copied nevertheless, because one can't replace
        another.
        """
        self._platform.synchronize()  # so that the staging buffers are full
        self._idle = len(self._layouts) == 1
        try:
            yield
        finally:
            self._idle = False

    @property
    def step_bytes(self) -> int:
        """Bytes that one step copies to the device."""
        return sum(self._sizes.values())

    def _fill(self) -> None:
        for layer in self._order[: len(self._places)]:
            self._begin(layer)
        self._computing = None

    def _place_of(self, layer: int) -> int:
        return self._order.index(layer) % len(self._places)

    def _after(self, layer: int) -> int:
        """The layer that uses the staging buffer of `layer` next, in this step or the following
        one."""
        number = self._order.index(layer) + len(self._places)
        return (
            self._order[number] if number < len(self._order) else self._order[self._place_of(layer)]
        )

    def _begin(self, layer: int) -> None:
        """Queues a layer's copy to its staging buffer after all queued work, unless already
        done."""
        if layer in self._arrivals:
            return
        place = self._place_of(layer)
        for other in [x for x in self._arrivals if self._place_of(x) == place]:
            del self._arrivals[other]  # copied for a step that ended before it
        at = 0
        with self._copies.behind():
            for piece in self._host[layer]:
                self._places[place][at : at + len(piece)].copy_(piece, non_blocking=True)
                at += len(piece)
        self._arrivals[layer] = self._copies.record()
        self.read_bytes += at


def _layout(layer: Layer) -> tuple[Any, ...]:
    found: list[Any] = []

    def note(tensor: Tensor) -> Tensor:
        found.append((tensor.shape, tensor.stride(), tensor.dtype))
        return tensor

    with_tensors(layer, note)
    return tuple(found)


def _bytes_of(tensor: Tensor) -> Tensor:
    """Returns a tensor's memory as uint8."""
    return tensor.permute(_order_of(tensor)).reshape(-1).view(torch.uint8)


def _order_of(tensor: Tensor) -> list[int]:
    """A tensor's dimensions ordered by stride, largest first."""
    return sorted(range(tensor.dim()), key=tensor.stride, reverse=True)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
