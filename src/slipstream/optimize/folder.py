"""Makes an engine folder (`config.engine_folder`): the checkpoint's files, and what a first start
with these settings computed (packed weights, tiles, kernels)."""

from __future__ import annotations

import dataclasses
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from slipstream.base.files import writing
from slipstream.config import EngineArgs, EngineConfig, num_ranks
from slipstream.config.engine_folder import (
    KERNELS_NAME,
    MACHINE_DEPENDENT,
    NOT_SAVED,
    PACKED_NAME,
    EngineFolder,
    is_engine_folder,
    read_engine_folder,
    write_engine_folder,
)
from slipstream.costs.environment import versions
from slipstream.engine.folder import this_machine
from slipstream.engine.llm import LLM
from slipstream.errors import ConfigError, EngineError
from slipstream.hub import resolve_model
from slipstream.spec.devices.gpu_archs import DESCRIBED_GPUS, DescribedGpu
from slipstream.worker.local_executor import LocalExecutor
from slipstream.worker.start.kernel_order import (
    KERNEL_COMMAND,
    KernelOrder,
    failed_kernels,
    manifest_name,
)

_logger = logging.getLogger(__name__)

KEPT_FILES = (
    ".safetensors",
    ".gguf",
    ".json",
    ".jinja",
    ".txt",
    ".model",
    ".tiktoken",
    ".html",
    ".md",
    ".vocab",
)
"""Extensions of the checkpoint's files that are copied. Programs and pickles are not."""

Tune = Callable[[EngineArgs, Path], None]
"""Function that measures the tiles for the settings' GPU and writes them to a file."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    folder: EngineFolder
    num_bytes: int
    packed_bytes: int
    start_s: float  # seconds of an engine's start, once weights are packed
    kernels: tuple[str, ...] = ()  # compute capabilities of GPUs, such as "sm_90"


def build_folder(
    args: EngineArgs,
    out: Path,
    *,
    measured: Mapping[str, Any] | None = None,
    tune: Tune | None = None,
    kernels: Sequence[str] = (),
    progress: Callable[[str], None] = lambda phase: None,
) -> Built:
    """Make the folder `out`; it appears complete or not at all. ConfigError if `out` exists, or if
    a setting can't be stored in a folder. `kernels` are compute capabilities, such as "sm_90", for
    which kernels are compiled into the folder."""
    gpus = [described_gpu(name) for name in kernels]
    out = out.absolute()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists already; give another --out, or remove it", field="out")
    for name, why in (
        ("tokenizer", "give a checkpoint that has its own"),
        ("speculative_model", "a draft model stays outside"),
    ):
        if getattr(args, name) not in (None, "ngram", "suffix"):
            raise ConfigError(
                f"{name}={getattr(args, name)!r} can't be stored in the folder: {why}", field=name
            )
    if args.cpu_layers is not None:
        what = "cpu_layers depends on what a GPU has free: leave it out, and give --cpu-layers at each start"
        raise ConfigError(what, field="cpu_layers")
    if "model" in (args.speculative_config or {}):
        what = "a draft model or head can't be stored in the folder; give --speculative-config at each start"
        raise ConfigError(what, field="speculative_config")
    source = resolve_model(args.model, download_dir=args.download_dir)
    if is_engine_folder(source):
        args, _ = dataclasses.replace(read_engine_folder(source), chosen={}).settle(
            args, this_machine()
        )
        args = dataclasses.replace(args, tile_table="auto")
    with writing(out, "out"):
        out.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        progress("copying the checkpoint")
        with writing(out, "out"):
            copy_checkpoint(source, partial)
        settings = saved_settings(args)
        folder = EngineFolder(
            path=partial,
            machine=this_machine(),
            settings=settings,
            chosen={},
            versions=versions(),
            measured=dict(measured or {}),
        )
        write_engine_folder(folder)  # makes the engine store its packed weights in the folder
        placed = dataclasses.replace(args, model=str(partial), download_dir=None)
        # tiles are measured for unsplit linear layers
        if tune is not None and num_ranks(args) == 1:
            progress("tiles")
            tune(placed, partial)
        config, sizes, _ = _start(placed, progress)
        chosen = chosen_settings(config, settings)
        folder = dataclasses.replace(folder, chosen=chosen, graph_sizes=sizes)
        write_engine_folder(folder)
        if num_ranks(args) == 1:
            _compile_kernels(placed, partial, gpus, progress)
        _, _, start_s = _start(placed, progress)
        partial.chmod(0o755)
        if out.exists():
            out.rmdir()
        os.rename(partial, out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return Built(
        folder=dataclasses.replace(folder, path=out),
        num_bytes=_bytes(out),
        packed_bytes=_bytes(out / PACKED_NAME),
        start_s=start_s,
        kernels=tuple(kernels),
    )


def kinds_of_gpus(capabilities: Iterable[tuple[int, int]]) -> list[str]:
    """Names, such as "sm_90", of those compute capabilities for which kernels can be compiled."""
    return ["sm_{}{}".format(*c) for c in capabilities if c in DESCRIBED_GPUS]


def described_gpu(name: str) -> DescribedGpu:
    """Description of a GPU with a compute capability such as "sm_90"."""
    for gpu in DESCRIBED_GPUS.values():
        if name == "sm_{}{}".format(*gpu.capability):
            return gpu
    known = ", ".join("sm_{}{}".format(*capability) for capability in DESCRIBED_GPUS)
    raise ConfigError(f"--gpu-kernels {name!r}: kernels are made for {known}", field="gpu_kernels")


def _compile_kernels(
    args: EngineArgs, folder: Path, gpus: Sequence[DescribedGpu], progress: Callable[[str], None]
) -> None:
    """Compile the engine's kernels for each GPU, in separate processes. EngineError with the
    compiler's message if one does not compile."""
    for gpu in gpus:
        name = manifest_name(gpu.capability)
        progress(f"kernels for {Path(name).stem}")
        own = read_engine_folder(folder)
        tiles = own.tiles if gpu.name in own.machine.gpus[:1] and own.tiles is not None else None
        table = "auto" if tiles is None else str(tiles)
        file = folder / KERNELS_NAME / name
        order = KernelOrder(
            settings=dataclasses.asdict(dataclasses.replace(args, tile_table=table)),
            gpu=gpu,
            key="",
            manifest=str(file),
            folder=str(folder / KERNELS_NAME),
        )
        ran = subprocess.run(
            KERNEL_COMMAND, input=order.dump().encode(), capture_output=True, check=False
        )
        if ran.returncode:
            lines = ran.stderr.decode(errors="replace").strip().splitlines() or ["it ended"]
            raise EngineError(f"the kernels for {Path(name).stem} were not found: {lines[-1]}")
        for kernel, error in failed_kernels(file).items():
            _logger.warning("%s: the kernel %s did not compile: %s", Path(name).stem, kernel, error)


def saved_settings(args: EngineArgs) -> dict[str, Any]:
    """The user's settings, without those that each start must be given again."""
    defaults = {f.name: f.default for f in dataclasses.fields(args)}
    return {
        name: value
        for name, default in defaults.items()
        if name not in NOT_SAVED and (value := getattr(args, name)) != default
    }


def chosen_settings(config: EngineConfig, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Values chosen for this machine for settings that the user did not give."""
    found = {
        "dtype": config.model.dtype,
        "max_model_len": config.model.max_model_len,
        "block_size": config.cache.block_size,
        "max_num_seqs": config.scheduling.max_num_seqs,
        "max_num_batched_tokens": config.scheduling.max_num_batched_tokens,
        "max_num_mixed_tokens": config.scheduling.max_num_mixed_tokens,
    }
    assert found.keys() == set(MACHINE_DEPENDENT)
    return {name: value for name, value in found.items() if name not in settings}


def copy_checkpoint(source: Path, to: Path) -> None:
    """Copy a checkpoint's files. A symbolic link is replaced by its target."""
    if source.is_file():
        shutil.copyfile(source, to / source.name)
        return
    for file in sorted(source.rglob("*")):
        inside = file.relative_to(source)
        hidden = any(part.startswith(".") for part in inside.parts)
        if (
            file.is_file()
            and file.suffix in KEPT_FILES
            and not hidden
            and inside.parts[0] not in (PACKED_NAME, KERNELS_NAME)
        ):
            (to / inside).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, to / inside)


def _start(
    args: EngineArgs, progress: Callable[[str], None]
) -> tuple[EngineConfig, tuple[int, ...], float]:
    """Start an engine once, and write its packed weights. Returns its resolved config, the sizes of
    its graphs, and the seconds of the start. With several ranks no weights are written, and no
    graph sizes are returned."""
    with LLM.from_engine_args(args, progress=progress) as llm:
        return llm.config, _packed(llm, progress), sum(llm.phases.values())


def _packed(llm: LLM, progress: Callable[[str], None]) -> tuple[int, ...]:
    """Write the packed weights and return the sizes of the graphs. No variable of the engine may
    outlive this function: the GPU memory that it references would stay allocated, and the next
    process, which measures the folder, needs it."""
    executor = llm.core.executor
    if not isinstance(executor, LocalExecutor):
        return ()
    writer = executor.runner.model.writer
    if writer is not None:
        progress("packing weights")
        writer.join()
    return executor.runner.graph_sizes


def _bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
