"""Triton's interpreter, made quicker for tests: it takes the same steps and the same checks, in less than half of the time.

For a kernel of a few lines the interpreter spends nearly all its time on types, and on looking for functions to replace. So
what depends on nothing but a type is kept here, and functions are replaced once a launch. conftest.py calls `install`.
"""

from __future__ import annotations

import inspect
from functools import cache, cached_property
from types import SimpleNamespace

import numpy as np
import triton.language as tl
from triton._utils import validate_block_shape
from triton.language import core
from triton.runtime import interpreter

NUMPY_TYPES = {
    scalar.name: interpreter._get_np_dtype(scalar)
    for scalar in (
        *(tl.int1, tl.int8, tl.uint8, tl.int16, tl.uint16, tl.int32, tl.uint32, tl.int64, tl.uint64),
        *(tl.float16, tl.bfloat16, tl.float32, tl.float64),
        *(tl.float8e5, tl.float8e5b16, tl.float8e4nv, tl.float8e4b8, tl.float8e4b15),
    )
}
ADDRESS = np.dtype(np.uint64)
OVERFLOWS = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


def numpy_type(given):
    """That of a type's elements. The interpreter fills a table of all types each time."""
    scalar = given.scalar
    return ADDRESS if isinstance(scalar, tl.pointer_type) else NUMPY_TYPES[scalar.name]


@cache
def shape_of(sizes):
    """(A block's shape as its type has it, as a tensor has it, its number of elements as both have it.)"""
    numel = validate_block_shape(sizes)
    return core.tuple(sizes), core.tuple([core.constexpr(n) for n in sizes]), numel, core.constexpr(numel)


NO_SHAPE = core.tuple([]), core.constexpr(1)


def block_type(self, element, shape):
    sizes = tuple([n.value if isinstance(n, core.constexpr) else n for n in shape])
    if not sizes:
        raise TypeError("0d block_type is forbidden")
    self.element_ty = element
    self.sizes = sizes
    self.shape, _, self.numel, _ = shape_of(sizes)


def tensor(self, handle, given):
    self.handle = handle
    self.type = given
    if isinstance(given, tl.block_type):
        self.dtype = given.element_ty
        _, self.shape, _, self.numel = shape_of(given.sizes)
    else:
        self.dtype = given.scalar
        self.shape, self.numel = NO_SHAPE


def equal_types(self, other):
    if self is other:
        return True
    other = core._unwrap_if_constexpr(other)
    return isinstance(other, tl.dtype) and self.name == other.name


def check_overflow(self, left, right, operation):
    """What the interpreter checks by five operations of its own, each with its types."""
    given = left.type.scalar
    assert given.name == right.type.scalar.name
    assert given.is_int()
    if given.int_bitwidth >= 64:
        return
    exact = OVERFLOWS[operation.__name__](left.handle.data.astype(np.int64), right.handle.data.astype(np.int64))
    fits = exact.min() >= given.get_int_min_value() and exact.max() <= given.get_int_max_value()
    assert fits, f"int{given.int_bitwidth} overflow detected for operation {operation.__name__}"


@cache
def builtins_of(place):
    return [(name, member) for name, member in inspect.getmembers(place) if core.is_builtin(member)]


def replace_builtins(place, builder, scope):
    def interpreted(member):
        def call(*args, **kwargs):
            kwargs["_semantic"] = interpreter.interpreter_semantic
            return member(*args, **kwargs)

        return call

    for name, member in builtins_of(place):
        scope.set_attr(place, name, interpreted(member))


class Launch:
    """While a kernel runs, the language's functions are the interpreter's. A function that it calls finds them replaced
    already; the interpreter would look for them among all names of the language at each call."""

    running = False
    replace_all = staticmethod(interpreter._patch_lang)

    def __init__(self):
        self.scope = self.replace_all(SimpleNamespace(__globals__={"tl": tl, "core": core}))
        Launch.running = True

    def restore(self):
        Launch.running = False
        self.scope.restore()


def install():
    interpreter._get_np_dtype = numpy_type
    interpreter._patch_builtin = replace_builtins
    interpreter._patch_lang = lambda function: None if Launch.running else Launch()
    interpreter.TritonSemantic.binary_op_sanitize_overflow_impl = check_overflow
    name = cached_property(lambda self: f"<{self.shape}, {self.element_ty}>")
    name.__set_name__(tl.block_type, "name")
    tl.block_type.name = name
    tl.block_type.__init__ = block_type
    tl.tensor.__init__ = tensor
    tl.dtype.__eq__ = equal_types
