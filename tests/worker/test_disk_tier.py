"""Files of KV blocks: what is torn, cut, damaged or somebody else's is a miss; the bound holds; two engines share a folder."""

from __future__ import annotations

import os
import resource
import secrets
import shutil
import signal
import stat

import numpy as np
import pytest
import torch

from slipstream.errors import ConfigError
from slipstream.kernels.cache.blocks import BlockTensors
from slipstream.kernels.plain.reference import ReferenceOps
from slipstream.messages.tiers import BlockCopy
from slipstream.platform.cpu import CpuPlatform
from slipstream.worker.tiers import device_blocks, disk_tier
from slipstream.worker.tiers.block_store import HostBlockStore, block_arrays
from slipstream.worker.tiers.device_blocks import DeviceBlocks
from slipstream.worker.tiers.disk_tier import HEADER, DiskTier
from slipstream.worker.tiers.exchange import BlockExchange
from tests.support.waiting import wait_for

OURS, THEIRS = b"o" * 16, b"t" * 16
SIZE = 3000


def key(number):
    return number.to_bytes(16, "big")


def pieces(value=0, size=SIZE):
    whole = np.full(size, value, np.uint8)
    return [memoryview(whole[:1]), memoryview(whole[1:2000]), memoryview(whole[2000:])]


def tier(path, limit=10 * (SIZE + HEADER.size), identity=OURS):
    return DiskTier(path, limit, identity, SIZE)


def write(disk, number, value):
    return disk.write(key(number), pieces(value), disk.era)


def content(disk, number):
    found = pieces(255)
    return set(b"".join(found)) if disk.read(key(number), found) else None


def file_of(disk, number):
    return disk._path(OURS.hex(), key(number).hex())


def test_a_block_survives_its_engine(tmp_path):
    disk = tier(tmp_path)
    assert write(disk, 1, 7)
    assert content(disk, 1) == {7}
    assert content(disk, 2) is None
    disk.close()
    again = tier(tmp_path)
    assert key(1) in again
    assert content(again, 1) == {7}
    assert os.stat(file_of(again, 1)).st_mode & 0o077 == 0  # nobody else reads prompts
    other = tier(tmp_path, identity=THEIRS)  # a changed model, kernel or type
    assert key(1) not in other
    assert content(other, 1) is None


def flipped(data, at):
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data[:-1],
        lambda data: data[:40],
        lambda data: b"",
        lambda data: data + b"x",
        lambda data: bytes(len(data)),
        lambda data: flipped(data, 0),
        lambda data: flipped(data, 8),
        lambda data: flipped(data, 30),
        lambda data: flipped(data, len(data) - 1),
        lambda data: (
            data[: HEADER.size] + bytes(SIZE)
        ),  # a rename that the disk made before the bytes
        lambda data: os.urandom(len(data)),
    ],
)
def test_a_damaged_file_is_a_miss_and_goes(tmp_path, change):
    disk = tier(tmp_path)
    write(disk, 1, 7)
    file_of(disk, 1).write_bytes(change(file_of(disk, 1).read_bytes()))
    assert content(disk, 1) is None
    assert key(1) not in disk
    assert not file_of(disk, 1).exists()
    assert disk.num_bytes == 0
    assert write(disk, 1, 8)
    assert content(disk, 1) == {8}


def test_another_blocks_file_is_a_miss(tmp_path):
    disk = tier(tmp_path)
    write(disk, 1, 7)
    write(disk, 2, 9)
    shutil.copy(file_of(disk, 1), file_of(disk, 2))
    assert content(disk, 2) is None
    assert content(disk, 1) == {7}


@pytest.mark.parametrize(
    "make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/etc/passwd", path)]
)
def test_what_is_no_file_is_a_miss(tmp_path, make):
    disk = tier(tmp_path)
    write(disk, 1, 7)
    file_of(disk, 1).unlink()
    make(file_of(disk, 1))
    assert content(disk, 1) is None
    assert os.path.exists("/etc/passwd")


def test_strange_files_do_not_hinder_a_start(tmp_path):
    disk = tier(tmp_path)
    write(disk, 1, 7)
    disk.close()
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / OURS.hex() / "README").write_text("mine")
    left = file_of(disk, 1).with_name(f".{file_of(disk, 2).name}.77.1")
    left.write_bytes(b"half")
    again = tier(tmp_path)
    assert content(again, 1) == {7}
    assert not left.exists()
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_the_bound_holds_and_the_least_recently_used_go(tmp_path):
    old = tier(tmp_path, identity=THEIRS)
    write(old, 1, 1)
    old.close()
    disk = tier(tmp_path, limit=3 * (SIZE + HEADER.size))
    for number in (1, 2, 3):
        write(disk, number, number)
    assert not old._path(THEIRS.hex(), key(1).hex()).exists()
    assert content(disk, 1) == {1}
    write(disk, 4, 4)
    assert [n for n in range(1, 5) if content(disk, n)] == [1, 3, 4]
    disk.close()
    smaller = tier(tmp_path, limit=SIZE + HEADER.size)
    assert len([*tmp_path.rglob("*.kv")]) == 1
    assert smaller.num_bytes <= smaller.limit_bytes
    with pytest.raises(ConfigError, match="kv_disk_bytes"):
        tier(tmp_path, limit=SIZE)
    with pytest.raises(
        ConfigError, match=r"kv_disk_bytes=1125899906842624000 is more than the disk of .* has"
    ):
        tier(tmp_path / "new", 1000 * 2**50)
    assert content(tier(tmp_path / "new"), 1) is None  # nothing stays locked


def test_two_engines_share_a_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_tier, "LOOK_EVERY_S", 0.0)
    first, second = tier(tmp_path), tier(tmp_path)
    assert (first.is_writer, second.is_writer) == (True, False)
    write(first, 1, 7)
    assert not write(second, 2, 8)
    assert content(second, 1) == {7}  # found when it looked
    second.clear()
    assert content(first, 1) == {7}
    first.close()
    assert write(second, 2, 8)
    assert second.is_writer
    assert content(second, 1) == {7}


def test_a_folder_that_can_not_be_used_is_refused_by_name(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match="kv_disk_path"):
            tier(path)


def test_a_full_disk_costs_blocks_and_nothing_else(tmp_path, monkeypatch):
    """The system refuses to write a file beyond a size, as a full disk does."""
    disk = tier(tmp_path)
    write(disk, 1, 7)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
        assert not write(disk, 2, 8)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert [f.name for f in tmp_path.rglob("*.kv*")] == [file_of(disk, 1).name]
    assert content(disk, 1) == {7}
    assert not write(disk, 2, 8)  # it pauses
    monkeypatch.setattr(disk_tier, "PAUSE_S", 0.0)
    disk._paused_until = 0.0
    assert write(disk, 2, 8)


def test_a_folder_that_goes_away_is_a_miss(tmp_path):
    disk = tier(tmp_path / "kv")
    write(disk, 1, 7)
    shutil.rmtree(tmp_path / "kv")
    (tmp_path / "kv").write_text("")
    assert content(disk, 1) is None
    assert not write(disk, 1, 7)


def test_what_was_ordered_before_all_is_forgotten_is_not_written(tmp_path):
    disk = tier(tmp_path)
    era = disk.era
    write(disk, 1, 7)
    disk.clear()
    assert content(disk, 1) is None
    assert not disk.write(key(2), pieces(), era)


def carried(store, *copies):
    store.submit(copies)
    found = {}
    while len(found) < len(copies):
        found |= dict(store.finished())
    return found


def test_a_cpus_blocks_go_to_files_and_come_back(tmp_path):
    rng, settled = np.random.default_rng(0), []
    k, v = (rng.normal(size=(5, 2, 4, 8)).astype(np.float32) for _ in range(2))
    turned = np.ascontiguousarray(v.swapaxes(2, 3)).swapaxes(2, 3)  # another order in memory
    store = HostBlockStore(
        [block_arrays([k, turned]), []],
        DiskTier(tmp_path, 2**20, OURS, 512),
        lambda: settled.append(1),
    )
    assert store.sizes == [512, 0]
    before = k[1].copy(), turned[1].copy()
    assert carried(store, BlockCopy(1, "device", "disk", key(1), 1)) == {1: True}
    assert not settled
    assert carried(
        store, BlockCopy(2, "disk", "device", key(1), 3), BlockCopy(3, "disk", "device", key(9), 2)
    ) == {2: True, 3: False}
    assert settled
    assert np.array_equal(k[3], before[0])
    assert np.array_equal(turned[3], before[1])
    store.close()


@pytest.mark.parametrize("odd", [False, True])
def test_a_devices_blocks_go_to_the_host_to_files_and_back(tmp_path, odd):
    """The code of a GPU runs on a CPU without a stream."""
    check_device_blocks(tmp_path, CpuPlatform(torch.device("cpu")), ReferenceOps(), odd)


def test_neighbouring_slots_cross_the_bus_in_one_piece(monkeypatch):
    """Neighbours lie within a chunk of pinned memory; each copy brings its own block."""
    monkeypatch.setattr(device_blocks, "CHUNK_BYTES", 4 * 256)
    cache = torch.arange(12.0).repeat_interleave(64).view(12, 2, 4, 8)
    store = DeviceBlocks(
        (BlockTensors.of([cache]), BlockTensors.of([])),
        ReferenceOps(),
        (11, 0),
        (8, 0),
        None,
        CpuPlatform(torch.device("cpu")),
    )
    pieces, runs = [], store._runs
    monkeypatch.setattr(
        store, "_runs", lambda copies: pieces.append([x for x, _ in runs(copies)]) or runs(copies)
    )
    slots = (9, 2, 3, 1, 5, 4, 7)  # a chunk has four
    out = [
        BlockCopy(i, "device", "host", key(i), block=i, slot=slot)
        for i, slot in enumerate(slots, start=1)
    ]
    assert all(carried(store, *out).values())
    assert [[part.stop - part.start for part in found] for found in pieces] == [[4, 1, 1, 1]]
    for i, slot in enumerate(slots, start=1):
        assert (store._kinds[0].slots(slot, 1)[0].view(torch.float32) == i).all()
    cache.zero_()
    back = [
        BlockCopy(20 + slot, "host", "device", key(i), block=slot, slot=slot)
        for i, slot in enumerate(slots, start=1)
    ]
    assert all(carried(store, *back).values())
    assert all((cache[slot] == i).all() for i, slot in enumerate(slots, start=1))
    store.close()


def check_device_blocks(tmp_path, platform, ops, odd):
    rng = torch.Generator().manual_seed(0)
    caches = [torch.randn(9, 2, 4, 8, generator=rng).to(platform.device) for _ in range(3)]
    caches[1] = caches[1].transpose(2, 3).contiguous().transpose(2, 3)
    if odd:  # 3 bytes
        caches.append(
            torch.randint(0, 99, (9, 1, 3, 1), generator=rng).to(torch.int8).to(platform.device)
        )
    states = [torch.randn(5, 3, 8, generator=rng), torch.randn(5, 2, 8, 8, generator=rng)]
    states = [state.to(platform.device) for state in states]
    block_bytes = 3 * 256 + 3 * odd
    store = DeviceBlocks(
        (BlockTensors.of(caches), BlockTensors.of(states)),
        ops,
        (6, 2),
        (2, 1),
        DiskTier(tmp_path, 2**20, OURS, 1024),
        platform,
    )
    assert (store.sizes[0], store.slots) == (block_bytes, (6, 2))
    before = [cache.clone() for cache in caches]
    out = [BlockCopy(i, "device", "host", key(i), block=i, slot=i) for i in (1, 2, 3, 4, 5)]
    assert carried(store, *out) == dict.fromkeys(range(1, 6), True)
    assert carried(
        store,
        BlockCopy(6, "host", "disk", key(4), slot=4),
        BlockCopy(7, "disk", "host", key(4), slot=6),
    ) in (
        {6: True, 7: True},
        {6: True, 7: False},  # it was read before it was written
    )
    assert carried(store, BlockCopy(8, "disk", "host", key(4), slot=6)) == {8: True}
    for cache in caches:
        cache.zero_()
    back = [BlockCopy(10 + i, "host", "device", key(i), block=9 - i, slot=i) for i in (1, 2, 3, 5)]
    assert all(
        carried(store, *back, BlockCopy(20, "host", "device", key(4), block=5, slot=6)).values()
    )
    for old, cache in zip(before, caches, strict=True):
        for i in (1, 2, 3, 5):
            assert torch.equal(cache[9 - i], old[i])
        assert torch.equal(cache[5], old[4])
        assert not cache[1].any()
    assert store.sizes[1] == 4 * (24 + 128)
    kept = [state.clone() for state in states]
    out = [BlockCopy(30 + i, "device", "host", key(i), i, i, kind=1) for i in (1, 2)]
    assert all(carried(store, *out, BlockCopy(40, "device", "host", key(6), 3, 3)).values())
    for state in states:
        state.zero_()
    to_disk = BlockCopy(33, "host", "disk", key(8), slot=2, kind=1)
    assert carried(store, to_disk) == {33: True}
    from_disk = BlockCopy(34, "disk", "host", key(8), slot=1, kind=1)
    assert carried(store, from_disk) == {34: True}
    assert carried(store, from_disk._replace(key=key(4), number=35)) == {35: False}  # a block
    assert carried(store, from_disk._replace(number=36)) == {36: True}
    assert carried(store, BlockCopy(37, "host", "device", key(8), 4, 1, kind=1)) == {37: True}
    for old, state in zip(kept, states, strict=True):
        assert torch.equal(state[4], old[2])
        assert not state[:4].any()
    store.close()


def test_a_devices_blocks_go_to_another_engine_and_come_from_it():
    """The code of a GPU runs on a CPU without a stream."""
    check_handover_of_a_device(CpuPlatform(torch.device("cpu")), ReferenceOps())


def check_handover_of_a_device(platform, ops):
    """Two stores with two pinned rows for blocks and one for states, and more copies than rows."""
    shapes, layout = ([(9, 2, 4, 8)] * 2, [(5, 3, 8)]), {"block_size": "4"}
    rng = torch.Generator().manual_seed(0)
    given, taken = (
        [[make(*s).to(platform.device) for s in own] for own in shapes]
        for make in (lambda *s: torch.randn(*s, generator=rng), torch.zeros)
    )
    addresses = [f"unix:test-{secrets.token_hex(8)}" for _ in range(2)]
    exchanges = [BlockExchange(2**16, (512, 96), layout, address) for address in addresses]
    giver, taker = (
        DeviceBlocks(
            (BlockTensors.of(own[0]), BlockTensors.of(own[1])),
            *(ops, (0, 0), (2, 1), None, platform, exchange, layout),
        )
        for own, exchange in zip((given, taken), exchanges, strict=True)
    )
    out = [BlockCopy(i, "device", "peer", key(i), block=i) for i in range(1, 8)]
    out += [BlockCopy(10 + i, "device", "peer", key(10 + i), i, kind=1) for i in (1, 2, 3)]
    assert set(carried(giver, *out).values()) == {True}
    more = dict(address=addresses[0])
    back = [BlockCopy(i, "peer", "device", key(i), block=9 - i, **more) for i in range(1, 8)]
    back += [
        BlockCopy(10 + i, "peer", "device", key(10 + i), 4 - i, kind=1, **more) for i in (1, 2, 3)
    ]
    lost = BlockCopy(20, "peer", "device", key(99), block=1, **more)
    assert carried(taker, *back, lost) == {**{copy.number: True for copy in back}, 20: False}
    for (blocks, states), (new_blocks, new_states) in ((given, taken),):
        for old, new in zip(blocks, new_blocks, strict=True):
            assert all(torch.equal(new[9 - i], old[i]) for i in range(1, 8))
            assert not new[1].any()
        for old, new in zip(states, new_states, strict=True):
            assert all(torch.equal(new[4 - i], old[i]) for i in (1, 2, 3))
    for store in (giver, taker):  # every pinned row is free again
        assert [len(t._free) for t in store._transits] == [2, 1]
        held = store.exchange._entries.values()
        wait_for(lambda held=held: not any(e.num_pins for e in [*held]), "a reader holds blocks")
        store.exchange.check()
    giver.close()
    assert carried(taker, lost._replace(key=key(1))) == {20: False}
    taker.close()


def test_the_folder_that_is_made_is_private(tmp_path):
    tier(tmp_path / "parent" / "made").close()
    assert stat.S_IMODE((tmp_path / "parent" / "made").stat().st_mode) == 0o700
