"""The request bodies, as strict schemas: an unknown field or a wrong type is a 400 whose `param` names it.

Three kinds of fields beyond OpenAI's usual ones: vLLM's extensions (top_k, min_p, ... priority), which work; fields
that tell the provider about the caller and change no answer (user, metadata, store=false), which are accepted; and
fields that are known but not supported, which are refused unless they hold the value that means "off". Nothing else
is taken.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
import msgspec.structs
from msgspec import Meta, Raw, Struct

from slipstream.server.errors import FIELDS, bad_request
from slipstream.server.structured import (
    JsonSchema,
    ResponseFormat,
    Structured,
    StructuredOutputs,
    structured,
    structured_param,
)
from slipstream.server.tools import (
    CalledFunction,
    FunctionSpec,
    NamedChoice,
    NamedFunction,
    ToolCall,
    ToolChoice,
    ToolSpec,
    ToolSpecs,
    call_dict,
    check_tools,
)
from slipstream.types import SamplingParams

Text = Annotated[str, Meta(min_length=1)]
Word = Annotated[str, Meta(min_length=1, max_length=1000)]
Int = Annotated[int, Meta(ge=-(2**31), lt=2**31)]  # what the engine's messages and kernels can carry
TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
Stop = Text | Annotated[list[Text], Meta(max_length=64)] | None
MAX_INPUTS = 2048  # texts in one request (OpenAI's limit)
_Off = msgspec.field(default_factory=Raw)  # the default of fields that must be off


class StreamOptions(Struct, forbid_unknown_fields=True, kw_only=True):
    include_usage: bool = False
    continuous_usage_stats: bool = False  # vLLM's: each chunk has the usage so far


class PromptCompression(Struct, forbid_unknown_fields=True, kw_only=True):
    """Ours: shorten the conversation before it is answered. Texts in `protect` stay wherever they are."""

    keep: Annotated[float, Meta(gt=0, le=1)] = 0.5
    method: Literal["iterative", "selective"] = "iterative"
    unit: Literal["token", "word", "sentence"] = "word"
    protect: Annotated[list[Text], Meta(max_length=64)] = []


class Generation(Structured, forbid_unknown_fields=True, kw_only=True):
    """What completions and chat completions share."""

    model: str | None = None  # the one that is served, as vLLM has it
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
    min_tokens: Int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=1024)] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    bad_words: Annotated[list[Word], Meta(max_length=1024)] | None = None
    allowed_token_ids: list[TokenId] | None = None
    prompt_logprobs: Int | None = None
    truncate_prompt_tokens: Int | None = None  # keep the prompt's last ones; -1: as many as there is room for
    add_special_tokens: bool | None = None  # default: true for completions, false for chat, whose template has them
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None  # in log-probabilities: "token_id:42"
    spaces_between_special_tokens: bool | None = None  # no effect: no tokenizer that we read puts any there
    priority: Int | None = None  # lower goes first
    # About the caller; no effect on the answer, by OpenAI's definition
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None  # prefixes are shared without it
    service_tier: Literal["auto", "default"] | None = None

    def check(self) -> None:
        """Refuse what the schema cannot express."""
        if self.store:
            raise bad_request("store=true is not supported: answers are not kept; leave it false", "store")
        if self.stream_options is not None and not self.stream:
            raise bad_request("stream_options needs stream=true", "stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise bad_request("prompt_logprobs come with whole answers only; leave stream out", "prompt_logprobs")

    def param(self, field: str | None) -> str | None:
        """This body's own name for a field that an error from the engine names."""
        return structured_param(self, field) if field and field.startswith("structured_outputs") else field

    def sampling(self, model: Mapping[str, float], **special: Any) -> SamplingParams:
        """The fields that are named alike there and here, with `special` on top; None means the default: the `model`'s own,
        else OpenAI's."""
        given = {**model} | {name: getattr(self, name) for name in _SAMPLING_FIELDS if getattr(self, name) is not None}
        if self.logit_bias is not None:
            given["logit_bias"] = _token_map(self.logit_bias)
        special.setdefault("structured_outputs", structured(self))
        return SamplingParams(**given, **special)


_SAMPLING_FIELDS = tuple(
    name
    for name in SamplingParams.__dataclass_fields__
    if name in Generation.__struct_fields__
    and name not in ("logit_bias", "max_tokens", "prompt_logprobs", "structured_outputs")
)


class CompletionRequest(Generation, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/completions"""

    # str | list[str] | list[int] | list[list[int]]; `prompts` checks that a list is of one kind
    prompt: str | list[str | TokenId | list[TokenId]]
    echo: bool | None = None
    logprobs: Int | None = None
    best_of: Int | None = None
    suffix: Raw = _Off

    off: ClassVar[dict[str, tuple[bytes, ...]]] = {"suffix": (b"null", b'""')}

    def check(self) -> None:
        super().check()
        refuse_unless_off(self, self.off)
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise bad_request(f"best_of={self.best_of} is supported only when it equals n", "best_of")
        if self.max_tokens == 0 and not (self.echo or self.prompt_logprobs is not None):
            raise bad_request("max_tokens: 0 needs echo or prompt_logprobs; else nothing is asked for", "max_tokens")

    def param(self, field: str | None) -> str | None:
        own = "logprobs" if self.prompt_logprobs is None else "prompt_logprobs"
        return {"prompt_token_ids": "prompt", "prompt_logprobs": own}.get(field or "") or super().param(field)

    def prompts(self) -> list[str | list[int]]:
        """One entry a prompt."""
        return one_kind(self.prompt, "prompt")


def one_kind(given: Any, name: str) -> list[str | list[int]]:
    """Text, token ids, or a list of one of them, as a list."""
    if isinstance(given, str):
        return [given]
    kinds = {type(part) for part in given}
    if len(kinds) != 1:
        what = "is an empty list" if not kinds else "mixes strings, token ids and lists"
        raise bad_request(f"{name} {what}; give text, token ids, or a list of one of them", name)
    return [given] if kinds == {int} else given


class TextPart(Struct, forbid_unknown_fields=True, tag_field="type", tag="text"):
    text: str


class Message(Struct, forbid_unknown_fields=True, kw_only=True):
    """A chat message. The fields after `name` are what an assistant's answer carries when a client sends it back."""

    role: str
    content: str | list[dict[str, Raw]] | None = None
    name: str | None = None
    refusal: Raw = _Off
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    function_call: Raw = _Off
    audio: Raw = _Off
    annotations: Raw = _Off


class ChatRequest(Generation, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/chat/completions"""

    messages: Annotated[list[Message], Meta(min_length=1)]
    compress_prompt: PromptCompression | None = None
    add_generation_prompt: bool | None = None  # vLLM's, as the next
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    reasoning_effort: str | None = None  # to templates that know it, as the next
    verbosity: str | None = None
    max_completion_tokens: Int | None = None
    logprobs: bool | None = None
    top_logprobs: Int | None = None
    tools: ToolSpecs | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: Raw = _Off
    function_call: Raw = _Off
    modalities: Raw = _Off
    audio: Raw = _Off

    off: ClassVar[dict[str, tuple[bytes, ...]]] = {
        "functions": (b"null", b"[]"),
        "function_call": (b"null", b'"none"'),
        "modalities": (b"null", b'["text"]'),
        "audio": (b"null",),
    }

    def check(self) -> None:
        super().check()
        refuse_unless_off(self, self.off)
        check_tools(self)
        if taken := _TEMPLATE_FIELDS & set(self.chat_template_kwargs or ()):
            raise bad_request(f"chat_template_kwargs: {min(taken)} is set by the request's own fields", "chat_template_kwargs")
        if self.continue_final_message and self.add_generation_prompt:
            message = "an answer is either begun or continued: leave out add_generation_prompt or continue_final_message"
            raise bad_request(message, "continue_final_message")
        if self.top_logprobs is not None and not self.logprobs:
            raise bad_request("top_logprobs needs logprobs=true", "top_logprobs")
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise bad_request("max_tokens and max_completion_tokens disagree; give one", "max_completion_tokens")

    def param(self, field: str | None) -> str | None:
        max_tokens = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        names = {"prompt": "messages", "prompt_token_ids": "messages", "logprobs": "top_logprobs"}
        return {**names, "max_tokens": max_tokens}.get(field or "") or super().param(field)


_TEMPLATE_FIELDS = {
    "messages", "tools", "add_generation_prompt", "continue_final_message", "add_special_tokens", "any_length", "tokenize",
}  # fmt: skip


class Pooled(Struct, forbid_unknown_fields=True, kw_only=True):
    """What embeddings, reranking and scores share: the model and vLLM's extensions."""

    model: str | None = None  # the one that is served
    truncate_prompt_tokens: Int | None = None  # cut texts that are longer; -1: than the model takes
    priority: Int | None = None  # lower goes first
    user: str | None = None  # about the caller; no effect


class EmbeddingRequest(Pooled, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/embeddings"""

    # str | list[str] | list[int] | list[list[int]]; `prompts` checks that a list is of one kind
    input: str | Annotated[list[str | TokenId | list[TokenId]], Meta(max_length=MAX_INPUTS)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Int | None = None

    def prompts(self) -> list[str | list[int]]:
        """One entry a text."""
        return one_kind(self.input, "input")


Texts = Annotated[list[str], Meta(min_length=1, max_length=MAX_INPUTS)]


class TextDocument(Struct, forbid_unknown_fields=True, kw_only=True):
    text: str


class RerankRequest(Pooled, forbid_unknown_fields=True, kw_only=True):
    """POST /rerank, /v1/rerank and /v2/rerank: Jina's and Cohere's"""

    query: str
    documents: Annotated[list[str | TextDocument], Meta(min_length=1, max_length=MAX_INPUTS)]
    top_n: Annotated[int, Meta(ge=1)] | None = None
    return_documents: bool = False


class ScoreRequest(Pooled, forbid_unknown_fields=True, kw_only=True):
    """POST /score and /v1/score: vLLM's. One text of `text_1` goes with all of `text_2`"""

    text_1: str | Texts
    text_2: str | Texts


class TokenizeRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /tokenize: a prompt, or messages through the chat template"""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    add_special_tokens: bool | None = None  # default: true for a prompt, false for messages, whose template has them
    add_generation_prompt: bool | None = None  # for messages; default true
    return_token_strs: bool = False


class DetokenizeRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /detokenize"""

    model: str | None = None
    tokens: list[TokenId]
    skip_special_tokens: bool = False


def message_dict(message: Message, path: str) -> dict[str, Any]:
    """The message as chat templates take it. `developer` is OpenAI's newer word for `system`, which templates know."""
    roles = ("system", "developer", "user", "assistant", "tool")
    if message.role not in roles:
        raise bad_request(f"role {message.role!r} is not supported; use one of {', '.join(roles)}", f"{path}.role")
    refuse_unless_off(message, _MESSAGE_OFF, path + ".")
    for name, role in (("tool_calls", "assistant"), ("reasoning_content", "assistant"), ("tool_call_id", "tool")):
        if getattr(message, name) is not None and message.role != role:
            raise bad_request(f"{name} is for the role {role!r}", f"{path}.{name}")
    if message.content is None and not message.tool_calls:
        raise bad_request("a message needs content", f"{path}.content")
    parts = (
        [message.content or ""]
        if isinstance(message.content, str | None)
        else [_text_part(part, f"{path}.content[{i}]") for i, part in enumerate(message.content)]
    )
    more = {"name": message.name, "tool_call_id": message.tool_call_id, "reasoning_content": message.reasoning_content}
    given: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role, "content": "".join(parts)}
    given |= {name: value for name, value in more.items() if value is not None}
    if message.tool_calls:
        given["tool_calls"] = [call_dict(call, f"{path}.tool_calls[{i}]") for i, call in enumerate(message.tool_calls)]
    return given


_MESSAGE_OFF = {
    "refusal": (b"null",),
    "function_call": (b"null",),
    "audio": (b"null",),
    "annotations": (b"null", b"[]"),
}


def _text_part(part: dict[str, Raw], path: str) -> str:
    kind = bytes(part.get("type", b"null"))
    if kind != b'"text"':
        raise bad_request(f"content part of type {_shorten(kind)}: only text is supported", path)
    return decode(TextPart, msgspec.json.encode(part), path + ".").text


def refuse_unless_off(body: Struct, off: dict[str, tuple[bytes, ...]], path: str = "") -> None:
    for name, allowed in off.items():
        raw = bytes(getattr(body, name))
        if raw and (len(raw) > 100 or msgspec.json.format(raw, indent=-1) not in allowed):
            only = " or ".join(value.decode() for value in allowed)
            raise bad_request(f"{name} is not supported yet; leave it out or {only}", path + name)


def _shorten(raw: bytes) -> str:
    text = raw.decode(errors="replace")
    return text if len(text) <= 60 else text[:60] + "…"


def _token_map(biases: dict[str, float]) -> dict[int, float]:
    for key, bias in biases.items():
        if not (key.isascii() and key.isdecimal() and len(key) < 10):
            raise bad_request(f"logit_bias: {_shorten(key.encode())!r} is not a token id", "logit_bias")
        if not -100 <= bias <= 100:
            raise bad_request(f"logit_bias: {bias} is not between -100 and 100", "logit_bias")
    found = {int(key): bias for key, bias in biases.items()}
    if len(found) < len(biases):  # "00" and "0"
        twice = next(key for key in biases if key != str(int(key)))
        raise bad_request(f"logit_bias: {_shorten(twice.encode())!r} names a token that is there twice", "logit_bias")
    return found


def template_variables(body: ChatRequest, template: str | None) -> dict[str, Any]:
    """What the request gives the chat template. OpenAI's own fields only where the template names them: elsewhere they would
    change nothing."""
    given = dict(body.chat_template_kwargs or {})
    for name in ("reasoning_effort", "verbosity"):
        if (value := getattr(body, name)) is not None:
            if name not in (template or ""):
                message = f"this model's chat template knows no {name}; leave it out (chat_template_kwargs are passed on)"
                raise bad_request(message, name)
            given[name] = value
    return given


T = TypeVar("T", bound=Struct)
_DECODERS: dict[type[Struct], msgspec.json.Decoder[Any]] = {}


def register(*bodies: type[Struct], parts: tuple[type[Struct], ...] = ()) -> None:
    """`bodies` can be decoded; errors and the log may name the fields of these and of their `parts`."""
    _DECODERS.update({kind: msgspec.json.Decoder(kind) for kind in bodies})
    for kind in (*bodies, *parts):
        FIELDS.update(field.encode_name for field in msgspec.structs.fields(kind))


register(
    CompletionRequest,
    ChatRequest,
    EmbeddingRequest,
    RerankRequest,
    ScoreRequest,
    TokenizeRequest,
    DetokenizeRequest,
    TextPart,
    parts=(
        *(StreamOptions, PromptCompression, Message, ResponseFormat, JsonSchema, StructuredOutputs),
        *(ToolSpec, FunctionSpec, ToolCall, CalledFunction, NamedChoice, NamedFunction),
    ),
)
_AT = re.compile(r"(?s)(.*?)(?: - at `\$\.?(.*)`)?\Z")
_FIELD = re.compile(r"(?s)Object (?:contains unknown|missing required) field `(.*)`\Z")


def decode(kind: type[T], body: bytes, path: str = "") -> T:
    """The body as `kind`, or a 400 that names the field at fault."""
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
        raise bad_request(f"{message} (in {param or 'the body'})", param, "invalid_field") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise bad_request(f"the body is not valid JSON: {exc}", code="invalid_json") from None
    except RecursionError:
        raise bad_request("the body is nested too deeply", code="invalid_json") from None
