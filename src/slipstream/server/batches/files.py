"""OpenAI's /v1/files: the inputs and outputs of batches, in the folder of `--files-dir`.

1. A file's content is `content/ID`. Its metadata is a row of `files.sqlite`, which all front ends
   share. The row is written last and deleted first, so a file with a row is complete. Content that
   a crash left without a row is removed.
2. A file belongs to the key that made it. Other keys can't see it.
3. All files together have at most `max_files_bytes`, and one key's at most half of it. No file is
   evicted: the upload is refused.
4. A file expires after `expires_after`, or after 30 days, like OpenAI's files of batches.
"""

from __future__ import annotations

import os
import re
import sqlite3
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct
from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from slipstream.engine.threads.fair_threads import FairThreads
from slipstream.server.http.errors import ApiError, bad_request, storage_error, unavailable
from slipstream.server.http.forms import AROUND, read_form
from slipstream.server.http.limits import counted
from slipstream.server.http.replies import json_response, page_answer, page_options
from slipstream.server.openai.response_store import Database
from slipstream.server.state import ServerState

DAY_S = 86_400
LIFE_S = 30 * DAY_S
MIN_LIFE_S, MAX_LIFE_S = 3600, 30 * DAY_S  # OpenAI's bounds of `expires_after`
MAX_NAME = 255
MAX_PAGE = 10_000
_CHUNK = 2**20
_copies = FairThreads("files", 16, per_client=4)

_SCHEMA = """
create table if not exists files (
    seq integer primary key autoincrement, id text unique not null, owner text not null, purpose text not null,
    bytes integer not null, created integer not null, expires integer not null, name text not null
);
create index if not exists files_owner on files (owner, seq);
create table if not exists batches (
    seq integer primary key autoincrement, id text unique not null, owner text not null, open integer not null,
    input text not null, about blob not null
);
create index if not exists batches_open on batches (open, seq);
"""

T = TypeVar("T")


class StoredFile(Struct, frozen=True):
    id: str
    owner: str
    purpose: str
    bytes: int
    created: int
    expires: int
    name: str

    def public(self) -> dict[str, Any]:
        """OpenAI's file object."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": self.created,
            "expires_at": self.expires,
            "filename": self.name,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


_COLUMNS = "id, owner, purpose, bytes, created, expires, name"


class FileStore:
    def __init__(self, folder: Path, *, max_bytes: int) -> None:
        self.folder, self.content, self.max_bytes = folder, folder / "content", max_bytes
        self.database = Database(folder / "files.sqlite", _SCHEMA, field="files_dir")
        self.content.mkdir(mode=0o700, exist_ok=True)
        self._arriving: Counter[str] = Counter()  # bytes of running uploads, by owner

    def path(self, id_: str) -> Path:
        return self.content / id_

    async def add(
        self, owner: str, name: str, purpose: str, upload: UploadFile, life_s: int
    ) -> StoredFile:
        """Store an upload. ApiError (413) if there is no space for it."""
        id_, part = f"file-{uuid.uuid4().hex}", self.content / f"{uuid.uuid4().hex}.part"
        size = upload.size or 0

        def copy() -> None:
            with part.open("xb") as out:
                upload.file.seek(0)
                while data := upload.file.read(_CHUNK):
                    out.write(data)
                out.flush()
                os.fsync(out.fileno())
            part.rename(self.path(id_))

        try:
            await _copies.run(copy)
        except OSError as error:
            part.unlink(missing_ok=True)
            raise storage_error("the file cannot be kept", error) from None
        now = int(time.time())
        file = StoredFile(id_, owner, purpose, size, now, now + life_s, name)
        try:
            await self.register(file, checks_room=True)
        except ApiError:
            self.path(id_).unlink(missing_ok=True)
            raise
        return file

    @contextmanager
    def arrival(self, owner: str, used: tuple[int, int]) -> Iterator[Callable[[int], None]]:
        """Count a running upload. The yielded function takes the number of bytes received so far.

        It raises ApiError (413) when all running uploads and the `used` bytes of the upload's start
        exceed the limits: otherwise uploads could fill the disk together before any is refused.
        """
        counted = 0

        def count(num_bytes: int) -> None:
            nonlocal counted
            more = max(0, num_bytes - AROUND) - counted
            counted += more
            self._arriving[owner] += more
            self._require_room(owner, used, (self._arriving.total(), self._arriving[owner]))

        try:
            yield count
        finally:
            self._arriving[owner] -= counted
            self._arriving += Counter()  # drops owners with no uploads

    async def used(self, owner: str) -> tuple[int, int]:
        """Returns (bytes of all files, bytes of the owner's)."""
        return await self.database.run(lambda db: _used(db, owner), writes=False)

    def _require_room(self, owner: str, used: tuple[int, int], more: tuple[int, int]) -> None:
        most_own = self.max_bytes // 2 if owner else self.max_bytes
        if used[0] + more[0] > self.max_bytes or used[1] + more[1] > most_own:
            message = f"there is no space for the file (this server keeps {self.max_bytes} bytes, {most_own} of one key, "
            raise ApiError(
                413,
                message + f"and {used[1]} are yours); delete files",
                param="file",
                code="storage_full",
            )

    async def register(self, file: StoredFile, *, checks_room: bool = False) -> None:
        """Add the row of a file whose content is in place. A second call has no effect. ApiError
        (413) with `checks_room` if there is no space."""
        row = msgspec.structs.astuple(file)

        def work(db: sqlite3.Connection) -> None:
            if checks_room:
                self._require_room(file.owner, _used(db, file.owner), (file.bytes, file.bytes))
            db.execute(f"insert or ignore into files ({_COLUMNS}) values (?,?,?,?,?,?,?)", row)

        await self.database.run(work)

    async def get(self, owner: str, id_: str) -> StoredFile | None:
        query = f"select {_COLUMNS} from files where id = ? and owner = ? and expires > ?"
        row = await self.database.run(
            lambda db: db.execute(query, (id_, owner, time.time())).fetchone(), writes=False
        )
        return None if row is None else StoredFile(*row)

    async def listed(
        self, owner: str, purpose: str | None, after: str | None, limit: int, *, newest_first: bool
    ) -> list[StoredFile]:
        """List up to `limit` + 1 files. ApiError (400) if `after` does not exist."""
        query, given = (
            f"select {_COLUMNS} from files where owner = ? and expires > ?",
            [owner, time.time()],
        )
        if purpose is not None:
            query, given = query + " and purpose = ?", [*given, purpose]

        def read(db: sqlite3.Connection) -> list[Any]:
            return db.execute(
                *page(db, "files", query, given, owner, after, limit, newest_first=newest_first)
            ).fetchall()

        return [StoredFile(*row) for row in await self.database.run(read, writes=False)]

    async def delete(self, owner: str, id_: str) -> bool:
        """Delete a file; False if it does not exist. ApiError (400) if an unfinished batch reads
        it."""

        def work(db: sqlite3.Connection) -> bool:
            used = db.execute(
                "select id from batches where input = ? and owner = ? and open", (id_, owner)
            ).fetchone()
            if used is not None:
                raise bad_request(
                    f"the batch {used[0]} reads this file; cancel it first", "file_id"
                )
            return (
                db.execute("delete from files where id = ? and owner = ?", (id_, owner)).rowcount
                > 0
            )

        found = await self.database.run(work)
        if found:
            await _copies.run(partial(self.path(id_).unlink, missing_ok=True))
        return found

    async def sweep(self) -> None:
        """Delete expired files, except inputs of unfinished batches."""

        def work(db: sqlite3.Connection) -> list[str]:
            query = "select id from files where expires <= ? and id not in (select input from batches where open)"
            gone = [row[0] for row in db.execute(query, (time.time(),))]
            db.executemany("delete from files where id = ?", [(id_,) for id_ in gone])
            return gone

        for id_ in await self.database.run(work):
            self.path(id_).unlink(missing_ok=True)

    async def remove_strays(self) -> None:
        """Delete content without a row, left by uploads that a crash broke off. Content younger
        than an hour may belong to a running upload."""
        rows = await self.database.run(
            lambda db: db.execute("select id from files").fetchall(), writes=False
        )
        known = {row[0] for row in rows}
        for path in self.content.iterdir():
            stray = path.suffix == ".part" or (
                path.name.startswith("file-") and path.name not in known
            )
            if stray and path.stat().st_mtime < time.time() - DAY_S / 24:
                path.unlink(missing_ok=True)

    def close(self) -> None:
        self.database.close()


def _used(db: sqlite3.Connection, owner: str) -> tuple[int, int]:
    query = "select coalesce(sum(bytes), 0), coalesce(sum(bytes) filter (where owner = ?), 0) from files"
    found: tuple[int, int] = db.execute(query, (owner,)).fetchone()
    return found


def page(
    db: sqlite3.Connection,
    table: str,
    query: str,
    given: list[Any],
    owner: str,
    after: str | None,
    limit: int,
    *,
    newest_first: bool,
) -> tuple[str, list[Any]]:
    """A query for up to `limit` + 1 rows after `after`."""
    if after is not None:
        row = db.execute(
            f"select seq from {table} where id = ? and owner = ?", (after, owner)
        ).fetchone()
        if row is None:
            raise bad_request(f"there is no {after[:100]!r}", "after")
        query, given = f"{query} and seq {'<' if newest_first else '>'} ?", [*given, row[0]]
    return f"{query} order by seq {'desc' if newest_first else 'asc'} limit ?", [*given, limit + 1]


def files_off() -> ApiError:
    return ApiError(
        403, "start the server with --files-dir DIR to use files and batches", code="files_disabled"
    )


class FileRoutes:
    def __init__(self, state: ServerState) -> None:
        self.state = state

    @property
    def _store(self) -> FileStore:
        if self.state.files is None:
            raise files_off()
        return self.state.files

    async def upload(self, request: Request) -> Response:
        store, owner = self._store, request.scope["record"].owner
        with store.arrival(owner, await store.used(owner)) as count:
            return json_response(
                (await self._stored(await self._form(request, count), owner)).public()
            )

    async def _stored(self, form: dict[str, Any], owner: str) -> StoredFile:
        try:
            upload, purpose = form.pop("file", None), form.pop("purpose", None)
            life_s = _life(
                form.pop("expires_after[anchor]", None), form.pop("expires_after[seconds]", None)
            )
            if form:
                name = next(iter(form))[:100]
                raise bad_request(
                    f"unknown field {name!r}; there are file, purpose, expires_after", name
                )
            if not isinstance(upload, UploadFile):
                raise bad_request("file is missing: send it as multipart/form-data", "file")
            if purpose != "batch":
                raise bad_request(
                    "purpose must be 'batch': files are for /v1/batches here", "purpose"
                )
            if not upload.size:
                raise bad_request("the file is empty", "file")
            name = re.sub(r"[\x00-\x1f\x7f]", "", upload.filename or "")[-MAX_NAME:] or "file.jsonl"
            return await self._store.add(owner, name, purpose, upload, life_s)
        finally:
            for value in (*form.values(), upload):
                if isinstance(value, UploadFile):
                    await value.close()

    async def _form(self, request: Request, count: Callable[[int], None]) -> dict[str, Any]:
        settings = self.state.settings
        form = await read_form(
            request,
            limit=settings.max_file_bytes,
            option="--max-file-bytes",
            fields="file and purpose",
            body_timeout_s=settings.body_timeout_s,
            count=count,
        )
        return dict(form)

    async def list(self, request: Request) -> Response:
        after, limit, newest_first = page_options(request, "purpose", most=MAX_PAGE, usual=MAX_PAGE)
        owner, purpose = request.scope["record"].owner, request.query_params.get("purpose")
        found = await self._store.listed(owner, purpose, after, limit, newest_first=newest_first)
        return page_answer([file.public() for file in found], limit)

    async def get(self, request: Request) -> Response:
        return json_response((await self._found(request)).public())

    async def content(self, request: Request) -> Response:
        file = await self._found(request)
        path = self._store.path(file.id)
        if not path.is_file():
            raise unavailable(
                "the file's content is gone from the server's folder", "storage_failed"
            )
        return FileResponse(path, media_type="application/octet-stream")

    async def delete(self, request: Request) -> Response:
        id_ = request.path_params["id"]
        if not await self._store.delete(request.scope["record"].owner, id_):
            raise _unknown(id_)
        return json_response({"id": id_, "object": "file", "deleted": True})

    async def _found(self, request: Request) -> StoredFile:
        id_ = request.path_params["id"]
        file = await self._store.get(request.scope["record"].owner, id_)
        if file is None:
            raise _unknown(id_)
        return file


def _life(anchor: Any, seconds: Any) -> int:
    if anchor is None and seconds is None:
        return LIFE_S
    if anchor != "created_at":
        raise bad_request("the anchor must be 'created_at'", "expires_after.anchor")
    if not (
        isinstance(seconds, str) and seconds.isascii() and seconds.isdecimal() and len(seconds) < 10
    ):
        raise bad_request("seconds must be a number", "expires_after.seconds")
    if not MIN_LIFE_S <= int(seconds) <= MAX_LIFE_S:
        raise bad_request(
            f"seconds must be from {MIN_LIFE_S} to {MAX_LIFE_S}", "expires_after.seconds"
        )
    return int(seconds)


def _unknown(id_: str) -> ApiError:
    return ApiError(
        404, f"file {id_[:100]!r} does not exist", param="file_id", code="file_not_found"
    )


def routes(state: ServerState) -> list[Route]:
    files = FileRoutes(state)
    return [
        Route("/v1/files", counted(state, files.upload), methods=["POST"]),
        Route("/v1/files", files.list, methods=["GET"]),
        Route("/v1/files/{id}", files.get, methods=["GET"]),
        Route("/v1/files/{id}", counted(state, files.delete), methods=["DELETE"]),
        Route("/v1/files/{id}/content", files.content, methods=["GET"]),
    ]
