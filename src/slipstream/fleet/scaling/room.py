"""The memory of one machine that the models of a fleet share (`models_memory`).

1. A replica starts if memory for it is free. If a request waits for a model without a replica, others free
   memory: models with `min: 0` and no requests stop their replicas, the least recently used first.
2. If all have requests for `PATIENCE_S`, the least recently used one stops its replicas nevertheless: they
   finish their requests, and new ones wait at the gateway.
3. Additional replicas of a model only use free memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from slipstream.costs.estimate import estimate, this_device
from slipstream.engine.folder import settled
from slipstream.errors import ConfigError
from slipstream.fleet.config import Fleet, PoolSpec, pools
from slipstream.hub import resolve_model
from slipstream.server.many.slot import needed_bytes
from slipstream.spec.description import read_spec

PATIENCE_S = 5.0
"""Seconds for which a request waits for models that are in use. In a server of several models it is
one second; starting a replica takes longer than waking an engine."""


@dataclass(frozen=True, slots=True)
class Room:
    """Memory for the replicas of a fleet. `limit`: bytes of all replicas together. `needs`: bytes
    of a replica, by pool."""

    limit: int
    needs: Mapping[str, int]

    def missing(self, held: Mapping[str, int], pool: str, more: int) -> int:
        """Bytes missing for `more` replicas of a pool in addition to the running ones (`held`, by pool). 0 or negative: they
        fit."""
        used = sum(self.needs[key] * number for key, number in held.items())
        return used + more * self.needs[pool] - self.limit


def room_of(fleet: Fleet) -> Room | None:
    """Memory limit of a fleet whose models share one machine. ConfigError if the models that always
    run, plus any other one, don't fit."""
    if fleet.models_memory is None:
        return None
    specs = pools(fleet)
    needs = {spec.key: _need(spec) for spec in specs}
    always = sum(spec.least * needs[spec.key] for spec in specs)
    most = max(needs[spec.key] * (spec.least == 0) for spec in specs)
    if always + most > fleet.models_memory:
        largest = max(specs, key=lambda spec: needs[spec.key] * (spec.least == 0)).key
        raise ConfigError(
            f"models_memory: a replica of {largest} needs {most >> 20:,} MiB, and those that always run "
            f"{always >> 20:,} MiB, more than its {fleet.models_memory >> 20:,} MiB; raise it, or lower engine.kv_cache_bytes",
            field="models_memory",
        )
    return Room(fleet.models_memory, needs)


def _need(spec: PoolSpec) -> int:
    args = settled(spec.args)
    device = this_device(args.device)
    description = read_spec(resolve_model(args.model, download_dir=args.download_dir))
    _, ledger = estimate(args, description.taking_media(args.max_images), device, with_steps=True)
    return needed_bytes(ledger, is_cuda=device.is_cuda)
