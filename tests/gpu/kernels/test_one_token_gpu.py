"""A decode step of one sequence in one kernel, whose programs wait for one another: near the layers one by one, and the same at
each run.

Run: pytest -m gpu tests/gpu/kernels/test_one_token_gpu.py
"""

from __future__ import annotations

import pytest
import torch

from slipstream import LLM, SamplingParams
from slipstream.model.load.loader import load_model
from slipstream.model.one_token import compile_one_token
from slipstream.spec.reason import Reason
from slipstream.spec.scheme import SCHEMES
from tests.support import one_token_steps as steps
from tests.support import tiny_models

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
KINDS = [torch.bfloat16, torch.float8_e4m3fn]


@pytest.mark.parametrize("scheme", [None, "fp8", "int8", "int4", "int4-g32", "mxfp4"])
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("family", steps.FAMILIES)
def test_a_step_is_as_near_to_float32_as_kernel_by_kernel(
    tmp_path, monkeypatch, family, kind, scheme
):
    """No farther from float32, with the same rounded weights, inputs and cache, than the layers kernel by kernel are; and into
    the cache what they write. Over latents, beyond 256 keys, programs attend for several heads. Layers with a window find
    their blocks in another table, which has none of those before the window."""
    if scheme == "mxfp4" and family != "gpt_oss":
        pytest.skip("only gpt-oss has experts in MXFP4")
    if family in steps.MIXTURES and scheme is not None and scheme.startswith("int4"):
        pytest.skip("the kernel has no experts in 4 bits")
    if family == "deepseek_v2" and kind.itemsize == 1:
        pytest.skip("latents have no cache of 8 bits")
    # Not at the top: tests/kernels imports it for Triton's interpreter.
    from slipstream.kernels.triton import TritonOps
    from slipstream.kernels.triton.one_token import kernel as one_token

    monkeypatch.setattr(one_token, "ONE_HEAD_KEYS", 256)
    steps.build(tmp_path, family)
    device = torch.device("cuda")
    named = SCHEMES[scheme] if scheme else None
    model = load_model(tmp_path, ops=TritonOps(), device=device, dtype=torch.bfloat16, scheme=named)
    exact = load_model(
        tmp_path, ops=steps.Exact(), device=device, dtype=torch.float32, scheme=named
    ).decoder
    decoder, fused = model.decoder, compile_one_token(model.decoder)
    assert not isinstance(fused, Reason), fused
    kv = steps.caches(model.spec, kind, device)
    groups, window = model.spec.group_of_layer, steps.FAMILIES[family].get("sliding_window", 0)
    table, second = (
        torch.randperm(steps.NUM_BLOCKS - 1, device=device, dtype=torch.int32)[None] + 1
        for _ in range(2)
    )
    token = torch.tensor([77], dtype=torch.int32, device=device)
    judged = steps.Judged(scheme, family)
    with torch.inference_mode():
        for length in steps.LENGTHS:
            seen = second.clone()
            seen[:, : max(0, length - window) // steps.BLOCK_SIZE] = 0
            meta = steps.last_of(length, table, seen if max(groups) else None)
            truth = exact.forward(token, steps.another(kv, torch.float32), meta)
            expected, written = decoder.forward(token, kv, meta), steps.kept(kv, meta, groups)
            found = fused.forward(token, kv, meta)
            judged.step(length, truth, (expected, written), (found, steps.kept(kv, meta, groups)))
            assert all(torch.equal(found, fused.forward(token, kv, meta)) for _ in range(20))
    judged.together()


@pytest.mark.parametrize(("family", "scheme"), [("llama", "int4"), ("gpt_oss", "mxfp4")])
def test_answers_of_an_engine(tmp_path, monkeypatch, family, scheme):
    """Answers through graphs, after steps of many sequences. gpt-oss' windows of 32 keys are shorter than the texts."""
    monkeypatch.setattr(
        "slipstream.worker.graphs.ladder.PATIENCE", 1
    )  # a prompt runs from a graph the first time, too
    sizes = {**steps.SIZES, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128}
    if family == "gpt_oss":
        steps.build(tmp_path, family, sliding_window=32, num_hidden_layers=4)
    else:
        tiny_models.write(tmp_path, family, **sizes)
    prompts = [{"prompt_token_ids": [(7 * i + n) % 250 for i in range(n)]} for n in (5, 40, 200)]
    greedy = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    limits = dict(max_model_len=512, max_num_seqs=4, kv_cache_bytes=2**26, skip_tokenizer_init=True)
    with LLM(str(tmp_path), quantization=scheme, **limits) as llm:
        refused = llm.core.executor.runner.forwards.refused
        assert "one-token" not in refused, refused
        together = [o.outputs[0].token_ids for o in llm.generate(prompts, greedy, progress=False)]
        alone = [llm.generate([p], greedy, progress=False)[0].outputs[0].token_ids for p in prompts]
        again = [llm.generate([p], greedy, progress=False)[0].outputs[0].token_ids for p in prompts]
        assert llm.stats().num_free_blocks == llm.stats().num_blocks
    assert alone == again
    assert (
        sum(a[:4] == b[:4] for a, b in zip(together, alone, strict=True)) >= 2
    )  # later a near tie may part them
