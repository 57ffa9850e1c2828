"""Runs steps on one device, with a model whose cache is allocated.

A `ModelRunner` holds the model, its KV cache, and the rows of the running sequences. launch(plan) =
sample(forward(prepare(plan)))

1. `prepare` updates the rows and makes an `InputBatch`.
2. `forward` computes hidden states. The loaded model's table of forward paths chooses how.
3. `sample` samples tokens and writes them where the next step reads them.

On a GPU `launch` queues the step and returns at once; `InFlightStep.result()` waits. Steps run on one stream in the
order of their launch. So the scheduler may assign freed blocks to the next step while this one still runs.

No torch. Values are the platform's: tensors, or NumPy arrays on a CPU without torch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, cast

import numpy as np

from slipstream.kernels.metadata import LayerKV, SamplingTensors
from slipstream.messages.steps import Extra, StepPlan, TokenMask
from slipstream.worker.forward.base import BegunStep, InputBatch, Output
from slipstream.worker.in_flight import InFlightStep
from slipstream.worker.inputs.input_batch import NO_ROWS
from slipstream.worker.inputs.rows import RowTable
from slipstream.worker.inputs.text_inputs import encoder_batch
from slipstream.worker.runner import Runner
from slipstream.worker.sampling.asked import completed_prompts, prompt_logprobs
from slipstream.worker.sampling.constrained import AwaitingMask, apply_mask
from slipstream.worker.sampling.draws import Sampler, draw
from slipstream.worker.sampling.sampler import sampling_tensors

if TYPE_CHECKING:
    from torch import Tensor

    from slipstream.worker.forward.forwards import Forwards
    from slipstream.worker.graphs.step_graphs import StepGraphs
    from slipstream.worker.loaded_runner import LoadedRunner
    from slipstream.worker.ranks.stage_tokens import FirstStage, LastStage


class ModelRunner(Runner):
    """Runs a decoder's steps."""

    def __init__(self, loaded: LoadedRunner, kv: list[LayerKV]) -> None:
        super().__init__(loaded, kv)
        self.rows = self._make_rows()
        self.graphs: StepGraphs | None = None
        self.adapter_graphs: StepGraphs | None = None
        self._begun: BegunStep | None = None  # a step that a CPU still computes
        self._ends_here = self.model.spec.has_last  # otherwise another stage continues its steps
        self._first: FirstStage | None = None  # of a pipeline, like `_last`
        self._last: LastStage | None = None
        self._join_stages()
        self._sampler = Sampler(
            self.ops.sample,
            lambda logits, mask: apply_mask(logits, mask, self.ops, self.platform),
            self.ops.best_logprobs,
            self.ops.packed_logprobs,
            self.platform.to_host,
            self.platform.values.floats,
            self.platform.values.on_host,
        )

    def _make_rows(self) -> RowTable:
        sectioned = self.config.media is not None and any(
            getattr(a.position, "sections", None) for a in self.model.spec.attentions
        )
        shard = None if self.partition is None else self.partition.shard
        rank = shard.rank if shard is not None and shard.deals_requests else 0
        return RowTable.of(
            self.config,
            self.ops,
            self.device,
            scales=self.model.spec.block_scales,
            sectioned=sectioned,
            rank=rank,
        )

    def _join_stages(self) -> None:
        """Set up the first and last stage of a pipeline, which pass on tokens."""
        if self.partition is None or self.partition.pipe is None:
            return
        from slipstream.worker.ranks.stage_tokens import FirstStage, LastStage

        if self.model.spec.has_first:
            self._first = FirstStage(self.partition.pipe, self.rows, self.platform, self.draft)
        if self._ends_here:
            self._last = LastStage(self.partition.pipe, self.device)

    # --- Graphs -------------------------------------------------------------------------------------------------------

    def capture(self) -> None:
        from slipstream.worker.graphs.graph_inputs import AdapterInput, SharedPrefixInput
        from slipstream.worker.graphs.step_graphs import StepGraphs

        config, forwards = self.config, cast("Forwards", self.forwards)
        make = partial(StepGraphs, forwards, self.kv, self.rows, config)
        self.graphs = make()
        self.graphs.capture(few=self.loaded.is_woken)
        forwards.add(self.graphs)
        shares = self.ops.shares_prefixes and config.cache.context_ranks == 1
        if shares and not self.loaded.has_latents:
            forwards.add(make(SharedPrefixInput(self.device), self.graphs))
        if self.adapters is not None:
            self.adapter_graphs = make(AdapterInput(self.adapters, self.rows, self.device))
            self.adapter_graphs.capture()
            forwards.add(self.adapter_graphs)
        if self.draft is not None and self.platform.is_asynchronous:
            self.draft.make_graphs(self.rows, config)

    @property
    def graph_sizes(self) -> tuple[int, ...]:  # type: ignore[override]
        return () if self.graphs is None else tuple(self.graphs.sizes)

    def capture_next(self) -> bool:
        with self.platform.values.inference():
            return any(
                graphs is not None and graphs.capture_next()
                for graphs in (self.graphs, self.adapter_graphs)
            )

    # --- Steps --------------------------------------------------------------------------------------------------------

    def launch(self, plan: StepPlan) -> InFlightStep | AwaitingMask:
        """Queue one step.

        On a CPU the launch computes the step, but a step of a few greedy decodes may still run when
        this returns. Any earlier step is done by then.
        """
        with self.platform.values.inference():
            return self._launch(plan)

    def _launch(self, plan: StepPlan) -> InFlightStep | AwaitingMask:
        batch, num_cold, rows = self.prepare(plan), self._num_cold, self.rows
        drafts = copied = later = None
        if self.draft is not None and (drafted := self.draft.write_drafts(plan, rows)):
            # A grammar's mask depends on the drafts, so they are copied to the host while the forward runs. Without a
            # grammar the copy is launched after the forward, so that the GPU does not wait for its launch.
            later = None if batch.has_grammar else self.draft.kept_drafts(drafted, rows)
            if later is None:
                drafts = self.platform.to_host(self.draft.tokens_of(drafted, rows))
                copied = self.platform.record()
        output = self.forwards.run(batch)
        if self.loaded.tap is not None and not isinstance(output, BegunStep):
            output.extras = (self.loaded.tap(plan, output),)
        if later is not None:
            drafts = self.platform.to_host(later())
        is_cold = self._num_cold > num_cold
        if self.loaded.follower is not None:
            self.loaded.follower.after_step()
        if not self._ends_here:
            return self._passed_on(plan, output)

        if isinstance(output, BegunStep):
            step = self._run_ahead(plan, output)
        elif batch.has_grammar:
            if self._last is not None:
                self._last.awaits_mask(sum(s.num_sampled for s in plan.scheduled))
            draw_by = self._awaiting(batch, output, drafts, is_cold)
            return AwaitingMask(plan, draw_by, drafts, copied)
        else:
            step = self.sample(batch, plan, output)
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
        """Prepare the sampling of a step with grammars. The part that needs no mask is launched now."""
        ready: tuple[Tensor, SamplingTensors | None] | None = None
        if output.sampled.requests and output.end is None and self.platform.is_asynchronous:
            ready = (
                output.forward.logits(output.sampled_states),
                sampling_tensors(self.rows, output.sampled),
            )

        def draw_by(mask: TokenMask) -> InFlightStep:
            num_cold = self._num_cold
            with self.platform.values.inference():
                step = self.sample(batch, batch.step[0], output, mask, ready)
            step.drafts, step.is_cold = drafts, is_cold or self._num_cold > num_cold
            return step

        return draw_by

    def prepare(self, plan: StepPlan) -> InputBatch:
        """Drop, create and extend rows, copy shared blocks, and encode new prompts.

        If a CPU still computes the previous step and `plan` continues it, inputs are gathered meanwhile, and tokens last.
        """
        rows = self.rows
        ahead_of = self._begun if self._begun and self._begun.goes_on_in(plan) else None
        if ahead_of is None:
            self.settle()
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
            self.ops.copy_blocks(self._block_rows, self._block_rows, sources, targets)
            if self.draft is not None:
                scale = self.model.spec.block_scales[0]  # drafters read the first group's tables
                self.draft.copy_blocks(sources * scale, targets * scale)
        if rows.cross is not None and (texts := encoder_batch(rows, plan)) is not None:
            self.forwards.encode(texts[0], self.kv, texts[1])
        batch = InputBatch(self.kv, plan, rows)
        if ahead_of is not None:
            self.settle()
            array = self.platform.values.array
            array(batch.token_ids)[:] = array(ahead_of.tokens)
        return batch

    def sample(
        self,
        batch: InputBatch,
        plan: StepPlan,
        output: Output,
        mask: TokenMask | None = None,
        ready: tuple[Tensor, SamplingTensors | None] | None = None,
    ) -> InFlightStep:
        """Sample tokens, and compute the log-probabilities and embeddings that requests want.

        `ready`: logits and sampling parameters, if already launched.
        """
        sampled, hidden, forward = output.sampled, output.hidden, output.forward

        def logits_of(start: int, i: int, n: int) -> Tensor:
            at = output.row(start) + i
            return forward.logits(hidden[at : at + n])

        extras: list[Extra | Callable[[], Extra]] = [*output.extras]
        if self.rows.wanting["prompt_logprobs"]:
            extras += prompt_logprobs(self._sampler, self.rows, plan, logits_of)
        pooled = self._pool(plan, output) if self.rows.wanting["vector"] else None
        if not sampled.requests:
            return InFlightStep(plan, None, NO_ROWS, self.platform.record(), None, extras, pooled)
        if mask is not None and output.end is not None:
            output.end(mask)
        tokens, logprobs = output.tokens, None
        if output.logprobs is not None:
            which, counts = sampled.wanted_logprobs(self.rows)
            logprobs = which, self.platform.to_host(output.logprobs), counts
        if tokens is None:
            own = output.sampled_states if ready is None else None
            tokens = forward.greedy(own) if own is not None and batch.is_greedy else None
            if tokens is None:
                drawn = None if own is None else forward.drawn(own, self.rows, sampled, mask)
                if drawn is None:
                    logits, params = ready or (forward.logits(output.sampled_states), None)
                    drawn = draw(self._sampler, self.rows, sampled, logits, mask, params)
                tokens, logprobs = drawn.tokens, drawn.logprobs
                extras += drawn.extras
            self.rows.write(sampled.rows, sampled.positions, tokens)
        if self._last is not None:
            self._last.drawn(tokens)
        copied = self.platform.to_host(tokens)
        done = self.platform.record()
        return InFlightStep(plan, sampled, copied, done, logprobs, extras, pooled)

    def _passed_on(self, plan: StepPlan, output: Output | BegunStep) -> InFlightStep:
        """Make the handle of a step whose result the next pipeline stage computes."""
        if self._first is not None and output.sampled.requests:
            self._first.expect(output.sampled.requests)
        return InFlightStep(plan, None, NO_ROWS, self.platform.record())

    def max_in_flight(self, plan: StepPlan) -> int:
        if self.platform.is_asynchronous:
            return 2
        return 1 if plan.scheduled[-1].num_tokens > 1 else 2

    def _run_ahead(self, plan: StepPlan, begun: BegunStep) -> InFlightStep:
        """Make the handle of a CPU's step of greedy decodes."""
        self._begun, done = begun, begun.done
        if done is None:
            self.settle()
        return InFlightStep(plan, begun.sampled, begun.tokens, done, begun.logprobs)

    def settle(self) -> None:
        """Wait for a step that a CPU still computes, and write its tokens where the next step reads them."""
        if self._begun is not None:
            begun, self._begun = self._begun, None
            begun.finish()
            self.rows.write(begun.sampled.rows, begun.sampled.positions, begun.tokens)

    def forget_rows(self) -> None:
        self._begun = None
        for stage in (self._first, self._last):
            if stage is not None:
                stage.forget()
        self.rows.forget()

    def _pool(self, plan: StepPlan, output: Output) -> tuple[tuple[str, ...], Tensor] | None:
        """Vectors or scores of a decoder's pooled sequences whose last token is in this step.

        They are computed from the last token's hidden state.
        """
        ids, ends = completed_prompts(self.rows, plan)
        if not ids:
            return None
        last = output.hidden[
            self.platform.upload(np.array([output.row(token) for token in ends], np.int64))
        ]
        starts = self.platform.values.arange(len(ids) + 1)
        vectors = self.forwards.vectors(self.model.description.pooling, last, starts)
        return ids, self.platform.to_host(vectors)
