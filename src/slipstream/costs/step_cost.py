"""Predicts the time of a step from measured steps. No torch.

A step's time is a sum of parts. Each part grows with one count of `StepCounts` and never falls:

  tokens             linear layers, over all tokens of the step (a graph's padding among them)
  sampled            the output head and the sampler, over the tokens sampled
  decode_context     attention of decodes, over the cached tokens that they attend to
  prompt_attention   attention of prompts, over the pairs (token, token that it attends to)
  num_prompts        fixed cost of each prompt of a step
  num_drafts         cost of drafts to verify, on top of their cost as tokens

A part is linear between knots. The slopes are fitted by least squares of relative errors, none of
them negative (`fit_steps`). So shapes between the measured ones are interpolated, and noise can't
make a larger step faster. Every answer has a label: *measured* (this very shape was),
*interpolated* (between measured ones) or *estimated* (beyond them, or from the analytic model,
`costs/analytic.py`).
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

from slipstream.errors import ConfigError

Label: TypeAlias = Literal["measured", "interpolated", "estimated"]
LABELS: tuple[Label, ...] = ("measured", "interpolated", "estimated")


def worst(*labels: Label) -> Label:
    """Least certain of the labels: "estimated" before "interpolated" before "measured"."""
    return max(labels, key=LABELS.index)


class StepCounts(NamedTuple):
    """The counts on which a step's time depends. A sequence with drafts to verify counts as one
    decode, and its context once."""

    num_decodes: int = 0
    decode_context: int = 0  # cached tokens that all decodes together attend to
    num_prompt_tokens: int = 0
    num_prompts: int = 0
    prompt_attention: int = 0  # pairs (token, token that it attends to) of prompts
    num_sampled: int = 0
    num_drafts: int = 0

    @property
    def num_tokens(self) -> int:
        return self.num_decodes + self.num_prompt_tokens + self.num_drafts

    @classmethod
    def of(
        cls,
        decodes: Sequence[int] = (),
        prompts: Sequence[tuple[int, int]] = (),
        verified: Sequence[tuple[int, int]] = (),
    ) -> StepCounts:
        """Build the shape of a step.

        `decodes` has the computed tokens of each decode. `prompts` has (computed, tokens) of each
        prompt, whose last token is sampled. `verified` has (computed, tokens) of each decode with
        drafts, all sampled.
        """
        pairs = sum(attention_pairs(computed, count) for computed, count in prompts)
        num_drafts = sum(count - 1 for _, count in verified)
        return cls(
            len(decodes) + len(verified),
            sum(decodes) + len(decodes) + sum(map(sum, verified)),
            sum(count for _, count in prompts),
            len(prompts),
            pairs,
            len(decodes) + len(verified) + len(prompts) + num_drafts,
            num_drafts,
        )


def attention_pairs(computed: int, count: int) -> int:
    """Number of (token, token that it attends to) pairs of `count` tokens after `computed` ones."""
    return count * computed + count * (count + 1) // 2


class StepCost(Protocol):
    """Predicts the time of a step. `host` is the time added by the engine's and the front end's CPU
    work."""

    @property
    def host(self) -> HostCost: ...

    def seconds(self, shape: StepCounts) -> float: ...

    def label(self, shape: StepCounts) -> Label: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCost:
    """Host time in addition to the steps.

    `step_s` and `sequence_s` are the engine's, per step and per sequence in it. The device waits
    for them unless steps overlap. `ahead_s` is how much longer an overlapping step takes on a CPU,
    where the host works on the same cores. `request_s` delays a request's first token outside the
    engine. `launch_s` is the time to launch a step's operators one by one, without a graph; the
    step takes at least that long.
    """

    step_s: float = 0.0
    sequence_s: float = 0.0
    ahead_s: float = 0.0
    request_s: float = 0.0
    launch_s: float = 0.0
    label: Label = "estimated"

    def seconds(self, num_sequences: int) -> float:
        return self.step_s + self.sequence_s * num_sequences


class MeasuredStep(NamedTuple):
    shape: StepCounts
    seconds: float


@dataclass(frozen=True, slots=True)
class PiecewiseLinear:
    """A function that is linear between `knots` and continues after the last. `values[i]` is its
    value at knot i; the first is 0."""

    knots: tuple[float, ...]
    values: tuple[float, ...]

    def __call__(self, x: float) -> float:
        knots, values = self.knots, self.values
        i = min(max(bisect_right(knots, x), 1), len(knots) - 1)
        return values[i - 1] + (values[i] - values[i - 1]) * (x - knots[i - 1]) / (
            knots[i] - knots[i - 1]
        )


PARTS = (
    "num_tokens",
    "num_sampled",
    "decode_context",
    "prompt_attention",
    "num_prompts",
    "num_drafts",
)
MAX_KNOTS = {
    "num_tokens": 24,
    "num_sampled": 5,
    "decode_context": 4,
    "prompt_attention": 2,
    "num_prompts": 2,
    "num_drafts": 2,
}
"""Maximum number of knots of each part: as many as measurements can distinguish."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTable:
    """Measured steps of one model with one set of settings on one kind of machine, and the fit to
    them.

        `identity` describes what was measured (`costs/tables.py` compares it), `made_by` how and when.
    `error` is the mean relative error of the fit at the measured steps.
    """

    identity: dict[str, Any]
    made_by: dict[str, Any]
    points: tuple[MeasuredStep, ...]
    constant: float
    parts: dict[str, PiecewiseLinear]
    host: HostCost
    error: float
    shipped: bool = False  # comes with the program, so not measured on this very machine
    _known: dict[StepCounts, float] = field(default_factory=dict, repr=False, compare=False)
    # largest measured value; 0: never measured
    _most: dict[str, int] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._known.update((p.shape, p.seconds) for p in self.points)
        self._most.update(
            (name, max((getattr(p.shape, name) for p in self.points), default=0)) for name in PARTS
        )

    def seconds(self, shape: StepCounts) -> float:
        parts = self.parts
        num_decodes, context, prompt_tokens, num_prompts, attention, num_sampled, num_drafts = shape
        num_tokens = num_decodes + prompt_tokens + num_drafts
        total = self.constant + parts["num_tokens"](num_tokens) + parts["num_sampled"](num_sampled)
        if num_drafts:
            total += parts["num_drafts"](num_drafts)
        if num_decodes:
            total += parts["decode_context"](context)
        if num_prompts:
            total += parts["prompt_attention"](attention) + parts["num_prompts"](num_prompts)
        return total

    def label(self, shape: StepCounts) -> Label:
        if shape in self._known and not self.shipped:
            return "measured"
        inside = all(getattr(shape, name) <= self._most[name] for name in PARTS)
        return "interpolated" if inside else "estimated"

    def scaled(self, factor: float) -> StepTable:
        """Copy of the table with all step times multiplied by `factor`."""
        parts = {
            n: PiecewiseLinear(p.knots, tuple(v * factor for v in p.values))
            for n, p in self.parts.items()
        }
        points = tuple(MeasuredStep(p.shape, p.seconds * factor) for p in self.points)
        return dataclasses.replace(
            self, points=points, constant=self.constant * factor, parts=parts, _known={}, _most={}
        )

    def with_host(self, host: HostCost) -> StepTable:
        return dataclasses.replace(self, host=host, _known={}, _most={})

    def as_data(self) -> dict[str, Any]:
        """Data for a JSON file that `read_table` reads."""
        return {
            "kind": "step costs",
            "identity": self.identity,
            "made_by": self.made_by,
            "host": dataclasses.asdict(self.host),
            "error": self.error,
            "shape": list(StepCounts._fields),
            "steps": [[*p.shape, p.seconds] for p in self.points],
        }


def read_table(data: Any, name: str, *, shipped: bool = False) -> StepTable:
    """Read a table written from `as_data`, and fit its steps again. ConfigError describes a wrong
    file."""
    try:
        named = data["shape"]  # tables without drafts lack the last column
        if (
            data["kind"] != "step costs"
            or len(named) < 6
            or named != list(StepCounts._fields)[: len(named)]
        ):
            raise ValueError("it has no step costs, or those of another version")
        points = [
            MeasuredStep(StepCounts(*map(int, row[:-1])), float(row[-1])) for row in data["steps"]
        ]
        host = HostCost(**data["host"])
        return fit_steps(
            points,
            identity=dict(data["identity"]),
            made_by=dict(data["made_by"]),
            host=host,
            shipped=shipped,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{name} is not a table of step costs: {error}; remove it, and measure again",
            field="table",
        ) from None


def fit_steps(
    points: Sequence[MeasuredStep],
    *,
    identity: dict[str, Any],
    made_by: dict[str, Any],
    host: HostCost | None = None,
    shipped: bool = False,
) -> StepTable:
    """Fit non-negative slopes with the least squared relative errors. ValueError with fewer than
    two steps."""
    if len(points) < 2:
        raise ValueError("at least two steps are needed")
    if any(p.seconds <= 0 for p in points):
        raise ValueError("a step takes no time")
    knots = {
        name: _knots([getattr(p.shape, name) for p in points], MAX_KNOTS[name]) for name in PARTS
    }
    ramps = [(name, i) for name in PARTS for i in range(len(knots[name]) - 1)]
    rows = [
        [
            1.0 / p.seconds,
            *(_ramp(knots[name], i, getattr(p.shape, name)) / p.seconds for name, i in ramps),
        ]
        for p in points
    ]
    solution = non_negative_least_squares(rows, [1.0] * len(rows))
    parts = {}
    for name in PARTS:
        values, total = [0.0], 0.0
        for (of, i), slope in zip(ramps, solution[1:], strict=True):
            if of == name:
                total += slope * (knots[name][i + 1] - knots[name][i])
                values.append(total)
        parts[name] = PiecewiseLinear(knots[name], tuple(values))
    table = StepTable(
        identity=identity,
        made_by=made_by,
        points=tuple(points),
        constant=solution[0],
        parts=parts,
        host=host or HostCost(),
        error=0.0,
        shipped=shipped,
    )
    errors = [abs(table.seconds(p.shape) / p.seconds - 1) for p in points]
    return dataclasses.replace(table, error=sum(errors) / len(errors), _known={}, _most={})


def _knots(values: Sequence[int], most: int) -> tuple[float, ...]:
    """0 and up to `most` of the distinct values, spread evenly over them, including the largest."""
    distinct = sorted({float(v) for v in values if v > 0}) or [1.0]
    if len(distinct) > most:
        distinct = [distinct[round(i * (len(distinct) - 1) / (most - 1))] for i in range(most)]
    return 0.0, *distinct


def _ramp(knots: Sequence[float], i: int, x: float) -> float:
    """Length of the part below x of the interval from knot i to the next. The last interval has no
    end."""
    end = float("inf") if i == len(knots) - 2 else knots[i + 1]
    return max(0.0, min(x, end) - knots[i])


SWEEPS = 4000


def non_negative_least_squares(
    rows: Sequence[Sequence[float]], targets: Sequence[float]
) -> list[float]:
    """The x ≥ 0 that minimizes |rows·x − targets|².

    The method is coordinate descent on the normal equations (Franc et al. 2005, "Sequential
    coordinate-wise algorithm for the non-negative least squares problem"). Columns are scaled to
    length 1 first.
    """
    count = len(rows[0])
    scales = [sum(row[j] ** 2 for row in rows) ** 0.5 or 1.0 for j in range(count)]
    scaled = [[value / scale for value, scale in zip(row, scales, strict=True)] for row in rows]
    columns = list(zip(*scaled, strict=True))
    gram = [
        [sum(a * b for a, b in zip(one, other, strict=True)) for other in columns]
        for one in columns
    ]
    gradient = [-sum(a * b for a, b in zip(column, targets, strict=True)) for column in columns]
    x = [0.0] * count
    for _ in range(SWEEPS):
        moved = 0.0
        for j in range(count):
            if gram[j][j] == 0:
                continue
            new = max(0.0, x[j] - gradient[j] / gram[j][j])
            if change := new - x[j]:
                x[j] = new
                moved = max(moved, abs(change))
                for k, value in enumerate(gram[j]):
                    gradient[k] += change * value
        if moved < 1e-9:
            break
    return [value / scale for value, scale in zip(x, scales, strict=True)]
