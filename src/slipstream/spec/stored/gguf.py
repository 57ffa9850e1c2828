"""A reader of GGUF files: their metadata and their tensors' bytes. Little-endian, versions 2 and 3.
No torch.

1. The file is mapped. Opening it reads only the header; a tensor's bytes are read when asked for.
2. Every count, length and offset is checked against the file's size before use. A damaged or
   hostile file raises a CheckpointError that names the place. It can't cause a hang, a huge
   allocation or a read beyond the end.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from slipstream.errors import CheckpointError
from slipstream.spec.stored.gguf_parts import parts_of
from slipstream.spec.stored.gguf_types import TYPES, QuantType

# NumPy is imported only when a file is opened, because the command line imports this module and
# `--help` must be fast.
if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    RawBytes: TypeAlias = npt.NDArray[np.uint8]


_OTHER_TYPES = {
    9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 41: "Q1_0", 42: "Q2_0",
}  # fmt: skip
"""Unsupported types, named in the error message."""

_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4
_MAX_DEPTH = 4  # nesting depth of arrays
_MAX_ENTRIES = 2**24  # entries of an array in the metadata; the largest vocabulary has 2**18
_MAX_NAMES = 2**20  # tensors, or keys
_NEIGHBORS = 2 * 2**20  # bytes around a page that a kernel with large folios maps with it


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """A tensor of the file. `shape` is in torch's order, rows first; the file stores it reversed."""

    name: str
    shape: tuple[int, ...]
    quant: QuantType
    offset: int  # bytes from the start of the file

    @property
    def type(self) -> str:
        return self.quant.name

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel // self.quant.block_size * self.quant.block_bytes


def _stamp(path: Path) -> tuple[int, ...]:
    """Properties of a file that change when it is modified. Empty if it doesn't exist."""
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


class GGUFFile:
    """An open file: its `metadata` and `tensors` by name. `raw` gives a tensor's bytes.

    A model in parts is read as one file, whichever part is given. `path` is the first, which has
    the metadata, and `files` are all. A missing part, or another model's, raises a CheckpointError
    that names it.
    """

    def __init__(self, path: str | Path) -> None:
        self.files = parts_of(Path(path))
        missing = [file.name for file in self.files if not file.is_file()]
        if missing and len(self.files) > 1:
            raise CheckpointError(
                f"{self.files[0].parent}: the model is in {len(self.files)} parts, and {', '.join(missing[:8])} "
                f"{'is' if len(missing) == 1 else 'are'} missing: put all of them into this folder",
                field=missing[0],
            )
        self._open(self.files[0])
        count = self.metadata.get("split.count", 0)
        if len(self.files) > 1 or count not in (0, 1):
            self._join(count)

    def _join(self, count: Any) -> None:
        if count != len(self.files):
            given = f"split.count = {count}" if count else "no split.count"
            raise CheckpointError(
                f"{self.path} has {given}, and its name says {len(self.files)} parts: they are named "
                "NAME-00001-of-00003.gguf and so on",
                field="split.count",
            )
        for number, path in enumerate(self.files):
            part = self
            if number:
                part = object.__new__(GGUFFile)
                part._open(path)
            said = part.metadata.get("split.no"), part.metadata.get("split.count")
            if said != (number, count):
                raise CheckpointError(
                    f"{path} has split.no = {said[0]} and split.count = {said[1]}, not {number} and {count}: it is not "
                    "what its name says",
                    field="split.no",
                )
            if number:
                if twice := self.tensors.keys() & part.tensors.keys():
                    raise CheckpointError(
                        f"{path}: the tensor {min(twice)!r} is in another part too",
                        field=min(twice),
                    )
                self._others |= dict.fromkeys(part.tensors, part)
                self.tensors |= part.tensors
        expected = self.metadata.get("split.tensors.count", len(self.tensors))
        if expected != len(self.tensors):
            raise CheckpointError(
                f"{self.path}: its {count} parts have {len(self.tensors)} tensors together, and split.tensors.count is "
                f"{expected}: they are not of one model",
                field="split.tensors.count",
            )

    def _open(self, path: Path) -> None:
        """Read one file's header."""
        self.path, self._others = path, dict[str, GGUFFile]()  # other parts' files by tensor name
        try:
            if self.path.stat().st_size == 0:
                raise CheckpointError(
                    f"{self.path}: the file is empty; fetch it again", field=self.path.name
                )
            with self.path.open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{self.path} can't be read: {error}", field=self.path.name
            ) from error
        import numpy as np

        self._mapped, self._stamp = mapped, _stamp(path)
        self._bytes: RawBytes = np.frombuffer(mapped, np.uint8)
        reader = _Reader(mapped, self.path)
        self.version = reader.version()
        num_tensors = reader.count("the number of tensors", 24)  # 24: bytes of the shortest entry
        num_metadata = reader.count("the number of metadata entries", 13)
        for what, number in (("tensors", num_tensors), ("metadata entries", num_metadata)):
            if number > _MAX_NAMES:
                raise reader.error(
                    f"it says that it has {number} {what}; at most {_MAX_NAMES} are read"
                )
        self._metadata_at, self._num_metadata = reader.offset, num_metadata
        self._metadata: dict[str, Any] | None = self._read_metadata(reader)
        self.tensors: dict[str, GGUFTensor] = self._read_tensors(reader, num_tensors)

    @property
    def metadata(self) -> dict[str, Any]:
        """The file's metadata by key. Read from the file again after `let_go_metadata`."""
        if (found := self._metadata) is None:
            reader = _Reader(self._mapped, self.path)
            reader.offset = self._metadata_at
            found = self._metadata = self._read_metadata(reader)
        return found

    def let_go_metadata(self) -> None:
        """Free the memory of the metadata: a vocabulary of 49,152 tokens takes 11 MB."""
        self._metadata = None

    def _read_metadata(self, reader: _Reader) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for _ in range(self._num_metadata):
            key = reader.string("a metadata key")
            if key in found:
                raise reader.error(f"the metadata key {key!r} appears twice", key)
            found[key] = reader.value(key)
        return found

    def raw(self, name: str) -> RawBytes:
        """The tensor's bytes in the file, mapped read-only: [numel / block_size, block_bytes]."""
        if name in self._others:
            return self._others[name].raw(name)
        tensor = self._find(name)
        flat = self._bytes[tensor.offset : tensor.offset + tensor.nbytes]
        return flat.reshape(-1, tensor.quant.block_bytes)

    def let_go(self, name: str | None = None, begin: int = 0, end: int | None = None) -> None:
        """Releases the memory pages of a tensor's bytes begin … end − 1, or of the whole file, after
        a read. Later reads load them from the file again."""
        if not hasattr(mmap, "MADV_DONTNEED"):
            return
        if name is None:
            for part in {self, *self._others.values()}:
                part._mapped.madvise(mmap.MADV_DONTNEED)
            return
        if name in self._others:
            self._others[name].let_go(name, begin, end)
            return
        tensor = self._find(name)
        first = tensor.offset + begin - _NEIGHBORS
        last = tensor.offset + (tensor.nbytes if end is None else end) + _NEIGHBORS
        first = max(0, first // mmap.PAGESIZE * mmap.PAGESIZE)
        self._mapped.madvise(mmap.MADV_DONTNEED, first, min(last, len(self._mapped)) - first)

    @property
    def is_current(self) -> bool:
        """Whether the files are still those that were opened, unmodified."""
        return all(part._stamp == _stamp(part.path) for part in {self, *self._others.values()})

    def _find(self, name: str) -> GGUFTensor:
        if name not in self.tensors:
            raise CheckpointError(f"{self.path} has no tensor {name!r}", field=name)
        return self.tensors[name]

    def _read_tensors(self, reader: _Reader, num_tensors: int) -> dict[str, GGUFTensor]:
        entries: list[tuple[str, tuple[int, ...], QuantType, int]] = []
        for _ in range(num_tensors):
            name = reader.string("a tensor's name")
            num_dims = reader.scalar("I", f"the dimensions of {name!r}")
            if not 1 <= num_dims <= _MAX_DIMS:
                raise reader.error(
                    f"the tensor {name!r} has {num_dims} dimensions, and 1 to {_MAX_DIMS} are possible",
                    name,
                )
            dims = tuple(reader.scalar("Q", f"the shape of {name!r}") for _ in range(num_dims))
            number = reader.scalar("I", f"the type of {name!r}")
            offset = reader.scalar("Q", f"the offset of {name!r}")
            if number not in TYPES:
                kind = _OTHER_TYPES.get(number, f"number {number}")
                known = " ".join(t.name for t in TYPES.values())
                raise reader.error(
                    f"the tensor {name!r} has the type {kind}, which is not supported. Use a file with the types "
                    f"{known}, such as Q4_K_M",
                    name,
                )
            entries.append((name, dims[::-1], TYPES[number], offset))
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 8 or alignment % 8:
            raise reader.error(
                f"general.alignment is {alignment!r}, not a multiple of 8", "general.alignment"
            )
        start = -(-reader.offset // alignment) * alignment
        tensors: dict[str, GGUFTensor] = {}
        for name, shape, quant, offset in entries:
            tensor = GGUFTensor(name, shape, quant, start + offset)
            if name in tensors:
                raise reader.error(f"the tensor {name!r} appears twice", name)
            if 0 in shape or shape[-1] % quant.block_size:
                raise reader.error(
                    f"the tensor {name!r} has shape {list(shape)}; rows of {quant.name} are multiples of "
                    f"{quant.block_size}, and nothing is empty",
                    name,
                )
            if offset % alignment:
                raise reader.error(
                    f"the tensor {name!r} starts at {offset}, off the alignment of {alignment}",
                    name,
                )
            if tensor.offset + tensor.nbytes > reader.size:
                raise reader.error(
                    f"the tensor {name!r} ends at byte {tensor.offset + tensor.nbytes}, and the file at {reader.size}: "
                    "it is cut off or damaged; fetch it again",
                    name,
                )
            tensors[name] = tensor
        if sum(tensor.nbytes for tensor in tensors.values()) > reader.size:
            raise reader.error(
                "its tensors together are larger than the file: they overlap, so it is damaged"
            )
        return tensors


class _Reader:
    """A cursor over the header. A count is checked against the remaining bytes before anything is
    allocated for it."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data, self.path = data, path
        self.size = len(data)
        self.offset = 0

    def error(self, message: str, field: str | None = None) -> CheckpointError:
        return CheckpointError(f"{self.path}: {message}", field=field)

    def version(self) -> int:
        if self.data[:4] != b"GGUF":
            raise self.error("this is not a GGUF file (it does not begin with GGUF)")
        self.offset = 4
        version: int = self.scalar("I", "the version")
        if version in (2, 3):
            return version
        hint = "; it is big-endian, which is not supported" if version & 0xFFFF == 0 else ""
        raise self.error(f"GGUF version {version} is not supported, 2 and 3 are{hint}")

    def take(self, num_bytes: int, what: str) -> int:
        """Skip bytes and return the offset where they begin. CheckpointError if the file ends earlier."""
        begin = self.offset
        if num_bytes > self.size - begin:
            raise self.error(
                f"the file ends within {what} (byte {begin}): it is cut off or damaged; fetch it again"
            )
        self.offset = begin + num_bytes
        return begin

    def scalar(self, code: str, what: str) -> Any:
        return struct.unpack_from(
            "<" + code, self.data, self.take(struct.calcsize("<" + code), what)
        )[0]

    def count(self, what: str, each: int) -> int:
        """Read a count of entries that take at least `each` bytes. CheckpointError if the file is too short for them."""
        count: int = self.scalar("Q", what)
        if count * each > self.size - self.offset:
            raise self.error(
                f"{what} is {count}, more than the file has room for: it is cut off or damaged; fetch it again"
            )
        return count

    def string(self, what: str) -> str:
        length = self.count(what, 1)
        begin = self.take(length, what)
        try:
            return self.data[begin : begin + length].decode()
        except UnicodeDecodeError as error:
            raise self.error(f"{what} is not UTF-8 (byte {begin})") from error

    def value(self, key: str) -> Any:
        return self._value(self.scalar("I", f"the type of {key}"), key, 0)

    def _value(self, kind: int, key: str, depth: int) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind], key)
        if kind == _STRING:
            return self.string(key)
        if kind != _ARRAY or depth == _MAX_DEPTH:
            raise self.error(f"the value of {key} has the unknown type {kind}", key)
        kind = self.scalar("I", f"the type of {key}")
        if kind in _SCALARS:
            code = "<" + _SCALARS[kind]
            count = self.entries(key, struct.calcsize(code))
            begin = self.take(count * struct.calcsize(code), key)
            import numpy as np

            return np.frombuffer(self.data, np.dtype(code), count, begin).tolist()
        if kind == _STRING:
            return self._strings(self.entries(key, 8), key)
        return [self._value(kind, key, depth + 1) for _ in range(self.entries(key, 12))]

    def entries(self, key: str, each: int) -> int:
        """Read the length of an array whose entries take at least `each` bytes."""
        count = self.count(f"the length of {key}", each)
        if count > _MAX_ENTRIES:
            raise self.error(f"{key} has {count} entries; at most {_MAX_ENTRIES} are read", key)
        return count

    def _strings(self, count: int, key: str) -> list[str]:
        """Read an array of strings. The code of `string` is inlined, because a vocabulary has hundreds of thousands of
        entries."""
        data, size, offset = self.data, self.size, self.offset
        length_at: Callable[[mmap.mmap, int], tuple[int]] = struct.Struct("<Q").unpack_from
        strings = []
        try:
            for _ in range(count):
                (length,) = length_at(data, offset)
                offset += 8
                end = offset + length
                if end > size:
                    raise struct.error
                strings.append(data[offset:end].decode())
                offset = end
        except struct.error:
            raise self.error(
                f"the file ends within {key} (byte {offset}): it is cut off or damaged; fetch it again",
                key,
            ) from None
        except UnicodeDecodeError as error:
            raise self.error(f"{key}[{len(strings)}] is not UTF-8", key) from error
        self.offset = offset
        return strings
