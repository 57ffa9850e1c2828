"""Forwards a request: sends it to a replica, watches it, and sends it to another replica when the
first one fails.

1. A request whose answer has not begun is sent to another replica after a failure, within a retry
   budget. At most `MAX_DEATHS` replicas may die with it; docs/fleet.md says which deaths count.
2. A stream that has begun continues on another replica after the tokens sent so far. The gateway
   knows these from the replica's marks (`server.operations.fleet`). An answer that can't be
   continued (several choices, log-probabilities) ends with an error event.
3. An answer that is not streamed is sent when it is complete, so until then rule 1 applies.
4. A slow client slows its replica down, because the gateway reads nothing that it can't forward.
5. If no replica can take a request, it waits at the gateway for `queue_s` at most.
6. A request goes to another replica if its first token takes longer than `first_token_s`, or a
   later one longer than `next_token_s`. The first replica is blamed for the failure although it is
   alive. Progress of an answer that is not streamed arrives by `UpstreamConnection.on_interim`.
7. A shadow request has no client: it has one attempt, outside all budgets, and nothing waits for
   it.
8. A batch line is sent to a replica without client requests; if there is none, it is sent later
   (`fleet.gateway.batches`)."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence, Set
from typing import Any

import msgspec

from slipstream.core.cache.prefix_cache import salted
from slipstream.fleet.gateway import phases
from slipstream.fleet.gateway.calls import Call, Opened, RetryElsewhere, about, refused, resume_body
from slipstream.fleet.gateway.members import Members, Replica, Version
from slipstream.fleet.gateway.phases import Prefilled
from slipstream.fleet.gateway.prompts import chain
from slipstream.fleet.gateway.router import Decision
from slipstream.fleet.gateway.streams import ELSEWHERE, MarkedStream, error_event
from slipstream.fleet.gateway.upstream import UpstreamError
from slipstream.server.answers import generation
from slipstream.server.http.errors import ApiError, unavailable
from slipstream.server.http.record import TOKENS_HEADER, RequestRecord
from slipstream.server.http.replies import send_whole
from slipstream.server.operations.fleet import HANDOVER_HEADER
from slipstream.server.operations.metrics import Metrics

MAX_SHADOWS = 256
"""Maximum concurrent shadow requests. Further requests are not shadowed, so that a slow shadow
version can't fill the gateway's memory."""

SHADOWED = frozenset(
    {
        *(
            "/v1/completions",
            "/v1/chat/completions",
            "/v1/messages",
            "/v1/embeddings",
            "/api/chat",
            "/api/generate",
        ),
        *(
            "/api/embed",
            "/api/embeddings",
            "/rerank",
            "/v1/rerank",
            "/v2/rerank",
            "/score",
            "/v1/score",
        ),
    }
)
"""Routes that store nothing, so they can be shadowed. /v1/responses stores its answers."""

# response headers that are passed on
_PASSED = (b"content-type", b"cache-control", b"retry-after", b"inference-header-content-length")
MAX_DEATHS = 2
"""Number of replicas that may die with the same request before it is refused."""

MAX_KILLS = 8
"""Number of replicas that may be killed from outside (SIGKILL), each after more tokens, before the request is
refused. Limited, because the kernel also kills a replica when a request takes all memory."""

ALONE_S = 5.0
"""Seconds for which a request whose replica died waits for a replica without another such request.
One of them may be the cause of the death, and the others would be lost with it."""

REPLICA_DIED = "replica_died"
"""Error code of a batch line whose replica died."""

PREFILL_S = 10.0
"""Minimum limit, in seconds, of the wait for a prompt that another replica computes. The answering
replica can compute it instead, so it is shorter than the wait for a first token."""

_MAX_STORED = 100_000  # stored answers whose replica is remembered


class Forwarder:
    def __init__(self, members: Members, metrics: Metrics) -> None:
        self.members, self.metrics = members, metrics
        self.stored: dict[str, str] = {}  # id of a stored answer → id of its replica
        self.shadows: set[asyncio.Task[None]] = set()
        self.num_failovers = self.num_resumed = self.num_hedged = self.num_broken = (
            self.num_unshadowed
        ) = self.num_handed = self.num_unhanded = 0

    @property
    def counts(self) -> dict[str, int]:
        """Counters for `slipstream fleet status` and /metrics."""
        return {
            "failovers": self.num_failovers,
            "resumed": self.num_resumed,
            "hedged": self.num_hedged,
            "broken": self.num_broken,
            "unshadowed": self.num_unshadowed,
            "handed": self.num_handed,
            "unhanded": self.num_unhanded,
        }

    async def see_through(self, version: Version, call: Call) -> None:
        """Obtain an answer to a request, from as many replicas in turn as needed and allowed."""
        if not call.is_line:
            self._shadow(version, call)
            self.members.hedges.request()
        self.members.budget.request()
        most, number, told = self.members.fleet.router.retries.most, 0, 0
        last: RetryElsewhere | None = None
        while True:
            if not call.first_token_sent:
                call.marked = MarkedStream()
            if self._may_divide(version, call):
                await self._prefill(version, call)
            replica, decision = await self._choose(version, call, last)
            try:
                await self._attempt(Opened(version, replica, decision, call), call)
                return
            except RetryElsewhere as failed:
                last = failed
            self.num_failovers += 1
            further = len(call.marked.tokens) > told
            await self.count_death(call, last, further=further)
            if further:  # further tokens arrived, so the request is not at fault
                number, told = 0, len(call.marked.tokens)
            # waiting for a start does not count as an attempt
            number += last.died or not last.engine_down
            if number > most or not (
                call.first_token_sent or last.gone or self.members.budget.take()
            ):
                raise last.error or unavailable(f"no replica answered: {last}", "replica_failed")

    async def count_death(self, call: Call, failed: RetryElsewhere, *, further: bool) -> None:
        """Count the death of a replica that had this request. ApiError if the request must not be
        sent to another one."""
        replica = failed.replica
        if not failed.died or replica is None:
            return
        killed = failed.engine_killed if failed.engine_died else await replica.was_killed()
        if killed and further:
            call.num_kills += 1
        else:
            call.num_deaths += 1
        if not killed:
            call.alone_until = time.monotonic() + ALONE_S
        if call.is_line:  # the batch's runner decides whether to try again
            raise unavailable(str(failed), REPLICA_DIED)
        if call.num_deaths >= MAX_DEATHS or call.num_kills >= MAX_KILLS:
            number = call.num_deaths + call.num_kills
            message = f"{number} replicas died while they had this request, so it is not sent to another ({failed})"
            raise ApiError(
                503,
                message,
                kind="service_unavailable",
                code="replica_failed",
                headers={"x-should-retry": "false"},
            )

    async def break_off(self, call: Call, error: ApiError) -> None:
        """End a stream that can't be continued, with an error event."""
        self.num_broken += call.first_token_sent
        call.record.status, call.record.error = error.status, error.code
        await call.send(
            {
                "type": "http.response.body",
                "body": error_event(call.scope, error),
                "more_body": False,
            }
        )

    async def _choose(
        self, version: Version, call: Call, last: RetryElsewhere | None
    ) -> tuple[Replica, Decision]:
        """Choose a replica; if none can take the request, wait at the gateway. ApiError if the wait
        is too long."""
        now = time.monotonic()
        until = now + self.members.fleet.router.queue_s
        if (autoscale := version.autoscale) is not None and version.is_asleep:
            until = now + autoscale.wait_s
            if version.num_waiting >= autoscale.max_waiting:
                raise unavailable(
                    f"{version.num_waiting} requests wait for {version.model} to start",
                    "too_many_waiting",
                )
        version.num_waiting += 1
        try:
            while True:
                decision = self._decide(version, call, now)
                if decision is None and not call.is_line and (slow := version.guard.slow()):
                    decision = self._decide(version, call, now, also=slow)
                if decision is not None:
                    return version.replicas[decision.replica], decision
                if call.tried and not any(
                    r.serves and r.id not in call.tried for r in version.replicas.values()
                ):
                    call.tried.clear()  # all were tried; the first may be available again
                    if last is not None and last.error is not None and last.error.status == 429:
                        raise last.error
                if call.is_line and version.can_answer:
                    raise unavailable(
                        f"all replicas of {version.model} have requests of clients", "no_room"
                    )
                if now >= until:
                    raise unavailable(
                        f"no replica of {version.model} could take the request", "no_replica"
                    )
                change = version.guard.next_change(now)
                await version.wait(min(until, change or until, now + 1.0) - now + 0.001)
                call.client.show_life_if_due()
                now = time.monotonic()
        finally:
            version.num_waiting -= 1

    def _decide(
        self,
        version: Version,
        call: Call,
        now: float,
        *,
        by_load: bool = False,
        also: Set[str] = frozenset(),
    ) -> Decision | None:
        """Choose a replica. `also`: replicas that may be chosen although the guard has excluded
        them."""
        exclude = set(call.tried)
        if call.is_line:
            exclude |= {
                r.id
                for r in version.replicas.values()
                if r.room_for_lines(self.members.fleet.batch_beside) <= 0
            }
        if call.num_deaths and now < call.alone_until and not call.first_token_sent:
            exclude |= {r.id for r in version.replicas.values() if r.num_suspects}
        if call.only is not None and call.only in version.replicas:
            exclude, also = version.replicas.keys() - {call.only}, {call.only}
        if call.adapter is not None:
            exclude |= {r.id for r in version.replicas.values() if call.adapter not in r.adapters}
        if version.has_roles:
            exclude |= version.replicas.keys() - phases.answering(version, call.tried)
        handed = call.handover is not None  # its prompt is loaded, not computed
        chains = [] if by_load or handed else self.chains(version, call)
        session = None if by_load else call.session
        num_tokens = 2 if handed else max(2, len(call.tokens))
        return version.placing.choose(
            chains, num_tokens, now=now, session=session, exclude=exclude, also=also
        )

    def chains(self, version: Version, call: Call) -> list[Sequence[bytes]]:
        """Keys of the prompt's blocks, one chain for each root key among the replicas."""
        return [
            chain(call.tokens, salted(root, call.prefix_salt), size)
            for root, size in version.roots(call.adapter)
        ]

    # --- The prompt elsewhere ---------------------------------------------------------------------------------------

    def _may_divide(self, version: Version, call: Call) -> bool:
        return (
            version.has_roles
            and not call.was_divided
            and bool(call.tokens)
            and call.generates
            and call.only is None
            and not (call.first_token_sent or call.is_line or call.is_shadow)
        )

    async def _prefill(self, version: Version, call: Call) -> None:
        """Let another replica compute the prompt if that pays; it is then named in `call.handover`.

        ApiError if too many replicas died of the request.
        """
        call.was_divided, now = True, time.monotonic()
        routing = self.members.fleet.router
        chains, out = self.chains(version, call), set(version.guard.out(now))
        if call.adapter is not None:
            out |= {r.id for r in version.replicas.values() if call.adapter not in r.adapters}
        always = routing.handover == "always"
        num_tokens = len(call.tokens)
        prompts = phases.worth_dividing(version, chains, num_tokens, out, now, always=always)
        decision = prompts and version.placing.choose(
            chains, num_tokens, now=now, exclude=version.replicas.keys() - prompts
        )
        if not decision:
            return
        replica = version.replicas[decision.replica]
        opened = Opened(version, replica, decision, call)
        line = replica.key_line + b" " + about(call.record) + b"\r\n"
        body = msgspec.json.encode({"path": call.scope["path"], "body": msgspec.Raw(call.raw)})
        try:
            least = min(PREFILL_S, routing.first_token_s)
            async with asyncio.timeout(max(least, 3 * decision.predicted_ttft_s)):
                opened.answer = await replica.pool.ask(
                    b"POST",
                    b"/fleet/prefill",
                    [line, *call.headers],
                    body,
                    on_interim=call.on_interim,
                )
                opened.whole = await opened.answer.read_all()
            if opened.answer.status == 200:
                call.handover = msgspec.json.decode(opened.whole, type=Prefilled)
                version.router.began(decision, time.monotonic())
                self.num_handed += 1
            else:
                self.num_unhanded += 1
            opened.began()
        except (TimeoutError, UpstreamError, msgspec.MsgspecError) as error:
            gone = isinstance(error, UpstreamError)
            died = isinstance(error, UpstreamError) and error.sent
            failed = RetryElsewhere(
                f"replica {replica.id}: {error or 'no prompt in time'}", gone=gone, died=died
            )
            opened.failed(failed)
            self.num_failovers += 1
            self.num_unhanded += 1
            await self.count_death(call, failed, further=False)
        finally:
            opened.close()

    # --- One try ------------------------------------------------------------------------------------------------------

    async def _attempt(self, opened: Opened, call: Call) -> None:
        """One attempt: on one replica, or on two if the request is hedged."""
        hedging = self.members.fleet.router.hedging
        if hedging is None or call.first_token_sent or call.is_shadow or call.is_line:
            try:
                await self._open(opened, call)
                await self._relay(opened, call)
            finally:
                opened.close()
            return
        tries = {asyncio.ensure_future(self._open(opened, call)): opened}
        failed: RetryElsewhere | None = None
        try:
            await asyncio.wait(
                tries, timeout=max(hedging.after_s, 3 * opened.decision.predicted_ttft_s)
            )
            if (
                not any(task.done() for task in tries)
                and (second := self._second(opened, call)) is not None
            ):
                tries[asyncio.ensure_future(self._open(second, call))] = second
            while tries:
                done, _ = await asyncio.wait(tries, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    one = tries.pop(task)
                    try:
                        await task
                    except RetryElsewhere as error:
                        one.close()
                        if tries:  # the caller counts the death of the last one
                            await self.count_death(call, error, further=False)
                        failed = error
                        continue
                    except BaseException:
                        one.close()
                        raise
                    _give_up(tries)  # end the other attempts now, not after the answer
                    try:
                        await self._relay(one, call)
                    finally:
                        one.close()
                    return
            assert failed is not None
            raise failed
        finally:
            _give_up(tries)

    def _second(self, first: Opened, call: Call) -> Opened | None:
        """A second replica for a hedged request, if there is one and the budget allows it."""
        version, now = first.version, time.monotonic()
        if call.only is not None or not self.members.hedges.take():
            return None
        other = self._decide(version, call, now, by_load=True)
        if other is None:
            return None
        self.num_hedged += 1
        return Opened(version, version.replicas[other.replica], other, call)

    def _first_token_s(self, opened: Opened, call: Call) -> float | None:
        """Seconds that the first token may take; None if the replica does not report tokens."""
        if not (call.streams or call.generates):
            return None
        seconds = max(self.members.fleet.router.first_token_s, 3 * opened.decision.predicted_ttft_s)
        # The answer so far is computed first, which took no longer than the time until now.
        if call.first_token_sent:
            seconds += 2 * (time.monotonic() - call.record.start)
        return seconds

    async def _open(self, opened: Opened, call: Call) -> None:
        """Send the request to a replica; return once it has begun to answer. RetryElsewhere if it
        can't."""
        replica, loop = opened.replica, asyncio.get_running_loop()
        patience = asyncio.timeout(self._first_token_s(opened, call))

        def on_interim(headers: list[tuple[bytes, bytes]]) -> None:
            call.on_interim(headers)
            if (told := dict(headers).get(TOKENS_HEADER)) is None:
                return  # a sign of life is no progress
            call.note_tokens(told)
            if patience.when() is not None and not patience.expired():
                patience.reschedule(loop.time() + self.members.fleet.router.next_token_s)

        try:
            call.tried.add(replica.id)
            fleet_line = replica.key_line + b" " + about(call.record) + b"\r\n"
            headers = [fleet_line, *call.headers]
            if (told := call.handover) is not None:
                headers.append(
                    f"{HANDOVER_HEADER}: {told.address} {told.num_cached_tokens}\r\n".encode()
                )
            path, body = call.path, call.raw
            if call.first_token_sent:
                path = b"/fleet/resume"
                body = resume_body(call)
            async with patience:
                opened.answer = await replica.pool.ask(
                    call.method, path, headers, body, on_interim=on_interim
                )
                status = opened.answer.status
                if status in (429, 500, 502, 503) or (call.first_token_sent and status != 200):
                    raise refused(opened.answer, await opened.answer.read_all())
                if call.streams and status == 200:
                    opened.first = await opened.answer.read()
                else:
                    opened.whole = await opened.answer.read_all()
            opened.began()
        except BaseException as error:
            if isinstance(error, TimeoutError):
                error = RetryElsewhere(
                    f"replica {replica.id} gave no token in time", blame=not call.is_line
                )
            elif isinstance(error, UpstreamError):
                error = RetryElsewhere(f"replica {replica.id}: {error}", gone=True, died=error.sent)
            opened.failed(error)
            raise error from None

    async def _relay(self, opened: Opened, call: Call) -> None:
        """Pass the answer on to the client."""
        answer, send = opened.answer, call.send
        assert answer is not None
        await call.client.settled()
        passed = [(name, value) for name, value in answer.headers if name in _PASSED]
        if not call.first_token_sent:  # for a resumed answer the tokens sent are counted instead
            call.note_tokens(dict(answer.headers).get(TOKENS_HEADER))
        media_type = dict(passed).get(b"content-type", b"")
        same_type = media_type.partition(b";")[0] == call.client.media_type.partition(b";")[0]
        if call.client.headers_sent and answer.status == 200 and not same_type:
            raise unavailable("the replica did not stream", "replica_failed")
        if opened.whole is not None:
            if call.client.headers_sent:
                error = refused(answer, opened.whole).error
                assert error is not None
                raise error
            call.record.status = answer.status
            await self._whole(opened, call, passed)
            return
        write: Callable[[bytes], bool] | None = call.scope.get("write_chunk")
        marked, record, data = call.marked, call.record, opened.first
        next_token_s = self.members.fleet.router.next_token_s
        unwritten = b""

        def pass_on(data: bytes) -> bool:
            """Write the events now, or queue them if the client is too slow."""
            nonlocal unwritten
            events = marked.feed(data)
            record.num_output_tokens = len(marked.tokens)
            if events and (write is None or not write(events)):
                unwritten = events
            return not unwritten

        def show_life() -> None:
            if write is not None:
                write(generation.sign_of_life(media_type))

        try:
            while data is not None:
                if call.first_token_sent:
                    pass_on(data)
                elif events := marked.feed(data):
                    self._begin(call)
                    await call.client.start(passed)
                    self._remember(call, opened)
                    unwritten = events
                record.num_output_tokens = len(marked.tokens)
                while True:
                    if unwritten:
                        unwritten, events = b"", unwritten
                        await send(
                            {"type": "http.response.body", "body": events, "more_body": True}
                        )
                    if not call.first_token_sent or write is None:
                        break
                    await answer.pour(pass_on, next_token_s, show_life, generation.PING_S)
                    if not unwritten:
                        break
                async with asyncio.timeout(next_token_s):
                    data = await answer.read()
        except (UpstreamError, TimeoutError) as error:
            why = (
                str(error) if isinstance(error, UpstreamError) else "it gave no more tokens in time"
            )
            gone = isinstance(error, UpstreamError)
            failed = RetryElsewhere(f"replica {opened.replica.id}: {why}", gone=gone, died=gone)
            raise self._unless_lost(opened, call, failed) from None
        if marked.ended is not None:
            call.record.num_prompt_tokens, call.record.num_output_tokens = marked.ended
        else:  # an error event ended it, or the route has no marks
            code = marked.error_code
            if code in ELSEWHERE:
                failed = RetryElsewhere(
                    f"replica {opened.replica.id}: {code}",
                    code=code,
                    error=unavailable("the replica failed", code),
                )
                raise self._unless_lost(opened, call, failed)
            if not call.first_token_sent:
                call.first_token_sent = True
                await call.client.start(passed)
        await send({"type": "http.response.body", "body": marked.rest, "more_body": False})
        self._end(call)

    def _begin(self, call: Call) -> None:
        call.first_token_sent = True
        if not call.is_shadow:
            call.record.ttft_s = time.monotonic() - call.record.start
            self.metrics.ttft.observe(call.record.ttft_s)

    def _end(self, call: Call) -> None:
        if not call.is_shadow:
            self.metrics.e2e.observe(time.monotonic() - call.record.start)

    def _unless_lost(self, opened: Opened, call: Call, failed: RetryElsewhere) -> Exception:
        """`failed` if another replica can continue the request; otherwise the error for its client."""
        call.marked.broken()
        opened.failed(failed)
        if not call.is_shadow:
            self.num_resumed += bool(call.marked.tokens)
        if call.first_token_sent and not call.marked.tokens:
            return failed.error or unavailable(
                "the replica failed, and the answer can't go on elsewhere", "replica_failed"
            )
        return failed

    async def _whole(self, opened: Opened, call: Call, about: list[tuple[bytes, bytes]]) -> None:
        assert opened.answer is not None
        assert opened.whole is not None
        status = opened.answer.status
        self._remember(call, opened)
        if status == 200:
            call.record.ttft_s = None
        await send_whole(call.send, opened.whole, about, status=status)
        self._end(call)

    def _remember(self, call: Call, opened: Opened) -> None:
        """Store which replica has an answer of /v1/responses."""
        if call.path in (b"/v1/responses", b"/responses"):
            self.stored["resp_" + call.record.id] = opened.replica.id
            while len(self.stored) > _MAX_STORED:
                del self.stored[next(iter(self.stored))]

    # --- Shadows ------------------------------------------------------------------------------------------------------

    def _shadow(self, chosen: Version, call: Call) -> None:
        """Send the request to shadow versions, too. Their answers are read and dropped."""
        if call.scope["path"] not in SHADOWED or call.adapter is not None:
            return
        for version in self.members.models[chosen.model]:
            if version is chosen or not version.spec.shadow or not version.can_answer:
                continue
            if int(call.record.id[:8], 16) / 2**32 >= version.spec.shadow:
                continue
            if len(self.shadows) >= MAX_SHADOWS:
                self.num_unshadowed += 1
                continue
            task = asyncio.create_task(self._ask_shadow(version, call))
            self.shadows.add(task)
            task.add_done_callback(self.shadows.discard)

    async def _ask_shadow(self, version: Version, call: Call) -> None:
        async def nowhere(message: Any) -> None:
            pass

        scope = {"path": call.scope["path"], "record": RequestRecord(key=call.record.key)}
        given = (call.method, call.path, call.raw, call.headers, call.streams, call.generates)
        copy = Call(
            scope,
            nowhere,
            *given,
            tokens=call.tokens,
            prefix_salt=call.prefix_salt,
            session=call.session,
            is_shadow=True,
        )
        with contextlib.suppress(ApiError, RetryElsewhere):
            replica, decision = await self._choose(version, copy, None)
            await self._attempt(Opened(version, replica, decision, copy), copy)


def _give_up(tries: dict[asyncio.Task[None], Opened]) -> None:
    for task, one in tries.items():
        if not task.cancel() and not task.cancelled():
            task.exception()  # marks the exception as retrieved
        one.close()
    tries.clear()
