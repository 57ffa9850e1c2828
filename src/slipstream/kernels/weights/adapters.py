"""Low-rank adapters on a model's products (Hu et al. 2021, arXiv:2106.09685): weights by slot, and
a step's tokens.

`AdapterOps` wraps an op set and adds the adapters' results to its products. All else is passed
through. So a decoder runs with adapters by `Decoder.with_ops`, and its layers do not know of them.

Shapes: T tokens in the step, N slots, P parts of a product (q, k and v of one weight), R the
maximum rank of a part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slipstream.kernels.metadata import NO_ADAPTER
from slipstream.kernels.weights.forms import Activations, Linear, Quantized
from slipstream.platform import platform_of

if TYPE_CHECKING:
    from slipstream.kernels.metadata import ExpertCounters
    from slipstream.kernels.ops import Experts, OpSet
    from slipstream.platform.collectives import RankGroup

FEW_TOKENS = 256
"""Steps of at most this many tokens have tiles of TILES[0] tokens, larger ones tiles of
TILES[1]."""

TILES = (4, 64)


@dataclass(frozen=True, slots=True)
class LoRAWeights:
    """The adapters of one product, one in each slot.

    Part p of the product has the rows from `starts[p]` to the next part's start, and the rows
    [p · R, (p + 1) · R) of `down`. A smaller rank leaves zeros, and so does a part without an
    adapter. The scale is multiplied into `up`. A slot's elements are contiguous; slots may be any
    distance apart. `live` lists the parts that some adapter has weights for. The others are all
    zeros and need not be read.
    """

    down: Tensor  # [N, P · R, in]
    up: Tensor  # [N, out, R]
    starts: tuple[int, ...]
    live: tuple[int, ...]

    @property
    def rank(self) -> int:
        return self.up.shape[2]

    @property
    def parts(self) -> list[slice]:
        """Rows of the product, part by part."""
        ends = (*self.starts[1:], self.up.shape[1])
        return [slice(begin, end) for begin, end in zip(self.starts, ends, strict=True)]


@dataclass(frozen=True, slots=True)
class LoRATokens:
    """The adapter of each token in a step. Tokens with one are sorted by slot, and cut into tiles
    of one slot each.

    Tensors are on the model's device. In a graph they have the maximum length of its steps, and
    unused tiles are empty (begin = end).
    """

    slots: Tensor  # int32 [T]; NO_ADAPTER for a token without one
    order: Tensor  # int32 [T]: tokens by slot; tiles leave out those without an adapter
    tiles: Tensor  # int32 [M, 3]: slot, and begin and end in `order`
    tile_tokens: int  # maximum tokens of a tile
    # on the host, not in a graph: (slot, begin, end) in `order`
    groups: tuple[tuple[int, int, int], ...] = ()
    own: LoRATokens | None = None
    """This rank's tokens, if ranks share out the step's. Some products read only these."""

    def of(self, x: Activations) -> LoRATokens:
        """Returns the tokens that a product reads: all, or this rank's share."""
        rows = x.values if isinstance(x, Quantized) else x
        return self.own if self.own is not None and len(rows) < len(self.slots) else self


def most_tiles(num_tokens: int, num_slots: int) -> int:
    """Maximum number of tiles of a step with `num_tokens` tokens."""
    return min(num_tokens, -(-num_tokens // tile_tokens(num_tokens)) + num_slots)


def tile_tokens(num_tokens: int) -> int:
    return TILES[num_tokens > FEW_TOKENS]


def sort_tokens(
    slots: npt.NDArray[np.int32],
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], tuple[tuple[int, int, int], ...]]:
    """Sorts each token's slot [T] into `LoRATokens`' order [T], tiles [M, 3] and groups."""
    order = np.argsort(slots, kind="stable").astype(np.int32)
    first = int(np.searchsorted(slots[order], 0))
    order = np.concatenate((order[first:], order[:first]))
    found, counts = np.unique(slots[slots >= 0], return_counts=True)
    ends = counts.cumsum()
    size = tile_tokens(len(slots))
    groups = tuple(zip(found.tolist(), (ends - counts).tolist(), ends.tolist(), strict=True))
    tiles = [
        (slot, at, min(at + size, end))
        for slot, begin, end in groups
        for at in range(begin, end, size)
    ]
    return order, np.array(tiles, np.int32).reshape(-1, 3), groups


def own_slots(slots: npt.NDArray[np.int32], ranks: RankGroup) -> npt.NDArray[np.int32]:
    """Returns the slots of this rank's share of the tokens (`RankOps.own_tokens`)."""
    each = -(-len(slots) // ranks.size)
    own = slots[ranks.rank * each : (ranks.rank + 1) * each]
    return np.pad(own, (0, each - len(own)), constant_values=NO_ADAPTER)


def tokens_of(
    slots: Sequence[int] | npt.NDArray[np.int32],
    device: torch.device,
    ranks: RankGroup | None = None,
) -> LoRATokens:
    """Makes the `LoRATokens` of a step whose token t has the adapter in slot slots[t]. The tokens
    are divided among `ranks` ranks."""
    given = np.asarray(slots, np.int32)
    order, tiles, groups = sort_tokens(given)
    there = (platform_of(device).upload(a) for a in (given, order, tiles))
    own = None if ranks is None else tokens_of(own_slots(given, ranks), device)
    return LoRATokens(next(there), next(there), next(there), tile_tokens(len(given)), groups, own)


class AdapterOps:
    """The op set `ops` with the adapters' results added to its products.

    `weights` are by the `id` of the product's `Linear`.
    """

    def __init__(self, ops: OpSet, weights: Mapping[int, LoRAWeights], tokens: LoRATokens) -> None:
        self._ops, self._weights, self._tokens = ops, weights, tokens

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def pieces(self, x: Tensor, group: RankGroup) -> Sequence[slice]:
        """Returns no pieces: `tokens` belong to the whole step, so sums are not split."""
        return ()

    def linear(self, x: Activations, w: Linear) -> Tensor:
        own = self._weights.get(id(w))
        return (
            self._ops.linear(x, w)
            if own is None
            else self._ops.adapted_linear(x, w, own, self._tokens.of(x))
        )

    def moe_and_shared(
        self,
        x: Tensor,
        router_logits: Tensor,
        experts: Experts,
        shared: tuple[Linear, Linear],
        load: ExpertCounters | None = None,
    ) -> Tensor:
        up, down = shared
        if id(up) not in self._weights and id(down) not in self._weights:
            return self._ops.moe_and_shared(x, router_logits, experts, shared, load)
        expert = experts.spec.expert
        inner = self._ops.activation(
            self.linear(x, up), expert.activation, gated=expert.gated, inputs=down.inputs
        )
        return self._ops.moe(x, router_logits, experts, load) + self.linear(inner, down)
