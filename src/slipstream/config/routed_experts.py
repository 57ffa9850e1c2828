"""Checks that a model and its settings allow `enable_return_routed_experts`."""

from __future__ import annotations

from slipstream.config.settings import EngineArgs, num_ranks
from slipstream.errors import ConfigError
from slipstream.spec.description import ModelDescription
from slipstream.spec.model import MoESpec


def check_routed_experts(args: EngineArgs, model: ModelDescription) -> None:
    """Raise ConfigError if the experts of tokens can't be returned."""
    field, spec = "enable_return_routed_experts", model.spec
    if not args.enable_return_routed_experts:
        return
    table = (
        (not any(isinstance(x.mlp, MoESpec) for x in spec.layers), "the model has no experts"),
        (not spec.generates or spec.is_encoder, "the model does not generate text alone"),
        (
            spec.cache_groups[0].kind != "full",
            "the cache forgets tokens of the first layer's window",
        ),
        (
            num_ranks(args) > args.tensor_parallel_size or args.context_parallel_size > 1,
            "of several ranks only those of tensor_parallel_size are covered (each routes all tokens)",
        ),
        (
            args.sequence_parallel,
            "sequence_parallel is not covered (each rank has some of the tokens)",
        ),
        (args.host_experts is not None, "experts on the host (host_experts) are not covered"),
        (args.cpu_layers is not None, "layers on the host (cpu_layers) are not covered"),
        (args.weights_bytes is not None, "streamed weights (weights_bytes) are not covered"),
        (
            args.kv_host_bytes is not None or args.kv_disk_bytes is not None,
            "blocks that leave the device (kv_host_bytes, kv_disk_bytes) lose their experts",
        ),
        (
            args.kv_handover_address is not None,
            "blocks from other engines (kv_handover_address) have no experts",
        ),
    )
    for refused, why in table:
        if refused:
            raise ConfigError(f"{field}: {why}; leave one of them out", field=field)
