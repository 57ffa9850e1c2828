"""Grammars on a GPU: the mask's kernel, and answers with two steps in flight.

Run: pytest -m gpu tests/gpu.
"""

from __future__ import annotations

import json

import pytest
import torch

from slipstream import LLM, SamplingParams, StructuredOutputsParams
from slipstream.kernels.plain.reference import ReferenceOps
from tests.support import tiny_models

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "ok": {"type": "boolean"}},
    "required": ["name", "ok"],
    "additionalProperties": False,
}
PARAMS = StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True)


@pytest.mark.parametrize("vocab", [33, 50_257, 128_256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_mask_equals_the_references(vocab, dtype):
    from slipstream.kernels.triton import TritonOps

    torch.manual_seed(0)
    logits = torch.randn(9, vocab, dtype=dtype, device="cuda")
    rows = torch.tensor([0, 8, 3], device="cuda")
    bits = torch.randint(
        -(2**31), 2**31, (3, -(-vocab // 32)), dtype=torch.int64, device="cuda"
    ).to(torch.int32)
    expected = logits.clone()
    ReferenceOps().mask_logits(expected, rows, bits)
    TritonOps().mask_logits(logits, rows, bits)
    assert torch.equal(logits, expected)


@pytest.mark.parametrize(
    "settings", [{}, {"enforce_eager": True}, {"deterministic": True}], ids=str
)
def test_answers_keep_to_the_schema(tmp_path, settings):
    """A request without a grammar runs in the same batch, with two steps in flight."""
    shape = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    tiny_models.write_with_tokenizer(tmp_path, "llama", max_position_embeddings=1024, **shape)
    llm = LLM(str(tmp_path), max_model_len=512, max_num_seqs=16, kv_cache_bytes=2**26, **settings)
    structured = SamplingParams(max_tokens=None, seed=1, n=2, structured_outputs=PARAMS)
    plain = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    given = ["hello", "the other", "in the hour"]
    mixed = llm.generate(given, [structured, plain, structured], progress=False)
    for answer in (mixed[0], mixed[2]):
        for choice in answer.outputs:
            assert choice.finish_reason == "stop"
            assert set(json.loads(choice.text)) == {"name", "ok"}
    assert not llm.core.grammars
