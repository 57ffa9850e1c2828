"""Settings of hand-overs: KV cache blocks that engines send to each other."""

from __future__ import annotations

import sys

from slipstream.config.chosen import positive
from slipstream.config.sections import Handover
from slipstream.config.settings import EngineArgs
from slipstream.errors import ConfigError
from slipstream.spec.model import ModelSpec

HANDOVER_BYTES = 2**30
"""Default size of the memory for blocks that are handed over to other engines."""


def handover_section(args: EngineArgs) -> Handover | None:
    """Hand-over settings; None if there are none. ConfigError if they can't be used."""
    if args.kv_handover_address is None:
        if args.kv_handover_bytes is not None:
            raise ConfigError(
                f"kv_handover_bytes={args.kv_handover_bytes}: it has an effect only with kv_handover_address; set that",
                field="kv_handover_bytes",
            )
        return None
    limit = HANDOVER_BYTES if args.kv_handover_bytes is None else args.kv_handover_bytes
    positive("kv_handover_bytes", limit)
    return Handover(address=args.kv_handover_address, limit_bytes=limit)


def check_handover(args: EngineArgs, spec: ModelSpec) -> None:
    """Raise ConfigError if blocks can't be handed over to other engines."""
    if args.kv_handover_address is None:
        return
    is_here = args.kv_handover_address.startswith("unix:")
    deals = args.expert_parallel_size > 1 and args.tensor_parallel_size == 1
    for refused, why in (
        (
            deals,
            f"expert_parallel_size={args.expert_parallel_size} without tensor_parallel_size distributes requests, whose "
            "blocks other engines can't find; set tensor_parallel_size, too",
        ),
        (
            args.local_ranks is not None,
            "ranks on several hosts (local_ranks) have no hand-overs; leave it out",
        ),
        (
            args.enable_prefix_caching is False or spec.needs_full_prompt,
            "blocks are handed over as cached prefixes: leave enable_prefix_caching on",
        ),
        (
            spec.kind != "a decoder",
            f"the model is {spec.kind}, whose blocks are not kept; leave it out",
        ),
        (is_here and sys.platform != "linux", "unix: needs Linux; use tcp://127.0.0.1:PORT"),
    ):
        if refused:
            message = f"kv_handover_address={args.kv_handover_address!r}: {why}"
            raise ConfigError(message, field="kv_handover_address")
