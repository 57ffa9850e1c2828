"""Makes an engine folder (`config.engine_folder`): the checkpoint's files, and what a first start with these settings found."""

from __future__ import annotations

import dataclasses
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from slipstream.config import EngineArgs, EngineConfig, num_ranks
from slipstream.config.engine_folder import (
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
from slipstream.errors import ConfigError
from slipstream.files import writing
from slipstream.hub import resolve_model
from slipstream.worker.local_executor import LocalExecutor

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
"""Endings of a checkpoint's files that are copied: no program and no pickle among them."""

Tune = Callable[[EngineArgs, Path], None]
"""Measures the tiles of the settings' GPU and writes them to a file."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    folder: EngineFolder
    num_bytes: int
    packed_bytes: int
    start_s: float  # of an engine, once packed


def build_folder(
    args: EngineArgs,
    out: Path,
    *,
    measured: Mapping[str, Any] | None = None,
    tune: Tune | None = None,
    progress: Callable[[str], None] = lambda phase: None,
) -> Built:
    """`out` appears whole or not at all. ConfigError if there is something already, or a setting can't travel with it."""
    out = out.absolute()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is there already; give another --out, or remove it", field="out")
    for name, why in (
        ("tokenizer", "give a checkpoint that has its own"),
        ("speculative_model", "a draft model stays outside"),
    ):
        if getattr(args, name) not in (None, "ngram", "suffix"):
            raise ConfigError(
                f"{name}={getattr(args, name)!r} can't travel in the folder: {why}", field=name
            )
    if args.cpu_layers is not None:
        what = "cpu_layers depends on what a GPU has free: leave it out, and give --cpu-layers at each start"
        raise ConfigError(what, field="cpu_layers")
    if "model" in (args.speculative_config or {}):
        what = "a draft model or head can't travel in the folder; give --speculative-config at each start"
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
        write_engine_folder(folder)  # from here on the folder keeps its packed weights itself
        placed = dataclasses.replace(args, model=str(partial), download_dir=None)
        if tune is not None and num_ranks(args) == 1:  # tiles are measured for whole products
            progress("tiles")
            tune(placed, partial)
        config, sizes, _ = _start(placed, progress)
        chosen = chosen_settings(config, settings)
        folder = dataclasses.replace(folder, chosen=chosen, graph_sizes=sizes)
        write_engine_folder(folder)
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
    )


def saved_settings(args: EngineArgs) -> dict[str, Any]:
    """The settings that the user chose, except those that each start sets again."""
    defaults = {f.name: f.default for f in dataclasses.fields(args)}
    return {
        name: value
        for name, default in defaults.items()
        if name not in NOT_SAVED and (value := getattr(args, name)) != default
    }


def chosen_settings(config: EngineConfig, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What was chosen for this machine where the user left it open."""
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
    """The files of a checkpoint; a link in it becomes the file that it leads to."""
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
            and inside.parts[0] != PACKED_NAME
        ):
            (to / inside).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, to / inside)


def _start(
    args: EngineArgs, progress: Callable[[str], None]
) -> tuple[EngineConfig, tuple[int, ...], float]:
    """What an engine resolves to, the sizes of its graphs, and the seconds of its start. Its packed weights are written; those
    of several ranks are none, and the sizes of their graphs are not asked for."""
    with LLM.from_engine_args(args, progress=progress) as llm:
        return llm.config, _packed(llm, progress), sum(llm.phases.values())


def _packed(llm: LLM, progress: Callable[[str], None]) -> tuple[int, ...]:
    """The sizes of its graphs, when its packed weights are written. No variable of the engine's lives on when it ends: the GPU
    memory that it names would stay with this process, and the next one, which measures the folder, needs it."""
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
