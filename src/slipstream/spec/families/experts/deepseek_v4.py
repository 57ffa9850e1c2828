"""DeepSeek V4: attention to recent tokens and to compressed keys, hyper-connections, and V3's
mixtures. The first layers choose experts by token id.

Its MTP layers are not run."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from slipstream.spec.families.base import ConfigReader, Family, Names
from slipstream.spec.families.builders import before, kinds, model, rms, rope_of_kind
from slipstream.spec.families.names import Theirs, table
from slipstream.spec.model import (
    ClampedSilu,
    CompressedAttentionSpec,
    DenseSpec,
    HyperSpec,
    IndexSpec,
    LayerSpec,
    ModelSpec,
    MoESpec,
    RopeSpec,
    SharedExpertSpec,
)

NEAR = "sliding_attention"
SPARSE = "compressed_sparse_attention"
HEAVY = "heavily_compressed_attention"
OF_RATIO = {0: NEAR, 4: SPARSE, 128: HEAVY}


def read(c: ConfigReader) -> ModelSpec:
    c.assume_missing(
        **dict(hidden_size=4096, moe_intermediate_size=2048, num_hidden_layers=43, head_dim=512),
        **dict(num_attention_heads=64, q_lora_rank=1024, num_experts_per_tok=6, vocab_size=129280),
        **dict(n_routed_experts=256, n_shared_experts=1, routed_scaling_factor=1.5, hc_mult=4),
        **dict(max_position_embeddings=1048576, hc_sinkhorn_iters=20, hc_eps=1e-6, o_groups=8),
        **dict(swiglu_limit=10.0, sliding_window=128, o_lora_rank=1024, index_n_heads=64),
        **dict(index_head_dim=128, index_topk=512, rms_norm_eps=1e-6, scoring_func="sqrtsoftplus"),
    )
    c.require_all(num_key_value_heads=1, n_shared_experts=1, hidden_act="silu")
    c.require("norm_topk_prob", True)  # transformers always normalizes, whatever the config says
    c.require("topk_method", "noaux_tc")
    c.require("attention_bias", False)
    c.require("mlp_bias", False)
    c.ignore("num_nextn_predict_layers", "router_jitter_noise", "output_router_logits")
    c.ignore("router_aux_loss_coef", "n_group", "topk_group", "ep_size")
    c.require("expert_dtype", "bf16", "fp8")
    count, hidden, size = c.size("num_hidden_layers"), c.size("hidden_size"), c.size("head_dim")
    eps, longest = c.take("rms_norm_eps", float), c.size("max_position_embeddings")
    norm, of_layer, rates = rms(hidden, eps), _kinds(c, count), _rates(c)
    positions = _positions(c, size, longest)
    rotary = positions[True].rotary_dim
    num_heads, num_groups = c.size("num_attention_heads"), c.size("o_groups")
    if num_heads % num_groups:
        raise c.unsupported("o_groups", f"must divide num_attention_heads ({num_heads})")
    index = IndexSpec(
        num_heads=c.size("index_n_heads"),
        head_dim=c.size("index_head_dim"),
        top_k=c.size("index_topk"),
        position=positions[True],
    )
    if index.head_dim < rotary:
        raise c.unsupported("index_head_dim", f"must be at least {rotary}, the rotated part")
    near = CompressedAttentionSpec(
        num_heads=num_heads,
        nope_dim=size - rotary,
        value_dim=size,
        kv_rank=size - rotary,
        q_rank=c.size("q_lora_rank"),
        scale=size**-0.5,
        position=positions[False],
        eps=eps,
        local=c.size("sliding_window"),
        num_out_groups=num_groups,
        out_rank=c.size("o_lora_rank"),
    )
    heavy = dataclasses.replace(near, position=positions[True], rate=rates[HEAVY])
    sparse = dataclasses.replace(heavy, rate=rates[SPARSE], index_spec=index)
    for kind, a in {HEAVY: heavy, SPARSE: sparse}.items():
        if a.head_dim % a.entry_rows or index.head_dim % a.entry_rows:
            raise c.unsupported(
                "compress_rates",
                f"{kind}: head_dim and index_head_dim must be multiples of {a.entry_rows}",
            )
    attentions = {NEAR: near, HEAVY: heavy, SPARSE: sparse}
    mlps = _mlps(c, count)
    streams = HyperSpec(
        count=c.size("hc_mult"),
        iterations=c.size("hc_sinkhorn_iters"),
        eps=c.take("hc_eps", float),
        norm_eps=eps,
    )

    def layer(i: int) -> LayerSpec:
        return LayerSpec(
            attention=attentions[of_layer[i]],
            mlp=mlps[i],
            block=before(norm),
            streams=dataclasses.replace(streams, opens=i == 0, closes=i == count - 1),
        )

    return model(c, "deepseek_v4", layer, norm, longest)


def _kinds(c: ConfigReader, count: int) -> list[str]:
    """Kind of each layer. The authors' key lists the tokens per compressed key, with MTP layers at the end."""
    ratios = c.take("compress_ratios", list, [])
    if ratios and (len(ratios) < count or not {*ratios} <= OF_RATIO.keys()):
        raise c.unsupported("compress_ratios", f"must be at least {count} of 0, 4 or 128")

    def default(i: int) -> str:
        if ratios:
            return OF_RATIO[ratios[i]]
        return SPARSE if i > 2 and i % 2 else HEAVY

    return kinds(c, (NEAR, SPARSE, HEAVY), default)


def _rates(c: ConfigReader) -> dict[str, int]:
    """Tokens per compressed key, by kind of layer."""
    found: dict[str, Any] = {SPARSE: 4, HEAVY: 128, **c.take("compress_rates", dict, {})}
    for kind, key in ((SPARSE, "compress_rate_csa"), (HEAVY, "compress_rate_hca")):
        if key in c:
            found[kind] = c.size(key)
    if found.keys() != {SPARSE, HEAVY} or not all(type(n) is int and n > 0 for n in found.values()):
        raise c.unsupported("compress_rates", f"must have whole numbers for {SPARSE} and {HEAVY}")
    return found


def _positions(c: ConfigReader, size: int, longest: int) -> dict[bool, RopeSpec]:
    """Rotary embeddings: False for layers without compressed keys, True for those with them. Only the latter is scaled."""
    rotary = c.maybe("qk_rope_head_dim", int)
    part = c.take("partial_rotary_factor", float, (rotary or size // 8) / size)
    if rotary is not None and rotary != int(size * part):
        raise c.unsupported("qk_rope_head_dim", "partial_rotary_factor says otherwise")
    thetas = c.take("rope_theta", float, 1e4), c.take("compress_rope_theta", float, 160000.0)
    raw = c.maybe("rope_scaling", dict) or c.maybe("rope_parameters", dict) or {}
    if {"main", "compress"} & raw.keys():
        if not all(isinstance(x, dict) for x in raw.values()) or len(raw) != 2:
            raise c.unsupported("rope_parameters", "must have objects for main and compress")
        own = {"sliding_attention": raw["main"], "full_attention": raw["compress"]}
    else:
        scaled = {k: v for k, v in raw.items() if k not in ("rope_theta", "partial_rotary_factor")}
        own = {"sliding_attention": {}, "full_attention": scaled}
    c.put(rope_parameters=own, rope_scaling=None)
    made = {}
    for is_compressed, kind in ((False, "sliding_attention"), (True, "full_attention")):
        theirs = {"rope_theta": thetas[is_compressed], "partial_rotary_factor": part, **own[kind]}
        if theirs.get("rope_type", theirs.get("type")) == "yarn":
            theirs.setdefault("attention_factor", 1.0)
        c.put(rope_parameters={kind: theirs})
        found = rope_of_kind(c, kind, size, max_position=longest, theta=1e4, partial=part)
        made[is_compressed] = dataclasses.replace(found, style="interleaved")
    if made[True].rotary_dim != made[False].rotary_dim or made[True].rotary_dim % 2:
        raise c.unsupported("rope_parameters", "main and compress must rotate the same even part")
    return made


def _mlps(c: ConfigReader, count: int) -> list[MoESpec]:
    num_hashed = c.take("num_hash_layers", int, 3)
    of_layer = kinds(
        c, ("hash_moe", "moe"), lambda i: "hash_moe" if i < num_hashed else "moe", "mlp_layer_types"
    )
    scoring = c.take("scoring_func", str)
    scores: dict[str, Literal["sqrt_softplus", "sigmoid"]] = {
        "sqrtsoftplus": "sqrt_softplus",
        "sigmoid": "sigmoid",
    }
    if scoring not in scores:
        raise c.unsupported("scoring_func", f"must be {' or '.join(scores)}")
    limit = c.take("swiglu_limit", float)
    if limit <= 0:
        raise c.unsupported("swiglu_limit", "must be above 0")
    expert = DenseSpec(
        intermediate_size=c.size("moe_intermediate_size"),
        activation=ClampedSilu(limit=limit, of_gate=True),
    )
    moe = MoESpec(
        num_experts=c.size("n_routed_experts"),
        num_experts_per_token=c.size("num_experts_per_tok"),
        expert=expert,
        normalize=True,
        scores=scores[scoring],
        correction=True,
        weight_scale=c.take("routed_scaling_factor", float),
        shared=SharedExpertSpec(mlp=expert),
    )
    hashed = dataclasses.replace(moe, correction=False, hashed=c.size("vocab_size"))
    return [hashed if kind == "hash_moe" else moe for kind in of_layer]


def _hyper(ours: str, theirs: str) -> dict[str, Theirs]:
    parts = {"product": "fn", "base": "base", "scale": "scale"}
    return {f"hyper.{ours}_{x}": {"weight": f"{theirs}_{y}"} for x, y in parts.items()}


NAMES: dict[str, Theirs] = {
    "embed": "embed",
    "final_norm": "norm",
    "head": "head",
    "pre_attention": "attn_norm",
    "attention.q_latent": "attn.wq_a",
    "attention.q_norm": "attn.q_norm",
    "attention.q": "attn.wq_b",
    "attention.latent": "attn.wkv",
    "attention.k_norm": "attn.norm",
    "attention.compress": (
        *("attn.compressor.wkv", "attn.compressor.wgate"),
        *("attn.indexer.compressor.wkv", "attn.indexer.compressor.wgate"),
    ),
    "attention.gate_bias": {"weight": "attn.compressor.ape"},
    "attention.entry_norm": "attn.compressor.norm",
    "attention.index_gate_bias": {"weight": "attn.indexer.compressor.ape"},
    "attention.index_norm": "attn.indexer.compressor.norm",
    "attention.index_q": "attn.indexer.wq_b",
    "attention.index_weights": "attn.indexer.weights_proj",
    "attention.sinks": {"weight": "attn.attn_sink"},
    "attention.out_parts": "attn.wo_a",
    "attention.out": "attn.wo_b",
    "pre_mlp": "ffn_norm",
    "router": "ffn.gate",
    "correction": {"weight": "ffn.gate.bias"},
    "expert_table": {"weight": "ffn.gate.tid2eid"},
    "experts.up": ("ffn.experts.{e}.w1", "ffn.experts.{e}.w3"),
    "experts.down": "ffn.experts.{e}.w2",
    "shared.up": ("ffn.shared_experts.w1", "ffn.shared_experts.w3"),
    "shared.down": "ffn.shared_experts.w2",
    **_hyper("attention", "hc_attn"),
    **_hyper("mlp", "hc_ffn"),
    **_hyper("last", "hc_head"),
}
"""The authors' names, which transformers also writes."""


def names(spec: ModelSpec) -> Names:
    found = table(NAMES, layer="layers.{i}.", changes={"expert_table": "integers"})(spec)
    return {
        name.rpartition(".")[2] if ".hc_head_" in name else name: place
        for name, place in found.items()
    }


FAMILIES = (
    Family(
        model_type="deepseek_v4",
        architectures=("DeepseekV4ForCausalLM",),
        read=read,
        names=names,
        prefixes=("model.", ""),
        ignored=(r"(model\.)?mtp\..*", r"lm_head\.weight"),  # the head is tied to the embeddings
    ),
)
