"""Checks the values of sampling parameters. RequestError names a wrong field, and the allowed values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from slipstream.errors import RequestError

if TYPE_CHECKING:
    from slipstream.params.sampling import SamplingParams

MAX_LOGPROBS = 20
"""Maximum number of alternatives per token that a request may ask for (OpenAI's limit for chat)."""

MAX_CHOICES = 128
"""Maximum `n` (OpenAI's limit)."""

SAMPLERS = (
    *(
        "penalties",
        "dry",
        "no_repeat_ngram",
        "temperature",
        "top_n_sigma",
        "min_p",
        "top_k",
        "typ_p",
        "top_p",
        "xtc",
    ),
)
"""Samplers by llama.cpp's names, in our order. `no_repeat_ngram` is ours."""

TRUNCATING = ("top_n_sigma", "min_p", "top_k", "typ_p", "top_p", "xtc")
"""Samplers that drop tokens; mirostat replaces them."""

SEQUENCE_BREAKERS = ("\n", ":", '"', "*")
"""Default of llama.cpp's DRY."""


FLAGS = (
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "detokenize",
    "spaces_between_special_tokens",
)

MAX_PENALTY = 10
"""Maximum length penalty: even a million to this power is finite."""


def check_params(given: SamplingParams) -> None:
    """Raise RequestError for the first field with an invalid value. Samplers are checked by `check_samplers`."""
    require = partial(_require, given)
    require(
        is_whole(given.n) and 1 <= given.n <= MAX_CHOICES,
        "n",
        f"a whole number from 1 to {MAX_CHOICES}",
    )
    require(
        is_finite(given.temperature) and 0 <= given.temperature <= 100,
        "temperature",
        "between 0 and 100",
    )
    fits = is_whole(given.top_k) and 0 <= given.top_k < 2**31
    require(fits, "top_k", "a whole number from 1 to 2147483647, or 0 or -1 for no limit")
    require(is_finite(given.top_p) and 0 < given.top_p <= 1, "top_p", "above 0 and at most 1")
    require(is_finite(given.min_p) and 0 <= given.min_p <= 1, "min_p", "between 0 and 1")
    require(
        is_finite(given.repetition_penalty) and given.repetition_penalty > 0,
        "repetition_penalty",
        "above 0",
    )
    for name in ("presence_penalty", "frequency_penalty"):
        value = getattr(given, name)
        require(is_finite(value) and -2 <= value <= 2, name, "between -2 and 2")
    require(
        all(t >= 0 and is_finite(b) for t, b in given.logit_bias.items()),
        "logit_bias",
        "a map of token ids to finite numbers",
    )
    seed, most, kept = given.seed, given.max_tokens, given.truncate_prompt_tokens
    require(
        seed is None or (is_whole(seed) and -(2**63) <= seed < 2**63),
        "seed",
        "a 64-bit whole number",
    )
    require(most is None or (is_whole(most) and most >= 1), "max_tokens", "a whole number ≥ 1")
    require(
        is_whole(given.min_tokens) and given.min_tokens >= 0, "min_tokens", "a whole number ≥ 0"
    )
    budget = given.thinking_token_budget
    require(
        budget is None or (is_whole(budget) and budget >= 0),
        "thinking_token_budget",
        "a whole number ≥ 0, or -1 for no limit",
    )
    require(most is None or given.min_tokens <= most, "min_tokens", f"at most max_tokens ({most})")
    require(all(isinstance(s, str) and s for s in given.stop), "stop", "made of non-empty strings")
    require(
        all(is_whole(t) and t >= 0 for t in given.stop_token_ids),
        "stop_token_ids",
        "made of token ids",
    )
    require(
        all(isinstance(w, str) and w.strip() for w in given.bad_words), "bad_words", "made of words"
    )
    fits = all(w and all(is_whole(t) and t >= 0 for t in w) for w in given.bad_words_token_ids)
    require(fits, "bad_words_token_ids", "lists of token ids")
    allowed = given.allowed_token_ids
    fits = allowed is None or (len(allowed) > 0 and all(is_whole(t) and t >= 0 for t in allowed))
    require(fits, "allowed_token_ids", "None, or at least one token id")
    fits = kept is None or (is_whole(kept) and (kept == -1 or kept >= 1))
    require(fits, "truncate_prompt_tokens", "−1 or a whole number ≥ 1")
    require(given.truncation_side in ("left", "right"), "truncation_side", "left or right")
    fits = given.best_of is None or (
        is_whole(given.best_of) and given.n <= given.best_of <= MAX_CHOICES
    )
    require(fits, "best_of", f"a whole number from n ({given.n}) to {MAX_CHOICES}")
    if given.stop and not given.detokenize:
        message = (
            "stop strings are looked for in the text; leave detokenize on, or use stop_token_ids"
        )
        raise RequestError(message, field="stop")
    for name in FLAGS:
        require(is_flag(getattr(given, name)), name, "True or False")
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(given, name)
        require(
            value is None or (is_whole(value) and 0 <= value <= MAX_LOGPROBS),
            name,
            f"from 0 to {MAX_LOGPROBS}",
        )


def check_samplers(given: SamplingParams) -> None:
    """Raise RequestError for the first field of a sampler that has an invalid value, or conflicts with another."""
    require = partial(_require, given)
    for name, low, high, need in (
        ("typical_p", 0, 1, "above 0 and at most 1"),
        ("dry_base", 0, 100, "above 0 and at most 100"),
        ("mirostat_tau", 0, 100, "above 0 and at most 100"),
        ("mirostat_eta", 0, 1, "above 0 and at most 1"),
    ):
        value = getattr(given, name)
        require(is_finite(value) and low < value <= high, name, need)
    for name in ("xtc_probability", "xtc_threshold"):
        require(
            is_finite(value := getattr(given, name)) and 0 <= value <= 1, name, "between 0 and 1"
        )
    require(is_finite(given.top_n_sigma), "top_n_sigma", "a number; 0 or less is off")
    require(
        is_finite(given.dry_multiplier) and 0 <= given.dry_multiplier <= 100,
        "dry_multiplier",
        "between 0 and 100",
    )
    for name, least in (
        ("dry_allowed_length", 1),
        ("dry_penalty_last_n", -1),
        ("no_repeat_ngram_size", 0),
    ):
        require(
            is_whole(value := getattr(given, name)) and least <= value < 2**31,
            name,
            f"a whole number ≥ {least}",
        )
    ids = given.dry_breaker_token_ids
    require(
        all(isinstance(b, str) and b for b in given.dry_sequence_breakers),
        "dry_sequence_breakers",
        "made of texts",
    )
    require(all(is_whole(t) and t >= 0 for t in ids), "dry_breaker_token_ids", "made of token ids")
    require(
        is_whole(given.mirostat_mode) and given.mirostat_mode in (0, 2),
        "mirostat_mode",
        "0 (off) or 2",
    )
    names = given.samplers or ()
    require(set(names) <= set(SAMPLERS), "samplers", f"made of {', '.join(SAMPLERS)}")
    require(len(set(names)) == len(names), "samplers", "without one named twice")
    fits = all((isinstance(f, str) and ":" in f) or callable(f) for f in given.logits_processors)
    require(fits, "logits_processors", 'made of functions or their names, "module:function"')
    if given.mirostat_mode and (cuts := [name for name in TRUNCATING if given.takes(name)]):
        name = {"typ_p": "typical_p", "xtc": "xtc_probability"}.get(cuts[0], cuts[0])
        message = (
            f"mirostat_mode=2 chooses by itself how many tokens may be drawn; leave {name} out"
        )
        raise RequestError(message, field="mirostat_mode")
    for name, on in (
        ("mirostat_mode", given.mirostat_mode),
        ("xtc_probability", given.takes("xtc")),
    ):
        if on and given.temperature == 0:
            raise RequestError(
                f"{name} is for draws, and temperature=0 takes the likeliest token", field=name
            )


def _require(given: SamplingParams, ok: bool, name: str, need: str) -> None:
    if not ok:
        raise RequestError(f"{name} must be {need}, got {getattr(given, name)!r}", field=name)


def is_finite(value: object) -> bool:
    """Whether the value is a finite number, and not a bool."""
    try:
        return (
            isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        )
    except OverflowError:  # a whole number that no float can hold
        return False


def is_flag(value: object) -> bool:
    """Whether the value is a bool. Text is not: "false" would be true."""
    return isinstance(value, int) and value in (0, 1)


def is_whole(value: object) -> bool:
    """Whether the value is an integer, and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def biases_of(given: Mapping[Any, Any]) -> dict[int, float]:
    """Returns `logit_bias` by token id. JSON has the ids as texts, so "0" and "00" are the same
    id."""
    try:
        made = {int(token): float(bias) for token, bias in given.items()}
    except (AttributeError, TypeError, ValueError, OverflowError):
        message = f"logit_bias must be a map of token ids to finite numbers, got {given!r}"
        raise RequestError(message, field="logit_bias") from None
    if len(made) < len(given):
        raise RequestError(
            f"logit_bias names a token twice: {sorted(map(str, given))}", field="logit_bias"
        )
    return made


def items_of(name: str, given: Any) -> tuple[Any, ...]:
    """Items of a list. RequestError for a string, whose items would be characters."""
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise RequestError(f"{name} must be a list, got {given!r}", field=name)
    return tuple(given)
