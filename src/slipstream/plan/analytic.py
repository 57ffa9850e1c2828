"""Estimates the time of a step on a machine where none was measured: from bytes, operations and the machine's ceilings. No
torch.

A product takes as long as reading its weights or as multiplying, whichever is longer, a little more where both are alike, and
a fixed time beside. Attention reads keys and values, or multiplies. Activations pass through memory between the operators. The
constants were fitted to an H200's records (benchmarks/results: kernels_cuda_linear, mixed_steps, llama_table_*); everything
that comes of it is *estimated*.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from slipstream.plan.devices import Hardware
from slipstream.plan.operators import Product, attention_bytes, attention_operations, window_of
from slipstream.plan.step_cost import HostCost, Label, StepShape
from slipstream.spec.model import ModelSpec

NEARNESS = 3.0
"""The norm by which the two times of a product add up: the larger alone would be infinite."""

FIXED_OPS = 6.0
"""Operators of a layer beside its products, each of which takes the fixed time: attention counts as two and a half."""

ACTIVATION_PASSES = 3.6
"""How often an operator's inputs and outputs pass through memory, norms, rotation and rounding included."""

LAUNCH_S = 120e-6
"""In which the host launches an operator where no graph does. In five runs of an engine beside H200s (the last is
benchmarks/results/beams.json) a prompt step of GPT-J took it 29 to 46 ms, 103 to 165 µs an operator; in two loops that do
nothing else 54 µs (the last: mixed_steps). This is the median."""

ONE_TOKEN_SHARE = 0.3
"""Of the fixed times where a step of one token is one kernel."""

DECODES_SHARE, MANY_DECODES = 0.6, 64
MIXED_SHARE = 1.35
"""Likewise of a GPU's step of few decodes (from so many on the whole), whose operators start while others end, and of steps of
decodes beside prompts, which have two kernels of attention (benchmarks/results: step_costs_h200, mixed_steps)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalyticCost:
    """A `StepCost` by calculation. `product_type` is what rounded products multiply in, `dtype` the others. `num_gpus`: weights
    and heads are spread over so many by tensor parallelism, with two all-reduces a layer (Shoeybi et al. 2019). `read_s`: what
    reading layers that are not kept on the device takes, beside the step. `dense_bytes`: of a number of a rounded weight
    (experts' aside), as which a step of several tokens reads it, where that is not what the ledger has."""

    spec: ModelSpec
    products: tuple[Product, ...]
    hardware: Hardware
    dtype: str
    dtype_bytes: int
    product_type: str
    cache_bytes: int  # of a number
    num_gpus: int = 1
    read_s: float = 0.0
    dense_bytes: int | None = None
    host: HostCost = field(default_factory=HostCost)
    # Of layers with alike attention: how many, bytes of a cached token, operations of a pair, and the window.
    _attentions: tuple[tuple[int, float, float, float], ...] = field(
        init=False, repr=False, compare=False
    )
    _others: dict[tuple[int, int, bool, bool], float] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        found = Counter(
            (attention_bytes(a, 1, self.cache_bytes), attention_operations(a, 1), window_of(a))
            for a in (layer.attention for layer in self.spec.layers)
        )
        object.__setattr__(self, "_attentions", tuple((count, *of) for of, count in found.items()))
        object.__setattr__(self, "_others", {})

    def label(self, shape: StepShape) -> Label:
        return "estimated"

    def on(self, num_gpus: int) -> AnalyticCost:
        return replace(self, num_gpus=num_gpus)

    def seconds(self, shape: StepShape) -> float:
        """The sum of `parts`. What hangs on a step's tokens alone is looked up: there are few sizes of graphs."""
        key = (
            shape.num_tokens,
            shape.num_sampled,
            shape.num_decodes == 0,
            shape.num_prompt_tokens == 0,
        )
        others = self._others.get(key)
        if others is None:
            no_attention = shape._replace(decode_context=0, prompt_attention=0)
            others = self._others[key] = sum(self._computing(no_attention).values())
        return max(others + self._attention(shape), self.read_s)

    def parts(self, shape: StepShape) -> dict[str, float]:
        """Seconds by what they go to: reading, multiplying, attention, activations, fixed times, links; and "layers", what
        reading layers that are not kept takes longer than the others together."""
        found = self._computing(shape)
        return (
            {**found, "layers": max(0.0, self.read_s - sum(found.values()))}
            if self.read_s
            else found
        )

    def _computing(self, shape: StepShape) -> dict[str, float]:
        h, n = self.hardware, self.num_gpus
        tokens = shape.num_tokens
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
            reading = p.count * held * p.share_read(count) / h.read_bytes_s / n
            multiplying = p.count * p.operations(count) / h.rate(kind) / n
            both = (reading**NEARNESS + multiplying**NEARNESS) ** (1 / NEARNESS)
            found["weights" if reading > multiplying else "products"] += both
            found["fixed"] += p.count * h.op_s
            if p.name != "head":
                activations += (
                    p.count * p.chosen * (p.rows / n + p.inner / n) * self.dtype_bytes * tokens
                )
        found["activations"] = ACTIVATION_PASSES * activations / h.read_bytes_s
        found["attention"] = self._attention(shape)
        num_layers = len(self.spec.layers)
        found["fixed"] += FIXED_OPS * num_layers * h.op_s
        if h.is_gpu:
            found["fixed"] *= _fixed_share(shape)
        if n > 1:
            found["link"] = (
                2
                * num_layers
                * h.all_reduce_s(tokens * self.spec.hidden_size * self.dtype_bytes, n)
            )
        return found

    def _attention(self, shape: StepShape) -> float:
        h, seconds = self.hardware, 0.0
        mean = shape.decode_context / shape.num_decodes if shape.num_decodes else 0.0
        mean_prompt = (
            shape.prompt_attention / shape.num_prompt_tokens if shape.num_prompt_tokens else 0.0
        )
        rate = h.rate(self.dtype)
        for count, token_bytes, pair_operations, window in self._attentions:
            cached = shape.num_decodes * min(mean, window)
            each = (
                1 + shape.num_drafts / shape.num_decodes if shape.num_decodes else 1.0
            )  # tokens that look at them
            pairs = shape.num_prompt_tokens * min(mean_prompt, window)
            decodes = cached * max(token_bytes / h.read_bytes_s, each * pair_operations / rate)
            seconds += count * (decodes + pairs * pair_operations / (rate * h.attention_share))
        return seconds / self.num_gpus


def launch_s(spec: ModelSpec, products: Iterable[Product]) -> float:
    """Of a GPU's step whose operators the host launches one by one."""
    return LAUNCH_S * (sum(p.count for p in products) + FIXED_OPS * len(spec.layers))


def _fixed_share(shape: StepShape) -> float:
    """Of the fixed times, on a GPU."""
    if shape.num_tokens == 1:
        return ONE_TOKEN_SHARE
    if shape.num_prompt_tokens:
        return MIXED_SHARE if shape.num_decodes else 1.0
    return DECODES_SHARE + (1 - DECODES_SHARE) * min(1.0, shape.num_tokens / MANY_DECODES)


def binds(parts: dict[str, float]) -> str:
    """What a step's time goes to most: memory (reading weights, keys, values), products, host or link; or reading layers that
    are not kept, if all else is done meanwhile."""
    if parts.get("layers"):
        return "reading layers"
    groups = {
        "bandwidth": parts["weights"] + parts["attention"] + parts["activations"],
        "products": parts["products"],
        "fixed times of operators": parts["fixed"],
        "link": parts["link"],
    }
    return max(groups, key=lambda name: groups[name])
