"""Bytes and operations of a model's linear layers and attention, from the spec and the memory
ledger. No torch.

The roofline (`worker/start/roofline.py`), the analytic model of a step (`costs/analytic.py`) and the
planner share these counts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from slipstream.spec.model import (
    ROUNDED,
    AttentionKind,
    LatentAttentionSpec,
    LayerSpec,
    ModelSpec,
    MoESpec,
)

UNROUNDED = frozenset(
    (
        *("expand", "router", "shared_weight", "gate", "project", "experts_in", "experts_out"),
        *("index", "index_q", "index_k", "index_weights"),
    )
)
"""Linear layers whose weights stay in the model's dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """A linear layer [tokens, inner] × [inner, rows], `count` times in the model.

    A token uses `chosen` of `copies` experts. `weight_bytes` covers all copies of one linear layer.
    `rounded` means quantized by the scheme.
    """

    name: str
    part: str
    rows: int
    inner: int
    copies: int = 1
    chosen: int = 1
    count: int = 1
    weight_bytes: float = 0.0
    rounded: bool = True

    @property
    def num_weights(self) -> int:
        """Number of weight elements in all copies of one linear layer."""
        return self.rows * self.inner * self.copies

    def operations(self, num_tokens: float) -> float:
        """FLOPs of one linear layer over `num_tokens` tokens (a multiply-add counts as two)."""
        return 2.0 * self.rows * self.inner * num_tokens * self.chosen

    def share_read(self, num_tokens: float) -> float:
        """Fraction of the weights that `num_tokens` tokens read. For experts it is the expected
        fraction chosen by at least one token."""
        return 1.0 if self.copies == 1 else 1 - math.pow(1 - self.chosen / self.copies, num_tokens)

    def read_bytes(self, num_tokens: float) -> float:
        return self.weight_bytes * self.share_read(num_tokens)


def products(spec: ModelSpec, bytes_by_part: Mapping[str, float]) -> tuple[Product, ...]:
    """Linear layers of a decoder's step, the output head last.

    A part's bytes in the ledger are distributed by size, so that the weights add up to the ledger's.
    """
    found: Counter[tuple[str, str, int, int, int, int]] = Counter()
    for layer in spec.layers:
        owner = layer if layer.same_as is None else spec.layers[layer.same_as]
        found.update(_of_layer(owner, spec.hidden_size))
    numbers: Counter[str] = Counter()
    for (_, part, rows, inner, copies, _), count in found.items():
        numbers[part] += rows * inner * copies * count
    made = [
        Product(
            name=name,
            part=part,
            rows=rows,
            inner=inner,
            copies=copies,
            chosen=chosen,
            count=count,
            weight_bytes=bytes_by_part[part] * rows * inner * copies / numbers[part],
            rounded=name not in UNROUNDED,
        )
        for (name, part, rows, inner, copies, chosen), count in found.items()
    ]
    head = bytes_by_part["output head"] or bytes_by_part["embeddings"]  # tied
    made.append(
        Product(
            name="head",
            part="output head",
            rows=spec.vocab_size,
            inner=spec.embed_width,
            weight_bytes=head,
        )
    )
    return tuple(made)


def _of_layer(layer: LayerSpec, hidden_size: int) -> list[tuple[str, str, int, int, int, int]]:
    found = []
    for name, shape in layer.shapes(hidden_size).items():
        *stem, product, kind = name.split(".")
        named = product in ROUNDED or product in UNROUNDED
        if kind != "weight" or not named or len(shape) != 2:
            continue
        experts = isinstance(layer.mlp, MoESpec) and stem == ["experts"]
        copies = layer.mlp.num_experts if experts and isinstance(layer.mlp, MoESpec) else 1
        chosen = (
            layer.mlp.num_experts_per_token if experts and isinstance(layer.mlp, MoESpec) else 1
        )
        part = "attention" if stem and stem[0] in ("attention", "cross") else "mlp"
        found.append((product, part, shape[0] // copies, shape[1], copies, chosen))
    return found


def attention_bytes(a: AttentionKind, num_cached: float, element_bytes: float) -> float:
    """Bytes of the keys and values of `num_cached` tokens. A latent is read once for both. With an
    index this is an upper bound: the latents of all keys."""
    return num_cached * a.cached_bytes(element_bytes)


def attention_operations(a: AttentionKind, num_pairs: float) -> float:
    """FLOPs of `num_pairs` (query token, key token) pairs: q·k and the weighted sum of v, over all
    heads."""
    values = a.kv_rank if isinstance(a, LatentAttentionSpec) else a.head_dim
    return num_pairs * 2 * a.num_heads * (a.head_dim + values)


def window_of(a: AttentionKind) -> float:
    """Maximum number of tokens to which a token attends."""
    window = None if isinstance(a, LatentAttentionSpec) else a.window
    return math.inf if window is None else window
