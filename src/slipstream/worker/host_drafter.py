"""Draft models and draft heads on a CPU without torch: `DraftModel` and `draft_head`'s drafters, of NumPy's arrays."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream.config import EngineConfig
from slipstream.kernels.host_ops import HostOps
from slipstream.kernels.metadata import LayerKV, SamplingTensors, cache_tensors
from slipstream.kernels.programs import LinearProgram
from slipstream.model.decoder import Decoder
from slipstream.model.draft_heads import ChainHead, MedusaHead
from slipstream.model.host_head import HostHead, load_host_head
from slipstream.model.host_model import load_host_model
from slipstream.model.step_program import compile_step
from slipstream.spec.description import ModelDescription
from slipstream.spec.draft_heads import HeadDescription
from slipstream.spec.drafts import check_draft_model
from slipstream.spec.model import LayerSpec, ModelSpec
from slipstream.spec.reason import NotCovered, Reason
from slipstream.spec.scheme import SCHEMES
from slipstream.types import ScheduledRequest, StepPlan
from slipstream.worker.drafter import Chain, Drafter
from slipstream.worker.host_chain import HostChain, check_num_drafts, head_scheme
from slipstream.worker.input_batch import SampledRows, gather, gather_pairs
from slipstream.worker.rows import RowTable
from slipstream.worker.sampler import sampling_tensors

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]

Sample = Callable[[Floats, SamplingTensors], npt.NDArray[np.int64]]
"""`OpSet.sample`"""


class HostMemory:
    """`DraftMemory`, of arrays. Unwritten pages take no memory."""

    def __init__(self, dtype: str) -> None:
        self.dtype = np.dtype(dtype)
        self.itemsize = self.dtype.itemsize

    def zeros(self, shape: tuple[int, ...]) -> Any:
        return np.zeros(shape, self.dtype)

    def layer(self, layer: LayerSpec, num_blocks: int, block_size: int) -> LayerKV:
        return LayerKV(*cache_tensors(layer.attention, num_blocks, block_size, self.zeros))

    def copy_blocks(self, layer: LayerKV, source: Any, target: Any) -> None:
        cache: Any
        for cache in (layer.k,) if layer.latent else (layer.k, layer.v):
            cache[target] = cache[source]


class HostDraftModel(Chain):
    """`draft_model.DraftModel`. NotCovered if the program lacks something for it."""

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

    def step(self, shares: Sequence[ScheduledRequest], rows: RowTable, *, follows: bool = False) -> None:
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


class HostHeadDrafter(Drafter):
    """The part that all heads share: `draft_head.HeadDrafter`."""

    def __init__(self, config: EngineConfig, loaded: HostHead, sample: Sample) -> None:
        super().__init__(config, HostMemory(config.model.dtype))
        self.target_ids, self.weights_bytes, self._sample = loaded.target_ids, loaded.weights_bytes, sample
        self.vocab_size, self.hidden_size = loaded.head.spec.vocab_size, loaded.head.spec.hidden_size
        self.states = HostStates(self.block_size)

    @property
    def block_bytes(self) -> int:
        return super().block_bytes + self.hidden_size * self.memory.itemsize * self.block_size

    def allocate(self, num_blocks: int) -> None:
        super().allocate(num_blocks)
        self.states.array = self.memory.zeros((num_blocks * self.block_size, self.hidden_size))

    def release(self) -> None:
        super().release()
        self.states.array = None

    def copy_blocks(self, source: Any, target: Any) -> None:
        super().copy_blocks(source, target)
        assert self.states.array is not None
        blocks = self.states.array.reshape(-1, self.block_size, self.hidden_size)
        blocks[target] = blocks[source]

    @abstractmethod
    def place_logits(self, hidden: Floats, place: int) -> Floats:
        """States [N, E] → [N, the head's vocabulary]"""

    def best(self, hidden: Floats, place: int) -> npt.NDArray[np.int64]:
        """The head's tokens [N] whose logits are largest."""
        found: npt.NDArray[np.int64] = self.place_logits(hidden, place).argmax(-1)
        return found

    def write(self, hidden: Floats, sampled: SampledRows, rows: RowTable, place: int = 0) -> None:
        """Draw a token of each of `sampled`, and put it where it belongs."""
        if rows.is_greedy(sampled.names):
            tokens = self.best(hidden, place)
            tokens = tokens if self.target_ids is None else self.target_ids[tokens]
        else:
            logits = self.place_logits(hidden, place)
            if self.target_ids is not None:
                wide = np.full((len(logits), self.vocab_size), -np.inf, np.float32)
                wide[:, self.target_ids] = logits
                logits = wide
            tokens = self._sample(logits, sampling_tensors(rows, sampled))
        rows.write(sampled.rows, sampled.positions, tokens)  # type: ignore[arg-type]


class HostStates:
    """`forward.StateCache`"""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.array: Array | None = None  # [B · block_size, E]

    def write(self, states: Floats, slots: npt.NDArray[np.int64]) -> None:
        if self.array is not None:
            self.array[slots] = states

    def read_array(self, slots: npt.NDArray[np.int64]) -> Floats:
        """float32 [T, E]"""
        assert self.array is not None
        return self.array[slots].astype(np.float32)


class HostChainDrafter(Chain, HostHeadDrafter):
    """EAGLE-3 and MTP: `draft_head.ChainDrafter`. NotCovered if a pass is no program."""

    first, keeps_drafts = 1, False

    def __init__(self, config: EngineConfig, loaded: HostHead, sample: Sample) -> None:
        assert isinstance(loaded.head, ChainHead)
        if isinstance(loaded.head.program, Reason):
            raise NotCovered(loaded.head.program)
        super().__init__(config, loaded, sample)
        self.head, self.layers = loaded.head, (loaded.head.spec.layer,)
        self.ends = np.zeros((config.scheduling.max_num_seqs + 1, self.hidden_size), np.float32)
        self.host = HostChain(self) if self.head.is_compiled else None

    @property
    def token_bytes(self) -> int:
        return self.head.token_bytes

    def draft(self, drafted: Sequence[ScheduledRequest], rows: RowTable) -> None:
        if self.host is not None and self.host.covers(drafted, rows):
            self.host.run(drafted, rows)
        else:
            super().draft(drafted, rows)
        for s in drafted:
            rows.rows[s.request_id].num_drafted = s.num_computed_tokens + 1

    def step(self, shares: Sequence[ScheduledRequest], rows: RowTable, *, follows: bool = False) -> None:
        given: Any = gather_pairs(rows, shares)
        sampled, index = given.sampled, given.sample_index
        states = self.ends[sampled.rows] if follows else self.states.read_array(given.meta.slot_mapping)
        hidden, following = self.head.run(given.token_ids, states, self.kv, given.meta)
        if not sampled.requests:
            return
        if index is not None:
            hidden, following = hidden[index], following[index]
        self.ends[sampled.rows] = following
        self.write(hidden, sampled, rows)

    def place_logits(self, hidden: Floats, place: int) -> Floats:
        return self.head.logits_of(hidden)

    def best(self, hidden: Floats, place: int) -> npt.NDArray[np.int64]:
        return self.head.argmax(hidden) if self.head.is_compiled else super().best(hidden, place)


class HostMedusaDrafter(HostHeadDrafter):
    """`draft_head.MedusaDrafter`"""

    layers = ()

    def __init__(self, config: EngineConfig, loaded: HostHead, sample: Sample, ops: HostOps) -> None:
        assert isinstance(loaded.head, MedusaHead)
        super().__init__(config, loaded, sample)
        self.head, made = loaded.head, dict[int, LinearProgram]()

        def product(w: Any) -> LinearProgram:
            return made.setdefault(id(w), LinearProgram(ops.pool, w))  # the model's head is every place's

        self._blocks = [[product(w) for w in place] for place in self.head.blocks]
        self._heads = [product(w) for w in self.head.heads]

    def place_logits(self, hidden: Floats, place: int) -> Floats:
        x = hidden
        for block in self._blocks[place]:
            y = block(x)
            x = np.asarray(x + y / (np.float32(1.0) + np.exp(-y)), np.float32)  # SiLU
        return self._heads[place](x)

    def draft(self, drafted: Sequence[ScheduledRequest], rows: RowTable) -> None:
        last = [ScheduledRequest(s.request_id, s.num_computed_tokens, 1, 1) for s in drafted]
        slots: Any = gather_pairs(rows, last).meta.slot_mapping
        states = self.states.read_array(slots)
        for place in range(max(len(s.drafts) for s in drafted)):
            which = [i for i, s in enumerate(drafted) if len(s.drafts) > place]
            shares = [
                ScheduledRequest(drafted[i].request_id, drafted[i].num_computed_tokens + place, 1, 1) for i in which
            ]
            sampled = gather_pairs(rows, shares).sampled
            assert sampled is not None
            self.write(states[which], sampled, rows, place)


def load_host_drafter(
    config: EngineConfig, description: HeadDescription, decoder: Decoder, ops: HostOps, sample: Sample
) -> HostChainDrafter | HostMedusaDrafter:
    """`draft_head.load_drafter`. NotCovered if the head is no program."""
    check_num_drafts(config, description)
    loaded = load_host_head(
        description,
        decoder,
        dtype=config.model.dtype,
        max_model_len=config.model.max_model_len,
        scheme=head_scheme(config, description, "int8" if ops.name == "cpu" else None),
        load_format="dummy" if config.model.load_format == "dummy" else "auto",
        seed=config.model.seed,
    )
    if isinstance(loaded.head, ChainHead):
        return HostChainDrafter(config, loaded, sample)
    return HostMedusaDrafter(config, loaded, sample, ops)
