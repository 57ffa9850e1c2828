"""Decides how many prompt tokens a step may contain alongside decodes.

Without an objective for the time between tokens, `chunk_with_decodes` decides. With one, `Pace`
does:

1. A step's time is predicted as a + b·decodes + c·prompt tokens + d·(prompt tokens × the context
   each attends to). Kalman filters learn the four coefficients from ended steps, since the
   coefficients drift as contexts grow. Old steps count less and less. Steps with decodes only teach
   a and b, so every `PROBE_EVERY`th step with decodes has no prompt tokens. The extra time of steps
   with prompts teaches c and d.
2. Where steps run in graphs of a few sizes, a step counts with the decodes and prompt tokens that
   its graph computes, and takes as many tokens as fit one of the graphs. Matrix products work on
   tiles of about 128 tokens, so times rise with the number of tiles. The time that prompts add is
   therefore a running average per graph size. The coefficients serve for sizes that were not
   measured. The cost of attention is learned within sizes, whose steps differ in nothing else.
3. A step takes as many prompt tokens as the prediction allows within the objective, less twice the
   mean prediction error.
4. A step takes at most twice as many prompt tokens as the largest measured step, since a prediction
   far from all measurements means nothing. The first step has `MIN_CHUNK`.
5. If the first prompt in line has waited more than `PATIENCE_S`, a step takes a minimum number of
   its tokens. This is the number predicted to take `MIN_SHARE` of the objective, from 1 to
   `MIN_CHUNK`; with graphs, it is the smallest graph's room. So prompts progress even where decodes
   alone exceed the objective.

No clock is read here: the same times give the same budgets.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Self

from slipstream.core.request import Request
from slipstream.costs.graph_sizes import Padding
from slipstream.types import ScheduledRequest

MIN_CHUNK = 32
PATIENCE_S = 0.5
MIN_SHARE = 0.25
PROBE_EVERY = 64

FEW_CHUNKS, FEW_REQUESTS = 4, 64
"""Bounds on a small backlog: at most this many chunks of prompt tokens, of this many requests."""

Pair = tuple[float, float]

NUM_DECODES, NUM_TOKENS, ATTENTION = 100.0, 1000.0, 1e6
"""Units of the features, chosen so that each coefficient is about the time of a step."""

NOISE = 0.1
"""Standard deviation of equal steps' times, relative to the time."""

DRIFT = 0.02
"""Relative change of a coefficient from one step to the next."""

NUM_FIRST = 4
"""Number of first steps without outlier detection; their prediction errors are not counted."""

SIZE_MEMORY = 1 / 8
"""Weight of the latest step in the running averages of a graph size."""

ATTENTION_MEMORY = 1 / 256
"""Weight of the latest step in the attention slope, which is learned over all sizes."""

UNTRIED = 0.7
"""Assumed time of a graph size without recent measurements, relative to the prediction.

Larger graphs take less than predicted where their tokens fit into the same tiles. It is below 1
because a size that is never tried would never be measured.
"""

FORGOTTEN = 8192
"""Steps after which a measured size no longer counts: its graph may have been captured since."""

OUTLIER = 4.0
"""Maximum of a step's time, as a multiple of its prediction.

A longer step compiled a kernel, or the machine did other work.
"""


def chunk_with_decodes(num_decodes: int, chunk: int, waiting: Iterable[Request]) -> int | None:
    """Maximum number of prompt tokens in a step with `num_decodes` decodes; None for no limit.

    With a small backlog it is one chunk, or twice the number of decodes, since a step with many
    decodes takes long anyway. With a large backlog there is no limit: the sooner the prompts are
    computed, the better for all. `waiting` are requests with prompt tokens left, and perhaps some
    that have ended since.
    """
    num_tokens = 0
    for i, request in enumerate(islice(waiting, FEW_REQUESTS + 1)):
        num_tokens += request.num_tokens - request.num_computed_tokens
        if i == FEW_REQUESTS or num_tokens > FEW_CHUNKS * chunk:
            return None
    return max(chunk, 2 * num_decodes)


class Filter:
    """Kalman filter (a random walk) for the two coefficients of a time, which are never negative."""

    def __init__(self, deviations: Pair) -> None:
        """`deviations`: initial standard deviations of the coefficients, in seconds."""
        self.coefficients = [0.0, 0.0]
        self._deviations = deviations
        self._variances = [deviations[0] ** 2, deviations[1] ** 2]
        self._covariance = 0.0

    def predict(self, x: Pair) -> float:
        return self.coefficients[0] * x[0] + self.coefficients[1] * x[1]

    def learn(self, x: Pair, seconds: float, noise_s: float) -> None:
        """Learn from a measured time with a standard deviation of `noise_s`."""
        predicted = self.predict(x)
        for i, most in enumerate(self._deviations):
            drift = DRIFT * max(self.coefficients[i], most * predicted / 10)
            self._variances[i] += drift**2
            if self._variances[i] > most**2:
                self._covariance *= most / self._variances[i] ** 0.5
                self._variances[i] = most**2
        (first, second), both = self._variances, self._covariance
        spread = first * x[0] + both * x[1], both * x[0] + second * x[1]
        scale = spread[0] * x[0] + spread[1] * x[1] + noise_s**2
        if not scale:
            return  # a clock that stands still
        for i in (0, 1):
            self.coefficients[i] = max(
                0.0, self.coefficients[i] + spread[i] / scale * (seconds - predicted)
            )
            self._variances[i] -= spread[i] ** 2 / scale
        self._covariance -= spread[0] * spread[1] / scale


@dataclass(frozen=True, slots=True)
class StepSize:
    """Features that determine a step's time."""

    num_decodes: int  # padding included
    num_tokens: int  # prompt tokens, padding included
    attention: float  # sum of the positions that the prompt tokens attend to

    @classmethod
    def of(
        cls, num_decodes: int, longer: Sequence[ScheduledRequest], padded: Padding | None = None
    ) -> Self:
        """Features of a step. `longer` are the requests with more than one token.

        A request that samples at every token verifies drafts; its tokens count as decodes.
        """
        prompts = [s for s in longer if s.num_sampled < s.num_tokens]
        guesses = sum(s.num_tokens for s in longer if s.num_sampled == s.num_tokens)
        attention = sum(s.num_tokens * (s.num_computed_tokens + s.num_tokens / 2) for s in prompts)
        num_decodes, num_tokens = num_decodes + guesses, sum(s.num_tokens for s in prompts)
        if (
            padded is not None
            and (in_graph := padded(num_decodes, num_tokens, len(prompts))) is not None
        ):
            num_decodes, num_tokens = in_graph
        return cls(num_decodes, num_tokens, attention)

    @property
    def decodes(self) -> Pair:
        return 1.0, self.num_decodes / NUM_DECODES

    @property
    def prompts(self) -> Pair:
        return self.num_tokens / NUM_TOKENS, self.attention / ATTENTION


@dataclass(slots=True)
class SizeCost:
    """Time that prompts add to steps of one graph size.

    `seconds` and `attention` are running averages. `step` is the last measured step.
    """

    seconds: float
    attention: float
    step: int


class LearnedStepCost:
    """Learned model of the time of a step."""

    def __init__(self) -> None:
        self.decodes = Filter((1.0, 1.0))
        # Attention of 1,000 tokens to 1,000 others takes less time than everything else done for
        # 1,000 tokens.
        self.prompts = Filter((1.0, 0.2))
        # by the graph's decodes and prompt tokens
        self._sizes: dict[tuple[int, int], SizeCost] = {}
        # of attention², and of attention × time, about the means of their sizes
        self._moments = [
            0.0,
            0.0,
        ]
        # mean relative error of recent predictions
        self.error = 0.0
        self.num_steps = 0
        self.largest = 0  # prompt tokens of the largest measured step

    def predict(self, step: StepSize, *, untried: float = 1.0) -> float:
        """Predicted seconds of a step.

        `untried` scales the time of the prompts if the graph size has no recent measurement.
        """
        known = self._sizes.get((step.num_decodes, step.num_tokens))
        if known is None or self.num_steps - known.step > FORGOTTEN:
            added = untried * self.prompts.predict(step.prompts)
        else:
            squares, both = self._moments
            slope = max(0.0, both / squares) if squares else 0.0
            added = max(0.0, known.seconds + slope * (step.attention - known.attention))
        return self.decodes.predict(step.decodes) + added

    def learn(self, step: StepSize, seconds: float, *, has_sizes: bool = False) -> None:
        """Learn from a measured step.

        With `has_sizes`, the time also counts for all steps of its size.
        """
        predicted = self.predict(step)
        self.num_steps += 1
        if predicted > 0 and self.num_steps > NUM_FIRST:
            seconds = min(seconds, OUTLIER * predicted)
            self.error += (
                min(1.0, abs(seconds - predicted) / max(seconds, predicted)) - self.error
            ) / 16
        noise_s = NOISE * max(seconds, predicted)
        if step.num_tokens:
            self.largest = max(self.largest, step.num_tokens)
            added = max(0.0, seconds - self.decodes.predict(step.decodes))
            self.prompts.learn(step.prompts, added, noise_s)
            if has_sizes:
                self._learn_size(step, added)
        else:
            self.decodes.learn(step.decodes, seconds, noise_s)

    def _learn_size(self, step: StepSize, seconds: float) -> None:
        size = step.num_decodes, step.num_tokens
        known = self._sizes.get(size)
        if known is None or self.num_steps - known.step > FORGOTTEN:
            self._sizes[size] = SizeCost(seconds, step.attention, self.num_steps)
            return
        off, more = seconds - known.seconds, step.attention - known.attention
        for i, product in enumerate((more * more, more * off)):
            self._moments[i] += product - ATTENTION_MEMORY * self._moments[i]
        known.seconds += SIZE_MEMORY * off
        known.attention += SIZE_MEMORY * more
        known.step = self.num_steps

    def tokens_within(self, seconds: float, computed: int, most: int) -> int:
        """Number of prompt tokens, after `computed` ones, that take `seconds`.

        This is `most` if they seem to take no time.
        """
        if seconds <= 0:
            return 0
        # c·n + d·(n·computed + n²/2) = seconds
        of_token, of_attention = self.prompts.coefficients
        linear = of_token / NUM_TOKENS + of_attention / ATTENTION * computed
        whole = linear + (linear * linear + 2 * of_attention / ATTENTION * seconds) ** 0.5
        return most if 2 * seconds >= most * whole else int(2 * seconds / whole)


class Pace:
    """Chooses the prompt tokens of steps with decodes, to keep `target_s` seconds between tokens."""

    def __init__(self, target_s: float, padded: Padding | None = None) -> None:
        """`padded` maps a step to its graph's size; None if steps compute exactly their tokens."""
        self.target_s = target_s
        self._padded = padded
        self.cost = LearnedStepCost()
        self._in_flight: dict[int, tuple[float, StepSize]] = {}
        self._last_end = float("-inf")
        # steps with decodes and prompts since the last one without prompts
        self._since_probe = PROBE_EVERY

    def launched(
        self, step_id: int, now: float, num_decodes: int, longer: Sequence[ScheduledRequest]
    ) -> None:
        step = StepSize.of(num_decodes, longer, self._padded)
        self._in_flight[step_id] = now, step
        if step.num_decodes:
            self._since_probe = self._since_probe + 1 if step.num_tokens else 0

    def ended(self, step_id: int, now: float, *, is_cold: bool = False) -> None:
        """Learn from an ended step, unless it `is_cold` (as in `StepResult`).

        Its time runs from its launch, or from the end of the previous step if that is later, to its
        end.
        """
        if (launched := self._in_flight.pop(step_id, None)) is not None and not is_cold:
            begin, step = launched
            self.cost.learn(
                step, now - max(begin, self._last_end), has_sizes=self._is_of_graph(step)
            )
        self._last_end = now

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
        most = max(MIN_CHUNK, 2 * self.cost.largest)
        step, most_s = StepSize.of(num_decodes, longer), self.target_s / (1 + 2 * self.cost.error)
        fits = min(most, self.cost.tokens_within(most_s - self.cost.predict(step), computed, most))
        if self._padded is not None:
            largest, of_graph, least = self._graph_within(
                self._padded, step, most_s, computed, most
            )
            if least:
                fits = fits if fits > largest == of_graph else of_graph
                return max(fits, least) if age_s >= PATIENCE_S else fits
        if age_s < PATIENCE_S:
            return fits
        return max(
            fits,
            1,
            min(MIN_CHUNK, self.cost.tokens_within(self.target_s * MIN_SHARE, computed, MIN_CHUNK)),
        )

    def _is_of_graph(self, step: StepSize) -> bool:
        """True if the step has a graph's exact size, which steps with fewer tokens share."""
        if self._padded is None or step.num_tokens < 2:
            return False
        fewer = self._padded(step.num_decodes, step.num_tokens - 1, 1)
        return fewer is not None and fewer[1] == step.num_tokens

    def _graph_within(
        self, padded: Padding, step: StepSize, most_s: float, computed: int, most: int
    ) -> tuple[int, int, int]:
        """Prompt tokens of three graphs with room for `step`'s decodes; 0 if there is none.

        1. The largest up to the first that reaches `most`.
        2. The largest that is predicted to take at most `most_s` seconds.
        3. The smallest.
        """
        fits = least = size = 0
        while size < most:
            if (larger := padded(step.num_decodes, size + 1, 1)) is None:
                break
            num_decodes, size = larger
            least = least or size
            if (
                self.cost.predict(
                    StepSize(num_decodes, size, size * (computed + size / 2)), untried=UNTRIED
                )
                <= most_s
            ):
                fits = size
        return size, fits, least
