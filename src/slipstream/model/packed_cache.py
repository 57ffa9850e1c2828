"""What a load rounded, kept in a file, so that the next start of the same checkpoint reads it instead of rounding again.

A file is known by all that its bytes follow from: the checkpoint's files (path, size, times of change), what they are said to
hold, the scheme, the model's type, the op set's layout and Slipstream's version. A checkpoint, scheme, type and op set have one
file; another replaces it. In an engine folder, which is copied to other machines, the checkpoint's files are known by their
contents instead.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from slipstream import __version__
from slipstream.errors import CheckpointError
from slipstream.kernels.ops import OpSet
from slipstream.kernels.weights import Linear
from slipstream.model.compressed import PASSED_OVER
from slipstream.model.gguf_blocks import BlockWeights
from slipstream.model.weights import safetensors_files
from slipstream.spec.description import ModelDescription
from slipstream.spec.parameters import Placement
from slipstream.spec.scheme import Scheme

_logger = logging.getLogger(__name__)


FORM = 1
"""Another number for another way of rounding, or other names of products, within a version."""

LEAST_BYTES = 16 * 2**20
"""Of a smaller model nothing is kept: its start gains nothing that one would notice."""

UNFINISHED_S = 3600.0
"""After so long a file that was begun is taken to be nobody's."""


SAMPLE_BYTES = 64 * 2**10


class KeptWeights:
    """Products as an earlier start made them, in place of the checkpoint's tensors; `rest` are held as they are. `rounded`: the
    checkpoint's are stored rounded, with scales and the like beside them."""

    def __init__(self, linears: dict[str, Linear], rest: BlockWeights | None, *, rounded: bool) -> None:
        self._own, self._rest, self._rounded = linears, rest, rounded

    def __contains__(self, target: str) -> bool:
        return target in self._own or (self._rest is not None and target in self._rest)

    def take(self, name: str, read: Callable[[], Tensor], find: Callable[[str], Placement | None]) -> bool:
        """Whether the tensor `name` is of a kept product, and need not be read, or is held by the rest."""
        if self._rest is not None and self._rest.take(name, read, find):
            return True
        stem, _, part = name.rpartition(".")
        if self._rounded and part in PASSED_OVER:
            return True
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
        own = path.parent if path.is_file() else path
        travels = folder.resolve().parent == own  # in the checkpoint's own folder, and copied with it
        stamps = [_contents(f) if travels else _stamp(f) for f in files]
        of = ["" if travels else str(path), str(scheme), str(dtype), ops.describe()]
        stored = [str(description.quantization), str(description.split_columns())]
        known = json.dumps([*of, stamps, stored, ops.layout, __version__, FORM])
        self._ops, self._folder = ops, folder
        name = "model" if travels and path.is_dir() else path.stem
        self._family = f"{name}-{scheme.name if scheme else 'stored'}-{_digest(json.dumps(of))[:8]}-"
        self.path = folder / f"{self._family}{_digest(known)[:24]}.safetensors"

    def read(self) -> dict[str, Linear] | None:
        """The products, without biases. None if there is no such file, or it can't be read; what is not whole is removed."""
        try:
            try:
                return self._ops.read_products(self.path) if self.path.is_file() else None
            except CheckpointError as error:
                _logger.warning("%s; it is made anew", error)
                self.path.unlink(missing_ok=True)
        except OSError as error:
            _logger.warning("kept weights are not read, the checkpoint's are: %s", error)
        return None

    def write(self, products: Mapping[str, Linear], num_bytes: int) -> threading.Thread | None:
        """Begins to write `products`, of `num_bytes` at most, and returns who does: the model can be used meanwhile. They are
        kept only if that takes no more than half of the disk's room; what hinders is logged."""
        if not products or num_bytes < LEAST_BYTES:
            return None
        writer = threading.Thread(target=self._write, args=(products, num_bytes), name="weights")
        writer.start()  # no daemon: a short run ends when the file is whole
        return writer

    def _write(self, products: Mapping[str, Linear], num_bytes: int) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._clear(f".{self._family}", before=time.time() - UNFINISHED_S)
            free = shutil.disk_usage(self._folder).free
            if free < 2 * num_bytes:
                raise OSError(f"{free:,} bytes are free, and {num_bytes:,} of them should not be more than half")
            written = self._ops.write_products(self.path, products)
            if written:
                _logger.info("rounded weights are kept for the next start: %s, %d MiB", self.path, written >> 20)
                self._clear(self._family)
        except OSError as error:
            _logger.warning("rounded weights are not kept for the next start (weights_cache='off' asks for that): %s", error)

    def _clear(self, prefix: str, before: float | None = None) -> None:
        """Remove the files so named, but the one at hand."""
        for file in self._folder.iterdir():
            ours = file.name.startswith(prefix) and file != self.path
            if ours and (before is None or file.stat().st_mtime < before):
                file.unlink(missing_ok=True)


def _stamp(file: Path) -> tuple[str | int, ...]:
    found = file.stat()
    return str(file), found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _contents(file: Path) -> tuple[str | int, ...]:
    """What a copy elsewhere has, too: name, size, and a digest of the file's ends and 64 places between."""
    digest, size = hashlib.sha256(), file.stat().st_size
    with file.open("rb") as opened:
        for part in range(66):
            opened.seek(max(0, size - SAMPLE_BYTES) * part // 65)
            digest.update(opened.read(SAMPLE_BYTES))
    return file.name, size, digest.hexdigest()


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
