"""Llama 2 and 3, SmolLM 2 and 3, and any other `llama`; Mistral (all layers have a window), Ministral (some have), and Mixtral
(mixtures of experts); and what is nearly Llama: Seed-OSS (biases of q, k and v), Arcee (MLPs without a gate), Helium
(interleaved rotary embedding), InternLM 3, nanochat (norms without weights), CWM, IQuest-Coder, Jais 2,
EXAONE 3, BitNet (norms before the output products), DiffLlama (differences
of heads)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from slipstream.errors import UnsupportedModelError
from slipstream.spec.families.base import ConfigReader, Family, GGUFFamily
from slipstream.spec.families.builders import (
    activation,
    called,
    decoder,
    gated,
    heads,
    kinds_of_layers,
    layer_norm,
    plain,
    rms,
    windows,
)
from slipstream.spec.families.metadata import llama_gguf_config
from slipstream.spec.families.names import LLAMA, Theirs, gguf_table, table
from slipstream.spec.layers import LAMBDAS, DifferentialSpec
from slipstream.spec.model import AttentionSpec, LayerSpec, MLPSpec, ModelSpec, MoESpec


def read(c: ConfigReader) -> ModelSpec:
    """Reads a Llama. llama.cpp writes Mixtral as a `llama` with experts."""
    return read_mixtral(c) if "num_local_experts" in c else _read(c, "llama", has_windows=False)


def read_mistral(c: ConfigReader) -> ModelSpec:
    if not c.says("sliding_window"):
        c.assume(sliding_window=4096)
    return _read(c, "mistral", has_windows=True)


def read_ministral(c: ConfigReader) -> ModelSpec:
    return _read(c, "ministral", has_windows=True)


def read_smollm3(c: ConfigReader) -> ModelSpec:
    """Reads SmolLM3. Every fourth layer has no position embedding."""
    count, every = c.size("num_hidden_layers"), c.size("no_rope_layer_interval", 4)
    rotated = c.take("no_rope_layers", list, [int((i + 1) % every != 0) for i in range(count)])
    c.require("use_sliding_window", False)
    c.ignore("max_window_layers")  # concerns windows, which are off
    if len(rotated) != count or not set(rotated) <= {0, 1}:
        raise c.unsupported("no_rope_layers", f"must be {count} of 0 or 1")
    return _read(c, "smollm3", has_windows=False, rotated=rotated, tied=True, theta=2e6)


def read_mixtral(c: ConfigReader) -> ModelSpec:
    expert = gated(c)
    moe = MoESpec(
        num_experts=c.size("num_local_experts", 8),
        num_experts_per_token=c.size("num_experts_per_tok", 2),
        expert=expert,
        normalize=True,
    )
    c.ignore("output_router_logits", "router_aux_loss_coef", "router_jitter_noise")
    return _read(c, "mixtral", has_windows=True, mlp=moe, eps=1e-5, theta=1e6)


def read_seed_oss(c: ConfigReader) -> ModelSpec:
    c.assume_missing(head_dim=128, num_key_value_heads=8)
    bias = c.take("attention_bias", bool, True), c.take("attention_out_bias", bool, False)
    return decoder(c, "seed_oss", max_position=524288, bias=bias)


def read_arcee(c: ConfigReader) -> ModelSpec:
    act, bias = activation(c, "hidden_act", "relu2"), c.take("mlp_bias", bool, False)
    mlp = plain(c.size("intermediate_size"), act, bias=bias)
    return decoder(c, "arcee", max_position=4096, eps=1e-5, mlp=mlp)


def read_helium(c: ConfigReader) -> ModelSpec:
    c.assume_missing(head_dim=128, num_key_value_heads=20)
    h = heads(c)
    if h.num_heads * h.head_dim != c.size("hidden_size"):
        raise c.unsupported("head_dim", "heads must be as wide together as hidden_size")
    bias = c.take("attention_bias", bool, False), False
    style = {"style": "interleaved", "theta": 1e5}
    return decoder(c, "helium", h=h, max_position=4096, eps=1e-8, bias=bias, positions=style)


def read_internlm3(c: ConfigReader) -> ModelSpec:
    c.assume_missing(head_dim=128, num_key_value_heads=2)
    bias = c.take(called(c, "qkv_bias", "attention_bias"), bool, False)
    c.require_all(attention_bias=bias, bias=bias, mlp_bias=bias)
    return decoder(
        c, "internlm3", max_position=32768, eps=1e-5, bias=(bias, bias), mlp=gated(c, bias=bias)
    )


def read_nanochat(c: ConfigReader) -> ModelSpec:
    """Reads nanochat: norms without weights, also of embeddings and of rotated q and k. Heads are
    rotated in the opposite direction."""
    norm = rms(c.size("hidden_size"), c.take("rms_norm_eps", float, 1e-6), learned=False)
    cap = c.maybe("final_logit_softcapping", float) if c.says("final_logit_softcapping") else 15.0
    return decoder(
        c,
        "nanochat",
        norm=norm,
        mlp=plain(c.size("intermediate_size"), activation(c, "hidden_act", "relu2"), bias=False),
        over="head",
        after_rotation=True,
        learned=False,
        positions={"backwards": True},
        embed_norm=norm,
        logit_softcap=cap,
    )


def read_cwm(c: ConfigReader) -> ModelSpec:
    """CWM: windows in three layers of four."""
    c.assume_missing(num_key_value_heads=8, head_dim=128)
    return decoder(
        c,
        "cwm",
        max_position=131072,
        eps=1e-5,
        bias=(False, False),
        positions={"theta": 1e6, "default": CWM_ROPE},
        **windows(c, lambda i: "sliding_attention" if i % 4 else "full_attention", 8192),
    )


def read_bitnet(c: ConfigReader) -> ModelSpec:
    """Reads BitNet b1.58, which norms the inputs of the output projections. `quantization_config`
    says how its ternary weights (−1, 0, 1) are stored."""
    h, eps = heads(c), c.take("rms_norm_eps", float, 1e-5)
    if h.num_heads * h.head_dim != c.size("hidden_size"):
        raise c.unsupported("head_dim", "heads must be as wide together as hidden_size")
    mlp = gated(c, default="relu2")
    return decoder(
        c,
        "bitnet",
        h=h,
        eps=eps,
        positions={"theta": 5e5},
        mlp=replace(mlp, down_norm=rms(mlp.intermediate_size, eps)),
        more={"out_norm": rms(c.size("hidden_size"), eps)},
    )


def read_diffllama(c: ConfigReader) -> ModelSpec:
    """Reads DiffLlama: the output of the second half of the heads is subtracted from that of the
    first."""
    h, eps = heads(c), c.take("rms_norm_eps", float, 1e-5)
    if h.num_kv_heads % 2 or h.num_heads % h.num_kv_heads:
        raise c.unsupported(
            "num_key_value_heads", "must be even, and a part of num_attention_heads"
        )
    c.require("mlp_bias", False)
    c.ignore("lambda_std_dev")  # a training setting
    doubled = h._replace(num_heads=2 * h.num_heads, num_kv_heads=2 * h.num_kv_heads)
    spec = decoder(c, "diffllama", h=doubled, eps=eps)

    def layer(i: int, whole: LayerSpec) -> LayerSpec:
        assert isinstance(whole.attention, AttentionSpec)
        own = DifferentialSpec(base=0.8 - 0.6 * math.exp(-0.3 * i), eps=eps)
        return replace(whole, attention=replace(whole.attention, differential=own))

    return replace(spec, layers=tuple(layer(i, x) for i, x in enumerate(spec.layers)))


def read_iquestcoder(c: ConfigReader) -> ModelSpec:
    c.assume_missing(num_key_value_heads=8, head_dim=128)
    c.require("clip_qkv")
    c.require("use_sliding_window", False)
    return decoder(c, "iquestcoder", max_position=131072, eps=1e-5)


def read_jais2(c: ConfigReader) -> ModelSpec:
    """Jais 2: layer norms, biases, and MLPs without a gate."""
    act, bias = activation(c, "hidden_act", "relu2"), c.take("mlp_bias", bool, True)
    return decoder(
        c,
        "jais2",
        max_position=8192,
        norm=layer_norm(c.size("hidden_size"), c.take("layer_norm_eps", float, 1e-5)),
        bias=(c.take("attention_bias", bool, True),) * 2,
        mlp=plain(c.size("intermediate_size"), act, bias=bias),
    )


def read_exaone(c: ConfigReader) -> ModelSpec:
    """EXAONE 3 and 3.5, whose config and tensors have GPT-2's names."""
    c.alias(EXAONE_KEYS)
    c.assume_missing(num_key_value_heads=8, intermediate_size=14336)
    return decoder(c, "exaone", max_position=4096, eps=1e-5, positions={"theta": 5e5})


EXAONE_KEYS = {
    "num_hidden_layers": "num_layers",
    "rms_norm_eps": "layer_norm_epsilon",
    "hidden_act": "activation_function",
}
CWM_ROPE = {
    **dict(rope_type="llama3", factor=16.0, high_freq_factor=4.0, low_freq_factor=1.0),
    "original_max_position_embeddings": 8192,
}


def _read(
    c: ConfigReader,
    family: str,
    *,
    has_windows: bool,
    mlp: MLPSpec | None = None,
    rotated: list[int] | None = None,
    tied: bool = False,
    eps: float = 1e-6,
    theta: float = 1e4,
) -> ModelSpec:
    """Reads a model with Llama's layers. `rotated`: 1 for each layer with rotary embedding, 0 for
    the others; None: all have it. `tied`, `eps` and `theta` are defaults."""
    window = c.maybe("sliding_window", int) if has_windows else None
    kinds = kinds_of_layers(c, "full_attention" if window is None else "sliding_attention")
    if window is None and "sliding_attention" in kinds:
        raise c.unsupported("layer_types", "has sliding_attention, but there is no sliding_window")
    return decoder(
        c,
        family,
        eps=eps,
        mlp=mlp,
        kinds=kinds,
        window=window,
        rotated=None if rotated is None else lambda i: bool(rotated[i]),
        positions={"theta": theta},
        tied=tied,
    )


def gguf_config(m: ConfigReader) -> dict[str, Any]:
    config = llama_gguf_config(m, experts=True)
    if m.take("expert_count", int, 0):
        return {
            **config,
            "num_local_experts": m.size("expert_count"),
            "num_experts_per_tok": m.size("expert_used_count"),
        }
    m.require("expert_used_count", 0)
    return config


def arcee_gguf_config(m: ConfigReader) -> dict[str, Any]:
    return {**llama_gguf_config(m), "hidden_act": "relu2"}


def seed_oss_gguf_config(m: ConfigReader) -> dict[str, Any]:
    return {**llama_gguf_config(m), "attention_bias": "blk.0.attn_q.bias" in m}


def bitnet_gguf_config(m: ConfigReader) -> dict[str, Any]:
    """Reads BitNet's GGUF config, with the activation that the file names in
    `hidden_activation`."""
    m.alias({"hidden_activation": "hidden_act"})
    if "hidden_activation" not in m:
        raise UnsupportedModelError(
            f"the file lacks {m.prefix}hidden_activation: BitNet 2B 4T has relu2, earlier models silu, and nothing else "
            "says which. Write that key into it (gguf's editor does), or serve the model's safetensors",
            field=f"{m.prefix}hidden_activation",
        )
    return {**llama_gguf_config(m), "hidden_act": m.take("hidden_activation", str)}


names = table(LLAMA)
MIXTRAL: dict[str, Theirs] = {
    **LLAMA,
    "router": "block_sparse_moe.gate",
    "experts.up": ("block_sparse_moe.experts.{e}.w1", "block_sparse_moe.experts.{e}.w3"),
    "experts.down": "block_sparse_moe.experts.{e}.w2",
}
BITNET: dict[str, Theirs] = {
    **LLAMA,
    "attention.out_norm": "self_attn.attn_sub_norm",
    "mlp.down_norm": "mlp.ffn_sub_norm",
}
DIFFLLAMA: dict[str, Theirs] = {
    **LLAMA,
    **{f"attention.{name}": {"weight": f"self_attn.{name}"} for name in LAMBDAS},
}
EXAONE: dict[str, Theirs] = {
    "embed": "transformer.wte",
    "final_norm": "transformer.ln_f",
    "head": "lm_head",
    "classifier.out": "score",
    "pre_attention": "ln_1",
    "attention.qkv": tuple(f"attn.attention.{x}_proj" for x in "qkv"),
    "attention.out": "attn.attention.out_proj",
    "pre_mlp": "ln_2",
    "mlp.up": ("mlp.c_fc_0", "mlp.c_fc_1"),
    "mlp.down": "mlp.c_proj",
}
UNPERMUTED = gguf_table(changes={"attention.qkv": "unpermute"})
# llama.cpp doesn't store that every fourth layer has no position embedding; smollm3's default says so.
GGUFS = {  # llama.cpp writes Mistral, without its window, and Mixtral as llama
    read: GGUFFamily(architecture="llama", config=gguf_config, names=UNPERMUTED),
    read_smollm3: GGUFFamily(architecture="smollm3", config=llama_gguf_config, names=UNPERMUTED),
    read_seed_oss: GGUFFamily(
        architecture="seed_oss",
        config=seed_oss_gguf_config,
        names=gguf_table({"pre_mlp": "post_attention_norm"}),
    ),
    read_exaone: GGUFFamily(architecture="exaone", config=llama_gguf_config, names=gguf_table()),
    read_bitnet: GGUFFamily(
        architecture="bitnet",
        config=bitnet_gguf_config,
        names=gguf_table({"attention.out_norm": "attn_sub_norm", "mlp.down_norm": "ffn_sub_norm"}),
    ),
    read_arcee: GGUFFamily(
        architecture="arcee",
        config=arcee_gguf_config,
        names=gguf_table(gated=False, changes={"attention.qkv": "unpermute"}),
    ),
}
NAMES = {
    read_mixtral: table(MIXTRAL),
    read_arcee: table({**LLAMA, "mlp.up": "mlp.up_proj"}),
    read_jais2: table({**LLAMA, "mlp.up": "mlp.up_proj"}),
    read_bitnet: table(BITNET),
    read_diffllama: table(DIFFLLAMA),
    read_exaone: table(EXAONE, layer="transformer.h.{i}."),
    read_nanochat: table({**LLAMA, "mlp.up": "mlp.fc1", "mlp.down": "mlp.fc2"}),
}
AS_LLAMA = (read_internlm3, read_iquestcoder, read_exaone)

FAMILIES = tuple(
    Family(
        model_type=model_type,
        architectures=(
            architecture,
            architecture.replace("CausalLM", "SequenceClassification"),
            *(("LlamaForCausalLM",) if reader in AS_LLAMA else ()),  # as transformers has it
        ),
        read=reader,
        names=NAMES.get(reader, names),
        gguf=GGUFS.get(reader),
    )
    for model_type, architecture, reader in (
        ("llama", "LlamaForCausalLM", read),
        ("mistral", "MistralForCausalLM", read_mistral),
        ("ministral", "MinistralForCausalLM", read_ministral),
        ("mixtral", "MixtralForCausalLM", read_mixtral),
        ("smollm3", "SmolLM3ForCausalLM", read_smollm3),
        ("seed_oss", "SeedOssForCausalLM", read_seed_oss),
        ("arcee", "ArceeForCausalLM", read_arcee),
        ("helium", "HeliumForCausalLM", read_helium),
        ("internlm3", "InternLM3ForCausalLM", read_internlm3),
        ("nanochat", "NanoChatForCausalLM", read_nanochat),
        ("cwm", "CwmForCausalLM", read_cwm),
        ("iquestcoder", "IQuestCoderForCausalLM", read_iquestcoder),
        ("jais2", "Jais2ForCausalLM", read_jais2),
        ("bitnet", "BitNetForCausalLM", read_bitnet),
        ("diffllama", "DiffLlamaForCausalLM", read_diffllama),
        ("exaone", "ExaoneForCausalLM", read_exaone),
    )
)
