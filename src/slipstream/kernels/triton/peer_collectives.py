"""Sums over ranks, with the norm that follows, and what ranks scatter, gather and exchange: one
kernel for any number of ranks, through memory that all ranks read and write. The kernel is
`peer_collectives.cu`. This file decides for which tensors it runs and in how many steps, and tests it at
the start."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from slipstream.errors import first_line
from slipstream.kernels.layouts import NormParams
from slipstream.kernels.triton.cuda import CudaKernel
from slipstream.kernels.triton.pointwise import FORMATS, as_activations, empty_rows
from slipstream.kernels.weights.forms import Activations
from slipstream.kernels.weights.quantize import SMALLEST
from slipstream.platform import platform_of
from slipstream.platform.collectives import RankGroup
from slipstream.platform.cuda import CudaPlatform
from slipstream.spec.model import OwnNorm
from slipstream.spec.scheme import FP8_TILE, InputFormat

SOURCES = tuple(
    Path(__file__).with_name(f"{name}.cu") for name in ("instructions", "peer_collectives")
)
KINDS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
CODES = (torch.float8_e4m3fn, torch.float8_e5m2)
"""Types that can be scattered, gathered and exchanged but not added. Integers are not among them,
because one value of theirs is `EMPTY`."""
NORMS = {"rms": 1, "layer": 2}
Op: TypeAlias = Literal["sum", "scatter", "gather", "exchange"]
OPS: tuple[Op, ...] = ("sum", "scatter", "gather", "exchange")
"""Ops in the order of their numbers in the kernel."""

EMPTY = -2147450880  # 0x80008000
MAX_BYTES = 16 * 2**20
"""Largest sum, and two ranks' largest part of a gather. It is the largest size that was measured between two
H200s: 55 µs, against 82 with NCCL (`parallel_sums`)."""
ONE_STEP_BYTES = {2: MAX_BYTES, 3: 2**20, 4: 2**19, 5: 5 * 2**16, 6: 2**18, 7: 3 * 2**16, 8: 2**17}
"""Largest sum in one step by the number of ranks; larger ones take two. An estimate from 2 µs for a
step and 370 GB/s of a GPU's links: of n ranks the first sends n − 1 times the bytes, the second
2 (n − 1) / n times. Only the two ranks' was measured. More than 8 ranks: as 8."""
MAX_THREADS = 512
"""Threads per thread block, for rows of up to 32 bytes per thread; twice as many for longer rows.
With 256, sums of 8 to 512 KB take a fifth longer."""
THREADS_OF_SM = 1024
"""Threads per multiprocessor: half of what it has, so that all thread blocks fit with 64 registers
per thread. Twice as many gain nothing up to 2 MB, and 3 to 9 % for 8 and 16 MB."""
VECTOR = 16
SCRATCH_BYTES = 256
TEST_CALLS = 12
TEST_PATIENCE = 8192
"""How long a test waits for another rank, in units of 2^20 cycles: about 5 s."""

_logger = logging.getLogger("slipstream.engine")


class CudaPeerCollectives:
    """`platform.PeerCollectives`, and norms of such sums. `map_memory` must be called before the first
    call. One stream only; every rank makes the same calls in the same order, of the same shapes."""

    def __init__(
        self,
        group: RankGroup,
        row_bytes: int,
        *,
        most_bytes: int = MAX_BYTES,
        one_step_bytes: int | None = None,
    ) -> None:
        """`row_bytes`: bytes of the rows that are normed, a multiple of 16. Other tensors are cut
        into rows of this size. `one_step_bytes`: None is as `ONE_STEP_BYTES`."""
        if row_bytes % VECTOR:
            raise ValueError(f"rows of {row_bytes} bytes are no multiple of {VECTOR}")
        self.group, self.device = group, group.device
        self.vectors = row_bytes // VECTOR
        self.rows = max(1, most_bytes // row_bytes)
        if one_step_bytes is None:
            one_step_bytes = ONE_STEP_BYTES.get(group.size, ONE_STEP_BYTES[8])
        self.one_step_rows = min(self.rows, max(1, one_step_bytes // row_bytes))
        self.places = 2 if self.one_step_rows == self.rows else 4
        self.place_rows = max(self.one_step_rows, -(-self.rows // group.size))
        most = MAX_THREADS if self.vectors <= 2 * MAX_THREADS else 2 * MAX_THREADS
        self.warps = min(most, self.vectors + 31) // 32
        self.programs_of_sm = max(1, THREADS_OF_SM // (self.warps * 32))
        self.most_programs = self._multiprocessors() * self.programs_of_sm
        self.patience = 0
        self._kernels: dict[
            tuple[object, ...], Callable[[int, int, Sequence[Tensor | int]], None]
        ] = {}
        self._peers: tuple[Tensor, ...] = ()

    def map_memory(self) -> None:
        """Map each rank's memory, and mark all places empty. All ranks must call it."""
        region = self.place_rows * self.vectors * VECTOR
        num_bytes = self.places * (self.group.size - 1) * region
        self._peers = self.group.share(num_bytes)  # they stay mapped as long as they are referenced
        self._peers[self.group.rank].view(torch.int32).fill_(EMPTY)
        self._memory = torch.tensor([x.data_ptr() for x in self._peers], dtype=torch.int64).to(
            self.device
        )
        self._counts = torch.zeros(self.most_programs, dtype=torch.int32, device=self.device)
        self.group.least(0)  # wait until all places are empty on all ranks

    def covers(self, x: Tensor, op: Op = "sum") -> bool:
        """Whether the op supports x: its type and size, which are the same on all ranks."""
        if op == "sum":
            size, most = x.numel(), self.rows
        else:
            size, most = x.numel(), self.place_rows
            if op != "gather":  # a part, the last one with zeros behind it
                size = -(-len(x) // self.group.size) * (x.numel() // max(1, len(x)))
        num_bytes, known = size * x.element_size(), x.dtype in KINDS
        if op in ("gather", "exchange"):
            known = known or x.dtype in CODES
        fits = 0 < num_bytes <= most * self.vectors * VECTOR and num_bytes % VECTOR == 0
        return fits and known and x.numel() * x.element_size() % VECTOR == 0

    def covers_norm(self, x: Tensor, norm: NormParams, inputs: InputFormat | None) -> bool:
        """Whether `normed` supports these arguments."""
        size = x.shape[1]
        alike = all(
            w.dtype == x.dtype and w.data_ptr() % VECTOR == 0
            for w in (norm.weight, norm.bias)
            if w is not None
        )
        whole = size * x.element_size() == self.vectors * VECTOR and (
            inputs != "fp8-block" or size % FP8_TILE == 0
        )
        return alike and whole and not isinstance(norm.kind, OwnNorm) and self.covers(x)

    def __call__(self, x: Tensor) -> Tensor:
        """The sum, in new memory."""
        total = torch.empty_like(x, memory_format=torch.contiguous_format)
        self._run(x, total, self._kernel("sum", x.dtype, self._steps(x)))
        return total

    def scatter(self, x: Tensor) -> Tensor:
        """[T, …] → [⌈T / n⌉, …]: this rank's rows of the sum, zeros after the last one's."""
        each = -(-len(x) // self.group.size)
        total = torch.empty(each, *x.shape[1:], dtype=x.dtype, device=x.device)
        self._run(x, total, self._kernel("scatter", x.dtype), part=total)
        return total

    def gather(self, x: Tensor) -> Tensor:
        """Gathers x of all ranks: […] → [n, …]. A float32 of −4.6e-41 becomes 0, because its bits
        are also those of two negative zeros of 16 bits."""
        every = torch.empty(self.group.size, *x.shape, dtype=x.dtype, device=x.device)
        self._run(x, every, self._kernel("gather"))
        return every

    def exchange(self, x: Tensor) -> Tensor:
        """Exchanges parts of x: [n · size, …] → [size, n, …]. Each rank's x has a part of `size`
        rows for every rank; the result has all ranks' parts for this one. Zeros are as in
        `gather`."""
        size = self.group.size
        parts = torch.empty(size, len(x) // size, *x.shape[1:], dtype=x.dtype, device=x.device)
        self._run(x, parts, self._kernel("exchange"), part=parts[0])
        return parts

    def normed(
        self, x: Tensor, norm: NormParams, residual: Tensor | None, inputs: InputFormat | None
    ) -> tuple[Activations, Tensor]:
        """Computes `OpSet.norm` of the sum of x over ranks, which is rounded to x's type before."""
        num_rows, size = x.shape
        out, scales = empty_rows(num_rows, size, x, inputs)
        total = torch.empty_like(x) if residual is None else residual.contiguous()
        steps = self._steps(x)
        kernel = self._kernel("sum", x.dtype, steps, norm, residual is not None, inputs)
        self._run(x, total, kernel, norm.weight, norm.bias, out, scales)
        return as_activations(out, scales, inputs), total

    def _steps(self, x: Tensor) -> int:
        """Number of exchanges in a sum: 1 or 2, the only choice that depends on its size."""
        one = x.numel() * x.element_size() <= self.one_step_rows * self.vectors * VECTOR
        return 1 if one else 2

    def _run(
        self,
        x: Tensor,
        total: Tensor,
        kernel: Callable[[int, int, Sequence[Tensor | int]], None],
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        out: Tensor | None = None,
        scales: Tensor | None = None,
        part: Tensor | None = None,
    ) -> None:
        """Launch a kernel. `part`: a tensor of the size of each rank's part of x, if it has parts."""
        # The ranks' slices of a tensor may differ in this, so it is no reason to take the library.
        if not x.is_contiguous() or x.data_ptr() % VECTOR:
            x = x.clone(memory_format=torch.contiguous_format)
        given = x.numel() * x.element_size() // VECTOR
        num_vectors = given if part is None else part.numel() * part.element_size() // VECTOR
        programs = min(-(-num_vectors // self.vectors), self.most_programs)
        others = (total if t is None else t for t in (weight, bias, out, scales))
        tensors = (x, total, self._memory, self._counts, *others)
        numbers = (num_vectors, given, programs, self.most_programs, self.patience)
        kernel(programs, self.warps * 32, (*tensors, *numbers))

    def _kernel(
        self,
        op: Op,
        dtype: torch.dtype = torch.bfloat16,
        steps: int = 1,
        norm: NormParams | None = None,
        adds: bool = False,
        inputs: InputFormat | None = None,
    ) -> Callable[[int, int, Sequence[Tensor | int]], None]:
        key: tuple[object, ...] = (op, dtype, steps)
        if norm is not None:
            key = (*key, norm.kind, norm.eps, norm.offset, norm.bias is None, adds, inputs)
        if key not in self._kernels:
            self._kernels[key] = self.compiled(
                self.definitions(op, dtype, steps, norm, adds, inputs)
            )
        return self._kernels[key]

    def definitions(
        self,
        op: Op,
        dtype: torch.dtype = torch.bfloat16,
        steps: int = 1,
        norm: NormParams | None = None,
        adds: bool = False,
        inputs: InputFormat | None = None,
    ) -> dict[str, int | float]:
        """Values for the names in capitals in the kernel's source."""
        return {
            "VECTORS": self.vectors,
            "WARPS": self.warps,
            "PROGRAMS_OF_SM": self.programs_of_sm,
            "RANKS": self.group.size,
            "THIS_RANK": self.group.rank,
            "OP": OPS.index(op),
            "STEPS": steps,
            "PLACES": self.places,
            "PLACE": self.place_rows * self.vectors,
            "KIND": KINDS[dtype],
            "HALF": dtype == torch.float16,
            "NORM": 0 if norm is None else NORMS[norm.kind],  # type: ignore[index]
            "RESIDUAL": adds,
            "BIAS": norm is not None and norm.bias is not None,
            "FORMAT": FORMATS[inputs],
            "EPS": 0.0 if norm is None else float(norm.eps),
            "OFFSET": 0.0 if norm is None else float(norm.offset),
            "SMALLEST": SMALLEST,
            "PDL": self._overlaps(),
            "FORM": 0,  # of other kernels' weights
        }

    def compile_first(self) -> None:
        """Compile the kernels without a norm."""
        for op in OPS:
            self._kernel(op)
        if self.one_step_rows < self.rows:
            self._kernel("sum", steps=2)

    def compiled(
        self, definitions: Mapping[str, int | float]
    ) -> Callable[[int, int, Sequence[Tensor | int]], None]:
        platform = platform_of(self.device)
        assert isinstance(platform, CudaPlatform)
        how = "overlapped" if self._overlaps() else "after"
        return CudaKernel(
            platform,
            SOURCES,
            "peer_collectives",
            definitions,
            shared_bytes=SCRATCH_BYTES,
            launch=how,
        )

    def _overlaps(self) -> bool:
        return platform_of(self.device).arch.pdl

    def _multiprocessors(self) -> int:
        return platform_of(self.device).multiprocessors


def try_peer_collectives(group: RankGroup, row_bytes: int) -> None:
    """Have `group` sum, gather, scatter and exchange through peers' memory from now on, if that works
    on every rank and gives the library's results."""
    peer, why = None, ""
    try:
        peer = CudaPeerCollectives(group, row_bytes)
        peer.compile_first()
    except Exception as error:  # from the driver, torch or a compiler; the log says which and why
        why = first_line(error)
    if group.least(peer is not None and not why)[0]:
        try:
            assert peer is not None
            peer.map_memory()
        except Exception as error:
            why = first_line(error)
    else:
        why = why or "on another rank"
    if not group.least(not why)[0]:
        _logger.warning(
            "collectives go through NCCL: peers' memory can't be written (%s)",
            why or "on another rank",
        )
        return
    assert peer is not None
    if group.least(agrees(peer))[0]:
        group.peer_collectives = peer
    else:
        _logger.warning(
            "collectives go through NCCL: those through peers' memory came out otherwise"
        )


@torch.inference_mode()
def agrees(peer: CudaPeerCollectives) -> bool:
    """Whether sums of one row up to the largest size, and what is scattered, gathered and exchanged,
    replayed in graphs of many, equal the library's in every bit."""
    group, found = peer.group, True
    row = peer.vectors * VECTOR // 2
    recorder = platform_of(peer.device).graphs()
    peer.patience = TEST_PATIENCE
    steps = {peer.one_step_rows * row, min(peer.one_step_rows + 1, peer.rows) * row}
    sizes = {row, 3 * row + 8, min(peer.rows, 67) * row, peer.rows * row, *steps}
    ways: list[tuple[int, Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = [
        (size, peer, lambda x: group.library_sum(x.clone())) for size in sorted(sizes)
    ]
    part = min(peer.place_rows, 5) * row
    ways += [
        (part, peer.gather, group.library_gather),
        (part * group.size, peer.exchange, group.library_exchange),
        (part * group.size, peer.scatter, lambda x: group.library_scatter(x.clone())),
    ]
    for size, way, library in ways:
        calls = TEST_CALLS if size < peer.rows * row else 3
        at = torch.arange(size, device=peer.device)
        # Small, so that sums of up to 17 ranks are exact in any order.
        seeds = range(1 + group.rank, 1 + group.rank + calls)
        given = [(at * i % 31 - 15).to(torch.bfloat16) for i in seeds]
        wanted = torch.stack([library(x) for x in given])
        graph, output = recorder.capture(
            lambda given=given, way=way: torch.stack([way(x) for x in given])  # type: ignore[misc]
        )
        for _ in range(3):
            output.zero_()
            graph.replay()
            found = found and torch.equal(output, wanted)
    peer.patience = 0
    return found
