"""An engine folder: a checkpoint with the engine settings found best for it, made by `slipstream
build` and `optimize`.

    DIR/                     the checkpoint, as any other engine reads it
      serve.yaml             settings, to be edited: {engine: {quantization: int8, ...}}
      slipstream-engine.json versions, the machine it was made on, and the choices for that machine
      packed/                weights in the layout of that machine's kernels
      tiles.json             tiles of that machine's GPU kernels
      kernels/               compiled GPU kernels, and a list of them for each kind of GPU

Such a folder can be used wherever a model is named. Settings have this precedence: the user's,
`serve.yaml`, and on the folder's machine the choices made there. Another machine chooses and packs
anew, and ignores the tiles. It logs that, and never refuses the folder. No torch.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.base.files import parse_json, read_yaml
from slipstream.config.settings import EngineArgs
from slipstream.errors import ConfigError

ENGINE_NAME, SERVE_NAME, PACKED_NAME, TILES_NAME, KERNELS_NAME = (
    "slipstream-engine.json",
    "serve.yaml",
    "packed",
    "tiles.json",
    "kernels",
)
FORMAT = 1
NOT_SAVED = (
    "model",
    "chat_template",
    "device",
    "download_dir",
    "tile_table",
    "weights_cache",
    "load_format",
    "skip_tokenizer_init",
    "num_threads",
    "rank_address",
    "local_ranks",
)
"""Settings that an engine folder does not store, because they belong to one start."""

OF_SEVERAL_DEVICES = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "pipeline_layers",
    "expert_parallel_size",
    "context_parallel_size",
    "sequence_parallel",
)

MACHINE_DEPENDENT = (
    "dtype",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_num_mixed_tokens",
    "block_size",
)
"""Settings that `resolve` chooses by the machine if the user leaves them open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Properties of a machine on which settings, packed weights and tiles depend. Memory is in
    whole GiB, because the free part varies."""

    cpu: str
    cpu_features: tuple[str, ...]
    num_cores: int
    memory_gib: int
    gpus: tuple[str, ...] = ()

    def differences(self, other: Machine) -> list[str]:
        """Differences between this machine and `other`, as text."""
        found = []
        for name, what in (
            ("gpus", "GPU"),
            ("cpu", "CPU"),
            ("cpu_features", "instructions"),
            ("num_cores", "cores"),
            ("memory_gib", "GiB"),
        ):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                found.append(f"{what}: {_words(mine)}, here {_words(theirs)}")
        return found


def _words(value: Any) -> str:
    return (", ".join(value) or "none") if isinstance(value, tuple) else str(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFolder:
    """An engine folder. `settings` are those of serve.yaml, of which `chosen` apply only on
    `machine`. `measured` are results stored by `build` or `optimize`."""

    path: Path
    machine: Machine
    settings: Mapping[str, Any]
    chosen: Mapping[str, Any]
    versions: Mapping[str, Any]
    measured: Mapping[str, Any]
    graph_sizes: tuple[int, ...] = ()

    @property
    def tiles(self) -> Path | None:
        file = self.path / TILES_NAME
        return file if file.is_file() else None

    def settle(
        self, args: EngineArgs, here: Machine, *, one_device: bool = False
    ) -> tuple[EngineArgs, list[str]]:
        """Fill settings that the user left open from the folder. Returns (settings, notices for the
        user). `one_device`: leave out settings of several devices."""
        notices = [
            f"{self.path.name} was made on another machine ({d})"
            for d in self.machine.differences(here)
        ]
        given = dict(self.settings)
        if notices:
            notices.append(
                "machine-dependent settings are chosen anew; `slipstream build` here makes a folder for this machine"
            )
        else:
            given = {**self.chosen, **given}
        if self.tiles is not None:
            if self.machine.gpus[:1] == here.gpus[:1] and here.gpus:
                given["tile_table"] = str(self.tiles)
            elif here.gpus:
                notices.append(f"its tiles are of {_words(self.machine.gpus)} and are not used")
        if one_device:
            given = {name: value for name, value in given.items() if name not in OF_SEVERAL_DEVICES}
        defaults = {f.name: f.default for f in dataclasses.fields(EngineArgs)}
        left_open = {
            name: value for name, value in given.items() if getattr(args, name) == defaults[name]
        }
        return dataclasses.replace(args, **left_open), notices


def is_engine_folder(path: Path) -> bool:
    return (path / ENGINE_NAME).is_file()


def packed_folder(checkpoint: Path) -> Path | None:
    """Folder of packed weights in an engine folder; None for any other checkpoint."""
    return _inside(checkpoint, PACKED_NAME)


def kernels_folder(checkpoint: Path) -> Path | None:
    """Folder of compiled kernels in an engine folder; None for any other checkpoint."""
    return _inside(checkpoint, KERNELS_NAME)


def _inside(checkpoint: Path, name: str) -> Path | None:
    folder = checkpoint.parent if checkpoint.is_file() else checkpoint
    return folder / name if is_engine_folder(folder) else None


def read_engine_folder(path: Path) -> EngineFolder:
    """Read an engine folder. ConfigError names an unreadable file or an unknown setting."""
    reading = ENGINE_NAME
    try:
        data = parse_json((path / ENGINE_NAME).read_bytes())
        if data["format"] != FORMAT:
            raise ValueError(f"its format is {data['format']!r}, and this version reads {FORMAT}")
        known: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in data["machine"].items()
        }
        machine = Machine(**known)
        chosen, versions, measured = (
            dict(data[name]) for name in ("chosen", "versions", "measured")
        )
        sizes = tuple(data["graph_sizes"])
        reading, file = SERVE_NAME, path / SERVE_NAME
        serve = (read_yaml(file) if file.is_file() else None) or {}
        if (
            not isinstance(serve, dict)
            or serve.keys() - {"engine"}
            or not isinstance(serve.get("engine", {}), dict)
        ):
            raise ValueError("it must hold engine: with settings below it, and nothing else")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise ConfigError(
            f"the engine folder {path} can't be used: {reading}: {what}", field="model"
        ) from None
    settings = serve.get("engine", {})
    for given, where in ((settings, SERVE_NAME), (chosen, ENGINE_NAME)):
        try:
            EngineArgs(model="", **given)
        except TypeError as error:
            raise ConfigError(f"{path / where}: {error}", field="model") from None
        if refused := given.keys() & set(NOT_SAVED):
            raise ConfigError(
                f"{path / where}: {min(refused)} is a setting of each start; leave it out",
                field=min(refused),
            )
    return EngineFolder(
        path=path,
        machine=machine,
        settings=settings,
        chosen=chosen,
        versions=versions,
        measured=measured,
        graph_sizes=sizes,
    )


def file_of(path: Path, setting: str) -> Path | None:
    """Path of an engine folder's serve.yaml if that file has this setting; otherwise None."""
    try:
        held = is_engine_folder(path) and setting in read_engine_folder(path).settings
    except (ConfigError, OSError):
        return None
    return path / SERVE_NAME if held else None


def write_engine_folder(folder: EngineFolder) -> None:
    """Write serve.yaml and slipstream-engine.json next to the checkpoint."""
    import yaml

    data = {
        "format": FORMAT,
        "machine": dataclasses.asdict(folder.machine),
        "chosen": dict(folder.chosen),
        "graph_sizes": list(folder.graph_sizes),
        "versions": dict(folder.versions),
        "measured": dict(folder.measured),
    }
    (folder.path / ENGINE_NAME).write_text(
        json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    text = "# Settings of `slipstream serve` in this folder; those of the command line go first.\n"
    text += yaml.safe_dump({"engine": dict(folder.settings)}, sort_keys=False, allow_unicode=True)
    (folder.path / SERVE_NAME).write_text(text, encoding="utf-8")
