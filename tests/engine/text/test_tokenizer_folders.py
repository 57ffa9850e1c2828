"""Tokenizers from folders: SentencePiece's files against its library, what stands beside tokenizer.json, and BOS."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path

import pytest
import sentencepiece as spm
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.engine.text.sentencepiece import _fields, build
from slipstream.engine.text.tokenizer import Tokenizer
from slipstream.errors import CheckpointError, RequestError, UnsupportedModelError
from tests.data.make_tokens import change, write_gguf
from tests.support import tiny_models

LINES = (Path(__file__).parents[2] / "data/tokenizer_corpus.txt").read_bytes().decode().split("\n")


def train(**options: object) -> bytes:
    model = io.BytesIO()
    defaults: dict[str, object] = {
        "model_type": "bpe",
        "vocab_size": 900,
        "byte_fallback": True,
        "character_coverage": 0.99,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "split_digits": True,
        "allow_whitespace_only_pieces": True,
        "minloglevel": 2,
        "num_threads": 1,
    }
    lines = [line for line in LINES if line.strip()][:800]
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, **{**defaults, **options}
    )
    return model.getvalue()


@pytest.fixture(scope="module", params=[True, False], ids=["prefix", "no-prefix"])
def pieces(request, tmp_path_factory) -> tuple[Tokenizer, spm.SentencePieceProcessor]:
    folder = tmp_path_factory.mktemp("pieces")
    (folder / "tokenizer.model").write_bytes(train(add_dummy_prefix=request.param))
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer.from_pretrained(folder), spm.SentencePieceProcessor(
        model_file=str(folder / "tokenizer.model")
    )


def test_sentencepieces_ids_on_a_corpus(pieces) -> None:
    ours, theirs = pieces
    rng = random.Random(0)
    for line in [
        *LINES[:600],
        "".join(LINES[:50]),
        *("".join(rng.choices("ab 1é字🙂", k=30)) for _ in range(200)),
    ]:
        ids = theirs.encode(line)
        assert ours.encode(line, add_special_tokens=False) == ids
        assert ours.decode(ids) == theirs.decode(ids) == line
    assert ours.encode("a")[0] == ours.bos_token_id == theirs.bos_id()
    assert ours.eos_token_ids == (theirs.eos_id(),)
    assert ours.vocab_size == theirs.vocab_size()


@settings(max_examples=200)
@given(text=st.text(max_size=30).filter(lambda t: "<" not in t and "▁" not in t and "\0" not in t))
def test_sentencepieces_ids_on_anything(pieces, text: str) -> None:
    ours, theirs = pieces
    assert ours.encode(text, add_special_tokens=False) == theirs.encode(text)


def test_scores_count_not_the_order_of_tokens(pieces) -> None:
    _, theirs = pieces
    numbers = list(range(theirs.vocab_size()))[::-1]
    kinds = [
        2 if theirs.is_unknown(i) else 3 if theirs.is_control(i) else 6 if theirs.is_byte(i) else 1
        for i in numbers
    ]
    tokens = [theirs.id_to_piece(i) for i in numbers]
    scores = [theirs.get_score(i) for i in numbers]
    prefix = theirs.encode("a", out_type=str)[0].startswith("▁")
    turned = build(tokens, scores, kinds, add_space_prefix=prefix)
    for line in LINES[:200]:
        assert [numbers[i] for i in turned.encode(line).ids] == theirs.encode(line)


@pytest.mark.parametrize(
    "options",
    [
        {"normalization_rule_name": "nmt_nfkc"},
        {"remove_extra_whitespaces": True},
        {"remove_extra_whitespaces": True, "normalization_rule_name": "nmt_nfkc_cf"},
    ],
    ids=str,
)
def test_texts_are_normalised_as_by_sentencepiece(tmp_path, options) -> None:
    data = train(**options)
    (tmp_path / "tokenizer.model").write_bytes(data)
    ours, theirs = Tokenizer.from_pretrained(tmp_path), spm.SentencePieceProcessor(model_proto=data)
    for line in ["", "  ", " ＡＢ  ½ é ", *LINES[:300]]:
        assert ours.encode(line, add_special_tokens=False) == theirs.encode(line)


def test_other_sentencepiece_models_are_refused(tmp_path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(train(model_type="unigram"))
    with pytest.raises(UnsupportedModelError, match="neither a BPE model"):
        Tokenizer.from_pretrained(tmp_path)
    good = train()
    for damaged in (good[:100], b"\x0a\xff", b"\xff" * 20, b"\x0b" + good):
        (tmp_path / "tokenizer.model").write_bytes(damaged)
        with pytest.raises((CheckpointError, UnsupportedModelError), match=r"tokenizer\.model"):
            Tokenizer.from_pretrained(tmp_path)


# --- What stands beside tokenizer.json --------------------------------------------------------------------------------


def test_bos_and_eos_by_flags_and_post_processor(folder) -> None:
    def around() -> tuple[list[int], list[int]]:
        tokenizer = Tokenizer.from_pretrained(folder)
        ids, bare = tokenizer.encode("hello"), tokenizer.encode("hello", add_special_tokens=False)
        at = ids.index(bare[0])
        assert ids[at : at + len(bare)] == bare
        return ids[:at], ids[at + len(bare) :]

    assert around() == ([], [])
    change(folder, "tokenizer_config.json", add_bos_token=True, add_eos_token=True)
    assert around() == ([0], [1])
    change(folder, "tokenizer_config.json", add_bos_token=None, add_eos_token=None)
    entry = {"id": "<s>", "ids": [0], "tokens": ["<s>"]}
    single = [
        {"SpecialToken": {"id": "<s>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ]
    processor = {
        "type": "TemplateProcessing",
        "single": single,
        "pair": single,
        "special_tokens": {"<s>": entry},
    }
    change(
        folder,
        "tokenizer.json",
        post_processor={**processor, "pair": [*single, {"Sequence": {"id": "B", "type_id": 0}}]},
    )
    assert around() == ([0], [])
    change(folder, "tokenizer_config.json", add_bos_token=False)
    assert around() == ([], [])


def test_a_template_that_wrote_the_bos_gets_no_second_one(folder) -> None:
    change(
        folder,
        "tokenizer_config.json",
        add_bos_token=True,
        chat_template="{{ bos_token }}{{ messages[0].content }}",
    )
    tokenizer = Tokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}])
    assert text == "<s>hello"
    assert (
        tokenizer.encode(text)
        == tokenizer.encode("hello")
        == tokenizer.encode(text, add_special_tokens=False)
    )


def test_tokens_that_only_the_config_declares(folder) -> None:
    from transformers import AutoTokenizer

    size = Tokenizer.from_pretrained(folder).vocab_size
    entry = {
        "content": "<tool>",
        "special": True,
        "normalized": False,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
    }
    change(
        folder,
        "tokenizer_config.json",
        added_tokens_decoder={str(size): entry},
        additional_special_tokens=["hello"],
    )
    ours, theirs = Tokenizer.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert ours.encode("a<tool>hello the") == theirs.encode("a<tool>hello the")
    assert size in ours.special_ids
    assert ours.vocab_size == len(theirs)
    change(folder, "tokenizer_config.json", added_tokens_decoder={str(size + 7): entry})
    with pytest.raises(CheckpointError, match="<tool>"):
        Tokenizer.from_pretrained(folder)


def test_truncation_and_padding_of_the_file_are_not_applied(folder) -> None:
    plain = Tokenizer.from_pretrained(folder).encode("hello there")
    cut = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    fill = {
        "strategy": {"Fixed": 50},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
    }
    for setting in ({"truncation": cut}, {"padding": {**fill, "pad_token": "<s>"}}):
        tiny_models.write_tokenizer(folder)
        change(folder, "tokenizer.json", **setting)
        assert Tokenizer.from_pretrained(folder).encode("hello there") == plain


def test_special_tokens_named_by_number_only(folder) -> None:
    change(folder, "config.json", bos_token_id=0, eos_token_id=1)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": "{{ bos_token }}|{{ eos_token }}"})
    )
    tokenizer = Tokenizer.from_pretrained(folder)
    assert config["bos_token"] == "<s>"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (0, (1,))
    assert tokenizer.apply_chat_template([]) == "<s>|</s>"


def test_tools_choose_their_template(folder) -> None:
    named = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "{{ tools[0].name }}"},
    ]
    change(folder, "tokenizer_config.json", chat_template=named)
    tokenizer = Tokenizer.from_pretrained(folder)
    assert tokenizer.apply_chat_template([]) == "plain"
    assert tokenizer.apply_chat_template([], tools=[{"name": "f"}]) == "f"


def test_half_a_surrogate_pair_is_a_request_error(folder) -> None:
    with pytest.raises(RequestError, match="Unicode") as caught:
        Tokenizer.from_pretrained(folder).encode("a\ud800")
    assert caught.value.field == "prompt"


# --- BERT's and T5's own files ------------------------------------------------------------------------------------------


def train_t5() -> bytes:
    options = {
        "model_type": "unigram",
        "byte_fallback": False,
        "normalization_rule_name": "nmt_nfkc",
        "vocab_size": 700,
    }
    ids = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
    return train(
        **options, **ids, remove_extra_whitespaces=True, allow_whitespace_only_pieces=False
    )


def test_t5s_pieces_are_cut_as_by_its_library(tmp_path) -> None:
    """A unigram model with a character map, sentinels after its pieces, and </s> at the end: as the library cuts texts."""
    data = train_t5()
    (tmp_path / "spiece.model").write_bytes(data)
    named = {f"{name}_token": f"<{name}>" for name in ("unk", "pad")}
    config = {"tokenizer_class": "T5Tokenizer", "eos_token": "</s>", **named, "extra_ids": 10}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours, theirs = Tokenizer.from_pretrained(tmp_path), spm.SentencePieceProcessor(model_proto=data)
    assert ours.vocab_size == theirs.vocab_size() + 10
    assert ours.id_to_token(theirs.vocab_size()) == "<extra_id_9>"
    assert ours.eos_token_ids == (1,)
    for line in [line for line in LINES[:400] if line.strip() and "<" not in line]:
        expected = theirs.encode(line)
        assert ours.encode(line) == [*expected, 1]
        if 2 not in expected:
            assert ours.decode(expected) == theirs.decode(expected)
    assert ours.encode("<extra_id_0>")[-2] == theirs.vocab_size() + 9
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({**config, "tokenizer_class": "XLNetTokenizer"})
    )
    with pytest.raises(UnsupportedModelError, match="XLNetTokenizer"):
        Tokenizer.from_pretrained(tmp_path)


def test_a_vocab_txt_gives_the_tokens_of_its_json(tmp_path) -> None:
    """vocab.txt gives what the tokenizer.json of the same vocabulary gives."""
    tiny_models.write_wordpiece(tmp_path / "json")
    stored = json.loads((tmp_path / "json" / "tokenizer.json").read_text())
    words = sorted(stored["model"]["vocab"], key=stored["model"]["vocab"].get)
    (tmp_path / "txt").mkdir()
    (tmp_path / "txt" / "vocab.txt").write_text("\n".join(words) + "\n")
    config = {
        "tokenizer_class": "BertTokenizer",
        "do_lower_case": True,
        "cls_token": "[CLS]",
        "sep_token": "[SEP]",
    }
    (tmp_path / "txt" / "tokenizer_config.json").write_text(json.dumps(config))
    a, b = (Tokenizer.from_pretrained(tmp_path / kind) for kind in ("json", "txt"))
    for text in ("The cats are singing.", "", "a  b\nc", "Ünïcode?", "the [SEP] cat"):
        assert a.encode(text) == b.encode(text)
        assert a.decode(a.encode(text)) == b.decode(b.encode(text))
        assert a.encode_pairs([(text, "the")]) == b.encode_pairs([(text, "the")])
    (tmp_path / "txt" / "vocab.txt").write_text("a\nb\n")
    with pytest.raises(CheckpointError, match="CLS"):
        Tokenizer.from_pretrained(tmp_path / "txt")


# --- The same in GGUF files, as llama.cpp's converter writes them -------------------------------------------------------


@pytest.mark.parametrize(
    "said",
    [{"eos_token_id": 1, "add_eos_token": True, "add_bos_token": False}, {}],
    ids=["said", "silent"],
)
def test_t5s_pieces_in_a_gguf_file(tmp_path, said) -> None:
    data = train_t5()
    theirs = spm.SentencePieceProcessor(model_proto=data)
    pieces = range(theirs.vocab_size())
    charsmap = dict(_fields(dict(_fields(data))[3]))[2]
    path = tmp_path / "x.gguf"
    write_gguf(
        path,
        {
            "model": "t5",
            "tokens": [theirs.id_to_piece(i) for i in pieces],
            "scores": [float(theirs.get_score(i)) for i in pieces],
            "token_type": [
                2 if theirs.is_unknown(i) else 3 if theirs.is_control(i) else 1 for i in pieces
            ],
            "precompiled_charsmap": list(charsmap),
            "add_space_prefix": True,
            "remove_extra_whitespaces": True,
            **said,
        },
    )
    ours = Tokenizer.from_pretrained(path)
    for line in [line for line in LINES[:400] if line.strip() and "<" not in line]:
        expected = theirs.encode(line)
        assert ours.encode(line) == [*expected, 1]
        if 2 not in expected:
            assert ours.decode(expected) == theirs.decode(expected)


def test_xlm_robertas_pieces_in_a_gguf_file(tmp_path) -> None:
    """bge-m3 and its like: a SentencePiece model whose pieces the converter moves one up, to XLM-R's order (<s>, <pad>, </s>,
    <unk>), with padding at the end."""
    options = {
        "model_type": "unigram",
        "byte_fallback": False,
        "normalization_rule_name": "nmt_nfkc",
        "vocab_size": 700,
    }
    data = train(
        **options,
        unk_id=0,
        bos_id=1,
        eos_id=2,
        remove_extra_whitespaces=True,
        allow_whitespace_only_pieces=False,
    )
    theirs = spm.SentencePieceProcessor(model_proto=data)
    pieces = range(3, theirs.vocab_size())
    ends = {"bos": 0, "eos": 2, "unknown": 3, "seperator": 2, "padding": 1, "cls": 0}
    path = tmp_path / "x.gguf"
    write_gguf(
        path,
        {
            "model": "t5",
            "pre": "default",
            "tokens": [
                "<s>",
                "<pad>",
                "</s>",
                "<unk>",
                *(theirs.id_to_piece(i) for i in pieces),
                "[PAD701]",
            ],
            "scores": [0.0, 0.0, 0.0, 0.0, *(float(theirs.get_score(i)) for i in pieces), -1000.0],
            "token_type": [3, 3, 3, 2, *([1] * len(pieces)), 5],
            "precompiled_charsmap": list(dict(_fields(dict(_fields(data))[3]))[2]),
            "add_space_prefix": True,
            "token_type_count": 1,
            "remove_extra_whitespaces": True,
            **{f"{name}_token_id": i for name, i in ends.items()},
            "add_bos_token": True,
            "add_eos_token": True,
        },
    )
    ours = Tokenizer.from_pretrained(path)
    assert ours.vocab_size == theirs.vocab_size() + 2
    for line in [line for line in LINES[:400] if line.strip() and "<" not in line]:
        pieces = theirs.encode(line)
        assert ours.encode(line) == [0, *(3 if i == 0 else i + 1 for i in pieces), 2]
        if 0 not in pieces:
            assert ours.decode(ours.encode(line)) == theirs.decode(pieces)


def test_berts_words_in_a_gguf_file(tmp_path) -> None:
    tiny_models.write_wordpiece(tmp_path / "json")
    vocab = json.loads((tmp_path / "json" / "tokenizer.json").read_text())["model"]["vocab"]

    def phantom(word: str) -> str:
        if word.startswith("[") and word.endswith("]"):
            return word
        return word[2:] if word.startswith("##") else "\u2581" + word

    tokens = [phantom(word) for word in sorted(vocab, key=vocab.get)]
    named = {"padding": 0, "unknown": 1, "cls": 2, "seperator": 3, "mask": 4}
    fields: dict[str, object] = {
        "model": "bert",
        "tokens": tokens,
        **{f"{n}_token_id": i for n, i in named.items()},
    }
    a, b = (
        Tokenizer.from_pretrained(p)
        for p in (tmp_path / "json", write_gguf(tmp_path / "x.gguf", fields))
    )
    for text in ("The cats are singing.", "", "a  b\nc", "Ünïcode?", "the [SEP] cat"):
        assert a.encode(text) == b.encode(text)
        assert a.decode(a.encode(text)) == b.decode(b.encode(text))
    for keys, text in (
        ({"normalizer.lowercase": False}, "the Cat"),
        ({"normalizer.strip_accents": False}, "ünïcode"),
    ):
        said = write_gguf(
            tmp_path / "said.gguf", fields | {f"tokenizer.ggml.{k}": v for k, v in keys.items()}
        )
        assert Tokenizer.from_pretrained(said).encode(text) != b.encode(text)
    del fields["cls_token_id"]
    with pytest.raises(CheckpointError, match="CLS"):
        Tokenizer.from_pretrained(write_gguf(tmp_path / "y.gguf", fields))
