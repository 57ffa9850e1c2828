"""Request bodies as strict schemas: an unknown field or a wrong type is a 400 whose `param` names
it.

There are three kinds of fields beyond OpenAI's usual ones:

1. vLLM's extensions (top_k, min_p, … priority), which work.
2. Fields about the caller that change no answer (user, metadata, store=false), which are accepted.
3. Known but unsupported fields, which are refused unless their value means "off".

Other fields are refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Raw, Struct

from slipstream.params.checks import MAX_LOGPROBS, TRUNCATING
from slipstream.params.sampling import SamplingParams
from slipstream.server.answers import beams
from slipstream.server.answers.hints import ABSENT, AnyHint, Hint
from slipstream.server.answers.structured import (
    JsonSchema,
    ResponseFormat,
    Structured,
    StructuredOutputs,
    structured,
    structured_param,
)
from slipstream.server.answers.tools import (
    AllowedTool,
    AllowedTools,
    CalledFunction,
    FunctionSpec,
    NamedChoice,
    NamedFunction,
    SentToolCall,
    ToolChoice,
    ToolSpec,
    ToolSpecs,
    offer_of,
)
from slipstream.server.http.decoding import OFF, refuse_unless_off, register, shorten
from slipstream.server.http.errors import bad_request
from slipstream.server.openai.messages import Message, Prompted, each_prompt

Text = Annotated[str, Meta(min_length=1)]
Breaker = Annotated[str, Meta(min_length=1, max_length=40)]  # llama.cpp's limit
Word = Annotated[str, Meta(min_length=1, max_length=1000)]
# The range of the engine's messages and kernels.
Int = Annotated[int, Meta(ge=-(2**31), lt=2**31)]
TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
Stop = Text | Annotated[list[Text], Meta(max_length=64)] | None

NO_FUNCTIONS: Mapping[str, str] = MappingProxyType({})


class StreamOptions(Struct, forbid_unknown_fields=True, kw_only=True):
    include_usage: bool | None = None  # false: not in chunks, either
    include_obfuscation: Hint[bool | None] = None
    continuous_usage_stats: bool = False  # vLLM's: each chunk has the usage so far


class PromptCompression(Struct, forbid_unknown_fields=True, kw_only=True):
    """Extension: shorten the conversation before it is answered. Texts in `protect` are
    unchanged."""

    keep: Annotated[float, Meta(gt=0, le=1)] = 0.5
    method: Literal["iterative", "selective"] = "iterative"
    unit: Literal["token", "word", "sentence"] = "word"
    protect: Annotated[list[Text], Meta(max_length=64)] = []


class GenerationRequest(Structured, forbid_unknown_fields=True, kw_only=True):
    """Base of completions and chat completions."""

    model: str | None = None  # default: the first served name, as in vLLM
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: Int | None = None
    stop: Stop = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], Meta(max_length=1024)] | None = None
    # vLLM's extensions
    top_k: Int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    # llama.cpp's, and transformers' no_repeat_ngram_size
    typical_p: float | None = None
    top_n_sigma: float | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: Int | None = None
    dry_penalty_last_n: Int | None = None
    dry_sequence_breakers: Annotated[list[Breaker], Meta(max_length=16)] | None = None
    no_repeat_ngram_size: Int | None = None
    mirostat_mode: Int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    samplers: Annotated[list[str], Meta(max_length=16)] | None = None
    # Names from the server's `--logits-processors`.
    logits_processors: Annotated[list[Text], Meta(max_length=16)] | None = None
    penalty_alpha: float | None = None  # refused above 0
    # vLLM's and transformers' fields of a beam search; `n` is the number of beams.
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    num_beam_groups: Int | None = None
    diversity_penalty: float | None = None
    min_tokens: Int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=1024)] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    bad_words: Annotated[list[Word], Meta(max_length=1024)] | None = None
    allowed_token_ids: list[TokenId] | None = None
    prompt_logprobs: Int | None = None
    # Keep this many of the prompt's last tokens; -1: as many as fit.
    truncate_prompt_tokens: Int | None = None
    truncation_side: Literal["left", "right"] | None = None  # right: keep its first tokens
    # Default: true for completions; false for chat, whose template writes them.
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None  # in log-probabilities: "token_id:42"
    # No effect: none of our tokenizers adds spaces there.
    spaces_between_special_tokens: bool | None = None
    thinking_token_budget: Int | None = None  # -1: no limit
    priority: Int | None = None  # lower numbers go first
    # Cached prefixes are shared only with requests that have the same salt.
    cache_salt: Text | None = None
    user: AnyHint = ABSENT
    metadata: AnyHint = ABSENT
    store: Hint[bool | None] = None
    safety_identifier: AnyHint = ABSENT
    # Hints for the order in which cached blocks are evicted; `end_of_branch` is ours.
    prompt_cache_key: Raw = ABSENT
    prompt_cache_retention: Raw = ABSENT
    end_of_branch: bool | None = None
    prompt_cache_options: Raw = ABSENT
    service_tier: AnyHint = ABSENT
    prediction: AnyHint = ABSENT
    # vLLM's, which its clients send unset
    request_id: Raw = OFF
    mm_processor_kwargs: Raw = OFF
    kv_transfer_params: Raw = OFF
    vllm_xargs: Raw = OFF
    repetition_detection: Raw = OFF

    off: ClassVar[dict[str, tuple[bytes, ...]]] = {
        "request_id": (b"null",),
        "mm_processor_kwargs": (b"null", b"{}"),
        "kv_transfer_params": (b"null",),
        "vllm_xargs": (b"null", b"{}"),
        "repetition_detection": (b"null",),
    }
    OTHER_NAMES: ClassVar[dict[str, str]] = {
        "request_id": "the answer's header x-request-id",
        "mm_processor_kwargs": "the detail of an image_url",
        "repetition_detection": "no_repeat_ngram_size",
    }

    def check(self) -> None:
        """Raise a 400 for invalid bodies that the schema can't express."""
        refuse_unless_off(self, self.off)
        beams.check(self)
        if self.penalty_alpha:
            raise bad_request(
                "contrastive search is not supported; leave penalty_alpha out", "penalty_alpha"
            )
        if self.stream_options is not None and not self.stream:
            raise bad_request("stream_options needs stream=true", "stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise bad_request(
                "prompt_logprobs come with whole answers only; leave stream out", "prompt_logprobs"
            )

    def param(self, field: str | None) -> str | None:
        """This body's own name of a field named by an engine error."""
        return (
            structured_param(self, field)
            if field and field.startswith("structured_outputs")
            else field
        )

    def sampling(
        self,
        model: Mapping[str, float],
        processors: Mapping[str, str] = NO_FUNCTIONS,
        **special: Any,
    ) -> SamplingParams:
        """The sampling parameters: this body's fields, overridden by `special`.

        A field of None means the default: the `model`'s own, or else OpenAI's. `processors`:
        functions that requests may name.
        """
        # Mirostat replaces the samplers that drop tokens, which the model may recommend.
        if self.mirostat_mode:
            model = {name: value for name, value in model.items() if name not in TRUNCATING}
        given = {**model} | {
            name: getattr(self, name)
            for name in _SAMPLING_FIELDS
            if getattr(self, name) is not None
        }
        if given.get("top_p") == 0:  # the smallest set is only the most likely token
            given |= {"top_p": 1.0, "temperature": 0.0}
        if self.logit_bias is not None:
            given["logit_bias"] = _token_map(self.logit_bias)
        special.setdefault("structured_outputs", structured(self))
        for name in self.logits_processors or ():
            if name not in processors:
                known = (
                    f"one of {', '.join(processors)}"
                    if processors
                    else "none (start it with --logits-processors)"
                )
                raise bad_request(
                    f"logits_processors: {name!r} is not served; this server has {known}",
                    "logits_processors",
                )
        special["logits_processors"] = tuple(
            processors[name] for name in self.logits_processors or ()
        )
        return SamplingParams(**given, **special)


_SAMPLING_FIELDS = tuple(
    name
    for name in SamplingParams.__dataclass_fields__
    if name in GenerationRequest.__struct_fields__
    and name
    not in (
        "logit_bias",
        "logits_processors",
        "max_tokens",
        "prompt_logprobs",
        "structured_outputs",
    )
)


class CompletionRequest(GenerationRequest, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/completions: a continuation of a prompt, in OpenAI's format"""

    prompt: str | list[str | TokenId | list[str | TokenId]]
    echo: bool | None = None
    logprobs: Int | None = None
    best_of: Int | None = None
    # For translation models, as the tokenizer spells them (`engine.requests.languages`).
    source_language: Text | None = None
    target_language: Text | None = None
    suffix: Raw = OFF

    prompt_embeds: Raw = OFF  # vLLM's

    off: ClassVar[dict[str, tuple[bytes, ...]]] = {
        **GenerationRequest.off,
        "suffix": (b"null", b'""'),
        "prompt_embeds": (b"null",),
    }

    def check(self) -> None:
        super().check()
        if self.stream and self.best_of not in (None, self.n or 1):
            raise bad_request(
                "the best of several answers are only known at their end; leave stream or best_of out",
                "best_of",
            )
        if self.max_tokens == 0 and not (self.echo or self.prompt_logprobs is not None):
            raise bad_request(
                "max_tokens: 0 needs echo or prompt_logprobs; without them it asks for nothing",
                "max_tokens",
            )

    def param(self, field: str | None) -> str | None:
        own = "logprobs" if self.prompt_logprobs is None else "prompt_logprobs"
        return {"prompt_token_ids": "prompt", "prompt_logprobs": own}.get(
            field or ""
        ) or super().param(field)

    def prompts(self) -> list[Prompted]:
        """A list with one entry for each prompt."""
        return each_prompt(self.prompt, "prompt")


class ChatReasoning(Struct, kw_only=True):
    """OpenRouter's `reasoning`. Other members have no effect."""

    effort: str | None = None
    max_tokens: Int | None = None
    enabled: bool | None = None
    exclude: bool | None = None  # true: reasoning is omitted from the answer


class ChatThinking(Struct, kw_only=True):
    """Field `thinking` of DeepSeek's, GLM's and Kimi's APIs. Other members have no effect."""

    type: Literal["enabled", "disabled", "adaptive", "auto"] | None = None
    budget_tokens: Int | None = None


class ChatRequest(GenerationRequest, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/chat/completions: an answer to messages, in OpenAI's format; `stream` sends it incrementally"""

    messages: Annotated[list[Message], Meta(min_length=1)]
    compress_prompt: PromptCompression | None = None
    add_generation_prompt: bool | None = None  # vLLM's, with the next two
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    echo: bool | None = None  # vLLM's; the answer repeats the assistant message that it continues
    include_reasoning: bool | None = None  # vLLM's; false: reasoning is omitted from the answer
    reasoning_effort: str | None = None  # for templates that know it, like `verbosity`
    verbosity: str | None = None
    # Other hosts' fields for the two above and for `thinking_token_budget`; see `read_thinking`.
    reasoning: ChatReasoning | None = None
    thinking: ChatThinking | None = None
    enable_thinking: bool | None = None
    thinking_budget: Int | None = None  # a hint for models that don't think
    separate_reasoning: Raw = OFF  # SGLang's, with the next
    stream_reasoning: Raw = OFF
    reasoning_format: Raw = OFF  # llama.cpp's
    max_completion_tokens: Int | None = None
    logprobs: bool | None = None
    top_logprobs: Int | None = None
    tools: ToolSpecs | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: Raw = OFF
    function_call: Raw = OFF
    modalities: Raw = OFF
    audio: Raw = OFF
    web_search_options: AnyHint = ABSENT  # like the hosted tool: the model is not told about it
    moderation: Raw = OFF
    documents: Raw = OFF  # vLLM's, up to `media_io_kwargs`
    chat_template: Raw = OFF
    media_io_kwargs: Raw = OFF
    usage: AnyHint = ABSENT  # OpenRouter's, up to `trace`
    provider: AnyHint = ABSENT
    models: AnyHint = ABSENT
    route: AnyHint = ABSENT
    transforms: AnyHint = ABSENT
    session_id: AnyHint = ABSENT
    trace: AnyHint = ABSENT
    user_id: AnyHint = ABSENT  # DeepSeek's and GLM's
    tool_stream: AnyHint = ABSENT
    cache_prompt: AnyHint = ABSENT  # llama.cpp's, up to `return_progress`
    id_slot: AnyHint = ABSENT
    timings_per_token: AnyHint = ABSENT
    return_progress: AnyHint = ABSENT
    ttl: AnyHint = ABSENT  # LM Studio's

    off: ClassVar[dict[str, tuple[bytes, ...]]] = {
        **GenerationRequest.off,
        "separate_reasoning": (b"null", b"true"),
        "stream_reasoning": (b"null", b"true"),
        "reasoning_format": (b"null", b'"auto"', b'"deepseek"'),
        "functions": (b"null", b"[]"),
        "function_call": (b"null", b'"none"'),
        "modalities": (b"null", b'["text"]'),
        "audio": (b"null",),
        "moderation": (b"null",),
        "documents": (b"null", b"[]"),
        "chat_template": (b"null",),
        "media_io_kwargs": (b"null", b"{}"),
    }
    OTHER_NAMES: ClassVar[dict[str, str]] = {
        **GenerationRequest.OTHER_NAMES,
        "documents": "a message, or chat_template_kwargs for a template that knows them",
        "chat_template": "`serve --chat-template FILE`",
    }

    def check(self) -> None:
        super().check()
        self.read_thinking()
        offer_of(self)
        if taken := TEMPLATE_FIELDS & set(self.chat_template_kwargs or ()):
            raise bad_request(
                f"chat_template_kwargs: {min(taken)} is set by the request's own fields",
                "chat_template_kwargs",
            )
        if self.continue_final_message and self.add_generation_prompt:
            message = "add_generation_prompt begins a message and continue_final_message continues one; leave one of them out"
            raise bad_request(message, "continue_final_message")
        if self.echo and not self.continue_final_message:
            message = "echo repeats the message that continue_final_message goes on with; set both"
            raise bad_request(message, "echo")
        if self.top_logprobs and not self.logprobs:
            raise bad_request("top_logprobs needs logprobs=true", "top_logprobs")
        if self.top_logprobs is not None and not 0 <= self.top_logprobs <= MAX_LOGPROBS:
            raise bad_request(
                f"top_logprobs must be from 0 to {MAX_LOGPROBS}, got {self.top_logprobs}",
                "top_logprobs",
            )
        if self.max_tokens is not None and self.max_completion_tokens not in (
            None,
            self.max_tokens,
        ):
            raise bad_request(
                "max_tokens and max_completion_tokens disagree; give one", "max_completion_tokens"
            )

    def read_thinking(self) -> None:
        """Fill the fields about thinking from those of other hosts' APIs, unless the body sets our
        own."""
        reasoning, thinking = self.reasoning or ChatReasoning(), self.thinking or ChatThinking()
        if self.thinking_budget is None:
            self.thinking_budget = (
                thinking.budget_tokens if reasoning.max_tokens is None else reasoning.max_tokens
            )
        if self.enable_thinking is None:
            self.enable_thinking = reasoning.enabled
        if self.enable_thinking is None and thinking.type in ("enabled", "disabled"):
            self.enable_thinking = thinking.type == "enabled"
        if self.reasoning_effort is None:
            self.reasoning_effort = "none" if self.enable_thinking is False else reasoning.effort
        if reasoning.exclude and self.include_reasoning is None:
            self.include_reasoning = False

    def param(self, field: str | None) -> str | None:
        max_tokens = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        names = {
            "prompt": "messages",
            "prompt_token_ids": "messages",
            "logprobs": "top_logprobs",
            **dict.fromkeys(("image", "audio"), "messages"),
        }
        return {**names, "max_tokens": max_tokens}.get(field or "") or super().param(field)


TEMPLATE_FIELDS = {
    "messages", "tools", "add_generation_prompt", "continue_final_message", "add_special_tokens", "any_length", "tokenize",
    "pictures",
}  # fmt: skip


class LoadAdapterRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/load_lora_adapter: serve an adapter under a name, on a server with --lora-folder"""

    lora_name: Annotated[str, Meta(min_length=1, max_length=200)]
    # Within the server's adapter folder.
    lora_path: Annotated[str, Meta(min_length=1, max_length=4096)]
    load_inplace: bool = False  # may replace the adapter of that name


class UnloadAdapterRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/unload_lora_adapter: stop serving an adapter"""

    lora_name: str


class TokenizeRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /tokenize: a prompt, or messages through the chat template"""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    # Default: true for a prompt; false for messages, whose template writes them.
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None  # for messages; default true
    continue_final_message: bool = False  # for messages, as the next two
    chat_template_kwargs: dict[str, Any] | None = None
    tools: ToolSpecs | None = None
    return_token_strs: bool = False
    content: str | list[str | TokenId] | None = None  # llama.cpp's names, as the next three
    add_special: bool = False
    with_pieces: bool = False
    parse_special: Literal[True] = True


class DetokenizeRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /detokenize: tokens as text"""

    model: str | None = None
    tokens: list[TokenId]
    skip_special_tokens: bool = False


def _token_map(biases: dict[str, float]) -> dict[int, float]:
    for key, bias in biases.items():
        if not (key.isascii() and key.isdecimal() and len(key) < 10):
            raise bad_request(
                f"logit_bias: {shorten(key.encode())!r} is not a token id", "logit_bias"
            )
        if not -100 <= bias <= 100:
            raise bad_request(f"logit_bias: {bias} is not between -100 and 100", "logit_bias")
    found = {int(key): bias for key, bias in biases.items()}
    if len(found) < len(biases):  # duplicates such as "00" and "0"
        twice = next(key for key in biases if key != str(int(key)))
        raise bad_request(
            f"logit_bias: {shorten(twice.encode())!r} names a token a second time", "logit_bias"
        )
    return found


def template_variables(body: ChatRequest, template: str | None) -> tuple[dict[str, Any], list[str]]:
    """(variables for the chat template, fields that the template does not use (hints)).

    If the template has only a switch for thinking, an effort of "none" turns that off.
    """
    given, hints = dict(body.chat_template_kwargs or {}), list[str]()
    for name in ("reasoning_effort", "verbosity"):
        value = getattr(body, name)
        if value is None:
            continue
        if name in (template or ""):
            given[name] = value
        elif (
            value == "none" and name == "reasoning_effort" and "enable_thinking" in (template or "")
        ):
            given.setdefault("enable_thinking", False)
        else:
            hints.append(name)
    if body.enable_thinking is not None:
        for name in SWITCHES.findall(template or ""):
            given.setdefault(name, body.enable_thinking)
    return given, hints


SWITCHES = re.compile(r"\b(enable_thinking|thinking(?= is (?:not )?defined))\b")
"""Names of chat templates' switches for thinking: most have the first, DeepSeek V3.1's and Kimi's the second."""

register(
    CompletionRequest,
    ChatRequest,
    LoadAdapterRequest,
    UnloadAdapterRequest,
    TokenizeRequest,
    DetokenizeRequest,
    parts=(
        *(StreamOptions, PromptCompression, ResponseFormat, JsonSchema, StructuredOutputs),
        *(ToolSpec, FunctionSpec, SentToolCall, CalledFunction),
        *(NamedChoice, NamedFunction, AllowedTools, AllowedTool),
    ),
)
