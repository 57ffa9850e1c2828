"""Scales of an 8-bit KV cache in a checkpoint. A value is code · scale, as in `LayerKV`. No torch.

1. compressed-tensors writes k_scale and v_scale next to each attention's projections, [1] for the
   layer or [kv heads, 1, 1]. Earlier versions wrote k_proj.output_scale and v_proj.output_scale,
   and ModelOpt k_proj.k_scale and v_proj.v_scale.
2. Zero points, which the tools write even where they are unused, must be zero.
3. A scale of queries (q_scale) is ignored, because queries stay in the model's type.

Input tensors may be torch's or NumPy's; results are NumPy's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream.errors import CheckpointError
from slipstream.spec.model import AttentionSpec, ModelSpec
from slipstream.spec.parallel import Shard, heads_of
from slipstream.spec.parameters import Placement

Floats = npt.NDArray[np.float32]

PARTS = {
    "k_proj.k_scale": "k",
    "v_proj.v_scale": "v",
    "k_scale": "k",
    "v_scale": "v",
    "k_proj.output_scale": "k",
    "v_proj.output_scale": "v",
}
ZERO_POINTS = (
    "k_zero_point",
    "v_zero_point",
    "q_zero_point",
    "k_proj.output_zero_point",
    "v_proj.output_zero_point",
)
PASSED_OVER = ("q_scale", "q_proj.output_scale")


class CacheScales:
    """Collects the scales among a checkpoint's tensors. `layers()` returns them after all tensors
    were offered to `take`.

    `names` is the family's table. A scale next to a q, k or v projection belongs to that attention.
    """

    def __init__(
        self, spec: ModelSpec, names: Mapping[str, Placement], *, shard: Shard | None = None
    ) -> None:
        """Finds scales next to the family's tensors in `names`. With a `shard`, only the rank's kv
        heads are kept."""
        inputs = [
            name for name, place in names.items() if place.target.endswith(".attention.qkv.weight")
        ]
        attentions = [layer.attention for layer in spec.layers]
        self._projections = {name.split(".")[-2] for name in inputs}
        self._heads = [0 if a is None else a.num_kv_heads for a in attentions]
        self._own = [
            _own_heads(a, shard) if isinstance(a, AttentionSpec) else [0] for a in attentions
        ]
        self._owners = spec.owners
        self._found: dict[tuple[int, str], Floats] = {}

    @staticmethod
    def is_of_cache(name: str) -> bool:
        """Whether a tensor of this name may be a cache scale."""
        return _part_of(name) is not None

    def take(
        self, name: str, read: Callable[[], Any], find: Callable[[str], Placement | None]
    ) -> bool:
        """Stores the tensor `name` if it is a cache scale, and returns whether it is.

        `find` maps a checkpoint's name of a projection's weight to its placement.
        """
        part = _part_of(name)
        if part is None:
            return False
        places = (
            find(f"{name.removesuffix(part)}{projection}.weight")
            for projection in self._projections
        )
        place = next((p for p in places if p is not None), None)
        if place is None:
            return False
        self._keep(name, part, int(place.target.split(".")[1]), read())
        return True

    def _keep(self, name: str, part: str, layer: int, value: Any) -> None:
        floats: Floats = (
            value.astype(np.float32) if isinstance(value, np.ndarray) else value.float().numpy()
        )
        if part in ZERO_POINTS and floats.any():
            raise CheckpointError(f"{name}: zero points of the cache are not supported", field=name)
        if part not in PARTS:
            return
        heads, scales = self._heads[layer], floats.reshape(-1)
        if scales.size not in (1, heads):
            raise CheckpointError(
                f"{name} holds {scales.size} scales for {heads} kv heads", field=name
            )
        if not (np.isfinite(scales) & (scales > 0)).all():
            raise CheckpointError(f"{name}: a scale must be a number above 0", field=name)
        if (layer, PARTS[part]) in self._found:
            raise CheckpointError(f"{name}: layer {layer} has these scales twice", field=name)
        self._found[layer, PARTS[part]] = np.broadcast_to(scales, heads)[self._own[layer]]

    def layers(self) -> list[tuple[Floats, Floats]]:
        """(scales of keys, scales of values) of each layer, float32 [K]. CheckpointError names a
        missing scale."""
        missing = [
            (i, x) for i in sorted({*self._owners}) for x in "kv" if (i, x) not in self._found
        ]
        if missing:
            layer, x = missing[0]
            raise CheckpointError(
                f"the checkpoint says that it has scales for the KV cache, and lacks {x}_scale of layer {layer}"
                + (f" and {len(missing) - 1} more" if len(missing) > 1 else "")
                + "; save it again, or set kv_cache_dtype to the model's type",
                field=f"{x}_scale",
            )
        return [(self._found[i, "k"], self._found[i, "v"]) for i in self._owners]


def _part_of(name: str) -> str | None:
    return next((p for p in (*PARTS, *ZERO_POINTS, *PASSED_OVER) if name.endswith(f".{p}")), None)


def _own_heads(a: AttentionSpec, shard: Shard | None) -> list[int]:
    """The kv heads whose scales a rank holds. A padding head of zeros works with any scale and gets
    head 0's."""
    heads = heads_of(a, shard or Shard(0, 1))
    return [*heads.kv, *[0] * (heads.num_kv_heads - len(heads.kv))]
