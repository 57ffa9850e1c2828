"""GGUF files: header, metadata and tensors, mapped rather than read. Versions 2 and 3, little-endian.

Every count and offset is checked against the size of the file before it is used: a damaged or hostile file gives a
CheckpointError, never a crash or a huge allocation. Format: ggml's docs/gguf.md.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from slipstream.errors import CheckpointError
from slipstream.model.gguf_quants import BLOCKS, dequantize_blocks

if TYPE_CHECKING:
    import torch

Bytes = npt.NDArray[np.uint8]

_TYPE_NAMES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K",
    13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S",
    22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 30: "BF16", 34: "TQ1_0",
    35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip
_SCALARS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
_STRING, _ARRAY = 8, 9
_MAX_DEPTH = 4
_CHUNK = 1 << 22
"""Elements dequantised at a time: 16 MiB of float32."""


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """`shape` is torch's order: the fastest-running dimension last."""

    name: str
    shape: tuple[int, ...]
    type: str
    offset: int
    nbytes: int


class GGUFFile:
    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._data: Bytes = np.memmap(path, dtype=np.uint8, mode="r")
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} can't be read: {error}", field=path.name) from error
        self._at = 0
        self._view = memoryview(self._data)
        if bytes(self._take(4)) != b"GGUF":
            raise self._damaged("it does not begin with GGUF")
        version = self._int("<I")
        if version not in (2, 3):
            raise self._damaged(f"version {version} is not supported (2 and 3 are)")
        num_tensors, num_values = self._int("<Q"), self._int("<Q")
        if num_tensors * 24 + num_values * 12 > len(self._data):
            raise self._damaged("its header counts more than the file can hold")
        self.metadata: dict[str, Any] = {}
        for _ in range(num_values):
            key = self._string()
            self.metadata[key] = self._value(self._int("<I"), 0)
        self.tensors = self._tensor_table(num_tensors)

    def dequantize(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """The tensor in `dtype`, a few million elements at a time, so that no whole float32 copy is made."""
        import torch

        tensor = self.tensors[name]
        if tensor.type not in BLOCKS:
            raise CheckpointError(
                f"{self.path.name}: the tensor {name} is of type {tensor.type}, which is not supported "
                f"({', '.join(BLOCKS)} are)",
                field=name,
            )
        elements, size = BLOCKS[tensor.type]
        out = torch.empty(tensor.shape, dtype=dtype)
        flat = out.view(-1)
        raw = self.raw(name).reshape(-1, size)
        step = max(1, _CHUNK // elements)
        for begin in range(0, len(raw), step):
            values = dequantize_blocks(tensor.type, raw[begin : begin + step])
            first = begin * elements
            flat[first : first + values.size] = torch.from_numpy(values.reshape(-1))
        return out

    def raw(self, name: str) -> Bytes:
        """The tensor's bytes as they are in the file, mapped."""
        tensor = self.tensors[name]
        return self._data[tensor.offset : tensor.offset + tensor.nbytes]

    # --- Header -------------------------------------------------------------------------------------------------------

    def _tensor_table(self, count: int) -> dict[str, GGUFTensor]:
        found: list[tuple[str, tuple[int, ...], str, int]] = []
        for _ in range(count):
            name = self._string()
            num_dims = self._int("<I")
            if not 1 <= num_dims <= 4:
                raise self._damaged(f"the tensor {name} has {num_dims} dimensions")
            shape = tuple(self._int("<Q") for _ in range(num_dims))[::-1]
            kind = self._int("<I")
            found.append((name, shape, _TYPE_NAMES.get(kind, f"number {kind}"), self._int("<Q")))
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment > 1 << 20:
            raise self._damaged(f"general.alignment = {alignment!r}")
        start = -(-self._at // alignment) * alignment
        tensors: dict[str, GGUFTensor] = {}
        for name, shape, kind_name, offset in found:
            count = 1
            for n in shape:
                count *= n
            nbytes = 0
            if kind_name in BLOCKS:  # others are refused when they are read
                elements, size = BLOCKS[kind_name]
                if shape[-1] % elements:
                    raise self._damaged(f"a row of the tensor {name} is no whole number of {kind_name} blocks")
                nbytes = count // elements * size
            if start + offset + nbytes > len(self._data):
                raise self._damaged(f"the tensor {name} reaches beyond the end of the file; fetch it again")
            if name in tensors:
                raise self._damaged(f"the tensor {name} occurs twice")
            tensors[name] = GGUFTensor(name, shape, kind_name, start + offset, nbytes)
        return tensors

    def _value(self, kind: int, depth: int) -> Any:
        if kind in _SCALARS:
            dtype = np.dtype(_SCALARS[kind])
            return np.frombuffer(self._take(dtype.itemsize), dtype)[0].item()
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY or depth >= _MAX_DEPTH:
            raise self._damaged(f"a metadata value is of unknown type {kind}")
        item, count = self._int("<I"), self._int("<Q")
        if item in _SCALARS:
            dtype = np.dtype(_SCALARS[item])
            return np.frombuffer(self._take(count * dtype.itemsize), dtype).tolist()
        if count * (8 if item == _STRING else 12) > len(self._data) - self._at:
            raise self._damaged("a metadata array is longer than the file")
        if item == _STRING:
            return self._strings(count)
        return [self._value(item, depth + 1) for _ in range(count)]

    def _strings(self, count: int) -> list[str]:
        """Many strings at once: the vocabulary's hundred thousand are read at every start."""
        data, at, end = self._view, self._at, len(self._data)
        unpack, found = struct.Struct("<Q").unpack_from, []
        for _ in range(count):
            if at + 8 > end:
                raise self._damaged("it ends within its metadata")
            (length,) = unpack(data, at)
            at += 8
            if length > end - at:
                raise self._damaged("a string is longer than the file")
            found.append(str(data[at : at + length], "utf-8", "replace"))
            at += length
        self._at = at
        return found

    def _string(self) -> str:
        return str(self._take(self._int("<Q")), "utf-8", "replace")

    def _int(self, form: str) -> int:
        value: int = struct.unpack(form, self._take(struct.calcsize(form)))[0]
        return value

    def _take(self, count: int) -> memoryview:
        if count > len(self._data) - self._at:
            raise self._damaged("it ends within its header; fetch it again")
        self._at += count
        return self._view[self._at - count : self._at]

    def _damaged(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self.path} is no sound GGUF file: {why}", field=self.path.name)
