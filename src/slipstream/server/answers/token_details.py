"""Details of single tokens in an answer, in vLLM's format: ids, the prompt's log-probabilities,
names by id."""

from __future__ import annotations

from typing import Any

from slipstream.outputs import Logprob
from slipstream.server.answers.generation import Choice, PromptInfo
from slipstream.server.openai.protocol import GenerationRequest


def prompt_details(body: GenerationRequest, info: PromptInfo) -> dict[str, Any]:
    """The requested details of the prompt: its tokens, and log-probabilities by token id. Fields
    not requested are null, so that typed clients have the attribute."""
    found: dict[str, Any] = {
        "prompt_token_ids": info.token_ids if body.return_token_ids else None,
        "prompt_logprobs": None,
    }
    if (num_best := body.prompt_logprobs) is not None:
        found["prompt_logprobs"] = [
            None
            if position is None
            else dict(map(_by_id, (position.chosen, *position.top[:num_best])))
            for position in info.logprobs or ()
        ]
    return found


def _by_id(token: Logprob) -> tuple[str, dict[str, Any]]:
    return str(token.token_id), {
        "logprob": token.logprob,
        "rank": token.rank,
        "decoded_token": token.token,
    }


def choice_details(body: GenerationRequest, choice: Choice) -> dict[str, Any]:
    """The token ids of a collected choice, if asked for."""
    return {"token_ids": choice.token_ids if body.return_token_ids else None}


def id_name(token: Logprob) -> str:
    """A token's name for `return_tokens_as_token_ids`."""
    return f"token_id:{token.token_id}"
