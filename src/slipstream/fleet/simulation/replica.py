"""A coarse replica on a virtual clock: continuous batching with a prefix cache, and the planner's
step costs.

It differs from the planner's (`simulate/simulator.py`), which plans each step with the engine's
scheduler and takes ten times as long:

1. A series of decode-only steps is one event, with the step time of its middle.
2. The cache has blocks of `PREFIX_TOKENS` tokens, in the engine's own pool. A request holds the
   blocks of its prompt and answer from its start, so nothing is preempted.
3. Prompts are computed in their order; sequences that decode come first.

Times are in seconds from the start.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence

from slipstream.core.cache.block_pool import BlockPool
from slipstream.costs.step_cost import StepCounts, attention_pairs
from slipstream.simulate.simulator import SimulatedEngine
from slipstream.simulate.traffic import PREFIX_TOKENS


class Prompt:
    """A request at a replica."""

    __slots__ = (
        *("index", "input_tokens", "output_tokens", "keys"),
        *("blocks", "num_cached", "num_computed"),
    )

    def __init__(
        self, index: int, input_tokens: int, output_tokens: int, keys: Sequence[bytes]
    ) -> None:
        self.index, self.keys = index, keys
        self.input_tokens, self.output_tokens = input_tokens, output_tokens
        self.blocks: list[int] = []
        self.num_cached = self.num_computed = 0


class CoarseReplica:
    """A coarse simulated replica. `first` and `end` are called with a request and the time of its first or last token."""

    def __init__(
        self,
        engine: SimulatedEngine,
        first: Callable[[Prompt, float], None],
        end: Callable[[Prompt, float], None],
        *,
        at: float = 0.0,
    ) -> None:
        self._cost, self._first, self._end = engine.cost, first, end
        self._padded = engine.padded
        scheduling = engine.scheduling
        self._max_seqs = scheduling.max_num_seqs
        self._budget = scheduling.max_num_batched_tokens
        self._mixed_budget = scheduling.max_num_mixed_tokens
        self.max_model_len = engine.max_model_len
        self.pool = BlockPool(
            max(2, 1 + (engine.num_blocks - 1) * engine.cache.block_size // PREFIX_TOKENS)
        )
        self.pool.listen(on=True)
        self.now = at  # start of the current step, or series of decode steps
        self.next_at = math.inf  # end of the current step or series
        self.computed_tokens = self.cached_tokens = 0
        self.busy_s = 0.0
        self._steps = 0
        # duration of a decode step in the series; 0: a step with prompts is running
        self._step_s = 0.0
        # by the index of the step after which they end
        self._decoding: list[tuple[int, int, Prompt]] = []
        self._context = 0  # cached tokens of decoding sequences
        self._waiting: deque[Prompt] = deque()
        self._prefilling: deque[Prompt] = deque()
        self._ending: list[Prompt] = []  # prompts that the current step completes
        self._chunk: list[tuple[Prompt, int]] = []

    @property
    def num_running(self) -> int:
        return len(self._decoding) + len(self._prefilling)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_open(self) -> int:
        return len(self._decoding) + len(self._prefilling) + len(self._waiting)

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens not yet computed."""
        queue = itertools.chain(self._prefilling, self._waiting)
        return sum(p.input_tokens - p.num_computed for p in queue)

    @property
    def usage(self) -> float:
        """Fraction of the blocks that requests hold."""
        return 1 - self.pool.num_free / self.pool.num_usable

    def fits(self, prompt: Prompt) -> bool:
        return (
            prompt.input_tokens + prompt.output_tokens <= self.max_model_len
            and _num_blocks(prompt) <= self.pool.num_usable
        )

    def add(self, prompt: Prompt, at: float) -> None:
        """Add a request that `fits`."""
        self._waiting.append(prompt)
        if self.next_at == math.inf:
            self.now = max(self.now, at)
            self._begin_step()
        elif self._step_s:  # it waits for the end of the current decode step
            done = min(
                math.ceil((at - self.now) / self._step_s), self._decoding[0][0] - self._steps
            )
            self.next_at = self.now + max(1, done) * self._step_s

    def advance(self) -> None:
        """Advance to `next_at`, the end of a step or of a series of decode steps."""
        now = self.next_at
        self.busy_s += now - self.now
        num = round((now - self.now) / self._step_s) if self._step_s else 1
        self.now = now
        self._steps += num
        self._context += num * len(self._decoding)
        for prompt, count in self._chunk:
            prompt.num_computed += count
        self._chunk = []
        decoding = self._decoding
        while decoding and decoding[0][0] <= self._steps:
            _, _, prompt = heapq.heappop(decoding)
            self._context -= prompt.input_tokens + prompt.output_tokens - 1
            self._finish(prompt, now)
        for prompt in self._ending:
            self._prefilling.popleft()
            self._first(prompt, now)
            if prompt.output_tokens == 1:
                self._finish(prompt, now)
                continue
            end = self._steps + prompt.output_tokens - 1
            heapq.heappush(decoding, (end, prompt.index, prompt))
            self._context += prompt.input_tokens
        self._ending = []
        self._begin_step()

    def take_changes(self) -> tuple[list[bytes], list[bytes]]:
        """Keys of blocks (cached, forgotten) since the last call."""
        changes = self.pool.changes
        if not changes:
            return [], []
        stored = [key for key, is_cached in changes.items() if is_cached]
        removed = [key for key, is_cached in changes.items() if not is_cached]
        changes.clear()
        return stored, removed

    def _finish(self, prompt: Prompt, now: float) -> None:
        self.pool.release(prompt.blocks)
        self._end(prompt, now)

    def _begin_step(self) -> None:
        num_decodes = len(self._decoding)
        room = (self._mixed_budget if num_decodes else self._budget) - num_decodes
        num_tokens = num_prompts = pairs = 0
        for prompt in self._prefilling:
            room = self._take(prompt, room)
        while room > 0 and self._waiting and self.num_running < self._max_seqs:
            prompt = self._waiting[0]
            if not self._admit(prompt):
                break
            self._prefilling.append(self._waiting.popleft())
            room = self._take(prompt, room)
        for prompt, count in self._chunk:
            num_tokens += count
            num_prompts += 1
            pairs += attention_pairs(prompt.num_computed, count)
        if num_tokens:
            self._step_s = 0.0
            shape = StepCounts(
                num_decodes,
                self._context + num_decodes,
                num_tokens,
                num_prompts,
                pairs,
                num_decodes + len(self._ending),
            )
            self.next_at = self.now + self._seconds(shape)
        elif num_decodes:
            num = max(1, self._decoding[0][0] - self._steps)
            context = self._context + num_decodes * (num + 1) // 2
            self._step_s = self._seconds(StepCounts(num_decodes, context, num_sampled=num_decodes))
            self.next_at = self.now + num * self._step_s
        else:
            self.next_at = math.inf

    def _seconds(self, shape: StepCounts) -> float:
        host = self._cost.host.seconds(shape.num_decodes + shape.num_prompts)
        if self._padded is not None:
            of_graph = self._padded(shape.num_decodes, shape.num_prompt_tokens, shape.num_prompts)
            if of_graph is None:
                host += self._cost.host.launch_s
            else:
                shape = shape._replace(num_decodes=of_graph[0], num_prompt_tokens=of_graph[1])
        return max(self._cost.seconds(shape), host)

    def _take(self, prompt: Prompt, room: int) -> int:
        """Add tokens of a prompt to the step. Returns how many more tokens fit into the step."""
        left = prompt.input_tokens - prompt.num_computed
        count = min(left, room)
        if count > 0:
            self._chunk.append((prompt, count))
            self.computed_tokens += count
            # Later prompts of the same step find its blocks, as in the engine.
            first, full = (
                n // PREFIX_TOKENS for n in (prompt.num_computed, prompt.num_computed + count)
            )
            for i in range(first, min(full, len(prompt.keys))):
                self.pool.register(prompt.blocks[i], prompt.keys[i])
            if count == left:
                self._ending.append(prompt)
        return room - count

    def _admit(self, prompt: Prompt) -> bool:
        """Allocate a prompt's cached blocks, and free ones for the rest. False if there are too few."""
        pool, keys = self.pool, prompt.keys
        # At least two tokens are left to compute, as by the engine's `longest_hit`.
        most = max(0, prompt.input_tokens - 2) // PREFIX_TOKENS
        cached = pool.chain(keys[:most])
        count = _num_blocks(prompt) - len(cached)
        if count > pool.num_free - pool.num_revived(cached):
            return False
        pool.hold(cached)
        prompt.blocks = [*cached, *pool.allocate(count)]
        prompt.num_cached = prompt.num_computed = len(cached) * PREFIX_TOKENS
        self.cached_tokens += prompt.num_cached
        return True


def _num_blocks(prompt: Prompt) -> int:
    return -(-(prompt.input_tokens + prompt.output_tokens) // PREFIX_TOKENS)
