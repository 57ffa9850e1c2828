"""Tokenizers from GGUF files against llama.cpp's ids, from folders against transformers; chat templates."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from slipstream.engine.text.gguf_tokenizer import SPLITS
from slipstream.engine.text.tokenizer import SpecialTokens, Tokenizer
from slipstream.errors import CheckpointError, RequestError, UnsupportedModelError
from slipstream.hub import list_cached
from tests.data.make_tokens import CHUNK, PRE, change, chunks, digest, golden_tokens, write_gguf
from tests.support import tiny_models

DATA = Path(__file__).parents[2] / "data"
TEXT = (DATA / "tokenizer_corpus.txt").read_bytes().decode()
GOLDEN = golden_tokens()
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁"), max_size=40)
"""SentencePiece can't tell ▁ from a space."""


APPROXIMATED = ("tekken", "gpt-4o", "llama4", "deepseek-coder")
"""Here llama.cpp itself only approximates the models' patterns outside ASCII (case classes without combining marks;
spaces that are not ASCII replaced), and we follow the patterns: equal on source code, the first two chunks."""


def summary(tokenizer: Tokenizer) -> list[list[object]]:
    ids = [tokenizer.encode(chunk) for chunk in chunks(TEXT)]
    return [[len(i), digest(i)] for i in ids]


SUMMARIES: dict[tuple[str, str], list[list[object]]] = {}


def summary_of_equals(tokenizer: Tokenizer) -> list[list[object]]:
    """Tokenizers of several names are the same one."""
    known = tokenizer._backend.to_str(), repr(tokenizer._special)
    if known not in SUMMARIES:
        SUMMARIES[known] = summary(tokenizer)
    return SUMMARIES[known]


# --- GGUF -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pre", [*PRE, "(none)"])
def test_every_pre_tokenizer_gives_llama_cpps_ids(pre, tmp_path):
    fields = GOLDEN["byte_level"] | ({} if pre == "(none)" else {"pre": pre})
    tokenizer = Tokenizer.from_pretrained(write_gguf(tmp_path / "x.gguf", fields))
    checked = 2 if pre in APPROXIMATED else None
    assert summary_of_equals(tokenizer)[:checked] == GOLDEN["pre"][pre][:checked]


def test_modernberts_words_are_gpt_2s(tmp_path):
    """llama.cpp splits both in the same way; the golden ids were made before it knew the name."""
    tokenizer = Tokenizer.from_pretrained(
        write_gguf(tmp_path / "x.gguf", GOLDEN["byte_level"] | {"pre": "modern-bert"})
    )
    assert summary(tokenizer) == GOLDEN["pre"]["gpt-2"]


@pytest.mark.parametrize(
    "said", [{}, {"add_bos_token": True, "add_eos_token": True}], ids=["silent", "said"]
)
def test_robertas_words_are_gpt_2s_between_its_own_ends(said, tmp_path):
    """llama.cpp splits both in the same way; the golden ids were made before it knew the name."""
    fields = GOLDEN["byte_level"] | {
        "pre": "roberta-bpe",
        "bos_token_id": 0,
        "eos_token_id": 1,
        **said,
    }
    tokenizer = Tokenizer.from_pretrained(write_gguf(tmp_path / "x.gguf", fields))
    ids = [tokenizer.encode(chunk, add_special_tokens=False) for chunk in chunks(TEXT)]
    assert [[len(i), digest(i)] for i in ids] == GOLDEN["pre"]["gpt-2"]
    assert tokenizer.encode("hello") == [0, *tokenizer.encode("hello", add_special_tokens=False), 1]


def test_every_name_of_the_table_is_checked():
    assert set(SPLITS) == {*PRE, "roberta-bpe", "modern-bert"}


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_gives_llama_cpps_ids(prefix, tmp_path):
    path = write_gguf(tmp_path / "x.gguf", GOLDEN["sentencepiece"] | {"add_space_prefix": prefix})
    tokenizer = Tokenizer.from_pretrained(path)
    assert summary(tokenizer) == GOLDEN["add_space_prefix"][str(prefix)]
    ids = tokenizer.encode(TEXT[:CHUNK])
    assert ids[0] == tokenizer.bos_token_id == 1


def test_gemma4s_merges_hold_in_the_place_of_scores(tmp_path):
    """Gemma 4's files have the same spelling as older ones, and scores without meaning."""
    known = GOLDEN["sentencepiece"] | {"add_space_prefix": False}
    by_scores = Tokenizer.from_pretrained(write_gguf(tmp_path / "scores.gguf", known))
    merges = json.loads(by_scores._backend.to_str())["model"]["merges"]
    own = {"model": "gemma4", "scores": [-1000.0] * len(known["tokens"]), "bos_token_id": 1}
    own |= {"merges": [" ".join(pair) for pair in merges]}
    tokenizer = Tokenizer.from_pretrained(write_gguf(tmp_path / "merges.gguf", known | own))
    assert summary(tokenizer) == summary(by_scores)


@pytest.mark.model
def test_smollm2_gives_llama_cpps_ids():
    path = list_cached().get("smollm2")
    if path is None:
        pytest.skip("smollm2 is not pulled")
    tokenizer = Tokenizer.from_pretrained(path)
    assert summary(tokenizer) == json.loads((DATA / "smollm2_tokens.json").read_text())["chunks"]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.vocab_size) == (
        1,
        (2, 4, 0),  # <|im_end|>, <reponame>, <|endoftext|>
        49152,
    )
    assert tokenizer.decode(tokenizer.encode(TEXT), skip_special_tokens=False) == TEXT
    licence = Path("/usr/share/common-licenses/GPL-3")
    if licence.is_file():
        assert len(tokenizer.encode(licence.read_text())) == 7639
    text = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize("name", ["bytes", "spaces", "no_prefix"])
@settings(max_examples=100)
@given(text=TEXTS)
def test_text_survives_the_round_trip(small, name, text):
    assert small[name].decode(small[name].encode(text)) == text


@pytest.mark.parametrize("name", ["bytes", "spaces", "no_prefix"])
@settings(max_examples=300)
@given(data=st.data())
def test_decodes_as_the_library_does_where_bytes_are_utf8(small, name, data):
    tokenizer = small[name]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    skip = data.draw(st.booleans())
    ours = tokenizer.decode(ids, skip)
    theirs = tokenizer._backend.decode(ids, skip_special_tokens=skip)
    if name == "bytes":
        assert ours == theirs  # also for bytes that are no character
    elif "�" not in ours:
        assert ours == theirs
    else:
        assert "�" in theirs


def test_tokens_one_by_one(small):
    spaces, byte_level = small["spaces"], small["bytes"]
    assert spaces.token_bytes(3 + 0xE2) == b"\xe2"
    assert spaces.token_bytes(spaces._backend.token_to_id("▁")) == b" "
    assert byte_level.token_bytes(byte_level._backend.token_to_id("Ġ")) == b" "
    assert byte_level.token_bytes(byte_level._backend.token_to_id("â")) == b"\xe2"
    assert byte_level.token_bytes(2) == b"<|user|>"
    assert byte_level.token_bytes(10**6) == b""
    assert byte_level.id_to_token(10**6) is None
    assert byte_level.special_ids == {0, 1}
    assert byte_level.encode("a<|user|></s>", add_special_tokens=False)[1:] == [2, 1]
    assert byte_level.decode([2, 1]) == "<|user|>"
    assert byte_level.decode([2, 1], skip_special_tokens=False) == "<|user|></s>"


def test_ends_and_begins_by_the_files_flags(tmp_path):
    fields = GOLDEN["byte_level"] | {
        "pre": "gpt-2",
        "add_bos_token": True,
        "add_eos_token": True,
        "eot_token_id": 2,
    }
    fields |= {"tokenizer.chat_template": "{{ eos_token }}"}
    tokenizer = Tokenizer.from_pretrained(write_gguf(tmp_path / "x.gguf", fields))
    inner = tokenizer.encode("hello", add_special_tokens=False)
    assert tokenizer.encode("hello") == [0, *inner, 1]
    assert tokenizer.eos_token_ids == (1, 2)
    assert tokenizer.encode("<s>hello</s>") == [
        0,
        *inner,
        1,
    ]  # what is there already is not said twice
    assert tokenizer.apply_chat_template([]) == "</s>"


def test_a_template_beside_a_file(tmp_path):
    """The template counts if the folder has no other model."""
    path = write_gguf(
        tmp_path / "x.gguf",
        GOLDEN["byte_level"] | {"pre": "gpt-2", "tokenizer.chat_template": "of the file"},
    )
    (tmp_path / "chat_template.jinja").write_text("of the folder")
    for place in (path, tmp_path):
        assert Tokenizer.from_pretrained(place).apply_chat_template([]) == "of the folder"
    (tmp_path / "y.gguf").write_bytes(path.read_bytes())
    assert Tokenizer.from_pretrained(path).apply_chat_template([]) == "of the file"


@pytest.mark.parametrize(
    ("change", "error", "named"),
    [
        ({"model": "rwkv"}, UnsupportedModelError, "tokenizer.ggml.model"),
        ({"pre": "never-heard-of"}, UnsupportedModelError, "tokenizer.ggml.pre"),
        ({"tokens": [1, 2]}, CheckpointError, "tokenizer.ggml.tokens"),
        ({"tokens": ["a", "b", "a"]}, CheckpointError, "tokenizer.ggml.tokens"),
        ({"token_type": [1]}, CheckpointError, "tokenizer.ggml.token_type"),
        ({"eos_token_id": 10**6}, CheckpointError, "tokenizer.ggml.eos_token_id"),
        ({"merges": ["nopair"]}, CheckpointError, "tokenizer.ggml.merges"),
        ({"merges": ["un known"]}, CheckpointError, "tokenizer.ggml.merges"),
        ({"merges": "text"}, CheckpointError, "tokenizer.ggml.merges"),
        ({"model": "llama"}, CheckpointError, "tokenizer.ggml.scores"),
        ({"model": "llama", "scores": ["x"]}, CheckpointError, "tokenizer.ggml.scores"),
    ],
)
def test_a_bad_field_is_named(change, error, named, tmp_path):
    path = write_gguf(tmp_path / "x.gguf", GOLDEN["byte_level"] | change)
    with pytest.raises(error) as caught:
        Tokenizer.from_pretrained(path)
    assert caught.value.field == named


# --- Folders ----------------------------------------------------------------------------------------------------------


def test_a_folder_as_transformers_reads_it(folder):
    from transformers import AutoTokenizer

    ours, theirs = Tokenizer.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    for text in chunks(TEXT)[:3]:
        ids = ours.encode(text)
        assert ids == theirs.encode(text)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    for begin in (True, False):
        expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=begin)
        assert ours.apply_chat_template(messages, add_generation_prompt=begin) == expected
    assert ours.special_ids == set(theirs.all_special_ids) | {2, 3}
    assert len(ours) == ours.vocab_size == len(theirs)
    for asked in ("a text", ["two", "texts of them"]):
        for adds in (True, False):
            expected = theirs(asked, add_special_tokens=adds)
            found = ours(asked, add_special_tokens=adds)
            assert found["input_ids"] == found.input_ids == expected["input_ids"]
            assert found.attention_mask == expected["attention_mask"]


def test_eos_from_every_place(folder):
    change(folder, "generation_config.json", eos_token_id=[3, 1])
    change(folder, "config.json", eos_token_id=2)
    tokenizer = Tokenizer.from_pretrained(folder)
    assert tokenizer.eos_token_ids == (1, 3, 2)
    assert tokenizer.bos_token_id == 0


def test_gaps_between_ids_are_counted(folder):
    content = json.loads((folder / "tokenizer.json").read_text())
    content["added_tokens"].append({**content["added_tokens"][0], "id": 500, "content": "<far>"})
    (folder / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = Tokenizer.from_pretrained(folder)
    if tokenizer.id_to_token(500) == "<far>":  # the library may also number it anew
        assert tokenizer.vocab_size == 501
    assert all(
        tokenizer.id_to_token(i) is None
        for i in range(tokenizer.vocab_size, tokenizer.vocab_size + 600)
    )


def test_gpt2s_own_files(folder):
    from transformers import GPT2TokenizerFast

    content = json.loads((folder / "tokenizer.json").read_text())["model"]
    end = "<|endoftext|>"
    (folder / "vocab.json").write_text(json.dumps(content["vocab"] | {end: len(content["vocab"])}))
    merges = [" ".join(m) for m in content["merges"]]
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    with pytest.raises(UnsupportedModelError, match="GPT2Tokenizer"):
        Tokenizer.from_pretrained(folder)
    change(folder, "config.json", model_type="qwen2")
    with pytest.raises(UnsupportedModelError, match="GPT2Tokenizer"):
        Tokenizer.from_pretrained(folder)
    change(folder, "config.json", model_type="gpt2")
    change(folder, "added_tokens.json", **{"<extra>": len(content["vocab"]) + 1})
    ours = Tokenizer.from_pretrained(folder)
    theirs = GPT2TokenizerFast(vocab=str(folder / "vocab.json"), merges=str(folder / "merges.txt"))
    for text in chunks(TEXT)[:3]:
        assert ours.encode(text) == theirs.encode(text)
    assert ours.eos_token_ids == (len(content["vocab"]),)
    assert ours.encode("<extra>") == [len(content["vocab"]) + 1]
    assert not {len(content["vocab"]) + 1} & ours.special_ids


def test_what_cannot_be_read_says_so(folder):
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer.from_pretrained(folder)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(b"")
    with pytest.raises(UnsupportedModelError, match=r"tokenizer\.model"):
        Tokenizer.from_pretrained(folder)


def test_an_unknown_decoder_is_refused():
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    for decoder in (None, decoders.BPEDecoder(), decoders.CTC()):
        if decoder is not None:
            backend.decoder = decoder
        with pytest.raises(UnsupportedModelError, match="decoder"):
            Tokenizer(backend, SpecialTokens())


# --- Chat templates -------------------------------------------------------------------------------------------------


def render(folder: Path, template: str, messages: object = (), **variables: object) -> str:
    (folder / "chat_template.jinja").write_text(template)
    return Tokenizer.from_pretrained(folder).apply_chat_template(messages, **variables)


def test_templates_have_what_hugging_face_gives_them(folder):
    assert render(folder, "{{ bos_token }}{{ tools | length }}", tools=[{}, {}]) == "<s>2"
    assert render(folder, "  {% if true %}\n  x\n  {% endif %}\n") == "  x\n"
    assert (
        render(
            folder,
            "{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}",
        )
        == "1"
    )
    assert render(folder, '{{ {"é<": 1} | tojson }}') == '{"é<": 1}'
    assert render(folder, "{{ [1] | tojson(indent=2) }}") == "[\n  1\n]"
    assert len(render(folder, '{{ strftime_now("%Y") }}')) == 4
    assert render(folder, "{% generation %}a{% endgeneration %}") == "a"
    assert render(folder, "{{ think }}{{ tools is none }}", think=7) == "7True"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].x.y }}", "undefined|no element"),
        ("{{ 1 / 0 }}", "division"),
        ("{{ messages.append(1) }}", "append"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% if %}", "broken"),
    ],
)
def test_a_template_that_refuses_is_a_request_error(folder, template, said):
    with pytest.raises(RequestError, match=said) as caught:
        render(folder, template, [])
    assert caught.value.field == "messages"


def test_where_the_template_comes_from(folder):
    change(
        folder,
        "tokenizer_config.json",
        chat_template=[{"name": "default", "template": "D"}, {"name": "x"}],
    )
    assert Tokenizer.from_pretrained(folder).apply_chat_template([]) == "D"
    assert render(folder, "F") == "F"  # the file of its own goes first
    (folder / "chat_template.jinja").unlink()
    change(folder, "tokenizer_config.json", chat_template=None)
    tokenizer = Tokenizer.from_pretrained(folder)
    assert tokenizer.chat_template is None
    with pytest.raises(RequestError, match="no chat template") as caught:
        tokenizer.apply_chat_template([])
    assert caught.value.field == "messages"


def test_wordpieces_come_back_with_spaces(tmp_path):
    """BERT's kind: truncation and padding of the file hold for nothing; words come back with spaces between."""

    tiny_models.write_wordpiece(tmp_path)
    tokenizer = Tokenizer.from_pretrained(tmp_path)
    ids = tokenizer.encode("The cats sing. Is it the cat?")
    assert (ids[0], ids[-1], len(ids)) == (2, 3, 19)
    assert tokenizer.decode(ids) == "the cats sing . is it the cat ?"
    assert tokenizer.decode(ids[1:4], skip_special_tokens=False) == "the ca"


def test_pairs_of_texts(tmp_path):

    tiny_models.write_wordpiece(tmp_path)
    tokenizer = Tokenizer.from_pretrained(tmp_path)
    first, second = (
        tokenizer.encode(text, add_special_tokens=False) for text in ("the cat", "a dog")
    )
    [(whole, num_first)] = tokenizer.encode_pairs([("the cat", "a dog")])
    assert (whole, num_first) == ([2, *first, 3, *second, 3], 6)
    for room, expected in (
        (11, whole),
        (10, [2, *first, 3, *second[:3], 3]),
        (7, [2, *first, 3, 3]),
        (5, [2, *first[:2], 3, 3]),
        (3, [2, 3, 3]),
    ):
        [(cut, num_first)] = tokenizer.encode_pairs([("the cat", "a dog")], max_length=room)
        assert cut == expected
        assert cut[num_first - 1] == 3
    with pytest.raises(RequestError):
        tokenizer.encode_pairs([("the cat", "a dog")], max_length=2)
    pairs = [("the cat", "a dog"), ("", "the " * 9), ("sing", "")]
    for room in (None, 6):
        each = [tokenizer.encode_pairs([pair], max_length=room)[0] for pair in pairs]
        assert tokenizer.encode_pairs(pairs, max_length=room) == each


def test_many_texts_are_encoded_as_each_alone(tmp_path):

    tiny_models.write_wordpiece(tmp_path)
    tokenizer = Tokenizer.from_pretrained(tmp_path)
    texts = ["the cat", "", "The cats sing. Is it the cat?", "[CLS] the [SEP]", "the " * 90]
    assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]
    with pytest.raises(RequestError, match="Unicode"):
        tokenizer.encode_batch(["the", "\ud800"])
