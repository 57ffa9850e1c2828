"""Steps of dummy requests before the first real one, so that no request waits for a compiler.

Captured graphs contain a step's layers and greedy ends. Other output heads and samplers run after
them, with kernels that depend on the sampling settings and the number of rows. Triton compiles
separate kernels for one row, for multiples of 16, and for other numbers.
"""

from __future__ import annotations

import numpy as np

from slipstream.messages.steps import (
    FROM_MODEL,
    NewRequest,
    ScheduledRequest,
    StepPlan,
    TableUpdate,
    TokenMask,
)
from slipstream.params.answer_forms import StructuredOutputsParams
from slipstream.params.sampling import SamplingParams
from slipstream.worker.model_runner import ModelRunner
from slipstream.worker.sampling.constrained import AwaitingMask

NUM_ROWS = (1, 3, 16, 80)
"""Numbers of rows. More than 64 rows are sampled differently (`sampling.SPLIT_ROWS`)."""
PROMPT = (0,) * 8
SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.8, top_k=20, top_p=0.9),
    SamplingParams(temperature=0.8, top_p=0.9, min_p=0.05, presence_penalty=0.5, logprobs=1),
    SamplingParams(
        temperature=1.0, structured_outputs=StructuredOutputsParams(regex="a")
    ),  # masks; its grammar does not matter
)
NUM_DRAFTS = 2


def warm_up(runner: ModelRunner) -> None:
    """Run prompts, decodes and, with speculation, drafts of a few rows with each of `SAMPLINGS`.

    All of them write into the null block. Nothing is run where nothing is compiled at run time
    (CPU), nor for models that generate nothing or have an encoder.
    """
    spec, scheduling = runner.model.spec, runner.config.scheduling
    if not runner.loaded.warms_up or not spec.generates or spec.encoder is not None:
        return
    if runner.config.model.max_model_len <= len(PROMPT) + NUM_DRAFTS + 1:
        return
    drafts = (0 if runner.draft is None else FROM_MODEL,) * NUM_DRAFTS
    null = tuple(TableUpdate(group, 0, (0,)) for group in range(len(runner.config.cache.groups)))
    for num_rows in NUM_ROWS:
        if (
            num_rows > scheduling.max_num_seqs
            or num_rows * len(PROMPT) > scheduling.max_num_batched_tokens
        ):
            break
        names = [f"warm-up {i}" for i in range(num_rows)]
        for sampling in SAMPLINGS:
            new = tuple(NewRequest(name, PROMPT, len(PROMPT), sampling) for name in names)
            prompts = tuple(ScheduledRequest(name, 0, len(PROMPT), 1, null) for name in names)
            decodes = tuple(ScheduledRequest(name, len(PROMPT), 1, 1) for name in names)
            plans = [StepPlan(0, prompts, new), StepPlan(1, decodes)]
            most = runner.config.speculation.limit
            count = min(NUM_DRAFTS, most, runner.config.max_num_sampled // num_rows - 1)
            # after a prompt, and after a run of drafts
            for first in (len(PROMPT), len(PROMPT) + 1) if count > 0 else ():
                own = drafts[:count]
                more = tuple(
                    ScheduledRequest(n, first, 1 + count, 1 + count, (), own) for n in names
                )
                plans.append(StepPlan(len(plans), more))
            for plan in plans:
                step = runner.launch(plan)
                if isinstance(step, AwaitingMask):
                    step.constrain(_anything(plan, spec.vocab_size))
                step.result()
            runner.forget_rows()
    runner.reset_expert_load()


def _anything(plan: StepPlan, vocab_size: int) -> TokenMask:
    """A mask that allows all tokens at all positions."""
    count = sum(s.num_sampled for s in plan.scheduled)
    return TokenMask(
        tuple(range(count)), np.full((count, -(-vocab_size // 32)), -1, np.int32).tobytes()
    )
