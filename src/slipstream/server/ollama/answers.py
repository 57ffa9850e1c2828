"""Ollama's answers: lines of JSON, with the text as `response` or in a message."""

from __future__ import annotations

import time
from typing import Any, ClassVar

from slipstream.engine.text.tool_formats.base import Arguments, BeginCall, Content, Reasoning
from slipstream.engine.text.tools import Reading, call_id, is_cut
from slipstream.outputs import CompletionOutput, Logprob, PositionLogprobs
from slipstream.server.answers.generation import Answer, encode
from slipstream.server.answers.tools import written_arguments
from slipstream.server.http.errors import ApiError
from slipstream.server.http.replies import utc_time
from slipstream.server.openai.chat import read_events


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
