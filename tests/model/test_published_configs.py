# ruff: noqa: E501
"""No false refusals: configs of real models, as their authors, transformers, trainers and converters write them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slipstream.errors import UnsupportedModelError
from slipstream.spec.description import read_spec

CONFIGS = Path(__file__).parents[2] / "benchmarks" / "configs"
WRITERS = {
    "authors": {},
    "transformers 4": {
        "_name_or_path": "org/model", "_attn_implementation_autoset": True, "transformers_version": "4.38.2",
        "use_cache": True, "output_attentions": False, "return_dict": True, "pruned_heads": {}, "top_k": 50, "typical_p": 1.0,
        "bad_words_ids": None, "forced_eos_token_id": None, "prefix": None, "finetuning_task": None, "num_return_sequences": 1,
    },
    "transformers 5 from GGUF": {
        "_model_name_or_path": "model.gguf", "unk_token_id": 0, "dtype": "float32", "transformers_version": "5.23.0",
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None,
    },
    "trainers": {
        "unsloth_fixed": True, "unsloth_version": "2025.1", "gradient_checkpointing": True, "neftune_noise_alpha": 5, "use_cache": False,
        "axolotl_config_path": "x.yml", "use_flash_attention_2": True, "_flash_attn_2_enabled": True, "pad_token_id": 0,
        "forced_bos_token_id": 1, "_attn_implementation": "flash_attention_2", "_commit_hash": "0123abc",
    },
}  # fmt: skip
EPS = {"rms_norm_eps": 1e-5}
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", **EPS, "pretraining_tp": 1}
MISTRAL = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "hidden_act": "silu", **EPS}
QWEN2 = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_act": "silu", "rms_norm_eps": 1e-6}
QWEN2 |= {"use_sliding_window": False, "max_window_layers": 28, "sliding_window": 32768}
QWEN3 = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_act": "silu", "rms_norm_eps": 1e-6, "head_dim": 128}
QWEN3 |= {"attention_bias": False, "attention_dropout": 0.0, "use_sliding_window": False, "sliding_window": None}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
SHAPES = {  # (base, layers, hidden, MLP, heads, kv heads, vocabulary, context, more)
    "llama-2-7b": (LLAMA, 32, 4096, 11008, 32, 32, 32000, 4096, {"rope_scaling": None}),
    "llama-2-70b": (LLAMA, 80, 8192, 28672, 64, 8, 32000, 4096, {}),
    "codellama-7b": (LLAMA, 32, 4096, 11008, 32, 32, 32016, 16384, {"rope_theta": 1e6}),
    "tinyllama-1.1b": (LLAMA, 22, 2048, 5632, 32, 4, 32000, 2048, {}),
    "llama-3.1-8b": (LLAMA, 32, 4096, 14336, 32, 8, 128256, 131072, {"rope_theta": 5e5, "rope_scaling": {**LLAMA3, "rope_type": "llama3"}}),
    "llama-3.2-1b": (LLAMA, 16, 2048, 8192, 32, 8, 128256, 131072, {"rope_theta": 5e5, "head_dim": 64, "tie_word_embeddings": True,
                     "mlp_bias": False, "rope_scaling": {**LLAMA3, "factor": 32.0, "rope_type": "llama3"}}),
    "llama-3.3-70b": (LLAMA, 80, 8192, 28672, 64, 8, 128256, 131072, {"rope_theta": 5e5, "rope_scaling": {**LLAMA3, "rope_type": "llama3"}}),
    "smollm2-135m": (LLAMA, 30, 576, 1536, 9, 3, 49152, 8192, {"rope_theta": 1e5, "tie_word_embeddings": True, "is_llama_config": True,
                     "rope_interleaved": False, "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}}),
    "yi-34b": (LLAMA, 60, 7168, 20480, 56, 8, 64000, 4096, {"rope_theta": 5e6}),
    "deepseek-coder-6.7b": (LLAMA, 32, 4096, 11008, 32, 32, 32256, 16384, {"rope_theta": 1e5, "rope_scaling": {"factor": 4.0, "type": "linear"}}),
    "deepseek-r1-distill-llama-8b": (LLAMA, 32, 4096, 14336, 32, 8, 128256, 131072, {"rope_theta": 5e5, "rope_scaling": {**LLAMA3, "rope_type": "llama3"}}),
    "vicuna-7b": (LLAMA, 32, 4096, 11008, 32, 32, 32000, 4096, {"max_sequence_length": 4096}),
    "open-llama-3b": (LLAMA, 26, 3200, 8640, 32, 32, 32000, 2048, {"rms_norm_eps": 1e-6}),
    "amber-7b": (LLAMA, 32, 4096, 11008, 32, 32, 32000, 2048, {"tie_word_embeddings": False}),
    "mistral-7b-v0.1": (MISTRAL, 32, 4096, 14336, 32, 8, 32000, 32768, {"sliding_window": 4096, "rope_theta": 1e4}),
    "mistral-7b-v0.3": (MISTRAL, 32, 4096, 14336, 32, 8, 32768, 32768, {"sliding_window": None, "rope_theta": 1e6}),
    "mistral-nemo": (MISTRAL, 40, 5120, 14336, 32, 8, 131072, 1024000, {"sliding_window": None, "head_dim": 128, "rope_theta": 1e6}),
    "zephyr-7b": (MISTRAL, 32, 4096, 14336, 32, 8, 32000, 32768, {"sliding_window": 4096, "pad_token_id": 2}),
    "qwen2-0.5b": (QWEN2, 24, 896, 4864, 14, 2, 151936, 131072, {"rope_theta": 1e6, "tie_word_embeddings": True}),
    "qwen2.5-7b": (QWEN2, 28, 3584, 18944, 28, 4, 152064, 131072, {"rope_theta": 1e6, "use_mrope": False}),
    "qwen2.5-72b": (QWEN2, 80, 8192, 29568, 64, 8, 152064, 32768, {"rope_theta": 1e6}),
    "qwen3-0.6b": (QWEN3, 28, 1024, 3072, 16, 8, 151936, 40960, {"rope_theta": 1e6, "tie_word_embeddings": True, "max_window_layers": 28}),
    "qwen3-8b": (QWEN3, 36, 4096, 12288, 32, 8, 151936, 40960, {"rope_theta": 1e6, "max_window_layers": 36}),
    "qwen3-32b": (QWEN3, 64, 5120, 25600, 64, 8, 151936, 40960, {"rope_theta": 1e6, "max_window_layers": 64}),
}  # fmt: skip
KEYS = (
    "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size",
    "max_position_embeddings",
)  # fmt: skip


def config_of(name):
    if name in SHAPES:
        base, *sizes, more = SHAPES[name]
        return {**base, **dict(zip(KEYS, sizes, strict=True)), **more}
    return json.loads((CONFIGS / name / "config.json").read_text())


HEADS = {"llama-3-8b-eagle3"}  # which are no models: `spec/draft_heads.py` reads them
NAMES = sorted({*SHAPES, *(path.parent.name for path in CONFIGS.glob("*/config.json"))} - HEADS)


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("name", NAMES)
def test_a_published_config_is_read(tmp_path, name, writer):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config_of(name)))
    plain = read_spec(tmp_path).spec
    file.write_text(json.dumps({**WRITERS[writer], **config_of(name)} | {k: v for k, v in WRITERS[writer].items() if "token" not in k}))
    assert read_spec(tmp_path).spec == plain


def test_there_are_enough():
    assert len(NAMES) * len(WRITERS) >= 200


@pytest.mark.parametrize("name", NAMES)
def test_what_could_change_an_answer_still_raises(tmp_path, name):
    (tmp_path / "config.json").write_text(json.dumps({**config_of(name), "attention_temperature_floor": 2.0}))
    with pytest.raises(UnsupportedModelError, match="attention_temperature_floor"):
        read_spec(tmp_path)
