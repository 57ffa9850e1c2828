"""Proposals of draft heads by their published maths, in plain torch over whole sequences. See
`draft_heads` for the heads."""

from __future__ import annotations

import copy

import torch
from torch.nn import functional as F

from tests.support import draft_heads


def naive_drafts(setup, hidden, tokens, count):
    """`count` tokens behind `tokens` [n]. `hidden`: the model's states of tokens[:-1] before each layer [n − 1, E], and at last
    the normed ones."""
    naive = {
        "eagle": eagle1,
        "eagle3": eagle3,
        "peagle": peagle,
        "dflash": dflash,
        "medusa": medusa,
        "mtp": mtp,
    }
    return naive[setup.config["method"]](setup, hidden, tokens, count)


def rms(x, weight, eps=1e-5):
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def attend(q, k, v, *, causal=True):
    """[n, H, D] over [n, K, D]"""
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[1:]).triu(1).bool(), -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)


def rotate(x, theta, first=0):
    """Rotation in half style, at positions `first`, …"""
    half = x.shape[-1] // 2
    angles = torch.outer(
        torch.arange(first, first + len(x)).float(), theta ** (-torch.arange(half) / half)
    )[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)


def layer(t, x, inputs, theta, keys=None, below=""):
    """Llama's layer, whose attention reads `inputs`; x is the residual. With `keys` [n, E] the attention is over keys and
    values of these, to which the last ones belong, and has no mask."""
    heads = {
        n: (inputs if n == "q" or keys is None else keys) @ t[f"{below}self_attn.{n}_proj.weight"].T
        for n in "qkv"
    }
    q, k, v = (heads[n].unflatten(1, (-1, 8)) for n in "qkv")
    if keys is not None:
        q, k = (rms(y, t[f"{below}self_attn.{n}_norm.weight"]) for n, y in (("q", q), ("k", k)))
    first = len(k) - len(q)
    mixed = attend(rotate(q, theta, first), rotate(k, theta), v, causal=keys is None)
    x = x + mixed.flatten(1) @ t[f"{below}self_attn.o_proj.weight"].T
    h = rms(x, t[f"{below}post_attention_layernorm.weight"])
    gate, up = (h @ t[f"{below}mlp.{n}_proj.weight"].T for n in ("gate", "up"))
    return x + (F.silu(gate) * up) @ t[f"{below}mlp.down_proj.weight"].T


def first_layer(setup, states, ids):
    """First layer of EAGLE-3 and P-EAGLE, which reads [embedding; state]."""
    t = setup.tensors
    e = rms(setup.model.get_input_embeddings().weight[ids], t["input_layernorm.weight"])
    h = rms(states, t["hidden_norm.weight"])
    residual = h if setup.head.get("norm_before_residual") else states
    return layer(t, residual, torch.cat((e, h), -1), theta(setup))


def theta(setup):
    return setup.head.get("transformer_layer_config", {}).get("rope_theta", 10000.0)


def chosen(setup, hidden):
    """The likeliest tokens, of the head's own."""
    t = setup.tensors
    head = t.get("lm_head.weight", setup.model.get_output_embeddings().weight)
    found = (hidden @ head.T).argmax(-1)
    return (found + t["d2t"][found] if "d2t" in t else found).tolist()


def eagle3(setup, hidden, tokens, count):
    t, drafts = setup.tensors, []
    states = fused(setup, [hidden[i] for i in (1, 2, 4)])
    for _ in range(count):
        x = first_layer(setup, states, [*tokens[1:], *drafts])[-1:]
        normed = rms(x, t["norm.weight"])
        drafts += chosen(setup, normed)
        states = torch.cat((states, normed if setup.head.get("norm_output") else x))
    return drafts


def fused(setup, states):
    """Output of `fc` for several layers' states. Each has its own norm with `fc_norm`, all have
    one with `input_norm`."""
    t = setup.tensors
    if "input_norm.weight" in t:
        return rms(torch.cat(states, -1), t["input_norm.weight"]) @ t["fc.weight"].T
    if setup.head.get("fc_norm"):
        states = [rms(h, t[f"fc_norm.{i}.weight"]) for i, h in enumerate(states)]
    return torch.cat(states, -1) @ t["fc.weight"].T


def peagle(setup, hidden, tokens, count):
    t = setup.tensors
    masks = t["mask_hidden"].view(1, 3, -1).expand(count - 1, 3, -1).unbind(1)
    states = fused(
        setup, [torch.cat((hidden[i], mask)) for i, mask in zip((1, 2, 4), masks, strict=True)]
    )
    x = first_layer(setup, states, [*tokens[1:], *[draft_heads.MASK] * (count - 1)])
    inputs = rms(x, t["layers.1.input_layernorm.weight"])
    x = layer(t, x, inputs, theta(setup), below="layers.1.")
    return chosen(setup, rms(x[-count:], t["norm.weight"]))


def eagle1(setup, hidden, tokens, count):
    t, drafts, states = setup.tensors, [], hidden[-1]
    for _ in range(count):
        e = setup.model.get_input_embeddings().weight[[*tokens[1:], *drafts]]
        x = torch.cat((e, states), -1) @ t["fc.weight"].T + t.get("fc.bias", 0.0)
        x = layer(t, x, x, 10000.0)
        drafts += chosen(setup, x[-1:])
        states = torch.cat((states, x[-1:]))
    return drafts


def dflash(setup, hidden, tokens, count):
    t = setup.tensors
    embed = t.get("embed_tokens.weight", setup.model.get_input_embeddings().weight)
    context = rms(
        torch.cat([hidden[i] for i in (2, 5)], -1) @ t["fc.weight"].T, t["hidden_norm.weight"]
    )
    x = embed[[tokens[-1], *[draft_heads.MASK] * count]]
    for i in range(2):
        rows = rms(x, t[f"layers.{i}.input_layernorm.weight"])
        x = layer(t, x, rows, 10000.0, keys=torch.cat((context, rows)), below=f"layers.{i}.")
    return chosen(setup, rms(x[1:], t["norm.weight"]))


def medusa(setup, hidden, tokens, count):
    t, drafts = setup.tensors, []
    for i in range(count):
        head = t.get(f"lm_heads.{i}.weight" if setup.kind == "converted" else f"{i}.2.weight")
        head = setup.model.get_output_embeddings().weight if head is None else head
        drafts.append(int((head @ medusa_states(setup, hidden[-1][-1], i)).argmax()))
    return drafts


def medusa_states(setup, x, place):
    """Output of a position's blocks for the model's states [..., E]."""
    t = setup.tensors
    for j in range(2):
        name = f"blocks.{place}.layers.{j}" if setup.kind == "converted" else f"{place}.{j}.linear"
        x = x + F.silu(x @ t[f"{name}.weight"].T + t[f"{name}.bias"])
    return x


def mtp(setup, hidden, tokens, count):
    """The layer itself is transformers': the model's last, with the head's weights."""
    t, model, drafts, states = setup.tensors, setup.model, [], hidden[-1]
    alone = copy.deepcopy(model.model)
    alone.layers = alone.layers[-1:]
    alone.layers[0].self_attn.layer_idx = 0
    alone.config.num_hidden_layers = 1
    own = {n: x for n, x in t.items() if n in alone.layers[0].state_dict()}
    experts = [
        [t[f"mlp.experts.{e}.{n}_proj.weight"] for n in ("gate", "up", "down")] for e in range(8)
    ]
    own["mlp.experts.gate_up_proj"] = torch.stack(
        [torch.cat((gate, up)) for gate, up, _ in experts]
    )
    own["mlp.experts.down_proj"] = torch.stack([down for *_, down in experts])
    alone.layers[0].load_state_dict(own)
    alone.norm = torch.nn.Identity()
    eps = model.config.rms_norm_eps
    for _ in range(count):
        e = rms(model.get_input_embeddings().weight[[*tokens[1:], *drafts]], t["enorm.weight"], eps)
        x = torch.cat((e, rms(states, t["hnorm.weight"], eps)), -1) @ t["eh_proj.weight"].T
        x = alone(inputs_embeds=x[None], use_cache=False).last_hidden_state[0]
        drafts.append(
            int(
                (
                    rms(x[-1], t["shared_head.norm.weight"], eps) @ t["shared_head.head.weight"].T
                ).argmax()
            )
        )
        states = torch.cat((states, x[-1:]))
    return drafts
