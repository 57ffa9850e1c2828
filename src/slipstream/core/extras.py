"""Contents of a step's result other than tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream.core.request import Request
from slipstream.core.request_table import RequestTable
from slipstream.messages.beams import LikeliestTokens
from slipstream.messages.finish_reason import FinishReason
from slipstream.messages.logprobs import PromptLogprobs, SampledLogprobs, TokenLogprobs, as_logprobs
from slipstream.messages.outputs import EngineOutput, TokenOutput
from slipstream.messages.steps import Extra, RequestFailure, SamplerState
from slipstream.messages.texts import PooledVector, VectorOutput


class Extras:
    """Contents of a step's result other than tokens, by kind and request."""

    def __init__(self, extras: Iterable[Extra]) -> None:
        self.sampled: SampledLogprobs | None = None
        self.of_prompts: dict[str, PromptLogprobs] = {}
        self.failed: dict[str, str] = {}
        self.states: list[SamplerState] = []
        self.vectors: list[PooledVector] = []
        self.others: list[Extra] = []  # contents that participants process
        self.completes: Callable[[TokenOutput], TokenOutput] | None = None  # set by a participant
        for extra in extras:
            match extra:
                case SampledLogprobs():
                    self.sampled = extra
                case PromptLogprobs():
                    self.of_prompts[extra.request_id] = extra
                case RequestFailure():
                    self.failed[extra.request_id] = extra.error
                case SamplerState():
                    self.states.append(extra)
                case PooledVector():
                    self.vectors.append(extra)
                case _:
                    self.others.append(extra)

    @cached_property
    def _arrays(self) -> list[npt.NDArray[Any]]:
        """Arrays of `sampled`, as from `best_logprobs`: chosen, ranks, top ids, top values."""
        s = self.sampled
        assert s is not None
        num = len(s.request_ids)
        chosen, ranks = np.frombuffer(s.logprobs, np.float32), np.frombuffer(s.ranks, np.int64)
        ids, values = np.frombuffer(s.top_ids, np.int64), np.frombuffer(s.top_logprobs, np.float32)
        return [chosen, ranks, ids.reshape(num, -1), values.reshape(num, -1)]

    @cached_property
    def _logprobs(self) -> dict[str, list[TokenLogprobs]]:
        found: dict[str, list[TokenLogprobs]] = {}
        if (s := self.sampled) is not None:
            for request_id, own in zip(
                s.request_ids, as_logprobs(s.token_ids, self._arrays, s.counts), strict=True
            ):
                found.setdefault(request_id, []).append(own)
        return found

    def likeliest(self, requests: Sequence[Request]) -> LikeliestTokens:
        """Most likely tokens of requests that have one sampled position each."""
        assert self.sampled is not None
        names = [request.request_id for request in requests]
        cached = [request.num_cached_tokens for request in requests]
        *_, ids, values = self._arrays
        if len(names) < len(ids):
            at = {request_id: i for i, request_id in enumerate(self.sampled.request_ids)}
            rows = [at[name] for name in names]
            ids, values = ids[rows], values[rows]
        return LikeliestTokens(names, cached, ids, values)

    def joined(self, output: TokenOutput) -> TokenOutput:
        """Add log-probabilities of the output's tokens and of a prompt that ended in this step."""
        logprobs = tuple(self._logprobs.get(output.request_id, ())[: len(output.token_ids)])
        output = output._replace(
            logprobs=logprobs, prompt_logprobs=self.of_prompts.pop(output.request_id, None)
        )
        return output if self.completes is None else self.completes(output)


def outputs_without_tokens(extras: Extras, requests: RequestTable) -> list[EngineOutput]:
    """Save sampler states, and return outputs of requests that did not sample.

    These are vectors, and log-probabilities of a prompt chunk that is not the prompt's last.
    """
    outputs: list[EngineOutput] = []
    by_id = requests.by_id
    for state in extras.states:
        if state.request_id in by_id:
            by_id[state.request_id].mirostat_mu = state.mirostat_mu
    for pooled in extras.vectors:
        if pooled.request_id in by_id:  # also if it was preempted meanwhile
            requests.finish(by_id[pooled.request_id], FinishReason.STOP)
            outputs.append(VectorOutput(pooled.request_id, pooled.vector, 0, 1, FinishReason.STOP))
    outputs += [
        TokenOutput(i, prompt_logprobs=x) for i, x in extras.of_prompts.items() if i in by_id
    ]
    return outputs
