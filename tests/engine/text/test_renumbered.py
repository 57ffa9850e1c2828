"""Folders whose pieces are SentencePiece's and whose ids are others', beside transformers' classes."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import sentencepiece as spm
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.engine.text.tokenizer import Tokenizer
from slipstream.errors import CheckpointError, RequestError, UnsupportedModelError
from tests.engine.text.test_tokenizer_folders import LINES, train

WAYS = {
    "marian": ("MarianTokenizer", "source.spm", {"model_type": "unigram"}),
    "m2m_100": ("M2M100Tokenizer", "sentencepiece.bpe.model", {"model_type": "unigram"}),
    "m2m_100-bpe": ("M2M100Tokenizer", "sentencepiece.bpe.model", {"model_type": "bpe"}),
    "mbart50": ("MBart50Tokenizer", "sentencepiece.bpe.model", {"model_type": "unigram"}),
    "pegasus": (
        "PegasusTokenizer",
        "spiece.model",
        {"model_type": "unigram", "pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1},
    ),
}
CLEANING = {
    "byte_fallback": False,
    "remove_extra_whitespaces": True,
    "normalization_rule_name": "nmt_nfkc",
    "allow_whitespace_only_pieces": False,
    "character_coverage": 0.98,
}


def write(folder: Path, way: str) -> tuple[Path, bytes]:
    kind, file, options = WAYS[way]
    data = train(**{**CLEANING, **options})
    (folder / file).write_bytes(data)
    pieces = spm.SentencePieceProcessor(model_proto=data)
    texts = [pieces.id_to_piece(i) for i in range(pieces.vocab_size())]
    config: dict[str, Any] = {"tokenizer_class": kind}
    if kind == "MarianTokenizer":  # of two languages' pieces, in another order, without some
        rng = random.Random(1)
        known = [t for t in texts if t not in ("<s>", "</s>", "<unk>") and rng.random() < 0.95]
        rng.shuffle(known)
        known = ["</s>", "<unk>", *known, "▁nur", "\u0436\u0436", ">>deu<<", ">>fra<<", "<pad>"]
        (folder / "vocab.json").write_text(json.dumps({t: i for i, t in enumerate(known)}))
        (folder / "target.spm").write_bytes(data)
        config |= {"source_lang": "en", "target_lang": "de"}
    elif kind == "M2M100Tokenizer":
        known = ["<s>", "<pad>", "</s>", "<unk>", *texts[3:-40]]
        (folder / "vocab.json").write_text(json.dumps({t: i for i, t in enumerate(known)}))
        config |= {"src_lang": "de"}
    elif kind == "MBart50Tokenizer":
        config |= {"src_lang": "fr_XX"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder, data


@pytest.fixture(scope="module", params=WAYS)
def both(request, tmp_path_factory) -> tuple[str, Tokenizer, Any, bytes]:
    import transformers

    folder, data = write(tmp_path_factory.mktemp(request.param), request.param)
    kind, _, _ = WAYS[request.param]
    pieces = spm.SentencePieceProcessor(model_proto=data)
    if kind == "MBart50Tokenizer":  # transformers reads the file by a library that is not here
        scored = [(pieces.id_to_piece(i), pieces.get_score(i)) for i in range(len(pieces))]
        theirs = transformers.MBart50Tokenizer(vocab=scored, src_lang="fr_XX")
    elif kind == "PegasusTokenizer":
        theirs = None
    else:
        theirs = getattr(transformers, kind).from_pretrained(folder)
    return request.param, Tokenizer.from_pretrained(folder), theirs, data


def expected(way: str, theirs: Any, data: bytes, text: str) -> list[int]:
    """The ids of transformers' slow classes, whose pieces are the library's. Those of mBART-50 and Pegasus are gone: they are
    the library's with an offset."""
    if way.startswith(("marian", "m2m")):
        return list(theirs(text)["input_ids"])
    ids = spm.SentencePieceProcessor(model_proto=data).encode(text)
    if way == "pegasus":
        return [*(i + 103 for i in ids), 1]
    return [theirs.convert_tokens_to_ids("fr_XX"), *(3 if i == 0 else i + 1 for i in ids), 2]


def test_a_corpus_has_the_ids_of_transformers(both):
    way, ours, theirs, data = both
    rng = random.Random(0)
    lines = [line for line in LINES[:300] if "<" not in line]
    lines += ["".join(rng.choices("ab 1é字🙂ж", k=30)) for _ in range(50)]
    unknown = 0
    for line in lines:
        ids = expected(way, theirs, data, line)
        assert ours.encode(line) == ids, line
        if ours.token_to_id("<unk>") in ids:
            unknown += 1
        elif way.startswith(("marian", "m2m")):
            read = theirs.decode(ids, skip_special_tokens=True)
            assert ours.decode(ids) == read.removeprefix("__de__").lstrip(
                " "
            )  # special in our eyes
        else:
            library = spm.SentencePieceProcessor(model_proto=data)
            assert ours.decode(ids) == library.decode(library.encode(line))
    assert 10 < unknown < len(lines) - 10


@settings(max_examples=60)
@given(text=st.text(max_size=30).filter(lambda t: not set(t) & set("<▁\0")))
def test_any_text_has_the_ids_of_transformers(both, text: str):
    way, ours, theirs, data = both
    assert ours.encode(text) == expected(way, theirs, data, text)


def test_tokens_have_the_numbers_of_transformers(both):
    way, ours, theirs, _ = both
    if way == "pegasus":  # facts of the class
        first = ["<pad>", "</s>", "<mask_1>", "<mask_2>", "<unk_2>", "<unk_3>"]
        assert [ours.id_to_token(i) for i in range(6)] == first
        assert [ours.token_to_id(t) for t in ("<unk_102>", "<unk>")] == [104, 105]
        assert ours.encode("a </s> b").count(1) == 2
        return
    named = ["</s>", "<unk>", "<pad>"]
    named += {
        "marian": [">>fra<<", "▁nur"],
        "mbart50": ["<s>", "ar_AR", "sl_SI", "<mask>"],
    }.get(way, ["<s>", "__af__", "__zu__"])
    for token in named:
        number = theirs.convert_tokens_to_ids(token)
        assert ours.token_to_id(token) == number
        assert ours.id_to_token(number) == token
        if not token.startswith("▁"):
            assert number in ours.special_ids
    assert ours.eos_token_ids == (theirs.eos_token_id,)
    text = "a </s> b"
    assert ours.encode(text).count(theirs.eos_token_id) == 2


def test_a_language_before_a_text_is_a_token_of_marians(both):
    way, ours, theirs, _ = both
    if way != "marian":
        return
    for text in (">>fra<< The fox.", ">>fra<<The", "The >>fra<< fox", ">>xxx<< The", ">>fra The"):
        assert ours.encode(text) == theirs(text)["input_ids"]


def test_what_it_can_not_do_is_refused(both, tmp_path):
    _, ours, _, _ = both
    with pytest.raises(UnsupportedModelError, match="copy the folder"):
        ours.save(tmp_path)
    with pytest.raises(RequestError, match="no pairs"):
        ours.encode_pairs([("a", "b")])


BAD = [
    ("marian", "tokenizer_config.json", {"separate_vocabs": True}, "separate_vocabs"),
    ("marian", "vocab.json", None, "vocab.json"),
    ("marian", "vocab.json", {"</s>": 0, "a": 0}, "vocab.json"),
    ("marian", "vocab.json", {"</s>": 0, "a": "b"}, "vocab.json"),
    ("marian", "vocab.json", {"a": 0}, "tokenizer"),
    (
        "m2m_100",
        "vocab.json",
        {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, "a": 6},
        "vocab.json",
    ),
    ("m2m_100", "tokenizer_config.json", {"language_codes": "x"}, "language_codes"),
    ("m2m_100", "tokenizer_config.json", {"src_lang": "tlh"}, "src_lang"),
    ("mbart50", "tokenizer_config.json", {"src_lang": "en"}, "src_lang"),
    ("pegasus", "tokenizer_config.json", {"offset": "7"}, "offset"),
    ("pegasus", "spiece.model", None, "tokenizer"),
]


@pytest.mark.parametrize(("way", "file", "changed", "field"), BAD)
def test_bad_folders_are_named(tmp_path, way, file, changed, field):
    folder, _ = write(tmp_path, way)
    if changed is None:
        (folder / file).unlink()
    elif file == "vocab.json":
        (folder / file).write_text(json.dumps(changed))
    else:
        config = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps({**config, **changed}))
    with pytest.raises((CheckpointError, UnsupportedModelError)) as error:
        Tokenizer.from_pretrained(folder)
    assert error.value.field == field


def test_a_folder_without_a_class_is_of_its_models(tmp_path):
    folder, _ = write(tmp_path, "marian")
    (folder / "tokenizer_config.json").write_text(json.dumps({"source_lang": "en"}))
    (folder / "config.json").write_text(json.dumps({"model_type": "marian", "eos_token_id": 0}))
    assert Tokenizer.from_pretrained(folder).token_to_id(">>fra<<")
