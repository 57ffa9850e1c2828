"""POST /v1/chat/completions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from slipstream.engine.grammars.check import check_in_thread
from slipstream.engine.grammars.reasoning import DONE, ReasoningCounter, counter
from slipstream.engine.media.prepared import PreparedMedia
from slipstream.engine.text.tool_formats.base import (
    Arguments,
    BeginCall,
    Content,
    Event,
    Parser,
    Reasoning,
)
from slipstream.engine.text.tools import Reading, begun_text, call_id, finish_reason, is_cut
from slipstream.errors import RequestError
from slipstream.outputs import CompletionOutput, Logprob, PositionLogprobs
from slipstream.params.prompts import MediaPrompt, Prompt, TokensPrompt
from slipstream.server.answers.beams import search
from slipstream.server.answers.context import shorten
from slipstream.server.answers.generation import Answer, encode
from slipstream.server.answers.token_details import choice_details, id_name, prompt_details
from slipstream.server.answers.tools import EFFORT_BUDGETS, reading_of, tool_dicts
from slipstream.server.http.errors import bad_request
from slipstream.server.http.keys import prefix_salt
from slipstream.server.http.record import RequestRecord
from slipstream.server.openai.messages import message_dict
from slipstream.server.openai.protocol import ChatRequest, template_variables
from slipstream.server.openai.tokens import template_tokens, tokens_with_media
from slipstream.server.state import ServerState

_ROLE = b'{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'


class ChatAnswer(Answer):
    kind, chunk_kind = "chat.completion", "chat.completion.chunk"
    id_prefix = "chatcmpl-"
    echoed = ""  # text of the conversation's last message that the answer repeats

    def chunk(self, delta: CompletionOutput) -> bytes:
        """The events of a delta: the role once, new text, and the finish reason in a chunk of its
        own."""
        choice, events = self.choices[delta.index], []
        index = b'{"index":%d,"delta":' % delta.index
        if not choice.begun:
            choice.begun = True
            events.append(self._begin(index, _ROLE, len(delta.token_ids)))
            events += self._echo(delta.index)
        ids = self._ids(delta)
        if delta.text or delta.logprobs or ids:
            logprobs = b"null" if delta.logprobs is None else encode(self._logprobs(delta.logprobs))
            events.append(self.text_event(delta.index, encode(delta.text), logprobs, ids))
        if delta.finish_reason is not None:
            events.append(self._last_event(index, delta.finish_reason, delta.index))
        return b"".join(events)

    def text_event(
        self, index: int, text: bytes, logprobs: bytes = b"null", ids: bytes = b""
    ) -> bytes:
        head = b'{"index":%d,"delta":{"content":' % index
        return self.event(
            head, text, b'},"logprobs":', logprobs, b',"finish_reason":null', ids, b"}"
        )

    def _echo(self, index: int) -> list[bytes]:
        return [self.text_event(index, encode(self.echoed))] if self.echoed else []

    def choice(self, index: int) -> dict[str, Any]:
        choice = self.choices[index]
        return {
            "index": index,
            "message": {
                "role": "assistant",
                "content": self.echoed + "".join(choice.text),
                "refusal": None,
            },
            "logprobs": None if self.sampling.logprobs is None else self._logprobs(choice.logprobs),
            "finish_reason": choice.finish_reason,
            **choice_details(self.body, choice),
        }

    def extra_fields(self) -> dict[str, Any]:
        # Clients such as LiteLLM's for Groq need the tier.
        return {"service_tier": "default", **prompt_details(self.body, self.prompt_info[0])}

    def _begin(self, index: bytes, role: bytes, num_before: int = 0) -> bytes:
        """The first event of a choice, with the prompt's token ids if requested."""
        event = self.event(index, role, num_before=num_before)
        if not self.body.return_token_ids:
            return event
        return (
            b'data: {"prompt_token_ids":' + encode(self.prompt_info[0].token_ids) + b"," + event[7:]
        )

    def _last_event(self, head: bytes, reason: str, index: int) -> bytes:
        end = encode(reason) + self.versions(index) + b"}"
        return self.event(head, b'{},"logprobs":null,"finish_reason":', end)

    def _ids(self, delta: CompletionOutput) -> bytes:
        return (
            b',"token_ids":' + encode(delta.token_ids)
            if self.body.return_token_ids and delta.token_ids
            else b""
        )

    def _logprobs(self, positions: list[PositionLogprobs]) -> dict[str, Any]:
        content = [
            {**self._entry(p.chosen), "top_logprobs": [self._entry(token) for token in p.top]}
            for p in positions
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: Logprob) -> dict[str, Any]:
        name = id_name(token) if self.body.return_tokens_as_token_ids else token.token
        return {"token": name, "logprob": token.logprob, "bytes": list(token.token_bytes)}


class ReadAnswer(ChatAnswer):
    """An answer parsed into reasoning, content and tool calls."""

    is_plain = False

    def __init__(self, reading: Reading, *args: Any) -> None:
        super().__init__(*args)
        self.reading = reading
        self.parsers = [reading.parser() for _ in self.choices]
        self._reasoning = ReasoningTokens.of(self, reading)

    def note(self, delta: CompletionOutput, now: float) -> None:
        super().note(delta, now)
        if self._reasoning is not None:
            self._reasoning.note(delta)

    def chunk(self, delta: CompletionOutput) -> bytes:
        choice, parts = self.choices[delta.index], list[bytes]()
        index = b'{"index":%d,"delta":' % delta.index
        if not choice.begun:
            choice.begun = True
            parts.append(
                self._begin(index, b'{"role":"assistant"},"logprobs":null,"finish_reason":null}')
            )
            parts += self._echo(delta.index)
        parser = self.parsers[delta.index]
        reason = delta.finish_reason
        events = read_events(parser, delta.text, last=reason is not None, cut=is_cut(reason))
        told = [encode(self._delta(event)) for event in events if self._shows(event)]
        ids = self._ids(delta)
        if (delta.logprobs or ids) and not told:
            told.append(b"{}")
        logprobs = encode(self._logprobs(delta.logprobs)) if delta.logprobs else b"null"
        for number, one in enumerate(told):
            own, its = (b"null", b"") if number else (logprobs, ids)
            parts.append(
                self.event(index, one, b',"logprobs":', own, b',"finish_reason":null', its, b"}")
            )
        if delta.finish_reason is not None:
            reason = finish_reason(delta.finish_reason, parser.num_calls)
            parts.append(self._last_event(index, reason, delta.index))
        return b"".join(parts)

    def choice(self, index: int) -> dict[str, Any]:
        answer = super().choice(index)
        text = "".join(self.choices[index].text)
        message = self.reading.message(text, answer["finish_reason"])
        answer["message"] |= {
            k: v
            for k, v in message.to_dict().items()
            if k != "role" and (k != "reasoning_content" or self.shows_reasoning)
        }
        if self.echoed:
            answer["message"]["content"] = self.echoed + (answer["message"]["content"] or "")
        if thought := answer["message"].get("reasoning_content"):
            answer["message"]["reasoning"] = thought  # newer vLLM's and OpenRouter's name
        answer["finish_reason"] = finish_reason(answer["finish_reason"], len(message.tool_calls))
        return answer

    @property
    def shows_reasoning(self) -> bool:
        return getattr(self.body, "include_reasoning", None) is not False

    def _shows(self, event: Event) -> bool:
        return self.shows_reasoning or not isinstance(event, Reasoning)

    def _delta(self, event: Event) -> dict[str, Any]:
        match event:
            case Content(text):
                return {"content": text}
            case Reasoning(text):
                return {"reasoning_content": text, "reasoning": text}
            case BeginCall(index, name):
                function = {"name": name, "arguments": ""}
                return {
                    "tool_calls": [
                        {"index": index, "id": call_id(), "type": "function", "function": function}
                    ]
                }
            case Arguments(index, text):
                return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


class ReasoningTokens:
    """Counts the tokens of reasoning in an answer's choices, for its usage."""

    def __init__(self, answer: Answer, counter: ReasoningCounter) -> None:
        self._answer, self._counter = answer, counter
        self._spots = [counter.start for _ in answer.choices]
        answer.num_reasoning_tokens = 0

    @classmethod
    def of(cls, answer: Answer, reading: Reading | None) -> ReasoningTokens | None:
        """Makes the counter of an answer's reasoning tokens; None for an answer without reasoning.
        A beam search returns no single tokens."""
        tokenizer = answer.state.engine.tokenizer
        if reading is None or tokenizer is None:
            return None
        markers = reading.reasoning(tokenizer)
        return None if markers is None else cls(answer, counter(markers, tokenizer))

    def note(self, delta: CompletionOutput) -> None:
        spot = self._spots[delta.index]
        if spot.phase == DONE:
            return
        before, after = spot.num_tokens, self._counter.after
        for token in delta.token_ids:
            spot = after(spot, token)
        self._spots[delta.index] = spot
        self._answer.num_reasoning_tokens = (self._answer.num_reasoning_tokens or 0) + (
            spot.num_tokens - before
        )


def read_events(parser: Parser, text: str, *, last: bool, cut: bool = False) -> list[Event]:
    """The parser's events for more text; adjacent events of the same kind are merged. `last`: the
    answer ends with `text`; `cut`: it was truncated."""
    events = parser.feed(text) + (parser.finish(cut=cut) if last else [])
    found: list[Event] = []
    for event in events:
        before = found[-1] if found else None
        if isinstance(event, Content) and isinstance(before, Content):
            found[-1] = Content(before.text + event.text)
        elif isinstance(event, Reasoning) and isinstance(before, Reasoning):
            found[-1] = Reasoning(before.text + event.text)
        elif (
            isinstance(event, Arguments)
            and isinstance(before, Arguments)
            and event.index == before.index
        ):
            found[-1] = Arguments(event.index, before.text + event.text)
        else:
            found.append(event)
    return found


def chat_answer(reading: Reading | None, *args: Any) -> Answer:
    return ChatAnswer(*args) if reading is None else ReadAnswer(reading, *args)


async def prepare(
    state: ServerState,
    body: ChatRequest,
    record: RequestRecord,
    *,
    answer: Callable[..., Answer] = chat_answer,
    cuts_max_tokens: bool = False,
) -> Answer:
    """Prepares the answer to a chat request.

    `answer` creates it from a Reading (None: the answer is plain text) and an Answer's arguments.
    With `cuts_max_tokens`, a `max_tokens` larger than the rest of the context is reduced to that;
    otherwise it is an error.
    """
    max_tokens = (
        body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    )
    if body.use_beam_search:
        assert max_tokens is not None, "the body is checked"
        beams, sampling = search(body, max_tokens)
        prompt = await prompt_of(state, body)
        record.hints += prompt.hints
        if prompt.media:
            raise bad_request(
                "use_beam_search takes no pictures; leave one of them out", "use_beam_search"
            )
        reading = reading_of(state, body, prompt.tokens, prompt.template, prompt.begun)
        made = answer(
            reading,
            state,
            body,
            [TokensPrompt(prompt_token_ids=prompt.tokens)],
            sampling,
            record,
            beams,
        )
        made.more_usage = {} if prompt.told is None else {"prompt_compression": prompt.told}
        return made
    sampling = body.sampling(
        state.engine.description.sampling,
        state.settings.logits_processors,
        max_tokens=max_tokens,  # None: the rest of the context
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
    )
    prompt = await prompt_of(state, body)
    tokens, tokenizer = prompt.tokens, state.engine.tokenizer
    room = state.engine.config.model.max_model_len - len(tokens)
    is_cut = cuts_max_tokens and max_tokens is not None and 0 < room < max_tokens
    if is_cut:
        sampling = dataclasses.replace(sampling, max_tokens=room)
    reading = reading_of(state, body, tokens, prompt.template, prompt.begun)
    if reading is not None:
        assert tokenizer is not None
        if not reading.carries_names:
            record.hints.append("tools.parameters.properties")
        advised = "reasoning_effort" in prompt.hints
        budget = body.thinking_budget
        if budget is None and advised:
            budget = EFFORT_BUDGETS.get(body.reasoning_effort or "")
        if (
            budget is not None
            and sampling.thinking_token_budget is None
            and reading.reasoning(tokenizer) is not None
        ):
            if advised:
                prompt.hints.remove("reasoning_effort")
            sampling = dataclasses.replace(sampling, thinking_token_budget=budget)
        # in this case the grammar includes the calls
        both = sampling.structured_outputs is not None
        checked = dataclasses.replace(reading, enforced=True) if both else reading
        for field, schema in checked.enforced_schemas:
            try:
                salt = prefix_salt(record.key, body.cache_salt)
                await check_in_thread(schema, record.client, salt)
            except RequestError as error:
                raise RequestError(error.message, field=field) from None
        sampling = reading.applied(sampling, tokenizer)
    record.hints += prompt.hints
    given: Prompt = TokensPrompt(prompt_token_ids=tokens)
    if prompt.media:
        name = "audio" if state.engine.description.spec.hears else "image"
        given = MediaPrompt(prompt_token_ids=tokens, multi_modal_data={name: prompt.media})
    made = answer(reading, state, body, [given], sampling, record)
    if body.echo and isinstance(made, ChatAnswer):
        made.echoed = prompt.begun
    made.ends_with_context = is_cut
    if reading is not None and tokenizer is not None:
        made.call_tokens = reading.call_tokens(tokenizer)
    if prompt.told is not None:
        made.more_usage = {"prompt_compression": prompt.told}
    return made


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation in the form that the model reads."""

    tokens: list[int]
    template: str | None
    told: dict[str, Any] | None  # entry of `usage` about prompt compression
    media: list[PreparedMedia] = dataclasses.field(default_factory=list)
    # Fields that the template does not use.
    hints: list[str] = dataclasses.field(default_factory=list)
    begun: str = ""  # the part of the prompt that the answer continues


async def prompt_of(state: ServerState, body: ChatRequest) -> ChatPrompt:
    tokenizer = state.engine.tokenizer
    uses_tools = bool(body.tools) and body.tool_choice != "none"
    template = (
        None
        if tokenizer is None
        else tokenizer.tool_template
        if uses_tools
        else tokenizer.chat_template
    )
    variables, hints = template_variables(body, template)
    if uses_tools:
        variables["tools"] = tool_dicts(body.tools or ())
    variables["add_special_tokens"] = bool(body.add_special_tokens)
    variables["any_length"] = body.truncate_prompt_tokens is not None
    if body.add_generation_prompt is not None:
        variables["add_generation_prompt"] = body.add_generation_prompt
    if body.continue_final_message:
        variables |= {"add_generation_prompt": False, "continue_final_message": True}
    told, media, begun = None, list[PreparedMedia](), ""
    if body.continue_final_message:
        last = f"messages[{len(body.messages) - 1}]"
        begun = begun_text([message_dict(body.messages[-1], last, [])])
    if body.compress_prompt is None:
        tokens, media = await tokens_with_media(state, body.messages, **variables)
    else:
        plain = [message_dict(message, f"messages[{i}]") for i, message in enumerate(body.messages)]
        shorter, told = await shorten(state, plain, body.compress_prompt)
        tokens = await template_tokens(state, shorter, **variables)
    return ChatPrompt(tokens, template, told, media, hints, begun)
