"""Layers whose weights are read from a file ahead of use, on a CPU. `spec.offload` chooses them.

  file ──read──> slot 0, slot 1, slot 0, …      by a thread, while earlier layers are computed

1. A layer's packed weights are views of its slot, at the same addresses every time. So its `Layer`
   is built once.
2. Norms, biases and other small tensors stay in memory.
3. The file is written layer by layer when the model is loaded, so that at most one layer is in
   memory in addition to those that stay. It has no name, so nothing is left of it, however the
   process ends.
4. Data stays in the system's page cache as long as nothing else needs the memory. Then reading it
   again is a copy.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.errors import CheckpointError
from slipstream.kernels.cpu.native import Arena, Bytes
from slipstream.kernels.cpu.packed import NativeLinear, stand_in
from slipstream.kernels.cpu.program.moe import NativeExperts
from slipstream.model.layers.layer import Layer
from slipstream.spec.offload import CHUNK, NUM_SLOTS

ALIGNMENT = 4096
READERS = 2
"""Number of reading threads. One thread does not reach the bandwidth of a disk or of the page cache."""


def with_parts(value: Any, kinds: tuple[type, ...], change: Callable[[Any], Any]) -> Any:
    """Returns a layer (or a part of one) with each part of these `kinds` changed, in order."""
    if isinstance(value, kinds):
        return change(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        own = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
        changed = {
            name: new
            for name, old in own.items()
            if (new := with_parts(old, kinds, change)) is not old
        }
        return dataclasses.replace(value, **changed) if changed else value
    return value


def products_of(value: Any) -> Iterator[NativeLinear | NativeExperts]:
    """Yields the packed weights of a layer, in order."""
    if isinstance(value, (NativeLinear, NativeExperts)):
        yield value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from products_of(getattr(value, field.name))


def layer_bytes(layer: Layer) -> int:
    return sum(_aligned(part.data.size) for w in products_of(layer) for part in w.parts)


class LayerStream:
    """Hands the decoder its streamed layers in order, read from the file in time.

    `read_bytes` is the number of bytes read. With `forgets` the page cache drops what was read, so
    that benchmarks measure the disk.
    """

    def __init__(self, folder: Path) -> None:
        """Opens an unnamed file in `folder`. CheckpointError if that fails."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 (it is read as long as the model is there)
        except OSError as error:
            raise CheckpointError(
                f"weights that are read as needed are kept in a file in {folder}, which can't be written: {error}",
                field="weights_bytes",
            ) from error
        self._spans: dict[int, tuple[int, int]] = {}  # in the file, by layer: (offset, size)
        self._order: list[int] = []
        self._slots: list[Bytes] = []
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="weights")
        self._reading: dict[int, list[Future[None]]] = {}
        self._end = 0
        self.read_bytes, self.forgets = 0, False

    # --- At the start ---

    def write(self, index: int, layer: Layer) -> None:
        """Writes a layer's packed weights to the file. They may be dropped afterwards."""
        begin = self._end
        try:
            for part in (part for w in products_of(layer) for part in w.parts):
                _write(self._file.fileno(), part.data, self._end)
                self._end += _aligned(part.data.size)
            os.ftruncate(self._file.fileno(), self._end)
        except OSError as error:
            message = f"weights that are read as needed can't be written to their file: {error}"
            raise CheckpointError(message, field="weights_bytes") from error
        self._spans[index] = begin, self._end - begin
        self._order = sorted(self._spans)

    def resident(self, index: int, layer: Layer) -> Layer:
        """Returns the layer with its weights read into separate memory. Call it after `write` of
        all layers."""
        offset, size = self._spans[index]
        memory = Arena(None, 0).take(size)
        for reading in self._submit(memory, offset):
            reading.result()
        return _moved(layer, memory)

    def keep_only(self, layers: Sequence[int]) -> None:
        """Selects the layers that are read in each step, and allocates their slots. The other
        layers stay in memory."""
        self._spans = {i: self._spans[i] for i in layers}
        self._order = sorted(self._spans)
        size = max(size for _, size in self._spans.values())
        count = min(NUM_SLOTS, len(self._order))
        arena = Arena(None, 0)
        for _ in range(count):
            whole = arena.take(size + ALIGNMENT)
            self._slots.append(whole[-whole.ctypes.data % ALIGNMENT :][:size])

    def streamed(self, index: int, layer: Layer) -> Layer:
        """Returns the layer with its weights as views of its slot."""
        return _moved(layer, self._slots[self._slot_of(index)])

    # --- In a step ---

    def before(self, layer: int) -> None:
        """Waits until the layer is in its slot, and starts reading the next ones. Call it before
        each layer, in order, and after the last one with the number of layers."""
        at = self._spans.get(layer)
        if at is None:
            if layer > self._order[-1]:
                self._begin(self._order[0])  # for the next step
            return
        self._begin(layer)
        for reading in self._reading.pop(layer):
            reading.result()
        following = self._order[(self._order.index(layer) + 1) % len(self._order)]
        if self._slot_of(following) != self._slot_of(layer):
            self._begin(following)

    def _slot_of(self, layer: int) -> int:
        return self._order.index(layer) % len(self._slots)

    def _begin(self, layer: int) -> None:
        """Starts reading a layer into its slot, unless already done.

        The slot's previous layer has been computed, because CPU calls are synchronous.
        """
        if layer in self._reading:
            return
        if overwritten := [x for x in self._reading if self._slot_of(x) == self._slot_of(layer)]:
            for other in overwritten:  # read for a step that ended before it
                for reading in self._reading.pop(other):
                    reading.result()
        offset, size = self._spans[layer]
        self._reading[layer] = self._submit(self._slots[self._slot_of(layer)][:size], offset)
        self.read_bytes += size

    def _submit(self, into: Bytes, offset: int) -> list[Future[None]]:
        return [
            self._readers.submit(self._read, into[i : i + CHUNK], offset + i)
            for i in range(0, into.size, CHUNK)
        ]

    def _read(self, into: Bytes, offset: int) -> None:
        rest, at = into.data, offset
        while rest:
            count = os.preadv(self._file.fileno(), [rest], at)
            if count == 0:
                raise CheckpointError(
                    "the file of weights that are read as needed ends early", field="weights_bytes"
                )
            rest, at = rest[count:], at + count
        if self.forgets:
            os.posix_fadvise(self._file.fileno(), offset, into.size, os.POSIX_FADV_DONTNEED)


def without_data(layer: Layer) -> Layer:
    """Returns the layer with its weights' bytes replaced by placeholders of the same size."""
    return _moved(layer, None)


def _moved(layer: Layer, memory: Bytes | None) -> Layer:
    """Returns the layer with its weights' bytes in `memory`, in the layout of
    `LayerStream.write`."""
    at = 0

    def moved(w: NativeLinear | NativeExperts) -> NativeLinear | NativeExperts:
        nonlocal at
        parts = []
        for part in w.parts:
            size = part.data.size
            data = stand_in((size,), np.uint8) if memory is None else memory[at : at + size]
            parts.append(dataclasses.replace(part, data=data))
            at += _aligned(size)
        return dataclasses.replace(w, parts=tuple(parts))  # type: ignore[arg-type]

    made: Layer = with_parts(layer, (NativeLinear, NativeExperts), moved)
    return made


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _write(descriptor: int, data: Bytes, offset: int) -> None:
    rest = np.ascontiguousarray(data).data.cast("B")
    while rest:
        count = os.pwrite(descriptor, rest[: 64 * 2**20], offset)
        rest, offset = rest[count:], offset + count
