"""Estimates the time of a step on a machine without measured steps. No torch.

The estimate uses bytes, operations and the machine's ceilings:

1. A linear layer takes the longer of reading its weights and multiplying, and slightly more if both
   take about the same time. Each linear layer adds a fixed time.
2. Attention reads keys and values, or multiplies.
3. Activations pass through memory between the operators.

The constants were fitted to an H200's records (benchmarks/results: kernels_cuda_linear,
mixed_steps, llama_table_*). Every result is labelled *estimated*.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from slipstream.costs.devices import Hardware
from slipstream.costs.operators import Product, attention_bytes, attention_operations, window_of
from slipstream.costs.step_cost import HostCost, Label, StepCounts
from slipstream.spec.model import ModelSpec

NEARNESS = 3.0
"""Exponent of the norm that combines a linear layer's times of reading and multiplying. Infinity
would take only the larger one."""

FIXED_OPS = 6.0
"""Time of a layer's operators other than linear layers, in units of the fixed time. Attention
counts as 2.5.
"""

ACTIVATION_PASSES = 3.6
"""Number of memory passes of an operator's inputs and outputs, including norms, rotary and
quantization."""

LAUNCH_S = 120e-6
"""Seconds in which the host launches one operator outside a graph.

Five engine runs next to H200s took 29 to 46 ms for a prompt step of GPT-J, which is 103 to 165 µs
per operator (the last: benchmarks/results/beams.json). The constant is their median. Two loops that
do nothing else took 54 µs (the last: mixed_steps.json).
"""

CONTEXT_PROMPTS, CONTEXT_DECODES = 1.18, 1.37
"""Ratio of the attention time with 1/n of the keys per GPU to 1/n of the whole time, for prompts
and decodes; it includes exchanges and merges that the link's bytes do not cover. With these values
the model predicts the measured speedup of two H200s over one (record `parallel_context`): 1.71
times the speed for a prompt of 131,072 tokens, 1.33 for a step of 8 such sequences."""

CONTEXT_TOKENS = 64
"""Minimum tokens of a step for which GPUs that divide keys by tokens divide the step's tokens too
(`model.layers.layer.SEQUENCE_TOKENS`)."""

ONE_TOKEN_SHARE = 0.3
"""Fraction of the fixed times in a GPU step of one token, which is one kernel."""

DECODES_SHARE, MANY_DECODES = 0.6, 64
MIXED_SHARE = 1.35
"""Factors of a GPU step's fixed time in steps of other kinds (benchmarks/results: step_costs_h200,
mixed_steps).

`DECODES_SHARE` is for a step of few decodes, whose operators start while others end. It rises to 1
at `MANY_DECODES`. `MIXED_SHARE` is for a step of decodes and prompts, which has two attention
kernels.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalyticCost:
    """A calculated `StepCost`.

    `product_type` is the dtype in which quantized linear layers multiply; the others use `dtype`.
    `num_gpus` is the tensor parallel size, with two all-reduces per layer (Shoeybi et al. 2019).
    With `context` each GPU has all weights, a part of the keys, and in long steps a part of the
    tokens. `read_s` is the time a step takes to read layers that are not stored on the device. It
    overlaps with the rest. `dense_bytes` is the size in bytes of an element of a quantized weight
    (experts excluded) in a step of several tokens, if it differs from the ledger's.
    """

    spec: ModelSpec
    products: tuple[Product, ...]
    hardware: Hardware
    dtype: str
    dtype_bytes: int
    product_type: str
    cache_bytes: float  # of one element
    num_gpus: int = 1
    context: bool = False
    read_s: float = 0.0
    dense_bytes: int | None = None
    host: HostCost = field(default_factory=HostCost)
    # One row per kind of attention: number of layers, bytes per cached token, operations per pair,
    # window.
    _attentions: tuple[tuple[int, float, float, float], ...] = field(
        init=False, repr=False, compare=False
    )
    _state_bytes: int = field(init=False, repr=False, compare=False)
    _others: dict[tuple[int, int, bool, bool], float] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        found = Counter(
            (attention_bytes(a, 1, self.cache_bytes), attention_operations(a, 1), window_of(a))
            for a in self.spec.attentions
        )
        object.__setattr__(self, "_attentions", tuple((count, *of) for of, count in found.items()))
        object.__setattr__(self, "_state_bytes", self.spec.state_bytes(self.dtype_bytes))
        object.__setattr__(self, "_others", {})

    def label(self, shape: StepCounts) -> Label:
        return "estimated"

    def on(self, num_gpus: int) -> AnalyticCost:
        return replace(self, num_gpus=num_gpus)

    def seconds(self, shape: StepCounts) -> float:
        """Returns the sum of `parts`. The time without attention is memoised, as it depends on the
        token counts alone and graphs have few sizes."""
        key = (
            shape.num_tokens,
            shape.num_sampled,
            shape.num_decodes == 0,
            shape.num_prompt_tokens == 0,
        )
        others = self._others.get(key)
        if others is None:
            parts = self._computing(shape)
            others = self._others[key] = sum(parts.values()) - parts["attention"]
        return max(others + self._attention(shape), self.read_s)

    def parts(self, shape: StepCounts) -> dict[str, float]:
        """Seconds by cause: weights, products (of linear layers), attention, activations, fixed times, link.

        With layers not stored on the device, "layers" is the time by which reading them exceeds all
        the others.
        """
        found = self._computing(shape)
        return (
            {**found, "layers": max(0.0, self.read_s - sum(found.values()))}
            if self.read_s
            else found
        )

    def _computing(self, shape: StepCounts) -> dict[str, float]:
        h, n = self.hardware, self.num_gpus
        tokens, shares = shape.num_tokens, n
        if self.context:  # each GPU reads all weights for its tokens
            tokens, shares = tokens if tokens < CONTEXT_TOKENS else -(-tokens // n), 1
        found = dict.fromkeys(
            ("weights", "products", "attention", "activations", "fixed", "link"), 0.0
        )
        activations = 0.0
        for p in self.products:
            count = shape.num_sampled if p.name == "head" else tokens
            if not count:
                continue
            rounded = p.rounded and p.name != "head"
            kind = self.product_type if rounded else self.dtype
            held = p.weight_bytes
            if self.dense_bytes and rounded and p.copies == 1 and tokens > 1:
                held = p.rows * p.inner * self.dense_bytes
            reading = p.count * held * p.share_read(count) / h.read_bytes_s / shares
            multiplying = p.count * p.operations(count) / h.rate(kind) / shares
            both = (reading**NEARNESS + multiplying**NEARNESS) ** (1 / NEARNESS)
            found["weights" if reading > multiplying else "products"] += both
            found["fixed"] += p.count * h.op_s
            if p.name != "head":
                activations += (
                    p.count * p.chosen * (p.rows + p.inner) / shares * self.dtype_bytes * tokens
                )
        found["activations"] = ACTIVATION_PASSES * activations / h.read_bytes_s
        found["attention"] = self._attention(shape)
        num_layers = len(self.spec.layers)
        found["fixed"] += FIXED_OPS * num_layers * h.op_s
        if h.is_gpu:
            found["fixed"] *= _fixed_share(shape)
        if n > 1 and self.context:  # queries and results, as many bytes as a sum of the results
            found["link"] = sum(
                h.all_reduce_s(shape.num_tokens * a.num_heads * a.head_dim * self.dtype_bytes, n)
                for a in self.spec.attentions
            )
        elif n > 1:
            found["link"] = (
                2
                * num_layers
                * h.all_reduce_s(tokens * self.spec.hidden_size * self.dtype_bytes, n)
            )
        return found

    def _attention(self, shape: StepCounts) -> float:
        """Returns seconds of attention, and of reading and writing recurrent layers' states."""
        h = self.hardware
        num_states = shape.num_decodes + shape.num_prompts
        seconds = 2 * num_states * self._state_bytes / h.read_bytes_s
        mean = shape.decode_context / shape.num_decodes if shape.num_decodes else 0.0
        mean_prompt = (
            shape.prompt_attention / shape.num_prompt_tokens if shape.num_prompt_tokens else 0.0
        )
        rate = h.rate(self.dtype)
        by_context = self.context and self.num_gpus > 1
        of_decodes, of_prompts = (CONTEXT_DECODES, CONTEXT_PROMPTS) if by_context else (1.0, 1.0)
        for count, token_bytes, pair_operations, window in self._attentions:
            cached = shape.num_decodes * min(mean, window)
            # query tokens per decode
            each = 1 + shape.num_drafts / shape.num_decodes if shape.num_decodes else 1.0
            pairs = shape.num_prompt_tokens * min(mean_prompt, window)
            decodes = cached * max(token_bytes / h.read_bytes_s, each * pair_operations / rate)
            prompts = pairs * pair_operations / (rate * h.attention_share)
            seconds += count * (of_decodes * decodes + of_prompts * prompts)
        return seconds / self.num_gpus


def launch_s(spec: ModelSpec, products: Iterable[Product]) -> float:
    """Seconds in which the host launches the operators of a GPU step one by one."""
    return LAUNCH_S * (sum(p.count for p in products) + FIXED_OPS * len(spec.layers))


def _fixed_share(shape: StepCounts) -> float:
    """Fraction of the fixed times that a step of this shape takes on a GPU."""
    if shape.num_tokens == 1:
        return ONE_TOKEN_SHARE
    if shape.num_prompt_tokens:
        return MIXED_SHARE if shape.num_decodes else 1.0
    return DECODES_SHARE + (1 - DECODES_SHARE) * min(1.0, shape.num_tokens / MANY_DECODES)


def binds(parts: dict[str, float]) -> str:
    """Name of the largest part of a step's time: bandwidth (weights, keys, values, activations),
    products (of linear layers), fixed times or link.

    It is "reading layers" if reading layers not stored on the device takes longer than everything else.
    """
    if parts.get("layers"):
        return "reading layers"
    groups = {
        "bandwidth": parts["weights"] + parts["attention"] + parts["activations"],
        "products": parts["products"],
        "fixed times of operators": parts["fixed"],
        "link": parts["link"],
    }
    return max(groups, key=lambda name: groups[name])
