"""Random weights have the types that a checkpoint's weights have."""

import pytest

from slipstream.model.load.random_weights import ArrayDraws, random_weights
from slipstream.spec.description import read_spec
from slipstream.spec.parameters import keeps_float32
from tests.support import tiny_models


@pytest.mark.parametrize("family", ["mamba", "nemotron_h", "qwen3_next", "deepseek_v3"])
def test_parameters_that_stay_float32_are_made_float32(family, tmp_path):
    tiny_models.write(tmp_path, family)
    shapes = read_spec(tmp_path).shapes
    made = random_weights(shapes, lambda name: ArrayDraws("float16", 0), None).values
    kept = {name for name in shapes if keeps_float32(name)}
    assert kept
    assert {name for name in shapes if made[name].dtype == "float32"} == kept
