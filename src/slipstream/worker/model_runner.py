"""Runs steps: the model, its KV cache, the rows, and the graphs, on one device.

`launch(plan)` queues a step and returns at once (on a GPU); `InFlightStep.result()` waits for its tokens. Steps are
carried out in the order of their launch on one stream, which is why the scheduler may hand freed blocks to the next
step while this one still runs.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
import math
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from slipstream.config import EngineConfig
from slipstream.errors import OutOfMemoryError
from slipstream.kernels.build import remedy
from slipstream.kernels.metadata import AttentionMetadata, LayerKV, SamplingTensors, cache_tensors
from slipstream.kernels.native import Running
from slipstream.kernels.select import select_ops
from slipstream.model.encoder import pool
from slipstream.model.loader import LoadedModel, load_model
from slipstream.spec.autotune_table import NO_TILES, TileTable
from slipstream.spec.description import ModelDescription
from slipstream.spec.model import LatentAttentionSpec
from slipstream.spec.scheme import FORMAT_MAX, SCHEMES
from slipstream.types import ExpertTokens, Plan, StepPlan, StepResult, TextsPlan, TokenLogprobs
from slipstream.worker.graphs import StepGraphs, graph_rows, ladder, short_sizes
from slipstream.worker.input_batch import RowTable, SampledRows, encoder_batch, gather, text_batch, upload
from slipstream.worker.sampler import (
    PROMPT_LOGPROB_ROWS,
    as_logprobs,
    best_logprobs,
    prompt_positions,
    sampling_tensors,
)
from slipstream.worker.texts import TextGraphs, most_texts, text_ladder, vectors_of

_logger = logging.getLogger("slipstream.engine")

GRAPH_BYTES = 40 * 2**20
"""The driver's own memory for one graph of some three hundred launches, with its share of workspaces: 14 to 34 MiB on an H200
is what the ledgers of 13 records (gpu_8b_*.json, gpu_gptj_*.json, gpu_families.json) leave beside logits and activations."""

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
"""Rows that are sampled then: each takes as much as the next, and 64 of SmolLM2's vocabulary take 95 MB, which stay in the
process."""

CALIBRATION_TOKENS = 1024
"""Random tokens whose keys and values set the scales of an 8-bit cache."""


RUN_AHEAD = 8
"""Most sequences of a step on a CPU that is left under way while the host looks at the one before and plans the next. The
host's work, a tenth of a step of one sequence, is hidden so, but a request that comes waits a step longer; steps of 16 and more
gained nothing (benchmarks/CPU_NOTES.md)."""


@dataclasses.dataclass(slots=True)
class InFlightStep:
    """A step that was launched. `result()` waits for the device and may be called once."""

    plan: Plan
    request_ids: tuple[str, ...]
    tokens: Tensor  # int64 [N], on the host once `done`
    done: torch.cuda.Event | Running | None  # None: it is
    logprobs: tuple[list[int], tuple[Tensor, ...], list[int]] | None = None  # which samples, values, how many wanted
    prompt_logprobs: dict[str, list[TokenLogprobs]] = dataclasses.field(default_factory=dict)
    pooled: tuple[tuple[str, ...], Tensor] | None = None  # which are complete, and their vectors float32 [N, E] on the host
    vectors: Tensor | None = None  # of a TextsPlan, float32 [S, E] on the host

    def result(self) -> StepResult:
        if self.done is not None:
            self.done.synchronize()
        tokens: list[int] = self.tokens.tolist()
        embeddings = {}
        if self.pooled is not None:
            embeddings = {i: vector.tobytes() for i, vector in zip(self.pooled[0], self.pooled[1].numpy(), strict=True)}
        logprobs: dict[str, tuple[TokenLogprobs, ...]] = {}
        if self.logprobs is not None:
            which, best, counts = self.logprobs
            values = as_logprobs([tokens[i] for i in which], best, counts)  # type: ignore[arg-type]
            logprobs = {self.request_ids[i]: (v,) for i, v in zip(which, values, strict=True)}
        return StepResult(
            step_id=self.plan.step_id,
            request_ids=self.request_ids,
            token_ids=tuple((t,) for t in tokens),
            logprobs=logprobs,
            prompt_logprobs={k: tuple(v) for k, v in self.prompt_logprobs.items()},
            embeddings=embeddings,
            vectors=b"" if self.vectors is None else self.vectors.numpy().tobytes(),
        )


class ModelRunner:
    """Loads the model at once; `allocate` must come before `launch`. `weights_folder`: where rounded weights are kept."""

    def __init__(
        self, config: EngineConfig, description: ModelDescription, tiles: TileTable = NO_TILES, *, weights_folder: Path
    ) -> None:
        self.config = config
        self.device = torch.device(config.device.info.device)
        self.dtype = TORCH_DTYPES[config.model.dtype]
        if self.device.type == "cpu":
            torch.set_num_threads(config.device.num_threads)
        else:
            torch.cuda.set_device(self.device)
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
            self._synchronize()
        self.kv_scales: list[tuple[Tensor, Tensor]] | None = None
        if config.cache.dtype in FORMAT_MAX:
            if self.model.cache_scales is not None:  # of the same form: `resolve` has seen to it
                self.kv_scales = self.model.cache_scales.layers()
            else:
                with self._phase("calibrate"), torch.inference_mode():
                    self.kv_scales = self._calibrate()
        self._expert_counts = self.model.decoder.count_experts()
        self._expert_copy: tuple[Tensor, torch.cuda.Event | None] | None = None
        self._expert_load: ExpertTokens = ()
        self.kv: list[LayerKV] = []
        self.rows: RowTable | None = None
        self._under_way: tuple[Tensor, Running, SampledRows] | None = None  # on a CPU: its tokens, and whose they are
        self.graphs: StepGraphs | None = None
        self.text_graphs: TextGraphs | None = None  # an encoder's

    # --- Start --------------------------------------------------------------------------------------------------------

    def profile(self) -> int:
        """Bytes that activations take at the largest step: a whole budget of prefill, and every row sampled."""
        with self._phase("profile"), torch.inference_mode():
            scheduling, size = self.config.scheduling, self.config.cache.block_size
            num_tokens, per_token = scheduling.max_num_batched_tokens, self.model.decoder.token_bytes
            num_rows = few_rows = min(scheduling.max_num_seqs, scheduling.max_num_batched_tokens)
            known = 0
            if per_token is not None:  # then a short step shows the rest, and leaves little behind in the process
                num_tokens, known = min(num_tokens, PROBE_TOKENS), num_tokens * per_token
                few_rows = min(num_rows, FEW_ROWS)
            length = min(self.config.model.max_model_len, num_tokens)
            kv = self.make_cache(1)
            meta, tokens = self._dummy_prefill(num_tokens, length, size)
            before = self._memory_mark()
            if self.model.spec.encoder is not None:
                self.model.decoder.encode(tokens, kv, meta)
                meta = dataclasses.replace(meta, cross=meta)
            if self._has_latents:  # of a prompt that has something in the cache, whose queries are wider
                self.model.decoder.forward(tokens, kv, dataclasses.replace(meta, from_start=False))
            hidden = self.model.decoder.forward(tokens, kv, meta)
            if not self.model.spec.generates:
                pool(self.ops, hidden, meta.query_start_loc, "mean")
                return known + max(0, self._memory_peak() - before)
            if few_rows < num_rows:
                known += max(0, self._memory_peak() - before)
                before = self._memory_mark()
            logits = self.model.decoder.logits(hidden[torch.arange(few_rows, device=self.device) % num_tokens])
            self.ops.sample(logits, self._dummy_sampling(few_rows))
            del logits, hidden
            return known + max(0, self._memory_peak() - before) * num_rows // few_rows

    def allocate(self, config: EngineConfig, num_blocks: int) -> int:
        """The KV cache of `num_blocks` blocks (block 0 is the null block), the rows, and on a GPU the graphs, whose bytes
        are returned. `config` is the engine's final one: its context may have been lowered to what fits."""
        self.config = config
        try:
            with self._phase("cache"):
                self.kv = self.make_cache(num_blocks)
                self.rows = None if self.model.spec.is_encoder else self._make_rows()
                self._synchronize()
        except RuntimeError as error:
            raise OutOfMemoryError(f"the KV cache of {num_blocks} blocks does not fit: {error}") from error
        graph_bytes = 0
        if not config.device.enforce_eager:
            before = torch.cuda.mem_get_info(self.device)[0]
            with self._phase("graphs"):
                if self.rows is None:
                    self.text_graphs = TextGraphs(self.model.decoder, self.model.description.pooling, self.kv, config)
                    self.text_graphs.capture()
                else:
                    self.graphs = StepGraphs(self.model.decoder, self.kv, self.rows, config)
                    self.graphs.capture()
            graph_bytes = max(0, before - torch.cuda.mem_get_info(self.device)[0])
        with self._phase("warm-up"), torch.inference_mode():
            self._warm_up()
        return graph_bytes

    def rows_bytes(self) -> int:
        """What `allocate` takes beside cache and graphs."""
        if self.model.spec.is_encoder:
            return 0
        model = self.config.model
        per_row = (model.max_model_len + 1 + self.config.longest_seq_blocks) * 4
        return (self.config.scheduling.max_num_seqs + 1) * per_row

    def graph_reserve_bytes(self, activation_bytes: int) -> int:
        """Room kept for graphs: the logits or vectors of each, the largest one's activations, and what the driver takes for the
        launches. The largest is run once beside its graph, before it is captured. `activation_bytes`: what `profile` found."""
        spec, size = self.model.spec, self.dtype.itemsize
        if spec.is_encoder:
            sizes = text_ladder(self.config.scheduling.max_num_batched_tokens)
            numbers = sum(most_texts(self.config, n) for n in sizes) * spec.hidden_size
            return 2 * activation_bytes + 4 * numbers + len(sizes) * GRAPH_BYTES
        decodes, short = ladder(self.config.scheduling.max_num_seqs), short_sizes(self.config, encoded=spec.encoder is not None)
        logits = (graph_rows(decodes, short) + decodes[-1]) * spec.vocab_size
        widest = max(layer.mlp.width for layer in spec.layers)
        activations = 2 * max(decodes[-1:] + short[-1:]) * (widest + 8 * spec.hidden_size)
        return (logits + activations) * size + (len(decodes) + len(short)) * GRAPH_BYTES

    # --- Steps --------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def launch(self, plan: Plan) -> InFlightStep:
        """Queue one step. On a CPU a step of a few greedy decodes is under way when this returns, if the kernels can; any other
        is done, and so is what was under way before."""
        if isinstance(plan, TextsPlan):
            return self._read(plan)
        rows = self.rows
        assert rows is not None, "allocate() comes first"
        self._take_tokens()
        rows.apply(plan)
        if plan.block_copies:
            pairs = upload(np.array(plan.block_copies, dtype=np.int64), self.device)
            for layer in self.kv:
                self.ops.copy_blocks(layer, pairs[:, 0], pairs[:, 1])
        if (texts := encoder_batch(plan, rows.block_size, self.device)) is not None:
            self.model.decoder.encode(texts[0], self.kv, texts[1])
        if self.graphs is not None and (replayed := self.graphs.run(plan)) is not None:
            return self._sample(plan, *replayed, {})
        batch = gather(rows, plan)
        greedy = all(rows.rows[s.request_id].is_greedy for s in batch.sampled.sequences)
        if greedy and batch.sample_index is None:
            begun = self.model.decoder.begin_greedy(batch.token_ids, self.kv, batch.meta)
            if begun is not None:
                sampled, running = begun
                self._under_way = (sampled, running, batch.sampled)
                goes_on = len(plan.scheduled) <= RUN_AHEAD and self.config.device.num_threads > 1
                if not goes_on:
                    self._take_tokens()
                ids = tuple([s.request_id for s in batch.sampled.sequences])
                return InFlightStep(plan, ids, sampled, running if goes_on else None)
        hidden = self.model.decoder.forward(batch.token_ids, self.kv, batch.meta)
        prompt = self._prompt_logprobs(plan, hidden)
        pooled = self._pool(plan, hidden, batch.meta)
        if not batch.sampled.sequences:
            return InFlightStep(plan, (), torch.empty(0, dtype=torch.int64), self._event(), None, prompt, pooled)
        hidden = hidden if batch.sample_index is None else hidden[batch.sample_index]
        if greedy and (tokens := self.model.decoder.greedy(hidden)) is not None:
            return self._sampled(plan, batch.sampled, tokens, prompt, pooled)
        return self._sample(plan, self.model.decoder.logits(hidden), batch.sampled, prompt, pooled)

    def _read(self, plan: TextsPlan) -> InFlightStep:
        """An encoder's step."""
        if self.text_graphs is not None:
            vectors = self.text_graphs.run(plan)
        else:
            token_ids, meta = text_batch(plan, self.config.cache.block_size, self.device)
            vectors = self._vectors(self.model.decoder.forward(token_ids, self.kv, meta), meta.query_start_loc)
        vectors = self._to_host(vectors)  # before the next replay, which writes where they stand
        return InFlightStep(plan, (), torch.empty(0, dtype=torch.int64), self._event(), vectors=vectors)

    def _sampled(
        self,
        plan: StepPlan,
        sampled: SampledRows,
        tokens: Tensor,
        prompt: dict[str, list[TokenLogprobs]] | None = None,
        pooled: tuple[tuple[str, ...], Tensor] | None = None,
    ) -> InFlightStep:
        assert self.rows is not None
        self.rows.write(sampled.rows, sampled.positions, tokens)
        ids = tuple([s.request_id for s in sampled.sequences])
        return InFlightStep(plan, ids, self._to_host(tokens), self._event(), None, prompt or {}, pooled)

    def is_long_in_launch(self, plan: Plan) -> bool:
        """Whether `launch` computes more than a token of each sequence before it returns."""
        return self.device.type == "cpu" and (isinstance(plan, TextsPlan) or plan.scheduled[-1].num_tokens > 1)

    def _take_tokens(self) -> None:
        """What the step under way on a CPU has sampled goes where the next step reads it."""
        if self._under_way is not None:
            assert self.rows is not None
            tokens, running, sampled = self._under_way
            running.synchronize()
            self.rows.write(sampled.rows, sampled.positions, tokens)
            self._under_way = None

    def forget_rows(self) -> None:
        """Every sequence is gone, after a step failed. What the device still computes changes nothing that is read again."""
        self._under_way = None
        if self.rows is not None:
            self.rows.forget()

    def _sample(
        self,
        plan: StepPlan,
        logits: Tensor,
        sampled: SampledRows,
        prompt: dict[str, list[TokenLogprobs]],
        pooled: tuple[tuple[str, ...], Tensor] | None = None,
    ) -> InFlightStep:
        rows = self.rows
        assert rows is not None
        ids = tuple(s.request_id for s in sampled.sequences)
        wanted = [rows.rows[i].sampling.logprobs for i in ids]
        which = [i for i, k in enumerate(wanted) if k is not None]
        # Log-probabilities are of the model's own distribution: kept before the sampler overwrites the logits.
        kept = logits[upload(np.array(which, np.int64), self.device)] if which else None
        tokens = self.ops.sample(logits, sampling_tensors(rows, sampled))
        rows.write(sampled.rows, sampled.positions, tokens)
        logprobs = None
        if kept is not None:
            counts = [wanted[i] or 0 for i in which]
            best = best_logprobs(kept, tokens[upload(np.array(which, np.int64), self.device)], max(counts))
            logprobs = (which, tuple(self._to_host(t) for t in best), counts)
        return InFlightStep(plan, ids, self._to_host(tokens), self._event(), logprobs, prompt, pooled)

    def _pool(self, plan: StepPlan, hidden: Tensor, meta: AttentionMetadata) -> tuple[tuple[str, ...], Tensor] | None:
        """The vectors (or scores) of a decoder's pooled sequences whose last token is in this step: its state stands for the
        whole."""
        assert self.rows is not None
        if not self.rows.pooled:
            return None
        rows, wanted = self.rows.rows, self.rows.pooled
        which = [
            i
            for i, s in enumerate(plan.scheduled)
            if s.request_id in wanted and s.num_computed_tokens + s.num_tokens == rows[s.request_id].num_prompt_tokens
        ]
        if not which:
            return None
        ends = meta.query_start_loc[upload(np.array(which, np.int64) + 1, self.device)]
        vectors = self._vectors(hidden[ends.long() - 1], torch.arange(len(which) + 1, device=self.device))
        return tuple(plan.scheduled[i].request_id for i in which), self._to_host(vectors)

    def _vectors(self, hidden: Tensor, starts: Tensor) -> Tensor:
        return vectors_of(self.model.decoder, self.model.description.pooling, hidden, starts)

    def _prompt_logprobs(self, plan: StepPlan, hidden: Tensor) -> dict[str, list[TokenLogprobs]]:
        """For sequences in prefill that asked: of each prompt token that follows a position of this step."""
        assert self.rows is not None
        found: dict[str, list[TokenLogprobs]] = {}
        start = 0
        for s in plan.scheduled:
            row = self.rows.rows[s.request_id]
            count = row.sampling.prompt_logprobs
            if count is not None and (num := prompt_positions(row, s)):
                entries: list[TokenLogprobs] = []
                first = s.num_computed_tokens + 1
                for i in range(0, num, PROMPT_LOGPROB_ROWS):
                    n = min(PROMPT_LOGPROB_ROWS, num - i)
                    logits = self.model.decoder.logits(hidden[start + i : start + i + n])
                    tokens = self.rows.tokens[row.index, first + i : first + i + n]
                    entries += as_logprobs(tokens.tolist(), best_logprobs(logits, tokens, count), [count] * n)
                found[s.request_id] = entries
            start += s.num_tokens
        return found

    def expert_load(self) -> ExpertTokens:
        """Tokens by expert since the start, of each layer with experts. Never waits for a GPU: there the numbers are those of
        the last call's time, once its copy has arrived."""
        if not self._expert_counts:
            return ()
        copied, event = self._expert_copy or (None, None)
        if event is None or event.query():
            counts = self._to_host(torch.cat(list(self._expert_counts.values())))
            self._expert_copy = counts, self._event()
            copied = counts if self.device.type == "cpu" else copied
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
        """A layer's keys and values each, of zeros."""
        dtype = TORCH_DTYPES[self.config.cache.dtype]
        if self.model.spec.is_encoder:  # its layers use one in turn
            return [LayerKV(*self._layer_cache(0, num_blocks, dtype))] * self.model.spec.num_layers
        if self.kv_scales is None:
            return [LayerKV(*self._layer_cache(i, num_blocks, dtype)) for i in range(len(self.model.spec.layers))]
        return [LayerKV(*self._layer_cache(i, num_blocks, dtype), *s) for i, s in enumerate(self.kv_scales)]

    def _layer_cache(self, layer: int, num_blocks: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        attention, size = self.model.spec.layers[layer].attention, self.config.cache.block_size
        by_dim = self.ops.values_by_dim(dtype)
        return cache_tensors(attention, num_blocks, size, lambda s: _zeros(s, dtype, self.device), values_by_dim=by_dim)

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
        self.model.decoder.forward(tokens, kv, meta)
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
            encoded=self.model.spec.encoder is not None,
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
        if self.device.type == "cpu" or self.text_graphs is not None:
            return
        for num_tokens, length in self._warm_up_steps():
            meta, tokens = self._dummy_prefill(num_tokens, length, self.config.cache.block_size)
            if length == 1:
                meta = dataclasses.replace(meta, num_decodes=num_tokens)
            if self.model.spec.encoder is not None:
                self.model.decoder.encode(tokens, self.kv, dataclasses.replace(meta, num_decodes=0))
                meta = dataclasses.replace(meta, cross=meta)
            hidden = self.model.decoder.forward(tokens, self.kv, meta)
            if not self.model.spec.generates:
                continue
            logits = self.model.decoder.logits(hidden[-2:])
            self.ops.sample(logits, self._dummy_sampling(len(logits)))
        self._synchronize()

    def _warm_up_steps(self) -> list[tuple[int, int]]:
        """(tokens, length of the prompts)"""
        steps = [(64, 64), (4, 1), (1, 1)]
        if self._has_latents:  # whole prompts, short ones and long, have kernels of their own
            most = min(512, self.config.scheduling.max_num_batched_tokens)  # of more tokens no activations were measured
            steps += [(most, min(n, most, self.config.model.max_model_len)) for n in (128, 512)]
        return steps

    def _to_host(self, tensor: Tensor) -> Tensor:
        if self.device.type == "cpu":
            return tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    def _event(self) -> torch.cuda.Event | None:
        if self.device.type == "cpu":
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _memory_mark(self) -> int:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            return torch.cuda.memory_allocated(self.device)
        return reset_peak_rss()

    def _memory_peak(self) -> int:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            return torch.cuda.max_memory_allocated(self.device)
        return _peak_rss_bytes()

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.phases[name] = time.perf_counter() - begin


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """On a CPU the pages come from the system zeroed, when they are first used: a large cache costs nothing until then."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(shape)


def reset_peak_rss() -> int:
    """Bytes of this process now, from which `_peak_rss_bytes` counts on. Where the system can't start the count anew, the
    highest there ever was: then less is found than was used."""
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:
        pass
    return _peak_rss_bytes()


def _peak_rss_bytes() -> int:
    try:
        with open("/proc/self/status") as file:
            line = next(line for line in file if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    except (OSError, StopIteration):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
