"""Canary: a few dozen tokens stored with a checkpoint, and the model's log-probabilities of them.

The log-probabilities are those of the machine that made the canary. At the start it tests whether the
checkpoint still yields these log-probabilities, with this machine's kernels and this cache dtype.

1. Most tokens run as one prefill, the last few as decodes, which have other kernels. Graphs are not used,
   because they replay the same kernels.
2. For each position the most likely tokens are stored. The KL divergence is computed over them and one bucket
   for all others. It never exceeds the KL over the whole vocabulary.
3. Rounding, another dtype or an 8-bit cache stay below `max_kl`. A wrong kernel or file exceeds it. `MAX_KL`
   documents the measurements, and what a canary can't detect.

The file is JSON: format, token_ids, num_decoded, top_ids and top_logprobs (one row per token),
max_kl, made_with.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from slipstream.base.files import parse_json
from slipstream.config.engine_folder import is_engine_folder
from slipstream.errors import CheckpointError, ConfigError, ModelError
from slipstream.kernels.metadata import LayerKV
from slipstream.kernels.uniform_steps import single_sequence
from slipstream.messages.stats import CanaryResult
from slipstream.platform import platform_of
from slipstream.spec.description import ModelDescription
from slipstream.spec.model import ModelSpec
from slipstream.worker.forward.table import ForwardTable

if TYPE_CHECKING:
    from slipstream.worker.local_executor import LocalExecutor

_logger = logging.getLogger("slipstream.engine")

CANARY_NAME = "slipstream-canary.json"
NUM_TOKENS = 48
NUM_DECODED = 4
NUM_TOP = 16
MAX_KL = 0.05
"""Limit of the mean KL in nats.

It was measured on SmolLM2-135M-Instruct, which is sensitive because it is small, against float32
and the reference kernels. bfloat16 costs 0.001, the CPU kernels on Q4_1 blocks 0.003, an int8 or
fp8 cache 0.01, int8 or fp8 weights and inputs 0.04. An error in every layer costs nats, and one
layer's MLP scaled by 2 costs 0.08. The canary does not detect an MLP scaled by 1.5, which costs
0.02, or an error in one head of one layer, which costs 0.006.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Canary:
    """A stored canary. Row i of `top_ids` and `top_logprobs` has the most likely successors of token i."""

    token_ids: tuple[int, ...]
    top_ids: tuple[tuple[int, ...], ...]
    top_logprobs: tuple[tuple[float, ...], ...]
    num_decoded: int = NUM_DECODED
    max_kl: float = MAX_KL
    made_with: Mapping[str, Any] = field(default_factory=dict)


def make_canary(
    forwards: ForwardTable,
    kv: Sequence[LayerKV],
    token_ids: Sequence[int],
    *,
    made_with: Mapping[str, Any],
    max_kl: float = MAX_KL,
) -> Canary:
    """Make a canary from the first NUM_TOKENS of `token_ids`; there must be more than NUM_DECODED."""
    tokens = tuple(token_ids[:NUM_TOKENS])
    found = _log_probabilities(forwards, kv, tokens, NUM_DECODED)
    ids = np.argsort(-found, axis=-1, kind="stable")[
        :, : min(NUM_TOP, forwards.decoder.spec.vocab_size)
    ]
    best = np.take_along_axis(found, ids, axis=-1)
    return Canary(
        token_ids=tokens,
        top_ids=tuple(map(tuple, ids.tolist())),
        top_logprobs=tuple(tuple(round(x, 5) for x in row) for row in best.tolist()),
        max_kl=max_kl,
        made_with=made_with,
    )


def layer_with_keys(spec: ModelSpec) -> int | None:
    """Index, among this stage's layers, of the first one with keys; None if all have only recurrent
    states."""
    kept = (
        i for i, layer in enumerate(spec.local_layers) if spec.layers[layer].attention is not None
    )
    return next(kept, None)


def block_size(spec: ModelSpec, kv: Sequence[LayerKV]) -> int:
    """Tokens of a block of the cache `kv`; 1 if no layer keeps keys."""
    found = layer_with_keys(spec)
    return 1 if found is None else kv[found].block_size


def run_canary(
    forwards: ForwardTable, kv: Sequence[LayerKV], canary: Canary, *, context: int
) -> CanaryResult:
    """Run a canary in the blocks 1, 2, … of `kv`, which must be unused.

    If the context is too short or there are too few blocks, the canary is shortened.
    """
    spec = forwards.decoder.spec
    num_tokens = min(len(canary.token_ids), context)
    if (layer := layer_with_keys(spec)) is not None:
        num_blocks = (len(kv[layer].k) - 1) // spec.block_scales[
            spec.group_of_layer[spec.local_layers[layer]]
        ]
        room = num_blocks // len(spec.cache_groups) * _block_size(forwards, kv)
        num_tokens = min(num_tokens, room)
    found = _log_probabilities(forwards, kv, canary.token_ids[:num_tokens], canary.num_decoded)
    log_p = np.array(canary.top_logprobs[:num_tokens], np.float32)
    ids = np.array(canary.top_ids[:num_tokens])
    log_q = np.take_along_axis(found, ids, axis=-1)
    rest_p, rest_q = (np.maximum(1 - np.exp(x).sum(-1), np.float32(1e-9)) for x in (log_p, log_q))
    kl = (np.exp(log_p) * (log_p - log_q)).sum(-1) + rest_p * np.log(rest_p / rest_q)
    mean = float(kl.mean())
    return CanaryResult(
        ok=mean <= canary.max_kl,  # false for NaN
        kl_mean=mean,
        kl_max=float(kl.max()),
        top1_agreement=float((found.argmax(-1) == ids[:, 0]).mean()),
        limit=canary.max_kl,
        num_tokens=num_tokens,
    )


def _block_size(forwards: ForwardTable, kv: Sequence[LayerKV]) -> int:
    """Tokens per block, summed over ranks if a block's tokens are divided among them."""
    part = forwards.decoder.partition
    size = block_size(forwards.decoder.spec, kv)
    return size * (1 if part is None or part.context is None else part.context.size)


def _log_probabilities(
    forwards: ForwardTable, kv: Sequence[LayerKV], token_ids: Sequence[int], num_decoded: int
) -> npt.NDArray[np.float32]:
    """Log-probabilities [T, V] of a prefill, then of `num_decoded` single tokens."""
    first = max(1, len(token_ids) - num_decoded)
    starts = [0, *range(first, len(token_ids))]
    size, scales = _block_size(forwards, kv), forwards.decoder.spec.block_scales
    found = []
    for start, end in zip(starts, [*starts[1:], len(token_ids)], strict=True):
        own = _logits(forwards, kv, token_ids[start:end], start, size, scales)
        own = own - own.max(axis=-1, keepdims=True)
        found.append(own - np.log(np.exp(own).sum(axis=-1, keepdims=True)))
    return np.concatenate(found)


def _logits(
    forwards: ForwardTable,
    kv: Sequence[LayerKV],
    token_ids: Sequence[int],
    start: int,
    size: int,
    scales: Sequence[int],
) -> npt.NDArray[np.float32]:
    platform, spec = platform_of(forwards.decoder.device), forwards.decoder.spec
    with platform.values.inference():
        meta = single_sequence(
            start, len(token_ids), block_size=size, platform=platform, scales=scales
        )
        hidden = forwards.hidden(platform.upload(np.array(token_ids, np.int32)), kv, meta)
        if not spec.has_last:  # the last stage computes them
            return np.zeros((len(token_ids), spec.vocab_size), np.float32)
        return platform.values.floats(forwards.logits(hidden))


def canary_of(description: ModelDescription, wanted: str) -> Canary | None:
    """The checkpoint's canary; None if it has none. ConfigError if it has none but `wanted` is "refuse"."""
    path, spec = description.path, description.spec
    if spec.kind != "a decoder":
        if wanted == "refuse":
            raise ConfigError(
                f"canary='refuse', but {path} is {spec.kind}, and only decoders have canaries; leave it at "
                "'warn', or set 'off'",
                field="canary",
            )
        log_no_canary(path, spec.kind)
        return None
    canary = read_canary(path, spec.vocab_size)
    if canary is None and wanted == "refuse":
        raise ConfigError(
            f"canary='refuse', but {path} has no {CANARY_NAME}; leave it at 'warn', or let `slipstream compress` "
            "write one",
            field="canary",
        )
    return canary


def refuse_bad(result: CanaryResult, wanted: str) -> None:
    """Raise ModelError if the result is bad and `wanted` is "refuse"."""
    if wanted == "refuse" and not result.ok:
        raise ModelError(
            f"{result.describe()}; use other kernels or another kv_cache_dtype, or set canary='warn'"
        )


def check_start(executor: LocalExecutor, wanted: str) -> CanaryResult | None:
    """Run the checkpoint's canary, if it has one, and record its seconds as a phase of the start."""
    begin, runner, model = time.perf_counter(), executor.runner, executor.config.model
    if wanted == "off" or model.load_format == "dummy":
        return None
    canary = canary_of(executor.description, wanted)
    if canary is None:
        return None
    result = run_canary(runner.forwards, runner.kv, canary, context=model.max_model_len)
    runner.reset_expert_load()
    executor.phases["canary"] = time.perf_counter() - begin
    if not runner.model.spec.has_last:
        return None  # only the last stage knows the result
    refuse_bad(result, wanted)
    return result


def log_no_canary(model: Path, kind: str) -> None:
    """Warn that the canary of a model that is not a decoder is ignored."""
    if _place(model).is_file():
        told = f"{model} is {kind}, and only decoders have canaries"
        _logger.warning("%s; its %s is ignored: delete it, or set canary='off'", told, CANARY_NAME)


# --- The file ---------------------------------------------------------------------------------------------------------


def write_canary(canary: Canary, folder: Path) -> Path:
    path = folder / CANARY_NAME
    path.write_text(json.dumps({"format": 1, **asdict(canary)}) + "\n", encoding="utf-8")
    return path


def _place(model: Path) -> Path:
    """Path of a model's canary.

    It is in the model's folder. Only in an engine folder, which has one model, is it next to a GGUF
    file.
    """
    in_engine_folder = model.is_file() and is_engine_folder(model.parent)
    return (model.parent if in_engine_folder else model) / CANARY_NAME


def read_canary(model: Path, vocab_size: int) -> Canary | None:
    """Read the canary of a checkpoint's folder or engine folder; None if there is none.

    A GGUF file outside an engine folder has none. CheckpointError if the canary is damaged.
    """
    path = _place(model)
    if not path.is_file():
        return None
    try:
        given = parse_json(path.read_bytes())
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
    """Raise ValueError or TypeError if the canary's contents are invalid."""
    widths = {len(row) for row in (*canary.top_ids, *canary.top_logprobs)}
    if (
        not len(canary.token_ids) == len(canary.top_ids) == len(canary.top_logprobs) > 0
        or len(widths) != 1
        or 0 in widths
    ):
        raise ValueError("its rows do not fit its tokens")
    ids = [*canary.token_ids, *(t for row in canary.top_ids for t in row)]
    if not all(isinstance(t, int) and 0 <= t < vocab_size for t in ids):
        raise ValueError(f"it has tokens that are none of the {vocab_size} of the model")
    if not all(isinstance(x, float) and x <= 0 for row in canary.top_logprobs for x in row):
        raise ValueError("its log-probabilities must be numbers of at most 0")
    if not canary.max_kl > 0 or not canary.num_decoded >= 0:
        raise ValueError("max_kl must be above 0, and num_decoded 0 or more")
