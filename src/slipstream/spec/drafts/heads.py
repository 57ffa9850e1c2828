"""Draft heads as data: small parts that propose tokens from the states of the model that they were
trained for.

    EAGLE-1, 2   one layer over a product (`fc`) of a token's embedding and the state before it
                 (Li et al. 2024)
    EAGLE-3      one layer over a token's embedding and a product (`fc`) of three layers' states
                 (Li et al. 2025)
    EAGLE-3.1    the same with a norm for each of these states; the next pair reads a normed state
                 (arXiv:2605.09992)
    P-EAGLE      the same with some layers and a mask for each further place, in one pass
                 (arXiv:2602.01469)
    DFlash       layers over a block of masks, which attend to each other and to the states before
                 it (arXiv:2602.06036)
    MTP          a layer that a model's checkpoint has in addition to its own
                 (DeepSeek-V3, arXiv:2412.19437, section 2.2)
    Medusa       heads that read the last state, one for each place after the next token
                 (Cai et al. 2024)

All but the last are a `LayeredSpec`. EAGLE and MTP continue from their own states, token by token.
P-EAGLE, DFlash and Medusa draft a block in one pass. `head_readers` and `mtp` make these specs of files. No
torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal, TypeAlias

from slipstream.spec.description import PartDescription
from slipstream.spec.model import (
    AttentionSpec,
    DenseSpec,
    LayerSpec,
    NormSpec,
    Shape,
    linear_shapes,
)
from slipstream.spec.parameters import Placement

FileMethod: TypeAlias = Literal["eagle", "eagle3", "peagle", "dflash", "medusa"]
"""Methods of heads that have a checkpoint of their own."""
HeadMethod: TypeAlias = FileMethod | Literal["mtp"]
CONTINUES: dict[FileMethod, bool] = {
    "eagle": True,
    "eagle3": True,
    "peagle": False,
    "dflash": False,
    "medusa": False,
}
"""Whether a method drafts autoregressively from its own states. Such a method can start before the
host knows which drafts were accepted."""
FILE_METHODS: tuple[FileMethod, ...] = tuple(CONTINUES)
WITHOUT_EMBEDDINGS: tuple[HeadMethod, ...] = ("medusa",)
"""Methods whose heads read no token's embedding, so that a last pipeline stage needs no embeddings for them."""

Names: TypeAlias = dict[str, Placement]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayeredSpec:
    """A draft head made of decoder layers.

    `join` says how the head combines a token's embedding with the state before it:

    1. `attention`: the first layer's attention reads [norm(embedding); norm(state)], twice
       `hidden_size` wide (EAGLE-3, P-EAGLE). With `norm_before_residual` its residual is the normed
       state.
    2. `product`: the product `join` makes one state of both, each after its norm if there is one
       (EAGLE-1 and 2, MTP).
    3. `context`: layers read embeddings. The earlier states are a context, of which every layer
       makes keys and values (DFlash).

    The fields:

    - `aux_layers`: `fc` reads the concatenated states before these layers of the model (0: the
      embeddings). None: the head reads the final hidden states.
    - `fc_norm`: before `fc`, each of these states has its own norm, or all together have one.
    - `norms`: the norms that the head has, of `embed_norm`, `hidden_norm` (the state's) and
      `final_norm`.
    - `state_first`: the product `join` reads [state; embedding].
    - `norm_output`: the next pair reads the output head's input, after `final_norm`.
    - `mask_token`: the head drafts a block in one pass; this token replaces each unknown one.
    - `draft_vocab_size`: the head predicts this many of the model's tokens.
    - `own_embedding`, `own_head`: without them the model's embeddings and output head are used.
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
    scales_embedding: bool = False  # multiplies embeddings by the target model's factor
    state_first: bool = False
    mask_token: int | None = None
    most_drafts: int | None = None

    @property
    def read_layers(self) -> tuple[int, ...]:
        """Indices of the model's layers whose inputs the head reads, in order."""
        return tuple(sorted(set(self.aux_layers or ())))

    @property
    def has_mask_state(self) -> bool:
        """Whether the mask token has its own hidden state: the parameter `mask`, added after `fc`."""
        return self.mask_token is not None and self.join == "attention"

    @property
    def aux_norms(self) -> dict[str, NormSpec]:
        """Norms before `fc` by name: one for each state, in the order of `aux_layers`, or one joint
        norm."""
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
        """The names in EAGLE's and DFlash's files. `first`: prefix of the first layer's names;
        `joined`: the product of embedding and state."""
        shapes = self.shapes
        top = {"fc": "fc", "norm": "final_norm", "embed_tokens": "embed", "lm_head": "head"}
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
    """Placements of the parameters of a layer named like Llama's or Qwen 3's."""
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
    """Medusa heads. Each is `num_layers` residual blocks x + silu(linear(x)) followed by an output
    head. Head i drafts the token i + 2 positions after that of the hidden state."""

    hidden_size: int
    vocab_size: int
    num_heads: int
    num_layers: int
    bias: bool
    own_heads: bool = True  # False: all heads share the model's output head
    read_layers: ClassVar[tuple[int, ...]] = ()

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
        """Placements of the parameters by the names in the authors' files, or (`converted`) in vLLM's."""
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
    """A draft head on disk. `names`: placement of each tensor of its file. `ignored`: patterns of tensors
    without effect. `has_map`: the file has a token map `d2t` or `t2d`. `source`: for an MTP head, the part of
    the target model's checkpoint that holds it, which the model's loader reads."""

    method: HeadMethod
    path: Path
    spec: HeadSpec
    names: Mapping[str, Placement]
    ignored: frozenset[str] = frozenset()
    has_map: bool = False
    source: PartDescription | None = None


WRAPPED = "model."
"""Prefix that some writers put before all tensor names except the output head's."""


def default_aux_layers(num_layers: int) -> tuple[int, int, int]:
    """Default of the EAGLE-3 authors' code: the inputs of a low, a middle and a high layer."""
    return 2, num_layers // 2, num_layers - 3
