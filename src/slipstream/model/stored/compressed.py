"""Reads quantized weights as the tools of compressed-tensors, GPTQ and AWQ write them. Nothing is
quantized twice.

In place of `weight` in the model's type, a product has from compressed-tensors:
  fp8, int8   weight [out, in] of float8_e4m3fn or int8, weight_scale [out, 1] (or one for all rows)
  fp8-block   the same with weight_scale [out / 128, in / 128], or weight_scale_inv as DeepSeek V3
              and Qwen 3 write it (the codes are multiplied by it, whatever its name says)
  int4        weight_packed int32 [out, in · bits / 32], codes of 2 to 4 bits (`model.stored.packing`),
              weight_scale [out, groups], and if asymmetric weight_zero_point, codes packed down the
              rows
from GPTQ's tools:
  int4        qweight int32 [in / 8, out], eight codes of one column per word;
              scales [in / group_size, out]; qzeros, all 8 (written as 7 in the format's first
              version); g_idx, the group of each input
and from AWQ's:
  int4        qweight int32 [in, out / 8], eight columns per word in the order of AWQ_COLUMNS;
              scales [in / group_size, out]; qzeros int32 [in / group_size, out / 8], the codes that
              stand for 0, packed alike

weight_shape and input_scale are ignored, as inputs are scaled at run time. Other zero points and
reordered inputs are refused. A weight that the op set has no product for (such as more than 4 bits
with inputs of the model's type) is expanded when it is read (`stored_weights.expanded`).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from slipstream.errors import CheckpointError
from slipstream.kernels.quantize import DTYPES, pack4
from slipstream.kernels.weights import (
    GroupedLinear,
    Linear,
    ScaledLinear,
    SplitLinear,
    TileScaledLinear,
    chunk_of,
)
from slipstream.model.load.checkpoint import PASSED_OVER
from slipstream.model.load.pulled import Pulled
from slipstream.model.stored.packing import unpack_words
from slipstream.model.stored.parts import SCALES, stored_parts, stored_shape
from slipstream.spec.native_formats import native_group_size
from slipstream.spec.parameters import Placement, Shape
from slipstream.spec.quantization_config import AWQ_COLUMNS, PLAIN_ZEROS, Method
from slipstream.spec.scheme import WeightFormat

PARTS = (
    "weight",
    *SCALES,
    "weight_packed",
    "weight_zero_point",
    "qweight",
    "qzeros",
    "scales",
    "g_idx",
)
REFUSED = ("weight_g_idx", "input_zero_point")


_Taken: TypeAlias = tuple[str, str, Placement, Callable[[], Tensor]]
"""A tensor of the checkpoint: its name, the part of a weight that it is, its place, its reader."""


@dataclass(slots=True)
class _Weight:
    """Codes and scales of one product, filled by slices of rows."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None


class RoundedWeights:
    """Collects a checkpoint's quantized tensors. `linears()` returns the weights once all were
    taken."""

    def __init__(
        self,
        shapes: dict[str, Shape],
        formats: Mapping[str, WeightFormat],
        method: Method,
        *,
        dtype: torch.dtype,
        device: torch.device,
        columns: Mapping[str, tuple[int, ...]] | None = None,
        on_host: Container[str] = (),
    ) -> None:
        """Prepares for the weights of `formats`, a mapping from names in `shapes`.

        `columns` lists for some of them the inputs that keep the model's type. Weights in `on_host`
        are held in host memory.
        """
        self.method, self.dtype, self.formats, self.columns = method, dtype, formats, columns or {}
        self._shapes, self._device, self._on_host = shapes, device, on_host
        self._taken: dict[str, list[_Taken]] = {name: [] for name in formats}

    def __contains__(self, target: str) -> bool:
        return target in self._taken

    def take(
        self, name: str, read: Callable[[], Tensor], find: Callable[[str], Placement | None]
    ) -> bool:
        """Notes the tensor `name` if it belongs to a quantized weight, and returns whether it
        does.

        `find` gives the place of a product's weight by the checkpoint's name for it.
        """
        stem, _, part = name.rpartition(".")
        if part in PASSED_OVER:
            return True
        placement = find(f"{stem}.weight")
        if placement is None or placement.target not in self._taken:
            return False
        if part in REFUSED or (
            part == "weight_zero_point" and self.formats[placement.target].symmetric
        ):
            raise CheckpointError(
                f"{name}: zero points and reordered inputs are not supported", field=name
            )
        if part not in PARTS or (part in SCALES and part != self.formats[placement.target].scale):
            return False
        if placement.transform is not None or placement.copies is not None:
            raise CheckpointError(
                f"{name}: rounded weights in this order of rows are not supported", field=name
            )
        self._taken[placement.target].append((name, part, placement, read))
        return True

    def _empty(self, name: str) -> _Weight:
        """Allocates a weight. What no tensor fills (a rank's padding heads) stays zero."""
        fmt, (outer, inner) = self.formats[name], self._shapes[name]
        device = torch.device("cpu") if name in self._on_host else self._device
        if fmt.inputs is not None:
            codes = torch.zeros(outer, inner, dtype=DTYPES[fmt.inputs], device=device)
            blocks = (
                (-(-outer // fmt.block_rows), fmt.groups(inner)) if fmt.block_rows > 1 else (outer,)
            )
            return _Weight(codes, torch.zeros(blocks, dtype=torch.float32, device=device), None)
        size = native_group_size(fmt, outer, inner)
        assert size, "`check_scheme` and `native_formats` see to it"
        codes = torch.zeros(outer, inner // 4, dtype=torch.int16, device=device)
        scales = torch.zeros(inner // size, outer, dtype=self.dtype, device=device)
        has_zeros = self.method == "awq" or not fmt.symmetric
        return _Weight(codes, scales, torch.zeros_like(scales) if has_zeros else None)

    def _put(
        self,
        into: _Weight,
        name: str,
        part: str,
        placement: Placement,
        read: Callable[[], Tensor],
    ) -> None:
        fmt = self.formats[placement.target]
        rows = into.codes.shape[0] - placement.start if placement.rows is None else placement.rows
        at = slice(placement.start, placement.start + rows)
        if part == "qzeros" and into.zeros is not None:
            words = _checked(name, read(), (into.zeros.shape[0], rows // 8), torch.int32)
            into.zeros[:, at] = _awq_codes(words).to(into.zeros)
        elif part in ("qzeros", "g_idx"):
            self._check_plain(name, part, fmt, read())
        elif part == "scales":
            self._scales(name, fmt, read().T, into, at)
        elif part == "qweight":
            inner = into.codes.shape[1] * 4
            awq = self.method == "awq"
            shape = (inner, rows // 8) if awq else (inner // 8, rows)
            words = _checked(name, read(), shape, torch.int32).to(into.codes.device)
            codes = _awq_codes(words) if awq else torch.stack(_nibbles(words), dim=1).flatten(0, 1)
            into.codes[at] = pack4(
                codes.T.contiguous(), chunk_of(inner, native_group_size(fmt, rows, inner) or inner)
            )
        elif part in SCALES:
            self._scales(name, fmt, read(), into, at)
        elif fmt.inputs is not None:
            expected = (rows, into.codes.shape[1])
            codes = _checked(name, read(), expected, into.codes.dtype)
            into.codes[at].view(torch.uint8).copy_(codes.view(torch.uint8))
        elif part == "weight_zero_point":
            inner = into.codes.shape[1] * 4
            words = _checked(name, read(), stored_shape(fmt, part, rows, inner), torch.int32)
            zeros = unpack_words(words.T.contiguous(), fmt.bits, rows)  # [groups, rows]
            assert into.zeros is not None
            into.zeros[:, at] = (
                (zeros + 8).repeat_interleave(len(into.zeros) // len(zeros), dim=0).to(into.zeros)
            )
        else:
            inner = into.codes.shape[1] * 4
            words = _checked(name, read(), stored_shape(fmt, part, rows, inner), torch.int32).to(
                into.codes.device
            )
            codes = unpack_words(words, fmt.bits, inner).int() + 8
            into.codes[at] = pack4(
                codes, chunk_of(inner, native_group_size(fmt, rows, inner) or inner)
            )

    def _check_plain(self, name: str, part: str, fmt: WeightFormat, value: Tensor) -> None:
        """Checks that every zero point is 8, or that the inputs of a group are neighbours.
        CheckpointError if not."""
        if part == "qzeros":
            plain = (value.unique().long() & 0xFFFFFFFF).tolist() == [PLAIN_ZEROS[self.method]]
        else:
            plain = torch.equal(value.long(), torch.arange(len(value)) // (fmt.group_size or 1))
        if not plain:
            raise CheckpointError(
                f"{name}: zero points and reordered inputs are not supported", field=name
            )

    def _scales(
        self, name: str, fmt: WeightFormat, given: Tensor, weight: _Weight, at: slice
    ) -> None:
        rows, into = at.stop - at.start, weight.scales
        if fmt.inputs is None:
            num_groups = fmt.groups(weight.codes.shape[1] * 4)
            given = _checked(name, given, (rows, num_groups), None).T
            into[:, at] = given.repeat_interleave(len(into) // num_groups, dim=0).to(into)
        elif fmt.block_rows > 1:
            shape = stored_shape(fmt, fmt.scale, rows, weight.codes.shape[1])
            start = at.start // fmt.block_rows
            into[start : start + shape[0]] = _checked(name, given, shape, None).to(into)
        else:
            given = given.reshape(-1).to(into)
            if given.numel() not in (1, rows):
                raise CheckpointError(
                    f"{name} holds {given.numel()} scales for {rows} rows", field=name
                )
            into[at] = given

    def missing(self, names: Mapping[str, Placement]) -> list[str]:
        """Lists the checkpoint's missing tensors. `names` has the places of dense weights."""

        def parts(target: str) -> tuple[str, ...]:
            if self.method in ("compressed-tensors", "fp8"):
                return stored_parts(self.formats[target])
            return (
                ("qweight", "scales", "qzeros") if self.method == "awq" else ("qweight", "scales")
            )

        return [
            name.removesuffix("weight") + part
            for name, place in names.items()
            if place.target in self._taken
            for part in parts(place.target)
            if all(
                (place.start, part) != (p.start, own) for _, own, p, _ in self._taken[place.target]
            )
        ]

    def linears(self) -> Mapping[str, Linear]:
        """Returns the weights, without biases, by the names of `spec.parameters`."""
        return Pulled({name: partial(self._linear, name) for name in self._taken})

    def _linear(self, name: str) -> Linear:
        w, fmt = self._empty(name), self.formats[name]
        for taken in self._taken[name]:
            self._put(w, *taken)
        rows, inner = w.codes.shape[0], w.codes.shape[1] * 4
        if fmt.block_rows > 1:
            return TileScaledLinear(weight=w.codes, scales=w.scales, out_dtype=self.dtype)
        if size := native_group_size(fmt, rows, inner):
            chunk = chunk_of(inner, size)
            return GroupedLinear(
                weight=w.codes, scales=w.scales, zeros=w.zeros, group_size=size, chunk=chunk
            )
        if fmt.split:
            return SplitLinear.of(w.codes, w.scales, self.columns[name], self.dtype)
        return ScaledLinear(weight=w.codes, scales=w.scales, out_dtype=self.dtype)


def _nibbles(words: Tensor) -> list[Tensor]:
    """Returns the eight codes of int32 words, from the low bits up."""
    return [words >> shift & 15 for shift in range(0, 32, 4)]


def _awq_codes(words: Tensor) -> Tensor:
    """int32 [rows, out / 8] → codes [rows, out]."""
    found = _nibbles(words)
    return torch.stack([found[i] for i in AWQ_COLUMNS], dim=-1).flatten(1)


def _checked(name: str, value: Tensor, shape: tuple[int, int], dtype: torch.dtype | None) -> Tensor:
    if tuple(value.shape) != shape or (dtype is not None and value.dtype != dtype):
        wanted = f"{list(shape)}" + (f" of {dtype}" if dtype is not None else "")
        raise CheckpointError(
            f"{name} is {list(value.shape)} of {value.dtype}; {wanted} was expected", field=name
        )
    return value
