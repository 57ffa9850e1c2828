"""Loads a model with torch, from a checkpoint or as random weights: to a device, to a device and
host memory, or to a file that is streamed."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from slipstream.errors import CheckpointError, ConfigError, OutOfMemoryError
from slipstream.kernels.cpu.ops import NativeOps
from slipstream.kernels.cpu.torch_ops import CpuOps
from slipstream.kernels.experts.host import HostExpertOps
from slipstream.kernels.ops import OpSet
from slipstream.kernels.weights.forms import BlockLinear, Linear
from slipstream.model.decoder import Decoder
from slipstream.model.layers.layer import Partition
from slipstream.model.load.cache_scales import CacheScales
from slipstream.model.load.checkpoint import StoredWeights, names_of
from slipstream.model.load.device_loader import DeviceLoader
from slipstream.model.load.loaded import (
    LoadedModel,
    check_scheme,
    decoder_bytes,
    decoder_forms,
    dummy_scheme,
    is_rounded,
)
from slipstream.model.load.packed_cache import CachedWeights, PackedCacheFile
from slipstream.model.load.pulled import Pulled, Weights
from slipstream.model.load.random_weights import random_blocks, seed_of
from slipstream.model.load.sharding import Sharded, check_formats, split_blocks
from slipstream.model.load.streamed_loader import load_streamed
from slipstream.model.load.weights import random_tensors, tensor_weights
from slipstream.model.media import MediaTower
from slipstream.model.sound import SoundTower
from slipstream.model.stored.compressed import RoundedWeights
from slipstream.model.stored.gguf_blocks import BlockWeights
from slipstream.model.stored.mxfp4 import Mxfp4Weights
from slipstream.model.stored.parts import Stored
from slipstream.model.vision import ImageTower
from slipstream.spec.description import ModelDescription, read_spec
from slipstream.spec.host_experts import host_weights
from slipstream.spec.media.sound import SoundSpec
from slipstream.spec.media.vision import VisionSpec
from slipstream.spec.parallel import Shard
from slipstream.spec.scheme import SCHEMES, Scheme, WeightFormat
from slipstream.spec.stored.native_formats import rounds, scheme_formats


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

    1. The linear layers are quantized by `scheme`, one after another, unless the checkpoint stores
       them quantized.
    2. A GGUF file's blocks are used as stored where `ops` can compute with them. Otherwise, or if a
       scheme quantizes them again, they are dequantized.
    3. Quantized weights that `ops` can't compute with are expanded.
    4. With `weights_folder`, weights that a load quantizes or repacks are stored there for the next
       load, if that makes it faster.
    5. With a `partition`, a rank's part is loaded, and nothing is kept.
    6. With `weights_bytes`, at most that many bytes of weights stay in memory, and nothing is kept
       for the next load.
    7. The experts of the first `host_experts` mixtures are packed in host memory. `ops` must be
       `HostExpertOps` then.

    Weights are read, transformed and packed one module at a time (`pulled.py`). So the whole model
    is never in memory unquantized.
    """
    description = read_spec(source) if isinstance(source, Path) else source
    load = _Load(
        description,
        ops=ops,
        device=device,
        dtype=dtype,
        max_model_len=max_model_len or description.spec.max_position,
        load_format=load_format,
        seed=seed,
        scheme=scheme,
        partition=partition,
        host_experts=host_experts,
    )
    with torch.inference_mode():
        if weights_bytes is None:
            return load.whole(weights_folder)
        if isinstance(ops, NativeOps):
            return load.streamed(weights_bytes, weights_folder)
        return load.on_device(weights_bytes)


def part_weights(
    part: ModelDescription,
    *,
    ops: OpSet,
    device: torch.device,
    dtype: torch.dtype,
    load_format: str,
    seed: int,
    scheme: Scheme | None,
    partition: Partition | None = None,
    given: Sequence[Stored] | None = None,
) -> tuple[Weights, Scheme | None]:
    """Reads a checkpoint, or a part of one, as `load_model` would. Returns (its weights, the scheme
    by which dense ones are to be quantized). With a `partition` they are one rank's. `given`:
    tensors to use instead of its files."""
    load = _Load(
        part,
        ops=ops,
        device=device,
        dtype=dtype,
        max_model_len=part.spec.max_position,
        load_format=load_format,
        seed=seed,
        scheme=scheme,
        partition=partition,
        host_experts=0,
        given=given,
    )
    return load.weights(), load.scheme


class _Load:
    """One load and its settings. `weights` is the source; `whole`, `streamed` and `on_device` are
    the ways to lay it out."""

    def __init__(
        self,
        description: ModelDescription,
        *,
        ops: OpSet,
        device: torch.device,
        dtype: torch.dtype,
        max_model_len: int,
        load_format: str,
        seed: int,
        scheme: Scheme | None,
        partition: Partition | None,
        host_experts: int,
        given: Sequence[Stored] | None = None,
    ) -> None:
        """Checks the settings. CheckpointError or ConfigError names the one at fault. `given`:
        tensors to use instead of the files."""
        if load_format not in ("auto", "dummy", description.format):
            raise CheckpointError(
                f"load_format={load_format!r}, but {description.path} is a {description.format} checkpoint",
                field="load_format",
            )
        self.description = description
        self.ops = ops
        self.device = device
        self.dtype = dtype
        self.max_model_len = max_model_len
        self.seed = seed
        self.partition = partition
        self.is_dummy = load_format == "dummy"
        self.stored = description.quantization
        self.by = self._scheme(scheme)
        self.given = given
        self.part = None
        if partition is not None:
            self.part = _part(description, ops, partition.shard, given)
        self.spec = description.spec if self.part is None else self.part.spec
        self.on_host = host_weights(self.spec, host_experts)
        assert not self.on_host or isinstance(ops, HostExpertOps)
        if self.by is not None:
            ranks = 1 if partition is None else partition.shard.size
            check_scheme(self.spec, self.by, ops, ranks=ranks)

    def _scheme(self, asked: Scheme | None) -> Scheme | None:
        """Returns the scheme of the quantized weights: the checkpoint's own, or the one asked for.

        None if weights of several formats are held as they are stored. Random ones are quantized as
        a checkpoint's would be.
        """
        stored = self.stored
        if stored is not None and stored.formats is not None:
            return dummy_scheme(stored, self.ops) if self.is_dummy else None
        if stored is not None and stored.scheme is not None:
            return SCHEMES[stored.scheme]
        return asked

    @property
    def scheme(self) -> Scheme | None:
        """The scheme for dense weights. In a quantized checkpoint dense weights, including expanded
        ones, stay dense: None."""
        return None if is_rounded(self.stored) and not self.is_dummy else self.by

    # --- Ways to lay a model out ---

    def whole(self, folder: Path | None) -> LoadedModel:
        """Lays out all weights on the device, with experts in host memory if requested."""
        try:
            return self._whole(folder)
        except torch.OutOfMemoryError as error:
            raise OutOfMemoryError(
                f"the weights do not fit on {self.device}: {error}", field="model"
            ) from error

    def _whole(self, folder: Path | None) -> LoadedModel:
        spec, ops, description = self.spec, self.ops, self.description
        file = self._cache_file(folder)
        kept = None if file is None else file.read()
        cache_scales = self._cache_scales()
        weights = self.weights(kept, cache_scales)
        held = set(weights.products)
        self._pack_host_experts(weights)
        tower = self._tower(weights)
        decoder = Decoder(
            spec,
            weights.values,
            ops,
            max_model_len=self.max_model_len,
            scheme=self.scheme,
            products=weights.products,
            partition=self.partition,
        )
        if description.gguf is not None:
            description.gguf.let_go()
        num_bytes = decoder_bytes(decoder) + (0 if tower is None else tower.num_bytes)
        writer = None
        if file is not None and kept is None:
            by = self.scheme
            own = [n for n in weights.products if (n in held if by is None else rounds(by, n))]
            writer = file.write({n: weights.products[n] for n in own}, num_bytes)
        host_bytes = ops.arena.num_bytes if isinstance(ops, HostExpertOps) else 0
        forms = decoder_forms(decoder)
        return LoadedModel(
            description, spec, decoder, num_bytes, forms, cache_scales, writer, tower, host_bytes
        )

    def streamed(self, budget: int, folder: Path | None) -> LoadedModel:
        """Lays out the weights in a file, with at most `budget` bytes in memory."""
        assert isinstance(self.ops, NativeOps)
        return load_streamed(
            self.description,
            self.weights(),
            ops=self.ops,
            max_model_len=self.max_model_len,
            scheme=self.scheme,
            folder=folder or Path(tempfile.gettempdir()),
            budget=budget,
        )

    def on_device(self, budget: int) -> LoadedModel:
        """Lays out at most `budget` bytes of weights on the device, and the others in host
        memory."""
        if self.device.type == "cpu" and self.ops.name != "reference":
            message = f"weights_bytes: on a CPU it needs the C++ kernels, but kernels={self.ops.name!r} run here"
            raise ConfigError(message, field="weights_bytes")
        scales = self._cache_scales()
        return DeviceLoader(
            self.description,
            self.weights(cache_scales=scales),
            ops=self.ops,
            device=self.device,
            max_model_len=self.max_model_len,
            scheme=self.scheme,
            cache_scales=scales,
        ).load(budget)

    # --- Sources ---

    def weights(
        self, kept: dict[str, Linear] | None = None, cache_scales: CacheScales | None = None
    ) -> Weights:
        """The weights: random ones, those `kept` from an earlier start, or the checkpoint's."""
        how: dict[str, Any] = dict(
            dtype=self.dtype, device=self.device, part=self.part, on_host=self.on_host
        )
        if self.is_dummy:
            found = random_tensors(self.description, seed=self.seed, scheme=self.scheme, **how)
            return self._with_random_blocks(found)
        held = self._held(kept)
        how |= dict(held=held, cache_scales=cache_scales, given=self.given)
        found = tensor_weights(self.description, **how)
        if self.part is None or not isinstance(held, BlockWeights):
            return found
        return Weights(found.values, split_blocks(found.products, self.part))

    def _with_random_blocks(self, found: Weights) -> Weights:
        """Replaces random weights that a GGUF file stores as quantized blocks by random blocks."""
        if self.description.gguf is None or self.description.family.gguf is None:
            return found
        file = self._blocks().linears()
        drawn: Mapping[str, Linear] = Pulled(
            {
                name: partial(random_blocks, w, seed_of(name, self.seed))
                for name, w in file.items()
                if isinstance(w, BlockLinear)
            }
        )
        if self.part is not None:
            drawn = split_blocks(drawn, self.part)
        products = {
            n: partial(every.__getitem__, n) for every in (found.products, drawn) for n in every
        }
        return Weights(found.values.only(lambda name: name not in drawn), Pulled(products))

    def _cache_scales(self) -> CacheScales | None:
        if self.stored is None or self.stored.kv_cache is None or self.is_dummy:
            return None
        names = self.description.family.names(self.description.spec)
        shard = None if self.partition is None else self.partition.shard
        return CacheScales(self.description.spec, names, shard=shard)

    def _cache_file(self, folder: Path | None) -> PackedCacheFile | None:
        """The file that keeps packed weights for the next load; None if that would not be faster."""
        stored = self.stored
        repacks = is_rounded(stored) or (
            self.by is not None and (stored is None or not stored.rounds)
        )
        if folder is None or self.is_dummy or self.part is not None or not repacks:
            return None
        if self.ops.layout is None:
            return None
        dtype = str(self.dtype).removeprefix("torch.")
        return PackedCacheFile(folder, self.description, self.by, dtype, self.ops)

    def _held(self, kept: dict[str, Linear] | None) -> StoredWeights | None:
        """The object that collects quantized weights as stored, or the ones `kept` from an earlier
        start. None if there are none."""
        description, stored = self.description, self.stored
        if description.family.gguf is not None and description.gguf is not None:
            blocks = self._blocks()
            return blocks if kept is None else CachedWeights(kept, blocks, rounded=False)
        if kept is not None:
            return CachedWeights(kept, None, rounded=is_rounded(stored))
        shapes = description.shapes if self.part is None else self.part.shapes
        where: dict[str, Any] = dict(dtype=self.dtype, device=self.device, on_host=self.on_host)
        if stored is not None and stored.method == "mxfp4":
            return Mxfp4Weights(shapes, SCHEMES["mxfp4"], **where)
        if stored is None or not is_rounded(stored):
            return None
        formats = {name: fmt for name, fmt in self._formats().items() if name in shapes}
        columns = description.split_columns()
        return RoundedWeights(shapes, formats, stored.method, columns=columns, **where)

    def _blocks(self) -> BlockWeights:
        """Collects a GGUF file's blocks. Next to a GPU, host memory only gets its experts' blocks."""
        description, ops = self.description, self.ops
        assert description.family.gguf is not None
        assert description.gguf is not None
        names = description.family.gguf.names(description.spec)
        shapes, types = description.shapes, ops.block_types
        if isinstance(ops, HostExpertOps):
            shapes = {name: shape for name, shape in shapes.items() if name in self.on_host}
            types = ops.host.block_types
        empty = partial(torch.empty, dtype=self.dtype, device="meta")
        device = None if isinstance(ops, HostExpertOps | NativeOps) else self.device
        return BlockWeights(description.gguf, names, shapes, types, empty, self.by, device)

    def _formats(self) -> dict[str, WeightFormat]:
        """Returns the formats of the weights that stay as stored, by our names."""
        description, stored = self.description, self.stored
        assert stored is not None
        if self.part is not None:
            return dict(self.part.formats)
        if stored.formats is None:
            return scheme_formats(description.shapes, stored.scheme or "")
        formats = description.native_formats(self.ops.rounded)
        if isinstance(self.ops, HostExpertOps):
            there = description.native_formats(self.ops.host.rounded)
            formats = {n: fmt for n, fmt in formats.items() if n not in self.on_host}
            formats |= {n: fmt for n, fmt in there.items() if n in self.on_host}
        return formats

    # --- Parts that are laid out apart ---

    def _pack_host_experts(self, weights: Weights) -> None:
        """Packs the experts in host memory, one weight at a time."""
        if not isinstance(self.ops, HostExpertOps):
            return
        host, by = self.ops.host, self.scheme
        for name, count in self.on_host.items():
            if name in weights.products:
                packed = host.pack_experts(weights.products.pop(name), num_experts=count)
            else:
                own = by if by is not None and rounds(by, name) else None
                value = weights.values.pop(name)
                packed = host.quantize_experts(value, own, num_experts=count)
            weights.products[name] = packed
        self.ops.arena.pin()

    def _tower(self, weights: Weights) -> MediaTower | None:
        """Lays out the encoder of pictures or sounds, if the model has one."""
        spec, ops = self.spec, self.ops
        if spec.media is None or not spec.has_first:
            return None
        # With thousands of patches at a time, oneDNN's matrix products are faster than the C++
        # kernels, which are built for few tokens.
        own = CpuOps() if ops.name == "cpu" else ops
        if isinstance(spec.media, SoundSpec):
            return SoundTower(spec.media, weights.values, own)
        assert isinstance(spec.media, VisionSpec)
        assert self.description.processing is not None
        return ImageTower(spec.media, self.description.processing, weights.values, own)


def _part(
    description: ModelDescription, ops: OpSet, shard: Shard, given: Sequence[Stored] | None
) -> Sharded:
    """Makes one rank's part of a checkpoint. ConfigError if its weights can't be split that way."""
    stored, formats = description.quantization, dict[str, WeightFormat]()
    if stored is not None and stored.formats is not None:
        formats = description.native_formats(ops.rounded)
    elif stored is not None and is_rounded(stored):
        formats = scheme_formats(description.shapes, stored.scheme or "")
    names = names_of(description, given)
    method = None if stored is None else stored.method
    part = Sharded(description.spec, shard, names, description.family.prefixes, formats, method)
    check_formats(part)
    return part
