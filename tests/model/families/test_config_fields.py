"""Each field of each family's config in transformers, set to other values: the model is refused by name, or it is the same.

So nothing is read and then not heeded, and nothing that matters is taken to be without effect.
"""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoConfig

from slipstream.errors import CheckpointError, UnsupportedModelError
from tests.model.harness import load, run
from tests.support import tiny_models

TOKENS = [5, 9, 200, 31, 7, 44, 45, 46, 47, 48, 49, 50, 9, 100, 101, 102, 7, 8, 9]
LEFT = {
    "vocab_size",
    "model_type",
    "architectures",
    "num_hidden_layers",
    "dtype",
    "id2label",
    "label2id",
    "problem_type",
}
LEFT |= {
    "return_dict",
    "output_hidden_states",
    "output_attentions",
    "chunk_size_feed_forward",
    "is_encoder_decoder",
}
LEFT |= {"bos_token_id", "eos_token_id", "pad_token_id", "_name_or_path", "transformers_version"}
NOT_HEEDED_THERE = {("mpt", "alibi_bias_max"), ("mpt", "expansion_ratio")}
"""transformers reads these and takes 8 and 4. The authors' code and llama.cpp heed them, and so do we."""
OTHER_MODELS = {("gemma3_text", "use_bidirectional_attention")}
"""Fields that make an encoder of a decoder; its vectors have tests of their own."""


def others(key, value):
    """Other values that a field could have."""
    match value:
        case bool():
            return [not value]
        case None:
            return [True, 2, 0.5, 8]
        case int():
            return [n for n in {value * 2, value // 2, value + 1, 0} if n != value and n <= 4096]
        case float():
            return [value * 1.5 + 0.1]
        case str() if "act" in key:
            return ["gelu", "relu", "gelu_new", "silu", "gelu_pytorch_tanh"]
        case _:
            return []


@pytest.mark.slow
@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_each_field_is_heeded_or_refused(tmp_path, family):
    settings = {k: v for k, v in tiny_models.settings_of(family).items() if v is not None}
    given = json.loads(
        AutoConfig.for_model(settings.pop("model_type"), **settings).to_json_string(use_diff=False)
    )
    changes = [
        {key: other}
        for key, value in given.items()
        if key not in LEFT
        for other in others(key, value)
    ]
    inner = {k: v for k, v in given.get("attn_config", {}).items() if k not in LEFT}
    changes += [
        {"attn_config": {**inner, k: other}} for k, v in inner.items() for other in others(k, v)
    ]
    num_same, refused = 0, set()
    for i, change in enumerate(changes):
        ((key, value),) = change.items()
        key = (
            next((k for k in inner if value[k] != inner[k]), key)
            if isinstance(value, dict)
            else key
        )
        path = tmp_path / str(i)
        try:
            theirs = tiny_models.build(path, family, **change)
            with torch.no_grad():
                expected = theirs(torch.tensor([TOKENS])).logits[0]
        except Exception:  # transformers can't either
            continue
        if not expected.isfinite().all():
            continue
        try:
            ours = run(load(path), TOKENS, (7, 1, 30))
        except (UnsupportedModelError, CheckpointError) as error:
            refused.add(error.field)
            continue
        if (family, key) not in NOT_HEEDED_THERE | OTHER_MODELS:
            error = ((ours - expected).abs().max() / expected.abs().max()).item()
            assert error <= 1e-4, (change, error)
            num_same += 1
    assert num_same > 5
    assert not refused & {None}
