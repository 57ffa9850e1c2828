"""Decides which quantized weights of a checkpoint keep their stored format when loaded. No torch.

Used by both the loader and the memory ledger.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from slipstream.spec.parameters import Placement, Shape
from slipstream.spec.scheme import FORMATS, FP8_TILE, SCHEMES, Scheme, WeightFormat
from slipstream.spec.stored.quantization_config import StoredFormats

PRODUCTS = (
    ".in.weight",
    ".qkv.weight",
    ".out.weight",
    ".up.weight",
    ".down.weight",
    ".q.weight",
    ".q_latent.weight",
    ".latent.weight",
)


def is_product(target: str) -> bool:
    """Whether `target` is a weight that may be quantized: a linear layer's or the output head, but
    not an image encoder's."""
    return target == "head.weight" or (
        target.endswith(PRODUCTS) and not target.startswith("media.")
    )


def rounds(scheme: Scheme, target: str) -> bool:
    """Whether `scheme` quantises the weight `target` at load."""
    if target == "head.weight":
        return scheme.head
    return is_product(target) and (".experts." in target or not scheme.experts_only)


def native_weight_bytes(
    target: str,
    shape: Shape,
    scheme: Scheme | None,
    formats: Mapping[str, WeightFormat],
    element_bytes: int,
    *,
    on_cpu: bool = False,
) -> int:
    """Bytes of a parameter: quantized by `scheme`, in its stored format (`formats`, without
    scales), or dense."""
    if scheme is not None and rounds(scheme, target):
        return scheme.weight_bytes(*shape, on_cpu=on_cpu)
    return (
        math.prod(shape) * (formats[target].bits if target in formats else 8 * element_bytes) // 8
    )


def is_expandable(target: str) -> bool:
    """Whether a checkpoint may store `target` quantized: a weight that stays quantized, or one that
    is expanded at load (`expand`, those of an index, and `join` of a draft head)."""
    return is_product(target) or target.endswith(
        (".expand.weight", ".index_q.weight", ".index_k.weight", "join.weight")
    )


def native_formats(
    names: Mapping[str, Placement],
    shapes: Mapping[str, Shape],
    formats: StoredFormats,
    rounded: frozenset[str],
) -> dict[str, WeightFormat]:
    """Format of each weight that can stay as stored, for an op set with the matrix products
    `rounded`. Tensors stacked into one weight must have the same format."""
    found: dict[str, set[WeightFormat | None]] = {}
    for name, place in names.items():
        if is_product(place.target):
            fmt = formats.of(name.removesuffix(".weight"))
            able = rounded - {"int8-split"} if ".experts." in place.target else rounded
            plain = place.transform is None and place.copies is None
            # A scale tile must not span rows of two tensors.
            plain = plain and (fmt is None or place.start % fmt.block_rows == 0)
            ours = (
                fmt is not None
                and fmt.product in able
                and native_group_size(fmt, *shapes[place.target]) is not None
            )
            found.setdefault(place.target, set()).add(fmt if plain and ours else None)
    return {target: fmt for target, (fmt, *more) in found.items() if fmt is not None and not more}


def scheme_formats(shapes: Iterable[str], scheme: str) -> dict[str, WeightFormat]:
    """The format of `scheme` for all linear layers' weights, and for the head if the scheme
    quantizes it."""
    by = SCHEMES[scheme]
    return {
        name: FORMATS[scheme]
        for name in shapes
        if (by.head if name == "head.weight" else is_product(name))
    }


def native_group_size(fmt: WeightFormat, rows: int, inner: int) -> int | None:
    """The group size with which a weight [rows, inner] is held, out of those that the kernels
    support.

    Larger stored groups have their scales repeated. 0: one scale per row or tile. None: no kernel
    supports this shape.
    """
    if fmt.block_rows > 1:
        return 0 if inner % FP8_TILE == 0 else None
    if fmt.inputs is not None:
        return None if rows % 16 or inner % 16 else 0
    if fmt.in_pairs:
        return None if rows % 16 or inner % 64 else fmt.group_size
    whole = fmt.group_size or inner
    return next(
        (
            size
            for size in (128, 32)
            if whole % size == 0 and inner % max(size, 64) == 0 == inner % whole
        ),
        None,
    )
