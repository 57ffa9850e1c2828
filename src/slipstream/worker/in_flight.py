"""Handle of a launched step. Its values are tensors that are being copied to the host, or arrays. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from slipstream.kernels.cpu.sampling.logprobs import unpacked_logprobs
from slipstream.messages.logprobs import SampledLogprobs
from slipstream.messages.steps import Extra, Plan, StepResult
from slipstream.messages.texts import PooledVector, TextVectors
from slipstream.worker.draft.verification import verified
from slipstream.worker.inputs.input_batch import SampledRows
from slipstream.worker.sampling.draws import BestLogprobs

if TYPE_CHECKING:
    from torch import Tensor

    from slipstream.platform import Event


@dataclass(slots=True)
class InFlightStep:
    """A launched step. `result()` waits for the device and may be called once."""

    awaits_mask = False

    plan: Plan
    sampled: SampledRows | None
    tokens: Tensor  # int64 [N], on the host once `done` has happened
    done: Event | None  # None: the step is done
    logprobs: BestLogprobs | None = None
    extras: Sequence[Extra | Callable[[], Extra]] = ()  # functions may be called once it is done
    # ids of complete pooled requests, and their vectors, float32 [N, E] on the host
    pooled: tuple[tuple[str, ...], Tensor] | None = None
    drafts: Tensor | None = None  # drafts of the draft model, int64 [N] on the host
    vectors: Tensor | None = None  # vectors of a TextsPlan, float32 [S, E] or [T, E] on the host
    per_token: bool = False
    is_cold: bool = False

    @property
    def is_done(self) -> bool:
        """True if the launch itself computed the step."""
        return self.done is None

    @property
    def is_ready(self) -> bool:
        """True if `result()` does not wait."""
        return self.done is None or self.done.query()

    def proposed(self) -> Sequence[int]:
        return () if self.drafts is None else self.drafts.tolist()

    def result(self) -> StepResult:
        if self.done is not None:
            self.done.synchronize()
        tokens: list[int] = self.tokens.tolist()
        extras: list[Extra] = [extra() if callable(extra) else extra for extra in self.extras]
        if self.pooled is not None:
            extras += [
                PooledVector(i, v.tobytes())
                for i, v in zip(self.pooled[0], np.asarray(self.pooled[1]), strict=True)
            ]
        if self.vectors is not None:
            extras.append(TextVectors(np.asarray(self.vectors).tobytes(), self.per_token))
        if self.logprobs is not None and self.sampled is not None:
            which, packed, counts = self.logprobs
            packed = np.asarray(packed)
            best = unpacked_logprobs(packed[which] if len(which) < len(packed) else packed)
            ids = self.sampled.request_ids
            names, chosen = tuple([ids[i] for i in which]), tuple([tokens[i] for i in which])
            extras.append(
                SampledLogprobs(
                    names, chosen, tuple(counts), *[values.tobytes() for values in best]
                )
            )
        num_tokens = None if self.sampled is None else self.sampled.num_tokens
        if num_tokens is not None and self.sampled is not None:
            tokens, num_tokens = verified(self.sampled.requests, tokens, self.proposed())
        return StepResult(self.plan.step_id, tokens, num_tokens, tuple(extras), self.is_cold)
