"""Numbers that are not finite are refused before weights that run are written over."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from slipstream.errors import CheckpointError
from slipstream.model.load.pulled import Pulled, Weights
from slipstream.model.load.refill import _checked, not_finite


def test_numbers_that_are_not_finite_are_counted():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    values = np.array([1.0, np.nan, np.inf, -np.inf, 3e38, 3e38])
    assert not_finite(values.astype(np.float32)) == 3
    assert not_finite(np.full(4, 3e38, np.float32)) == 0  # its sum is infinite
    assert not_finite(values.astype(ml_dtypes.bfloat16)) == 3
    assert not_finite(torch.from_numpy(values).to(torch.bfloat16)) == 3
    assert not_finite(torch.full((4,), 3e38)) == 0
    assert not_finite(np.full(4, 255, np.uint8)) == 0


def test_a_weight_that_is_not_finite_is_named_as_it_is_made():
    good, bad = np.ones(4, np.float32), np.array([1, np.nan], np.float32)
    checked = _checked(Weights(Pulled.of({"a": good, "b": bad}), Pulled({})))
    assert checked.values["a"] is good
    with pytest.raises(CheckpointError, match="b has 1 numbers that are not finite") as error:
        checked.values["b"]
    assert error.value.field == "b"
