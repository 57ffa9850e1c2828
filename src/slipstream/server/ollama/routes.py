"""Ollama's routes, for its clients.

/api/chat, /api/generate, /api/embed, /api/embeddings, /api/tags, /api/ps, /api/show, /api/version.

A body is translated into this server's chat, completion or embedding, and answered like one. The
differences:

1. A stream is lines of JSON, and the default. An error is {"error": "text"}.
2. A name may end with ":latest".
3. Options about loading a model are accepted without effect, because the server's start decides
   them. So are `num_ctx`, and with one model `keep_alive` (`server.many`).
4. A body without a prompt or messages is a request to load the model.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from msgspec import Meta, Raw, Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Scope

from slipstream.engine.requests.pooled import check_dimensions, refuse_classifier, rows
from slipstream.engine.text.tool_formats.base import Arguments, BeginCall, Content, Reasoning
from slipstream.engine.text.tools import Reading, call_id, is_cut
from slipstream.outputs import CompletionOutput, Logprob, PositionLogprobs
from slipstream.params.sampling import SamplingParams
from slipstream.server.answers.generation import Answer, encode
from slipstream.server.answers.hints import HINT, given_hints
from slipstream.server.answers.route import GenerationRoute
from slipstream.server.answers.tools import (
    ToolSpecs,
    calls_tools,
    chat_template,
    reasons,
    thinking_fields,
    written_arguments,
)
from slipstream.server.http.decoding import OFF, decode, refuse_unless_off, register
from slipstream.server.http.errors import SHAPES, ApiError, bad_request
from slipstream.server.http.limits import read_as
from slipstream.server.http.record import RequestRecord
from slipstream.server.http.replies import json_response, utc_time
from slipstream.server.openai import chat, completions
from slipstream.server.openai.chat import read_events
from slipstream.server.openai.embeddings import PooledRoute, embed
from slipstream.server.openai.messages import picture_part, text_part
from slipstream.server.openai.models import require_model
from slipstream.server.openai.pooled_bodies import MAX_INPUTS, Pooled
from slipstream.server.openai.protocol import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    Int,
    Stop,
    Text,
)
from slipstream.server.state import ServerState
from slipstream.spec.description import ModelDescription
from slipstream.spec.stored.safetensors import weight_bytes


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
    num_ctx: Raw = HINT
    penalize_newline: Raw = HINT
    mirostat_tau: Raw = HINT
    mirostat_eta: Raw = HINT
    num_keep: Raw = HINT
    num_batch: Raw = HINT
    num_gpu: Raw = HINT
    main_gpu: Raw = HINT
    num_thread: Raw = HINT
    numa: Raw = HINT
    low_vram: Raw = HINT
    f16_kv: Raw = HINT
    logits_all: Raw = HINT
    vocab_only: Raw = HINT
    embedding_only: Raw = HINT
    use_mmap: Raw = HINT
    use_mlock: Raw = HINT

    hints: ClassVar[tuple[str, ...]] = (
        *("num_ctx", "penalize_newline", "mirostat_tau", "mirostat_eta", "num_keep", "num_batch"),
        *("num_gpu", "main_gpu", "num_thread", "numa", "low_vram", "f16_kv", "logits_all"),
        *("vocab_only", "embedding_only", "use_mmap", "use_mlock"),
    )
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
    keep_alive: Raw = HINT
    cache_salt: Text | None = None  # vLLM's
    logprobs: bool | None = None
    top_logprobs: Int | None = None
    truncate: Raw = HINT  # too long a prompt is an error
    shift: Raw = HINT  # the answer ends at the end of the context

    hints: ClassVar[tuple[str, ...]] = ("keep_alive", "truncate", "shift")

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
    keep_alive: Raw = HINT
    cache_salt: Text | None = None  # vLLM's


class OllamaEmbeddingsRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /api/embeddings: one text; Ollama's route before /api/embed"""

    model: str
    prompt: str = ""
    options: OllamaOptions | None = None  # no effect, like the next
    keep_alive: Raw = HINT
    cache_salt: Text | None = None  # vLLM's


class OllamaShowRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /api/show: information about a model, in Ollama's format"""

    model: str = ""
    name: str = ""  # its former name
    verbose: bool = False  # no effect, like the next
    system: Raw = HINT
    template: Raw = HINT
    options: Raw = HINT


BODIES: dict[str, type[Struct]] = {
    "/api/chat": OllamaChatRequest,
    "/api/generate": OllamaGenerateRequest,
    "/api/embed": OllamaEmbedRequest,
    "/api/embeddings": OllamaEmbeddingsRequest,
    "/api/show": OllamaShowRequest,
}
register(*BODIES.values(), parts=(OllamaOptions, OllamaMessage, OllamaCall, OllamaFunction))


SHAPES["/api"] = lambda error, _: encode({"error": error.message})


def known_name(state: ServerState, name: str) -> str:
    return (
        name
        if name in state.model_names or name in state.engine.adapters
        else name.removesuffix(":latest")
    )


# --- Answers -------------------------------------------------------------------------


class OllamaAnswer(Answer):
    """An Ollama answer. The text is the field `response` or a message; `reading` separates
    reasoning from it."""

    kind = chunk_kind = id_prefix = ""
    media_type = b"application/x-ndjson"
    is_plain = False
    as_message: ClassVar[bool]

    def __init__(self, reading: Reading | None, *args: Any) -> None:
        super().__init__(*args)
        self.parser = None if reading is None else reading.parser()
        self._call: tuple[str, list[str]] | None = None  # an unfinished call: name, arguments

    def chunk(self, delta: CompletionOutput) -> bytes:
        reason = delta.finish_reason
        parts = self._read(delta.text, reason is not None, cut=is_cut(reason))
        told = [{**self._said(part), "done": False} for part in parts]
        if delta.logprobs:
            told = told or [{**self._said({"content": ""}), "done": False}]
            told[0]["logprobs"] = _logprobs(delta.logprobs)
        return b"".join(map(_line, told))

    def _read(self, text: str, finished: bool, *, cut: bool = False) -> list[dict[str, Any]]:
        """New output as message fields: content, thinking, or complete calls."""
        if self.parser is None:
            return [{"content": text}] if text else []
        found = list[dict[str, Any]]()
        for event in read_events(self.parser, text, last=finished, cut=cut):
            match event:
                case Content(text):
                    found.append({"content": text})
                case Reasoning(text):
                    found.append({"content": "", "thinking": text})
                case BeginCall(_, name):
                    found += self._whole_call()
                    self._call = (name, [])
                case Arguments(_, text) if self._call is not None:
                    self._call[1].append(text)
        return found + (self._whole_call() if finished else [])

    def _whole_call(self) -> list[dict[str, Any]]:
        if self._call is None:
            return []
        (name, pieces), self._call = self._call, None
        function = {"name": name, "arguments": written_arguments("".join(pieces))}
        return [{"content": "", "tool_calls": [{"id": call_id(), "function": function}]}]

    def end(self) -> bytes:
        return self._take_events() + _line({**self._said({"content": ""}), **self._done()})

    def failure(self, error: ApiError) -> bytes:
        return _line({"error": error.message})

    def collected(self) -> bytes:
        text = "".join(text for choice in self.choices for text in choice.text)
        cut = bool(self.choices) and is_cut(self.choices[0].finish_reason)
        parts = self._read(text, True, cut=cut)
        whole: dict[str, Any] = {"content": "".join(part["content"] for part in parts)}
        if thoughts := "".join(part.get("thinking", "") for part in parts):
            whole["thinking"] = thoughts
        if calls := [call for part in parts for call in part.get("tool_calls", ())]:
            whole["tool_calls"] = calls
        found = [position for choice in self.choices for position in choice.logprobs]
        more = {"logprobs": _logprobs(found)} if found else {}
        return encode({**self._said(whole), **self._done(), **more})

    def _said(self, part: dict[str, Any]) -> dict[str, Any]:
        said: dict[str, Any] = {"message": {"role": "assistant", **part}}
        if not self.as_message:
            said = {"response": part["content"]}
            if "thinking" in part:
                said["thinking"] = part["thinking"]
        return {"model": self.body.model, "created_at": utc_time(time.time()), **said}

    def _done(self) -> dict[str, Any]:
        if not self.choices:
            return {"done": True, "done_reason": "load"}
        record, total = self.record, time.monotonic() - self.record.start
        prompt = total if record.ttft_s is None else record.ttft_s
        prompt = max(0.0, prompt - record.load_s)
        return {
            "done": True,
            "done_reason": self.choices[0].finish_reason,
            "total_duration": round(total * 1e9),
            "load_duration": round(record.load_s * 1e9),
            "prompt_eval_count": record.num_prompt_tokens,
            "prompt_eval_duration": round(prompt * 1e9),
            "eval_count": record.num_output_tokens,
            "eval_duration": round((total - record.load_s - prompt) * 1e9),
        }


class OllamaChatAnswer(OllamaAnswer):
    as_message = True


class OllamaGenerateAnswer(OllamaAnswer):
    as_message = False


def _logprobs(positions: list[PositionLogprobs]) -> list[dict[str, Any]]:
    return [
        {**_token(p.chosen), **({"top_logprobs": [_token(one) for one in p.top]} if p.top else {})}
        for p in positions
    ]


def _token(one: Logprob) -> dict[str, Any]:
    return {"token": one.token, "logprob": one.logprob, "bytes": list(one.token_bytes)}


def _line(value: Any) -> bytes:
    """A line of JSON. Unicode line separators are escaped, for clients that split lines as Python
    does."""
    line = encode(value)
    for mark in ("\x85", "\u2028", "\u2029"):
        line = line.replace(mark.encode(), b"\\u%04x" % ord(mark))
    return line + b"\n"


async def _prepare(
    state: ServerState,
    body: ChatRequest | CompletionRequest,
    record: RequestRecord,
    *,
    answer: type[OllamaAnswer],
) -> Answer:
    if not (body.messages if isinstance(body, ChatRequest) else body.prompt):
        loaded = answer(None, state, body, [], SamplingParams(), record)
        loaded.stream = False
        return loaded
    if isinstance(body, ChatRequest):
        return await chat.prepare(state, body, record, answer=answer, cuts_max_tokens=True)
    return await completions.prepare(
        state, body, record, answer=partial(answer, None), max_tokens=None
    )


# --- Routes --------------------------------------------------------------------------


class _Generate(GenerationRoute):
    def __init__(
        self, state: ServerState, body: type[OllamaBody], answer: type[OllamaAnswer]
    ) -> None:
        super().__init__(state, GenerationRequest, partial(_prepare, answer=answer))
        self.body = body

    def read(self, raw: bytes, scope: Scope) -> GenerationRequest:
        body = decode(self.body, raw)
        hints = given_hints(body)
        scope["record"].hints += [
            h for h in hints if not (h == "keep_alive" and self.state.on_demand)
        ]
        return body.translated(self.state)


class _Embed(PooledRoute):
    def read(self, raw: bytes) -> OllamaPooled:
        body = decode(OllamaEmbedRequest, raw)
        texts = [body.input] if isinstance(body.input, str) else body.input
        texts = [] if texts == [""] else texts  # Ollama computes no vector for it
        cut = -1 if body.truncate else None
        name = known_name(self.state, body.model)
        return OllamaPooled(
            model=name,
            texts=texts,
            dimensions=body.dimensions,
            truncate_prompt_tokens=cut,
            cache_salt=body.cache_salt,
        )


class _OneEmbedding(PooledRoute):
    def read(self, raw: bytes) -> OllamaPooled:
        body = decode(OllamaEmbeddingsRequest, raw)
        return OllamaPooled(
            model=known_name(self.state, body.model),
            texts=[body.prompt] if body.prompt else [],
            dimensions=None,
            truncate_prompt_tokens=-1,
            cache_salt=body.cache_salt,
        )


class OllamaPooled(Pooled, kw_only=True):
    texts: list[str]
    dimensions: int | None


async def _embeddings(
    state: ServerState, body: OllamaPooled, record: RequestRecord
) -> dict[str, Any]:
    refuse_classifier(state.engine.description)
    check_dimensions(state.engine.description, body.dimensions)
    answer = await embed(state, body.texts, body, "input", record)
    record.num_prompt_tokens = tokens = sum(map(len, answer.prompt_token_ids))
    total = round((time.monotonic() - record.start) * 1e9)
    found = rows(answer, body.dimensions).tolist() if body.texts else []
    load = round(record.load_s * 1e9)
    about = {"total_duration": total, "load_duration": load, "prompt_eval_count": tokens}
    return {"model": body.model, "embeddings": found, **about}


async def _embedding(
    state: ServerState, body: OllamaPooled, record: RequestRecord
) -> dict[str, Any]:
    found = (await _embeddings(state, body, record))["embeddings"]
    return {"embedding": found[0] if found else []}


OLLAMA_VERSION = "0.13.0"
"""Version of Ollama whose API this is. Editors require one that supports tools."""


class _About:
    """Routes about the served models."""

    def __init__(self, state: ServerState) -> None:
        self.state = state

    async def tags(self, request: Request) -> Response:
        return json_response({"models": [self._model(name) for name in self.state.model_names]})

    async def ps(self, request: Request) -> Response:
        """List the loaded models: all of them, or none while the server sleeps."""
        engine, years = self.state.engine, 100 * 365.25 * 86400
        models = (
            [] if engine.is_sleeping else [self._model(name) for name in self.state.model_names]
        )
        on_gpu = engine.config.device.info.is_cuda
        own = {
            "expires_at": utc_time(self.state.created + years),
            "context_length": engine.config.model.max_model_len,
        }
        return json_response(
            {
                "models": [
                    model | own | {"size_vram": model["size"] if on_gpu else 0} for model in models
                ]
            }
        )

    async def version(self, request: Request) -> Response:
        return json_response({"version": OLLAMA_VERSION})

    async def show(self, request: Request) -> Response:
        state = self.state
        body = await read_as(OllamaShowRequest, request, state)
        if not (body.model or body.name):
            raise bad_request("`model` is missing: name the model to show", "model")
        require_model(state, known_name(state, body.model or body.name))
        description, template = state.engine.description, chat_template(state)
        spec, kind = description.spec, description.family.model_type
        answer = {
            "template": template,
            "details": _details(description),
            "model_info": {
                "general.architecture": kind,
                "general.parameter_count": spec.num_parameters,
                f"{kind}.context_length": state.engine.config.model.max_model_len,
                f"{kind}.embedding_length": spec.hidden_size,
                f"{kind}.block_count": len(spec.layers),
            },
            "capabilities": _capabilities(state, template),
            "modified_at": utc_time(state.created),
        }
        return json_response(answer)

    def _model(self, name: str) -> dict[str, Any]:
        return model_entry(name, self.state.engine.description, self.state.created)


def model_entry(name: str, description: ModelDescription, created: float) -> dict[str, Any]:
    """A model as Ollama lists it."""
    path = description.path
    return {
        "name": name,
        "model": name,
        "modified_at": utc_time(created),
        "size": path.stat().st_size if path.is_file() else weight_bytes(path),
        "digest": "",
        "details": _details(description),
    }


def _details(description: ModelDescription) -> dict[str, Any]:
    family = description.family.model_type
    return {
        "parent_model": "",
        "format": description.format,
        "family": family,
        "families": [family],
        "parameter_size": f"{description.spec.num_parameters / 1e6:.1f}M",
        "quantization_level": description.scheme or description.gguf_type or description.dtype,
    }


def _capabilities(state: ServerState, template: str) -> list[str]:
    spec = state.engine.description.spec
    if not spec.generates:
        return ["embedding"]
    return (
        ["completion"]
        + ["tools"] * calls_tools(state)
        + ["vision"] * spec.sees
        + ["audio"] * spec.hears
        + ["thinking"] * reasons(state, template)
    )


def routes(state: ServerState) -> list[Route]:
    about = _About(state)

    return [
        Route("/api/chat", _Generate(state, OllamaChatRequest, OllamaChatAnswer), methods=["POST"]),
        Route(
            "/api/generate",
            _Generate(state, OllamaGenerateRequest, OllamaGenerateAnswer),
            methods=["POST"],
        ),
        Route("/api/embed", _Embed(state, Pooled, _embeddings), methods=["POST"]),
        Route("/api/embeddings", _OneEmbedding(state, Pooled, _embedding), methods=["POST"]),
        Route("/api/show", about.show, methods=["POST"]),
        Route("/api/tags", about.tags),
        Route("/api/ps", about.ps),
        Route("/api/version", about.version),
    ]
