"""Inspection of a model for `slipstream info`: description, sizes, and an engine's estimated memory. No weights are
loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from slipstream.config import KV_BYTES, EngineArgs, EngineConfig
from slipstream.costs.estimate import bytes_by_part, estimate
from slipstream.costs.memory import MemoryLedger
from slipstream.costs.offload import copy_rate, estimate_offload, read_rate
from slipstream.hub import resolve_model
from slipstream.spec.description import ModelDescription, read_spec
from slipstream.spec.model import ModelSpec
from slipstream.spec.offload import OffloadPlan
from slipstream.spec.reason import Reason
from slipstream.worker.forward.forward_paths import fast_paths, torch_reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """Result of `inspect_model`. `fast_paths`: by name, why a forward path is not available; None:
    it is. `needs_torch`: why torch is needed; None: it isn't."""

    path: Path
    description: ModelDescription
    config: EngineConfig
    ledger: MemoryLedger
    offload: OffloadPlan | None
    bytes_by_part: Mapping[str, int]
    fast_paths: Mapping[str, Reason | None]
    needs_torch: Reason | None

    @property
    def spec(self) -> ModelSpec:
        return self.description.spec

    @property
    def kv_bytes_per_token(self) -> int:
        return self.spec.kv_bytes_per_token(KV_BYTES[self.config.cache.dtype])

    def offload_rate(self) -> float | None:
        """Bytes per second at which offloaded layers are read; None if unknown."""
        info = self.config.device.info
        return copy_rate(info.name) if info.is_cuda else read_rate(self.path)


def inspect_model(settings: EngineArgs) -> Inspection:
    """Inspect the model of `settings` on this machine."""
    path = resolve_model(settings.model, download_dir=settings.download_dir)
    description = read_spec(path)
    config, ledger = estimate(settings, description)
    return Inspection(
        path=path,
        description=description,
        config=config,
        ledger=ledger,
        offload=estimate_offload(config, description),
        bytes_by_part=bytes_by_part(config, description),
        fast_paths=fast_paths(config, description.spec),
        needs_torch=torch_reason(config, description),
    )
