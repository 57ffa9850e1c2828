"""Stored answers of /v1/responses, in an SQLite database that all front ends share.

1. It is in `--state-dir`. Without that it is in memory, or with several front ends in the
   supervisor's folder, and is lost when the server ends.
2. It holds at most `max_stored_responses` and `max_stored_bytes`. When it is full, the owner with
   the most bytes loses its least recently used answer. So an owner with many answers can't evict
   those of others. Continuing an answer counts as a use of its whole conversation.
3. A row belongs to the key that asked for it. Other keys can't see it.
4. One thread uses the database, so that the event loop never waits for a disk.
"""

from __future__ import annotations

import asyncio
import errno
import os
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import msgspec
from msgspec import Struct

from slipstream.base.files import open_private
from slipstream.engine.threads.fair_threads import FairThreads
from slipstream.errors import ConfigError
from slipstream.server.http.errors import bad_request, storage_error, unavailable

T = TypeVar("T")

_BUSY_S = 10.0
CONVERSATIONS = FairThreads("conversations", 16, per_client=2)
"""Threads that convert stored answers back to messages."""

_SCHEMA = """
create table if not exists responses (
    id text primary key, owner text not null, previous text, used integer not null, size integer not null,
    answer blob not null, items blob not null
) without rowid;
create index if not exists responses_by_owner on responses (owner, used, size);
create table if not exists places (item text not null, owner text not null, response text not null,
    primary key (item, owner)) without rowid;
create index if not exists places_by_response on places (response);
create trigger if not exists forget_places after delete on responses begin
    delete from places where response = old.id;
end;
create table if not exists uses (n integer not null);
insert into uses select 0 where not exists (select 1 from uses);
"""


class StoredResponse(Struct):
    """A stored answer: its fields in OpenAI's API, with its output. `items`: what its request added
    to the conversation."""

    id: str
    previous: str | None
    answer: dict[str, Any]
    items: list[dict[str, Any]]


class Database:
    """An SQLite database, in a file or in memory, and the thread that uses it."""

    def __init__(self, path: Path | None, schema: str, *, field: str = "state_dir") -> None:
        self.path, self._remedy = path, "; send store=false" if field == "state_dir" else ""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sqlite")
        try:
            if path is not None:
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                os.close(open_private(path))  # SQLite's other files get the same mode
            self._db = sqlite3.connect(
                ":memory:" if path is None else path,
                timeout=_BUSY_S,
                isolation_level=None,
                check_same_thread=False,
            )
            _use_wal(self._db)
            self._db.execute("pragma synchronous = normal")
            self._db.execute("pragma secure_delete = on")  # overwrite deleted content
            self._db.executescript(schema)
        except (OSError, sqlite3.Error) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise ConfigError(
                f"cannot keep the server's state in {path}: {why}", field=field
            ) from None

    async def run(self, work: Callable[[sqlite3.Connection], T], *, writes: bool = True) -> T:
        """Run `work` in a transaction. A read-only one doesn't wait for other processes. ApiError
        (503, 507) if the database fails."""

        def transaction() -> T:
            self._db.execute("begin immediate" if writes else "begin")
            try:
                found = work(self._db)
                self._db.execute("commit")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("rollback")
                raise
            return found

        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, transaction)
        except sqlite3.Error as error:
            # some errors have no code
            is_full = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
            failure = OSError(errno.ENOSPC if is_full else errno.EIO, f"{error}{self._remedy}")
            raise storage_error("the server's storage failed", failure) from None

    async def forget(self) -> None:
        """Empty the write-ahead log, which still contains deleted data. A reader in another process
        can delay it."""
        checkpoint = partial(self._db.execute, "pragma wal_checkpoint(truncate)")
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, checkpoint)
        except sqlite3.Error as error:
            raise unavailable(
                f"it is deleted, but traces of it may remain on the disk: {error}", "storage_failed"
            ) from None

    def close(self) -> None:
        self._thread.shutdown()
        self._db.close()


def _use_wal(db: sqlite3.Connection) -> None:
    """Switch to a write-ahead log, trying for `_BUSY_S`.

    While another process opens the file for the first time, SQLite refuses this at once instead of
    waiting: two processes that change the mode would wait for each other.
    """
    end = time.monotonic() + _BUSY_S
    while True:
        try:
            db.execute("pragma journal_mode = wal")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > end:
                raise
        time.sleep(0.01)


class ResponseStore:
    def __init__(self, path: Path | None, *, max_responses: int, max_bytes: int) -> None:
        self._database = Database(path, _SCHEMA)
        self.max_responses, self.max_bytes = max_responses, max_bytes

    async def put(self, owner: str, stored: StoredResponse) -> bool:
        """Store an answer. False, without storing it, if it alone exceeds `max_bytes`."""
        answer, items = msgspec.json.encode(stored.answer), msgspec.json.encode(stored.items)
        size = len(answer) + len(items)
        if size > self.max_bytes:
            return False

        def work(db: sqlite3.Connection) -> None:
            row = (stored.id, owner, stored.previous, _use(db), size, answer, items)
            db.execute("insert into responses values (?, ?, ?, ?, ?, ?, ?)", row)
            told = (*stored.items, *stored.answer.get("output", ()))
            ids = [item["id"] for item in told if "id" in item]
            db.executemany(
                "insert or ignore into places values (?, ?, ?)",
                [(item, owner, stored.id) for item in ids],
            )
            count, total = db.execute("select count(*), sum(size) from responses").fetchone()
            if count > self.max_responses or total > self.max_bytes:
                self._evict(db, count, total)

        await self._database.run(work)
        return True

    def _evict(self, db: sqlite3.Connection, count: int, total: int) -> None:
        rows = db.execute("select owner, count(*), sum(size) from responses group by owner")
        held = {owner: [number, size] for owner, number, size in rows}
        while count > self.max_responses or total > self.max_bytes:
            # Index in `held` of the exceeded limit: number or bytes.
            of = 0 if count > self.max_responses else 1
            owner = max(held, key=lambda owner: held[owner][of])
            query = "select id, size from responses where owner = ? order by used limit 1"
            id_, size = db.execute(query, (owner,)).fetchone()
            db.execute("delete from responses where id = ?", (id_,))
            held[owner][0] -= 1
            held[owner][1] -= size
            count, total = count - 1, total - size

    async def conversation(
        self, owner: str, id_: str, *, max_bytes: int
    ) -> list[StoredResponse] | str:
        """The answer and all before it, oldest first; or the id of a missing one. ApiError (400) if
        together they exceed `max_bytes`, before the rest is read."""

        def read(db: sqlite3.Connection) -> list[_Row] | str:
            found: list[_Row] = []
            wanted: str | None = id_
            left = max_bytes
            while wanted is not None:
                size = db.execute(
                    "select size from responses where id = ? and owner = ?", (wanted, owner)
                ).fetchone()
                if size is None:
                    return wanted
                if (left := left - size[0]) < 0:
                    message = f"the conversation is longer than the {max_bytes} bytes this server takes; send a shorter one"
                    raise bad_request(message, "previous_response_id")
                row = db.execute(
                    "select previous, answer, items from responses where id = ?", (wanted,)
                ).fetchone()
                found.append((wanted, *row))
                wanted = row[0]
            return found[::-1]

        found = await self._database.run(read, writes=False)
        return found if isinstance(found, str) else await self._taken(found)

    async def _taken(self, rows: list[_Row]) -> list[StoredResponse]:
        """Decode rows, and mark them as used. Decoding takes place outside the database's thread
        and transactions."""
        found = await CONVERSATIONS.run(partial(_stored, rows))

        def touch(db: sqlite3.Connection) -> None:
            now = _use(db)
            db.executemany(
                "update responses set used = ? where id = ?", [(now, row[0]) for row in rows]
            )

        await self._database.run(touch)
        return found

    async def items(self, owner: str, ids: list[str]) -> dict[str, dict[str, Any]]:
        """The kept items with these ids, from answers and their requests. Missing ids are left
        out."""

        def read(db: sqlite3.Connection) -> list[_Row]:
            places = dict[str, None]()
            for id_ in ids:
                query = "select response from places where item = ? and owner = ?"
                places.update(dict.fromkeys(row[0] for row in db.execute(query, (id_, owner))))
            query = "select id, previous, answer, items from responses where id = ?"
            return [row for place in places for row in db.execute(query, (place,))]

        wanted = set(ids)
        return {
            item["id"]: item
            for stored in await self._taken(await self._database.run(read, writes=False))
            for item in (*stored.items, *stored.answer["output"])
            if item["id"] in wanted
        }

    async def get(self, owner: str, id_: str) -> StoredResponse | None:
        def read(db: sqlite3.Connection) -> list[_Row]:
            query = "select id, previous, answer, items from responses where id = ? and owner = ?"
            return db.execute(query, (id_, owner)).fetchall()

        rows = await self._database.run(read, writes=False)
        return (await self._taken(rows))[0] if rows else None

    async def delete(self, owner: str, id_: str) -> bool:
        query = "delete from responses where id = ? and owner = ?"
        found = await self._database.run(lambda db: db.execute(query, (id_, owner)).rowcount > 0)
        if found:
            await self._database.forget()
        return found

    def close(self) -> None:
        self._database.close()


_Row: TypeAlias = tuple[str, str | None, bytes, bytes]  # id, previous, answer, items


def _stored(rows: list[_Row]) -> list[StoredResponse]:
    return [
        StoredResponse(id_, previous, msgspec.json.decode(a), msgspec.json.decode(i))
        for id_, previous, a, i in rows
    ]


def _use(db: sqlite3.Connection) -> int:
    """Next value of a use counter. Not a clock: if a clock jumped, the newest answer could be
    evicted first."""
    db.execute("update uses set n = n + 1")
    found: int = db.execute("select n from uses").fetchone()[0]
    return found
