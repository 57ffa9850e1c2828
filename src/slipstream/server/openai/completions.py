"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, cast

from slipstream.engine.requests.languages import LANGUAGES
from slipstream.messages.finish_reason import FinishReason
from slipstream.outputs import CompletionOutput, Logprob, PositionLogprobs
from slipstream.params.prompts import Prompt, TokensPrompt
from slipstream.server.answers.beams import search
from slipstream.server.answers.generation import Answer, encode
from slipstream.server.answers.token_details import choice_details, id_name, prompt_details
from slipstream.server.http.record import RequestRecord
from slipstream.server.openai.protocol import CompletionRequest
from slipstream.server.openai.tokens import text_prompt, without_mixes
from slipstream.server.state import ServerState, TokenizerProtocol

DEFAULT_MAX_TOKENS = 16  # OpenAI's


class CompletionAnswer(Answer):
    kind = chunk_kind = "text_completion"
    id_prefix = "cmpl-"
    body: CompletionRequest

    @property
    def tokenizer(self) -> TokenizerProtocol | None:
        return self.state.engine.tokenizer

    def chunk(self, delta: CompletionOutput) -> bytes:
        choice = self.choices[delta.index]
        if not choice.begun and not delta.token_ids and delta.finish_reason is None:
            return b""  # a part of the prompt was computed; its log-probabilities follow later
        text, logprobs = delta.text, b"null"
        if not choice.begun:
            text = self._echo(delta.index) + text
        if self.body.logprobs is not None:
            logprobs = encode(self._logprobs(delta.index, delta.logprobs or []))
        ids = b""
        if self.body.return_token_ids:
            if not choice.begun:
                ids = b',"prompt_token_ids":' + encode(
                    self.prompt_info[delta.index // self.num_drawn].token_ids
                )
            ids += b',"token_ids":' + encode(delta.token_ids)
        choice.begun = True
        if (
            not text
            and not delta.logprobs
            and delta.finish_reason is None
            and not (ids and delta.token_ids)
        ):
            return b""
        reason = b"null"
        if delta.finish_reason is not None:
            reason, ids = encode(delta.finish_reason), ids + self.versions(delta.index)
        return self.text_event(delta.index, encode(text), logprobs, reason, ids)

    def text_event(
        self,
        index: int,
        text: bytes,
        logprobs: bytes = b"null",
        reason: bytes = b"null",
        ids: bytes = b"",
    ) -> bytes:
        head = b'{"index":%d,"text":' % index
        return self.event(
            head, text, b',"logprobs":', logprobs, b',"finish_reason":', reason, ids, b"}"
        )

    def choice(self, index: int) -> dict[str, Any]:
        choice = self.choices[index]
        return {
            "index": index,
            "text": self._echo(index) + "".join(choice.text),
            "logprobs": None
            if self.body.logprobs is None
            else self._logprobs(index, choice.logprobs),
            "finish_reason": choice.finish_reason,
            **choice_details(self.body, choice),
            **prompt_details(self.body, self.prompt_info[index // self.num_drawn]),
        }

    def note(self, delta: CompletionOutput, now: float) -> None:
        # The engine generates one token for every prompt; with max_tokens=0 it is dropped.
        if self.body.max_tokens == 0:
            delta.text, delta.token_ids, delta.logprobs = (
                "",
                [],
                None if delta.logprobs is None else [],
            )
            if delta.finish_reason is not None:
                delta.finish_reason = FinishReason.LENGTH
        super().note(delta, now)

    def _echo(self, index: int) -> str:
        """The prompt's text if `echo` asks for it before the answer, otherwise ""."""
        if not self.body.echo:
            return ""
        prompt = _prompts(self.body)[index // self.num_drawn]
        if self.body.truncate_prompt_tokens is not None:
            prompt = self.prompt_info[index // self.num_drawn].token_ids
        if isinstance(prompt, str):
            return prompt
        if self.tokenizer is None:
            return ""  # like the answer's text
        return self.tokenizer.decode(prompt, skip_special_tokens=self.sampling.skip_special_tokens)

    def _logprobs(self, index: int, new: list[PositionLogprobs]) -> dict[str, Any]:
        """Log-probabilities of a choice in OpenAI's older format. With `echo`, the prompt's
        positions come first."""
        choice, info = self.choices[index], self.prompt_info[index // self.num_drawn]
        positions: list[PositionLogprobs | None] = list(new)
        if not choice.begun:
            before = [] if self.body.echo else info.token_ids
            choice.strips_space = self.tokenizer is not None and self.tokenizer.strips_space_after(
                before, skip_special_tokens=self.sampling.skip_special_tokens
            )
            if self.body.echo:
                positions = [*(info.logprobs or ()), *positions]
        tokens: list[str] = []
        values: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for position in positions:
            # The prompt's first token has no log-probability, because nothing precedes it.
            chosen = self._first_token(info.token_ids[0]) if position is None else position.chosen
            data = chosen.token_bytes or chosen.token.encode()
            if chosen.token_id in self.hidden_ids:
                data = b""
            if data and choice.strips_space:
                data, choice.strips_space = data.removeprefix(b" "), False
            # A token that begins inside a character has the offset of that character.
            offsets.append(choice.num_chars - (data[:1] > b"\x7f" and data[0] & 0xC0 == 0x80))
            choice.num_chars += sum(byte & 0xC0 != 0x80 for byte in data)
            name = id_name if self.body.return_tokens_as_token_ids else _name
            tokens.append(name(chosen))
            values.append(None if position is None else chosen.logprob)
            # The sampled token is first, as in vLLM's answers.
            best = () if position is None else (chosen, *position.top[: self.body.logprobs])
            tops.append({name(t): t.logprob for t in best} or None)
        return {
            "tokens": tokens,
            "token_logprobs": values,
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    @cached_property
    def hidden_ids(self) -> frozenset[int]:
        """Token ids without visible text."""
        if self.tokenizer is None or not self.sampling.skip_special_tokens:
            return frozenset()
        return self.tokenizer.special_ids

    def _first_token(self, token_id: int) -> Logprob:
        data = b"" if self.tokenizer is None else self.tokenizer.token_bytes(token_id)
        return Logprob(token_id, data.decode("utf-8", "replace"), 0.0, token_bytes=data)


def _name(token: Logprob) -> str:
    """The token as a key. Parts of a character become "bytes:…" as OpenAI writes them, so keys stay
    distinct."""
    if "\ufffd" not in token.token:
        return token.token
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.token_bytes)


def _prompts(body: CompletionRequest) -> list[str | list[int]]:
    """The prompts of a body processed by `prepare`: token ids are not mixed with texts any more."""
    return cast("list[str | list[int]]", body.prompts())


async def read_prompts(state: ServerState, body: CompletionRequest) -> list[Prompt]:
    """Reads the prompts of a body for the engine."""
    special = body.add_special_tokens is not False
    given = body.prompts()
    if any(isinstance(prompt, list) and str in map(type, prompt) for prompt in given):
        body.prompt = cast(
            Any, await without_mixes(state, given, "prompt", add_special_tokens=special)
        )
    found = [
        await text_prompt(
            state,
            prompt,
            add_special_tokens=special,
            any_length=body.truncate_prompt_tokens is not None,
        )
        if isinstance(prompt, str)
        else TokensPrompt(prompt_token_ids=prompt)
        for prompt in _prompts(body)
    ]
    named = {name: value for name in LANGUAGES if (value := getattr(body, name)) is not None}
    if not named:
        return found
    whole: list[Any] = [{"prompt": p} if isinstance(p, str) else p for p in found]
    return [cast("Prompt", {**prompt, **named}) for prompt in whole]


async def prepare(
    state: ServerState,
    body: CompletionRequest,
    record: RequestRecord,
    *,
    answer: Callable[..., Answer] = CompletionAnswer,
    max_tokens: int | None = DEFAULT_MAX_TOKENS,
) -> Answer:
    """Prepares the answer to a body, of the class `answer`. `max_tokens` applies if the body has
    none (None: the rest of the context)."""
    prompts = await read_prompts(state, body)
    if body.use_beam_search:
        beams, sampling = search(body, body.max_tokens or DEFAULT_MAX_TOKENS)
        return answer(state, body, prompts, sampling, record, beams)
    asked = [
        k for k in (body.prompt_logprobs, body.logprobs if body.echo else None) if k is not None
    ]
    sampling = body.sampling(
        state.engine.description.sampling,
        state.settings.logits_processors,
        max_tokens=max_tokens if body.max_tokens is None else body.max_tokens or 1,
        logprobs=body.logprobs,
        best_of=body.best_of,
        prompt_logprobs=max(asked) if asked else None,
    )
    return answer(state, body, prompts, sampling, record)
