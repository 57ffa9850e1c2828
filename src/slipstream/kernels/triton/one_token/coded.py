"""Weights in GGUF's types for the one-token kernel: which it multiplies, and what it is given of them.

Codes stay where the other kernels read them (`CodedLinear`). Factors are copied, 5 to 10 % of a
weight's bytes, so that those of 8 rows and a unit lie together (`units.cu`):

- scales, a byte each or a float16, and a row's minima after each four of them;
- then, of types with `d`, its word for each row. Signed scales have 128 added.

Values are a product of their own, since files often have them in more bits than queries and keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.layouts import LayerTensors, TokenShape
from slipstream.kernels.tracing.token_shape import inner_sizes
from slipstream.kernels.weights.forms import CodedLinear, JoinedLinear
from slipstream.spec.reason import Reason
from slipstream.spec.stored.gguf_types import FORMS

CODED = ("Q4_K", "Q5_K", "Q6_K", "Q4_0", "Q5_0", "Q8_0")
"""The types, in the order of the source's numbers."""
PRODUCTS = {"qkv": 0, "latent": 4, "out": 8, "up": 12, "down": 16}
"""First of the four bits of `form_numbers` that give the type of each product. `latent` stands for
the rows of values."""
UNITS_IN_STAGE = 8
SLAB = 8
"""Number of rows whose codes are stored together."""


def factor_bytes(kind: str) -> int:
    """Bytes of the factors of a unit of 8 rows."""
    form = FORMS[kind]
    return 128 if form.scales == "halves" else 160 if form.mins else 96


def _stage(kind: str) -> int:
    form = FORMS[kind]
    slab = UNITS_IN_STAGE * (8 * form.group * form.bits + factor_bytes(kind))
    return 2 * (-(-slab // 128) * 128 + 64)


MAX_STAGE = max(map(_stage, CODED))
"""Bytes of the largest stage of the ring."""


def sum_bytes(widest: int) -> int:
    """Bytes of sums and scales of a linear layer's inputs."""
    return 2 * 4 * (widest // 32 + widest // 16) + widest // 64


def shape_refusal(s: TokenShape) -> Reason | None:
    """Return why the kernel has no layers of this shape in GGUF's types; None if it has."""
    if s.experts is not None or s.latent is not None or s.delta is not None:
        return Reason("the one-token kernel has GGUF's types in dense layers with attention only")
    if any(n % 256 for n in inner_sizes(s)) or s.num_kv_heads * s.head_dim % 16:
        return Reason("the one-token kernel reads GGUF's types by 256 inputs")
    return None


def refusal(layers: Sequence[LayerTensors], s: TokenShape) -> Reason | None:
    """Return why the kernel can't multiply these weights; None if it can."""
    for layer in layers:
        for name, found in _products(layer, s).items():
            if found is None:
                return Reason(
                    f"the one-token kernel has one GGUF type for a product, and {name} has several"
                )
            if found.type not in CODED or found.rows % 16:
                return Reason(f"the one-token kernel has no GGUF type {found.type}")
    return None


def _products(layer: LayerTensors, s: TokenShape) -> dict[str, CodedLinear | None]:
    """A layer's weights by the kernel's names; None for one of several types."""
    given: Mapping[str, Any] = layer
    values = s.num_kv_heads * s.head_dim
    first = given["qkv"].out_features - values
    return {
        "qkv": _rows(given["qkv"], 0, first),
        "latent": _rows(given["qkv"], first, first + values),
        **{name: _rows(given[name], 0, given[name].out_features) for name in ("out", "up", "down")},
    }


def _rows(w: CodedLinear | JoinedLinear, start: int, stop: int) -> CodedLinear | None:
    """Returns some rows of a weight as a weight over the same memory; None if the rows have several
    types."""
    for part in w.parts if isinstance(w, JoinedLinear) else (w,):
        if start >= 0 and stop <= part.rows:
            if start % SLAB or stop % SLAB:
                return None
            slabs = slice(start // SLAB, stop // SLAB)
            return CodedLinear(
                weight=part.weight[slabs],
                high=None if part.high is None else part.high[slabs],
                factors=part.factors[:, :, start:stop],
                d=None if part.d is None else part.d[:, start:stop],
                type=part.type,
                rows=stop - start,
                inner=part.inner,
                dtype=part.dtype,
            )
        start, stop = start - part.rows, stop - part.rows
    return None


def tensors(layer: LayerTensors, s: TokenShape) -> LayerTensors:
    """Returns the layer with each weight replaced by the tensors that the kernel reads."""
    made: dict[str, Any] = dict(layer)
    numbers = 0
    for name, w in _products(layer, s).items():
        assert w is not None
        made |= {name: w.weight, f"{name}_scales": factors(w), f"{name}_rows": w.high}
        numbers |= CODED.index(w.type) << PRODUCTS[name]
    for name in ("qkv", "out", "up", "down"):
        given: Any = layer[name]
        parts = given.parts if isinstance(given, JoinedLinear) else (given,)
        biases = [part.bias for part in parts if part.bias is not None]
        made[f"{name}_bias"] = torch.cat(biases) if biases else None
    if (bias := made["qkv_bias"]) is not None:
        made["latent_bias"] = bias[-s.num_kv_heads * s.head_dim :]
    return {**made, "form_numbers": numbers}


def masks(layers: Sequence[LayerTensors]) -> dict[str, int]:
    """Types that each product has in any layer, as a bit mask with one bit per type."""
    found = dict.fromkeys(PRODUCTS, 0)
    for layer in layers:
        numbers = layer["form_numbers"]
        assert isinstance(numbers, int)
        for name, at in PRODUCTS.items():
            found[name] |= 1 << (numbers >> at & 15)
    return found


def factors(w: CodedLinear) -> Tensor:
    """Returns the scale factors, int32 [slabs of 8 rows, units, words of 8 rows]."""
    form = FORMS[w.type]
    units, words, rows = w.factors.shape
    own = w.factors  # [units, words, rows]
    if form.mins:  # s0 s1 m0 m1 → s0 m0 s1 m1
        own = own[:, [0, 2, 1, 3]]
    elif form.scales == "bytes":
        own = own ^ -0x7F7F7F80  # 0x80808080
    parts = [own.view(units, words, -1, SLAB).permute(2, 0, 3, 1).reshape(rows // SLAB, units, -1)]
    if w.d is not None:
        d = w.d.repeat_interleave(units // len(w.d), dim=0)  # [units, rows]
        parts.append(d.view(units, -1, SLAB).permute(1, 0, 2))
    made = torch.cat(parts, dim=2)
    assert made.shape[2] * 4 == factor_bytes(w.type)
    return made.contiguous()
