"""Long texts that begin as an earlier one: their tokens are those that the library gives for the whole."""

from __future__ import annotations

import random
import sys

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from slipstream.engine.text import known_beginnings
from slipstream.engine.text.known_beginnings import KnownBeginnings, seams_of

MARKS = ("<|im_start|>", "<|im_end|>")
PIECES = (*MARKS, "user\n", " word", "  ", "é日😀", "<|im_", "ab", "\n", "<", "x<|im_end|", "▁")


def byte_level():
    made = tokenizers.Tokenizer(models.BPE(unk_token=None))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    made.decoder = decoders.ByteLevel()
    return made, pre_tokenizers.ByteLevel.alphabet()


def metaspace(scheme):
    made = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    return made, ["▁", *"abdeorsuwx<|im_\n"]


def prepending():
    made = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    return made, ["▁", *"abdeorsuwx<|im_\n"]


@pytest.fixture(
    params=[byte_level, lambda: metaspace("first"), lambda: metaspace("always"), prepending]
)
def backend(request):
    made, alphabet = request.param()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<unk>"], initial_alphabet=list(alphabet)
    )
    made.train_from_iterator(["".join(PIECES) * 9, "word word user ab abab <|im_"], trainer)
    made.add_special_tokens([AddedToken(mark, normalized=False) for mark in MARKS])
    return made


def test_tokens_are_those_of_the_whole_text(backend, monkeypatch):
    monkeypatch.setattr(known_beginnings, "MIN_CHARS", 8)
    monkeypatch.setattr(known_beginnings, "MAX_TEXTS", 6)
    rng, known = random.Random(0), KnownBeginnings(seams_of(backend))
    texts, num_saved = [""], 0

    def encode(text):
        return backend.encode(text, add_special_tokens=False).ids

    for _ in range(400):
        before = rng.choice(texts)
        text = before[: rng.choice((len(before), rng.randrange(len(before) + 1)))]
        text += "".join(rng.choices(PIECES, k=rng.randrange(9)))
        read = []
        ids = known.encode(text, "", lambda part, read=read: read.append(part) or encode(part))
        assert ids == encode(text)
        num_saved += len(text) - sum(map(len, read))
        texts = [*texts[-5:], text]
    assert num_saved > 1000


def test_a_turn_reads_only_what_is_new(backend):
    known, read = KnownBeginnings(seams_of(backend)), []

    def encode(text):
        read.append(len(text))
        return backend.encode(text, add_special_tokens=False).ids

    said = f"<|im_start|>user\n{'word ' * 9000}<|im_end|>\n"
    for _ in range(3):
        known.encode(f"{said}<|im_start|>assistant\n", "", encode)
        said += "<|im_start|>assistant\nab<|im_end|>\n<|im_start|>user\nword<|im_end|>\n"
    assert read[0] > 40_000
    assert max(read[1:]) < 200


def test_a_text_is_cut_only_before_a_token_that_nothing_else_can_take(backend):
    assert set(seams_of(backend).values()) - {"<unk>"} == set(MARKS)
    backend.add_special_tokens(
        [
            AddedToken("a<|im_end|>", normalized=False),
            AddedToken("<|sep|>", lstrip=True, normalized=False),
        ]
    )
    assert set(seams_of(backend).values()) - {"<unk>"} == {"<|im_start|>", "a<|im_end|>"}
    backend.add_special_tokens([AddedToken("b<", normalized=False)])
    assert set(seams_of(backend).values()) - {"<unk>"} == {"a<|im_end|>", "b<"}


def test_a_token_that_unknown_characters_get_too_is_no_place_to_cut():
    backend = metaspace("first")[0]
    trainer = tokenizers.trainers.BpeTrainer(special_tokens=["<unk>"], initial_alphabet=["a", "▁"])
    backend.train_from_iterator(["a a"], trainer)
    known = KnownBeginnings(seams_of(backend))
    known.encode(text := "a<unk>" + "日 " * 9000, "", lambda part: backend.encode(part).ids)
    assert seams_of(backend)
    assert known._known["", text][1] == []


@pytest.mark.parametrize(("letter", "kept"), [("a", 4), ("日", 2)])
def test_no_more_bytes_are_remembered_than_are_allowed(backend, monkeypatch, letter, kept):
    monkeypatch.setattr(known_beginnings, "MAX_BYTES", 150_000)
    known = KnownBeginnings(seams_of(backend))
    for i in (*range(9), 8):
        known.encode(f"{i}{letter * 20_000}<|im_end|>", "", lambda text: [7] * 3_000)
    assert len(known._known) == kept
    size = sum(sys.getsizeof(text) + 4 * len(ids) for (_, text), (ids, _) in known._known.items())
    assert known._num_bytes == size <= 150_000
    assert all(ids.itemsize == 4 for ids, _ in known._known.values())


def test_texts_of_another_salt_do_not_help(backend):
    known, read = KnownBeginnings(seams_of(backend)), []
    text = f"{'word ' * 9000}<|im_end|>"
    for salt in ("a", "b", "a"):
        known.encode(text, salt, lambda part: read.append(len(part)) or backend.encode(part).ids)
    assert read[0] == read[1] == len(text)
    assert read[2] == len("<|im_end|>")


def test_a_token_that_overlaps_itself_is_no_place_to_cut():
    backend = byte_level()[0]
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in ("|a|", "<|b|>")])
    assert set(seams_of(backend).values()) == {"<|b|>"}


def test_places_to_cut_among_random_tokens_are_those_of_the_definition():
    rng = random.Random(0)
    texts = {"".join(rng.choices("abcdef<|>", k=rng.randrange(1, 6))) for _ in range(20)}
    backend = byte_level()[0]
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in texts])
    touched = {
        text
        for text in texts
        for other in texts
        if (text in other and text != other)
        or any(
            (other if other != text else text[1:]).endswith(text[:n]) for n in range(1, len(text))
        )
    }
    assert set(seams_of(backend).values()) == texts - touched
    assert 0 < len(texts - touched) < len(texts)


def test_thousands_of_added_tokens_cost_a_text_no_search_each():
    class Searched(str):
        num = 0

        def count(self, *args):
            Searched.num += 1
            return super().count(*args)

    backend = byte_level()[0]
    unused = [AddedToken(f"<unused{n}>", normalized=False) for n in range(6400)]
    backend.add_special_tokens([*unused, AddedToken("<end_of_turn>", normalized=False)])
    seams = seams_of(backend)  # each against each took a minute
    assert len(seams) == 6401
    known = KnownBeginnings(seams)
    known.encode(
        Searched(f"{'word ' * 9000}<end_of_turn>"), "", lambda text: backend.encode(text).ids
    )
    assert Searched.num == 1
    all_of_them = "".join(token.content for token in unused) * 2
    known.encode(Searched(all_of_them), "", lambda text: backend.encode(text).ids)
    assert Searched.num <= 1 + known_beginnings.MAX_SEAMS
