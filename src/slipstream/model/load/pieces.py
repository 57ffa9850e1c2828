"""Builds a model in pieces: layer by layer, and what is outside the layers. Used by loaders of
models that are not entirely on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slipstream.kernels.positions import PositionTables
from slipstream.model.building import build_layer
from slipstream.model.decoder import Decoder
from slipstream.model.layers.layer import Layer, Partition
from slipstream.model.load.pulled import Weights
from slipstream.spec.model import LayerSpec, ModelSpec
from slipstream.spec.scheme import Scheme

if TYPE_CHECKING:
    from slipstream.kernels.ops import OpSet


def layer_prefix(index: int) -> str:
    """Prefix of the names of a layer's parameters."""
    return f"layers.{index}."


def load_layer(
    spec: LayerSpec,
    index: int,
    weights: Weights,
    ops: OpSet,
    tables: PositionTables,
    scheme: Scheme | None,
    partition: Partition | None = None,
) -> Layer:
    """Lays out layer `index`. `weights` must be able to produce it again."""
    prefix = layer_prefix(index if spec.same_as is None else spec.same_as)
    own = weights.layer(prefix)
    how: Any = dict(scheme=scheme, products=own.products, partition=partition)
    return build_layer(spec, own.values, ops, tables, name=prefix, **how)


def load_ends(
    spec: ModelSpec,
    weights: Weights,
    ops: OpSet,
    max_model_len: int,
    scheme: Scheme | None,
    partition: Partition | None = None,
) -> Decoder:
    """Lays out the decoder without its layers."""
    own = weights.ends()
    return Decoder(
        spec,
        own.values,
        ops,
        max_model_len=max_model_len,
        scheme=scheme,
        products=own.products,
        layers=(),
        partition=partition,
    )
