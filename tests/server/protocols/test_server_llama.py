"""llama.cpp's routes over the real engine, and reranking and embedding as TEI's and Cohere's clients ask for them."""

from __future__ import annotations

import json

import pytest

from tests.server.conftest import serving
from tests.server.fake_engine import ByteTokenizer, FakeEngine

ASK = {"prompt": "The cat", "n_predict": 4, "temperature": 0, "ignore_eos": True}
SAID = [{"role": "user", "content": "Say hello."}]
DOCS = ["the sky", "a cat", "a dog"]
ROUTES = {
    "/completion": ASK,
    "/v1/completions": {"prompt": "The cat", "max_tokens": 4, "temperature": 0, "ignore_eos": True},
    "/chat/completions": {"messages": SAID, "max_tokens": 2},
}


def events(answer):
    return [json.loads(part[6:]) for part in answer.text.split("\n\n") if part]


def test_a_completion_has_llamas_fields_and_openais_text(ask):
    found = ask("/completion", return_tokens=True)
    own = ask("/v1/completions", return_token_ids=True)["choices"][0]
    assert (found["content"], found["tokens"]) == (own["text"], own["token_ids"])
    assert found["tokens_evaluated"] == len(own["prompt_token_ids"])
    assert (found["tokens_predicted"], found["stop"], found["stop_type"]) == (4, True, "limit")
    assert found["timings"]["predicted_n"] == 4
    assert found["timings"]["prompt_n"] + found["timings"]["cache_n"] == found["tokens_evaluated"]
    assert found["generation_settings"]["n_predict"] == 4
    assert ask("/completion")["tokens"] == []
    assert ask("/completions", **ASK)["content"] == found["content"]


def test_a_stream_is_the_whole_answer_and_ends_with_its_facts(ask):
    whole = ask("/completion")
    parts = events(ask.http.post("/completion", json=ASK | {"stream": True, "n_probs": 2}))
    assert "".join(part["content"] for part in parts) == whole["content"]
    assert [part["stop"] for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1]["stop_type"] == "limit"
    probs = [one for part in parts[:-1] for one in part["completion_probabilities"]]
    assert len(probs) == 4
    assert all(len(one["top_logprobs"]) == 2 for one in probs)
    assert [one["id"] for one in probs] == [t for part in parts for t in part["tokens"]]


def test_the_reason_of_a_stop_and_several_prompts(ask):
    text = ask("/completion")["content"]
    stopped = ask("/completion", stop=[text[1]])
    assert (stopped["stop_type"], stopped["stopping_word"]) == ("word", text[1])
    several = ask("/completion", prompt=["The cat", "The dog"])
    assert [one["index"] for one in several] == [0, 1]
    assert several[0]["content"] == text
    ids = ask("/tokenize", content="The cat", add_special=True)["tokens"]
    assert ask("/completion", prompt=ids)["content"] == text
    full = ask("/completion", n_predict=-1, ignore_eos=True)
    assert (full["truncated"], ask("/completion")["truncated"]) == (True, False)
    nothing = ask("/completion", n_predict=0)
    assert (nothing["content"], nothing["tokens_evaluated"]) == ("", len(ids))


def test_formats_biases_and_what_is_refused(ask):
    assert ask("/completion", grammar='root ::= "yes"', n_predict=50)["content"] == "yes"
    schema = {"enum": ["abc"]}
    assert (
        ask("/completion", json_schema=schema, n_predict=50, ignore_eos=False)["content"] == '"abc"'
    )
    (token,) = ask("/tokenize", content="x")["tokens"][-1:]
    assert (
        ask("/completion", logit_bias=[[token, 100]], return_tokens=True)["tokens"] == [token] * 4
    )
    chosen = ask("/completion", return_tokens=True)["tokens"][0]
    never = ask("/completion", logit_bias={str(chosen): False}, return_tokens=True)["tokens"]
    assert chosen not in never
    for bad in (
        {"n_predict": "5"},
        {"dynatemp_range": 0.5},
        {"n_probs": 99},
        {"zap": 1},
        {"lora": [{"id": 0, "scale": 1}]},
    ):
        assert ask("/completion", status=400, **bad)["param"] in bad
    ask("/completion", cache_prompt=True, id_slot=0, n_keep=2, seed=-1, dynatemp_range=0)


def test_biases_are_bounded_and_digits_in_a_pair_are_a_text(ask):
    (seven,) = ask("/tokenize", content="7")["tokens"][-1:]
    assert seven != 7
    as_text = ask("/completion", logit_bias=[["7", 100]], return_tokens=True)["tokens"]
    assert seven in as_text
    assert 7 not in as_text
    by_id = ask("/completion", logit_bias={str(seven): 100}, return_tokens=True)["tokens"]
    assert by_id == [seven] * 4
    ask("/completion", logit_bias={"\u0667": 1})  # a digit, and no id
    for many, status in ((1024, 200), (1025, 400)):
        for biases in (
            [["a", 1]] * many,
            {f"a{i}": 1 for i in range(many)},
            [["a" * (many - 960), 1]],
            {"a" * (many - 960): 1},
        ):
            answer = ask.http.post("/completion", json=ASK | {"logit_bias": biases})
            assert answer.status_code == status, answer.text
            if status == 400:
                assert answer.json()["error"]["param"].startswith("logit_bias")


def test_templates_tokens_and_facts_about_the_server(ask):
    text = ask("/apply-template", messages=SAID)["prompt"]
    own = ask("/tokenize", messages=SAID)["tokens"]
    assert ask("/tokenize", content=text)["tokens"] == own
    pieces = ask("/tokenize", content="The cat", with_pieces=True)["tokens"]
    assert "".join(one["piece"] for one in pieces).strip("▁ ") == "The cat"
    ids = ask("/tokenize", content=["The", pieces[-1]["id"]])["tokens"]
    assert ids[-1] == pieces[-1]["id"]
    assert ask("/detokenize", tokens=own)["content"] == ask("/detokenize", tokens=own)["prompt"]
    props, slots = (ask.http.get(path).json() for path in ("/props", "/slots"))
    assert props["total_slots"] == len(slots) == 8
    assert props["default_generation_settings"]["n_ctx"] == slots[0]["n_ctx"] == 1024
    assert props["chat_template"]
    assert ask.http.get("/models").json()["data"][0]["id"] == "smollm2"
    assert ask("/chat/completions")["object"] == "chat.completion"
    vector = ask("/embedding", content="The cat")[0]["embedding"][0]
    own = ask("/embeddings", input="The cat")["data"][0]["embedding"]
    assert vector == pytest.approx(own, abs=1e-5)


def test_infill_puts_the_models_tokens_round_the_gap(ask):
    class Coder(ByteTokenizer):
        ids = {"<fim_prefix>": 1, "<fim_suffix>": 2, "<fim_middle>": 3, "<file_sep>": 4}  # noqa: RUF012

        def token_to_id(self, token):
            return self.ids.get(token)

    gap = {"input_prefix": "def f", "input_suffix": "end", "prompt": "(", "n_predict": 2}
    engine = FakeEngine()
    engine.tokenizer = Coder()
    with serving(engine) as server, server.http() as http:
        more = {"input_extra": [{"filename": "a.py", "text": "one"}]}
        assert http.post("/infill", json=gap).status_code == 200
        assert http.post("/infill", json=gap | more).status_code == 200
    first, second = ([*prompt["prompt_token_ids"]] for prompt, *_ in engine.seen)
    plain = [0, 1, *b"def f(", 2, *b"end", 3]
    assert first == plain
    assert second == [0, 4, *b"a.py\none", 4, *b"filename\n", *plain[1:]]
    assert ask("/infill", status=400, **gap)["param"] == "input_prefix"


def test_reranking_as_tei_and_scores_by_other_names(ask):
    own = ask("/rerank", query="a cat", documents=DOCS)["results"]
    found = ask("/rerank", query="a cat", texts=DOCS, return_text=True, truncate=True)
    assert [one["index"] for one in found] == [one["index"] for one in own]
    assert [one["score"] for one in found] == [one["relevance_score"] for one in own]
    assert found[0]["text"] == DOCS[found[0]["index"]]
    assert ask("/v1/reranking", query="a cat", documents=DOCS)["results"] == own
    assert ask("/rerank", status=400, query="a")["param"] == "documents"
    assert ask("/rerank", status=400, query="a", texts=DOCS, documents=DOCS)["param"] == "documents"
    long = "cat " * 2000
    assert ask("/rerank", status=400, query="a", texts=["b", long])["param"] == "texts[1]"
    scores = ask("/score", text_1="a cat", text_2=DOCS)["data"]
    for one, two in (("queries", "documents"), ("data_1", "data_2")):
        assert ask("/score", **{one: "a cat", two: DOCS})["data"] == scores
        assert ask("/score", status=400, **{one: "a", two: ["b", long]})["param"] == f"{two}[1]"
    assert ask("/score", status=400, queries="a", text_2="b")["param"] == "text_1"


def test_coheres_embeddings_equal_our_own(ask):
    own = [one["embedding"] for one in ask("/v1/embeddings", input=DOCS)["data"]]
    body = {"model": "smollm2", "texts": DOCS, "input_type": "search_document"}
    found = ask("/v2/embed", **body, embedding_types=["float", "base64"])
    assert found["embeddings"]["float"][0] == pytest.approx(own[0], abs=1e-5)
    assert len(found["embeddings"]["base64"]) == 3
    assert found["meta"]["billed_units"]["input_tokens"] > 3
    assert ask("/v2/embed", status=400, texts=DOCS, embedding_types=["int8"])["param"].startswith(
        "embedding_types"
    )
    assert ask("/v2/embed", status=400, texts=["cat " * 2000], truncate="NONE")["param"] == "texts"
    assert ask("/v2/embed", texts=["cat " * 2000])["embeddings"]["float"]
    assert (
        ask("/v2/embed", status=400, texts=DOCS, output_dimension=3)["param"] == "output_dimension"
    )


def test_texts_as_objects_chosen_fields_and_counts(ask):
    whole = ask("/completion")
    assert ask("/completion", prompt={"prompt_string": "The cat"})["content"] == whole["content"]
    both = ask("/completion", prompt=["The cat", {"prompt_string": "The cat"}])
    assert both[0]["content"] == both[1]["content"] == whole["content"]
    chosen = ask("/completion", response_fields=["content", "generation_settings/n_predict", "no"])
    assert chosen == {"content": whole["content"], "generation_settings/n_predict": 4}
    last = whole["content"][-1]
    assert last not in ask("/completion", logit_bias=[[last, False]])["content"]
    assert last not in ask("/completion", logit_bias={last: -100})["content"]
    refused = {"prompt": {"prompt_string": "a", "multimodal_data": ["x"]}}
    assert ask.http.post("/completion", json=refused).status_code == 400
    one = ask("/completion", n_predict=1)["timings"]
    assert (one["predicted_n"], one["predicted_per_second"]) == (1, 0.0)
    said = {"messages": SAID}
    counted = ask.http.post("/chat/completions/input_tokens", json=said).json()["input_tokens"]
    assert counted > 2
