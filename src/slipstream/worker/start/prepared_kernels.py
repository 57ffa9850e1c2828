"""Compiled kernels for a start on a GPU, so that no step compiles one.

1. `begin` looks for the list of the engine's kernels: in an engine folder, or stored by an earlier
   start. If there is none, or a kernel is missing, another process finds and compiles them
   (`kernel_variants.py`) while this one reads weights.
2. `finish` waits for it and loads all kernels onto the GPU.
"""

from __future__ import annotations

import dataclasses
import logging
import subprocess
from pathlib import Path

from slipstream.base.deaths import stdin_of
from slipstream.config import EngineArgs, EngineConfig
from slipstream.config.engine_folder import kernels_folder
from slipstream.hub import cache_folder
from slipstream.kernels.triton.kernel_cache import holds, use_layers
from slipstream.kernels.triton.variants import KernelVariant
from slipstream.platform.cuda import CudaPlatform
from slipstream.spec.description import ModelDescription
from slipstream.spec.devices.autotune_table import TileTable
from slipstream.spec.devices.gpu_archs import DescribedGpu
from slipstream.worker.start.kernel_order import (
    KERNEL_COMMAND,
    KernelList,
    KernelOrder,
    kernel_key,
    manifest_name,
    read_manifest,
)

_logger = logging.getLogger("slipstream.engine")


class PreparedKernels:
    """The kernels of one start."""

    def __init__(self, order: KernelOrder, listed: KernelList | None) -> None:
        self._order, self._listed = order, listed
        self._process: subprocess.Popen[bytes] | None = None

    @classmethod
    def begin(
        cls,
        args: EngineArgs,
        config: EngineConfig,
        description: ModelDescription,
        tiles: TileTable,
        platform: CudaPlatform,
    ) -> PreparedKernels:
        gpu = DescribedGpu(
            platform.capability,
            platform.name,
            platform.multiprocessors,
            platform.shared_bytes,
            platform.memory()[1],
        )
        key = kernel_key(config, description.spec, tiles, gpu)
        made = cache_folder() / "kernels" / f"{key}.json"
        files, layers = [made], list[Path]()
        if (shipped := kernels_folder(description.path)) is not None and shipped.is_dir():
            layers = [shipped]
            files.append(shipped / manifest_name(platform.capability))
        use_layers(layers)
        listed = next((x for f in files if (x := read_manifest(f, key)) is not None), None)
        settings = dataclasses.asdict(args)
        order = KernelOrder(
            settings=settings, gpu=gpu, key=key, manifest=str(made), layers=tuple(map(str, layers))
        )
        self = cls(order, listed)
        if listed is None or not all(holds(name, layers) for name in listed.folders):
            self._start()
        return self

    def _start(self) -> None:
        self._process = process = subprocess.Popen(
            KERNEL_COMMAND, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        pipe = stdin_of(process)
        pipe.write(self._order.dump().encode())
        pipe.close()
        process.stdin = None

    def finish(self) -> None:
        """Wait for the kernels and load them. Missing ones are compiled later by warm-up steps; a
        warning says why."""
        if self._process is not None:
            _, errors = self._process.communicate()
            if self._process.returncode:
                lines = errors.decode(errors="replace").strip().splitlines() or ["it ended"]
                _logger.warning(
                    "the kernels were not found before the start, so steps may compile some: %s",
                    lines[-1],
                )
            else:
                self._listed = read_manifest(Path(self._order.manifest), self._order.key)
        if self._listed is None:
            return
        for name, error in self._listed.failed.items():
            _logger.warning("the kernel %s did not compile: %s", name, error)
        for kernel in self._listed.variants:
            try:
                KernelVariant(*kernel).load()._init_handles()
            except Exception as error:  # only steps that launch this kernel will fail
                _logger.warning("the kernel %s can't be loaded: %s", kernel.name, error)
