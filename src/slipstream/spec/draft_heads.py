"""What a draft head *is*, as data: a small part that guesses tokens from the states of the model it was trained for. No torch.

    EAGLE-1, 2   one layer over what `fc` makes of a token's embedding and the last state before it (Li et al. 2024)
    EAGLE-3      one layer over the embedding of a token and what `fc` makes of three layers' states (Li et al. 2025)
    EAGLE-3.1    the same with a norm for each of these states, and the next pair reads a normed state (arXiv:2605.09992)
    P-EAGLE      the same with some layers and a mask for each further place, in one pass (arXiv:2602.01469)
    DFlash       layers over a block of masks, which see each other and the states before it (arXiv:2602.06036)
    MTP          the layer that a checkpoint has behind its last one (DeepSeek-V3, arXiv:2412.19437, section 2.2)
    Medusa       heads that read the last state, one for each place behind the next token (Cai et al. 2024)

All but the last are a `LayeredSpec`. EAGLE and MTP go on from their own states, token by token. P-EAGLE, DFlash and Medusa
guess a block in one pass. Readers are as strict as those of models: a key of a config that could change what is computed, and
that nobody reads here, is refused by name.
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
from slipstream.spec.model import (
    AttentionSpec,
    DenseSpec,
    LayerSpec,
    ModelSpec,
    NormSpec,
    QKNormSpec,
    SequentialBlock,
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
    reads the final hidden states. With `fc_norm` each of them has a norm of its own before `fc`. `norms`: those that the head
    has of `embed_norm`, `hidden_norm` (the state's) and `final_norm`. With `norm_output` the next pair reads what the output
    head reads, behind `final_norm`. With `mask_token` the head guesses a block in one pass; that token stands for each one that
    is not known. The head's tokens are `draft_vocab_size` of the model's. What it has no own one of, embeddings and output
    head, is the model's.
    """

    hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    layers: tuple[LayerSpec, ...]
    norm: NormSpec
    join: Literal["attention", "product", "context"]
    norms: tuple[str, ...] = ("embed_norm", "hidden_norm", "final_norm")
    aux_layers: tuple[int, ...] | None = None
    fc_norm: bool = False
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
    def aux_norms(self) -> dict[int, str]:
        """By layer of `aux_layers`: the name of its norm before `fc`."""
        return {layer: f"fc_norm.{i}" for i, layer in enumerate(self.aux_layers or ())} if self.fc_norm else {}

    @property
    def shapes(self) -> dict[str, Shape]:
        e = self.hidden_size
        found: dict[str, Shape] = {"embed.weight": (self.vocab_size, e)} if self.own_embedding else {}
        width = 0 if self.aux_layers is None else len(self.aux_layers) * e
        if width:
            found["fc.weight"] = (e, width)
        if self.has_mask_state:
            found["mask.weight"] = (1, width)
        for name in (*self.aux_norms.values(), *self.norms):
            found |= self.norm.shapes(name)
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
        shapes, top = self.shapes, {"fc": "fc", "norm": "final_norm", "embed_tokens": "embed", "lm_head": "head"}
        top |= {norm: norm for norm in self.aux_norms.values()}
        top = {f"{theirs}.weight": f"{ours}.weight" for theirs, ours in top.items()} | {"mask_hidden": "mask.weight"}
        if self.join == "product":
            top |= {f"{joined}.{kind}": f"join.{kind}" for kind in ("weight", "bias")}
        if self.join == "context":
            top["hidden_norm.weight"] = "hidden_norm.weight"
        else:
            top |= {f"{first}hidden_norm.weight": "hidden_norm.weight", f"{first}input_layernorm.weight": "embed_norm.weight"}
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
        found |= {f"self_attn.{x}_proj.{kind}": Placement(f"attention.qkv.{kind}", at, n) for x, at, n in parts}
        found[f"self_attn.o_proj.{kind}"] = Placement(f"attention.out.{kind}")
        found[f"mlp.gate_proj.{kind}"] = Placement(f"mlp.up.{kind}", 0, half)
        found[f"mlp.up_proj.{kind}"] = Placement(f"mlp.up.{kind}", half, half)
        found[f"mlp.down_proj.{kind}"] = Placement(f"mlp.down.{kind}")
    found |= {f"self_attn.{x}_norm.weight": Placement(f"attention.{x}_norm.weight") for x in "qk"}
    norms = {"input_layernorm": "pre_attention", "post_attention_layernorm": "pre_mlp"}
    found |= {f"{x}.weight": Placement(f"{y}.weight") for x, y in norms.items()}
    placed = {f"{theirs}{name}": replace(place, target=f"{ours}{place.target}") for name, place in found.items()}
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


HeadSpec: TypeAlias = LayeredSpec | MedusaSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadDescription:
    """A head on disk. `names`: where its file's tensors go; `ignored` have no meaning here. `has_map`: there is a `d2t`."""

    method: HeadMethod
    path: Path
    spec: HeadSpec
    names: Mapping[str, Placement]
    ignored: frozenset[str] = frozenset()
    has_map: bool = False


WRAPPED = "model."
"""What some writers put before the names of all tensors but the output head's."""

KINDS: dict[HeadMethod, str] = {
    "eagle": "EAGLE-1 or 2, which reads the last layer's state alone",
    "eagle3": "EAGLE-3",
    "peagle": "P-EAGLE, which guesses all places in one pass",
    "dflash": "DFlash, which guesses a block of masks",
    "medusa": "Medusa",
}


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
    config = read_json(path / "config.json")
    names = frozenset(name.removeprefix(WRAPPED) for name in tensor_names(path))
    found = _kind_of(config, names)
    if found not in (None, method):
        raise UnsupportedModelError(f"{path} is a head of {KINDS[found]}: take method {found!r}", field="method")
    if method == "medusa":
        return _read_medusa(path, config, names, spec)
    if method == "eagle":
        return _read_eagle(path, config, names, spec)
    if method == "dflash":
        return _read_dflash(path, config, names, spec)
    return _read_eagle3(method, path, config, names, spec)


def _kind_of(config: dict[str, Any], stored: frozenset[str]) -> HeadMethod | None:
    """The kind of a head, so that its method can be named; None: neither config nor tensors tell."""
    made_for = " ".join(map(str, (*(config.get("architectures") or ()), config.get("model_type"))))
    kind, speculator = made_for.lower().replace("_", ""), config.get("speculators_model_type")
    for known in KINDS:
        if speculator == known:
            return known
    if "dflash_config" in config or "dflash" in kind:
        return "dflash"
    if any(config.get(key) for key in ("pard_token", "ptd_token_id", "parallel_drafting")) or "mask_hidden" in stored:
        return "peagle"
    if "medusa" in kind or "medusa_num_heads" in config:
        return "medusa"
    if "fc.weight" in stored and not any(name.endswith("hidden_norm.weight") for name in stored):
        return "eagle"
    if "eagle" in kind:
        return "eagle3" if "eagle3" in kind else "eagle"
    return None


def default_aux_layers(num_layers: int) -> tuple[int, int, int]:
    """A low, a middle and a high layer, as the paper's code has them: the states before these."""
    return 2, num_layers // 2, num_layers - 3


def _opened(
    path: Path, config: dict[str, Any], target: ModelSpec, kind: HeadMethod
) -> tuple[ConfigReader, ConfigReader, bool]:
    """(the config, its part about the layers, whether it is of the format `speculators`)"""
    c = ConfigReader(config, f"{path.name}/config.json")
    is_speculators = "speculators_model_type" in c or "speculators_config" in c
    if is_speculators:
        c.require("speculators_model_type", kind)
        c.ignore("speculators_config", "speculators_version", "has_no_defaults_at_init", "embed_requires_grad")
    read = c.part("transformer_layer_config") if is_speculators else c
    if kind == "eagle" and isinstance(config.get("model"), dict):  # as vLLM has it
        read = c.part("model")
        c.require("truncated_vocab_size", target.vocab_size)
    c.require("target_hidden_size", target.hidden_size)
    c.ignore("target_model_type", "tie_word_embeddings")
    read.require("hidden_size", target.hidden_size)
    read.ignore("sliding_window", "max_window_layers", "tie_word_embeddings")
    read.require("use_sliding_window", False)
    return c, read, is_speculators


def _layer(
    read: ConfigReader, target: ModelSpec, *, qkv_bias: str = "attention_bias", **more: Any
) -> tuple[LayerSpec, NormSpec]:
    """(a layer with a norm before attention and before the MLP, that norm)"""
    h = heads(read)
    out_bias = read.take("attention_bias", bool, False)
    norm = rms(target.hidden_size, read.take("rms_norm_eps", float, 1e-6))
    position = rope(read, h.head_dim, max_position=read.size("max_position_embeddings", 2048))
    mlp = gated(read, bias=read.take("mlp_bias", bool, False))
    own = attention(h, position, qkv_bias=read.take(qkv_bias, bool, out_bias), out_bias=out_bias, **more)
    return LayerSpec(attention=own, mlp=mlp, block=before(norm)), norm


def _without(layer: LayerSpec, norm: NormSpec) -> LayerSpec:
    """The layer without a norm of its own before attention."""
    return replace(layer, block=SequentialBlock(pre_mlp=norm))


def _made(
    method: HeadMethod,
    path: Path,
    readers: tuple[ConfigReader, ConfigReader],
    stored: frozenset[str],
    target: ModelSpec,
    *,
    first: str = "layers.0.",
    joined: str = "fc",
    draft_vocab_size: int,
    **parts: Any,
) -> HeadDescription:
    """The head with these `parts` of its spec, and with what its file has (`stored`) of embeddings, output head and map of
    tokens. No key of its config may be left."""
    for reader in dict.fromkeys(readers):
        reader.finish()
    has_map, has_all = "d2t" in stored, draft_vocab_size == target.vocab_size
    if stored and not has_map and not has_all:
        raise CheckpointError(
            f"{path} lacks d2t, which says what its {draft_vocab_size} tokens are of the model's", field="d2t"
        )
    spec = LayeredSpec(
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab_size,
        own_embedding="embed_tokens.weight" in stored,
        own_head="lm_head.weight" in stored or not has_all or (not stored and method in ("eagle3", "peagle")),
        **parts,
    )
    ignored = frozenset(("t2d", "d2t"))
    names = spec.names(first, joined)
    return HeadDescription(method=method, path=path, spec=spec, names=names, ignored=ignored, has_map=has_map)


# --- EAGLE-1 and 2 --------------------------------------------------------------------------------------------------------


def _read_eagle(path: Path, config: dict[str, Any], stored: frozenset[str], target: ModelSpec) -> HeadDescription:
    """The authors' files, vLLM's (the same config below `model`), and those of `speculators`. Embeddings and output head in the
    file are copies of the model's, since neither was trained."""
    c, read, is_speculators = _opened(path, config, target, "eagle")
    if is_speculators:
        c.require("layernorms", False)
        c.require("transformer_layer_architecture", "LlamaDecoderLayer")
    read.require("vocab_size", target.vocab_size)
    read.require("model_type", "llama", "eagle", "mixtral", "qwen2")
    said = [part.maybe(key, bool) for part in (c, read) for key in ("bias", "eagle_fc_bias", "fusion_bias")]
    joined = "fusion_fc" if is_speculators else "fc"
    bias = next((x for x in said if x is not None), f"{joined}.bias" in stored)
    count = read.size("num_hidden_layers", 1)
    layer, norm = _layer(read, target, qkv_bias="qkv_bias")
    copies = frozenset(("embed_tokens.weight", "lm_head.weight"))
    made = _made(
        "eagle",
        path,
        (c, read),
        stored - copies,
        target,
        first="transformer." if is_speculators else "layers.0.",
        joined=joined,
        draft_vocab_size=target.vocab_size,
        layers=(_without(layer, norm), *(layer,) * (count - 1)),
        norm=norm,
        join="product",
        norms=(),
        join_bias=bias,
    )
    return replace(made, ignored=copies)


# --- EAGLE-3 and P-EAGLE --------------------------------------------------------------------------------------------------


def _read_eagle3(
    method: HeadMethod, path: Path, config: dict[str, Any], stored: frozenset[str], target: ModelSpec
) -> HeadDescription:
    c, read, is_speculators = _opened(path, config, target, method)
    if read is not c:
        read.ignore("vocab_size")
    else:
        c.require("vocab_size", target.vocab_size)
        c.require("num_nextn_predict_layers", 0)
    before_residual = c.take("norm_before_residual", bool, is_speculators and method == "eagle3")
    c.require("norm_before_fc", False)
    draft_vocab_size = c.size("draft_vocab_size", target.vocab_size)
    aux = _aux_layers(c, target.num_layers)
    c.require("num_aux_hidden_states", len(aux))
    mask = _mask_token(c, target, "mask_token_id", "ptd_token_id", "pard_token") if method == "peagle" else None
    c.ignore("parallel_drafting")  # P-EAGLE's, which its tensors show as well
    read.require("model_type", "llama", "llama3", "LlamaForCausalLMEagle3")
    count = read.size("num_hidden_layers", 1)
    layer, norm = _layer(read, target)
    return _made(
        method,
        path,
        (c, read),
        stored,
        target,
        first="layers.0." if any(name.startswith("layers.0.") for name in stored) else "midlayer.",
        draft_vocab_size=draft_vocab_size,
        layers=(_without(layer, norm), *(layer,) * (count - 1)),
        norm=norm,
        join="attention",
        aux_layers=aux,
        fc_norm=c.take("fc_norm", bool, False),
        norm_output=c.take("norm_output", bool, False),
        norm_before_residual=before_residual,
        mask_token=mask,
    )


def _aux_layers(c: ConfigReader, num_layers: int) -> tuple[int, ...]:
    """`eagle_aux_hidden_state_layer_ids` count the states before layers; within `eagle_config` (SGLang, ModelOpt) those behind
    them."""
    key = "eagle_aux_hidden_state_layer_ids"
    given, shift = c.take(key, list, []), 0
    if not given and "eagle_config" in c:
        inner = c.part("eagle_config")
        inner.require("use_aux_hidden_state", True)
        given, shift = inner.take(key, list, []), 1
        inner.finish()
    if not given:
        given, shift = list(default_aux_layers(num_layers)), 0
    return _rising(c, key, given, shift, num_layers)


def _rising(c: ConfigReader, key: str, given: list[Any], shift: int, last: int) -> tuple[int, ...]:
    """`given` + `shift`, as numbers of states: that before layer 0 to that before layer `last`."""
    fits = all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i + shift <= last for i in given)
    if not given or not fits or len(set(given)) < len(given) or sorted(given) != list(given):
        raise c.unsupported(key, f"must be rising numbers of states between layers, from {-shift} to {last - shift}")
    return tuple(i + shift for i in given)


def _mask_token(c: ConfigReader, target: ModelSpec, *keys: str) -> int:
    found = [token for key in keys if (token := c.maybe(key, int)) is not None]
    if not found or not 0 <= found[0] < target.vocab_size:
        raise c.unsupported(keys[0], f"must be one of the model's {target.vocab_size} tokens")
    return found[0]


# --- DFlash ---------------------------------------------------------------------------------------------------------------


def _read_dflash(path: Path, config: dict[str, Any], stored: frozenset[str], target: ModelSpec) -> HeadDescription:
    """The authors' `dflash_config` counts the states behind layers; `speculators` those before them. Of both the last one that
    is read stands before the final norm, which the state behind the last layer has passed."""
    c, read, is_speculators = _opened(path, config, target, "dflash")
    key, draft_vocab_size = "aux_hidden_state_layer_ids", target.vocab_size
    if is_speculators:
        c.require("sliding_window_non_causal", False)
        c.require("sample_from_anchor", False)
        draft_vocab_size = c.size("draft_vocab_size", target.vocab_size)
        aux = _rising(c, key, c.take(key, list), 0, target.num_layers - 1)
        mask, block_size = _mask_token(c, target, "mask_token_id"), c.size("block_size", 8)
        read.ignore("vocab_size")
    else:
        inner = c.part("dflash_config")
        aux = _rising(inner, "target_layer_ids", inner.take("target_layer_ids", list), 1, target.num_layers - 1)
        mask = _mask_token(inner, target, "mask_token_id")
        of = c if "block_size" in c else inner
        block_size = of.size("block_size")
        inner.finish()
        c.require("vocab_size", target.vocab_size)
        c.require("num_target_layers", target.num_layers)
    read.require("model_type", "qwen3")
    read.assume(head_dim=128)
    count = read.size("num_hidden_layers")
    read.require("layer_types", ["full_attention"] * count)
    qk_norm = QKNormSpec(over="head", eps=read.take("rms_norm_eps", float, 1e-6))
    layer, norm = _layer(read, target, qk_norm=qk_norm)
    return _made(
        "dflash",
        path,
        (c, read),
        stored,
        target,
        draft_vocab_size=draft_vocab_size,
        layers=(layer,) * count,
        norm=norm,
        join="context",
        norms=("hidden_norm", "final_norm"),
        aux_layers=aux,
        scales_embedding="embed_tokens.weight" not in stored,
        mask_token=mask,
        most_drafts=block_size - 1,
    )


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
    stored = tensor_names(target.path)
    assert spec.final_norm is not None
    head = LayeredSpec(
        hidden_size=spec.hidden_size,
        vocab_size=spec.vocab_size,
        draft_vocab_size=spec.vocab_size,
        layers=spec.layers[-1:],
        norm=spec.final_norm,
        join="product",
        own_head=f"{below}shared_head.head.weight" in stored,
        scales_embedding=True,
    )
    own = {"enorm": "embed_norm", "hnorm": "hidden_norm", "eh_proj": "join", "shared_head.norm": "final_norm"}
    own |= {"shared_head.head": "head"} if head.own_head else {}
    names = {f"{below}{theirs}.weight": Placement(f"{name}.weight") for theirs, name in own.items()}
    for name, place in family.names(replace(spec, layers=(*spec.layers, spec.layers[-1]))).items():
        if place.target.startswith(ours):
            names[name] = replace(place, target=f"layers.0.{place.target.removeprefix(ours)}")
    ignored = frozenset(name for name in stored if not name.startswith(below)) | {f"{below}embed_tokens.weight"}
    return HeadDescription(method="mtp", path=target.path, spec=head, names=names, ignored=ignored)


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
    return HeadDescription(method="medusa", path=path, spec=spec, names=spec.names(converted), ignored=ignored)
