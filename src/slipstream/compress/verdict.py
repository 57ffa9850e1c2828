"""Judges a compression: whether the result is smaller than its input, worse, or broken.

The input's size is that of the user's file: of a GGUF file its bytes, not its size in 16 bits. No
torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slipstream.errors import ConfigError

if TYPE_CHECKING:
    from slipstream.evals.divergence import Divergence
    from slipstream.spec.description import ModelDescription

DENSE_TYPES = frozenset(("F32", "F16", "BF16"))


def check_max_kl(max_kl: float | None) -> None:
    """Raises ConfigError if a limit of the mean KL is negative or NaN."""
    if max_kl is not None and not max_kl >= 0:
        raise ConfigError(
            f"--max-kl must be a number of nats of at least 0, got {max_kl}", field="max_kl"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityLimits:
    """Limits beyond which a result counts as broken. Useful recipes are far within them
    (SmolLM2-135M): INT3 by GPTQ has 1.8 times the perplexity and the same most likely token at 67 %
    of positions; with half of the weights zeroed by SparseGPT the perplexity is 1.9 times."""

    max_perplexity_ratio: float = 3.0  # perplexity of the result over its input's
    min_top1_agreement: float = 0.5

    def check(self) -> None:
        if not self.max_perplexity_ratio >= 1:
            raise ConfigError(
                f"max_perplexity_ratio={self.max_perplexity_ratio} must be 1 or more",
                field="max_perplexity_ratio",
            )
        if not 0 <= self.min_top1_agreement <= 1:
            raise ConfigError(
                f"min_top1_agreement={self.min_top1_agreement} must be a share from 0 to 1",
                field="min_top1_agreement",
            )

    def faults(self, found: Divergence) -> tuple[str, ...]:
        """Exceeded limits, described for the user. A NaN exceeds all."""
        faults = []
        if not found.perplexity_ratio <= self.max_perplexity_ratio:
            faults.append(
                f"its perplexity is {found.perplexity_b:,.4g}, {found.perplexity_ratio:,.3g} times the input's "
                f"(at most {self.max_perplexity_ratio:g})"
            )
        if not found.top1_agreement >= self.min_top1_agreement:
            faults.append(
                f"it ranks the input's likeliest token first for {found.top1_agreement:.1%} of the tokens "
                f"(at least {self.min_top1_agreement:.0%})"
            )
        return tuple(faults)


def is_worse(found: Divergence) -> bool:
    """Whether the perplexity rose by more than twice its standard error."""
    return not found.perplexity_ratio <= 1 + 2 * found.perplexity_ratio_stderr


def headline(
    bytes_before: int,
    bytes_after: int,
    found: Divergence | None = None,
    faults: tuple[str, ...] = (),
) -> str:
    """One line for the user: whether the result is broken, and size and perplexity relative to the input's."""
    size = f"{bytes_after / bytes_before:.2f} × the bytes of its input"
    parts = [f"larger than its input: {size}" if bytes_after > bytes_before else size]
    if found is None:
        parts.append("quality not measured")
    else:
        change = found.perplexity_ratio - 1
        told = f"{change:+.2%}" if change < 10 else f"× {found.perplexity_ratio:,.4g}"
        parts.append(f"{'worse' if is_worse(found) else 'no worse'}: perplexity {told}")
    return ("broken; " if faults else "") + "; ".join(parts)


def rounded_before(source: ModelDescription) -> str | None:
    """Describe the quantization of a GGUF file's layers, such as "4-bit already: Q4_1, …"; None if
    they are not quantized. The number of bits is that of the type of most values."""
    if source.gguf is None:
        return None
    products = [
        t for name, t in source.gguf.tensors.items() if name.startswith("blk.") and len(t.shape) > 1
    ]
    values: dict[str, int] = {}
    for tensor in products:
        values[tensor.type] = values.get(tensor.type, 0) + tensor.numel
    types = sorted(values, key=lambda name: -values[name])
    if not types or types[0] in DENSE_TYPES:
        return None
    bits = 8 * sum(t.nbytes for t in products) / sum(values.values())
    (digit, *_) = re.findall(r"\d", types[0])
    return f"{digit}-bit already: {', '.join(types)}, {bits:.2f} bits a weight with scales, embeddings apart"


def input_bytes(source: ModelDescription) -> int | None:
    """Size in bytes of a GGUF file's tensors; None for other checkpoints, which are dense."""
    return sum(t.num_bytes for t in source.stored) or None
