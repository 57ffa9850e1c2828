"""A model split into a pipeline's stages gives what it gives on one device: every family, in float32."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.kernels.select import select_ops
from slipstream.model.load.loader import load_model
from slipstream.spec.description import read_spec
from slipstream.spec.model import parameters
from slipstream.spec.parallel import Shard, even_stages, split_shapes
from tests.costs.specs import make_spec
from tests.model.harness import CPU, load, run
from tests.model.ranks.parallel_ranks import on_stages
from tests.model.ranks.test_parallel import DECODERS, TOKENS, build, close


def layers(count):
    return make_spec(kv_heads=(4,) * count)


# Their layers read keys of other stages' layers, which `tests/worker/ranks/test_pipeline_ranks.py` sees refused.
SHARED_KEYS = (
    "gemma3n_text",
    "gemma4_text",
    "glm_moe_dsa",
    "deepseek_v4",
    "zamba2",
    "longcat_flash",
)


@pytest.mark.parametrize("family", [family for family in DECODERS if family not in SHARED_KEYS])
def test_every_decoder_in_two_stages(tmp_path, family):
    build(tmp_path, family)
    num_layers = read_spec(tmp_path).spec.num_layers
    wanted = run(load(tmp_path), TOKENS)
    close(
        on_stages(tmp_path, lambda model: run(model, TOKENS, [7, 1, 4]), (num_layers - 1, 1)),
        wanted,
    )


@pytest.mark.parametrize("family", ["llama", "gemma2", "opt-350m"])
def test_middle_stages_give_the_whole_models_logits(tmp_path, family):
    build(tmp_path, family, num_hidden_layers=5)
    wanted = run(load(tmp_path), TOKENS)
    close(on_stages(tmp_path, lambda model: run(model, TOKENS, [7, 1, 4]), (2, 1, 2)), wanted)


def test_the_stages_make_up_the_whole(tmp_path):
    build(tmp_path, "gemma2")  # its head is the embeddings' table, which two stages have
    spec = read_spec(tmp_path).spec
    first, last = (
        split_shapes(spec, Shard(0, 1, tensor=False, layers=own))
        for own in ((0, 1), (1, spec.num_layers))
    )
    assert first | last == parameters(spec)
    assert set(first) & set(last) == {"embed.weight"}


def test_random_weights_are_the_same_ones(tmp_path):
    build(tmp_path, "llama")
    how = dict(load_format="dummy", seed=3)
    whole = load_model(
        tmp_path, ops=select_ops(CPU, "reference"), device=CPU, dtype=torch.float32, **how
    )
    close(on_stages(tmp_path, lambda model: run(model, TOKENS), (1, 1), **how), run(whole, TOKENS))


@given(st.integers(1, 12), st.integers(1, 12))
def test_stages_are_about_even(num_layers, count):
    spec = layers(max(num_layers, count))
    stages = even_stages(spec, count)
    assert len(stages) == count
    assert min(stages) >= 1
    assert sum(stages) == spec.num_layers


def test_the_output_head_counts_as_layers():
    small = layers(12)
    large = dataclasses.replace(small, vocab_size=small.vocab_size * 40)
    assert even_stages(large, 2)[1] < even_stages(small, 2)[1]
