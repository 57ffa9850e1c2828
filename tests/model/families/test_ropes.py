"""Rotary embeddings as configs say them, in every mixture of transformers 4's keys and those of 5, beside transformers' own."""

from __future__ import annotations

import importlib
import itertools
import json
import random

import numpy as np
import pytest
from transformers import AutoConfig
from transformers.utils import logging

from slipstream.errors import UnsupportedModelError
from slipstream.kernels.positions import _frequencies
from slipstream.spec.description import read_spec
from slipstream.spec.families import families
from slipstream.spec.model import LongRopeScaling
from tests.support import tiny_models

YARN = {"rope_type": "yarn", "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONG = {"short_factor": [1.0, 1.1, 1.3, 1.5], "long_factor": [1.0, 2.0, 5.0, 30.0]}
SCALED = [
    {"rope_type": "linear", "factor": 4.0},
    {"type": "linear", "factor": 4},
    {"type": "linear", "rope_type": "default", "factor": 4.0},
    {**YARN, "original_max_position_embeddings": 64, "rope_theta": 2e4},
    YARN,
    {**YARN, "factor": None, "original_max_position_embeddings": 64},
    {**YARN, "factor": 0.5},
    {**YARN, "mscale": 0.7, "mscale_all_dim": 1.0, "beta_fast": 16, "beta_slow": None},
    {**YARN, "attention_factor": 2, "truncate": False, "finetuned": True},
    {**YARN, "original_max_position_embeddings": 4},
    {**YARN, "original_max_position_embeddings": 1, "rope_theta": 3.0},
    {"rope_type": "yarn"},
    {**LLAMA3, "original_max_position_embeddings": 32},
    LLAMA3,
    {"rope_type": "llama3", "factor": 8.0},
    {"rope_type": "longrope", **LONG},
    {"rope_type": "longrope", "original_max_position_embeddings": 64, **LONG},
    {"type": "longrope", "original_max_position_embeddings": 64, "factor": 3.0, **LONG},
    {"type": "su", "original_max_position_embeddings": 64, "attention_factor": 1.5, **LONG},
    {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "dynamic"},
    {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    {"type": "ntk", "factor": 2.0},
    {"rope_type": None, "type": "linear", "factor": 2.0},
    {"type": None, "factor": 2.0},
]
FLAT = [
    None,
    {},
    {"rope_type": "default"},
    {"rope_type": "default", "rope_theta": 3e4},
    {"rope_theta": 3e4, "partial_rotary_factor": 0.5},
    {"rope_type": "default", "rope_theta": None},
    {"rope_type": "default", "factor": 4.0},
    {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 1.0},
    {"full_attention": {"rope_type": "default", "rope_theta": 3e4}},
    *SCALED,
]
OF_KINDS = [
    None,
    {},
    {"rope_type": "default", "rope_theta": 3e4},
    {
        "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 3e4},
        "sliding_attention": {"rope_type": "default"},
    },
    {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_theta": 7e4}},
    {"full_attention": {**YARN, "rope_theta": 3e4}, "sliding_attention": None},
    {"full_attention": {**YARN, "truncate": False}},
    {"full_attention": {}, "sliding_attention": {"type": "linear", "factor": 3.0}},
    {"sliding_attention": {"rope_type": "default", "rope_theta": 7e4}},
    {"full_attention": {"rope_type": "longrope", **LONG}, "rope_theta": 3e4},
]
SCALINGS = [None, {}, {"rope_type": "default"}, *SCALED]
TOPS = [
    {},
    {"rope_theta": 5e4},
    {"rope_theta": 500000},
    {"rope_theta": 5e4, "original_max_position_embeddings": 32},
    {"partial_rotary_factor": 0.5},
    {"rope_theta": 5e4, "partial_rotary_factor": 1.0},
]
OWN = {
    "gpt_neox": [{"rotary_emb_base": 2e4, "rotary_pct": 1.0}, {"rotary_pct": 0.5}],
    "gemma3_text": [
        {"rope_local_base_freq": 2e4},
        {"rope_local_base_freq": 2e4, "rope_theta": 1e4},
    ],
    "modernbert": [{"global_rope_theta": 2e4}, {"local_rope_theta": 3e4}],
}
FAMILIES = [
    *("llama", "mistral", "mixtral", "ministral", "smollm3", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe"),
    *("gemma", "gemma2", "gemma3_text", "phi", "phi3", "falcon", "starcoder2", "gpt_neox", "gpt_oss"),
    *("glm", "glm4", "glm4_moe", "granite", "olmo2", "olmo3", "cohere", "cohere2"),
    *("deepseek_v2", "deepseek_v3", "modernbert", "eurobert"),
    *("seed_oss", "arcee", "helium", "exaone4", "ernie4_5", "ernie4_5_moe", "minimax_m2"),
    *("glm4_moe_lite", "dots1", "olmoe", "flex_olmo", "granitemoe", "granitemoeshared"),
    *("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral3", "nemotron", "stablelm"),
]  # fmt: skip
ROPES = {"rope_theta", "rope_parameters", "rope_scaling"}


def plain_config(family):
    """A config of the family that says nothing of ropes: heads of 8 numbers in layers of all the family's kinds."""
    settings = {**tiny_models._LLAMA, "model_type": family}
    settings = tiny_models.settings_of(family) if family in tiny_models.FAMILIES else settings
    settings = {k: v for k, v in settings.items() if v is not None and k not in ROPES}
    if "head_dim" in settings or family == "mixtral":
        settings["head_dim"] = 8
    config = AutoConfig.for_model(settings.pop("model_type"), **settings).to_dict()
    own = {"num_key_value_heads"} if family == "modernbert" else {"head_dim"} - settings.keys()
    for key in ROPES | own:
        config.pop(key, None)
    return {**config, "architectures": [families()[family].architectures[0]]}


def theirs(folder):
    """{kind of layer: (short, long frequencies, factor of cos and sin)} of transformers; the error that it raises."""
    try:
        config = AutoConfig.from_pretrained(folder)
        module = importlib.import_module(
            type(config).__module__.replace("configuration_", "modeling_")
        )
        rotary = next(v for k, v in vars(module).items() if k.endswith("RotaryEmbedding"))
        made = rotary(config)
        found = {}
        for kind in ("full_attention", "sliding_attention", None):
            prefix = f"{kind}_" if kind else ""
            if (short := getattr(made, f"{prefix}inv_freq", None)) is None:
                continue
            rope_type = made.rope_type[kind] if kind else made.rope_type
            long = short
            if rope_type == "longrope":
                from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

                long, _ = ROPE_INIT_FUNCTIONS["longrope"](
                    config, None, seq_len=10**6, layer_type=kind
                )
            found[kind] = (short, long, getattr(made, f"{prefix}attention_scaling"))
        return found
    except Exception as error:
        return error


def ours(folder):
    spec = read_spec(folder).spec
    found = {}
    for layer in spec.layers:
        kind = "sliding_attention" if getattr(layer.attention, "window", None) else "full_attention"
        if (position := layer.attention.position) is not None:
            found[kind] = position
    return found


def same(position, expected):
    short, long, factor = expected
    is_long = isinstance(position.scaling, LongRopeScaling)
    for wanted, length in ((short, 1), (long, 10**6 if is_long else 1)):
        found, scale = _frequencies(position, length)
        if found.shape != tuple(wanted.shape) or not np.allclose(found, wanted, rtol=3e-6, atol=0):
            return False
        if not np.isclose(scale, factor, rtol=1e-6):
            return False
    return True


@pytest.mark.parametrize("family", FAMILIES)
def test_ropes_are_what_transformers_makes_of_the_config_or_refused(tmp_path, family):
    compare(tmp_path, family, num_cases=120)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_ropes_of_all_mixtures_are_those_of_transformers_or_refused(tmp_path, family):
    compare(tmp_path, family, num_cases=None)


def compare(tmp_path, family, *, num_cases):
    """Compares at most so many mixtures, drawn at random: each is equal, or refused by the field's
    name."""
    plain, num_same, wrong, unnamed = plain_config(family), 0, [], []
    tops = [*TOPS, *OWN.get(family, [])]
    parameters = OF_KINDS if family in ("gemma3_text", "olmo3", "modernbert") else FLAT
    cases = [*itertools.product(tops, parameters, SCALINGS)]
    if num_cases is not None:
        cases = random.Random(family).sample(cases, num_cases)
    logging.set_verbosity_error()
    for top, parameters, scaling in cases:
        config = dict(plain, **top)
        if parameters is not None:
            config["rope_parameters"] = parameters
        if scaling is not None:
            config["rope_scaling"] = scaling
        (tmp_path / "config.json").write_text(json.dumps(config))
        try:
            found = ours(tmp_path)
        except UnsupportedModelError as error:
            unnamed += [] if error.field else [error]
            continue
        expected = theirs(tmp_path)
        case = {**top, "rope_parameters": parameters, "rope_scaling": scaling}
        if isinstance(expected, Exception):
            wrong.append((case, f"transformers refuses it: {expected}"))
        elif not all(same(found[k], expected.get(k) or expected[None]) for k in found):
            wrong.append((case, found))
        else:
            num_same += 1
    assert not unnamed
    assert not wrong, f"{len(wrong)} wrong, {num_same} the same; {wrong[:5]}"
    assert num_same >= len(cases) // 20
    return num_same, len(cases)
