"""Schedulers of texts for embeddings or scores. No torch.

1. An encoder reads a text in one step and stores no state, so `TextScheduler` has no blocks, rows
   or preemption. A step takes as many whole texts as fit, in order of (priority, arrival). The
   texts of a call stay one request from the tokenizer to the answer. Each text costs one
   comparison; everything else is done once per request and step.
2. A decoder computes texts in chunks, and they share cached prefixes, like prompts. `TextSequences`
   turns each text into a request of the decoder's scheduler and joins their answers.
"""

from __future__ import annotations

import heapq
import time
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any, Protocol

from slipstream.config import CacheConfig, SchedulingConfig
from slipstream.errors import ContextLengthError, EngineOverloadedError, RequestError
from slipstream.messages.finish_reason import FinishReason
from slipstream.messages.outputs import EngineOutput, StepOutput
from slipstream.messages.requests import EngineRequest
from slipstream.messages.stats import SchedulerStats
from slipstream.messages.steps import Plan, StepResult
from slipstream.messages.texts import TextsPlan, TextsRequest, TextVectors, VectorOutput
from slipstream.params.sampling import SamplingParams

UNSAMPLED = SamplingParams(max_tokens=1, temperature=0.0)


class Steps(Protocol):
    """The engine's interface to a scheduler. `Scheduler` documents the methods."""

    def schedule(self) -> Plan | None: ...
    def update(self, plan: Any, result: StepResult) -> list[StepOutput]: ...
    def abort(
        self, request_ids: Iterable[str], reason: FinishReason = ...
    ) -> list[EngineOutput]: ...
    def fail_all(self, reason: FinishReason, error: str) -> list[EngineOutput]: ...
    def drain_outputs(self) -> list[EngineOutput]: ...
    def next_wakeup(self) -> float | None: ...
    def reset_prefix_cache(self) -> None: ...
    def stats(self) -> SchedulerStats: ...
    @property
    def has_requests(self) -> bool: ...


class _Texts:
    """A request in progress.

    Texts [0, num_planned) are in steps; texts [0, num_done) have their vectors.
    """

    __slots__ = ("first_blocks", "num_done", "num_planned", "num_texts", "spec", "starts")

    def __init__(self, spec: TextsRequest, block_size: int) -> None:
        self.spec = spec
        lengths = int32(spec.lengths)
        self.num_texts = len(lengths)
        # [N + 1]: text i has tokens starts[i] … starts[i + 1] − 1
        self.starts = [0, *accumulate(lengths)]
        # the same in blocks
        self.first_blocks = [0, *accumulate([-(-n // block_size) for n in lengths])]
        self.num_planned = self.num_done = 0


class TextScheduler:
    """An encoder's scheduler. `num_blocks`: size of its scratch cache, null block included."""

    def __init__(
        self,
        scheduling: SchedulingConfig,
        cache: CacheConfig,
        *,
        max_model_len: int,
        num_blocks: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scheduling = scheduling
        self.num_usable = num_blocks - 1
        self._block_size = cache.block_size
        self._longest = min(
            max_model_len, scheduling.max_num_batched_tokens, self.num_usable * cache.block_size
        )
        self._clock = clock
        self._requests: dict[str, _Texts] = {}
        # heap of requests with texts not yet in a step
        self._waiting: list[tuple[int, float, int, _Texts]] = []
        # (request, its first text, end) by step
        self._in_flight: dict[int, list[tuple[_Texts, int, int]]] = {}
        self._batch = 0  # texts that may still join the open batch, unless the policy is "inflight"
        self._counter = self._step_id = 0

    def add(self, spec: TextsRequest) -> None:
        """Queue a request.

        Raises EngineOverloadedError if its texts do not fit into the queue, and ContextLengthError
        if one of them could never run.
        """
        texts, max_queue = _Texts(spec, self._block_size), self.scheduling.max_queue
        if spec.request_id in self._requests:
            raise RequestError(
                f"request_id {spec.request_id!r} is in use; choose another", field="request_id"
            )
        if max_queue is not None and self.num_waiting + texts.num_texts > max_queue:
            raise EngineOverloadedError(
                f"{self.num_waiting} texts are waiting already, and {texts.num_texts} more would exceed max_queue; "
                "try again later"
            )
        longest = max(int32(spec.lengths), default=0)
        if longest > self._longest:
            raise ContextLengthError(
                f"a text has {longest} tokens, and a step holds {self._longest}; shorten it",
                field="prompt",
            )
        self._counter += 1
        self._requests[spec.request_id] = texts
        heapq.heappush(self._waiting, (spec.priority, spec.arrival, self._counter, texts))

    def abort(
        self, request_ids: Iterable[str], reason: FinishReason = FinishReason.ABORT
    ) -> list[EngineOutput]:
        """End requests now. Their results of steps in flight are dropped. Unknown ids are ignored."""
        return self._end([i for i in request_ids if i in self._requests], reason)

    def fail_all(self, reason: FinishReason, error: str) -> list[EngineOutput]:
        """End all requests after a step failed.

        Results of steps in flight are not expected any more.
        """
        self._in_flight.clear()
        return self._end(list(self._requests), reason, error)

    def _end(
        self, request_ids: Sequence[str], reason: FinishReason, error: str | None = None
    ) -> list[EngineOutput]:
        for request_id in request_ids:
            del self._requests[request_id]
        self._waiting = [
            entry for entry in self._waiting if entry[3].spec.request_id in self._requests
        ]
        heapq.heapify(self._waiting)
        self._batch = min(self._batch, self.num_waiting)
        return [
            VectorOutput(request_id, finish_reason=reason, error=error)
            for request_id in request_ids
        ]

    @property
    def has_requests(self) -> bool:
        return bool(self._requests)

    @property
    def num_running(self) -> int:
        """Number of texts in steps in flight."""
        return sum(texts.num_planned - texts.num_done for texts in self._requests.values())

    @property
    def num_waiting(self) -> int:
        return sum(texts.num_texts - texts.num_planned for texts in self._requests.values())

    def drain_outputs(self) -> list[EngineOutput]:
        return []

    def reset_prefix_cache(self) -> None:
        """Do nothing: there is no prefix cache."""

    # --- A step -------------------------------------------------------------------------------------------------------

    def schedule(self) -> TextsPlan | None:
        """Plan the next step with as many whole texts as it holds.

        None if no text may be computed now.
        """
        scheduling = self.scheduling
        tokens, blocks = scheduling.max_num_batched_tokens, self.num_usable
        room = min(scheduling.max_num_seqs, self._may_join(self._clock()))
        parts: list[tuple[_Texts, int, int]] = []
        while self._waiting and room:
            texts = self._waiting[0][3]
            if parts and texts.spec.task != parts[0][0].spec.task:
                break  # a step has only one task
            first, starts, first_blocks = texts.num_planned, texts.starts, texts.first_blocks
            end = min(
                first + room,
                bisect_right(starts, starts[first] + tokens) - 1,
                bisect_right(first_blocks, first_blocks[first] + blocks) - 1,
            )
            if end == first:
                break
            parts.append((texts, first, end))
            texts.num_planned = end
            room -= end - first
            tokens -= starts[end] - starts[first]
            blocks -= first_blocks[end] - first_blocks[first]
            if end == texts.num_texts:
                heapq.heappop(self._waiting)
        if not parts:
            return None
        if scheduling.policy != "inflight":
            self._batch -= sum(end - first for _, first, end in parts)
        self._step_id += 1
        self._in_flight[self._step_id] = parts
        return TextsPlan(
            self._step_id,
            b"".join(
                [
                    t.spec.token_ids[4 * t.starts[first] : 4 * t.starts[end]]
                    for t, first, end in parts
                ]
            ),
            b"".join([t.spec.lengths[4 * first : 4 * end] for t, first, end in parts]),
            # A text that is no pair belongs entirely to the first part.
            b"".join(
                [
                    (t.spec.num_first or t.spec.lengths)[4 * first : 4 * end]
                    for t, first, end in parts
                ]
            )
            if any(t.spec.num_first for t, _, _ in parts)
            else b"",
            parts[0][0].spec.task,
        )

    def _may_join(self, now: float) -> int:
        """Number of texts that may join steps now.

        Batches that wait for their end are baselines; see `core.policy`.
        """
        scheduling, waiting = self.scheduling, self.num_waiting
        if scheduling.policy == "inflight":
            return waiting
        if not self._batch and not self.num_running and waiting:
            full, opens = waiting >= scheduling.max_num_seqs, self.next_wakeup()
            if full or opens is None or now >= opens:
                self._batch = min(waiting, scheduling.max_num_seqs)
        return self._batch

    def next_wakeup(self) -> float | None:
        """Time at which a batch starts without any other event; None if never."""
        if (
            self.scheduling.policy != "dynamic"
            or not self._waiting
            or self._batch
            or self.num_running
        ):
            return None
        return self._waiting[0][3].spec.arrival + self.scheduling.batch_window_s

    def update(self, plan: TextsPlan, result: StepResult) -> list[StepOutput]:
        """Process a step's vectors. A request ends with its last text."""
        outputs: list[StepOutput] = []
        (found,) = result.extras
        assert isinstance(found, TextVectors)
        num_rows = plan.num_tokens if found.per_token else len(plan.lengths) // 4
        width, begin = len(found.vectors) // num_rows, 0
        for texts, first, end in self._in_flight.pop(plan.step_id, ()):
            rows = texts.starts[end] - texts.starts[first] if found.per_token else end - first
            request_id = texts.spec.request_id
            vectors = found.vectors[begin : begin + width * rows]
            begin += len(vectors)
            if self._requests.get(request_id) is not texts:
                continue  # aborted meanwhile
            texts.num_done = end
            reason = None
            if end == texts.num_texts:
                reason = FinishReason.STOP
                del self._requests[request_id]
            outputs.append(VectorOutput(request_id, vectors, first, end - first, reason))
        return outputs

    def stats(self) -> SchedulerStats:
        usable = self.num_usable
        return SchedulerStats(
            num_running=self.num_running,
            num_waiting=self.num_waiting,
            num_blocks=usable,
            num_free_blocks=usable,
        )


class TextSequences:
    """Requests of texts for a decoder.

    Each text becomes a request of its scheduler with its own id.
    """

    def __init__(self) -> None:
        self._left: dict[str, set[str]] = {}  # texts without an answer, by request
        # (request, index of the text) by id of the text's engine request
        self._places: dict[str, tuple[str, int]] = {}

    def split(self, spec: TextsRequest) -> list[EngineRequest]:
        """Make an engine request of each text."""
        starts = [0, *accumulate(int32(spec.lengths))]
        token_ids = int32(spec.token_ids).tolist()
        found = [
            EngineRequest(
                request_id=f"{spec.request_id}/{i}",
                prompt_token_ids=tuple(token_ids[starts[i] : starts[i + 1]]),
                sampling=UNSAMPLED,
                max_tokens=0,
                arrival=spec.arrival,
                priority=spec.priority,
                cache_salt=spec.cache_salt,
                pooled=True,
            )
            for i in range(len(starts) - 1)
        ]
        self._left[spec.request_id] = {r.request_id for r in found}
        self._places.update({r.request_id: (spec.request_id, i) for i, r in enumerate(found)})
        return found

    def forget(self, request_ids: Iterable[str]) -> list[str]:
        """Ids of the engine requests to abort: those of a request's texts, or the id itself.

        The requests of texts are forgotten.
        """
        found: list[str] = []
        for request_id in request_ids:
            sequences = self._left.pop(request_id, None)
            for sequence in sequences or ():
                del self._places[sequence]
            found += (request_id,) if sequences is None else sequences
        return found

    def joined(self, outputs: list[EngineOutput]) -> list[EngineOutput]:
        """Replace outputs of single texts by outputs of their requests, in place.

        A request ends with the last of its texts, or with the first that fails.
        """
        if not self._places:
            return outputs
        found: list[EngineOutput] = []
        for output in outputs:
            if not isinstance(output, VectorOutput) or output.request_id not in self._places:
                found.append(output)
                continue
            request_id, index = self._places.pop(output.request_id)
            left = self._left[request_id]
            left.discard(output.request_id)
            if not left:
                del self._left[request_id]
            reason = (
                output.finish_reason
                if not left or output.finish_reason is not FinishReason.STOP
                else None
            )
            found.append(
                VectorOutput(
                    request_id, output.vectors, index, output.num_texts, reason, output.error
                )
            )
        return found

    def clear(self) -> None:
        self._left.clear()
        self._places.clear()


def int32(data: bytes) -> array[int]:
    """Decode 32-bit integers in the machine's byte order."""
    return array("i", data)
