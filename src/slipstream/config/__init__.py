"""The settings of an engine.

`EngineArgs` has what the user wrote. `resolve(args, model, device)` checks it and returns a frozen
`EngineConfig`, which records who chose each setting's value and why. It changes at most once:
`EngineConfig.with_memory_limits` returns a copy with a shorter context. No torch.
"""

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
