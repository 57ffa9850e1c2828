"""Blocks of KV cache that this engine hands over to others: a bounded store by block hash. No torch.

1. `reserve` and `fill` put a block in; other engines get it by its hash (`peers.py` says how both speak). A request
   for a block that is being filled waits for it.
2. The memory has slots for each kind of cache: blocks, recurrent states. If all are taken, the least recently used
   block that nobody reads is evicted. A block that nobody asked for in `TTL_S` is dropped.
3. A block is pinned while an engine reads it, and no longer than its connection; over TCP no longer than `_DONE_S`.
4. On Linux the memory is an unnamed file, which readers on this host map. It goes with the last process that has it.

A lost block costs time only: an engine that does not find it computes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import logging
import mmap
import os
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import mul

import msgspec
import numpy as np

from slipstream.errors import ConfigError
from slipstream.worker.tiers import peers
from slipstream.worker.tiers.peers import MISSING, Bytes

_logger = logging.getLogger("slipstream.engine")

TTL_S = 60.0
"""Seconds after which a block that nobody asks for is dropped."""

FILL_S = 5.0
"""Maximum time in seconds to wait for blocks that are being filled."""

_HELLO_S = 5.0
"""Maximum time in seconds for a whole greeting, even if its bytes arrive one by one."""

_DONE_S = 30.0
"""Maximum time in seconds for which a reader over TCP may pin blocks. It gets copies, so it never reads a slot that
was reused. A reader on this host reads the memory itself: it pins blocks until it is done, or its process ends."""

_TICK_S = 1.0
_MAX_CONNECTIONS = 256
_MAX_GREETING = 16  # maximum connections that have not sent a valid greeting yet


@dataclass(slots=True, eq=False)
class _Entry:
    key: bytes
    kind: int
    place: int  # index of the slot in the memory
    used: float
    is_ready: bool = False
    num_pins: int = 0
    is_gone: bool = False  # dropped while an engine read it


class BlockExchange:
    """Store of the blocks that this engine hands over to others at `address`. `sizes` are the bytes
    of a block, and of a slot of each `SlotKind`. `of`: (rank, number of ranks); each has a part of
    `limit_bytes` and an address of its own (`peers.rank_address`)."""

    def __init__(
        self,
        limit_bytes: int,
        sizes: Sequence[int],
        layout: Mapping[str, str],
        address: str,
        of: tuple[int, int] = (0, 1),
    ) -> None:
        self.address, self._layout, self._sizes = address, layout, sizes
        parts = of[1] * sum(map(bool, sizes))
        share = limit_bytes // parts
        counts = [share // size if size else 0 for size in sizes]
        if any(size and not count for size, count in zip(sizes, counts, strict=True)):
            least = max(sizes) * parts
            raise ConfigError(
                f"kv_handover_bytes={limit_bytes} is too small for a block or a state, for which it takes {least} bytes; "
                "raise it",
                field="kv_handover_bytes",
            )
        whole = [count * size for count, size in zip(counts, sizes, strict=True)]
        firsts = itertools.accumulate(whole, initial=0)
        self._free = [
            [first + i * size for i in reversed(range(count))]
            for first, size, count in zip(firsts, sizes, counts, strict=False)
        ]
        self.limit_bytes = sum(whole)
        self._changed = threading.Condition()
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()  # least recently used first
        self.num_given = self.num_expired = self.num_evicted = 0  # blocks and states
        place = peers.split_address(peers.rank_address(address, *of))
        self._file = -1
        if isinstance(place, str):
            self._listener, memory = self._listen_here(place)
        else:
            self._listener, memory = _listen(place), mmap.mmap(-1, self.limit_bytes)
        self._memory: Bytes = np.frombuffer(memory, np.uint8)
        self._connections: set[socket.socket] = set()
        self._greeting: dict[socket.socket, None] = {}  # not yet welcomed, oldest first
        self._is_open = True
        self._thread = threading.Thread(target=self._accept, name="kv-exchange", daemon=True)
        self._thread.start()

    # --- Putting in ---------------------------------------------------------------------------------------------------

    def reserve(self, key: bytes, kind: int) -> bool | None:
        """Reserve a slot for a block that the caller then fills. False if the block is stored
        already, None if no slot is free."""
        with self._changed:
            self._expire()
            if (entry := self._entries.get(key)) is not None:
                self._touch(entry)
                return False
            free = self._free[kind]
            if not free:
                unused = (
                    e
                    for e in self._entries.values()
                    if e.kind == kind and e.is_ready and not e.num_pins
                )
                if (oldest := next(unused, None)) is None:
                    return None
                self._remove(oldest)
                self.num_evicted += 1
            self._entries[key] = _Entry(key, kind, free.pop(), time.monotonic())
            return True

    def fill(self, key: bytes, pieces: Sequence[Bytes]) -> bool:
        """Copy a block's contents into its reserved slot. False if the reservation was dropped
        meanwhile."""
        with self._changed:
            if (entry := self._entries.get(key)) is None or entry.is_ready or entry.num_pins:
                return False
            entry.num_pins += 1  # not evicted
        place = entry.place
        try:
            for piece in pieces:
                self._memory[place : place + len(piece)] = piece
                place += len(piece)
            entry.is_ready = True
        finally:
            with self._changed:
                if not (entry.is_ready or entry.is_gone):
                    self._remove(entry)
                self._unpin([entry])
                self._changed.notify_all()
        return not entry.is_gone

    def __contains__(self, key: bytes) -> bool:
        with self._changed:
            return key in self._entries

    def clear(self) -> None:
        with self._changed:
            for entry in list(self._entries.values()):
                self._remove(entry)
            self._changed.notify_all()

    @property
    def num_bytes(self) -> int:
        with self._changed:
            return sum(self._sizes[entry.kind] for entry in self._entries.values())

    def check(self) -> None:
        """Assert that each slot is free or has one entry, which nobody reads or fills; for tests."""
        with self._changed:
            entries = self._entries.values()
            assert all(entry.is_ready and not entry.num_pins for entry in entries)
            places = [entry.place for entry in entries] + [p for free in self._free for p in free]
            assert len(places) == len(set(places))
            free = sum(map(mul, map(len, self._free), self._sizes))
            used = sum(self._sizes[entry.kind] for entry in entries)
            assert free + used == self.limit_bytes

    def close(self) -> None:
        self._is_open = False
        self._listener.close()
        with self._changed:
            connections = tuple(self._connections)
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._thread.join(2 * _TICK_S)
        if self._file != -1:
            os.close(self._file)
            self._file = -1

    # --- Slots, under the lock ----------------------------------------------------------------------------------------

    def _touch(self, entry: _Entry) -> None:
        entry.used = time.monotonic()
        self._entries.move_to_end(entry.key)

    def _remove(self, entry: _Entry) -> None:
        del self._entries[entry.key]
        if entry.num_pins:
            entry.is_gone = True
        else:
            self._free[entry.kind].append(entry.place)

    def _unpin(self, entries: Sequence[_Entry]) -> None:
        for entry in entries:
            entry.num_pins -= 1
            if entry.is_gone and not entry.num_pins:
                self._free[entry.kind].append(entry.place)

    def _expire(self) -> None:
        until = time.monotonic() - TTL_S
        while self._entries and (entry := next(iter(self._entries.values()))).used <= until:
            if entry.num_pins or not entry.is_ready:
                self._touch(entry)
                continue
            self._remove(entry)
            self.num_expired += 1

    def pin(self, keys: Sequence[bytes], patience_s: float = FILL_S) -> list[_Entry | None]:
        """Find blocks and pin them until `unpin`; None for a missing one. Waits for blocks being filled, but not longer
        than `patience_s`; None for those not filled by then."""

        def filled() -> bool:
            found = map(self._entries.get, keys)
            return all(entry is None or entry.is_ready for entry in found)

        with self._changed:
            self._expire()
            self._changed.wait_for(filled, patience_s)
            found = list[_Entry | None]()
            for key in keys:
                entry = self._entries.get(key)
                if entry is not None and not entry.is_ready:
                    entry = None
                if entry is not None:
                    self._touch(entry)
                    entry.num_pins += 1
                found.append(entry)
            return found

    def unpin(self, entries: Sequence[_Entry | None]) -> None:
        with self._changed:
            self._unpin([entry for entry in entries if entry is not None])

    # --- Giving out ---------------------------------------------------------------------------------------------------

    def _listen_here(self, name: str) -> tuple[socket.socket, mmap.mmap]:
        self._file = os.memfd_create("slipstream-kv", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
        os.ftruncate(self._file, self.limit_bytes)
        # A reader may rely on the memory's size.
        fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        return _listen("\0" + name), mmap.mmap(self._file, self.limit_bytes)

    def _accept(self) -> None:
        self._listener.settimeout(_TICK_S)
        while self._is_open:
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                with self._changed:
                    self._expire()
                continue
            except OSError:
                return  # the listening socket was closed
            with self._changed:
                if len(self._connections) >= _MAX_CONNECTIONS:
                    connection.close()
                    continue
                self._connections.add(connection)
                self._greeting[connection] = None
                if len(self._greeting) > _MAX_GREETING:
                    oldest = next(iter(self._greeting))
                    del self._greeting[oldest]
                    with contextlib.suppress(OSError):  # its thread ends
                        oldest.shutdown(socket.SHUT_RDWR)
            threading.Thread(
                target=self._serve, args=(connection,), name="kv-given", daemon=True
            ).start()

    def _serve(self, connection: socket.socket) -> None:
        pinned = list[_Entry | None]()
        try:
            if not self._welcome(connection):
                return
            with self._changed:
                self._greeting.pop(connection, None)
            connection.settimeout(None)
            until = None
            while True:
                if self._file == -1:  # a peer that wants nothing for IDLE_S disconnects by itself
                    until = time.monotonic() + 2 * peers.IDLE_S if not pinned else until
                message = peers.receive(connection, until=until)
                self.unpin(pinned)
                pinned = []
                if isinstance(message, peers.Get):
                    pinned = self.pin(message.keys)
                    until = time.monotonic() + _DONE_S if self._file == -1 else None
                    self._give(connection, pinned, until)
        except (OSError, EOFError, ValueError, msgspec.MsgspecError):
            pass  # disconnected, or is no engine
        finally:
            self.unpin(pinned)
            with self._changed:
                self._connections.discard(connection)
                self._greeting.pop(connection, None)
            connection.close()

    def _welcome(self, connection: socket.socket) -> bool:
        """Accept a connection from an engine if its blocks have the same layout."""
        until = time.monotonic() + _HELLO_S
        peers.limit_wait(connection, until)
        if self._file != -1 and not peers.is_own(connection):
            peers.send(connection, peers.PeerRefused("its processes belong to another user"))
            return False
        hello = peers.receive(connection, limit=peers.MAX_HELLO, until=until)
        theirs = hello.layout if isinstance(hello, peers.Hello) else {}
        if why := differences(self._layout, theirs):
            peers.send(connection, peers.PeerRefused(why))
            return False
        shared = self._file != -1
        files = [self._file] if shared else []
        peers.send(connection, peers.Welcome(self.limit_bytes * shared), files)
        return True

    def _give(
        self, connection: socket.socket, entries: Sequence[_Entry | None], until: float | None
    ) -> None:
        places = [MISSING if entry is None else entry.place for entry in entries]
        if until is not None:
            peers.limit_wait(connection, until)
        peers.send(connection, peers.Found(places))
        for entry in entries if self._file == -1 else ():
            if entry is not None:
                size = self._sizes[entry.kind]
                if until is not None:
                    peers.limit_wait(connection, until)
                connection.sendall(self._memory[entry.place : entry.place + size].data)
        with self._changed:
            self.num_given += len(entries) - entries.count(None)


def differences(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    """Name the differences between two engines' block layouts; empty if there are none."""
    wrong = [
        f"{name} is {ours.get(name, 'unknown')} there and {theirs.get(name, 'unknown')} here"
        for name in {**ours, **theirs}
        if ours.get(name) != theirs.get(name)
    ]
    return "; ".join(wrong)


def _listen(place: tuple[str, int] | str) -> socket.socket:
    try:
        if isinstance(place, str):
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(place)
            listener.listen()
            return listener
        return socket.create_server(place)
    except OSError as error:
        name = f"unix:{place[1:]}" if isinstance(place, str) else f"tcp://{place[0]}:{place[1]}"
        raise ConfigError(
            f"kv_handover_address={name!r} can't be listened at ({error.strerror}); name another",
            field="kv_handover_address",
        ) from error
