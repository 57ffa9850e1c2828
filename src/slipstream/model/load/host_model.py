"""Loads a model that runs as one C++ program, without torch. Parameters are NumPy arrays."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from slipstream.errors import CheckpointError
from slipstream.kernels.cpu.host_ops import HostOps
from slipstream.kernels.cpu.native import stand_in
from slipstream.model.decoder import Decoder
from slipstream.model.load.cache_scales import CacheScales
from slipstream.model.load.checkpoint import StoredWeights, array_weights, random_arrays
from slipstream.model.load.loaded import (
    LoadedModel,
    check_scheme,
    decoder_bytes,
    decoder_forms,
    dummy_scheme,
)
from slipstream.model.load.packed_cache import CachedWeights, PackedCacheFile
from slipstream.model.stored.gguf_blocks import BlockWeights
from slipstream.model.stored.host_compressed import HostRoundedWeights
from slipstream.spec.description import ModelDescription
from slipstream.spec.native_formats import rounds, scheme_formats
from slipstream.spec.parameters import parameters
from slipstream.spec.scheme import SCHEMES, Scheme, WeightFormat


def load_host_model(
    description: ModelDescription,
    *,
    ops: HostOps,
    dtype: str,
    max_model_len: int,
    load_format: str = "auto",
    seed: int = 0,
    scheme: Scheme | None = None,
    weights_folder: Path | None = None,
) -> LoadedModel:
    """Loads a model in `dtype` ("bfloat16", "float32"), as `loader.load_model` does.

    It reads a checkpoint in any format but MXFP4, or makes random weights from `seed`.
    """
    if load_format not in ("auto", "dummy", description.format):
        raise CheckpointError(
            f"load_format={load_format!r}, but {description.path} is a {description.format} checkpoint",
            field="load_format",
        )
    spec, dummy, file, kept, cache_scales = (
        description.spec,
        load_format == "dummy",
        None,
        None,
        None,
    )
    stored = description.quantization
    if (
        dummy and stored is not None and stored.rounds
    ):  # random weights are quantized as a checkpoint's would be
        scheme = (
            dummy_scheme(stored, ops)
            if stored.formats is not None
            else SCHEMES[stored.scheme or ""]
        )
    stored = None if dummy else stored
    formats = dict[str, WeightFormat]()
    if stored is not None and stored.rounds:
        if stored.formats is not None:
            formats = description.native_formats(ops.rounded)
        elif stored.scheme is not None:
            formats = scheme_formats(description.shapes, stored.scheme)
            check_scheme(spec, SCHEMES[stored.scheme], ops)
        scheme = None  # a checkpoint's own quantization counts; its other weights stay dense
    elif scheme is not None:
        check_scheme(spec, scheme, ops)
    if (scheme is not None or formats) and weights_folder is not None and not dummy:
        file = PackedCacheFile(weights_folder, description, scheme, dtype, ops)
        kept = file.read()
    held: StoredWeights | None = None
    if not dummy and description.family.gguf is not None and description.gguf is not None:
        names, empty = description.family.gguf.names(spec), partial(stand_in, dtype=dtype)
        blocks = BlockWeights(
            description.gguf, names, parameters(spec), ops.block_types, empty, scheme
        )
        held = blocks if kept is None else CachedWeights(kept, blocks, rounded=False)
    elif kept is not None:
        held = CachedWeights(kept, None, rounded=bool(formats))
    elif stored is not None and stored.rounds:
        held = HostRoundedWeights(parameters(spec), formats, stored.method, dtype)
    if stored is not None and stored.kv_cache is not None:
        cache_scales = CacheScales(spec, description.family.names(spec))
    weights = (
        random_arrays(parameters(spec), dtype, seed, scheme)
        if dummy
        else array_weights(description, dtype, held, cache_scales)
    )
    own: Any = ops
    decoder = Decoder(
        spec,
        weights.values,
        own,
        max_model_len=max_model_len,
        scheme=scheme,
        products=weights.products,
    )
    if description.gguf is not None:
        description.gguf.let_go()
    num_bytes, writer = decoder_bytes(decoder), None
    if file is not None and kept is None:
        ours = {
            n: w
            for n, w in weights.products.items()
            if (n in formats if scheme is None else rounds(scheme, n))
        }
        writer = file.write(ours, num_bytes)
    return LoadedModel(
        description, spec, decoder, num_bytes, decoder_forms(decoder), cache_scales, writer
    )
