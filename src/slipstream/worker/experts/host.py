"""Mixtures whose experts run on the host, next to a GPU (`kernels.experts.host`)."""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING, cast

import torch

from slipstream.config import EngineConfig
from slipstream.config.forms import HostExperts
from slipstream.costs.hardware import available_cores
from slipstream.kernels.cpu.ops import NativeOps
from slipstream.kernels.experts.host import HostExpertOps
from slipstream.model.layers.feed_forward import MoE
from slipstream.model.load.loaded import LoadedModel
from slipstream.platform import Platform

if TYPE_CHECKING:
    from slipstream.kernels.ops import OpSet
    from slipstream.worker.experts.load import ExpertLoad

_logger = logging.getLogger("slipstream.engine")

LOOK_EVERY = 8
"""Steps after which one layer's experts on the GPU are adapted to the load."""


def with_host_experts(config: EngineConfig, ops: OpSet, platform: Platform) -> OpSet:
    """Wrap the op set so that it also computes experts on the host, if the settings ask for it.

    One core is left to queue the GPU's work.
    """
    if not isinstance(config.model.offload, HostExperts):
        return ops
    chosen = config.origins["num_threads"].source == "user"
    threads = config.device.num_threads if chosen else max(1, available_cores() - 1)
    return cast("OpSet", HostExpertOps(ops, NativeOps(threads), platform))


@torch.inference_mode()
def settle_experts(config: EngineConfig, model: LoadedModel, platform: Platform) -> LoadedModel:
    """Measure when copying experts to the device pays, and place some there permanently.

    Returns the model with the bytes of both included.
    """
    ops, decoder, how = model.decoder.ops, model.decoder, config.model.offload
    if not isinstance(ops, HostExpertOps) or not isinstance(how, HostExperts):
        return model
    own = {i: x.mlp.experts for i, x in enumerate(decoder.layers) if isinstance(x.mlp, MoE)}
    if platform.is_asynchronous:
        ops.choose(own.values(), decoder.dtype, config.scheduling.max_num_batched_tokens)
    held = ops.hold(own, how.hot_bytes, decoder.dtype)
    _logger.info("%s; %s experts of each layer on the device as well", ops.describe(), held or "no")
    return dataclasses.replace(model, weights_bytes=model.weights_bytes + ops.num_bytes)


class LoadFollower:
    """Chooses the experts on the device by the measured load, one layer every few steps."""

    def __init__(self, ops: OpSet, load: ExpertLoad) -> None:
        self._ops = ops if isinstance(ops, HostExpertOps) else None
        self._load = load
        self._steps = 0

    def after_step(self) -> None:
        if self._ops is None or not self._ops.holds_experts:
            return
        self._steps += 1
        if self._steps % LOOK_EVERY == 0:
            self._ops.follow(self._load.read())
