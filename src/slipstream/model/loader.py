"""Loads a model from a path."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Container
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from slipstream.errors import CheckpointError, ConfigError, OutOfMemoryError
from slipstream.kernels.cpu.ops import NativeOps
from slipstream.kernels.cpu.torch_ops import CpuOps
from slipstream.kernels.host_experts import HostExpertOps
from slipstream.kernels.ops import OpSet
from slipstream.kernels.weights import Linear
from slipstream.model.cache_scales import CacheScales
from slipstream.model.checkpoint import StoredWeights
from slipstream.model.compressed import RoundedWeights
from slipstream.model.decoder import Decoder
from slipstream.model.device_loader import DeviceLoader
from slipstream.model.gguf_blocks import BlockWeights
from slipstream.model.layers import Partition
from slipstream.model.loaded import (
    LoadedModel,
    check_scheme,
    decoder_bytes,
    decoder_forms,
    dummy_scheme,
    is_rounded,
)
from slipstream.model.mxfp4 import Mxfp4Weights
from slipstream.model.packed_cache import CachedWeights, PackedCacheFile
from slipstream.model.sharding import Sharded, check_formats, split_blocks
from slipstream.model.streamed_loader import load_streamed
from slipstream.model.vision import ImageTower
from slipstream.model.weights import dummy_parameters, every_name, load_parameters
from slipstream.spec.description import ModelDescription, read_spec
from slipstream.spec.host_experts import host_weights
from slipstream.spec.native_formats import rounds, scheme_formats
from slipstream.spec.parallel import Shard
from slipstream.spec.parameters import parameters
from slipstream.spec.scheme import SCHEMES, Scheme, WeightFormat


def load_model(
    source: Path | ModelDescription,
    *,
    ops: OpSet,
    device: torch.device,
    dtype: torch.dtype,
    max_model_len: int | None = None,
    load_format: str = "auto",
    seed: int = 0,
    scheme: Scheme | None = None,
    weights_folder: Path | None = None,
    partition: Partition | None = None,
    weights_bytes: int | None = None,
    host_experts: int = 0,
) -> LoadedModel:
    """Loads a checkpoint, by its path or description, onto `device` in `dtype`.
    `load_format="dummy"` makes random weights.

    1. The layers' products are quantized by `scheme`, one after another, unless the checkpoint
       holds them quantized.
    2. A GGUF file's blocks are used as stored where `ops` can. Otherwise, and where a scheme
       quantizes them anew, they are dequantized.
    3. Quantized weights that `ops` has no product for are expanded.
    4. With `weights_folder`, products that a load quantizes or repacks are kept there for the next
       load, if that makes it faster.
    5. With a `partition`, a rank's part is loaded, and nothing is kept.
    6. With `weights_bytes`, at most that many bytes of weights stay in memory, and nothing is kept
       for the next load.
    7. The experts of the first `host_experts` mixtures are packed in host memory. `ops` are
       `HostExpertOps` then.
    """
    description = read_spec(source) if isinstance(source, Path) else source
    stored = description.quantization
    if stored is not None and stored.formats is not None:
        # Each weight is held as it is, or expanded. Random ones are quantized as a checkpoint's
        # would be.
        scheme = dummy_scheme(stored, ops) if load_format == "dummy" else None
    elif stored is not None and stored.scheme is not None:
        scheme = SCHEMES[stored.scheme]
    if load_format not in ("auto", "dummy", description.format):
        raise CheckpointError(
            f"load_format={load_format!r}, but {description.path} is a {description.format} checkpoint",
            field="load_format",
        )
    part = None if partition is None else _part(description, ops, partition.shard)
    spec = description.spec if part is None else part.spec
    if scheme is not None:
        check_scheme(spec, scheme, ops, ranks=1 if partition is None else partition.shard.size)
    if weights_bytes is not None:
        assert partition is None
        context = max_model_len if max_model_len is not None else description.spec.max_position
        if not isinstance(ops, NativeOps):
            if device.type == "cpu" and ops.name != "reference":
                message = f"weights_bytes: on a CPU it needs the C++ kernels, but kernels={ops.name!r} run here"
                raise ConfigError(message, field="weights_bytes")
            with torch.inference_mode():
                return _device_loader(
                    description, ops, device, dtype, context, load_format, seed, scheme
                ).load(weights_bytes)
        with torch.inference_mode():
            return load_streamed(
                description,
                ops=ops,
                dtype=dtype,
                max_model_len=context,
                load_format=load_format,
                seed=seed,
                scheme=scheme,
                held=None
                if load_format == "dummy"
                else _stored_weights(description, ops, dtype, device, scheme, None, None),
                folder=weights_folder or Path(tempfile.gettempdir()),
                budget=weights_bytes,
            )
    on_host = host_weights(spec, host_experts)
    assert not on_host or isinstance(ops, HostExpertOps)
    packed: dict[str, Linear] = {}
    held: StoredWeights | None = None
    cache_scales = file = kept = None
    with torch.inference_mode():

        def take(name: str, value: Tensor | Linear) -> bool:
            """Packs an expert's weight for the host, and returns whether it did."""
            if name not in on_host:
                return False
            assert isinstance(ops, HostExpertOps)
            if isinstance(value, Linear):
                packed[name] = ops.host.pack_experts(value, num_experts=on_host[name])
            else:
                by = None if scheme is None or not rounds(scheme, name) else scheme
                packed[name] = ops.host.quantize_experts(value.cpu(), by, num_experts=on_host[name])
            return True

        try:
            if load_format == "dummy":
                values = dummy_parameters(
                    description, dtype=dtype, device=device, seed=seed, part=part, take=take
                )
            else:
                repacks = is_rounded(stored) or (
                    scheme is not None and (stored is None or not stored.rounds)
                )
                if (
                    weights_folder is not None
                    and part is None
                    and ops.layout is not None
                    and repacks
                ):
                    file = PackedCacheFile(
                        weights_folder, description, scheme, str(dtype).removeprefix("torch."), ops
                    )
                    kept = file.read()
                held = _stored_weights(
                    description, ops, dtype, device, scheme, kept, part, on_host=on_host
                )
                if stored is not None and stored.kv_cache is not None:
                    names = description.family.names(description.spec)
                    shard = None if partition is None else partition.shard
                    cache_scales = CacheScales(description.spec, names, shard=shard)
                values = load_parameters(
                    description,
                    dtype=dtype,
                    device=device,
                    held=held,
                    cache_scales=cache_scales,
                    part=part,
                    on_host=on_host,
                )
        except torch.OutOfMemoryError as error:
            raise OutOfMemoryError(
                f"the weights do not fit on {device}: {error}", field="model"
            ) from error
        context = max_model_len if max_model_len is not None else description.spec.max_position
        products = held.linears() if held is not None else {}
        if part is not None and isinstance(held, BlockWeights):
            products = split_blocks(
                {name: w for name, w in products.items() if name in part.shapes}, part
            )
        repacked = set(products)
        if is_rounded(stored) and load_format != "dummy":
            scheme = None  # weights without a product were expanded, and are not quantized again
        for given in (values, products):
            for name in [name for name in given if name in on_host]:
                take(name, given.pop(name))
        products |= packed
        if isinstance(ops, HostExpertOps):
            ops.arena.pin()
        tower = None
        if spec.vision is not None and spec.has_first:
            assert description.images is not None
            # With thousands of patches at a time, oneDNN's products are faster than the C++
            # kernels, which are made for few tokens.
            tower = ImageTower(
                spec.vision, description.images, values, CpuOps() if ops.name == "cpu" else ops
            )
        decoder = Decoder(
            spec,
            values,
            ops,
            max_model_len=context,
            scheme=scheme,
            products=products,
            partition=partition,
        )
    if description.gguf is not None:
        description.gguf.let_go()
    num_bytes = decoder_bytes(decoder) + (0 if tower is None else tower.num_bytes)
    writer = None
    if file is not None and kept is None:
        ours = {
            n: w
            for n, w in products.items()
            if (n in repacked if scheme is None else rounds(scheme, n))
        }
        writer = file.write(ours, num_bytes)
    host_bytes = ops.arena.num_bytes if isinstance(ops, HostExpertOps) else 0
    forms = decoder_forms(decoder)
    return LoadedModel(
        description, spec, decoder, num_bytes, forms, cache_scales, writer, tower, host_bytes
    )


def _part(description: ModelDescription, ops: OpSet, shard: Shard) -> Sharded:
    """Makes a rank's part of a checkpoint. ConfigError if its weights can't be split that way."""
    stored, formats = description.quantization, dict[str, WeightFormat]()
    gguf = description.family.gguf if description.format == "gguf" else None
    if stored is not None and stored.formats is not None:
        formats = description.native_formats(ops.rounded)
    elif stored is not None and is_rounded(stored):
        formats = scheme_formats(description.shapes, stored.scheme or "")
    names = (gguf or description.family).names(description.spec)
    method = None if stored is None else stored.method
    part = Sharded(description.spec, shard, names, description.family.prefixes, formats, method)
    check_formats(part)
    return part


def _device_loader(
    description: ModelDescription,
    ops: OpSet,
    device: torch.device,
    dtype: torch.dtype,
    max_model_len: int,
    load_format: str,
    seed: int,
    scheme: Scheme | None,
) -> DeviceLoader:
    """Makes a loader for a decoder whose layers don't all stay on the device."""
    stored, is_dummy, scales = description.quantization, load_format == "dummy", None
    by = scheme
    if is_rounded(stored) and not is_dummy:
        by = None  # as in `load_model`
    if stored is not None and stored.kv_cache is not None and not is_dummy:
        scales = CacheScales(description.spec, description.family.names(description.spec))
    return DeviceLoader(
        description,
        ops=ops,
        device=device,
        dtype=dtype,
        max_model_len=max_model_len,
        is_dummy=is_dummy,
        seed=seed,
        scheme=by,
        held_of=lambda wanted: _stored_weights(
            description, ops, dtype, device, scheme, None, None, wanted
        ),
        cache_scales=scales,
    )


def _stored_weights(
    description: ModelDescription,
    ops: OpSet,
    dtype: torch.dtype,
    device: torch.device,
    scheme: Scheme | None,
    kept: dict[str, Linear] | None,
    part: Sharded | None,
    wanted: Callable[[str], bool] = every_name,
    on_host: Container[str] = (),
) -> StoredWeights | None:
    """Returns the object that takes the `wanted` quantized weights as stored, or replaces them by
    those `kept` from an earlier start.

    None if there are none. Weights in `on_host` are held in host memory, in formats of its kernels.
    """
    stored, shapes = (
        description.quantization,
        parameters(description.spec) if part is None else part.shapes,
    )
    shapes = {name: shape for name, shape in shapes.items() if wanted(name)}
    gguf = description.family.gguf
    if gguf is not None and description.gguf is not None:
        names = gguf.names(description.spec)
        empty = partial(torch.empty, dtype=dtype, device="meta")
        types, whole = (
            ops.block_types,
            {n: shape for n, shape in parameters(description.spec).items() if wanted(n)},
        )
        if isinstance(ops, HostExpertOps):
            whole, types = (
                {name: shape for name, shape in whole.items() if name in on_host},
                ops.host.block_types,
            )
        blocks = BlockWeights(description.gguf, names, whole, types, empty, scheme)
        return blocks if kept is None else CachedWeights(kept, blocks, rounded=False)
    if kept is not None:
        return CachedWeights(kept, None, rounded=is_rounded(stored))
    if stored is not None and stored.method == "mxfp4":
        return Mxfp4Weights(shapes, SCHEMES["mxfp4"], dtype=dtype, device=device, on_host=on_host)
    if stored is None or not is_rounded(stored):
        return None
    if part is not None:
        formats = part.formats
    elif stored.formats is not None:
        formats = description.native_formats(ops.rounded)
        if isinstance(ops, HostExpertOps):
            there = description.native_formats(ops.host.rounded)
            formats = {n: fmt for n, fmt in formats.items() if n not in on_host}
            formats |= {n: fmt for n, fmt in there.items() if n in on_host}
    else:
        formats = scheme_formats(shapes, stored.scheme or "")
    formats = {name: fmt for name, fmt in formats.items() if name in shapes}
    columns = description.split_columns()
    return RoundedWeights(
        shapes, formats, stored.method, dtype=dtype, device=device, columns=columns, on_host=on_host
    )
