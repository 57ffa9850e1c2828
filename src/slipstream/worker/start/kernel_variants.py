"""Finds every kernel of an engine on a described GPU and compiles it, in a separate process.

    python -m slipstream.worker.start.kernel_variants < settings.json

Starting on a GPU runs it while weights are read (`prepared_kernels.py`); `slipstream build` runs it
for GPUs that need not be present. It uses no GPU.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, cast

import torch

from slipstream.base.files import write_whole
from slipstream.config import EngineArgs, resolve
from slipstream.costs.hardware import available_cores
from slipstream.hub import machine_folder, resolve_model, tiles_folder
from slipstream.kernels.metadata import AttentionMetadata, LayerKV
from slipstream.kernels.ops import OpSet
from slipstream.kernels.triton.cuda import CudaSource
from slipstream.kernels.triton.kernel_cache import use_layers
from slipstream.kernels.triton.variants import Compilers, Job, KernelVariant, recording
from slipstream.model.decoder import Decoder
from slipstream.model.layers.layer import Layer, one_of_each_passage
from slipstream.platform import platform_of
from slipstream.platform.meta import MetaPlatform
from slipstream.spec.description import read_spec
from slipstream.spec.devices.autotune_table import load_tiles
from slipstream.spec.devices.gpu_archs import DescribedGpu
from slipstream.worker.device import detect
from slipstream.worker.local_executor import LocalExecutor
from slipstream.worker.model_runner import ModelRunner
from slipstream.worker.start.kernel_order import KernelOrder, kernel_key
from slipstream.worker.start.kernel_steps import KernelSteps

MAX_PROCESSES = 16
"""Maximum number of compiling processes. A start has about 100 variants, of 0.1 to 2 s each."""
MAX_FINDERS = 6
"""Maximum number of processes that launch dummy steps on a described GPU. There are about 700
steps, which take one process 10 s."""
MAX_SILENT_S = 120
"""Seconds without a new kernel after which a search counts as hung."""


@dataclass(frozen=True, slots=True)
class EngineKernels:
    """Triton's variants, and kernels in CUDA C++ (`kernels/triton/cuda.py`)."""

    variants: frozenset[KernelVariant]
    sources: frozenset[CudaSource]


@dataclass(frozen=True, slots=True)
class _Repeated:
    """Placeholder of a layer that another one represents. It returns the previous layer's
    output."""

    layer: Layer

    def __call__(
        self, ops: OpSet, pending: Any, residual: Any, kv: LayerKV, meta: AttentionMetadata
    ) -> tuple[Any, Any]:
        return pending, residual


def _pass_repeated_layers(decoder: Decoder) -> None:
    """Replace the layers that launch no additional kernels (most of a model's) by placeholders."""
    kept = one_of_each_passage(decoder.layers)
    decoder.layers = [
        layer if i in kept else cast(Layer, _Repeated(layer))
        for i, layer in enumerate(decoder.layers)
    ]


def find_kernels(
    args: EngineArgs,
    capability: tuple[int, int],
    take: Callable[[Iterable[Job]], None] = lambda jobs: None,
) -> EngineKernels:
    """The kernels of an engine with these settings on a GPU of this compute capability. `take` gets
    each when it is found, possibly repeatedly; CUDA sources when the first engine is created.

    Steps run in graphs in one engine, and op by op in another: padding changes some variants.
    """
    platform = platform_of(torch.device("meta"))
    assert isinstance(platform, MetaPlatform)
    device = "meta:{}{}".format(*capability)
    args = replace(args, device=device, load_format="dummy", skip_tokenizer_init=True, canary="off")
    noted: list[Callable[[Job], None]] = [lambda job: take((job,))]
    with recording(capability, lambda variant: noted[-1](variant)) as found:
        for eager in (True,) if args.enforce_eager else (False, True):
            executor = LocalExecutor.build(replace(args, enforce_eager=eager))
            take(platform.cuda_sources)
            executor.warm_up()
            if isinstance(executor.runner, ModelRunner) and executor.runner.model.spec.generates:
                steps = KernelSteps(executor.runner)
                if not args.enable_lora:  # adapters create additional layers
                    _pass_repeated_layers(executor.runner.model.decoder)
                if eager:
                    for job in _in_parts(steps, platform, noted):
                        if isinstance(job, KernelVariant):
                            found.add(job)
                        else:
                            platform.cuda_sources.add(job)
                        take((job,))
                if not eager or args.enforce_eager:
                    steps.run_samplings()
            while executor.capture_next():
                pass
            executor.shutdown()
    take(platform.cuda_sources)
    return EngineKernels(frozenset(found), frozenset(platform.cuda_sources))


def _in_parts(
    steps: KernelSteps, platform: MetaPlatform, noted: list[Callable[[Job], None]]
) -> Iterator[Job]:
    """Run the forwards in forks of this process. Yields the kernels that they launch, possibly repeatedly."""
    count = max(1, min(MAX_FINDERS, available_cores() // 2))
    context = multiprocessing.get_context("fork")

    def run(part: int, out: Connection) -> None:
        before = set(platform.cuda_sources)
        noted.append(out.send)
        steps.run_forwards(part, count)
        for source in platform.cuda_sources - before:
            out.send(source)
        out.send(None)
        os._exit(0)  # the compiler pool is closed by the parent

    open_pipes: list[Connection] = []
    made = []
    try:
        for part in range(count):
            pipe, out = context.Pipe(False)
            made.append(context.Process(target=run, args=(part, out), daemon=True))
            made[-1].start()
            out.close()
            open_pipes.append(pipe)
        while open_pipes:
            done = wait(open_pipes, MAX_SILENT_S)
            if not done:
                raise RuntimeError(f"a search for kernels said nothing for {MAX_SILENT_S} s")
            for ready in done:
                assert isinstance(ready, Connection)
                try:
                    job = ready.recv()
                except EOFError:
                    raise RuntimeError("a search for kernels ended early; see stderr") from None
                if job is None:
                    open_pipes.remove(ready)
                else:
                    yield job
    finally:
        for process in made:
            if open_pipes:  # a fork may wait for a lock that a thread of the parent had
                process.kill()
            process.join()


def _leave_out_torch_compiler() -> None:
    """Keep torch from importing its compiler. Arithmetic on the meta device would import it only to
    exclude itself from compilation, which takes three seconds."""
    compiler: Any = types.ModuleType("torch._dynamo")
    compiler.disable = lambda function, *_, **__: function
    sys.modules.setdefault("torch._dynamo", compiler)


def carry_out(order: KernelOrder) -> None:
    _leave_out_torch_compiler()
    platform = platform_of(torch.device("meta"))
    assert isinstance(platform, MetaPlatform)
    platform.describe(order.gpu)
    capability = order.gpu.capability
    args = EngineArgs(**order.settings)
    use_layers([Path(layer) for layer in order.layers])
    num_processes = min(MAX_PROCESSES, available_cores())
    with Compilers(capability, num_processes=num_processes, folder=order.folder) as compilers:
        found = find_kernels(args, capability, compilers.compile)
        names, failed = compilers.results()
    made = [v for v in sorted(found.variants) if v in names]
    text = json.dumps(
        {
            "key": order.key or _key(args, order.gpu),
            "variants": [[v.module, v.name, v.key, v.data] for v in made],
            "folders": sorted(names.values()),
            "failed": failed,
        }
    )
    Path(order.manifest).parent.mkdir(parents=True, exist_ok=True)
    write_whole(Path(order.manifest), text)


def _key(args: EngineArgs, gpu: DescribedGpu) -> str:
    """The key of a start with these settings on this GPU."""
    description = read_spec(resolve_model(args.model, download_dir=args.download_dir))
    description = description.taking_media(args.max_images)
    info = detect("meta:{}{}".format(*gpu.capability), machine_folder())
    config = resolve(args, description, info).of_rank
    tiles = load_tiles(config.device.tile_table, info.name, tiles_folder())
    return kernel_key(config, description.spec, tiles, gpu)


if __name__ == "__main__":
    carry_out(KernelOrder.parse(sys.stdin.read()))
