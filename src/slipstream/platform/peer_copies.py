"""Sums over two GPUs that overlap with linear layers: each GPU copies its part into the other's memory.

The GPU's copy engines make the copies, so linear layers lose no multiprocessor to them, as they would to a
kernel of NCCL. A step's tokens are cut into pieces: while one piece is copied, the next piece's linear layers
are computed. The consumer of a sum, a norm, adds the parts (`OpSet.norm_arriving`).

There are two buffers for a step's rows, one for each of a layer's two sums. A rank writes to a buffer again
one layer later. By then it has received the other rank's rows of the sum in between, which the other rank
sent after it had read the buffer.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from slipstream.errors import OutOfMemoryError, first_line
from slipstream.platform.base import CopyQueue, Event, Graph, Platform
from slipstream.spec.parallel import COPIED_SUMS_FROM

if TYPE_CHECKING:
    from slipstream.platform.collectives import RankGroup

PIECE_TOKENS = 2560
"""Number of tokens in a dense model's piece: with 20 tiles of rows, linear layers with 4,096 or
14,336 outputs keep 97 % of an H200 busy."""
LAST_TOKENS = 512
"""Minimum tokens of the last piece, whose copy overlaps with little computation."""
TILE = 128
"""Rows of a linear layer's tile: all pieces but the last are multiples of it."""
TEST_TOKENS = 3000
TEST_TENSORS = 24
"""Maximum number of tensors with all rows of the test that exist at once: in a run, in its graph,
and the expected results."""

_logger = logging.getLogger("slipstream.engine")


def cut(num_tokens: int, is_mixture: bool) -> tuple[slice, ...]:
    """Pieces of a step's tokens. `is_mixture`: two halves, because each piece reads all experts."""
    if is_mixture:
        each = -(-num_tokens // (2 * TILE)) * TILE
    else:
        each = min(PIECE_TOKENS, (num_tokens - LAST_TOKENS) // TILE * TILE)
    ends = list(range(each, num_tokens, each))
    if ends and num_tokens - ends[-1] < LAST_TOKENS and not is_mixture:
        ends[-1] -= LAST_TOKENS
    return tuple(map(slice, [0, *ends], [*ends, num_tokens]))


@dataclass(frozen=True, slots=True)
class CopiedSum:
    """An `OverlappedSum`. `own`: this rank's part; `other`: the buffer in which the other rank's
    part arrives."""

    own: Tensor
    other: Tensor
    sent: Event | None
    copies: PeerCopies
    channel: int

    def parts(self) -> tuple[Tensor, ...]:
        if self.sent is not None:
            self.sent.wait()  # `own` may be freed after this
        self.copies.wait(self.channel)
        return self.own, self.other


class PeerCopies:
    """`OverlappedSums` of the two ranks of `group`, for steps of up to `most_tokens` rows of `size`
    elements. `is_mixture`: see `cut`. Both ranks make the same calls in the same order."""

    def __init__(
        self,
        group: RankGroup,
        queue: CopyQueue,
        most_tokens: int,
        size: int,
        dtype: torch.dtype,
        is_mixture: bool = False,
    ) -> None:
        assert group.size == 2
        self.group = group
        self._queue = queue
        self._peer = 1 - group.rank
        self._is_mixture = is_mixture
        self.shape, self.dtype = (2, most_tokens, size), dtype
        self._own, self._handle = group.share_tensor(self.shape, dtype)
        self._there = self._handle.get_buffer(self._peer, self.shape, dtype)

    def pieces(self, num_tokens: int) -> tuple[slice, ...]:
        return (
            cut(num_tokens, self._is_mixture)
            if COPIED_SUMS_FROM <= num_tokens <= self.shape[1]
            else ()
        )

    def begin(self, x: Tensor, *, place: int, index: int, rows: slice) -> CopiedSum:
        x, channel = x.contiguous(), 2 * index + place
        with self._queue.behind():
            self._there[place, rows].copy_(x)
            self._handle.put_signal(self._peer, channel)
        return CopiedSum(x, self._own[place, rows], self._queue.record(), self, channel)

    def wait(self, channel: int) -> None:
        """Make later work wait for the other rank's rows."""
        self._handle.wait_signal(self._peer, channel)


def try_peer_copies(
    group: RankGroup,
    platform: Platform,
    most_tokens: int,
    size: int,
    dtype: torch.dtype,
    is_mixture: bool = False,
) -> None:
    """Let `group` overlap the sums of long steps with linear layers from now on, if that works.

    It needs two ranks that write to each other's memory, enough memory, and the same results as the
    library's.
    """
    if group.size != 2 or group.peer_collectives is None or most_tokens < COPIED_SUMS_FROM:
        return
    try:
        copies = PeerCopies(group, platform.copy_queue(), most_tokens, size, dtype, is_mixture)
    except RuntimeError as error:
        _logger.warning("sums do not go on beside products: %s", first_line(error))
        return
    try:
        is_right = agrees(copies, platform)
    except OutOfMemoryError as error:  # any other error is one rank's alone, and ends the start
        _logger.warning("sums do not go on beside products: %s", error)
        return
    if group.least(is_right)[0]:
        group.overlapped = copies
    else:
        _logger.warning("sums do not go on beside products: those by copies came out otherwise")


@torch.inference_mode()
def agrees(copies: PeerCopies, platform: Platform) -> bool:
    """Whether sums in a replayed graph equal the library's in every bit. OutOfMemoryError on both
    ranks if one of them has no memory for the test, because neither can leave the test alone."""
    group, (_, most, size), found = copies.group, copies.shape, True
    num_rows, why = min(most, TEST_TOKENS), "a rank has no memory to test the copies"
    platform.release_unused()
    if not group.least(
        platform.memory()[0] >= TEST_TENSORS * num_rows * size * copies.dtype.itemsize
    )[0]:
        raise OutOfMemoryError(why)
    rows = torch.arange(num_rows, device=platform.device)
    given = [
        (rows[:, None] * (i + 1) % 251 - 125 * group.rank).to(copies.dtype).expand(-1, size)
        for i in range(4)
    ]
    wanted = torch.stack(
        [group.library_sum(x.clone(memory_format=torch.contiguous_format)) for x in given]
    )

    def sums() -> Tensor:
        made = []
        for i, x in enumerate(given):
            pieces = cut(len(x), is_mixture=False)
            begun = [copies.begin(x[p], place=i % 2, index=j, rows=p) for j, p in enumerate(pieces)]
            made.append(torch.cat([torch.add(*one.parts()) for one in begun]))
        return torch.stack(made)

    captured: tuple[Graph, Tensor] | None = None
    try:
        captured = platform.graphs().capture(sums)
    except RuntimeError as error:
        why = first_line(error)
    if not group.least(captured is not None)[0] or captured is None:
        raise OutOfMemoryError(why)
    graph, output = captured
    for _ in range(3):
        output.zero_()
        graph.replay()
        found = found and torch.equal(output, wanted)
    return found
