"""Ranks on other hosts: they connect to the executor's `rank_address`, as in torchrun. No torch.

    this host:   slipstream serve MODEL --tensor-parallel-size 2 --local-ranks 1 --rank-address 10.0.0.1:29500
    another:     python -m slipstream.worker.ranks.rank_process --join 10.0.0.1:29500

1. A rank introduces itself (`Join`). It gets its number, in order of arrival, and everything it
   needs (`Begin`).
2. A rank of another version, with another expected number of ranks, or in excess is refused with
   the reason.
3. There is neither a password nor encryption, as in torch.distributed. The address must be on a
   private network.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import msgspec

from slipstream import __version__
from slipstream.errors import ConfigError, EngineError
from slipstream.worker.ranks.messages import FromRank, Join, RankLink, RankRefused, ToRank

JOIN_S = 60.0
"""Seconds that the executor waits for ranks, and that a rank tries to reach the executor."""

HELLO_S = 5.0
"""Seconds after which a connection without a message is closed."""


def parse_address(text: str, field: str = "rank_address") -> tuple[str, int]:
    """Parse HOST:PORT. ConfigError if it is malformed."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(
            f"{field}={text!r} must be HOST:PORT, such as 10.0.0.1:29500", field=field
        )
    return host.strip("[]"), int(port)


def accept_ranks(
    address: str, size: int, count: int, *, wait_s: float = JOIN_S
) -> list[tuple[RankLink, Join, str]]:
    """Wait for `count` of `size` ranks. Returns (link, greeting, address) of each.

    ConfigError if the address is not this host's or is in use. EngineError if not all ranks arrive
    in time.
    """
    host, port = parse_address(address)
    try:
        listener = socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET
        )
    except OSError as error:
        raise ConfigError(
            f"rank_address={address!r} can't be opened for listening: {error}", field="rank_address"
        ) from error
    found: list[tuple[RankLink, Join, str]] = []
    end = time.monotonic() + wait_s
    with listener:
        while len(found) < count:
            listener.settimeout(max(0.01, end - time.monotonic()))
            try:
                connection, peer = listener.accept()
            except TimeoutError:
                for link, _, _ in found:
                    link.close()
                raise EngineError(
                    f"{len(found)} of {count} ranks have come to {address} within {wait_s:.0f} s; start the others with "
                    f"`python -m slipstream.worker.ranks.rank_process --join {address}`"
                ) from None
            joined = _greet(connection, size)
            if joined is not None:
                found.append((*joined, f"{peer[0]}:{peer[1]}"))
    return found


def _greet(connection: socket.socket, size: int) -> tuple[RankLink, Join] | None:
    """Exchange greetings with a rank that has connected, and return its link. None if the rank was
    refused."""
    connection.settimeout(HELLO_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        connection.recv(1, socket.MSG_PEEK)
    except OSError:
        connection.close()
        return None
    connection.settimeout(None)
    link = RankLink(Connection(connection.detach()), FromRank)
    # ends the wait for a rank that sends an incomplete message
    late = threading.Timer(HELLO_S, link.cut)
    late.daemon = True
    late.start()
    try:
        join = link.receive()
    except (EOFError, OSError, msgspec.DecodeError):
        link.close()
        return None
    finally:
        late.cancel()
    why = ""
    if not isinstance(join, Join):
        why = "it is not a rank"
    elif join.version != __version__:
        why = f"it has Slipstream {join.version}, and the executor {__version__}"
    elif join.world_size not in (None, size):
        why = f"it was started for {join.world_size} ranks (--world-size), and there are {size}"
    if why:
        with contextlib.suppress(OSError):
            link.send(RankRefused(why))
        link.close()
        return None
    return link, join


def join(
    address: str,
    greeting: Join,
    *,
    wait_s: float = JOIN_S,
    clock: Callable[[], float] = time.monotonic,
) -> RankLink:
    """Connect a rank to the executor at `address`. EngineError if none answers in time."""
    host, port = parse_address(address, "--join")
    end, why = clock() + wait_s, ""
    while clock() < end:
        try:
            connection = socket.create_connection((host, port), timeout=HELLO_S)
        except OSError as error:
            why = str(error)
            time.sleep(0.2)
            continue
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link = RankLink(Connection(connection.detach()), ToRank)
        link.send(greeting)
        return link
    raise EngineError(
        f"no executor answers at {address} within {wait_s:.0f} s ({why}); start it with rank_address={address!r}"
    )
