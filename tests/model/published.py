"""Published configs shrunk to tiny sizes, in the styles of their writers, with random weights that transformers stores.

`outcome` compares a checkpoint here with transformers in float32: "same", "refused" by a field's name, or what is wrong."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM
from transformers.utils import logging

from slipstream.errors import SlipstreamError
from slipstream.kernels.select import select_ops
from slipstream.model.load.loader import load_model
from slipstream.spec.description import read_spec
from tests.model.checkpoints import CONFIGS
from tests.model.harness import CPU, run, states, written
from tests.support.tiny_models import correction_buffers

TOKENS = [(7 * i) % 89 + 5 for i in range(40)]
TOLERANCE = 1e-4
"""Difference that sums in another order make, relative to the largest number."""

Config = dict[str, Any]
SIZES: Config = {
    **dict.fromkeys(("vocab_size", "padded_vocab_size"), 96),
    **dict.fromkeys(("hidden_size", "n_embd", "n_embed", "d_model", "dim", "pooler_hidden_size"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "ffn_hidden_size", "hidden_dim"), 96),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 8),
    **dict.fromkeys(("initializer_range", "init_std", "initializer_factor"), 0.2),
    **dict(sliding_window=8, local_attention=8, head_dim=16, d_kv=16, rotary_dim=8, n_inner=96),
    **dict(q_lora_rank=16, kv_lora_rank=24, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=20),
    **dict(first_k_dense_replace=1, ff_factor=1, num_nextn_predict_layers=0, embedding_size=64),
    **dict(qk_head_dim=20, moe_shared_expert_intermediate_size=32, layer_group_size=3),
}  # fmt: skip
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers")
POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "model_max_length")
PATTERNS = {
    "gemma3_text": 7,
    "modernbert": 4,
    "smollm3": 5,
    "olmo3": 4,
    "cohere2": 4,
    "qwen3_5_text": 4,
    "qwen3_5_moe_text": 4,
    "lfm3": 6,
}
REMOTE = {"chatglm", "bailing_moe"}
"""Model types that transformers has only as its authors' code."""

_T5 = {**CONFIGS["flan-t5-small"], "feed_forward_proj": "gated-gelu", "d_kv": 64}
_UNUSED = ("position_embedding_type", "type_vocab_size")
_BERT = {k: v for k, v in CONFIGS["bert-base-uncased"].items() if k not in _UNUSED}
MORE: dict[str, Config] = {
    "mt5-small": {**_T5, "model_type": "mt5", "architectures": ["MT5ForConditionalGeneration"]},
    "umt5-small": {**_T5, "model_type": "umt5", "architectures": ["UMT5ForConditionalGeneration"]},
    "camembert-base": {
        **CONFIGS["roberta-base"],
        "model_type": "camembert",
        "architectures": ["CamembertForMaskedLM"],
    },
    "all-mpnet-base-v2": {
        **_BERT,
        **dict(model_type="mpnet", architectures=["MPNetForMaskedLM"], pad_token_id=1),
        **dict(relative_attention_num_buckets=32, max_position_embeddings=514),
    },
    "electra-base-discriminator": {
        **_BERT,
        "model_type": "electra",
        "architectures": ["ElectraForPreTraining"],
        "type_vocab_size": 2,
        "embedding_size": 768,
    },
    "distilbert-base-uncased": {
        **dict(model_type="distilbert", architectures=["DistilBertForMaskedLM"], activation="gelu"),
        **dict(dim=768, hidden_dim=3072, n_heads=12, n_layers=6, max_position_embeddings=512),
        **dict(sinusoidal_pos_embds=False, tie_weights_=True, vocab_size=30522, pad_token_id=0),
    },
    "eurobert-210m": {
        **{k: v for k, v in CONFIGS["llama-3-8b"].items() if k not in ("bos_token_id",)},
        "model_type": "eurobert",
        "architectures": ["EuroBertForMaskedLM"],
        "rope_theta": 250000,
        "tie_word_embeddings": False,
    },
    "deberta-v3-base": {
        **dict(model_type="deberta-v2", architectures=["DebertaV2ForMaskedLM"]),
        **dict(hidden_act="gelu", hidden_size=768, intermediate_size=3072, vocab_size=128100),
        **dict(num_attention_heads=12, num_hidden_layers=12, max_position_embeddings=512),
        **dict(relative_attention=True, position_buckets=256, norm_rel_ebd="layer_norm"),
        **dict(share_att_key=True, pos_att_type="p2c|c2p", position_biased_input=False),
        **dict(max_relative_positions=-1, layer_norm_eps=1e-7, type_vocab_size=0),
        **dict(pooler_dropout=0, pooler_hidden_act="gelu", pooler_hidden_size=768, pad_token_id=0),
    },
    "ministral-8b-by-5": {
        **CONFIGS["ministral-8b"],
        "model_type": "ministral",
        "architectures": ["MinistralForCausalLM"],
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "e5-mistral-7b-instruct": {**CONFIGS["mistral-7b-v0-1"], "architectures": ["MistralModel"]},
}
PUBLISHED = {**CONFIGS, **MORE}


def shrunk(config: Config) -> Config:
    """The config with tiny sizes, and all else as it was published."""
    tiny, kind = dict(config), config["model_type"]
    tiny.pop("quantization_config", None)  # the weights here are dense
    for key in tiny.keys() & SIZES.keys():
        tiny[key] = SIZES[key] if tiny[key] else tiny[key]
    if kind == "bailing_hybrid":
        tiny |= {"n_group": 4, "topk_group": 2}
    if kind == "zamba2":
        tiny |= dict(n_mamba_heads=8, hybrid_layer_ids=[1, 2], num_key_value_heads=4)
        tiny |= dict(layers_block_type=["mamba", "hybrid", "hybrid"], initializer_range=0.1)
    count = PATTERNS.get(kind, 3)
    tiny |= {key: count for key in LAYERS if tiny.get(key) is not None}
    heads = next((config[k] for k in ("num_attention_heads", "n_head") if config.get(k)), None)
    for key in KV_HEADS:
        if tiny.get(key) is not None:
            tiny[key] = {heads: 4, 1: 1}.get(config[key], 2)
    for key in ("layer_types", "no_rope_layers"):
        if isinstance(tiny.get(key), list):
            tiny[key] = (tiny[key] * count)[:count]
    if kind == "deepseek_v2" and tiny.get("n_group", 1) > 1:
        tiny |= {"n_group": 4, "topk_group": 2}
    if kind in ("deepseek_v3", "glm4_moe") and tiny.get("n_group", 1) > 1:
        tiny |= {"n_group": 2, "topk_group": 1}
    if kind.startswith("deepseek"):
        tiny["num_key_value_heads"] = 4
    tiny |= {k: 2 for k in ("num_experts_per_tok", "experts_per_token") if tiny.get(k)}
    if config.get("word_embed_proj_dim") not in (None, config.get("hidden_size")):
        tiny["word_embed_proj_dim"] = 32
    elif "word_embed_proj_dim" in config:
        tiny["word_embed_proj_dim"] = 64
    longest = max((config[k] for k in POSITIONS if config.get(k) is not None), default=256)
    less = max(1, longest // 256)
    shorter = {k: tiny[k] // less for k in POSITIONS if isinstance(tiny.get(k), int)}
    tiny |= {k: max(v, 64) for k, v in shorter.items()}
    if tiny.get("original_max_position_embeddings"):
        tiny["original_max_position_embeddings"] //= less
    if isinstance(scaling := tiny.get("rope_scaling"), dict):
        tiny["rope_scaling"] = _shrunk_scaling(scaling, less, tiny)
    if kind == "mpt":  # there the clip must be a float, and the bias is 8 whatever the config says
        own = tiny["attn_config"]
        clip = None if own.get("clip_qkv") is None else float(own["clip_qkv"])
        tiny["attn_config"] = {**own, "clip_qkv": clip, "alibi_bias_max": 8}
    if kind in ("smollm3", "eurobert"):
        tiny.setdefault("pad_token_id", 0)  # the class has one of the published vocabulary
    if kind in ("roberta", "xlm-roberta", "camembert", "mpnet"):
        tiny |= {"max_position_embeddings": 66, "pad_token_id": 1}
    return tiny | {k: 0 for k in tiny if k.endswith("_token_id") and _beyond(tiny[k])}


def _beyond(value: Any) -> bool:
    ids = value if isinstance(value, list) else [value]
    return any(isinstance(v, int) and v >= 90 for v in ids)


def _shrunk_scaling(scaling: Config, less: int, tiny: Config) -> Config:
    found, half = dict(scaling), int(16 * tiny.get("partial_rotary_factor", 1.0)) // 2
    for key in ("short_factor", "long_factor"):
        if key in found:
            found[key] = (found[key] * half)[:half]
    if found.get("original_max_position_embeddings"):
        found["original_max_position_embeddings"] = max(
            8, found["original_max_position_embeddings"] // less
        )
    return found


# --- Models of transformers -------------------------------------------------------------------------------------------


def auto_class(config: Config) -> Any:
    if config.get("is_encoder_decoder"):
        return AutoModelForSeq2SeqLM
    named = (config.get("architectures") or [""])[0]
    decoder = named.endswith(("ForCausalLM", "LMHeadModel"))
    return AutoModelForCausalLM if decoder else AutoModel


class Built:
    """A model of a shrunk config with random weights, as transformers stores it in `folder`, and its decoder alone."""

    def __init__(self, folder: Path, config: Config) -> None:
        logging.set_verbosity_error()
        warnings.simplefilter("ignore")
        self.config, self.auto = config, auto_class(config)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
        torch.manual_seed(0)
        made = AutoConfig.from_pretrained(folder)
        model = self.auto.from_config(made, dtype=torch.float32).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() == 1 or name.endswith("bias"):
                    parameter.add_(torch.randn_like(parameter) * 0.1)
            for buffer in correction_buffers(model):
                buffer.normal_(0.0, 0.3)
        self.tensors, self.saved = _stored(model, folder / "whole")
        self.alone = None
        if self.auto is AutoModelForCausalLM:
            self.alone = _stored(model.base_model, folder / "alone")
        shutil.rmtree(folder / "whole")


def _stored(model: Any, folder: Path) -> tuple[dict[str, torch.Tensor], Config]:
    model.save_pretrained(folder)
    found = load_file(folder / "model.safetensors")
    return found, json.loads((folder / "config.json").read_text())


# --- Styles -----------------------------------------------------------------------------------------------------------

YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
BASES = {"modernbert": "global_rope_theta", "gpt_neox": "rotary_emb_base"}
LOCAL = {"gemma3_text": "rope_local_base_freq", "modernbert": "local_rope_theta"}
HEADS = ("lm_head.weight", "embed_out.weight")
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")

Checkpoint = tuple[Config, dict[str, torch.Tensor], Any]


def styles(b: Built) -> Iterator[tuple[str, Callable[[], Checkpoint]]]:
    """(name, the checkpoint and transformers' class for it) of each way in which the model may be stored."""

    def plain(config: Config) -> Callable[[], Checkpoint]:
        return lambda: (config, b.tensors, b.auto)

    new = b.saved
    yield "published", plain(b.config)
    yield "by transformers 5", plain(new)
    ropes = {"rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "rotary_pct"}
    ropes |= {"rotary_emb_base", "global_rope_theta", "local_rope_theta", "rope_local_base_freq"}
    if own := new.get("rope_parameters"):
        yield "without a word of ropes", plain({k: v for k, v in new.items() if k not in ropes})
        if "proportional" not in str(own):  # transformers asks for Gemma 4's base inside
            yield "new parameters, the base next to them", plain(_base_outside(new, own))
        base = BASES.get(new["model_type"], "rope_theta")
        old = {"rope_parameters": {"rope_type": "default"}, base: 123456.0}
        yield "the old base next to a default", plain({**b.config, **old})
        wide = {"head_dim": 16} if new.get("head_dim", 0) is None else {}  # YaRN there asks for it
        yield "old scaling next to new parameters", plain({**new, **wide, "rope_scaling": YARN})
    if b.auto is not AutoModel:
        for name, tied, change in (
            ("tied, the same head stored", True, lambda t: t),
            ("tied, another head stored", True, lambda t: t.roll(1, 0) * 1.5),
            ("untied", False, lambda t: t.roll(2, 0) * 0.5),
        ):
            yield name, lambda tied=tied, change=change: _with_head(b, tied, change)
    if b.alone is not None:
        tensors, config = b.alone
        for tied in (False, True):
            said = {**config, "tie_word_embeddings": tied}
            auto = AutoModelForCausalLM if tied else AutoModel
            yield f"the decoder alone, tied {tied}", lambda s=said, a=auto: (s, tensors, a)


def _base_outside(config: Config, own: Config) -> Config:
    found = json.loads(json.dumps(config))
    outer = BASES.get(config["model_type"], "rope_theta")
    if "full_attention" in own:
        found["rope_parameters"]["full_attention"].pop("rope_theta", None)
        found["rope_parameters"]["sliding_attention"].pop("rope_theta", None)
        return {**found, outer: 33333.0, LOCAL.get(config["model_type"], outer): 5555.0}
    found["rope_parameters"].pop("rope_theta", None)
    return {**found, outer: 33333.0}


def _with_head(b: Built, tied: bool, change: Callable[[torch.Tensor], torch.Tensor]) -> Checkpoint:
    is_neox = b.config["model_type"] == "gpt_neox"
    embed = next(n for n in b.tensors if n.endswith((*EMBEDDINGS, "shared.weight")))
    head = {HEADS[is_neox]: change(b.tensors[embed]).clone().contiguous()}
    return {**b.saved, "tie_word_embeddings": tied}, {**b.tensors, **head}, b.auto


# --- Comparison -------------------------------------------------------------------------------------------------------


def outcome(folder: Path, checkpoint: Checkpoint) -> str:
    """ "same", "refused: FIELD", or what is wrong."""
    config, tensors, auto = checkpoint
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    try:
        ours = _ours(folder)
    except SlipstreamError as error:
        return f"refused: {error.field}" if error.field else f"refused without a field: {error}"
    try:
        expected = _theirs(folder, auto)
    except Exception as error:
        return f"transformers refuses it: {type(error).__name__}: {str(error)[:200]}"
    if ours.shape != expected.shape:
        return f"shapes {list(ours.shape)} and {list(expected.shape)}"
    apart = float((ours - expected).abs().max() / expected.abs().max())
    return "same" if apart <= TOLERANCE else f"{apart:.1e} apart"


def _ours(folder: Path) -> torch.Tensor:
    ops, description = select_ops(CPU, "reference"), read_spec(folder)
    length = min(len(TOKENS), description.spec.max_position)
    model = load_model(description, ops=ops, device=CPU, dtype=torch.float32, max_model_len=length)
    if model.spec.encoder is not None:
        return written(model, [TOKENS], [TOKENS[:9]])[0]
    return states(model, [TOKENS])[0] if model.spec.is_encoder else run(model, TOKENS)


@torch.inference_mode()
def _theirs(folder: Path, auto: Any) -> torch.Tensor:
    model = auto.from_pretrained(folder, dtype=torch.float32).eval()
    inputs = {"input_ids": torch.tensor([TOKENS])}
    if auto is AutoModelForSeq2SeqLM:
        inputs["decoder_input_ids"] = torch.tensor([TOKENS[:9]])
    found = model(**inputs)
    return (found.last_hidden_state if auto is AutoModel else found.logits)[0]
