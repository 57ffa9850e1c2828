"""Loads a decoder whose weights are not all kept in memory, layer by layer (`spec.offload`,
`layer_stream`).

1. Each layer is packed, written to the stream's file, and dropped. So at most one layer is in
   memory in addition to those that stay.
2. Once all sizes are known, the layers that are to stay are read back.

So a checkpoint larger than the memory can start and run.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from slipstream.kernels.cpu.native import Arena
from slipstream.kernels.cpu.ops import NativeOps
from slipstream.kernels.weights import Linear
from slipstream.model.building import build_layer
from slipstream.model.checkpoint import StoredWeights
from slipstream.model.decoder import Decoder
from slipstream.model.layer_stream import LayerStream, layer_bytes, without_data
from slipstream.model.layers import Layer
from slipstream.model.loaded import LoadedModel, decoder_bytes, decoder_forms
from slipstream.model.weights import by_layer, dummy_values, load_parameters
from slipstream.spec.description import ModelDescription
from slipstream.spec.offload import plan_offload
from slipstream.spec.scheme import Scheme

_logger = logging.getLogger("slipstream.engine")


def load_streamed(
    description: ModelDescription,
    *,
    ops: NativeOps,
    dtype: torch.dtype,
    max_model_len: int,
    load_format: str,
    seed: int,
    scheme: Scheme | None,
    held: StoredWeights | None,
    folder: Path,
    budget: int,
) -> LoadedModel:
    """Loads the model with at most `budget` bytes of weights in memory.

    `held` takes a GGUF file's blocks. `folder` is for the stream's file.
    """
    spec, device = description.spec, torch.device("cpu")
    products = held.linears() if held is not None else {}
    tables, stream = ops.position_tables(max_model_len, device), LayerStream(folder)
    layers: list[Layer] = []
    ends: dict[str, Tensor] = {}
    for name, values in _parts(description, dtype, load_format, seed, held):
        if not name:
            ends |= values
            continue
        ops.host.arena = Arena(ops.pool)  # its memory is freed with the layer
        own: dict[str, Linear] = {n: w for n, w in products.items() if n.startswith(name)}
        layer = build_layer(
            spec.layers[len(layers)], values, ops, tables, name=name, scheme=scheme, products=own
        )
        stream.write(len(layers), layer)
        layers.append(without_data(layer))
        del layer, own, values
    ops.host.arena = Arena(ops.pool)
    outer = {n: w for n, w in products.items() if not n.startswith("layers.")}
    decoder = Decoder(
        spec, ends, ops, max_model_len=max_model_len, scheme=scheme, products=outer, layers=()
    )
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


def _parts(
    description: ModelDescription,
    dtype: torch.dtype,
    load_format: str,
    seed: int,
    held: StoredWeights | None,
) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yields (name prefix, parameters) of each layer in order, and at last the other parameters
    with ""."""
    prefixes, device = (
        [f"layers.{i}." for i in range(description.spec.num_layers)],
        torch.device("cpu"),
    )
    if load_format != "dummy":
        for prefix in prefixes:
            yield (
                prefix,
                load_parameters(
                    description,
                    dtype=dtype,
                    device=device,
                    held=held,
                    wanted=lambda n, p=prefix: n.startswith(p),  # type: ignore[misc]
                ),
            )
        yield (
            "",
            load_parameters(
                description,
                dtype=dtype,
                device=device,
                held=held,
                wanted=lambda n: not n.startswith("layers."),
            ),
        )
        return
    others: dict[str, Tensor] = {}
    for prefix, own in by_layer(dummy_values(description, dtype=dtype, device=device, seed=seed)):
        if prefix:
            yield prefix, dict(own)
        else:
            others.update(own)
    yield "", others
