"""Tiny random draft heads, written as their authors publish them, for the models of `tiny_models`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.support.tiny_models import VOCAB

SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
DRAFT_VOCAB = 128
MASK = 250
"""The token in the place of those that are not known."""


def drawn(shapes: Mapping[str, tuple[int, ...]], g: torch.Generator) -> dict[str, Tensor]:
    """Random tensors; those of norms are near 1."""
    return {n: torch.randn(s, generator=g) * 0.3 + ("norm" in n) for n, s in shapes.items()}


def layer_shapes(
    sizes: Mapping[str, int], below: str = "", *, wide: int = 1
) -> dict[str, tuple[int, ...]]:
    """A layer of Llama's; its attention reads `wide` rows side by side."""
    e, f = sizes["hidden_size"], sizes["intermediate_size"]
    q, kv = e, e * sizes["num_key_value_heads"] // sizes["num_attention_heads"]
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (e,), "post_attention_layernorm.weight": (e,), "self_attn.q_proj.weight": (q, wide * e),
        "self_attn.k_proj.weight": (kv, wide * e), "self_attn.v_proj.weight": (kv, wide * e), "self_attn.o_proj.weight": (e, q),
        "mlp.gate_proj.weight": (f, e), "mlp.up_proj.weight": (f, e), "mlp.down_proj.weight": (e, f),
    }  # fmt: skip
    return {below + n: s for n, s in shapes.items()}


def maps(g: torch.Generator) -> dict[str, Tensor]:
    """Maps the head's tokens to the model's."""
    ids = torch.randperm(VOCAB, generator=g)[:DRAFT_VOCAB].sort().values
    t2d = torch.zeros(VOCAB, dtype=torch.bool).scatter(0, ids, True)
    return {"d2t": ids - torch.arange(DRAFT_VOCAB), "t2d": t2d}


def layer_config(sizes: Mapping[str, int], **more: Any) -> dict[str, Any]:
    own = {
        "model_type": "llama",
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 256,
    }
    return {**own, **sizes, **more}


def eagle(
    path: Path,
    *,
    seed: int = 0,
    speculators: bool = False,
    drop: str = "",
    sizes: Mapping[str, int] = SHAPE,
    masks: bool = False,
    wrapped: bool = False,
    num_fc_norms: int = 3,
    **changes: Any,
) -> dict[str, Tensor]:
    """An EAGLE-3 head for a model of 6 layers; its tensors by the authors' names, without the layer's prefix. The file lacks
    those that `drop` names. With `masks` one of P-EAGLE, of two layers. `fc_norm`, `norm_before_fc` and `norm_output` are
    changes of the config. `wrapped`: the names of all tensors but the output head's begin with `model.`."""
    g = torch.Generator().manual_seed(seed)
    sizes = {**SHAPE, **sizes}
    e = sizes["hidden_size"]
    shapes = {
        "fc.weight": (e, 3 * e),
        "norm.weight": (e,),
        "lm_head.weight": (DRAFT_VOCAB, e),
        "hidden_norm.weight": (e,),
    }
    shapes |= layer_shapes(sizes, wide=2)
    if changes.get("fc_norm"):
        shapes |= {f"fc_norm.{i}.weight": (e,) for i in range(num_fc_norms)}
    if changes.get("norm_before_fc") or changes.get("eagle_config", {}).get("norm_before_fc"):
        shapes |= {"input_norm.weight": (3 * e,)}
    if masks:
        shapes |= {
            **layer_shapes(sizes, "layers.1."),
            "mask_hidden": (1, 1, 3 * e) if speculators else (1, 3 * e),
        }
    tensors = drawn(shapes, g) | maps(g)
    layer = layer_config(sizes, num_hidden_layers=1 + masks)
    if speculators:
        config: dict[str, Any] = {
            "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "speculators_version": "0.2.0",
            "draft_vocab_size": DRAFT_VOCAB, "norm_before_residual": True, "eagle_aux_hidden_state_layer_ids": [1, 2, 4],
            "transformer_layer_config": {**layer, "vocab_size": VOCAB, "rope_theta": 5000.0},
            "speculators_config": {"algorithm": "eagle3"},
        }  # fmt: skip
        if masks:
            config |= {
                "speculators_model_type": "peagle",
                "mask_token_id": MASK,
                "norm_before_residual": False,
            }
    else:
        config = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "vocab_size": VOCAB,
            "draft_vocab_size": DRAFT_VOCAB,
            **layer,
        }
        config["eagle_aux_hidden_state_layer_ids"] = [1, 2, 4]
        if masks:
            config |= {"ptd_token_id": MASK, "parallel_drafting": True}
    write(
        path,
        {**config, **changes},
        {n: t for n, t in tensors.items() if n not in drop.split()},
        "layers.0." if speculators else "midlayer.",
        "model." if wrapped else "",
    )
    return tensors


def eagle1(
    path: Path,
    *,
    seed: int = 0,
    speculators: bool = False,
    bias: bool = True,
    sizes: Mapping[str, int] = SHAPE,
    **changes: Any,
) -> dict[str, Tensor]:
    """A head of EAGLE-1; its tensors by the authors' names, without the layer's prefix. The embeddings beside them are to be a
    copy of the model's."""
    g, sizes = torch.Generator().manual_seed(seed), {**SHAPE, **sizes}
    e = sizes["hidden_size"]
    shapes = layer_shapes(sizes) | {"fc.weight": (e, 2 * e)} | ({"fc.bias": (e,)} if bias else {})
    del shapes["input_layernorm.weight"]
    tensors = drawn(shapes, g)
    copies = {"embed_tokens.weight": torch.zeros(VOCAB, e)}
    if speculators:
        config = {
            "architectures": ["EagleSpeculator", "LlamaDecoderLayer"], "speculators_model_type": "eagle",
            "speculators_version": "0.1.0", "transformer_layer_architecture": "LlamaDecoderLayer", "layernorms": False,
            "fusion_bias": bias, "transformer_layer_config": layer_config(sizes, vocab_size=VOCAB),
            "speculators_config": {"algorithm": "eagle"},
        }  # fmt: skip
    else:
        config = {"architectures": ["LlamaForCausalLM"], **layer_config(sizes, vocab_size=VOCAB)}
        config |= {} if bias else {"bias": False}
    named = {n.replace("fc.", "fusion_fc.") if speculators else n: t for n, t in tensors.items()}
    write(
        path, {**config, **changes}, named | copies, "transformer." if speculators else "layers.0."
    )
    return tensors


def dflash(
    path: Path,
    *,
    seed: int = 0,
    speculators: bool = False,
    block_size: int = 8,
    sizes: Mapping[str, int] = SHAPE,
    **changes: Any,
) -> dict[str, Tensor]:
    """A DFlash head of two layers for a model of 6; its tensors by the authors' names."""
    g, sizes = torch.Generator().manual_seed(seed), {**SHAPE, **sizes}
    e, d = sizes["hidden_size"], sizes["hidden_size"] // sizes["num_attention_heads"]
    shapes = {"fc.weight": (e, 2 * e), "hidden_norm.weight": (e,), "norm.weight": (e,)}
    for i in range(2):
        shapes |= layer_shapes(sizes, f"layers.{i}.")
        shapes |= {f"layers.{i}.self_attn.{x}_norm.weight": (d,) for x in "qk"}
    layer = layer_config(
        sizes,
        model_type="qwen3",
        num_hidden_layers=2,
        head_dim=d,
        layer_types=["full_attention"] * 2,
        use_sliding_window=False,
    )
    if speculators:
        shapes |= {"lm_head.weight": (DRAFT_VOCAB, e), "embed_tokens.weight": (VOCAB, e)}
        config = {
            "architectures": ["DFlashSpeculator"], "speculators_model_type": "dflash", "speculators_version": "0.5.0",
            "draft_vocab_size": DRAFT_VOCAB, "block_size": block_size, "aux_hidden_state_layer_ids": [2, 5],
            "mask_token_id": MASK, "sliding_window_non_causal": False, "sample_from_anchor": False,
            "transformer_layer_config": {**layer, "vocab_size": VOCAB}, "speculators_config": {"algorithm": "dflash"},
        }  # fmt: skip
    else:
        config = {
            "architectures": ["DFlashDraftModel"], "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, **layer,
            "vocab_size": VOCAB, "block_size": block_size, "num_target_layers": 6,
            "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [1, 4]},
        }  # fmt: skip
    tensors = drawn(shapes, g) | (maps(g) if speculators else {})
    write(path, {**config, **changes}, tensors, "")
    return tensors


def medusa(
    path: Path,
    *,
    seed: int = 0,
    converted: bool = False,
    num_heads: int = 3,
    shared: bool = False,
    sizes: Mapping[str, int] = SHAPE,
    **changes: Any,
) -> dict[str, Tensor]:
    """Medusa heads with two residual blocks each. `shared`: they have the model's output head."""
    g, e = torch.Generator().manual_seed(seed), sizes["hidden_size"]
    tensors = {}
    for i in range(num_heads):
        for j in range(2):
            name = f"blocks.{i}.layers.{j}" if converted else f"{i}.{j}.linear"
            tensors[f"{name}.weight"] = torch.randn(e, e, generator=g) * 0.3
            tensors[f"{name}.bias"] = torch.randn(e, generator=g) * 0.3
        if not shared:
            tensors[f"lm_heads.{i}.weight" if converted else f"{i}.2.weight"] = (
                torch.randn(VOCAB, e, generator=g) * 0.3
            )
    config = {
        "model_type": "medusa",
        "num_heads": num_heads,
        "num_hidden_layers": 2,
        "hidden_size": e,
        "vocab_size": VOCAB,
    }
    if not converted:
        config = {
            "medusa_num_heads": num_heads,
            "medusa_num_layers": 2,
            "base_model_name_or_path": "tiny",
        }
    changes |= {"original_lm_head": True} if shared else {}
    write(path, {**config, **changes}, tensors, "")
    return tensors


def mtp(path: Path, *, seed: int = 0) -> dict[str, Tensor]:
    """Adds a layer that drafts to the checkpoint at `path`, which is one of DeepSeek's or GLM's kind: its last layer's weights,
    changed a little, and what stands around them. The new tensors, without the layer's prefix."""
    from safetensors.torch import load_file

    g = torch.Generator().manual_seed(seed)
    config = json.loads((path / "config.json").read_text())
    tensors = load_file(path / "model.safetensors")
    n, e = config["num_hidden_layers"], config["hidden_size"]
    last = f"model.layers.{n - 1}."
    new = {name.removeprefix(last): t for name, t in tensors.items() if name.startswith(last)}
    new = {name: t + 0.05 * torch.randn(t.shape, generator=g) for name, t in new.items()}
    for name in ("enorm", "hnorm", "shared_head.norm"):
        new[f"{name}.weight"] = 1 + 0.1 * torch.randn(e, generator=g)
    new["eh_proj.weight"] = 0.3 * torch.randn(e, 2 * e, generator=g)
    new["shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    new["embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    write(
        path,
        {**config, "num_nextn_predict_layers": 1, "num_mtp_layers": 1},
        {**tensors, **{f"model.layers.{n}.{k}": t for k, t in new.items()}},
        "",
    )
    return new


def write(
    path: Path, config: dict[str, Any], tensors: dict[str, Tensor], below: str, wrapper: str = ""
) -> None:
    path.mkdir(parents=True, exist_ok=True)
    of_layer = (
        "self_attn.",
        "mlp.",
        "hidden_norm.",
        "input_layernorm.",
        "post_attention_layernorm.",
    )
    of_layer = of_layer if below else ()
    named = {
        (below + n if n.startswith(of_layer) else n): t.contiguous() for n, t in tensors.items()
    }
    named = {n if n.startswith("lm_head.") else wrapper + n: t for n, t in named.items()}
    save_file(named, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))


BY_METHOD = {
    "eagle": eagle1,
    "eagle3": eagle,
    "peagle": partial(eagle, masks=True),
    "dflash": dflash,
    "medusa": medusa,
}
"""Functions that write a method's head as its authors publish it."""

eagle31 = partial(eagle, fc_norm=True, norm_output=True)

joint_norm = partial(eagle, speculators=True, norm_before_fc=True, norm_output=True)
"""Writes a head in the default form of the trainer of `speculators`."""

BY_KIND = {
    **{method: (method, write) for method, write in BY_METHOD.items()},
    "eagle31": ("eagle3", eagle31),
    "joint-norm": ("eagle3", joint_norm),
}
"""The method of each kind, and who writes it."""
