"""Common part of `run` and `chat`: starts an engine and shows its progress; streams one answer and
measures its speed."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slipstream.cli.console import phases
from slipstream.config import EngineArgs
from slipstream.errors import ConfigError

if TYPE_CHECKING:
    from slipstream import LLM, RequestOutput, SamplingParams
    from slipstream.params.prompts import Prompt

Message = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Speed of one answer, measured in this process. TTFT counts from the request.
    `decode_tokens_per_s` is (tokens − 1) / time after the first token. `start_s` counts from the
    start of the process until the model was ready."""

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    ttft_s: float | None
    decode_tokens_per_s: float | None
    start_s: float | None = None
    drafted_tokens: int = 0  # drafted by speculation, and verified
    accepted_tokens: int = 0  # accepted ones among these

    def line(self) -> str:
        cached = f" ({self.cached_tokens} cached)" if self.cached_tokens else ""
        parts = [f"{self.prompt_tokens} prompt tokens{cached}"]
        if self.ttft_s is not None:
            parts.append(f"first token after {self.ttft_s:.3f} s")
        speed = (
            f" at {self.decode_tokens_per_s:.1f} tok/s"
            if self.decode_tokens_per_s is not None
            else ""
        )
        parts.append(f"{self.output_tokens} tokens{speed}")
        if self.drafted_tokens:
            parts.append(f"{self.accepted_tokens} of {self.drafted_tokens} drafted tokens accepted")
        if self.start_s is not None:
            parts.append(f"started in {self.start_s:.2f} s")
        return " · ".join(parts)


@contextmanager
def open_llm(args: EngineArgs) -> Iterator[tuple[LLM, float | None]]:
    """Context manager that starts an engine in this process and ends it. Yields the engine, and the
    seconds from the process's start until it was ready."""
    # A start creates objects that all stay; garbage collection of them would take a tenth of the
    # time.
    gc.disable()
    with phases(f"starting {args.model}") as on_phase:
        from slipstream.costs.hardware import import_numpy, seconds_since_process_start

        import_numpy()
        from slipstream.engine.llm import LLM

        llm = LLM.from_engine_args(args, progress=on_phase)
        start_s = seconds_since_process_start()
    gc.freeze()
    gc.enable()
    with llm:
        yield llm, start_s


def given_texts(words: list[str], what: str, field: str) -> list[str]:
    """`words`, or the lines of standard input if they are a single `-`. ConfigError if there is no
    text."""
    texts = [line for line in sys.stdin.read().splitlines() if line] if words == ["-"] else words
    if not texts:
        raise ConfigError(f"there is no {what} on standard input", field=field)
    return texts


def stream_answer(
    llm: LLM,
    prompt: str | Sequence[Message],
    sampling: SamplingParams,
    write: Callable[[str], None],
    *,
    start_s: float | None = None,
) -> tuple[RequestOutput, Speed]:
    """Write the answer to a text or a conversation as it arrives. Returns the whole answer and its
    speed. An exception of `write`, or an interrupt, cancels the request."""
    from slipstream.engine.output import merge

    given: Prompt = prompt if isinstance(prompt, str) else media_prompt(llm, prompt)
    whole: RequestOutput | None = None
    with closing(llm.stream(given, sampling, add_special_tokens=isinstance(prompt, str))) as deltas:  # type: ignore[type-var]
        for delta in deltas:
            for choice in delta.outputs:
                if choice.text:
                    write(choice.text)
            whole = merge(whole, delta)
    assert whole is not None
    return whole, measure(whole, start_s)


def media_prompt(llm: LLM, messages: Sequence[Message]) -> Prompt:
    """Prompt of the engine for a conversation whose messages may contain images or audio."""
    from slipstream.engine.media.parts import without_media

    plain, media = without_media(list(messages))
    text = apply_template(llm, plain)
    if not media:
        return text
    contents = [x["content"] for x in plain if isinstance(x.get("content"), list)]
    hears = any(part["type"] == "audio" for parts in contents for part in parts)
    return {"prompt": text, "multi_modal_data": {"audio" if hears else "image": media}}


def apply_template(llm: LLM, messages: Sequence[Message]) -> str:
    tokenizer = llm.get_tokenizer()
    if tokenizer.chat_template is None:
        model = llm.config.model.model
        raise ConfigError(
            f"{model} is a base model: it has no chat template, so it continues a text and holds no conversation. Take a model "
            f"that was trained to chat, or slipstream run --raw {model} 'TEXT'",
            field="model",
        )
    return str(tokenizer.apply_chat_template(list(messages), add_generation_prompt=True))


def measure(output: RequestOutput, start_s: float | None = None) -> Speed:
    count = sum(len(choice.token_ids) for choice in output.outputs)
    times = output.times
    ttft = rate = None
    if times is not None and times.first_token is not None and times.last_token is not None:
        ttft = times.first_token - times.arrival
        if count > 1 and times.last_token > times.first_token:
            rate = (count - 1) / (times.last_token - times.first_token)
    return Speed(
        prompt_tokens=len(output.prompt_token_ids),
        cached_tokens=output.num_cached_tokens,
        output_tokens=count,
        ttft_s=ttft,
        decode_tokens_per_s=rate,
        start_s=start_s,
        drafted_tokens=sum(choice.num_drafted for choice in output.outputs),
        accepted_tokens=sum(choice.num_accepted for choice in output.outputs),
    )
