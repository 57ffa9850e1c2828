"""What a config.json's `quantization_config` says: which scheme the checkpoint's weights are held by, whose tools wrote them,
and which 8-bit KV cache its scales are for. No torch.

Read as strictly as the rest of a config: what is not supported, or not known, is refused by name. Inputs are always scaled
token by token as they come: a checkpoint's own static input scales are not needed, and where they were asked for this is the
finer way. Queries stay in the model's type, so that the scales of an attention that is quantised as a whole are needed for
keys and values alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from slipstream.model.families.base import ConfigReader
from slipstream.model.scheme import SCHEMES, InputFormat

Method: TypeAlias = Literal["compressed-tensors", "gptq", "gptq_v2", "awq", "mxfp4"]
"""How a checkpoint's tensors are called and packed. GPTQ's first version writes zero points less one."""

PREFIX = "quantization_config."
INT4_BY_GROUP = {128: "int4", 32: "int4-g32"}
SPARSE_FORMATS = ("sparse-bitmask", "sparse-24-bitmask")
FORMATS = ("float-quantized", "int-quantized", "pack-quantized", "naive-quantized")
NO_EFFECT = frozenset((
    "backend", "batch_size", "block_name_to_quantize", "cache_block_outputs", "damp_auto_increment", "damp_percent",
    "dataset", "disable_exllama", "do_fuse", "exllama_config", "fuse_max_seq_len", "global_compression_ratio",
    "max_input_length", "meta", "model_file_base_name", "model_name_or_path", "model_seqlen",
    "module_name_preceding_first_block", "modules_in_block_to_quantize", "modules_to_fuse", "mse", "observer",
    "observer_kwargs", "pad_token_id", "scale_dtype", "static_groups", "tokenizer", "true_sequential", "use_cuda_fp16",
    "use_exllama", "version", "zp_dtype",
))  # fmt: skip
"""Keys that tell how the weights were found or packed, not what they are; a layer left out is missed among the tensors."""


@dataclass(frozen=True, slots=True)
class StoredQuantization:
    """`scheme` is a name in `SCHEMES`, or None where the weights are in the model's type; something is set."""

    method: Method
    scheme: str | None
    kv_cache: InputFormat | None = None  # there are scales for a cache of this form
    sparse: bool = False  # some weights are held without their zeros (model/bitmasks.py)


def read_quantization(config: Mapping[str, Any], *, tied_embeddings: bool) -> StoredQuantization:
    """UnsupportedModelError names the field that is not supported."""
    read = _reader(config, PREFIX)
    kind = read.take("quant_method", str)
    readers = {"compressed-tensors": _compressed_tensors, "gptq": _gptq, "awq": _awq, "mxfp4": _mxfp4}
    if kind == "fp8":
        raise read.unsupported(
            "quant_method",
            "scales for blocks of 128 × 128 (DeepSeek V3) are not supported: take a checkpoint of compressed-tensors with a "
            "scale a row, or one in bfloat16 with quantization='fp8'",
        )
    if kind not in readers:
        raise read.unsupported("quant_method", f"only {', '.join(readers)} are supported")
    found = readers[kind](read, tied_embeddings)
    read.finish()
    return found


def _awq(read: ConfigReader, tied_embeddings: bool) -> StoredQuantization:
    read.require("version", "gemm", "GEMM")
    read.require("zero_point", True)
    read.require("modules_to_not_convert", [], ["lm_head"])
    return StoredQuantization("awq", _int4(read))


def _mxfp4(read: ConfigReader, tied_embeddings: bool) -> StoredQuantization:
    kept = read.maybe("modules_to_not_convert", list) or []  # all but the experts, which alone have blocks
    if any(str(name).rstrip(".*").endswith(("experts", "mlp")) for name in kept):
        raise read.unsupported("modules_to_not_convert", "experts that are left out are not supported")
    return StoredQuantization("mxfp4", "mxfp4")


def _gptq(read: ConfigReader, tied_embeddings: bool) -> StoredQuantization:
    read.require("sym", True)
    for name in ("desc_act", "lm_head", "is_marlin_format"):
        read.require(name, False)
    read.require("dynamic", {})
    read.require("pack_dtype", "int32")
    read.require("checkpoint_format", "gptq", "gptq_v2")
    second = read.maybe("checkpoint_format", str) == "gptq_v2"
    return StoredQuantization("gptq_v2" if second else "gptq", _int4(read))


def _int4(read: ConfigReader) -> str:
    if read.take("bits", int) != 4:
        raise read.unsupported("bits", "only 4 is supported")
    size = read.take("group_size", int)
    if size not in INT4_BY_GROUP:
        raise read.unsupported("group_size", "only 128 or 32 is supported")
    return INT4_BY_GROUP[size]


def _compressed_tensors(read: ConfigReader, tied_embeddings: bool) -> StoredQuantization:
    read.require("transform_config", {})
    sparse = _sparsity(read)
    caches = {"kv_cache_scheme": read.maybe("kv_cache_scheme", dict)}
    groups = dict(read.maybe("config_groups", dict) or {})
    for name, group in [*groups.items()]:
        if isinstance(group, Mapping) and group.get("weights") is None:  # an attention as a whole, its cache with it
            caches[f"config_groups.{name}"] = _attention_inputs(_reader(groups.pop(name), f"{PREFIX}config_groups.{name}."))
    kinds = {where: _cache(given, f"{PREFIX}{where}.") for where, given in caches.items() if given is not None}
    kv_cache = next(iter(kinds.values()), None)
    if len(set(kinds.values())) > 1 or len(groups) > 1 or not (groups or kinds or sparse):
        raise read.unsupported("config_groups", "only one group, for all layers, is supported, and one form of the KV cache")
    # Routers of experts are never rounded. (Were another layer left out, its tensors would be of another kind than expected.)
    ignored = [layer for layer in read.maybe("ignore", list) or [] if not str(layer).rstrip("$").endswith("gate")]
    if not groups:
        read.require("format", "dense", *FORMATS, *SPARSE_FORMATS)
        read.require("quantization_status", "compressed", "frozen")  # of weights, which are as they were
        return StoredQuantization("compressed-tensors", None, kv_cache, sparse)
    read.require("format", *FORMATS)
    read.require("quantization_status", "compressed")
    name, group = next(iter(groups.items()))
    found = _group(_reader(group, f"{PREFIX}config_groups.{name}."), f"{PREFIX}config_groups.{name}.")
    has_head = not tied_embeddings and "lm_head" not in ignored
    if any(layer != "lm_head" for layer in ignored) or (has_head and f"{found}-head" not in SCHEMES):
        raise read.unsupported("ignore", "only the output head, lm_head, may be left out" + ", and must" * has_head)
    return StoredQuantization("compressed-tensors", f"{found}-head" if has_head else found, kv_cache, sparse)


def _sparsity(read: ConfigReader) -> bool:
    """Whether weights are held without their zeros. Which ones (`targets`, `ignore`) their tensors' names say as well."""
    given = read.maybe("sparsity_config", dict)
    if not given:
        return False
    inner = _reader(given, f"{PREFIX}sparsity_config.")
    inner.require("format", "dense", *SPARSE_FORMATS)
    inner.ignore("targets", "ignore", "global_sparsity", "sparsity_structure", "registry_requires_subclass")
    inner.finish()
    return given.get("format") in SPARSE_FORMATS


def _attention_inputs(group: ConfigReader) -> dict[str, Any]:
    """What a group without weights says of its inputs: only attention modules have such."""
    targets = group.take("targets", list)
    if not all(isinstance(t, str) and t.endswith("Attention") for t in targets):
        raise group.unsupported("targets", "without weights only attention modules are supported")
    group.require("format", "dense", *FORMATS)
    group.require("weights")
    group.require("output_activations")
    inputs = group.take("input_activations", dict)
    group.finish()
    return inputs


def _cache(given: Mapping[str, Any], prefix: str) -> InputFormat:
    """The form of cache that a scheme's scales are for: 8 bits, symmetric, found beforehand, a scale a layer or kv head."""
    read = _reader(given, prefix)
    read.require("symmetric", True)
    read.require("dynamic", False)
    read.require("strategy", "tensor", "attn_head")
    for name in ("group_size", "block_structure", "actorder"):
        read.require(name)
    if read.take("num_bits", int) != 8:
        raise read.unsupported("num_bits", "only 8 is supported")
    kind = read.take("type", str)
    if kind not in ("float", "int"):
        raise read.unsupported("type", "only 'float' or 'int' is supported")
    read.finish()
    return "fp8" if kind == "float" else "int8"


def _group(group: ConfigReader, prefix: str) -> str:
    """The scheme of one group of layers, but for the output head."""
    group.require("targets", ["Linear"])
    group.require("format", "float-quantized", "int-quantized", "pack-quantized", "naive-quantized")
    group.require("output_activations")
    weights = _reader(group.take("weights", dict), f"{prefix}weights.")
    given = group.maybe("input_activations", dict)
    group.finish()
    weights.require("symmetric", True)
    weights.require("dynamic", False)
    weights.require("actorder", "static")
    weights.require("block_structure")
    bits, kind = weights.take("num_bits", int), weights.take("type", str)
    strategy, size = weights.take("strategy", str), weights.maybe("group_size", int)
    weights.finish()
    if given is None:
        if (bits, kind, strategy) != (4, "int", "group") or size not in INT4_BY_GROUP:
            raise weights.unsupported("num_bits", "without 8-bit inputs only 4-bit int by groups of 128 or 32 is supported")
        return INT4_BY_GROUP[size]
    if bits != 8 or kind not in ("float", "int") or strategy not in ("channel", "tensor"):
        raise weights.unsupported("num_bits", "with 8-bit inputs only 8-bit float or int by channel or tensor is supported")
    inputs = _reader(given, f"{prefix}input_activations.")
    inputs.require("num_bits", 8)
    inputs.require("type", kind)
    inputs.require("symmetric", True)
    inputs.ignore("strategy", "dynamic", "group_size", "actorder", "block_structure")
    inputs.finish()
    return "fp8" if kind == "float" else "int8"


def _reader(config: Any, prefix: str) -> ConfigReader:
    whole = config if isinstance(config, Mapping) else {"": config}  # what is no object has one key that nobody knows
    return ConfigReader(whole, prefix=prefix, no_effect=NO_EFFECT)
