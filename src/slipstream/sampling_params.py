"""Sampling parameters: how tokens are drawn, when an answer ends, and what it must look like. Values are checked when an
object is made; RequestError names a field that is wrong. No torch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from slipstream.errors import RequestError

MAX_LOGPROBS = 20
"""The most alternatives a request may ask for at each token (OpenAI's limit for chat)."""

MAX_CHOICES = 128
"""The largest `n` (OpenAI's limit)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """The form of the answer. Exactly one of these is given:

    `json`: a JSON schema, as text, a dict or a bool.
    `regex`: a regular expression of the whole answer.
    `choice`: texts, one of which is the answer.
    `grammar`: EBNF as in llama.cpp, or Lark.
    `json_object`: any JSON object.

    The others go with them:

    `whitespace_pattern`: a regular expression of what may stand between two tokens of JSON.
    `disable_any_whitespace`: nothing may stand there.
    `around`: a Lark grammar that contains the answer as @answer, for instance behind reasoning.
    """

    json: str | dict[str, Any] | bool | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool = False
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None
    around: str | None = None

    def __post_init__(self) -> None:
        def refuse(message: str, name: str) -> RequestError:
            return RequestError(message, field=f"structured_outputs.{name}")

        if isinstance(self.json, (dict, bool)):
            try:
                object.__setattr__(self, "json", json.dumps(self.json, ensure_ascii=False))
            except (TypeError, ValueError, RecursionError) as error:
                raise refuse(f"json is not a JSON schema: {error}", "json") from None
        if isinstance(self.choice, list):
            object.__setattr__(self, "choice", tuple(self.choice))
        texts = ("json", "regex", "grammar", "whitespace_pattern", "around")
        for name in texts:
            if not isinstance(value := getattr(self, name), (str, type(None))):
                raise refuse(f"{name} must be a text, got {value!r}", name)
        choice = self.choice
        if choice is not None and not (isinstance(choice, tuple) and choice and all(isinstance(c, str) and c for c in choice)):
            raise refuse(f"choice must be a list of non-empty texts, got {choice!r}", "choice")
        given = [n for n in ("json", "regex", "choice", "grammar") if getattr(self, n) is not None]
        given += ["json_object"] * bool(self.json_object)
        if len(given) != 1:
            found = " and ".join(given) or "none"
            message = f"give exactly one of json, regex, choice, grammar and json_object, got {found}"
            raise RequestError(message, field="structured_outputs")
        if given[0] not in ("json", "json_object"):
            for name in ("disable_any_whitespace", "whitespace_pattern"):
                if getattr(self, name):
                    raise refuse(f"{name} is for json and json_object", name)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen, and when generation ends.

    A token is chosen in this order: structured_outputs, allowed_token_ids, bad_words and logit_bias, penalties, temperature,
    min_p, top_k, top_p, then one draw.

    `temperature`: 0 is greedy.
    `top_k`, `top_p`: 0 and 1 switch these filters off.
    `repetition_penalty` counts tokens of prompt and answer (Keskar et al. 2019, CTRL); `presence_penalty` and
    `frequency_penalty` those of the answer (OpenAI).
    `seed`: the draw at a position depends on the seed and the position alone.
    `logprobs`: the log-probabilities of the chosen token and of the k best, before temperature and filters;
    `prompt_logprobs` the same for the prompt.
    `bad_words`: a token that would complete such a word in the answer is not drawn while another token is allowed. A word is
    tokenised as at the beginning of a text, and as after a space. `bad_words_token_ids` gives words as tokens.
    `allowed_token_ids`: no other token is drawn.
    `truncate_prompt_tokens`: the prompt keeps its last k tokens; −1: as many as there is room for.
    `detokenize`: False leaves texts empty.
    `best_of`: only the value of `n` is supported.
    `spaces_between_special_tokens` has no effect, since no tokenizer that we read adds such spaces.
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
    detokenize: bool = True
    spaces_between_special_tokens: bool = True
    best_of: int | None = None  # None after it was checked

    def __post_init__(self) -> None:
        # As in other libraries, stop may be a string or a list, and -1 means no top_k.
        if not isinstance(self.stop, (str, list, tuple, type(None))):
            raise RequestError(f"stop must be a string or a list of strings, got {self.stop!r}", field="stop")
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        object.__setattr__(self, "top_k", 0 if self.top_k == -1 else self.top_k)
        object.__setattr__(self, "logit_bias", {int(t): float(b) for t, b in (self.logit_bias or {}).items()})
        for name in ("bad_words", "bad_words_token_ids"):
            object.__setattr__(self, name, _items(name, getattr(self, name) or ()))
        words = tuple(_items("bad_words_token_ids", word) for word in self.bad_words_token_ids)
        object.__setattr__(self, "bad_words_token_ids", words)
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", _items("allowed_token_ids", self.allowed_token_ids))
        self._check()
        object.__setattr__(self, "best_of", None)

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def _check(self) -> None:
        def require(ok: bool, name: str, need: str) -> None:
            if not ok:
                raise RequestError(f"{name} must be {need}, got {getattr(self, name)!r}", field=name)

        def finite(value: float) -> bool:
            return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)

        def whole(value: object) -> bool:
            return isinstance(value, int) and not isinstance(value, bool)

        require(whole(self.n) and 1 <= self.n <= MAX_CHOICES, "n", f"a whole number from 1 to {MAX_CHOICES}")
        require(finite(self.temperature) and 0 <= self.temperature <= 100, "temperature", "between 0 and 100")
        require(whole(self.top_k) and self.top_k >= 0, "top_k", "a whole number ≥ 1, or 0 or -1 for no limit")
        require(finite(self.top_p) and 0 < self.top_p <= 1, "top_p", "above 0 and at most 1")
        require(finite(self.min_p) and 0 <= self.min_p <= 1, "min_p", "between 0 and 1")
        require(finite(self.repetition_penalty) and self.repetition_penalty > 0, "repetition_penalty", "above 0")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            require(finite(value) and -2 <= value <= 2, name, "between -2 and 2")
        require(
            all(t >= 0 and finite(b) for t, b in self.logit_bias.items()),
            "logit_bias",
            "a map of token ids to finite numbers",
        )
        seed, most, kept = self.seed, self.max_tokens, self.truncate_prompt_tokens
        require(seed is None or (whole(seed) and -(2**63) <= seed < 2**63), "seed", "a 64-bit whole number")
        require(most is None or (whole(most) and most >= 1), "max_tokens", "a whole number ≥ 1")
        require(whole(self.min_tokens) and self.min_tokens >= 0, "min_tokens", "a whole number ≥ 0")
        require(most is None or self.min_tokens <= most, "min_tokens", f"at most max_tokens ({most})")
        require(all(isinstance(s, str) and s for s in self.stop), "stop", "made of non-empty strings")
        require(all(whole(t) and t >= 0 for t in self.stop_token_ids), "stop_token_ids", "made of token ids")
        require(all(isinstance(w, str) and w.strip() for w in self.bad_words), "bad_words", "made of words")
        fits = all(w and all(whole(t) and t >= 0 for t in w) for w in self.bad_words_token_ids)
        require(fits, "bad_words_token_ids", "lists of token ids")
        allowed = self.allowed_token_ids
        fits = allowed is None or (len(allowed) > 0 and all(whole(t) and t >= 0 for t in allowed))
        require(fits, "allowed_token_ids", "None, or at least one token id")
        fits = kept is None or (whole(kept) and (kept == -1 or kept >= 1))
        require(fits, "truncate_prompt_tokens", "−1 or a whole number ≥ 1")
        if self.best_of not in (None, self.n):
            raise RequestError(
                f"best_of={self.best_of!r} is supported only when it equals n ({self.n}); for the best of several ask for n "
                "answers with logprobs, and choose",
                field="best_of",
            )
        if self.stop and not self.detokenize:
            message = "stop strings are looked for in the text; leave detokenize on, or use stop_token_ids"
            raise RequestError(message, field="stop")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            require(value is None or (whole(value) and 0 <= value <= MAX_LOGPROBS), name, f"from 0 to {MAX_LOGPROBS}")


def _items(name: str, given: Any) -> tuple[Any, ...]:
    """The items of a list. A string is refused: its items are letters."""
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise RequestError(f"{name} must be a list, got {given!r}", field=name)
    return tuple(given)
