"""Plans of GPUs that share out keys by tokens."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from slipstream.config import EngineArgs
from slipstream.costs.devices import find_device
from slipstream.costs.step_cost import StepCounts
from slipstream.errors import ConfigError
from slipstream.simulate.engines import plan_engine
from slipstream.simulate.planning import PlanOptions
from slipstream.spec.description import read_spec

FOLDER = Path("benchmarks/configs/llama-3-8b").resolve()


def test_two_gpus_have_twice_the_room_and_half_of_long_work():
    description, h200 = read_spec(FOLDER), find_device("h200")
    args = EngineArgs(model=str(FOLDER), quantization="fp8")
    one = plan_engine(args, description, h200)
    two = plan_engine(dataclasses.replace(args, context_parallel_size=2), description, h200)
    assert two.num_gpus == 2
    assert two.ledger.weights_bytes == 2 * one.ledger.weights_bytes
    assert two.ledger.num_kv_tokens == pytest.approx(2 * one.ledger.num_kv_tokens, rel=0.05)

    def times_faster(**step):
        shape = StepCounts.of(**step)
        return one.analytic.seconds(shape) / two.analytic.seconds(shape)

    assert 1.6 < times_faster(prompts=((100_000, 8192),)) < 2.01
    assert 1.5 < times_faster(decodes=(100_000,) * 8) < 2.01
    assert times_faster(decodes=(100,) * 8) < 1.01  # each reads all weights


def test_more_devices_than_a_plan_may_have_are_refused():
    args = EngineArgs(model=str(FOLDER), context_parallel_size=4)
    with pytest.raises(ConfigError, match="raise --max-gpus") as error:
        PlanOptions(max_gpus=2).check(args)
    assert error.value.field == "context_parallel_size"
