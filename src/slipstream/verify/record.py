"""A reference model's fingerprint, with which a server of the model compares itself when it is idle."""

from __future__ import annotations

from pathlib import Path

import msgspec

from slipstream.base.files import writing
from slipstream.server.operations.self_check import (
    NUM_DECODED,
    NUM_TASK_TOKENS,
    NUM_TOP,
    Fingerprint,
    Task,
    TokenSequence,
)
from slipstream.verify import probes
from slipstream.verify.reference import Reference

NUM_SEQUENCES = 4
NUM_ANSWERED = 24
"""Number of tokens in the model's own greedy answer to each question."""

NUM_TASKS, TASK_LINES = 8, 6
"""Number of code words that are asked for, and number of lines of about 20 tokens before the question."""


def fingerprint(reference: Reference, *, max_kl: float, seed: int = 0) -> Fingerprint:
    """Compute a fingerprint: the reference model's distributions along a few questions and its own
    answers, and the code words that it finds."""
    sequences = []
    for number in range(NUM_SEQUENCES):
        prompt = reference.prompt(probes.short(1009 * seed + number))
        answer = reference.scorer.greedy(prompt, NUM_ANSWERED)
        token_ids = [*prompt, *answer]
        top = reference.logprobs(token_ids[:1], token_ids[1:]).topk(NUM_TOP, -1)
        if len(token_ids) > NUM_DECODED + 1:
            made = TokenSequence(
                token_ids=token_ids,
                top_ids=top.indices.tolist(),
                top_logprobs=[[round(x, 5) for x in row] for row in top.values.tolist()],
            )
            sequences.append(made)
    tasks = []
    for number in range(NUM_TASKS):
        messages, word = probes.needle(1009 * seed + number, TASK_LINES)
        prompt = reference.prompt(messages)
        room = reference.scorer.context - NUM_TASK_TOKENS
        if len(prompt) <= room and word in reference.greedy(prompt, NUM_TASK_TOKENS):
            tasks.append(Task(token_ids=prompt, word=word))
    name = reference.scorer.name
    return Fingerprint(format=1, model=name, max_kl=max_kl, sequences=sequences, tasks=tasks)


def write(found: Fingerprint, path: str) -> None:
    """Write a fingerprint as JSON. ConfigError if the file can't be written."""
    with writing(path, "record"):
        Path(path).expanduser().write_bytes(msgspec.json.encode(found))
