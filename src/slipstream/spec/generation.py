"""Keys of a checkpoint's generation config that restrict answers, apart from sampling parameters. No torch.

1. `bad_words_ids` and `suppress_tokens` are applied to every answer, as in transformers.
2. Other keys that change answers are not applied; a message names them when the model is loaded.
3. If a folder has no generation_config.json, these keys are read from its config.json.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from slipstream.errors import CheckpointError

Words = tuple[tuple[int, ...], ...]

NOT_APPLIED: Mapping[str, tuple[Any, ...]] = {
    "begin_suppress_tokens": ([],),
    "constraints": (),
    "diversity_penalty": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "exponential_decay_length_penalty": (),
    "force_words_ids": (),
    "forced_decoder_ids": ([],),
    "forced_eos_token_id": (),
    "guidance_scale": (1,),
    "length_penalty": (1,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "no_repeat_ngram_size": (0,),
    "num_beams": (1,),
    "penalty_alpha": (0,),
    "sequence_bias": ({}, []),
    "stop_strings": ([],),
    "token_healing": (False,),
    "typical_p": (1,),
}
"""Keys that can change an answer but are not applied. Their values here, besides null, have no effect."""


def not_applied(generation: Mapping[str, Any], *, speech: bool) -> tuple[str, ...]:
    """Keys with an effect that is not applied, as "name=value". Some are excluded for speech models, which have their own
    rules."""
    own = {"begin_suppress_tokens", "forced_decoder_ids"} if speech else set()
    found = {name: generation.get(name) for name in NOT_APPLIED if name not in own}
    if found["num_beams"] in (None, 1):  # only read with beam search
        found.pop("length_penalty")
    return tuple(
        f"{name}={value!r}"
        for name, value in found.items()
        if value is not None and value not in NOT_APPLIED[name]
    )


def banned_words(generation: Mapping[str, Any], ends: Iterable[int], vocab_size: int) -> Words:
    """Token sequences that no answer may contain: `bad_words_ids`, except single end tokens, and `suppress_tokens`.
    Sequences with a token outside the vocabulary can't be generated and are left out. CheckpointError for malformed
    values."""
    words, tokens = (generation.get(name) or [] for name in ("bad_words_ids", "suppress_tokens"))
    if not isinstance(words, list) or not all(isinstance(word, list) and word for word in words):
        raise _wrong("bad_words_ids", words, "lists of tokens")
    if not isinstance(tokens, list):
        raise _wrong("suppress_tokens", tokens, "a list of tokens")
    words = [*words, *([token] for token in tokens)]
    if wrong := [
        t for word in words for t in word if isinstance(t, bool) or not isinstance(t, int)
    ]:
        raise _wrong("bad_words_ids or suppress_tokens", wrong[0], "tokens")
    possible = (tuple(w) for w in words if all(0 <= t < vocab_size for t in w))
    single = [(end,) for end in ends]
    given = tuple((t,) for t in tokens)
    return tuple(dict.fromkeys(w for w in possible if w not in single or w in given))


def _wrong(name: str, value: Any, what: str) -> CheckpointError:
    return CheckpointError(
        f"generation_config.json: {name} has {value!r}; it must be {what}", field=name
    )
