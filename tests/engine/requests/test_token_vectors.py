"""Vectors, labels and weights of tokens: ColBERT's layouts with MaxSim, bge-m3's heads, classifiers of tokens."""

from __future__ import annotations

import base64
import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream import LLM
from slipstream.config import EngineArgs
from slipstream.engine.async_llm import AsyncLLM
from slipstream.errors import CheckpointError, RequestError, UnsupportedModelError
from slipstream.spec.description import read_spec
from tests.server.conftest import serving
from tests.support import tiny_models

SETTINGS = dict(device="cpu", dtype="float32", num_threads=1)
TEXTS = ["the cat", "sing the song of the road .", "a"]
QUERY, DOCUMENTS = "who sings ?", ["the cat .", "sing the song of the road . " * 3, "a . a"]
Q, D = "[unused0]", "[unused1]"


def with_markers(path):
    """Adds the tokens that stand before queries and documents to the vocabulary."""
    file = path / "tokenizer.json"
    found = json.loads(file.read_text())
    vocabulary = found["model"]["vocab"]
    vocabulary |= {Q: len(vocabulary), D: len(vocabulary) + 1}
    file.write_text(json.dumps(found))
    return vocabulary


def states(theirs, ids):
    with torch.no_grad():
        return theirs(torch.tensor([list(ids)])).last_hidden_state[0]


def unit(x):
    return x / x.norm(dim=-1, keepdim=True)


def write_pylate(path, *, bias=False, **says):
    torch.manual_seed(1)
    weight = torch.randn(12, 32)
    (path / "1_Dense").mkdir(exist_ok=True)
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Dense", "type": "pylate.models.Dense.Dense"},
    ]
    (path / "modules.json").write_text(json.dumps(modules))
    dense = dict(in_features=32, out_features=12, bias=bias)
    dense["activation_function"] = "torch.nn.modules.linear.Identity"
    (path / "1_Dense" / "config.json").write_text(json.dumps(dense))
    save_file({"linear.weight": weight}, path / "1_Dense" / "model.safetensors")
    own = dict(model_type="ColBERT", query_prefix=Q, document_prefix=D, query_length=9)
    own |= dict(document_length=24, similarity_fn_name="MaxSim", do_query_expansion=False)
    (path / "config_sentence_transformers.json").write_text(json.dumps({**own, **says}))
    return weight


def write_stanford(path):
    """The original code's checkpoint: the product is among the weights, and settings are in `artifact.metadata`."""
    torch.manual_seed(1)
    weight, file = torch.randn(12, 32), path / "model.safetensors"
    tensors = {f"bert.{name}": x for name, x in load_file(file).items()}
    save_file({**tensors, "linear.weight": weight}, file)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "architectures": ["HF_ColBERT"]}))
    own = dict(query_maxlen=9, doc_maxlen=24, dim=12, query_token_id=Q, doc_token_id=D)
    (path / "artifact.metadata").write_text(json.dumps({**own, "mask_punctuation": True}))
    return weight


WRITERS = {"pylate": write_pylate, "stanford": write_stanford}


@pytest.fixture(params=list(WRITERS))
def colbert(request, tmp_path):
    theirs = tiny_models.build_encoder(tmp_path)
    tiny_models.write_wordpiece(tmp_path)
    return tmp_path, theirs, with_markers(tmp_path), WRITERS[request.param](tmp_path)


def tokens_of(llm, text, marker, longest):
    ids = llm.tokenizer.encode(text)
    ids = [ids[0], marker, *ids[1:]]
    return ids if len(ids) <= longest else [*ids[: longest - 1], ids[-1]]


@pytest.mark.parametrize("kernels", ["cpu", "torch"])
def test_a_models_scores_are_max_sims_of_its_tokens(colbert, kernels):
    path, theirs, vocabulary, weight = colbert
    with LLM(str(path), kernels=kernels, **SETTINGS) as llm:
        query = tokens_of(llm, QUERY, vocabulary[Q], 9)
        made = unit(states(theirs, query) @ weight.T)
        exact = []
        for text in DOCUMENTS:
            ids = tokens_of(llm, text, vocabulary[D], 24)
            rows = unit(states(theirs, ids) @ weight.T)
            kept = [
                i for i, token in enumerate(ids) if token not in (vocabulary["."], vocabulary["?"])
            ]
            exact.append((made @ rows[kept].T).max(1).values.sum().item())
        assert [o.score for o in llm.score(QUERY, DOCUMENTS)] == pytest.approx(exact, abs=1e-4)
        ranked = llm.rerank(QUERY, DOCUMENTS)
        assert [r.index for r in ranked] == np.argsort(exact)[::-1].tolist()
        pairs = llm.score([QUERY, DOCUMENTS[0], QUERY], DOCUMENTS)
        assert [pairs[0].score, pairs[2].score] == pytest.approx([exact[0], exact[2]], abs=1e-4)
        for output in llm.encode(TEXTS):  # without a prefix
            rows = unit(states(theirs, output.prompt_token_ids) @ weight.T)
            np.testing.assert_allclose(output.data, rows.numpy(), atol=1e-5)
        with pytest.raises(RequestError, match="a vector for each token"):
            llm.embed(TEXTS)
        with pytest.raises(RequestError, match="rows for tokens"):  # whichever way it is asked
            llm._input.texts.prepare(TEXTS)


def test_tokens_of_a_model_of_embeddings_have_vectors_too(tmp_path):
    """Steps of one task alternate with those of the other."""
    theirs = tiny_models.build_encoder(tmp_path)
    tiny_models.write_wordpiece(tmp_path)
    with LLM(str(tmp_path), **SETTINGS, max_num_batched_tokens=130, max_num_seqs=2) as llm:
        found = llm.encode(TEXTS * 3, pooling_task="token_embed")
        for output in found:
            rows = unit(states(theirs, output.prompt_token_ids))
            np.testing.assert_allclose(output.data, rows.numpy(), atol=1e-5)
        assert llm.encode(TEXTS)[0].data.shape == (32,)
        with pytest.raises(RequestError, match="no 'token_classify'"):
            llm.encode(TEXTS, pooling_task="token_classify")
        with pytest.raises(RequestError, match="no sparse embeddings"):
            llm.embed_sparse(TEXTS)


def write_heads(path):
    torch.manual_seed(2)
    sparse, colbert = torch.nn.Linear(32, 1), torch.nn.Linear(32, 32)
    for name, layer in (("sparse", sparse), ("colbert", colbert)):
        save_file(dict(layer.state_dict()), path / f"{name}_linear.safetensors")
    return sparse, colbert


def lexical(ids, weights, special):
    found = {}
    for token, weight in zip(ids, weights.tolist(), strict=True):
        if token not in special and weight > 0:
            found[token] = max(found.get(token, 0.0), weight)
    return dict(sorted(found.items()))


@pytest.mark.parametrize("kernels", ["cpu", "torch"])
def test_heads_of_bge_m3(tmp_path, kernels):
    theirs = tiny_models.build_encoder(tmp_path, "roberta")
    tiny_models.write_wordpiece(tmp_path)
    sparse, colbert = write_heads(tmp_path)
    with LLM(str(tmp_path), kernels=kernels, **SETTINGS) as llm:
        assert len(llm.embed(TEXTS)[0].embedding) == 32
        with torch.no_grad():
            for output in llm.embed_sparse(TEXTS):
                ids = output.prompt_token_ids
                weights = torch.relu(sparse(states(theirs, ids)))[:, 0]
                exact = lexical(ids, weights, range(5))
                assert output.indices == list(exact)
                assert output.values == pytest.approx(list(exact.values()), abs=1e-5)
            for output in llm.encode(TEXTS, pooling_task="token_embed"):
                rows = unit(colbert(states(theirs, output.prompt_token_ids)))
                np.testing.assert_allclose(output.data, rows[1:].numpy(), atol=1e-5)


@pytest.mark.parametrize(
    "family",
    [
        *("bert", "roberta", "distilbert", "electra", "mpnet", "modernbert", "deberta-v3"),
        *("albert", "rembert", "roformer", "megatron-bert"),
    ],
)
def test_labels_of_tokens_equal_transformers(tmp_path, family):
    from transformers import AutoConfig, AutoModelForTokenClassification

    settings = {**tiny_models.ENCODERS[family], "num_labels": 3}
    torch.manual_seed(0)
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    theirs = AutoModelForTokenClassification.from_config(config).eval()
    theirs.save_pretrained(tmp_path)
    tiny_models.write_wordpiece(tmp_path)
    with LLM(str(tmp_path), **SETTINGS) as llm:
        for output in llm.encode(TEXTS, pooling_task="token_classify"):
            with torch.no_grad():
                exact = theirs(torch.tensor([output.prompt_token_ids])).logits[0]
            np.testing.assert_allclose(output.data, exact.numpy(), atol=1e-4)
        for refused in (llm.embed, llm.classify):
            with pytest.raises(RequestError):
                refused(TEXTS)
        with pytest.raises(RequestError, match="classifies tokens"):
            llm.score("a", ["b"])


def test_scores_over_http_are_those_of_token_vectors_and_wrong_fields_are_named(colbert):
    args = EngineArgs(model=str(colbert[0]), **SETTINGS)
    with (
        serving(start=lambda: AsyncLLM.start(args), served_model_names=("c",)) as server,
        server.http() as http,
    ):
        body = {"input": TEXTS, "task": "token_embed", "encoding_format": "base64"}
        data = http.post("/pooling", json=body).json()["data"]
        for text, item in zip(TEXTS, data, strict=True):
            got = np.frombuffer(base64.b64decode(item["data"]), np.float32).reshape(-1, 12)
            assert len(got) == len(http.post("/tokenize", json={"prompt": text}).json()["tokens"])
        queries = http.post("/pooling", json={"input": QUERY, "input_type": "query"}).json()
        documents = {"input": DOCUMENTS, "input_type": "document"}
        made = [np.array(x["data"]) for x in http.post("/pooling", json=documents).json()["data"]]
        query = np.array(queries["data"][0]["data"])
        exact = [(query @ x.T).max(1).sum() for x in made]
        body = {"query": QUERY, "documents": DOCUMENTS}
        for result in http.post("/rerank", json=body).json()["results"]:
            assert result["relevance_score"] == pytest.approx(exact[result["index"]], abs=1e-5)
        body = {"text_1": QUERY, "text_2": DOCUMENTS}
        found = http.post("/score", json=body).json()["data"]
        assert [x["score"] for x in found] == pytest.approx(exact, abs=1e-5)
        for route, given, field in (
            ("/v1/embeddings", {"input": "a"}, "model"),
            ("/pooling", {"input": "a", "task": "classify"}, "task"),
            ("/pooling", {"input": "a", "input_type": "passage"}, "input_type"),
            ("/embed_sparse", {"inputs": "a"}, "model"),
        ):
            answer = http.post(route, json=given)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


def test_sparse_embeddings_over_http(tmp_path):
    tiny_models.build_encoder(tmp_path)
    tiny_models.write_wordpiece(tmp_path)
    write_heads(tmp_path)
    with LLM(str(tmp_path), **SETTINGS) as llm:
        exact = llm.embed_sparse(TEXTS)
    args = EngineArgs(model=str(tmp_path), **SETTINGS)
    with (
        serving(start=lambda: AsyncLLM.start(args), served_model_names=("c",)) as server,
        server.http() as http,
    ):
        found = http.post("/embed_sparse", json={"inputs": TEXTS}).json()
        assert [[x["index"] for x in text] for text in found] == [x.indices for x in exact]
        for text, own in zip(found, exact, strict=True):
            assert [x["value"] for x in text] == pytest.approx(own.values, abs=1e-6)
        assert len(http.post("/embed_sparse", json={"inputs": "the cat"}).json()) == 1
        long = {"inputs": ["a", "b " * 200]}
        answer = http.post("/embed_sparse", json=long)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "inputs[1]")
        assert len(http.post("/embed_sparse", json={**long, "truncate": True}).json()) == 2
        weights = {"input": TEXTS, "task": "token_classify"}  # as vLLM gives bge-m3's
        rows = [x["data"] for x in http.post("/pooling", json=weights).json()["data"]]
        assert [len(x) for x in rows] == [len(x.prompt_token_ids) for x in exact]


def test_what_is_not_understood_is_refused_by_name(tmp_path):
    tiny_models.build_encoder(tmp_path)
    write_pylate(tmp_path)
    modules = json.loads((tmp_path / "modules.json").read_text())
    modules.append({"path": "2_TokenPooling", "type": "x.HierarchicalTokenPooling"})
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(UnsupportedModelError, match="HierarchicalTokenPooling"):
        read_spec(tmp_path)
    modules[-1] = {"path": "2_Mask", "type": "x.MultiVectorMask"}
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "2_Mask").mkdir()
    for said, field in (
        ({"skiplist_tasks": ["query"]}, "skiplist_tasks"),
        ({"keep_only_token_ids": [3]}, "keep_only_token_ids"),
    ):
        (tmp_path / "2_Mask" / "config.json").write_text(json.dumps(said))
        with pytest.raises(UnsupportedModelError) as caught:
            read_spec(tmp_path)
        assert caught.value.field == field
    (tmp_path / "modules.json").unlink()
    (tmp_path / "config_sentence_transformers.json").unlink()
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["HF_ColBERT"]}))
    with pytest.raises(CheckpointError) as lacking:
        read_spec(tmp_path)
    assert lacking.value.field == "linear.weight"
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "sparse_linear.pt").write_bytes(b"")
    tiny_models.write_wordpiece(tmp_path)
    with (
        LLM(str(tmp_path), **SETTINGS) as llm,
        pytest.raises(RequestError, match=r"sparse_linear.pt"),
    ):
        llm.embed_sparse(TEXTS)
