"""Zamba 2: Mamba-2 layers. Before some of them one of a few shared transformer blocks runs. No torch."""

from __future__ import annotations

import math
from typing import Any

from slipstream.spec.families.base import ConfigReader, Family, Names
from slipstream.spec.families.builders import HeadCounts, attention, gated, kinds, model, rms, rope
from slipstream.spec.families.hybrids.mamba import mamba_names
from slipstream.spec.families.names import LLAMA, Theirs, of_conv, table
from slipstream.spec.model import (
    LayerSpec,
    Mamba2Spec,
    ModelSpec,
    RecallSpec,
    SequentialBlock,
    SharedTensor,
)


def _default(i: int) -> str:
    return "hybrid" if (i % 6 == 0 and 0 < i < 43) or i in (47, 51) else "linear_attention"


def read(c: ConfigReader) -> ModelSpec:
    c.assume(hidden_size=2560, num_hidden_layers=54, num_attention_heads=32, vocab_size=32000)
    c.assume(intermediate_size=4 * c.size("hidden_size"))
    hidden, queries = c.size("hidden_size"), c.size("num_attention_heads")
    width, max_position = (
        c.size("mamba_expand", 2) * hidden,
        c.size("max_position_embeddings", 4096),
    )
    num_heads, groups = c.size("n_mamba_heads", 8), c.size("mamba_ngroups", 1)
    if 2 * hidden % queries:
        raise c.unsupported("num_attention_heads", f"must divide {2 * hidden}, twice hidden_size")
    if width % num_heads or num_heads % groups:
        raise c.unsupported("n_mamba_heads", f"must divide {width} channels, into mamba_ngroups")
    h = HeadCounts(queries, c.size("num_key_value_heads", queries), 2 * hidden // queries)
    for key, value in (
        *(("attention_hidden_size", 2 * hidden), ("attention_head_dim", h.head_dim)),
        *(("head_dim", h.head_dim), ("mamba_headdim", width // num_heads)),
        *(("kv_channels", hidden // queries), ("num_query_groups", queries)),
        *(("add_bias_linear", False), ("use_long_context", False)),
    ):
        c.require(key, value)
    c.ignore("use_conv_bias", "use_mamba_kernels", "use_mem_eff_path", "chunk_size")
    c.ignore("num_logits_to_keep", "time_step_max", "time_step_floor")
    which = kinds(
        c,
        ("linear_attention", "hybrid"),
        _default,
        "layers_block_type" if "layers_block_type" in c else "layer_types",
    )
    hybrids = [i for i, kind in enumerate(which) if kind == "hybrid"]
    if not hybrids:
        raise c.unsupported("layers_block_type", "some layers must be hybrid")
    c.require("hybrid_layer_ids", hybrids)
    attends = c.take("use_shared_attention_adapter", bool, False)
    if attends and h.num_kv_heads != queries:
        raise c.unsupported("num_key_value_heads", "adapters of keys have all heads' rows")
    c.size("adapter_rank", 128)
    # with untied embeddings, transformers doesn't share the transformer blocks either
    count = len(hybrids) if c.value("tie_word_embeddings") is False else c.size("num_mem_blocks", 1)
    c.ignore("num_mem_blocks")
    shared = _shared(hybrids, count, attends)
    position = rope(c, h.head_dim, max_position=max_position)
    rotated = c.take("use_mem_rope", bool, False)
    eps = c.take("rms_norm_eps", float, 1e-5)
    of = attention(
        h, position if rotated else None, scale=(h.head_dim / 2) ** -0.5, reads=2 * hidden
    )
    norm, mlp = rms(hidden, eps), gated(c, default="gelu")
    recurrent = Mamba2Spec(
        num_heads=num_heads,
        value_dim=width // num_heads,
        key_dim=c.size("mamba_d_state", 64),
        num_groups=groups,
        conv_width=c.size("mamba_d_conv", 4),
        eps=1e-5,
        norm_groups=groups,
        time_limit=(c.take("time_step_min", float, 0.001), math.inf),
    )

    def layer(i: int) -> LayerSpec:
        joins, last = which[i] == "hybrid", len(which) - 1
        recall = RecallSpec(norm=norm, joins=joins, opens=i == 0, closes=i == last)
        block = SequentialBlock()
        if joins:
            block = SequentialBlock(pre_attention=rms(2 * hidden, eps), pre_mlp=norm)
        more: dict[str, Any] = {"attention": of if joins else None, "mlp": mlp if joins else None}
        return LayerSpec(recurrent=recurrent, block=block, streams=recall, **more)

    return model(c, "zamba2", layer, norm, max_position, tied=True, shared=shared)


WHOLE = ("input_layernorm", "pre_ff_layernorm", "self_attn.o_proj", "feed_forward.down_proj")
"""Modules of a shared transformer block that its layers use without an adapter."""


def _shared(
    hybrids: list[int], num_blocks: int, attends: bool
) -> tuple[tuple[str, SharedTensor], ...]:
    """Tensors of each hybrid layer's transformer block: those of the first layer that uses the block, and the layer's own
    adapters."""
    lists = {"feed_forward.gate_up_proj": "feed_forward.gate_up_proj_adapter_list"}
    for x in "qkv":
        lists[f"self_attn.{x}_proj"] = f"self_attn.linear_{x}_adapter_list" if attends else ""
    found = dict[str, SharedTensor]()
    for n, i in enumerate(hybrids):
        own, first = (f"model.layers.{j}.{SHARED}" for j in (i, hybrids[n % num_blocks]))
        for module in WHOLE:
            found[f"{own}{module}.weight"] = SharedTensor(f"{first}{module}.weight")
        for module, adapters in lists.items():
            parts = [f"{first}{adapters}.{n}.{x}.weight" for x in (0, 1)] if adapters else ()
            found[f"{own}{module}.weight"] = SharedTensor(f"{first}{module}.weight", *parts)
    return tuple(found.items())


SHARED = "shared_transformer."
NAMES: dict[str, Theirs] = {
    **LLAMA,
    **mamba_names("mamba"),
    "final_norm": "model.final_layernorm",
    "streams.norm": "input_layernorm",
    "streams.join": "linear",
    "pre_attention": f"{SHARED}input_layernorm",
    "attention.qkv": tuple(f"{SHARED}self_attn.{x}_proj" for x in "qkv"),
    "attention.out": f"{SHARED}self_attn.o_proj",
    "pre_mlp": f"{SHARED}pre_ff_layernorm",
    "mlp.up": f"{SHARED}feed_forward.gate_up_proj",
    "mlp.down": f"{SHARED}feed_forward.down_proj",
}


def names(spec: ModelSpec) -> Names:
    """Table of names. In a hybrid layer, Mamba is a nested module."""
    found = table(NAMES, changes={"recurrent.conv": of_conv})(spec)
    for i, layer in enumerate(spec.layers):
        if layer.attention is not None:
            for part in ("input_layernorm.", "mamba."):
                below = f"model.layers.{i}."
                for name in [x for x in found if x.startswith(below + part)]:
                    found[f"{below}mamba_decoder.{name.removeprefix(below)}"] = found.pop(name)
    return found


FAMILIES = (
    Family(
        model_type="zamba2",
        architectures=("Zamba2ForCausalLM", "Zamba2ForSequenceClassification"),
        read=read,
        names=names,
        ignored=(rf".*\.{SHARED}.*_adapter_list\..*",),  # other layers' adapters
    ),
)
