"""Triton's interpreter, made quicker for tests: it takes the same steps and the same checks, in a third of the time.

For a kernel of a few lines the interpreter spends nearly all its time on types, and on looking for functions to replace. So
what depends on nothing but types, or on constants, comes from the interpreter's own functions once and is kept here, and
functions are replaced once a launch. conftest.py calls `install`.
"""

from __future__ import annotations

import inspect
from functools import cache, partial
from types import SimpleNamespace

import numpy as np
import triton.language as tl
from triton._utils import validate_block_shape
from triton.language import core
from triton.runtime import interpreter

NUMPY_TYPES = {
    scalar.name: interpreter._get_np_dtype(scalar)
    for scalar in (
        *(
            tl.int1,
            tl.int8,
            tl.uint8,
            tl.int16,
            tl.uint16,
            tl.int32,
            tl.uint32,
            tl.int64,
            tl.uint64,
        ),
        *(tl.float16, tl.bfloat16, tl.float32, tl.float64),
        *(tl.float8e5, tl.float8e5b16, tl.float8e4nv, tl.float8e4b8, tl.float8e4b15),
    )
}
ADDRESS = np.dtype(np.uint64)
BOOL = np.dtype(bool)
MAX_BYTES = {name: dtype.itemsize for name, dtype in NUMPY_TYPES.items()}
"""Size of one element, by type."""
OVERFLOWS = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


def numpy_type(given):
    """NumPy's type of a type's elements. The interpreter fills a table of all types at each call."""
    scalar = given.scalar
    return ADDRESS if isinstance(scalar, tl.pointer_type) else NUMPY_TYPES[scalar.name]


@cache
def shape_of(sizes):
    """(A block's shape as its type has it, as a tensor has it, its number of elements as both have it.)"""
    numel = validate_block_shape(sizes)
    return (
        core.tuple(sizes),
        core.tuple([core.constexpr(n) for n in sizes]),
        numel,
        core.constexpr(numel),
    )


NO_SHAPE = core.tuple([]), core.constexpr(1)
SAME = core.constexpr(True)


@cache
def name_of(sizes, element):
    return f"<{shape_of(sizes)[0]}, {element}>"


def block_type(self, element, shape):
    sizes = tuple([n.value if isinstance(n, core.constexpr) else n for n in shape])
    if not sizes:
        raise TypeError("0d block_type is forbidden")
    self.element_ty = element
    self.sizes = sizes
    self.shape, _, self.numel, _ = shape_of(sizes)
    self.name = name_of(sizes, element.name)


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


equal_tuples_slowly = core.tuple.__eq__


def equal_tuples(self, other):
    """Shapes, mostly the very same object: see `shape_of`."""
    return SAME if self is other else equal_tuples_slowly(self, other)


unwrap_slowly = core._unwrap_if_constexpr
PLAIN = {int, float, bool, type(None), tl.tensor, tl.dtype, tl.pointer_type, tl.block_type}


def unwrap(given):
    if given.__class__ is tl.constexpr:
        return given.value
    return given if given.__class__ in PLAIN else unwrap_slowly(given)


def handle(self, data, dtype, attr=None):
    self.data = data
    self.dtype = dtype
    self.attr = {} if attr is None else attr
    most = MAX_BYTES.get(dtype.name)
    if most is None or data.itemsize > most:
        self.__post_init__()  # the interpreter's own check, which knows more types


def binary_op(self, left, right, operation):
    if left.data.dtype is BOOL and right.data.dtype is BOOL:
        return binary_op_slowly(self, left, right, operation)
    kind = left.dtype.scalar
    output = operation(left.data, right.data)
    if output.itemsize > MAX_BYTES.get(kind.name, ADDRESS.itemsize):
        output = output.astype(numpy_type(kind))
    if (
        output.dtype is BOOL
    ):  # a comparison; repeated to fill a block, it would have the numbers' type
        kind = tl.int1
    return interpreter.TensorHandle(output, kind)


binary_op_slowly = interpreter.InterpreterBuilder.binary_op


class QuickSemantic(interpreter.TritonSemantic):
    """Builder of operations that keeps the types it derives from types."""

    def __init__(self, builder):
        super().__init__(builder)
        self.constants = {}
        self.types_of_operands = {}

    def scalar_constant(self, value, dtype):
        if value.__class__ not in (int, float) or value == 0.0:  # 0.0 and -0.0 would be one key
            return super().scalar_constant(value, dtype)
        key = value, dtype.name
        if key not in self.constants:
            self.constants[key] = super().scalar_constant(value, dtype)
        return self.constants[key]

    def binary_op_type_checking_impl(self, left, right, *flags, **named):
        """Both operands with the types that they have in the operation. Their numbers are not repeated to fill a block: where
        they go, NumPy does that."""
        left_type = left.type if left.__class__ is tl.tensor else self.to_tensor_type(left)
        right_type = right.type if right.__class__ is tl.tensor else self.to_tensor_type(right)
        scalars = left.__class__ is tl.tensor, right.__class__ is tl.tensor
        key = left_type.name, right_type.name, scalars, flags, *named.items()
        types = self.types_of_operands.get(key)
        if types is None:
            both = super().binary_op_type_checking_impl(left, right, *flags, **named)
            self.types_of_operands[key] = [x.type for x in both]
            return both
        return self._operand(left, types[0]), self._operand(right, types[1])

    def _operand(self, x, wanted):
        if x.__class__ is not tl.tensor:
            x = self._cast_to_computation_type(x, wanted.scalar)
        if x.type.name == wanted.name:
            return x
        if x.dtype.name != wanted.scalar.name:
            x = self.cast(x, wanted.scalar)
        return tl.tensor(x.handle, wanted)

    def broadcast_impl_value(self, left, right):
        return (
            (left, right)
            if left.shape is right.shape
            else super().broadcast_impl_value(left, right)
        )

    def binary_op_sanitize_overflow_impl(self, left, right, operation):
        """Checks for overflow, which the interpreter does by five operations of its own, each with
        its types."""
        given = left.type.scalar
        assert given.name == right.type.scalar.name
        assert given.is_int()
        if given.int_bitwidth >= 64:
            return
        exact = OVERFLOWS[operation.__name__](
            left.handle.data.astype(np.int64), right.handle.data.astype(np.int64)
        )
        fits = exact.min() >= given.get_int_min_value() and exact.max() <= given.get_int_max_value()
        assert fits, f"int{given.int_bitwidth} overflow detected for operation {operation.__name__}"


TABLES = {}


def convert_by_table(convert, data, given, wanted, rounding):
    """Numbers of 8 or 16 bits are looked up among all that there are."""
    bits = given.primitive_bitwidth
    if bits > 16:
        return convert(data, given, wanted, rounding)
    key, codes = (given.name, wanted.name, rounding), np.dtype(f"uint{bits}")
    if key not in TABLES:
        TABLES[key] = convert(np.arange(2**bits, dtype=codes), given, wanted, rounding)
    return TABLES[key][data.view(codes)]


REFUSES = core.load.__code__


@cache
def builtins_of(place):
    """Built-in functions, without the check that refuses calls outside a kernel."""
    found = [
        (name, member) for name, member in inspect.getmembers(place) if core.is_builtin(member)
    ]
    return [
        (name, getattr(m, "__wrapped__", m) if m.__code__ is REFUSES else m) for name, m in found
    ]


def replace_builtins(place, builder, scope):
    def interpreted(member):
        def call(*args, **kwargs):
            kwargs["_semantic"] = interpreter.interpreter_semantic
            return member(*args, **kwargs)

        return call

    for name, member in builtins_of(place):
        scope.set_attr(place, name, interpreted(member))


class Launch:
    """A kernel's run, during which the language's functions are the interpreter's. A function that
    the kernel calls finds them replaced already; the interpreter would look for them among all
    names of the language at each call."""

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
    interpreter.interpreter_semantic = QuickSemantic(interpreter.interpreter_builder)
    interpreter.InterpreterBuilder.binary_op = binary_op
    interpreter.TensorHandle.__init__ = handle
    interpreter._convert_float = partial(convert_by_table, interpreter._convert_float)
    core._unwrap_if_constexpr = unwrap
    core.tuple.__eq__ = equal_tuples
    tl.block_type.__init__ = block_type
    tl.tensor.__init__ = tensor
    tl.dtype.__eq__ = equal_types
