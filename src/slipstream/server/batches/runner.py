"""Runs batches: each line is a request inside this process, with a priority below all others.

A server has one runner, and so has a fleet's gateway.

1. One front end runs batches: the one that holds a lock in `--files-dir`. If it dies the kernel
   frees the lock, and another front end takes over.
2. Lines run while an engine has nothing else to do, up to `batch_max_concurrent` at once. While
   clients' requests run, at most `batch_beside` lines do: the others are cancelled within 50 ms and
   run again later. A line that was cancelled three times may end, one at a time, so that batches
   progress on a busy server, too. `LineRunner` decides how many lines may run.
3. An answer is one line, appended to a file of its batch. That file is the only record of finished
   lines. After a crash a torn last line is cut off, and lines with an answer are not run again.
4. An error of a line (400, 500) is its answer. An error of the server (429, 503) is not: the line
   waits.
5. A batch that expires or is cancelled keeps its answers. A full disk fails it, with its reason.
6. The start of a line is written to a file before it runs. If a process (this one, the engine, a
   replica) dies meanwhile, all running lines are suspects: they run before all others, alone and
   one at a time. A line that was running at `MAX_DEATHS` deaths gets an error as its answer. The
   file is written without fsync: it need not survive a power cut.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import time
import uuid
from collections import Counter, deque
from collections.abc import Iterator, Sequence, Set
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec
from msgspec import Raw, Struct
from starlette.types import ASGIApp, Message, Scope

from slipstream.base import locks
from slipstream.base.files import open_private
from slipstream.engine.threads.fair_threads import FairThreads
from slipstream.server.batches.batches import Batch, BatchError, BatchStore, Status
from slipstream.server.batches.files import LIFE_S, StoredFile
from slipstream.server.http.errors import ApiError
from slipstream.server.http.keys import Key
from slipstream.server.http.limits import own_receive
from slipstream.server.state import ServerState

_logger = logging.getLogger("slipstream.server")

MAX_LINES = 50_000
MAX_ERRORS = 100
POLL_S = 0.05
LOOK_S = 0.5
SWEEP_S = 600.0
MAX_CANCELS = 3
MAX_DEATHS = 2
DEATHS = frozenset({"engine_dead", "engine_killed", "replica_died"})
"""Error codes of requests whose engine or replica died."""

MAX_PAUSE_S = 60.0
COUNT_EVERY_S = 1.0
MAX_JOURNAL_BYTES = 2**22

# one thread is enough, since the runner waits for each call
_reading = FairThreads("batches", 1, per_client=1)


class Line(Struct, forbid_unknown_fields=True):
    custom_id: str
    method: Literal["POST"]
    url: str
    body: Raw


class _Done(Struct):
    """The only field of a written answer that a restarted batch reads."""

    custom_id: str


_line = msgspec.json.Decoder(Line)
_body = msgspec.json.Decoder(dict[str, Raw])
_done = msgspec.json.Decoder(_Done)
_text = msgspec.json.Decoder(str)


def lines_of(path: Path) -> Iterator[tuple[int, bytes]]:
    """The non-empty lines of a file, numbered from 1."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, line


def check(path: Path, endpoint: str, max_line_bytes: int) -> tuple[int, list[BatchError]]:
    """Returns (number of lines, errors in them)."""
    seen: set[str] = set()
    errors: list[BatchError] = []
    number = 0
    for number, raw in lines_of(path):
        try:
            if len(raw) > max_line_bytes:
                raise ValueError(
                    f"the line is longer than the {max_line_bytes} bytes that a body may have"
                )
            line = _line.decode(raw)
            if not line.custom_id or len(line.custom_id) > 512:
                raise ValueError("custom_id must have from 1 to 512 characters")
            if line.custom_id in seen:
                raise ValueError(f"the custom_id {line.custom_id[:100]!r} appears twice")
            if line.url != endpoint:
                raise ValueError(f"url is {line.url[:100]!r}, and the batch is for {endpoint}")
            if bytes(_body.decode(line.body).get("stream", b"false")) not in (b"false", b"null"):
                raise ValueError("an answer of a batch can't be streamed; leave stream out")
        except (ValueError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            errors.append(BatchError("invalid_line", str(error), number))
            if len(errors) >= MAX_ERRORS:
                break
            continue
        seen.add(line.custom_id)
        if len(seen) > MAX_LINES:
            return len(seen), [
                BatchError("too_many_lines", f"a batch has at most {MAX_LINES} lines")
            ]
    if not seen and not errors:
        errors.append(BatchError("empty_file", "the file has no lines"))
    return len(seen), errors


def repaired(path: Path) -> set[str]:
    """The custom ids of the answers in a file. Cuts off the text after the last whole answer."""
    found: set[str] = set()
    if not path.exists():
        return found
    good = 0
    with path.open("r+b") as file:
        for raw in file:
            try:
                found.add(_done.decode(raw).custom_id)
            except (msgspec.DecodeError, UnicodeDecodeError):
                break
            if not raw.endswith(b"\n"):
                found.discard(_done.decode(raw).custom_id)
                break
            good += len(raw)
        file.truncate(good)
    return found


class LineRunner(Protocol):
    """Decides how many lines of batches run. An engine and a fleet have one each."""

    def look(self, running: Sequence[Scope]) -> tuple[int, Sequence[Scope]]:
        """Decides (number of lines that may start, running lines to cancel, in order). `running`:
        oldest first."""


class EngineLineRunner:
    """Runs lines in this process's own engine."""

    def __init__(self, state: ServerState) -> None:
        self.state = state

    def look(self, running: Sequence[Scope]) -> tuple[int, Sequence[Scope]]:
        allowed = self._allowed(len(running))
        return max(0, allowed - len(running)), running[allowed:][::-1]

    def _allowed(self, running: int) -> int:
        settings = self.state.settings
        if (
            self.state.draining
            or self.state.engine.is_sleeping
            or not self.state.engine.health().ok
        ):
            return 0
        most = settings.batch_max_concurrent
        if most is None:
            most = max(1, self.state.engine.config.scheduling.max_num_seqs // 2)
        online = self.state.load.num_requests - running
        return most if online <= 0 else min(most, settings.batch_beside)


class Journal:
    """The running lines of a batch, and the number of deaths during each, in a file that outlives
    this process.

    A line of the file is a sign and a custom id: `+` it starts, `-` it was put back, `!` a process
    died while it ran. Answers are in other files. Methods raise OSError if the disk is full.
    """

    def __init__(self, path: Path, finished: Set[str]) -> None:
        self._path = path
        self.deaths: Counter[str] = Counter()
        self._under_way: set[str] = set()
        for line in path.read_bytes().splitlines() if path.exists() else ():
            with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):  # a torn last line
                sign, id_ = line[:1], _text.decode(line[1:])
                if id_ not in finished:
                    (self._under_way.add if sign == b"+" else self._under_way.discard)(id_)
                    self.deaths[id_] += sign == b"!"
        self.deaths.update(self._under_way)
        self._under_way.clear()
        self.deaths = +self.deaths
        self._num_bytes = 0
        if path.exists():
            self._rewrite()

    def begin(self, id_: str) -> None:
        """Record the start of a line, before it runs."""
        self._under_way.add(id_)
        self._write(b"+", id_)

    def put_back(self, id_: str) -> None:
        self._under_way.discard(id_)
        self._write(b"-", id_)

    def died(self, id_: str) -> None:
        self._under_way.discard(id_)
        self.deaths[id_] += 1
        self._write(b"!", id_)

    def answered(self, id_: str) -> None:
        """Forget a line with an answer. Nothing is written: the answer itself is the record."""
        self._under_way.discard(id_)
        self.deaths.pop(id_, None)

    def _write(self, sign: bytes, id_: str) -> None:
        self._num_bytes += append(self._path, _entry(sign, id_))
        if self._num_bytes > MAX_JOURNAL_BYTES:
            self._rewrite()

    def _rewrite(self) -> None:
        """Replace the file by one with only the current state. A crash leaves the old file or the
        new one."""
        new = self._path.with_suffix(".begun.part")
        new.write_bytes(
            b"".join(
                [_entry(b"!", id_) for id_ in self.deaths.elements()]
                + [_entry(b"+", id_) for id_ in self._under_way]
            )
        )
        new.replace(self._path)
        self._num_bytes = 0


def _entry(sign: bytes, id_: str) -> bytes:
    return sign + msgspec.json.encode(id_) + b"\n"


def append(path: Path, data: bytes) -> int:
    """Append data, and return its number of bytes. OSError if the disk is full."""
    descriptor = open_private(path, append=True)
    try:
        if os.write(descriptor, data) != len(data):
            raise OSError(errno.ENOSPC, "the disk is full")
    finally:
        os.close(descriptor)
    return len(data)


class RunningLine:
    """A running line. A LineRunner identifies its request by `scope`."""

    def __init__(self, line: Line, endpoint: str) -> None:
        self.line, self.scope = line, own_scope(endpoint, bytes(line.body))


class Work:
    """A batch that runs in this process."""

    def __init__(self, batch: Batch, store: BatchStore) -> None:
        self.id, self.batch, self.files = batch.id, batch, store.files
        self.paths = {
            "output": self.files.path(f"{batch.id}.output"),
            "error": self.files.path(f"{batch.id}.errors"),
        }
        self._finished = {kind: repaired(path) for kind, path in self.paths.items()}
        self.num_completed, self.num_failed = (
            len(self._finished["output"]),
            len(self._finished["error"]),
        )
        self.journal = Journal(
            self.files.path(f"{batch.id}.begun"), set().union(*self._finished.values())
        )
        self._lines = lines_of(self.files.path(batch.input_file_id))
        self.suspects: deque[Line] = deque()
        if suspected := self.journal.deaths.keys():
            found = (_line.decode(raw) for _, raw in self._lines)
            self.suspects.extend(line for line in found if line.custom_id in suspected)
            self._lines = lines_of(self.files.path(batch.input_file_id))
            self._finished["suspect"] = {line.custom_id for line in self.suspects}
        self.again: deque[Line] = deque()
        self.cancels: Counter[str] = Counter()  # of lines, by custom_id
        self.running: dict[asyncio.Task[None], RunningLine] = {}
        self.paused_until = 0.0  # time.monotonic()
        self.failure: BatchError | None = None
        self.counted = 0.0
        self._bytes = sum(path.stat().st_size for path in self.paths.values() if path.exists())

    def next(self) -> Line | None:
        """Takes the next line without an answer, suspects first; None after the last."""
        if self.suspects:
            return self.suspects.popleft()
        if self.again:
            return self.again.popleft()
        for _, raw in self._lines:
            line = _line.decode(raw)
            if not any(line.custom_id in found for found in self._finished.values()):
                return line
        return None

    def append(self, kind: Literal["output", "error"], answer: dict[str, Any]) -> None:
        """Write an answer. ApiError (413) or OSError if there is no space."""
        data = msgspec.json.encode(answer) + b"\n"
        self._bytes += len(data)
        if self._bytes > self.files.max_bytes // 2:
            raise ApiError(
                413,
                "the answers are longer than half of what --max-files-bytes allows",
                code="storage_full",
            )
        append(self.paths[kind], data)
        self.journal.answered(answer["custom_id"])
        if kind == "output":
            self.num_completed += 1
        else:
            self.num_failed += 1

    def put_back(self, line: Line, *, died: bool = False) -> None:
        """Queue a line without an answer again. `died`: its engine or replica died. OSError if the
        disk is full."""
        suspect = died or line.custom_id in self.journal.deaths
        (self.suspects if suspect else self.again).append(line)
        self.journal.died(line.custom_id) if died else self.journal.put_back(line.custom_id)

    def give_up(self, line: Line) -> None:
        """Answer a line that must not run again with an error. ApiError or OSError if there is no
        space."""
        number = self.journal.deaths[line.custom_id]
        message = f"The process that ran this request died {number} times while it ran. It is not run again."
        _logger.error("a line of %s is given up: %d processes died while it ran", self.id, number)
        self.append("error", _without_answer(line, "engine_error", message))

    def unanswered(self) -> Iterator[Line]:
        while (line := self.next()) is not None:
            yield line


class BatchRunner:
    def __init__(
        self, state: ServerState, store: BatchStore, app: ASGIApp, room: LineRunner
    ) -> None:
        self.state, self.store, self.app, self.room = state, store, app, room
        self._works: dict[str, Work] = {}
        self._lock = -1
        self._turn = 0

    async def run(self) -> None:
        """Run batches until cancelled. An error of ours is logged, and the loop continues."""
        try:
            while not self._leads():
                await asyncio.sleep(LOOK_S)
            with contextlib.suppress(ApiError):
                await self.store.files.remove_strays()
            looked = swept = 0.0
            while True:
                now = time.monotonic()
                try:
                    if now - swept > SWEEP_S:
                        swept = now
                        await self.store.files.sweep()
                        await self.store.forget_old(time.time() - LIFE_S)
                    if now - looked > LOOK_S:
                        looked = now
                        for batch in await self.store.open():
                            await self._look(batch)
                    self._adjust()
                    for work in list(self._works.values()):
                        await self._settle(work)
                except Exception:
                    _logger.exception("batches stop for a moment")
                    await asyncio.sleep(1.0)
                await asyncio.sleep(POLL_S if self._works else LOOK_S)
        finally:
            for work in self._works.values():
                for task in work.running:
                    task.cancel()
            if self._lock >= 0:
                os.close(self._lock)

    def _leads(self) -> bool:
        if self._lock < 0:
            self._lock = open_private(self.store.files.folder / "runner.lock")
        return locks.take(self._lock)

    # --- The life of a batch -------------------------------------------------------------

    async def _look(self, batch: Batch) -> None:
        """Continue a batch whose status has changed, or that another process left."""
        work = self._works.get(batch.id)
        if batch.status == "validating":
            await self._validate(batch)
        elif batch.status == "finalizing" and work is None:
            await self._finalize(batch)
        elif batch.status in ("in_progress", "cancelling") and work is None:
            self._works[batch.id] = await _reading.run(partial(Work, batch, self.store))
        elif work is not None:
            work.batch = batch

    async def _validate(self, batch: Batch) -> None:
        path = self.store.files.path(batch.input_file_id)
        try:
            total, errors = await _reading.run(
                partial(check, path, batch.endpoint, self.state.settings.max_body_bytes)
            )
        except OSError as error:
            total, errors = (
                0,
                [BatchError("file_unreadable", f"the input file cannot be read: {error.strerror}")],
            )

        def begin(found: Batch) -> None:
            found.errors, found.total = errors, 0 if errors else total
            if found.status == "validating":
                found.become("failed" if errors else "in_progress")

        await self.store.change(batch.id, begin)

    async def _settle(self, work: Work) -> None:
        """End a batch that is done, expired, cancelled or failed; otherwise update its progress."""
        batch, now = work.batch, time.time()
        then: Status | None = None
        if work.failure is not None:
            then = "failed"
        elif batch.status == "cancelling":
            then = "cancelled"
        elif now >= batch.expires:
            then = "expired"
        elif work.num_completed + work.num_failed >= batch.total:
            then = "completed"
        if then is None:
            if time.monotonic() - work.counted > COUNT_EVERY_S:
                work.counted = time.monotonic()
                await self.store.change(work.id, lambda found: _count(found, work))
            return
        running = list(work.running)
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)
        if then == "expired":
            await _reading.run(partial(self._write_expired, work))
        status = then

        def close(found: Batch) -> None:
            _count(found, work)
            found.then = status
            if work.failure is not None:
                found.errors.append(work.failure)
            found.output_file_id = f"file-{uuid.uuid4().hex}" if work.num_completed else None
            found.error_file_id = f"file-{uuid.uuid4().hex}" if work.num_failed else None
            found.become("finalizing")

        found = await self.store.change(work.id, close)
        del self._works[work.id]
        await self._finalize(found)

    def _write_expired(self, work: Work) -> None:
        message = "This request could not be executed before the completion window expired."
        try:
            for line in work.unanswered():
                work.append("error", _without_answer(line, "batch_expired", message))
        except (OSError, ApiError) as failure:
            _logger.error("the errors of %s are not all written: %s", work.id, failure)

    async def _finalize(self, batch: Batch) -> None:
        """Publish the answers as the owner's files. Repeating it after a crash has the same
        result."""
        for kind, id_ in (("output", batch.output_file_id), ("errors", batch.error_file_id)):
            part = self.store.files.path(f"{batch.id}.{kind}")
            if id_ is None:
                part.unlink(missing_ok=True)
                continue
            path = self.store.files.path(id_)
            if part.exists():
                with part.open("rb") as file:
                    os.fsync(file.fileno())
                part.rename(path)
            now, name = int(time.time()), f"{batch.id}_{kind}.jsonl"
            size = path.stat().st_size
            await self.store.files.register(
                StoredFile(id_, batch.owner, "batch_output", size, now, now + LIFE_S, name)
            )
        self.store.files.path(f"{batch.id}.begun").unlink(missing_ok=True)
        await self.store.change(batch.id, lambda found: found.become(found.then))

    # --- Lines ---------------------------------------------------------------------------

    def _adjust(self) -> None:
        """Start or cancel lines, so that as many run as allowed. The batches take turns."""
        tasks = [
            (task, work, one) for work in self._works.values() for task, one in work.running.items()
        ]
        room, surplus = self.room.look([one.scope for _, _, one in tasks])
        if surplus:
            self._cancel(tasks, surplus)
            return
        now = time.monotonic()
        ready = [
            work
            for work in self._works.values()
            if work.failure is None and now >= work.paused_until
        ]
        ready = [
            work
            for work in ready
            if work.batch.status == "in_progress" and time.time() < work.batch.expires
        ]
        if any(one.line.custom_id in work.journal.deaths for _, work, one in tasks):
            return
        if suspicious := [work for work in ready if work.suspects]:
            ready, room = suspicious, 0 if tasks else min(room, 1)
        while ready and room > 0:
            self._turn = (self._turn + 1) % len(ready)
            work = ready[self._turn]
            line = work.next()
            if line is None:
                ready.remove(work)
                continue
            try:
                if work.journal.deaths[line.custom_id] >= MAX_DEATHS:
                    work.give_up(line)
                    continue
                work.journal.begin(line.custom_id)
            except (OSError, ApiError) as error:
                self._fail(work, error)
                ready.remove(work)
                continue
            one = RunningLine(line, work.batch.endpoint)
            task = asyncio.create_task(self._ask(work, one))
            work.running[task] = one
            task.add_done_callback(work.running.pop)
            room -= 1

    @staticmethod
    def _cancel(
        tasks: Sequence[tuple[asyncio.Task[None], Work, RunningLine]], surplus: Sequence[Scope]
    ) -> None:
        """Cancel the lines of `surplus`, except one that was cancelled too often."""
        tired = next(
            (
                one.scope
                for _, work, one in tasks
                if work.cancels[one.line.custom_id] >= MAX_CANCELS
            ),
            None,
        )
        wrong = {id(scope) for scope in surplus if scope is not tired}
        for task, work, one in tasks:
            if id(one.scope) in wrong:
                work.cancels[one.line.custom_id] += 1
                task.cancel()

    async def _ask(self, work: Work, one: RunningLine) -> None:
        line = one.line
        try:
            key, found = self._key(work)
            if not found:
                work.failure = _key_gone()
                return
            one.scope["key"] = key
            status, headers, body = await call(self.app, one.scope, bytes(line.body))
        except asyncio.CancelledError:
            self._put_back(work, line)
            raise
        except Exception:  # logged by RequestLog
            status = 500
            headers = {}
            body = b'{"error":{"message":"internal error","type":"server_error"}}'
        if status == 401:  # the key was revoked while the line ran
            self._put_back(work, line)
            work.failure = work.failure or _key_gone()
            return
        if status in (429, 503):
            record = one.scope.get("record")
            self._put_back(work, line, died=record is not None and record.error in DEATHS)
            wait = headers.get("retry-after", "1")
            work.paused_until = time.monotonic() + min(
                MAX_PAUSE_S, float(wait) if wait.isdecimal() else 1.0
            )
            return
        response = {
            "status_code": status,
            "request_id": headers.get("x-request-id", ""),
            "body": Raw(body),
        }
        answer = {"id": _id(), "custom_id": line.custom_id, "response": response, "error": None}
        try:
            work.append("output" if status == 200 else "error", answer)
        except (OSError, ApiError) as error:
            self._fail(work, error)

    def _put_back(self, work: Work, line: Line, *, died: bool = False) -> None:
        try:
            work.put_back(line, died=died)
        except OSError as error:
            self._fail(work, error)

    @staticmethod
    def _fail(work: Work, error: Exception) -> None:
        work.failure = BatchError("storage_failed", f"the answers cannot be kept: {error}")
        _logger.error("batch %s fails: %s", work.id, error)

    def _key(self, work: Work) -> tuple[Key | None, bool]:
        """Returns (key of the batch's owner, whether the batch may continue)."""
        if not self.state.keys:
            return None, not work.batch.owner
        key = self.state.keys.by_id(work.batch.owner)
        return key, key is not None and key.state(time.time()) == "active"


def _key_gone() -> BatchError:
    return BatchError("key_gone", "the key of the batch was revoked, has expired or was removed")


def _count(batch: Batch, work: Work) -> None:
    batch.completed, batch.failed = work.num_completed, work.num_failed


def _id() -> str:
    return f"batch_req_{uuid.uuid4().hex}"


def _without_answer(line: Line, code: str, message: str) -> dict[str, Any]:
    error = {"code": code, "message": message}
    return {"id": _id(), "custom_id": line.custom_id, "response": None, "error": error}


def own_scope(path: str, body: bytes) -> Scope:
    """ASGI scope of a background request that this process sends to itself. The caller sets its
    key."""
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))],
        "client": None,
        "server": None,
        "key": None,
        "background": True,
    }


async def call(app: ASGIApp, scope: Scope, body: bytes) -> tuple[int, dict[str, str], bytes]:
    """Send a request to `app` in this process. Returns (status, headers, body)."""
    status, headers, parts = 500, dict[str, str](), list[bytes]()

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
            headers.update(
                {name.decode(): value.decode() for name, value in message.get("headers", ())}
            )
        else:
            parts.append(message.get("body", b""))

    await app(scope, own_receive(body), send)
    return status, headers, b"".join(parts)
