"""A server's checks of its own model while idle (`--self-check FILE`).

The file is a fingerprint: token sequences with a reference model's most likely next tokens at each position
(`slipstream verify --record FILE`). A check (look) sends them to the engine as requests when it has been idle
for `IDLE_S` seconds: most tokens as a prompt, the last as an answer. A client's request ends it.

1. The weights at the start are compared with the fingerprint. The mean KL must be at most its `max_kl`, and
   half of the most likely tokens must be equal.
2. Updated weights are compared with their own first look. So drift is detected for each version, and an
   update itself causes no alarm.
3. A bad look is repeated at once. Two in a row make `ok` false, until one is good.
4. The fingerprint's tasks, which the reference solves, give an additional score: the fraction that the server
   solves.

The KL is a lower bound computed from the most likely tokens of both; it never exceeds the KL over the whole
vocabulary.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from slipstream.engine.process.streams import OutputStream
from slipstream.errors import ConfigError, SlipstreamError
from slipstream.outputs import PositionLogprobs, RequestOutput
from slipstream.params.sampling import SamplingParams
from slipstream.server.operations.looks import Look, VersionCheck

if TYPE_CHECKING:
    from slipstream.server.state import EngineProtocol, ServerState

_logger = logging.getLogger("slipstream.server")

IDLE_S = 2.0
"""Seconds without a request after which a check may begin."""

NUM_TOP = 8
"""Number of most likely tokens of the reference at each position."""

NUM_ASKED = 20
"""Number of most likely tokens requested of the engine; the reference's are among them unless the model is wrong."""

NUM_DECODED = 8
"""Maximum number of tokens generated and compared per sequence; ends at the first that differs from
the reference's."""

LEAST = math.log(1e-9)
"""Minimum log-probability: lower ones are raised to it, so that a KL is finite."""

MIN_KL = 1e-3
"""KL in nats up to which differences count as rounding. The detector gets this value instead of a lower one."""

MIN_AGREEMENT = 0.5
"""Minimum fraction of positions whose most likely token equals the reference's. Models quantized to 4 bits agree at most
positions; other models at few."""

TIMEOUT_S = 60.0

MAX_VERSIONS = 50
"""Maximum number of weight versions whose checks are stored."""

MAX_LOOKS = 64
"""Maximum number of checks of a version that are stored individually."""

NUM_TASK_TOKENS = 16
"""Maximum tokens of the answer to a task."""

Row = dict[int, float]
"""Log-probabilities of the most likely tokens at a position, by token id."""


class TokenSequence(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Token ids, and for each position from the second on the most likely tokens with their
    log-probabilities."""

    token_ids: list[int]
    top_ids: list[list[int]]
    top_logprobs: list[list[float]]

    def rows(self) -> list[Row]:
        return [
            dict(zip(*row, strict=True))
            for row in zip(self.top_ids, self.top_logprobs, strict=True)
        ]


class Task(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A prompt whose greedy answer contains a certain word."""

    token_ids: list[int]
    word: str


class Fingerprint(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A reference model's answers. `model`: its name, for people. It solves all `tasks`."""

    format: int
    model: str
    max_kl: float
    sequences: list[TokenSequence]
    tasks: list[Task] = []

    @classmethod
    def read(cls, path: str, *, vocab_size: int, max_len: int) -> Fingerprint:
        """Read a fingerprint. ConfigError if the file is unreadable, damaged, or of another kind of model."""

        def bad(why: str) -> ConfigError:
            return ConfigError(f"self_check: {path} {why}", field="self_check")

        try:
            found = msgspec.json.decode(Path(path).expanduser().read_bytes(), type=cls)
            rows = [row for sequence in found.sequences for row in sequence.rows()]
        except OSError as error:
            raise bad(f"can't be read: {error.strerror}") from None
        except (msgspec.DecodeError, ValueError) as error:
            raise bad(
                f"is no fingerprint ({error}); make one with slipstream verify --record"
            ) from None
        if found.format != 1 or not rows or not found.max_kl > 0:
            raise bad("has another format, no sequences, or no max_kl above 0")
        if not all(row and all(map(math.isfinite, row.values())) for row in rows):
            raise bad("has a row without tokens, or a log-probability that is no finite number")
        for sequence in found.sequences:
            n = len(sequence.token_ids)
            if len(sequence.top_ids) != n - 1 or n <= NUM_DECODED + 1:
                raise bad("has rows that do not fit its tokens")
            if n > max_len:
                raise bad(f"has a sequence of {n} tokens; max_model_len is {max_len}")
            ids = [*sequence.token_ids, *(t for row in sequence.top_ids for t in row)]
            if not all(0 <= t < vocab_size for t in ids):
                raise bad(f"is of another model: this one has {vocab_size} tokens")
        for task in found.tasks:
            n = len(task.token_ids) + NUM_TASK_TOKENS
            if not task.token_ids or not task.word or n > max_len:
                raise bad(f"has an empty task, or one of {n} tokens; max_model_len is {max_len}")
            if not all(0 <= t < vocab_size for t in task.token_ids):
                raise bad(f"is of another model: this one has {vocab_size} tokens")
        return found


class SelfCheckResult(msgspec.Struct, frozen=True):
    """Result of one check: rows of each sequence, and the fraction of solved tasks."""

    version: str
    rows: list[list[Row]]
    tasks: float | None


class SelfCheck:
    """The self-check of one server, as an `IdleCheck`. `run` ends when it is cancelled."""

    name = "self_check"

    def __init__(self, state: ServerState, path: str, every_s: float) -> None:
        engine = state.engine
        self._state, self._every_s = state, every_s
        self._fingerprint = Fingerprint.read(
            path,
            vocab_size=engine.description.spec.vocab_size,
            max_len=engine.config.model.max_model_len,
        )
        self._reference = [sequence.rows() for sequence in self._fingerprint.sequences]
        self._own: dict[str, list[list[Row]]] = {}  # results of each version's first check
        self._began: str | None = None  # weight version at the start
        self._asking: asyncio.Task[SelfCheckResult | None] | None = None
        self.versions: dict[str, VersionCheck] = {}
        self.ok: bool | None = None  # None: not checked yet
        self.num_looks = {"pass": 0, "fault": 0, "interrupted": 0}
        self._new_kl: float | None = None

    async def run(self) -> None:
        while True:
            try:
                if self._began is None:
                    self._began = (await self._state.engine.stats()).weight_version or None
                await self._idle()
                await self.look()
            except (SlipstreamError, TimeoutError) as error:  # asleep or dead
                _logger.warning("the self-check could not look: %s", error or "no answer")
            except Exception:
                _logger.exception("the self-check could not look")
            await asyncio.sleep(self._every_s)

    async def interrupt(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.wait([self._asking])

    async def look(self) -> bool | None:
        """Check, and repeat if the result is bad. Returns whether it is good; None: interrupted."""
        for attempt in range(2):
            self._asking = asyncio.create_task(self._answers())
            try:
                await asyncio.wait([self._asking])
            finally:
                self._asking.cancel()  # if the server ends
            seen = None if self._asking.cancelled() else self._asking.result()
            if seen is None:
                self.num_looks["interrupted"] += 1
                return None
            is_good = self._note(seen)
            self.num_looks["pass" if is_good else "fault"] += 1
            if is_good or attempt:
                self._tell(is_good, seen.version)
                return is_good
        return None

    def report(self) -> list[VersionCheck]:
        """Results by weight version, oldest first."""
        return list(self.versions.values())

    def take_kl(self) -> float | None:
        found, self._new_kl = self._new_kl, None
        return None if found is None else max(MIN_KL, found)

    def families(self) -> Iterator[Metric]:
        for name, text, value in SCORES:
            gauge = GaugeMetricFamily(
                f"slipstream:self_check_{name}",
                f"{text} of the last self-check, by version of the weights",
                labels=["version"],
            )
            for version, check in self.versions.items():
                if (score := value(check)) is not None:
                    gauge.add_metric([version], score)
            yield gauge
        if self.ok is not None:
            text = "0 if the last two self-checks failed"
            yield GaugeMetricFamily("slipstream:self_check_ok", text, float(self.ok))
        looks = CounterMetricFamily(
            "slipstream:self_checks", "Self-checks, by outcome", labels=["outcome"]
        )
        for outcome, count in self.num_looks.items():
            looks.add_metric([outcome], count)
        yield looks

    # --- Asking -------------------------------------------------------------------------------

    async def _idle(self) -> None:
        quiet = 0.0
        while quiet < IDLE_S:
            await asyncio.sleep(IDLE_S / 4)
            quiet = quiet + IDLE_S / 4 if await _is_free(self._state) else 0.0

    async def _answers(self) -> SelfCheckResult | None:
        """The engine's answers to the sequences; None if a client's request or a weight update
        interrupted it."""
        versions, rows, done = set[str](), list[list[Row]](), list[bool]()
        engine = self._state.engine
        for sequence in self._fingerprint.sequences:
            if not await _is_free(self._state):
                return None
            answer = await _rows(engine, sequence.token_ids)
            if answer is None:
                return None
            versions.add(answer[0])
            rows.append(answer[1])
        for task in self._fingerprint.tasks if engine.tokenizer is not None else ():
            if not await _is_free(self._state):
                return None
            told = await _told(engine, task.token_ids)
            if told is None:
                return None
            versions.add(told[0])
            done.append(task.word in told[1])
        tasks = sum(done) / len(done) if done else None
        return SelfCheckResult(versions.pop(), rows, tasks) if len(versions) == 1 else None

    def _note(self, seen: SelfCheckResult) -> bool:
        version = seen.version
        self._began = self._began or version
        against = self._reference
        if version != self._began:
            against = self._own.setdefault(version, seen.rows)
        pairs = [
            (row, own)
            for rows, others in zip(against, seen.rows, strict=True)
            for row, own in zip(rows, others, strict=False)
        ]
        kl = sum(divergence(row, own) for row, own in pairs) / len(pairs)
        same = sum(
            max(row, key=row.__getitem__) == max(own, key=own.__getitem__) for row, own in pairs
        )
        agreement, now = same / len(pairs), time.time()
        self._new_kl = kl
        is_good = kl <= self._fingerprint.max_kl and agreement >= MIN_AGREEMENT
        look = Look(time=now, kl=kl, top1_agreement=agreement, tasks=seen.tasks, is_good=is_good)
        before = self.versions.pop(version, None)
        self.versions[version] = VersionCheck(
            version=version,
            against="the fingerprint" if version == self._began else "its own first look",
            num_looks=1 if before is None else before.num_looks + 1,
            num_bad=(0 if before is None else before.num_bad) + (not is_good),
            kl_first=kl if before is None else before.kl_first,
            kl_last=kl,
            kl_max=kl if before is None else max(kl, before.kl_max),
            top1_agreement=agreement,
            tasks=seen.tasks,
            first_time=now if before is None else before.first_time,
            last_time=now,
            looks=thinned([*([] if before is None else before.looks), look]),
        )
        while len(self.versions) > MAX_VERSIONS:
            gone = next(iter(self.versions))
            del self.versions[gone]
            self._own.pop(gone, None)
        return is_good

    def _tell(self, is_good: bool, version: str) -> None:
        before, self.ok = self.ok, is_good
        check = self.versions[version]
        if not is_good and before is not False:
            _logger.error(
                "the self-check fails: KL %.3g nats from %s, at most %g; %.0f %% of likeliest tokens "
                "are the same; weights %s",
                check.kl_last,
                check.against,
                self._fingerprint.max_kl,
                100 * check.top1_agreement,
                version,
            )
        elif is_good and before is False:
            _logger.info("the self-check is good again: KL %.3g nats", check.kl_last)


SCORES: tuple[tuple[str, str, Callable[[VersionCheck], float | None]], ...] = (
    ("kl", "KL in nats", lambda check: check.kl_last),
    (
        "agreement",
        "Share of likeliest tokens that are the same",
        lambda check: check.top1_agreement,
    ),
    ("tasks", "Share of the fingerprint's tasks that were done", lambda check: check.tasks),
)
"""Metrics of a version's last check: (name, description, value)."""


def thinned(looks: list[Look]) -> list[Look]:
    """The checks, thinned to `MAX_LOOKS` over the whole time: the two neighbours closest in time,
    except the last one, are merged to one with the worse of each value."""
    while len(looks) > MAX_LOOKS:
        at = min(range(len(looks) - 2), key=lambda i: looks[i + 1].time - looks[i].time)
        looks = [*looks[:at], _worse(looks[at], looks[at + 1]), *looks[at + 2 :]]
    return looks


def _worse(a: Look, b: Look) -> Look:
    tasks = [look.tasks for look in (a, b) if look.tasks is not None]
    return Look(
        time=max(a, b, key=lambda look: (not look.is_good, look.kl)).time,
        kl=max(a.kl, b.kl),
        top1_agreement=min(a.top1_agreement, b.top1_agreement),
        tasks=min(tasks, default=None),
        is_good=a.is_good and b.is_good,
    )


async def _is_free(state: ServerState) -> bool:
    engine = state.engine
    if engine.num_requests or engine.is_sleeping or state.draining:
        return False
    return not (await engine.stats()).is_paused


async def _deltas(
    engine: EngineProtocol, prompt: list[int], sampling: SamplingParams
) -> list[RequestOutput] | None:
    """The deltas of an answer. None if another request arrives; this one is then cancelled."""
    stream, found = OutputStream(), list[RequestOutput]()
    cancel = await engine.submit({"prompt_token_ids": prompt}, sampling, stream)
    try:
        while not found or not found[-1].finished:
            async with asyncio.timeout(TIMEOUT_S):  # a paused engine runs no steps
                found.append(await stream.get())
            if engine.num_requests > 1:
                return None
    finally:
        cancel()
    return found


def _version(deltas: list[RequestOutput]) -> str:
    """The weight version reported with the last token."""
    found = [v for delta in deltas for v, _ in delta.outputs[0].weight_versions or ()]
    return found[-1] if found else ""


async def _told(engine: EngineProtocol, prompt: list[int]) -> tuple[str, str] | None:
    """(weight version, text of the greedy answer). None if another request arrives."""
    sampling = SamplingParams(temperature=0, max_tokens=NUM_TASK_TOKENS, detokenize=False)
    deltas = await _deltas(engine, prompt, sampling)
    if deltas is None or engine.tokenizer is None:
        return None
    token_ids = [t for delta in deltas for t in delta.outputs[0].token_ids]
    return _version(deltas), engine.tokenizer.decode(token_ids)


async def _rows(engine: EngineProtocol, token_ids: Sequence[int]) -> tuple[str, list[Row]] | None:
    """(weight version, most likely tokens after each token but the last, as far as generated tokens
    equal the given ones). None if another request arrives."""
    prompt = list(token_ids[:-NUM_DECODED])
    sampling = SamplingParams(
        temperature=0,
        max_tokens=NUM_DECODED,
        logprobs=NUM_ASKED,
        prompt_logprobs=NUM_ASKED,
        ignore_eos=True,
        detokenize=False,
    )
    deltas = await _deltas(engine, prompt, sampling)
    if deltas is None:
        return None
    rows, answer = list[Row](), list[int]()
    for delta in deltas:
        output = delta.outputs[0]
        if delta.prompt_logprobs is not None:
            rows = [_row(p) for p in delta.prompt_logprobs if p is not None] + rows
        rows += [_row(p) for p in output.logprobs or ()]
        answer += output.token_ids
    wanted = token_ids[-NUM_DECODED:]
    same = next(
        (i for i, (a, b) in enumerate(zip(answer, wanted, strict=False)) if a != b), NUM_DECODED
    )
    return _version(deltas), rows[: len(prompt) - 1 + same + 1]


def _row(position: PositionLogprobs) -> Row:
    # LEAST also for NaN: broken weights differ from every model
    return {entry.token_id: max(LEAST, entry.logprob) for entry in position.top}


def divergence(reference: Row, seen: Row) -> float:
    """Lower bound of KL(reference‖server) from two rows of most likely tokens, over the reference's
    tokens and one bucket for all others.

    A token that the server did not list has at most the probability of the last one listed. Within
    that limit the other tokens are assumed as close to the reference as possible.
    """
    known, last = reference.keys() & seen.keys(), min(seen.values())
    kl = sum(math.exp(reference[t]) * (reference[t] - seen[t]) for t in known)
    rest, other = (1 - sum(math.exp(row[t]) for t in known) for row in (reference, seen))
    for logprob in sorted((reference[t] for t in reference.keys() - known), reverse=True):
        p = math.exp(logprob)
        # its part of the bucket, like that of all less likely tokens
        if p * other <= math.exp(last) * rest:
            break
        kl += p * (logprob - last)
        rest, other = rest - p, other - math.exp(last)
    if rest > 1e-6:
        kl += rest * math.log(rest / max(other, math.exp(LEAST)))
    return max(0.0, kl)
