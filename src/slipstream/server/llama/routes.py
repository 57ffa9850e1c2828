"""llama.cpp's routes, for its clients.

/completion (and /completions), /infill, /embedding, /apply-template, /props, /slots.

A body is translated into a completion and answered like one. Fields about slots and the prompt
cache are hints: requests share steps, and prefixes are always cached. A 400 names an unsupported
field that would change the answer.
"""

from __future__ import annotations

import time
from typing import Annotated, Any, ClassVar

from msgspec import Meta, Raw, Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Scope

from slipstream import __version__
from slipstream.engine.requests.pooled import refuse_classifier, rows
from slipstream.outputs import CompletionOutput, Logprob, PositionLogprobs
from slipstream.server.answers.generation import Answer, encode
from slipstream.server.answers.hints import ABSENT, AnyHint, given_hints
from slipstream.server.answers.route import GenerationRoute
from slipstream.server.answers.structured import Schema
from slipstream.server.answers.tools import ToolSpecs, chat_template, tool_dicts
from slipstream.server.http.decoding import OFF, decode, refuse_unless_off, register
from slipstream.server.http.errors import bad_request
from slipstream.server.http.limits import counted, in_flight, read_as
from slipstream.server.http.record import RequestRecord
from slipstream.server.http.replies import json_response
from slipstream.server.openai import chat, completions
from slipstream.server.openai.embeddings import PooledRoute, of_inputs
from slipstream.server.openai.messages import Message, PromptString, message_dict, without_objects
from slipstream.server.openai.models import served_model
from slipstream.server.openai.pooled_bodies import MAX_INPUTS, EmbeddingRequest
from slipstream.server.openai.protocol import (
    Breaker,
    ChatRequest,
    CompletionRequest,
    Int,
    Stop,
    Text,
    TokenId,
)
from slipstream.server.openai.tokens import message_variables
from slipstream.server.state import ServerState, TokenizerProtocol

BiasText = Annotated[str, Meta(max_length=64)]
Bias = (
    Annotated[dict[BiasText, float | bool], Meta(max_length=1024)]
    | Annotated[list[tuple[TokenId | BiasText, float | bool]], Meta(max_length=1024)]
)


Part = str | TokenId | PromptString
Parts = list[Part | list[Part]]


class LlamaBody(Struct, forbid_unknown_fields=True, kw_only=True):
    """Base of /completion and /infill."""

    model: str | None = None
    n_predict: Int | None = None  # below 0: the rest of the context
    stream: bool | None = None
    temperature: float | None = None
    top_k: Int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    top_n_sigma: float | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: Int | None = None
    dry_penalty_last_n: Int | None = None
    dry_sequence_breakers: Annotated[list[Breaker], Meta(max_length=16)] | None = None
    mirostat: Int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    samplers: Annotated[list[str], Meta(max_length=16)] | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None  # -1: random
    stop: Stop = None
    ignore_eos: bool | None = None
    logit_bias: Bias | None = None  # by token or text; false: never
    n_probs: Int | None = None
    grammar: str | None = None
    json_schema: Schema | None = None
    return_tokens: bool = False
    timings_per_token: bool = False
    response_fields: Annotated[list[str], Meta(max_length=64)] | None = None  # a/b selects b in a
    cache_salt: Text | None = None  # vLLM's
    # Refused unless the value means "off".
    dynatemp_range: Raw = OFF
    n_indent: Raw = OFF
    t_max_predict_ms: Raw = OFF
    post_sampling_probs: Raw = OFF
    return_progress: Raw = OFF
    lora: Raw = OFF
    repeat_last_n: Raw = OFF  # no effect without a penalty
    # Fields about slots, the cache and disabled samplers.
    cache_prompt: AnyHint = ABSENT
    id_slot: AnyHint = ABSENT
    n_keep: AnyHint = ABSENT
    n_discard: AnyHint = ABSENT
    n_cache_reuse: AnyHint = ABSENT
    min_keep: AnyHint = ABSENT
    dynatemp_exponent: AnyHint = ABSENT

    off: ClassVar[dict[str, tuple[bytes, ...]]] = {
        "dynatemp_range": (b"null", b"0", b"0.0"),
        "n_indent": (b"null", b"0"),
        "t_max_predict_ms": (b"null", b"0", b"-1"),
        "post_sampling_probs": (b"null", b"false"),
        "return_progress": (b"null", b"false"),
        "lora": (b"null", b"[]"),
    }

    def translated(self, prompt: Any, tokenizer: TokenizerProtocol | None) -> LlamaCompletion:
        refuse_unless_off(self, self.off)
        if self.repeat_penalty not in (None, 1) or self.presence_penalty or self.frequency_penalty:
            refuse_unless_off(self, {"repeat_last_n": (b"null", b"-1", b"64")})
        fields = {name: getattr(self, name) for name in _SAME}
        fields |= {ours: getattr(self, theirs) for theirs, ours in _NAMES.items()}
        if self.logit_bias is not None:
            fields["logit_bias"] = _token_biases(self.logit_bias, tokenizer)
        if self.n_predict is not None and self.n_predict < 0:
            fields["max_tokens"] = None
        if self.seed is not None and self.seed < 0:
            fields["seed"] = None
        fields |= {
            "prompt": prompt,
            "logprobs": self.n_probs or None,
            "stop": self.stop or None,
            "return_token_ids": True,
            "shows_tokens": self.return_tokens,
            "times_tokens": self.timings_per_token,
            "shows_fields": self.response_fields or None,
        }
        given = {name: value for name, value in fields.items() if value is not None}
        return decode(LlamaCompletion, encode(given))


def _token_biases(
    given: dict[str, float | bool] | list[tuple[int | str, float | bool]],
    tokenizer: TokenizerProtocol | None,
) -> dict[str, float]:
    """Biases by token id. A text's bias applies to each of its tokens. Keys of an object (always
    strings in JSON) are ids if they are digits."""
    biases = dict[str, float]()
    keyed = isinstance(given, dict)
    for key, bias in given.items() if isinstance(given, dict) else given:
        value = -100.0 if bias is False else float(bias)
        if isinstance(key, int) or (keyed and key.isascii() and key.isdecimal()):
            biases[str(key)] = value
        elif tokenizer is None:
            raise bad_request("this server runs without a tokenizer; send token ids", "logit_bias")
        else:
            ids = tokenizer.encode(key, add_special_tokens=False)
            biases |= dict.fromkeys(map(str, ids), value)
    return biases


_SAME = (
    *("model", "stream", "temperature", "top_k", "top_p", "min_p", "typical_p", "top_n_sigma"),
    *("xtc_probability", "xtc_threshold", "dry_multiplier", "dry_base", "dry_allowed_length"),
    *("dry_penalty_last_n", "dry_sequence_breakers", "mirostat_tau", "mirostat_eta", "samplers"),
    *("presence_penalty", "frequency_penalty", "seed", "ignore_eos", "logit_bias", "grammar"),
    *("json_schema", "cache_salt"),
)
_NAMES = {
    "n_predict": "max_tokens",
    "repeat_penalty": "repetition_penalty",
    "mirostat": "mirostat_mode",
}


class LlamaCompletion(CompletionRequest, forbid_unknown_fields=True, kw_only=True):
    """A translated body."""

    shows_tokens: bool = False
    times_tokens: bool = False
    shows_fields: list[str] | None = None

    def check(self) -> None:
        if self.max_tokens != 0:  # with 0 the prompt is only read into the cache
            super().check()

    def param(self, field: str | None) -> str | None:
        own = {ours: theirs for theirs, ours in _NAMES.items()} | {"logprobs": "n_probs"}
        name = super().param(field)
        return own.get(name or "", name)


class LlamaCompletionRequest(LlamaBody, forbid_unknown_fields=True, kw_only=True):
    """POST /completion and /completions: llama.cpp's format"""

    prompt: str | PromptString | Annotated[Parts, Meta(max_length=MAX_INPUTS * 64)]


class InfillExtra(Struct, forbid_unknown_fields=True, kw_only=True):
    text: str
    filename: str = "tmp"


class InfillRequest(LlamaBody, forbid_unknown_fields=True, kw_only=True):
    """POST /infill: text between two given texts, for models with infilling tokens"""

    input_prefix: str
    input_suffix: str
    prompt: str = ""  # continues the prefix
    input_extra: list[InfillExtra] = []


class LlamaEmbeddingRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /embedding: llama.cpp's format"""

    content: str | PromptString | Annotated[Parts, Meta(max_length=MAX_INPUTS)]
    model: str | None = None


class ApplyTemplateRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /apply-template: messages as the text that the model reads"""

    messages: Annotated[list[Message], Meta(min_length=1)]
    model: str | None = None
    tools: ToolSpecs | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None


COUNT_PATHS = ("/chat/completions/input_tokens", "/v1/chat/completions/input_tokens")

BODIES: dict[str, type[Struct]] = {
    "/completion": LlamaCompletionRequest,
    "/completions": LlamaCompletionRequest,
    "/infill": InfillRequest,
    "/embedding": LlamaEmbeddingRequest,
    "/apply-template": ApplyTemplateRequest,
    **dict.fromkeys(COUNT_PATHS, ChatRequest),
}
register(*BODIES.values(), LlamaCompletion, parts=(InfillExtra,))

_FIM = {
    "prefix": ("<|fim_prefix|>", "<fim_prefix>", "<fim-prefix>", "<｜fim▁begin｜>", "▁<PRE>", "<PRE>", "[PREFIX]"),
    "suffix": ("<|fim_suffix|>", "<fim_suffix>", "<fim-suffix>", "<｜fim▁hole｜>", "▁<SUF>", "<SUF>", "[SUFFIX]"),
    "middle": ("<|fim_middle|>", "<fim_middle>", "<fim-middle>", "<｜fim▁end｜>", "▁<MID>", "<MID>", "[MIDDLE]"),
    "file": ("<|file_sep|>", "<file_sep>"),
}  # fmt: skip
"""Names of the tokens that mark the parts of an infilling prompt."""


def infill_prompt(state: ServerState, body: InfillRequest) -> list[str | int]:
    """Token ids and texts in llama.cpp's order: prefix, suffix, middle."""
    tokenizer, ids = state.engine.tokenizer, dict[str, int]()
    if tokenizer is not None:
        for part, names in _FIM.items():
            for name in reversed(names):
                if (found := tokenizer.token_to_id(name)) is not None:
                    ids[part] = found
    if tokenizer is None or not {"prefix", "suffix", "middle"} <= set(ids):
        raise bad_request(
            "this model has no tokens for a text with a gap; take one trained for infill, such as Qwen2.5-Coder",
            "input_prefix",
        )
    parts: list[str | int] = [i for i in tokenizer.encode("") if i == tokenizer.bos_token_id]
    if body.input_extra:
        mark = ids.get("file")
        if mark is None:
            raise bad_request("this model has no token between files", "input_extra")
        for extra in body.input_extra:
            parts += [mark, f"{extra.filename}\n{extra.text}"]
        parts += [mark, "filename\n"]
    parts += [ids["prefix"], body.input_prefix + body.prompt]
    parts += [ids["suffix"], body.input_suffix, ids["middle"]]
    return [part for part in parts if part != ""]


_NONE = object()

# --- Answers -------------------------------------------------------------------------


class LlamaAnswer(completions.CompletionAnswer):
    """A completion in llama.cpp's format. A stream ends with an event that contains all fields."""

    kind = chunk_kind = id_prefix = ""
    is_plain = False
    body: LlamaCompletion

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.stop_reasons: dict[int, str | int | None] = {}

    def note(self, delta: CompletionOutput, now: float) -> None:
        if delta.finish_reason is not None:
            self.stop_reasons[delta.index] = delta.stop_reason
        super().note(delta, now)

    def chunk(self, delta: CompletionOutput) -> bytes:
        if not (delta.text or delta.token_ids) or self.body.max_tokens == 0:
            return b""
        said = {
            "index": delta.index,
            "content": delta.text,
            "tokens": delta.token_ids,
            "stop": False,
            "id_slot": -1,
            **self._counts(delta.index),
        }
        if self.body.logprobs is not None:
            said["completion_probabilities"] = _probabilities(delta.logprobs or [])
        if self.body.times_tokens:
            said["timings"] = self.timings(delta.index)
        return b"data: " + encode(said) + b"\n\n"

    def end(self) -> bytes:
        facts = [{**self.facts(i), "content": "", "tokens": []} for i in range(len(self.choices))]
        ends = [b"data: " + encode(self._chosen(fact)) + b"\n\n" for fact in facts]
        return b"".join([self._take_events(), *ends])

    def collected(self) -> bytes:
        found = [self._chosen(self.facts(i)) for i in self.choices_given()]
        return encode(found if isinstance(self.body.prompt, list) and len(found) > 1 else found[0])

    def _chosen(self, facts: dict[str, Any]) -> dict[str, Any]:
        """The fields that `response_fields` selects; all without it."""
        if self.body.shows_fields is None:
            return facts
        chosen = dict[str, Any]()
        for path in self.body.shows_fields:
            found: Any = facts
            for name in path.split("/"):
                found = found.get(name, _NONE) if isinstance(found, dict) else _NONE
            if found is not _NONE:
                chosen[path] = found
        return chosen

    def facts(self, index: int) -> dict[str, Any]:
        choice, reason = self.choices[index], self.stop_reasons.get(index)
        text = "".join(choice.text)
        kind = {"stop": "word" if isinstance(reason, str) else "eos", "length": "limit"}
        said: dict[str, Any] = {
            "index": index,
            "content": text,
            "tokens": choice.token_ids if self.body.shows_tokens else [],
            "id_slot": -1,
            "stop": True,
            "model": self.body.model,
            **self._counts(index),
            "generation_settings": self.settings(),
            "prompt": self._prompt(index),
            "has_new_line": "\n" in text,
            "truncated": choice.finish_reason == "length" and self._fills_context(index),
            "stop_type": kind.get(choice.finish_reason or "", "none"),
            "stopping_word": reason if isinstance(reason, str) else "",
            "tokens_cached": self.prompt_info[index // self.num_drawn].num_cached_tokens,
            "timings": self.timings(index),
        }
        if self.body.logprobs is not None and not self.stream:
            said["completion_probabilities"] = _probabilities(choice.logprobs)
        return said

    def settings(self) -> dict[str, Any]:
        """The sampling parameters by llama.cpp's names."""
        used = self.sampling
        predict = -1 if used.max_tokens is None else self.body.max_tokens
        return {
            "n_predict": predict,
            "temperature": used.temperature,
            "seed": used.seed,
            "top_k": used.top_k,
            "top_p": used.top_p,
            "min_p": used.min_p,
            "repeat_penalty": used.repetition_penalty,
            "presence_penalty": used.presence_penalty,
            "frequency_penalty": used.frequency_penalty,
            "stop": list(used.stop),
            "n_probs": self.body.logprobs or 0,
            "grammar": self.body.grammar or "",
            "stream": self.stream,
        }

    def timings(self, index: int) -> dict[str, Any]:
        choice, info = self.choices[index], self.prompt_info[index // self.num_drawn]
        first = choice.first_token or time.monotonic()
        read = max(0, len(info.token_ids) - info.num_cached_tokens)
        prompt_ms = (first - self.record.start) * 1e3
        predicted_ms = max(0.0, choice.last_token - first) * 1e3
        return {
            "cache_n": info.num_cached_tokens,
            **_rate("prompt", read, prompt_ms),
            **_rate("predicted", choice.num_tokens, predicted_ms, steps=choice.num_tokens - 1),
        }

    def _counts(self, index: int) -> dict[str, int]:
        evaluated = len(self.prompt_info[index // self.num_drawn].token_ids)
        return {"tokens_predicted": self.choices[index].num_tokens, "tokens_evaluated": evaluated}

    def _fills_context(self, index: int) -> bool:
        return sum(self._counts(index).values()) >= self.state.engine.config.model.max_model_len

    def _prompt(self, index: int) -> str:
        ids = self.prompt_info[index // self.num_drawn].token_ids
        return (
            "" if self.tokenizer is None else self.tokenizer.decode(ids, skip_special_tokens=False)
        )


def _rate(name: str, count: int, ms: float, steps: int | None = None) -> dict[str, Any]:
    """A count, its time, and rates over `steps`; an answer's first token is produced with the
    prompt."""
    over = max(0, count if steps is None else steps)
    return {
        f"{name}_n": count,
        f"{name}_ms": ms,
        f"{name}_per_token_ms": ms / over if over else 0.0,
        f"{name}_per_second": 1e3 * over / ms if ms else 0.0,
    }


def _probabilities(positions: list[PositionLogprobs]) -> list[dict[str, Any]]:
    return [
        {**_token(one.chosen), "top_logprobs": [_token(token) for token in one.top]}
        for one in positions
    ]


def _token(one: Logprob) -> dict[str, Any]:
    return {
        "id": one.token_id,
        "token": one.token,
        "bytes": list(one.token_bytes),
        "logprob": one.logprob,
    }


async def _prepare(state: ServerState, body: LlamaCompletion, record: RequestRecord) -> Answer:
    return await completions.prepare(state, body, record, answer=LlamaAnswer, max_tokens=None)


# --- Routes --------------------------------------------------------------------------


class _Complete(GenerationRoute):
    def __init__(self, state: ServerState, body: type[LlamaBody]) -> None:
        super().__init__(state, LlamaCompletion, _prepare)
        self.body = body

    def read(self, raw: bytes, scope: Scope) -> LlamaCompletion:
        body = decode(self.body, raw)
        scope["record"].hints += given_hints(body)
        tokenizer = self.state.engine.tokenizer
        if isinstance(body, InfillRequest):
            return body.translated(infill_prompt(self.state, body), tokenizer)
        assert isinstance(body, LlamaCompletionRequest)
        return body.translated(without_objects(body.prompt, "prompt"), tokenizer)


class _Embedding(PooledRoute):
    def read(self, raw: bytes) -> EmbeddingRequest:
        body = decode(LlamaEmbeddingRequest, raw)
        return EmbeddingRequest(input=without_objects(body.content, "content"), model=body.model)


async def _embedding(
    state: ServerState, body: EmbeddingRequest, record: RequestRecord
) -> list[dict[str, Any]]:
    refuse_classifier(state.engine.description)
    found = rows(await of_inputs(state, body, record), None).tolist()
    return [{"index": i, "embedding": [vector]} for i, vector in enumerate(found)]


class _LlamaInfo:
    """Routes with information about the model and the server."""

    def __init__(self, state: ServerState) -> None:
        self.state = state

    async def apply_template(self, request: Request) -> Response:
        body = await read_as(ApplyTemplateRequest, request, self.state)
        tokenizer = self.state.engine.tokenizer
        if tokenizer is None:
            raise bad_request("this server runs without a tokenizer", "messages")
        plain = [message_dict(one, f"messages[{i}]") for i, one in enumerate(body.messages)]
        variables = message_variables(body, body.add_generation_prompt is not False)
        if body.tools:
            variables["tools"] = tool_dicts(body.tools)
        return json_response({"prompt": tokenizer.apply_chat_template(plain, **variables)})

    async def count(self, request: Request) -> Response:
        state = self.state
        body = await read_as(ChatRequest, request, state)
        body.check()
        body.model = served_model(state, body.model)
        async with in_flight(state, request.receive, request.scope["record"]):
            prompt = await chat.prompt_of(state, body)
        return json_response(
            {"object": "response.input_tokens", "input_tokens": len(prompt.tokens)}
        )

    async def props(self, request: Request) -> Response:
        state = self.state
        tokenizer, spec = state.engine.tokenizer, state.engine.description.spec
        bos = None if tokenizer is None else tokenizer.bos_token_id
        begin = "" if tokenizer is None or bos is None else tokenizer.id_to_token(bos)
        return json_response(
            {
                "default_generation_settings": {
                    "n_ctx": state.engine.config.model.max_model_len,
                    "params": dict(state.engine.description.sampling),
                },
                "total_slots": state.engine.config.scheduling.max_num_seqs,
                "model_alias": state.model_names[0],
                "model_path": state.model_names[0],
                "chat_template": chat_template(state),
                "bos_token": begin,
                "modalities": {"vision": spec.sees, "audio": spec.hears},
                "build_info": f"slipstream {__version__}",
                "is_sleeping": state.engine.is_sleeping,
            }
        )

    async def slots(self, request: Request) -> Response:
        """List the sequence slots of a step. As many are busy as requests are in progress."""
        engine, running = self.state.engine, len(self.state.in_flight)
        return json_response(
            [
                {"id": i, "n_ctx": engine.config.model.max_model_len, "is_processing": i < running}
                for i in range(engine.config.scheduling.max_num_seqs)
            ]
        )


def routes(state: ServerState) -> list[Route]:
    about = _LlamaInfo(state)
    embedding = _Embedding(state, EmbeddingRequest, _embedding)
    return [
        *(
            Route(path, _Complete(state, LlamaCompletionRequest), methods=["POST"])
            for path in ("/completion", "/completions")
        ),
        Route("/infill", _Complete(state, InfillRequest), methods=["POST"]),
        Route("/embedding", embedding, methods=["POST"]),
        Route("/apply-template", counted(state, about.apply_template), methods=["POST"]),
        *(Route(path, counted(state, about.count), methods=["POST"]) for path in COUNT_PATHS),
        Route("/props", about.props),
        Route("/slots", about.slots),
    ]
