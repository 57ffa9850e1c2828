"""Weight formats that the device's kernels support, and the dtypes that follow from them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from slipstream.config.parallel import native_products
from slipstream.config.sections import Origin
from slipstream.config.settings import DeviceInfo, DType, EngineArgs, one_of
from slipstream.errors import ConfigError
from slipstream.spec.devices.gpu_archs import gpu_arch, least_with_fp8
from slipstream.spec.model import ModelSpec
from slipstream.spec.scheme import NATIVE_PRODUCTS, SCHEMES
from slipstream.spec.stored.gguf_types import FORMS as GGUF_FORMS
from slipstream.spec.stored.native_formats import is_product

if TYPE_CHECKING:
    from slipstream.spec.description import ModelDescription


CPU_SCHEMES = frozenset(
    name for name, scheme in SCHEMES.items() if scheme.name in NATIVE_PRODUCTS["cpu"]
)
FOUR_BITS = ("int4", "nvfp4", "mxfp4")
"""Schemes with 4 bits. With a dense copy of such weights, steps of many tokens are faster."""


def stored_scheme(args: EngineArgs, model: ModelDescription, device: DeviceInfo) -> Origin:
    """Scheme of the checkpoint's weights as the kernels use them; None if they have several formats
    or are expanded."""
    if not has_formats(model):
        return Origin(model.scheme, "model", "what the checkpoint holds")
    if args.quantization not in (None, model.scheme):
        raise ConfigError(
            f"quantization={args.quantization!r}, but the checkpoint's weights are rounded already; leave it out",
            field="quantization",
        )
    if on_cpu(args, device) and (model.scheme not in CPU_SCHEMES or args.kernels == "torch"):
        why = "the checkpoint's rounded weights are expanded: a CPU's kernels have no product with them"
        return Origin(None, "model", why)
    return Origin(model.scheme, "model", "what the checkpoint holds")


def auto_dtype(trained: str, device: DeviceInfo) -> tuple[DType, str]:
    if not device.is_cuda:
        return device.best_dtype, device.dtype_reason or "the faster one on this CPU"
    if trained == "float16":
        return "float16", "the checkpoint's own"
    if device.compute_capability is not None and not gpu_arch(device.compute_capability).bfloat16:
        return "float16", "this GPU has no bfloat16"
    return "bfloat16", "the GPU's fast type, with float32's range"


def parameters_of_4_bits(
    args: EngineArgs, model: ModelDescription, device: DeviceInfo, quantization: str | None
) -> int:
    """Number of 4-bit parameters, without experts. Dense copies of them make steps of many tokens
    faster."""
    held = model.native_formats(native_products(args.kernels, device))
    if held:
        sizes = {name: math.prod(shape) for name, shape in model.shapes.items()}
        return sum(
            sizes[name]
            for name, fmt in held.items()
            if fmt.product in FOUR_BITS and ".experts." not in name
        )
    scheme = None if quantization is None else SCHEMES[quantization]
    if scheme is None and model.gguf_type in GGUF_FORMS:
        own = (n for n in model.shapes if is_product(n) and ".experts." not in n)
        return sum(math.prod(model.shapes[name]) for name in own)
    if scheme is None or scheme.experts_only or scheme.name not in FOUR_BITS:
        return 0
    return _product_parameters(model.spec)


def parameters_of_8_bits(
    args: EngineArgs, model: ModelDescription, device: DeviceInfo, quantization: str | None
) -> int:
    """Number of int8 parameters, without experts, that a CPU's kernels may store sparse."""
    if device.is_cuda or args.kernels not in ("auto", "cpu"):
        return 0
    sizes = {
        name: math.prod(shape) for name, shape in model.shapes.items() if ".experts." not in name
    }
    if held := model.native_formats(native_products(args.kernels, device)):
        return sum(
            sizes[name] for name, fmt in held.items() if name in sizes and fmt.product == "int8"
        )
    if quantization is None or SCHEMES[quantization].name != "int8":
        return 0
    return _product_parameters(model.spec)


def has_formats(model: ModelDescription) -> bool:
    """Whether the checkpoint has a separate format for each weight."""
    return model.quantization is not None and model.quantization.formats is not None


def on_cpu(args: EngineArgs, device: DeviceInfo) -> bool:
    """Whether the CPU's own kernels are used, not the reference's or a GPU's."""
    return not device.is_cuda and args.kernels != "reference"


def check_formats(
    args: EngineArgs, model: ModelDescription, device: DeviceInfo, quantization: str | None
) -> None:
    """Raise ConfigError if the device's kernels do not support the format of weights or cache, the
    user's or the checkpoint's."""
    if quantization is not None:
        one_of("quantization", quantization, tuple(SCHEMES))
    kv_dtype = args.kv_cache_dtype if args.kv_cache_dtype != "auto" else model.kv_cache
    if kv_dtype is not None:
        one_of(
            "kv_cache_dtype", kv_dtype, ("float32", "bfloat16", "float16", "fp8", "int8", "int4")
        )
    kv_off = (
        "leave it at 'auto'"
        if model.kv_cache is None
        else "set it to the model's type, such as 'bfloat16'"
    )
    named = ", ".join(repr(name) for name in SCHEMES if name in CPU_SCHEMES)
    weights = f"{named}, and GGUF's blocks as they are: take one"
    for name, given, here, off in (
        ("quantization", quantization, weights, "leave it at None"),
        ("kv_cache_dtype", kv_dtype, "'int8': take that", kv_off),
    ):
        if on_cpu(args, device) and given not in (
            None,
            *CPU_SCHEMES,
            "float32",
            "bfloat16",
            "float16",
        ):
            raise ConfigError(
                f"{name}={given!r} needs a GPU; a CPU's kernels have {here}, or {off} (or take kernels='reference', which is "
                "exact and slow)",
                field=name,
            )
    capability = device.compute_capability
    if capability is None or gpu_arch(capability).fp8:
        return
    has = f"{device.name} has {capability[0]}.{capability[1]}"
    needed = "{}.{}".format(*least_with_fp8())
    if quantization is not None and SCHEMES[quantization].inputs in ("fp8", "fp8-block"):
        raise ConfigError(
            f"quantization={quantization!r} needs a GPU of compute capability {needed} or more; {has}: use 'int8' or 'int4'",
            field="quantization",
        )
    held = model.native_formats(native_products(args.kernels, device))
    if eight := [name for name, fmt in held.items() if fmt.kind == "float" and fmt.bits == 8]:
        raise ConfigError(
            f"{len(eight)} of the checkpoint's weights ({eight[0]} first) are FP8, whose products need a GPU of compute "
            f"capability {needed} or more; {has}: take a checkpoint in int8, int4 or 16 bits",
            field="model",
        )


def _product_parameters(spec: ModelSpec) -> int:
    """Number of parameters of linear layers, without experts."""
    shapes = (p for x in spec.all_layers for p in x.weight_shapes(spec.hidden_size))
    return sum(p.rows * p.inner for p in shapes if p.copies == 1)
