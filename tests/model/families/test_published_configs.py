# ruff: noqa: E501
"""No false refusals: configs of real models, as their authors, transformers, trainers and converters write them."""

from __future__ import annotations

import json

import pytest

from slipstream.errors import UnsupportedModelError
from slipstream.spec.description import read_spec
from tests.model.checkpoints import CONFIGS
from tests.model.published import PUBLISHED, REMOTE, Built, outcome, shrunk, styles

LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
WRITERS = {
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


@pytest.mark.parametrize("name", CONFIGS)
def test_a_published_config_is_read(tmp_path, name):
    """The config as its authors write it and the same saved by others give the same model."""
    file, config = tmp_path / "config.json", CONFIGS[name]
    file.write_text(json.dumps(config))
    plain = read_spec(tmp_path).spec
    assert plain.num_layers == next(config[key] for key in LAYERS if key in config)
    for given in WRITERS.values():
        # an encoder-decoder's answers begin with this token
        writer = {
            k: given[k] for k in given if plain.encoder is None or not k.startswith("forced_")
        }
        file.write_text(
            json.dumps({**writer, **config} | {k: v for k, v in writer.items() if "token" not in k})
        )
        assert read_spec(tmp_path).spec == plain


def test_there_are_two_hundred_different_ones():
    assert len({json.dumps(config, sort_keys=True) for config in CONFIGS.values()}) >= 200
    assert len({config["model_type"] for config in CONFIGS.values()}) >= 30


@pytest.mark.parametrize(
    "model_type", sorted({config["model_type"] for config in CONFIGS.values()})
)
def test_what_could_change_an_answer_still_raises(tmp_path, model_type):
    config = next(config for config in CONFIGS.values() if config["model_type"] == model_type)
    (tmp_path / "config.json").write_text(
        json.dumps({**config, "attention_temperature_floor": 2.0})
    )
    with pytest.raises(UnsupportedModelError, match="attention_temperature_floor"):
        read_spec(tmp_path)


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("qwen3-coder-30b-a3b", "shared_expert_intermediate_size", 512),
        ("qwen3-coder-30b-a3b", "use_qk_norm", False),
        ("qwen3-coder-30b-a3b", "qkv_bias", True),
        ("falcon-11b", "ff_factor", 8),
    ],
)
def test_what_is_said_twice_must_agree(tmp_path, name, key, value):
    (tmp_path / "config.json").write_text(json.dumps({**CONFIGS[name], key: value}))
    with pytest.raises(UnsupportedModelError, match=key):
        read_spec(tmp_path)


# --- Against transformers ---------------------------------------------------------------------------------------------

RUNNABLE = [name for name in PUBLISHED if PUBLISHED[name]["model_type"] not in REMOTE]
ONE_OF_EACH = [*{PUBLISHED[name]["model_type"]: name for name in reversed(RUNNABLE)}.values()]


def check(tmp_path, name, wanted=lambda style, i: True):
    """Every style of the config that is `wanted` gives transformers' numbers, or is refused by a field's name. As it was
    published, and as transformers 5 saves it, it is read."""
    built = Built(tmp_path / "model", shrunk(PUBLISHED[name]))
    found = {
        style: outcome(tmp_path / "stored", make())
        for i, (style, make) in enumerate(styles(built))
        if wanted(style, i)
    }
    assert {s: r for s, r in found.items() if r != "same" and not r.startswith("refused: ")} == {}
    for style in found.keys() & {"published", "by transformers 5"}:
        assert found[style] == "same", style
    return found


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_a_shrunk_config_computes_what_transformers_does(tmp_path, name):
    """Each config is tried as published and in two further styles, which differ from family to
    family."""
    turn = ONE_OF_EACH.index(name)
    found = check(tmp_path, name, lambda style, i: i == 0 or (i + turn) % 5 == 0)
    assert 1 <= len(found) <= 4


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNNABLE)
def test_a_shrunk_config_computes_what_transformers_does_in_every_style(tmp_path, name):
    check(tmp_path, name)
