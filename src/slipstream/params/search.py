"""Parameters of requests without sampling: beam searches and vectors. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from slipstream.base.suggesting import suggesting_init
from slipstream.errors import RequestError
from slipstream.params.checks import MAX_LOGPROBS, MAX_PENALTY, is_finite, is_flag


@suggesting_init
@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """Parameters of a beam search, by vLLM's and transformers' names.

    `num_beam_groups` above 1 (Vijayakumar et al. 2018): this many groups of beams take turns at
    each step. A token loses `diversity_penalty` for each beam of an earlier group that has just
    taken it.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    num_beam_groups: int = 1
    diversity_penalty: float = 0.0

    def __post_init__(self) -> None:
        for name in ("beam_width", "max_tokens", "num_beam_groups"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise RequestError(
                    f"{name} must be a whole number above 0, got {value!r}", field=name
                )
        if self.beam_width >= MAX_LOGPROBS:
            raise RequestError(
                f"beam_width must be below {MAX_LOGPROBS}, got {self.beam_width}",
                field="beam_width",
            )
        penalty = self.length_penalty
        if (
            not isinstance(penalty, int | float)
            or isinstance(penalty, bool)
            or not abs(penalty) <= MAX_PENALTY
        ):
            raise RequestError(
                f"length_penalty must be a number from -{MAX_PENALTY} to {MAX_PENALTY}, got {penalty!r}",
                field="length_penalty",
            )
        if self.beam_width % self.num_beam_groups:
            message = f"num_beam_groups must divide beam_width ({self.beam_width}), got {self.num_beam_groups}"
            raise RequestError(message, field="num_beam_groups")
        if not is_finite(self.diversity_penalty) or not 0 <= self.diversity_penalty <= 100:
            message = f"diversity_penalty must be between 0 and 100, got {self.diversity_penalty!r}"
            raise RequestError(message, field="diversity_penalty")
        if (self.num_beam_groups > 1) != (self.diversity_penalty > 0):
            message = "num_beam_groups above 1 and a diversity_penalty above 0 go together"
            raise RequestError(message, field="diversity_penalty")
        if not is_flag(self.ignore_eos):
            raise RequestError(
                f"ignore_eos must be True or False, got {self.ignore_eos!r}", field="ignore_eos"
            )
        if not (isinstance(self.early_stopping, bool) or self.early_stopping == "never"):
            raise RequestError(
                f'early_stopping must be True, False or "never", got {self.early_stopping!r}',
                field="early_stopping",
            )


@suggesting_init
@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """Parameters of vectors and scores, by vLLM's names: `pooling_params` of `LLM.embed`,
    `encode`, `classify` and `score`."""

    dimensions: int | None = None
    task: str | None = None
    truncate_prompt_tokens: int | None = None  # -1: cut texts to the model's length
    use_activation: bool | None = None

    def __post_init__(self) -> None:
        if self.truncate_prompt_tokens not in (None, -1):
            raise RequestError(
                f"truncate_prompt_tokens={self.truncate_prompt_tokens!r}: only -1 (the model's length) is supported here",
                field="truncate_prompt_tokens",
            )
        if self.use_activation is False:
            raise RequestError(
                "use_activation=False: LLM.encode gives a classifier's scores as they are; leave it out",
                field="use_activation",
            )
