"""Loads a decoder layer by layer, of which some layers are streamed from a file (`spec.offload`,
`layer_stream`).

1. Each layer is packed, written to the stream's file, and dropped, so that only one is in memory.
2. When all sizes are known, the layers that stay in memory are read back.

So a checkpoint larger than memory can be loaded and run.
"""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from slipstream.kernels.cpu.native import Arena
from slipstream.kernels.cpu.ops import NativeOps
from slipstream.model.layer_stream import LayerStream, layer_bytes, without_data
from slipstream.model.layers.layer import Layer
from slipstream.model.load.loaded import LoadedModel, decoder_bytes, decoder_forms
from slipstream.model.load.pieces import load_ends, load_layer
from slipstream.model.load.pulled import Weights
from slipstream.spec.description import ModelDescription
from slipstream.spec.offload import plan_offload
from slipstream.spec.scheme import Scheme

_logger = logging.getLogger("slipstream.engine")


def load_streamed(
    description: ModelDescription,
    weights: Weights,
    *,
    ops: NativeOps,
    max_model_len: int,
    scheme: Scheme | None,
    folder: Path,
    budget: int,
) -> LoadedModel:
    """Loads the model with at most `budget` bytes of weights in memory. `folder`: where the
    stream's file is created."""
    spec, device = description.spec, torch.device("cpu")
    tables, stream = ops.position_tables(max_model_len, device), LayerStream(folder)
    layers: list[Layer] = []
    for i, own in enumerate(spec.layers):
        ops.host.arena = Arena(ops.pool)  # an arena whose memory is freed with the layer
        layer = load_layer(own, i, weights, ops, tables, scheme)
        stream.write(i, layer)
        layers.append(without_data(layer))
        del layer
    ops.host.arena = Arena(ops.pool)
    decoder = load_ends(spec, weights, ops, max_model_len, scheme)
    if description.gguf is not None:
        description.gguf.let_go()
    sizes = [layer_bytes(layer) for layer in layers]
    plan = plan_offload(sizes, decoder_bytes(decoder), budget)
    streamed = () if plan is None else plan.streamed
    kept = [stream.resident(i, x) for i, x in enumerate(layers) if i not in streamed]
    if plan is not None:
        stream.keep_only(streamed)
        _logger.info("%s", plan.describe())
    others = iter(kept)
    decoder.take_layers(
        [stream.streamed(i, x) if i in streamed else next(others) for i, x in enumerate(layers)]
    )
    forms = decoder_forms(decoder)
    if plan is not None:
        decoder.stream = stream
    total = decoder_bytes(decoder) if plan is None else plan.resident_bytes
    return LoadedModel(description, spec, decoder, total, forms)
