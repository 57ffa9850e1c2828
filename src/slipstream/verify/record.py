"""A reference model's fingerprint, which a server of the model compares itself with when it is idle."""

from __future__ import annotations

from pathlib import Path

import msgspec

from slipstream.base.files import writing
from slipstream.server.operations.self_check import NUM_DECODED, NUM_TOP, Fingerprint, TokenSequence
from slipstream.verify import probes
from slipstream.verify.reference import Reference

NUM_SEQUENCES = 4
NUM_ANSWERED = 24
"""Tokens of the model's own greedy answer to each question."""


def fingerprint(reference: Reference, *, max_kl: float, seed: int = 0) -> Fingerprint:
    """The reference's distributions along a few questions and its own answers to them."""
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
    return Fingerprint(format=1, model=reference.scorer.name, max_kl=max_kl, sequences=sequences)


def write(found: Fingerprint, path: str) -> None:
    """Write a fingerprint as JSON. ConfigError if the file can't be written."""
    with writing(path, "record"):
        Path(path).expanduser().write_bytes(msgspec.json.encode(found))
