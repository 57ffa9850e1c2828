"""Loads a decoder of which some layers stay in host memory (`spec.offload`, `device_stream`).

1. The parameters outside the layers are loaded.
2. The first layer of each kind is laid out on the device, measured and dropped. This gives the
   sizes of all layers.
3. Each layer is laid out in turn. It stays on the device, or is copied to the host and dropped. So
   at any time at most one more layer than planned is on the device, and one in this process besides
   pinned memory.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from typing import Any

import torch

from slipstream.errors import OutOfMemoryError
from slipstream.kernels.ops import OpSet
from slipstream.model.device_stream import DeviceStream, layer_bytes, with_tensors, without_data
from slipstream.model.layers.layer import Layer
from slipstream.model.load.cache_scales import CacheScales
from slipstream.model.load.loaded import LoadedModel, decoder_bytes, decoder_forms, tensor_bytes
from slipstream.model.load.pieces import layer_prefix, load_ends, load_layer
from slipstream.model.load.pulled import Weights
from slipstream.platform import platform_of
from slipstream.spec.description import ModelDescription
from slipstream.spec.offload import plan_offload
from slipstream.spec.parameters import parameters
from slipstream.spec.scheme import Scheme

_logger = logging.getLogger("slipstream.engine")


class DeviceLoader:
    """Lays out the layers of a model one after another."""

    def __init__(
        self,
        description: ModelDescription,
        weights: Weights,
        *,
        ops: OpSet,
        device: torch.device,
        max_model_len: int,
        scheme: Scheme | None,
        cache_scales: CacheScales | None,
    ) -> None:
        self.description = description
        self.weights = weights
        self.ops = ops
        self.device = device
        self.max_model_len = max_model_len
        self.scheme = scheme
        self.cache_scales = cache_scales
        self.tables = ops.position_tables(max_model_len, device)

    def load(self, budget: int) -> LoadedModel:
        """Loads the model with at most `budget` bytes of weights on the device. ConfigError if that
        is too little."""
        try:
            return self._load(budget)
        except torch.OutOfMemoryError as error:
            message = f"weights_bytes={budget}, and the weights do not fit on {self.device}: {error}; lower it"
            raise OutOfMemoryError(message, field="weights_bytes") from error

    def _load(self, budget: int) -> LoadedModel:
        spec, stream = self.description.spec, DeviceStream(platform_of(self.device))
        decoder = load_ends(spec, self.weights, self.ops, self.max_model_len, self.scheme)
        sizes, small = self._sizes()
        others = decoder_bytes(decoder) + tensor_bytes(vars(self.tables)) + small
        plan = plan_offload(sizes, others, budget)
        streamed = () if plan is None else plan.streamed
        stream.expect({i: sizes[i] for i in streamed})
        layers: list[Layer] = []
        for i, layer in self._layers(range(spec.num_layers)):
            layers.append(
                stream.keep(i, layer) if i in streamed else with_tensors(layer, lambda x: x)
            )
            del layer  # before the next layer is made
        if plan is not None:
            stream.open()
            _logger.info("%s", plan.describe())
        if self.description.gguf is not None:
            self.description.gguf.let_go()
        decoder.take_layers(
            [stream.placed(i, x) if i in streamed else x for i, x in enumerate(layers)]
        )
        forms = decoder_forms(decoder)
        if plan is not None:
            decoder.stream = stream
        total = decoder_bytes(decoder) if plan is None else plan.resident_bytes
        return LoadedModel(self.description, spec, decoder, total, forms, self.cache_scales)

    def _sizes(self) -> tuple[list[int], int]:
        """(bytes of each layer in a staging buffer, bytes that all layers keep outside it)."""
        kinds = [self._kind(i) for i in range(self.description.spec.num_layers)]
        found: dict[Any, tuple[int, int]] = {}
        shared = 0
        for i, layer in self._layers({kinds.index(kind) for kind in kinds}):
            shared = tensor_bytes(vars(self.tables))
            found[kinds[i]] = (
                layer_bytes(layer),
                tensor_bytes(without_data(layer), vars(self.tables)) - shared,
            )
            del layer
        return [found[kind][0] for kind in kinds], sum(found[kind][1] for kind in kinds)

    def _kind(self, index: int) -> Any:
        """Key of the layer's kind. Layers of the same kind have the same layout."""
        description, prefix = self.description, layer_prefix(index)
        formats, columns = description.native_formats(self.ops.rounded), description.split_columns()
        shapes = {n: s for n, s in parameters(description.spec).items() if n.startswith(prefix)}
        of_weights = tuple(
            (n.removeprefix(prefix), s, formats.get(n), len(columns.get(n, ())))
            for n, s in shapes.items()
        )
        return description.spec.layers[index], of_weights

    def _layers(self, wanted: Collection[int]) -> Iterator[tuple[int, Layer]]:
        """Yields the layers with these indices one by one, laid out on the device."""
        layers = self.description.spec.layers
        for i in sorted(wanted):
            yield i, load_layer(layers[i], i, self.weights, self.ops, self.tables, self.scheme)
