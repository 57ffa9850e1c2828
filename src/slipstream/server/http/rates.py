"""Rate limits of a key over all front ends: requests and tokens per minute, tokens per day,
concurrent requests.

1. A minute is any 60 s. Counts are kept by second; those of the last 60 and the current one are
   added up. So the limit holds in every window. A request counts in the second in which it was
   admitted.
2. Tokens are reserved before a request is queued: its prompt and its maximum answer. Unused ones
   are returned when it ends. So a key never exceeds its limit, and clients that set `max_tokens`
   can run more.
3. A day is one of UTC. If the clock goes back over midnight, the count continues.
4. The counts are in memory shared by the front ends, one row per key. A row is locked while it is
   read and changed, for a few microseconds, without waiting for anything else. The kernel releases
   the lock of a process that dies.
5. The counts of the day are in `--state-dir`, if there is one, and outlive the server. The others
   end with it.
6. A row whose counts have all expired holds no information, so another key may reuse it: rows of
   deleted keys don't accumulate.

The rest of the server uses only `Limiter`: a router in front of several servers can have its own.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from slipstream.base.files import open_private
from slipstream.errors import ConfigError
from slipstream.server.http.errors import ApiError, unavailable
from slipstream.server.http.keys import Key

WINDOW = 61  # seconds: the last 60 and the current one
MAX_FRONT_ENDS = 128
MAX_ROWS = 8192
RATE_HEADERS = tuple(
    f"x-ratelimit-{what}-{of}"
    for of in ("requests", "tokens")
    for what in ("limit", "remaining", "reset")
)
DAY_S = 86_400

# A row of each table begins with the key's id as two numbers. Then the second of the newest count,
# then counts by second modulo WINDOW.
_LAST = 2
_REQUESTS = 3
_TOKENS = 3 + WINDOW
_RUNNING = _TOKENS + WINDOW  # requests at once, by front end
_NOW_WIDTH = _RUNNING + MAX_FRONT_ENDS
_DAY, _SPENT, _DAY_WIDTH = 2, 3, 4


class Grant(Protocol):
    """An admitted request."""

    @property
    def counts_tokens(self) -> bool:
        """Whether the key has a token limit that applies to this request."""

    def reserve(self, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """Reserve tokens for a prompt and its maximum answer. ApiError (429) if the key has fewer
        left."""

    def close(self, num_tokens: int) -> None:
        """End the request, which used `num_tokens` tokens. Its reserved prompts count as used even
        if it failed."""

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """OpenAI's rate limit headers for an answer."""


class Limiter(Protocol):
    def admit(self, key: Key, *, background: bool = False) -> Grant:
        """Count a request. ApiError (429) if the key has too many. Only the day's limit applies to
        one in the `background`."""

    def close(self) -> None: ...


class Table:
    """Rows of 8-byte numbers by key id, in a file mapped by several processes or in private memory.
    A row for which `is_over` is true may be reused for another key whenever it is not locked."""

    def __init__(
        self,
        path: Path | None,
        width: int,
        is_over: Callable[[memoryview], bool] = lambda row: False,
    ) -> None:
        self._width, self._is_over, self._rows = width, is_over, dict[str, int]()
        num_bytes = MAX_ROWS * width * 8
        self._fd = -1
        try:
            if path is not None:
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._fd = open_private(path)
                os.ftruncate(self._fd, num_bytes)  # a sparse file: only rows in use take space
            self._map = mmap.mmap(self._fd, num_bytes)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"cannot keep the keys' counts in {path}: {error}", field="state_dir"
            ) from None
        self._numbers = memoryview(self._map).cast("q")

    @contextlib.contextmanager
    def row(self, id_: str) -> Iterator[memoryview]:
        """Context manager that locks and yields the row of `id_`."""
        name = int.from_bytes(id_.encode()[:16].ljust(16, b"\0"), "little")
        words = (name & 2**63 - 1, name >> 64 & 2**63 - 1)
        while True:
            index = self._rows.get(id_)
            if index is None:
                index = self._rows[id_] = self._find(words)
            with self._locked(index + 1):
                begin = index * self._width
                if (self._numbers[begin], self._numbers[begin + 1]) == words:
                    with self._numbers[begin : begin + self._width] as row:
                        yield row
                    return
            del self._rows[id_]  # the counts expired and the row became another key's

    def _find(self, words: tuple[int, int]) -> int:
        """Index of the id's row, which is created if needed. Locks the table, then rows. This order
        can't deadlock, because the holder of a row's lock never waits for the table's."""
        over: list[int] = []
        with self._locked(0):
            for index in range(MAX_ROWS):
                begin = index * self._width
                found = self._numbers[begin], self._numbers[begin + 1]
                if found == words:
                    return index
                if found == (0, 0):
                    over.append(index)
                    break
                with self._numbers[begin : begin + self._width] as row:
                    if len(over) < 2 and self._is_over(row):
                        over.append(index)
            for index in over:
                begin = index * self._width
                with self._locked(index + 1), self._numbers[begin : begin + self._width] as row:
                    if row[0] == row[1] == 0 or self._is_over(row):  # checked again under the lock
                        row[2:] = memoryview(bytes(8 * (self._width - 2))).cast("q")
                        row[0], row[1] = words
                        return index
        raise unavailable(
            "the keys' counts are full; start the server again, or take another --state-dir",
            "keys_full",
        )

    @contextlib.contextmanager
    def _locked(self, place: int) -> Iterator[None]:
        if self._fd < 0:
            yield
            return
        fcntl.lockf(self._fd, fcntl.LOCK_EX, 1, place)
        try:
            yield
        finally:
            fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, place)

    def rows_in_use(self) -> Iterator[memoryview]:
        for index in range(MAX_ROWS):
            begin = index * self._width
            if not self._numbers[begin] and not self._numbers[begin + 1]:
                return
            yield self._numbers[begin : begin + self._width]

    def close(self) -> None:
        with contextlib.suppress(BufferError):  # a traceback still holds a row
            self._numbers.release()
            self._map.close()
        if self._fd >= 0:
            os.close(self._fd)


class SharedLimiter:
    """The limiter of a server whose front ends share counts in files.

    `shared_dir`: folder of counts that end with the server; None: there is only one front end.
    `state_dir`: folder of the day's counts, which outlive the server. `slot()`: number of this
    front end.
    """

    def __init__(
        self,
        *,
        shared_dir: str | None = None,
        state_dir: str | None = None,
        slot: Callable[[], int] = lambda: 0,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.slot, self.clock, self.wall = slot, clock, wall
        self.now = Table(_now_file(shared_dir), _NOW_WIDTH, self._is_over)
        lasting = state_dir or shared_dir
        path = None if lasting is None else Path(lasting) / "tokens-by-day"
        self.day = Table(path, _DAY_WIDTH, lambda row: row[_DAY] < self.wall() // DAY_S)

    def _is_over(self, row: memoryview) -> bool:
        return row[_LAST] < self.clock() - WINDOW and not any(
            row[_RUNNING : _RUNNING + MAX_FRONT_ENDS]
        )

    def admit(self, key: Key, *, background: bool = False) -> SharedGrant:
        grant = SharedGrant(self, key, background=background)
        if background:
            return grant
        with self.now.row(key.id) as row:
            second = self._turn(row)
            running = sum(row[_RUNNING : _RUNNING + MAX_FRONT_ENDS])
            if key.max_concurrent is not None and running >= key.max_concurrent:
                message = f"{running} requests of this key are in flight, as many as it may have"
                raise too_many(message, "concurrency", 1)
            if key.requests_per_minute is not None:
                counts = row[_REQUESTS : _REQUESTS + WINDOW]
                wait = _wait(counts, second, 1, key.requests_per_minute)
                if wait:
                    message = f"this key may send {key.requests_per_minute} requests a minute; try again in {wait} s"
                    raise too_many(message, "requests", wait, grant.headers_of(row, second))
            row[_REQUESTS + second % WINDOW] += 1
            grant.slot = self.slot()
            row[_RUNNING + grant.slot] += 1
        return grant

    def _turn(self, row: memoryview) -> int:
        """The current second. Clears the counts of seconds outside the window."""
        second, last = int(self.clock()), row[_LAST]
        for passed in range(max(last + 1, second - WINDOW + 1), second + 1):
            row[_REQUESTS + passed % WINDOW] = row[_TOKENS + passed % WINDOW] = 0
        row[_LAST] = second = max(second, last)
        return second

    def close(self) -> None:
        self.now.close()
        self.day.close()


def _now_file(shared_dir: str | None) -> Path | None:
    return None if shared_dir is None else Path(shared_dir) / "keys-now"


def forget_front_end(shared_dir: str, slot: int) -> None:
    """Set the running requests of a front end that died to 0."""
    path = _now_file(shared_dir)
    assert path is not None
    if path.exists():
        table = Table(path, _NOW_WIDTH)
        for row in table.rows_in_use():
            row[_RUNNING + slot] = 0
            row.release()
        table.close()


class SharedGrant:
    def __init__(self, limiter: SharedLimiter, key: Key, *, background: bool) -> None:
        self._limiter, self.key, self._background = limiter, key, background
        self.slot: int | None = None
        self._reserved: list[tuple[int, int, int]] = []  # (tokens, second, day) of reservations
        self._num_prompt_tokens = 0

    @property
    def counts_tokens(self) -> bool:
        return self.key.tokens_per_day is not None or (
            self.key.tokens_per_minute is not None and not self._background
        )

    def reserve(self, num_prompt_tokens: int, num_output_tokens: int) -> None:
        if not self.counts_tokens:
            return
        num_tokens = num_prompt_tokens + num_output_tokens
        key, limiter = self.key, self._limiter
        day = int(limiter.wall() // DAY_S)
        with limiter.now.row(key.id) as row, limiter.day.row(key.id) as spent:
            second = limiter._turn(row)
            if day > spent[_DAY]:
                spent[_DAY], spent[_SPENT] = day, 0
            day = spent[_DAY]
            if key.tokens_per_day is not None and spent[_SPENT] + num_tokens > key.tokens_per_day:
                left = max(0, key.tokens_per_day - spent[_SPENT])
                message = f"this key may use {key.tokens_per_day} tokens a day (UTC) and has {left} left; the request may take "
                raise too_many(
                    message + f"{num_tokens}", "insufficient_quota", _to_midnight(limiter.wall())
                )
            if key.tokens_per_minute is not None and not self._background:
                headers = self.headers_of(row, second)
                if num_tokens > key.tokens_per_minute:
                    message = f"the request may take {num_tokens} tokens, the key's limit is {key.tokens_per_minute} a minute; "
                    message += "send a smaller max_tokens, or a shorter prompt"
                    raise too_many(message, "tokens", None, headers)
                wait = _wait(
                    row[_TOKENS : _TOKENS + WINDOW], second, num_tokens, key.tokens_per_minute
                )
                if wait:
                    message = f"this key may use {key.tokens_per_minute} tokens a minute, and the request may take {num_tokens}"
                    raise too_many(f"{message}; try again in {wait} s", "tokens", wait, headers)
            if not self._background:
                row[_TOKENS + second % WINDOW] += num_tokens
            spent[_SPENT] += num_tokens
        self._reserved.append((num_tokens, second, day))
        self._num_prompt_tokens += num_prompt_tokens

    def close(self, num_tokens: int) -> None:
        key, limiter, num_tokens = self.key, self._limiter, max(num_tokens, self._num_prompt_tokens)
        today, unused_today = int(limiter.wall() // DAY_S), dict[int, int]()
        with limiter.now.row(key.id) as row:
            if self.slot is not None:
                row[_RUNNING + self.slot] -= 1
                self.slot = None
            now = limiter._turn(row)
            for reserved, second, day in self._reserved:
                used = min(reserved, num_tokens)
                num_tokens -= used
                if second > now - WINDOW and not self._background:
                    row[_TOKENS + second % WINDOW] -= reserved - used
                if day >= today:  # the row of an earlier day may belong to another key
                    unused_today[day] = unused_today.get(day, 0) + reserved - used
        self._reserved.clear()
        if unused_today:
            with limiter.day.row(key.id) as spent:
                spent[_SPENT] -= unused_today.get(spent[_DAY], 0)

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        with self._limiter.now.row(self.key.id) as row:
            return self.headers_of(row, self._limiter._turn(row))

    def headers_of(self, row: memoryview, second: int) -> list[tuple[bytes, bytes]]:
        if self._background:
            return []
        found = []
        limits = (
            ("requests", self.key.requests_per_minute, _REQUESTS),
            ("tokens", self.key.tokens_per_minute, _TOKENS),
        )
        for name, limit, begin in limits:
            if limit is not None:
                counts = row[begin : begin + WINDOW]
                newest = next(
                    (age for age in range(WINDOW) if counts[(second - age) % WINDOW]), WINDOW
                )
                values = (
                    ("limit", limit),
                    ("remaining", max(0, limit - sum(counts))),
                    ("reset", f"{WINDOW - newest}s"),
                )
                found += [
                    (f"x-ratelimit-{what}-{name}".encode(), str(value).encode())
                    for what, value in values
                ]
        return found


def _wait(counts: memoryview, second: int, wanted: int, limit: int) -> int:
    """Seconds until `wanted` more fit under `limit` in the window; 0: they fit now."""
    over = sum(counts) + wanted - limit
    if over <= 0:
        return 0
    for age in range(WINDOW - 1, -1, -1):
        over -= counts[(second - age) % WINDOW]
        if over <= 0:
            return WINDOW - age
    return WINDOW


def _to_midnight(now: float) -> int:
    return int(DAY_S - now % DAY_S) + 1


def too_many(
    message: str, kind: str, wait: int | None, more: list[tuple[bytes, bytes]] | None = None
) -> ApiError:
    """OpenAI's 429. `wait` None: the request never fits, and clients need not try again."""
    headers = {name.decode(): value.decode() for name, value in more or []}
    headers |= {"x-should-retry": "false"} if wait is None else {"retry-after": str(wait)}
    code = kind if kind == "insufficient_quota" else "rate_limit_exceeded"
    return ApiError(429, message, kind=kind, code=code, headers=headers)
