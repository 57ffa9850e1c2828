"""Loads a model that runs as one C++ program, without torch, as NumPy arrays."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from slipstream.errors import CheckpointError
from slipstream.kernels.cpu.host_ops import HostOps
from slipstream.kernels.cpu.packed import stand_in
from slipstream.kernels.weights.forms import Linear
from slipstream.model.decoder import Decoder
from slipstream.model.load.cache_scales import CacheScales
from slipstream.model.load.checkpoint import StoredWeights, array_weights, names_of, random_arrays
from slipstream.model.load.loaded import (
    LoadedModel,
    check_scheme,
    decoder_bytes,
    decoder_forms,
    dummy_scheme,
)
from slipstream.model.load.packed_cache import CachedWeights, PackedCacheFile
from slipstream.model.load.pulled import Weights
from slipstream.model.stored.gguf_blocks import BlockWeights
from slipstream.model.stored.host_compressed import HostRoundedWeights
from slipstream.model.stored.parts import Stored
from slipstream.spec.description import ModelDescription
from slipstream.spec.scheme import SCHEMES, Scheme, WeightFormat
from slipstream.spec.stored.native_formats import rounds, scheme_formats


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
    """Loads a model in `dtype` ("bfloat16", "float32"), like `loader.load_model`.

    Reads a checkpoint in any format except MXFP4, or draws random weights from `seed`.
    """
    by, formats = _planned(description, ops, load_format, scheme)
    file, kept = None, None
    if (by is not None or formats) and weights_folder is not None and load_format != "dummy":
        file = PackedCacheFile(weights_folder, description, by, dtype, ops)
        kept = file.read()
    spec, stored, cache_scales = description.spec, description.quantization, None
    if stored is not None and stored.kv_cache is not None and load_format != "dummy":
        cache_scales = CacheScales(spec, description.family.names(spec))
    weights = _weights(description, ops, dtype, load_format, seed, by, formats, kept, cache_scales)
    own: Any = ops
    decoder = Decoder(
        spec, weights.values, own, max_model_len=max_model_len, scheme=by, products=weights.products
    )
    if description.gguf is not None:
        description.gguf.let_go()
    num_bytes, writer = decoder_bytes(decoder), None
    if file is not None and kept is None:
        ours = {
            n: w
            for n, w in weights.products.items()
            if (n in formats if by is None else rounds(by, n))
        }
        writer = file.write(ours, num_bytes)
    return LoadedModel(
        description, spec, decoder, num_bytes, decoder_forms(decoder), cache_scales, writer
    )


def part_arrays(
    part: ModelDescription,
    *,
    ops: HostOps,
    dtype: str,
    load_format: str,
    seed: int,
    scheme: Scheme | None,
    given: Sequence[Stored] | None = None,
) -> tuple[Weights, Scheme | None]:
    """Reads a checkpoint, or a part of one, as `load_host_model` would. Returns (its weights, the
    scheme by which dense ones are to be quantized). `given`: arrays to use instead of its files."""
    by, formats = _planned(part, ops, load_format, scheme)
    return _weights(part, ops, dtype, load_format, seed, by, formats, given=given), by


def _planned(
    description: ModelDescription, ops: HostOps, load_format: str, asked: Scheme | None
) -> tuple[Scheme | None, dict[str, WeightFormat]]:
    """(scheme that quantizes dense weights, formats of weights that stay as stored).
    CheckpointError or ConfigError names a setting at fault."""
    if load_format not in ("auto", "dummy", description.format):
        raise CheckpointError(
            f"load_format={load_format!r}, but {description.path} is a {description.format} checkpoint",
            field="load_format",
        )
    stored = description.quantization
    if stored is None or not stored.rounds:
        if asked is not None:
            check_scheme(description.spec, asked, ops)
        return asked, {}
    named = None if stored.scheme is None else SCHEMES[stored.scheme]
    if load_format == "dummy":  # random weights are quantized as a checkpoint's would be
        by = named if stored.formats is None else dummy_scheme(stored, ops)
        if by is not None:
            check_scheme(description.spec, by, ops)
        return by, {}
    # A quantized checkpoint's own format applies; its other weights stay dense.
    if stored.formats is not None:
        return None, description.native_formats(ops.rounded)
    assert named is not None
    assert stored.scheme is not None
    check_scheme(description.spec, named, ops)
    return None, scheme_formats(description.shapes, stored.scheme)


def _weights(
    description: ModelDescription,
    ops: HostOps,
    dtype: str,
    load_format: str,
    seed: int,
    scheme: Scheme | None,
    formats: dict[str, WeightFormat],
    kept: dict[str, Linear] | None = None,
    cache_scales: CacheScales | None = None,
    given: Sequence[Stored] | None = None,
) -> Weights:
    """Random weights, the `given` ones, those `kept` from an earlier start, or the checkpoint's."""
    if load_format == "dummy":
        return random_arrays(description.shapes, dtype, seed, scheme)
    stored = description.quantization
    held: StoredWeights | None = None
    if description.family.gguf is not None and description.gguf is not None:
        names, empty = names_of(description), partial(stand_in, dtype=dtype)
        blocks = BlockWeights(
            description.gguf, names, description.shapes, ops.block_types, empty, scheme
        )
        held = blocks if kept is None else CachedWeights(kept, blocks, rounded=False)
    elif kept is not None:
        held = CachedWeights(kept, None, rounded=bool(formats))
    elif stored is not None and stored.rounds:
        held = HostRoundedWeights(description.shapes, formats, stored.method, dtype)
    return array_weights(description, dtype, held, cache_scales, given)
