"""Draft heads with autograd, for training: plain torch over padded sequences [B, L].

EAGLE-3 is trained the way it drafts (its "training-time test", Li et al. 2025, section 3.2). Step 0
reads the model's states. Step s reads, at each position, the head's own state of step s − 1 there,
and the token s positions later. So at step s the query of position p predicts like one at position
p + s. It attends to positions 0 … p of step 0, and to position p of steps 1 … s, like a chain of
drafts. The target of each step is the model's prediction among the head's tokens; step s has the
weight 0.8^s."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from slipstream.kernels.positions import rope_table
from slipstream.model.draft_heads import as_model
from slipstream.model.sequences import register
from slipstream.spec.drafts.heads import LayeredSpec, MedusaSpec, default_aux_layers
from slipstream.spec.families.builders import HeadCounts, attention
from slipstream.spec.model import (
    AttentionSpec,
    DenseSpec,
    LayerSpec,
    ModelSpec,
    NormSpec,
    RopeSpec,
    SequentialBlock,
)

DECAY = 0.8
"""Ratio of a step's weight to that of the step before."""


class EagleNet(nn.Module):
    """EAGLE-3's head. `parameters` are by the names of `spec.shapes`; `embed` [V, E] is the model's
    embedding table, which is not trained."""

    def __init__(
        self, spec: LayeredSpec, parameters: Mapping[str, Tensor], embed: Tensor, *, max_len: int
    ) -> None:
        super().__init__()
        self.spec = spec
        register(self, {name: nn.Parameter(value) for name, value in parameters.items()})
        position = spec.layers[0].self_attention.position
        assert isinstance(position, RopeSpec)
        self.register_buffer(
            "angles", rope_table(position, max_len).to(embed.device), persistent=False
        )
        self.register_buffer("embed", embed, persistent=False)

    def forward(self, token_ids: Tensor, aux: Tensor, num_steps: int) -> list[Tensor]:
        """token_ids [B, L], the model's states before `aux_layers`, concatenated [B, L, 3E] → for
        each step s the hidden states [B, L, E] from which the output head predicts, at position p,
        token p + s + 2."""
        if norms := self.spec.aux_norms:
            parts = zip(aux.chunk(len(norms), -1), norms, strict=True)
            aux = torch.cat([self.norm(part, name) for part, name in parts], -1)
        states, found = F.linear(aux, self.of("fc.weight")), list[Tensor]()
        first: tuple[Tensor, Tensor] | None = None
        own: list[tuple[Tensor, Tensor]] = []
        for step in range(num_steps):
            tokens = F.pad(token_ids[:, 1 + step :], (0, 1 + step))
            hidden, states, keys = self.layer(
                F.embedding(tokens, self.embed),  # type: ignore[arg-type]
                states,
                first,
                own,
                step,
            )
            first, own = (keys, own) if first is None else (first, [*own, keys])
            found.append(hidden)
        return found

    def layer(
        self,
        embedded: Tensor,
        states: Tensor,
        first: tuple[Tensor, Tensor] | None,
        own: list[tuple[Tensor, Tensor]],
        step: int,
    ) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
        """Run a layer. Returns (normed hidden states, the states for the next step, its keys and
        values [B, K, L, D])."""
        rows = self.norm(states, "hidden_norm")
        residual = rows if self.spec.norm_before_residual else states
        a = self.spec.layers[0].self_attention
        qkv = F.linear(
            torch.cat((self.norm(embedded, "embed_norm"), rows), -1),
            self.of("layers.0.attention.qkv.weight"),
        )
        heads = qkv.unflatten(-1, (-1, a.head_dim)).transpose(1, 2)
        q, k, v = heads.split((a.num_heads, a.num_kv_heads, a.num_kv_heads), 1)
        q, k = self.rotate(q, step), self.rotate(k, step)
        group = a.num_heads // a.num_kv_heads
        if first is None:
            keys, values = (t.repeat_interleave(group, 1) for t in (k, v))
            mixed = F.scaled_dot_product_attention(q, keys, values, is_causal=True, scale=a.scale)
        else:
            mixed = along(q, first, [*own, (k, v)], group, a.scale)
        x = residual + F.linear(
            mixed.transpose(1, 2).flatten(2), self.of("layers.0.attention.out.weight")
        )
        gate, up = F.linear(
            self.norm(x, "layers.0.pre_mlp"), self.of("layers.0.mlp.up.weight")
        ).chunk(2, -1)
        x = x + F.linear(F.silu(gate) * up, self.of("layers.0.mlp.down.weight"))
        hidden = self.norm(x, "final_norm")
        return hidden, hidden if self.spec.norm_output else x, (k, v)

    def norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(
            x.float(), x.shape[-1:], self.of(f"{name}.weight").float(), self.spec.norm.eps
        )

    def rotate(self, x: Tensor, step: int) -> Tensor:
        cos, sin = self.angles[step : step + x.shape[2]].chunk(2, -1)  # type: ignore[index]
        a, b = x.float().chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)

    def of(self, name: str) -> Tensor:
        return self.get_parameter(name)

    def logits(self, hidden: Tensor, place: int) -> Tensor:
        return F.linear(hidden, self.of("head.weight"))


def along(
    q: Tensor,
    first: tuple[Tensor, Tensor],
    own: list[tuple[Tensor, Tensor]],
    group: int,
    scale: float,
) -> Tensor:
    """Attention of queries [B, H, L, D] over the keys of step 0 up to each query's position, and
    over each later step's key at the query's own position."""
    k, v = (t.repeat_interleave(group, 1) for t in first)
    length = q.shape[2]
    ahead = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    scores = [(q @ k.mT).masked_fill(ahead, -torch.inf)]
    scores += [(q * key.repeat_interleave(group, 1)).sum(-1, keepdim=True) for key, _ in own]
    weights = (torch.cat(scores, -1).float() * scale).softmax(-1).to(q.dtype)
    mixed = weights[..., :length] @ v
    for i, (_, value) in enumerate(own):
        mixed = mixed + weights[..., length + i, None] * value.repeat_interleave(group, 1)
    return mixed


class MedusaNet(nn.Module):
    """Medusa heads: blocks before the model's own output head (Cai et al. 2024, "Medusa-1")."""

    def __init__(
        self, spec: MedusaSpec, parameters: Mapping[str, Tensor], rows: Tensor, model: ModelSpec
    ) -> None:
        """Use `rows`, those of `model`'s output head for the tokens that training counts; they are
        not trained."""
        super().__init__()
        self.spec, self.model = spec, model
        register(self, {f"head{name}": nn.Parameter(value) for name, value in parameters.items()})
        self.register_buffer("rows", rows, persistent=False)

    def forward(self, token_ids: Tensor, states: Tensor, num_steps: int) -> list[Tensor]:
        """The model's final states [B, L, E] → for each head i the states that predict, at position p, token p + i +
        2."""
        found = []
        for i in range(num_steps):
            x = states
            for j in range(self.spec.num_layers):
                name = f"head{i}.blocks.{j}"
                x = x + F.silu(
                    F.linear(
                        x, self.get_parameter(f"{name}.weight"), self.get_parameter(f"{name}.bias")
                    )
                )
            found.append(x)
        return found

    def logits(self, hidden: Tensor, place: int) -> Tensor:
        logits: Tensor = as_model(F.linear(hidden, self.rows).float(), self.model)  # type: ignore[arg-type]
        return logits


def losses(
    net: EagleNet | MedusaNet,
    hidden: list[Tensor],
    wanted: Tensor,
    counted: Tensor,
    final: Tensor | None = None,
    state_weight: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Weighted sum of the steps' losses, and for each step (number of positions whose most likely
    token is the model's, number of counted positions).

    `wanted` [B, L, D]: the model's logits at each position for the head's tokens. `counted` [B, L]:
    mask of the positions whose next token is one of the head's. With `state_weight` the states also
    match `final` [B, L, E], from which the model computes its logits (smooth L1, as EAGLE-1 and 2
    are trained)."""
    total, hits, counts = wanted.new_zeros(()), [], []
    for step, h in enumerate(hidden):
        shift = step + 1
        if h.shape[1] <= shift:
            break
        rows = counted[:, shift:]
        target = wanted[:, shift:][rows]
        logits = net.logits(h[:, :-shift][rows], step).float()
        weight = DECAY**step
        if len(target):
            total = total - weight * (target.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean()
        if len(target) and final is not None and state_weight:
            like = F.smooth_l1_loss(h[:, :-shift][rows].float(), final[:, shift:][rows])
            total = total + weight * state_weight * like
        hits.append((logits.argmax(-1) == target.argmax(-1)).sum())
        counts.append(rows.sum())
    return total, torch.stack(hits), torch.stack(counts)


# --- Initial weights ------------------------------------------------------------------------------------------------


def eagle_for(
    spec: ModelSpec,
    draft_vocab_size: int,
    *,
    fc_norm: Literal["each", "joint"] | None = None,
    norm_output: bool = False,
) -> LayeredSpec:
    """Head whose layer has the shape of the model's last layer, if that is of the usual kind; else
    usual proportions."""
    last = spec.layers[-1]
    a, m, e = last.self_attention, last.feed_forward, spec.hidden_size
    head_dim = 64 if e % 64 == 0 else e
    heads = HeadCounts(e // head_dim, e // head_dim, head_dim)
    if isinstance(a, AttentionSpec):
        heads = HeadCounts(a.num_heads, a.num_kv_heads, a.head_dim)
    theta = a.position.theta if isinstance(a.position, RopeSpec) else 10000.0
    position = RopeSpec(theta=theta, rotary_dim=heads.head_dim)
    wide = (
        m.intermediate_size if isinstance(m, DenseSpec) and m.gated else -(-8 * e // 3 // 64) * 64
    )
    norm = NormSpec(
        kind="rms", size=e, eps=spec.final_norm.eps if spec.final_norm is not None else 1e-6
    )
    layer = LayerSpec(
        attention=attention(heads, position),
        mlp=DenseSpec(intermediate_size=wide, activation="silu"),
        block=SequentialBlock(pre_mlp=norm),
    )
    aux = tuple(
        sorted({min(max(0, i), spec.num_layers) for i in default_aux_layers(spec.num_layers)})
    )
    return LayeredSpec(
        hidden_size=e,
        vocab_size=spec.vocab_size,
        draft_vocab_size=draft_vocab_size,
        layers=(layer,),
        norm=norm,
        join="attention",
        aux_layers=aux,
        fc_norm=fc_norm,
        norm_output=norm_output,
    )


def eagle_start(
    head: LayeredSpec, spec: ModelSpec, model: Mapping[str, Tensor], rows: Tensor, seed: int
) -> dict[str, Tensor]:
    """Initial parameters of an EAGLE-3 head. `fc` passes the last aux state unchanged (a norm
    before it is the model's last norm). The layer is the model's last one, if the shapes are equal.
    The output head has the model's `rows` for the head's tokens, with the scale of its logits.
    Weights that read embeddings are random and small."""
    g = torch.Generator().manual_seed(seed)
    e, last = head.hidden_size, f"layers.{spec.num_layers - 1}."
    values = {
        n: torch.ones(s) if len(s) == 1 else torch.randn(s, generator=g) * 0.02
        for n, s in head.shapes.items()
    }
    values["fc.weight"][:, -e:] += torch.eye(e)
    values["head.weight"] = rows.float().cpu() * spec.logit_scale
    for name in (
        "attention.out.weight",
        "mlp.up.weight",
        "mlp.down.weight",
        "attention.qkv.weight",
    ):
        own = model.get(f"{last}{name}")
        if own is None:
            continue
        into = values[f"layers.0.{name}"]
        into = into[:, e:] if name == "attention.qkv.weight" else into
        if own.shape == into.shape:
            into.copy_(own)
    for ours, theirs in (
        ("hidden_norm", f"{last}pre_attention"),
        ("layers.0.pre_mlp", f"{last}pre_mlp"),
        ("final_norm", "final_norm"),
        *((name, "final_norm") for name in list(head.aux_norms)[-1:]),
    ):
        own, norm = model.get(f"{theirs}.weight"), spec.final_norm
        if own is not None and norm is not None and norm.kind == "rms":
            values[f"{ours}.weight"][-e:] = own.float().cpu() + norm.weight_offset
    return values


def medusa_for(spec: ModelSpec, num_heads: int) -> MedusaSpec:
    return MedusaSpec(
        hidden_size=spec.hidden_size,
        vocab_size=spec.vocab_size,
        num_heads=num_heads,
        num_layers=1,
        bias=True,
        own_heads=False,
    )


def medusa_start(head: MedusaSpec) -> dict[str, Tensor]:
    """Initial blocks of zeros: each head starts as the model's own output head."""
    return {name: torch.zeros(shape) for name, shape in head.shapes.items()}
