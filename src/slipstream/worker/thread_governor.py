"""Chooses how many CPU threads compute steps, while the engine runs.

A step ends when its slowest thread does. If another program takes a core, the thread on that core
delays the others, and one thread fewer can be faster. So decode steps are timed. A step's value is
its time divided by the minimum time of steps with as many tokens and about as many keys. A window
of steps is valued by its median, so that single interruptions don't matter.

1. A window above `SLOWER` starts a trial: a window with one thread fewer. That number of threads is
   kept if it is faster by `MARGIN`.
2. With fewer threads than available, one more gets a trial now and then, and is kept if it is
   faster.
3. A failed trial doubles the wait for the next one, up to `MAX_WAIT` windows.
4. Prompts end a trial with fewer threads, without a verdict. They take far longer than decodes, and
   with few decodes between them a window could last many seconds.

Only speed depends on this: a step's results are bit-identical with any number of threads (csrc/cpu/pool.h).
"""

from __future__ import annotations

from slipstream.kernels.cpu.thread_pool import ThreadPool

WINDOW = 8
"""Steps in a window."""

SLOWER, MARGIN = 1.3, 0.93

AGING = 1.0005
"""Factor by which a minimum time grows with each step, since sequences and their steps grow."""

FIRST_WAIT, MAX_WAIT = 4, 64
"""Windows between two trials."""


class ThreadGovernor:
    """Chooses between 1 and `threads.num_threads` threads."""

    def __init__(self, threads: ThreadPool) -> None:
        self._threads = threads
        # minimum seconds, by tokens of a step and bit length of its number of keys
        self._least: dict[tuple[int, int], float] = {}
        self._window: list[float] = []
        # during a trial: the number of threads to beat, and the value of its window
        self._before: tuple[int, float] | None = None
        self._wait = self._next_wait = FIRST_WAIT
        # whether fewer threads are tried next if both directions may help; they alternate
        self._down = True

    def begin_prompts(self) -> None:
        """End a trial with fewer threads, because a step with prompts begins."""
        if self._before is not None and self._threads.num_used < self._before[0]:
            self._threads.use(self._before[0])
            self._before, self._wait = None, FIRST_WAIT
            self._window.clear()

    def note(self, num_tokens: int, num_keys: int, seconds: float) -> None:
        """Record a decode step's seconds; its sequences have `num_keys` keys in total."""
        size = num_tokens, num_keys.bit_length()
        least = self._least.get(size)
        self._least[size] = seconds if least is None else min(seconds, least * AGING)
        if least is not None:
            self._window.append(seconds / least)
        if len(self._window) == WINDOW:
            found = sorted(self._window)[WINDOW // 2]
            self._window.clear()
            self._judge(found)

    def _judge(self, found: float) -> None:
        used = self._threads.num_used
        if self._before is not None:
            number, other = self._before
            self._before = None
            kept = found < (other if used > number else MARGIN * other)
            if not kept:
                self._threads.use(number)
            self._next_wait = FIRST_WAIT if kept else min(2 * self._next_wait, MAX_WAIT)
            self._wait = self._next_wait
            return
        self._wait -= 1
        if self._wait > 0:
            return
        fewer = found > SLOWER and used > 1
        if used < self._threads.num_threads and not (fewer and self._down):
            self._down = True
            self._try(used + 1, found)
        elif fewer:
            self._down = False
            self._try(used - 1, found)

    def _try(self, num_threads: int, found: float) -> None:
        self._before = self._threads.num_used, found
        self._threads.use(num_threads)
