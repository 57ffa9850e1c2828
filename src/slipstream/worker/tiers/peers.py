"""Fetches blocks from other engines' exchanges (`exchange.py`), and defines the protocol. No torch.

    fetching engine                          giving engine
    Hello(layout)                  ──>
                                   <──  Welcome(num_bytes), with the memory itself on one host; or PeerRefused
    Get(keys)                      ──>
                                   <──  Found(places); over TCP the contents follow
    Done()                         ──>  the places may be used again

1. `unix:NAME` is a socket of this host (Linux, the abstract namespace: nothing is left of a process that is killed).
   Both processes must belong to one user. The memory is mapped here, so a block is copied once.
2. `tcp://HOST:PORT` is for other hosts. Whoever knows a block's hash gets its contents, so the network must be private.
3. Messages are msgpack after their length. The end of a process breaks its connection: blocks not yet copied fail.
4. A thread for each exchange fetches. It ends when the connection breaks, or after `IDLE_S` without requests.
5. Each of several ranks has an exchange of its own, from which the same rank of the other engine fetches.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import queue
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from slipstream.errors import ConfigError
from slipstream.messages.tiers import BlockCopy

_logger = logging.getLogger("slipstream.engine")

MISSING = -1
"""Slot index of a block that the exchange does not have."""

REPLY_S = 10.0
"""Maximum time in seconds to wait for an exchange's reply."""

IDLE_S = 60.0
MAX_MESSAGE = 2**26
MAX_HELLO = 2**13

Bytes = npt.NDArray[np.uint8]


class Hello(msgspec.Struct, tag=True):
    layout: dict[str, str]  # settings that the contents of blocks depend on, by name


class Welcome(msgspec.Struct, tag=True):
    num_bytes: int  # size of the memory passed along; 0: contents follow each Found


class PeerRefused(msgspec.Struct, tag=True):
    why: str


class Get(msgspec.Struct, tag=True):
    keys: list[bytes]


class Found(msgspec.Struct, tag=True):
    places: list[int]  # slot index of each key in the memory, or MISSING


class Done(msgspec.Struct, tag=True):
    pass


Message = Hello | Welcome | PeerRefused | Get | Found | Done
_encode, _decode = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder(Message).decode


def split_address(address: str) -> tuple[str, int] | str:
    """Split an address into (host, port), or return the name of a Unix socket. ConfigError if it is neither."""
    kind, _, rest = address.partition(":")
    host, _, port = rest.removeprefix("//").rpartition(":")
    if kind == "unix" and rest:
        return rest
    if kind == "tcp" and host and port.isdecimal() and int(port) < 65536:
        return host, int(port)
    raise ConfigError(
        f"kv_handover_address={address!r} is no address; write unix:NAME, or tcp://HOST:PORT for other hosts",
        field="kv_handover_address",
    )


def rank_address(address: str, rank: int, num_ranks: int) -> str:
    """Address of a rank's exchange in an engine whose address is `address`: the name with the rank's number, or a port
    as many higher. ConfigError if there is no such port."""
    place = split_address(address)
    if num_ranks == 1:
        return address
    if isinstance(place, str):
        return f"unix:{place}-{rank}"
    if place[1] + num_ranks > 65536:
        raise ConfigError(
            f"kv_handover_address={address!r}: {num_ranks} ranks take as many ports from there on; name a lower one",
            field="kv_handover_address",
        )
    return f"tcp://{place[0]}:{place[1] + rank}"


def send(sock: socket.socket, message: Message, files: Sequence[int] = ()) -> None:
    data = _encode(message)
    data = len(data).to_bytes(4, "little") + data
    if files:
        data = data[socket.send_fds(sock, [data], files) :]
    sock.sendall(data)


def receive(
    sock: socket.socket,
    files: list[int] | None = None,
    limit: int = MAX_MESSAGE,
    until: float | None = None,
) -> Message:
    """Receive a message of up to `limit` bytes, and append file descriptors passed with it to `files`. EOFError at the end.

    `until`: deadline of the whole message on the monotonic clock. Without it each part may take the socket's timeout.
    """
    size = bytearray()
    if files is not None:  # passed with the first byte
        first, found, *_ = socket.recv_fds(sock, 4, 1)
        size += first
        files += found
    size += read(sock, 4 - len(size), until)
    if (count := int.from_bytes(size, "little")) > limit:
        raise ValueError(f"a message of {count} bytes")
    return _decode(read(sock, count, until))


def read(sock: socket.socket, count: int, until: float | None = None) -> bytes:
    data = bytearray()
    while len(data) < count:  # allocate memory for bytes received, not for the announced length
        if until is not None:
            limit_wait(sock, until)
        part = sock.recv(min(count - len(data), 2**16))
        if not part:
            raise EOFError
        data += part
    return bytes(data)


def limit_wait(sock: socket.socket, until: float) -> None:
    """Set the socket's timeout so that its next call ends by `until`. TimeoutError if that has
    passed."""
    if (left := until - time.monotonic()) <= 0:
        raise TimeoutError
    sock.settimeout(left)


def read_into(sock: socket.socket, view: memoryview) -> None:
    while view:
        if not (count := sock.recv_into(view)):
            raise EOFError
        view = view[count:]


def is_own(sock: socket.socket) -> bool:
    """Whether the other end of a Unix socket belongs to this process's user."""
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", data)
    return bool(uid == os.getuid())


class Peers:
    """Fetches blocks for one engine, whose blocks have this `layout`.

    `pieces` returns the memory to copy a block to. A thread calls `done` with each copy's number and success.
    """

    def __init__(
        self,
        layout: Mapping[str, str],
        pieces: Callable[[BlockCopy], list[Bytes]],
        done: Callable[[int, bool], None],
    ) -> None:
        self._hello = Hello(dict(layout))
        self.pieces, self.done = pieces, done
        self._lock = threading.Lock()
        self._peers: dict[str, _Peer] = {}
        self._refused: set[str] = set()

    def fetch(self, address: str, copies: Sequence[BlockCopy]) -> None:
        with self._lock:
            if (peer := self._peers.get(address)) is None:
                peer = self._peers[address] = _Peer(self, address)
            peer.wanted.put(copies)

    def close(self) -> None:
        with self._lock:
            peers = list(self._peers.values())
        for peer in peers:
            peer.close()
        for peer in peers:
            peer.thread.join(REPLY_S)

    def connect(self, address: str) -> tuple[socket.socket, mmap.mmap | None]:
        """Connect to an exchange; also map its memory if it can be mapped. OSError or EOFError if there is none."""
        place, files = split_address(address), list[int]()
        if isinstance(place, str):
            sock = socket.socket(socket.AF_UNIX)
            sock.settimeout(REPLY_S)
        else:
            sock = socket.create_connection(place, REPLY_S)
        try:
            if isinstance(place, str):
                sock.connect("\0" + place)
                if not is_own(sock):  # anyone may take the name of a process that is gone
                    raise PermissionError("the socket belongs to another user")
            send(sock, self._hello)
            reply = receive(sock, files if isinstance(place, str) else None)
            if isinstance(reply, PeerRefused):
                if address not in self._refused:
                    self._refused.add(address)
                    _logger.error("blocks can't be taken from %s: %s", address, reply.why)
                raise ConnectionRefusedError(reply.why)
            if not isinstance(reply, Welcome):
                raise ValueError("no welcome")
            if not reply.num_bytes:
                return sock, None
            if not files or not fcntl.fcntl(files[0], fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise ValueError("its memory may shrink")  # which would kill this process
            return sock, mmap.mmap(files[0], reply.num_bytes, access=mmap.ACCESS_READ)
        except BaseException:
            sock.close()
            raise
        finally:
            for file in files:
                socket.close(file)

    def left(self, peer: _Peer) -> None:
        """Forget a peer whose connection ended. Blocks requested since then have failed."""
        with self._lock:
            self._peers.pop(peer.address, None)
            while not peer.wanted.empty():
                for copy in peer.wanted.get() or ():
                    self.done(copy.number, False)


def _is_over(sock: socket.socket) -> bool:
    """Whether the other end has closed an idle connection. Nothing else arrives unasked."""
    ready = select.poll()
    ready.register(sock, select.POLLIN)
    return bool(ready.poll(0))


class _Peer:
    """The exchange of another engine."""

    def __init__(self, peers: Peers, address: str) -> None:
        self.address = address
        self.wanted: queue.SimpleQueue[Sequence[BlockCopy] | None] = queue.SimpleQueue()
        self._peers = peers
        self._socket: socket.socket | None = None
        self.thread = threading.Thread(target=self._run, name="kv-peer", daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.wanted.put(None)
        if (sock := self._socket) is not None:
            with contextlib.suppress(OSError):  # it is closed already
                sock.shutdown(socket.SHUT_RDWR)

    def _run(self) -> None:
        memory = None
        left = list[BlockCopy]()
        try:
            while (copies := self.wanted.get(timeout=IDLE_S)) is not None:
                left = list(copies)[::-1]
                if self._socket is not None and _is_over(self._socket):
                    self._socket.close()
                    self._socket = None  # its engine may have started again
                if self._socket is None:
                    self._socket, memory = self._peers.connect(self.address)
                self._fetch(
                    self._socket, None if memory is None else np.frombuffer(memory, np.uint8), left
                )
        except queue.Empty:
            pass
        except (OSError, EOFError, ValueError, msgspec.MsgspecError) as error:
            _logger.warning("blocks from %s did not come: %s", self.address, error or "it ended")
        except Exception:
            _logger.exception("blocks from %s did not come", self.address)
        finally:
            if self._socket is not None:
                self._socket.close()
            for copy in left:
                self._peers.done(copy.number, False)
            self._peers.left(self)

    def _fetch(self, sock: socket.socket, memory: Bytes | None, left: list[BlockCopy]) -> None:
        """Fetch the blocks in `left`, last one first, and remove each from the list when it is done."""
        send(sock, Get([copy.key for copy in reversed(left)]))
        found = receive(sock)
        if not isinstance(found, Found) or len(found.places) != len(left):
            raise ValueError("no answer to what was wanted")
        for place in found.places:
            copy = left[-1]
            if place != MISSING:
                pieces = self._peers.pieces(copy)
                for piece in pieces:
                    if memory is None:
                        read_into(sock, piece.data)
                        continue
                    piece[:] = memory[place : place + len(piece)]
                    place += len(piece)
            left.pop()
            self._peers.done(copy.number, place != MISSING)
        send(sock, Done())
