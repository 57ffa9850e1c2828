"""The settings of an engine.

`EngineArgs` has the user's settings. `resolve(args, model, device)` checks them and returns a
frozen `EngineConfig`, which records who chose each value and why. It changes at most once:
`EngineConfig.with_memory_limits` returns a copy with a shorter context. No torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slipstream.config.settings import (
    DTYPE_BYTES,
    KV_BYTES,
    DeviceInfo,
    DType,
    EngineArgs,
    KVDType,
    num_ranks,
    setting_help,
    split_setting,
)

if TYPE_CHECKING:
    from slipstream.config.cpu_layers import stage_args
    from slipstream.config.parallel import native_products
    from slipstream.config.resolver import resolve
    from slipstream.config.sections import (
        CacheConfig,
        DeviceConfig,
        EngineConfig,
        LoRASettings,
        ModelConfig,
        Origin,
        SchedulingConfig,
    )

_LATE = {
    **dict.fromkeys(
        ("CacheConfig", "DeviceConfig", "EngineConfig", "LoRASettings", "ModelConfig", "Origin"),
        "sections",
    ),
    "SchedulingConfig": "sections",
    "native_products": "parallel",
    "resolve": "resolver",
    "stage_args": "cpu_layers",
}
"""Public names that are imported only when they are used, each with its module. These modules
import all model families, which `--help` does not need."""

__all__ = [
    "DTYPE_BYTES",
    "KV_BYTES",
    "CacheConfig",
    "DType",
    "DeviceConfig",
    "DeviceInfo",
    "EngineArgs",
    "EngineConfig",
    "KVDType",
    "LoRASettings",
    "ModelConfig",
    "Origin",
    "SchedulingConfig",
    "native_products",
    "num_ranks",
    "resolve",
    "setting_help",
    "split_setting",
    "stage_args",
]


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_LATE[name]}"), name)
