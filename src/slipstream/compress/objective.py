"""What a student is asked for: to give the teacher's distribution, its hidden states, its attention.

Distributions are compared in float32 at a temperature T, a few rows at a time, whose logits are computed again in the backward
pass instead of kept. With teacher p and student q, over the vocabulary:
    forward   Σ p log(p/q)     the student covers all that the teacher does (Hinton et al. 2015)
    reverse   Σ q log(q/p)     it keeps to what the teacher is sure of (MiniLLM, Gu et al. 2024)
    js        (forward of p and m + forward of q and m) / 2 with m = (p+q)/2
times T², so that gradients stay as large whatever T is. Of a teacher whose top k logits were kept (`teacher.py`), all other
tokens are one outcome: a lower bound of the divergence, exact where the rest weighs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from slipstream.compress.steps import Divergence
from slipstream.kernels.autograd import AutogradOps
from slipstream.kernels.metadata import AttentionMetadata, LayerKV
from slipstream.kernels.ops import AttentionParams
from slipstream.model.sequences import SequenceBatch
from slipstream.spec.model import ModelSpec

LOGITS_BYTES = 2**29
"""Float32 logits that are there at once, the student's and as many of the teacher's."""


def divergence(kind: Divergence, teacher: Tensor, student: Tensor) -> Tensor:
    """[N] nats, of float32 log-probabilities [N, V]."""
    match kind:
        case "forward":
            return _kl(teacher, student)
        case "reverse":
            return _kl(student, teacher)
        case "js":
            mixed = torch.logaddexp(teacher, student) - torch.log(torch.tensor(2.0))
            return (_kl(teacher, mixed) + _kl(student, mixed)) / 2


def _kl(p: Tensor, q: Tensor) -> Tensor:
    return (p.exp() * (p - q)).sum(-1)


@dataclass(frozen=True, slots=True)
class TopK:
    """A teacher's likeliest tokens [N, k] and their log-probabilities float32 at the temperature they are compared at."""

    ids: Tensor
    logprobs: Tensor

    def rows(self, rows: slice | Tensor) -> TopK:
        return TopK(self.ids[rows], self.logprobs[rows])

    def outcomes(self, student: Tensor) -> tuple[Tensor, Tensor]:
        """(teacher, student) log-probabilities [N, k + 1], all other tokens last; `student` is [N, V]."""
        rest = (-self.logprobs.exp().sum(-1, keepdim=True)).clamp(min=-1 + 1e-7).log1p()
        others = student.scatter(-1, self.ids, -torch.inf).logsumexp(-1, keepdim=True).clamp(min=-100.0)
        return torch.cat((self.logprobs, rest), -1), torch.cat((student.gather(-1, self.ids), others), -1)


@dataclass(frozen=True, slots=True)
class TokenLosses:
    """Sums over tokens, each with its weight: the divergence, the negative log-likelihood of what comes next, the weights."""

    divergence: Tensor
    nll: Tensor
    weight: Tensor


def token_losses(
    head: Callable[[Tensor], Tensor],
    hidden: Tensor,
    teacher: Callable[[slice], Tensor] | TopK,
    targets: Tensor,
    weights: Tensor,
    *,
    vocab_size: int,
    kind: Divergence,
    temperature: float,
) -> TokenLosses:
    """`head` makes logits [n, V] of the student's final hidden states [N, E]; `teacher` gives its logits for some rows, or was
    kept. `targets` [N] are the tokens that follow."""
    at_once = max(1, LOGITS_BYTES // (4 * vocab_size))
    sums = [torch.zeros((), device=hidden.device) for _ in range(2)]

    def some(h: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        logits = head(h).float()
        student = (logits / temperature).log_softmax(-1)
        if isinstance(teacher, TopK):
            pair = teacher.rows(rows).outcomes(student)
        else:
            with torch.no_grad():
                other = (teacher(rows).float() / temperature).log_softmax(-1)
            pair = other, student
        w = weights[rows]
        found = (divergence(kind, *pair) * w).sum() * temperature**2
        said = student if temperature == 1 else logits.log_softmax(-1)
        return found, -(said.gather(-1, targets[rows][:, None])[:, 0] * w).sum()

    for begin in range(0, len(hidden), at_once):
        rows = slice(begin, begin + at_once)
        part = hidden[rows]
        parts = checkpoint(some, part, rows, use_reentrant=False) if torch.is_grad_enabled() else some(part, rows)
        sums = [total + part for total, part in zip(sums, parts, strict=True)]
    return TokenLosses(sums[0], sums[1], weights.sum())


# --- Hidden states and attention --------------------------------------------------------------------------------------


class TappedOps(AutogradOps):
    """`tap(q, kv, meta, scoring)` sees every attention while it is set."""

    def __init__(self) -> None:
        self.tap: Callable[[Tensor, LayerKV, AttentionMetadata, AttentionParams], None] | None = None

    def attention(self, q: Tensor, kv: LayerKV, meta: AttentionMetadata, scoring: AttentionParams) -> Tensor:
        if self.tap is not None:
            self.tap(q, kv, meta, scoring)
        return super().attention(q, kv, meta, scoring)


def attention_weights(q: Tensor, kv: LayerKV, s: AttentionParams, lengths: Sequence[int]) -> list[Tensor]:
    """For each sequence float32 [H, n, n]: what each token looks at, as `OpSet.attention` weighs it."""
    found = []
    for i, part in enumerate(q.split(list(lengths))):
        n, num_heads, _ = part.shape
        keys = kv.k[i, :, :n].repeat_interleave(num_heads // kv.k.shape[1], dim=0)
        scores = torch.einsum("nhd,hld->hnl", part.float(), keys.float()) * s.scale
        if s.softcap is not None:
            scores = s.softcap * torch.tanh(scores / s.softcap)
        at = torch.arange(n, device=q.device)
        distance = at[:, None] - at[None, :]
        if s.alibi_slopes is not None:
            scores = scores - s.alibi_slopes.float()[:, None, None] * distance
        hidden = distance < 0
        if s.window is not None:
            hidden = hidden | (distance >= s.window)
        found.append(scores.masked_fill(hidden, -torch.inf).softmax(-1))
    return found


@dataclass(slots=True)
class Seen:
    """What one pass leaves for matching, by layer."""

    lengths: tuple[int, ...]  # of the sequences
    states: dict[int, Tensor]  # [T, E] after the layer
    attention: dict[int, tuple[Tensor, LayerKV, AttentionParams]]  # what `attention_weights` takes

    @classmethod
    def watch(
        cls, ops: TappedOps, batch: SequenceBatch, layers: Sequence[int], *, attention: bool
    ) -> tuple[Seen, Callable[[int, Tensor], None]]:
        """(to be filled, the `each` of `WholeModel.hidden`). The pass that fills it is the next; the tap must be off when it is
        computed again."""
        seen, now = cls(batch.lengths, {}, {}), 0

        def tap(q: Tensor, kv: LayerKV, meta: AttentionMetadata, scoring: AttentionParams) -> None:
            if now in layers:
                seen.attention[now] = q, kv, scoring

        def each(i: int, state: Tensor) -> None:
            nonlocal now
            now = i
            if i - 1 in layers:
                seen.states[i - 1] = state

        ops.tap = tap if attention else None
        return seen, each

    def weights(self, layer: int) -> list[Tensor]:
        q, kv, scoring = self.attention[layer]
        return attention_weights(q, kv, scoring, self.lengths)


class Matching(nn.Module):
    """Learned maps from the student's sizes to the teacher's, for pairs (student's layer, teacher's layer).

    States: a linear map of each pair's, and the squared error of a token over its square (after TinyBERT, Jiao et al. 2020,
    Eq. 8). Attention: each of the teacher's heads from a learned mixture of the student's, and the KL of what a token looks at.
    """

    def __init__(self, student: ModelSpec, teacher: ModelSpec, pairs: Sequence[tuple[int, int]], *, attention: bool) -> None:
        super().__init__()
        self.pairs = tuple(pairs)
        e, width = student.hidden_size, teacher.hidden_size
        self.maps = nn.ParameterList([torch.eye(width, e) for _ in pairs])
        self.mixtures = nn.ParameterList()
        for s, t in pairs if attention else ():
            heads, others = student.layers[s].attention.num_heads, teacher.layers[t].attention.num_heads
            near = torch.arange(others) * heads // others  # a head begins as its nearest
            self.mixtures.append(4.0 * F.one_hot(near, heads).float())

    def forward(self, student: Seen, teacher: Seen) -> tuple[Tensor, Tensor]:
        """(states, attention): sums over tokens, means over pairs and heads; 0 for what is not matched."""
        zero = self.maps[0].new_zeros(())
        states, looks = zero, zero
        for i, (s, t) in enumerate(self.pairs):
            wanted = teacher.states[t].detach().float()
            error = (student.states[s].float() @ self.maps[i].T - wanted).square().sum(-1)
            states = states + (error / wanted.square().sum(-1).clamp(min=1e-12)).sum()
            if len(self.mixtures):
                mix = self.mixtures[i].softmax(-1)
                for ours, theirs in zip(student.weights(s), teacher.weights(t), strict=True):
                    mixed = torch.einsum("ts,snl->tnl", mix, ours)
                    looks = looks + F.kl_div((mixed + 1e-9).log(), theirs.detach(), reduction="sum") / len(mix)
        return states / len(self.pairs), looks / len(self.pairs)


def layer_pairs(student: int, teacher: int, kept: Sequence[int] | None = None) -> list[tuple[int, int]]:
    """Each of the student's layers with the teacher's that it was, or, if it was none, that stands as deep."""
    if kept is not None:
        return list(enumerate(kept))
    return [(i, (i + 1) * teacher // student - 1 if student <= teacher else i * teacher // student) for i in range(student)]
