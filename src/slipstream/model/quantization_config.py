"""What a config.json's `quantization_config` says: which scheme the checkpoint's weights are held by, and whose tools wrote
them. No torch.

Read as strictly as the rest of a config: what is not supported, or not known, is refused by name. Inputs are always scaled
token by token as they come: a checkpoint's own static input scales are not needed, and where they were asked for this is the
finer way. The cache's type is a setting of the engine, so that the checkpoint's scales for it are not needed either.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

from slipstream.model.families.base import ConfigReader
from slipstream.model.scheme import SCHEMES

Method: TypeAlias = Literal["compressed-tensors", "gptq", "gptq_v2", "awq"]
"""How a checkpoint's tensors are called and packed. GPTQ's first version writes zero points less one."""

PREFIX = "quantization_config."
INT4_BY_GROUP = {128: "int4", 32: "int4-g32"}
NO_EFFECT = frozenset((
    "backend", "batch_size", "block_name_to_quantize", "cache_block_outputs", "damp_auto_increment", "damp_percent",
    "dataset", "disable_exllama", "do_fuse", "exllama_config", "fuse_max_seq_len", "global_compression_ratio",
    "kv_cache_scheme", "max_input_length", "meta", "model_file_base_name", "model_name_or_path", "model_seqlen",
    "module_name_preceding_first_block", "modules_in_block_to_quantize", "modules_to_fuse", "mse", "observer",
    "observer_kwargs", "pad_token_id", "scale_dtype", "static_groups", "tokenizer", "true_sequential", "use_cuda_fp16",
    "use_exllama", "version", "zp_dtype",
))  # fmt: skip
"""Keys that tell how the weights were found or packed, not what they are; a layer left out is missed among the tensors."""


def read_quantization(config: Mapping[str, Any], *, tied_embeddings: bool) -> tuple[str, Method]:
    """A name in `SCHEMES`, and who wrote it. UnsupportedModelError names the field that is not supported."""
    read = _reader(config, PREFIX)
    kind = read.take("quant_method", str)
    readers = {"compressed-tensors": _compressed_tensors, "gptq": _gptq, "awq": _awq}
    if kind not in readers:
        raise read.unsupported("quant_method", f"only {', '.join(readers)} are supported")
    found = readers[kind](read, tied_embeddings)
    read.finish()
    return found


def _awq(read: ConfigReader, tied_embeddings: bool) -> tuple[str, Method]:
    read.require("version", "gemm", "GEMM")
    read.require("zero_point", True)
    read.require("modules_to_not_convert", [], ["lm_head"])
    return _int4(read), "awq"


def _gptq(read: ConfigReader, tied_embeddings: bool) -> tuple[str, Method]:
    read.require("sym", True)
    for name in ("desc_act", "lm_head", "is_marlin_format"):
        read.require(name, False)
    read.require("dynamic", {})
    read.require("pack_dtype", "int32")
    read.require("checkpoint_format", "gptq", "gptq_v2")
    return _int4(read), "gptq_v2" if read.maybe("checkpoint_format", str) == "gptq_v2" else "gptq"


def _int4(read: ConfigReader) -> str:
    if read.take("bits", int) != 4:
        raise read.unsupported("bits", "only 4 is supported")
    size = read.take("group_size", int)
    if size not in INT4_BY_GROUP:
        raise read.unsupported("group_size", "only 128 or 32 is supported")
    return INT4_BY_GROUP[size]


def _compressed_tensors(read: ConfigReader, tied_embeddings: bool) -> tuple[str, Method]:
    read.require("format", "float-quantized", "int-quantized", "pack-quantized", "naive-quantized")
    read.require("quantization_status", "compressed")
    read.require("transform_config", {})
    read.require("sparsity_config", {})
    groups = read.take("config_groups", dict)
    if len(groups) != 1:
        raise read.unsupported("config_groups", "only one group, for all layers, is supported")
    name, group = next(iter(groups.items()))
    found = _group(_reader(group, f"{PREFIX}config_groups.{name}."), f"{PREFIX}config_groups.{name}.")
    ignored = read.maybe("ignore", list) or []
    has_head = not tied_embeddings and "lm_head" not in ignored
    if any(layer != "lm_head" for layer in ignored) or (has_head and f"{found}-head" not in SCHEMES):
        raise read.unsupported("ignore", "only the output head, lm_head, may be left out" + ", and must" * has_head)
    return (f"{found}-head" if has_head else found), "compressed-tensors"


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
