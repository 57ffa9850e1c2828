"""Mixtures whose experts stay in host memory, next to a device that does the rest.

`HostExpertOps` is the device's op set, except for mixtures whose experts were packed by the C++
kernels (`NativeExperts`). Such a step runs like this, without the host's Python waiting for
anything:

1. The device chooses each token's experts, and copies tokens and choice to host memory.
2. The device's queue calls the host, whose C++ kernels compute the experts on all cores. Meanwhile
   the device computes a shared expert.
3. The device copies the result back, and continues.

All of it is recorded in graphs. A step reads only the chosen experts' weights, and host memory
bandwidth is the limit. For steps of many tokens it is faster to copy the layer's weights to the
device and compute there (`copy_from`).
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import mmap
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from slipstream.errors import OutOfMemoryError
from slipstream.kernels.arrays import to_tensor
from slipstream.kernels.cpu import native
from slipstream.kernels.cpu.native import Arena, Bytes, Job
from slipstream.kernels.cpu.ops import NativeOps
from slipstream.kernels.cpu.program.moe import NativeExperts, add_experts, add_made_choice
from slipstream.kernels.cpu.program.native_program import Program, run_job
from slipstream.kernels.cpu.unpack import BITS, unpack
from slipstream.kernels.experts.hot import HotExperts
from slipstream.kernels.metadata import ExpertCounters
from slipstream.kernels.ops import Experts, OpSet
from slipstream.kernels.weights.forms import Linear
from slipstream.platform import Platform

_logger = logging.getLogger("slipstream.engine")

SLICE = 1024
"""Maximum number of tokens that the host computes at a time. Longer steps are cut, so that the
copies need little memory."""

MIN_COPIED = 32
"""Minimum tokens of a step whose weights may be copied. The host always computes smaller ones."""


class HostExpertOps:
    """An op set: `device`, but the host computes the experts that `host` has packed."""

    has_host_experts = True

    def __init__(self, device: OpSet, host: NativeOps, platform: Platform) -> None:
        self._ops, self.host, self._platform = device, host, platform
        self.arena = PinnedArena(host, platform)
        host.host.arena = self.arena
        # minimum tokens of a step that the device computes; None: the host computes all
        self.copy_from: int | None = None
        self._queue = platform.copy_queue()
        self._memory = SharedMemory(platform)
        self._layers: dict[int, HostMixture] = {}
        self._copies: dict[str, Tensor] = {}
        self._biases: dict[int, Tensor] = {}
        self._hot: dict[int, HotExperts] = {}
        self._turns: list[tuple[int, HotExperts]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def describe(self) -> str:
        many = "never" if self.copy_from is None else f"from {self.copy_from} tokens on"
        how = f"{self.host.describe()}, {self.host.pool.num_threads} threads; copied to the device in steps {many}"
        return f"{self._ops.describe()}, experts on the host by {how}"

    def pack_experts(self, w: Linear, *, num_experts: int) -> Linear:
        if not isinstance(w, NativeExperts):
            return self._ops.pack_experts(w, num_experts=num_experts)
        return self.host.pack_experts(
            w if w.bias is None else replace(w, bias=w.bias.cpu()), num_experts=num_experts
        )

    def forms_of(self, w: Linear) -> list[tuple[str, int]]:
        if not isinstance(w, NativeExperts):
            return self._ops.forms_of(w)
        return [(f"{name} of the host", num_bytes) for name, num_bytes in self.host.forms_of(w)]

    # --- Steps ---

    def moe(
        self, x: Tensor, router_logits: Tensor, experts: Experts, load: ExpertCounters | None = None
    ) -> Tensor:
        if not isinstance(experts.up, NativeExperts):
            return self._ops.moe(x, router_logits, experts, load)
        if self._copies_for(len(x)):
            return self._ops.moe(x, router_logits, self.copied(experts, x.dtype), load)
        return self._finished(x, self._begin(x, router_logits, experts, load), None)

    def moe_and_shared(
        self,
        x: Tensor,
        router_logits: Tensor,
        experts: Experts,
        shared: tuple[Linear, Linear],
        load: ExpertCounters | None = None,
    ) -> Tensor:
        if not isinstance(experts.up, NativeExperts):
            return self._ops.moe_and_shared(x, router_logits, experts, shared, load)
        if self._copies_for(len(x)):
            return self._ops.moe_and_shared(
                x, router_logits, self.copied(experts, x.dtype), shared, load
            )
        begun = self._begin(x, router_logits, experts, load)
        return self._finished(x, begun, self._ops._always(x, experts, shared))

    def _begin(
        self, x: Tensor, router_logits: Tensor, experts: Experts, load: ExpertCounters | None
    ) -> Begun:
        """Queues a call of the host. It overlaps with the device's next work."""
        weights, chosen = self._ops.route(
            router_logits, experts.spec, experts.correction, load, experts.scales
        )
        hot, here = self._hot.get(id(experts.up)), None
        if hot is not None:
            chosen, here = hot.split(weights, chosen)
        if load is not None:  # padding has no experts
            chosen = chosen.masked_fill((load.slots < load.block_size)[:, None], -1)
        given = torch.cat((x.float(), chosen.float(), weights), dim=1)
        layer = self._layer(experts)
        result = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        with self._queue.behind():
            for first in range(0, len(x), SLICE):
                own = slice(first, min(first + SLICE, len(x)))
                num_tokens = own.stop - own.start
                layer.given[:num_tokens].copy_(given[own], non_blocking=True)
                layer.call(num_tokens)
                result[own].copy_(layer.result[:num_tokens], non_blocking=True)
        return Begun(result, given, None if hot is None or here is None else (hot, *here))

    def _finished(self, x: Tensor, begun: Begun, added: Tensor | None) -> Tensor:
        """Returns the host's result plus that of experts on the device plus `added` [T, E]."""
        if begun.here is not None:
            hot, weights, places = begun.here
            own = self._ops.moe_of_choice(x, weights, places, hot.experts)
            added = own if added is None else added + own
        self._queue.join()
        return (begun.result if added is None else begun.result + added).to(x.dtype)

    def _layer(self, experts: Experts) -> HostMixture:
        found = self._layers.get(id(experts.up))
        if found is None:
            found = self._layers[id(experts.up)] = HostMixture(
                experts, self.host, self._memory, self._platform
            )
        return found

    # --- Steps of many tokens ---

    def _copies_for(self, num_tokens: int) -> bool:
        return self.copy_from is not None and num_tokens >= self.copy_from

    def copied(self, experts: Experts, dtype: torch.dtype) -> Experts:
        """Returns the experts as dense weights of `dtype` on the device. The next layer's overwrite
        them."""
        made = []
        for name, w in (("up", experts.up), ("down", experts.down)):
            assert isinstance(w, NativeExperts)
            made.append(self._copied(name, w, dtype))
        return Experts(made[0], made[1], experts.spec, experts.correction, experts.scales)

    def _copied(self, name: str, w: NativeExperts, dtype: torch.dtype) -> Linear:
        num_experts, start = w.parts[0].num_experts, 0
        out = self._place(name, dtype, num_experts, w.rows, w.inner)
        for part in w.parts:
            bytes_of = to_tensor(part.data).view(num_experts, part.stride)
            data = self._place("bytes", torch.uint8, num_experts, part.stride)
            data.copy_(bytes_of, non_blocking=True)
            each = max(1, UNPACKED_AT_ONCE // (part.rows * part.inner))
            for e in range(0, num_experts, each):
                unpack(data[e : e + each], part, out[e : e + each, start : start + part.rows])
            start += part.rows
        return Linear(weight=out.flatten(0, 1), bias=self._bias(w, dtype))

    def _bias(self, w: NativeExperts, dtype: torch.dtype) -> Tensor | None:
        """Returns the bias on the device. It stays there, because a graph can't copy from memory
        that moves."""
        if w.bias is not None and id(w) not in self._biases:
            self._biases[id(w)] = torch.as_tensor(w.bias).to(self._platform.device, dtype)
        return self._biases.get(id(w))

    def _place(self, use: str, dtype: torch.dtype, *shape: int) -> Tensor:
        """Returns a buffer in the device's memory, which every layer reuses."""
        size = math.prod(shape) * dtype.itemsize
        held = self._copies.get(use)
        if held is None or held.numel() < size:
            held = self._copies[use] = torch.empty(
                size, dtype=torch.uint8, device=self._platform.device
            )
        return held[:size].view(dtype).view(shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of device memory for copies of weights and for the experts that the device
        holds."""
        return sum(x.numel() for x in self._copies.values()) + sum(
            hot.num_bytes for hot in self._hot.values()
        )

    # --- Experts that the device holds ---

    @property
    def holds_experts(self) -> bool:
        return bool(self._turns)

    def hold(self, mixtures: Mapping[int, Experts], num_bytes: int, dtype: torch.dtype) -> int:
        """Copies some experts of each of the host's mixtures (by layer) to the device as well: the
        same number of each, as many as fit in `num_bytes`.

        Returns the number per mixture.
        """
        own = {
            i: e for i, e in mixtures.items() if isinstance(e.up, NativeExperts) and _can_copy(e)
        }
        if not own:
            return 0
        each = max(_numbers(e) for e in own.values()) * dtype.itemsize
        count = min(num_bytes // (each * len(own)), min(e.spec.num_experts for e in own.values()))
        for i, e in own.items() if count else ():
            hot = self._hot[id(e.up)] = HotExperts(e, count, self._platform, dtype)
            self._turns.append((i, hot))
        return count

    def follow(self, load: Sequence[tuple[int, Sequence[int]]]) -> int:
        """Replaces rarely chosen experts on the device by often chosen ones, in one layer per call,
        all layers in turn. Returns the number of replaced experts."""
        if not self._turns:
            return 0
        self._turns.append(self._turns.pop(0))
        layer, hot = self._turns[-1]
        counts = next((counts for i, counts in load if i == layer), None)
        return 0 if counts is None else hot.follow(counts)

    def choose(self, mixtures: Iterable[Experts], dtype: torch.dtype, most_tokens: int) -> None:
        """Measures the number of tokens from which it is faster to copy the first mixture's experts
        to the device than to compute on the host. Each way is run twice, and the faster run counts.

        Nothing is copied if the device has no memory for a layer's experts.
        """
        experts = next((e for e in mixtures if isinstance(e.up, NativeExperts)), None)
        if experts is None or not _can_copy(experts) or not self.arena.is_pinned:
            return
        size = experts.up.weight.shape[1]
        num_tokens = MIN_COPIED
        while num_tokens <= most_tokens:
            x = torch.randn(num_tokens, size, device=self._platform.device, dtype=dtype)
            logits = torch.randn(num_tokens, experts.spec.num_choices, device=self._platform.device)
            once, seconds = partial(self.moe, x, logits, experts), []
            try:
                for copy_from in (None, 0):
                    self.copy_from = copy_from
                    seconds.append(min(self._timed(once) for _ in range(2)))
            except torch.OutOfMemoryError:
                break
            if seconds[1] < seconds[0]:
                self.copy_from = num_tokens
                return
            num_tokens *= 2
        self.copy_from = None
        self._copies.clear()

    def _timed(self, work: Callable[[], object]) -> float:
        self._platform.synchronize()
        begin = time.perf_counter()
        work()
        self._platform.synchronize()
        return time.perf_counter() - begin


UNPACKED_AT_ONCE = 64 * 2**20
"""Maximum elements of a weight that are float32 at a time."""


def _can_copy(experts: Experts) -> bool:
    """Tells whether `unpack` supports the formats of the experts."""
    ways = cast("tuple[NativeExperts, NativeExperts]", (experts.up, experts.down))
    return all(part.kind in BITS for w in ways for part in w.parts)


@dataclass(frozen=True, slots=True)
class Begun:
    """Work that the host has begun. `result`, float32 [T, E], is valid once the device's queue has
    waited for the host; until then `given` must live. `here` has the experts that the device
    computes meanwhile, and which tokens chose them.
    """

    result: Tensor
    given: Tensor
    here: tuple[HotExperts, Tensor, Tensor] | None


class HostMixture:
    """A host program for one layer's experts, which reads and writes memory that device and host
    share.

    `given`, float32 [SLICE, E + 2k], has a token's row, its experts and their weights. `result`,
    float32 [SLICE, E], has the output.
    """

    def __init__(
        self, experts: Experts, host: NativeOps, memory: SharedMemory, platform: Platform
    ) -> None:
        up, down, spec = experts.up, experts.down, experts.spec
        assert isinstance(up, NativeExperts)
        assert isinstance(down, NativeExperts)
        # the program has addresses of their weights
        self._platform, self._experts = (platform, experts)
        size, k = up.inner, spec.num_experts_per_token
        self.given, self.result = (
            memory.pinned("given", size + 2 * k),
            memory.pinned("result", down.rows),
        )
        self.program = p = Program(host.pool)

        def scratch(name: str, form: int, width: int, rows: int) -> int:
            return p.bound(memory.scratch(name, form, width, rows))

        gathered = scratch("gathered", up.form, size, k)
        choice = p.bound(self.given[:, size:])
        add_made_choice(p, p.bound(self.given[:, :size]), choice, spec, gathered, up.form, size)
        out = add_experts(p, gathered, up, down, spec, scratch)
        kept = p.bound(self.given[:, :size]) if spec.identity and spec.adds_identity else -1
        p.add("combine", out, p.bound(self.result), down.rows, -1, -1, False, kept)
        self._jobs: dict[int, Job] = {}

    def call(self, num_tokens: int) -> None:
        """Queues a call of the host for `num_tokens` tokens of `given`."""
        job = self._jobs.get(num_tokens)
        if job is None:
            job = self._jobs[num_tokens] = self.program.job(num_tokens)
        self._platform.call_host(run_job(), ctypes.addressof(job))


def _numbers(experts: Experts) -> int:
    """Number of elements in one expert's weights and biases."""
    ways = cast("tuple[NativeExperts, NativeExperts]", (experts.up, experts.down))
    return sum(w.rows * (w.inner + (w.bias is not None)) for w in ways)


class SharedMemory:
    """Host memory that all layers use, one after another. Buffers of equal shape are shared."""

    def __init__(self, platform: Platform) -> None:
        self._platform = platform
        self._pinned: dict[tuple[str, int], Tensor] = {}
        self._scratch: dict[tuple[str, int, int], Bytes] = {}

    def pinned(self, name: str, width: int) -> Tensor:
        """Returns pinned float32 [SLICE, width]."""
        if (name, width) not in self._pinned:
            made = self._platform.pinned(SLICE * width * 4)
            self._pinned[name, width] = made.view(torch.float32).view(SLICE, width).zero_()
        return self._pinned[name, width]

    def scratch(self, name: str, form: int, width: int, rows_a_token: int) -> Bytes:
        """Returns a byte buffer for SLICE tokens with `rows_a_token` rows each; a row has `width`
        elements in the activation format `form`."""
        row = int(native.load().ss_form_bytes(form, width))
        key = name, row, rows_a_token
        if key not in self._scratch:
            count = SLICE * rows_a_token
            self._scratch[key] = Arena(size=0).take(count * row).reshape(count, row)
        return self._scratch[key]


class PinnedArena(Arena):
    """An arena of whole pages, huge ones where the system has them.

    `pin` page-locks them, so that the device reads them directly. A copy from there is several
    times as fast.
    """

    def __init__(self, host: NativeOps, platform: Platform) -> None:
        super().__init__(host.pool)
        self._platform = platform
        self._waiting: list[Bytes] = []
        self.num_bytes, self.is_pinned = 0, True

    def take(self, num_bytes: int) -> Bytes:
        size = -(-max(1, num_bytes) // HUGE) * HUGE
        # shared memory, the default, has small pages
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # the system has none
                pages.madvise(mmap.MADV_HUGEPAGE)
        memory = np.frombuffer(pages, np.uint8)
        self._waiting.append(memory)
        self.num_bytes += memory.size
        return memory[:num_bytes]

    def pin(self) -> None:
        """Page-locks all memory that was taken.

        If the system does not allow it, a warning is logged, and nothing is copied from here.
        """
        try:
            while self._waiting and self.is_pinned:
                self._platform.pin(self._waiting.pop())
        except OutOfMemoryError as error:
            self.is_pinned = False
            _logger.warning("long steps won't copy experts to the device: %s", error)


HUGE = 2 * 2**20
"""Bytes of a huge page."""
