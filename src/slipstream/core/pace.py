"""Decides how many prompt tokens a step may contain alongside decodes, to meet an objective for the time between tokens.

Without an objective only `core.step.chunk_with_decodes` applies. With one, `Pace` does, too:

1. Two running averages tell what fits: the time of steps with decodes alone, and the time that a
   prompt token adds. The latter is kept by the power of two of the token's position, because
   attention makes later tokens dearer, and where steps run in graphs by the graph's size, because
   matrix products work on tiles. Every `PROBE_EVERY`th step with decodes has no prompt tokens.
2. A step takes a fraction of the tokens that fit. The fraction falls by a tenth with each step that took longer than the
   objective, and rises slowly with each other step.
3. A step takes at most twice as many tokens as the largest measured one of such positions, and in
   graphs the next size after it. The first takes `MIN_CHUNK`.
4. If the first prompt in line has waited more than `PATIENCE_S`, a step takes at least the tokens
   that seem to take `MIN_SHARE` of the objective, from 1 to `MIN_CHUNK`; with graphs, what the
   smallest has room for. So prompts progress even where decodes alone exceed the objective.

No clock is read here: the same times give the same budgets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from slipstream.costs.graph_sizes import Padding
from slipstream.messages.steps import ScheduledRequest

MIN_CHUNK = 32
PATIENCE_S = 0.5
MIN_SHARE = 0.25
PROBE_EVERY = 64

MEMORY = 1 / 8
"""Weight of the latest step in the running averages."""

OUTLIER = 4.0
"""Maximum of a measured time, as a multiple of its average.

A longer step compiled a kernel, or the machine did other work.
"""

RISE, FALL = 0.005, 0.9
"""Change of the fraction that a step takes: added after a step in time, multiplied after a late one."""

MARGIN = 0.99
"""Fraction of the objective that steps aim at, since times vary."""

UNTRIED = 1.18
"""Assumed time of a graph size without measurements, relative to the next smaller size.

Larger graphs take less where their tokens fit into the same tiles. A size that is never tried would
never be measured. A token takes at least what it took at earlier positions.
"""


class TokenCost:
    """Running average of the seconds of a token, over all tokens of recent steps.

    Large steps count more than small ones, whose times are mostly noise.
    """

    def __init__(self) -> None:
        self._seconds = self._num_tokens = 0.0
        self.largest = 0  # tokens of the largest measured step

    @property
    def value(self) -> float:
        return self._seconds / self._num_tokens if self._num_tokens else 0.0

    def add(self, seconds: float, num_tokens: int = 1) -> None:
        if self._seconds:
            seconds = min(seconds, OUTLIER * self.value * num_tokens)
        self._seconds += seconds - MEMORY * self._seconds
        self._num_tokens += num_tokens - MEMORY * self._num_tokens
        self.largest = max(self.largest, num_tokens)


class PacedStep(NamedTuple):
    """A step in flight. Tokens are counted as its graph pads them."""

    begin: float
    num_decodes: int
    num_tokens: int  # prompt tokens
    position: int  # mean position at which they begin


class Pace:
    """Chooses the prompt tokens of steps with decodes, to keep `target_s` seconds between tokens."""

    def __init__(self, target_s: float, padded: Padding | None = None) -> None:
        """`padded` maps a step to its graph's size; None if steps compute exactly their tokens."""
        self.target_s = target_s
        self._padded = padded
        self._plain = TokenCost()  # seconds of a step without prompts
        # seconds that a prompt token adds, by its position and the graph's size (0: none)
        self._added: dict[tuple[int, int], TokenCost] = {}
        self._share = 1.0
        self._in_flight: dict[int, PacedStep] = {}
        self._last_end = float("-inf")
        # steps with decodes and prompts since the last one without prompts
        self._since_probe = PROBE_EVERY

    def launched(
        self, step_id: int, now: float, num_decodes: int, longer: Sequence[ScheduledRequest]
    ) -> None:
        """Note a step. `longer` are its requests with more than one token.

        A request that samples at every token verifies drafts; its tokens count as decodes.
        """
        prompts = [s for s in longer if s.num_sampled < s.num_tokens]
        num_tokens = sum(s.num_tokens for s in prompts)
        positions = sum(s.num_tokens * s.num_computed_tokens for s in prompts)
        num_decodes += sum(s.num_tokens for s in longer) - num_tokens
        mean = positions // max(1, num_tokens)
        if self._padded is not None:
            in_graph = self._padded(num_decodes, num_tokens, len(prompts))
            num_decodes, num_tokens = in_graph or (num_decodes, num_tokens)
        self._in_flight[step_id] = PacedStep(now, num_decodes, num_tokens, mean)
        if num_decodes:
            self._since_probe = self._since_probe + 1 if num_tokens else 0

    def ended(self, step_id: int, now: float, *, is_cold: bool = False) -> None:
        """Learn from an ended step, unless it `is_cold` (as in `StepResult`).

        Its time runs from its launch, or from the end of the previous step if that is later, to its
        end.
        """
        if (step := self._in_flight.pop(step_id, None)) is not None and not is_cold:
            self._learn(step, now - max(step.begin, self._last_end))
        self._last_end = now

    def _learn(self, step: PacedStep, seconds: float) -> None:
        if not step.num_tokens:
            self._plain.add(seconds)
            return
        added = max(0.0, seconds - self._plain.value)
        position = _bucket(step.position)
        size = step.num_tokens if self._is_of_graph(step) else 0
        for key in {(position, 0), (position, size)}:
            self._added.setdefault(key, TokenCost()).add(added, step.num_tokens)
        if step.num_decodes and seconds > MARGIN * self.target_s:
            self._share *= FALL
        elif step.num_decodes:
            self._share = min(1.0, self._share + RISE)

    def forget_steps(self) -> None:
        """Drop the steps in flight, which will not end."""
        self._in_flight.clear()

    def prompt_tokens(
        self, num_decodes: int, longer: Sequence[ScheduledRequest], computed: int, age_s: float
    ) -> int:
        """Number of prompt tokens that may join a step with `num_decodes` and `longer`.

        The first prompt in line has `computed` computed tokens and arrived `age_s` seconds ago.
        """
        if self._since_probe >= PROBE_EVERY - 1:
            return 0
        known = self._added.get((_bucket(computed), 0)) or TokenCost()
        most = max(MIN_CHUNK, 2 * known.largest)
        seconds = self._share * (MARGIN * self.target_s - self._plain.value)
        fits, least = _within(seconds, known, most), 1
        if self._padded is not None:
            num_decodes += sum(s.num_tokens for s in longer if s.num_sampled == s.num_tokens)
            fits, least = self._graph_within(seconds, num_decodes, computed, known.largest, fits)
        if age_s < PATIENCE_S:
            return fits
        return max(fits, least, _within(self.target_s * MIN_SHARE, known, MIN_CHUNK))

    def _is_of_graph(self, step: PacedStep) -> bool:
        """True if the step has a graph's exact size, which steps with fewer tokens share."""
        if self._padded is None or step.num_tokens < 2:
            return False
        fewer = self._padded(step.num_decodes, step.num_tokens - 1, 1)
        return fewer is not None and fewer[1] == step.num_tokens

    def _graph_within(
        self, seconds: float, num_decodes: int, computed: int, largest: int, fits: int
    ) -> tuple[int, int]:
        """Prompt tokens of the largest graph within `seconds`, and of the smallest.

        The next size after the `largest` measured one is the last. Beyond the graphs, `fits` holds.
        """
        assert self._padded is not None
        found = least = size = 0
        cost = 0.0
        while size <= largest or not least:
            if (larger := self._padded(num_decodes, size + 1, 1)) is None:
                return max(found, fits if fits > size else 0), least or 1
            assumed = UNTRIED * cost * size / larger[1]
            size = larger[1]
            least = least or size
            known = self._added.get((_bucket(computed), size))
            cost = max(assumed, self._earlier(computed, size)) if known is None else known.value
            if cost * size <= seconds:
                found = size
        return found, least

    def _earlier(self, computed: int, size: int) -> float:
        """Seconds of a token in a graph of `size` at the last positions before `computed` with a measurement; 0 without."""
        for position in range(_bucket(computed) - 1, -1, -1):
            if (known := self._added.get((position, size))) is not None:
                return known.value
        return 0.0


def _bucket(position: int) -> int:
    """Number of a range of positions at which a token costs about as much, by powers of two."""
    return (position // 1024).bit_length()


def _within(seconds: float, added: TokenCost, most: int) -> int:
    """Number of tokens, at most `most`, that take `seconds`; `most` if they seem to take no time."""
    if seconds <= 0:
        return 0
    return most if seconds >= most * added.value else int(seconds / added.value)
