"""Reads the config of a draft head on disk into a `HeadDescription` (`spec.drafts.heads`). No torch.

Readers are as strict as those of models: a key that could change the computation and is not read
here is refused by name.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from slipstream.errors import CheckpointError, UnsupportedModelError
from slipstream.spec.description import ModelDescription, read_json
from slipstream.spec.drafts.heads import (
    WRAPPED,
    HeadDescription,
    HeadMethod,
    LayeredSpec,
    MedusaSpec,
    default_aux_layers,
)
from slipstream.spec.drafts.mtp import read_mtp
from slipstream.spec.families.base import ConfigReader
from slipstream.spec.families.builders import attention, before, gated, heads, rms, rope
from slipstream.spec.model import LayerSpec, ModelSpec, NormSpec, QKNormSpec, SequentialBlock
from slipstream.spec.stored.safetensors import tensor_names

KINDS: dict[HeadMethod, str] = {
    "eagle": "EAGLE-1 or 2, which reads the last layer's state alone",
    "eagle3": "EAGLE-3",
    "peagle": "P-EAGLE, which drafts all places in one pass",
    "dflash": "DFlash, which drafts a block of masks",
    "medusa": "Medusa",
}


def read_head(method: HeadMethod, path: Path, target: ModelDescription) -> HeadDescription:
    """The head at `path` for the model `target`; an MTP layer's path is the model's own. A misfit
    is refused by name."""
    spec = target.spec
    if not spec.generates or spec.kind != "a decoder" or spec.embed_size is not None:
        raise UnsupportedModelError(
            f"method {method!r} needs a decoder with embeddings as wide as its layers",
            field="method",
        )
    if spec.cache_groups[0].kind != "full":
        raise UnsupportedModelError(
            f"method {method!r} needs layers that keep all tokens of a request; use method 'ngram' or 'suffix'",
            field="method",
        )
    if method == "mtp":
        return read_mtp(target)
    if not (path / "config.json").is_file():
        raise CheckpointError(f"{path} holds no config.json of a draft head", field="model")
    config = read_json(path / "config.json")
    names = frozenset(name.removeprefix(WRAPPED) for name in tensor_names(path))
    found = _kind_of(config, names)
    if found not in (None, method):
        raise UnsupportedModelError(
            f"{path} is a head of {KINDS[found]}: use method {found!r}", field="method"
        )
    if method == "medusa":
        return _read_medusa(path, config, names, spec)
    if method == "eagle":
        return _read_eagle(path, config, names, spec)
    if method == "dflash":
        return _read_dflash(path, config, names, spec)
    return _read_eagle3(method, path, config, names, spec)


def _kind_of(config: dict[str, Any], stored: frozenset[str]) -> HeadMethod | None:
    """The head's actual method, to be named in an error message. None: neither config nor tensors
    show it."""
    made_for = " ".join(map(str, (*(config.get("architectures") or ()), config.get("model_type"))))
    kind, speculator = made_for.lower().replace("_", ""), config.get("speculators_model_type")
    for known in KINDS:
        if speculator == known:
            return known
    if "dflash_config" in config or "dflash" in kind:
        return "dflash"
    if (
        any(config.get(key) for key in ("pard_token", "ptd_token_id", "parallel_drafting"))
        or "mask_hidden" in stored
    ):
        return "peagle"
    if "medusa" in kind or "medusa_num_heads" in config:
        return "medusa"
    if "fc.weight" in stored and not any(name.endswith("hidden_norm.weight") for name in stored):
        return "eagle"
    if "eagle" in kind:
        return "eagle3" if "eagle3" in kind else "eagle"
    return None


def _opened(
    path: Path, config: dict[str, Any], target: ModelSpec, kind: HeadMethod
) -> tuple[ConfigReader, ConfigReader, bool]:
    """(reader of the config, reader of its part about the layers, whether the format is that of `speculators`)."""
    c = ConfigReader(config, f"{path.name}/config.json")
    is_speculators = "speculators_model_type" in c or "speculators_config" in c
    if is_speculators:
        c.require("speculators_model_type", kind)
        # These keys describe the head's author and target model.
        c.ignore("speculators_config", "speculators_version", "has_no_defaults_at_init")
    read = c.part("transformer_layer_config") if is_speculators else c
    if kind == "eagle" and isinstance(config.get("model"), dict):  # vLLM's format
        read = c.part("model")
        c.require("truncated_vocab_size", target.vocab_size)
    c.require("target_hidden_size", target.hidden_size)
    c.ignore("target_model_type")
    read.require("hidden_size", target.hidden_size)
    # Without `use_sliding_window` and `layer_types`, no layer has a window.
    read.ignore("sliding_window", "max_window_layers")
    read.require("use_sliding_window", False)
    return c, read, is_speculators


def _layer(
    read: ConfigReader, target: ModelSpec, *, qkv_bias: str = "attention_bias", **more: Any
) -> tuple[LayerSpec, NormSpec]:
    """(a decoder layer with a norm before attention and before the MLP, that norm)."""
    h = heads(read)
    out_bias = read.take("attention_bias", bool, False)
    norm = rms(target.hidden_size, read.take("rms_norm_eps", float, 1e-6))
    position = rope(read, h.head_dim, max_position=read.size("max_position_embeddings", 2048))
    mlp = gated(read, bias=read.take("mlp_bias", bool, False))
    own = attention(
        h, position, qkv_bias=read.take(qkv_bias, bool, out_bias), out_bias=out_bias, **more
    )
    return LayerSpec(attention=own, mlp=mlp, block=before(norm)), norm


def _without(layer: LayerSpec, norm: NormSpec) -> LayerSpec:
    """The layer without its norm before attention."""
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
    """The description of a head with these `parts` of its spec. Embeddings, output head and token map are
    read from its file if `stored` has them. Raises if a key of its config was left unread."""
    has_map, has_all = bool(stored & {"d2t", "t2d"}), draft_vocab_size == target.vocab_size
    own_embedding = "embed_tokens.weight" in stored
    own_head = (
        "lm_head.weight" in stored or not has_all or (not stored and method in ("eagle3", "peagle"))
    )
    for reader in dict.fromkeys(readers):
        if reader.take("tie_word_embeddings", bool, False) and own_embedding and not own_head:
            raise reader.unsupported(
                "tie_word_embeddings", "a head with its own embeddings needs its own lm_head.weight"
            )
        if reader.take("embed_requires_grad", bool, False) and stored and not own_embedding:
            raise reader.unsupported(
                "embed_requires_grad", f"{path} lacks embed_tokens.weight, which was trained"
            )
        reader.finish()
    if stored and not has_map and not has_all:
        raise CheckpointError(
            f"{path} lacks d2t and t2d, one of which must map its {draft_vocab_size} tokens to the model's",
            field="d2t",
        )
    spec = LayeredSpec(
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab_size,
        own_embedding=own_embedding,
        own_head=own_head,
        **parts,
    )
    ignored = frozenset(("t2d", "d2t"))
    names = spec.names(first, joined)
    return HeadDescription(
        method=method, path=path, spec=spec, names=names, ignored=ignored, has_map=has_map
    )


# --- EAGLE-1 and 2 -------------------------------------------------------------------


def _read_eagle(
    path: Path, config: dict[str, Any], stored: frozenset[str], target: ModelSpec
) -> HeadDescription:
    """Read the authors' files, vLLM's (the same config below `model`) or those of `speculators`.

    Embeddings and output head in the file are copies of the model's, because neither was trained.
    """
    c, read, is_speculators = _opened(path, config, target, "eagle")
    if is_speculators:
        c.require("layernorms", False)
        c.require("transformer_layer_architecture", "LlamaDecoderLayer")
    read.require("vocab_size", target.vocab_size)
    read.require("model_type", "llama", "eagle", "mixtral", "qwen2")
    said = [
        part.maybe(key, bool)
        for part in (c, read)
        for key in ("bias", "eagle_fc_bias", "fusion_bias")
    ]
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


# --- EAGLE-3 and P-EAGLE -------------------------------------------------------------


def _read_eagle3(
    method: HeadMethod,
    path: Path,
    config: dict[str, Any],
    stored: frozenset[str],
    target: ModelSpec,
) -> HeadDescription:
    c, read, is_speculators = _opened(path, config, target, method)
    if read is not c:
        # Converters wrote other sizes here. The tensors have the model's, or are refused.
        read.ignore("vocab_size")
    else:
        c.require("vocab_size", target.vocab_size)
        c.require("num_nextn_predict_layers", 0)
    before_residual = c.take("norm_before_residual", bool, is_speculators and method == "eagle3")
    draft_vocab_size = c.size("draft_vocab_size", target.vocab_size)
    aux, fc_norm = _states_read(c, target.num_layers)
    c.require("num_aux_hidden_states", len(aux))
    mask = (
        _mask_token(c, target, "mask_token_id", "ptd_token_id", "pard_token")
        if method == "peagle"
        else None
    )
    c.ignore("parallel_drafting")  # P-EAGLE's; its tensors also show that it drafts in parallel
    read.require("model_type", "llama", "llama3", "LlamaForCausalLMEagle3")
    count = read.size("num_hidden_layers", 1)
    read.require("layer_types", ["full_attention"] * count)
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
        fc_norm=fc_norm,
        norm_output=c.take("norm_output", bool, False),
        norm_before_residual=before_residual,
        mask_token=mask,
    )


def _states_read(
    c: ConfigReader, num_layers: int
) -> tuple[tuple[int, ...], Literal["each", "joint"] | None]:
    """(indices of the hidden states that `fc` reads, the kind of norms before it).

    `eagle_aux_hidden_state_layer_ids` counts states before layers; within `eagle_config` (SGLang,
    ModelOpt) states after layers. ModelOpt writes `norm_before_fc` there, too.
    """
    key = "eagle_aux_hidden_state_layer_ids"
    given, shift = c.take(key, list, []), 0
    each, joint = c.take("fc_norm", bool, False), c.take("norm_before_fc", bool, False)
    if "eagle_config" in c:
        inner = c.part("eagle_config")
        for norm in ("use_input_layernorm_in_first_layer", "use_last_layernorm"):
            inner.require(norm, True)
        inner.require("use_aux_hidden_state", True)
        inner.require("next_layer_regular", True)
        inner.require("use_mtp_layernorm", False)
        inner.require("parallel_draft_step", 1)
        inner.ignore("parallel_draft_heads_num_layers")  # concerns draft steps after the first
        joint = inner.take("norm_before_fc", bool, joint)
        behind = inner.take(key, list, [])
        if given and behind:
            raise c.unsupported(key, "is given twice, here and in eagle_config")
        if behind:
            given, shift = behind, 1
        inner.finish()
    if each and joint:
        raise c.unsupported(
            "fc_norm",
            "norm_before_fc is true as well, and a head has one norm of all states or one of each",
        )
    if not given:
        given = list(default_aux_layers(num_layers))
    return _rising(c, key, given, shift, num_layers), "joint" if joint else "each" if each else None


def _rising(c: ConfigReader, key: str, given: list[Any], shift: int, last: int) -> tuple[int, ...]:
    """`given` + `shift`, as indices of hidden states; state i is the input of layer i. They must
    rise strictly within 0 … `last`."""
    fits = all(
        isinstance(i, int) and not isinstance(i, bool) and 0 <= i + shift <= last for i in given
    )
    if not given or not fits or len(set(given)) < len(given) or sorted(given) != list(given):
        raise c.unsupported(
            key, f"must be rising numbers of states between layers, from {-shift} to {last - shift}"
        )
    return tuple(i + shift for i in given)


def _mask_token(c: ConfigReader, target: ModelSpec, *keys: str) -> int:
    found = [token for key in keys if (token := c.maybe(key, int)) is not None]
    if not found or not 0 <= found[0] < target.vocab_size:
        raise c.unsupported(keys[0], f"must be one of the model's {target.vocab_size} tokens")
    return found[0]


# --- DFlash --------------------------------------------------------------------------


def _read_dflash(
    path: Path, config: dict[str, Any], stored: frozenset[str], target: ModelSpec
) -> HeadDescription:
    """Read a DFlash head.

    The authors' `dflash_config` counts states after layers, `speculators` states before layers.
    Both exclude the state after the last layer, because that has passed the final norm.
    """
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
        aux = _rising(
            inner,
            "target_layer_ids",
            inner.take("target_layer_ids", list),
            1,
            target.num_layers - 1,
        )
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


# --- Medusa --------------------------------------------------------------------------


def _read_medusa(
    path: Path, config: dict[str, Any], stored: frozenset[str], target: ModelSpec
) -> HeadDescription:
    c = ConfigReader(config, f"{path.name}/config.json")
    c.require("model_type", "medusa")
    c.require("hidden_size", target.hidden_size)
    c.require("vocab_size", target.vocab_size)
    c.require("truncated_vocab_size", target.vocab_size)
    c.ignore(
        "base_model_name_or_path",
        "version",
        "medusa_choices",
        "max_paths",
        "topk",
        "max_seq_len",
        "base_model_config",
    )
    num_heads = c.size("medusa_num_heads" if "medusa_num_heads" in c else "num_heads")
    num_layers = c.size("medusa_num_layers" if "medusa_num_layers" in c else "num_hidden_layers", 1)
    converted = any(name.removeprefix("medusa_heads.").startswith("blocks.") for name in stored)
    shared = c.take("original_lm_head", bool, False)
    c.take("medusa_fc_bias", bool, True)
    c.finish()
    if "token_map" in stored:
        raise CheckpointError(
            f"{path}: token_map (a smaller vocabulary) is not supported for Medusa heads",
            field="token_map",
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
    return HeadDescription(
        method="medusa", path=path, spec=spec, names=spec.names(converted), ignored=ignored
    )
