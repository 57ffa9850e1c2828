"""tiktoken's files as folders have them: cut and joined as the library does, specials and prefixes of the models that use them.

The library itself is not needed: `joined` is its algorithm in the plainest form (compared with tiktoken 0.14 once, over
the whole corpus).
"""

from __future__ import annotations

import json
from base64 import b64encode
from itertools import pairwise
from pathlib import Path

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from slipstream.engine.text import sentencepiece, tiktoken
from slipstream.engine.text.tiktoken import CL100K, is_tiktoken, spelling
from slipstream.engine.text.tokenizer import Tokenizer
from slipstream.errors import CheckpointError, UnsupportedModelError
from tests.engine.text.test_tokenizer_folders import LINES, train

GLM4 = ("<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", "<|system|>", "<|user|>")
LLAMA3 = ("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>")
KINDS = {
    "ChatGLM4Tokenizer": (GLM4, [2, 4], "<|endoftext|>"),
    "PreTrainedTokenizerFast": (LLAMA3, [0], "<|end_of_text|>"),
}


@pytest.fixture(scope="module")
def ranks() -> dict[bytes, int]:
    """A trained vocabulary, its tokens shuffled a little (as no training leaves them), and one that no merges make."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=900, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(LINES[:600], trainer)
    back = {character: byte for byte, character in spelling().items()}
    vocab = sorted(backend.get_vocab().items(), key=lambda item: item[1])
    found = [bytes(back[c] for c in token) for token, _ in vocab] + [b" remarkably"]
    found[300], found[301] = found[301], found[300]
    return {token: rank for rank, token in enumerate(found)}


def write(
    folder: Path, ranks: dict[bytes, int], kind: str = "ChatGLM4Tokenizer", **config: object
) -> Path:
    folder.mkdir(exist_ok=True)
    lines = [b64encode(token) + f" {rank}\n".encode() for token, rank in ranks.items()]
    (folder / "tokenizer.model").write_bytes(b"".join(lines))
    specials, _, eos = KINDS.get(kind, KINDS["ChatGLM4Tokenizer"])
    declared = {
        str(len(ranks) + i): {"content": token, "special": True} for i, token in enumerate(specials)
    }
    config = {"tokenizer_class": kind, "added_tokens_decoder": declared, "eos_token": eos, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def joined(text: str, ranks: dict[bytes, int]) -> list[int]:
    ids = []
    for piece in regex.findall(CL100K, text):
        data = piece.encode()
        parts = [data] if data in ranks else [bytes([b]) for b in data]
        while len(parts) > 1:
            found = [
                (ranks[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in ranks
            ]
            if not found:
                break
            at = min(found)[1]
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        ids += [ranks[part] for part in parts]
    return ids


@pytest.mark.parametrize("kind", KINDS)
def test_texts_are_cut_and_joined_as_tiktoken_does(ranks, tmp_path, kind) -> None:
    tokenizer = Tokenizer.from_pretrained(write(tmp_path, ranks, kind))
    specials, prefix, eos = KINDS[kind]
    assert tokenizer.vocab_size == len(ranks) + len(specials)
    around = [len(ranks) + i for i in prefix]
    for line in [
        *LINES[:400],
        " remarkably remarkable 1234567 I'LL 'Ll",
        "\r\n\n  a\t",
        "aaaaaaaaaaa",
        "é字🙂ß",
    ]:
        assert tokenizer.encode(line, add_special_tokens=False) == joined(line, ranks), line
        assert tokenizer.encode(line) == around + joined(line, ranks)
        assert tokenizer.decode(tokenizer.encode(line)) == line
    assert tokenizer.eos_token_ids == (len(ranks) + specials.index(eos),)
    assert tokenizer.encode(f"a{specials[-1]}")[-1] == len(ranks) + len(specials) - 1
    written = "".join(specials[i] for i in prefix)
    assert tokenizer.encode(written + "a") == tokenizer.encode(
        "a"
    )  # what a template wrote is not put there again


@pytest.fixture(scope="module")
def glm4(ranks, tmp_path_factory) -> Tokenizer:
    return Tokenizer.from_pretrained(write(tmp_path_factory.mktemp("glm4"), ranks))


@settings(max_examples=200)
@given(text=st.text(max_size=40).filter(lambda t: "<" not in t and "[" not in t))
def test_any_text_is_encoded_as_by_ranks_and_back(glm4, ranks, text: str) -> None:
    assert glm4.encode(text, add_special_tokens=False) == joined(text, ranks)
    assert glm4.decode(glm4.encode(text)) == text


def test_saved_it_is_the_same(glm4, tmp_path) -> None:
    glm4.save(tmp_path)
    again = Tokenizer.from_pretrained(tmp_path)
    for line in LINES[:100]:
        assert again.encode(line) == glm4.encode(line)


def test_what_the_file_does_not_say_is_not_guessed(ranks, tmp_path) -> None:
    with pytest.raises(UnsupportedModelError, match="QWenTokenizer") as caught:
        Tokenizer.from_pretrained(write(tmp_path, ranks, "QWenTokenizer"))
    assert caught.value.field == "tokenizer_class"
    with pytest.raises(CheckpointError, match=r"\[gMASK\]"):
        Tokenizer.from_pretrained(write(tmp_path, ranks, added_tokens_decoder={}))
    for wrong in ({**ranks, b"zzzz": 5}, {k: v for k, v in ranks.items() if k != b"a"}):
        with pytest.raises(CheckpointError, match="ranks"):
            Tokenizer.from_pretrained(write(tmp_path, wrong))
    (tmp_path / "tokenizer.model").write_bytes(b"YQ== 0\nbad line here\n")
    with pytest.raises(CheckpointError, match=r"tokenizer\.model"):
        Tokenizer.from_pretrained(tmp_path)


# --- SentencePiece's files of the same name ---------------------------------------------------------------------------------


def test_classes_of_sentencepieces_file(tmp_path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(train())
    assert not is_tiktoken(tmp_path / "tokenizer.model")

    def read(**config: object) -> Tokenizer:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        return Tokenizer.from_pretrained(tmp_path)

    plain = read().encode("so the sop")
    assert read(tokenizer_class="LlamaTokenizer", bos_token="<s>").encode("so the sop") == [
        1,
        *plain,
    ]
    assert (
        read(tokenizer_class="LlamaTokenizer", bos_token="<s>", add_bos_token=False).encode(
            "so the sop"
        )
        == plain
    )
    with pytest.raises(UnsupportedModelError, match="InternLM2Tokenizer"):
        read(tokenizer_class="InternLM2Tokenizer")


def test_chatglms_markers_stand_before_and_after_pieces(tmp_path) -> None:
    """ChatGLM 2 and 3: [gMASK] and sop before a text, roles behind the pieces. No word with "sop" in it is cut, unless the
    folder declares the token so (as ChatGLM 3's do)."""
    (tmp_path / "tokenizer.model").write_bytes(train())

    def read(**config: object) -> Tokenizer:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        return Tokenizer.from_pretrained(tmp_path)

    plain, two = read(), read(tokenizer_class="ChatGLMTokenizer")
    assert two.encode("a soprano") == [901, 903, *plain.encode("a soprano")]
    declared = {
        "901": {"content": "[gMASK]"},
        "903": {"content": "sop"},
        "906": {"content": "<|user|>"},
    }
    template = "[gMASK]sop<|user|>\n{{ messages[0].content }}<|assistant|>"
    three = read(
        tokenizer_class="ChatGLMTokenizer", added_tokens_decoder=declared, chat_template=template
    )
    ids = three.encode(three.apply_chat_template([{"role": "user", "content": "hello"}]))
    assert (ids[:3], ids[-1]) == ([901, 903, 906], 907)
    assert 903 in three.encode("a soprano", add_special_tokens=False)


def test_tokens_whose_merges_would_take_hours_are_refused(tmp_path) -> None:
    ranks = {bytes([i]): i for i in range(256)} | {b"a" * 20_000: 256}
    path = tmp_path / "tokenizer.model"
    path.write_bytes(b"\n".join(b64encode(k) + b" %d" % v for k, v in ranks.items()))
    with pytest.raises(CheckpointError, match="20000 characters"):
        tiktoken.from_file(path, {"tokenizer_class": next(iter(tiktoken.PREFIXES))})
    with pytest.raises(CheckpointError, match="20000 characters"):
        sentencepiece.build(["a", "a" * 20_000], [0.0, 0.0], [1, 1], add_space_prefix=False)
