"""Workloads: prompts as token ids, and the number of tokens of each answer. The same seed gives the
same workload.

Prompts are random token ids unless the workload is made of real text. Answers have exactly
`output_tokens` tokens: engines ignore end-of-sequence, so that all of them do the same work."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from slipstream.base.files import parse_json
from slipstream.errors import ConfigError

Length = tuple[int, int]
"""(input tokens, output tokens) of a request."""

SHAREGPT_INPUT = (4, 1024)
SHAREGPT_TOTAL = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRequest:
    """A request. `prompt`: the text of `prompt_token_ids`, if the workload consists of text.
    `messages`: those of a chat, in place of a prompt."""

    prompt_token_ids: tuple[int, ...]
    output_tokens: int
    prompt: str | None = None
    messages: tuple[dict[str, str], ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchWorkload:
    """Requests, and in `settings` how they were generated, for the report."""

    name: str
    requests: tuple[BenchRequest, ...]
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def input_tokens(self) -> int:
        return sum(len(r.prompt_token_ids) for r in self.requests)

    @property
    def output_tokens(self) -> int:
        return sum(r.output_tokens for r in self.requests)

    def describe(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "num_requests": len(self.requests),
            "input_tokens": self.input_tokens,
            "output_tokens": self.output_tokens,
            **self.settings,
        }


def warmup(workload: BenchWorkload, count: int, *, output_tokens: int = 8) -> list[BenchRequest]:
    """Yields `count` short requests like those of `workload`, with reversed prompts so that they do
    not fill the prefix cache."""
    return [
        replace(
            r,
            prompt=None,
            prompt_token_ids=r.prompt_token_ids[::-1],
            output_tokens=min(r.output_tokens, output_tokens),
        )
        for r in workload.requests[:count]
    ]


def from_lengths(
    name: str, lengths: Sequence[Length], *, vocab_size: int, seed: int, **settings: Any
) -> BenchWorkload:
    """Random token ids of the given lengths."""
    rng = random.Random(seed)
    requests = tuple(
        BenchRequest(
            prompt_token_ids=tuple(rng.choices(range(vocab_size), k=n_in)), output_tokens=n_out
        )
        for n_in, n_out in lengths
    )
    return BenchWorkload(name=name, requests=requests, settings={**settings, "seed": seed})


def fixed(
    num_requests: int, input_len: int, output_len: int, *, vocab_size: int, seed: int = 0
) -> BenchWorkload:
    """Requests of equal lengths."""
    lengths = [(input_len, output_len)] * num_requests
    return from_lengths(
        "fixed",
        lengths,
        vocab_size=vocab_size,
        seed=seed,
        input_len=input_len,
        output_len=output_len,
    )


def uniform(
    num_requests: int, input_range: Length, output_range: Length, *, vocab_size: int, seed: int = 0
) -> BenchWorkload:
    """Lengths uniform between the ends of each range, both included."""
    rng = random.Random(seed)
    lengths = [(rng.randint(*input_range), rng.randint(*output_range)) for _ in range(num_requests)]
    ranges = {"input_range": list(input_range), "output_range": list(output_range)}
    return from_lengths("random", lengths, vocab_size=vocab_size, seed=seed, **ranges)


def shared_prefix(
    num_requests: int,
    prefix_len: int,
    input_len: int,
    output_len: int,
    *,
    vocab_size: int,
    seed: int = 0,
) -> BenchWorkload:
    """Requests with a common system prompt of `prefix_len` tokens, each followed by `input_len`
    tokens of its own."""
    rng = random.Random(seed)
    prefix = tuple(rng.choices(range(vocab_size), k=prefix_len))
    requests = tuple(
        BenchRequest(
            prompt_token_ids=prefix + tuple(rng.choices(range(vocab_size), k=input_len)),
            output_tokens=output_len,
        )
        for _ in range(num_requests)
    )
    settings = {
        "prefix_len": prefix_len,
        "input_len": input_len,
        "output_len": output_len,
        "seed": seed,
    }
    return BenchWorkload(name="shared-prefix", requests=requests, settings=settings)


def recorded(path: Path, num_requests: int, *, vocab_size: int, seed: int = 0) -> BenchWorkload:
    """The first `num_requests` lengths of a file {"lengths": [[input, output], …]}, with random token ids."""
    lengths = read_lengths(path)
    if num_requests > len(lengths):
        raise ConfigError(
            f"{path} holds {len(lengths)} lengths, fewer than {num_requests} requests",
            field="num_requests",
        )
    return from_lengths(
        "lengths", lengths[:num_requests], vocab_size=vocab_size, seed=seed, file=str(path)
    )


def read_lengths(path: Path) -> list[Length]:
    try:
        rows = parse_json(path.read_bytes())["lengths"]
        lengths = [(int(n_in), int(n_out)) for n_in, n_out in rows]
    except (OSError, ValueError, OverflowError, KeyError, TypeError) as error:
        raise ConfigError(
            f'{path} is not a file of lengths {{"lengths": [[input, output], …]}}: {error}',
            field="lengths",
        ) from None
    if not lengths or any(n_in < 1 or n_out < 1 for n_in, n_out in lengths):
        raise ConfigError(
            f"{path} holds {'a length below 1' if lengths else 'no lengths'}", field="lengths"
        )
    return lengths


def sharegpt(
    turns: Iterable[tuple[str, str]],
    encode: Callable[[str], Sequence[int]],
    num_requests: int,
    *,
    seed: int = 0,
) -> BenchWorkload:
    """Real conversations: the first human turn is the prompt; the first answer gives the output
    length.

    They are shuffled by `seed`. Prompts outside `SHAREGPT_INPUT`, or more than `SHAREGPT_TOTAL`
    tokens, are left out."""
    pairs = list(turns)
    random.Random(seed).shuffle(pairs)
    requests: list[BenchRequest] = []
    for prompt, answer in pairs:
        if len(requests) == num_requests:
            break
        ids, n_out = tuple(encode(prompt)), len(encode(answer))
        if SHAREGPT_INPUT[0] <= len(ids) <= SHAREGPT_INPUT[
            1
        ] and 1 <= n_out <= SHAREGPT_TOTAL - len(ids):
            requests.append(BenchRequest(prompt_token_ids=ids, output_tokens=n_out, prompt=prompt))
    if len(requests) < num_requests:
        raise ConfigError(
            f"the data set holds {len(requests)} fitting conversations, not {num_requests}",
            field="num_requests",
        )
    return BenchWorkload(name="sharegpt", requests=tuple(requests), settings={"seed": seed})
