"""Sums by copies into the other rank's memory, with ranks as threads and signals as semaphores. On GPUs each start tests them
against NCCL (`peer_copies.agrees`)."""

from __future__ import annotations

import logging
import threading
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.platform import peer_copies, platform_of
from slipstream.platform.collectives import RankGroup
from slipstream.platform.peer_copies import (
    LAST_TOKENS,
    PIECE_TOKENS,
    TILE,
    PeerCopies,
    cut,
    try_peer_copies,
)
from slipstream.spec.parallel import COPIED_SUMS_FROM as FROM_TOKENS
from tests.model.ranks.parallel_ranks import as_threads
from tests.support.waiting import PATIENCE_S

PLATFORM = platform_of(torch.device("cpu"))
SIZE = 8


class Memory:
    """torch's handle of memory that all ranks share."""

    def __init__(self, tensors, signals, rank):
        self.tensors, self.signals, self.rank = tensors, signals, rank

    def get_buffer(self, rank, shape, dtype):
        return self.tensors[rank].view(shape)

    def put_signal(self, rank, channel):
        self.signals[rank].setdefault(channel, threading.Semaphore(0)).release()

    def wait_signal(self, rank, channel):
        assert rank != self.rank
        assert (
            self.signals[self.rank]
            .setdefault(channel, threading.Semaphore(0))
            .acquire(timeout=PATIENCE_S)
        )


def shared_by(group, signals):
    """`RankGroup.share_tensor` of ranks that are threads."""

    def share_tensor(shape, dtype):
        own = torch.zeros(shape, dtype=dtype)
        group.meeting.given[group.rank] = own
        group.meeting.barrier.wait()
        tensors = list(group.meeting.given)
        group.meeting.barrier.wait()
        return own, Memory(tensors, signals, group.rank)

    return share_tensor


@given(num_tokens=st.integers(FROM_TOKENS, 40_000), is_mixture=st.booleans())
def test_pieces_are_all_tokens_in_order(num_tokens, is_mixture):
    pieces = cut(num_tokens, is_mixture)
    assert [p.start for p in pieces] == [0, *(p.stop for p in pieces[:-1])]
    assert pieces[-1].stop == num_tokens
    sizes = [p.stop - p.start for p in pieces]
    assert len(sizes) > 1
    assert all(n % TILE == 0 for n in sizes[:-1])
    if is_mixture:
        assert len(sizes) == 2
        assert sizes[0] - sizes[1] < 2 * TILE
    else:
        assert max(sizes) <= PIECE_TOKENS
        assert min(sizes) >= LAST_TOKENS


def test_what_one_rank_copies_the_other_adds():
    """Steps of different lengths, with two sums a layer whose pieces are all begun before the first is read."""
    signals = [{}, {}]

    def run(group):
        group.share_tensor = shared_by(group, signals)
        copies = PeerCopies(group, PLATFORM.copy_queue(), 6000, SIZE, torch.float32)
        assert copies.pieces(FROM_TOKENS - 1) == copies.pieces(6001) == ()
        for step, num_tokens in enumerate((6000, 2048, 2700)):
            for place in (0, 1):
                x = (
                    torch.arange(num_tokens)[:, None] * (1.0 + group.rank)
                    + step
                    + place
                    + torch.arange(SIZE)
                )
                begun = [
                    copies.begin(x[rows], place=place, index=i, rows=rows)
                    for i, rows in enumerate(copies.pieces(num_tokens))
                ]
                found = torch.cat([sum(one.parts()) for one in begun])
                wanted = torch.arange(num_tokens)[:, None] * 3.0 + 2 * (
                    step + place + torch.arange(SIZE)
                )
                assert torch.equal(found, wanted)
        return True

    assert as_threads(2, run) == [True, True]


def test_only_two_ranks_that_share_memory_copy(caplog, monkeypatch):
    monkeypatch.setattr(
        peer_copies,
        "agrees",
        lambda copies, platform: copies.group.rank == 0 or "right" in caplog.text,
    )
    how = PLATFORM, FROM_TOKENS, SIZE, torch.float32
    signals = [{}, {}]

    def run(group):
        group.share_tensor = shared_by(group, signals)
        try_peer_copies(group, *how)  # no sums through peers' memory
        group.peer_collectives, before = "there", group.overlapped
        try_peer_copies(group, PLATFORM, FROM_TOKENS - 1, SIZE, torch.float32)
        assert before is group.overlapped is None
        try_peer_copies(group, *how)  # rank 1 finds other sums
        assert group.overlapped is None
        group.least(0)
        logging.getLogger("slipstream.engine").warning("right")
        group.least(0)
        try_peer_copies(group, *how)
        return group.overlapped

    assert all(isinstance(x, PeerCopies) for x in as_threads(2, run))
    assert caplog.text.count("came out otherwise") == 2

    def fails(group):
        def share_tensor(shape, dtype):
            raise RuntimeError("another rank has no memory to share\nmore")

        group.share_tensor, group.peer_collectives = share_tensor, "there"
        try_peer_copies(group, *how)
        return group.overlapped

    assert as_threads(2, fails) == [None, None]
    assert "beside products: another rank has no memory to share" in caplog.text


class Replays:
    """A graph that runs its work anew."""

    def __init__(self, work, output):
        self.work, self.output = work, output

    def replay(self):
        self.output.copy_(self.work())


@pytest.mark.parametrize(
    ("free", "can_capture", "says"),
    [
        (2**30, True, ""),
        (2**20, True, "a rank has no memory to test the copies"),
        (2**30, False, "CUDA error: out of memory"),
    ],
)
def test_without_memory_for_their_test_no_rank_copies(caplog, free, can_capture, says):
    """Rank 1 is short of it. Rank 0 would wait for what it sends, and the start would hang, or end."""
    signals, dtype = [{}, {}], torch.float32

    def run(group):
        def capture(work):
            output = work()
            if not can_capture and group.rank == 1:
                raise torch.OutOfMemoryError("CUDA error: out of memory\nmore")
            return Replays(work, output), output

        group.share_tensor = shared_by(group, signals)
        group.library_sum = group.all_reduce
        group.peer_collectives = "there"
        platform = SimpleNamespace(
            device=PLATFORM.device,
            copy_queue=PLATFORM.copy_queue,
            release_unused=lambda: None,
            memory=lambda: (free if group.rank == 1 else 2**30, 2**30),
            graphs=lambda: SimpleNamespace(capture=capture),
        )
        try_peer_copies(group, platform, FROM_TOKENS, SIZE, dtype)
        return group.overlapped is not None

    assert as_threads(2, run) == [not says] * 2
    assert says in caplog.text
    assert caplog.text.count("do not go on beside products") == (2 if says else 0)


def test_an_error_of_the_test_itself_ends_the_start(monkeypatch):
    """One rank that went on alone would leave the other waiting."""

    def broken(copies, platform):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(peer_copies, "agrees", broken)
    signals = [{}, {}]

    def run(group):
        group.share_tensor, group.peer_collectives = shared_by(group, signals), "there"
        with pytest.raises(RuntimeError, match="illegal memory access"):
            try_peer_copies(group, PLATFORM, FROM_TOKENS, SIZE, torch.float32)
        return group.overlapped is None

    assert as_threads(2, run) == [True, True]


@pytest.mark.parametrize("step", ["empty", "rendezvous"])
def test_memory_that_one_rank_cant_share_no_rank_shares(monkeypatch, step):
    """A rank that shared it alone would wait for the other's next call."""
    from torch.distributed import _symmetric_memory as symmetric

    failing = threading.local()

    def fake(name, found):
        def call(*args, **kwargs):
            if name == step and failing.now:
                raise RuntimeError("no memory is left")
            return found(*args, **kwargs)

        monkeypatch.setattr(symmetric, name, call)

    fake("empty", lambda shape, dtype, device: torch.empty(shape, dtype=dtype))
    fake("rendezvous", lambda own, name: "mapped")

    def run(threads):
        group = RankGroup(
            threads.rank, threads.size, PLATFORM.device, SimpleNamespace(group_name="x")
        )
        group.least, failing.now = threads.least, threads.rank == 1
        with pytest.raises(RuntimeError) as caught:
            group.share_tensor((4,), torch.float32)
        failing.now = False
        assert torch.equal(group.share_tensor((4,), torch.float32)[0], torch.zeros(4))
        return str(caught.value)

    assert as_threads(2, run) == ["another rank has no memory to share", "no memory is left"]


@pytest.mark.parametrize("size", [3, 4])
def test_more_than_two_ranks_do_not_copy(size):
    def run(group):
        group.peer_collectives = "there"
        try_peer_copies(group, PLATFORM, FROM_TOKENS, SIZE, torch.float32)
        return group.overlapped

    assert as_threads(size, run) == [None] * size
