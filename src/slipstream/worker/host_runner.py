"""Runs steps on a CPU without torch, for models whose step is one C++ program.

Values are NumPy arrays. It is the counterpart of `ModelRunner`. `forward_paths.host_refusal` lists
what it does not cover. Both runners share the code for the scheduler's rows, step inputs, sampling
parameters and step results (`rows.py`, `input_batch.py`, `sampler.py`, `in_flight.py`).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from slipstream.config import EngineConfig
from slipstream.costs.hardware import host_memory
from slipstream.errors import OutOfMemoryError
from slipstream.kernels import sampling
from slipstream.kernels.cpu.host_ops import HostOps
from slipstream.kernels.cpu.host_texts import HostTextOps
from slipstream.kernels.cpu.native import ThreadPool
from slipstream.kernels.cpu.programs import Argmax
from slipstream.kernels.metadata import AttentionMetadata, LayerKV, cache_tensors, shared_caches
from slipstream.model.decoder import Decoder
from slipstream.model.encoder import pool
from slipstream.model.host_model import load_host_model
from slipstream.model.loaded import LoadedModel
from slipstream.model.step_program import StepProgram, compile_step
from slipstream.spec.description import ModelDescription
from slipstream.spec.draft_heads import HeadDescription
from slipstream.spec.pooling import PoolingSpec
from slipstream.spec.reason import NotCovered, Reason
from slipstream.spec.scheme import FORMAT_MAX, SCHEMES
from slipstream.stats import ExpertTokens
from slipstream.types import Extra, Plan, StepPlan, TextsPlan, TokenMask
from slipstream.worker.forward.forward_paths import load_refusal
from slipstream.worker.in_flight import RUN_AHEAD, InFlightStep
from slipstream.worker.input_batch import (
    GatheredInputs,
    SampledRows,
    encoder_batch,
    gather,
    text_batch,
)
from slipstream.worker.rows import RowTable
from slipstream.worker.sampling.constrained import AwaitingMask, mask_bits
from slipstream.worker.sampling.draws import Sampler, completed_prompts, draw, prompt_logprobs
from slipstream.worker.thread_governor import ThreadGovernor
from slipstream.worker.tiers.block_store import BlockStore, block_arrays
from slipstream.worker.tiers.disk_tier import DiskTier

if TYPE_CHECKING:
    from slipstream.worker.draft.drafter import Drafter
    from slipstream.worker.draft.host_drafter import HostStates

Array = npt.NDArray[Any]

CALIBRATION_TOKENS = 1024
"""Random tokens whose keys and values set the scales of an int8 cache."""


class HostPlatform:
    """The part of `ModelRunner.platform` that is used on a CPU."""

    kind: Literal["cpu"] = "cpu"
    is_asynchronous = False
    caches_memory = False

    def memory(self) -> tuple[int, int]:
        """(free, total) bytes of host memory."""
        total, free = host_memory()
        return free, total

    def release_unused(self) -> None:
        pass


class HostForward:
    """Runs the model's steps with the C++ program, the only forward path here.

    Models that the program does not cover run in `ModelRunner`, so this needs no table of paths
    like `forward.Forwards`.
    """

    def __init__(self, decoder: Decoder, program: StepProgram, pool: ThreadPool) -> None:
        self.program = program
        text_ops: Any = HostTextOps(pool)
        # for what the program leaves out: parts of an encoder, a classifier, pooling
        self.decoder = decoder.with_ops(text_ops)

    def hidden(self, token_ids: Array, kv: Sequence[LayerKV], meta: AttentionMetadata) -> Array:
        """Token ids [T] to hidden states [T, E]."""
        given: Any = (
            self.decoder.embedded(token_ids, meta) if self.decoder.spec.is_encoder else None  # type: ignore[arg-type]
        )
        return self.program.forward(token_ids, kv, meta, given)[0]

    def encode(self, token_ids: Any, kv: Sequence[LayerKV], meta: AttentionMetadata) -> None:
        """Run the encoder of an encoder-decoder over whole prompts [T].

        The keys and values that the decoder's layers read go into the cache.
        """
        given: Any = self.decoder.embedded(token_ids, meta)
        self.program.encode(given, kv, meta)

    def logits(self, hidden: Array) -> Array:
        return self.program.logits(hidden)

    def vectors(self, hidden: Any, starts: Any, how: PoolingSpec) -> Array:
        """Compute texts' vectors or scores; see `texts.vectors_of`."""
        if how.score_tokens is not None:
            logits, (yes, no) = self.logits(hidden), how.score_tokens
            return logits[:, [yes]] - (np.float32(0.0) if no is None else logits[:, [no]])
        if self.decoder.classifier is not None:
            scores: Any = self.decoder.classifier(self.decoder.ops, hidden, starts)
            return scores  # type: ignore[no-any-return]
        found: Any = pool(self.decoder.ops, hidden, starts, how.kind)
        if not how.normalize:
            return found  # type: ignore[no-any-return]
        return found / np.maximum(np.linalg.norm(found, axis=-1, keepdims=True), np.float32(1e-12))  # type: ignore[no-any-return]


class HostRunner:
    """Loads the model when constructed. `allocate` must precede `launch`.

    `weights_folder` is where rounded weights are kept. NotCovered if the program lacks something
    that this model needs.
    """

    partition = None
    warms_up = False
    adapters = None
    graph_sizes = ()
    platform = HostPlatform()

    def __init__(
        self, config: EngineConfig, description: ModelDescription, *, weights_folder: Path
    ) -> None:
        self.config, model, device = config, config.model, config.device
        self.phases: dict[str, float] = {}
        with self._phase("weights"):
            self.ops = HostOps(
                device.num_threads, device.info.isa, dense_copies=device.dense_copies
            )
            self.model: LoadedModel = load_host_model(
                description,
                ops=self.ops,
                dtype=model.dtype,
                max_model_len=model.max_model_len,
                load_format=model.load_format,
                seed=model.seed,
                scheme=SCHEMES[model.quantization] if model.quantization else None,
                weights_folder=None if model.weights_cache == "off" else weights_folder,
            )
        with self._phase("program"):
            decoder = self.model.decoder
            self._expert_counts: dict[int, Any] = decoder.count_experts()
            self._compile()
            fixed = device.fixed_threads or device.num_threads == 1
            self._governor = None if fixed else ThreadGovernor(self.ops.pool)
            self._argmax = Argmax(self.ops.pool, description.spec.vocab_size)
        self.kv_scales: list[tuple[Array, Array]] | None = None
        if config.cache.dtype in FORMAT_MAX:
            if self.model.cache_scales is not None:
                # `resolve` has checked that they are for this type
                self.kv_scales = self.model.cache_scales.layers()
            else:
                with self._phase("calibrate"):
                    self.kv_scales = self._calibrate()
                    self.reset_expert_load()
        self.kv: list[LayerKV] = []
        self.rows: RowTable | None = None
        self._under_way: InFlightStep | None = None
        # hidden states and slots of the step under way, for the draft head
        self._states: tuple[Array, Array] | None = None
        self.draft: Drafter | None = None
        self._kept_states: HostStates | None = None  # states that the draft head reads

    def _compile(self) -> None:
        decoder = self.model.decoder
        program = compile_step(decoder, self.ops.pool)
        if isinstance(program, Reason):
            raise NotCovered(program)
        self.program, self.forwards = program, HostForward(decoder, program, self.ops.pool)

    def load_head(self, description: HeadDescription) -> None:
        """Load a draft head; see `ModelRunner.load_head`."""
        # imported late: most starts need none
        from slipstream.worker.draft.host_drafter import load_host_drafter

        with self._phase("draft head"):
            self.draft = head = load_host_drafter(
                self.config, description, self.model.decoder, self.ops, self._sampler.sample
            )
            self._kept_states, self.model.decoder.tap = head.states, head.head.tap
            self._compile()
            self.config = self.config.with_most_drafts(description.spec.most_drafts)

    def load_draft(self, description: ModelDescription, weights_folder: Path) -> None:
        """Load a draft model; see `ModelRunner.load_draft`."""
        if (reason := load_refusal(description, self.config.model.load_format)) is not None:
            raise NotCovered(reason)
        from slipstream.worker.draft.host_drafter import HostDraftModel

        with self._phase("draft model"):
            self.draft = HostDraftModel(
                self.config,
                description,
                self.model.spec,
                ops=self.ops,
                sample=self._sampler.sample,
                weights_folder=None if self.config.model.weights_cache == "off" else weights_folder,
            )

    # --- Start --------------------------------------------------------------------------------------------------------

    def profile(self) -> int:
        """Bytes of activations in the largest step: a full prefill budget with every row sampled.

        They follow from the program's buffers, so nothing is run.
        """
        config, spec = self.config, self.model.spec
        # logits and a copy, and the row that is drawn
        sampled = (2 * config.max_num_sampled + 8) * spec.vocab_size
        if spec.is_encoder:
            # embeddings while they are summed
            sampled = 2 * config.scheduling.max_num_batched_tokens * spec.hidden_size
        per_token = self.program.token_bytes + (0 if self.draft is None else self.draft.token_bytes)
        return config.scheduling.max_num_batched_tokens * per_token + 4 * sampled

    def graph_reserve_bytes(self, activation_bytes: int) -> int:
        return 0

    def allocate(self, config: EngineConfig, num_blocks: int) -> int:
        """Allocate the rows and the KV cache of `num_blocks` blocks, with the null block 0.

        Returns 0, the bytes of graphs. `config` is the engine's final configuration, whose context
        may have been lowered to what fits.
        """
        self.config = config
        try:
            with self._phase("cache"):
                self.kv = self._make_cache(num_blocks)
                if self.draft is not None:
                    self.draft.allocate(num_blocks)
                if not self.model.spec.is_encoder:
                    self.rows = RowTable.of(config, None, None)
        except MemoryError as error:
            raise OutOfMemoryError(
                f"the KV cache of {num_blocks} blocks does not fit: {error}"
            ) from error
        return 0

    def release(self) -> None:
        """Free what `allocate` allocated.

        No step may be in flight, and `allocate` must precede the next step.
        """
        self._take_tokens()
        self.kv.clear()  # in place: the program holds the same list
        if self.draft is not None:
            self.draft.release()
        self.rows = None

    def open_store(self, disk: DiskTier | None, num_slots: int, num_staged: int) -> BlockStore:
        """Open the tiers below the cache. A CPU has only the disk tier."""
        assert not num_slots
        return BlockStore(block_arrays(self._caches()), disk, self._take_tokens)

    def _caches(self) -> list[Array]:
        """The cache's arrays. Arrays shared by several groups are listed once."""
        return list(
            {  # type: ignore[arg-type]
                id(x): x
                for layer in self.kv
                for x in ((layer.k,) if layer.latent else (layer.k, layer.v))
            }.values()
        )

    def capture_next(self) -> bool:
        return False

    def _make_cache(self, num_blocks: int) -> list[LayerKV]:
        """Zeroed keys and values of the layers (`shared_caches`).

        Memory is taken at the first write.
        """
        spec, dtype, scales = self.model.spec, self.config.cache.dtype, self.kv_scales
        return shared_caches(
            spec.local_layers,
            spec.cache_places,
            lambda i: self._layer_cache(i, num_blocks, dtype),
            scales,  # type: ignore[arg-type]
        )

    def _layer_cache(self, layer: int, num_blocks: int, dtype: str) -> tuple[Any, Any]:
        attention, size = self.model.spec.layers[layer].attention, self.config.cache.block_size
        new: Any = lambda shape: np.zeros(shape, np.dtype(dtype))
        return cache_tensors(attention, num_blocks, size, new)

    def _calibrate(self) -> list[tuple[Array, Array]]:
        """Scales of an int8 cache: float32 [K] for the keys and for the values of each layer.

        The largest magnitude of a head on random text, times a margin, maps to the end of the
        range.
        """
        spec, size = self.model.spec, self.config.cache.block_size
        length = min(CALIBRATION_TOKENS, self.config.model.max_model_len)
        tokens = np.random.default_rng(0).integers(0, spec.vocab_size, length, dtype=np.int32)
        num_blocks = -(-length // size)
        kv = [
            LayerKV(*self._layer_cache(i, num_blocks + 1, self.config.model.dtype))
            for i in range(len(spec.layers))
        ]
        self.forwards.hidden(tokens, kv, single_sequence(0, length, block_size=size))
        top = np.float32(FORMAT_MAX["int8"] / 1.1)

        def scale(cache: Any) -> Array:
            largest: Array = np.abs(cache.astype(np.float32)).max(axis=(0, 2, 3))
            return np.maximum(largest, np.float32(1e-6)) / top

        return [(scale(layer.k), scale(layer.v)) for layer in kv]

    # --- Steps --------------------------------------------------------------------------------------------------------

    def launch(self, plan: Plan) -> InFlightStep | AwaitingMask:
        """Run one step.

        A step of a few greedy decodes may still run when this returns. Any other step is done by
        then, and so is the previous step.
        """
        if isinstance(plan, TextsPlan):
            return self._launch_texts(plan)
        rows = self._prepared(plan)
        drafts, is_cold = None, False
        if self.draft is not None:
            num_cold = self.draft.num_cold
            if drafted := self.draft.write_drafts(plan, rows):
                drafts = self.draft.tokens_of(drafted, rows)
            is_cold = self.draft.num_cold > num_cold
        given = gather(rows, plan)
        ids, sampled = given.token_ids, given.sampled
        assert sampled is not None
        if given.sample_index is None and rows.is_greedy(sampled.names):
            begun = self.program.begin_greedy(ids, self.kv, given.meta)
            if begun is not None:
                found: Any = begun[0]
                self._under_way = step = InFlightStep(
                    plan, sampled, found, begun[2], drafts=drafts, is_cold=is_cold
                )
                self._states = begun[1], given.meta.slot_mapping  # type: ignore[assignment]
                if len(plan.scheduled) > RUN_AHEAD or self.ops.pool.num_used == 1:
                    self._take_tokens()
                    step.done = None
                return step
        decodes = given.meta.max_query_len == 1
        if self._governor is not None and not decodes:
            self._governor.begin_prompts()
        hidden, states = self.program.forward(ids, self.kv, given.meta)
        if self._governor is not None and decodes:
            self._governor.note(len(ids), int(given.meta.seq_lens.sum()), self.ops.pool.last_s)
        if self._kept_states is not None:
            self._kept_states.write(states, given.meta.slot_mapping)  # type: ignore[arg-type]

        def drawn(mask: TokenMask | None = None) -> InFlightStep:
            step = self._sample(plan, given, sampled, hidden, mask)
            step.drafts, step.is_cold = drafts, is_cold
            return step

        return (
            AwaitingMask(plan, drawn, drafts, None)
            if rows.wanted("grammar", sampled.names)
            else drawn()
        )

    def max_in_flight(self, plan: Plan) -> int:
        """Number of steps that may be in flight; see `ModelRunner.max_in_flight`."""
        return 1 if isinstance(plan, TextsPlan) or plan.scheduled[-1].num_tokens > 1 else 2

    def _launch_texts(self, plan: TextsPlan) -> InFlightStep:
        """Run an encoder's step."""
        token_ids, meta = text_batch(plan, self.config.cache.block_size, None)
        hidden, tokens = self.forwards.hidden(token_ids, self.kv, meta), np.empty(0, np.int64)  # type: ignore[arg-type]
        vectors: Any = self.forwards.vectors(
            hidden, meta.query_start_loc, self.model.description.pooling
        )
        return InFlightStep(plan, None, tokens, None, vectors=vectors)  # type: ignore[arg-type]

    def forget_rows(self) -> None:
        """Drop every sequence after a step failed."""
        self._under_way = self._states = None
        if self.rows is not None:
            self.rows.forget()

    def _prepared(self, plan: StepPlan) -> RowTable:
        """Update the rows, copy shared blocks, and encode new prompts of an encoder-decoder."""
        assert self.rows is not None, "allocate() comes first"
        self._take_tokens()
        self.rows.apply(plan)
        if plan.block_copies:
            source, target = np.array(plan.block_copies, np.int64).T
            for cache in self._caches():
                cache[target] = cache[source]
            if self.draft is not None:
                self.draft.copy_blocks(source, target)
        if (texts := encoder_batch(self.rows, plan)) is not None:
            self.forwards.encode(texts[0], self.kv, texts[1])
        return self.rows

    def _take_tokens(self) -> None:
        """Finish the step under way, and write its tokens where the next step reads them."""
        if self._under_way is not None:
            step, self._under_way = self._under_way, None
            assert self.rows is not None
            assert step.sampled is not None
            if step.done is not None:
                step.done.synchronize()
                if self._governor is not None:
                    num_keys = sum(s.num_computed_tokens + 1 for s in step.sampled.requests)
                    self._governor.note(len(step.tokens), num_keys, self.ops.pool.last_s)
            self.rows.write(step.sampled.rows, step.sampled.positions, step.tokens)
            if self._states is not None and self._kept_states is not None:
                self._kept_states.write(*self._states)
            self._states = None

    def _sample(
        self,
        plan: StepPlan,
        given: GatheredInputs,
        sampled: SampledRows,
        hidden: Array,
        mask: TokenMask | None,
    ) -> InFlightStep:
        """Compute the tokens, log-probabilities and vectors that the step's requests want."""
        assert self.rows is not None

        def logits_of(start: int, i: int, n: int) -> Array:
            return self.program.logits(hidden[start + i : start + i + n])

        extras: list[Extra] = [*prompt_logprobs(self._sampler, self.rows, plan, logits_of)]
        pooled = self._pooled(plan, hidden)
        tokens: Any = np.empty(0, np.int64)
        if not sampled.requests:
            return InFlightStep(plan, None, tokens, None, None, extras, pooled)
        index: Any = given.sample_index
        own, logprobs = hidden if index is None else hidden[index], None
        tokens = self.program.greedy(own) if self.rows.is_greedy(sampled.names) else None
        if tokens is None:
            drawn = draw(self._sampler, self.rows, sampled, self.program.logits(own), mask)
            tokens, logprobs = drawn.tokens, drawn.logprobs
            extras += drawn.extras
        self.rows.write(sampled.rows, sampled.positions, tokens)
        return InFlightStep(plan, sampled, tokens, None, logprobs, extras, pooled)

    @cached_property
    def _sampler(self) -> Sampler:
        return Sampler(
            lambda logits, params: sampling.sample(logits, params, self._argmax),
            lambda logits, mask: sampling.mask_logits(logits, *mask_bits(mask)),
            sampling.best_logprobs,
            lambda x: x,
            lambda logits: logits,
        )

    def _pooled(self, plan: StepPlan, hidden: Array) -> tuple[tuple[str, ...], Any] | None:
        """Vectors of complete pooled requests; see `ModelRunner._pool`."""
        assert self.rows is not None
        ids, ends = completed_prompts(self.rows, plan)
        if not ids:
            return None
        starts = np.arange(len(ids) + 1)
        return ids, self.forwards.vectors(hidden[ends], starts, self.model.description.pooling)

    def expert_load(self) -> ExpertTokens:
        """Tokens per expert since the start, for each layer with experts."""
        return tuple(
            (layer, tuple(counts.tolist())) for layer, counts in self._expert_counts.items()
        )

    def reset_expert_load(self) -> None:
        """Reset the counts, which so far came from no request."""
        for counts in self._expert_counts.values():
            counts[:] = 0

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.phases[name] = time.perf_counter() - begin


def single_sequence(
    start: int, num_tokens: int, *, block_size: int, num_groups: int = 1
) -> AttentionMetadata:
    """`AttentionMetadata.single_sequence` with NumPy arrays."""
    length = start + num_tokens
    own = np.arange(-(-length // block_size), dtype=np.int32)[None] * np.int32(
        num_groups
    ) + np.int32(1)
    positions = np.arange(start, length)
    slots = own[0, positions // block_size].astype(np.int64) * block_size + positions % block_size
    arrays: dict[str, Any] = dict(
        query_start_loc=np.array([0, num_tokens], np.int32),
        seq_lens=np.array([length], np.int32),
        positions=positions,
    )
    sizes = dict(num_decodes=int(num_tokens == 1), max_query_len=num_tokens, max_seq_len=length)
    first = AttentionMetadata(
        **arrays,
        **sizes,  # type: ignore[arg-type]
        block_table=own,  # type: ignore[arg-type]
        slot_mapping=slots,
        from_start=start == 0,
    )
    others: Any = (
        dataclasses.replace(
            first,
            block_table=own + np.int32(g),  # type: ignore[arg-type]
            slot_mapping=slots + g * block_size,
        )
        for g in range(1, num_groups)
    )
    return first.with_groups(*others)
