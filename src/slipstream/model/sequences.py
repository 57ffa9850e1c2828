"""Runs whole sequences through a model without a KV cache, for training, calibration and
importances.

1. A `SequenceBatch` holds sequences of any lengths, one after another.
2. A layer's cache is *flat*: one block per sequence. It exists only while the layer runs.
3. `WholeModel` is the decoder as a torch module. Its parameters have the names of
   `spec.parameters`. Its blocks can be sharded one by one, and recomputed in the backward pass
   instead of stored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from slipstream.errors import ConfigError, UnsupportedModelError
from slipstream.kernels.metadata import AttentionMetadata, LayerKV
from slipstream.kernels.ops import OpSet
from slipstream.kernels.plain.autograd import AutogradOps
from slipstream.kernels.positions import PositionTables
from slipstream.kernels.states import LayerState
from slipstream.model.building import build_layer
from slipstream.model.decoder import Decoder
from slipstream.model.layers.layer import Layer
from slipstream.model.layers.residual import whole
from slipstream.spec.model import AttentionSpec, LayerSpec, ModelSpec, RecallSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceBatch:
    """A batch of T tokens in S sequences, one after another."""

    token_ids: Tensor  # int64 [T]
    lengths: tuple[int, ...]  # lengths of the S sequences, at least 1 each
    meta: AttentionMetadata

    @classmethod
    def of(cls, sequences: Sequence[Sequence[int] | Tensor], device: torch.device) -> SequenceBatch:
        """Makes a batch from token ids. ConfigError if there are none or a sequence is empty."""
        lengths = tuple(len(s) for s in sequences)
        if not lengths or min(lengths) < 1:
            raise ConfigError(
                "a batch needs sequences, of one token or more each", field="sequences"
            )
        longest = max(lengths)
        token_ids = torch.cat([torch.as_tensor(s, dtype=torch.int64) for s in sequences])
        positions = torch.cat([torch.arange(n) for n in lengths])
        slots = (
            positions
            + torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)) * longest
        )
        starts = torch.tensor([0, *lengths]).cumsum(0)
        meta = AttentionMetadata(
            query_start_loc=starts.int().to(device),
            seq_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
            block_table=torch.arange(len(lengths), dtype=torch.int32, device=device)[:, None],
            positions=positions.to(device),
            slot_mapping=slots.to(device),
            num_decodes=0,
            max_query_len=longest,
            max_seq_len=longest,
        )
        return cls(token_ids=token_ids.to(device), lengths=lengths, meta=meta)

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    def starts(self) -> Tensor:
        """Mask of each sequence's first token, bool [T]: no earlier token predicts it."""
        return self.meta.positions == 0

    def flat_cache(self, spec: LayerSpec, dtype: torch.dtype) -> LayerKV:
        """Makes a cache for one layer and one pass. Block 0 holds a sequence too: without padding
        there is no null block. States of recurrent layers are neither read nor kept."""
        a, new = attention_of(spec), partial(torch.zeros, dtype=dtype, device=self.token_ids.device)
        shape = (len(self.lengths), 0, self.meta.max_seq_len, 0)
        if a is not None:
            shape = (len(self.lengths), a.num_kv_heads, self.meta.max_seq_len, a.head_dim)
        state = None if spec.recurrent is None else LayerState(new(0))
        return LayerKV(new(shape), new(shape), state=state)


def attention_of(layer: LayerSpec) -> AttentionSpec | None:
    """The layer's attention; None if it is purely recurrent. UnsupportedModelError for latent attention, or
    if the layer reads more than its input: training and compression don't support these."""
    if isinstance(layer.streams, RecallSpec):
        raise UnsupportedModelError(
            "layers that share weights can't be trained or compressed yet", field="num_mem_blocks"
        )
    if layer.attention is None:
        return None
    if not isinstance(layer.attention, AttentionSpec):
        raise UnsupportedModelError(
            "latent attention can't be trained or compressed yet", field="kv_lora_rank"
        )
    if layer.attention.index is not None:
        raise UnsupportedModelError(
            "attention with an index can't be trained or compressed yet", field="layer_types"
        )
    if layer.attention.kv_from is not None or layer.own_input is not None:
        raise UnsupportedModelError(
            "layers that read another's keys and values, or inputs of their own, can't be trained or compressed yet",
            field="num_kv_shared_layers",
        )
    return layer.attention


def run_layer(
    layer: Layer, ops: OpSet, pending: Tensor, residual: Tensor | None, batch: SequenceBatch
) -> tuple[Tensor, Tensor | None]:
    """Runs `Layer` on whole sequences. Returns (the output not yet added, the residual)."""
    kind = pending.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else pending.dtype
    made, residual = layer(ops, pending, residual, batch.flat_cache(layer.spec, dtype), batch.meta)
    return whole(ops, made), residual


def layer_output(layer: Layer, ops: OpSet, x: Tensor, batch: SequenceBatch) -> Tensor:
    """The residual [T, E] after the layer, given the residual `x` before it."""
    pending, residual = run_layer(layer, ops, x, None, batch)
    return pending if residual is None else pending + residual


class TrainableLayer(nn.Module):
    """A layer as a torch module. Its parameters have the names of `spec.parameters` without
    `layers.N.`."""

    def __init__(
        self, spec: LayerSpec, parameters: dict[str, Tensor], ops: OpSet, tables: PositionTables
    ) -> None:
        super().__init__()
        self.spec, self.ops, self.tables = spec, ops, tables
        register(self, parameters)

    def forward(
        self, pending: Tensor, residual: Tensor | None, batch: SequenceBatch
    ) -> tuple[Tensor, Tensor | None]:
        # Rebuilt for each pass, because sharded parameters are different tensors each time.
        layer = build_layer(
            self.spec, dict[str, Tensor](self.named_parameters()), self.ops, self.tables
        )
        return run_layer(layer, self.ops, pending, residual, batch)


class WholeModel(nn.Module):
    """The decoder over whole sequences, under autograd.

    `parameters` become this module's under their names; `requires_grad` is kept. The first axis of
    inputs and outputs is T, the tokens of all sequences. With `recompute`, a block's inner
    activations are recomputed in the backward pass. Sequences have at most `max_len` tokens. `ops`:
    `AutogradOps` or a subclass (for observing, or fake quantization).
    """

    def __init__(
        self,
        spec: ModelSpec,
        parameters: Mapping[str, Tensor],
        *,
        max_len: int,
        recompute: bool = False,
        ops: AutogradOps | None = None,
    ) -> None:
        super().__init__()
        self.spec, self.recompute = spec, recompute
        self.ops = AutogradOps() if ops is None else ops
        tables = PositionTables(max_len, parameters["embed.weight"].device)
        self.layers = nn.ModuleList()
        for i, layer in enumerate(spec.layers):
            prefix = f"layers.{i}."
            own = {
                name.removeprefix(prefix): value
                for name, value in parameters.items()
                if name.startswith(prefix)
            }
            self.layers.append(TrainableLayer(layer, own, self.ops, tables))
        register(
            self,
            {name: value for name, value in parameters.items() if not name.startswith("layers.")},
        )

    def ends(self) -> Decoder:
        """Builds the decoder without layers from this module's current parameters."""
        own: dict[str, Tensor] = {}
        for part, module in self.named_children():
            if part != "layers":
                own.update(module.named_parameters(prefix=part))
        return Decoder(self.spec, own, self.ops, max_model_len=1, layers=())

    def hidden(
        self, batch: SequenceBatch, each: Callable[[int, Tensor], None] | None = None
    ) -> Tensor:
        """Hidden states [T, E] after the final norm.

        `each(i, residual)` is called before layer i, and after the last one with i = the number of
        layers.
        """
        ends = self.ends()
        h, residual = ends.embedded(batch.token_ids, batch.meta), None
        for i, block in enumerate(self.layers):
            if each is not None:
                each(i, h if residual is None else h + residual)
            if self.recompute and torch.is_grad_enabled():
                h, residual = checkpoint(block, h, residual, batch, use_reentrant=False)
            else:
                h, residual = block(h, residual, batch)
        if each is not None:
            each(len(self.layers), h if residual is None else h + residual)
        return ends.finished(h, residual)

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [N, E] → logits [N, V]."""
        return self.ends().logits(hidden)

    def forward(
        self,
        batch: SequenceBatch,
        read: Callable[[Tensor], Any] | None = None,
        each: Callable[[int, Tensor], None] | None = None,
    ) -> Any:
        """Returns the logits [T, V], or `read` of the final hidden states.

        `read` runs inside this module's call, where sharded parameters are complete. Return tensors
        that need gradients directly or in a tuple. `each` is as in `hidden`.
        """
        hidden = self.hidden(batch, each)
        return self.logits(hidden) if read is None else read(hidden)


def register(module: nn.Module, parameters: dict[str, Tensor]) -> None:
    """Registers `parameters` with the module. Each dot in a name makes a submodule. Plain tensors
    are wrapped without a copy."""
    for name, value in parameters.items():
        *path, last = name.split(".")
        at = module
        for part in path:
            if part not in at._modules:
                at.add_module(part, nn.Module())
            at = at.get_submodule(part)
        at.register_parameter(
            last, value if isinstance(value, nn.Parameter) else nn.Parameter(value)
        )
