"""Launches that go by Triton's look-up of arguments, against it."""

import math
from types import SimpleNamespace

import pytest
import torch
import triton
from hypothesis import given
from hypothesis import strategies as st
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature
from triton.tools.tensor_descriptor import TensorDescriptor

from slipstream.kernels.triton import launch
from slipstream.kernels.triton.launch import Kernel, cdiv, kind, next_power_of_2

MEMORY = torch.zeros(256, dtype=torch.uint8)


def tensor(dtype, offset):
    at = (-MEMORY.data_ptr() % 16 + offset) // dtype.itemsize * dtype.itemsize
    return MEMORY[at : at + 16].view(dtype)


def descriptor(dtype, rows, columns):
    return TensorDescriptor(torch.zeros(32, 64, dtype=dtype), [32, 64], [64, 1], [rows, columns])


DTYPES = [torch.float32, torch.bfloat16, torch.int32, torch.int64, torch.uint8, torch.float8_e4m3fn]
VALUES = st.one_of(
    st.integers(-(2**63), 2**64 - 1),
    st.sampled_from([0, 1, 15, 16, 17, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**63 - 16, 2**63, 2**32]),
    st.floats(allow_nan=False),
    st.booleans(),
    st.none(),
    st.builds(tensor, st.sampled_from(DTYPES), st.sampled_from([0, 8, 16])),
    st.builds(descriptor, st.sampled_from(DTYPES), st.sampled_from([8, 16]), st.sampled_from([32, 64])),
)


def compiled_for(value):
    """What Triton compiles for: the type of the argument and what it takes for granted of it."""
    jit = JITFunction(one)
    bind = create_function_from_signature(jit.signature, jit.params, make_backend(GPUTarget("cuda", 90, 32)))
    return bind(value)[1]


def one(x):
    pass


def several(a, n, size, SIZE: triton.language.constexpr, LAST: triton.language.constexpr = 5):
    pass


@given(st.lists(VALUES, min_size=2, max_size=12))
def test_arguments_of_a_kind_are_compiled_alike(values):
    found = {}
    for value in values:
        made = found.setdefault(kind(value), compiled_for(value))
        assert made == compiled_for(value), value


def test_what_differs_in_kind():
    alike = [(3, 5), (16, 32), (True, False), (0.5, 1.0), (tensor(torch.int32, 0), tensor(torch.int32, 16))]
    differ = [(1, 3), (3, 16), (1, True), (1, 1.0), (2**31, 3), (tensor(torch.int32, 0), tensor(torch.int32, 8)), (None, 3)]
    assert all(kind(a) == kind(b) for a, b in alike)
    assert all(kind(a) != kind(b) for a, b in differ)
    with pytest.raises(TypeError, match="a kernel's argument is str"):
        kind("x")


class Recorded:
    """A function of Triton whose launches are noted: of itself, which compile, and of what it compiled."""

    def __init__(self):
        self.params, self.compiled, self.launched = JITFunction(several).params, [], []

    def __getitem__(self, grid):
        def run(*args, **named):
            self.compiled.append((grid, args, named))
            number = len(self.compiled)
            return Compiled(lambda grid, args: self.launched.append((number, grid, args)))

        return run


class Compiled(SimpleNamespace):
    def __init__(self, note):
        self.note = note

    def __getitem__(self, grid):
        return lambda *args: self.note(grid, args)


def test_a_launch_compiles_once_for_arguments_of_its_kinds(monkeypatch):
    device = [0]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: device[0])
    jit = Recorded()
    kernel, x, y = Kernel(jit), tensor(torch.int32, 0), tensor(torch.int32, 16)
    kernel[(2,)](x, 3, SIZE=8, size=7, num_warps=4)
    assert jit.compiled == [((2,), (x, 3), {"SIZE": 8, "size": 7, "num_warps": 4})]
    kernel[(9, 2)](y, 5, SIZE=8, size=9, num_warps=4)
    assert jit.launched == [(1, (9, 2, 1), (y, 5, 9, 8, 5))]  # in the function's order, with what was left to its default
    kernel[(1,)](y, 5, 9, 8, num_warps=4)  # by position: another form of call
    kernel[(1,)](y, 5, SIZE=16, size=9, num_warps=4)  # other constants, options, kinds and devices
    kernel[(1,)](y, 5, SIZE=8, size=9, num_warps=8)
    kernel[(1,)](y, 16, SIZE=8, size=9, num_warps=4)
    kernel[(1,)](y, 5, SIZE=8, size=9, num_warps=4, LAST=6)
    device[0] = 1
    kernel[(1,)](y, 5, SIZE=8, size=9, num_warps=4)
    assert (len(jit.compiled), len(jit.launched)) == (7, 1)
    kernel[(1,)](y, 5, SIZE=8, size=9, num_warps=4)
    device[0] = 0
    kernel[(3,)](x, 7, SIZE=8, size=9, num_warps=4, LAST=6)
    assert jit.launched[1:] == [(7, (1, 1, 1), (y, 5, 9, 8, 5)), (6, (3, 1, 1), (x, 7, 9, 8, 6))]
    assert kernel.params is jit.params


def test_sizes():
    for a in range(40):
        assert [cdiv(a, b) for b in (1, 3, 16)] == [math.ceil(a / b) for b in (1, 3, 16)]
        assert next_power_of_2(a) == triton.next_power_of_2(a)


def test_an_interpreted_function_stays_as_it_is(monkeypatch):
    monkeypatch.setattr(launch.triton, "jit", lambda function, **settings: (function, settings))
    assert launch.kernel(one) == (one, {})
    assert launch.kernel(do_not_specialize=["x"])(one) == (one, {"do_not_specialize": ["x"]})
