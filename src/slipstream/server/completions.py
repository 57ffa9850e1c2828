"""POST /v1/completions."""

from __future__ import annotations

from typing import Any

from slipstream.server.generation import Answer, Choice, PromptFacts, encode
from slipstream.server.protocol import CompletionRequest
from slipstream.server.record import RequestRecord
from slipstream.server.state import ServerState
from slipstream.server.tokens import text_prompt
from slipstream.types import CompletionOutput, Logprob, PositionLogprobs, Prompt, TokensPrompt

DEFAULT_MAX_TOKENS = 16  # OpenAI's


class CompletionAnswer(Answer):
    kind = chunk_kind = "text_completion"
    id_prefix = "cmpl-"
    body: CompletionRequest

    def chunk(self, delta: CompletionOutput) -> bytes:
        choice = self.choices[delta.index]
        text, logprobs = delta.text, b"null"
        if not choice.begun:
            text = self._echo(delta.index) + text
        if self.body.logprobs is not None:
            logprobs = encode(self._logprobs(delta.index, delta.logprobs or []))
        choice.begun = True
        if not text and not delta.logprobs and delta.finish_reason is None:
            return b""
        reason = b"null" if delta.finish_reason is None else encode(delta.finish_reason)
        index = b'{"index":%d,"text":' % delta.index
        return self.event(index, encode(text), b',"logprobs":', logprobs, b',"finish_reason":', reason, b"}")

    def choice(self, index: int) -> dict[str, Any]:
        choice = self.choices[index]
        return {
            "index": index,
            "text": self._echo(index) + "".join(choice.text),
            "logprobs": None if self.body.logprobs is None else self._logprobs(index, choice.logprobs),
            "finish_reason": choice.finish_reason,
        }

    def _facts(self, index: int) -> PromptFacts:
        return self.prompt_facts[index // self.sampling.n]

    def _echo(self, index: int) -> str:
        """The prompt's text, if it is to stand before the answer."""
        if not self.body.echo:
            return ""
        prompt = self.body.prompts()[index // self.sampling.n]
        if isinstance(prompt, str):
            return prompt
        tokenizer = self.state.engine.tokenizer
        if tokenizer is None:
            return ""  # as the answer's own text
        return tokenizer.decode(prompt, skip_special_tokens=self.sampling.skip_special_tokens)

    def _logprobs(self, index: int, new: list[PositionLogprobs]) -> dict[str, Any]:
        """OpenAI's older form; with echo, the prompt's positions stand first."""
        choice = self.choices[index]
        positions: list[PositionLogprobs | None] = list(new)
        first: list[str] = []
        if self.body.echo and not choice.begun:
            facts = self._facts(index)
            positions = [*(facts.logprobs or ())[1:], *positions]
            first = [self._first_token(facts)]
        return _legacy_logprobs(choice, first, [p for p in positions if p is not None])

    def _first_token(self, facts: PromptFacts) -> str:
        """The token that nothing precedes: it has no log-probability."""
        tokenizer = self.state.engine.tokenizer
        return "" if tokenizer is None else tokenizer.decode(facts.token_ids[:1], skip_special_tokens=False)


def _legacy_logprobs(choice: Choice, first: list[str], positions: list[PositionLogprobs]) -> dict[str, Any]:
    offsets: list[int] = []
    for token in first:
        offsets.append(choice.num_chars)
        choice.num_chars += len(token)
    for position in positions:
        # A token that begins inside a character points at that character.
        data = position.chosen.token_bytes or position.chosen.token.encode()
        inside = bool(data) and data[0] & 0xC0 == 0x80
        offsets.append(choice.num_chars - inside)
        choice.num_chars += sum(byte & 0xC0 != 0x80 for byte in data)
    unknown = [None] * len(first)
    return {
        "tokens": first + [_name(p.chosen) for p in positions],
        "token_logprobs": unknown + [p.chosen.logprob for p in positions],
        "top_logprobs": unknown + [{_name(a): a.logprob for a in (*p.top, p.chosen)} for p in positions],
        "text_offset": offsets,
    }


def _name(token: Logprob) -> str:
    """The token as a key: distinct also where it is only part of a character (OpenAI writes such bytes out)."""
    if "\ufffd" not in token.token:
        return token.token
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.token_bytes)


async def prepare(state: ServerState, body: CompletionRequest, record: RequestRecord) -> CompletionAnswer:
    prompts: list[Prompt] = [
        await text_prompt(state, prompt) if isinstance(prompt, str) else TokensPrompt(prompt_token_ids=prompt)
        for prompt in body.prompts()
    ]
    sampling = body.sampling(
        max_tokens=DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
    )
    return CompletionAnswer(state, body, prompts, sampling, record)
