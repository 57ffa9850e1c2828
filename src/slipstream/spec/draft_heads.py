"""What a draft head *is*, as data: a small part that guesses tokens from the states of the model it was trained for. No torch.

    EAGLE-3   one layer over the embedding of a token and what `fc` makes of three layers' states (Li et al. 2025)
    MTP       the layer that a checkpoint has behind its last one (DeepSeek-V3, arXiv:2412.19437, section 2.2)
    Medusa    heads that read the last state, one for each place behind the next token (Cai et al. 2024)

The first two go on from their own states, token by token; Medusa guesses a block in one pass. Readers are as strict as those of
models: a key of a config that could change what is computed, and that nobody reads here, is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

from slipstream.errors import CheckpointError, UnsupportedModelError
from slipstream.spec.description import ModelDescription, read_json, tensor_names
from slipstream.spec.families.base import ConfigReader
from slipstream.spec.families.builders import attention, before, gated, heads, rms, rope
from slipstream.spec.model import LayerSpec, ModelSpec, NormSpec, Shape, linear_shapes
from slipstream.spec.parameters import Placement

HeadMethod: TypeAlias = Literal["eagle3", "medusa", "mtp"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleSpec:
    """`layer` reads [embedding; state] of twice `hidden_size`; its norm `pre_attention` is the state's, `embed_norm` the
    embedding's. `aux_layers`: the states before these layers of the model (0: the embeddings) go through `fc`, side by side.
    With `norm_before_residual` the residual is the normed state. The head's tokens are `draft_vocab_size` of the model's."""

    hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    layer: LayerSpec
    norm: NormSpec
    aux_layers: tuple[int, ...]
    norm_before_residual: bool = False
    own_embedding: bool = False
    own_head: bool = True

    most_drafts: None = None

    @property
    def shapes(self) -> dict[str, Shape]:
        e = self.hidden_size
        found: dict[str, Shape] = {"embed.weight": (self.vocab_size, e)} if self.own_embedding else {}
        found["fc.weight"] = (e, len(self.aux_layers) * e)
        found |= self.norm.shapes("embed_norm")
        found |= self.layer.shapes(e)
        found["attention.qkv.weight"] = (found["attention.qkv.weight"][0], 2 * e)
        found |= self.norm.shapes("final_norm")
        return {**found, "head.weight": (self.draft_vocab_size, e)} if self.own_head else found

    def names(self, below: str = "midlayer.") -> dict[str, Placement]:
        """`below`: what stands before the layer's names in the file."""
        found = {"fc.weight": Placement("fc.weight"), "norm.weight": Placement("final_norm.weight")}
        if self.own_embedding:
            found["embed_tokens.weight"] = Placement("embed.weight")
        if self.own_head:
            found["lm_head.weight"] = Placement("head.weight")
        a, m = self.layer.attention, self.layer.mlp
        q, kv = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
        shapes, of_layer = self.shapes, dict[str, Placement]()
        for kind in ("weight", "bias"):
            parts = (("q", 0, q), ("k", q, kv), ("v", q + kv, kv))
            of_layer |= {f"self_attn.{x}_proj.{kind}": Placement(f"attention.qkv.{kind}", at, n) for x, at, n in parts}
            of_layer[f"self_attn.o_proj.{kind}"] = Placement(f"attention.out.{kind}")
            half = shapes["mlp.up.weight"][0] // 2
            of_layer[f"mlp.gate_proj.{kind}"] = Placement(f"mlp.up.{kind}", 0, half)
            of_layer[f"mlp.up_proj.{kind}"] = Placement(f"mlp.up.{kind}", half, half)
            of_layer[f"mlp.down_proj.{kind}"] = Placement(f"mlp.down.{kind}")
        assert m is not None
        norms = {"hidden_norm": "pre_attention", "input_layernorm": "embed_norm", "post_attention_layernorm": "pre_mlp"}
        of_layer |= {f"{theirs}.weight": Placement(f"{ours}.weight") for theirs, ours in norms.items()}
        return found | {f"{below}{name}": place for name, place in of_layer.items() if place.target in shapes}


@dataclass(frozen=True, slots=True, kw_only=True)
class MTPSpec:
    """`join` makes a state of [embedding; state], each through a norm of its own; `layer` is like the model's last. Without
    `own_head` the model's serves."""

    hidden_size: int
    vocab_size: int
    layer: LayerSpec
    norm: NormSpec
    own_head: bool
    layer_names: Mapping[str, Placement]
    index: int  # the layer's number in the checkpoint

    most_drafts: None = None

    @property
    def draft_vocab_size(self) -> int:
        return self.vocab_size

    @property
    def shapes(self) -> dict[str, Shape]:
        e = self.hidden_size
        found: dict[str, Shape] = {
            **self.norm.shapes("embed_norm"),
            **self.norm.shapes("hidden_norm"),
            "join.weight": (e, 2 * e),
        }
        found |= self.layer.shapes(e) | self.norm.shapes("final_norm")
        return {**found, "head.weight": (self.vocab_size, e)} if self.own_head else found

    def names(self) -> dict[str, Placement]:
        below = f"model.layers.{self.index}."
        own = {"enorm": "embed_norm", "hnorm": "hidden_norm", "eh_proj": "join", "shared_head.norm": "final_norm"}
        own |= {"shared_head.head": "head"} if self.own_head else {}
        return {f"{below}{theirs}.weight": Placement(f"{ours}.weight") for theirs, ours in own.items()} | dict(
            self.layer_names
        )


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
                found |= linear_shapes(f"{i}.blocks.{j}", self.hidden_size, self.hidden_size, self.bias)
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
                theirs = f"blocks.{i}.layers.{'.'.join(rest)}" if converted else f"{i}.{rest[0]}.linear.{rest[1]}"
            found[theirs] = Placement(target)
        return found


HeadSpec: TypeAlias = EagleSpec | MTPSpec | MedusaSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadDescription:
    """A head on disk. `names`: where its file's tensors go; `ignored` have no meaning here. `has_map`: there is a `d2t`."""

    path: Path
    spec: HeadSpec
    names: Mapping[str, Placement]
    ignored: frozenset[str] = frozenset()
    has_map: bool = False


def read_head(method: HeadMethod, path: Path, target: ModelDescription) -> HeadDescription:
    """The head at `path` (an MTP layer's is the model's own) for the model `target`. What does not fit is refused by name."""
    spec = target.spec
    if not spec.generates or spec.kind != "a decoder" or spec.embed_size is not None:
        raise UnsupportedModelError(
            f"method {method!r} needs a decoder with embeddings as wide as its layers", field="method"
        )
    if spec.cache_groups[0].kind != "full":
        raise UnsupportedModelError(
            f"method {method!r} needs layers that keep all tokens of a request; take method 'ngram' or 'suffix'",
            field="method",
        )
    if method == "mtp":
        return _read_mtp(target)
    if not (path / "config.json").is_file():
        raise CheckpointError(f"{path} holds no config.json of a draft head", field="model")
    config, names = read_json(path / "config.json"), tensor_names(path)
    _refuse_other_kinds(path, config, names)
    return (_read_eagle if method == "eagle3" else _read_medusa)(path, config, names, spec)


def _refuse_other_kinds(path: Path, config: dict[str, Any], stored: frozenset[str]) -> None:
    """Name a head of a kind that is not read, instead of its first field or tensor that is not known."""
    made_for = " ".join(map(str, (*(config.get("architectures") or ()), config.get("model_type"))))
    kind, speculator = made_for.lower().replace("_", ""), config.get("speculators_model_type")
    parallel = [key for key in ("pard_token", "ptd_token_id", "parallel_drafting") if config.get(key)]
    parallel += sorted(name for name in stored if name.endswith("mask_hidden"))
    first_of_eagle = "fc.weight" in stored and not any(name.endswith("hidden_norm.weight") for name in stored)
    found = None
    if "dflash_config" in config or "dflash" in kind or speculator == "dflash":
        found = "DFlash, which guesses a block by diffusion"
    elif parallel or "peagle" in kind or speculator == "peagle":
        found = f"P-EAGLE, which guesses all places in one pass ({', '.join(parallel) or made_for})"
    elif first_of_eagle or speculator == "eagle" or ("eagle" in kind and "eagle3" not in kind):
        found = "EAGLE-1 or 2, which reads the last layer's state alone"
    if found is not None:
        raise UnsupportedModelError(
            f"{path} is a head of {found}; Slipstream runs heads of EAGLE-3 and Medusa, and MTP layers: take one of these, make"
            " one (slipstream compress MODEL --recipe draft:eagle3), or use method 'suffix', which needs none",
            field="model",
        )


def default_aux_layers(num_layers: int) -> tuple[int, int, int]:
    """A low, a middle and a high layer, as the paper's code has them: the states before these."""
    return 2, num_layers // 2, num_layers - 3


# --- EAGLE-3 --------------------------------------------------------------------------------------------------------------


def _read_eagle(path: Path, config: dict[str, Any], stored: frozenset[str], target: ModelSpec) -> HeadDescription:
    c = ConfigReader(config, f"{path.name}/config.json")
    is_speculators = "speculators_model_type" in c or "speculators_config" in c
    if is_speculators:
        c.require("speculators_model_type", "eagle3")
        c.ignore("speculators_config", "speculators_version", "has_no_defaults_at_init", "embed_requires_grad")
        c.require("norm_before_fc", False)
        layer_config = c.part("transformer_layer_config")
        layer_config.ignore("vocab_size")
    else:
        layer_config = c
        c.require("vocab_size", target.vocab_size)
        c.require("num_nextn_predict_layers", 0)
    before_residual = c.take("norm_before_residual", bool, is_speculators)
    c.require("norm_before_fc", False)
    c.require("target_hidden_size", target.hidden_size)
    draft_vocab_size = c.size("draft_vocab_size", target.vocab_size)
    aux = _aux_layers(c, target.num_layers)
    c.ignore("target_model_type", "tie_word_embeddings")
    read = layer_config
    read.require("hidden_size", target.hidden_size)
    read.require("num_hidden_layers", 1)
    read.require("model_type", "llama", "llama3", "LlamaForCausalLMEagle3")
    h, bias = heads(read), read.take("attention_bias", bool, False)
    norm = rms(target.hidden_size, read.take("rms_norm_eps", float, 1e-6))
    position = rope(read, h.head_dim, max_position=read.size("max_position_embeddings", 2048))
    mlp = gated(read, bias=read.take("mlp_bias", bool, False))
    read.ignore("sliding_window", "tie_word_embeddings")
    if read is not c:
        read.finish()
    c.finish()
    spec = EagleSpec(
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab_size,
        layer=LayerSpec(attention=attention(h, position, qkv_bias=bias, out_bias=bias), mlp=mlp, block=before(norm)),
        norm=norm,
        aux_layers=aux,
        norm_before_residual=before_residual,
        own_embedding="embed_tokens.weight" in stored,
        own_head="lm_head.weight" in stored or not stored or draft_vocab_size != target.vocab_size,
    )
    has_map = "d2t" in stored
    if stored and not has_map and draft_vocab_size != target.vocab_size:
        raise CheckpointError(
            f"{path} lacks d2t, which says what its {draft_vocab_size} tokens are of the model's", field="d2t"
        )
    below = "layers.0." if any(name.startswith("layers.0.") for name in stored) else "midlayer."
    return HeadDescription(
        path=path, spec=spec, names=spec.names(below), ignored=frozenset(("t2d", "d2t")), has_map=has_map
    )


def _aux_layers(c: ConfigReader, num_layers: int) -> tuple[int, ...]:
    """`eagle_aux_hidden_state_layer_ids` count the states before layers; within `eagle_config` (SGLang, ModelOpt) those behind
    them."""
    given, shift = c.take("eagle_aux_hidden_state_layer_ids", list, []), 0
    if not given and "eagle_config" in c:
        inner = c.part("eagle_config")
        inner.require("use_aux_hidden_state", True)
        given, shift = inner.take("eagle_aux_hidden_state_layer_ids", list, []), 1
        inner.finish()
    ids = tuple(given) if given else default_aux_layers(num_layers)
    shift = shift if given else 0
    fits = all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i + shift <= num_layers for i in ids)
    if not fits or len(set(ids)) < len(ids) or sorted(ids) != list(ids):
        raise c.unsupported(
            "eagle_aux_hidden_state_layer_ids",
            f"must be rising numbers of the model's {num_layers} layers (found {list(ids)})",
        )
    return tuple(i + shift for i in ids)


# --- MTP ------------------------------------------------------------------------------------------------------------------


def _read_mtp(target: ModelDescription) -> HeadDescription:
    spec, family = target.spec, target.family
    if not family.mtp or target.format != "safetensors":
        raise UnsupportedModelError(
            f"method 'mtp' is for safetensors checkpoints with layers that draft (DeepSeek-V3, GLM-4.5), not for {target.name}",
            field="method",
        )
    if target.quantization is not None and target.quantization.rounds:
        raise UnsupportedModelError(
            "method 'mtp' reads layers in the model's type, and this checkpoint's weights are rounded; take another method",
            field="quantization_config",
        )
    config = read_json(target.path / "config.json")
    count = config.get("num_nextn_predict_layers", config.get("num_mtp_layers", 0))
    if count != 1:
        raise UnsupportedModelError(
            f"config.json: num_nextn_predict_layers = {count!r}: method 'mtp' runs a model with one",
            field="num_nextn_predict_layers",
        )
    n = spec.num_layers
    below, ours = f"model.layers.{n}.", f"layers.{n}."
    names = family.names(replace(spec, layers=(*spec.layers, spec.layers[-1])))
    own = {
        name: replace(p, target=p.target.removeprefix(ours)) for name, p in names.items() if p.target.startswith(ours)
    }
    stored = tensor_names(target.path)
    assert spec.final_norm is not None
    head = MTPSpec(
        hidden_size=spec.hidden_size,
        vocab_size=spec.vocab_size,
        layer=spec.layers[-1],
        norm=spec.final_norm,
        own_head=f"{below}shared_head.head.weight" in stored,
        layer_names=own,
        index=n,
    )
    ignored = frozenset(name for name in stored if not name.startswith(below)) | {f"{below}embed_tokens.weight"}
    return HeadDescription(path=target.path, spec=head, names=head.names(), ignored=ignored)


# --- Medusa ---------------------------------------------------------------------------------------------------------------


def _read_medusa(path: Path, config: dict[str, Any], stored: frozenset[str], target: ModelSpec) -> HeadDescription:
    c = ConfigReader(config, f"{path.name}/config.json")
    c.require("model_type", "medusa")
    c.require("hidden_size", target.hidden_size)
    c.require("vocab_size", target.vocab_size)
    c.require("truncated_vocab_size", target.vocab_size)
    c.ignore(
        "base_model_name_or_path", "version", "medusa_choices", "max_paths", "topk", "max_seq_len", "base_model_config"
    )
    num_heads = c.size("medusa_num_heads" if "medusa_num_heads" in c else "num_heads")
    num_layers = c.size("medusa_num_layers" if "medusa_num_layers" in c else "num_hidden_layers", 1)
    converted = any(name.removeprefix("medusa_heads.").startswith("blocks.") for name in stored)
    shared = c.take("original_lm_head", bool, False)
    c.take("medusa_fc_bias", bool, True)
    c.finish()
    if "token_map" in stored:
        raise CheckpointError(
            f"{path}: token_map (a smaller vocabulary) is not supported for Medusa heads", field="token_map"
        )
    bias = not stored or any(name.endswith(".bias") for name in stored)
    spec = MedusaSpec(
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        num_heads=num_heads,
        num_layers=num_layers,
        bias=bias,
        own_heads=not shared,
    )
    ignored = frozenset(("lm_head.weight",)) if shared else frozenset()
    return HeadDescription(path=path, spec=spec, names=spec.names(converted), ignored=ignored)
