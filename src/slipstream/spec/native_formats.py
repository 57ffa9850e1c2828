"""Which of a checkpoint's rounded weights are held as they are stored, and how: what the loader does and plans count on.
No torch."""

from __future__ import annotations

from collections.abc import Mapping

from slipstream.spec.parameters import Placement, Shape
from slipstream.spec.quantization_config import StoredFormats
from slipstream.spec.scheme import FP8_TILE, Scheme, WeightFormat

PRODUCTS = (".qkv.weight", ".out.weight", ".up.weight", ".down.weight", ".q.weight", ".q_latent.weight", ".latent.weight")


def is_product(target: str) -> bool:
    """Whether it is a weight that may be rounded: of a layer's product, or the output head's."""
    return target == "head.weight" or target.endswith(PRODUCTS)


def rounds(scheme: Scheme, target: str) -> bool:
    """Whether `scheme`, rounding at load, is for the weight `target`."""
    if target == "head.weight":
        return scheme.head
    return target.endswith(PRODUCTS) and (".experts." in target or not scheme.experts_only)


def is_expandable(target: str) -> bool:
    """Whether a checkpoint may hold it rounded: the products, and what makes keys and values of latents, which runs dense."""
    return is_product(target) or target.endswith(".expand.weight")


def held_formats(
    names: Mapping[str, Placement],
    shapes: Mapping[str, Shape],
    formats: StoredFormats,
    rounded: frozenset[str],
) -> dict[str, WeightFormat]:
    """The format of each of our weights that can be held as the checkpoint has it, of those `names` that an op set with such
    products has: the parts that we hold as one must agree."""
    found: dict[str, set[WeightFormat | None]] = {}
    for name, place in names.items():
        if is_product(place.target):
            fmt = formats.of(name.removesuffix(".weight"))
            able = rounded - {"int8-split"} if ".experts." in place.target else rounded
            plain = place.transform is None and place.copies is None
            plain = plain and (fmt is None or place.start % fmt.block_rows == 0)  # no block has rows of two parts
            ours = plain and fmt is not None and fmt.product in able and held_group(fmt, *shapes[place.target]) is not None
            found.setdefault(place.target, set()).add(fmt if ours else None)
    return {target: fmt for target, (fmt, *more) in found.items() if fmt is not None and not more}


def held_group(fmt: WeightFormat, rows: int, inner: int) -> int | None:
    """The size of the groups that a weight [rows, inner] is held by here: one that the products have, scales being repeated.
    0: by rows, or blocks. None: the products do not cut it."""
    if fmt.block_rows > 1:
        return 0 if inner % FP8_TILE == 0 else None
    if fmt.inputs is not None:
        return None if rows % 16 or inner % 16 else 0
    whole = fmt.group_size or inner
    return next((size for size in (128, 32) if whole % size == 0 and inner % max(size, 64) == 0 == inner % whole), None)
