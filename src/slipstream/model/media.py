"""Common code of image and audio encoders: layers without a cache, and passes over several inputs.
Uses torch and the decoder's op set.

Shapes: N patches or states of all inputs, E the encoder's hidden size.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.kernels.layouts import NormParams, QKVLayout
from slipstream.kernels.metadata import AttentionMetadata, LayerKV
from slipstream.kernels.ops import OpSet
from slipstream.kernels.packed_parts import PackedParts
from slipstream.kernels.weights.forms import Linear
from slipstream.model.building import build_linear, build_norm
from slipstream.model.layers.residual import normed
from slipstream.spec.media.medium import MediaSpec
from slipstream.spec.media.vision import CLIPPED
from slipstream.spec.model import AttentionSpec, DenseSpec, LayerSpec, OwnActivation

MAX_PATCHES = {"cuda": 16384, "cpu": 8192}
"""Maximum patches of one pass, by device, unless a single image has more. More images are encoded
in several passes of similar size.

On a GPU the host takes 12 to 16 ms to launch a pass, whatever its size.
"""

PRODUCTS = ("attention.qkv", "attention.out", "mlp.up", "mlp.down")
"""Names of a layer's linear layers, in the order of `MediaLayer`'s fields."""

ROW = 8
"""Multiple to which the hidden units of an MLP are padded, since a GPU's fast matrix products need
rows of a multiple of 16 bytes.

On an H100, Qwen 2.5 VL's rows of 3,420 elements took 347 µs, and padded rows about 110.
"""


@dataclass(frozen=True, slots=True)
class Layout:
    """Metadata of a pass: where each image's patches are. Tensors are on the encoder's device."""

    whole: PackedParts  # one part per picture
    windows: PackedParts  # one part per window; `whole` without windows
    positions: Tensor | None  # int64 [N, n]: rows of the position table, to be summed
    weights: Tensor | None  # float32 [N, n]: their weights; None: 1
    cos_sin: Tensor | None  # float32 [N, D]: cosines, then sines
    meta: AttentionMetadata  # patch i has row i of `cos_sin`, and slot i of keys and values
    order: Tensor | None  # int64 [N / merge²]: groups in window order; None: no reordering
    inner: Tensor | None = None  # int64 [N]: row of each patch if class tokens are inserted
    interleaved: bool = False  # layout of the pairs that `cos_sin` rotates


@dataclass(frozen=True, slots=True)
class Clamped:
    """A linear layer that clamps its input and its output.

    It combines several stacked layers. Those with the same input bounds are computed together.
    """

    linear: Linear
    # (low, high, columns of the output) of each input clamp
    inputs: Sequence[tuple[float, float, slice]]
    low: Tensor  # [R], of the outputs
    high: Tensor

    @classmethod
    def of(cls, linear: Linear, bounds: Tensor, rows: Sequence[int]) -> Clamped:
        """Combines n stacked linear layers: layer i has `rows[i]` rows and the bounds `bounds[i]`
        (`spec.media.vision.BOUNDS`)."""
        counts = torch.tensor(rows, device=bounds.device)
        low, high = (bounds[:, i].repeat_interleave(counts) for i in (2, 3))
        inputs = list[tuple[float, float, slice]]()
        for (lo, hi), end in zip(bounds[:, :2].tolist(), itertools.accumulate(rows), strict=True):
            start = inputs[-1][2].stop if inputs else 0
            if inputs and inputs[-1][:2] == (lo, hi):
                start = inputs.pop()[2].start
            inputs.append((lo, hi, slice(start, end)))
        return cls(linear, inputs, low, high)

    def __call__(self, ops: OpSet, x: Tensor) -> Tensor:
        found = [ops.linear(x.clamp(lo, hi), self.linear)[:, own] for lo, hi, own in self.inputs]
        rows = found[0] if len(found) == 1 else torch.cat(found, dim=1)
        return rows.clamp(self.low, self.high)


@dataclass(frozen=True, slots=True)
class MediaLayer:
    spec: LayerSpec
    qkv: Linear | Clamped
    out: Linear | Clamped
    up: Linear | Clamped
    down: Linear | Clamped
    norms: Mapping[str, NormParams]
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    gains: Tensor | None = None  # [2, E]: factors of the outputs of attention and MLP

    def __call__(
        self, ops: OpSet, h: Tensor, parts: PackedParts, layout: Layout | None = None
    ) -> Tensor:
        """[N, E] → [N, E]. Without a layout patches are not rotated."""
        a, mlp = self.spec.attention, self.spec.mlp
        assert isinstance(a, AttentionSpec)
        assert isinstance(mlp, DenseSpec)
        rows = _product(ops, normed(ops, self.norms["pre_attention"], h), self.qkv)
        sizes = (a.num_heads, a.num_kv_heads, a.num_kv_heads)
        q, k, v = rows.unflatten(1, (-1, a.head_dim)).split(sizes, dim=1)
        # written to a cache with one token per block
        if layout is not None and layout.cos_sin is not None:
            k_cache, v_cache = (
                rows.new_empty(len(rows), a.num_kv_heads, 1, a.head_dim) for _ in range(2)
            )
            kv = LayerKV(k_cache, v_cache)
            heads = QKVLayout(
                num_heads=a.num_heads,
                num_kv_heads=a.num_kv_heads,
                head_dim=a.head_dim,
                cos_sin=layout.cos_sin,
                interleaved=layout.interleaved,
                q_norm=self.q_norm,
                k_norm=self.k_norm,
                norm_eps=0.0 if a.qk_norm is None else a.qk_norm.eps,
                value_eps=a.value_eps,
            )
            q = ops.rope_and_cache(rows, kv, layout.meta, heads)
            k = kv.k.squeeze(2)
            v = kv.v.squeeze(2)
        elif (norm := a.qk_norm) is not None:
            assert norm.over == "row"
            assert self.q_norm is not None
            assert self.k_norm is not None
            q, k = (
                normed(ops, NormParams(kind="rms", weight=w, eps=norm.eps), x.flatten(1)).view_as(x)
                for x, w in ((q, self.q_norm), (k, self.k_norm))
            )
        if (copies := a.num_heads // a.num_kv_heads) > 1:
            k, v = (x.repeat_interleave(copies, dim=1) for x in (k, v))
        mixed = ops.packed_attention(q, k, v, parts, scale=a.scale).flatten(1)
        first, second = (1, 1) if self.gains is None else self.gains
        h = h + first * self._after("post_attention", ops, _product(ops, mixed, self.out))
        rows = _product(ops, normed(ops, self.norms["pre_mlp"], h), self.up)
        # a custom activation, which needs no kernel here
        if isinstance(act := mlp.activation, OwnActivation):
            rows = act.function(rows.float()).to(rows.dtype)
        else:
            rows = cast("Tensor", ops.activation(rows, act, gated=mlp.gated))
        return h + second * self._after("post_mlp", ops, _product(ops, rows, self.down))

    def _after(self, name: str, ops: OpSet, h: Tensor) -> Tensor:
        return normed(ops, self.norms[name], h) if name in self.norms else h


def _product(ops: OpSet, x: Tensor, by: Linear | Clamped) -> Tensor:
    return by(ops, x) if isinstance(by, Clamped) else ops.linear(x, by)


class MediaTower:
    """An image or audio encoder. Removes the `parameters` whose names begin with "media." from the mapping."""

    spec: MediaSpec

    def __init__(
        self, spec: MediaSpec, parameters: MutableMapping[str, Tensor], ops: OpSet
    ) -> None:
        self.spec, self.ops = spec, ops
        self._own = own = {
            name: parameters.pop(name) for name in list(parameters) if name.startswith("media.")
        }
        out = own["media.connector.out.weight"]
        self.device, self.dtype = out.device, out.dtype
        self.most_patches = MAX_PATCHES[self.device.type]
        for i, layer in enumerate(spec.layers):
            assert isinstance(layer.mlp, DenseSpec)
            pad_units(own, f"media.layers.{i}.mlp.", layer.mlp)
        self.num_bytes = sum(value.numel() * value.element_size() for value in own.values())
        self.layers = [self._layer(layer, f"layers.{i}.") for i, layer in enumerate(spec.layers)]
        norm = spec.final_norm
        self.final_norm = None if norm is None else build_norm(norm, "media.final_norm", own)

    def __call__(
        self, given: Sequence[Tensor], sizes: Sequence[tuple[int, ...]] = ()
    ) -> list[Tensor]:
        """Encodes inputs of images or audio → token embeddings of each, [num_tokens, text size].
        `sizes`: rows and columns of tokens."""
        raise NotImplementedError

    def probe(self) -> int:
        """Encode an input so that its memory can be measured. Returns how many times that memory a pass may need."""
        raise NotImplementedError

    def _linear(self, name: str) -> Linear:
        return build_linear(f"media.{name}", self._own, self.ops, None, {})

    def _size(self, given: Tensor) -> int:
        """Number of an input's patches or states."""
        raise NotImplementedError

    def _encode(self, given: Sequence[Tensor]) -> list[Tensor]:
        """Token embeddings of each input, computed in one pass."""
        raise NotImplementedError

    def _in_passes(self, given: Sequence[Tensor]) -> list[Tensor]:
        ends = pass_ends([self._size(x) for x in given], self.most_patches)
        return [
            x
            for start, end in itertools.pairwise((0, *ends))
            for x in self._encode(given[start:end])
        ]

    def _layer(self, s: LayerSpec, name: str) -> MediaLayer:
        assert isinstance(s.attention, AttentionSpec)
        assert isinstance(s.mlp, DenseSpec)
        own = self._own
        products: list[Linear | Clamped] = [self._linear(f"{name}{x}") for x in PRODUCTS]
        if (bounds := own.pop(f"media.{name}bounds.weight", None)) is not None:
            bounds, size = bounds.view(len(CLIPPED), -1), padded(s.mlp.intermediate_size)
            rows = (
                s.attention.qkv_rows,
                (self.spec.hidden_size,),
                (size, size),
                (self.spec.hidden_size,),
            )
            of_each = bounds.split([len(x) for x in rows])
            made = zip(products, of_each, rows, strict=True)
            products = [Clamped.of(cast("Linear", p), b, r) for p, b, r in made]
        qkv, out, up, down = products
        return MediaLayer(
            s,
            qkv,
            out,
            up,
            down,
            {key: build_norm(n, f"media.{name}{key}", own) for key, n in s.norms.items()},
            own.pop(f"media.{name}attention.q_norm.weight", None),
            own.pop(f"media.{name}attention.k_norm.weight", None),
            own.pop(f"media.{name}gains.weight", None),
        )


def pass_ends(counts: Sequence[int], most: int) -> list[int]:
    """End indices of the passes over inputs with these patch `counts`.

    A pass has at most `most` patches, unless a single input has more. Passes get similar shares, so
    the last one is seldom much smaller than the others.
    """
    each = -(-sum(counts) // -(-sum(counts) // most)) if counts else 0
    ends, num_patches = list[int](), 0
    for i, count in enumerate(counts):
        if num_patches and (num_patches >= each or num_patches + count > most):
            ends.append(i)
            num_patches = 0
        num_patches += count
    return [*ends, len(counts)] if counts else []


def padded(size: int) -> int:
    return size + -size % ROW


def pad_units(parameters: MutableMapping[str, Tensor], name: str, spec: DenseSpec) -> None:
    """Pads the hidden units of an MLP to a multiple of ROW with zeros, which add nothing."""
    size, parts = spec.intermediate_size, 2 if spec.gated else 1
    if more := padded(size) - size:
        for part in ("up.weight", "up.bias"):
            if (value := parameters.get(name + part)) is not None:
                rows = value.unflatten(0, (parts, size))
                parameters[name + part] = torch.cat(
                    (rows, rows.new_zeros(parts, more, *rows.shape[2:])), dim=1
                ).flatten(0, 1)
        parameters[name + "down.weight"] = F.pad(parameters[name + "down.weight"], (0, more))
