"""Checks whether a model can propose tokens for another. No torch."""

from __future__ import annotations

from slipstream.errors import ConfigError
from slipstream.spec.model import ModelSpec


def check_draft_model(draft: ModelSpec, target: ModelSpec, max_model_len: int) -> None:
    """Raise ConfigError with the reason if `draft` can't propose tokens for `target`."""
    reason = None
    if not draft.generates or draft.kind != "a decoder":
        reason = f"the draft model is {draft.kind}; it must be a decoder that generates text"
    elif target.encoder is not None or target.cache_groups[0].kind != "full":
        reason = "the model has no layers that keep all tokens of a request; use method 'ngram' or 'suffix'"
    elif draft.is_recurrent:
        reason = (
            "the draft model has recurrent layers; use one without, or method 'ngram' or 'suffix'"
        )
    elif draft.layer_inputs is not None or draft.owners != tuple(range(draft.num_layers)):
        reason = "the draft model has layers that share keys and values; use one without"
    elif len(draft.cache_groups) > 1 or draft.cache_groups[0].kind != "full":
        reason = "the draft model has sliding windows; use one without"
    elif draft.vocab_size != target.vocab_size:
        sizes = f"{draft.vocab_size} tokens and the model {target.vocab_size}"
        reason = f"the draft model has {sizes}; use one with the same tokenizer"
    elif draft.max_position < max_model_len:
        reason = f"the draft model takes up to {draft.max_position} tokens; lower max_model_len={max_model_len}"
    if reason is not None:
        raise ConfigError(f"speculative_config: {reason}", field="speculative_config")
