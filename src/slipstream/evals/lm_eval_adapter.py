"""`LLM` as a model of lm-eval, so that all of its tasks can be run.

    import lm_eval
    lm_eval.simple_evaluate(model=SlipstreamLM(LLM("smollm2")), tasks=["hellaswag"])

It needs the package lm-eval; `evals.tasks.run_lm_eval` reports if that is missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows

from slipstream.engine.llm import LLM
from slipstream.errors import ConfigError
from slipstream.evals.likelihood import loglikelihoods
from slipstream.params.prompts import Prompt
from slipstream.params.sampling import SamplingParams

DEFAULT_GENERATED = 256
"""Maximum answer length in tokens for a task that sets none (lm-eval's default)."""

LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


class SlipstreamLM(TemplateLM):  # type: ignore[misc]  # lm-eval is not installed where types are checked
    """Passes all requests of a task to the engine at once, which batches them."""

    def __init__(self, llm: LLM) -> None:
        super().__init__()
        self.llm = llm
        self.tokenizer = llm.get_tokenizer()

    @property
    def eot_token_id(self) -> int:
        if not self.tokenizer.eos_token_ids:
            raise ConfigError("lm-eval needs a tokenizer with an end token", field="tokenizer")
        return self.tokenizer.eos_token_ids[0]

    @property
    def prefix_token_id(self) -> int:
        """Token id that precedes a text without context."""
        return (
            self.eot_token_id
            if self.tokenizer.bos_token_id is None
            else self.tokenizer.bos_token_id
        )

    @property
    def max_length(self) -> int:
        return self.llm.config.model.max_model_len

    @property
    def tokenizer_name(self) -> str:
        return self.llm.config.model.model.replace("/", "__")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        return self.tokenizer.encode(string, add_special_tokens is not False)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        return self.tokenizer.apply_chat_template(
            chat_history, add_generation_prompt=add_generation_prompt
        )

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str], list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        scores = loglikelihoods(
            self.llm, [(context, continuation) for _, context, continuation in requests]
        )
        found = [(s.logprob, s.is_greedy) for s in scores]
        for request, score in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood", request[0], score)
        return found

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """ln p of whole texts. Each token is scored once, with as much context before it as fits."""
        pairs: list[tuple[list[int], list[int]]] = []
        owners: list[int] = []
        for i, request in enumerate(requests):
            ids = self.tokenizer.encode(request.args[0], add_special_tokens=False)
            for before, scored in get_rolling_token_windows(
                ids, self.prefix_token_id, self.max_length - 2, 1
            ):
                pairs.append((before[: len(before) - len(scored) + 1], scored))
                owners.append(i)
        found = [0.0] * len(requests)
        for i, score in zip(owners, loglikelihoods(self.llm, pairs), strict=True):
            found[i] += score.logprob
        for request, total in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return found

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        prompts: list[Prompt] = []
        samplings = []
        for request in requests:
            text, settings = request.args
            sampling = sampling_of(settings)
            assert sampling.max_tokens is not None
            room = self.max_length - sampling.max_tokens
            if room < 1:
                raise ConfigError(
                    f"a task asks for {sampling.max_tokens} tokens, but the context has {self.max_length}; raise max_model_len",
                    field="max_model_len",
                )
            prompts.append({"prompt_token_ids": self.tokenizer.encode(text)[-room:]})
            samplings.append(sampling)
        found = [a.outputs[0].text for a in self.llm.generate(prompts, samplings, progress=False)]
        for request, answer in zip(requests, found, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, answer)
        return found


def sampling_of(settings: dict[str, Any]) -> SamplingParams:
    """Sampling parameters from a task's `generation_kwargs`. ConfigError for unknown keys."""
    left = dict(settings)
    until = left.pop("until", [])
    lengths = [left.pop(name) for name in LENGTHS if name in left]
    temperature, sample = float(left.pop("temperature", 0.0)), left.pop("do_sample", None)
    known = {
        name: left.pop(name)
        for name in ("top_p", "top_k", "min_p", "repetition_penalty", "seed")
        if name in left
    }
    if left:
        raise ConfigError(
            f"generation_kwargs {', '.join(left)} are not supported; drop them",
            field="generation_kwargs",
        )
    return SamplingParams(
        temperature=0.0 if sample is False else temperature or (1.0 if sample else 0.0),
        stop=tuple(s for s in ([until] if isinstance(until, str) else until) if s),
        max_tokens=int(lengths[0]) if lengths else DEFAULT_GENERATED,
        **known,
    )
