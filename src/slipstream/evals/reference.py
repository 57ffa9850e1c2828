"""Comparison of a checkpoint with the same one in Hugging Face transformers, on random tokens in float32 (`model.check`)."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from slipstream.bench.adapters import transformers as peer
from slipstream.errors import ConfigError
from slipstream.model.check import CheckReport, check, padding_tokens, unrounded_inputs
from slipstream.spec.description import ModelDescription, read_spec
from slipstream.spec.stored.gguf_types import CPU_BLOCK_BYTES

DEFAULT_NUM_TOKENS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceCheck:
    """Result of `check_against_transformers`. `kernels` is the kernel set in use, as "auto" was resolved."""

    report: CheckReport
    num_tokens: int
    kernels: str
    rounds_inputs: bool


def check_against_transformers(
    path: Path,
    *,
    num_tokens: int | None,
    device: str,
    kernels: str,
    tolerance: float,
    seed: int,
    phase: Callable[[str], None],
) -> ReferenceCheck:
    """Compare both models. `num_tokens` None: 64, or the whole context if that is shorter."""
    phase("description")
    description = read_spec(path)
    if description.speech is not None:
        message = "this model reads audio, and check-model compares texts alone; compare its transcriptions"
        raise ConfigError(message, field="model")
    most = description.spec.max_position
    if num_tokens is None:
        num_tokens = min(DEFAULT_NUM_TOKENS, most)
    if not 1 <= num_tokens <= most:
        message = f"num_tokens must be from 1 to the model's {most}, got {num_tokens}"
        raise ConfigError(message, field="num_tokens")
    if kernels == "auto" and device == "cpu" and _is_rounded(description):
        kernels = "reference"  # the CPU's kernels quantize the inputs of linear layers to 8 bits
    phase("transformers")
    theirs = peer.load_folder(path, "float32", description.spec.kind)
    padding = padding_tokens(theirs)
    drawn = [t for t in range(description.spec.vocab_size) if t not in padding]
    tokens = random.Random(seed).choices(drawn, k=num_tokens)
    phase("slipstream")
    report = check(path, theirs, tokens, device=device, kernels=kernels, tolerance=tolerance)
    return ReferenceCheck(
        report=report,
        num_tokens=num_tokens,
        kernels=kernels,
        rounds_inputs=not unrounded_inputs(description),
    )


def _is_rounded(description: ModelDescription) -> bool:
    packed = any(t.name in CPU_BLOCK_BYTES for t in description.stored)
    return description.quantization is not None or packed
