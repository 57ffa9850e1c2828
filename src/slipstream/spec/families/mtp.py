"""Multi-token-prediction (MTP) layers as a family's checkpoints store them. No torch.

A module is a projection of a token's embedding and the previous hidden state, each normed, then one
or two layers like the model's, and a final norm (`spec.drafts.heads`). Families differ in names, in
the order of the two inputs, and in the state from which a second draft continues.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from slipstream.spec.model import LayerSpec, ModelSpec
from slipstream.spec.parameters import Transform

Config: TypeAlias = Mapping[str, Any]


def last_layer(spec: ModelSpec, config: Config) -> tuple[LayerSpec, ...]:
    """The single layer of an MTP module that is like the model's last layer."""
    return spec.layers[-1:]


@dataclass(frozen=True, slots=True, kw_only=True)
class MTPFormat:
    """How a family's checkpoints store MTP modules.

    - `counts`: config keys; the first one present gives the number of modules. `default`: their
      number if none is present.
    - `layers(spec, config)`: the layers of a module.
    - `renamed`: (prefix of a layer's names in the family's table for a model of these layers alone,
      prefix of the module's names in the checkpoint). {n} stands for the number of the model's
      layers, {last} for the number of the module's last layer in its names.
    - `around`: the checkpoint's names of `embed_norm`, `hidden_norm`, `join`, `final_norm` and,
      where a module may have an output head of its own, of `head`.
    - `copies`: names of copies of the model's embeddings, which are not read.
    - `norm_output`: a second draft continues from the state after the last norm.
    - `state_first`: the projection reads [state; embedding], not [embedding; state].
    - `norms`: how the norms of `around` are stored.
    """

    counts: tuple[str, ...]
    around: Mapping[str, str]
    renamed: tuple[str, str]
    layers: Callable[[ModelSpec, Config], tuple[LayerSpec, ...]] = last_layer
    default: int = 0
    copies: tuple[str, ...] = ()
    norm_output: bool = True
    state_first: bool = False
    norms: Transform | None = None

    def count(self, config: Config) -> Any:
        return next((config[k] for k in self.counts if config.get(k) is not None), self.default)


NEXTN = "model.layers.{n}."
DEEPSEEK = MTPFormat(
    counts=("num_nextn_predict_layers", "num_mtp_layers"),
    renamed=("model.layers.0.", NEXTN),
    around={
        "embed_norm": f"{NEXTN}enorm",
        "hidden_norm": f"{NEXTN}hnorm",
        "join": f"{NEXTN}eh_proj",
        "final_norm": f"{NEXTN}shared_head.norm",
        "head": f"{NEXTN}shared_head.head",
    },
    copies=(f"{NEXTN}embed_tokens.weight",),
    norm_output=False,
)
"""Format of DeepSeek V3 (arXiv:2412.19437, section 2.2), which GLM-4.5 and Kimi K2 share."""

LING = MTPFormat(
    counts=DEEPSEEK.counts,
    renamed=DEEPSEEK.renamed,
    around={
        **{key: DEEPSEEK.around[key] for key in ("embed_norm", "hidden_norm", "join")},
        "final_norm": f"{NEXTN}final_layernorm",
    },
    copies=(f"{NEXTN}word_embeddings.weight",),
)
"""Format of Ling 2 and 3, which continue from the state after the final norm."""

LLAMA_CPP = MTPFormat(
    counts=("nextn_predict_layers",),
    renamed=("blk.0.", "blk.{n}."),
    around={
        "embed_norm": "blk.{n}.nextn.enorm",
        "hidden_norm": "blk.{n}.nextn.hnorm",
        "join": "blk.{n}.nextn.eh_proj",
        "final_norm": "blk.{n}.nextn.shared_head_norm",
        "head": "blk.{n}.nextn.shared_head_head",
    },
    copies=("blk.{n}.nextn.embed_tokens.weight",),
    norm_output=False,
)
"""llama.cpp's names for the same modules."""
