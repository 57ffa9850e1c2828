"""Classifiers of many labels and reward models: probabilities as `problem_type` says, in Python and over HTTP."""

from __future__ import annotations

import base64
import json

import numpy as np
import pytest
import torch

from slipstream import LLM
from slipstream.config import EngineArgs
from slipstream.engine.async_llm import AsyncLLM
from slipstream.errors import RequestError, UnsupportedModelError
from slipstream.spec.description import read_spec
from tests.server.conftest import serving
from tests.support import tiny_models

SETTINGS = dict(device="cpu", dtype="float32", num_threads=1)
TEXTS = ["the cat", "sing the song of the road .", "a"]
LABELS = {"0": "joy", "1": "anger", "2": "fear"}


def build(path, problem=None, labels=3):
    theirs = tiny_models.build_encoder(path, num_labels=labels)
    tiny_models.write_wordpiece(path)
    file = path / "config.json"
    config = json.loads(file.read_text())
    own = LABELS if labels == 3 else {"0": "LABEL_0"}
    file.write_text(json.dumps({**config, "problem_type": problem, "id2label": own}))
    return theirs


def logits_of(theirs, outputs):
    with torch.no_grad():
        return torch.cat([theirs(torch.tensor([o.prompt_token_ids])).logits for o in outputs])


@pytest.mark.parametrize(
    ("problem", "labels", "activation"),
    [
        (None, 3, lambda x: x.softmax(-1)),
        ("single_label_classification", 3, lambda x: x.softmax(-1)),
        ("multi_label_classification", 3, torch.sigmoid),
        ("regression", 3, lambda x: x),
        (None, 1, torch.sigmoid),
        ("regression", 1, lambda x: x),
    ],
)
def test_probabilities_are_those_of_the_problem_type(tmp_path, problem, labels, activation):
    theirs = build(tmp_path, problem, labels)
    with LLM(str(tmp_path), **SETTINGS) as llm:
        own = llm.classify(TEXTS)
        exact = logits_of(theirs, own)
        for output, row in zip(own, exact, strict=True):
            assert output.outputs.probs == pytest.approx(activation(row).tolist(), abs=1e-5)
            names = list(LABELS.values()) if labels == 3 else ["LABEL_0"]
            assert output.label == names[int(row.argmax())]
        for output, row in zip(llm.encode(TEXTS), exact, strict=True):
            assert output.data == pytest.approx(row.numpy(), abs=1e-5)
        assert llm.classify([]) == []


def test_a_classifier_with_rotary_positions_gives_their_scores(tmp_path):
    theirs = tiny_models.build_encoder(tmp_path, "jina_embeddings_v3", num_labels=3)
    tiny_models.write_wordpiece(tmp_path)
    with LLM(str(tmp_path), **SETTINGS) as llm:
        own = llm.encode(TEXTS)
        for output, row in zip(own, logits_of(theirs, own), strict=True):
            assert output.data == pytest.approx(row.numpy(), abs=1e-5)


def test_a_reward_model_on_a_decoder_gives_its_score(tmp_path):
    torch.manual_seed(0)
    from transformers import LlamaConfig, LlamaForSequenceClassification  # imports Triton

    config = LlamaConfig(
        vocab_size=tiny_models.VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_labels=1, pad_token_id=0, problem_type="regression",
    )  # fmt: skip
    theirs = LlamaForSequenceClassification(config).eval()
    theirs.save_pretrained(tmp_path)
    tiny_models.write_tokenizer(tmp_path)
    with LLM(str(tmp_path), **SETTINGS) as llm:
        own = llm.classify(["hello the hello", "the"])
        exact = logits_of(theirs, own)
        assert [o.probs[0] for o in own] == pytest.approx(exact[:, 0].tolist(), abs=1e-5)


def test_vllms_route_classifies_and_names_a_wrong_input(tmp_path):
    theirs = build(tmp_path, "multi_label_classification")
    args = EngineArgs(model=str(tmp_path), **SETTINGS)
    with (
        LLM(str(tmp_path), **SETTINGS) as llm,
        serving(start=lambda: AsyncLLM.start(args), served_model_names=("c",)) as server,
        server.http() as http,
    ):
        own = llm.classify(TEXTS)
        exact = logits_of(theirs, own)
        body = {"model": "c", "input": TEXTS}
        answer = http.post("/classify", json=body).json()
        assert answer["object"] == "list"
        assert answer["usage"]["prompt_tokens"] == sum(len(o.prompt_token_ids) for o in own)
        for i, (one, output) in enumerate(zip(answer["data"], own, strict=True)):
            assert (one["index"], one["label"], one["num_classes"]) == (i, output.label, 3)
            assert one["probs"] == pytest.approx(output.probs, abs=1e-5)
        plain = http.post("/v1/classify", json={**body, "use_activation": False}).json()["data"]
        assert np.array([one["probs"] for one in plain]) == pytest.approx(exact.numpy(), abs=1e-5)
        pooled = http.post("/pooling", json=body).json()["data"]
        assert np.array([one["data"] for one in pooled]) == pytest.approx(exact.numpy(), abs=1e-5)
        coded = http.post("/pooling", json={**body, "encoding_format": "base64"}).json()["data"]
        found = [np.frombuffer(base64.b64decode(one["data"]), np.float32) for one in coded]
        assert np.array(found) == pytest.approx(exact.numpy(), abs=1e-5)
        wrong = http.post("/classify", json={"model": "c", "input": [1, 9999]})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "input")


def test_models_without_classes_and_unknown_problems_are_refused(tmp_path):
    tiny_models.build_encoder(tmp_path)
    tiny_models.write_wordpiece(tmp_path)
    with LLM(str(tmp_path), **SETTINGS) as llm:
        with pytest.raises(RequestError) as caught:
            llm.classify(TEXTS)
        assert caught.value.field == "model"
    build(tmp_path / "other", "clustering")
    with pytest.raises(UnsupportedModelError) as caught:
        read_spec(tmp_path / "other")
    assert caught.value.field == "problem_type"
