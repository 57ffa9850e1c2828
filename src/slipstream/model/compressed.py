"""Weights that a checkpoint holds rounded, as compressed-tensors, GPTQ's or AWQ's tools write them, put together without a
second rounding.

Beside each product's name stand, instead of `weight` in the model's type, from compressed-tensors:
    fp8, int8   weight [out, in] of float8_e4m3fn or int8, weight_scale [out, 1] (or one number for all rows)
    int4        weight_packed int32 [out, in / 8], eight codes (number + 8) a word from the low bits up, and
                weight_scale [out, in / group_size]
and from GPTQ's tools:
    int4        qweight int32 [in / 8, out], eight codes of one column a word; scales [in / group_size, out]; qzeros, all 8
                (written as 7 in the format's first version); g_idx, which group an input is in
and from AWQ's:
    int4        qweight int32 [in, out / 8], eight columns a word in the order of AWQ_COLUMNS; scales [in / group_size, out];
                qzeros int32 [in / group_size, out / 8], the code that stands for 0, packed alike
What is only noted there (weight_shape, and input_scale: inputs are scaled as they come) is passed over; other zero points and
reordered inputs are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from slipstream.errors import CheckpointError
from slipstream.kernels.ops import GroupedLinear, Linear, ScaledLinear
from slipstream.kernels.quantize import DTYPES, chunk_of, pack4
from slipstream.model.parameters import Placement, Shape
from slipstream.model.quantization_config import Method
from slipstream.model.scheme import Scheme

PRODUCTS = (".qkv.weight", ".out.weight", ".up.weight", ".down.weight", ".q.weight", ".q_latent.weight", ".latent.weight")
PARTS = ("weight", "weight_scale", "weight_packed", "qweight", "qzeros", "scales", "g_idx")
PASSED_OVER = ("weight_shape", "input_scale", "output_scale", "k_scale", "v_scale")
AWQ_COLUMNS = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in a word, counted in codes from the low bits, columns 0 to 7 stand."""

REFUSED = ("weight_zero_point", "weight_g_idx", "input_zero_point")


@dataclass(slots=True)
class _Weight:
    """One product's codes and scales, filled a slice of rows at a time: `filled` holds (first row, which part)."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    filled: set[tuple[int, str]] = field(default_factory=set)


class RoundedWeights:
    """Takes a checkpoint's rounded tensors; `linears()` gives the weights when all were taken."""

    def __init__(
        self, shapes: dict[str, Shape], scheme: Scheme, method: Method, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.scheme, self.method, self.dtype = scheme, method, dtype
        self._weights: dict[str, _Weight] = {}
        for name, shape in shapes.items():
            if not (name.endswith(PRODUCTS) or (scheme.head and name == "head.weight")):
                continue
            outer, inner = shape
            zeros = None
            if scheme.inputs is not None:
                codes = torch.empty(outer, inner, dtype=DTYPES[scheme.inputs], device=device)
                scales = torch.empty(outer, dtype=torch.float32, device=device)
            else:
                assert scheme.group_size is not None
                codes = torch.empty(outer, inner // 4, dtype=torch.int16, device=device)
                scales = torch.empty(inner // scheme.group_size, outer, dtype=dtype, device=device)
                zeros = torch.empty_like(scales) if method == "awq" else None
            self._weights[name] = _Weight(codes, scales, zeros)

    def __contains__(self, target: str) -> bool:
        return target in self._weights

    def take(self, name: str, read: Callable[[], Tensor], find: Callable[[str], Placement | None]) -> bool:
        """Whether the tensor `name` belongs to a rounded weight; if so it is read into its place. `find` gives the place of a
        product's weight by the checkpoint's name for it."""
        stem, _, part = name.rpartition(".")
        if part in PASSED_OVER:
            return True
        placement = find(f"{stem}.weight")
        if placement is None or placement.target not in self._weights:
            return False
        if part in REFUSED:
            raise CheckpointError(f"{name}: zero points and reordered inputs are not supported", field=name)
        if part not in PARTS:
            return False
        if placement.transform is not None or placement.copies is not None:
            raise CheckpointError(f"{name}: rounded weights in this order of rows are not supported", field=name)
        into = self._weights[placement.target]
        rows = into.codes.shape[0] - placement.start if placement.rows is None else placement.rows
        at = slice(placement.start, placement.start + rows)
        if part == "qzeros" and into.zeros is not None:
            words = _checked(name, read(), (into.zeros.shape[0], rows // 8), torch.int32)
            into.zeros[:, at] = _awq_codes(words).to(into.zeros)
        elif part in ("qzeros", "g_idx"):
            self._check_plain(name, part, read())
        elif part == "scales":
            self._scales(name, read().T, into.scales, at, rows)
        elif part == "qweight":
            inner = into.codes.shape[1] * 4
            awq = self.method == "awq"
            shape = (inner, rows // 8) if awq else (inner // 8, rows)
            words = _checked(name, read(), shape, torch.int32).to(into.codes.device)
            codes = _awq_codes(words) if awq else torch.stack(_nibbles(words), dim=1).flatten(0, 1)
            into.codes[at] = pack4(codes.T.contiguous(), chunk_of(inner, self.scheme))
        elif part == "weight_scale":
            self._scales(name, read(), into.scales, at, rows)
        elif self.scheme.inputs is not None:
            expected = (rows, into.codes.shape[1])
            codes = _checked(name, read(), expected, into.codes.dtype)
            into.codes[at].view(torch.uint8).copy_(codes.view(torch.uint8))
        else:
            inner = into.codes.shape[1] * 4
            words = _checked(name, read(), (rows, inner // 8), torch.int32).to(into.codes.device)
            codes = torch.stack(_nibbles(words), dim=-1).flatten(1)
            into.codes[at] = pack4(codes, chunk_of(inner, self.scheme))
        into.filled.add((placement.start, part))
        return True

    def _check_plain(self, name: str, part: str, value: Tensor) -> None:
        """Every number stands for code − 8, and groups are of neighbours."""
        if part == "qzeros":
            plain = value.unique().tolist() == [0x77777777 if self.method == "gptq" else 0x88888888 - 2**32]
        else:
            plain = torch.equal(value.long(), torch.arange(len(value)) // (self.scheme.group_size or 1))
        if not plain:
            raise CheckpointError(f"{name}: zero points and reordered inputs are not supported", field=name)

    def _scales(self, name: str, given: Tensor, into: Tensor, at: slice, rows: int) -> None:
        if self.scheme.inputs is None:
            into[:, at] = _checked(name, given, (rows, into.shape[0]), None).T.to(into)
        else:
            given = given.reshape(-1).to(into)
            if given.numel() not in (1, rows):
                raise CheckpointError(f"{name} holds {given.numel()} scales for {rows} rows", field=name)
            into[at] = given

    def missing(self, names: dict[str, Placement]) -> list[str]:
        """The checkpoint's tensors that were not there; `names` are the places of unrounded ones."""
        parts: tuple[str, ...] = ("weight" if self.scheme.inputs is not None else "weight_packed", "weight_scale")
        if self.method != "compressed-tensors":
            parts = ("qweight", "scales", "qzeros") if self.method == "awq" else ("qweight", "scales")
        return [
            name.removesuffix("weight") + part
            for name, place in names.items()
            if place.target in self._weights
            for part in parts
            if (place.start, part) not in self._weights[place.target].filled
        ]

    def linears(self) -> dict[str, Linear]:
        """By the names of `model.parameters`, without biases."""
        made: dict[str, Linear] = {}
        for name, w in self._weights.items():
            if self.scheme.inputs is not None:
                made[name] = ScaledLinear(weight=w.codes, scales=w.scales, out_dtype=self.dtype)
            else:
                assert self.scheme.group_size is not None
                chunk = chunk_of(w.codes.shape[1] * 4, self.scheme)
                made[name] = GroupedLinear(
                    weight=w.codes, scales=w.scales, zeros=w.zeros, group_size=self.scheme.group_size, chunk=chunk
                )
        return made


def _nibbles(words: Tensor) -> list[Tensor]:
    """The eight codes of int32 words, from the low bits up."""
    return [words >> shift & 15 for shift in range(0, 32, 4)]


def _awq_codes(words: Tensor) -> Tensor:
    """int32 [rows, out / 8] → codes [rows, out]."""
    found = _nibbles(words)
    return torch.stack([found[i] for i in AWQ_COLUMNS], dim=-1).flatten(1)


def _checked(name: str, value: Tensor, shape: tuple[int, int], dtype: torch.dtype | None) -> Tensor:
    if tuple(value.shape) != shape or (dtype is not None and value.dtype != dtype):
        wanted = f"{list(shape)}" + (f" of {dtype}" if dtype is not None else "")
        raise CheckpointError(f"{name} is {list(value.shape)} of {value.dtype}; {wanted} was expected", field=name)
    return value
