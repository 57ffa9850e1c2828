"""Keeps quantized weights in a file, so that the next start with the same checkpoint reads them.

1. A file's name is a digest of everything that its content depends on: the checkpoint's files
   (path, size, times of change) and description, the scheme, the model's dtype, the op set's
   layout and Slipstream's version.
2. There is one file per checkpoint, scheme, dtype and op set. A new one replaces the old.
3. An engine folder may be copied to other machines. In it the checkpoint's files are identified by
   content instead.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream import __version__
from slipstream.errors import CheckpointError
from slipstream.kernels.weights.forms import Linear
from slipstream.model.load.checkpoint import PASSED_OVER
from slipstream.model.stored.gguf_blocks import BlockWeights
from slipstream.spec.description import ModelDescription
from slipstream.spec.parameters import Placement
from slipstream.spec.scheme import Scheme
from slipstream.spec.stored.safetensors import safetensors_files

if TYPE_CHECKING:
    from slipstream.kernels.cpu.host_ops import HostOps
    from slipstream.kernels.ops import OpSet

_logger = logging.getLogger(__name__)


FORM = 2
"""Version of the file format. Raised when quantization or the weights' names change within a
release."""

MIN_BYTES = 16 * 2**20
"""Minimum size of a model that is kept. A smaller one would not start noticeably faster."""

UNFINISHED_S = 3600.0
"""Seconds after which an unfinished file counts as abandoned."""


SAMPLE_BYTES = 64 * 2**10


class CachedWeights:
    """Packed weights of an earlier start, used instead of the checkpoint's tensors.

    `rest` collects further weights that stay as stored. `rounded`: the checkpoint stores the cached
    weights quantized, with scales next to them.
    """

    def __init__(
        self, linears: dict[str, Linear], rest: BlockWeights | None, *, rounded: bool
    ) -> None:
        self._own, self._rest, self._rounded = linears, rest, rounded

    def __contains__(self, target: str) -> bool:
        return target in self._own or (self._rest is not None and target in self._rest)

    def take(
        self, name: str, read: Callable[[], Any], find: Callable[[str], Placement | None]
    ) -> bool:
        """Whether the tensor `name` need not be read, because it belongs to a cached weight or
        `rest` takes it."""
        if self._rest is not None and self._rest.take(name, read, find):
            return True
        stem, _, part = name.rpartition(".")
        if self._rounded and part in PASSED_OVER:
            return True
        place = find(name)
        if place is None and part != "bias":  # codes, scales and shapes are named like the weight
            place = find(f"{stem}.weight")
        return place is not None and place.target in self._own

    def missing(self, names: Mapping[str, Placement]) -> list[str]:
        return []

    def linears(self) -> dict[str, Linear]:
        return self._own if self._rest is None else self._own | self._rest.linears()


class PackedCacheFile:
    """The file with one checkpoint's packed weights, for an op set's layout."""

    def __init__(
        self,
        folder: Path,
        description: ModelDescription,
        scheme: Scheme | None,
        dtype: str,
        ops: OpSet | HostOps,
    ) -> None:
        path = description.path.resolve()
        files = _files(path, description)
        own = path.parent if path.is_file() else path
        # it is in the checkpoint's own folder and is copied with it
        travels = folder.resolve().parent == own
        stamps = [_contents(f) if travels else _stamp(f) for f in files]
        of = ["" if travels else str(path), str(scheme), dtype, ops.describe()]
        stored = [str(description.quantization), str(description.split_columns())]
        known = json.dumps([*of, stamps, stored, ops.layout, __version__, FORM])
        self._ops, self._folder = ops, folder
        name = "model" if travels and path.is_dir() else path.stem
        self._family = (
            f"{name}-{scheme.name if scheme else 'stored'}-{_digest(json.dumps(of))[:8]}-"
        )
        self.path = folder / f"{self._family}{_digest(known)[:24]}.safetensors"

    def read(self) -> dict[str, Linear] | None:
        """Reads the weights, without biases. None if there is no file or it can't be read. A
        damaged file is removed."""
        try:
            try:
                return self._ops.read_products(self.path) if self.path.is_file() else None
            except CheckpointError as error:
                _logger.warning("%s; it is made anew", error)
                self.path.unlink(missing_ok=True)
        except OSError as error:
            _logger.warning(
                "the kept weights can't be read, so the checkpoint's are used: %s", error
            )
        return None

    def write(self, products: Mapping[str, Linear], num_bytes: int) -> threading.Thread | None:
        """Starts a thread that writes `products`, of at most `num_bytes`, and returns it, or None
        for small models. The model can be used meanwhile.

        The thread logs a failure, and writes nothing if the file would take over half of the disk's
        free space.
        """
        if not products or num_bytes < MIN_BYTES:
            return None
        writer = threading.Thread(target=self._write, args=(products, num_bytes), name="weights")
        writer.start()  # not a daemon, so that a short run ends only when the file is complete
        return writer

    def _write(self, products: Mapping[str, Linear], num_bytes: int) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._clear(f".{self._family}", before=time.time() - UNFINISHED_S)
            import shutil

            free = shutil.disk_usage(self._folder).free
            if free < 2 * num_bytes:
                raise OSError(
                    f"{free:,} bytes are free, and the weights' {num_bytes:,} must not be more than half of them"
                )
            written = self._ops.write_products(self.path, products)
            if written:
                _logger.info(
                    "rounded weights are kept for the next start: %s, %d MiB",
                    self.path,
                    written >> 20,
                )
                self._clear(self._family)
        except OSError as error:
            _logger.warning(
                "rounded weights are not kept for the next start (weights_cache='off' turns this off): %s",
                error,
            )

    def _clear(self, prefix: str, before: float | None = None) -> None:
        """Removes the files with this prefix, except the current one. With `before` (a time), only
        older ones."""
        for file in self._folder.iterdir():
            ours = file.name.startswith(prefix) and file != self.path
            if ours and (before is None or file.stat().st_mtime < before):
                file.unlink(missing_ok=True)


def checkpoint_stamps(description: ModelDescription) -> list[tuple[str | int, ...]]:
    """A key that changes with the checkpoint's files: names, sizes, times of modification and of change (ctime)."""
    return [_stamp(file) for file in _files(description.path.resolve(), description)]


def _files(path: Path, description: ModelDescription) -> list[Path]:
    return (
        [file.resolve() for file in description.gguf.files]
        if description.gguf is not None
        else [path / "config.json", *safetensors_files(path)]
    )


def _stamp(file: Path) -> tuple[str | int, ...]:
    found = file.stat()
    return str(file), found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _contents(file: Path) -> tuple[str | int, ...]:
    """A key that is the same for a copy of the file: name, size, and a digest of the file's two
    ends and of 64 samples between."""
    digest, size = hashlib.sha256(), file.stat().st_size
    with file.open("rb") as opened:
        for part in range(66):
            opened.seek(max(0, size - SAMPLE_BYTES) * part // 65)
            digest.update(opened.read(SAMPLE_BYTES))
    return file.name, size, digest.hexdigest()


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
