"""Additional inputs of captured steps besides rows and tokens: adapters or shared prefixes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from slipstream.kernels.metadata import NO_ADAPTER, AttentionMetadata, LayerKV, SharedPrefixes
from slipstream.kernels.weights.adapters import (
    LoRATokens,
    most_tiles,
    own_slots,
    sort_tokens,
    tile_tokens,
)
from slipstream.messages.steps import StepPlan
from slipstream.model.decoder import Decoder
from slipstream.platform import platform_of
from slipstream.spec.reason import Reason
from slipstream.worker.adapters import Adapters
from slipstream.worker.forward.forwards import HAS_ADAPTERS, Adapted, Forwards, InputBatch
from slipstream.worker.graphs.mixed_inputs import Size, padded_room
from slipstream.worker.inputs.feature_inputs import shared_prefixes
from slipstream.worker.inputs.rows import RowTable
from slipstream.worker.inputs.step_shape import num_leading_decodes


class GraphInput:
    """Additional input of captured steps. This base class is for plain steps, which have none;
    subclasses have a buffer for each graph size."""

    name = "graphs"
    waits = False
    """True if a size is captured when it is needed for the second time."""

    @property
    def at_start(self) -> bool:
        """Whether the commonest sizes are captured at the start."""
        return True

    def refusal(self, batch: InputBatch, plan: StepPlan) -> Reason | None:
        """Reason why a step does not use the graphs with this input; None if it does."""
        return HAS_ADAPTERS if batch.has_adapters else None

    def has_changed(self) -> bool:
        """Whether the kernels that a step launches have changed since the last call, so that graphs
        must be captured again."""
        return False

    def allot(self, size: Size) -> None:
        """Allocate a size's buffer, before its capture."""

    def fill(self, size: Size, plan: StepPlan) -> None:
        """Uploads a step's input, before a replay."""

    def hidden(
        self,
        size: Size,
        forwards: Forwards,
        token_ids: Tensor,
        kv: Sequence[LayerKV],
        meta: AttentionMetadata,
        decoder: Decoder,
    ) -> Tensor:
        """Runs the forward that a graph captures."""
        return forwards.hidden(token_ids, kv, meta, decoder)


class SharedPrefixInput(GraphInput):
    """Input that describes which decodes begin with the same blocks. Until a size is captured, the
    graph without shared prefixes is used."""

    name = "graphs with shared prefixes"
    waits = True

    def __init__(self, device: torch.device) -> None:
        self._platform = platform_of(device)
        self._shared: dict[Size, Tensor] = {}  # int32 [3, decodes]

    @property
    def at_start(self) -> bool:
        return False

    def refusal(self, batch: InputBatch, plan: StepPlan) -> Reason | None:
        if not plan.shared:
            return Reason("no requests of the step share a prefix")
        if plan.scheduled[-1].num_tokens > 1:
            return Reason("the step has prompts")
        return super().refusal(batch, plan)

    def allot(self, size: Size) -> None:
        self._shared[size] = torch.from_numpy(shared_prefixes((), size[0])).to(
            self._platform.device
        )

    def fill(self, size: Size, plan: StepPlan) -> None:
        self._platform.upload_into(self._shared[size], shared_prefixes(plan.shared, size[0]))

    def hidden(
        self,
        size: Size,
        forwards: Forwards,
        token_ids: Tensor,
        kv: Sequence[LayerKV],
        meta: AttentionMetadata,
        decoder: Decoder,
    ) -> Tensor:
        shared = SharedPrefixes(*self._shared[size].unbind(0))
        return forwards.hidden(token_ids, kv, meta.sharing(shared), decoder)


class AdapterInput(GraphInput):
    """Input with each token's adapter. Graphs are captured when adapters are first used, and again
    when an adapter has weights for linear layers that had none before, because launches without
    weights are left out.
    """

    name = "graphs with adapters"

    def __init__(self, adapters: Adapters, rows: RowTable, device: torch.device) -> None:
        self.adapters, self._rows, self._platform = adapters, rows, platform_of(device)
        self._parts = adapters.parts
        self._tokens: dict[Size, Tensor] = {}  # int32

    @property
    def at_start(self) -> bool:
        return bool(self._parts)

    def refusal(self, batch: InputBatch, plan: StepPlan) -> Reason | None:
        return None if batch.has_adapters else Reason("no request of the step has an adapter")

    def has_changed(self) -> bool:
        before, self._parts = self._parts, self.adapters.parts
        return before != self._parts

    def allot(self, size: Size) -> None:
        if size not in self._tokens:
            room = sum(sum(rooms) for _, rooms in self._parts_of(size))
            device = self._platform.device
            self._tokens[size] = torch.zeros(room, dtype=torch.int32, device=device)

    def _parts_of(self, size: Size) -> list[tuple[int, tuple[int, int, int]]]:
        """(number of tokens, sizes of slots, order and tiles) of the step and, if ranks divide it,
        of this rank's part."""
        num_tokens, loras = sum(size), self.adapters.settings.max_loras
        ranks = self.adapters.decoder.sharers(num_tokens)
        counts = [num_tokens] if ranks is None else [num_tokens, -(-num_tokens // ranks.size)]
        return [
            (n, (padded_room(n), padded_room(n), padded_room(3 * most_tiles(n, loras))))
            for n in counts
        ]

    def hidden(
        self,
        size: Size,
        forwards: Forwards,
        token_ids: Tensor,
        kv: Sequence[LayerKV],
        meta: AttentionMetadata,
        decoder: Decoder,
    ) -> Tensor:
        parts, tokens = self._parts_of(size), None
        given = self._tokens[size].split([room for _, rooms in parts for room in rooms])
        for i, (n, _) in reversed(list(enumerate(parts))):
            slots, order, tiles = given[3 * i : 3 * i + 3]
            num_tiles = most_tiles(n, self.adapters.settings.max_loras)
            tiles = tiles[: 3 * num_tiles].view(-1, 3)
            tokens = LoRATokens(slots[:n], order[:n], tiles, tile_tokens(n), own=tokens)
        assert tokens is not None
        adapted = Adapted(forwards.base, self.adapters)
        return adapted.hidden(token_ids, kv, meta, tokens, decoder)

    def fill(self, size: Size, plan: StepPlan) -> None:
        scheduled, num_tokens = plan.scheduled, sum(size)
        slots = np.full(num_tokens, NO_ADAPTER, np.int32)
        own, num_decodes = self._rows.adapters_of(scheduled), num_leading_decodes(scheduled)
        slots[:num_decodes] = own[:num_decodes]
        behind = own[num_decodes:].repeat([s.num_tokens for s in scheduled[num_decodes:]])
        first = size[0] if size[1] else num_decodes  # in a decode graph drafts follow directly
        slots[first : first + len(behind)] = behind
        host, at = np.zeros(len(self._tokens[size]), np.int32), 0
        ranks = self.adapters.decoder.sharers(num_tokens)
        for n, rooms in self._parts_of(size):
            part = slots if n == num_tokens or ranks is None else own_slots(slots, ranks)
            order, tiles, _ = sort_tokens(part)
            for values, room in zip((part, order, tiles.reshape(-1)), rooms, strict=True):
                host[at : at + len(values)] = values
                at += room
        self._platform.upload_into(self._tokens[size], host)
