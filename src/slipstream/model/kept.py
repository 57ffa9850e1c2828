"""What a load rounded, kept in a file, so that the next start of the same checkpoint reads it instead of rounding again.

A file is known by all that its bytes follow from: the checkpoint's files (path, size, time of change), the scheme, the model's
type, the op set's layout and Slipstream's version. A checkpoint and scheme have one file; another replaces it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from slipstream import __version__
from slipstream.errors import CheckpointError
from slipstream.kernels.ops import Linear, OpSet
from slipstream.model.description import ModelDescription
from slipstream.model.gguf_blocks import BlockWeights
from slipstream.model.parameters import Placement
from slipstream.model.scheme import Scheme
from slipstream.model.weights import safetensors_files

_logger = logging.getLogger(__name__)


class KeptWeights:
    """Products as an earlier start made them, in place of the checkpoint's tensors; `rest` are held as they are."""

    def __init__(self, linears: dict[str, Linear], rest: BlockWeights | None) -> None:
        self._own, self._rest = linears, rest

    def __contains__(self, target: str) -> bool:
        return target in self._own or (self._rest is not None and target in self._rest)

    def take(self, name: str, read: Callable[[], Tensor], find: Callable[[str], Placement | None]) -> bool:
        """Whether the tensor `name` is of a kept product, and need not be read, or is held by the rest."""
        if self._rest is not None and self._rest.take(name, read, find):
            return True
        stem, _, part = name.rpartition(".")
        place = find(name)
        if place is None and part != "bias":  # codes, scales and shapes stand beside the weight's name
            place = find(f"{stem}.weight")
        return place is not None and place.target in self._own

    def missing(self, names: Mapping[str, Placement]) -> list[str]:
        return []

    def linears(self) -> dict[str, Linear]:
        return self._own if self._rest is None else self._own | self._rest.linears()


class KeptFile:
    """Where the products of one checkpoint are kept, for an op set with a layout."""

    def __init__(
        self, folder: Path, description: ModelDescription, scheme: Scheme | None, dtype: torch.dtype, ops: OpSet
    ) -> None:
        path = description.path.resolve()
        files = [path] if description.format == "gguf" else [path / "config.json", *safetensors_files(path)]
        stamps = [(str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
        known = json.dumps([stamps, str(scheme), str(dtype), ops.layout, __version__])
        self._ops, self._folder = ops, folder
        self._family = f"{path.stem}-{scheme.name if scheme else 'stored'}-{_digest(f'{path} {scheme}')[:8]}-"
        self.path = folder / f"{self._family}{_digest(known)[:24]}.safetensors"

    def read(self) -> dict[str, Linear] | None:
        """The products, without biases. None if there is no such file, or it is damaged: then it is removed."""
        if not self.path.is_file():
            return None
        try:
            return self._ops.read_products(self.path)
        except CheckpointError as error:
            _logger.warning("%s; it is made anew", error)
            self.path.unlink(missing_ok=True)
            return None

    def write(self, products: Mapping[str, Linear], num_bytes: int) -> None:
        """Keeps `products`, of `num_bytes` at most, if that takes no more than half of the disk's room; says so if not."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(self._folder).free
            if free < 2 * num_bytes:
                raise OSError(f"{free:,} bytes are free, and {num_bytes:,} of them should not be more than half")
            written = self._ops.write_products(self.path, products)
        except OSError as error:
            _logger.warning("rounded weights are not kept for the next start (weights_cache='off' asks for that): %s", error)
            return
        if not written:
            return
        _logger.info("the rounded weights are kept for the next start: %s, %d MiB", self.path, written >> 20)
        for older in self._folder.glob(f"{self._family}*.safetensors"):
            if older != self.path:
                older.unlink(missing_ok=True)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
