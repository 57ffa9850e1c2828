"""Applies an engine folder's settings (`config.engine_folder`) at the start of an engine."""

from __future__ import annotations

import logging
from pathlib import Path

from slipstream.config import EngineArgs
from slipstream.config.engine_folder import Machine, is_engine_folder, read_engine_folder
from slipstream.costs.hardware import available_cores, cpu_features, cpu_name, gpus, host_memory

_logger = logging.getLogger(__name__)


def this_machine() -> Machine:
    return Machine(
        cpu=cpu_name(),
        cpu_features=cpu_features(),
        num_cores=available_cores(),
        memory_gib=round(host_memory()[0] / 2**30),
        gpus=tuple(gpu.name for gpu in gpus()),
    )


def settled(args: EngineArgs, *, one_device: bool = False) -> EngineArgs:
    """`args` with an engine folder's settings filled in where the user left them open; unchanged if
    the model is no engine folder. Differences of the machine are logged. `one_device`: ignores the
    folder's multi-device settings."""
    path = Path(args.model).expanduser()
    if not args.model or not is_engine_folder(path):
        return args
    found, notices = read_engine_folder(path).settle(args, this_machine(), one_device=one_device)
    for notice in notices:
        _logger.warning("%s", notice)
    return found
