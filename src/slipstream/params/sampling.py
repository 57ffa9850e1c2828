"""Sampling parameters: how tokens are sampled, when an answer ends, and which form it has. No torch.

Values are checked when an object is made; RequestError names a wrong field.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from slipstream.base.suggesting import suggesting_init
from slipstream.errors import RequestError
from slipstream.params.answer_forms import ReasoningMarkers, StructuredOutputsParams
from slipstream.params.checks import (
    SEQUENCE_BREAKERS,
    biases_of,
    check_params,
    check_samplers,
    items_of,
)
from slipstream.spec.media.speech_rules import SpeechRules


@suggesting_init
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Parameters of an answer: how the next token is chosen, and when generation ends.

    A token is chosen in this order: structured_outputs, allowed_token_ids, bad_words and
    logit_bias, logits_processors, penalties, dry, no_repeat_ngram_size, temperature, top_n_sigma,
    min_p, top_k, typical_p, top_p, xtc, then one draw.

    - `temperature`: 0 is greedy.
    - `top_k`, `top_p`: 0 and 1 disable these filters.
    - `repetition_penalty` counts tokens of prompt and answer (Keskar et al. 2019, CTRL);
      `presence_penalty` and `frequency_penalty` count the answer's (OpenAI).
    - `typical_p`: keeps the tokens whose surprise is nearest to the expected one, with this
      probability together (Meister et al. 2023).
    - `top_n_sigma`: keeps tokens within this many standard deviations of the largest logit (Tang et
      al. 2024).
    - `xtc_probability`: the chance, at each token, that of the tokens with a probability of at
      least `xtc_threshold` all but the least likely are dropped.
    - `dry_multiplier`: lowers the logit of a token that would continue a repetition of an earlier
      run, by this number times `dry_base` to the power of the run's tokens beyond
      `dry_allowed_length`. `dry_sequence_breakers` end runs; `dry_penalty_last_n` is the number of
      tokens looked at (−1: all).
    - `no_repeat_ngram_size`: no run of this many tokens occurs twice, prompt included.
    - `mirostat_mode=2`: keeps the mean surprise at `mirostat_tau` bits (Basu et al. 2021);
      `mirostat_eta` is its learning rate.
    - `samplers`: the samplers to use, in this order, by llama.cpp's names. Others are off.
    - `logits_processors`: functions (prompt_token_ids, token_ids, logits) → logits, or their names
      "module:function". Logits are a NumPy array float32 [V].
    - `seed`: the draw at a position depends only on the seed and the position.
    - `logprobs`: the log-probabilities of the chosen token and of the k best, before temperature
      and filters; `prompt_logprobs` is the same for the prompt.
    - `bad_words`: a token that would complete such a word in the answer is not drawn while another
      token is allowed. A word is tokenised both as at the beginning of a text and as after a space.
      `bad_words_token_ids` has words as tokens.
    - `allowed_token_ids`: only these tokens are drawn.
    - `truncate_prompt_tokens`: the prompt keeps its last k tokens; −1: as many as fit. With
      `truncation_side="right"` it keeps its first ones.
    - `detokenize`: False leaves texts empty.
    - `best_of`: this many answers are drawn, and the `n` with the highest log-probability per token
      are returned.
    - `spaces_between_special_tokens` has no effect, because none of our tokenizers adds such
      spaces.
    - `speech`: the rules of a speech model's answer; set by transcriptions.
    - `thinking_token_budget`: the reasoning has at most this many tokens; then the marker of its end
      is forced, and the answer follows. −1: no limit. `reasoning` are the markers; None: those of
      the model's chat template.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputsParams | None = None
    bad_words: tuple[str, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str = "left"
    detokenize: bool = True
    spaces_between_special_tokens: bool = True
    best_of: int | None = None  # None after the check if it equals n
    typical_p: float = 1.0
    top_n_sigma: float = -1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_sequence_breakers: tuple[str, ...] = SEQUENCE_BREAKERS
    dry_breaker_token_ids: tuple[int, ...] = ()
    no_repeat_ngram_size: int = 0
    mirostat_mode: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    samplers: tuple[str, ...] | None = None
    logits_processors: tuple[Any, ...] = ()
    thinking_token_budget: int | None = None
    reasoning: ReasoningMarkers | None = None
    speech: SpeechRules | None = None

    def __post_init__(self) -> None:
        # As in other libraries, stop may be a string or a list, and -1 means no top_k.
        if not isinstance(self.stop, (str, list, tuple, type(None))):
            raise RequestError(
                f"stop must be a string or a list of strings, got {self.stop!r}", field="stop"
            )
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        object.__setattr__(self, "stop", stop)
        object.__setattr__(
            self, "stop_token_ids", items_of("stop_token_ids", self.stop_token_ids or ())
        )
        object.__setattr__(self, "top_k", 0 if self.top_k == -1 else self.top_k)
        if self.thinking_token_budget == -1:
            object.__setattr__(self, "thinking_token_budget", None)
        object.__setattr__(self, "logit_bias", biases_of(self.logit_bias or {}))
        for name in ("bad_words", "bad_words_token_ids"):
            object.__setattr__(self, name, items_of(name, getattr(self, name) or ()))
        words = tuple(items_of("bad_words_token_ids", word) for word in self.bad_words_token_ids)
        object.__setattr__(self, "bad_words_token_ids", words)
        if self.allowed_token_ids is not None:
            object.__setattr__(
                self, "allowed_token_ids", items_of("allowed_token_ids", self.allowed_token_ids)
            )
        for name in ("dry_sequence_breakers", "dry_breaker_token_ids", "logits_processors"):
            object.__setattr__(self, name, items_of(name, getattr(self, name) or ()))
        if self.samplers is not None:
            names = (
                "typ_p" if name == "typical_p" else name
                for name in items_of("samplers", self.samplers)
            )
            object.__setattr__(self, "samplers", tuple(names))
        check_params(self)
        form = self.structured_outputs
        if form is not None and not isinstance(form, StructuredOutputsParams):
            message = f"structured_outputs must be a StructuredOutputsParams, got {form!r}"
            raise RequestError(message, field="structured_outputs")
        check_samplers(self)
        object.__setattr__(self, "best_of", None if self.best_of == self.n else self.best_of)

    @property
    def num_drawn(self) -> int:
        """Number of answers that are sampled; the best `n` of them are returned."""
        return self.best_of or self.n

    @property
    def is_masked(self) -> bool:
        """Whether the host restricts the allowed tokens: by a grammar, or by a budget of reasoning."""
        return self.structured_outputs is not None or self.thinking_token_budget is not None

    @property
    def by_chain(self) -> bool:
        """Whether a row is sampled by the chain of samplers (`worker/sampling/sampler_chain.py`),
        not with the whole batch."""
        return bool(
            self.samplers is not None
            or self.logits_processors
            or self.mirostat_mode
            or self.no_repeat_ngram_size
            or self.dry_multiplier
            or self.xtc_probability
            or self.top_n_sigma > 0
            or self.typical_p < 1.0
            or (self.speech and (self.speech.forced or self.speech.first_timestamp is not None))
        )

    def takes(self, sampler: str) -> bool:
        """Whether the sampler is active, so that it may drop tokens or change their logits."""
        if self.samplers is not None and sampler not in self.samplers:
            return False
        values: dict[str, object] = {
            "penalties": self.has_penalties,
            "dry": self.dry_multiplier,
            "no_repeat_ngram": self.no_repeat_ngram_size,
            "temperature": self.temperature != 1.0,
            "top_n_sigma": self.top_n_sigma > 0,
            "min_p": self.min_p,
            "top_k": self.top_k,
            "typ_p": self.typical_p < 1.0,
            "top_p": self.top_p < 1.0,
            "xtc": self.xtc_probability,
        }
        return bool(values[sampler])

    @property
    def has_penalties(self) -> bool:
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )
