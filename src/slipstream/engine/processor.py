"""Turns a user's request into engine requests.

`InputProcessor` checks a prompt and its SamplingParams, and rejects what could not work before anything is queued. `prompts.py`
tokenises prompts, `texts.py` prepares the texts of embedding calls. `output.py` converts the other way. No torch.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from slipstream.config import EngineArgs, EngineConfig
from slipstream.engine.beams import BeamSearchOutput, BeamSearchSequence
from slipstream.engine.beams import check as check_beams
from slipstream.engine.grammars.grammar import check
from slipstream.engine.grammars.reasoning import counter
from slipstream.engine.prompts import PromptReader
from slipstream.engine.sampler_params import Breakers, with_functions
from slipstream.engine.text.chat_template import read_template
from slipstream.engine.text.tokenizer import Tokenizer
from slipstream.engine.text.tools import Formats, OfferedTools, no_reasoning, reading
from slipstream.engine.texts import TextsProcessor
from slipstream.engine.threads.fair_threads import NUM_CORES, FairThreads
from slipstream.engine.vision.pictures import PictureProcessor, placed
from slipstream.errors import (
    AdapterError,
    ContextLengthError,
    EngineError,
    RequestError,
    UnsupportedModelError,
)
from slipstream.hub import resolve_model
from slipstream.spec.description import ModelDescription
from slipstream.stats import CanaryResult
from slipstream.types import (
    DEFAULT_OPTIONS,
    BeamSearchParams,
    BeamsOutput,
    BeamsRequest,
    EngineRequest,
    FinishReason,
    Prompt,
    RequestOptions,
    SamplingParams,
    pack_ids,
)

_logger = logging.getLogger("slipstream.engine")

INLINE_CHARS = 16_384
"""More characters than this are tokenised in a thread; for fewer the way there and back costs more than the work."""

_T = TypeVar("_T")


_CLIENT_THREADS = max(2, NUM_CORES)
MAX_CHARS = 16 * 2**20
"""Characters that are tokenised or rendered at a time, half of them for one client. A character
that is a token of its own takes some 270 bytes."""

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
    """Result of `work`, which renders or tokenises `num_characters` characters. Long work runs in a
    thread, so that the tokens of other requests hardly wait for it. With a `tokenizer` that has a
    time limit all work does: a short text can take all of that time."""
    if num_characters <= INLINE_CHARS and not getattr(tokenizer, "has_time_limit", False):
        return work()
    return await _texts.run(work, weight=num_characters)


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A user's request, checked: its engine requests, one for each answer that is drawn, the first of which the others fork
    from. Engine requests have ids of their own, never used twice, so that late news of a cancelled request can't reach another
    of the same name."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]  # an encoder's, if the model has one
    sampling: SamplingParams
    engine_requests: tuple[EngineRequest, ...]
    hides_logprobs: bool = False  # the request has no log-probabilities of answers


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


def load_tokenizer(args: EngineArgs, model: ModelDescription) -> Tokenizer | None:
    """The tokenizer that `args` asks for: the model's own, another one, or none. With a `chat_template` it has that one.
    ConfigError if the file is none."""
    if args.skip_tokenizer_init:
        return None
    path = None
    if args.tokenizer is not None:
        path = Path(args.tokenizer).expanduser()
        if not (path / "tokenizer.json").is_file():  # else it needs no model beside it
            path = resolve_model(args.tokenizer, download_dir=args.download_dir)
    tokenizer = Tokenizer.for_model(model, path)
    if args.chat_template is not None:
        tokenizer.set_chat_template(read_template(args.chat_template))
    return tokenizer


def end_tokens(model: ModelDescription, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Every token that ends an answer: those that the model's files name, and the tokenizer's."""
    of_tokenizer = [
        i for i in (tokenizer.eos_token_ids if tokenizer else ()) if i < model.spec.vocab_size
    ]
    return tuple(dict.fromkeys((*model.eos_token_ids, *of_tokenizer)))


def default_sampling(model: ModelDescription) -> SamplingParams:
    """Default sampling parameters from the model's generation config. UnsupportedModelError if they
    are not valid."""
    try:
        return SamplingParams(**dict(model.sampling))  # type: ignore[arg-type]
    except RequestError as error:
        raise UnsupportedModelError(
            f"generation_config.json: {error}", field=error.field
        ) from error


def log_canary(result: CanaryResult | None) -> None:
    """Say what the checkpoint's canary found, a warning if it is not well."""
    if result is not None:
        _logger.log(logging.INFO if result.ok else logging.WARNING, "%s", result.describe())


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
        pictures: PictureProcessor | None = None,
    ) -> None:
        """Prepares requests for one model. Without a `description` the model is a decoder that is
        not asked for vectors. `ids` yields the ids of engine requests. `in_process` says that the
        model runs in this process, so that a request can hold functions. `pictures` is None for a
        model that takes none."""
        self.tokenizer = tokenizer
        self.description = description
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.eos_token_ids = tuple(eos_token_ids)
        self.takes_adapters = takes_adapters
        self.in_process = in_process
        self._breakers = Breakers(tokenizer, vocab_size)
        self.pictures = pictures
        self._ids = ids or map(str, itertools.count())
        self.prompts = PromptReader(tokenizer, vocab_size, max_model_len, description, pictures)
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
        """An answer ends at any end token that the model's files or the tokenizer name."""
        default_sampling(description)  # wrong ones are found at the start
        vision, images, pictures = description.spec.vision, description.images, None
        if vision is not None and images is not None and config.images is not None:
            pictures = PictureProcessor(vision, images, config.images.max_images)
        return cls(
            tokenizer,
            vocab_size=description.spec.vocab_size,
            max_model_len=config.model.max_model_len,
            eos_token_ids=end_tokens(description, tokenizer),
            description=description,
            ids=ids,
            takes_adapters=config.lora is not None,
            in_process=in_process and config.parallel.num_ranks == 1,
            pictures=pictures,
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
        """Check and tokenise. RequestError names the field; ContextLengthError if prompt or answer do not fit. With
        `grammar_checked` the grammar was checked before, which can take seconds. `formats` says how the model writes its
        reasoning, for a budget of a prompt without a chat template."""
        spec = None if self.description is None else self.description.spec
        if spec is not None and not spec.generates:
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
        audio = self.prompts.audio_of(prompt)
        prompt, pictures = self.prompts.parted(prompt)
        any_length = sampling.truncate_prompt_tokens is not None
        special = options.add_special_tokens
        text, tokens, packed = self.prompts.tokens(
            prompt, special, any_length=any_length, pictures=pictures
        )
        salt = options.cache_salt
        images = placed(tokens, pictures, self.prompts.vision, salt) if pictures else ()
        if images and any_length:
            raise RequestError(
                "a prompt with pictures can't be cut", field="truncate_prompt_tokens"
            )
        if sampling.truncate_prompt_tokens is not None:
            tokens = self.prompts.last(tokens, sampling, text is not None and special)
            packed = pack_ids(tokens)
        encoded: tuple[int, ...] = ()
        shown = tokens
        if spec is not None and spec.encoder is not None and spec.encoder.audio is not None:
            encoded = (0,) * spec.encoder.audio.num_states
        elif spec is not None and spec.encoder is not None:
            encoded, tokens = tuple(tokens), [spec.encoder.start_token_id]
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
            raise self._too_long(len(tokens))
        max_tokens = room if sampling.max_tokens is None else sampling.max_tokens
        if max_tokens > room:
            raise self._too_long(len(tokens), max_tokens)
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
            sampling = self._with_reasoning(sampling, tokens, formats)
        sampling = with_functions(
            self._breakers.put(self._with_words(sampling)), in_process=self.in_process
        )
        if sampling.stop and self.tokenizer is None:
            raise RequestError(
                "stop strings need a tokenizer (skip_tokenizer_init is set)", field="stop"
            )
        hides_logprobs = sampling.best_of is not None and sampling.logprobs is None
        if hides_logprobs:  # they say which answers are the best
            sampling = dataclasses.replace(sampling, logprobs=0)
        if options.answer_token_ids:
            self._check_answer(options.answer_token_ids, sampling, max_tokens)
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
            images=images,
            marks=self.prompts.borders(tokens),
        )
        others = (self._fork(first, i) for i in range(1, sampling.num_drawn))
        request_id = options.request_id or f"request-{first.request_id}"
        return PreparedRequest(request_id, text, shown, sampling, (first, *others), hides_logprobs)

    def _with_reasoning(
        self, sampling: SamplingParams, prompt: Sequence[int], formats: Formats
    ) -> SamplingParams:
        """Sampling parameters with the markers of the reasoning, which has a budget. A grammar then
        begins after it. RequestError if the model has no reasoning, or the end can't be forced."""
        tokenizer, markers = self.tokenizer, sampling.reasoning
        if tokenizer is None:
            message = "a budget of reasoning needs a tokenizer (skip_tokenizer_init is set)"
            raise RequestError(message, field="thinking_token_budget")
        if markers is None:
            text = tokenizer.decode(prompt, skip_special_tokens=False)
            how = reading(
                *(formats, OfferedTools(), tokenizer.chat_template, lambda: text),
                to_name="",
                begun=text,
            )
            if how is None:
                raise no_reasoning()
            made = how.applied(sampling, tokenizer)
            asked, markers = sampling.structured_outputs, made.reasoning
            around = asked is not None and asked.around is not None
            sampling = dataclasses.replace(
                sampling,
                reasoning=markers,
                structured_outputs=asked if around else made.structured_outputs,
            )
        assert markers is not None
        forced = counter(markers, tokenizer, sampling.thinking_token_budget).forced
        allowed = sampling.allowed_token_ids
        if allowed is not None and (lacking := forced - set(allowed)):
            raise RequestError(
                f"allowed_token_ids must have the tokens that end the reasoning, since thinking_token_budget forces them; add "
                f"{sorted(lacking)}",
                field="allowed_token_ids",
            )
        return sampling

    def _check_answer(
        self, begun: Sequence[int], sampling: SamplingParams, max_tokens: int
    ) -> None:
        """Raise RequestError if an answer can't go on after the tokens that are there."""
        self.prompts.check_ids("answer_token_ids", begun)
        if len(begun) >= max_tokens:
            raise RequestError(
                f"{len(begun)} tokens of at most {max_tokens} are there already",
                field="answer_token_ids",
            )
        if sampling.n > 1 or sampling.logprobs is not None or sampling.prompt_logprobs is not None:
            message = "an answer of several choices or with log-probabilities can't go on elsewhere; ask again for all of it"
            raise RequestError(message, field="answer_token_ids")

    def prepare_beams(
        self,
        prompt: Prompt,
        params: BeamSearchParams,
        options: RequestOptions = DEFAULT_OPTIONS,
        *,
        truncate_prompt_tokens: int | None = None,
    ) -> PreparedBeams:
        """A beam search over one prompt. Errors as of `prepare`."""
        ends = () if params.ignore_eos else self.eos_token_ids
        if self.description is not None:
            check_beams(params, len(ends), self.description.spec)
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=params.max_tokens,
            truncate_prompt_tokens=truncate_prompt_tokens,
        )
        made = self.prepare(prompt, sampling, options)
        (first,) = made.engine_requests
        if first.images:
            raise RequestError("beam search takes no pictures", field="multi_modal_data")
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

    def _too_long(self, num_prompt: int, max_tokens: int | None = None) -> ContextLengthError:
        """Begins with the words by which OpenAI's clients know this error."""
        what = f"This model's maximum context length is {self.max_model_len} tokens. However, "
        if max_tokens is None:
            what += f"the prompt has {num_prompt} tokens, and at least one is for the answer; shorten the prompt"
        else:
            what += (
                f"you requested {num_prompt + max_tokens} tokens ({num_prompt} in the prompt, and max_tokens is "
                f"{max_tokens}); ask for at most {self.max_model_len - num_prompt} tokens, or shorten the prompt"
            )
        error = ContextLengthError(what, field="prompt" if max_tokens is None else "max_tokens")
        error.lengths = (num_prompt, max_tokens, self.max_model_len)
        return error

    def _with_words(self, sampling: SamplingParams) -> SamplingParams:
        """Sampling parameters with their bad words as tokens. RequestError if no allowed token is
        left."""
        words = sampling.bad_words_token_ids
        if sampling.bad_words:
            if self.tokenizer is None:
                message = "bad_words need a tokenizer (skip_tokenizer_init is set); pass bad_words_token_ids"
                raise RequestError(message, field="bad_words")
            forms = [
                form for word in sampling.bad_words for form in (word.strip(), " " + word.strip())
            ]
            encoded = (
                tuple(self.tokenizer.encode(form, add_special_tokens=False)) for form in forms
            )
            words = tuple(dict.fromkeys((*words, *encoded)))
            sampling = dataclasses.replace(sampling, bad_words=(), bad_words_token_ids=words)
        self.prompts.check_ids("bad_words_token_ids", list(itertools.chain.from_iterable(words)))
        allowed = sampling.allowed_token_ids
        if allowed is not None:
            self.prompts.check_ids("allowed_token_ids", allowed)
            sampling = dataclasses.replace(
                sampling, allowed_token_ids=tuple(dict.fromkeys(allowed))
            )
            if set(allowed) <= {word[0] for word in words if len(word) == 1}:
                raise RequestError(
                    "every one of allowed_token_ids is one of bad_words", field="allowed_token_ids"
                )
        return sampling

    def _fork(self, first: EngineRequest, index: int) -> EngineRequest:
        """Choice `index`: the same prompt, its own seed, and no second look at the prompt's log-probabilities."""
        sampling = first.sampling
        seed = None if sampling.seed is None else (sampling.seed + index + 2**63) % 2**64 - 2**63
        return dataclasses.replace(
            first,
            request_id=f"{first.request_id}/{index}",
            fork_of=first.request_id,
            images=tuple(dataclasses.replace(image, pixels=b"") for image in first.images),
            sampling=dataclasses.replace(sampling, seed=seed, prompt_logprobs=None),
        )
