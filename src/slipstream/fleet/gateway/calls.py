"""A request at the gateway, its attempt at a replica, and the headers that both exchange."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from urllib.parse import quote

import msgspec
from starlette.types import Scope, Send

from slipstream.fleet.gateway.members import Replica, Version
from slipstream.fleet.gateway.phases import Prefilled
from slipstream.fleet.gateway.router import Decision
from slipstream.fleet.gateway.signs_of_life import StreamStart
from slipstream.fleet.gateway.streams import ENGINE_DEATHS, MarkedStream
from slipstream.fleet.gateway.upstream import UpstreamConnection
from slipstream.server.http.errors import ERROR_CODE_HEADER, ApiError, overloaded, unavailable
from slipstream.server.http.record import RequestRecord
from slipstream.server.operations.fleet import BATCH


class RetryElsewhere(Exception):  # noqa: N818 - no failure of the request
    """Failure of one replica; another may answer. `error` is the replica's own answer, if it gave
    one."""

    def __init__(
        self,
        why: str,
        *,
        gone: bool = False,
        died: bool = False,
        code: str | None = None,
        error: ApiError | None = None,
        blame: bool = True,
    ) -> None:
        """`died`: the replica died while it had the request. `code`: of its error answer."""
        super().__init__(why)
        self.engine_died = code in ENGINE_DEATHS
        self.engine_killed = code == "engine_killed"
        self.engine_down = self.engine_died or code == "engine_down"
        self.gone, self.died = gone or self.engine_down, died or self.engine_died
        self.error, self.blame = error, blame and not self.engine_down
        self.replica: Replica | None = None


@dataclass(slots=True)
class Call:
    """One request at the gateway."""

    scope: Scope
    send: Send
    method: bytes
    path: bytes
    raw: bytes
    headers: list[bytes]
    streams: bool
    generates: bool = False  # the replica reports the answer's tokens
    adapter: str | None = None  # the adapter that its body names
    tokens: list[int] = field(default_factory=list)  # tokens of the prompt
    prefix_salt: str = ""  # salt for the keys of the prompt's blocks
    session: str | None = None
    marked: MarkedStream = field(default_factory=MarkedStream)
    first_token_sent: bool = False
    tried: set[str] = field(default_factory=set)
    only: str | None = None  # id of the one replica that may answer
    is_shadow: bool = False
    num_deaths: int = 0  # deaths of replicas that the request may have caused
    num_kills: int = 0  # replicas killed from outside after they had sent more tokens
    was_divided: bool = False  # whether it was decided that another replica computes its prompt
    handover: Prefilled | None = None  # where its prompt's blocks are
    # time.monotonic() until which it avoids replicas with another suspect request
    alone_until: float = 0.0
    client: StreamStart = field(init=False)

    def __post_init__(self) -> None:
        self.client = StreamStart(self.send)

    @property
    def is_line(self) -> bool:
        """True for a line of a batch."""
        return self.record.background

    @property
    def record(self) -> RequestRecord:
        record: RequestRecord = self.scope["record"]
        return record

    def on_interim(self, headers: list[tuple[bytes, bytes]]) -> None:
        """Forward a replica's sign of life."""
        media_type = dict(headers).get(b"content-type")
        shows_life = self.scope.get("shows_life", True) and not (self.is_shadow or self.is_line)
        if media_type and self.streams and shows_life:
            self.client.show_life(media_type)

    def note_tokens(self, told: bytes | None) -> None:
        """Record the numbers of tokens so far, from a replica's `TOKENS_HEADER`."""
        if told is not None:
            prompt, answer = told.split()
            self.record.num_prompt_tokens, self.record.num_output_tokens = int(prompt), int(answer)


class Opened:
    """A request sent to a replica. It counts as in flight there until `close`."""

    def __init__(self, version: Version, replica: Replica, decision: Decision, call: Call) -> None:
        self.version, self.replica, self.decision = version, replica, decision
        self._is_line, self._is_suspect = call.is_line, call.num_deaths > 0
        self.answer: UpstreamConnection | None = None
        self.first: bytes | None = None  # first part of a stream
        self.whole: bytes | None = None
        self._sent = time.monotonic()
        self._closed = False
        replica.num_in_flight += 1
        replica.num_suspects += self._is_suspect
        if self._is_line:
            replica.num_lines += 1
            call.scope["replica"] = replica

    def began(self) -> None:
        now = time.monotonic()
        if self.whole is None:
            self.version.placing.began(self.decision, now - self._sent, now)
        elif self.answer is not None and self.answer.status == 200:
            self.version.guard.did_well(self.replica.id, now)
        else:
            self.version.guard.let_go(self.replica.id)

    def failed(self, error: BaseException) -> None:
        if isinstance(error, RetryElsewhere):
            error.replica = self.replica
            if error.engine_down:
                self.replica.set_ready(False)  # until it reports the opposite
        if isinstance(error, RetryElsewhere) and error.blame:
            self.version.guard.failed(
                self.replica.id, str(error), time.monotonic(), gone=error.gone
            )

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.replica.num_in_flight -= 1
        self.replica.num_lines -= self._is_line
        self.replica.num_suspects -= self._is_suspect
        self.version.placing.ended(self.decision, time.monotonic())
        if self.answer is not None:
            self.answer.done()
        self.version.changed()


def about(record: RequestRecord) -> bytes:
    """Encodes the request's id, time, key and priority for its replica
    (`server.operations.fleet`)."""
    found, key = f"{record.id} {record.created}", record.key
    if key is not None:
        priority = BATCH if record.background else "-" if key.priority is None else key.priority
        found += f" {quote(key.id, safe='')} {priority} {key.weight!r}"
        if key.share_prefixes is not None:
            found += f" ={quote(key.share_prefixes, safe='')}"
    elif record.background:
        found += f"  {BATCH} 1.0"
    return found.encode()


def refused(answer: UpstreamConnection, body: bytes) -> RetryElsewhere:
    """RetryElsewhere for a replica's error answer, in any protocol's format. Its `error` is for the
    client."""
    status, kind, param = answer.status, "invalid_request_error", None
    code = dict(answer.headers).get(ERROR_CODE_HEADER, b"").decode("latin-1") or None
    try:
        told = msgspec.json.decode(body)["error"]
        if isinstance(told, str):
            message = told
        else:
            message, code = str(told["message"]), code or told.get("code")
            if "param" in told:  # OpenAI's shape
                kind, param = told.get("type") or kind, told["param"]
    except (msgspec.DecodeError, LookupError, TypeError, AttributeError):
        message = "the replica failed"
    if status == 429:
        return RetryElsewhere(message, error=overloaded(message), blame=False)
    if status in (500, 502, 503):
        return RetryElsewhere(
            message,
            code=code,
            error=unavailable(message, code or "replica_failed"),
            blame=code != "shutting_down",
        )
    error = ApiError(status, message, kind=kind, param=param, code=code)
    return RetryElsewhere(message, error=error, blame=False)


def resume_body(call: Call) -> bytes:
    wanted = {
        "path": call.scope["path"],
        "body": msgspec.Raw(call.raw),
        "answer_token_ids": call.marked.tokens,
    }
    return msgspec.json.encode(wanted)
