"""The error for a prompt or an answer that exceeds the context. No torch."""

from __future__ import annotations

from slipstream.errors import ContextLengthError

MAX_CHARS_PER_TOKEN = 128
"""Assumed maximum characters of a token. A text with more than this per token of the context is
refused without tokenizing it."""


def hopeless(max_model_len: int, num_chars: int, field: str) -> ContextLengthError:
    """`over_context` for a text that is too long to tokenize. The error states the minimum number
    of tokens that it can have."""
    error = ContextLengthError(
        f"This model's maximum context length is {max_model_len} tokens. However, the prompt has {num_chars} characters, far "
        "more than fit; shorten it",
        field=field,
    )
    error.lengths = (-(-num_chars // MAX_CHARS_PER_TOKEN), None, max_model_len)
    return error


def over_context(
    max_model_len: int, num_prompt: int, max_tokens: int | None = None
) -> ContextLengthError:
    """Error whose first words are those by which OpenAI's clients recognize it.

    The answer may have `max_tokens`; None: the prompt alone is too long.
    """
    what = f"This model's maximum context length is {max_model_len} tokens. However, "
    if max_tokens is None:
        what += f"the prompt has {num_prompt} tokens, and at least one is for the answer; shorten the prompt"
    else:
        what += (
            f"you requested {num_prompt + max_tokens} tokens ({num_prompt} in the prompt, and max_tokens is "
            f"{max_tokens}); ask for at most {max_model_len - num_prompt} tokens, or shorten the prompt"
        )
    error = ContextLengthError(what, field="prompt" if max_tokens is None else "max_tokens")
    error.lengths = (num_prompt, max_tokens, max_model_len)
    return error
