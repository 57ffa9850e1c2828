"""Step tables on disk: this machine's own in the user's cache folder, and shipped ones. No torch.

A table covers one model's sizes with one format of weights and cache on one kind of device. A table
measured by another version of the program is not used, because kernels change. Shipped tables are
used whatever the version, and their times are labelled *interpolated*.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from slipstream import __version__
from slipstream.base.files import write_whole
from slipstream.config import EngineConfig
from slipstream.costs.devices import DATA
from slipstream.costs.environment import plain
from slipstream.costs.step_cost import StepTable, read_table
from slipstream.errors import ConfigError
from slipstream.hub import machine_folder
from slipstream.spec.model import ModelSpec


def identity(config: EngineConfig, spec: ModelSpec, weights_bytes: int) -> dict[str, Any]:
    """Identity of a table. `weights_bytes` distinguishes weight formats without a name, such as a
    GGUF file's."""
    info = config.device.info
    digest = hashlib.blake2b(repr(spec).encode(), digest_size=8).hexdigest()
    return {
        "device": info.name,
        "num_threads": None if info.is_cuda else config.device.num_threads,
        "model": digest,
        # A CPU's dtype is measured at an engine's start. Before that only a user's choice is known.
        "dtype": config.model.dtype
        if info.is_cuda or config.origins["dtype"].source == "user"
        else None,
        "quantization": config.model.quantization,
        "kv_cache_dtype": config.cache.dtype,
        "weights_mib": round(weights_bytes / 2**20),
    }


def table_path(of: dict[str, Any]) -> Path:
    key = json.dumps([of, __version__], sort_keys=True).encode()
    return machine_folder() / f"steps-{hashlib.blake2b(key, digest_size=8).hexdigest()}.json"


def find_table(of: dict[str, Any]) -> StepTable | None:
    """This machine's table, or a shipped one, or None."""
    path = table_path(of)
    if path.is_file():
        return _read(path, shipped=False)
    for path in sorted(DATA.glob("steps-*.json")):
        table = _read(path, shipped=True)
        if all(table.identity.get(name) == value for name, value in of.items()):
            return table
    return None


def keep_table(table: StepTable) -> Path:
    """Write a table, completely or not at all, and return its path."""
    path = table_path(table.identity)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(table.as_data(), default=plain) + "\n")
    return path


def ceilings_path(device: str, num_threads: int) -> Path:
    key = json.dumps([device, num_threads, __version__]).encode()
    return machine_folder() / f"ceilings-{hashlib.blake2b(key, digest_size=8).hexdigest()}.json"


def write_ceilings(device: str, num_threads: int, found: dict[str, float]) -> Path:
    path = ceilings_path(device, num_threads)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps({"kind": "ceilings", "device": device, "found": found}) + "\n")
    return path


def read_ceilings(device: str, num_threads: int) -> dict[str, float]:
    """Ceilings that `write_ceilings` stored for this machine; empty if it was not measured."""
    try:
        data = json.loads(ceilings_path(device, num_threads).read_text(encoding="utf-8"))
        return {str(name): float(value) for name, value in data["found"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}  # not measured, or the file is not ours: the data sheet's rates are used


def _read(path: Path, *, shipped: bool) -> StepTable:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} can't be read: {error}; remove it, and measure again", field="table"
        ) from None
    return read_table(data, str(path), shipped=shipped)
