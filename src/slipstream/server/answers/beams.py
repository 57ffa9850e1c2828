"""`use_beam_search` of completions and chat (vLLM's name): its parameters, and the fields it
excludes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from msgspec import Raw

from slipstream.errors import RequestError
from slipstream.params.sampling import SamplingParams
from slipstream.params.search import BeamSearchParams
from slipstream.server.http.errors import bad_request

if TYPE_CHECKING:
    from slipstream.server.openai.protocol import GenerationRequest

OWN = ("length_penalty", "early_stopping", "num_beam_groups", "diversity_penalty")
"""Fields that configure the search; they are refused without `use_beam_search`."""

NEUTRAL = {"length_penalty": 1.0, "num_beam_groups": 1, "diversity_penalty": 0.0}
"""Values of `OWN` that change no search, and that clients send with every request."""

TAKEN = frozenset(
    (
        *OWN,
        *(
            "use_beam_search",
            "model",
            "prompt",
            "messages",
            "n",
            "max_tokens",
            "max_completion_tokens",
            "ignore_eos",
            "echo",
        ),
        *(
            "priority",
            "cache_salt",
            "user",
            "metadata",
            "store",
            "safety_identifier",
            "prompt_cache_key",
            "prompt_cache_retention",
            "end_of_branch",
            "service_tier",
            "temperature",
        ),
        *(
            "add_special_tokens",
            "truncate_prompt_tokens",
            "return_token_ids",
            "spaces_between_special_tokens",
        ),
        *(
            "add_generation_prompt",
            "continue_final_message",
            "chat_template_kwargs",
            "reasoning_effort",
            "verbosity",
        ),
        *("compress_prompt", "skip_special_tokens"),
    )
)
"""Fields that a search accepts. All other fields concern sampling, or single tokens of the
answer."""


def check(body: GenerationRequest) -> None:
    """Raise a 400 if a field contradicts `use_beam_search`, or needs it."""
    if not body.use_beam_search:
        given = {name: getattr(body, name) for name in OWN}
        if wrong := [
            name for name in OWN if _is_given(given[name]) and given[name] != NEUTRAL.get(name)
        ]:
            raise bad_request(f"{wrong[0]} goes with use_beam_search=true; leave it out", wrong[0])
        return
    others = [name for name in body.__struct_fields__ if name not in TAKEN]
    if wrong := [name for name in others if _is_given(getattr(body, name))]:
        reason = (
            "the search returns whole answers"
            if "stream" in wrong[0]
            else "the search returns the likeliest answers"
        )
        raise bad_request(
            f"use_beam_search does not take {wrong[0]}: {reason}; leave it out", wrong[0]
        )
    if body.temperature not in (None, 0, 1):
        raise bad_request("use_beam_search does not sample; leave temperature out", "temperature")
    if body.skip_special_tokens is False:
        raise bad_request(
            "use_beam_search always skips special tokens; leave skip_special_tokens out",
            "skip_special_tokens",
        )
    if (
        not body.max_tokens
        and not getattr(body, "max_completion_tokens", None)
        and hasattr(body, "messages")
    ):
        raise bad_request(
            "use_beam_search needs max_tokens: it would search to the end of the context without it",
            "max_tokens",
        )


def _is_given(value: Any) -> bool:
    if isinstance(value, Raw):
        return bytes(value) not in (b"", b"null")
    return value is not None and value is not False


@contextmanager
def named_as_in_body() -> Iterator[None]:
    """Context manager that renames the engine's `beam_width` to the body's `n` in errors."""
    try:
        yield
    except RequestError as error:
        error.message = error.message.replace("beam_width", "n")
        error.args = (error.message,)
        error.field = "n" if error.field == "beam_width" else error.field
        raise


def search(body: GenerationRequest, max_tokens: int) -> tuple[BeamSearchParams, SamplingParams]:
    """Parameters of the search, and the sampling parameters that the response writers expect."""
    own: dict[str, Any] = {
        name: getattr(body, name) for name in OWN if getattr(body, name) is not None
    }
    width = 1 if body.n is None else body.n
    with named_as_in_body():
        params = BeamSearchParams(
            beam_width=width, max_tokens=max_tokens, ignore_eos=bool(body.ignore_eos), **own
        )
    truncated = body.truncate_prompt_tokens
    sampling = SamplingParams(
        n=params.beam_width,
        temperature=0.0,
        max_tokens=max_tokens,
        truncate_prompt_tokens=truncated,
    )
    return params, sampling
