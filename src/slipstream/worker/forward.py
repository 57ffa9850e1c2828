"""Ways to run the model over a step's tokens, and the table that chooses one.

    eager       the decoder's loop over its layers, op by op; covers every step
    program     the whole step as one program of the CPU's C++ kernels
    one-token   all layers of a step of one token as one GPU kernel
    graphs      a captured CUDA graph of any of these (`worker/graphs.py`)

Each is a `Forward`: `covers(batch)` says why it can't take a batch, or None, and `run(batch)` computes it. `Forwards` holds
them in the order in which they are asked. A way that this model rules out altogether is not in the table: its reason is in
`Forwards.refused`, and is logged once.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from slipstream.kernels.metadata import AttentionMetadata, LayerKV
from slipstream.kernels.native import Running
from slipstream.model.decoder import Decoder
from slipstream.model.layers import Tap
from slipstream.model.one_token import OneTokenKernel, compile_one_token
from slipstream.model.program import CpuProgram, compile_program
from slipstream.spec.reason import Reason
from slipstream.types import StepPlan
from slipstream.worker.input_batch import GatheredInputs, RowTable, SampledRows, gather

_logger = logging.getLogger("slipstream.engine")

NO_PLAN = Reason("the tokens are not a scheduled step")


class InputBatch:
    """The input of one forward: a scheduled step whose sequences have their rows, or plain tokens.

    The tensors of a scheduled step are gathered when they are first asked for, since a graph gathers its own.
    """

    def __init__(
        self, kv: Sequence[LayerKV], plan: StepPlan | None, table: RowTable | None, gathered: GatheredInputs | None = None
    ) -> None:
        self.kv, self.plan, self.table = kv, plan, table
        if gathered is not None:
            self.gathered = gathered

    @classmethod
    def of(cls, token_ids: Tensor, kv: Sequence[LayerKV], meta: AttentionMetadata) -> InputBatch:
        """Tokens [T] that belong to no plan: a canary's, a measurement's, those of a graph that is being captured."""
        return cls(kv, None, None, GatheredInputs(token_ids=token_ids, meta=meta, sample_index=None, sampled=None))

    @cached_property
    def gathered(self) -> GatheredInputs:
        assert self.plan is not None
        assert self.table is not None
        return gather(self.table, self.plan)

    @property
    def token_ids(self) -> Tensor:
        return self.gathered.token_ids

    @property
    def meta(self) -> AttentionMetadata:
        return self.gathered.meta

    @cached_property
    def num_tokens(self) -> int:
        return len(self.token_ids) if self.plan is None else self.plan.num_tokens

    @cached_property
    def is_greedy(self) -> bool:
        """Of the logits nothing is wanted but where they are largest."""
        assert self.plan is not None
        assert self.table is not None
        return self.table.is_greedy([s.request_id for s in self.plan.scheduled if s.num_sampled])

    @property
    def has_grammar(self) -> bool:
        """Some request samples by a grammar."""
        assert self.plan is not None
        assert self.table is not None
        return self.table.wanted("grammar", [s.request_id for s in self.plan.scheduled if s.num_sampled])


class StateCache:
    """States of tokens that a draft head reads, in the blocks of their requests' first group. They are kept while `tensor`
    [B · block_size, E] is there."""

    def __init__(self, block_size: int, hidden_size: int, dtype: torch.dtype) -> None:
        self.block_size, self.hidden_size, self.dtype = block_size, hidden_size, dtype
        self.tensor: Tensor | None = None

    def write(self, states: Tensor, meta: AttentionMetadata) -> None:
        """Of a step's tokens [T, E]."""
        if self.tensor is not None:
            self.tensor.index_copy_(0, meta.slot_mapping, states.to(self.dtype))

    def read(self, meta: AttentionMetadata) -> Tensor:
        """[T, E]"""
        assert self.tensor is not None
        return self.tensor[meta.slot_mapping]

    def copy_blocks(self, source: Tensor, target: Tensor) -> None:
        assert self.tensor is not None
        blocks = self.tensor.unflatten(0, (-1, self.block_size))
        blocks[target] = blocks[source]


@dataclass(slots=True)
class Output:
    """What a forward gives. `hidden` [T or more, E] has the plan's tokens in its order: token i in row `row(i)`."""

    forward: Forward
    hidden: Tensor | None  # None: there are `tokens` instead
    sampled: SampledRows | None = None  # None: the batch has no plan
    sample_index: Tensor | None = None  # int64 [N]: which of `hidden` are sampled; None: all, as many as `sampled` has
    tokens: Tensor | None = None  # int64 [N], where the forward has sampled greedily itself
    running: Running | None = None  # the step, while it is under way on the CPU's threads
    states: tuple[Tensor, AttentionMetadata] | None = None  # of that step: what its `StateCache` is to be given when it is done
    num_decodes: int = 0  # behind so many tokens `hidden` has
    padding: int = 0  # so many rows of no token

    def row(self, token: int) -> int:
        return token + (self.padding if token >= self.num_decodes else 0)


class Forward(ABC):
    name: str

    @abstractmethod
    def covers(self, batch: InputBatch) -> Reason | None:
        """Why this way can't run `batch`; None if it can."""

    @abstractmethod
    def run(self, batch: InputBatch) -> Output: ...

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [N, E] of this way's `run` → [N, V]"""

    def greedy(self, hidden: Tensor) -> Tensor | None:
        """[N, E] → int64 [N], the tokens whose logits are largest (of equals the first), without writing the logits. None: this
        way makes logits."""
        return None


class Eager(Forward):
    name = "eager"

    def __init__(self, decoder: Decoder, states: StateCache | None = None) -> None:
        """`states`: where a draft head's states go."""
        self.decoder, self.states = decoder, states

    def covers(self, batch: InputBatch) -> Reason | None:
        return None

    def run(self, batch: InputBatch) -> Output:
        given = batch.gathered
        return Output(self, self._hidden(given.token_ids, batch.kv, given.meta), given.sampled, given.sample_index)

    def _hidden(self, token_ids: Tensor, kv: Sequence[LayerKV], meta: AttentionMetadata) -> Tensor:
        if self.states is None:
            return self.decoder.forward(token_ids, kv, meta)
        return self._keep(*self.decoder.tapped(token_ids, kv, meta), meta)

    def _keep(self, hidden: Tensor, states: Tensor, meta: AttentionMetadata) -> Tensor:
        if self.states is not None:
            self.states.write(states, meta)
        return hidden

    def encode(self, token_ids: Tensor, kv: Sequence[LayerKV], meta: AttentionMetadata) -> None:
        """The encoder of an encoder-decoder over whole prompts [T]: what the decoder's layers read of them goes into the
        cache."""
        self.decoder.encode(token_ids, kv, meta)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.decoder.logits(hidden)


class OneToken(Eager):
    name = "one-token"

    def __init__(self, decoder: Decoder, kernel: OneTokenKernel, states: StateCache | None = None) -> None:
        super().__init__(decoder, states)
        self.kernel = kernel

    def covers(self, batch: InputBatch) -> Reason | None:
        return None if batch.num_tokens == 1 else Reason("the step has more than one token")

    def _hidden(self, token_ids: Tensor, kv: Sequence[LayerKV], meta: AttentionMetadata) -> Tensor:
        hidden = self.kernel.forward(token_ids, kv, meta)
        return self._keep(hidden, hidden, meta)


class Program(Eager):
    name = "program"

    def __init__(self, decoder: Decoder, program: CpuProgram, states: StateCache | None = None) -> None:
        super().__init__(decoder, states)
        self.program = program

    def run(self, batch: InputBatch) -> Output:
        """A step of nothing but greedy decodes is only begun: `Output.running` is waited for before the next."""
        given = batch.gathered
        if batch.plan is not None and given.sample_index is None and batch.is_greedy:
            begun = self.program.begin_greedy(given.token_ids, batch.kv, given.meta)
            if begun is not None:
                tokens, states, running = begun
                kept = None if self.states is None else (states, given.meta)
                return Output(self, None, given.sampled, tokens=tokens, running=running, states=kept)
        return super().run(batch)

    def _hidden(self, token_ids: Tensor, kv: Sequence[LayerKV], meta: AttentionMetadata) -> Tensor:
        return self._keep(*self.program.tapped(token_ids, kv, meta), meta)

    def encode(self, token_ids: Tensor, kv: Sequence[LayerKV], meta: AttentionMetadata) -> None:
        self.program.encode(token_ids, kv, meta)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.program.logits(hidden)

    def greedy(self, hidden: Tensor) -> Tensor | None:
        return self.program.greedy(hidden)


class Forwards:
    """The table: ways to run the model, the most special first. The last one covers every batch."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.refused: dict[str, Reason] = {}
        self.paths: list[Forward] = []
        self.base: Eager = Eager(decoder)
        self.states: StateCache | None = None
        self._build()

    def keep_states(self, states: StateCache, tap: Tap | None) -> None:
        """From now on each step writes what `tap` reads between the layers, or without one its hidden states."""
        self.states, self.decoder.tap = states, tap
        self._build()

    def _build(self) -> None:
        """Ways that run given tokens; graphs are added by `add` once there is a cache."""
        self.base = Eager(self.decoder, self.states)
        self.paths = [self.base]
        if self.decoder.device.type == "cpu":
            program = compile_program(self.decoder)
            if isinstance(program, Reason):
                self._refuse(Program.name, program)
            else:
                self.base = Program(self.decoder, program, self.states)
                self.paths = [self.base]
        else:
            kernel = compile_one_token(self.decoder)
            if isinstance(kernel, Reason):
                self._refuse(OneToken.name, kernel)
            else:
                self.paths = [OneToken(self.decoder, kernel, self.states), self.base]

    def _refuse(self, name: str, reason: Reason) -> None:
        if name not in self.refused and reason.notable:
            _logger.warning("steps do not run the fast way, %s: %s", name, reason)
        self.refused[name] = reason

    def add(self, path: Forward) -> None:
        """Ask `path` before all others."""
        self.paths.insert(0, path)

    def run(self, batch: InputBatch) -> Output:
        path = next(path for path in self.paths if path.covers(batch) is None)
        return path.run(batch)

    def hidden(self, token_ids: Tensor, kv: Sequence[LayerKV], meta: AttentionMetadata) -> Tensor:
        """Tokens [T] → hidden states [T, E] after the final norm; their keys and values are in the cache."""
        hidden = self.run(InputBatch.of(token_ids, kv, meta)).hidden
        assert hidden is not None
        return hidden

    def encode(self, token_ids: Tensor, kv: Sequence[LayerKV], meta: AttentionMetadata) -> None:
        self.base.encode(token_ids, kv, meta)

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, E] of `hidden` → [N, V]"""
        return self.base.logits(hidden)

    def count_experts(self) -> dict[int, Tensor]:
        """From now on each step counts its tokens by expert: int64 [X] on the device for each layer that has experts."""
        counts = self.decoder.count_experts()
        if counts:
            self._build()  # the other ways are told where to count
        return counts

    @property
    def token_bytes(self) -> int | None:
        """Bytes that a step takes for each of its tokens; None where only a measurement tells."""
        return self.base.program.token_bytes if isinstance(self.base, Program) else None
