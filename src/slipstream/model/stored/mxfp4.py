"""Experts that a checkpoint holds in MXFP4 (OCP Microscaling Formats 1.0), as gpt-oss does.

They are rearranged for the kernels without being quantized again. Instead of a layer's `NAME`
[experts, rows, in] there are:
  NAME_blocks   uint8 [experts, rows, in / 32, 16], two codes of e2m1 per byte, the lower half first
  NAME_scales   uint8 [experts, rows, in / 32], exponents plus 127
Everything else is in the model's type.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from slipstream.errors import CheckpointError
from slipstream.kernels.weights.forms import GroupedLinear, Linear, new_linear
from slipstream.kernels.weights.quantize import pack4
from slipstream.model.load.pulled import Pulled
from slipstream.spec.parameters import Deinterleave, Placement, Shape
from slipstream.spec.scheme import Scheme

EXPERTS = (".experts.up.weight", ".experts.down.weight")
PARTS = ("blocks", "scales")


_Taken: TypeAlias = tuple[str, Callable[[], Tensor], Placement]


class Mxfp4Weights:
    """Collects a checkpoint's blocks and scales. `linears()` returns the weights after all tensors
    were offered to `take`."""

    def __init__(
        self,
        shapes: dict[str, Shape],
        scheme: Scheme,
        *,
        dtype: torch.dtype,
        device: torch.device,
        on_host: Container[str] = (),
    ) -> None:
        """Expects the experts' weights in `shapes`; those in `on_host` go to host memory."""
        assert scheme.group_size is not None
        self.scheme, self.size, self.dtype = scheme, scheme.group_size, dtype
        self._shapes = {n: s for n, s in shapes.items() if n.endswith(EXPERTS)}
        self._device, self._on_host = device, on_host
        self._taken: dict[tuple[str, str], _Taken] = {}

    def __contains__(self, target: str) -> bool:
        return target in self._shapes

    def take(
        self, name: str, read: Callable[[], Tensor], find: Callable[[str], Placement | None]
    ) -> bool:
        """Records the tensor `name` if it belongs to an expert's weight, and returns whether it
        does."""
        stem, _, part = name.rpartition("_")
        placement = find(stem) if part in PARTS else None
        if placement is None or placement.target not in self._shapes:
            return False
        self._taken[placement.target, part] = name, read, placement
        return True

    def _linear(self, target: str) -> GroupedLinear:
        """Builds a weight from its tensors.

        CheckpointError names a tensor of the wrong shape, or a scale that the model's dtype can't
        represent.
        """
        place = torch.device("cpu") if target in self._on_host else self._device

        def make(part: str, shape: Shape, kind: str | None) -> Tensor:
            return torch.zeros(shape, dtype=torch.int16 if kind else self.dtype, device=place)

        made = new_linear("mxfp4", self._shapes[target], self.dtype, make, size=self.size)
        assert isinstance(made, GroupedLinear)
        for part in PARTS:
            # otherwise a rank's padding of zeros
            if (taken := self._taken.get((target, part))) is not None:
                self._put(made, part, *taken)
        return made

    def _put(
        self,
        into: GroupedLinear,
        part: str,
        name: str,
        read: Callable[[], Tensor],
        placement: Placement,
    ) -> None:
        copies = placement.copies
        assert copies is not None
        value, rows, groups = read(), into.weight.shape[0] // copies, into.scales.shape[0]
        expected = (copies, rows, groups, 16) if part == "blocks" else (copies, rows, groups)
        if tuple(value.shape) != expected or value.dtype != torch.uint8:
            raise CheckpointError(
                f"{name} is {list(value.shape)} of {value.dtype}; {list(expected)} of torch.uint8 was expected",
                field=name,
            )
        for expert in range(copies):  # one at a time, since unpacked codes take more memory
            own = value[expert].to(into.weight.device)
            if isinstance(placement.transform, Deinterleave):
                own = torch.cat((own[::2], own[1::2]))
            at = slice(expert * rows, (expert + 1) * rows)
            if part == "scales":
                into.scales[:, at] = torch.ldexp(
                    torch.ones_like(own, dtype=torch.float32), own.int() - 127
                ).T
            else:
                codes = torch.stack((own & 15, own >> 4), dim=-1).view(rows, -1).int()
                into.weight[at] = pack4(codes, into.chunk)
        if part == "scales" and not (into.scales.isfinite() & (into.scales > 0)).all():
            raise CheckpointError(
                f"{name} holds scales beyond {self.dtype}; use dtype='bfloat16'", field=name
            )

    def missing(self, names: Mapping[str, Placement]) -> list[str]:
        """Names of the checkpoint's missing tensors. `names` has the placements of dense weights."""
        held = (
            (name, place.target) for name, place in names.items() if place.target in self._shapes
        )
        return [
            f"{name}_{part}"
            for name, target in held
            for part in PARTS
            if (target, part) not in self._taken
        ]

    def linears(self) -> Mapping[str, Linear]:
        """The weights, without biases, by the names of `spec.parameters`."""
        return Pulled({name: partial(self._linear, name) for name in self._shapes})
