"""Parts of the C++ kernels' programs: a layer's operators, and products as programs of their own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from slipstream.kernels.cpu import native
from slipstream.kernels.cpu.arrays import address, array
from slipstream.kernels.cpu.packed import NativeLinear
from slipstream.kernels.cpu.program.native_program import Program
from slipstream.kernels.cpu.thread_pool import ThreadPool

if TYPE_CHECKING:
    from slipstream.kernels.metadata import SamplingTensors

Floats = npt.NDArray[np.float32]


class LinearProgram:
    """A program of one product: float32 [T, in] → [T, out]. For measurements it may also multiply
    `more` weights of the same shape, and then returns the last product.
    """

    def __init__(
        self, pool: ThreadPool, w: NativeLinear, more: Iterable[NativeLinear] = ()
    ) -> None:
        self.program = Program(pool)
        self._rows, self._inner = w.weight.shape
        self._x, self._y = self.program.bound(), self.program.bound()
        x = in_form(self.program, self._x, w)
        for each in (w, *more):
            add_linear(self.program, x, self._y, each)

    def __call__(self, x: Floats) -> Floats:
        assert x.dtype == np.float32
        assert x.shape[1] == self._inner
        y = np.empty((len(x), self._rows), np.float32)
        self.program.bind(self._x, x)
        self.program.bind(self._y, y)
        self.program.run(native.StepInputs(num_tokens=len(x)))
        return y


class LinearArgmax:
    """Program of a linear layer and the first maximum of each of its rows: float32 [T, in] → int64
    [T]. The full rows [T, out] are never stored."""

    def __init__(self, pool: ThreadPool, w: NativeLinear) -> None:
        (part,) = w.parts
        self.program = p = Program(pool)
        self._size, self._x, self._out = part.inner, p.bound(), p.bound()
        p.add(
            "linear_argmax",
            in_form(p, self._x, w),
            self._out,
            part.kind,
            part.rows,
            part.inner,
            part.data,
            w.bias,
            weights=part,
        )

    def __call__(self, x: Floats) -> npt.NDArray[np.int64]:
        found = self.of(x)
        self.program.run(native.StepInputs(num_tokens=len(x)))
        return found

    def of(self, x: Floats) -> npt.NDArray[np.int64]:
        """Binds `x` and returns the array that the next run of `program` fills. Both must live until then."""
        assert x.dtype == np.float32
        assert x.shape[1] == self._size
        found = np.empty((len(x), 1), np.int64)
        self.program.bind(self._x, x)
        self.program.bind(self._out, found)
        return found[:, 0]


class Argmax:
    """Program that finds the first maximum of each row, float32 [T, V] → int64 [T]."""

    def __init__(self, pool: ThreadPool, size: int) -> None:
        self._program = p = Program(pool)
        self._x, self._out = p.bound(), p.bound()
        p.add("argmax", self._x, self._out, size)

    def __call__(self, x: Floats) -> npt.NDArray[np.int64]:
        found = np.empty((len(x), 1), np.int64)
        self._program.bind(self._x, x)
        self._program.bind(self._out, found)
        self._program.run(native.StepInputs(num_tokens=len(x)))
        return found[:, 0]


DRAW_PARAMS = np.dtype(
    [
        *(("seed", "i8"), ("position", "i8"), ("mask", "u8"), ("logprobs", "u8"), ("token", "i8")),
        *(("temperature", "f4"), ("top_p", "f4"), ("min_p", "f4"), ("top_k", "i4")),
        *(("mask_words", "i4"), ("num_top", "i4")),
    ]
)
"""The struct `ss_draw_params`."""


class Beyond(NamedTuple):
    """Requirements of rows of logits other than a draw.

    `mask` is the pair (row numbers and the number of each one's bits, int64 [2, N]; the bits, int32
    [U, words]). `logprobs` has rows that want the log-probabilities of their token and of `num_top`
    others. `tokens`, int64 [S], are given, and none is drawn.
    """

    mask: tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]] | None = None
    logprobs: Sequence[int] = ()
    num_top: int = 0
    tokens: npt.NDArray[np.int64] | None = None


NOTHING_BEYOND = Beyond()


def draw_params(
    count: int, params: SamplingTensors | None, beyond: Beyond = NOTHING_BEYOND
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int32]]:
    """Returns the parameters of S draws as bytes [S, n] (greedy without `params`), and an array for log-probabilities,
    int32 [S, 2 + 2 · num_top]. Biases and penalties are not included."""
    made = np.zeros((count, 1), DRAW_PARAMS)
    if params is not None and not params.all_greedy:
        for name in ("temperature", "top_p", "min_p", "top_k"):
            made[name][:, 0] = array(getattr(params, name))
        made["seed"][:, 0] = array(params.seeds)
        made["position"][:, 0] = array(params.history_lens)
    made["token"] = -1 if beyond.tokens is None else beyond.tokens[:, None]
    if beyond.mask is not None:
        (rows, which), bits = beyond.mask
        made["mask"][rows, 0] = address(bits) + which * bits.strides[0]
        made["mask_words"] = bits.shape[1]
    packed = np.empty((count if beyond.logprobs else 0, 2 + 2 * beyond.num_top), np.int32)
    if beyond.logprobs:
        made["num_top"] = beyond.num_top
        places = np.array(beyond.logprobs, np.int64)
        made["logprobs"][places, 0] = address(packed) + places * packed.strides[0]
    # as bytes: NumPy describes the fields of other arrays with each question for their address
    return made.view(np.uint8), packed


class RowDraws:
    """Program that draws a token for each row of logits: float32 [T, V] → int64 [T]. With a weight,
    which must have one part, it computes the logits first, from float32 [T, in].
    """

    def __init__(self, pool: ThreadPool, size: int, w: NativeLinear | None = None) -> None:
        self.program = p = Program(pool)
        self._x, self._given, self._out = p.bound(), p.bound(), p.bound()
        if w is None:
            p.add("draw", self._x, self._given, self._out, size)
            return
        (part,) = w.parts
        weight = part.kind, part.rows, part.inner, part.data, w.bias
        x, logits = in_form(p, self._x, w), p.buffer(native.FORM_F32, size)
        p.add("linear_draw", x, logits, self._given, self._out, *weight, weights=part)

    def __call__(
        self, x: Floats, params: SamplingTensors | None, beyond: Beyond = NOTHING_BEYOND
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
        """The tokens, and the packed log-probabilities of rows that want them."""
        x = np.ascontiguousarray(x)
        found = self.of(x, params, beyond)
        self.program.run(native.StepInputs(num_tokens=len(x)))
        return found

    def of(
        self, x: Floats, params: SamplingTensors | None, beyond: Beyond = NOTHING_BEYOND
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
        """Binds `x` and the parameters, and returns the arrays that the next run of `program` fills.
        `x`, the arrays and `beyond` must live until then."""
        assert x.dtype == np.float32
        self._given_params, packed = draw_params(len(x), params, beyond)
        found = np.empty((len(x), 1), np.int64)
        self.program.bind(self._x, x)
        self.program.bind(self._given, self._given_params)
        self.program.bind(self._out, found)
        return found[:, 0], packed


def in_form(program: Program, x: int, w: NativeLinear) -> int:
    """Add a conversion of float32 x to the format that the weight's linear layer reads. Returns the
    buffer of the result."""
    if w.form == native.FORM_F32:
        return x
    inner = w.weight.shape[1]
    made = program.buffer(w.form, inner)
    program.add("convert", x, made, w.form, inner, 1)
    return made


def add_linear(
    program: Program, x: int, y: int, w: NativeLinear, *, accumulate: bool = False
) -> None:
    """Add a linear layer, part by part. x has the format that the weight reads; y is float32."""
    row = 0
    for part in w.parts:
        bias = None if w.bias is None else w.bias[row : row + part.rows]
        weight = part.kind, part.rows, part.inner, part.data
        program.add(
            "linear",
            x,
            y,
            row,
            *weight,
            bias,
            accumulate,
            part.dense,
            part.dense_from,
            weights=part,
        )
        row += part.rows
