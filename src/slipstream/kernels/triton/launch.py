"""Launches of Triton kernels with little host time.

`@kernel` stands in the place of `@triton.jit` where the host launches the function. Triton looks at every argument anew in each
launch, to find what was compiled for arguments of their kinds: on an H200's host that is 45 of a launch's 65 µs. Here:

1. The *kinds* of a launch are the values of its constants and options, and of the other arguments what Triton compiles for.
2. The first launch of such kinds goes through Triton, which compiles. Later ones go to what it compiled.

Kinds may be finer than Triton's, but not coarser: a launch would then run what was compiled for other arguments
(tests/kernels/test_launch.py compares the two).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up. Triton's takes 4 µs on the host."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is not less than n. Triton's takes 4 µs on the host."""
    return 1 << (n - 1).bit_length() if n > 0 else 0


def kind(value: Any) -> Any:
    """What Triton compiles for of an argument that is no constant."""
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if value is None or isinstance(value, bool | float):
        return type(value)
    if isinstance(value, int):
        return value == 1, value % 16 == 0, -(2**31) <= value < 2**31, value < 2**63
    if isinstance(value, TensorDescriptor):
        return value.base.dtype, tuple(value.block_shape), value.padding
    raise TypeError(f"a kernel's argument is {type(value).__name__}")


class Kernel:
    """A function that the host launches: `kernel[grid](*arguments)`."""

    def __init__(self, jit: JITFunction[Any]) -> None:
        self.jit = jit
        self._forms: dict[tuple[int | str, ...], _Form] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.jit, name)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        return functools.partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **named: Any) -> Any:
        form = self._forms.get((len(args), *named))
        if form is None:
            form = self._forms[len(args), *named] = _Form(self.jit, len(args), tuple(named))
        values = (*args, *named.values())
        key = (
            torch.cuda.current_device(),
            *[
                value if is_constant else kind(value)
                for value, is_constant in zip(values, form.is_constant, strict=True)
            ],
        )
        compiled = form.compiled.get(key)
        if compiled is None:
            compiled = self.jit[grid](*args, **named)
            if compiled is not None:
                form.compiled[key] = compiled
            return compiled
        compiled[(*grid, 1, 1)[:3]](*[values[i] for i in form.order], *form.defaults)
        return compiled


class _Form:
    """How a call gives a function its arguments: some by position, the others and the options by name."""

    def __init__(self, jit: JITFunction[Any], num_positional: int, named: tuple[str, ...]) -> None:
        params = {p.name: p for p in jit.params}
        given = [*list(params)[:num_positional], *named]
        self.is_constant = [name not in params or params[name].is_constexpr for name in given]
        left = [p for name, p in params.items() if name not in given]
        assert list(params)[len(params) - len(left) :] == [p.name for p in left], "defaults are of the last parameters"
        self.order = [given.index(name) for name in params if name in given]
        self.defaults = [p.default for p in left]
        self.compiled: dict[tuple[Any, ...], Any] = {}


def kernel(function: Any = None, **settings: Any) -> Any:
    """`triton.jit` for a function that the host launches. Where Triton interprets, it is `triton.jit`."""
    if function is None:
        return functools.partial(kernel, **settings)
    made = triton.jit(function, **settings)
    return Kernel(made) if isinstance(made, JITFunction) else made
