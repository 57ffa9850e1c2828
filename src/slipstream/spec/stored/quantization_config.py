"""Reads the `quantization_config` of a config.json. No torch.

It gives the weights' format, the tool that wrote them, and the 8-bit KV cache format for which
there are scales.

1. It is read as strictly as the rest of a config. Unsupported or unknown fields raise an error with
   their name.
2. Inputs are always scaled per token at run time. A checkpoint's static input scales are ignored,
   since they are coarser.
3. Queries stay in the model's dtype. If attention is quantized, only the scales of keys and values
   are used.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

from slipstream.errors import CheckpointError
from slipstream.spec.families.base import ConfigReader
from slipstream.spec.scheme import FORMATS as SCHEME_FORMATS
from slipstream.spec.scheme import FP8_TILE, SCHEMES, RowFormat, WeightFormat

Method: TypeAlias = Literal[
    "compressed-tensors", "fp8", "gptq", "gptq_v2", "awq", "mxfp4", "modelopt", "bitnet"
]
"""A checkpoint's convention for the names and packing of its tensors. `fp8`: DeepSeek V3's and Qwen
3's, with scales per tile. `gptq`, the first version, stores zero points minus 1."""

AWQ_COLUMNS = (0, 4, 1, 5, 2, 6, 3, 7)
"""Positions of columns 0 to 7 in a 32-bit word of AWQ's tools, counted in codes from the low bits."""

PLAIN_ZEROS: dict[Method, int] = {"gptq": 0x77777777, "gptq_v2": 0x88888888}
"""The 32-bit word in which all eight zero points are 8, by method."""

PREFIX = "quantization_config."
MXFP8 = WeightFormat(kind="float", group_size=32, scale_type="e8m0")
INT4_BY_GROUP = {128: "int4", 32: "int4-g32"}
SPARSE_FORMATS = ("sparse-bitmask", "sparse-24-bitmask")
COLUMNS_NAME = "slipstream-columns.json"
"""File next to the weights that lists input columns kept in the model's dtype (LLM.int8(), Dettmers
et al. 2022).

It lists them for each module with int8 inputs, by the checkpoint's names. Other engines ignore the
file and quantize these columns, too.
"""

FORMATS = (
    *("float-quantized", "int-quantized", "pack-quantized", "naive-quantized"),
    *("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized"),
)
NO_EFFECT = frozenset((
    "act_data_type", "act_dynamic", "act_group_aware", "act_group_size", "act_sym", "amp", "autoround_version", "backend",
    "batch_size", "block_name_to_quantize", "cache_block_outputs", "compute_device_filter", "damp_auto_increment",
    "damp_percent", "dataset", "disable_exllama", "do_fuse", "enable_alg_ext", "enable_minmax_tuning",
    "enable_norm_bias_tuning", "enable_quanted_input", "exllama_config", "failsafe_with_rtn", "fuse_max_seq_len",
    "global_compression_ratio", "gptaq", "gptaq_alpha", "gptaq_memory_device", "gradient_accumulate_steps",
    "hessian_chunk_bytes", "hessian_chunk_size", "hessian_use_bfloat16_staging", "hyb_act", "iters", "low_gpu_mem_usage",
    "lr", "max_input_length", "meta", "minmax_lr", "mock_quantization", "model_file_base_name", "model_name_or_path",
    "model_seqlen", "module_name_preceding_first_block", "modules_in_block_to_quantize", "modules_to_fuse", "mse",
    "nsamples", "observer", "observer_kwargs", "offload_to_disk", "offload_to_disk_path", "pack_impl", "pad_token_id",
    "parallel_packing", "provider", "quant_block_list", "quantizer", "scale_dtype", "seqlen",
    "static_attention_granularity", "static_groups", "static_kv_granularity", "supported_types", "tokenizer",
    "to_quant_block_names", "true_sequential", "use_cuda_fp16", "use_exllama", "v2", "v2_alpha", "v2_memory_device",
    "version", "vram_strategy", "zp_dtype",
))  # fmt: skip
"""Keys about how weights were quantized or packed, not about their format. Excluded layers are
recognized by their tensors."""


@dataclass(frozen=True, slots=True)
class StoredFormats:
    """The format of each module's weight, by the rules of compressed-tensors.

    A module in `ignore` is not quantized. Any other has the format of the first match among

    1. the group that names it,
    2. the group with a regular expression ("re:…") that matches it,
    3. the group for "Linear".

    `columns`: input columns that keep the model's dtype, by module (`COLUMNS_NAME`).
    """

    groups: tuple[tuple[tuple[str, ...], WeightFormat], ...]
    ignore: tuple[str, ...] = ()
    columns: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def products(self) -> frozenset[str]:
        """The matrix products needed to compute with weights as they are stored: fp8, int8, int4."""
        found = {fmt.product for _, fmt in self.groups} | (
            {"int8-split"} if self.columns else set()
        )
        return frozenset(product for product in found if product is not None)

    def of(self, module: str) -> WeightFormat | None:
        """The format of a module (a weight's name in the checkpoint without .weight); None: not
        quantized."""
        found = self._group(module)
        return replace(found, split=True) if found is not None and module in self.columns else found

    def _group(self, module: str) -> WeightFormat | None:
        # In a multimodal model the decoder's modules may have an additional prefix.
        if any(_matches(module, x) or x.endswith(f".{module}") for x in self.ignore):
            return None
        for expression in (False, True):
            for targets, found in self.groups:
                if any(t.startswith("re:") is expression and _matches(module, t) for t in targets):
                    return found
        return next((found for targets, found in self.groups if "Linear" in targets), None)


def _matches(module: str, target: str) -> bool:
    """Whether a target of the config applies to the module. Regular expressions match from the
    beginning, like re.match."""
    return (
        re.match(target[3:], module) is not None if target.startswith("re:") else module == target
    )


@dataclass(frozen=True, slots=True)
class StoredQuantization:
    """The quantisation of a checkpoint.

    `scheme`: a name in `SCHEMES` if all linear layers use it. `formats`: the format of each module
    (compressed-tensors). Without both, weights have the model's dtype, and only the cache or
    sparsity is described.
    """

    method: Method
    scheme: str | None
    kv_cache: RowFormat | None = None  # format of the KV cache for which the checkpoint has scales
    # some weights are stored as bit masks and nonzero values (model/stored/bitmasks.py)
    sparse: bool = False
    formats: StoredFormats | None = None
    zeros: float | None = None  # fraction of zeros in the linear layers, if the config has it
    # see `model.stored.ternary`
    ternary: Literal["packed", "packed-inverse", "masters"] | None = None

    @property
    def rounds(self) -> bool:
        """Whether some weights are quantized."""
        return self.scheme is not None or self.formats is not None


def read_quantization(config: Mapping[str, Any], *, tied_embeddings: bool) -> StoredQuantization:
    """Read a quantization_config. UnsupportedModelError names a field that is not supported."""
    read = _reader(config, PREFIX)
    kind = read.take("quant_method", str)
    readers = {
        "compressed-tensors": _compressed_tensors,
        "fp8": _fp8,
        "gptq": _gptq,
        "awq": _awq,
        "auto-round": _auto_round,
        "intel/auto-round": _auto_round,
        "mxfp4": _mxfp4,
        "bitnet": _bitnet,
        **dict.fromkeys(("modelopt", *MODELOPT_ALIASES), _modelopt),
    }
    if kind not in readers:
        raise read.unsupported("quant_method", f"only {', '.join(readers)} are supported")
    found = readers[kind](read, tied_embeddings)
    read.finish()
    return found


def _fp8(read: ConfigReader, tied_embeddings: bool) -> StoredQuantization:
    """Read FP8 with tile scales, for all linear layers except `modules_to_not_convert`.

    Such a name matches the beginning or end of a module's name, as in transformers. The output head
    is never quantized.
    """
    read.require("fmt", "e4m3")
    read.require("activation_scheme", "dynamic")
    read.require("scale_fmt", "float", "ue8m0")  # power-of-two scales are exact in float32
    if read.take("weight_block_size", list) != [FP8_TILE, FP8_TILE]:
        raise read.unsupported("weight_block_size", f"only [{FP8_TILE}, {FP8_TILE}] is supported")
    names = tuple(str(name) for name in read.maybe("modules_to_not_convert", list) or [])
    _check_expressions(read, "modules_to_not_convert", tuple(f"re:{name}" for name in names))
    names = tuple(name for name in names if not _never_rounded(name))
    kept = tuple(
        rule for name in names for rule in (rf"re:(?:{name})(?:\.|$)", f"re:.*(?:{name})$")
    )
    fmt = replace(SCHEME_FORMATS["fp8-block"], scale="weight_scale_inv")
    formats = StoredFormats(((("Linear",), fmt),), ("lm_head", *kept))
    return StoredQuantization("fp8", _scheme(formats, tied_embeddings), formats=formats)


def _bitnet(read: ConfigReader, tied_embeddings: bool) -> StoredQuantization:
    """Read BitNet's weights of −1, 0 and 1, which are held in int8, with inputs in int8."""
    read.require("use_rms_norm", False)
    read.ignore("rms_norm_eps")
    read.require("modules_to_not_convert", [], ["lm_head"])
    read.require("linear_class", "bitlinear", "autobitlinear")
    read.require("quantization_mode", "offline", "online")
    by_scale = read.take("linear_class", str, "bitlinear") == "autobitlinear"
    ternary: Literal["packed", "packed-inverse", "masters"] = (
        "packed" if by_scale else "packed-inverse"
    )
    if by_scale and read.take("quantization_mode", str, "offline") == "online":
        ternary = "masters"
    fmt = WeightFormat(whole=True, inputs="int8")
    formats = StoredFormats(((("Linear",), fmt),), ("lm_head",))
    return StoredQuantization("bitnet", "int8", formats=formats, ternary=ternary)


def _never_rounded(name: str) -> bool:
    """Whether schemes never quantize a module: norms, embeddings, routers, the head, image and
    audio encoders."""
    ends = ("norm", "embed_tokens", "mlp.gate", "shared_expert_gate")
    return name == "lm_head" or name.endswith(ends) or _OF_TOWERS.search(name) is not None


_OF_TOWERS = re.compile(r"visual|vision|audio|multi_modal_projector|connector")
"""Name parts of image and audio encoders and their connectors."""


def with_columns(stored: StoredQuantization | None, given: Mapping[str, Any]) -> StoredQuantization:
    """`stored` with the input columns `given` by the file `COLUMNS_NAME`. CheckpointError if they
    don't match the modules."""
    if stored is None or stored.formats is None:
        raise CheckpointError(
            f"{COLUMNS_NAME} needs weights that compressed-tensors rounded", field=COLUMNS_NAME
        )
    for module, columns in given.items():
        fmt = stored.formats.of(module)
        if fmt is None or fmt.inputs != "int8":
            raise CheckpointError(f"{COLUMNS_NAME}: {module} has no int8 inputs", field=module)
        if (
            not isinstance(columns, list)
            or not columns
            or any(type(c) is not int or c < 0 for c in columns)
        ):
            raise CheckpointError(
                f"{COLUMNS_NAME}: {module} must have a list of columns", field=module
            )
    formats = replace(
        stored.formats, columns={module: tuple(columns) for module, columns in given.items()}
    )
    return replace(stored, scheme=None if given else stored.scheme, formats=formats)


def _awq(read: ConfigReader, tied_embeddings: bool) -> StoredQuantization:
    read.require("version", "gemm", "GEMM")
    read.require("zero_point", True)
    read.ignore("sym")  # zero points are stored either way
    for key in ("format", "checkpoint_format"):
        read.require(key, "gemm")
    _check_method(read, "awq")
    kept = [str(name) for name in read.maybe("modules_to_not_convert", list) or []]
    if any(not _never_rounded(name) for name in kept):
        raise read.unsupported(
            "modules_to_not_convert", "only the head and routers may be left out"
        )
    return StoredQuantization("awq", _int4(read))


PACKINGS: dict[str, Method] = {
    "auto_round:auto_gptq": "gptq",
    "auto_round:gptq": "gptq",
    "auto_round": "gptq_v2",
    "auto_round:gptqmodel": "gptq_v2",
    "auto_round:auto_awq": "awq",
    "auto_round:awq": "awq",
}
"""Packing of weights (GPTQ's or AWQ's) by AutoRound's name for it."""


def _auto_round(read: ConfigReader, tied_embeddings: bool) -> StoredQuantization:
    """Read AutoRound's config (Cheng et al. 2023). Modules in `extra_config` must have 16 bits,
    i.e. be unquantized."""
    packing = read.take("packing_format", str, "auto_round:auto_gptq")
    if packing not in PACKINGS:
        raise read.unsupported("packing_format", f"only {', '.join(PACKINGS)} are supported")
    method = PACKINGS[packing]
    if method == "awq":
        read.ignore("sym")
    else:
        read.require("sym", True)
    for name, own in (read.maybe("extra_config", dict) or {}).items():
        bits = own.get("bits") if isinstance(own, Mapping) else None
        if not isinstance(bits, int) or bits < 16:
            raise read.unsupported("extra_config", f"{name} has another format")
    _check_method(read, None)
    return StoredQuantization(method, _int4(read))


def _check_method(read: ConfigReader, method: str | None) -> None:
    """Check the keys of GPTQ's, AWQ's and AutoRound's tools apart from the format. Refused:
    quantized inputs or head, rotated weights, and words other than 32 bits."""
    if method is not None:
        read.require("method", method)
    for key in ("desc_act", "lm_head", "is_marlin_format"):
        read.require(key, False)
    read.require("dynamic", {})
    read.require("pack_dtype", "int32")
    read.require("data_type", "int")
    read.require("act_bits", 16, 32)
    read.require("rotation_configs", [])


def _mxfp4(read: ConfigReader, tied_embeddings: bool) -> StoredQuantization:
    # Only experts have blocks; all other modules are excluded.
    kept = read.maybe("modules_to_not_convert", list) or []
    if any(str(name).rstrip(".*").endswith(("experts", "mlp")) for name in kept):
        raise read.unsupported(
            "modules_to_not_convert", "experts that are left out are not supported"
        )
    return StoredQuantization("mxfp4", "mxfp4")


MODELOPT_ALIASES = ("modelopt_fp4", "modelopt_mxfp8", "modelopt_mixed")
MODELOPT = {
    "FP8": WeightFormat(kind="float", whole=True, inputs="fp8", static_inputs=True),
    "FP8_PER_CHANNEL_PER_TOKEN": WeightFormat(kind="float", inputs="fp8"),
    **dict.fromkeys(("NVFP4", "W4A16_NVFP4"), replace(SCHEME_FORMATS["nvfp4"], by_modelopt=True)),
    "W4A8_MXFP4_FP8": replace(SCHEME_FORMATS["mxfp4-all"], by_modelopt=True),
    "MXFP8": replace(MXFP8, by_modelopt=True),
}
"""Weight formats by ModelOpt's names. Activations are only quantized with FP8 weights; otherwise
they keep the model's dtype, whatever the name says."""
MODELOPT_CONFIG = "hf_quant_config.json"
"""ModelOpt's file next to config.json. Newer versions also write a quantization_config into
config.json itself."""


def _modelopt(read: ConfigReader, tied_embeddings: bool) -> StoredQuantization:
    """Read NVIDIA ModelOpt's quantization from config.json, or from `MODELOPT_CONFIG`, where it is
    under the key `quantization`."""
    read.ignore("producer", "config_groups")  # the groups repeat `quant_algo`
    own, inner = read, read.maybe("quantization", dict)
    if inner is not None:
        own = _reader(inner, f"{PREFIX}quantization.")
    kept = own.maybe("exclude_modules", list) or own.maybe("ignore", list) or []
    ignored = tuple(_of_wildcards(str(name)) for name in kept)
    algo = own.take("quant_algo", str)
    layers = own.maybe("quantized_layers", dict) or {}
    cache: Any = own.maybe("kv_cache_quant_algo", str) or own.maybe("kv_cache_scheme", object)
    own.require("has_zero_point", False)
    own.require("pre_quant_scale", False)
    groups: list[tuple[tuple[str, ...], WeightFormat]] = []
    if algo == "MIXED_PRECISION":
        own.ignore("group_size")
        for name, given in layers.items():
            layer = _reader(given, f"{PREFIX}quantized_layers.{name}.")
            groups.append(((_of_wildcards(name),), _modelopt_format(layer)))
            layer.finish()
    else:
        groups.append((("Linear",), _modelopt_format(own, algo)))
    if inner is not None:
        own.finish()
    kv_cache: RowFormat | None = None
    if cache not in (None, "", {}):
        fp8 = cache == "FP8" or (
            isinstance(cache, Mapping)
            and (cache.get("num_bits"), cache.get("type")) == (8, "float")
        )
        if not fp8:
            raise own.unsupported("kv_cache_quant_algo", "only 'FP8' is supported")
        kv_cache = "fp8"
    formats = StoredFormats(tuple(groups), ignored)
    scheme = _scheme(formats, tied_embeddings)
    return StoredQuantization("modelopt", scheme, kv_cache, formats=formats)


def _modelopt_format(read: ConfigReader, algo: str | None = None) -> WeightFormat:
    algo = read.take("quant_algo", str) if algo is None else algo
    found = MODELOPT.get(algo)
    if found is None:
        raise read.unsupported("quant_algo", f"only {', '.join(MODELOPT)} are supported")
    read.require("group_size", found.group_size)
    return found


def _of_wildcards(name: str) -> str:
    """Translates a ModelOpt module name, possibly with wildcards, to a target. A name without
    wildcards stands for the module and all below it."""
    if name in ("lm_head", "lm_head*", "*lm_head*"):
        return "lm_head"
    if any(x in name for x in "*?["):
        return f"re:{fnmatch.translate(name)}"
    return rf"re:{re.escape(name)}(?:\.|$)"


def _gptq(read: ConfigReader, tied_embeddings: bool) -> StoredQuantization:
    read.require("sym", True)
    _check_method(read, "gptq")
    read.require("checkpoint_format", "gptq", "gptq_v2")
    found = read.maybe("checkpoint_format", str) or read.maybe("format", str) or "gptq"
    read.require("format", found)  # must be this format
    if found not in ("gptq", "gptq_v2"):
        raise read.unsupported("format", "only gptq and gptq_v2 are supported")
    return StoredQuantization("gptq_v2" if found == "gptq_v2" else "gptq", _int4(read))


def _int4(read: ConfigReader) -> str:
    if read.take("bits", int) != 4:
        raise read.unsupported("bits", "only 4 is supported")
    size = read.take("group_size", int)
    if size not in INT4_BY_GROUP:
        raise read.unsupported("group_size", "only 128 or 32 is supported")
    return INT4_BY_GROUP[size]


def _compressed_tensors(read: ConfigReader, tied_embeddings: bool) -> StoredQuantization:
    read.require("transform_config", {})
    sparse, zeros = _sparsity(read)
    caches = {"kv_cache_scheme": read.maybe("kv_cache_scheme", dict)}
    groups = dict(read.maybe("config_groups", dict) or {})
    for name, group in [*groups.items()]:
        # A group for whole attention modules, with their cache.
        if isinstance(group, Mapping) and group.get("weights") is None:
            caches[f"config_groups.{name}"] = _attention_inputs(
                _reader(groups.pop(name), f"{PREFIX}config_groups.{name}.")
            )
    kinds = {
        where: _cache(given, f"{PREFIX}{where}.")
        for where, given in caches.items()
        if given is not None
    }
    kv_cache = next(iter(kinds.values()), None)
    if len(set(kinds.values())) > 1 or not (groups or kinds or sparse):
        raise read.unsupported(
            "config_groups", "a group of layers, or one form of the KV cache, is needed"
        )
    ignored = tuple(str(layer) for layer in read.maybe("ignore", list) or [])
    if not groups:
        read.require("format", "dense", *FORMATS, *SPARSE_FORMATS)
        # Without groups no weight is quantized, so either status is right.
        read.require("quantization_status", "compressed", "frozen")
        return StoredQuantization("compressed-tensors", None, kv_cache, sparse, zeros=zeros)
    read.require("format", *FORMATS, "mixed-precision")
    read.require("quantization_status", "compressed")
    _check_expressions(read, "ignore", ignored)
    found = []
    for name, given in groups.items():
        prefix = f"{PREFIX}config_groups.{name}."
        found.append(_group(_reader(given, prefix), prefix))
    formats = StoredFormats(tuple(found), ignored)
    return StoredQuantization(
        "compressed-tensors", _scheme(formats, tied_embeddings), kv_cache, sparse, formats, zeros
    )


def _scheme(formats: StoredFormats, tied_embeddings: bool) -> str | None:
    """The scheme of all linear layers, if they share one. Ignored routers and image encoders don't
    count, since they are never quantized."""
    ignored = {
        layer
        for layer in formats.ignore
        if not layer.removesuffix("\\Z").rstrip("$)*.").endswith(("gate", "router"))
        and not _OF_TOWERS.search(layer)
    }
    if len(formats.groups) > 1 or formats.groups[0][0] != ("Linear",) or ignored - {"lm_head"}:
        return None
    # A single scale for the whole weight or input is repeated per row or token.
    held = replace(
        formats.groups[0][1],
        whole=False,
        static_inputs=False,
        scale="weight_scale",
        by_modelopt=False,
    )
    name = next(
        (n for n, fmt in SCHEME_FORMATS.items() if fmt == held and not SCHEMES[n].head), None
    )
    if name is None or tied_embeddings or "lm_head" in ignored:
        return name
    return f"{name}-head" if f"{name}-head" in SCHEMES else None


def _check_expressions(read: ConfigReader, field: str, targets: tuple[str, ...]) -> None:
    for target in (t for t in targets if t.startswith("re:")):
        try:
            re.compile(target[3:])
        except re.error as error:
            raise read.unsupported(
                field, f"{target!r} is not a regular expression: {error}"
            ) from error


def _sparsity(read: ConfigReader) -> tuple[bool, float | None]:
    """(whether weights are stored without their zeros, fraction of zeros). Tensor names tell which
    weights, so `targets` and `ignore` are not needed."""
    given = read.maybe("sparsity_config", dict)
    if not given:
        return False, None
    inner = _reader(given, f"{PREFIX}sparsity_config.")
    inner.require("format", "dense", *SPARSE_FORMATS)
    zeros = inner.maybe("global_sparsity", float)
    inner.ignore("targets", "ignore", "sparsity_structure", "registry_requires_subclass")
    inner.finish()
    return given.get("format") in SPARSE_FORMATS, zeros


def _attention_inputs(group: ConfigReader) -> dict[str, Any]:
    """The input format of a group without weights, which only attention modules have."""
    targets = group.take("targets", list)
    if not all(isinstance(t, str) and t.endswith("Attention") for t in targets):
        raise group.unsupported("targets", "without weights only attention modules are supported")
    group.require("format", "dense", *FORMATS)
    group.require("weights")
    group.require("output_activations")
    inputs = group.take("input_activations", dict)
    group.finish()
    return inputs


def _cache(given: Mapping[str, Any], prefix: str) -> RowFormat:
    """The format of an 8-bit KV cache with static symmetric scales, one per layer or kv head."""
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


def _group(group: ConfigReader, prefix: str) -> tuple[tuple[str, ...], WeightFormat]:
    """(target modules of a group, their format)."""
    targets = tuple(str(target) for target in group.take("targets", list))
    if not targets or any(
        t not in ("Linear", "lm_head") and "." not in t and not t.startswith("re:") for t in targets
    ):
        raise group.unsupported(
            "targets", "only 'Linear', names of modules and 're:…' are supported"
        )
    _check_expressions(group, "targets", targets)
    group.require("format", *FORMATS)
    group.require("output_activations")
    weights = _reader(group.take("weights", dict), f"{prefix}weights.")
    given = group.maybe("input_activations", dict)
    group.finish()
    weights.require("dynamic", False)
    weights.require("actorder", "static", "weight")
    weights.require("strategy", "group", "channel", "tensor", "block", "tensor_group")
    weights.require("type", "int", "float")
    bits = weights.take("num_bits", int)
    strategy = weights.take("strategy", str)
    size = weights.maybe("group_size", int)
    symmetric, is_int = weights.take("symmetric", bool, True), weights.take("type", str) == "int"
    if strategy == "block":
        return targets, _block(group, weights, given, f"{prefix}input_activations.")
    weights.require("block_structure")
    weights.finish()
    if not is_int and strategy in ("group", "tensor_group"):
        return targets, _float_groups(weights, bits, size, strategy, symmetric)
    if strategy == "group" and (size or 0) < 1:
        raise weights.unsupported("group_size", "a group has at least one input")
    if not 2 <= bits <= 8 or not (is_int or (bits == 8 and symmetric)):
        raise weights.unsupported(
            "num_bits", "only 2 to 8 bits of int, or 8 of float, symmetric, are supported"
        )
    made = WeightFormat(
        kind="int" if is_int else "float",
        bits=bits,
        group_size=size if strategy == "group" else None,
        symmetric=symmetric,
        whole=strategy == "tensor",
    )
    if given is None:
        return targets, made
    if bits != 8 or not symmetric or strategy == "group":
        raise weights.unsupported(
            "num_bits",
            "with 8-bit inputs only 8 bits by channel or tensor, symmetric, are supported",
        )
    inputs = _reader(given, f"{prefix}input_activations.")
    inputs.require("num_bits", 8)
    inputs.require("type", "int" if is_int else "float")
    inputs.require("symmetric", True)
    static = inputs.maybe("dynamic", bool) is False
    inputs.ignore("strategy", "group_size", "actorder", "block_structure")
    inputs.finish()
    return targets, replace(made, inputs="int8" if is_int else "fp8", static_inputs=static)


def _float_groups(
    weights: ConfigReader, bits: int, size: int | None, strategy: str, symmetric: bool
) -> WeightFormat:
    """The format NVFP4, MXFP4 or MXFP8. Inputs keep the model's dtype, whatever `input_activations` says."""
    kinds = {
        ("tensor_group", 4, 16): SCHEME_FORMATS["nvfp4"],
        ("group", 4, 32): SCHEME_FORMATS["mxfp4-all"],
        ("group", 8, 32): MXFP8,
    }
    found = kinds.get((strategy, bits, size or 0))
    if found is None or not symmetric:
        raise weights.unsupported(
            "group_size",
            "of floats only nvfp4 (4 bits, tensor_group of 16), mxfp4 and mxfp8 (groups of 32) are supported",
        )
    return found


def _block(group: ConfigReader, weights: ConfigReader, given: Any, prefix: str) -> WeightFormat:
    """FP8 with one scale per tile of 128 × 128 weights and one per 128 inputs."""
    if weights.take("block_structure", list) != [FP8_TILE, FP8_TILE]:
        raise weights.unsupported("block_structure", f"only [{FP8_TILE}, {FP8_TILE}] is supported")
    weights.require("num_bits", 8)
    weights.require("type", "float")
    weights.require("symmetric", True)
    weights.finish()
    if given is None:
        raise group.unsupported(
            "input_activations",
            f"with blocks of weights 8 bits by groups of {FP8_TILE} are supported",
        )
    inputs = _reader(given, prefix)
    required = {
        "num_bits": 8,
        "type": "float",
        "symmetric": True,
        "strategy": "group",
        "group_size": FP8_TILE,
    }
    for name, value in required.items():
        inputs.require(name, value)
    inputs.require("dynamic", True)
    inputs.ignore("actorder", "block_structure")
    inputs.finish()
    return SCHEME_FORMATS["fp8-block"]


def _reader(config: Any, prefix: str) -> ConfigReader:
    # A value that is not an object is treated as an unknown key.
    whole = config if isinstance(config, Mapping) else {"": config}
    return ConfigReader(whole, prefix=prefix, no_effect=NO_EFFECT)
