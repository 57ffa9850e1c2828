"""Reads quantized weights in the formats of compressed-tensors, ModelOpt, GPTQ and AWQ without
quantizing them again. No torch: `compressed` implements this for torch tensors, `host_compressed`
for NumPy arrays.

Instead of `weight` in the model's dtype, a linear layer has from compressed-tensors:
  fp8, int8   weight [out, in] of float8_e4m3fn or int8, weight_scale [out, 1] (or one for all rows)
  fp8-block   the same with weight_scale [out / 128, in / 128], or weight_scale_inv as DeepSeek V3
              and Qwen 3 write it (the codes are multiplied by it, whatever its name says)
  int4        weight_packed int32 [out, in · bits / 32], codes of 2 to 4 bits (`model.stored.packing`),
              weight_scale [out, groups], and if asymmetric weight_zero_point, codes packed down the
              rows
  nvfp4       weight_packed uint8 [out, in / 2], two codes of e2m1 a byte, the low half first,
              weight_scale float8_e4m3fn [out, in / 16], weight_global_scale float32 [1], which
              divides them
  mxfp4       weight_packed alike, weight_scale uint8 [out, in / 32], exponents plus 127
from ModelOpt:
  nvfp4       weight, weight_scale and weight_scale_2, which multiplies the scales
from GPTQ's tools:
  int4        qweight int32 [in / 8, out], eight codes of one column per word;
              scales [in / group_size, out]; qzeros, all 8 (written as 7 in the format's first
              version); g_idx, the group of each input
and from AWQ's:
  int4        qweight int32 [in, out / 8], eight columns per word in the order of AWQ_COLUMNS;
              scales [in / group_size, out]; qzeros int32 [in / group_size, out / 8], the codes that
              stand for 0, packed alike

weight_shape and input_scale are ignored, as inputs are scaled at run time. Other zero points and
reordered inputs are refused. A weight that the op set can't compute with (such as more than 4 bits
with unquantized inputs) is expanded when it is read (`stored_weights.expanded`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from slipstream.errors import CheckpointError
from slipstream.kernels.weights.forms import Linear, new_linear
from slipstream.model.load.checkpoint import PASSED_OVER
from slipstream.model.load.pulled import Pulled
from slipstream.model.stored.parts import SCALES, stored_parts, stored_shape
from slipstream.spec.parameters import Placement, Shape
from slipstream.spec.scheme import WeightFormat
from slipstream.spec.stored.native_formats import native_group_size
from slipstream.spec.stored.quantization_config import AWQ_COLUMNS, PLAIN_ZEROS, Method

PARTS = (
    "weight",
    *SCALES,
    "weight_global_scale",
    "weight_scale_2",
    "weight_packed",
    "weight_zero_point",
    "qweight",
    "qzeros",
    "scales",
    "g_idx",
)
REFUSED = ("weight_g_idx", "input_zero_point")

Array: TypeAlias = Any
"""An array of torch or NumPy."""

_Taken: TypeAlias = tuple[str, str, Placement, Callable[[], Array]]
"""A checkpoint tensor: its name, which part of a weight it is, its placement, its reader."""


class RoundedTensors:
    """Collects a checkpoint's quantized tensors. `linears()` returns the weights after all tensors
    were offered to `take`.

    Subclasses for torch and NumPy implement the methods that raise NotImplementedError here.
    """

    dtype: Any
    """The model's dtype."""

    int32: Any
    uint8: Any
    """The array library's dtypes."""

    def __init__(
        self, shapes: Mapping[str, Shape], formats: Mapping[str, WeightFormat], method: Method
    ) -> None:
        """Expects the weights in `formats`, by names in `shapes`."""
        self.shapes, self.formats, self.method = shapes, formats, method
        self._taken: dict[str, list[_Taken]] = {name: [] for name in formats}

    def make(self, name: str, part: str, shape: Shape, kind: str | None) -> Array:
        """Allocates a tensor of the weight `name`, as `new_linear` requests it."""
        raise NotImplementedError

    def finished(self, name: str, weight: Linear) -> Linear:
        """A filled weight in the form that the op set uses."""
        return weight

    def on_device(self, value: Array, name: str) -> Array:
        """Moves `value` to where the weight `name` is held."""
        return value

    def on_host(self, value: Array) -> np.ndarray[Any, Any]:
        raise NotImplementedError

    def put_eight_bits(self, codes: Array, value: Array) -> None:
        codes[:] = value

    def pack4(self, codes: Array, chunk: int) -> Array:
        raise NotImplementedError

    def unpack(self, words: Array, bits: int, count: int) -> Array:
        """Unpacks int32 [rows, words] in host memory to codes [rows, count] with zero at 8."""
        raise NotImplementedError

    def code_pairs(self, octets: Array) -> Array:
        """Unpacks bytes [rows, n] to codes [rows, 2 n], the low halves first."""
        raise NotImplementedError

    def group_scales(self, value: Array, fmt: WeightFormat) -> Array:
        """Returns scales of `fmt.scale_type` as floats."""
        raise NotImplementedError

    def nibbles(self, words: Array, order: Sequence[int] = range(8)) -> Array:
        """Unpacks 4-bit codes: int32 [rows, n] → [rows, 8 n]. `order`: positions of a word's codes, 0 in its lowest bits."""
        raise NotImplementedError

    def repeat(self, values: Array, times: int) -> Array:
        """Repeats rows: [groups, rows] → [groups · times, rows]."""
        raise NotImplementedError

    # --- What is taken -------------------------------------------------------------------

    def __contains__(self, target: str) -> bool:
        return target in self._taken

    def take(
        self, name: str, read: Callable[[], Array], find: Callable[[str], Placement | None]
    ) -> bool:
        """Records the tensor `name` if it belongs to a quantized weight, and returns whether it
        does.

        `find` maps a checkpoint's name of a weight to its placement.
        """
        stem, _, part = name.rpartition(".")
        if part in PASSED_OVER:
            return True
        place = find(f"{stem}.weight")
        if place is None or place.target not in self._taken:
            return False
        fmt = self.formats[place.target]
        if part in REFUSED or (part == "weight_zero_point" and fmt.symmetric):
            raise _unsupported(name)
        if part not in PARTS or (part in SCALES and part != fmt.scale):
            return False
        if place.transform is not None or place.copies is not None:
            raise CheckpointError(
                f"{name}: rounded weights in this order of rows are not supported", field=name
            )
        self._taken[place.target].append((name, part, place, read))
        return True

    def _parts(self, target: str) -> tuple[str, ...]:
        """Names of the parts that a weight needs. GPTQ's zero points are checked, not stored."""
        if self.method in ("compressed-tensors", "fp8", "modelopt", "bitnet"):
            return stored_parts(self.formats[target])
        return ("qweight", "scales", "qzeros") if self.method == "awq" else ("qweight", "scales")

    def missing(self, names: Mapping[str, Placement]) -> list[str]:
        """Names of the checkpoint's missing tensors. `names` has the placements of dense weights."""
        return [
            name.removesuffix("weight") + part
            for name, place in names.items()
            if place.target in self._taken
            for part in self._parts(place.target)
            if all(
                (place.start, part) != (p.start, own) for _, own, p, _ in self._taken[place.target]
            )
        ]

    def linears(self) -> Mapping[str, Linear]:
        """The weights, without biases, by the names of `spec.parameters`."""
        return Pulled({name: partial(self._linear, name) for name in self._taken})

    # --- A weight from its parts ---------------------------------------------------------

    def _linear(self, name: str) -> Linear:
        fmt, shape = self.formats[name], self.shapes[name]
        assert fmt.product is not None
        weight = new_linear(
            fmt.product,
            shape,
            self.dtype,
            partial(self.make, name),
            size=native_group_size(fmt, *shape),
            zeros=self.method == "awq" or not fmt.symmetric,
            divides=not fmt.by_modelopt,
        )
        for taken in self._taken[name]:
            self._put(weight, *taken)
        return self.finished(name, weight)

    def _put(
        self,
        into: Any,  # made by `new_linear`
        name: str,
        part: str,
        place: Placement,
        read: Callable[[], Array],
    ) -> None:
        fmt, inner = self.formats[place.target], into.in_features
        rows = into.out_features - place.start if place.rows is None else place.rows
        at, groups = slice(place.start, place.start + rows), fmt.groups(inner)
        awq = self.method == "awq"

        def words(shape: tuple[int, int]) -> Array:
            return _checked(name, read(), shape, self.int32)

        def put4(codes: Array) -> None:
            into.weight[at] = self.pack4(codes, into.chunk)

        def spread(given: Array, values: Array) -> None:
            values[:, at] = self.repeat(given, len(values) // groups)

        match part:
            case "weight" | "weight_packed" if fmt.in_pairs:
                shape = stored_shape(fmt, part, rows, inner)
                own = self.on_device(_checked(name, read(), shape, self.uint8), place.target)
                put4(self.code_pairs(own))
            case "weight_global_scale" | "weight_scale_2":
                assert into.row_scales is not None
                into.row_scales[at] = _factor(name, float(read().reshape(-1)[0]))
            case "weight":
                codes = _checked(name, read(), (rows, inner), into.weight.dtype)
                self.put_eight_bits(into.weight[at], codes)
            case "weight_packed":
                own = words(stored_shape(fmt, part, rows, inner))
                if fmt.bits == 4:  # on the device, where unpacking is fast
                    put4(self.nibbles(self.on_device(own, place.target))[:, :inner])
                else:
                    put4(self.on_device(self.unpack(own, fmt.bits, inner), place.target))
            case "qweight" if awq:
                own = self.on_device(words((inner, rows // 8)), place.target)
                put4(self.nibbles(own, AWQ_COLUMNS).T)
            case "qweight":
                own = self.on_device(words((inner // 8, rows)), place.target)
                put4(self.nibbles(own.T))
            case "weight_zero_point":
                own = words(stored_shape(fmt, part, rows, inner))
                spread(self.unpack(own.T, fmt.bits, rows), into.zeros)
            case "qzeros" if awq:
                spread(self.nibbles(words((groups, rows // 8)), AWQ_COLUMNS), into.zeros)
            case "qzeros" | "g_idx":
                value = self.on_host(read()).reshape(-1).astype(np.int64)
                zeros, group = part == "qzeros", inner // groups
                plain = PLAIN_ZEROS[self.method] if zeros else np.arange(value.size) // group
                if not (value & 0xFFFFFFFF == plain).all():
                    raise _unsupported(name)
            case "scales":
                spread(_checked(name, read(), (groups, rows), None), into.scales)
            case _ if fmt.in_pairs:
                given = self.group_scales(_checked(name, read(), (rows, groups), None), fmt)
                # NaN, infinite, negative, or outside the range of the model's dtype
                into.scales[:, at] = given.T
                if not ((into.scales[:, at] >= 0) & (into.scales[:, at] < np.inf)).all():
                    raise CheckpointError(
                        f"{name} holds scales that are no numbers of {into.scales.dtype} from 0 on; use dtype='bfloat16'",
                        field=name,
                    )
            case _ if fmt.inputs is None:
                spread(_checked(name, read(), (rows, groups), None).T, into.scales)
            case _ if fmt.block_rows > 1:
                shape, start = stored_shape(fmt, part, rows, inner), at.start // fmt.block_rows
                into.scales[start : start + shape[0]] = _checked(name, read(), shape, None)
            case _:
                scales = read().reshape(-1)
                if len(scales) not in (1, rows):
                    raise CheckpointError(
                        f"{name} holds {len(scales)} scales for {rows} rows", field=name
                    )
                into.scales[at] = scales


def _factor(name: str, value: float) -> float:
    if not 0 < value < math.inf:
        raise CheckpointError(f"{name} is {value}; it must be a number above 0", field=name)
    return value


def _unsupported(name: str) -> CheckpointError:
    return CheckpointError(
        f"{name}: zero points and reordered inputs are not supported", field=name
    )


def _checked(name: str, value: Array, shape: tuple[int, int], dtype: Any) -> Array:
    if tuple(value.shape) != shape or (dtype is not None and value.dtype != dtype):
        wanted = f"{list(shape)}" + (f" of {dtype}" if dtype is not None else "")
        raise CheckpointError(
            f"{name} is {list(value.shape)} of {value.dtype}; {wanted} was expected", field=name
        )
    return value
