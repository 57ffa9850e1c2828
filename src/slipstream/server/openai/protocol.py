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
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, TypeVar

import msgspec
import msgspec.structs
from msgspec import Meta, Raw, Struct

from slipstream.base.arguments import likely_value
from slipstream.engine.text.tools import ROLES
from slipstream.params.checks import MAX_LOGPROBS, TRUNCATING
from slipstream.params.sampling import SamplingParams
from slipstream.server.answers import beams
from slipstream.server.answers.hints import HINT
from slipstream.server.answers.structured import (
    JsonSchema,
    ResponseFormat,
    Structured,
    StructuredOutputs,
    structured,
    structured_param,
)
from slipstream.server.answers.tools import (
    CalledFunction,
    FunctionSpec,
    NamedChoice,
    NamedFunction,
    SentToolCall,
    ToolChoice,
    ToolSpec,
    ToolSpecs,
    call_dict,
    offer_of,
)
from slipstream.server.http.errors import FIELDS, bad_request
from slipstream.server.http.field_hints import allowed_values, likely_name
from slipstream.server.http.json_depth import MAX_DEPTH, is_too_deep

Text = Annotated[str, Meta(min_length=1)]
Breaker = Annotated[str, Meta(min_length=1, max_length=40)]  # llama.cpp's limit
Word = Annotated[str, Meta(min_length=1, max_length=1000)]
# The range of the engine's messages and kernels.
Int = Annotated[int, Meta(ge=-(2**31), lt=2**31)]
TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
Stop = Text | Annotated[list[Text], Meta(max_length=64)] | None
MAX_INPUTS = 2048  # texts in one request (OpenAI's limit)
NO_FUNCTIONS: Mapping[str, str] = MappingProxyType({})
OFF = msgspec.field(default_factory=Raw)  # default of fields that must be off


class StreamOptions(Struct, forbid_unknown_fields=True, kw_only=True):
    hints: ClassVar[tuple[str, ...]] = ("include_obfuscation",)

    include_usage: bool | None = None  # false: not in chunks, either
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool = False  # vLLM's: each chunk has the usage so far


class PromptCompression(Struct, forbid_unknown_fields=True, kw_only=True):
    """Our extension: shorten the conversation before it is answered. Texts in `protect` stay as
    they are."""

    keep: Annotated[float, Meta(gt=0, le=1)] = 0.5
    method: Literal["iterative", "selective"] = "iterative"
    unit: Literal["token", "word", "sentence"] = "word"
    protect: Annotated[list[Text], Meta(max_length=64)] = []


class GenerationRequest(Structured, forbid_unknown_fields=True, kw_only=True):
    """Base of completions and chat completions."""

    hints: ClassVar[tuple[str, ...]] = (
        *("user", "metadata", "store", "safety_identifier", "service_tier"),
        "prediction",
    )

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
    # Default: true for completions, false for chat, whose template has them.
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None  # in log-probabilities: "token_id:42"
    # No effect: none of our tokenizers adds spaces there.
    spaces_between_special_tokens: bool | None = None
    thinking_token_budget: Int | None = None  # -1: no limit
    priority: Int | None = None  # lower goes first
    # Cached prefixes are shared only with requests that have the same salt.
    cache_salt: Text | None = None
    user: Raw = HINT
    metadata: Raw = HINT
    store: bool | None = None
    safety_identifier: Raw = HINT
    # Hints for the order in which cached blocks are evicted; `end_of_branch` is ours.
    prompt_cache_key: Raw = HINT
    prompt_cache_retention: Raw = HINT
    end_of_branch: bool | None = None
    prompt_cache_options: Raw = HINT
    service_tier: Raw = HINT
    prediction: Raw = HINT

    def check(self) -> None:
        """Raise a 400 for what the schema cannot express."""
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
        """This body's own name of a field that an error of the engine names."""
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
        """The sampling parameters: this body's fields, with `special` on top.

        A field of None means the default: the `model`'s own, or else OpenAI's. `processors` are the
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
        if given.get("top_p") == 0:  # the smallest set is the likeliest token alone
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
    """POST /v1/completions"""

    prompt: str | list[str | TokenId | list[str | TokenId]]
    echo: bool | None = None
    logprobs: Int | None = None
    best_of: Int | None = None
    suffix: Raw = OFF

    off: ClassVar[dict[str, tuple[bytes, ...]]] = {"suffix": (b"null", b'""')}

    def check(self) -> None:
        super().check()
        refuse_unless_off(self, self.off)
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


class TextOnly(Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["text"]
    text: str


class PromptString(Struct, forbid_unknown_fields=True, kw_only=True):
    """A text as an object, as llama.cpp's clients send it where pictures could stand beside it."""

    prompt_string: str | None = None
    content: Annotated[list[TextOnly], Meta(min_length=1)] | None = None
    multimodal_data: list[str] = []

    def whole(self, name: str) -> str:
        if self.multimodal_data:
            message = "pictures go to /chat/completions, as image_url; leave multimodal_data out"
            raise bad_request(message, name)
        if (self.prompt_string is None) == (self.content is None):
            raise bad_request("give either prompt_string or content", name)
        if self.content is not None:
            return "".join(part.text for part in self.content)
        return self.prompt_string or ""


def without_objects(given: Any, name: str) -> Any:
    """A prompt or prompts; texts that are objects as texts."""
    if isinstance(given, PromptString):
        return given.whole(name)
    return [without_objects(part, name) for part in given] if isinstance(given, list) else given


Prompted: TypeAlias = "str | list[str | int]"
"""A prompt of a body: a text, or token ids with texts between them, as llama.cpp takes them."""


def each_prompt(given: Any, name: str) -> list[Prompted]:
    """The prompts of a text, of token ids (texts may be among them), or of a list of either."""
    if isinstance(given, str):
        return [given]
    kinds = {type(part) for part in given}
    if not kinds or kinds >= {int, list}:
        what = "mixes token ids and lists" if kinds else "is an empty list"
        raise bad_request(f"{name} {what}; give text, token ids, or a list of these", name)
    return [given] if int in kinds else given


class TextPart(Struct, forbid_unknown_fields=True, tag_field="type", tag="text"):
    text: str
    cache_control: Raw = HINT  # see `answers.cache_hints`, as the next
    prompt_cache_breakpoint: Raw = HINT


class RefusalPart(Struct, forbid_unknown_fields=True, tag_field="type", tag="refusal"):
    refusal: str


@dataclass(frozen=True, slots=True)
class PicturePart:
    """A picture in a message. `path` is its place in the body, for errors."""

    url: str
    detail: str
    path: str


class ImageUrl(Struct, forbid_unknown_fields=True, kw_only=True):
    url: str
    detail: Literal["auto", "low", "high"] | None = None


class ImagePart(Struct, forbid_unknown_fields=True, tag_field="type", tag="image_url"):
    image_url: ImageUrl | str  # a plain URL is vLLM's short form
    cache_control: Raw = HINT
    prompt_cache_breakpoint: Raw = HINT


class Message(Struct, forbid_unknown_fields=True, kw_only=True):
    """A chat message. The fields after `name` belong to an assistant's answer that a client sends
    back. `reasoning` is the name of `reasoning_content` in OpenRouter and newer vLLM."""

    hints: ClassVar[tuple[str, ...]] = (
        *("id", "annotations", "reasoning_details", "thinking_blocks"),
        *("provider_specific_fields", "parsed"),
    )

    role: str
    content: str | list[dict[str, Raw]] | None = None
    name: str | None = None
    refusal: Raw = OFF
    tool_calls: list[SentToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    function_call: Raw = OFF
    audio: Raw = OFF
    annotations: Raw = HINT
    id: Raw = HINT
    cache_control: Raw = HINT
    reasoning_details: Raw = HINT
    thinking_blocks: Raw = HINT
    provider_specific_fields: Raw = HINT
    parsed: Raw = HINT


class ChatReasoning(Struct, kw_only=True):
    """OpenRouter's `reasoning`. Other members have no effect."""

    effort: str | None = None
    max_tokens: Int | None = None
    enabled: bool | None = None
    exclude: bool | None = None  # true: the answer leaves it out


class ChatThinking(Struct, kw_only=True):
    """`thinking` of DeepSeek's, GLM's and Kimi's APIs. Other members have no effect."""

    type: Literal["enabled", "disabled", "adaptive", "auto"] | None = None
    budget_tokens: Int | None = None


class ChatRequest(GenerationRequest, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/chat/completions"""

    # vLLM's field.
    OTHER_NAMES: ClassVar[dict[str, str]] = {"mm_processor_kwargs": "the detail of an image_url"}

    messages: Annotated[list[Message], Meta(min_length=1)]
    compress_prompt: PromptCompression | None = None
    add_generation_prompt: bool | None = None  # vLLM's, with the next two
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    include_reasoning: bool | None = None  # vLLM's; false: the answer leaves it out
    reasoning_effort: str | None = None  # for templates that know it, like `verbosity`
    verbosity: str | None = None
    # Other hosts' fields for the two above and for `thinking_token_budget`; see `read_thinking`.
    reasoning: ChatReasoning | None = None
    thinking: ChatThinking | None = None
    enable_thinking: bool | None = None
    thinking_budget: Int | None = None  # a hint to a model that does not think
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
    web_search_options: Raw = OFF
    moderation: Raw = OFF
    usage: Raw = HINT  # OpenRouter's, up to `trace`
    provider: Raw = HINT
    models: Raw = HINT
    route: Raw = HINT
    transforms: Raw = HINT
    session_id: Raw = HINT
    trace: Raw = HINT
    user_id: Raw = HINT  # DeepSeek's and GLM's
    tool_stream: Raw = HINT
    cache_prompt: Raw = HINT  # llama.cpp's, up to `return_progress`
    id_slot: Raw = HINT
    timings_per_token: Raw = HINT
    return_progress: Raw = HINT
    ttl: Raw = HINT  # LM Studio's

    hints: ClassVar[tuple[str, ...]] = (
        *GenerationRequest.hints,
        *("usage", "provider", "models", "route", "transforms", "session_id", "trace", "user_id"),
        *("tool_stream", "cache_prompt", "id_slot", "timings_per_token", "return_progress", "ttl"),
    )
    off: ClassVar[dict[str, tuple[bytes, ...]]] = {
        "separate_reasoning": (b"null", b"true"),
        "stream_reasoning": (b"null", b"true"),
        "reasoning_format": (b"null", b'"auto"', b'"deepseek"'),
        "functions": (b"null", b"[]"),
        "function_call": (b"null", b'"none"'),
        "modalities": (b"null", b'["text"]'),
        "audio": (b"null",),
        "web_search_options": (b"null",),
        "moderation": (b"null",),
    }

    def check(self) -> None:
        super().check()
        refuse_unless_off(self, self.off)
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
        if self.top_logprobs is not None and not self.logprobs:
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
        """Take over what other hosts' fields say of thinking, where the own fields say nothing."""
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
            "image": "messages",
        }
        return {**names, "max_tokens": max_tokens}.get(field or "") or super().param(field)


TEMPLATE_FIELDS = {
    "messages", "tools", "add_generation_prompt", "continue_final_message", "add_special_tokens", "any_length", "tokenize",
    "pictures",
}  # fmt: skip


class Pooled(Struct, forbid_unknown_fields=True, kw_only=True):
    """Base of embeddings, reranking and scores, with vLLM's extensions."""

    model: str | None = None  # default: the first served name
    truncate_prompt_tokens: Int | None = None  # cut longer texts to this; -1: to the model's limit
    priority: Int | None = None  # lower goes first
    # Cached prefixes are shared only with requests that have the same salt.
    cache_salt: Text | None = None
    user: str | None = None  # no effect


class Inputs(Pooled, forbid_unknown_fields=True, kw_only=True):
    """Base of embeddings, classes and pooling: texts, or vLLM's `messages`, which are one text
    through the chat template."""

    input: (
        str
        | PromptString
        | Annotated[
            list[str | TokenId | PromptString | list[str | TokenId]], Meta(max_length=MAX_INPUTS)
        ]
        | None
    ) = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    add_generation_prompt: bool = False  # for messages, as the next two
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None  # default: true for texts, false for messages

    def prompts(self) -> list[Prompted]:
        """A list with one entry for each text of `input`."""
        if self.input is None or self.messages is not None:
            raise bad_request("give either input or messages", "input")
        for name in ("add_generation_prompt", "continue_final_message", "chat_template_kwargs"):
            if getattr(self, name):
                raise bad_request(f"{name} is for messages; leave it out", name)
        return each_prompt(without_objects(self.input, "input"), "input")


class EmbeddingRequest(Inputs, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/embeddings"""

    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Int | None = None


class ClassifyRequest(Inputs, forbid_unknown_fields=True, kw_only=True):
    """POST /classify and /v1/classify: vLLM's format. With `use_activation` false scores are not probabilities"""

    use_activation: bool | None = None


class PoolingRequest(Inputs, forbid_unknown_fields=True, kw_only=True):
    """POST /pooling and /v1/pooling: vLLM's format. A text's vector, those of its tokens, or a classifier's or reward model's
    scores as they are"""

    encoding_format: Literal["float", "base64"] = "float"
    task: str | None = None  # vLLM's names: embed, classify, score, token_embed, token_classify
    # Whether the texts of a model of late interaction are queries or documents. Without it they are as they are.
    input_type: Literal["query", "document"] | None = None


class SparseRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /embed_sparse: TEI's format"""

    inputs: str | Annotated[list[str], Meta(min_length=1, max_length=MAX_INPUTS)]
    truncate: bool = False
    prompt_name: None = None
    truncation_direction: Literal["right", "Right"] = "right"
    model: str | None = None
    priority: Int | None = None
    cache_salt: Text | None = None
    user: str | None = None

    @property
    def truncate_prompt_tokens(self) -> int | None:
        return -1 if self.truncate else None


Texts = Annotated[list[str], Meta(min_length=1, max_length=MAX_INPUTS)]


class TextDocument(Struct, forbid_unknown_fields=True, kw_only=True):
    text: str


class RerankRequest(Pooled, forbid_unknown_fields=True, kw_only=True):
    """POST /rerank, /v1/rerank and /v2/rerank: in Jina's and Cohere's format, or with `texts` in TEI's"""

    query: str
    documents: Annotated[list[str | TextDocument], Meta(min_length=1, max_length=MAX_INPUTS)] = []
    top_n: Annotated[int, Meta(ge=1)] | None = None
    return_documents: bool = False
    max_tokens_per_doc: Annotated[int, Meta(ge=0)] = (
        0  # Cohere's; what is longer is cut. 0: not cut
    )
    use_activation: bool | None = None  # vLLM's; false: scores are a classifier's logits
    texts: Texts | None = None  # TEI's, as the next four
    return_text: bool = False
    truncate: bool = False
    truncation_direction: Literal["right", "Right"] = "right"
    raw_scores: bool = False

    def given(self) -> tuple[str, list[str]]:
        """The name of the field with the documents, and their texts."""
        if bool(self.documents) == (self.texts is not None):
            raise bad_request("give either documents or texts", "documents")
        if self.texts is not None:
            return "texts", self.texts
        return "documents", [d if isinstance(d, str) else d.text for d in self.documents]


class ScoreRequest(Pooled, forbid_unknown_fields=True, kw_only=True):
    """POST /score and /v1/score: in vLLM's format; one `text_1` goes with all of `text_2`. Its other names for them are
    `queries` and `documents` (or `items`), and `data_1` and `data_2`"""

    text_1: str | Texts | None = None
    text_2: str | Texts | None = None
    queries: str | Texts | None = None
    documents: str | Texts | None = None
    data_1: str | Texts | None = None
    data_2: str | Texts | None = None
    items: str | Texts | None = None
    use_activation: bool | None = None

    def names(self) -> tuple[str, str]:
        """The names of the two fields that are given."""
        pairs = (
            *(("text_1", "text_2"), ("queries", "documents"), ("data_1", "data_2")),
            ("queries", "items"),
        )
        named = dict.fromkeys(name for pair in pairs for name in pair)
        given = [name for name in named if getattr(self, name) is not None]
        if len(given) == 1:
            missing = next(
                other for a, b in pairs for own, other in ((a, b), (b, a)) if own == given[0]
            )
            raise bad_request(f"{missing} is missing; it goes with {given[0]}", missing)
        if tuple(given) not in pairs:
            raise bad_request("give text_1 and text_2, or queries and documents", "text_1")
        return given[0], given[1]


class CohereEmbedRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /v2/embed: Cohere's format"""

    model: str | None = None
    texts: Texts
    # No effect: no text is put before the input.
    input_type: (
        Literal["search_document", "search_query", "classification", "clustering"] | None
    ) = None
    embedding_types: list[Literal["float", "base64", "binary", "ubinary"]] | None = None
    output_dimension: Int | None = None
    truncate: Literal["NONE", "START", "END"] = "END"
    priority: Int | None = None
    cache_salt: Text | None = None
    user: str | None = None


class LoadAdapterRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/load_lora_adapter: serve an adapter under a name, on a server with --lora-folder"""

    lora_name: Annotated[str, Meta(min_length=1, max_length=200)]
    # Within the server's adapter folder.
    lora_path: Annotated[str, Meta(min_length=1, max_length=4096)]


class UnloadAdapterRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/unload_lora_adapter: stop serving an adapter"""

    lora_name: str


class TokenizeRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /tokenize: a prompt, or messages through the chat template"""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    # Default: true for a prompt, false for messages, whose template has them.
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
    """POST /detokenize"""

    model: str | None = None
    tokens: list[TokenId]
    skip_special_tokens: bool = False


def message_dict(
    message: Message, path: str, pictures: list[PicturePart] | None = None
) -> dict[str, Any]:
    """The message as chat templates take it. `developer`, OpenAI's newer word for `system`, becomes
    `system`, which templates know. Pictures are appended to `pictures`; None refuses them."""
    if message.role not in ROLES:
        what = f"role {message.role!r} is not supported; use one of {', '.join(ROLES)}{likely_value(message.role, ROLES)}"
        raise bad_request(what, f"{path}.role")
    refuse_unless_off(message, _MESSAGE_OFF, path + ".")
    for name, role in (
        ("tool_calls", "assistant"),
        ("reasoning_content", "assistant"),
        ("reasoning", "assistant"),
        ("tool_call_id", "tool"),
    ):
        if getattr(message, name) is not None and message.role != role:
            raise bad_request(f"{name} is for the role {role!r}", f"{path}.{name}")
    if message.content is None and not message.tool_calls:
        raise bad_request("a message needs content", f"{path}.content")
    parts: list[str | PicturePart] = (
        [message.content or ""]
        if isinstance(message.content, str | None)
        else [
            _part(part, f"{path}.content[{i}]", pictures is not None)
            for i, part in enumerate(message.content)
        ]
    )
    seen = [part for part in parts if isinstance(part, PicturePart)]
    if seen and message.role != "user":
        raise bad_request(
            f"only a user's message has pictures, not one of {message.role!r}", seen[0].path
        )
    if pictures is not None:
        pictures += seen
    more = {
        "name": message.name,
        "tool_call_id": message.tool_call_id,
        "reasoning_content": message.reasoning_content or message.reasoning,
    }
    given: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": _content(parts),
    }
    given |= {name: value for name, value in more.items() if value is not None}
    if message.tool_calls:
        given["tool_calls"] = [call_dict(call) for call in message.tool_calls]
    return given


_MESSAGE_OFF = {
    "refusal": (b"null",),
    "function_call": (b"null",),
    "audio": (b"null",),
}


def _part(part: dict[str, Raw], path: str, with_pictures: bool) -> str | PicturePart:
    kind = bytes(part.get("type", b"null"))
    if kind == b'"image_url"' and with_pictures:
        image = decode(ImagePart, msgspec.json.encode(part), path + ".").image_url
        image = ImageUrl(url=image) if isinstance(image, str) else image
        return PicturePart(image.url, image.detail or "auto", f"{path}.image_url")
    if kind == b'"refusal"':
        return decode(RefusalPart, msgspec.json.encode(part), path + ".").refusal
    if kind != b'"text"':
        known = "text and image_url are" if with_pictures else "only text is"
        raise bad_request(f"content part of type {_shorten(kind)}: {known} supported", path)
    return decode(TextPart, msgspec.json.encode(part), path + ".").text


def _content(parts: list[str | PicturePart]) -> str | list[dict[str, str]]:
    """The text of all parts, or a list if there are pictures."""
    if all(isinstance(part, str) for part in parts):
        return "".join(part for part in parts if isinstance(part, str))
    return [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image"}
        for part in parts
    ]


def picture_part(url: str, detail: str | None) -> dict[str, Raw]:
    """A content part with a picture, for messages translated from other protocols."""
    image = {"url": url} if detail is None else {"url": url, "detail": detail}
    return {"type": Raw(b'"image_url"'), "image_url": Raw(msgspec.json.encode(image))}


def text_part(text: str) -> dict[str, Raw]:
    return {"type": Raw(b'"text"'), "text": Raw(msgspec.json.encode(text))}


def refuse_unless_off(body: Struct, off: Mapping[str, tuple[bytes, ...]], path: str = "") -> None:
    for name, allowed in off.items():
        raw = bytes(getattr(body, name))
        if raw and (len(raw) > 100 or msgspec.json.format(raw, indent=-1) not in allowed):
            only = " or ".join(value.decode() for value in allowed)
            name = body.__struct_encode_fields__[body.__struct_fields__.index(name)]
            raise bad_request(f"{name} is not supported yet; leave it out or {only}", path + name)


def _shorten(raw: bytes) -> str:
    text = raw.decode(errors="replace")
    return text if len(text) <= 60 else text[:60] + "…"


def _token_map(biases: dict[str, float]) -> dict[int, float]:
    for key, bias in biases.items():
        if not (key.isascii() and key.isdecimal() and len(key) < 10):
            raise bad_request(
                f"logit_bias: {_shorten(key.encode())!r} is not a token id", "logit_bias"
            )
        if not -100 <= bias <= 100:
            raise bad_request(f"logit_bias: {bias} is not between -100 and 100", "logit_bias")
    found = {int(key): bias for key, bias in biases.items()}
    if len(found) < len(biases):  # such as "00" and "0"
        twice = next(key for key in biases if key != str(int(key)))
        raise bad_request(
            f"logit_bias: {_shorten(twice.encode())!r} names a token a second time",
            "logit_bias",
        )
    return found


def template_variables(body: ChatRequest, template: str | None) -> tuple[dict[str, Any], list[str]]:
    """The chat template's variables from the request, and the fields that the template does not
    know (hints).

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

T = TypeVar("T", bound=Struct)
_DECODERS: dict[type[Struct], msgspec.json.Decoder[Any]] = {}


def register(*bodies: type[Struct], parts: tuple[type[Struct], ...] = ()) -> None:
    """Make `bodies` decodable. Errors and the log may name their fields and those of their
    `parts`."""
    _DECODERS.update({kind: msgspec.json.Decoder(kind) for kind in bodies})
    for kind in (*bodies, *parts):
        FIELDS.update(field.encode_name for field in msgspec.structs.fields(kind))


register(
    CompletionRequest,
    ChatRequest,
    EmbeddingRequest,
    RerankRequest,
    ScoreRequest,
    ClassifyRequest,
    PoolingRequest,
    SparseRequest,
    CohereEmbedRequest,
    LoadAdapterRequest,
    UnloadAdapterRequest,
    TokenizeRequest,
    DetokenizeRequest,
    TextPart,
    RefusalPart,
    ImagePart,
    parts=(
        PromptString,
        TextOnly,
        ImageUrl,
        *(StreamOptions, PromptCompression, Message, ResponseFormat, JsonSchema, StructuredOutputs),
        *(ToolSpec, FunctionSpec, SentToolCall, CalledFunction, NamedChoice, NamedFunction),
    ),
)
_AT = re.compile(r"(?s)(.*?)(?: - at (?:`key` in )?`\$\.?(.*)`)?\Z")
_FIELD = re.compile(r"(?s)Object (?:contains unknown|missing required) field `(.*)`\Z")


MARKS = {
    b"\x1f\x8b": "it is compressed (gzip); send it as it is",
    b"\xef\xbb\xbf": "it begins with a byte order mark; send UTF-8 without one",
    b"\xff\xfe": "it is UTF-16; send UTF-8",
}
"""First bytes of bodies that are no JSON, with the reason and remedy for the error."""


def check_depth(body: bytes, path: str = "") -> None:
    """Raise a 400 that names the field if a body is nested deeper than `MAX_DEPTH`."""
    if not is_too_deep(body):
        return
    try:
        fields = msgspec.json.decode(body, type=dict[str, Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        fields = {}
    name = next((name for name, raw in fields.items() if is_too_deep(b"[%b]" % bytes(raw))), None)
    param = path.rstrip(".") or None if name is None else path + name
    raise bad_request(
        f"lists and objects are nested deeper than {MAX_DEPTH} levels (in {param or 'the body'}); make it flatter",
        param,
        "invalid_json",
    )


def decode(kind: type[T], body: bytes, path: str = "") -> T:
    """The body as `kind`, or a 400 that names the wrong field."""
    check_depth(body, path)
    try:
        value: T = _DECODERS[kind].decode(body)
        return value
    except msgspec.ValidationError as exc:
        match = _AT.fullmatch(str(exc))
        assert match is not None
        message, where = match[1], match[2] or ""
        named = _FIELD.fullmatch(message)
        parts = [part for part in (where, named and named[1]) if part]
        param = path + ".".join(parts) if parts else path.rstrip(".") or None
        hint = ""
        if named and "unknown" in message[:24]:
            hint = likely_name(kind, where, named[1])
        elif message.startswith("Invalid enum value"):
            hint = allowed_values(kind, where)
        raise bad_request(
            f"{message} (in {param or 'the body'}){hint}", param, "invalid_field"
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        told = next((text for mark, text in MARKS.items() if body.startswith(mark)), str(exc))
        raise bad_request(f"the body is not valid JSON: {told}", code="invalid_json") from None
    except RecursionError:
        raise bad_request("the body is nested too deeply", code="invalid_json") from None


def decode_raw(raw: Raw | bytes, path: str) -> Any:
    """The value of a field that was left undecoded, or a 400 that names it."""
    try:
        return msgspec.json.decode(bytes(raw))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise bad_request(
            f"this is not valid JSON: {exc} (in {path})", path, "invalid_json"
        ) from None
