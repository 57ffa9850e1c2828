"""Gemma 3n's language models, also those of multimodal checkpoints, without their image and audio encoders.

1. Layers have several parallel residual streams (AltUp), per-layer input embeddings, and a low-rank branch added to
   attention's output.
2. The last layers read the keys and values of an earlier layer of their kind.
3. Scores are not scaled; queries, keys and values are normed. In the first layers all but the largest MLP gates are set to
   zero.
"""

from __future__ import annotations

import dataclasses
import re
from statistics import NormalDist
from typing import Any

from slipstream.spec.families.base import ConfigReader, Family, GGUFFamily, Names
from slipstream.spec.families.builders import (
    activation,
    attention,
    heads,
    kinds_of_layers,
    model,
    rms,
    rope_of_kind,
)
from slipstream.spec.families.gemma import SANDWICH, TANH
from slipstream.spec.families.names import Theirs, gguf_table, table
from slipstream.spec.model import (
    DenseSpec,
    LayerInputsSpec,
    LayerSpec,
    ModelSpec,
    OwnInputSpec,
    QKNormSpec,
    SequentialBlock,
    StreamsSpec,
)
from slipstream.spec.parameters import Placement

DEFAULTS = {
    "vocab_size": 262_400,
    "hidden_size": 2048,
    "num_hidden_layers": 35,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
}
FULL, WINDOW = "full_attention", "sliding_attention"


def read(c: ConfigReader) -> ModelSpec:
    c.require("model_type", "gemma3n_text")
    c.assume(**DEFAULTS)
    h, hidden, count = heads(c), c.size("hidden_size"), c.size("num_hidden_layers")
    max_position, eps = (
        c.size("max_position_embeddings", 32768),
        c.take("rms_norm_eps", float, 1e-6),
    )
    norm, bias = rms(hidden, eps), c.take("attention_bias", bool, False)
    kinds = kinds_of_layers(c, lambda i: WINDOW if (i + 1) % 5 else FULL)
    window, num_shared = c.size("sliding_window", 512), c.take("num_kv_shared_layers", int, 15)
    if not 0 <= num_shared < count:
        raise c.unsupported("num_kv_shared_layers", f"must be from 0 to {count - 1}")
    owning = count - num_shared
    if missing := set(kinds[owning:]) - set(kinds[:owning]):
        raise c.unsupported(
            "num_kv_shared_layers", f"no layer before has keys and values of {missing.pop()}"
        )
    last_of = {kind: i for i, kind in enumerate(kinds[:owning])}
    mlps = _mlps(c, count)
    inputs = LayerInputsSpec(
        vocab_size=c.size("vocab_size_per_layer_input", 262_144),
        size=c.size("hidden_size_per_layer_input", 256),
        num_layers=count,
        scale=c.size("hidden_size_per_layer_input", 256) ** 0.5,
        factor=2**-0.5,
        norm=rms(c.size("hidden_size_per_layer_input", 256), eps * hidden),
    )
    num_streams, active = c.size("altup_num_inputs", 4), c.take("altup_active_idx", int, 0)
    if num_streams < 2 or not 0 <= active < num_streams:
        raise c.unsupported("altup_active_idx", "must be one of at least 2 altup_num_inputs")
    c.ignore("altup_coef_clip", "altup_lr_multiplier")  # only used in training
    c.ignore("query_pre_attn_scalar")  # scores are not scaled
    streams = StreamsSpec(
        count=num_streams,
        active=active,
        low_rank=c.size("laurel_rank", 64),
        scaled=c.take("altup_correct_scale", bool, True),
        norm=rms(hidden, eps, gain=1 / hidden),
        low_rank_norm=norm,
    )
    block = SequentialBlock(pre_attention=norm, post_attention=norm, pre_mlp=norm, post_mlp=norm)

    def layer(i: int) -> LayerSpec:
        kind, shares = kinds[i], i >= owning
        key, theta = ("rope_theta", 1e6) if kind == FULL else ("rope_local_base_freq", 1e4)
        position = rope_of_kind(
            c,
            kind,
            h.head_dim,
            max_position=max_position,
            theta=theta,
            theta_key=key,
            scaled=kind == FULL,
        )
        of = attention(
            h,
            position,
            scale=1.0,
            qkv_bias=bias,
            out_bias=bias,
            window=window if kind == WINDOW else None,
            qk_norm=QKNormSpec(over="head", eps=eps),
            value_eps=None if shares else eps,
            kv_from=last_of[kind] if shares else None,
        )
        act = mlps[i].activation
        assert isinstance(act, str)
        own = OwnInputSpec(size=inputs.size, first=i * inputs.size, activation=act, norm=norm)
        ends = dataclasses.replace(streams, opens=i == 0, closes=i == count - 1)
        return LayerSpec(attention=of, mlp=mlps[i], block=block, own_input=own, streams=ends)

    cap = c.maybe("final_logit_softcapping", float) if c.says("final_logit_softcapping") else 30.0
    return model(
        c,
        "gemma3n",
        layer,
        norm,
        max_position,
        embed_scale=hidden**0.5,
        logit_softcap=cap,
        layer_inputs=inputs,
        tied=True,
    )


def _mlps(c: ConfigReader, count: int) -> list[DenseSpec]:
    """MLP of each layer. A single size in the config applies to all layers."""
    sizes = c.value("intermediate_size") or 16384
    sizes = sizes if isinstance(sizes, list) else [sizes] * count
    if len(sizes) != count or not all(type(n) is int and 1 <= n < 2**31 for n in sizes):
        raise c.unsupported("intermediate_size", f"must be a number above 0, or {count} of them")
    zeroed = c.value("activation_sparsity_pattern")
    if zeroed is None:
        num_sparse = 10 if count > 10 else 0
        zeroed = [0.95] * num_sparse + [0.0] * (count - num_sparse)
    zeroed = zeroed if isinstance(zeroed, list) else [zeroed] * count
    if len(zeroed) != count or not all(type(x) in (int, float) and 0 <= x < 1 for x in zeroed):
        raise c.unsupported("activation_sparsity_pattern", f"must be {count} numbers from 0 to 1")
    act = activation(c, "hidden_activation", TANH)
    return [
        DenseSpec(intermediate_size=size, activation=act, sparsity=float(part))
        for size, part in zip(sizes, zeroed, strict=True)
    ]


NAMES: dict[str, Theirs] = {
    **SANDWICH,
    "own_input.gate": "per_layer_input_gate",
    "own_input.project": "per_layer_projection",
    "own_input.norm": "post_per_layer_input_norm",
    "streams.router": "altup.modality_router",
    "streams.predict": "altup.prediction_coefs",
    "streams.correct": "altup.correction_coefs",
    "streams.norm": "altup.router_norm",
    "streams.scale": {"weight": "altup.correct_output_scale"},
    "streams.narrow": "laurel.linear_left",
    "streams.wide": "laurel.linear_right",
    "streams.low_rank_norm": "laurel.post_laurel_norm",
    "layer_inputs.table": "model.embed_tokens_per_layer",
    "layer_inputs.project": "model.per_layer_model_projection",
    "layer_inputs.norm": "model.per_layer_projection_norm",
}
ENDS: dict[str, Theirs] = {
    "streams.open": "altup_projections",
    "streams.close": "altup_unembed_projections",
}
OF_ENDS = re.compile(r"(model\.|)(?:layers|blk)\.\d+\.(altup_(?:unemb\w*_)?proj\w*)\.weight")
GGUF3N: dict[str, Theirs] = {
    "own_input.gate": "inp_gate",
    "own_input.project": "proj",
    "own_input.norm": "post_norm",
    "streams.router": "altup_router",
    "streams.predict": "altup_predict_coef",
    "streams.correct": "altup_correct_coef",
    "streams.norm": "altup_router_norm",
    "streams.scale": "altup_correct_scale",
    "streams.narrow": "laurel_l",
    "streams.wide": "laurel_r",
    "streams.low_rank_norm": "laurel_post_norm",
    "streams.open": "altup_proj",
    "streams.close": "altup_unembd_proj",
    "layer_inputs.table": "per_layer_token_embd",
    "layer_inputs.project": "per_layer_model_proj",
    "layer_inputs.norm": "per_layer_proj_norm",
}


def names(spec: ModelSpec) -> Names:
    """Table of tensor names. Projections to and from the residual streams belong to the first and
    last layer here, but have no layer number in the checkpoint."""
    return _without_layer(table({**NAMES, **ENDS})(spec), spec, stacked=False)


def gguf_names(spec: ModelSpec) -> Names:
    return _without_layer(gguf_table(GGUF3N)(spec), spec, stacked=True)


def _without_layer(found: Names, spec: ModelSpec, *, stacked: bool) -> Names:
    """`found` with stream projections named without a layer number. `stacked`: one tensor holds the
    projections of all streams."""
    made, rows = {}, spec.hidden_size
    for name, place in found.items():
        end, s = OF_ENDS.fullmatch(name), spec.layers[0].streams
        if end is None or not isinstance(s, StreamsSpec):
            made[name] = place
        elif stacked:
            made[f"{end[2]}.weight"] = Placement(place.target, copies=s.count - 1)
        else:
            for i in range(s.count - 1):
                own = Placement(place.target, i * rows, rows)
                made[f"{end[1]}{end[2]}.{i}.weight"] = own
    return made


def gguf_config(m: ConfigReader) -> dict[str, Any]:
    count, inner = m.size("block_count"), m.value("feed_forward_length")
    pattern = m.take(
        "attention.sliding_window_pattern", list, [(i + 1) % 5 != 0 for i in range(count)]
    )
    head_dim = m.size("attention.key_length")
    m.require("attention.value_length", head_dim)
    m.require("rope.dimension_count", head_dim)
    deviations = m.maybe("activation_sparsity_scale", list)
    config: dict[str, Any] = {
        "model_type": "gemma3n_text",
        "hidden_size": m.size("embedding_length"),
        "num_hidden_layers": count,
        "intermediate_size": inner,
        "num_attention_heads": m.size("attention.head_count"),
        "num_key_value_heads": m.size("attention.head_count_kv"),
        "head_dim": head_dim,
        "max_position_embeddings": m.size("context_length"),
        "rms_norm_eps": m.take("attention.layer_norm_rms_epsilon", float),
        "hidden_activation": TANH,
        "sliding_window": m.size("attention.sliding_window"),
        "layer_types": [WINDOW if has_window else FULL for has_window in pattern],
        "num_kv_shared_layers": m.take("attention.shared_kv_layers", int, 15),
        "hidden_size_per_layer_input": m.size("embedding_length_per_layer_input"),
        "altup_active_idx": m.take("altup.active_idx", int, 0),
        "altup_num_inputs": m.size("altup.num_inputs", 4),
        "rope_theta": m.take("rope.freq_base", float, 1e6),
        "rope_local_base_freq": m.take("rope.freq_base_swa", float, 1e4),
    }
    if deviations is not None:  # −∞ without a threshold
        normal = NormalDist()
        config["activation_sparsity_pattern"] = [normal.cdf(float(x)) for x in deviations]
    if (cap := m.maybe("final_logit_softcapping", float)) is not None:
        config["final_logit_softcapping"] = cap
    for key, tensor, side in (
        ("vocab_size_per_layer_input", "per_layer_token_embd.weight", 0),
        ("laurel_rank", "blk.0.laurel_l.weight", 0),
    ):
        if (shape := m.maybe(tensor, list)) is not None:
            config[key] = shape[side]
    return config


UNUSED = r"(model\.)?layers\.\d+\.self_attn\.(k_proj|v_proj|k_norm)\.weight"
TOWERS = r"(model\.)?(vision_tower|embed_vision|audio_tower|embed_audio)\..*"

FAMILIES = (
    Family(
        model_type="gemma3n_text",
        architectures=("Gemma3nForCausalLM",),
        read=read,
        names=names,
        ignored=(UNUSED,),
        gguf=GGUFFamily(
            architecture="gemma3n",
            config=gguf_config,
            names=gguf_names,
            ignored=(r"blk\.\d+\.attn_(k|v|k_norm)\.weight",),
            shapes=(r"per_layer_token_embd\.weight", r"blk\.0\.laurel_l\.weight"),
        ),
    ),
    Family(
        model_type="gemma3n",
        architectures=("Gemma3nForConditionalGeneration",),
        read=read,
        names=names,
        nested_config="text_config",
        prefixes=("language_model.", "model.language_model.", "model."),
        ignored=(UNUSED, TOWERS),
    ),
)
