"""From a path to a model that runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from slipstream.errors import CheckpointError, ConfigError, OutOfMemoryError
from slipstream.kernels.ops import OpSet
from slipstream.model.cache_scales import CacheScales
from slipstream.model.compressed import RoundedWeights, held_formats, scheme_formats
from slipstream.model.decoder import Decoder
from slipstream.model.description import ModelDescription, read_spec
from slipstream.model.gguf import GGUFFile
from slipstream.model.gguf_blocks import BlockWeights
from slipstream.model.parameters import parameters
from slipstream.model.scheme import SCHEMES, Scheme
from slipstream.model.spec import ModelSpec
from slipstream.model.weights import dummy_parameters, load_parameters


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """`weights_bytes` counts what the device holds: parameters as laid out for the ops, and position tables. `cache_scales`
    are the checkpoint's, for an 8-bit cache of the form that its description names."""

    description: ModelDescription
    decoder: Decoder
    weights_bytes: int
    cache_scales: CacheScales | None = None

    @property
    def spec(self) -> ModelSpec:
        return self.description.spec


def load_model(
    path: Path,
    *,
    ops: OpSet,
    device: torch.device,
    dtype: torch.dtype,
    max_model_len: int | None = None,
    load_format: str = "auto",
    seed: int = 0,
    scheme: Scheme | None = None,
) -> LoadedModel:
    """Load a checkpoint (or make random weights, `load_format="dummy"`) straight onto `device` in `dtype`; the layers'
    products are then rounded by `scheme`, one after the other, unless the checkpoint holds them rounded. A GGUF file's
    blocks are used as they are where `ops` can; else, and with a scheme, they are dequantised first; weights that
    compressed-tensors rounded are expanded where `ops` has no product with them."""
    description = read_spec(path)
    stored, shapes = description.quantization, parameters(description.spec)
    if stored is not None and stored.formats is not None:
        scheme = None  # each weight is held as it is, or expanded
    elif stored is not None and stored.scheme is not None:
        scheme = SCHEMES[stored.scheme]
    if load_format not in ("auto", "dummy", description.format):
        raise CheckpointError(
            f"load_format={load_format!r}, but {path} is a {description.format} checkpoint", field="load_format"
        )
    if scheme is not None:
        check_scheme(description.spec, scheme)
    with torch.inference_mode():
        try:
            rounded: RoundedWeights | BlockWeights | None = None
            cache_scales = None
            if load_format == "dummy":
                values = dummy_parameters(description, dtype=dtype, device=device, seed=seed)
            else:
                if stored is not None and (stored.scheme is not None or stored.formats is not None):
                    if stored.formats is not None:
                        names = description.family.names(description.spec)
                        held = held_formats(names, shapes, stored.formats, ops.rounded, ops.rounded_experts)
                    else:
                        held = scheme_formats(shapes, stored.scheme or "")
                    rounded = RoundedWeights(shapes, held, stored.method, dtype=dtype, device=device)
                    scheme = None  # what is not held rounded is expanded, and stays so
                elif description.family.gguf is not None and description.format == "gguf" and scheme is None:
                    names = description.family.gguf.names(description.spec)
                    rounded = BlockWeights(GGUFFile(description.path), names, shapes, ops.block_types, dtype)
                if stored is not None and stored.kv_cache is not None:
                    cache_scales = CacheScales(description.spec, description.family.names(description.spec), device=device)
                values = load_parameters(
                    description, dtype=dtype, device=device, rounded=rounded, cache_scales=cache_scales
                )
        except torch.OutOfMemoryError as error:
            raise OutOfMemoryError(f"the weights do not fit on {device}: {error}", field="model") from error
        context = max_model_len if max_model_len is not None else description.spec.max_position
        linears = rounded.linears() if rounded is not None else {}
        decoder = Decoder(description.spec, values, ops, max_model_len=context, scheme=scheme, rounded=linears)
    return LoadedModel(description, decoder, _bytes(decoder), cache_scales)


def check_scheme(spec: ModelSpec, scheme: Scheme) -> None:
    """ConfigError if a product can't be cut as the scheme needs it: inputs by groups, 8-bit rows by the library's 16."""
    if scheme.inputs is not None:
        heads = [("vocab_size", spec.vocab_size)] if scheme.head else []
        kv_rows = [("num_kv_heads · head_dim", layer.attention.kv_size) for layer in spec.layers]
        for name, rows in (*heads, *kv_rows):
            if rows % 16:
                raise ConfigError(
                    f"{scheme.name} products need rows in multiples of 16, and the model's {name} is {rows}; leave the weights "
                    "as they are" + (", or the head with 'fp8'" if name == "vocab_size" else ""),
                    field="quantization",
                )
    for layer in spec.layers:
        for product in layer.products(spec.hidden_size):
            if (inner := product.inner) % scheme.multiple:
                name = "num_heads · head_dim" if product.part == "attention" else "intermediate_size"
                name = "hidden_size" if inner == spec.hidden_size else name
                other = "use 'int4-g32', 'fp8' or 'int8'" if scheme.multiple > 64 else "leave the weights as they are"
                raise ConfigError(
                    f"{scheme.name} products need inputs in multiples of {scheme.multiple}, and the model's {name} is "
                    f"{inner}; {other}",
                    field="quantization",
                )


def _bytes(decoder: Decoder) -> int:
    """Bytes of all distinct tensors that the decoder holds."""
    found: dict[int, int] = {}

    def visit(value: object) -> None:
        if isinstance(value, torch.Tensor):
            if value.device.type != "meta":  # a packed weight's stand-in
                key = id(value) if value.is_mkldnn else value.data_ptr()
                found[key] = value.numel() * value.element_size()
        elif isinstance(value, (list, tuple)):
            for item in value:
                visit(item)
        elif isinstance(value, dict):
            for item in value.values():
                visit(item)
        elif hasattr(value, "__dataclass_fields__"):
            for name in value.__dataclass_fields__:
                visit(getattr(value, name))

    for value in vars(decoder).values():
        visit(value)
    return sum(found.values())
