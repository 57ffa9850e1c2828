"""Bodies of Ollama's requests, and how each becomes this server's chat, completion or embedding."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeVar

from msgspec import Meta, Raw, Struct

from slipstream.server.answers.generation import encode
from slipstream.server.answers.hints import ABSENT, AnyHint
from slipstream.server.answers.tools import ToolSpecs, chat_template, thinking_fields
from slipstream.server.http.decoding import OFF, decode, refuse_unless_off, register
from slipstream.server.http.errors import bad_request
from slipstream.server.openai.messages import picture_part, text_part
from slipstream.server.openai.pooled_bodies import MAX_INPUTS
from slipstream.server.openai.protocol import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    Int,
    Stop,
    Text,
)
from slipstream.server.state import ServerState


class OllamaOptions(Struct, forbid_unknown_fields=True, kw_only=True):
    temperature: float | None = None
    top_k: Int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: Stop = None
    num_predict: Int | None = None  # below 0: the rest of the context
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    typical_p: float | None = None
    # Refused unless the value means "off".
    mirostat: Raw = OFF
    tfs_z: Raw = OFF
    repeat_last_n: Raw = OFF  # no effect without a penalty
    # Options about loading, parameters of disabled samplers, and defaults that clients always send.
    num_ctx: AnyHint = ABSENT
    penalize_newline: AnyHint = ABSENT
    mirostat_tau: AnyHint = ABSENT
    mirostat_eta: AnyHint = ABSENT
    num_keep: AnyHint = ABSENT
    num_batch: AnyHint = ABSENT
    num_gpu: AnyHint = ABSENT
    main_gpu: AnyHint = ABSENT
    num_thread: AnyHint = ABSENT
    numa: AnyHint = ABSENT
    low_vram: AnyHint = ABSENT
    f16_kv: AnyHint = ABSENT
    logits_all: AnyHint = ABSENT
    vocab_only: AnyHint = ABSENT
    embedding_only: AnyHint = ABSENT
    use_mmap: AnyHint = ABSENT
    use_mlock: AnyHint = ABSENT

    off: ClassVar[dict[str, tuple[bytes, ...]]] = {
        "mirostat": (b"null", b"0"),
        "tfs_z": (b"null", b"1", b"1.0"),
    }

    def check(self) -> None:
        """Raise a 400 for options that would change the answer. Our penalties cover the whole text,
        Ollama's by default the last 64 tokens; that default is accepted."""
        refuse_unless_off(self, self.off, "options.")
        if self.repeat_penalty not in (None, 1) or self.presence_penalty or self.frequency_penalty:
            off = {"repeat_last_n": (b"null", b"-1", b"64")}
            refuse_unless_off(self, off, "options.")


class OllamaBody(Struct, forbid_unknown_fields=True, kw_only=True):
    """Base of the bodies of generating routes."""

    model: str
    stream: bool | None = None  # default: true
    options: OllamaOptions | None = None
    format: Raw = OFF  # "json" or a schema
    think: bool | Literal["low", "medium", "high"] | None = None
    keep_alive: AnyHint = ABSENT
    cache_salt: Text | None = None  # vLLM's
    logprobs: bool | None = None
    top_logprobs: Int | None = None
    truncate: AnyHint = ABSENT  # too long a prompt is an error
    shift: AnyHint = ABSENT  # the answer ends at the end of the context

    def translated(self, state: ServerState) -> GenerationRequest:
        raise NotImplementedError

    def shared(self, state: ServerState) -> dict[str, Any]:
        """The fields that chats and completions share, by our names."""
        given = self.options or OllamaOptions()
        given.check()
        found = {ours: getattr(given, theirs) for theirs, ours in _NAMES.items()}
        predict = given.num_predict
        return {
            "model": known_name(state, self.model),
            "stream": self.stream is not False,
            "cache_salt": self.cache_salt,
            "max_tokens": None if predict is None or predict < 0 else predict,
            **found,
        }

    def chat(self, state: ServerState, messages: list[dict[str, Any]]) -> ChatRequest:
        fields = {**self.shared(state), **self.response_format(), **self.thinking(state)}
        fields |= {"logprobs": self.logprobs, "top_logprobs": self.top_logprobs or None}
        if not messages:
            return ChatRequest(model=fields["model"], messages=[])
        return _checked(ChatRequest, messages=messages, **fields)

    def response_format(self) -> dict[str, Raw]:
        """Translates `format` to OpenAI's field `response_format`."""
        raw = bytes(self.format)
        if raw in (b"", b"null", b'""'):
            return {}
        if raw.startswith(b'"'):
            return {"response_format": Raw(b'{"type":"json_object"}' if raw == b'"json"' else raw)}
        return {
            "response_format": Raw(
                b'{"type":"json_schema","json_schema":{"name":"format","schema":' + raw + b"}}"
            )
        }

    def thinking(self, state: ServerState) -> dict[str, Any]:
        """Translates `think` to fields of a chat request. A 400 if the model doesn't support it."""
        think = self.think
        if think is None:
            return {}
        if isinstance(think, str):
            # The template supports efforts; otherwise an effort becomes a budget.
            knows = "reasoning_effort" in chat_template(state)
            more = {} if knows else thinking_fields(state, "think", asked=True)
            return {**more, "reasoning_effort": think}
        return thinking_fields(state, "think", asked=think)


_SAME = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "seed",
    "stop",
    "presence_penalty",
    "frequency_penalty",
)
_NAMES = {**dict(zip(_SAME, _SAME, strict=True)), "repeat_penalty": "repetition_penalty"}


T = TypeVar("T", bound=GenerationRequest)


def _checked(kind: type[T], **fields: Any) -> T:
    """Decodes and checks `fields` as one of our bodies."""
    return decode(
        kind, encode({name: value for name, value in fields.items() if value is not None})
    )


class OllamaFunction(Struct, forbid_unknown_fields=True, kw_only=True):
    name: str
    arguments: dict[str, Any] = {}
    index: int | None = None


class OllamaCall(Struct, forbid_unknown_fields=True, kw_only=True):
    """A tool call in an assistant message that a client sends back. If it has no id, the next tool
    message answers it."""

    function: OllamaFunction
    id: str | None = None
    type: Literal["function"] | None = None


class OllamaMessage(Struct, forbid_unknown_fields=True, kw_only=True):
    role: str
    content: str | None = None
    images: list[str] | None = None
    tool_calls: list[OllamaCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None
    thinking: str | None = None


class OllamaChatRequest(OllamaBody, forbid_unknown_fields=True, kw_only=True):
    """POST /api/chat: an answer to messages, in Ollama's format"""

    messages: list[OllamaMessage] = []
    tools: ToolSpecs | None = None

    def translated(self, state: ServerState) -> ChatRequest:
        made = self.chat(state, _chat_messages(self.messages))
        made.tools = self.tools or None
        return made


def _chat_messages(messages: list[OllamaMessage]) -> list[dict[str, Any]]:
    """A chat's messages. Calls without ids are matched with the tool results after them, in
    order."""
    found, waiting = list[dict[str, Any]](), list[str]()
    for i, message in enumerate(messages):
        said: dict[str, Any] = {
            "role": message.role,
            "content": _content(message.content, message.images),
            "reasoning_content": message.thinking or None,
        }
        if message.tool_calls:
            ids = [call.id or f"call_{i}_{k}" for k, call in enumerate(message.tool_calls)]
            waiting += ids
            said["tool_calls"] = [
                {
                    "id": id_,
                    "function": {
                        "name": call.function.name,
                        "arguments": encode(call.function.arguments).decode(),
                    },
                }
                for id_, call in zip(ids, message.tool_calls, strict=True)
            ]
        if message.role == "tool":
            said["name"] = message.tool_name
            said["tool_call_id"] = message.tool_call_id or (waiting[0] if waiting else f"call_{i}")
            waiting = [id_ for id_ in waiting if id_ != said["tool_call_id"]]
        found.append({name: value for name, value in said.items() if value is not None})
    return found


def _content(text: str | None, images: list[str] | None) -> str | list[dict[str, Raw]] | None:
    """Converts a message's content to a chat's: images, then the text. The image format is detected
    from the data."""
    if not images:
        return text
    parts = [picture_part(f"data:image/png;base64,{image}", None) for image in images]
    return [*parts, text_part(text)] if text else parts


class OllamaGenerateRequest(OllamaBody, forbid_unknown_fields=True, kw_only=True):
    """POST /api/generate: `prompt` as a user message, or unchanged (`raw`, or without a template)"""

    prompt: str = ""
    system: str | None = None
    raw: bool = False
    suffix: Raw = OFF
    template: Raw = OFF
    context: Raw = OFF
    images: list[str] | None = None

    no_more: ClassVar[dict[str, tuple[bytes, ...]]] = {
        "suffix": (b"null", b'""'),
        "template": (b"null", b'""'),
        "context": (b"null", b"[]"),
    }

    def translated(self, state: ServerState) -> GenerationRequest:
        refuse_unless_off(self, self.no_more)
        tokenizer = state.engine.tokenizer
        if self.raw or tokenizer is None or tokenizer.chat_template is None:
            if self.system or self.images or self.response_format() or self.think:
                field = (
                    "system"
                    if self.system
                    else "images"
                    if self.images
                    else "think"
                    if self.think
                    else "format"
                )
                raise bad_request(
                    f"{field} needs a chat template; this prompt is used without one", field
                )
            if not self.prompt:
                return CompletionRequest(model=known_name(state, self.model), prompt=[])
            best = self.top_logprobs or 0 if self.logprobs else None
            fields = {"prompt": self.prompt, "logprobs": best, **self.shared(state)}
            return _checked(CompletionRequest, **fields)
        user = _content(self.prompt, self.images)
        said = {"system": self.system, "user": user} if user else {}
        return self.chat(
            state, [{"role": role, "content": content} for role, content in said.items() if content]
        )


class OllamaEmbedRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /api/embed: texts as vectors, in Ollama's format"""

    model: str
    input: str | Annotated[list[str], Meta(max_length=MAX_INPUTS)]
    truncate: bool = True
    dimensions: Int | None = None
    options: OllamaOptions | None = None  # no effect, like the next
    keep_alive: AnyHint = ABSENT
    cache_salt: Text | None = None  # vLLM's


class OllamaEmbeddingsRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /api/embeddings: one text; Ollama's route before /api/embed"""

    model: str
    prompt: str = ""
    options: OllamaOptions | None = None  # no effect, like the next
    keep_alive: AnyHint = ABSENT
    cache_salt: Text | None = None  # vLLM's


class OllamaShowRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /api/show: information about a model, in Ollama's format"""

    model: str = ""
    name: str = ""  # its former name
    verbose: bool = False  # no effect, like the next
    system: AnyHint = ABSENT
    template: AnyHint = ABSENT
    options: AnyHint = ABSENT


BODIES: dict[str, type[Struct]] = {
    "/api/chat": OllamaChatRequest,
    "/api/generate": OllamaGenerateRequest,
    "/api/embed": OllamaEmbedRequest,
    "/api/embeddings": OllamaEmbeddingsRequest,
    "/api/show": OllamaShowRequest,
}
register(*BODIES.values(), parts=(OllamaOptions, OllamaMessage, OllamaCall, OllamaFunction))


def known_name(state: ServerState, name: str) -> str:
    return (
        name
        if name in state.model_names or name in state.engine.adapters
        else name.removesuffix(":latest")
    )
