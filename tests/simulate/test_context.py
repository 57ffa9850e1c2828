"""Plans of GPUs that share out keys by tokens."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest

from slipstream.config import EngineArgs
from slipstream.costs.devices import find_device
from slipstream.costs.step_cost import StepCounts
from slipstream.errors import ConfigError
from slipstream.simulate import recommend
from slipstream.simulate.engines import plan_engine
from slipstream.simulate.planning import PlanOptions
from slipstream.spec.description import read_spec

FOLDER = Path("benchmarks/configs/llama-3-8b").resolve()


def test_two_gpus_have_twice_the_room_and_the_recorded_times_of_long_work():
    """The times of one and two H200s are in benchmarks/results/parallel_context.json."""
    description, h200 = read_spec(FOLDER), find_device("h200")
    args = EngineArgs(model=str(FOLDER), quantization="fp8", kv_cache_dtype="fp8")
    one = plan_engine(args, description, h200)
    two = plan_engine(dataclasses.replace(args, context_parallel_size=2), description, h200)
    assert two.num_gpus == 2
    assert two.ledger.weights_bytes == 2 * one.ledger.weights_bytes
    assert two.ledger.num_kv_tokens == pytest.approx(2 * one.ledger.num_kv_tokens, rel=0.05)

    def times_faster(**step):
        shape = StepCounts.of(**step)
        return one.analytic.seconds(shape) / two.analytic.seconds(shape)

    assert times_faster(prompts=((65536, 8192),)) == pytest.approx(1.71, abs=0.05)
    assert times_faster(decodes=(131_169,) * 8) == pytest.approx(1.33, abs=0.05)
    assert times_faster(decodes=(100,) * 8) < 1.01  # each reads all weights


def test_more_devices_than_a_plan_may_have_are_refused():
    args = EngineArgs(model=str(FOLDER), context_parallel_size=4)
    with pytest.raises(ConfigError, match="raise --max-gpus") as error:
        PlanOptions(max_gpus=2).check(args)
    assert error.value.field == "context_parallel_size"


def test_stages_have_no_times():
    args = EngineArgs(model=str(FOLDER), pipeline_parallel_size=2)
    with pytest.raises(ConfigError, match="no times of stages") as error:
        plan_engine(args, read_spec(FOLDER), find_device("h200"))
    assert error.value.field == "pipeline_parallel_size"


@pytest.mark.parametrize(
    ("rate", "by_context", "chosen", "said"),
    [
        (1.0, 2.5, 2, "2 replicas 2: context parallelism pays"),
        (1.0, 2.1, 1, "2 replicas 2: context parallelism does not pay"),
        (None, 0.4, 2, "no other form meets the objectives: that pays"),
        (None, None, 1, None),
    ],
)
def test_plan_takes_the_form_that_carries_more_requests_a_device(
    monkeypatch, rate, by_context, chosen, said
):
    args = EngineArgs(model=str(FOLDER), quantization="fp8")
    engine = plan_engine(args, read_spec(FOLDER), find_device("h200"))
    tried = SimpleNamespace(rate=by_context and by_context / 2)
    searched = SimpleNamespace(rate=by_context)
    monkeypatch.setattr(recommend, "find_capacity", lambda *args, **more: tried)

    def choose(length):
        load = SimpleNamespace(
            workload=SimpleNamespace(mean_lengths=(length, 100)), objectives=None, seed=0
        )
        before = SimpleNamespace(rate=rate)
        given = recommend.Tuned(engine, before, {"max_num_mixed_tokens": 4096})
        limits = {"max_num_mixed_tokens": 512}
        tune = lambda engine, capacity: recommend.Tuned(engine, searched, limits)
        return recommend.by_context(given, load, 2, None, lambda: None, tune), given

    (found, notes), given = choose(8092)
    assert (found.engine.num_gpus, found.engine.args.context_parallel_size) == (chosen, chosen)
    assert (found.capacity, found.limits["max_num_mixed_tokens"]) == (
        (searched, 512) if chosen > 1 else (given.capacity, 4096)
    )
    assert notes == [] if said is None else said in notes[0]
    short, given = choose(8091)  # not tried: with an answer of 100 a token short
    assert short == (given, [])


def test_plan_does_not_try_what_the_engine_refuses(monkeypatch):
    folder = Path("benchmarks/configs/gpt-oss-20b").resolve()  # windows and sinks
    engine = plan_engine(EngineArgs(model=str(folder)), read_spec(folder), find_device("h200"))
    load = SimpleNamespace(workload=SimpleNamespace(mean_lengths=(65536, 100)))
    given = recommend.Tuned(engine, SimpleNamespace(rate=1.0), None)
    assert recommend.by_context(given, load, 8, None, lambda: None, None) == (given, [])
