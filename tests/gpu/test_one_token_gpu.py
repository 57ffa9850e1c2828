"""A decode step of one sequence in one kernel, whose programs wait for one another: near the layers one by one, and the same at
each run.

Run: pytest -m gpu tests/gpu/test_one_token_gpu.py
"""

from __future__ import annotations

import pytest
import torch

from slipstream import LLM, SamplingParams
from slipstream.kernels.metadata import AttentionMetadata, LayerKV, cache_tensors
from slipstream.kernels.reference import ReferenceOps
from slipstream.model.loader import load_model
from slipstream.model.scheme import SCHEMES
from tests import tiny_models

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
SIZES = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4, "max_position_embeddings": 2048}
NUM_BLOCKS = 130


def caches(spec, kind, device):
    def new(shape):
        return (torch.randn(shape, device=device) * 0.5).to(kind)

    one_byte = kind.itemsize == 1
    found = []
    for layer in spec.layers:
        k, v = cache_tensors(layer.attention, NUM_BLOCKS, 16, new, values_by_dim=one_byte)
        scale = torch.full((layer.attention.num_kv_heads,), 0.3, device=device) if one_byte else None
        found.append(LayerKV(k, v, scale, scale))
    return found


def exactly(kv):
    """The same cache in float32, without scales."""
    k, v = kv.k.float(), kv.v.float()
    if kv.k_scale is not None:
        k, v = k * kv.k_scale[:, None, None], v * kv.v_scale[:, None, None]
    return LayerKV(k, v)


@pytest.mark.parametrize("scheme", [None, "fp8", "int8", "int4", "int4-g32"])
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("qwen3", {**SIZES, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128}),
        ("llama", {**SIZES, "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 64}),
        ("gptj", {"n_embd": 1024, "n_layer": 4, "n_head": 4, "rotary_dim": 64, "n_positions": 2048}),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_a_step(tmp_path, family, overrides, kind, scheme):
    from slipstream.kernels.triton import TritonOps  # not at the top: tests/kernels imports it for Triton's interpreter

    tiny_models.build(tmp_path, family, **overrides)
    device = torch.device("cuda")
    named = SCHEMES[scheme] if scheme else None
    model = load_model(tmp_path, ops=TritonOps(), device=device, dtype=torch.bfloat16, scheme=named)
    decoder, fused = model.decoder, model.decoder.one_token
    assert fused is not None
    kv = caches(model.spec, kind, device)
    exact = load_model(tmp_path, ops=ReferenceOps(), device=device, dtype=torch.float32).decoder
    exact_kv = [exactly(layer) for layer in kv]
    table = torch.randperm(NUM_BLOCKS - 1, device=device, dtype=torch.int32)[None] + 1
    token = torch.tensor([77], dtype=torch.int32, device=device)
    with torch.inference_mode():
        for length in (1, 16, 200, 257, 900, 2000):
            at = length - 1
            meta = AttentionMetadata(
                query_start_loc=torch.tensor([0, 1], dtype=torch.int32, device=device),
                seq_lens=torch.tensor([length], dtype=torch.int32, device=device),
                block_table=table,
                positions=torch.tensor([at], device=device),
                slot_mapping=table[0, at // 16].long()[None] * 16 + at % 16,
                num_decodes=1,
                max_query_len=1,
                max_seq_len=2048,
            )
            decoder.one_token = None
            expected = decoder.forward(token, kv, meta).float()
            decoder.one_token = fused
            found = decoder.forward(token, kv, meta)
            apart = ((found.float() - expected).norm() / expected.norm()).item()
            if scheme in ("fp8", "int8"):  # inputs that fall on the other side of two codes, in every product
                truth = exact.forward(token, exact_kv, meta)
                one_by_one, together = ((x - truth).norm() for x in (expected, found.float()))
                assert together < 1.15 * one_by_one, (together, one_by_one, apart)
                assert apart < 0.2
            else:
                assert apart < 0.05
            assert all(torch.equal(found, decoder.forward(token, kv, meta)) for _ in range(20))


def test_answers_of_an_engine(tmp_path):
    """Through graphs, after steps of many sequences."""
    tiny_models.build(tmp_path, "llama", **SIZES, num_attention_heads=8, num_key_value_heads=2, head_dim=128)
    prompts = [{"prompt_token_ids": [(7 * i + n) % 250 for i in range(n)]} for n in (5, 40, 200)]
    greedy = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    with LLM(str(tmp_path), skip_tokenizer_init=True, max_model_len=512, quantization="int4", max_num_seqs=4) as llm:
        together = [o.outputs[0].token_ids for o in llm.generate(prompts, greedy, progress=False)]
        alone = [llm.generate([p], greedy, progress=False)[0].outputs[0].token_ids for p in prompts]
        again = [llm.generate([p], greedy, progress=False)[0].outputs[0].token_ids for p in prompts]
        assert llm.stats().num_free_blocks == llm.stats().num_blocks
    assert alone == again
    assert sum(a[:4] == b[:4] for a, b in zip(together, alone, strict=True)) >= 2  # later a near tie may part them
