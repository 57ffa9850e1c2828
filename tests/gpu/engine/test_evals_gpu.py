"""Evaluation on a GPU: what is measured there is what the reference gives, and the canary passes from one to the other.

Run: pytest -m gpu tests/gpu.
"""

from __future__ import annotations

import pytest
import torch

from slipstream.compress.report import tokens_per_s
from slipstream.config import EngineArgs
from slipstream.evals.divergence import compare
from slipstream.evals.scorer import Scorer
from slipstream.evals.text import Document, cut
from slipstream.worker.start.canary import run_canary
from tests.support import tiny_models

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
CONTEXT = 96


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_models.write_with_tokenizer(
        folder,
        hidden_size=256,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=512,
        initializer_range=0.05,
    )
    return folder


def load(model, **settings):
    return Scorer.load(EngineArgs(model=str(model), **settings), context=CONTEXT)


@pytest.mark.parametrize("quantization", [None, "fp8", "int8", "int4", "int4-g32"])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8", "int8"])
def test_a_gpu_measures_what_the_reference_does(model, quantization, kv_cache_dtype):
    """Bounds are as wide as bfloat16 needs: here the reference in bfloat16 is off its own float32
    by up to 10 % of a layer, 4.6 % of the perplexity and a KL of 0.005, since inputs fall into
    other codes. The size is chance, so a difference of one code is allowed."""
    rounded = {"quantization": quantization, "kv_cache_dtype": kv_cache_dtype}
    exact = load(model, device="cpu", kernels="reference", dtype="bfloat16", **rounded)
    single = load(model, device="cpu", kernels="reference", dtype="float32", **rounded)
    gpu = load(model, device="cuda", dtype="bfloat16", **rounded)
    windows = list(
        cut(
            [Document(text="hello the world in the hour " * 30)],
            gpu.tokenizer,
            context=CONTEXT,
            stride=48,
        )
    )[:3]
    found = compare(exact, gpu, windows, num_worst=1)
    assert found.kl.mean < 0.01
    assert found.perplexity_ratio == pytest.approx(1, abs=0.05)
    natural = max(layer.own for layer in compare(exact, single, windows, num_worst=0).layers)
    a_code = max({"fp8": 1 / 16}.get(kind or "", 0.01) for kind in (quantization, kv_cache_dtype))
    assert max(layer.own for layer in found.layers) < 1.5 * natural + a_code
    assert len(found.worst) == 1
    turned = compare(gpu, exact, windows, num_worst=0)
    assert turned.perplexity_a == pytest.approx(found.perplexity_b, rel=1e-4)
    canary = exact.canary(windows[0].token_ids)
    assert run_canary(gpu.forwards, gpu.kv, canary, context=CONTEXT).ok


def test_every_way_of_scoring_has_a_rate(model):
    found = tokens_per_s(EngineArgs(model=str(model), device="cuda", kv_cache_bytes=2**26), (1, 4))
    assert all(rate > 0 for rate in found.values())
