"""The table of step times: what is fitted, what it says of itself, and what it refuses."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.costs.step_cost import (
    HostCost,
    MeasuredStep,
    StepCounts,
    attention_pairs,
    fit_steps,
    non_negative_least_squares,
    read_table,
    worst,
)
from slipstream.errors import ConfigError


def true_time(shape):
    """A machine: weights, then a product's time by token, attention, a head."""
    return (
        2e-3
        + max(0, shape.num_tokens - 8) * 5e-5
        + shape.num_sampled * 2e-5
        + shape.decode_context * 1e-7
        + shape.prompt_attention * 2e-8
        + shape.num_prompts * 1e-4
    )


SHAPES = [StepCounts.of((c,) * n) for n in (1, 2, 4, 8, 16, 32, 64) for c in (31, 255, 1023)]
SHAPES += [StepCounts.of((), ((c, n),)) for n in (16, 64, 128, 256, 512) for c in (0, 1024)]
SHAPES += [StepCounts.of((255,) * n, ((0, p),)) for n in (4, 16, 60) for p in (32, 128, 400)]


def table(shapes=SHAPES, time=true_time, **more):
    return fit_steps(
        [MeasuredStep(s, time(s)) for s in shapes], identity={"a": 1}, made_by={}, **more
    )


def test_attention_pairs_are_counted():
    assert attention_pairs(3, 4) == sum(3 + i for i in (1, 2, 3, 4))
    assert StepCounts.of((9, 4), ((3, 4), (0, 2))) == StepCounts(2, 15, 6, 2, 22 + 3, 4)


def test_a_machine_that_is_linear_between_knots_is_found():
    found = table()
    assert found.error < 0.02
    for shape in (
        StepCounts.of((500,) * 12),
        StepCounts.of((), ((0, 300),)),
        StepCounts.of((100,) * 30, ((64, 200),)),
    ):
        assert found.seconds(shape) == pytest.approx(true_time(shape), rel=0.08)


def test_a_cost_is_labelled_by_how_near_measurements_are():
    found = table()
    assert found.label(SHAPES[0]) == "measured"
    assert found.label(StepCounts.of((300,) * 12)) == "interpolated"
    assert found.label(StepCounts.of((300,) * 500)) == "estimated"
    assert table(shipped=True).label(SHAPES[0]) == "interpolated"
    assert worst("measured", "estimated", "interpolated") == "estimated"


@settings(max_examples=50)
@given(
    st.lists(st.floats(0.5, 2.0), min_size=len(SHAPES), max_size=len(SHAPES)),
    st.integers(1, 80),
    st.integers(0, 600),
)
def test_a_larger_step_is_never_faster_however_noisy_the_measurements(noise, decodes, prompt):
    times = iter(noise)
    found = table(time=lambda shape: true_time(shape) * next(times))
    prompts = ((0, prompt),) if prompt > 1 else ()
    base = found.seconds(StepCounts.of((100,) * decodes, prompts))
    assert base > 0
    assert found.seconds(StepCounts.of((100,) * (decodes + 1), prompts)) >= base
    assert found.seconds(StepCounts.of((200,) * decodes, prompts)) >= base
    assert found.seconds(StepCounts.of((100,) * decodes, ((0, prompt + 2),))) >= base


def test_a_file_gives_the_same_table_again():
    host = HostCost(step_s=1e-4, sequence_s=1e-6, request_s=2e-3, label="measured")
    first = table(host=host)
    again = read_table(first.as_data(), "x.json")
    assert again == first
    assert again.host == host
    assert first.scaled(2.0).seconds(SHAPES[5]) == pytest.approx(2 * first.seconds(SHAPES[5]))


@pytest.mark.parametrize(
    "data", [{}, {"kind": "other"}, [], {"kind": "step costs", "shape": ["x"]}]
)
def test_another_file_is_named(data):
    with pytest.raises(ConfigError, match=r"x\.json is not a table of step costs"):
        read_table(data, "x.json")


def test_least_squares_are_never_negative():
    assert non_negative_least_squares([[1, 1], [1, 2], [1, 3]], [3, 2, 1]) == pytest.approx(
        [2, 0], abs=1e-6
    )
    assert non_negative_least_squares([[1, 0], [0, 2]], [3, 8]) == pytest.approx([3, 4])
