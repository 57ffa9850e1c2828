"""Compares two models on the same text, to measure what a compression, a kernel or a cache format changes.

A is the original, B the other. For every scored token, with A's distribution p and B's q, it computes KL(p‖q) = Σ p (ln p −
ln q) in nats, whether the most likely token is the same (top-1), and the fraction of common tokens among the five most
likely (top-5). Both models process the same tokens side by side, so that only sums and one value per token are stored.

For each layer, as ‖b − a‖ / ‖a‖ over all tokens (relative root mean square error):

    state   the residual after the layer, which includes the errors before it
    own     what the layer adds to A's residual: a large value shows the layer at fault
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from slipstream.errors import ConfigError
from slipstream.evals.perplexity import Progress, check_windows, scored, token_nll
from slipstream.evals.scorer import STEP_TOKENS, Scorer
from slipstream.evals.text import Window
from slipstream.kernels.metadata import AttentionMetadata
from slipstream.model.layers.residual import whole

TOP = 5
LAYER_WINDOWS = 4
"""Number of windows on which layers are compared; more do not change the mean."""

KL_EDGES = tuple(10 ** (i / 4) for i in range(-24, 5))
"""Edges of the histogram of KL over tokens: from 1e-6 to 10 nats, four per decade."""

SHOWN_CONTEXT = 48
"""Number of tokens of text shown before a token with a large KL."""

CONTINUATION = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class KLDistribution:
    """Distribution of the KL over tokens, in nats. `p99` is the 99th percentile. `stderr` is the mean's, over
    windows. `histogram` counts tokens between `KL_EDGES`; the first and last count include those outside."""

    mean: float
    p99: float
    max: float
    stderr: float
    histogram: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerDivergence:
    layer: int
    own: float
    state: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LikelyToken:
    """A candidate for the next token, as text, with its probability."""

    token: str
    probability: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorstPrompt:
    """The token with the largest KL in a window: the text before it, the token, each model's candidates and continuation."""

    window: int
    kl_mean: float  # of the window
    kl: float  # of the token
    text: str
    actual: str
    expected_a: tuple[LikelyToken, ...]
    expected_b: tuple[LikelyToken, ...]
    continuation_a: str
    continuation_b: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """Divergence of model B from model A on a text. `perplexity_ratio` is B's over A's; its
    standard error is over paired windows. If `layers` is empty, `why_no_layers` says why."""

    kl: KLDistribution
    perplexity_a: float
    perplexity_b: float
    perplexity_ratio_stderr: float
    top1_agreement: float
    top5_agreement: float
    num_tokens: int
    num_windows: int
    layers: tuple[LayerDivergence, ...] = ()
    why_no_layers: str = ""
    worst: tuple[WorstPrompt, ...] = ()
    window_kl: tuple[float, ...] = field(default=(), repr=False)

    @property
    def perplexity_ratio(self) -> float:
        return self.perplexity_b / self.perplexity_a


@torch.inference_mode()
def compare(
    a: Scorer,
    b: Scorer,
    windows: Sequence[Window],
    *,
    num_worst: int = 5,
    layers: bool = True,
    progress: Progress = lambda done, total: None,
) -> Divergence:
    """Compare B with A on `windows`. ConfigError if their vocabularies differ, or if no token is scored. Steps of `progress`
    are the windows, the comparison layer by layer, and each of the worst prompts."""
    check_windows(a, windows)
    check_vocabularies(a, b, windows)
    kls: list[Tensor] = []
    nll_a: list[float] = []
    nll_b: list[float] = []
    same1 = shared5 = 0.0
    num_steps = len(windows) + layers + num_worst
    for i, window in enumerate(windows):
        (hidden_a, targets), (hidden_b, _) = scored(a, window), scored(b, window)
        kl, sum_a, sum_b = [], 0.0, 0.0
        for rows in a.rows(len(targets)):
            logits_a = a.logits(hidden_a[rows])
            logits_b = b.logits(hidden_b[rows]).to(logits_a.device)
            sum_a += float(token_nll(logits_a, targets[rows]).double().sum())
            sum_b += float(token_nll(logits_b, targets[rows]).double().sum())
            best_a, best_b = logits_a.topk(TOP).indices, logits_b.topk(TOP).indices
            same1 += float((best_a[:, 0] == best_b[:, 0]).sum())
            shared5 += float((best_a[:, :, None] == best_b[:, None, :]).sum()) / TOP
            kl.append(token_kl(logits_a, logits_b).cpu())
        kls.append(torch.cat(kl))
        nll_a.append(sum_a)
        nll_b.append(sum_b)
        progress(i + 1, num_steps)
    counts = torch.tensor([len(k) for k in kls], dtype=torch.float64)
    total, every = float(counts.sum()), torch.cat(kls).double()
    means = torch.stack([k.double().mean() for k in kls])
    difference = (
        torch.tensor(nll_b, dtype=torch.float64) - torch.tensor(nll_a, dtype=torch.float64)
    ) / counts
    ratio = math.exp(min(float((difference * counts).sum()) / total, 700.0))
    found, why = (
        layer_divergence(a, b, windows[:LAYER_WINDOWS]) if layers else ((), "not asked for")
    )
    progress(len(windows) + layers, num_steps)
    order, worst = means.argsort(descending=True).tolist(), []
    for i in _distinct(windows, kls, order)[:num_worst]:
        worst.append(_worst(a, b, windows[i], i, kls[i]))
        progress(len(windows) + layers + len(worst), num_steps)
    return Divergence(
        kl=KLDistribution(
            mean=float(every.mean()),
            p99=_percentile(every, 0.99),
            max=float(every.max()),
            stderr=_stderr(means, counts),
            histogram=_histogram(every),
        ),
        perplexity_a=math.exp(min(sum(nll_a) / total, 700.0)),
        perplexity_b=math.exp(min(sum(nll_b) / total, 700.0)),
        perplexity_ratio_stderr=ratio * _stderr(difference, counts),
        top1_agreement=same1 / total,
        top5_agreement=shared5 / total,
        num_tokens=int(total),
        num_windows=len(windows),
        layers=found,
        why_no_layers=why,
        worst=tuple(worst),
        window_kl=tuple(means.tolist()),
    )


def token_kl(logits_a: Tensor, logits_b: Tensor) -> Tensor:
    """KL(A‖B) of each row in nats [N], from logits float32 [N, V]. Terms where A's probability is 0 are 0."""
    log_p, log_q = logits_a.log_softmax(-1), logits_b.log_softmax(-1)
    p = log_p.exp()
    return (p * (log_p - log_q)).masked_fill(p == 0, 0).sum(-1).clamp(min=0)


def check_vocabularies(a: Scorer, b: Scorer, windows: Sequence[Window]) -> None:
    """Raise ConfigError unless the vocabularies have the same size, and the same tokens where the
    text uses them."""
    sizes = a.spec.vocab_size, b.spec.vocab_size
    if sizes[0] != sizes[1]:
        raise ConfigError(
            f"{a.name} has a vocabulary of {sizes[0]} tokens and {b.name} of {sizes[1]}: they can't be compared token by "
            "token; compare their perplexities per character, or their answers",
            field="model",
        )
    for token in sorted({t for w in windows for t in w.token_ids}):
        if a.tokenizer.token_bytes(token) != b.tokenizer.token_bytes(token):
            raise ConfigError(
                f"the token {token} is {a.tokenizer.id_to_token(token)!r} for {a.name} and {b.tokenizer.id_to_token(token)!r} "
                f"for {b.name}: their vocabularies differ; compare models with the same tokenizer",
                field="tokenizer",
            )


@torch.inference_mode()
def layer_divergence(
    a: Scorer, b: Scorer, windows: Sequence[Window]
) -> tuple[tuple[LayerDivergence, ...], str]:
    """(the divergence of each layer, "") or ((), the reason why there is none). Layers run one by one, so code that an
    op set compiles for several layers is not used."""
    if (len(a.decoder.layers), a.spec.hidden_size) != (len(b.decoder.layers), b.spec.hidden_size):
        return (), (
            f"{a.name} has {len(a.decoder.layers)} layers of width {a.spec.hidden_size}, {b.name} "
            f"{len(b.decoder.layers)} of {b.spec.hidden_size}"
        )
    for x in (a, b):
        if any(layer.streams is not None for layer in x.spec.layers):
            return (), f"layers of {x.name} have several residuals"
    # |Δown|², |own|², |Δstate|², |state|²
    sums = torch.zeros(len(a.decoder.layers), 4, dtype=torch.float64)
    for window in windows:
        tokens = window.token_ids[:STEP_TOKENS]
        meta_a, meta_b = a.step(0, len(tokens)), b.step(0, len(tokens))
        at_a = a.decoder.embedded(a.tensor(tokens), meta_a).clone()
        at_b = b.decoder.embedded(b.tensor(tokens), meta_b).clone()
        for i in range(len(a.decoder.layers)):
            next_a, next_b = _after(a, i, at_a, meta_a), _after(b, i, at_b, meta_b)
            own_a, own_b = next_a - at_a, _after(b, i, at_a.to(at_b), meta_b).to(at_a) - at_a
            pairs = (own_b - own_a, own_a, next_b.to(next_a) - next_a, next_a)
            sums[i] += torch.stack([x.double().square().sum().cpu() for x in pairs])
            at_a, at_b = next_a, next_b
    own = (sums[:, 0] / sums[:, 1].clamp(min=1e-300)).sqrt().tolist()
    state = (sums[:, 2] / sums[:, 3].clamp(min=1e-300)).sqrt().tolist()
    return tuple(LayerDivergence(layer=i, own=own[i], state=state[i]) for i in range(len(own))), ""


def _after(scorer: Scorer, layer: int, state: Tensor, meta: AttentionMetadata) -> Tensor:
    """Residual after a layer with input `state` [T, E], which is not changed."""
    decoder = scorer.decoder
    pending, residual = decoder.layers[layer](
        decoder.ops, state.clone(), None, scorer.kv[layer], meta
    )
    made = whole(decoder.ops, pending)
    return made.clone() if residual is None else made + residual


def _distinct(windows: Sequence[Window], kls: Sequence[Tensor], order: Sequence[int]) -> list[int]:
    """Windows in this order, but only one for each text before the worst token, because many conversations begin alike."""
    found: dict[tuple[int, ...], int] = {}
    for i in order:
        at = _worst_token(windows[i], kls[i])
        found.setdefault(windows[i].token_ids[max(0, at - SHOWN_CONTEXT) : at + 1], i)
    return list(found.values())


def _worst_token(window: Window, kl: Tensor) -> int:
    return window.num_context + int(kl.argmax())


def _worst(a: Scorer, b: Scorer, window: Window, number: int, kl: Tensor) -> WorstPrompt:
    at = _worst_token(window, kl)
    before = window.token_ids[:at]

    def expected(scorer: Scorer) -> tuple[LikelyToken, ...]:
        best = scorer.logits(scorer.hidden(before)[-1:]).softmax(-1)[0].topk(TOP)
        return tuple(
            LikelyToken(
                token=scorer.tokenizer.decode([t], skip_special_tokens=False), probability=p
            )
            for t, p in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        )

    def text(tokens: Sequence[int]) -> str:
        return a.tokenizer.decode(tokens, skip_special_tokens=False)

    return WorstPrompt(
        window=number,
        kl_mean=float(kl.mean()),
        kl=float(kl.max()),
        text=text(before[-SHOWN_CONTEXT:]),
        actual=text([window.token_ids[at]]),
        expected_a=expected(a),
        expected_b=expected(b),
        continuation_a=text(a.greedy(before, CONTINUATION)),
        continuation_b=text(b.greedy(before, CONTINUATION)),
    )


def _percentile(values: Tensor, share: float) -> float:
    """Smallest value that the fraction `share` of all values does not exceed."""
    return float(values.sort().values[max(0, math.ceil(share * len(values)) - 1)])


def _histogram(values: Tensor) -> tuple[int, ...]:
    edges = torch.tensor(KL_EDGES[1:-1], dtype=values.dtype)
    return tuple(torch.bucketize(values, edges).bincount(minlength=len(KL_EDGES) - 1).tolist())


def _stderr(means: Tensor, weights: Tensor) -> float:
    """Standard error of the weighted mean of independent windows' means; 0 for one window."""
    n = len(means)
    if n < 2:
        return 0.0
    share = weights / weights.sum()
    spread = means - (means * share).sum()
    return float(((share * spread).square().sum() * n / (n - 1)).sqrt())
