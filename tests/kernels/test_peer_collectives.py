"""Sums over ranks in one kernel: its source compiled for the CPU with `instructions_on_cpu.h`, where the thread blocks of all
ranks run together. On GPUs each start tests it against NCCL (`peer_collectives.agrees`)."""

from __future__ import annotations

import ctypes

import pytest
import torch

from slipstream.kernels.layouts import NormParams
from slipstream.kernels.triton import TritonOps, peer_collectives, sampling
from slipstream.platform.collectives import RankGroup
from slipstream.spec.model import OwnNorm
from tests.kernels import on_cpu
from tests.kernels.rank_memory import (
    Rank,
    are_empty,
    call,
    check_norms,
    norm_of,
    numbers,
    wanted,
)

RUN = """
static volatile int ended[RANKS];  // threads
extern "C" int run(int programs, int threads, unsigned seed, void** of_ranks) {
    programs_of_rank = programs;
    for (int rank = 0; rank < RANKS; rank++) ended[rank] = 0;
    return on_cpu(programs * RANKS, threads, seed, [of_ranks] {
        void** a = of_ranks + THIS_RANK * 9;
        const int* n = (const int*)a[8];
        for (int i = 0; i < n[5]; i++) {  // kernels one after another, each behind the one before on its own rank only
            const int rank = THIS_RANK, wanted = i * programs_of_rank * block_size;
            while (ended[rank] < wanted) yield();
            peer_collectives((uint4*)a[0] + i * n[0], (uint4*)a[1] + i * n[0], (u64*)a[2], (u32*)a[3], (uint4*)a[4],
                             (uint4*)a[5], (u8*)a[6], (float*)a[7], n[0], n[1], n[2], n[3], n[4]);
            ended[rank]++;
        }
    });
}
"""


class OnCpu(peer_collectives.CudaPeerCollectives):
    """A launch is kept until all ranks have made theirs; then the programs of all run."""

    seed, kernels = 0, 1
    """`kernels`: so many run behind one another at each launch, over inputs and results that lie behind one another."""

    def __init__(self, group, row_bytes, launches, folder, **how):
        self.launches, self.folder = launches, folder
        super().__init__(group, row_bytes, **how)
        self.map_memory()

    def _multiprocessors(self):
        return 3

    def _overlaps(self):
        return True

    def compiled(self, definitions):
        text = f"#define CTAS programs_of_rank\nstatic int programs_of_rank;\n{on_cpu.INSTRUCTIONS}"
        text += peer_collectives.SOURCES[1].read_text() + RUN
        run = on_cpu.load(
            self.folder, text, definitions | {"SHARED": peer_collectives.SCRATCH_BYTES}
        ).run

        def launch(programs, threads, arguments):
            tensors, given = arguments[:8], arguments[8:]
            numbers = (ctypes.c_int * 6)(*given, self.kernels)
            pointers = [*(t.data_ptr() for t in tensors), ctypes.addressof(numbers)]
            self.launches.append((pointers, numbers, tensors))
            if len(self.launches) == self.group.size:
                every = [pointer for pointers, *_ in self.launches for pointer in pointers]
                stuck = run(programs, threads, self.seed, (ctypes.c_void_p * len(every))(*every))
                self.launches.clear()
                assert not stuck, "its programs wait for good"

        return launch


def ranks_of(folder, row_bytes, size=2, **how):
    memories, launches = [None] * size, []
    return [OnCpu(Rank(rank, memories), row_bytes, launches, folder, **how) for rank in range(size)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("peer_collectives")


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    ("size", "dtype", "one_step_bytes"),
    [
        (2, torch.bfloat16, None),
        (3, torch.float16, None),
        (2, torch.float32, None),
        (3, torch.bfloat16, 640),
        *(pytest.param(n, torch.bfloat16, 1280, marks=pytest.mark.slow) for n in range(2, 9)),
        pytest.param(4, torch.float32, 640, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_sums_one_after_another(folder, size, dtype, one_step_bytes, seed):
    """Sums of one row, of several rows for a thread block and of a part of a row, in buffers that
    others have used, in one step and in two. Every rank gets the same bits, and all buffers are
    empty afterwards."""
    ranks = ranks_of(folder, 640, size, most_bytes=640 * 100, one_step_bytes=one_step_bytes)
    width = 640 // dtype.itemsize
    for i, shape in enumerate(
        [(1, width), (100, width), (7, width), (width // 4,), (1, width), (100, width), (1, width)]
    ):
        given = [numbers(shape, dtype, 10 * i + rank) for rank in range(size)]
        for r in ranks:
            r.seed = seed and seed + i
        found = [r(x) for r, x in zip(ranks, given, strict=True)]
        for own in found:
            assert torch.equal(own, wanted("sum", given, 0)), (i, shape)
    assert are_empty(ranks)


def test_the_librarys_sums_in_order_are_rounded_once_as_those_in_shared_memory():
    """Sums that are too large for one way go the other way, with the same bits."""
    given = [numbers((7, 160), torch.bfloat16, rank) for rank in range(3)]
    group = RankGroup(1, 3, torch.device("cpu"))
    group.in_order = True
    group.library_gather = lambda x: torch.stack([given[0], x, given[2]])
    assert torch.equal(group.library_sum(given[1].clone()), wanted("sum", given, 1))
    group.library_gather = lambda x: torch.stack([x + rank for rank in range(3)])
    ids = torch.tensor([2**30 + 1, 5])
    assert group.library_sum(ids.clone()).tolist() == [3 * 2**30 + 6, 18]


def test_norms_of_deterministic_are_one_kernel_for_sums_of_any_size(folder):
    """A fused norm adds squares in another order, and covers no large sums."""
    (rank, _), x = ranks_of(folder, 640, 2), numbers((3, 320), torch.bfloat16, 0)
    norm, ops = norm_of("rms", 320, torch.bfloat16), TritonOps(deterministic=True)
    group, rank.normed = rank.group, None
    group.peer_collectives, group.all_reduce = rank, lambda x: x + 1
    assert rank.covers_norm(x, norm, None)
    found = ops.all_reduce_norm(x, norm, group=group)[0]
    assert torch.equal(found, ops.norm(x + 1, norm)[0])


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    "size", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, *range(4, 9)))]
)
def test_scatters_gathers_and_exchanges_between_sums(folder, size, seed):
    """All ops in any order over the same places. A scatter's rows need not be a multiple of the
    ranks; codes of 8 bits are gathered as they are."""
    ranks = ranks_of(folder, 640, size, most_bytes=640 * 40, one_step_bytes=640)
    rows = [("gather", 2), ("sum", 9), ("exchange", 2 * size), ("scatter", size + 1), ("sum", 1)]
    rows += [("scatter", 1), ("exchange", size), ("gather", 5), ("sum", 40), ("scatter", 3 * size)]
    for i, (op, count) in enumerate(rows):
        given = [numbers((count, 160), torch.bfloat16, 10 * i + rank) for rank in range(size)]
        assert all(r.covers(x, op) for r, x in zip(ranks, given, strict=True))
        for r in ranks:
            r.seed = seed and seed + i
        found = [call(r, op)(x) for r, x in zip(ranks, given, strict=True)]
        for rank, own in enumerate(found):
            assert torch.equal(own, wanted(op, given, rank)), (i, op, rank)
    codes = [numbers((3, 64), torch.float8_e4m3fn, rank) for rank in range(size)]
    for own in [r.gather(x) for r, x in zip(ranks, codes, strict=True)]:
        assert torch.equal(own.float(), torch.stack(codes).float())
    assert are_empty(ranks)


@pytest.mark.parametrize("seed", range(1, 4))
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_rank_that_is_ahead(folder, size, seed):
    """No rank waits for the others to have read: it may be in the next sum by then. So many sums that warps sleep where it
    matters: with one place for a row each seed fails. Three ranks sum in two steps."""
    ranks = ranks_of(folder, 640, size, one_step_bytes=None if size == 2 else 640)
    given = [numbers((100, 5, 320), torch.bfloat16, rank) for rank in range(size)]
    found = [torch.zeros_like(x) for x in given]
    for r, x, total in zip(ranks, given, found, strict=True):
        r.kernels, r.seed = len(x), seed
        r._run(x[0], total[0], r._kernel("sum", x.dtype, size - 1))
    for total in found:
        assert torch.equal(total, wanted("sum", given, 0))


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("inputs", "kind", "adds", "dtype"),
    [
        (None, "rms", True, torch.bfloat16),
        (None, "layer", False, torch.float32),
        ("fp8", "rms", True, torch.bfloat16),
        ("int8", "layer", True, torch.float16),
        ("fp8-block", "rms", False, torch.bfloat16),
        ("fp8-block", "layer", True, torch.float32),
    ],
    ids=str,
)
def test_norms_of_sums(folder, inputs, kind, adds, dtype, size):
    """Results equal the op set's own norm of the rounded sum, but for the order in which squares
    are added. Three ranks sum in two steps."""
    width, rows = 1280, 5
    row_bytes = width * dtype.itemsize
    ranks = ranks_of(folder, row_bytes, size, one_step_bytes=None if size == 2 else row_bytes)
    norm = norm_of(kind, width, dtype)
    ops = TritonOps()
    for i in range(3):
        given = [numbers((rows, width), dtype, 5 + i * 10 + rank) for rank in range(size)]
        residual = numbers((rows, width), dtype, 7 + i) if adds else None
        found = []
        for r, x in zip(ranks, given, strict=True):
            r.group.peer_collectives = r
            own = None if residual is None else residual.clone()
            found.append(ops.all_reduce_norm(x, norm, group=r.group, residual=own, inputs=inputs))
        check_norms(found, given, norm, residual, inputs)


@pytest.mark.parametrize(
    ("size", "width", "num_rows"), [(2, 60, 3), (2, 64, 70), (3, 65, 5), (4, 33, 2)], ids=str
)
def test_best_of_ranks(folder, size, width, num_rows):
    """Each rank's best and its logit, as sums with zeros. The last ranks may have columns that do not count, or no others."""
    ranks, own = ranks_of(folder, 640, size), 32
    torch.manual_seed(width)
    logits = torch.randn(num_rows, size * own).bfloat16()
    logits[0] = logits[0, 0]  # all equal: the first is it
    logits[-1, width - 1] = 9.0
    logits[:, width:] = 20.0
    wanted = logits[:, :width].float().argmax(-1)
    parts = [logits[:, rank * own : (rank + 1) * own] for rank in range(size)]
    pairs = [
        sampling.best_of_rank(part, rank, size, width, block=16) for rank, part in enumerate(parts)
    ]
    for summed in [r(pair) for r, pair in zip(ranks, pairs, strict=True)]:
        assert torch.equal(sampling.best_of_all(summed, size), wanted)
    ranks[-1].group.peer_collectives = ranks[-1]
    for r, pair in zip(ranks[:-1], pairs, strict=False):
        r(pair)
    assert torch.equal(
        TritonOps().best_of_ranks(parts[-1], ranks[-1].group, width), wanted
    )  # its launch is the last


def test_what_it_does_not_take(folder):
    (sums,) = ranks_of(folder, 640, most_bytes=6400)[:1]
    x, weight = torch.zeros(4, 320, dtype=torch.bfloat16), torch.ones(320, dtype=torch.bfloat16)
    norm = NormParams(kind="rms", weight=weight, eps=1e-5)
    assert sums.covers(x)
    assert sums.covers_norm(x, norm, "fp8")
    assert not sums.covers(x.expand(3, 4, 320))
    assert not sums.covers(torch.zeros(11, 320, dtype=torch.bfloat16))  # more than its memory
    assert not sums.covers(torch.zeros(7, dtype=torch.bfloat16))
    assert not sums.covers(torch.zeros(4, 320, dtype=torch.int16))
    assert not sums.covers_norm(x, norm, "fp8-block")  # 320 is not whole tiles
    assert not sums.covers_norm(x[:, :160].contiguous(), norm, None)
    assert not sums.covers_norm(x, NormParams(kind="rms", weight=weight.float(), eps=1e-5), None)
    own = OwnNorm(name="mine", function=lambda x, weight, bias, eps: x)
    assert not sums.covers_norm(x, NormParams(kind=own, weight=weight, eps=1e-5), None)
    with pytest.raises(ValueError, match="multiple of 16"):
        peer_collectives.CudaPeerCollectives(sums.group, 24)
