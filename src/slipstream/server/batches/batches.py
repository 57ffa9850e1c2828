"""OpenAI's /v1/batches: the routes, and the stored state of each batch. `runner` runs batches.

A batch is a database row with an encoded `Batch`. Every change is one transaction that reads the
row again, because a client's request and the batch runner may be in two processes.
"""

from __future__ import annotations

import re
import sqlite3
import time
import uuid
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from slipstream.server.batches.files import FileStore, files_off, page
from slipstream.server.http.decoding import register
from slipstream.server.http.errors import ApiError, bad_request
from slipstream.server.http.limits import counted, read_as
from slipstream.server.http.replies import json_response, page_answer, page_options
from slipstream.server.state import ServerState

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
MAX_PAGE = 100
MAX_OPEN = 100
"""Maximum unfinished batches of one key."""

MAX_WINDOW_S = 7 * 86_400
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}

Status: TypeAlias = Literal[
    "validating",
    "failed",
    "in_progress",
    "finalizing",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
]
ENDED = frozenset({"failed", "completed", "expired", "cancelled"})


class BatchRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/batches: answer the requests of a file in the background"""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: (
        Annotated[dict[str, Annotated[str, Meta(max_length=512)]], Meta(max_length=16)] | None
    ) = None


register(BatchRequest)


class BatchError(Struct):
    code: str
    message: str
    line: int | None = None
    param: str | None = None


class Batch(Struct, kw_only=True):
    """A batch. `times`: when it reached each status, by OpenAI's names."""

    id: str
    owner: str
    endpoint: str
    input_file_id: str
    completion_window: str
    metadata: dict[str, str] | None
    expires: int
    status: Status = "validating"
    then: Status = "completed"  # next status after its files are written
    times: dict[str, int] = msgspec.field(default_factory=dict)
    errors: list[BatchError] = msgspec.field(default_factory=list)
    total: int = 0
    completed: int = 0
    failed: int = 0
    output_file_id: str | None = None
    error_file_id: str | None = None

    def become(self, status: Status) -> None:
        self.status = status
        self.times.setdefault(f"{status}_at", int(time.time()))

    def public(self) -> dict[str, Any]:
        """OpenAI's batch object."""
        names = (
            "in_progress",
            "finalizing",
            "completed",
            "failed",
            "expired",
            "cancelling",
            "cancelled",
        )
        errors = {"object": "list", "data": self.errors} if self.errors else None
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": errors,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status,
            "output_file_id": self.output_file_id if self.status in ENDED else None,
            "error_file_id": self.error_file_id if self.status in ENDED else None,
            "created_at": self.times["created_at"],
            "expires_at": self.expires,
            **{f"{name}_at": self.times.get(f"{name}_at") for name in names},
            "request_counts": {
                "total": self.total,
                "completed": self.completed,
                "failed": self.failed,
            },
            "metadata": self.metadata,
        }


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Batch)


class BatchStore:
    """The batches of a server, stored in the same database as its files."""

    def __init__(self, files: FileStore) -> None:
        self.files, self._database = files, files.database

    async def add(self, batch: Batch) -> None:
        """Store a new batch. ApiError (429) if its owner has too many."""

        def work(db: sqlite3.Connection) -> None:
            (count,) = db.execute(
                "select count(*) from batches where owner = ? and open", (batch.owner,)
            ).fetchone()
            if count >= MAX_OPEN:
                message = f"{count} batches are unfinished, the most that this server takes; wait for one, or cancel it"
                raise ApiError(
                    429,
                    message,
                    kind="rate_limit_error",
                    code="too_many_batches",
                    headers={"retry-after": "60"},
                )
            row = (batch.id, batch.owner, batch.input_file_id, _encoder.encode(batch))
            db.execute(
                "insert into batches (id, owner, open, input, about) values (?, ?, 1, ?, ?)", row
            )

        await self._database.run(work)

    async def change(self, id_: str, how: Callable[[Batch], None]) -> Batch:
        """Apply `how` to the stored batch, and return the changed one."""

        def work(db: sqlite3.Connection) -> Batch:
            batch = _decoder.decode(
                db.execute("select about from batches where id = ?", (id_,)).fetchone()[0]
            )
            how(batch)
            row = (batch.status not in ENDED, _encoder.encode(batch), id_)
            db.execute("update batches set open = ?, about = ? where id = ?", row)
            return batch

        return await self._database.run(work)

    async def get(self, owner: str, id_: str) -> Batch | None:
        query = "select about from batches where id = ? and owner = ?"
        row = await self._database.run(
            lambda db: db.execute(query, (id_, owner)).fetchone(), writes=False
        )
        return None if row is None else _decoder.decode(row[0])

    async def listed(self, owner: str, after: str | None, limit: int) -> list[Batch]:
        query = "select about from batches where owner = ?"

        def read(db: sqlite3.Connection) -> list[Any]:
            return db.execute(
                *page(db, "batches", query, [owner], owner, after, limit, newest_first=True)
            ).fetchall()

        return [_decoder.decode(row[0]) for row in await self._database.run(read, writes=False)]

    async def open(self) -> list[Batch]:
        """Unfinished batches, oldest first."""
        query = "select about from batches where open order by seq"
        rows = await self._database.run(lambda db: db.execute(query).fetchall(), writes=False)
        return [_decoder.decode(row[0]) for row in rows]

    async def forget_old(self, before: float) -> None:
        """Delete batches that ended before this time (seconds since 1970)."""

        def work(db: sqlite3.Connection) -> None:
            rows = db.execute("select id, about from batches where not open").fetchall()
            old = [
                (id_,) for id_, about in rows if max(_decoder.decode(about).times.values()) < before
            ]
            db.executemany("delete from batches where id = ?", old)

        await self._database.run(work)


class Batches:
    def __init__(self, state: ServerState) -> None:
        self.state = state

    @property
    def _store(self) -> BatchStore:
        if self.state.batches is None:
            raise files_off()
        return self.state.batches

    async def create(self, request: Request) -> Response:
        store, owner = self._store, request.scope["record"].owner
        body = await read_as(BatchRequest, request, self.state)
        if body.endpoint not in ENDPOINTS:
            raise bad_request(f"endpoint must be one of {', '.join(ENDPOINTS)}", "endpoint")
        window = _window(body.completion_window)
        if await store.files.get(owner, body.input_file_id) is None:
            raise bad_request(f"file {body.input_file_id[:100]!r} does not exist", "input_file_id")
        now = int(time.time())
        batch = Batch(
            id=f"batch_{uuid.uuid4().hex}",
            owner=owner,
            endpoint=body.endpoint,
            input_file_id=body.input_file_id,
            completion_window=body.completion_window,
            metadata=body.metadata,
            expires=now + window,
            times={"created_at": now},
        )
        await store.add(batch)
        return json_response(batch.public())

    async def list(self, request: Request) -> Response:
        after, limit, newest_first = page_options(request, most=MAX_PAGE, usual=20)
        if not newest_first:
            raise bad_request("batches are listed with the newest first; leave order out", "order")
        found = await self._store.listed(request.scope["record"].owner, after, limit)
        return page_answer([batch.public() for batch in found], limit)

    async def get(self, request: Request) -> Response:
        return json_response((await self._found(request)).public())

    async def cancel(self, request: Request) -> Response:
        def cancel(batch: Batch) -> None:
            if batch.status in ENDED:
                raise bad_request(f"the batch is {batch.status} and can't be cancelled")
            if batch.status != "finalizing":
                batch.become("cancelling")

        found = await self._found(request)
        return json_response((await self._store.change(found.id, cancel)).public())

    async def _found(self, request: Request) -> Batch:
        id_ = request.path_params["id"]
        batch = await self._store.get(request.scope["record"].owner, id_)
        if batch is None:
            raise ApiError(
                404, f"batch {id_[:100]!r} does not exist", param="batch_id", code="batch_not_found"
            )
        return batch


def _window(text: str) -> int:
    match = re.fullmatch(r"([1-9][0-9]{0,5})([smhd])", text)
    seconds = 0 if match is None else int(match[1]) * _UNITS[match[2]]
    if not 0 < seconds <= MAX_WINDOW_S:
        raise bad_request(
            "completion_window must be a span of at most 7d, such as '24h'", "completion_window"
        )
    return seconds


def routes(state: ServerState) -> list[Route]:
    batches = Batches(state)
    return [
        Route("/v1/batches", counted(state, batches.create), methods=["POST"]),
        Route("/v1/batches", batches.list, methods=["GET"]),
        Route("/v1/batches/{id}", batches.get, methods=["GET"]),
        Route("/v1/batches/{id}/cancel", batches.cancel, methods=["POST"]),
    ]
