"""Slipstream in this process: `LLM` for all requests at once, `AsyncLLM` (with the engine in its
own process) for arrivals over time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Self

from slipstream.bench.adapters import AS_STORED, EngineSetup, OnPhase
from slipstream.bench.load import MeasuredAnswer
from slipstream.bench.workload import BenchRequest
from slipstream.config import EngineArgs
from slipstream.costs.metrics import RequestTiming
from slipstream.engine.async_llm import AsyncLLM
from slipstream.engine.llm import LLM
from slipstream.params.options import DEFAULT_OPTIONS, RequestOptions
from slipstream.params.prompts import Prompt
from slipstream.params.sampling import SamplingParams


def greedy(output_tokens: int) -> SamplingParams:
    """Sampling parameters for a greedy answer of exactly this many tokens."""
    return SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True)


def prompt_of(request: BenchRequest) -> Prompt:
    return {"prompt_token_ids": list(request.prompt_token_ids)}


class OfflineSlipstream:
    """Engine `LLM`, which receives all requests at once; it reports the times of each request's
    first and last token."""

    def __init__(
        self, args: EngineArgs, *, progress: Callable[[str], None] = lambda phase: None
    ) -> None:
        self.llm = LLM.from_engine_args(args, progress=progress)

    def run(self, requests: Sequence[BenchRequest]) -> list[RequestTiming]:
        """Send all requests at once, with an empty prefix cache. Returns a record of each."""
        self.llm.reset_prefix_cache()
        outputs = self.llm.generate(
            [prompt_of(r) for r in requests],
            [greedy(r.output_tokens) for r in requests],
            progress=False,
        )
        return [
            RequestTiming(
                input_tokens=len(output.prompt_token_ids),
                output_tokens=len(output.outputs[0].token_ids),
                sent=output.times.arrival,
                first_token=output.times.first_token,
                last_token=output.times.last_token,
                cached_tokens=output.num_cached_tokens,
            )
            for output in outputs
            if output.times is not None
        ]

    def token_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Natural log-probability of each token but the first, given those before it."""
        sampling = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, prompt_logprobs=0)
        (output,) = self.llm.generate([list(token_ids)], sampling, progress=False)
        return [
            position.chosen.logprob
            for position in output.prompt_logprobs or ()
            if position is not None
        ]

    def describe(self) -> dict[str, Any]:
        llm = self.llm
        stats = llm.stats()
        return {
            "name": "slipstream",
            "config": llm.config,
            "ledger": llm.ledger,
            "start_phases_s": llm.phases,
            "stats": stats,
        }

    def close(self) -> None:
        self.llm.shutdown()


class AsyncSlipstream:
    """A `StreamingEngine` over `AsyncLLM`; used as `async with await AsyncSlipstream.start(args)`."""

    def __init__(self, engine: AsyncLLM) -> None:
        self.engine = engine

    @classmethod
    async def start(
        cls, args: EngineArgs, *, progress: Callable[[str], None] = lambda phase: None
    ) -> Self:
        return cls(await AsyncLLM.start(args, progress=progress))

    async def ask(
        self,
        request: BenchRequest,
        answer: MeasuredAnswer,
        options: RequestOptions = DEFAULT_OPTIONS,
        /,
    ) -> None:
        sampling = greedy(request.output_tokens)
        async for output in self.engine.generate(prompt_of(request), sampling, options):
            tokens = sum(len(choice.token_ids) for choice in output.outputs)
            if tokens:
                answer.add(time.monotonic(), tokens)
                if answer.keeps:
                    answer.token_ids += output.outputs[0].token_ids
            answer.counts_cached = True
            answer.cached_tokens = max(answer.cached_tokens, output.num_cached_tokens)

    async def describe(self) -> dict[str, Any]:
        engine = self.engine
        return {
            "name": "slipstream",
            "config": engine.config,
            "ledger": engine.ledger,
            "start_phases_s": engine.phases,
            "stats": await engine.stats(),
        }

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.engine.shutdown()


def engine_args(setup: EngineSetup) -> EngineArgs:
    """Engine settings for a measurement: no tokenizer, no prefix cache, and limits that fit the
    batch and the lengths, unless `setup` sets others."""
    given: dict[str, Any] = {
        "enable_prefix_caching": False,
        "skip_tokenizer_init": True,
        "max_num_seqs": setup.batch_size,
        "max_model_len": setup.max_model_len,
        **setup.parallel.settings,
        **setup.settings,
    }
    if setup.scheme != AS_STORED:
        given["quantization"] = setup.scheme
    return EngineArgs(model=str(setup.path or setup.model), **given)


def make(setup: EngineSetup, on_phase: OnPhase) -> OfflineSlipstream:
    return OfflineSlipstream(engine_args(setup), progress=on_phase)
