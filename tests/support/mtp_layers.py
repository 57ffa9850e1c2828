"""Layers that draft (multi-token prediction) of several families: written into tiny checkpoints as their authors publish them,
and computed in plain float32 torch over whole sequences, by the published descriptions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from tests.support import tiny_models
from tests.support.naive_heads import attend

FAMILIES = (
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "nemotron_h",
    "mimo",
    "ernie4_5_moe",
    "glm4_moe",
)


def build(path: Path, family: str, *, seed: int = 0, **more: Any) -> Any:
    """A checkpoint with a layer that drafts, and the model as transformers has it, without that layer."""
    if family == "mimo":
        model = tiny_models.build(path, "qwen2", use_sliding_window=False, **more)
        config = json.loads((path / "config.json").read_text())
        config |= {"model_type": "mimo", "architectures": ["MiMoForCausalLM"]}
        (path / "config.json").write_text(
            json.dumps({**config, "attention_bias": True, "num_nextn_predict_layers": 1})
        )
    else:
        model = tiny_models.build(path, family, **more)
    add(path, seed=seed)
    return model


def add(
    path: Path, *, seed: int = 0, tensors: dict[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Adds a layer that drafts to the checkpoint at `path`: random tensors, or these."""
    config, stored = read(path)
    kind = config["model_type"]
    counts = {"qwen3_5_text": "mtp_num_hidden_layers", "qwen3_5_moe_text": "mtp_num_hidden_layers"}
    key = counts.get(kind, "num_nextn_predict_layers")
    new = drawn(config, seed) if tensors is None else tensors
    more = {"mtp_hybrid_override_pattern": "*E"} if kind == "nemotron_h" else {}
    config = {**config, **more, key: 1}
    if kind == "qwen3_next":
        del config[key]  # its config has no number
    (path / "config.json").write_text(json.dumps(config))
    save_file(stored | {n: t.contiguous() for n, t in new.items()}, path / "model.safetensors")
    return new


def read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    return json.loads((path / "config.json").read_text()), load_file(path / "model.safetensors")


def names(config: dict[str, Any]) -> dict[str, str]:
    """The tensors beside the layer: of the embedding's norm, the state's norm, their product, the last norm."""
    n = config.get("num_hidden_layers")
    kind = config["model_type"]
    found = {
        "mimo": [
            f"model.mtp_layers.0.{x}"
            for x in ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
        ],
        "ernie4_5_moe": [
            "model.mtp_emb_norm.0",
            "model.mtp_hidden_norm.0",
            "model.mtp_linear_proj.0",
            "model.norm",
        ],
        "nemotron_h": [
            f"mtp.layers.{x}" for x in ("0.enorm", "0.hnorm", "0.eh_proj", "1.final_layernorm")
        ],
        "glm4_moe": [
            f"model.layers.{n}.{x}" for x in ("enorm", "hnorm", "eh_proj", "shared_head.norm")
        ],
    }.get(kind, [f"mtp.{x}" for x in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")])
    return dict(
        zip(("embed", "hidden", "join", "final"), (f"{x}.weight" for x in found), strict=True)
    )


def below(config: dict[str, Any]) -> str:
    """The beginning of the names of the layer's tensors."""
    kind = config["model_type"]
    return {
        "mimo": "model.mtp_layers.0.",
        "ernie4_5_moe": "model.mtp_block.0.",
        "nemotron_h": "mtp.layers.",
        "glm4_moe": f"model.layers.{config.get('num_hidden_layers')}.",
    }.get(kind, "mtp.layers.0.")


def drawn(config: dict[str, Any], seed: int) -> dict[str, Tensor]:
    g, e, kind = torch.Generator().manual_seed(seed), config["hidden_size"], config["model_type"]
    is_qwen, first = kind.startswith("qwen3"), below(config)
    d = config.get("head_dim") or e // config["num_attention_heads"]
    q, kv = config["num_attention_heads"] * d, config["num_key_value_heads"] * d
    mixer = "0.mixer." if kind == "nemotron_h" else "self_attn."
    shapes: dict[str, tuple[int, ...]] = {
        f"{mixer}q_proj.weight": ((2 if is_qwen else 1) * q, e),
        f"{mixer}k_proj.weight": (kv, e),
        f"{mixer}v_proj.weight": (kv, e),
        f"{mixer}o_proj.weight": (e, q),
    }
    biased = kind == "mimo" or (kind == "glm4_moe" and config["attention_bias"])
    if biased:
        sizes = {"q": q, "k": kv, "v": kv}
        shapes |= {f"self_attn.{x}_proj.bias": (size,) for x, size in sizes.items()}
    if is_qwen or config.get("use_qk_norm"):
        shapes |= {f"self_attn.{x}_norm.weight": (d,) for x in "qk"}
    if kind == "nemotron_h":
        shapes |= {"0.norm.weight": (e,), "1.norm.weight": (e,)}
    else:
        shapes |= {"input_layernorm.weight": (e,), "post_attention_layernorm.weight": (e,)}
    num, size = num_experts(config), config.get("moe_intermediate_size")
    mlp = "1.mixer." if kind == "nemotron_h" else "mlp."
    if not num:
        shapes |= _mlp(mlp, e, config["intermediate_size"], gated=True)
    else:
        gated = kind != "nemotron_h"
        shapes[f"{mlp}gate.weight"] = (num, e)
        for i in range(num):
            shapes |= _mlp(f"{mlp}experts.{i}.", e, size, gated=gated)
        if is_qwen:
            shared, own = "shared_expert", config["shared_expert_intermediate_size"]
            shapes[f"{mlp}shared_expert_gate.weight"] = (1, e)
        else:
            shared, own = "shared_experts", config.get("moe_shared_expert_intermediate_size", size)
            shapes[f"{mlp}gate.e_score_correction_bias"] = (num,)
        shapes |= _mlp(f"{mlp}{shared}.", e, own, gated=gated)
    every = {first + n: s for n, s in shapes.items()}
    for ours, theirs in names(config).items():
        if theirs != "model.norm.weight":
            every[theirs] = (e, 2 * e) if ours == "join" else (e,)
    offset = 0.0 if is_qwen else 1.0
    return {
        n: torch.randn(s, generator=g) * (0.1 if len(s) == 1 else 0.3)
        + (offset if "norm" in n else 0.0)
        for n, s in every.items()
    }


def num_experts(config: dict[str, Any]) -> int:
    """ERNIE's layer that drafts has none, though the model has."""
    if config["model_type"] == "ernie4_5_moe":
        return 0
    return int(config.get("num_experts") or config.get("n_routed_experts") or 0)


def _mlp(name: str, e: int, size: int, *, gated: bool) -> dict[str, tuple[int, ...]]:
    shapes = {f"{name}up_proj.weight": (size, e), f"{name}down_proj.weight": (e, size)}
    return shapes | ({f"{name}gate_proj.weight": (size, e)} if gated else {})


# --- The maths --------------------------------------------------------------------------------------------------------


def logits(path: Path, hidden: Tensor, tokens: list[int], count: int) -> list[Tensor]:
    """Logits from which `count` drafts after `tokens` [n] are drawn, if each is the likeliest
    token. `hidden` [n − 1, E]: the model's states of tokens[:-1] after its last norm."""
    config, t = read(path)
    kind, eps = config["model_type"], config.get("rms_norm_eps", config.get("layer_norm_epsilon"))
    offset, of = 1.0 if kind.startswith("qwen3") else 0.0, names(config)
    embed = next(
        t[n] for n in ("model.embed_tokens.weight", "backbone.embeddings.weight") if n in t
    )
    head, found, drafts, states = t.get("lm_head.weight", embed), [], [], hidden

    def norm(x: Tensor, name: str) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * (offset + t[name])

    for _ in range(count):
        pair = norm(embed[[*tokens[1:], *drafts]], of["embed"]), norm(states, of["hidden"])
        x = torch.cat(pair[::-1] if kind == "mimo" else pair, -1) @ t[of["join"]].T
        x = layer(config, t, x, norm)
        out = norm(x, of["final"])
        found.append(out[-1] @ head.T)
        drafts.append(int(found[-1].argmax()))
        states = torch.cat((states, (x if kind == "glm4_moe" else out)[-1:]))
    return found


def layer(config: dict[str, Any], t: dict[str, Tensor], x: Tensor, norm: Any) -> Tensor:
    kind, first = config["model_type"], below(config)
    ins = (
        ("0.norm", "1.norm")
        if kind == "nemotron_h"
        else ("input_layernorm", "post_attention_layernorm")
    )
    x = x + attention(config, t, norm(x, f"{first}{ins[0]}.weight"), norm)
    h = norm(x, f"{first}{ins[1]}.weight")
    mlp = f"{first}{'1.mixer' if kind == 'nemotron_h' else 'mlp'}."
    return x + (mixture(config, t, h, mlp) if num_experts(config) else dense(t, h, mlp))


def attention(config: dict[str, Any], t: dict[str, Tensor], h: Tensor, norm: Any) -> Tensor:
    kind = config["model_type"]
    name = below(config) + ("0.mixer." if kind == "nemotron_h" else "self_attn.")
    d = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    q, k, v = (
        F.linear(h, t[f"{name}{n}_proj.weight"], t.get(f"{name}{n}_proj.bias")) for n in "qkv"
    )
    gate = None
    if kind.startswith("qwen3"):  # each head's query, then its gate
        q, gate = q.unflatten(1, (-1, 2 * d)).chunk(2, -1)
        q, gate = q.flatten(1), gate.flatten(1)
    q, k, v = (y.unflatten(1, (-1, d)) for y in (q, k, v))
    if f"{name}q_norm.weight" in t:
        q, k = norm(q, f"{name}q_norm.weight"), norm(k, f"{name}k_norm.weight")
    if kind != "nemotron_h":
        q, k = rotated(config, q, d), rotated(config, k, d)
    out = attend(q, k, v).flatten(1)
    return (out if gate is None else out * gate.sigmoid()) @ t[f"{name}o_proj.weight"].T


def rotated(config: dict[str, Any], x: Tensor, d: int) -> Tensor:
    """The first dimensions of each head by their positions; those of ERNIE in neighbouring pairs."""
    said = config.get("rope_parameters") or {}
    size = int(d * said.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)))
    theta = said.get("rope_theta", config.get("rope_theta"))
    angles = torch.outer(torch.arange(len(x)).float(), theta ** (-torch.arange(0, size, 2) / size))
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    y, rest = x[..., :size], x[..., size:]
    if config["model_type"] == "ernie4_5_moe":
        a, b = y[..., 0::2], y[..., 1::2]
        y = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    else:
        a, b = y.chunk(2, -1)
        y = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    return torch.cat((y, rest), -1)


def dense(t: dict[str, Tensor], h: Tensor, name: str) -> Tensor:
    up = h @ t[f"{name}up_proj.weight"].T
    gate = t.get(f"{name}gate_proj.weight")
    up = up.relu().square() if gate is None else F.silu(h @ gate.T) * up
    return up @ t[f"{name}down_proj.weight"].T


def mixture(config: dict[str, Any], t: dict[str, Tensor], h: Tensor, name: str) -> Tensor:
    scores, top = h @ t[f"{name}gate.weight"].T, config["num_experts_per_tok"]
    if config["model_type"].startswith("qwen3"):
        weights, chosen = scores.softmax(-1).topk(top)
        weights = weights / weights.sum(-1, keepdim=True)
        always = dense(t, h, f"{name}shared_expert.")
        out = always * (h @ t[f"{name}shared_expert_gate.weight"].T).sigmoid()
    else:
        scores = scores.sigmoid()
        corrected = scores + t[f"{name}gate.e_score_correction_bias"]
        groups = corrected.unflatten(1, (config["n_group"], -1))
        best = groups.topk(2).values.sum(-1).topk(config["topk_group"]).indices
        kept = torch.zeros(groups.shape[:2]).scatter(1, best, 1.0).bool()
        corrected = groups.masked_fill(~kept[..., None], -torch.inf).flatten(1)
        chosen = corrected.topk(top).indices
        weights = scores.gather(1, chosen)
        weights = weights / weights.sum(-1, keepdim=True) * config["routed_scaling_factor"]
        out = dense(t, h, f"{name}shared_experts.")
    for i in range(num_experts(config)):
        weight = torch.where(chosen == i, weights, 0.0).sum(-1, keepdim=True)
        out = out + weight * dense(t, h, f"{name}experts.{i}.")
    return out


# --- A model that counts ----------------------------------------------------------------------------------------------


def teach_to_count(path: Path, *, by: str) -> None:
    """Makes the model at `path` answer each token by the next one, and its layer that drafts know it: `by` the "token" of a
    pair, or by its "state" alone.

    Token t has the embedding [cos f·t, sin f·t] for some frequencies f, so a rotation leads to the next one. Nothing is added
    to the residual, and the output head's rows are those of the embeddings before.
    """
    config, stored = read(path)
    e, of = config["hidden_size"], names(config)
    embed = next(
        n for n in ("model.embed_tokens.weight", "backbone.embeddings.weight") if n in stored
    )
    size = len(stored[embed])
    step = 2 * torch.pi * torch.arange(1, e // 2 + 1) ** 2 / size
    angles = torch.outer(torch.arange(size), step)
    numbers = 2**0.5 * torch.cat((angles.cos(), angles.sin()), 1)
    cos, sin = step.cos().diag(), step.sin().diag()
    turn = torch.cat((torch.cat((cos, -sin), 1), torch.cat((sin, cos), 1)))
    offset = 1.0 if config["model_type"].startswith("qwen3") else 0.0
    for name, tensor in stored.items():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            tensor.zero_()
        elif "norm" in name and tensor.dim() == 1:
            tensor.fill_(1.0 - offset)
    stored[embed], stored["lm_head.weight"] = numbers, numbers.roll(1, 0)
    halves = [torch.eye(e), torch.zeros(e, e)] if by == "token" else [torch.zeros(e, e), turn]
    halves = halves[::-1] if config["model_type"] == "mimo" else halves
    stored[of["join"]] = torch.cat(halves, 1)
    config["tie_word_embeddings"] = False
    (path / "config.json").write_text(json.dumps(config))
    save_file({n: t.contiguous() for n, t in stored.items()}, path / "model.safetensors")


def add_to_text(path: Path, model_type: str) -> dict[str, Any]:
    """Adds a layer for drafts to the text model of a checkpoint with pictures. Returns the speculative config that uses it."""
    config, stored = read(path)
    new = drawn({**config["text_config"], "model_type": model_type}, 0)
    save_file(stored | new, path / "model.safetensors")
    return {"method": "mtp", "num_speculative_tokens": 3}
