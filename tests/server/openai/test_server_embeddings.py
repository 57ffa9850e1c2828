"""Embeddings and reranking over HTTP, with real engines on tiny random models and OpenAI's own client."""

from __future__ import annotations

import base64
import math
import struct
import threading

import openai
import pytest

from slipstream.config import EngineArgs
from slipstream.engine.async_llm import AsyncLLM
from tests.server.conftest import serving
from tests.support import tiny_models

TEXTS = ["the cat", "sing the song of the road .", ""]


def start(path, served=None, **settings):
    args = EngineArgs(model=str(path), dtype="float32", device="cpu", num_threads=1, **settings)
    return serving(start=lambda: AsyncLLM.start(args), served_model_names=("m",), **(served or {}))


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bert")
    tiny_models.build_encoder(folder)
    tiny_models.write_wordpiece(folder)
    tiny_models.write_sentence_transformers(folder)
    return folder


@pytest.fixture(scope="module")
def server(path):
    with start(path, max_num_seqs=2) as running:
        yield running


@pytest.fixture(scope="module")
def expected(path):
    from slipstream import LLM

    with LLM(str(path), dtype="float32", device="cpu", num_threads=1) as llm:
        yield llm.embed(TEXTS)


def test_openais_client_gets_the_vectors(server, expected):
    client = server.client()
    for given in (
        {},
        {"encoding_format": "float"},
        {"encoding_format": "base64"},
    ):  # without, it asks for base64 and decodes
        answer = client.embeddings.create(model="m", input=TEXTS, **given)
        assert answer.object == "list"
        assert answer.model == "m"
        assert [item.index for item in answer.data] == [0, 1, 2]
        for item, output in zip(answer.data, expected, strict=True):
            vector = item.embedding
            if isinstance(vector, str):
                vector = struct.unpack("<32f", base64.b64decode(vector))
            assert vector == pytest.approx(output.embedding, abs=1e-6)
        tokens = sum(len(output.prompt_token_ids) for output in expected)
        assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (tokens, tokens)
    server.wait_for(lambda: not server.state.in_flight, "a request was not freed")


def test_text_tokens_and_lists_of_them(server, expected):
    client = server.client()
    ids = [output.prompt_token_ids for output in expected]
    for given, count in ((TEXTS[0], 1), (ids[0], 1), (ids, 3)):
        data = client.embeddings.create(model="m", input=given).data
        assert len(data) == count
        assert data[0].embedding == pytest.approx(expected[0].embedding, abs=1e-6)


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [[5], 5]}, "input"),
        ({"input": "the " * 80}, "input"),
        ({"input": [5000]}, "input"),
        ({"dimensions": 16}, "dimensions"),
        ({"encoding_format": "int8"}, "encoding_format"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"pooling": "mean"}, "pooling"),
    ],
    ids=str,
)
def test_what_is_wrong_is_named(server, more, param):
    body = {"model": "m", "input": "the cat", **more}
    with server.http() as http:
        answer = http.post("/v1/embeddings", json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"].split("[")[0] == param


def test_the_text_at_fault_is_named(server):
    long = "the " * 80
    with server.http() as http:
        for route, body, param in (
            ("/v1/embeddings", {"input": ["a", "the cat", long]}, "input[2]"),
            ("/v1/embeddings", {"input": [[5], [6], []]}, "input[2]"),
            ("/v1/embeddings", {"input": [[5], [5000]]}, "input[1]"),
            ("/v1/embeddings", {"input": [5000]}, "input"),
            ("/v1/embeddings", {"input": [long]}, "input"),
            ("/rerank", {"query": "the cat", "documents": ["a", long]}, "documents[1]"),
            ("/rerank", {"query": long, "documents": ["a"]}, "query"),
        ):
            answer = http.post(route, json={"model": "m", **body})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_texts_among_ids_get_special_tokens_unless_told(server):
    with server.http() as http:

        def count(given, **more):
            body = {"model": "m", "input": given, **more}
            return http.post("/v1/embeddings", json=body).json()["usage"]["prompt_tokens"]

        assert count([["the cat", 5]], add_special_tokens=False) == 1 + count(
            "the cat", add_special_tokens=False
        )
        assert count([["the cat", 5]]) == 1 + count("the cat")


def test_a_text_far_too_long_is_refused_without_special_tokens_unless_it_is_cut(server):
    body = {"model": "m", "input": ["a", "the " * 5000], "add_special_tokens": False}
    with server.http() as http:
        answer = http.post("/v1/embeddings", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input[1]")
        assert "characters" in answer.text
        cut = http.post("/v1/embeddings", json=body | {"truncate_prompt_tokens": 4})
        assert cut.status_code == 200


def test_long_texts_are_cut_off_the_event_loop(server, monkeypatch):
    where, encode = [], server.engine.tokenizer.encode

    def noted(*args, **more):
        where.append((more, threading.current_thread().name))
        return encode(*args, **more)

    monkeypatch.setattr(server.engine.tokenizer, "encode", noted)
    long = ["the " * 1000] * 5  # each short enough for the event loop
    with server.http() as http:
        found = http.post("/v2/embed", json={"texts": long, "truncate": "START"})
        assert (found.status_code, len(found.json()["texts"])) == (200, 5)
        body = {"query": "a", "documents": long, "max_tokens_per_doc": 4}
        assert http.post("/rerank", json=body).status_code == 200
    own = {"add_special_tokens": False}
    names = [name for _, name in where[:5]] + [name for more, name in where if more == own]
    assert len(names) == 10
    assert all("text" in name for name in names), names


def test_logits_are_refused_of_a_model_that_has_none(server):
    with server.http() as http:
        for route, body, param in (
            (
                "/rerank",
                {"query": "a", "documents": ["b"], "use_activation": False},
                "use_activation",
            ),
            ("/rerank", {"query": "a", "texts": ["b"], "raw_scores": True}, "raw_scores"),
            ("/score", {"text_1": "a", "text_2": "b", "use_activation": False}, "use_activation"),
        ):
            answer = http.post(route, json=body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
            body[param] = not body[param]
            assert http.post(route, json=body).status_code == 200


def test_too_long_is_cut_when_asked(server):
    body = {"truncate_prompt_tokens": -1}
    answer = server.client().embeddings.create(model="m", input=["the " * 80], extra_body=body)
    assert answer.usage.prompt_tokens == 64


def test_as_many_texts_as_openai_takes_are_taken(server):
    with server.http() as http:
        sent = {"model": "m", "input": ["the"] * 2048, "encoding_format": "base64"}
        assert len(http.post("/v1/embeddings", json=sent).json()["data"]) == 2048


def test_texts_are_limited_and_counted_as_choices_are(path):
    with start(path, served={"max_choices_per_request": 3}) as server, server.http() as http:
        rerank = {"model": "m", "query": "the cat"}
        assert http.post("/v1/embeddings", json={"model": "m", "input": TEXTS}).status_code == 200
        assert http.post("/rerank", json={**rerank, "documents": TEXTS[:2]}).status_code == 200
        assert sum(server.state.metrics.finished.values()) == 6
        assert (
            'slipstream:request_success_total{finish_reason="stop",model_name="m"} 6.0'
            in http.get("/metrics").text
        )
        for route, body, param in (
            ("/v1/embeddings", {"model": "m", "input": ["the"] * 4}, "input"),
            ("/rerank", {**rerank, "documents": TEXTS}, "documents"),  # and the query
        ):
            refused = http.post(route, json=body)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
            assert "4 texts" in refused.text
            assert "at most 3" in refused.text
        assert sum(server.state.metrics.finished.values()) == 6


def test_an_encoder_writes_nothing(server):
    client = server.client()
    with pytest.raises(openai.BadRequestError, match="encoder"):
        client.completions.create(model="m", prompt="the cat")
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="other", input="the cat")


@pytest.mark.parametrize("route", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_embeddings_rerank_by_cosine(server, route):
    documents = ["the dog", {"text": "the cats"}, "zzz"]
    with server.http() as http:
        body = {"model": "m", "query": "the cat", "documents": documents, "return_documents": True}
        answer = http.post(route, json=body).json()
        first = http.post(route, json={**body, "top_n": 1, "return_documents": False}).json()[
            "results"
        ]
    vectors = (
        server.client()
        .embeddings.create(model="m", input=["the cat", "the dog", "the cats", "zzz"])
        .data
    )
    query, *others = (item.embedding for item in vectors)
    scores = [sum(map(math.prod, zip(query, other, strict=True))) for other in others]
    order = sorted(range(3), key=lambda i: -scores[i])
    assert [result["index"] for result in answer["results"]] == order
    assert [r["relevance_score"] for r in answer["results"]] == pytest.approx(
        [scores[i] for i in order], abs=1e-5
    )
    assert {r["index"]: r["document"]["text"] for r in answer["results"]} == {
        0: "the dog",
        1: "the cats",
        2: "zzz",
    }
    assert first == [{k: v for k, v in answer["results"][0].items() if k != "document"}]
    assert answer["usage"]["total_tokens"] > 0


def test_a_cross_encoder_reranks(tmp_path):
    tiny_models.build_encoder(tmp_path, num_labels=1)
    tiny_models.write_wordpiece(tmp_path)
    documents = ["the dog", "the cats", "the " * 200]
    with start(tmp_path) as server, server.http() as http:
        body = {"model": "m", "query": "the cat", "documents": documents}
        refused = http.post("/rerank", json=body)
        answer = http.post("/rerank", json={**body, "truncate_prompt_tokens": -1}).json()
        assert (
            http.post("/v1/embeddings", json={"model": "m", "input": "a"}).json()["error"]["param"]
            == "model"
        )
        assert (
            http.post("/rerank", json={**body, "documents": []}).json()["error"]["param"]
            == "documents"
        )
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "documents[2]")
    scores = [result["relevance_score"] for result in answer["results"]]
    assert scores == sorted(scores, reverse=True)
    assert all(0 < score < 1 for score in scores)
    assert sorted(result["index"] for result in answer["results"]) == [0, 1, 2]


def test_t5_completes_and_does_not_chat(tmp_path):
    theirs = tiny_models.build_t5(tmp_path)
    tiny_models.write_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(
        '{"eos_token": "</s>"}'
    )  # without a chat template
    with start(tmp_path, max_model_len=64, max_num_seqs=4) as server:
        client = server.client()
        prompts = ["hello the hello", "in the"]
        answer = client.completions.create(model="m", prompt=prompts, max_tokens=6, temperature=0)
        pieces = client.completions.create(
            model="m", prompt=prompts[0], max_tokens=6, temperature=0, stream=True
        )
        assert "".join(piece.choices[0].text for piece in pieces) == answer.choices[0].text
        tokenizer = server.engine.tokenizer
        assert answer.usage.prompt_tokens == sum(
            len(tokenizer.encode(prompt)) for prompt in prompts
        )
        for prompt, choice in zip(prompts, answer.choices, strict=True):
            assert choice.text == tokenizer.decode(greedy(theirs, tokenizer.encode(prompt), 6))
        with pytest.raises(openai.BadRequestError, match="chat template"):
            client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "hello"}]
            )
        with pytest.raises(openai.BadRequestError, match="encoder"):
            client.completions.create(
                model="m", prompt="hello", echo=True, logprobs=1, max_tokens=1
            )
        with pytest.raises(openai.BadRequestError, match="embeddings"):
            client.embeddings.create(model="m", input="hello")


def greedy(model, prompt, count):
    import torch

    ids = [0]
    with torch.no_grad():
        while len(ids) <= count and (len(ids) == 1 or ids[-1] != 1):
            logits = model(
                input_ids=torch.tensor([prompt]), decoder_input_ids=torch.tensor([ids])
            ).logits
            ids.append(int(logits[0, -1].argmax()))
    return [token for token in ids[1:] if token != 1]


def test_scores_as_vllm_has_them(server, path):
    first, second = ["the cat", "the dog"], ["the cats", "zzz"]
    with server.http() as http:
        pairs = http.post("/score", json={"model": "m", "text_1": first, "text_2": second}).json()
        one = http.post("/v1/score", json={"text_1": first[0], "text_2": second}).json()
        single = http.post("/score", json={"text_1": first[0], "text_2": second[0]}).json()
    vectors = [
        item.embedding
        for item in server.client().embeddings.create(model="m", input=[*first, *second]).data
    ]
    cosine = {
        (i, j): sum(map(math.prod, zip(vectors[i], vectors[2 + j], strict=True)))
        for i in (0, 1)
        for j in (0, 1)
    }
    assert [item["score"] for item in pairs["data"]] == pytest.approx(
        [cosine[0, 0], cosine[1, 1]], abs=1e-5
    )
    assert [item["score"] for item in one["data"]] == pytest.approx(
        [cosine[0, 0], cosine[0, 1]], abs=1e-5
    )
    assert [item["score"] for item in single["data"]] == pytest.approx([cosine[0, 0]], abs=1e-5)
    assert [(item["index"], item["object"]) for item in pairs["data"]] == [
        (0, "score"),
        (1, "score"),
    ]
    assert (one["model"], one["object"]) == ("m", "list")
    assert one["usage"]["prompt_tokens"] > 0
    long = "the " * 80
    with server.http() as http:
        for body, param in (
            ({"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
            ({"text_1": "a", "text_2": []}, "text_2"),
            ({"text_1": "a", "text_2": ["a", long]}, "text_2[1]"),
            ({"text_1": "a", "text_2": long}, "text_2"),
            ({"text_1": ["a", long], "text_2": ["a", "b"]}, "text_1[1]"),
            ({"text_1": "a"}, "text_2"),
        ):
            answer = http.post("/score", json=body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        body = {"text_1": "a", "text_2": ["a", long], "truncate_prompt_tokens": -1}
        assert http.post("/score", json=body).status_code == 200


def test_a_cross_encoder_scores_pairs(tmp_path):
    tiny_models.build_encoder(tmp_path, num_labels=1)
    tiny_models.write_wordpiece(tmp_path)
    documents = ["the dog", "the cats"]
    with start(tmp_path) as server, server.http() as http:
        ranked = http.post("/rerank", json={"query": "the cat", "documents": documents}).json()[
            "results"
        ]
        found = http.post("/score", json={"text_1": "the cat", "text_2": documents}).json()["data"]
        refused = http.post("/score", json={"text_1": "the cat", "text_2": ["a", "the " * 200]})
    assert {r["index"]: r["relevance_score"] for r in ranked} == pytest.approx(
        {r["index"]: r["score"] for r in found}
    )
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "text_2[1]")
