"""The part of an op set that lays out weights at a load. No step calls it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.weights.forms import Linear
from slipstream.kernels.weights.quantize import round_linear
from slipstream.spec.model import LatentAttentionSpec
from slipstream.spec.scheme import Scheme


class WeightOps(ABC):
    name: str
    block_types: frozenset[str] = frozenset()
    """GGUF types that `pack_weight` takes without dequantizing."""
    rounded: frozenset[str] = frozenset()
    """Products (of `spec.scheme.NATIVE_PRODUCTS`) whose quantized weights `pack_weight` and
    `pack_experts` take. Other weights are expanded first."""
    output_multiple = 1
    """Multiple of `out` that 8-bit products of a weight [out, in] need."""

    def eight_bits(self, device: torch.device) -> str | None:
        """Returns the 8-bit scheme with the fastest products on `device`, or None if none is faster
        than a dense product."""
        return None

    @property
    def layout(self) -> str | None:
        """Name of this op set's layout of packed products, if keeping them in a file makes a start
        faster; else None."""
        return None

    def write_products(self, path: Path, products: Mapping[str, Linear]) -> int:
        """Writes quantized products, by name, to a file, which appears complete. Only with a
        `layout`.

        Returns the file's size in bytes. It is 0, without a file, if a product is not in this op
        set's format. OSError if there is no space.
        """
        raise NotImplementedError

    def read_products(self, path: Path) -> dict[str, Linear]:
        """Reads the products that `write_products` wrote, without biases. CheckpointError if the
        file is damaged."""
        raise NotImplementedError

    def describe(self) -> str:
        """Returns the op set's name for messages."""
        return self.name

    @abstractmethod
    def quantize_weight(
        self, weight: Tensor, bias: Tensor | None, scheme: Scheme | None = None
    ) -> Linear:
        """Lays out a dense weight [out, in] as this op set's `linear` reads it best, quantized if a
        `scheme` is given.

        May return the weight as it is.
        """

    def pack_weight(self, w: Linear) -> Linear:
        """Lays out a weight that a checkpoint, or this op set's own file, holds already
        quantized."""
        return w

    def embedding(self, table: Tensor | Linear, tied: Linear | None) -> Tensor | Linear:
        """Returns the table that `embed` or a compiled step reads.

        `tied` is the output head that was made from it. The result may be this head.
        """
        return table

    def place_of(self, table: Tensor | Linear) -> tuple[torch.device, torch.dtype]:
        """Returns the device of a model with this embedding table, and the type of its hidden
        states.

        A table in a checkpoint's own blocks is on the CPU; its `weight` is only a placeholder.
        """
        if isinstance(table, Linear):
            return torch.device("cpu"), table.weight.dtype
        return table.device, table.dtype

    def pack_latent(self, expand: Tensor, spec: LatentAttentionSpec) -> tuple[Any, Any]:
        """Splits the weight [H · (P + V), C] that expands latents into keys [H, P, C] and values
        [H, C, V].

        Both have the layout of `pack_heads`.
        """
        keys, values = expand.unflatten(0, (spec.num_heads, -1)).split(
            (spec.nope_dim, spec.value_dim), dim=1
        )
        return self.pack_heads(keys), self.pack_heads(values.transpose(1, 2))

    def pack_heads(self, weight: Tensor) -> Any:
        """Lays out a weight [H, in, out] that `mla_attention` multiplies head by head."""
        return weight.contiguous()

    def pack_experts(self, w: Linear, *, num_experts: int) -> Linear:
        """Lays out the stacked quantized weights of all experts, as `pack_weight` does."""
        return w

    def quantize_experts(
        self,
        weight: Tensor,
        scheme: Scheme | None = None,
        bias: Tensor | None = None,
        *,
        num_experts: int,
    ) -> Linear:
        """Lays out the stacked dense weights and biases of all experts for `moe`, as
        `quantize_weight` does."""
        return (
            Linear(weight=weight, bias=bias)
            if scheme is None
            else round_linear(weight, bias, scheme)
        )

    def forms_of(self, w: Linear) -> list[tuple[str, int]]:
        """Returns the formats of a product's weight and their bytes, for messages."""
        tensors = [
            v
            for f in fields(w)
            if isinstance(v := getattr(w, f.name), Tensor) and v.device.type != "meta"
        ]
        name = str(w.weight.dtype).removeprefix("torch.")
        if w.sparse is not None:
            tensors.append(w.sparse.packed)
            name += f", without zeros from {w.sparse.from_tokens} tokens on"
        return [(name, sum(t.numel() * t.element_size() for t in tensors))]
