"""A decode step of one sequence in one kernel, in Triton's interpreter: one program, which then waits for nobody. Many programs
at once: tests/gpu."""

from __future__ import annotations

import pytest
import torch

from slipstream.kernels.ops import LayerKV, by_dim
from slipstream.kernels.reference import ReferenceOps
from slipstream.kernels.triton import TritonOps, one_token
from slipstream.model.loader import load_model
from slipstream.model.scheme import SCHEMES
from tests import tiny_models
from tests.model.harness import CPU, Paged

WIDE = {"hidden_size": 128, "intermediate_size": 256}
CACHED = 86


def steps(model, cache):
    """Logits of two tokens, one by one, after a cache of CACHED keys of noise."""
    torch.manual_seed(1)
    paged = Paged(model, 1, 128)
    if cache is not None:
        paged.kv = [eight_bits(layer, cache, model.decoder.ops.values_by_dim(cache)) for layer in paged.kv]
    paged.computed[0] = CACHED
    return torch.cat([paged.step([(0, [token])])[0] for token in (9, 200)])


def eight_bits(layer, dtype, turned):
    k, v = ((t * 20).to(dtype) for t in (layer.k, layer.v))
    scale = torch.full((k.shape[1],), 0.05)
    return LayerKV(k, by_dim(v) if turned else v, scale, 1.5 * scale)


def differ(path, cache=None, scheme="int4-g32"):
    reference, fused = (
        load_model(path, ops=ops, device=CPU, dtype=torch.float32, scheme=SCHEMES[scheme])
        for ops in (ReferenceOps(), TritonOps())
    )
    assert reference.decoder.one_token is None
    assert fused.decoder.one_token is not None
    expected = steps(reference, cache)
    return ((steps(fused, cache) - expected).abs().max() / expected.abs().max()).item()


@pytest.fixture(autouse=True)
def few_pieces(monkeypatch):
    """Rows here are shorter than one; the interpreter takes as long for what is masked."""
    monkeypatch.setattr(one_token, "TILE", (8, 4, 2, 0))


@pytest.fixture
def small_tiles(monkeypatch):
    """So that some 90 keys are split."""
    monkeypatch.setattr(one_token, "KEYS", 16)
    monkeypatch.setattr(one_token, "FEWEST_TILES", 1)


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("qwen3", {**WIDE, "head_dim": 32}),
        ("gptj", {"n_embd": 128, "n_inner": 256, "n_head": 2, "rotary_dim": 16}),
        ("opt", {"hidden_size": 128, "ffn_dim": 192, "word_embed_proj_dim": 128, "num_attention_heads": 2}),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
@pytest.mark.usefixtures("small_tiles")
def test_steps_equal_the_reference(tmp_path, family, overrides):
    tiny_models.build(tmp_path, family, **overrides)
    assert differ(tmp_path) < 8e-3  # its inputs are float16


@pytest.mark.usefixtures("small_tiles")
def test_cache_of_8_bits(tmp_path):
    tiny_models.build(tmp_path, **WIDE, head_dim=32)
    assert differ(tmp_path, torch.float8_e4m3fn) < 1e-2  # a number may fall on the other side of two codes


def test_keys_in_one_part(tmp_path):
    tiny_models.build(tmp_path, **WIDE, head_dim=32)
    assert differ(tmp_path, scheme="int4") < 8e-3


@pytest.mark.parametrize(
    ("family", "scheme"),
    [("mistral", "int4-g32"), ("gemma2", "int4-g32"), ("bloom", "int4-g32"), ("llama", "fp8"), ("llama", None)],
)
def test_what_runs_layer_by_layer(tmp_path, family, scheme):
    """Windows, soft caps, ALiBi; and weights that are not codes."""
    sizes = {"hidden_size": 128, "n_head": 4} if family == "bloom" else {**WIDE, "head_dim": 32}
    tiny_models.build(tmp_path, family, **sizes)
    model = load_model(
        tmp_path, ops=TritonOps(), device=CPU, dtype=torch.float32, scheme=SCHEMES[scheme] if scheme else None
    )
    assert model.decoder.one_token is None
