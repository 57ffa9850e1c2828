"""Runs steps on one device: the model, its KV cache, and the rows of the sequences that run.

    launch(plan) = sample(forward(prepare(plan)))

1. `prepare` brings the rows up to date: an `InputBatch`.
2. `forward` runs the model over it (`worker/forward.py` chooses how): hidden states.
3. `sample` draws tokens and writes them where the next step reads them.

`launch` queues the step and returns at once on a GPU; `InFlightStep.result()` waits. Steps run in the order of their launch on
one stream, which is why the scheduler may hand freed blocks to the next step while this one still runs.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from slipstream.config import MOST_DRAFTS, EngineConfig
from slipstream.errors import OutOfMemoryError
from slipstream.kernels.build import remedy
from slipstream.kernels.metadata import AttentionMetadata, LayerKV, SamplingTensors, cache_tensors
from slipstream.kernels.native import Running
from slipstream.kernels.select import select_ops
from slipstream.model.encoder import pool
from slipstream.model.loader import LoadedModel, load_model
from slipstream.plan.graph_sizes import GRAPH_BYTES, graph_bytes
from slipstream.platform import Event, platform_of
from slipstream.spec.autotune_table import NO_TILES, TileTable
from slipstream.spec.description import ModelDescription
from slipstream.spec.draft_heads import HeadDescription
from slipstream.spec.model import LatentAttentionSpec
from slipstream.spec.scheme import FORMAT_MAX, SCHEMES
from slipstream.types import (
    ExpertTokens,
    Extra,
    Plan,
    PooledVector,
    PromptLogprobs,
    SampledLogprobs,
    StepPlan,
    StepResult,
    TextsPlan,
    TextVectors,
    TokenLogprobs,
    TokenMask,
)
from slipstream.worker.constrained import AwaitingMask, apply_mask
from slipstream.worker.draft_head import HeadDrafter, load_drafter
from slipstream.worker.draft_model import DraftModel
from slipstream.worker.drafter import Drafter
from slipstream.worker.forward import Forwards, InputBatch, Output
from slipstream.worker.graphs import StepGraphs
from slipstream.worker.input_batch import RowTable, SampledRows, encoder_batch
from slipstream.worker.sampler import (
    PROMPT_LOGPROB_ROWS,
    as_logprobs,
    best_logprobs,
    prompt_positions,
    sampling_tensors,
    verified,
)
from slipstream.worker.texts import EagerTexts, TextGraphs, most_texts, text_ladder, vectors_of

_logger = logging.getLogger("slipstream.engine")

TORCH_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
}

PROBE_TOKENS = 64
"""Tokens of the step that is measured where most of what a step takes is known."""

FEW_ROWS = 8
"""Rows that are sampled then. Each takes as much as the next, and 64 of SmolLM2's vocabulary take 95 MB, which stay in the
process."""

CALIBRATION_TOKENS = 1024
"""Random tokens whose keys and values set the scales of an 8-bit cache."""

RUN_AHEAD = 8
"""Most sequences of a step on a CPU that is left under way while the host looks at the one before and plans the next. The
host's work, a tenth of a step of one sequence, is hidden so, but a request that comes waits a step longer. Steps of 16 and more
gained nothing (benchmarks/CPU_NOTES.md)."""


@dataclasses.dataclass(slots=True)
class InFlightStep:
    """A step that was launched. `result()` waits for the device and may be called once."""

    awaits_mask = False

    plan: Plan
    sampled: SampledRows | None
    tokens: Tensor  # int64 [N], on the host once `done`
    done: Event | Running | None  # None: it is
    logprobs: tuple[list[int], tuple[Tensor, ...], list[int]] | None = None  # which samples, values, how many wanted
    prompt_logprobs: Sequence[PromptLogprobs] = ()
    pooled: tuple[tuple[str, ...], Tensor] | None = None  # which are complete, and their vectors float32 [N, E] on the host
    drafts: Tensor | None = None  # int64 [N] on the host, which the draft model proposed
    vectors: Tensor | None = None  # of a TextsPlan, float32 [S, E] on the host

    @property
    def is_done(self) -> bool:
        """The launch itself computed it."""
        return self.done is None

    def proposed(self) -> Sequence[int]:
        return () if self.drafts is None else self.drafts.tolist()

    def result(self) -> StepResult:
        if self.done is not None:
            self.done.synchronize()
        tokens: list[int] = self.tokens.tolist()
        extras: list[Extra] = [*self.prompt_logprobs]
        if self.pooled is not None:
            extras += [PooledVector(i, v.tobytes()) for i, v in zip(self.pooled[0], self.pooled[1].numpy(), strict=True)]
        if self.vectors is not None:
            extras.append(TextVectors(self.vectors.numpy().tobytes()))
        if self.logprobs is not None and self.sampled is not None:
            which, best, counts = self.logprobs
            values = as_logprobs([tokens[i] for i in which], best, counts)  # type: ignore[arg-type]
            ids, found = self.sampled.request_ids, dict[str, list[TokenLogprobs]]()
            for i, value in zip(which, values, strict=True):
                found.setdefault(ids[i], []).append(value)
            extras += [SampledLogprobs(request_id, tuple(own)) for request_id, own in found.items()]
        num_tokens = None if self.sampled is None else self.sampled.num_tokens
        if num_tokens is not None and self.sampled is not None:
            drafts = () if self.drafts is None else self.drafts.tolist()
            tokens, num_tokens = verified(self.sampled.requests, tokens, drafts)
        return StepResult(self.plan.step_id, tokens, num_tokens, tuple(extras))


class ModelRunner:
    """Loads the model at once; `allocate` must come before `launch`. `weights_folder`: where rounded weights are kept."""

    def __init__(
        self, config: EngineConfig, description: ModelDescription, tiles: TileTable = NO_TILES, *, weights_folder: Path
    ) -> None:
        self.config = config
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
            )
            self.forwards = Forwards(self.model.decoder)
            self.platform.synchronize()
        self.kv_scales: list[tuple[Tensor, Tensor]] | None = None
        if config.cache.dtype in FORMAT_MAX:
            if self.model.cache_scales is not None:  # of the same form: `resolve` has seen to it
                self.kv_scales = self.model.cache_scales.layers()
            else:
                with self._phase("calibrate"), torch.inference_mode():
                    self.kv_scales = self._calibrate()
        self._expert_counts = self.forwards.count_experts()
        self._expert_copy: tuple[Tensor, Event | None] | None = None
        self._expert_load: ExpertTokens = ()
        self.kv: list[LayerKV] = []
        self.rows: RowTable | None = None
        self._under_way: Output | None = None  # on a CPU
        self.graphs: StepGraphs | None = None
        self.texts: EagerTexts | TextGraphs | None = None  # an encoder's
        self.draft: Drafter | None = None

    def load_head(self, description: HeadDescription) -> None:
        """The head that proposes tokens."""
        with self._phase("draft head"):
            self.draft = head = load_drafter(self.config, description, self.model.decoder, device=self.device, dtype=self.dtype)
            self.forwards.keep_states(head.states, head.head.tap)
            if self.config.speculation is not None and (most := description.spec.most_drafts) is not None:
                speculation = dataclasses.replace(self.config.speculation, most_drafts=min(most, MOST_DRAFTS))
                self.config = dataclasses.replace(self.config, speculation=speculation)

    def load_draft(self, description: ModelDescription, weights_folder: Path) -> None:
        """The model that proposes tokens."""
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

    # --- Start --------------------------------------------------------------------------------------------------------

    def profile(self) -> int:
        """Bytes that activations take at the largest step: a whole budget of prefill, and every row sampled."""
        with self._phase("profile"), torch.inference_mode():
            scheduling, size = self.config.scheduling, self.config.cache.block_size
            num_tokens, per_token = scheduling.max_num_batched_tokens, self.forwards.token_bytes
            num_rows = few_rows = self.config.max_num_sampled
            known = 0
            if per_token is not None:  # then a short step shows the rest, and leaves little behind in the process
                known = num_tokens * (per_token + (0 if self.draft is None else self.draft.token_bytes))
                num_tokens = min(num_tokens, PROBE_TOKENS)
                few_rows = min(num_rows, FEW_ROWS)
            length = min(self.config.model.max_model_len, num_tokens)
            kv = self.make_cache(1)
            meta, tokens = self._dummy_prefill(num_tokens, length, size)
            before = self.platform.start_peak()
            if self.model.spec.encoder is not None:
                self.forwards.encode(tokens, kv, meta)
            if self._has_latents:  # of a prompt that has something in the cache, whose queries are wider
                self.forwards.hidden(tokens, kv, dataclasses.replace(meta, from_start=False))
            if self.draft is not None:
                self.draft.probe(tokens, meta)
            hidden = self.forwards.hidden(tokens, kv, meta)
            if not self.model.spec.generates:
                pool(self.ops, hidden, meta.query_start_loc, "mean")
                return known + max(0, self.platform.peak() - before)
            if few_rows < num_rows:
                known += max(0, self.platform.peak() - before)
                before = self.platform.start_peak()
            logits = self.forwards.logits(hidden[torch.arange(few_rows, device=self.device) % num_tokens])
            self.ops.sample(logits, self._dummy_sampling(few_rows))
            del logits, hidden
            return known + max(0, self.platform.peak() - before) * num_rows // few_rows

    def allocate(self, config: EngineConfig, num_blocks: int) -> int:
        """The KV cache of `num_blocks` blocks (block 0 is the null block), the rows, and on a GPU the graphs, whose bytes
        are returned. `config` is the engine's final one: its context may have been lowered to what fits."""
        self.config = config
        try:
            with self._phase("cache"):
                self.kv = self.make_cache(num_blocks)
                if self.draft is not None:
                    self.draft.allocate(num_blocks)
                self.rows = None if self.model.spec.is_encoder else self._make_rows()
                self.platform.synchronize()
        except RuntimeError as error:
            raise OutOfMemoryError(f"the KV cache of {num_blocks} blocks does not fit: {error}") from error
        before = self.platform.memory()[0]
        with torch.inference_mode():
            if self.rows is None:
                make = EagerTexts if config.device.enforce_eager else TextGraphs
                self.texts = make(self.forwards, self.model.description.pooling, self.kv, config)
            if not config.device.enforce_eager:
                with self._phase("graphs"):
                    self._capture(config)
            graph_bytes = 0 if config.device.enforce_eager else max(0, before - self.platform.memory()[0])
            with self._phase("warm-up"):
                self._warm_up()
        return graph_bytes

    def release(self) -> None:
        """Give back what `allocate` took. No step is in flight, and `allocate` comes before the next."""
        self._take_tokens()
        self.kv.clear()  # in place: the program looks at the same list
        if self.draft is not None:
            self.draft.release()
        self.rows = self.texts = None

    def _capture(self, config: EngineConfig) -> None:
        if isinstance(self.texts, TextGraphs):
            self.texts.capture()
        elif self.rows is not None:
            self.graphs = StepGraphs(self.forwards, self.kv, self.rows, config)
            self.graphs.capture()
            self.forwards.add(self.graphs)
            if self.draft is not None and self.platform.is_asynchronous:
                self.draft.make_graphs(self.rows, config)

    def rows_bytes(self) -> int:
        """What `allocate` takes beside cache and graphs."""
        if self.model.spec.is_encoder:
            return 0
        model = self.config.model
        tables = len(self.config.cache.groups) * self.config.max_blocks_per_seq
        per_row = (model.max_model_len + 1 + tables) * 4
        return (self.config.scheduling.max_num_seqs + 1) * per_row

    def graph_reserve_bytes(self, activation_bytes: int) -> int:
        """Room kept for graphs: their hidden states or vectors, the largest one's activations, and what the driver takes
        for the launches. The largest is run once beside its graph, before it is captured. `activation_bytes`: what `profile`
        found."""
        spec, size = self.model.spec, self.dtype.itemsize
        if spec.is_encoder:
            sizes = text_ladder(self.config.scheduling.max_num_batched_tokens)
            numbers = sum(most_texts(self.config, n) for n in sizes) * spec.hidden_size
            return 2 * activation_bytes + 4 * numbers + len(sizes) * GRAPH_BYTES
        drafts = 0 if self.draft is None else self.draft.num_graphs * GRAPH_BYTES
        return graph_bytes(self.config, spec, size) + drafts

    def capture_next(self) -> bool:
        """Capture one more graph that steps may want. False: there is none left."""
        with torch.inference_mode():
            return self.graphs is not None and self.graphs.capture_next()

    # --- Steps --------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def launch(self, plan: Plan) -> InFlightStep | AwaitingMask:
        """Queue one step. On a CPU a step of a few greedy decodes is under way when this returns, if the kernels can; any other
        is done, and so is what was under way before."""
        if isinstance(plan, TextsPlan):
            return self._launch_texts(plan)
        batch = self.prepare(plan)
        drafts = self.draft.propose(plan, batch.table) if self.draft is not None and batch.table is not None else None
        drafted = None
        if drafts is not None:  # on their way to the host while the forward runs
            drafts, drafted = self.platform.to_host(drafts), self.platform.record()
        output = self.forwards.run(batch)

        def sampled(mask: TokenMask | None = None) -> InFlightStep:
            step = self.sample(batch, output, mask)
            step.drafts = drafts
            return step

        return AwaitingMask(plan, sampled, drafts, drafted) if batch.has_grammar else sampled()

    def prepare(self, plan: StepPlan) -> InputBatch:
        """Rows dropped, made and extended, shared blocks copied, new prompts encoded."""
        rows = self.rows
        assert rows is not None, "allocate() comes first"
        self._take_tokens()
        rows.apply(plan)
        if plan.block_copies:
            pairs = self.platform.upload(np.array(plan.block_copies, dtype=np.int64))
            for layer in {layer.k.data_ptr(): layer for layer in self.kv}.values():  # groups share tensors
                self.ops.copy_blocks(layer, pairs[:, 0], pairs[:, 1])
            if self.draft is not None:
                self.draft.copy_blocks(pairs[:, 0], pairs[:, 1])
        if (texts := encoder_batch(rows, plan)) is not None:
            self.forwards.encode(texts[0], self.kv, texts[1])
        return InputBatch(self.kv, plan, rows)

    def sample(self, batch: InputBatch, output: Output, mask: TokenMask | None = None) -> InFlightStep:
        """Tokens of the sequences that want one, log-probabilities and vectors of those that want these."""
        plan, sampled = batch.plan, output.sampled
        assert plan is not None
        assert sampled is not None
        if output.running is not None:
            return self._run_ahead(plan, sampled, output)
        assert output.hidden is not None
        prompt = self._prompt_logprobs(plan, output)
        pooled = self._pool(plan, output)
        if not sampled.requests:
            return InFlightStep(plan, None, _NO_TOKENS, self.platform.record(), None, prompt, pooled)
        index = output.sample_index
        hidden = output.hidden if index is None else output.hidden.index_select(0, index)
        tokens, logprobs = output.forward.greedy(hidden) if batch.is_greedy else None, None
        if tokens is None:
            tokens, logprobs = self._draw(output.forward.logits(hidden), sampled, mask)
        assert self.rows is not None
        self.rows.write(sampled.rows, sampled.positions, tokens)
        return InFlightStep(plan, sampled, self.platform.to_host(tokens), self.platform.record(), logprobs, prompt, pooled)

    def max_in_flight(self, plan: Plan) -> int:
        """How many steps may be in flight once `plan` is launched. 1: `launch` computes it before it returns, so the tokens of
        the step before would wait for it."""
        if self.platform.is_asynchronous:
            return 2
        return 1 if isinstance(plan, TextsPlan) or plan.scheduled[-1].num_tokens > 1 else 2

    def _launch_texts(self, plan: TextsPlan) -> InFlightStep:
        """An encoder's step."""
        assert self.texts is not None, "allocate() comes first"
        vectors = self.platform.to_host(self.texts.run(plan))  # before the next replay, which writes where they stand
        return InFlightStep(plan, None, _NO_TOKENS, self.platform.record(), vectors=vectors)

    def _run_ahead(self, plan: StepPlan, sampled: SampledRows, output: Output) -> InFlightStep:
        """A CPU's step of greedy decodes that was begun."""
        assert output.tokens is not None
        assert output.running is not None
        self._under_way = output
        goes_on = len(plan.scheduled) <= RUN_AHEAD and self.config.device.num_threads > 1
        if not goes_on:
            self._take_tokens()
        return InFlightStep(plan, sampled, output.tokens, output.running if goes_on else None)

    def _take_tokens(self) -> None:
        """What the step under way on a CPU has sampled goes where the next step reads it."""
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
        """Every sequence is gone, after a step failed. What the device still computes changes nothing that is read again."""
        self._under_way = None
        if self.rows is not None:
            self.rows.forget()

    def _draw(
        self, logits: Tensor, sampled: SampledRows, mask: TokenMask | None
    ) -> tuple[Tensor, tuple[list[int], tuple[Tensor, ...], list[int]] | None]:
        """Tokens of logits [N, V], and what `InFlightStep.logprobs` says of them."""
        rows = self.rows
        assert rows is not None
        which, counts = [], []
        if rows.wanted("logprobs", sampled.names):
            wanted = [rows.rows[i].sampling.logprobs for i in sampled.request_ids]
            which = [i for i, k in enumerate(wanted) if k is not None]
            counts = [wanted[i] or 0 for i in which]
        # Log-probabilities are of the model's own distribution: kept before the mask and the sampler overwrite the logits.
        index = self.platform.upload(np.array(which, np.int64)) if which else None
        kept = None if index is None else logits[index]
        if mask is not None and mask.positions:
            apply_mask(logits, mask, self.ops, self.platform)
        tokens = self.ops.sample(logits, sampling_tensors(rows, sampled))
        if kept is None:
            return tokens, None
        best = best_logprobs(kept, tokens[index], max(counts))
        return tokens, (which, tuple(self.platform.to_host(t) for t in best), counts)

    def _pool(self, plan: StepPlan, output: Output) -> tuple[tuple[str, ...], Tensor] | None:
        """The vectors (or scores) of a decoder's pooled sequences whose last token is in this step: its state stands for the
        whole."""
        assert self.rows is not None
        assert output.hidden is not None
        rows, wanted, end = self.rows.rows, self.rows.wanting["vector"], 0
        if not wanted:
            return None
        ends, ids = [], []
        for s in plan.scheduled:
            end += s.num_tokens
            whole = s.num_computed_tokens + s.num_tokens
            if s.request_id in wanted and whole == rows[s.request_id].num_prompt_tokens:
                ends.append(output.row(end - 1))
                ids.append(s.request_id)
        if not ids:
            return None
        last = output.hidden[self.platform.upload(np.array(ends, np.int64))]
        starts = torch.arange(len(ids) + 1, device=self.device)
        vectors = vectors_of(self.forwards, self.model.description.pooling, last, starts)
        return tuple(ids), self.platform.to_host(vectors)

    def _prompt_logprobs(self, plan: StepPlan, output: Output) -> list[PromptLogprobs]:
        """For sequences in prefill that asked: of each prompt token that follows a position of this step."""
        assert self.rows is not None
        assert output.hidden is not None
        found: list[PromptLogprobs] = []
        start = 0
        for s in plan.scheduled:
            row = self.rows.rows[s.request_id]
            count = row.sampling.prompt_logprobs
            if count is not None and (num := prompt_positions(row, s)):
                entries: list[TokenLogprobs] = []
                first, at = s.num_computed_tokens + 1, output.row(start)
                for i in range(0, num, PROMPT_LOGPROB_ROWS):
                    n = min(PROMPT_LOGPROB_ROWS, num - i)
                    logits = output.forward.logits(output.hidden[at + i : at + i + n])
                    tokens = self.rows.tokens[row.index, first + i : first + i + n]
                    entries += as_logprobs(tokens.tolist(), best_logprobs(logits, tokens, count), [count] * n)
                found.append(PromptLogprobs(s.request_id, s.num_computed_tokens, tuple(entries)))
            start += s.num_tokens
        return found

    def expert_load(self) -> ExpertTokens:
        """Tokens by expert since the start, of each layer with experts. Never waits for a GPU: there the numbers are those of
        the last call's time, once its copy has arrived."""
        if not self._expert_counts:
            return ()
        copied, event = self._expert_copy or (None, None)
        if event is None or event.query():
            counts = self.platform.to_host(torch.cat(list(self._expert_counts.values())))
            self._expert_copy = counts, self.platform.record()
            copied = copied if self.platform.is_asynchronous else counts
            if copied is not None:
                sizes = [len(c) for c in self._expert_counts.values()]
                by_layer = zip(self._expert_counts, copied.split(sizes), strict=True)
                self._expert_load = tuple((layer, tuple(c.tolist())) for layer, c in by_layer)
        return self._expert_load

    def reset_expert_load(self) -> None:
        """Forget what was counted so far: it was no request's."""
        for counts in self._expert_counts.values():
            counts.zero_()

    # --- Pieces -------------------------------------------------------------------------------------------------------

    def make_cache(self, num_blocks: int) -> list[LayerKV]:
        """The layers' keys and values, of zeros. Layers at one place of different groups share a tensor."""
        dtype, places = TORCH_DTYPES[self.config.cache.dtype], self.model.spec.cache_places
        made = {place: self._layer_cache(i, num_blocks, dtype) for i, place in reversed(list(enumerate(places)))}
        if self.kv_scales is None:
            return [LayerKV(*made[place]) for place in places]
        return [LayerKV(*made[place], *own) for place, own in zip(places, self.kv_scales, strict=True)]

    def _layer_cache(self, layer: int, num_blocks: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        attention, size = self.model.spec.layers[layer].attention, self.config.cache.block_size
        by_dim = self.ops.values_by_dim(dtype)
        return cache_tensors(attention, num_blocks, size, lambda s: self.platform.zeros(s, dtype), values_by_dim=by_dim)

    def _calibrate(self) -> list[tuple[Tensor, Tensor]]:
        """Scales of an 8-bit cache: for each layer, float32 [K] for keys and for values, such that the largest magnitude that
        random text puts into a head, times a margin, falls on the end of the range. A float's precision does not depend
        on the scale, so fp8 takes a wide margin."""
        size, kind = self.config.cache.block_size, self.config.cache.dtype
        length = min(CALIBRATION_TOKENS, self.config.model.max_model_len)
        meta, tokens = self._dummy_prefill(length, length, size)
        num_blocks = -(-length // size)
        table = torch.arange(1, num_blocks + 1, dtype=torch.int32, device=self.device)[None]
        meta = dataclasses.replace(meta, block_table=table, slot_mapping=meta.positions + size)
        rng = torch.Generator(self.device).manual_seed(0)
        tokens.random_(0, self.model.spec.vocab_size, generator=rng)
        kv = [LayerKV(*self._layer_cache(i, num_blocks + 1, self.dtype)) for i in range(len(self.model.spec.layers))]
        self.forwards.hidden(tokens, kv, meta)
        top = FORMAT_MAX[kind] / (2.0 if kind == "fp8" else 1.1)  # type: ignore[index]

        def scale(cache: Tensor) -> Tensor:
            return cache.float().abs().amax(dim=(0, 2, 3)).clamp(min=1e-6) / top

        return [(scale(layer.k), scale(layer.v)) for layer in kv]

    @property
    def _has_latents(self) -> bool:
        return any(isinstance(layer.attention, LatentAttentionSpec) for layer in self.model.spec.layers)

    def _make_rows(self) -> RowTable:
        config = self.config
        return RowTable(
            config.scheduling.max_num_seqs,
            config.model.max_model_len,
            config.cache.block_size,
            self.ops,
            self.device,
            config.model.seed,
            groups=config.cache.groups,
        )

    def _dummy_prefill(self, num_tokens: int, length: int, block_size: int) -> tuple[AttentionMetadata, Tensor]:
        """A step of whole prompts of `length` tokens, all written to the null block."""
        positions = torch.arange(num_tokens, device=self.device) % length
        starts = torch.tensor([*range(0, num_tokens, length), num_tokens], dtype=torch.int32)
        meta = AttentionMetadata(
            query_start_loc=starts.to(self.device),
            seq_lens=starts.diff().to(self.device),
            block_table=torch.zeros(len(starts) - 1, -(-length // block_size), dtype=torch.int32, device=self.device),
            positions=positions,
            slot_mapping=positions % block_size,
            num_decodes=0,
            max_query_len=length,
            max_seq_len=length,
            from_start=True,
        )
        return meta, torch.zeros(num_tokens, dtype=torch.int32, device=self.device)

    def _dummy_sampling(self, num_rows: int) -> SamplingTensors:
        def full(value: float, dtype: torch.dtype) -> Tensor:
            return torch.full((num_rows,), value, dtype=dtype, device=self.device)

        return SamplingTensors(
            temperature=full(1.0, torch.float32),
            top_k=full(0, torch.int32),
            top_p=full(0.9, torch.float32),
            min_p=full(0.0, torch.float32),
            seeds=full(1, torch.int64),
            history_lens=full(1, torch.int32),
            any_top_p=True,
        )

    def _warm_up(self) -> None:
        """A small prefill and two decodes, of several sequences and of one, which has kernels of its own: so that the first
        request pays for no compilation. Graphs of texts have run their largest and smallest steps."""
        if not self.platform.is_asynchronous or isinstance(self.texts, TextGraphs):
            return
        for num_tokens, length in self._warm_up_steps():
            meta, tokens = self._dummy_prefill(num_tokens, length, self.config.cache.block_size)
            if length == 1:
                meta = dataclasses.replace(meta, num_decodes=num_tokens)
            if self.model.spec.encoder is not None:
                self.forwards.encode(tokens, self.kv, dataclasses.replace(meta, num_decodes=0))
            hidden = self.forwards.hidden(tokens, self.kv, meta)
            if not self.model.spec.generates:
                continue
            logits = self.forwards.logits(hidden[-2:])
            self.ops.sample(logits, self._dummy_sampling(len(logits)))
        self.platform.synchronize()

    def _warm_up_steps(self) -> list[tuple[int, int]]:
        """(tokens, length of the prompts)"""
        steps = [(64, 64), (4, 1), (1, 1)]
        if self._has_latents:  # whole prompts, short ones and long, have kernels of their own
            most = min(512, self.config.scheduling.max_num_batched_tokens)  # of more tokens no activations were measured
            steps += [(most, min(n, most, self.config.model.max_model_len)) for n in (128, 512)]
        return steps

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.phases[name] = time.perf_counter() - begin


_NO_TOKENS = torch.empty(0, dtype=torch.int64)
