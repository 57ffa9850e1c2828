"""What a family is, and the pieces that families share. No torch.

A family is a reader from a Hugging Face config to a `ModelSpec`, and a table from checkpoint names to ours. The reader is
strict: every key of the config is either read or known to have no effect on inference; anything else raises, naming it.
The same goes for a GGUF file's metadata, from which such a config is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from slipstream.errors import UnsupportedModelError
from slipstream.model.parameters import Placement
from slipstream.model.spec import (
    Activation,
    AttentionSpec,
    DenseSpec,
    LinearScaling,
    Llama3Scaling,
    ModelSpec,
    NormSpec,
    RopeSpec,
    YarnScaling,
)

T = TypeVar("T")
Names = dict[str, Placement]

NO_EFFECT = frozenset((
    "_from_model_config", "_name_or_path", "architectures", "attention_dropout", "attention_probs_dropout_prob",
    "attn_pdrop", "auto_map", "bos_token_id", "cls_token_id", "dtype", "embd_pdrop", "eos_token_id",
    "gradient_checkpointing", "hidden_dropout", "hidden_dropout_prob", "id2label", "initializer_range",
    "is_llama_config", "label2id", "model_type", "output_attentions", "output_hidden_states", "pad_token_id",
    "pretraining_tp", "problem_type", "resid_pdrop", "return_dict", "rope_interleaved", "sep_token_id",
    "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj",
    "task_specific_params", "tokenizer_class", "torch_dtype", "transformers.js_config", "transformers_version",
    "unsloth_fixed", "unsloth_version", "use_cache",
))  # fmt: skip
"""Keys that change nothing about what the model computes at inference (or that the tokenizer reads)."""


GGUF_NO_EFFECT = frozenset((
    "rope.scaling.finetuned", "rope.scaling.original_context_length",  # without a scaling, which is refused
    "vocab_size",  # the embedding has as many rows
))  # fmt: skip
"""The same for a GGUF file's keys, less the architecture that stands before each."""


class ConfigReader:
    """Takes keys out of a config; `finish` raises if any is left that could matter. Messages put `prefix` before keys."""

    def __init__(
        self,
        config: Mapping[str, Any],
        where: str = "config.json",
        *,
        prefix: str = "",
        no_effect: frozenset[str] = NO_EFFECT,
    ) -> None:
        self._config = config
        self._where = where
        self._prefix = prefix
        self._no_effect = no_effect
        self._read: set[str] = set()

    def __contains__(self, key: str) -> bool:
        return self._config.get(key) is not None

    def take(self, key: str, kind: type[T], default: T | None = None) -> T:
        """The value of `key`, of type `kind`; a missing one is `default`, or an error without."""
        self._read.add(key)
        value = self._config.get(key)
        if value is None:
            if default is None:
                key = self._prefix + key
                raise UnsupportedModelError(f"{self._where} lacks {key!r}", field=key)
            return default
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)  # type: ignore[return-value]
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise self.unsupported(key, f"must be of type {kind.__name__}")
        return value

    def maybe(self, key: str, kind: type[T]) -> T | None:
        self._read.add(key)
        return self.take(key, kind) if key in self else None

    def size(self, key: str, default: int | None = None) -> int:
        value = self.take(key, int, default)
        if value < 1:
            raise self.unsupported(key, "must be at least 1")
        return value

    def require(self, key: str, *allowed: Any) -> None:
        """`key` is missing or one of `allowed`: the only values that are implemented."""
        self._read.add(key)
        if self._config.get(key) not in (None, *allowed):
            raise self.unsupported(key, "only " + " or ".join(repr(a) for a in allowed) + " is supported")

    def unsupported(self, key: str, why: str) -> UnsupportedModelError:
        name = self._prefix + key
        return UnsupportedModelError(f"{self._where}: {name} = {self._config.get(key)!r}: {why}", field=name)

    def finish(self, *more_without_effect: str) -> None:
        unknown = set(self._config) - self._read - self._no_effect - set(more_without_effect)
        unknown = {k for k in unknown if self._config[k] is not None}
        if unknown:
            keys = [f"{self._prefix}{k} = {self._config[k]!r}" for k in sorted(unknown)]
            raise UnsupportedModelError(
                f"{self._where} has {', '.join(keys)}, which Slipstream does not know: it may change what the model "
                "computes, so it is not ignored",
                field=self._prefix + min(unknown),
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFFamily:
    """How llama.cpp writes the family: its name there, the config keys that its metadata gives, and the tensor names.

    `config` makes a Hugging Face config of the metadata (without the architecture before each key), of which no key may
    be left over; `names` maps GGUF tensor names, with {i} for the layer, to checkpoint names. `unpermute`: the rows of q
    and k stand in llama.cpp's order; `norms_plus_one`: one was added to the weights of norms.
    """

    architecture: str
    config: Callable[[ConfigReader], dict[str, Any]]
    names: Mapping[str, str]
    unpermute: bool = False
    norms_plus_one: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """`names(spec)` lists every tensor of a checkpoint; `ignored` are regular expressions of tensors without meaning."""

    model_type: str
    architectures: tuple[str, ...]
    read: Callable[[ConfigReader], ModelSpec]
    names: Callable[[ModelSpec], Names]
    prefixes: tuple[str, ...] = ("",)  # that some writers put before every name
    ignored: tuple[str, ...] = ()
    gguf: GGUFFamily | None = None
    nested_config: str | None = None  # the key that holds the language model's own config


# --- Pieces of descriptions -------------------------------------------------------------------------------------------

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}


def activation(c: ConfigReader, key: str, default: str | None = None) -> Activation:
    name = c.take(key, str, default)
    if name not in ACTIVATIONS:
        raise c.unsupported(key, f"the activations are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def heads(c: ConfigReader) -> tuple[int, int, int]:
    """(query heads, kv heads, head_dim) under Llama's names."""
    num_heads = c.size("num_attention_heads")
    num_kv_heads = c.size("num_key_value_heads", num_heads)
    hidden = c.size("hidden_size")
    if "head_dim" not in c and hidden % num_heads:
        raise c.unsupported(
            "hidden_size", f"is no multiple of num_attention_heads ({num_heads}), and head_dim is missing"
        )
    return num_heads, num_kv_heads, c.size("head_dim", hidden // num_heads)


def rope(
    c: ConfigReader, head_dim: int, *, theta: float = 10000.0, max_position: int, kind: str | None = None
) -> RopeSpec:
    """Rotary embedding from `rope_parameters` (transformers 5; one dict for each layer `kind` in some models) or from
    `rope_theta` and `rope_scaling` (before)."""
    rotary_dim = int(head_dim * c.take("partial_rotary_factor", float, 1.0))
    if "rope_parameters" in c:
        raw = c.take("rope_parameters", dict)
        if kind is not None and kind in raw:
            raw = raw[kind]
        key = "rope_parameters"
        c.maybe("rope_theta", float)
        c.maybe("rope_scaling", dict)
    else:
        raw = {"rope_theta": c.take("rope_theta", float, theta), **(c.maybe("rope_scaling", dict) or {})}
        key = "rope_scaling"
    return rope_from(c, key, dict(raw), rotary_dim, theta=theta, max_position=max_position)


def rope_from(
    c: ConfigReader, key: str, raw: dict[str, Any], rotary_dim: int, *, theta: float, max_position: int
) -> RopeSpec:
    theta = float(raw.pop("rope_theta", theta))
    kind = raw.pop("rope_type", None) or raw.pop("type", None) or "default"
    raw.pop("type", None)
    rotary_dim = int(rotary_dim * raw.pop("partial_rotary_factor", 1.0))

    def number(name: str, default: float | None = None) -> float:
        value = raw.pop(name, None)
        value = default if value is None else value
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise c.unsupported(key, f"{name} must be a number")
        return float(value)

    scaling: LinearScaling | Llama3Scaling | YarnScaling | None
    if kind == "default":
        raw.pop("factor", None)
        scaling = None
    elif kind == "linear":
        scaling = LinearScaling(factor=number("factor"))
    elif kind == "llama3":
        scaling = Llama3Scaling(
            factor=number("factor"),
            low_freq_factor=number("low_freq_factor"),
            high_freq_factor=number("high_freq_factor"),
            original_max_position=int(number("original_max_position_embeddings", max_position)),
        )
    elif kind == "yarn":
        attention_factor = raw.pop("attention_factor", None)
        scaling = YarnScaling(
            factor=number("factor"),
            original_max_position=int(number("original_max_position_embeddings", max_position)),
            beta_fast=number("beta_fast", 32.0),
            beta_slow=number("beta_slow", 1.0),
            attention_factor=None if attention_factor is None else float(attention_factor),
        )
    else:
        raise c.unsupported(key, f"rope_type {kind!r} is not supported; default, linear, llama3 and yarn are")
    if raw:
        raise c.unsupported(key, f"{', '.join(sorted(raw))} is not known")
    return RopeSpec(theta=theta, rotary_dim=rotary_dim, scaling=scaling)


def rms(size: int, eps: float, *, weight_offset: float = 0.0) -> NormSpec:
    return NormSpec(kind="rms", size=size, eps=eps, weight_offset=weight_offset)


# --- Pieces of name tables --------------------------------------------------------------------------------------------


def llama_names(spec: ModelSpec, norms: Mapping[str, str]) -> Names:
    """The names that most families use. `norms` maps a layer's norms (ours) to the checkpoint's."""
    names: Names = {
        "model.embed_tokens.weight": Placement("embed.weight"),
        "model.norm.weight": Placement("final_norm.weight"),
    }
    if not spec.tied_embeddings:
        names["lm_head.weight"] = Placement("head.weight")
    for i, layer in enumerate(spec.layers):
        theirs, ours = f"model.layers.{i}.", f"layers.{i}."
        for our_norm, their_norm in norms.items():
            names[f"{theirs}{their_norm}.weight"] = Placement(f"{ours}{our_norm}.weight")
        names.update(qkv_names(layer.attention, theirs + "self_attn.", ours))
        names[f"{theirs}self_attn.o_proj.weight"] = Placement(f"{ours}attention.out.weight")
        if layer.attention.out_bias:
            names[f"{theirs}self_attn.o_proj.bias"] = Placement(f"{ours}attention.out.bias")
        if layer.attention.qk_norm is not None:
            for x in "qk":
                names[f"{theirs}self_attn.{x}_norm.weight"] = Placement(f"{ours}attention.{x}_norm.weight")
        names.update(gated_names(layer.mlp, theirs + "mlp.", ours))
    return names


def qkv_names(a: AttentionSpec, theirs: str, ours: str) -> Names:
    """Three projections that fill one."""
    names: Names = {}
    for kind in ("weight", "bias") if a.qkv_bias else ("weight",):
        start = 0
        for x, rows in (("q", a.q_size), ("k", a.kv_size), ("v", a.kv_size)):
            names[f"{theirs}{x}_proj.{kind}"] = Placement(f"{ours}attention.qkv.{kind}", start, rows)
            start += rows
    return names


def gated_names(mlp: DenseSpec, theirs: str, ours: str) -> Names:
    names: Names = {}
    for kind in ("weight", "bias") if mlp.bias else ("weight",):
        names[f"{theirs}gate_proj.{kind}"] = Placement(f"{ours}mlp.up.{kind}", 0, mlp.intermediate_size)
        names[f"{theirs}up_proj.{kind}"] = Placement(
            f"{ours}mlp.up.{kind}", mlp.intermediate_size, mlp.intermediate_size
        )
        names[f"{theirs}down_proj.{kind}"] = Placement(f"{ours}mlp.down.{kind}")
    return names


def both(names: Names, theirs: str, ours: str, *, transform: str = "none") -> None:
    """A weight and its bias; only the weight is transformed."""
    names[f"{theirs}.weight"] = Placement(f"{ours}.weight", transform=transform)  # type: ignore[arg-type]
    names[f"{theirs}.bias"] = Placement(f"{ours}.bias")


# --- GGUF ---------------------------------------------------------------------------------------------------------------

LLAMA_GGUF_NAMES: dict[str, str] = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "blk.{i}.attn_norm.weight": "model.layers.{i}.input_layernorm.weight",
    "blk.{i}.ffn_norm.weight": "model.layers.{i}.post_attention_layernorm.weight",
    "blk.{i}.attn_q.weight": "model.layers.{i}.self_attn.q_proj.weight",
    "blk.{i}.attn_k.weight": "model.layers.{i}.self_attn.k_proj.weight",
    "blk.{i}.attn_v.weight": "model.layers.{i}.self_attn.v_proj.weight",
    "blk.{i}.attn_q.bias": "model.layers.{i}.self_attn.q_proj.bias",
    "blk.{i}.attn_k.bias": "model.layers.{i}.self_attn.k_proj.bias",
    "blk.{i}.attn_v.bias": "model.layers.{i}.self_attn.v_proj.bias",
    "blk.{i}.attn_q_norm.weight": "model.layers.{i}.self_attn.q_norm.weight",
    "blk.{i}.attn_k_norm.weight": "model.layers.{i}.self_attn.k_norm.weight",
    "blk.{i}.attn_output.weight": "model.layers.{i}.self_attn.o_proj.weight",
    "blk.{i}.ffn_gate.weight": "model.layers.{i}.mlp.gate_proj.weight",
    "blk.{i}.ffn_up.weight": "model.layers.{i}.mlp.up_proj.weight",
    "blk.{i}.ffn_down.weight": "model.layers.{i}.mlp.down_proj.weight",
}


def llama_gguf_config(m: ConfigReader) -> dict[str, Any]:
    """The keys that most architectures share. What llama.cpp can do and these models don't is refused, not ignored."""
    config: dict[str, Any] = {
        "hidden_size": m.size("embedding_length"),
        "num_hidden_layers": m.size("block_count"),
        "intermediate_size": m.size("feed_forward_length"),
        "num_attention_heads": m.size("attention.head_count"),
        "num_key_value_heads": m.maybe("attention.head_count_kv", int),
        "head_dim": m.maybe("attention.key_length", int),
        "rms_norm_eps": m.take("attention.layer_norm_rms_epsilon", float),
        "max_position_embeddings": m.size("context_length"),
        "rope_theta": m.maybe("rope.freq_base", float),
        "hidden_act": "silu",
    }
    head_dim = config["head_dim"] or config["hidden_size"] // config["num_attention_heads"]
    m.require("attention.value_length", head_dim)
    m.require("attention.causal", True)
    m.require("rope.dimension_count", head_dim)
    m.require("rope.scaling.type", "none")
    m.require("rope.scaling.factor", 0.0, 1.0)  # llama.cpp takes 0 for none
    m.require("rope.scale_linear", 0.0, 1.0)  # its name in older files
    m.require("expert_count", 0)
    m.require("expert_used_count", 0)
    m.require("tensor_data_layout", "Meta AI original pth")  # the order of rows that `unpermute` undoes
    return {k: v for k, v in config.items() if v is not None}


def layers(count: int, make: Callable[[int], T]) -> tuple[T, ...]:
    return tuple(make(i) for i in range(count))


def kinds_of_layers(c: ConfigReader, count: int, default: Iterable[str]) -> list[str]:
    """`layer_types`: full_attention or sliding_attention, for each layer."""
    kinds = c.take("layer_types", list, list(default))
    if len(kinds) != count or not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise c.unsupported("layer_types", f"must be {count} of full_attention or sliding_attention")
    return kinds
