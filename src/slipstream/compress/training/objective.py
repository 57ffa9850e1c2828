"""The losses of distillation: the student matches the teacher's distribution, hidden states and attention.

Distributions are compared in float32 at a temperature T, a few rows at a time. Logits are recomputed in the
backward pass, not stored. With teacher p and student q, over the vocabulary:

    forward   Σ p log(p/q)     the student covers everything that the teacher does (Hinton et al. 2015)
    reverse   Σ q log(q/p)     the student keeps to what the teacher is sure of (MiniLLM, Gu et al. 2024)
    js        (KL(p‖m) + KL(q‖m)) / 2 with m = (p + q) / 2

Each is multiplied by T², so that the magnitude of gradients does not depend on T. With cached top-k logits
(`teacher.py`), all other tokens count as one outcome, which gives a lower bound of the divergence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from slipstream.compress.steps import Divergence
from slipstream.kernels.metadata import AttentionMetadata, LayerKV
from slipstream.kernels.ops import AttentionParams
from slipstream.kernels.plain.autograd import AutogradOps
from slipstream.model.sequences import SequenceBatch
from slipstream.spec.model import ModelSpec

LOGITS_BYTES = 2**29
"""Maximum bytes of the student's float32 logits in memory at a time; the teacher's take as much."""


def divergence(kind: Divergence, teacher: Tensor, student: Tensor) -> Tensor:
    """Divergence of each row in nats [N], from float32 log-probabilities [N, V]."""
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
    """The teacher's k most likely tokens [N, k] and their log-probabilities, float32, at the temperature of the loss."""

    ids: Tensor
    logprobs: Tensor

    def rows(self, rows: slice | Tensor) -> TopK:
        return TopK(self.ids[rows], self.logprobs[rows])

    def outcomes(self, student: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities (teacher's, student's), each [N, k + 1], whose last outcome is all other tokens. `student` is
        [N, V]."""
        rest = (-self.logprobs.exp().sum(-1, keepdim=True)).clamp(min=-1 + 1e-7).log1p()
        others = (
            student.scatter(-1, self.ids, -torch.inf).logsumexp(-1, keepdim=True).clamp(min=-100.0)
        )
        return torch.cat((self.logprobs, rest), -1), torch.cat(
            (student.gather(-1, self.ids), others), -1
        )


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
) -> tuple[Tensor, Tensor]:
    """(divergence, negative log-likelihood of the next token), weighted sums over tokens in nats.

    `head` computes logits [n, V] from the student's final hidden states [N, E]. `teacher` computes
    its logits for a slice of rows, or is a cache of them. `targets` [N] are the next tokens."""
    at_once = max(1, LOGITS_BYTES // (4 * vocab_size))
    sums = [torch.zeros((), device=hidden.device) for _ in range(2)]

    def losses_of(h: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
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
        unscaled = student if temperature == 1 else logits.log_softmax(-1)
        return found, -(unscaled.gather(-1, targets[rows][:, None])[:, 0] * w).sum()

    for begin in range(0, len(hidden), at_once):
        rows = slice(begin, begin + at_once)
        part = hidden[rows]
        recompute = torch.is_grad_enabled()
        parts = (
            checkpoint(losses_of, part, rows, use_reentrant=False)
            if recompute
            else losses_of(part, rows)
        )
        sums = [total + part for total, part in zip(sums, parts, strict=True)]
    return sums[0], sums[1]


# --- Hidden states and attention --------------------------------------------------------------------------------------


class TappedOps(AutogradOps):
    """Calls `tap(q, kv, meta, params)` before every attention, if it is set."""

    def __init__(self) -> None:
        self.tap: Callable[[Tensor, LayerKV, AttentionMetadata, AttentionParams], None] | None = (
            None
        )

    def attention(
        self, q: Tensor, kv: LayerKV, meta: AttentionMetadata, params: AttentionParams
    ) -> Tensor:
        if self.tap is not None:
            self.tap(q, kv, meta, params)
        return super().attention(q, kv, meta, params)


def attention_weights(
    q: Tensor, kv: LayerKV, s: AttentionParams, lengths: Sequence[int]
) -> list[Tensor]:
    """Attention weights of each sequence, float32 [H, n, n], as `OpSet.attention` computes them."""
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
class LayerOutputs:
    """Outputs of selected layers in one pass, by layer."""

    lengths: tuple[int, ...]  # of the sequences
    states: dict[int, Tensor]  # [T, E] after the layer
    # arguments of `attention_weights`
    attention: dict[int, tuple[Tensor, LayerKV, AttentionParams]]

    @classmethod
    def record(
        cls, ops: TappedOps, batch: SequenceBatch, layers: Sequence[int], *, attention: bool
    ) -> tuple[LayerOutputs, Callable[[int, Tensor], None]]:
        """(an object that the next pass fills, the argument `each` for its `WholeModel.hidden`).
        Set `ops.tap` to None before the pass is recomputed."""
        outputs, now = cls(batch.lengths, {}, {}), 0

        def tap(q: Tensor, kv: LayerKV, meta: AttentionMetadata, params: AttentionParams) -> None:
            if now in layers:
                outputs.attention[now] = q, kv, params

        def each(i: int, state: Tensor) -> None:
            nonlocal now
            now = i
            if i - 1 in layers:
                outputs.states[i - 1] = state

        ops.tap = tap if attention else None
        return outputs, each

    def weights(self, layer: int) -> list[Tensor]:
        q, kv, params = self.attention[layer]
        return attention_weights(q, kv, params, self.lengths)


class Matching(nn.Module):
    """Learned maps from the student's sizes to the teacher's, for pairs (student's layer, teacher's layer).

    States: a linear map for each pair, and each token's squared error relative to its square (after TinyBERT, Jiao et al.
    2020, Eq. 8). Attention: a learned mixture of the student's heads for each head of the teacher, and the KL of the
    attention weights.
    """

    def __init__(
        self,
        student: ModelSpec,
        teacher: ModelSpec,
        pairs: Sequence[tuple[int, int]],
        *,
        attention: bool,
    ) -> None:
        super().__init__()
        self.pairs = tuple(pairs)
        e, width = student.hidden_size, teacher.hidden_size
        self.maps = nn.ParameterList([torch.eye(width, e) for _ in pairs])
        self.mixtures = nn.ParameterList()
        self.attended = list[tuple[int, int]]()  # pairs in which both layers have attention
        for s, t in pairs if attention else ():
            a, b = student.layers[s].attention, teacher.layers[t].attention
            if a is None or b is None:
                continue
            self.attended.append((s, t))
            heads, others = a.num_heads, b.num_heads
            near = torch.arange(others) * heads // others  # each head starts as the nearest one
            self.mixtures.append(4.0 * F.one_hot(near, heads).float())

    def forward(self, student: LayerOutputs, teacher: LayerOutputs) -> tuple[Tensor, Tensor]:
        """Losses (of states, of attention): sums over tokens, means over pairs and heads.
        Attention's is 0 if it is not matched."""
        states = attention = self.maps[0].new_zeros(())
        for i, (s, t) in enumerate(self.pairs):
            wanted = teacher.states[t].detach().float()
            error = (student.states[s].float() @ self.maps[i].T - wanted).square().sum(-1)
            states = states + (error / wanted.square().sum(-1).clamp(min=1e-12)).sum()
        for (s, t), mixture in zip(self.attended, self.mixtures, strict=True):
            mix = mixture.softmax(-1)
            for ours, theirs in zip(student.weights(s), teacher.weights(t), strict=True):
                mixed = torch.einsum("ts,snl->tnl", mix, ours)
                attention = attention + F.kl_div(
                    (mixed + 1e-9).log(), theirs.detach(), reduction="sum"
                ) / len(mix)
        return states / len(self.pairs), attention / max(1, len(self.attended))


def layer_pairs(
    student: int, teacher: int, kept: Sequence[int] | None = None
) -> list[tuple[int, int]]:
    """(student's layer, teacher's layer) for each layer of the student: the layer it came from, or the one at the same
    relative depth."""
    if kept is not None:
        return list(enumerate(kept))
    return [
        (i, (i + 1) * teacher // student - 1 if student <= teacher else i * teacher // student)
        for i in range(student)
    ]
