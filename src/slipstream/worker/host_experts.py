"""A runner's mixtures whose experts the host computes beside a GPU (`kernels.host_experts`)."""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING, cast

import torch

from slipstream.config import EngineConfig
from slipstream.costs.hardware import available_cores
from slipstream.kernels.cpu import NativeOps
from slipstream.kernels.host_experts import HostExpertOps
from slipstream.model.layers import MoE
from slipstream.model.loaded import LoadedModel
from slipstream.platform import Platform

if TYPE_CHECKING:
    from slipstream.kernels.ops import OpSet
    from slipstream.worker.expert_load import ExpertLoad

_logger = logging.getLogger("slipstream.engine")

LOOK_EVERY = 8
"""Steps after which the experts that a GPU holds of one layer follow the load."""


def with_host_experts(config: EngineConfig, ops: OpSet, platform: Platform) -> OpSet:
    """The op set that also computes experts on the host, if the settings say so. One core is left to queue the GPU's work."""
    if not config.model.host_experts:
        return ops
    chosen = config.origins["num_threads"].source == "user"
    threads = config.device.num_threads if chosen else max(1, available_cores() - 1)
    return cast("OpSet", HostExpertOps(ops, NativeOps(threads), platform))


@torch.inference_mode()
def settle_experts(config: EngineConfig, model: LoadedModel, platform: Platform) -> LoadedModel:
    """Measure when copying experts to the device pays, and put some there for good. The model with the bytes of both."""
    ops, decoder = model.decoder.ops, model.decoder
    if not isinstance(ops, HostExpertOps):
        return model
    own = {i: x.mlp.experts for i, x in enumerate(decoder.layers) if isinstance(x.mlp, MoE)}
    if platform.is_asynchronous:
        ops.choose(own.values(), decoder.dtype, config.scheduling.max_num_batched_tokens)
    held = ops.hold(own, config.model.hot_expert_bytes, decoder.dtype)
    _logger.info("%s; %s experts of each layer on the device as well", ops.describe(), held or "no")
    return dataclasses.replace(model, weights_bytes=model.weights_bytes + ops.num_bytes)


class LoadFollower:
    """After every few steps, lets the experts that the device holds of one layer follow the measured load."""

    def __init__(self, ops: OpSet, load: ExpertLoad) -> None:
        self._ops, self._load, self._steps = (
            ops if isinstance(ops, HostExpertOps) else None,
            load,
            0,
        )

    def after_step(self) -> None:
        if self._ops is None or not self._ops.holds_experts:
            return
        self._steps += 1
        if self._steps % LOOK_EVERY == 0:
            self._ops.follow(self._load.read())
