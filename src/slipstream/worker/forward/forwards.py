"""Ways to run the model over a step's tokens, and the table that chooses one.

    eager       the decoder's loop over its layers, op by op; covers every step without adapters
    adapters    the same loop, with the adapters of the step's requests
    images      the same loop, with image embeddings among those of tokens; asked first
    program     the whole step as one program of the CPU's C++ kernels
    one-token   all layers of a step of one token as one GPU kernel
    graphs      a captured CUDA graph of any of these (`worker/graphs/step_graphs.py`)

Each is a `Forward`: `covers(batch)` returns the reason why it can't take a batch, or None, and
`run(batch)` computes it. `Forwards` holds them in the order in which they are asked. A path that
this model rules out altogether is not in the table. Its reason is in `Forwards.refused`, and is
logged once.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slipstream.kernels.adapters import AdapterOps, LoRATokens, tokens_of
from slipstream.kernels.arrays import to_array
from slipstream.kernels.cpu.native import RunningStep
from slipstream.kernels.metadata import AttentionMetadata, LayerKV
from slipstream.model.decoder import Decoder
from slipstream.model.layers import AnyTap
from slipstream.model.one_token import OneTokenKernel, compile_one_token
from slipstream.model.program import CpuProgram, compile_program
from slipstream.spec.reason import Reason
from slipstream.types import StepPlan, StepShape
from slipstream.worker.forward.images import ImageEncoder, ImageOps, step_images
from slipstream.worker.input_batch import GatheredInputs, SampledRows, gather
from slipstream.worker.packed_tables import upload
from slipstream.worker.rows import RowTable
from slipstream.worker.step_shape import shape_of

if TYPE_CHECKING:
    from slipstream.kernels.ops import OpSet
    from slipstream.worker.adapters import Adapters

_logger = logging.getLogger("slipstream.engine")

NO_IMAGES = Reason("no placeholder of a picture is in the step")
NO_PLAN = Reason("the tokens are not a scheduled step")
HAS_ADAPTERS = Reason("a request of the step has an adapter")


class InputBatch:
    """Input of one forward: a scheduled step whose sequences have rows, or plain tokens.

    The tensors of a scheduled step are gathered at first use, because a graph gathers its own.
    """

    def __init__(
        self,
        kv: Sequence[LayerKV],
        plan: StepPlan | None,
        table: RowTable | None,
        gathered: GatheredInputs | None = None,
        *,
        adapted: bool = True,
    ) -> None:
        """If `adapted` is False, requests' adapters are ignored (for a draft model)."""
        self.kv, self.plan, self.table, self._adapted = kv, plan, table, adapted
        if gathered is not None:
            self.gathered = gathered

    @classmethod
    def of(cls, token_ids: Tensor, kv: Sequence[LayerKV], meta: AttentionMetadata) -> InputBatch:
        """Make a batch of tokens [T] without a plan: of a canary, a measurement or a capture."""
        return cls(
            kv,
            None,
            None,
            GatheredInputs(token_ids=token_ids, meta=meta, sample_index=None, sampled=None),
        )

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
    def shape(self) -> StepShape:
        """Shape of a scheduled step; the ranks' largest where ranks have requests of their own."""
        assert self.plan is not None
        return self.plan.largest or shape_of(self.plan.scheduled)

    @cached_property
    def is_greedy(self) -> bool:
        """True if the requests want only the index of the largest logit."""
        assert self.plan is not None
        assert self.table is not None
        return self.table.is_greedy([s.request_id for s in self.plan.scheduled if s.num_sampled])

    @cached_property
    def has_adapters(self) -> bool:
        """True if some request has an adapter."""
        if (
            self.plan is None
            or self.table is None
            or not self._adapted
            or not self.table.wanting["adapter"]
        ):
            return False
        return self.table.wanted("adapter", [s.request_id for s in self.plan.scheduled])

    @cached_property
    def has_images(self) -> bool:
        """True if some request has image placeholders in this step."""
        if self.plan is None or self.table is None or not self.table.wanting["images"]:
            return False
        wanting, rows = self.table.wanting["images"], self.table.rows
        return any(
            rows[s.request_id].needs_images(s)
            for s in self.plan.scheduled
            if s.request_id in wanting
        )

    @property
    def has_grammar(self) -> bool:
        """True if a request samples with a grammar."""
        assert self.plan is not None
        assert self.table is not None
        return self.table.wanted(
            "grammar", [s.request_id for s in self.plan.scheduled if s.num_sampled]
        )


class StateCache:
    """Hidden states that a draft head reads, in the blocks of the requests' first group.

    They are kept only if `kept` [B · block_size, E] is set.
    """

    def __init__(self, block_size: int, hidden_size: int, dtype: torch.dtype) -> None:
        self.block_size, self.hidden_size, self.dtype = block_size, hidden_size, dtype
        self.kept: Tensor | None = None

    def write(self, states: Tensor, meta: AttentionMetadata) -> None:
        """Keep the states [T, E] of a step's tokens."""
        if self.kept is not None:
            self.kept.index_copy_(0, meta.slot_mapping, states.to(self.dtype))

    def read(self, meta: AttentionMetadata) -> Tensor:
        """States [T, E] of a step's tokens."""
        assert self.kept is not None
        return self.kept[meta.slot_mapping]

    def read_array(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """States as a float32 array [T, E], on a CPU."""
        assert self.kept is not None
        return to_array(self.kept)[slots].astype(np.float32)


@dataclass(slots=True)
class Output:
    """Result of a forward.

    Token i of the plan is in row `row(i)` of `hidden` [T or more, E]: after `num_decodes` rows
    there are `padding` rows without tokens.
    """

    forward: Forward
    hidden: Tensor | None  # None if there are `tokens` instead
    sampled: SampledRows | None = None  # None if the batch has no plan
    # rows of `hidden` that are sampled, int32 or int64 [N]; None: all
    sample_index: Tensor | None = None
    # int64 [N], if the forward has drawn them itself; already in the rows, unless `running`
    tokens: Tensor | None = None
    running: RunningStep | None = None  # the step, if the CPU's threads still compute it
    # states to be written to the `StateCache` when the step is done
    states: tuple[Tensor, AttentionMetadata] | None = None
    num_decodes: int = 0
    padding: int = 0

    @property
    def sampled_states(self) -> Tensor:
        """Sampled rows of `hidden`, [N, E]."""
        assert self.hidden is not None
        return (
            self.hidden
            if self.sample_index is None
            else self.hidden.index_select(0, self.sample_index)
        )

    def row(self, token: int) -> int:
        return token + (self.padding if token >= self.num_decodes else 0)


class Forward(ABC):
    name: str
    num_cold = 0
    """Number of steps that captured a graph, or ran op by op because theirs is not captured yet."""

    @abstractmethod
    def covers(self, batch: InputBatch) -> Reason | None:
        """Reason why this path can't run `batch`; None if it can. No side effects."""

    def passed_over(self, batch: InputBatch, reason: Reason) -> None:  # noqa: B027
        """Notification that `Forwards` ran `batch` another way, because `covers` gave this reason."""

    @abstractmethod
    def run(self, batch: InputBatch) -> Output: ...

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [N, V] of hidden states [N, E] from this path's `run`."""

    def greedy(self, hidden: Tensor) -> Tensor | None:
        """Tokens with the largest logits, int64 [N], from hidden states [N, E].

        The logits are not written to memory. Of equal logits the first wins. None if this path must
        write logits.
        """
        return None


class Eager(Forward):
    name = "eager"

    def __init__(self, decoder: Decoder, states: StateCache | None = None) -> None:
        """`states` is where a draft head's states go."""
        self.decoder, self.states = decoder, states

    def covers(self, batch: InputBatch) -> Reason | None:
        return HAS_ADAPTERS if batch.has_adapters else None

    def run(self, batch: InputBatch) -> Output:
        given = batch.gathered
        return Output(
            self,
            self._hidden(given.token_ids, batch.kv, given.meta),
            given.sampled,
            given.sample_index,
        )

    def _hidden(self, token_ids: Tensor, kv: Sequence[LayerKV], meta: AttentionMetadata) -> Tensor:
        if self.states is None:
            return self.decoder.forward(token_ids, kv, meta)
        return self._keep(*self.decoder.tapped(token_ids, kv, meta), meta)

    def _keep(self, hidden: Tensor, states: Tensor, meta: AttentionMetadata) -> Tensor:
        if self.states is not None:
            self.states.write(states, meta)
        return hidden

    def encode(self, token_ids: Tensor, kv: Sequence[LayerKV], meta: AttentionMetadata) -> None:
        """Run the encoder of an encoder-decoder over whole prompts [T].

        The keys and values that the decoder's layers read go into the cache.
        """
        self.decoder.encode(token_ids, kv, meta)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.decoder.logits(hidden)

    def greedy(self, hidden: Tensor) -> Tensor | None:
        return self.decoder.greedy(hidden)


class OneToken(Eager):
    name = "one-token"

    def __init__(
        self, decoder: Decoder, kernel: OneTokenKernel, states: StateCache | None = None
    ) -> None:
        super().__init__(decoder, states)
        self.kernel = kernel

    def covers(self, batch: InputBatch) -> Reason | None:
        return (
            super().covers(batch)
            if batch.num_tokens == 1
            else Reason("the step has more than one token")
        )

    def _hidden(self, token_ids: Tensor, kv: Sequence[LayerKV], meta: AttentionMetadata) -> Tensor:
        hidden = self.kernel.forward(token_ids, kv, meta)
        return self._keep(hidden, hidden, meta)


class ProgramForward(Eager):
    name = "program"

    def __init__(
        self, decoder: Decoder, program: CpuProgram, states: StateCache | None = None
    ) -> None:
        super().__init__(decoder, states)
        self.program = program

    def run(self, batch: InputBatch) -> Output:
        """Run a step. A step of only greedy decodes is just started, and `Output.running` tells so.

        It must be waited for before the next step.
        """
        given = batch.gathered
        if batch.plan is not None and given.sample_index is None and batch.is_greedy:
            begun = self.program.begin_greedy(given.token_ids, batch.kv, given.meta)
            if begun is not None:
                tokens, states, running = begun
                kept = None if self.states is None else (states, given.meta)
                return Output(
                    self, None, given.sampled, tokens=tokens, running=running, states=kept
                )
        return super().run(batch)

    def _hidden(self, token_ids: Tensor, kv: Sequence[LayerKV], meta: AttentionMetadata) -> Tensor:
        return self._keep(*self.program.tapped(token_ids, kv, meta), meta)

    def encode(self, token_ids: Tensor, kv: Sequence[LayerKV], meta: AttentionMetadata) -> None:
        self.program.encode(token_ids, kv, meta)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.program.logits(hidden)

    def greedy(self, hidden: Tensor) -> Tensor | None:
        return self.program.greedy(hidden)


class Variant(Eager):
    """The layers with an addition, for steps that need it.

    `base`, which runs other steps, makes the logits.
    """

    def __init__(self, base: Eager) -> None:
        super().__init__(base.decoder, base.states)
        self.base = base

    def logits(self, hidden: Tensor) -> Tensor:
        return self.base.logits(hidden)

    def greedy(self, hidden: Tensor) -> Tensor | None:
        return self.base.greedy(hidden)

    def _output(self, hidden: Tensor, given: GatheredInputs) -> Output:
        if isinstance(self.base, ProgramForward):
            hidden = hidden.float()  # the type that its logits read
        return Output(self, hidden, given.sampled, given.sample_index)


def adapters_of(batch: InputBatch) -> LoRATokens:
    """Adapters of the tokens of a scheduled step."""
    plan, table, device = batch.plan, batch.table, batch.gathered.token_ids.device
    assert plan is not None
    assert table is not None
    return tokens_of(
        table.adapters_of(plan.scheduled).repeat([s.num_tokens for s in plan.scheduled]), device
    )


class Adapted(Variant):
    """Steps of requests with adapters."""

    name = "adapters"

    def __init__(self, base: Eager, adapters: Adapters) -> None:
        super().__init__(base)
        self.adapters = adapters

    def covers(self, batch: InputBatch) -> Reason | None:
        return None if batch.has_adapters else Reason("no request of the step has an adapter")

    def run(self, batch: InputBatch) -> Output:
        given = batch.gathered
        return self._output(
            self.hidden(given.token_ids, batch.kv, given.meta, adapters_of(batch)), given
        )

    def hidden(
        self, token_ids: Tensor, kv: Sequence[LayerKV], meta: AttentionMetadata, tokens: LoRATokens
    ) -> Tensor:
        """Compute hidden states [T, E] of token ids [T]; `tokens` has the adapters of these tokens."""
        ops = cast("OpSet", AdapterOps(self.decoder.ops, self.adapters.weights, tokens))
        return Eager(self.decoder.with_ops(ops), self.states)._hidden(token_ids, kv, meta)


class WithImages(Variant):
    """Steps with image embeddings in place of some tokens', and with the requests' adapters."""

    name = "images"

    def __init__(
        self, base: Eager, encoder: ImageEncoder | None, adapters: Adapters | None
    ) -> None:
        """`encoder` is None in later pipeline stages, which receive its output among embeddings."""
        super().__init__(base)
        self.encoder, self.adapters = encoder, adapters

    def covers(self, batch: InputBatch) -> Reason | None:
        return None if batch.has_images else NO_IMAGES

    def run(self, batch: InputBatch) -> Output:
        given, plan, table = batch.gathered, batch.plan, batch.table
        assert plan is not None
        assert table is not None
        images = step_images(plan, table)
        ops: Any = self.decoder.ops
        if batch.has_adapters:
            assert self.adapters is not None
            ops = AdapterOps(ops, self.adapters.weights, adapters_of(batch))
        spec = self.decoder.spec
        assert spec.vision is not None
        sections = getattr(spec.layers[0].attention.position, "sections", None)
        decoder = self.decoder.with_ops(
            cast("OpSet", ImageOps(ops, images, given.meta, spec.vision, sections))
        )
        h = self.decoder.embedded(given.token_ids, given.meta)
        if images.parts and self.encoder is not None:
            rows = torch.cat(
                [
                    x[a:b]
                    for x, (_, a, b) in zip(
                        self.encoder.embeddings(images), images.parts, strict=True
                    )
                ]
            )
            h = h.index_copy(0, upload(images.tokens, h.device), rows.to(h.dtype))
        hidden, states = decoder.run(h, batch.kv, given.meta)
        return self._output(self._keep(hidden, states, given.meta), given)


class Forwards:
    """The table of paths that run the model, most special first. Some path covers every batch."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.refused: dict[str, Reason] = {}
        self.paths: list[Forward] = []
        self.base: Eager = Eager(decoder)
        self.states: StateCache | None = None
        self.adapters: Adapters | None = None
        self.images: ImageEncoder | None = None
        self.takes_images = False
        self._build()

    def take_adapters(self, adapters: Adapters) -> None:
        """Let requests have adapters from now on."""
        self.adapters = adapters
        self._build()

    def take_images(self, encoder: ImageEncoder | None) -> None:
        """Let requests have images from now on. `encoder`: see `WithImages`."""
        self.images, self.takes_images = encoder, True
        self._build()

    @property
    def adapted(self) -> Adapted:
        assert self.adapters is not None
        return Adapted(self.base, self.adapters)

    def keep_states(self, states: StateCache, tap: AnyTap | None) -> None:
        """Keep states from now on: each step writes what `tap` reads between the layers.

        Without a tap it writes the step's hidden states.
        """
        self.states, self.decoder.tap = states, tap
        self._build()

    def _build(self) -> None:
        """Collect the paths that run given tokens. Graphs are added by `add` once there is a cache."""
        self.base = Eager(self.decoder, self.states)
        self.paths = [self.base]
        if self.decoder.device.type == "cpu":
            program = compile_program(self.decoder)
            if isinstance(program, Reason):
                self._refuse(ProgramForward.name, program)
            else:
                self.base = ProgramForward(self.decoder, program, self.states)
                self.paths = [self.base]
        else:
            kernel = compile_one_token(self.decoder)
            if isinstance(kernel, Reason):
                self._refuse(OneToken.name, kernel)
            else:
                self.paths = [OneToken(self.decoder, kernel, self.states), self.base]
        if self.adapters is not None:
            self.paths.append(self.adapted)
        if self.takes_images:
            self.paths.insert(0, WithImages(self.base, self.images, self.adapters))

    def _refuse(self, name: str, reason: Reason) -> None:
        if name not in self.refused and reason.notable:
            _logger.warning("steps do not run on the fast path, %s: %s", name, reason)
        self.refused[name] = reason

    def add(self, path: Forward) -> None:
        """Ask `path` before all others except the one for images."""
        self.paths.insert(self.takes_images, path)

    @property
    def num_cold(self) -> int:
        return sum(path.num_cold for path in self.paths)

    def run(self, batch: InputBatch) -> Output:
        for path in self.paths:
            reason = path.covers(batch)
            if reason is None:
                return path.run(batch)
            path.passed_over(batch, reason)
        raise AssertionError("the last way covers every batch")

    def hidden(self, token_ids: Tensor, kv: Sequence[LayerKV], meta: AttentionMetadata) -> Tensor:
        """Compute hidden states [T, E] after the final norm from token ids [T]; fills the cache."""
        hidden = self.run(InputBatch.of(token_ids, kv, meta)).hidden
        assert hidden is not None
        return hidden

    def encode(self, token_ids: Tensor, kv: Sequence[LayerKV], meta: AttentionMetadata) -> None:
        self.base.encode(token_ids, kv, meta)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [N, V] of hidden states [N, E]."""
        return self.base.logits(hidden)

    def count_experts(self) -> dict[int, Tensor]:
        """Count the tokens of each expert from now on.

        Returns int64 [X] on the device for each layer that has experts.
        """
        counts = self.decoder.count_experts()
        if counts:
            self._build()  # the other paths must count in the same place
        return counts

    @property
    def token_bytes(self) -> int | None:
        """Bytes that a step takes per token; None if they must be measured."""
        return self.base.program.token_bytes if isinstance(self.base, ProgramForward) else None
