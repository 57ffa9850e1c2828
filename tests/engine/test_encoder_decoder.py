"""T5 through the whole engine: its answers are transformers', alone and in batches, whatever happens to their blocks."""

from __future__ import annotations

import json

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, processors
from transformers import MarianTokenizer

from slipstream import LLM, SamplingParams
from slipstream.errors import (
    CheckpointError,
    ConfigError,
    ContextLengthError,
    OutOfMemoryError,
    RequestError,
)
from slipstream.spec.description import read_spec
from tests.engine.text.test_renumbered import write
from tests.support import tiny_models

SETTINGS = dict(device="cpu", dtype="float32", num_threads=1, block_size=4)
PROMPTS = [[(7 * i + 3 * n) % 250 + 5 for i in range(n)] for n in (5, 1, 40, 16, 17, 3, 28, 90)]
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module", params=tiny_models.T5S)
def t5(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    theirs = tiny_models.build_t5(path, request.param)
    tiny_models.write_tokenizer(path)
    expected = []
    for prompt in PROMPTS:
        ids = [0]
        with torch.no_grad():
            for _ in range(20):
                logits = theirs(
                    input_ids=torch.tensor([prompt]), decoder_input_ids=torch.tensor([ids])
                ).logits
                ids.append(int(logits[0, -1].argmax()))
        expected.append(ids[1:])
    return path, expected


def as_prompts(prompts):
    return [{"prompt_token_ids": ids} for ids in prompts]


def answers(llm, prompts, sampling=GREEDY):
    return [output.outputs[0].token_ids for output in llm.generate(as_prompts(prompts), sampling)]


def test_greedy_equals_transformers_alone_and_together(t5):
    path, expected = t5
    with LLM(str(path), max_model_len=96, max_num_seqs=4, **SETTINGS) as llm:
        assert llm.config.scheduling.max_num_mixed_tokens >= 96 + 4
        assert (
            answers(llm, PROMPTS) == expected
        )  # admitted a few at a time, beside those that decode
        for prompt, alone in zip(PROMPTS, expected, strict=True):
            assert answers(llm, [prompt]) == [alone]
        stats = llm.stats()
        assert stats.num_free_blocks == stats.num_blocks
        assert stats.prefix_queries == 0
        assert stats.prompt_tokens_total == 2 * sum(map(len, PROMPTS))
        (output,) = llm.generate(as_prompts(PROMPTS[:1]), GREEDY)
        assert output.prompt_token_ids == PROMPTS[0]


@pytest.mark.parametrize("kernels", ["reference", "torch"])
def test_with_other_kernels(t5, kernels):
    path, expected = t5
    with LLM(str(path), max_model_len=96, max_num_seqs=4, kernels=kernels, **SETTINGS) as llm:
        assert answers(llm, PROMPTS[:4]) == expected[:4]


def test_preempted_answers_are_the_same(t5):
    """Too few blocks for all: what loses its blocks is encoded again, and its answer so far computed again."""
    path, expected = t5
    per_block = 2 * 3 * 3 * 8 * 4 * 4  # keys and values, layers, heads, dimensions, bytes, tokens
    with LLM(
        str(path), max_model_len=96, max_num_seqs=8, kv_cache_bytes=per_block * 49, **SETTINGS
    ) as llm:
        assert answers(llm, PROMPTS) == expected
        assert llm.stats().num_preemptions > 0
        assert llm.stats().num_free_blocks == llm.stats().num_blocks


def test_the_prompts_blocks_count_as_well(t5):
    path, _ = t5
    block = 2 * 3 * 3 * 8 * 4 * 4  # as above
    with LLM(
        str(path), max_model_len=96, max_num_seqs=3, **SETTINGS
    ) as llm:  # unasked: room for all sequences
        assert llm.ledger.num_blocks == 3 * 2 * 24 + 1
        assert llm.ledger.num_full_sequences == 3
    with pytest.raises(OutOfMemoryError, match="92 tokens of prompt and of answer") as caught:
        LLM(str(path), max_model_len=96, kv_cache_bytes=block * 48, **SETTINGS)
    assert caught.value.field == "max_model_len"
    with LLM(str(path), kv_cache_bytes=block * 48, **SETTINGS) as llm:  # 47 blocks, 23 for each
        assert llm.config.model.max_model_len == 92
        longest = SamplingParams(temperature=0, max_tokens=91, ignore_eos=True)
        assert len(answers(llm, [[7] * 92], longest)[0]) == 91


def test_choices_share_one_encoded_prompt(t5):
    path, expected = t5
    with LLM(str(path), max_model_len=96, **SETTINGS) as llm:
        sampling = SamplingParams(n=3, temperature=0, max_tokens=20, ignore_eos=True)
        (output,) = llm.generate(as_prompts(PROMPTS[2:3]), sampling)
        assert [choice.token_ids for choice in output.outputs] == [expected[2]] * 3
        stats = llm.stats()
        assert stats.num_free_blocks == stats.num_blocks
        assert stats.prompt_tokens_total == 40
        drawn = SamplingParams(temperature=1.0, seed=5, max_tokens=12, ignore_eos=True)
        alone = answers(llm, PROMPTS[2:3], drawn)
        assert answers(llm, [PROMPTS[5], PROMPTS[2]], drawn)[1:] == alone


def test_text_and_what_is_refused(t5):
    path, _ = t5
    with LLM(str(path), max_model_len=64, **SETTINGS) as llm:
        (output,) = llm.generate("hello the hello", SamplingParams(temperature=0, max_tokens=5))
        assert output.outputs[0].finish_reason in ("length", "stop")
        with pytest.raises(ContextLengthError, match="90 tokens"):
            llm.generate(as_prompts(PROMPTS[7:]), GREEDY)
        with pytest.raises(ContextLengthError, match="max_tokens"):
            llm.generate("hello", SamplingParams(max_tokens=64))
        with pytest.raises(RequestError, match="encoder"):
            llm.generate("hello", SamplingParams(max_tokens=1, prompt_logprobs=1))
        with pytest.raises(RequestError, match="no embeddings"):
            llm.embed("hello")
    for settings, field in (
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype"),
        (
            {"max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 60},
            "max_num_batched_tokens",
        ),
        (
            {"max_model_len": 64, "max_num_seqs": 4, "max_num_mixed_tokens": 60},
            "max_num_mixed_tokens",
        ),
        ({"target_itl_ms": 20.0}, "target_itl_ms"),
    ):
        with pytest.raises(ConfigError) as caught:
            LLM(str(path), **SETTINGS, **settings)
        assert caught.value.field == field


# --- BART and its kin, and languages ------------------------------------------------------------


def expected_of(theirs, prompt, begin, count=12):
    ids = list(begin)
    with torch.no_grad():
        for _ in range(count):
            given = dict(input_ids=torch.tensor([prompt]), decoder_input_ids=torch.tensor([ids]))
            ids.append(int(theirs(**given).logits[0, -1].argmax()))
    return ids[len(begin) :]


SHORT = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.mark.parametrize("family", tiny_models.BARTS)
def test_barts_greedy_equals_transformers(family, tmp_path):
    """Together, and in too few blocks."""
    theirs = tiny_models.build_bart(tmp_path, family)
    prompts = [PROMPTS[i] for i in (0, 1, 3, 6)] * 2
    expected = [expected_of(theirs, prompt, [2]) for prompt in prompts[:4]] * 2
    block = 2 * 3 * 32 * 4 * 4  # keys and values, layers, numbers, bytes, tokens
    settings = {**SETTINGS, "max_model_len": 32, "max_num_seqs": 8, "skip_tokenizer_init": True}
    for how in ({}, dict(kernels="torch"), dict(kv_cache_bytes=block * 33)):
        with LLM(str(tmp_path), **settings, **how) as llm:
            assert answers(llm, prompts, SHORT) == expected
            stats = llm.stats()
            assert bool(stats.num_preemptions) == ("kv_cache_bytes" in how)
            assert stats.num_free_blocks == stats.num_blocks


@pytest.mark.slow
@pytest.mark.parametrize("family", ["bart", "m2m_100"])
def test_barts_on_two_ranks_equal_one(family, tmp_path):
    tiny_models.build_bart(tmp_path, family)
    settings = {**SETTINGS, "max_model_len": 96, "skip_tokenizer_init": True}
    found = []
    for ranks in (1, 2):
        with LLM(str(tmp_path), tensor_parallel_size=ranks, **settings) as llm:
            found.append(answers(llm, PROMPTS, SHORT))
    assert found[0] == found[1]


def write_languages(path, template):
    """A tokenizer with two languages, one of which stands next to each text."""
    tiny_models.write_tokenizer(path)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.add_special_tokens(["eng_Latn", "__de__"])
    tokenizer.add_tokens([AddedToken(">>fra<<", normalized=False)])
    ids = {t: tokenizer.token_to_id(t) for t in ("eng_Latn", "__de__", ">>fra<<", "</s>")}
    pairs = [(t, i) for t, i in ids.items() if t in template]
    tokenizer.post_processor = processors.TemplateProcessing(template, special_tokens=pairs)
    tokenizer.save(str(path / "tokenizer.json"))
    return ids


@pytest.mark.parametrize("template", ["eng_Latn $A </s>", "$A </s> eng_Latn"])
def test_languages_are_chosen_by_the_request(template, tmp_path):
    theirs = tiny_models.build_bart(tmp_path, "m2m_100", pad_token_id=0)
    ids = write_languages(tmp_path, template)
    english, german, french = ids["eng_Latn"], ids["__de__"], ids[">>fra<<"]
    generation = tmp_path / "generation_config.json"
    said = json.loads(generation.read_text())
    generation.write_text(json.dumps({**said, "forced_bos_token_id": german}))
    with LLM(str(tmp_path), max_model_len=64, **SETTINGS) as llm:
        text = llm.get_tokenizer().encode("hello", add_special_tokens=False)
        is_before = template.startswith("eng")
        for source, target, begin in (
            (None, None, [2, german]),
            ("__de__", "eng_Latn", [2, english]),
            ("de", None, [2, german]),
            (None, "fra", [2, german]),
        ):
            own = german if source else english
            read = [own, *text, ids["</s>"]] if is_before else [*text, ids["</s>"], own]
            read = [french, *read] if target == "fra" else read
            named = dict(source_language=source, target_language=target)
            prompt = {"prompt": "hello", **{k: v for k, v in named.items() if v}}
            (output,) = llm.generate(prompt, SHORT)
            assert output.outputs[0].token_ids == expected_of(theirs, read, begin)
            given = {"prompt_token_ids": read, "target_language": "eng_Latn"}
            (output,) = llm.generate(given, SHORT)
            assert output.outputs[0].token_ids == expected_of(theirs, read, [2, english])
        for wrong, field in (
            ({"target_language": "hello"}, "target_language"),
            ({"target_language": "</s>"}, "target_language"),
            ({"target_language": 3}, "target_language"),
            ({"source_language": "tlh"}, "source_language"),
        ):
            with pytest.raises(RequestError) as caught:
                llm.generate({"prompt": "hello", **wrong}, SHORT)
            assert caught.value.field == field
        with pytest.raises(RequestError, match="leave it out") as caught:
            llm.generate({"prompt_token_ids": [7], "source_language": "de"}, SHORT)
        assert caught.value.field == "source_language"


def test_a_folder_as_opus_mt_has_it_translates_texts(tmp_path):
    """Pieces in source.spm, their numbers in vocab.json, and no tokenizer.json."""
    write(tmp_path, "marian")
    numbers = json.loads((tmp_path / "vocab.json").read_text())
    end, pad, size = numbers["</s>"], numbers["<pad>"], len(numbers)
    named = dict(eos_token_id=end, pad_token_id=pad, decoder_start_token_id=pad, vocab_size=size)
    theirs = tiny_models.build_bart(tmp_path, "marian", **named)
    prompt = {"prompt": "The quick fox.", "target_language": "fra"}
    reference = MarianTokenizer.from_pretrained(tmp_path)
    read = reference(">>fra<< The quick fox.")["input_ids"]
    with LLM(str(tmp_path), max_model_len=64, **SETTINGS) as llm:
        (plain,) = llm.generate({"prompt": ">>fra<< The quick fox."}, SHORT)
        (named,) = llm.generate(prompt, SHORT)
        together = llm.generate([prompt, {"prompt": "fox"}, prompt], SHORT)
    tokens = expected_of(theirs, read, [pad])
    for answer in (plain, named, together[0], together[2]):
        assert list(answer.outputs[0].token_ids) == tokens
        shown = [i for i in tokens if i not in (end, numbers["<unk>"], pad)]
        assert answer.outputs[0].text.split() == reference.decode(shown).split()


def test_a_model_that_translates_nothing_refuses_languages(tmp_path):
    tiny_models.build(tmp_path)
    tiny_models.write_tokenizer(tmp_path)
    with LLM(str(tmp_path), **SETTINGS) as llm:
        with pytest.raises(RequestError) as caught:
            llm.generate({"prompt": "hello", "target_language": "de"}, SHORT)
    assert caught.value.field == "target_language"


def test_the_checkpoints_bad_words_are_not_written(tmp_path):
    """`bad_words_ids` of one token (OPUS-MT's padding) and of several, and `suppress_tokens`, as transformers' generate."""
    theirs = tiny_models.build_bart(tmp_path, "marian")
    name, prompt = tmp_path / "generation_config.json", PROMPTS[0]
    said = json.loads(name.read_text())
    settings = {**SETTINGS, "max_model_len": 32, "skip_tokenizer_init": True}

    def both(**more):
        name.write_text(json.dumps({**said, **more}))
        theirs.generation_config.update(**more)
        how = dict(do_sample=False, num_beams=1, max_new_tokens=8, min_new_tokens=8)
        made = theirs.generate(torch.tensor([prompt]), **how)[0].tolist()[1:]
        with LLM(str(tmp_path), **settings) as llm:
            sampling = SamplingParams(temperature=0, max_tokens=8, min_tokens=8)
            (own,) = answers(llm, [prompt], sampling)
            if more:
                (forks,) = llm.generate(
                    as_prompts([prompt]),
                    SamplingParams(n=2, temperature=0, max_tokens=8, min_tokens=8),
                )
                assert [list(x.token_ids) for x in forks.outputs] == [list(own)] * 2
                with pytest.raises(RequestError, match="generation config"):
                    llm.generate(as_prompts([prompt]), SamplingParams(allowed_token_ids=(first,)))
        return list(own), made

    own, made = both()
    assert own == made
    first = own[0]
    for more in (
        {"bad_words_ids": [[first], [2]]},
        {"bad_words_ids": [[first]], "suppress_tokens": [own[1], 10_000]},
    ):
        own, made = both(**more)
        assert own == made
        assert first not in own
    pair = own[:2]
    own, made = both(bad_words_ids=[[first], pair], suppress_tokens=None)
    assert own == made


@pytest.mark.parametrize(
    ("change", "field"),
    [({"bad_words_ids": [3]}, "bad_words_ids"), ({"suppress_tokens": 3}, "suppress_tokens")],
)
def test_bad_words_of_another_form_are_refused(tmp_path, change, field):
    tiny_models.build_bart(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps(change))
    with pytest.raises(CheckpointError) as caught:
        read_spec(tmp_path)
    assert caught.value.field == field


def test_keys_that_are_not_applied_are_named(tmp_path, caplog):
    tiny_models.build_bart(tmp_path)
    name = tmp_path / "generation_config.json"
    name.write_text(json.dumps({"num_beams": 4, "min_length": 0, "forced_eos_token_id": 2}))
    with LLM(str(tmp_path), max_model_len=32, skip_tokenizer_init=True, **SETTINGS):
        assert "forced_eos_token_id=2, num_beams=4 are not applied" in caplog.text
    name.unlink()
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"num_beams": 1, "length_penalty": 2.0, "min_length": 5, "forced_eos_token_id": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_spec(tmp_path).not_applied == ("min_length=5",)


def test_an_old_bart_begins_with_its_bos_token(tmp_path):
    tiny_models.build_bart(tmp_path)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"forced_bos_token_id": None, "force_bos_token_to_be_generated": True}
    (tmp_path / "config.json").write_text(json.dumps(config | {"bos_token_id": 7}))
    assert read_spec(tmp_path).spec.encoder.forced == (7,)
