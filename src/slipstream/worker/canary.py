"""A canary: a few dozen tokens stored with a checkpoint, and what the model made of them where it was made.

Run at a start, it tells whether this checkpoint, with these kernels and this form of the cache, still gives what it gave:
most of the tokens as one prefill, the last few as decodes, which are other kernels. For each position the likeliest tokens'
log-probabilities are stored; the KL is taken over them and one bucket for all others, which is never more than the KL over the
whole vocabulary. Rounding, another type or an 8-bit cache stay below `max_kl`; a wrong kernel or file does not (`MAX_KL` says
what was measured, and what is too small to be seen).
Captured graphs are not run: they replay the same kernels.

The file is JSON: format, token_ids, num_decoded, top_ids and top_logprobs (a row for each token), max_kl, made_with.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import CheckpointError
from slipstream.kernels.metadata import AttentionMetadata, LayerKV
from slipstream.types import CanaryResult
from slipstream.worker.forward import Forwards

_logger = logging.getLogger("slipstream.engine")

CANARY_NAME = "slipstream-canary.json"
NUM_TOKENS = 48
NUM_DECODED = 4
NUM_TOP = 16
MAX_KL = 0.05
"""Nats. Measured on SmolLM2-135M-Instruct, touchy because it is small, against float32 and the reference kernels: bfloat16
costs 0.001, the CPU's kernels on Q4_1 blocks 0.003, an int8 or fp8 cache 0.01, int8 or fp8 products 0.04. What is wrong in
every layer costs nats; one layer's MLP scaled by 2, 0.08; but by 1.5, 0.02, and one head's queries in one layer, 0.006: such
pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Canary:
    """Row i of `top_ids` and `top_logprobs` is what follows token i."""

    token_ids: tuple[int, ...]
    top_ids: tuple[tuple[int, ...], ...]
    top_logprobs: tuple[tuple[float, ...], ...]
    num_decoded: int = NUM_DECODED
    max_kl: float = MAX_KL
    made_with: Mapping[str, Any] = field(default_factory=dict)


def make_canary(
    forwards: Forwards, kv: Sequence[LayerKV], token_ids: Sequence[int], *, made_with: Mapping[str, Any], max_kl: float = MAX_KL
) -> Canary:
    """What the model makes of the first NUM_TOKENS of `token_ids` (more than NUM_DECODED of them)."""
    tokens = tuple(token_ids[:NUM_TOKENS])
    best = _log_probabilities(forwards, kv, tokens, NUM_DECODED).topk(min(NUM_TOP, forwards.decoder.spec.vocab_size))
    return Canary(
        token_ids=tokens,
        top_ids=tuple(map(tuple, best.indices.tolist())),
        top_logprobs=tuple(tuple(round(x, 5) for x in row) for row in best.values.tolist()),
        max_kl=max_kl,
        made_with=made_with,
    )


def run_canary(forwards: Forwards, kv: Sequence[LayerKV], canary: Canary, *, context: int) -> CanaryResult:
    """Writes to blocks 1, 2, … of `kv`, which nobody may be using. A context shorter than the canary, or too few blocks, cut
    it."""
    room = (len(kv[0].k) - 1) // len(forwards.decoder.spec.cache_groups) * kv[0].block_size
    num_tokens = min(len(canary.token_ids), context, room)
    found = _log_probabilities(forwards, kv, canary.token_ids[:num_tokens], canary.num_decoded)
    log_p = torch.tensor(canary.top_logprobs[:num_tokens], device=found.device)
    ids = torch.tensor(canary.top_ids[:num_tokens], device=found.device)
    log_q = found.gather(-1, ids)
    rest_p, rest_q = ((1 - x.exp().sum(-1)).clamp(min=1e-9) for x in (log_p, log_q))
    kl = (log_p.exp() * (log_p - log_q)).sum(-1) + rest_p * (rest_p / rest_q).log()
    mean = float(kl.mean())
    return CanaryResult(
        ok=mean <= canary.max_kl,  # what is no number is not
        kl_mean=mean,
        kl_max=float(kl.max()),
        top1_agreement=float((found.argmax(-1) == ids[:, 0]).float().mean()),
        limit=canary.max_kl,
        num_tokens=num_tokens,
    )


@torch.inference_mode()
def _log_probabilities(forwards: Forwards, kv: Sequence[LayerKV], token_ids: Sequence[int], num_decoded: int) -> Tensor:
    """float32 [T, V]: a prefill, then `num_decoded` tokens one by one."""
    device, first = forwards.decoder.device, max(1, len(token_ids) - num_decoded)
    starts = [0, *range(first, len(token_ids))]
    found = []
    for start, end in zip(starts, [*starts[1:], len(token_ids)], strict=True):
        size, num_groups = kv[0].block_size, len(forwards.decoder.spec.cache_groups)
        meta = AttentionMetadata.alone(start, end - start, block_size=size, device=device, num_groups=num_groups)
        tokens = torch.tensor(token_ids[start:end], dtype=torch.int32, device=device)
        found.append(forwards.logits(forwards.hidden(tokens, kv, meta)).float().log_softmax(-1))
    return torch.cat(found)


def log_no_canary(model: Path, kind: str) -> None:
    """Say that a canary beside a model that is no decoder is passed over."""
    if (model / CANARY_NAME).is_file():
        told = f"{model} is {kind}, for which no canary can tell anything"
        _logger.warning("%s; its %s is not looked at: delete it, or set canary='off'", told, CANARY_NAME)


# --- The file ---------------------------------------------------------------------------------------------------------


def write_canary(canary: Canary, folder: Path) -> Path:
    path = folder / CANARY_NAME
    path.write_text(json.dumps({"format": 1, **asdict(canary)}) + "\n", encoding="utf-8")
    return path


def read_canary(model: Path, vocab_size: int) -> Canary | None:
    """That of a checkpoint's folder; None without one, and for a GGUF file. CheckpointError if it is damaged."""
    path = model / CANARY_NAME
    if not path.is_file():
        return None
    try:
        given = json.loads(path.read_text("utf-8"))
        if given.pop("format") != 1:
            raise ValueError("its format is not 1")
        canary = Canary(
            **{
                **given,
                "token_ids": tuple(given["token_ids"]),
                "top_ids": tuple(map(tuple, given["top_ids"])),
                "top_logprobs": tuple(map(tuple, given["top_logprobs"])),
            }
        )
        _check(canary, vocab_size)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(
            f"{path} can't be used ({error}); delete it, or set canary='off'", field="canary"
        ) from error
    return canary


def _check(canary: Canary, vocab_size: int) -> None:
    """ValueError or TypeError if something in it can't be."""
    widths = {len(row) for row in (*canary.top_ids, *canary.top_logprobs)}
    if not len(canary.token_ids) == len(canary.top_ids) == len(canary.top_logprobs) > 0 or len(widths) != 1 or 0 in widths:
        raise ValueError("its rows do not fit its tokens")
    ids = [*canary.token_ids, *(t for row in canary.top_ids for t in row)]
    if not all(isinstance(t, int) and 0 <= t < vocab_size for t in ids):
        raise ValueError(f"it has tokens that are none of the {vocab_size} of the model")
    if not all(isinstance(x, float) and x <= 0 for row in canary.top_logprobs for x in row):
        raise ValueError("it has log-probabilities that are none")
    if not canary.max_kl > 0 or not canary.num_decoded >= 0:
        raise ValueError("max_kl must be above 0, and num_decoded not below")
