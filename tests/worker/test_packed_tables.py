"""Tables in one array against tables each on its own."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.platform import platform_of
from slipstream.worker.inputs.packed_tables import PackedTables

TABLES = {
    "tokens": ("int32", (3, 7)),
    "floats": ("float32", (2, 5)),
    "seeds": ("int64", (4, 3)),
    "empty": ("int64", (0,)),
}
DEVICES = {"none": None, "cpu": torch.device("cpu"), "uploaded": torch.device("cpu")}


@pytest.mark.parametrize("device", DEVICES)
@given(data=st.data())
def test_each_table_holds_what_was_put(device, data):
    packed = PackedTables(TABLES, platform_of(DEVICES[device]))
    if device == "uploaded":
        packed._host = None  # as on a GPU: nothing is written before `flush`
    expected = {name: np.zeros(shape, dtype) for name, (dtype, shape) in TABLES.items()}
    for _ in range(data.draw(st.integers(1, 3))):
        names = data.draw(st.lists(st.sampled_from(["tokens", "floats", "seeds"]), unique=True))
        for name in names:
            own, size = expected[name], expected[name].size
            where = np.array(data.draw(st.lists(st.integers(0, size - 1), unique=True)), np.int64)
            whole = st.integers(-(2**62), 2**62) if name == "seeds" else st.integers(-99, 99)
            values = np.array([data.draw(whole) for _ in where], own.dtype)
            own.reshape(-1)[where] = values
            packed.put(name, where, values)
            if name == "tokens":  # and ranges elsewhere
                ends = data.draw(
                    st.lists(st.integers(0, size), max_size=4, unique=True).map(sorted)
                )
                pairs = [
                    (begin, end)
                    for begin, end in itertools.pairwise(ends)
                    if not ((begin <= where) & (where < end)).any()
                ]
                runs = [np.arange(begin, end, dtype=np.int32) - 50 for begin, end in pairs]
                for (begin, end), run in zip(pairs, runs, strict=True):
                    own.reshape(-1)[begin:end] = run
                packed.put_runs(name, [begin for begin, _ in pairs], runs)
        packed.flush()
        for name, own in expected.items():
            assert np.array_equal(np.asarray(packed[name]), own)


def test_a_table_is_the_memory_that_is_written():
    packed = PackedTables(TABLES, platform_of(torch.device("cpu")))
    packed._host, seeds = None, packed["seeds"]
    packed.put("seeds", np.array([4]), np.array([2**61 + 5]))
    assert not seeds.any()
    packed.flush()
    assert seeds[1, 1] == 2**61 + 5
    packed.flush()  # nothing is left to write
