"""Functions of a request's own, which another process can import."""

from __future__ import annotations


def no_repeats(prompt_ids, past_ids, logits):
    logits[past_ids] = -float("inf")
    return logits


def only_seven(prompt_ids, past_ids, logits):
    return [0.0 if token == 7 else -float("inf") for token in range(len(logits))]


def broken(prompt_ids, past_ids, logits):
    raise ValueError("it does not work")
