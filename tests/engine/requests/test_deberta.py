"""DeBERTa in an engine: scores of pairs and labels, vectors, schemes, ranks; and what is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from slipstream import LLM
from slipstream.errors import UnsupportedModelError
from slipstream.spec.description import read_spec
from tests.support import tiny_models

SETTINGS = dict(device="cpu", dtype="float32", num_threads=1)
TEXTS = ["the cat", "sing the song of the road .", "a", "what is ? " * 14]
FAMILIES = ["deberta-v3", "deberta-v2"]


def labelled(theirs, llm):
    tokens = [o.prompt_token_ids for o in llm.classify(TEXTS)]
    with torch.no_grad():
        return [theirs(torch.tensor([t])).logits.softmax(-1)[0].numpy() for t in tokens]


@pytest.mark.parametrize("family", FAMILIES)
def test_labels_have_transformers_probabilities(tmp_path, family):
    theirs = tiny_models.build_encoder(tmp_path, family, num_labels=3)
    tiny_models.write_wordpiece(tmp_path)
    with LLM(str(tmp_path), **SETTINGS, max_num_batched_tokens=130, max_num_seqs=4) as llm:
        for output, probs in zip(llm.classify(TEXTS), labelled(theirs, llm), strict=True):
            np.testing.assert_allclose(output.probs, probs, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_pairs_have_transformers_scores(tmp_path, family):
    """The two texts of a pair have different types, if the model has types."""
    theirs = tiny_models.build_encoder(tmp_path, family, num_labels=1)
    tiny_models.write_wordpiece(tmp_path)
    with LLM(str(tmp_path), **SETTINGS) as llm:
        found = llm.score("the cat", TEXTS)
        texts = llm._input.texts.prepare([("the cat", text) for text in TEXTS])
        ids = texts.token_ids
    for output, tokens in zip(found, ids, strict=True):
        types = torch.zeros(1, len(tokens), dtype=torch.long)
        types[0, tokens.index(3) + 1 :] = 1 if family == "deberta-v2" else 0
        with torch.no_grad():
            score = theirs(torch.tensor([tokens]), token_type_ids=types).logits[0, 0].sigmoid()
        assert output.score == pytest.approx(score.item(), abs=1e-5)


@pytest.mark.usefixtures("forked_ranks")
def test_eight_bits_and_two_ranks_give_nearly_the_same_vectors(tmp_path):
    tiny_models.build_encoder(tmp_path, "deberta-v3", hidden_size=64, noise=0.02)
    tiny_models.write_wordpiece(tmp_path)

    def vectors(**settings):
        with LLM(str(tmp_path), **{**SETTINGS, **settings}) as llm:
            return np.array([o.embedding for o in llm.embed(TEXTS)])

    exact = vectors()
    np.testing.assert_allclose(vectors(tensor_parallel_size=2), exact, atol=1e-5)
    assert (vectors(quantization="int8") * exact).sum(1).min() > 0.99
    assert (vectors(dtype="bfloat16") * exact).sum(1).min() > 0.99


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("conv_kernel_size", 3),
        ("pos_att_type", ["p2p"]),
        ("pos_att_type", []),
        ("norm_rel_ebd", "rms"),
        ("embedding_size", 16),
        ("position_buckets", 2),
    ],
)
def test_what_is_not_known_is_refused_by_name(tmp_path, field, value):
    tiny_models.build_encoder(tmp_path, "deberta-v3")
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), field: value}))
    with pytest.raises(UnsupportedModelError) as caught:
        read_spec(tmp_path)
    assert caught.value.field == field
