"""Converts a user's request to engine requests.

`InputProcessor` checks a prompt and its SamplingParams, and rejects invalid ones before anything is queued. `prompts.py`
tokenises prompts, `texts.py` prepares the texts of embedding calls. `output.py` converts the other way. No torch.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from slipstream.config import EngineConfig
from slipstream.engine.grammars.check import check
from slipstream.engine.media.prepared import MediaProcessor, PreparedMedia, joined, placed
from slipstream.engine.media.reader import media_processor
from slipstream.engine.model_files import default_sampling, end_tokens
from slipstream.engine.requests.choices import check_answer, fork
from slipstream.engine.requests.languages import both_sides
from slipstream.engine.requests.over_context import over_context
from slipstream.engine.requests.prompts import PromptReader
from slipstream.engine.requests.reasoning_budgets import with_reasoning
from slipstream.engine.requests.sampler_params import Breakers, with_functions, with_words
from slipstream.engine.requests.texts import TextsProcessor
from slipstream.engine.text.tokenizer import Tokenizer
from slipstream.engine.text.tools import Formats
from slipstream.engine.threads.fair_threads import NUM_CORES, FairThreads
from slipstream.errors import AdapterError, RequestError
from slipstream.messages.media import AudioWindow
from slipstream.messages.requests import EngineRequest, pack_ids
from slipstream.params.options import DEFAULT_OPTIONS, RequestOptions
from slipstream.params.prompts import Prompt, plain_prompt
from slipstream.params.sampling import SamplingParams
from slipstream.spec.description import ModelDescription

INLINE_CHARS = 16_384
"""Longer texts are tokenized in a thread; up to this number of characters that costs more than the work."""

_T = TypeVar("_T")


_CLIENT_THREADS = max(2, NUM_CORES)
MAX_CHARS = 16 * 2**20
"""Maximum characters being tokenized or rendered at a time, half of them for one client. A
character that is its own token takes about 270 bytes."""

_texts = FairThreads(
    "texts",
    max(32, 4 * _CLIENT_THREADS),
    per_client=_CLIENT_THREADS,
    max_weight=MAX_CHARS,
    client_weight=MAX_CHARS // 2,
    trim_weight=2**20,
)


async def in_thread_if_long(
    work: Callable[[], _T], num_characters: int, tokenizer: Any = None
) -> _T:
    """Runs `work`, which renders or tokenizes `num_characters` characters. Long work runs in a
    thread, so that other requests' tokens are hardly delayed. With a `tokenizer` that has a time
    limit all work does, since even a short text can take that long."""
    if num_characters <= INLINE_CHARS and not getattr(tokenizer, "has_time_limit", False):
        return work()
    return await _texts.run(work, weight=num_characters)


def _listed(data: Any) -> list[Any]:
    found = data.get("image", data.get("audio", ())) if isinstance(data, dict) else ()
    return list(found) if isinstance(found, (list, tuple)) else [found]


def num_characters(prompt: Prompt | tuple[str, str]) -> int:
    """Number of characters to tokenize, 0 for token ids. A prompt with unprepared media counts as
    long, so that they are prepared in a thread."""
    if isinstance(prompt, dict):
        media = _listed(prompt.get("multi_modal_data"))
        if not all(isinstance(x, PreparedMedia | AudioWindow) for x in media):
            return INLINE_CHARS + 1  # waits for their preparation
        prompt = prompt.get("prompt", "")  # type: ignore[assignment]
    return (
        sum(map(len, prompt))
        if isinstance(prompt, tuple)
        else len(prompt)
        if isinstance(prompt, str)
        else 0
    )


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A user's request, checked: one engine request for each sampled answer; the others are forks
    of the first. Engine requests have unique ids that are never reused, so that late messages about
    a cancelled request can't reach another one of the same name."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]  # the encoder's, if the model has one
    sampling: SamplingParams
    engine_requests: tuple[EngineRequest, ...]
    hides_logprobs: bool = False  # log-probabilities of answers are not returned


class InputProcessor:
    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        vocab_size: int,
        max_model_len: int,
        eos_token_ids: Sequence[int],
        description: ModelDescription | None = None,
        ids: Iterator[str] | None = None,
        takes_adapters: bool = False,
        in_process: bool = True,
        media: MediaProcessor | None = None,
    ) -> None:
        """Prepares requests for one model. Without a `description` the model is a decoder without embeddings.
        `ids` yields the ids of engine requests. With `in_process` the model runs in this process, so a
        request may contain functions. `media` reads a prompt's pictures or sounds."""
        self.tokenizer = tokenizer
        self.description = description
        self._writes = description is None or description.spec.generates
        self._banned = () if description is None else description.banned
        encoder = None if description is None else description.spec.encoder
        self._reads_audio = encoder is not None and encoder.audio is not None
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.eos_token_ids = tuple(eos_token_ids)
        self.takes_adapters = takes_adapters
        self.in_process = in_process
        self._breakers = Breakers(tokenizer, vocab_size)
        self._ids = ids or map(str, itertools.count())
        self.prompts = PromptReader(tokenizer, vocab_size, max_model_len, description, media)
        self.texts = TextsProcessor(self.prompts, self._ids)

    @classmethod
    def for_model(
        cls,
        description: ModelDescription,
        config: EngineConfig,
        tokenizer: Tokenizer | None,
        *,
        ids: Iterator[str] | None = None,
        in_process: bool = True,
    ) -> InputProcessor:
        """Makes the processor of a model. An answer ends at any end token that the model's files or the tokenizer name."""
        default_sampling(description)  # invalid ones must raise at the start
        return cls(
            tokenizer,
            vocab_size=description.spec.vocab_size,
            max_model_len=config.model.max_model_len,
            eos_token_ids=end_tokens(description, tokenizer),
            description=description,
            ids=ids,
            takes_adapters=config.lora is not None,
            in_process=in_process and config.parallel.num_ranks == 1,
            media=media_processor(description, config),
        )

    def prepare(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        options: RequestOptions = DEFAULT_OPTIONS,
        *,
        grammar_checked: bool = False,
        formats: Formats = Formats(),  # noqa: B008 - it is frozen
    ) -> PreparedRequest:
        """Check and tokenize a request. RequestError names an invalid field; ContextLengthError if prompt or
        answer don't fit. `grammar_checked`: the grammar was already checked, which can take seconds.
        `formats`: the model's reasoning format, for a budget without a chat template."""
        spec = None if self.description is None else self.description.spec
        if spec is not None and not self._writes:
            use = (
                "/rerank, LLM.rerank"
                if spec.classifier
                else "/v1/embeddings, LLM.embed or `slipstream embed`"
            )
            raise RequestError(
                f"this model ({spec.family}) is {spec.kind} and writes no text; use {use}",
                field="model",
            )
        if options.lora_request is not None and not self.takes_adapters:
            raise AdapterError("adapters are off; start with enable_lora", field="lora_request")
        if isinstance(prompt, dict) and ("cache_salt" in prompt or None in prompt.values()):
            prompt, options = plain_prompt(prompt, options)
        audio: AudioWindow | None = None
        media: Sequence[PreparedMedia] = ()
        if self._reads_audio or (isinstance(prompt, dict) and "multi_modal_data" in prompt):
            audio = self.prompts.media.audio_of(prompt)
            prompt, media = self.prompts.media.parted(prompt)
        any_length = sampling.truncate_prompt_tokens is not None
        special, salt = options.add_special_tokens, options.cache_salt
        text, tokens, packed = self.prompts.tokens(
            prompt, special, any_length=any_length, media=media, salt=salt
        )
        spans = placed(tokens, media, self.prompts.media.spec, salt) if media else ()
        whole_salt = ""
        if spans and spec is not None and spec.joins_prompts:
            spans, whole_salt = joined(tokens, spans, salt, spec)
        if spans and any_length:
            raise RequestError("a prompt with media can't be cut", field="truncate_prompt_tokens")
        if sampling.truncate_prompt_tokens is not None:
            tokens = self.prompts.cut(tokens, sampling, text is not None and special)
            packed = pack_ids(tokens)
        encoded: tuple[int, ...] = ()
        shown = tokens
        if spec is not None and spec.encoder is not None and spec.encoder.audio is not None:
            encoded = (0,) * spec.encoder.audio.num_states
        elif spec is not None and spec.encoder is not None:
            encoded, tokens = both_sides(self.tokenizer, spec.encoder, prompt, tokens)
            packed = pack_ids(tokens)
            if len(encoded) > self.max_model_len:
                raise self.prompts.too_long(len(encoded))
        if encoded and sampling.prompt_logprobs is not None:
            raise RequestError(
                "an encoder's prompt has no log-probabilities (echo needs them)",
                field="prompt_logprobs",
            )
        room = self.max_model_len - len(tokens)
        if room < 1:
            raise over_context(self.max_model_len, len(tokens))
        max_tokens = room if sampling.max_tokens is None else sampling.max_tokens
        if max_tokens > room:
            raise over_context(self.max_model_len, len(tokens), max_tokens)
        if sampling.min_tokens > max_tokens:
            raise RequestError(
                f"min_tokens={sampling.min_tokens} is more than the {max_tokens} that fit",
                field="min_tokens",
            )
        self.prompts.check_ids("logit_bias", sampling.logit_bias)
        self.prompts.check_ids("stop_token_ids", sampling.stop_token_ids)
        if sampling.structured_outputs is not None:
            if self.tokenizer is None:
                message = "structured outputs need a tokenizer (skip_tokenizer_init is set)"
                raise RequestError(message, field="structured_outputs")
            if not grammar_checked:
                check(sampling.structured_outputs, salt)
        if sampling.thinking_token_budget is not None:
            sampling = with_reasoning(sampling, tokens, formats, self.tokenizer)
        if (
            (self._banned or sampling.bad_words)
            or sampling.bad_words_token_ids
            or sampling.allowed_token_ids is not None
        ):
            sampling = with_words(sampling, self.tokenizer, self.prompts, self._banned)
        if sampling.dry_multiplier:
            sampling = self._breakers.put(sampling)
        if sampling.logits_processors:
            sampling = with_functions(sampling, in_process=self.in_process)
        if sampling.stop and self.tokenizer is None:
            raise RequestError(
                "stop strings need a tokenizer (skip_tokenizer_init is set)", field="stop"
            )
        hides_logprobs = sampling.best_of is not None and sampling.logprobs is None
        if hides_logprobs:  # needed to choose the best answers
            sampling = dataclasses.replace(sampling, logprobs=0)
        if options.answer_token_ids:
            check_answer(self.prompts, options.answer_token_ids, sampling, max_tokens)
        first = EngineRequest.of(
            options,
            request_id=next(self._ids),
            prompt_token_ids=packed,
            sampling=sampling
            if sampling.num_drawn == 1
            else dataclasses.replace(sampling, n=1, best_of=None),
            eos_token_ids=() if sampling.ignore_eos else self.eos_token_ids,
            max_tokens=max_tokens,
            encoder_token_ids=encoded,
            audio=audio,
            media=spans,
            whole_salt=whole_salt,
            marks=self.prompts.borders(tokens),
        )
        others = (fork(first, i) for i in range(1, sampling.num_drawn))
        request_id = options.request_id or f"request-{first.request_id}"
        return PreparedRequest(request_id, text, shown, sampling, (first, *others), hides_logprobs)
