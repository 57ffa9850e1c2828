"""Beam searches of users, checked and tokenised. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.engine.beams import BeamSearchOutput, BeamSearchSequence
from slipstream.engine.beams import check as check_beams
from slipstream.engine.requests.processor import InputProcessor
from slipstream.engine.text.tokenizer import Tokenizer
from slipstream.errors import EngineError, RequestError
from slipstream.messages.beams import BeamsOutput, BeamsRequest
from slipstream.messages.finish_reason import FinishReason
from slipstream.params.options import DEFAULT_OPTIONS, RequestOptions
from slipstream.params.prompts import Prompt
from slipstream.params.sampling import SamplingParams
from slipstream.params.search import BeamSearchParams


@dataclass(frozen=True, slots=True)
class PreparedBeams:
    """A beam search, checked and tokenised."""

    request: BeamsRequest
    prompt: str | None

    def answer(self, output: BeamsOutput, tokenizer: Tokenizer | None) -> BeamSearchOutput:
        """Answer for the user. EngineError if the engine failed."""
        if output.error is not None or not output.answers:
            raise EngineError(output.error or f"the search ended with {output.finish_reason}")
        prompt = list(self.request.prompt_token_ids)
        sequences = [
            BeamSearchSequence(
                [*prompt, *answer.token_ids],
                None if tokenizer is None else tokenizer.decode(list(answer.token_ids)),
                answer.logprob,
                answer.score,
                "stop" if answer.finish_reason is FinishReason.STOP else "length",
            )
            for answer in output.answers
        ]
        return BeamSearchOutput(self.prompt, prompt, sequences, output.num_cached_tokens)


def prepare_beams(
    processor: InputProcessor,
    prompt: Prompt,
    params: BeamSearchParams,
    options: RequestOptions = DEFAULT_OPTIONS,
    *,
    truncate_prompt_tokens: int | None = None,
) -> PreparedBeams:
    """Prepare a beam search over one prompt. Errors as of `InputProcessor.prepare`."""
    ends = () if params.ignore_eos else processor.eos_token_ids
    if processor.description is not None:
        check_beams(params, len(ends), processor.description.spec)
        if processor.description.banned:
            raise RequestError(
                "beam search does not apply the bad_words_ids and suppress_tokens of this model's generation config; draw the "
                "answer instead, or take them out of the file",
                field="model",
            )
    sampling = SamplingParams(
        temperature=0.0, max_tokens=params.max_tokens, truncate_prompt_tokens=truncate_prompt_tokens
    )
    made = processor.prepare(prompt, sampling, options)
    (first,) = made.engine_requests
    if first.media:
        raise RequestError(
            "beam search takes no pictures and no sounds; leave them out", field="multi_modal_data"
        )
    request = BeamsRequest(
        request_id=first.request_id,
        prompt_token_ids=tuple(made.prompt_token_ids),
        params=params,
        eos_token_ids=ends,
        arrival=first.arrival,
        priority=first.priority,
        cache_salt=first.cache_salt,
        lora=first.lora,
        share=first.share,
    )
    return PreparedBeams(request, made.prompt)
