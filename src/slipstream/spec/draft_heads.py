"""Draft heads as data: small parts that propose tokens from the states of the model that they were trained for. No torch.

    EAGLE-1, 2   one layer over what `fc` makes of a token's embedding and the last state before it (Li et al. 2024)
    EAGLE-3      one layer over the embedding of a token and what `fc` makes of three layers' states (Li et al. 2025)
    EAGLE-3.1    the same with a norm for each of these states, and the next pair reads a normed state (arXiv:2605.09992)
    P-EAGLE      the same with some layers and a mask for each further place, in one pass (arXiv:2602.01469)
    DFlash       layers over a block of masks, which see each other and the states before it (arXiv:2602.06036)
    MTP          the layer that a checkpoint has behind its last one (DeepSeek-V3, arXiv:2412.19437, section 2.2)
    Medusa       heads that read the last state, one for each place behind the next token (Cai et al. 2024)

All but the last are a `LayeredSpec`. EAGLE and MTP go on from their own states, token by token. P-EAGLE, DFlash and Medusa
guess a block in one pass. `head_readers` makes these specs of files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeAlias

from slipstream.spec.model import (
    AttentionSpec,
    DenseSpec,
    LayerSpec,
    NormSpec,
    Shape,
    linear_shapes,
)
from slipstream.spec.parameters import Placement

HeadMethod: TypeAlias = Literal["eagle", "eagle3", "peagle", "dflash", "medusa", "mtp"]

Names: TypeAlias = dict[str, Placement]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayeredSpec:
    """A head of decoder layers. `join` says how the embedding of a token meets the state before it:

    1. `attention`: the first layer's attention reads [norm(embedding); norm(state)] of twice `hidden_size` (EAGLE-3, P-EAGLE).
       With `norm_before_residual` its residual is the normed state.
    2. `product`: the product `join` makes a state of both, each through its norm if there is one (EAGLE-1 and 2, MTP).
    3. `context`: layers read embeddings. The states before them are a context, of which every layer makes keys and values
       (DFlash).

    `aux_layers`: the states before these layers of the model (0: the embeddings) go through `fc`, side by side; None: the head
    reads the final hidden states. `fc_norm`: before `fc` each of them has a norm of its own, or all have one side by side.
    `norms`: those that the head has of `embed_norm`, `hidden_norm` (the state's) and `final_norm`. With `norm_output` the next
    pair reads what the output head reads, behind `final_norm`. With `mask_token` the head guesses a block in one pass; that
    token stands for each one that is not known. The head's tokens are `draft_vocab_size` of the model's. What it has no own one
    of, embeddings and output head, is the model's.
    """

    hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    layers: tuple[LayerSpec, ...]
    norm: NormSpec
    join: Literal["attention", "product", "context"]
    norms: tuple[str, ...] = ("embed_norm", "hidden_norm", "final_norm")
    aux_layers: tuple[int, ...] | None = None
    fc_norm: Literal["each", "joint"] | None = None
    norm_output: bool = False
    join_bias: bool = False
    norm_before_residual: bool = False
    own_embedding: bool = False
    own_head: bool = True
    scales_embedding: bool = False  # as the model does
    mask_token: int | None = None
    most_drafts: int | None = None

    @property
    def has_mask_state(self) -> bool:
        """Whether a mask has a state, too: of `mask`, through `fc`."""
        return self.mask_token is not None and self.join == "attention"

    @property
    def aux_norms(self) -> dict[str, NormSpec]:
        """Those before `fc`, by name: of each state in the order of `aux_layers`, or the one of all."""
        count = len(self.aux_layers or ())
        if self.fc_norm == "joint":
            return {"input_norm": replace(self.norm, size=count * self.hidden_size)}
        return {f"fc_norm.{i}": self.norm for i in range(count)} if self.fc_norm == "each" else {}

    @property
    def shapes(self) -> dict[str, Shape]:
        e = self.hidden_size
        found: dict[str, Shape] = (
            {"embed.weight": (self.vocab_size, e)} if self.own_embedding else {}
        )
        width = 0 if self.aux_layers is None else len(self.aux_layers) * e
        if width:
            found["fc.weight"] = (e, width)
        if self.has_mask_state:
            found["mask.weight"] = (1, width)
        for name, norm in (self.aux_norms | dict.fromkeys(self.norms, self.norm)).items():
            found |= norm.shapes(name)
        if self.join == "product":
            found |= linear_shapes("join", e, 2 * e, self.join_bias)
        for i, layer in enumerate(self.layers):
            found |= {f"layers.{i}.{name}": shape for name, shape in layer.shapes(e).items()}
        if self.join == "attention":
            qkv = "layers.0.attention.qkv.weight"
            found[qkv] = (found[qkv][0], 2 * e)
        return {**found, "head.weight": (self.draft_vocab_size, e)} if self.own_head else found

    def names(self, first: str = "layers.0.", joined: str = "fc") -> Names:
        """The names of EAGLE's and DFlash's files. `first`: what stands before those of the first layer; `joined`: the product
        of embedding and state."""
        shapes, top = (
            self.shapes,
            {"fc": "fc", "norm": "final_norm", "embed_tokens": "embed", "lm_head": "head"},
        )
        top |= {norm: norm for norm in self.aux_norms}
        top = {f"{theirs}.weight": f"{ours}.weight" for theirs, ours in top.items()} | {
            "mask_hidden": "mask.weight"
        }
        if self.join == "product":
            top |= {f"{joined}.{kind}": f"join.{kind}" for kind in ("weight", "bias")}
        if self.join == "context":
            top["hidden_norm.weight"] = "hidden_norm.weight"
        else:
            top |= {
                f"{first}hidden_norm.weight": "hidden_norm.weight",
                f"{first}input_layernorm.weight": "embed_norm.weight",
            }
        found = {theirs: Placement(ours) for theirs, ours in top.items() if ours in shapes}
        for i, layer in enumerate(self.layers):
            found |= _names_of_layer(layer, f"layers.{i}." if i else first, f"layers.{i}.", shapes)
        return found


def _names_of_layer(layer: LayerSpec, theirs: str, ours: str, shapes: Mapping[str, Shape]) -> Names:
    """Those of Llama's and Qwen 3's layers."""
    a, m = layer.attention, layer.mlp
    assert isinstance(a, AttentionSpec)
    assert isinstance(m, DenseSpec)
    q, kv, half = a.q_size, a.kv_size, m.intermediate_size
    found: Names = {}
    for kind in ("weight", "bias"):
        parts = (("q", 0, q), ("k", q, kv), ("v", q + kv, kv))
        found |= {
            f"self_attn.{x}_proj.{kind}": Placement(f"attention.qkv.{kind}", at, n)
            for x, at, n in parts
        }
        found[f"self_attn.o_proj.{kind}"] = Placement(f"attention.out.{kind}")
        found[f"mlp.gate_proj.{kind}"] = Placement(f"mlp.up.{kind}", 0, half)
        found[f"mlp.up_proj.{kind}"] = Placement(f"mlp.up.{kind}", half, half)
        found[f"mlp.down_proj.{kind}"] = Placement(f"mlp.down.{kind}")
    found |= {f"self_attn.{x}_norm.weight": Placement(f"attention.{x}_norm.weight") for x in "qk"}
    norms = {"input_layernorm": "pre_attention", "post_attention_layernorm": "pre_mlp"}
    found |= {f"{x}.weight": Placement(f"{y}.weight") for x, y in norms.items()}
    placed = {
        f"{theirs}{name}": replace(place, target=f"{ours}{place.target}")
        for name, place in found.items()
    }
    return {name: place for name, place in placed.items() if place.target in shapes}


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaSpec:
    """`num_heads` times: `num_layers` residual blocks x + silu(linear(x)), and an output head. Head i guesses the token i + 2
    places behind the state's own."""

    hidden_size: int
    vocab_size: int
    num_heads: int
    num_layers: int
    bias: bool
    own_heads: bool = True  # else the model's output head serves all

    @property
    def most_drafts(self) -> int:
        return self.num_heads

    @property
    def draft_vocab_size(self) -> int:
        return self.vocab_size

    @property
    def shapes(self) -> dict[str, Shape]:
        found: dict[str, Shape] = {}
        for i in range(self.num_heads):
            for j in range(self.num_layers):
                found |= linear_shapes(
                    f"{i}.blocks.{j}", self.hidden_size, self.hidden_size, self.bias
                )
            if self.own_heads:
                found[f"{i}.head.weight"] = (self.vocab_size, self.hidden_size)
        return found

    def names(self, converted: bool = False) -> dict[str, Placement]:
        """The authors' names, or those of vLLM's converted form."""
        found: dict[str, Placement] = {}
        for target in self.shapes:
            i, part, *rest = target.split(".")
            if part == "head":
                theirs = f"lm_heads.{i}.weight" if converted else f"{i}.{self.num_layers}.weight"
            else:
                theirs = (
                    f"blocks.{i}.layers.{'.'.join(rest)}"
                    if converted
                    else f"{i}.{rest[0]}.linear.{rest[1]}"
                )
            found[theirs] = Placement(target)
        return found


HeadSpec: TypeAlias = LayeredSpec | MedusaSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadDescription:
    """A head on disk. `names`: where its file's tensors go; `ignored` have no meaning here. `has_map`: there is a `d2t` or
    a `t2d`."""

    method: HeadMethod
    path: Path
    spec: HeadSpec
    names: Mapping[str, Placement]
    ignored: frozenset[str] = frozenset()
    has_map: bool = False


WRAPPED = "model."
"""What some writers put before the names of all tensors but the output head's."""


def default_aux_layers(num_layers: int) -> tuple[int, int, int]:
    """A low, a middle and a high layer, as the paper's code has them: the states before these."""
    return 2, num_layers // 2, num_layers - 3
