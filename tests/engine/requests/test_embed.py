"""Embeddings and reranking through the whole engine, against transformers on tiny random models."""

from __future__ import annotations

import dataclasses
import enum
import json
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from slipstream import LLM, SamplingParams
from slipstream.cli.answers.embed import cosine
from slipstream.engine.requests import pooled
from slipstream.engine.requests.texts import whole_numbers
from slipstream.errors import (
    CheckpointError,
    ConfigError,
    ContextLengthError,
    RequestError,
    UnsupportedModelError,
)
from slipstream.spec.description import read_spec
from tests.support import tiny_models
from tests.support.waiting import PATIENCE_S

SETTINGS = dict(device="cpu", dtype="float32", num_threads=1)
TEXTS = [
    "the cat",
    "a",
    "",
    "sing the song of the long road ." * 4,
    "the cats are sitting",
    "x y z ?",
]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    path = tmp_path_factory.mktemp("bert")
    theirs = tiny_models.build_encoder(path)
    tiny_models.write_wordpiece(path)
    tiny_models.write_sentence_transformers(path)
    return path, theirs


@pytest.fixture(scope="module")
def llm(encoder):
    with LLM(
        str(encoder[0]), max_model_len=120, max_num_seqs=3, max_num_batched_tokens=130, **SETTINGS
    ) as llm:
        yield llm


def expected(theirs, ids, kind="mean"):
    with torch.no_grad():
        hidden = theirs(torch.tensor([ids])).last_hidden_state[0]
    vector = {"mean": hidden.mean(0), "cls": hidden[0], "last": hidden[-1]}[kind]
    return F.normalize(vector, dim=0)


def test_vectors_equal_transformers(encoder, llm):
    found = llm.embed(TEXTS)
    for text, output in zip(TEXTS, found, strict=True):
        assert output.prompt == text
        assert output.prompt_token_ids[0] == 2
        assert output.prompt_token_ids[-1] == 3
        torch.testing.assert_close(
            torch.tensor(output.embedding), expected(encoder[1], output.prompt_token_ids)
        )
    assert (
        len(found[3].prompt_token_ids) > 64
    )  # neither tokenizer.json's truncation nor its padding holds
    assert llm.stats().num_free_blocks == llm.stats().num_blocks
    assert llm.stats().generation_tokens_total == 0


def test_a_text_alone_is_the_same(llm):
    together = llm.embed(TEXTS)
    for text, output in zip(TEXTS, together, strict=True):
        torch.testing.assert_close(
            torch.tensor(llm.embed(text)[0].embedding), torch.tensor(output.embedding)
        )
        ids = llm.embed({"prompt_token_ids": output.prompt_token_ids})[0]
        torch.testing.assert_close(torch.tensor(ids.embedding), torch.tensor(output.embedding))


def test_long_texts_are_refused_or_cut(llm):
    text = "the " * 200
    with pytest.raises(ContextLengthError, match=r"202 tokens .* 120"):
        llm.embed(["a", text])
    (cut,) = llm.embed(text, truncate=True)
    assert len(cut.prompt_token_ids) == 120
    assert cut.prompt_token_ids[-1] == 3


def test_texts_and_tokens_mix_and_what_is_wrong_is_named(llm):
    together = llm.embed(TEXTS)
    ids = [output.prompt_token_ids for output in together]
    mixed = [{"prompt_token_ids": ids[0]}, TEXTS[1], TEXTS[2], {"prompt_token_ids": ids[3]}]
    for output, expected in zip(llm.embed(mixed), together, strict=False):
        assert output.prompt_token_ids == expected.prompt_token_ids
        torch.testing.assert_close(torch.tensor(output.embedding), torch.tensor(expected.embedding))
    assert llm.embed([]) == []
    assert [
        len(o.prompt_token_ids) for o in llm.embed([{"prompt_token_ids": [5] * 200}], truncate=True)
    ] == [120]
    for wrong, index in (
        ([{"prompt_token_ids": [5]}, {"prompt_token_ids": [7, True]}], 1),
        (["the", {"prompt_token_ids": [7, -1]}], 1),
        ([{"prompt_token_ids": [2**70]}], 0),
        ([{"prompt_token_ids": [5]}, "the", {"prompt_token_ids": []}], 2),
        (["the", {"text": "cat"}], 1),
        (["the", 5], 1),
        (["the", np.array([5])], 1),
        ([{"prompt_token_ids": [5]}, {"prompt_token_ids": None}], 1),
        (["the", "the " * 200], 1),
    ):
        with pytest.raises(RequestError) as caught:
            llm.embed(wrong)
        assert caught.value.__notes__ == [f"in text {index}"]
    with pytest.raises(RequestError, match="Unicode"):
        llm.embed(["the", "\ud800"])
    assert llm.stats().num_waiting == 0


def test_tokens_are_looked_at_together():
    """Nothing but `int`s of 32 bits passes, wherever it stands."""
    given = [[1, 2], [105], [3, 4, 5, -7, 2**31 - 1, -(2**31)]]
    found = whole_numbers(given)
    assert found.dtype == np.int32
    assert found.tolist() == [token for ids in given for token in ids]
    assert whole_numbers([[1]]).tolist() == [1]
    kinds = (2**31, -(2**31) - 1, np.int64(3), enum.IntEnum("E", "x").x)
    for wrong in (True, 2.5, None, "a", (7,), [7], [], 1j, object(), *kinds):
        for lists in (
            [[wrong]],
            [[1, 2], [wrong]],
            [[wrong, 105], [105, 105]],
            [[1, wrong, 2], [3]],
        ):
            assert whole_numbers(lists) is None, lists
    assert whole_numbers([[1.0, True, 105, 105]]) is None  # ten bytes, as of two numbers


def test_tokens_in_other_sequences_than_lists(llm):
    found = llm.embed(
        [
            {"prompt_token_ids": [5, 6, 7]},
            {"prompt_token_ids": (5, 6, 7)},
            {"prompt_token_ids": range(5, 8)},
        ]
    )
    for output in found:
        assert output.prompt_token_ids == [5, 6, 7]
        torch.testing.assert_close(torch.tensor(output.embedding), torch.tensor(found[0].embedding))


def test_only_one_thread_reads_texts_at_a_time(llm, monkeypatch):
    """The engine's answers go to whoever steps it: to another thread they would be lost."""
    inside, go_on, launch, found = (
        threading.Event(),
        threading.Event(),
        llm.core.executor.runner.launch,
        [],
    )

    def wait(plan):
        inside.set()
        assert go_on.wait(PATIENCE_S)
        return launch(plan)

    monkeypatch.setattr(llm.core.executor.runner, "launch", wait)
    first = threading.Thread(target=lambda: found.extend(llm.embed(TEXTS)))
    first.start()
    assert inside.wait(PATIENCE_S)
    try:
        for call in (lambda: llm.embed("the"), lambda: llm.rerank("the", ["cat"])):
            with pytest.raises(RequestError, match="another thread's call"):
                call()
    finally:
        go_on.set()
        first.join()
    assert len(found) == len(TEXTS)
    assert len(llm.embed(TEXTS)) == len(TEXTS)


def test_answers_are_made_while_the_rest_is_computed(llm, monkeypatch):
    events, launch, make = [], llm.core.executor.runner.launch, pooled.as_embeddings
    monkeypatch.setattr(
        llm.core.executor.runner, "launch", lambda plan: events.append("launch") or launch(plan)
    )
    monkeypatch.setattr(
        "slipstream.engine.llm.as_embeddings", lambda *given: events.append("make") or make(*given)
    )
    assert len(llm.embed(TEXTS * 2)) == 12
    assert events == ["launch", "make"] * (len(events) // 2)
    assert len(events) > 4


def test_the_next_step_is_launched_before_the_last_ones_vectors_are_waited_for(llm, monkeypatch):
    """The order of events is what is seen here; the gain is a GPU's."""
    events, launch = [], llm.core.executor.runner.launch

    def seen(plan):
        step = launch(plan)
        events.append(("launch", plan.step_id))
        done = SimpleNamespace(synchronize=lambda: events.append(("wait", plan.step_id)))
        return dataclasses.replace(step, done=done)

    monkeypatch.setattr(llm.core.executor.runner, "launch", seen)
    monkeypatch.setattr(llm.core.executor.runner, "max_in_flight", lambda plan: 2)
    assert [o.embedding for o in llm.embed(TEXTS * 2)] == [
        o.embedding for o in llm.embed(TEXTS * 2)
    ]
    first = events[0][1]
    assert events[:5] == [
        ("launch", first),
        ("launch", first + 1),
        ("wait", first),
        ("launch", first + 2),
        ("wait", first + 1),
    ]


def test_a_failed_step_ends_the_call_and_no_other(llm, monkeypatch):
    def fail(plan):
        raise RuntimeError("so it is")

    with monkeypatch.context() as patch:
        patch.setattr(llm.core.executor.runner, "launch", fail)
        with pytest.raises(RuntimeError, match="so it is"):
            llm.embed(TEXTS)
    assert not llm.core.has_work
    assert len(llm.embed(TEXTS)) == len(TEXTS)


def test_the_files_limit_holds_unless_the_user_says_otherwise(encoder):
    with LLM(str(encoder[0]), **SETTINGS) as llm:
        assert llm.config.model.max_model_len == 64
        assert not llm.config.cache.enable_prefix_caching
        assert not llm.config.scheduling.enable_chunked_prefill
        assert llm.config.origins["enable_prefix_caching"].source == "model"


def test_what_an_encoder_does_not_do_is_refused_by_name(encoder, llm):
    with pytest.raises(RequestError, match="encoder"):
        llm.generate("the", SamplingParams(max_tokens=1))
    with pytest.raises(RequestError, match="dimensions"):
        llm.embed("the", dimensions=7)
    for settings, field in (
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype"),
        ({"max_num_batched_tokens": 40, "max_num_seqs": 2}, "max_num_batched_tokens"),
        ({"max_model_len": 1000}, "max_model_len"),
    ):
        with pytest.raises(ConfigError) as caught:
            LLM(str(encoder[0]), **SETTINGS, **settings)
        assert caught.value.field == field


@pytest.mark.parametrize("mode", ["cls_token", "lasttoken"])
def test_other_ways_of_pooling(tmp_path, mode):
    theirs = tiny_models.build_encoder(tmp_path)
    tiny_models.write_wordpiece(tmp_path)
    tiny_models.write_sentence_transformers(tmp_path, mode=mode, normalize=False)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "matryoshka_dimensions": [8, 16]}))
    (tmp_path / "config_sentence_transformers.json").write_text(
        json.dumps({"prompts": {"p": "the "}, "default_prompt_name": "p"})
    )
    with LLM(str(tmp_path), **SETTINGS) as llm:
        (whole,), (short,) = llm.embed("cat"), llm.embed("cat", dimensions=8)
    ids = whole.prompt_token_ids
    assert len(ids) == 6  # [CLS] the c ##a ##t [SEP]
    with torch.no_grad():
        hidden = theirs(torch.tensor([ids])).last_hidden_state[0]
    vector = hidden[0] if mode == "cls_token" else hidden[-1]
    torch.testing.assert_close(torch.tensor(whole.embedding), vector)
    torch.testing.assert_close(torch.tensor(short.embedding), F.normalize(vector[:8], dim=0))


# --- Reranking ----------------------------------------------------------------------------------------------------------

DOCUMENTS = ["the dog", "a cat", "sitting on the long road", "cat ?"]


def test_embeddings_rank_by_cosine(llm):
    query, *others = (torch.tensor(o.embedding) for o in llm.embed(["the cat", *DOCUMENTS]))
    scores = [float(query @ other) for other in others]
    found = llm.rerank("the cat", DOCUMENTS)
    assert [r.index for r in found] == sorted(range(4), key=lambda i: -scores[i])
    assert [r.relevance_score for r in found] == pytest.approx(
        sorted(scores, reverse=True), abs=1e-6
    )
    assert [r.document for r in found] == [DOCUMENTS[r.index] for r in found]
    assert llm.rerank("the cat", DOCUMENTS, top_n=2) == found[:2]
    for wrong in (
        {"documents": []},
        {"documents": "the dog"},
        {"documents": DOCUMENTS, "top_n": 0},
    ):
        with pytest.raises(RequestError):
            llm.rerank("the cat", **wrong)


def test_no_cosine_is_above_1(llm):
    texts = [
        f"{a} {b}" for a in ("the", "a", "cat", "road", "on") for b in ("dog", "cat", "long", "?")
    ]
    assert all(1 - 1e-6 < s.score <= 1 for s in llm.score(texts, texts))
    vectors = [list(map(float, o.embedding)) for o in llm.embed(texts)]
    assert all(cosine(v, v) <= 1 for v in vectors)


@pytest.mark.parametrize("probabilities", [True, False])
def test_a_cross_encoder_scores_pairs(tmp_path, probabilities):
    theirs = tiny_models.build_encoder(tmp_path, num_labels=1)
    tiny_models.write_wordpiece(tmp_path)
    if not probabilities:
        config = json.loads((tmp_path / "config.json").read_text())
        name = "torch.nn.modules.linear.Identity"
        (tmp_path / "config.json").write_text(
            json.dumps({**config, "sbert_ce_default_activation_function": name})
        )
    with LLM(str(tmp_path), max_num_seqs=2, **SETTINGS) as llm:
        found, scored = llm.rerank("the cat", DOCUMENTS), llm.score("the cat", DOCUMENTS)
        with pytest.raises(RequestError, match="rerank"):
            llm.embed("the cat")
        long = llm.rerank("the cat", ["the " * 300], truncate=True)
        [(pair, num_first)] = llm.get_tokenizer().encode_pairs([("the cat", DOCUMENTS[0])])
    assert long[0].num_tokens == 130
    assert (pair[0], pair[num_first - 1], pair[-1], num_first) == (2, 3, 3, 6)
    expected = []
    for document in DOCUMENTS:
        [(ids, n)] = llm.get_tokenizer().encode_pairs([("the cat", document)])
        with torch.no_grad():
            score = theirs(
                torch.tensor([ids]), token_type_ids=(torch.arange(len(ids)) >= n).long()[None]
            ).logits[0, 0]
        expected.append(float(score.sigmoid() if probabilities else score))
    assert [r.index for r in found] == sorted(range(4), key=lambda i: -expected[i])
    assert [r.relevance_score for r in found] == pytest.approx(
        sorted(expected, reverse=True), rel=1e-4, abs=1e-5
    )
    assert [one.outputs.score for one in scored] == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_a_classifier_of_many_labels_does_not_rank(tmp_path):
    tiny_models.build_encoder(tmp_path, num_labels=3)
    tiny_models.write_wordpiece(tmp_path)
    with LLM(str(tmp_path), **SETTINGS) as llm, pytest.raises(RequestError, match="3 labels"):
        llm.rerank("the", ["cat"])


# --- Decoders -----------------------------------------------------------------------------------------------------------


def test_a_decoder_gives_the_state_of_the_last_token(tmp_path):
    """The state is the same in chunks, with cached prefixes, and next to answers that are being written."""
    theirs = tiny_models.build_with_tokenizer(tmp_path)
    settings = dict(block_size=4, max_num_seqs=4, max_num_batched_tokens=8, kv_cache_bytes=2**20)
    texts = ["hello the hello the hello", "hello the hello", "x", "hello the hello the hello"]
    with LLM(str(tmp_path), **SETTINGS, **settings) as llm:
        written = (
            llm.generate("hello", SamplingParams(temperature=0, max_tokens=6))[0]
            .outputs[0]
            .token_ids
        )
        stream = llm.stream("hello", SamplingParams(temperature=0, max_tokens=6))
        next(stream)
        with pytest.raises(RequestError, match="stream"):
            llm.embed("x")
        stream.close()
        for output in llm.embed(texts):
            with torch.no_grad():
                states = theirs.model(torch.tensor([output.prompt_token_ids])).last_hidden_state[0]
            vector = F.normalize(states[-1], dim=0)
            torch.testing.assert_close(torch.tensor(output.embedding), vector, rtol=1e-4, atol=1e-5)
        assert llm.stats().prefix_hits > 0
        assert (
            llm.generate("hello", SamplingParams(temperature=0, max_tokens=6))[0]
            .outputs[0]
            .token_ids
            == written
        )
        assert llm.stats().num_free_blocks == llm.stats().num_blocks


def test_only_a_decoders_last_token_stands_for_a_text(tmp_path):
    tiny_models.write_with_tokenizer(tmp_path)
    tiny_models.write_sentence_transformers(tmp_path)
    with (
        LLM(str(tmp_path), **SETTINGS, kv_cache_bytes=2**20) as llm,
        pytest.raises(RequestError, match="last token"),
    ):
        llm.embed("hello")


@pytest.mark.parametrize(
    "family", ["qwen3", "llama", "gemma", "mixtral", "gemma3_text", "cohere_compass_text"]
)
def test_a_decoder_with_a_classifier_scores_pairs(family, tmp_path):
    """A conversion of Qwen3-Reranker: the last token's score of the query followed by the document."""
    theirs = tiny_models.build_classifier(tmp_path, family)
    tiny_models.write_tokenizer(tmp_path)
    settings = dict(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=16)
    with LLM(str(tmp_path), **settings, **SETTINGS) as llm:
        documents = [TEXTS[4], TEXTS[0], "x y"]
        for _ in range(2):  # the query is in the prefix cache the second time
            for result in llm.rerank("the cat", documents):
                [(ids, _)] = llm.get_tokenizer().encode_pairs([("the cat", result.document)])
                with torch.no_grad():
                    score = theirs(torch.tensor([ids])).logits[0, 0]
                assert result.relevance_score == pytest.approx(score.sigmoid().item(), abs=1e-4)
        with pytest.raises(RequestError, match="writes no text"):
            llm.generate("the cat", SamplingParams(max_tokens=1))
        with pytest.raises(RequestError, match="rerank"):
            llm.embed("the cat")
    spec = read_spec(tmp_path).spec
    assert (spec.kind, spec.tied_embeddings) == ("a classifier", False)
    assert spec.num_parameters == sum(p.numel() for p in theirs.parameters())


def test_a_decoder_of_embeddings_as_the_hub_has_it(tmp_path):
    """Qwen3-Embedding: the model alone, whose names have no prefix; a tokenizer that ends each text; the last token's state; a
    prompt that is there by name, and does not stand before texts unasked."""
    theirs = tiny_models.build_with_tokenizer(tmp_path, "qwen3", tie_word_embeddings=True)
    file = tmp_path / "model.safetensors"
    save_file(
        {name.removeprefix("model."): tensor for name, tensor in load_file(file).items()}, file
    )
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    end = {"SpecialToken": {"id": "</s>", "type_id": 0}}
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"Sequence": {"id": "A", "type_id": 0}}, end],
        "pair": [
            {"Sequence": {"id": "A", "type_id": 0}},
            {"Sequence": {"id": "B", "type_id": 1}},
            end,
        ],
        "special_tokens": {"</s>": {"id": "</s>", "ids": [1], "tokens": ["</s>"]}},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    tiny_models.write_sentence_transformers(tmp_path, mode="lasttoken")
    says = {
        "prompts": {"query": "Instruct: find\nQuery:", "document": ""},
        "default_prompt_name": None,
    }
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(says))
    with LLM(
        str(tmp_path), max_model_len=64, max_num_seqs=4, max_num_batched_tokens=16, **SETTINGS
    ) as llm:
        for _ in range(2):  # in chunks, and with a prefix that is in the cache already
            for text, output in zip(TEXTS[:2], llm.embed(TEXTS[:2]), strict=True):
                assert output.prompt == text
                assert output.prompt_token_ids[-1] == 1
                vector = expected(theirs.model, output.prompt_token_ids, "last")
                torch.testing.assert_close(
                    torch.tensor(output.embedding), vector, rtol=1e-4, atol=1e-5
                )
        best = llm.rerank(TEXTS[0], [TEXTS[4], TEXTS[0]])[0]
        assert (best.index, best.relevance_score) == (1, pytest.approx(1.0, abs=1e-5))


@pytest.mark.parametrize("no", [21, None])
def test_a_language_model_that_judges_pairs(no, tmp_path):
    """Qwen3-Reranker as sentence-transformers has it: the chat template of a query and a document, and the logits of "yes" and
    "no" after it, or of one token alone."""
    theirs = tiny_models.build_with_tokenizer(tmp_path, "qwen3", tie_word_embeddings=True)
    template = "{% for m in messages %}{{ m.role[0] }} {{ m.content }} {% endfor %}{% if add_generation_prompt %}x{% endif %}"
    (tmp_path / "chat_template.jinja").write_text(template)
    kinds = (
        "sentence_transformers.base.modules.transformer.Transformer",
        "x.logit_score.LogitScore",
    )
    modules = [
        {"idx": i, "path": "1_LogitScore" if i else "", "type": kind}
        for i, kind in enumerate(kinds)
    ]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1_LogitScore").mkdir()
    (tmp_path / "1_LogitScore" / "config.json").write_text(
        json.dumps({"true_token_id": 9, "false_token_id": no})
    )
    activation = "torch.nn.modules.activation.Sigmoid" if no else "torch.nn.modules.linear.Identity"
    says = {
        "prompts": {"judge": "is it so"},
        "default_prompt_name": "judge",
        "activation_fn": activation,
    }
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(says))
    with LLM(
        str(tmp_path), max_model_len=48, max_num_seqs=4, max_num_batched_tokens=16, **SETTINGS
    ) as llm:
        tokenizer, documents = llm.get_tokenizer(), ["a dog", "the cat sat", "x y"]
        results = llm.rerank("the cat", documents)
        assert sorted(r.index for r in results) == [0, 1, 2]
        assert [r.relevance_score for r in results] == sorted(
            (r.relevance_score for r in results), reverse=True
        )
        for result in results:
            ids = tokenizer.encode(
                f"s is it so q the cat d {result.document} x", add_special_tokens=False
            )
            assert result.num_tokens == len(ids)
            with torch.no_grad():
                logits = theirs(torch.tensor([ids])).logits[0, -1]
            score = logits[9] if no is None else (logits[9] - logits[no]).sigmoid()
            assert result.relevance_score == pytest.approx(score.item(), abs=1e-4)
        with pytest.raises(ContextLengthError):
            llm.rerank("the cat", ["a dog " * 40])
        (cut,) = llm.rerank("the cat", ["a dog " * 40], truncate=True)
        assert 40 < cut.num_tokens <= 48
        with pytest.raises(RequestError, match="rerank"):
            llm.embed("the cat")
        assert llm.generate("the cat", SamplingParams(max_tokens=1))[0].outputs[0].token_ids
    for wrong in ({"true_token_id": 10**6}, {"true_token_id": "yes"}):
        (tmp_path / "1_LogitScore" / "config.json").write_text(json.dumps(wrong))
        with pytest.raises((CheckpointError, UnsupportedModelError)) as caught:
            read_spec(tmp_path)
        assert caught.value.field == "true_token_id"


def test_outputs_have_vllms_names_too(encoder, llm):
    found = llm.embed(TEXTS, use_tqdm=False)
    assert [one.outputs.embedding for one in found] == [one.embedding for one in found]
    arrays = llm.encode(TEXTS, pooling_task="embed")
    assert [one.outputs.data.tolist() for one in arrays] == [one.embedding for one in found]
    vectors = torch.tensor([one.embedding for one in found])
    cosines = F.cosine_similarity(vectors[:1], vectors).tolist()
    assert [one.outputs.score for one in llm.score(TEXTS[0], TEXTS)] == pytest.approx(
        cosines, abs=1e-5
    )
    pairs = llm.score(TEXTS[:3], TEXTS[3:])
    expected_pairs = F.cosine_similarity(vectors[:3], vectors[3:]).tolist()
    assert [one.score for one in pairs] == pytest.approx(expected_pairs, abs=1e-5)
    counts = [len(one.prompt_token_ids) for one in found]
    assert [one.num_tokens for one in pairs] == [counts[i] + counts[3 + i] for i in range(3)]
    with pytest.raises(RequestError, match="2 texts on one side and 3"):
        llm.score(TEXTS[:2], TEXTS[:3])
    with pytest.raises(RequestError, match="no 'token_classify'"):
        llm.encode("x", pooling_task="token_classify")
    with pytest.raises(RequestError, match="nothing to score"):
        llm.score("x", [])
    assert llm.encode([]) == []
