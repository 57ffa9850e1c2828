"""Computes a model's hidden states at each token of a text, as in the engine, for the training of draft heads."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.config import EngineArgs
from slipstream.kernels.metadata import AttentionMetadata
from slipstream.kernels.states import state_metadata
from slipstream.model.layers.taps import JoinedTap
from slipstream.worker.forward.state_cache import StateCache
from slipstream.worker.start.loading import load_runner
from slipstream.worker.torch_loading import TorchLoaded


class Collected(StateCache):
    """Stores the hidden states of the last step."""

    last: Tensor

    def write(self, states: Tensor, meta: AttentionMetadata) -> None:
        self.last = states


class TextStates:
    """Hidden states of sequences of up to `context` tokens, computed up to `step_tokens` (in whole
    blocks) at once. `layers`: indices of layers whose input states are returned too."""

    def __init__(
        self, args: EngineArgs, layers: Sequence[int], *, context: int, step_tokens: int
    ) -> None:
        args = dataclasses.replace(
            args, max_model_len=context, max_num_seqs=1, max_num_batched_tokens=None
        )
        self.description, loaded, _ = load_runner(args, by_torch=True)
        assert isinstance(loaded, TorchLoaded)
        self.forwards, self.block_size = loaded.forwards, loaded.config.cache.block_size
        decoder = self.forwards.decoder
        self.spec, self.device = decoder.spec, decoder.device
        self._kept = Collected(loaded.platform.values)
        self.forwards.keep_states(self._kept, JoinedTap(tuple(layers)) if layers else None)
        self.kv = loaded.make_cache(
            len(self.spec.cache_groups) * (-(-step_tokens // self.block_size) + 1)
        )

    @torch.inference_mode()
    def of(self, sequences: Sequence[Sequence[int]]) -> tuple[list[Tensor], list[Tensor]]:
        """(final states [L, E], inputs of each of `layers`, concatenated; without layers the final states) for each
        sequence."""
        tokens = torch.tensor(
            [t for s in sequences for t in s], dtype=torch.int32, device=self.device
        )
        lengths = [len(s) for s in sequences]
        hidden = self.forwards.hidden(tokens, self.kv, self._meta(lengths))
        return list(hidden.split(lengths)), list(self._kept.last.split(lengths))

    def _meta(self, lengths: Sequence[int]) -> AttentionMetadata:
        """Attention metadata of whole sequences, each in blocks of its own in every group, from block 1 onwards."""
        size, groups = self.block_size, len(self.spec.cache_groups)
        counts = torch.tensor([-(-n // size) for n in lengths])
        first = counts.cumsum(0) - counts
        blocks = (first[:, None] + torch.arange(int(counts.max()))).clamp(max=int(counts.sum()) - 1)
        positions = torch.cat([torch.arange(n) for n in lengths])
        rows = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        starts = torch.tensor([0, *lengths]).cumsum(0)

        def of_group(group: int) -> tuple[Tensor, Tensor]:
            own = (blocks * groups + 1 + group) * self.spec.block_scales[group]
            slots = own[rows, positions // size] * size + positions % size
            return own.int().to(self.device), slots.to(self.device)

        table, slots = of_group(0)
        meta = AttentionMetadata(
            query_start_loc=starts.int().to(self.device),
            seq_lens=torch.tensor(lengths, dtype=torch.int32, device=self.device),
            block_table=table,
            positions=positions.to(self.device),
            slot_mapping=slots,
            num_decodes=0,
            max_query_len=max(lengths),
            max_seq_len=max(lengths),
            from_start=True,
            states=state_metadata(
                starts.tolist(), lambda array: torch.from_numpy(array).to(self.device)
            ),
        )
        others = (of_group(g) for g in range(1, groups))
        return meta.with_groups(
            *(dataclasses.replace(meta, block_table=t, slot_mapping=s) for t, s in others)
        )
