"""Draft models and draft heads on a CPU without torch.

These are `DraftModel` and the drafters of `head_drafter`, with NumPy arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream.config import EngineConfig
from slipstream.kernels.cpu.host_ops import HostOps
from slipstream.kernels.metadata import LayerKV, cache_tensors
from slipstream.model.decoder import Decoder
from slipstream.model.draft_heads import LayeredHead
from slipstream.model.host_head import load_host_head
from slipstream.model.host_model import load_host_model
from slipstream.model.step_program import compile_step
from slipstream.spec.description import ModelDescription
from slipstream.spec.draft_heads import HeadDescription
from slipstream.spec.drafts import check_draft_model
from slipstream.spec.model import LayerSpec, ModelSpec
from slipstream.spec.reason import NotCovered, Reason
from slipstream.spec.scheme import SCHEMES
from slipstream.types import ScheduledRequest, StepPlan
from slipstream.worker.draft.drafter import Chain
from slipstream.worker.draft.head_drafter import (
    HeadBlock,
    HeadChain,
    HeadDrafter,
    MedusaDrafter,
    Sample,
)
from slipstream.worker.draft.host_chain import check_num_drafts, head_scheme
from slipstream.worker.input_batch import gather
from slipstream.worker.rows import RowTable
from slipstream.worker.sampling.sampler import sampling_tensors

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]


class HostMemory:
    """`DraftMemory` with NumPy arrays. Unwritten pages take no memory."""

    def __init__(self, dtype: str) -> None:
        self.dtype = np.dtype(dtype)
        self.itemsize = self.dtype.itemsize

    def zeros(self, shape: tuple[int, ...]) -> Any:
        return np.zeros(shape, self.dtype)

    def lowest(self, shape: tuple[int, ...]) -> Any:
        return np.full(shape, -np.inf, np.float32)

    def layer(self, layer: LayerSpec, num_blocks: int, block_size: int) -> LayerKV:
        return LayerKV(*cache_tensors(layer.attention, num_blocks, block_size, self.zeros))

    def block_rows(self, arrays: Sequence[Any]) -> Sequence[Any]:
        return arrays

    def copy_blocks(self, rows: Sequence[Any], source: Any, target: Any) -> None:
        for array in rows:
            array[target] = array[source]


class HostDraftModel(Chain):
    """`draft_model.DraftModel` on a CPU.

    NotCovered if the program lacks something that the model needs.
    """

    def __init__(
        self,
        config: EngineConfig,
        description: ModelDescription,
        target: ModelSpec,
        *,
        ops: HostOps,
        sample: Sample,
        weights_folder: Path | None,
    ) -> None:
        super().__init__(config, HostMemory(config.model.dtype))
        check_draft_model(description.spec, target, config.model.max_model_len)
        assert config.speculation is not None
        quantization = config.speculation.quantization
        self.model = load_host_model(
            description,
            ops=ops,
            dtype=config.model.dtype,
            max_model_len=config.model.max_model_len,
            load_format=config.model.load_format if description.format != "gguf" else "auto",
            seed=config.model.seed,
            scheme=SCHEMES[quantization] if quantization is not None else None,
            weights_folder=weights_folder,
        )
        program = compile_step(self.model.decoder, ops.pool)
        if isinstance(program, Reason):
            raise NotCovered(program)
        self.program, self._sample = program, sample
        self.weights_bytes, self.layers = self.model.weights_bytes, self.model.spec.layers

    @property
    def token_bytes(self) -> int:
        return self.program.token_bytes

    def step(
        self, shares: Sequence[ScheduledRequest], rows: RowTable, *, follows: bool = False
    ) -> None:
        given = gather(rows, StepPlan(0, tuple(shares)))
        hidden, _ = self.program.forward(given.token_ids, self.kv, given.meta)
        sampled: Any = given.sampled
        if not sampled.requests:
            return
        index: Any = given.sample_index
        own = hidden if index is None else hidden[index]
        tokens = self.program.greedy(own) if rows.is_greedy(sampled.names) else None
        if tokens is None:
            tokens = self._sample(self.program.logits(own), sampling_tensors(rows, sampled))
        rows.write(sampled.rows, sampled.positions, tokens)  # type: ignore[arg-type]


class HostStates:
    """`forward.StateCache` with NumPy arrays."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.kept: Array | None = None  # [B · block_size, E]

    def write(self, states: Floats, slots: npt.NDArray[np.int64]) -> None:
        if self.kept is not None:
            self.kept[slots] = states

    def read(self, meta: Any) -> Floats:
        return self.read_array(meta.slot_mapping)

    def read_array(self, slots: npt.NDArray[np.int64]) -> Floats:
        """Read hidden states, float32 [T, E]."""
        assert self.kept is not None
        return self.kept[slots].astype(np.float32)


def load_host_drafter(
    config: EngineConfig,
    description: HeadDescription,
    decoder: Decoder,
    ops: HostOps,
    sample: Sample,
) -> HeadDrafter:
    """Load a draft head, like `draft_head.load_drafter`.

    NotCovered if the head does not compile to a program.
    """
    check_num_drafts(config, description)
    loaded = load_host_head(
        description,
        decoder,
        dtype=config.model.dtype,
        max_model_len=config.model.max_model_len,
        scheme=head_scheme(config, description, ops.eight_bits),
        load_format="dummy" if config.model.load_format == "dummy" else "auto",
        seed=config.model.seed,
    )
    head, memory, states = (
        loaded.head,
        HostMemory(config.model.dtype),
        HostStates(config.cache.block_size),
    )
    if not isinstance(head, LayeredHead):
        return MedusaDrafter(config, loaded, memory, states, sample)
    if isinstance(head.program, Reason):
        raise NotCovered(head.program)
    if head.spec.mask_token is not None:
        return HeadBlock(config, loaded, memory, states, sample)
    ends = np.zeros((config.scheduling.max_num_seqs + 1, head.spec.hidden_size), np.float32)
    return HeadChain(config, loaded, memory, states, sample, ends)
