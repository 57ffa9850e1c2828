"""Input and output of `kernel_variants.py`: the request to compile an engine's kernels, and the
list of them. No torch."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from slipstream.config import EngineConfig
from slipstream.spec.devices.autotune_table import TileTable
from slipstream.spec.devices.gpu_archs import DescribedGpu
from slipstream.spec.model import ModelSpec

SOURCES = ("config", "core", "costs", "kernels", "model", "platform", "spec", "worker")
"""Folders of this package whose code determines which kernels an engine needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelOrder:
    """A request to find and compile the kernels of an engine with `settings` (`EngineArgs`) on `gpu`.

    `manifest`: the file to write, with the variants and `key`. The process computes `key` if it is
    "". `folder`: where the kernels go; None is Triton's cache. `layers`: read-only folders of
    kernels.
    """

    settings: Mapping[str, Any]
    gpu: DescribedGpu
    key: str
    manifest: str
    folder: str | None = None
    layers: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> KernelOrder:
        given = json.loads(text)
        gpu = DescribedGpu(**{**given["gpu"], "capability": tuple(given["gpu"]["capability"])})
        return cls(**{**given, "gpu": gpu, "layers": tuple(given["layers"])})

    def dump(self) -> str:
        return json.dumps(dataclasses.asdict(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelList:
    """The kernels of an engine. `folders`: names of their folders in Triton's cache. `failed`:
    errors of those that did not compile."""

    variants: tuple[ListedKernel, ...]
    folders: tuple[str, ...]
    failed: Mapping[str, str]


KERNEL_COMMAND = (sys.executable, "-m", "slipstream.worker.start.kernel_variants")
"""Command of a process that performs the `KernelOrder` given on its standard input."""


class ListedKernel(NamedTuple):
    """A variant of a kernel to compile (`kernels/triton/variants.py`)."""

    module: str
    name: str
    key: str
    data: str


def read_manifest(file: Path, key: str) -> KernelList | None:
    """The list in `file`, if it was made for `key`. None without such a list."""
    try:
        given = json.loads(file.read_bytes())
        variants = tuple(ListedKernel(*entry) for entry in given["variants"])
        found = KernelList(
            variants=variants, folders=tuple(given["folders"]), failed=dict(given["failed"])
        )
        return found if given["key"] == key else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def failed_kernels(file: Path) -> dict[str, str]:
    """Errors by kernel of those in a list that did not compile."""
    return dict(json.loads(file.read_bytes())["failed"])


def manifest_name(capability: tuple[int, int]) -> str:
    """Name of the list in an engine folder's kernels."""
    return "sm_{}{}.json".format(*capability)


def kernel_key(config: EngineConfig, spec: ModelSpec, tiles: TileTable, gpu: DescribedGpu) -> str:
    """Digest of everything that an engine's kernels on a GPU depend on. `config` is the
    configuration before the cache is sized."""
    model, cache, device = config.model, config.cache, config.device
    parts = (
        (model.dtype, model.quantization, model.max_model_len, model.offload),
        (cache.dtype, cache.block_size, cache.groups, cache.state_interval),
        (device.kernels, device.enforce_eager, device.deterministic, device.dense_copies),
        (config.scheduling, config.speculation, config.lora, config.media, config.parallel),
        (spec, tiles.identity),
        (gpu.capability, gpu.multiprocessors, gpu.shared_bytes),
        (version("triton"), _sources()),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


@functools.cache
def _sources() -> str:
    package, found = Path(__file__).parents[2], hashlib.sha256()
    for name in SOURCES:
        for file in sorted((package / name).rglob("*")):
            if file.suffix in (".py", ".cu"):
                found.update(file.read_bytes())
    return found.hexdigest()
