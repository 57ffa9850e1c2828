"""GPT-2 (learned positions; weights fused and stored transposed) and GPT-J (attention and MLP side by side; part of each head
turned, neighbouring dimensions together)."""

from __future__ import annotations

from slipstream.model.families.base import ConfigReader, Family, Names, activation, both, layers, qkv_names
from slipstream.model.parameters import Placement
from slipstream.model.spec import (
    AttentionSpec,
    DenseSpec,
    LayerSpec,
    LearnedPositionSpec,
    ModelSpec,
    NormSpec,
    ParallelBlock,
    RopeSpec,
    SequentialBlock,
)


def _norm(c: ConfigReader) -> NormSpec:
    return NormSpec(kind="layer", size=c.size("n_embd"), eps=c.take("layer_norm_epsilon", float, 1e-5), bias=True)


def _mlp(c: ConfigReader) -> DenseSpec:
    return DenseSpec(
        intermediate_size=c.size("n_inner", 4 * c.size("n_embd")),
        activation=activation(c, "activation_function", "gelu_new"),
        gated=False,
        bias=True,
    )


def _head_dim(c: ConfigReader) -> int:
    hidden, num_heads = c.size("n_embd"), c.size("n_head")
    if hidden % num_heads:
        raise c.unsupported("n_embd", f"is no multiple of n_head ({num_heads})")
    return hidden // num_heads


def read_gpt2(c: ConfigReader) -> ModelSpec:
    norm, head_dim = _norm(c), _head_dim(c)
    c.require("add_cross_attention", False)
    c.require("scale_attn_by_inverse_layer_idx", False)
    c.require("reorder_and_upcast_attn", False)
    attention = AttentionSpec(
        num_heads=c.size("n_head"),
        num_kv_heads=c.size("n_head"),
        head_dim=head_dim,
        scale=head_dim**-0.5 if c.take("scale_attn_weights", bool, True) else 1.0,
        position=None,
        qkv_bias=True,
        out_bias=True,
    )
    layer = LayerSpec(attention=attention, mlp=_mlp(c), block=SequentialBlock(pre_attention=norm, pre_mlp=norm))
    max_position = c.size("n_positions", 1024)
    spec = ModelSpec(
        family="gpt2",
        vocab_size=c.size("vocab_size"),
        hidden_size=c.size("n_embd"),
        max_position=max_position,
        layers=layers(c.size("n_layer"), lambda i: layer),
        final_norm=norm,
        learned_positions=LearnedPositionSpec(num_positions=max_position),
        tied_embeddings=c.take("tie_word_embeddings", bool, True),
    )
    c.finish("n_ctx")
    return spec


def gpt2_names(spec: ModelSpec) -> Names:
    names: Names = {"wte.weight": Placement("embed.weight"), "wpe.weight": Placement("positions.weight")}
    both(names, "ln_f", "final_norm")
    if not spec.tied_embeddings:
        names["lm_head.weight"] = Placement("head.weight")
    for i in range(spec.num_layers):
        theirs, ours = f"h.{i}.", f"layers.{i}."
        both(names, f"{theirs}ln_1", f"{ours}pre_attention")
        both(names, f"{theirs}ln_2", f"{ours}pre_mlp")
        both(names, f"{theirs}attn.c_attn", f"{ours}attention.qkv", transform="transpose")
        both(names, f"{theirs}attn.c_proj", f"{ours}attention.out", transform="transpose")
        both(names, f"{theirs}mlp.c_fc", f"{ours}mlp.up", transform="transpose")
        both(names, f"{theirs}mlp.c_proj", f"{ours}mlp.down", transform="transpose")
    return names


def read_gptj(c: ConfigReader) -> ModelSpec:
    head_dim = _head_dim(c)
    rotary_dim = c.size("rotary_dim", head_dim)
    if rotary_dim > head_dim or rotary_dim % 2:
        raise c.unsupported("rotary_dim", f"must be even and at most the head's {head_dim} dimensions")
    attention = AttentionSpec(
        num_heads=c.size("n_head"),
        num_kv_heads=c.size("n_head"),
        head_dim=head_dim,
        scale=head_dim**-0.5,
        position=RopeSpec(theta=10000.0, rotary_dim=rotary_dim, style="interleaved"),
    )
    layer = LayerSpec(attention=attention, mlp=_mlp(c), block=ParallelBlock(norm=_norm(c)))
    spec = ModelSpec(
        family="gptj",
        vocab_size=c.size("vocab_size"),
        hidden_size=c.size("n_embd"),
        max_position=c.size("n_positions", 2048),
        layers=layers(c.size("n_layer"), lambda i: layer),
        final_norm=_norm(c),
        tied_embeddings=c.take("tie_word_embeddings", bool, False),
        head_bias=True,
    )
    # Old checkpoints carry keys of the training code; `rotary` was always on, `scale_attn_weights` always true.
    c.require("rotary", True)
    c.require("scale_attn_weights", True)
    c.finish("n_ctx")
    return spec


def gptj_names(spec: ModelSpec) -> Names:
    names: Names = {"transformer.wte.weight": Placement("embed.weight")}
    both(names, "transformer.ln_f", "final_norm")
    if not spec.tied_embeddings:
        names["lm_head.weight"] = Placement("head.weight")
    names["lm_head.bias"] = Placement("head.bias")
    for i, layer in enumerate(spec.layers):
        theirs, ours = f"transformer.h.{i}.", f"layers.{i}."
        both(names, f"{theirs}ln_1", f"{ours}norm")
        names.update(qkv_names(layer.attention, f"{theirs}attn.", ours))
        names[f"{theirs}attn.out_proj.weight"] = Placement(f"{ours}attention.out.weight")
        both(names, f"{theirs}mlp.fc_in", f"{ours}mlp.up")
        both(names, f"{theirs}mlp.fc_out", f"{ours}mlp.down")
    return names


FAMILIES = (
    Family(
        model_type="gpt2",
        architectures=("GPT2LMHeadModel",),
        read=read_gpt2,
        names=gpt2_names,
        prefixes=("", "transformer."),
        ignored=(r"h\.\d+\.attn\.(bias|masked_bias)",),
    ),
    Family(
        model_type="gptj",
        architectures=("GPTJForCausalLM",),
        read=read_gptj,
        names=gptj_names,
        ignored=(r"transformer\.h\.\d+\.attn\.(bias|masked_bias)",),
    ),
)
