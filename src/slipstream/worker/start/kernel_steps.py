"""Steps of dummy requests that together launch every kernel variant an engine can need.

Sizes come from the kernels' declared thresholds (`kernels/thresholds.py`). Requests have every
option that changes the kernels after the forward. All steps write to the null block. They are run
on a described GPU, where a step takes milliseconds (`kernel_variants.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from slipstream.kernels.thresholds import sizes_around
from slipstream.messages.steps import (
    FROM_MODEL,
    NewRequest,
    ScheduledRequest,
    SharedPrefix,
    StateMark,
    StepPlan,
    TableUpdate,
    TokenMask,
)
from slipstream.params.answer_forms import StructuredOutputsParams
from slipstream.params.lora_request import LoRARequest
from slipstream.params.sampling import SamplingParams
from slipstream.worker.model_runner import ModelRunner
from slipstream.worker.sampling.constrained import AwaitingMask

GREEDY = SamplingParams(temperature=0.0)
SAMPLED_ROWS = (1, 3, 16, 80)
"""Numbers of sampled rows that are tried with each combination of sampling options."""
TOP_LOGPROBS = (0, 1, 2, 3, 5, 9, 17, 20)
"""Numbers of log-probabilities: one in each range of powers of two, and the most."""
FEW, MIDDLE = 8, 512
"""(number of decodes up to which the longest context is tried, context length for more decodes)."""


def samplings() -> list[SamplingParams]:
    """Sampling parameters for each combination of options that changes what runs after the
    forward."""
    cuts: list[dict[str, Any]] = [
        {"top_k": k, "top_p": p, "min_p": m}
        for k, p, m in itertools.product((0, 20), (1.0, 0.9), (0.0, 0.05))
    ]
    found = [GREEDY]
    for cut in cuts:
        found.append(SamplingParams(temperature=0.8, **cut))
        found.append(SamplingParams(temperature=0.8, **cut, presence_penalty=0.5))
    found.append(SamplingParams(temperature=0.0, repetition_penalty=1.1))
    found.append(SamplingParams(temperature=0.8, logit_bias={1: 1.0}))
    found.append(SamplingParams(temperature=0.8, allowed_token_ids=(1, 2)))
    found += [SamplingParams(temperature=0.8, logprobs=n) for n in TOP_LOGPROBS]
    found += [SamplingParams(temperature=0.0, prompt_logprobs=n) for n in TOP_LOGPROBS]
    # masks; the grammar itself does not matter
    for t in (0.0, 0.8):
        grammar = StructuredOutputsParams(regex="a")
        found.append(SamplingParams(temperature=t, structured_outputs=grammar))
        found.append(SamplingParams(temperature=t, structured_outputs=grammar, logprobs=1))
    return found


@dataclass(frozen=True, slots=True)
class DummySequence:
    """One sequence of a dummy step: `num_tokens` tokens from position `begin` on, of which `drafts`
    are drafts."""

    begin: int
    num_tokens: int
    drafts: int = 0


class KernelSteps:
    """Maker of the dummy steps of one runner."""

    BESIDE = 3
    """Number of decodes in the dummy steps that also have prompts."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        config, self.thresholds = runner.config, runner.ops.thresholds
        scheduling = config.scheduling
        self.max_tokens = scheduling.max_num_batched_tokens
        self.max_seqs = scheduling.max_num_seqs
        self.longest = config.model.max_model_len - 1
        self.max_drafts = config.speculation.limit
        self.groups = range(len(config.cache.groups))
        self.encodes = runner.model.spec.encoder is not None
        self.loras: list[LoRARequest | None] = [None]
        if config.lora is not None:
            self.loras += config.lora.requests

    def run_forwards(self, part: int = 0, num_parts: int = 1) -> None:
        """Launch steps of all sizes, or one part of them."""
        for parts, lora, shared in itertools.islice(self._forwards(), part, None, num_parts):
            self._launch(parts, GREEDY, lora, shared=shared)
        if part == 0:
            self._copies()

    def _forwards(self) -> Iterator[tuple[list[DummySequence], LoRARequest | None, bool]]:
        for lora in self.loras:
            for parts in (*self._decodes(), *self._prompts(), *self._verified()):
                yield parts, lora, False
            for parts in self._sharing():
                yield parts, lora, True

    def run_samplings(self) -> None:
        """Launch small steps with all ways to sample, and steps of decodes of all sizes."""
        for parts in (*self._decodes(), *self._verified()):
            self._launch(parts, GREEDY)
        for sampling in samplings():
            for n in SAMPLED_ROWS:
                if n <= self.max_seqs and 4 * n <= self.max_tokens and self.longest > 4:
                    self._launch([DummySequence(0, 4)] * n, sampling)
                    self._launch([DummySequence(4, 1)] * n, sampling)
                    if self.max_drafts > 0 and 2 * n <= self.runner.config.max_num_sampled:
                        self._launch([DummySequence(3, 2, 1)] * n, sampling)

    def _decodes(self) -> Iterator[list[DummySequence]]:
        for n in sizes_around(self.thresholds.decodes, self.max_seqs):
            for begin in {0, min(self.longest - 1, self.longest if n <= FEW else MIDDLE)}:
                yield [DummySequence(begin, 1)] * n

    def _prompts(self) -> Iterator[list[DummySequence]]:
        """Prompts alone, after a cached part, and after decodes; few long ones and many short
        ones."""
        tokens = sizes_around(self.thresholds.tokens, self.max_tokens)
        for n in tokens:
            for length in {min(n, self.longest), 2}:
                yield from self._beside(n, length)
        for length in sizes_around(self.thresholds.queries, min(self.longest, self.max_tokens)):
            for n in {length, self.max_tokens}:
                yield from self._beside(n, length)

    def _beside(self, num_tokens: int, length: int) -> Iterator[list[DummySequence]]:
        """Steps of about `num_tokens` tokens in prompts of `length` tokens."""
        count = min(max(1, num_tokens // length), self.max_seqs)
        rest = num_tokens - count * length
        for begin in self._contexts(length):
            prompts = [DummySequence(begin, length)] * count
            if 0 < rest < length and count < self.max_seqs:
                prompts = [*prompts, DummySequence(0, rest)]
            if begin >= 0:
                yield prompts
                if (
                    self.BESIDE + len(prompts) <= self.max_seqs
                    and num_tokens + self.BESIDE <= self.max_tokens
                ):
                    yield [DummySequence(1, 1)] * self.BESIDE + sorted(
                        prompts, key=lambda p: p.num_tokens
                    )

    def _contexts(self, num_tokens: int) -> list[int]:
        """Cached tokens before `num_tokens` new ones: none, some, and beyond each threshold."""
        room = self.longest - num_tokens
        wanted = (0, MIDDLE, *self.thresholds.keys)
        return sorted({min(n, room) for n in wanted if room >= 0})

    def _verified(self) -> Iterator[list[DummySequence]]:
        most = min(self.runner.config.max_num_sampled, self.max_tokens)
        limit = min(self.max_drafts, self.longest - 1)
        for drafts in sorted({1, 2, limit} & set(range(1, limit + 1))):
            for n in sizes_around(self.thresholds.decodes, self.max_seqs):
                for begin in {max(1, c) for c in self._contexts(1 + drafts)}:
                    if n * (1 + drafts) <= most:
                        verified = [DummySequence(begin, 1 + drafts, drafts)] * n
                        yield verified
                        yield [DummySequence(1, 1), *verified[1:]]

    def _sharing(self) -> Iterator[list[DummySequence]]:
        size = self.runner.config.cache.block_size
        for n in sizes_around(self.thresholds.decodes, self.max_seqs):
            for begin in {size, min(self.longest - 1, MIDDLE)}:
                if n > 1 and begin < self.longest:
                    yield [DummySequence(begin, 1)] * n

    def _copies(self) -> None:
        for n in (1, 2, 3, 16):
            plan = StepPlan(0, (), block_copies=((0, 0),) * n)
            self.runner.prepare(plan)

    def _launch(
        self,
        parts: Sequence[DummySequence],
        sampling: SamplingParams,
        lora: LoRARequest | None = None,
        *,
        shared: bool = False,
    ) -> None:
        runner = self.runner
        null = tuple(TableUpdate(group, 0, (0,)) for group in self.groups)
        draft = 1 if runner.draft is None else FROM_MODEL
        new, scheduled = [], []
        for i, part in enumerate(parts):
            end = part.begin + part.num_tokens - part.drafts
            encoder = (1,) * 4 if self.encodes and part.begin == 0 else ()
            new.append(
                NewRequest(
                    str(i), (1,) * end, end, sampling, lora=lora,
                    encoder_token_ids=encoder, num_encoder_tokens=4 if self.encodes else 0,
                )
            )  # fmt: skip
            drafts = (draft,) * part.drafts
            scheduled.append(
                ScheduledRequest(str(i), part.begin, part.num_tokens, 1 + part.drafts, null, drafts)
            )
        share = (SharedPrefix(0, len(parts), runner.config.cache.block_size),) if shared else ()
        marks: tuple[StateMark, ...] = ()
        if runner.model.spec.is_recurrent and parts[-1].num_tokens > 1 and not parts[-1].drafts:
            marks = (StateMark(str(len(parts) - 1), parts[-1].num_tokens, 0),)
        plan = StepPlan(0, tuple(scheduled), tuple(new), shared=share, state_marks=marks)
        step = runner.launch(plan)
        if isinstance(step, AwaitingMask):
            step.proposed()
            step.constrain(anything(plan, runner.model.spec.vocab_size))
        step.result()
        runner.forget_rows()


def anything(plan: StepPlan, vocab_size: int) -> TokenMask:
    """A mask that allows all tokens at all positions."""
    count = sum(s.num_sampled for s in plan.scheduled)
    words = np.full((count, -(-vocab_size // 32)), -1, np.int32)
    return TokenMask(tuple(range(count)), words.tobytes())
