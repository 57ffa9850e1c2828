"""Runs steps on one device.

It holds the model, its KV cache, and the rows of the running sequences. launch(plan) =
sample(forward(prepare(plan)))

1. `prepare` updates the rows and makes an `InputBatch`.
2. `forward` computes hidden states. `worker/forward/forwards.py` chooses how.
3. `sample` draws tokens and writes them where the next step reads them.

On a GPU `launch` queues the step and returns at once; `InFlightStep.result()` waits. Steps run on
one stream in the order of their launch. So the scheduler may give freed blocks to the next step
while this one still runs.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from slipstream.config import EngineConfig
from slipstream.costs.graph_sizes import CHAIN_DEPTHS, GRAPH_BYTES, graph_bytes
from slipstream.errors import AdapterError, ConfigError, OutOfMemoryError
from slipstream.kernels.arrays import to_array
from slipstream.kernels.blocks import BlockRows
from slipstream.kernels.build import remedy
from slipstream.kernels.metadata import LayerKV, SamplingTensors
from slipstream.kernels.select import select_ops
from slipstream.model.device_stream import DeviceStream
from slipstream.model.layers import Partition
from slipstream.model.loaded import LoadedModel
from slipstream.model.loader import load_model
from slipstream.platform import hash_triton, platform_of
from slipstream.spec.adapter_slots import ALONE
from slipstream.spec.autotune_table import NO_TILES, TileTable
from slipstream.spec.description import ModelDescription
from slipstream.spec.draft_heads import HeadDescription
from slipstream.spec.model import LatentAttentionSpec
from slipstream.spec.scheme import FORMAT_MAX, SCHEMES
from slipstream.stats import ExpertTokens
from slipstream.types import Extra, Plan, StepPlan, TextsPlan, TokenMask
from slipstream.worker.adapters import Adapters
from slipstream.worker.device_cache import TORCH_DTYPES, DeviceCache
from slipstream.worker.draft.drafter import Drafter
from slipstream.worker.draft.head_drafter import HeadDrafter
from slipstream.worker.draft.heads import load_drafter
from slipstream.worker.draft.model import DraftModel
from slipstream.worker.experts.balance import LayerSwap
from slipstream.worker.experts.host import LoadFollower, settle_experts, with_host_experts
from slipstream.worker.experts.load import ExpertLoad
from slipstream.worker.experts.places import ExpertPlaces
from slipstream.worker.forward.forwards import Forwards, InputBatch, Output
from slipstream.worker.forward.images import ImageEncoder
from slipstream.worker.forward.texts import (
    EagerTexts,
    TextGraphs,
    most_texts,
    text_ladder,
    vectors_of,
)
from slipstream.worker.graphs.step_graphs import AdapterGraphs, SharedPrefixGraphs, StepGraphs
from slipstream.worker.in_flight import RUN_AHEAD, InFlightStep
from slipstream.worker.input_batch import SampledRows, encoder_batch
from slipstream.worker.ranks.stage_tokens import FirstStage, LastStage
from slipstream.worker.rows import RowTable
from slipstream.worker.sampling.constrained import AwaitingMask, apply_mask
from slipstream.worker.sampling.draws import Sampler, completed_prompts, draw, prompt_logprobs
from slipstream.worker.sampling.sampler import sampling_tensors
from slipstream.worker.start.dummy_steps import CALIBRATION_TOKENS, calibrated_scales
from slipstream.worker.start.probe_steps import compile_kernels, measure_activations
from slipstream.worker.tiers.block_store import BlockStore, block_arrays
from slipstream.worker.tiers.disk_tier import DiskTier

_logger = logging.getLogger("slipstream.engine")


class ModelRunner:
    """Loads the model when constructed. `allocate` must precede `launch`.

    `weights_folder` is where rounded weights are kept.
    """

    def __init__(
        self,
        config: EngineConfig,
        description: ModelDescription,
        tiles: TileTable = NO_TILES,
        *,
        weights_folder: Path,
        partition: Partition | None = None,
    ) -> None:
        """With a `partition`, this is one rank of several."""
        self.config, self.partition = config, partition
        self.device = torch.device(config.device.info.device)
        self.platform = platform_of(self.device)
        self.platform.activate(config.device.num_threads)
        self.dtype = TORCH_DTYPES[config.model.dtype]
        self.ops = select_ops(
            self.device,
            config.device.kernels,
            tiles,
            num_threads=config.device.num_threads,
            isa=config.device.info.isa,
            deterministic=config.device.deterministic,
            dense_copies=config.device.dense_copies,
        )
        if config.device.kernels == "auto" and self.ops.name == "torch":
            _logger.warning(
                "the C++ kernels are not installed: torch's run instead, several times slower and without quantization; %s",
                remedy(),
            )
        self.ops = with_host_experts(config, self.ops, self.platform)
        self.phases: dict[str, float] = {}
        with self._phase("weights"):
            self.model: LoadedModel = load_model(
                description,
                ops=self.ops,
                device=self.device,
                dtype=self.dtype,
                max_model_len=config.model.max_model_len,
                load_format=config.model.load_format,
                seed=config.model.seed,
                scheme=SCHEMES[config.model.quantization] if config.model.quantization else None,
                weights_folder=None if config.model.weights_cache == "off" else weights_folder,
                partition=partition,
                weights_bytes=config.model.weights_bytes,
                host_experts=config.model.host_experts,
            )
            if self.model.decoder.stream is not None:
                # copying layers takes longer than the launches that a graph would save
                self.config = config = dataclasses.replace(
                    config, device=dataclasses.replace(config.device, enforce_eager=True)
                )
            self.forwards = Forwards(self.model.decoder)
            self.adapters: Adapters | None = None
            if config.lora is not None:
                shard = ALONE if partition is None else partition.shard
                self.adapters = Adapters(config.lora, description, self.model.decoder, shard)
                self.forwards.take_adapters(self.adapters)
                for request in config.lora.requests:
                    try:
                        self.adapters.load(request)
                    except AdapterError as error:
                        raise ConfigError(
                            f"lora_modules: {request.name}: {error}", field="lora_modules"
                        ) from error
            self.images: ImageEncoder | None = None
            if config.images is not None:
                if (tower := self.model.tower) is not None:
                    self.images = ImageEncoder(tower, config.images.cache_bytes)
                self.forwards.take_images(self.images)
            self.platform.synchronize()
            if self.ops.name == "triton":
                hash_triton()()  # started when the device was found
        with self._phase("host experts"):
            self.model = settle_experts(config, self.model, self.platform)
        self.kv_scales: list[tuple[Tensor, Tensor]] | None = None
        if config.cache.dtype in FORMAT_MAX:
            if self.model.cache_scales is not None:
                # `resolve` has checked that they are for this type
                held = self.model.spec.local_layers
                own = self.model.cache_scales.layers()[held.start : held.stop]
                self.kv_scales = [
                    (self.platform.upload(k), self.platform.upload(v)) for k, v in own
                ]
            else:
                with self._phase("calibrate"), torch.inference_mode():
                    self.kv_scales = self._calibrate()
        self._experts = ExpertLoad(self.forwards.count_experts(), self.platform)
        self._follower = LoadFollower(self.ops, self._experts)
        self._places: ExpertPlaces | None = None  # if experts are distributed over ranks
        if partition is not None and partition.shard.experts:
            self._places = ExpertPlaces(self.model.decoder, self._experts, partition)
        self.kv: list[LayerKV] = []
        self._block_rows: BlockRows | None = None
        self.rows: RowTable | None = None
        self._under_way: Output | None = None  # a step that a CPU still computes
        self._first: FirstStage | None = None  # of a pipeline, like `_last`
        self._last: LastStage | None = None
        self.graphs: StepGraphs | None = None
        self.adapter_graphs: AdapterGraphs | None = None
        self.texts: EagerTexts | TextGraphs | None = None  # of an encoder
        self.draft: Drafter | None = None

    def load_head(self, description: HeadDescription) -> None:
        """Load the head that proposes tokens."""
        with self._phase("draft head"):
            self.draft = head = load_drafter(
                self.config, description, self.model.decoder, device=self.device, dtype=self.dtype
            )
            self.forwards.keep_states(head.states, head.head.tap)
            most = description.spec.most_drafts
            if self.config.drafts_ahead:  # a longer chain would run op by op
                most = CHAIN_DEPTHS[-1] if most is None else min(most, CHAIN_DEPTHS[-1])
            self.config = self.config.with_most_drafts(most)

    def load_draft(self, description: ModelDescription, weights_folder: Path) -> None:
        """Load the model that proposes tokens."""
        with self._phase("draft model"):
            self.draft = DraftModel(
                self.config,
                description,
                self.model.spec,
                ops=self.ops,
                device=self.device,
                dtype=self.dtype,
                weights_folder=None if self.config.model.weights_cache == "off" else weights_folder,
            )
            if self.config.drafts_ahead:  # the same limit as for a head
                self.config = self.config.with_most_drafts(CHAIN_DEPTHS[-1])

    # --- Start --------------------------------------------------------------------------------------------------------

    def profile(self) -> int:
        """Bytes of activations in the largest step: a full prefill budget with every row sampled."""
        with self._phase("profile"), torch.inference_mode(), self.without_copies():
            return measure_activations(self)

    def allocate(self, config: EngineConfig, num_blocks: int) -> int:
        """Allocate the rows and the KV cache of `num_blocks` blocks, and capture graphs on a GPU.

        Block 0 is the null block. Returns the graphs' bytes. `config` is the engine's final
        configuration, whose context may have been lowered to what fits.
        """
        self.config = config
        try:
            with self._phase("cache"):
                self.kv = self.make_cache(num_blocks)
                self._block_rows = BlockRows.of_layers(self.kv)
                if self.draft is not None:
                    self.draft.allocate(num_blocks)
                self.rows = None if self.model.spec.is_encoder else self._make_rows()
                self._join_stages()
                self.platform.synchronize()
        except RuntimeError as error:
            raise OutOfMemoryError(
                f"the KV cache of {num_blocks} blocks does not fit: {error}"
            ) from error
        before = self.platform.memory()[0]
        with torch.inference_mode():
            if self.rows is None:
                make = EagerTexts if config.device.enforce_eager else TextGraphs
                self.texts = make(self.forwards, self.model.description.pooling, self.kv, config)
            if not config.device.enforce_eager:
                with self._phase("graphs"):
                    self._capture(config)
            graph_bytes = (
                0 if config.device.enforce_eager else max(0, before - self.platform.memory()[0])
            )
            with self._phase("warm-up"), self.without_copies():
                if self.warms_up and not isinstance(self.texts, TextGraphs):
                    # text graphs have already run their largest and smallest steps
                    compile_kernels(self)
        return graph_bytes

    def without_copies(self) -> AbstractContextManager[None]:
        """Context for steps whose numbers nobody reads: streamed layers are not copied to the GPU."""
        stream = self.model.decoder.stream
        return stream.idle() if isinstance(stream, DeviceStream) else nullcontext()

    def release(self) -> None:
        """Free the memory of `allocate`.

        No step may be in flight, and `allocate` must precede the next step.
        """
        self._take_tokens()
        self.kv.clear()  # in place, because the program holds the same list
        self._block_rows = None
        if self.draft is not None:
            self.draft.release()
        self.rows = self.texts = None

    def open_store(self, disk: DiskTier | None, num_slots: int, num_staged: int) -> BlockStore:
        """Open the tiers below the cache: `num_slots` blocks of host memory (GPU only), and disk."""
        assert self._block_rows is not None
        if not num_slots:
            return BlockStore(
                block_arrays([to_array(rows) for rows in self._block_rows.rows]),
                disk,
                self._take_tokens,
            )
        from slipstream.worker.tiers.device_blocks import DeviceBlocks

        return DeviceBlocks(self._block_rows, self.ops, num_slots, num_staged, disk, self.platform)

    def _capture(self, config: EngineConfig) -> None:
        if isinstance(self.texts, TextGraphs):
            self.texts.capture()
        elif self.rows is not None:
            self.graphs = StepGraphs(self.forwards, self.kv, self.rows, config)
            self.graphs.capture()
            self.forwards.add(self.graphs)
            if self.ops.shares_prefixes and not self.has_latents:
                self.forwards.add(SharedPrefixGraphs(self.graphs, config))
            if self.adapters is not None:
                self.adapter_graphs = AdapterGraphs(
                    self.forwards, self.kv, self.rows, config, self.adapters
                )
                self.adapter_graphs.capture()
                self.forwards.add(self.adapter_graphs)
            if self.draft is not None and self.platform.is_asynchronous:
                self.draft.make_graphs(self.rows, config)

    def graph_reserve_bytes(self, activation_bytes: int) -> int:
        """Bytes to keep free for graphs.

        These are their hidden states or vectors, the largest graph's activations, and the driver's
        memory for the launches. The largest step runs once eagerly before it is captured.
        `activation_bytes` is the result of `profile`.
        """
        spec, size = self.model.spec, self.dtype.itemsize
        if spec.is_encoder:
            sizes = text_ladder(self.config.scheduling.max_num_batched_tokens)
            numbers = sum(most_texts(self.config, n) for n in sizes) * spec.hidden_size
            return 2 * activation_bytes + 4 * numbers + len(sizes) * GRAPH_BYTES
        drafts = 0 if self.draft is None else self.draft.graph_bytes(self.config)
        return graph_bytes(self.config, spec, size) + drafts

    @property
    def graph_sizes(self) -> tuple[int, ...]:
        """Sizes of captured steps."""
        return () if self.graphs is None else tuple(self.graphs.sizes)

    def capture_next(self) -> bool:
        """Capture one more graph that steps may need. False if there is none left."""
        with torch.inference_mode():
            return any(
                graphs is not None and graphs.capture_next()
                for graphs in (self.graphs, self.adapter_graphs)
            )

    # --- Steps --------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def launch(self, plan: Plan) -> InFlightStep | AwaitingMask:
        """Queue one step.

        On a CPU the launch computes the step, but a step of a few greedy decodes may still run when
        this returns. Any earlier step is done by then.
        """
        if isinstance(plan, TextsPlan):
            return self._launch_texts(plan)
        batch, num_cold, rows = self.prepare(plan), self._num_cold, self.rows
        assert rows is not None
        drafts = copied = later = None
        if self.draft is not None and (drafted := self.draft.write_drafts(plan, rows)):
            # A grammar's mask waits for the drafts, so they are copied to the host while the
            # forward runs. Without a grammar the copy is launched after the forward, so that the
            # GPU does not wait for its launch.
            if not batch.has_grammar and self.draft.has_kept_drafts(drafted, rows):
                later = partial(self.draft.kept_drafts, drafted)
            else:
                drafts, copied = (
                    self.platform.to_host(self.draft.tokens_of(drafted, rows)),
                    self.platform.record(),
                )
        output = self.forwards.run(batch)
        if later is not None:
            drafts = self.platform.to_host(later())
        is_cold = self._num_cold > num_cold
        self._follower.after_step()
        if not self.model.spec.has_last:
            return self._passed_on(plan, output)

        if batch.has_grammar:
            if self._last is not None:
                self._last.awaits_mask(sum(s.num_sampled for s in plan.scheduled))
            return AwaitingMask(
                plan, self._awaiting(batch, output, drafts, is_cold), drafts, copied
            )
        step = self.sample(batch, output)
        step.drafts, step.is_cold = drafts, is_cold
        if self.draft is not None:
            self.draft.go_ahead(plan, rows)
        if self.graphs is not None and self.graphs.capture_beside(plan):
            step.is_cold = True
        return step

    @property
    def _num_cold(self) -> int:
        return self.forwards.num_cold + (0 if self.draft is None else self.draft.num_cold)

    def _awaiting(
        self, batch: InputBatch, output: Output, drafts: Tensor | None, is_cold: bool
    ) -> Callable[[TokenMask], InFlightStep]:
        """Make the draw of a step with grammars. The part that needs no mask is launched now."""
        ready: tuple[Tensor, SamplingTensors | None] | None = None
        if (sampled := output.sampled) is not None and output.hidden is not None:
            assert self.rows is not None
            if sampled.requests:
                ready = (
                    output.forward.logits(output.sampled_states),
                    sampling_tensors(self.rows, sampled),
                )

        @torch.inference_mode()
        def draw_by(mask: TokenMask) -> InFlightStep:
            step = self.sample(batch, output, mask, ready)
            step.drafts, step.is_cold = drafts, is_cold
            return step

        return draw_by

    def prepare(self, plan: StepPlan) -> InputBatch:
        """Drop, make and extend rows, copy shared blocks, and encode new prompts."""
        rows = self.rows
        assert rows is not None, "allocate() comes first"
        self._take_tokens()
        if self._first is not None:
            self._first.before(plan)
        adapters: dict[int, int] = {}
        if self.adapters is not None and (
            wanted := [s.lora for s in plan.new if s.lora is not None]
        ):
            kept = rows.rows.keys() - set(plan.released)
            adapters = self.adapters.place(wanted, {rows.rows[name].adapter for name in kept})
            if self.adapter_graphs is not None:
                self.adapter_graphs.adapters_changed()
        rows.apply(plan, adapters)
        if plan.block_copies:
            sources, targets = self.platform.upload(
                np.array(plan.block_copies, dtype=np.int64).T.copy()
            )
            assert self._block_rows is not None
            self.ops.copy_blocks(self._block_rows, self._block_rows, sources, targets)
            if self.draft is not None:
                self.draft.copy_blocks(sources, targets)
        if (texts := encoder_batch(rows, plan)) is not None:
            self.forwards.encode(texts[0], self.kv, texts[1])
        return InputBatch(self.kv, plan, rows)

    def sample(
        self,
        batch: InputBatch,
        output: Output,
        mask: TokenMask | None = None,
        ready: tuple[Tensor, SamplingTensors | None] | None = None,
    ) -> InFlightStep:
        """Draw tokens, and compute the log-probabilities and vectors that requests want.

        `ready` are the logits and sampling parameters of the draw, if they are already launched.
        """
        plan, sampled = batch.plan, output.sampled
        assert plan is not None
        assert sampled is not None
        if output.running is not None:
            return self._run_ahead(plan, sampled, output)
        assert output.hidden is not None
        assert self.rows is not None
        hidden, forward = output.hidden, output.forward

        def logits_of(start: int, i: int, n: int) -> Tensor:
            at = output.row(start) + i
            return forward.logits(hidden[at : at + n])

        extras: list[Extra] = [*prompt_logprobs(self._sampler, self.rows, plan, logits_of)]
        pooled = self._pool(plan, output)
        if not sampled.requests:
            return InFlightStep(
                plan, None, _NO_TOKENS, self.platform.record(), None, extras, pooled
            )
        tokens, logprobs = output.tokens, None
        if tokens is None:
            own = output.sampled_states if ready is None else None
            tokens = forward.greedy(own) if own is not None and batch.is_greedy else None
            if tokens is None:
                logits, params = ready or (forward.logits(output.sampled_states), None)
                drawn = draw(self._sampler, self.rows, sampled, logits, mask, params)
                tokens, logprobs = drawn.tokens, drawn.logprobs
                extras += drawn.extras
            self.rows.write(sampled.rows, sampled.positions, tokens)
        if self._last is not None:
            self._last.drawn(tokens)
        return InFlightStep(
            plan,
            sampled,
            self.platform.to_host(tokens),
            self.platform.record(),
            logprobs,
            extras,
            pooled,
        )

    @cached_property
    def _sampler(self) -> Sampler:
        return Sampler(
            self.ops.sample,
            lambda logits, mask: apply_mask(logits, mask, self.ops, self.platform),
            self.ops.best_logprobs,
            self.platform.to_host,
            lambda logits: np.asarray(logits.float().cpu().numpy()),
        )

    def _passed_on(self, plan: StepPlan, output: Output) -> InFlightStep:
        """Make the handle of a step that the next stage continues."""
        if self._first is not None and output.sampled is not None and output.sampled.requests:
            self._first.expect(output.sampled.requests)
        return InFlightStep(plan, None, _NO_TOKENS, self.platform.record())

    def max_in_flight(self, plan: Plan) -> int:
        """Number of steps that may be in flight once `plan` is launched.

        1 means that `launch` computes the step before it returns, so the previous step's tokens
        would wait for it.
        """
        if self.platform.is_asynchronous:
            return 2
        return 1 if isinstance(plan, TextsPlan) or plan.scheduled[-1].num_tokens > 1 else 2

    def _launch_texts(self, plan: TextsPlan) -> InFlightStep:
        """Launch an encoder's step."""
        assert self.texts is not None, "allocate() comes first"
        # before the next replay overwrites them
        vectors = self.platform.to_host(self.texts.run(plan))
        return InFlightStep(plan, None, _NO_TOKENS, self.platform.record(), vectors=vectors)

    def _run_ahead(self, plan: StepPlan, sampled: SampledRows, output: Output) -> InFlightStep:
        """Handle a CPU's step of greedy decodes that has been started."""
        assert output.tokens is not None
        assert output.running is not None
        self._under_way = output
        goes_on = len(plan.scheduled) <= RUN_AHEAD and self.config.device.num_threads > 1
        if not goes_on:
            self._take_tokens()
        return InFlightStep(plan, sampled, output.tokens, output.running if goes_on else None)

    def _take_tokens(self) -> None:
        """Wait for a CPU's step under way, and write its tokens where the next step reads them."""
        if self._under_way is not None:
            assert self.rows is not None
            output, self._under_way = self._under_way, None
            assert output.running is not None
            assert output.tokens is not None
            assert output.sampled is not None
            output.running.synchronize()
            self.rows.write(output.sampled.rows, output.sampled.positions, output.tokens)
            if output.states is not None and isinstance(self.draft, HeadDrafter):
                self.draft.states.write(*output.states)

    def forget_rows(self) -> None:
        """Drop every sequence after a step failed.

        Nothing that the device still computes is read again.
        """
        self._under_way = None
        for stage in (self._first, self._last):
            if stage is not None:
                stage.forget()
        if self.rows is not None:
            self.rows.forget()

    def _pool(self, plan: StepPlan, output: Output) -> tuple[tuple[str, ...], Tensor] | None:
        """Vectors or scores of a decoder's pooled sequences whose last token is in this step.

        They are computed from the last token's hidden state.
        """
        assert self.rows is not None
        assert output.hidden is not None
        ids, ends = completed_prompts(self.rows, plan)
        if not ids:
            return None
        last = output.hidden[
            self.platform.upload(np.array([output.row(token) for token in ends], np.int64))
        ]
        starts = torch.arange(len(ids) + 1, device=self.device)
        vectors = vectors_of(self.forwards, self.model.description.pooling, last, starts)
        return ids, self.platform.to_host(vectors)

    def expert_load(self) -> ExpertTokens:
        """Tokens per expert since the start, for each layer with experts."""
        return self._experts.read()

    def movable_load(self) -> tuple[ExpertTokens, int]:
        """`expert_load` of layers whose experts can change ranks, and an expert's weight bytes."""
        assert self._places is not None
        layers = self._places.layers
        return tuple(
            own for own in self._experts.read() if own[0] in layers
        ), self._places.expert_bytes

    def swap_experts(self, swaps: Sequence[LayerSwap]) -> None:
        """Let experts change places before the next step. All ranks must make this call."""
        assert self._places is not None
        self._take_tokens()
        self._places.swap(swaps)

    def reset_expert_load(self) -> None:
        """Reset the counts, which so far came from no request."""
        self._experts.reset()

    # --- Helpers ------------------------------------------------------------------------------------------------------

    def make_cache(self, num_blocks: int) -> list[LayerKV]:
        """Zeroed keys and values of the layers."""
        return DeviceCache(self.model.spec, self.ops, self.platform, self.config.cache).shared(
            num_blocks, self.kv_scales
        )

    def _calibrate(self) -> list[tuple[Tensor, Tensor]]:
        """Measure the scales of an 8-bit cache."""
        cache = self.config.cache
        return calibrated_scales(
            self.forwards,
            partial(
                DeviceCache(self.model.spec, self.ops, self.platform, cache).of_each_layer,
                dtype=self.dtype,
            ),
            cache.dtype,
            vocab_size=self.model.spec.vocab_size,
            num_tokens=min(CALIBRATION_TOKENS, self.config.model.max_model_len),
            block_size=cache.block_size,
            device=self.device,
        )

    @property
    def has_latents(self) -> bool:
        return any(
            isinstance(layer.attention, LatentAttentionSpec) for layer in self.model.spec.layers
        )

    def _join_stages(self) -> None:
        """Set up the first and last stage of a pipeline, which pass on tokens."""
        if self.partition is None or self.partition.pipe is None or self.rows is None:
            return
        if self.model.spec.has_first:
            self._first = FirstStage(self.partition.pipe, self.rows, self.platform)
        if self.model.spec.has_last:
            self._last = LastStage(self.partition.pipe, self.device)

    def _make_rows(self) -> RowTable:
        sectioned = any(
            getattr(layer.attention.position, "sections", None) for layer in self.model.spec.layers
        )
        shard = None if self.partition is None else self.partition.shard
        rank = shard.rank if shard is not None and shard.deals_requests else 0
        return RowTable.of(self.config, self.ops, self.device, sectioned=sectioned, rank=rank)

    @property
    def warms_up(self) -> bool:
        """True if warm-up steps are needed.

        They are needed on a GPU, whose kernels compile, and on a CPU that sends a GPU its part of the
        steps.
        """
        pipe = None if self.partition is None else self.partition.pipe
        return self.platform.is_asynchronous or (pipe is not None and pipe.through_host)

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.phases[name] = time.perf_counter() - begin


_NO_TOKENS = torch.empty(0, dtype=torch.int64)
