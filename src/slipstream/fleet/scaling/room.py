"""The memory of one machine that the models of a fleet share (`models_memory`).

1. A replica starts if its memory is free. A model without a replica, for which a request waits, has others
   make room: models with `min: 0` that have no requests end theirs, the one used longest ago first.
2. If all have requests for `PATIENCE_S`, the one used longest ago ends its replicas all the same: they answer
   what they have, and its next requests wait at the gateway.
3. More replicas of a model that has some take free memory alone.
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
"""Seconds for which a request waits for models that have requests. Serve's several models have one second;
a replica's start takes longer than the waking of an engine."""


@dataclass(frozen=True, slots=True)
class Room:
    """Memory for the replicas of a fleet. `limit`: bytes of all replicas together. `needs`: bytes
    of a replica, by pool."""

    limit: int
    needs: Mapping[str, int]

    def missing(self, held: Mapping[str, int], pool: str, more: int) -> int:
        """Bytes that `more` replicas of a pool lack next to the running ones (`held`, by pool). 0 or below: they fit."""
        used = sum(self.needs[key] * number for key, number in held.items())
        return used + more * self.needs[pool] - self.limit


def room_of(fleet: Fleet) -> Room | None:
    """The room of a fleet whose models share one machine's memory. ConfigError if those that always run, and any other
    one, do not fit."""
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
