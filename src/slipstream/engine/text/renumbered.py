"""Tokenizers of folders whose pieces are SentencePiece's and whose ids are another's: OPUS-MT, M2M-100, mBART-50, Pegasus.

A text is cut by the pieces of one file. They are numbered by `vocab.json` (Marian's, M2M-100's), or come behind tokens of the
class (mBART-50's, Pegasus'). A piece without a number is unknown; a stretch of unknown characters is looked up as it stands, as
Marian's and M2M-100's classes do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken

from slipstream.engine.text import sentencepiece
from slipstream.errors import CheckpointError, RequestError, UnsupportedModelError
from slipstream.spec.description import read_json

M2M100 = (
    "af am ar ast az ba be bg bn br bs ca ceb cs cy da de el en es et fa ff fi fr fy ga gd gl gu ha he hi hr ht hu "
    "hy id ig ilo is it ja jv ka kk km kn ko lb lg ln lo lt lv mg mk ml mn mr ms my ne nl no ns oc or pa pl ps pt "
    "ro ru sd si sk sl so sq sr ss su sv sw ta th tl tn tr uk ur uz vi wo xh yi yo zh zu"
)
WMT21 = "en ha is ja cs ru zh de"
MBART50 = (
    "ar_AR cs_CZ de_DE en_XX es_XX et_EE fi_FI fr_XX gu_IN hi_IN it_IT ja_XX kk_KZ ko_KR lt_LT lv_LV my_MM ne_NP "
    "nl_XX ro_RO ru_RU si_LK tr_TR vi_VN zh_CN af_ZA az_AZ bn_IN fa_IR he_IL hr_HR id_ID ka_GE km_KH mk_MK ml_IN "
    "mn_MN mr_IN pl_PL ps_AF pt_XX sv_SE sw_KE ta_IN te_IN th_TH tl_XX uk_UA ur_PK xh_ZA gl_ES sl_SI"
)
"""Languages by id, as the classes of these names have them."""


class Numbered(NamedTuple):
    """Numbers of tokens, those among them that a text names as a whole, and the tokens around a text."""

    numbers: Mapping[str, int]
    specials: Sequence[str]
    prefix: Sequence[str] = ()
    suffix: Sequence[str] = ("</s>",)
    languages: Sequence[str] = ()  # >>fra<<: tokens where a text begins, nowhere else


class Encoding(NamedTuple):
    ids: list[int]
    type_ids: list[int]
    sequence_ids: list[int | None]


class Renumbered:
    """A `TokenizerBackend` with other ids."""

    def __init__(self, backend: tokenizers.Tokenizer, how: Numbered, unknown: str) -> None:
        backend.add_special_tokens(
            [AddedToken(token, special=True, normalized=False) for token in how.specials]
        )
        self._backend, self._how, self._numbers = backend, how, how.numbers
        self._names = {number: token for token, number in how.numbers.items()}
        self._unknown = how.numbers[unknown]
        self.around = [[how.numbers[token] for token in end] for end in (how.prefix, how.suffix)]
        self.decoder, self.normalizer = backend.decoder, backend.normalizer
        self.pre_tokenizer = backend.pre_tokenizer

    def encode(self, text: str, pair: str | None = None, *, add_special_tokens: bool) -> Encoding:
        given = text if pair is None else (text, pair)
        return self.encode_batch_fast([given], add_special_tokens=add_special_tokens)[0]

    def encode_batch_fast(
        self, texts: Sequence[Any], *, add_special_tokens: bool
    ) -> list[Encoding]:
        codes, rests = list[list[int]](), list[Any]()
        for text in texts:
            if not isinstance(text, str):
                message = "this tokenizer's class takes no pairs of texts"
                raise RequestError(message, field="prompt")
            named = self._how.languages and text.startswith(">>") and "<<" in text
            end = text.find("<<") + 2 if named else 0
            codes.append([self._number(text[:end])] if end else [])
            rests.append(text[end:])
        found = []
        for code, made in zip(codes, self._backend.encode_batch(rests), strict=True):
            ids = code + [self._number(token) for token in made.tokens]
            if add_special_tokens:
                ids = [*self.around[0], *ids, *self.around[1]]
            found.append(Encoding(ids, [0] * len(ids), [0] * len(ids)))
        return found

    def _number(self, token: str) -> int:
        return self._numbers.get(token, self._unknown)

    def token_to_id(self, token: str) -> int | None:
        return self._numbers.get(token)

    def id_to_token(self, number: int) -> str | None:
        return self._names.get(number)

    def get_vocab(self, with_added_tokens: bool = True) -> Mapping[str, int]:
        return self._numbers

    def get_vocab_size(self, with_added_tokens: bool = True) -> int:
        return max(self._names) + 1

    def get_added_tokens_decoder(self) -> dict[int, AddedToken]:
        found = {t: AddedToken(t, special=True, normalized=False) for t in self._how.specials}
        # no seams of texts, at which `KnownBeginnings` cuts
        found |= {t: AddedToken(t, special=True, lstrip=True) for t in self._how.languages}
        return {self._numbers[t]: token for t, token in found.items()}

    def to_str(self) -> str:
        raise UnsupportedModelError(
            "a tokenizer with numbers of its own can't be written as a tokenizer.json; copy the folder's files",
            field="tokenizer",
        )


FILES = {
    "MarianTokenizer": "source.spm",
    "M2M100Tokenizer": "sentencepiece.bpe.model",
    "MBart50Tokenizer": "sentencepiece.bpe.model",
    "PegasusTokenizer": "spiece.model",
}
"""The file of pieces of each class."""
_KINDS = {"marian": "Marian", "m2m_100": "M2M100", "pegasus": "Pegasus"}


def class_of(path: Path, config: Mapping[str, Any], model: Mapping[str, Any]) -> str | None:
    """The class of a folder's tokenizer, if it is one of these, and the folder has its file."""
    named = config.get("tokenizer_class") or model.get("tokenizer_class") or ""
    kind = str(named).removesuffix("Fast")
    if not kind and (by_model := _KINDS.get(str(model.get("model_type")))):
        kind = f"{by_model}Tokenizer"
    return kind if kind in FILES and (path / FILES[kind]).is_file() else None


def read(path: Path, kind: str, config: Mapping[str, Any]) -> tuple[Renumbered, dict[str, str]]:
    """The tokenizer of a class, and the texts of its special tokens."""
    pieces = sentencepiece.pieces_of(path / FILES[kind])
    texts = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    if kind == "MarianTokenizer":
        if config.get("separate_vocabs") is True:
            message = (
                f"{path}: separate_vocabs=True, two vocabularies of one model, is not supported"
            )
            raise UnsupportedModelError(message, field="separate_vocabs")
        how = _marian(path)
    elif kind == "M2M100Tokenizer":
        how = _m2m100(path, config)
    elif kind == "MBart50Tokenizer":
        how = _mbart50(pieces.tokens, config)
    else:
        how, texts["mask_token"] = _pegasus(pieces.tokens, config), "<mask_2>"
    if kind in ("M2M100Tokenizer", "MBart50Tokenizer"):
        texts["bos_token"] = "<s>"
    if missing := [t for t in (*texts.values(), *how.prefix, *how.suffix) if t not in how.numbers]:
        raise CheckpointError(
            f"{path}: the vocabulary lacks {', '.join(missing)}", field="tokenizer"
        )
    return Renumbered(sentencepiece.build_pieces(path / FILES[kind], pieces), how, "<unk>"), texts


def _vocab(path: Path) -> dict[str, int]:
    file = path / "vocab.json"
    if not file.is_file():
        message = f"{path} has a file of pieces, and no vocab.json with their numbers"
        raise CheckpointError(message, field="vocab.json")
    vocab = read_json(file)
    numbers = [n for n in vocab.values() if type(n) is int and 0 <= n < 2**31]
    if len(numbers) < len(vocab) or len(set(numbers)) < len(numbers) or not vocab:
        message = f"{file}: its values are not different numbers of tokens"
        raise CheckpointError(message, field="vocab.json")
    return vocab


def _marian(path: Path) -> Numbered:
    numbers = _vocab(path)
    languages = [t for t in numbers if t.startswith(">>") and t.endswith("<<")]
    specials = [t for t in ("</s>", "<unk>", "<pad>") if t in numbers]
    return Numbered(numbers, specials, languages=languages)


def _source(config: Mapping[str, Any], codes: Sequence[str], default: str) -> str:
    found = config.get("src_lang") or default
    if found not in codes:
        message = f"src_lang={found!r} is none of the tokenizer's {len(codes)} languages"
        raise UnsupportedModelError(message, field="src_lang")
    return str(found)


def _m2m100(path: Path, config: Mapping[str, Any]) -> Numbered:
    lists = {"m2m100": M2M100.split(), "wmt21": WMT21.split()}
    named = config.get("language_codes") or "m2m100"
    if named not in lists:
        message = f"language_codes={named!r} is none of {', '.join(lists)}"
        raise UnsupportedModelError(message, field="language_codes")
    codes, numbers = lists[named], _vocab(path)
    languages = [f"__{code}__" for code in codes]
    numbers |= {token: len(numbers) + i for i, token in enumerate(languages)}
    if len(set(numbers.values())) < len(numbers):
        message = (
            f"{path / 'vocab.json'}: its numbers have gaps, where languages' numbers would fall"
        )
        raise CheckpointError(message, field="vocab.json")
    prefix = (f"__{_source(config, codes, 'en')}__",)
    specials = [t for t in ("<s>", "<pad>", "</s>", "<unk>") if t in numbers]
    return Numbered(numbers, [*specials, *languages], prefix=prefix)


def _mbart50(tokens: Sequence[str], config: Mapping[str, Any]) -> Numbered:
    """fairseq's order: four tokens, the pieces but their first three, languages, <mask>."""
    codes, first = MBART50.split(), ("<s>", "<pad>", "</s>", "<unk>")
    ordered = (*first, *tokens[3:], *codes, "<mask>")
    numbers = {token: i for i, token in enumerate(ordered)}
    prefix = (_source(config, codes, "en_XX"),)
    return Numbered(numbers, [*first, *codes, "<mask>"], prefix=prefix)


def _pegasus(tokens: Sequence[str], config: Mapping[str, Any]) -> Numbered:
    """<pad>, </s>, two masks and as many <unk_N> as `offset` leaves room for; then the pieces but their first two."""
    offset = config.get("offset", 103)
    if type(offset) is not int or not 3 <= offset <= 10_000:
        message = f"tokenizer_config.json: offset = {offset!r} is no number from 3 to 10,000"
        raise UnsupportedModelError(message, field="offset")
    first = ("<pad>", "</s>", "<mask_1>", "<mask_2>", *(f"<unk_{i}>" for i in range(2, offset)))
    numbers = {token: i for i, token in enumerate((*first, *tokens[2:]))}
    return Numbered(numbers, [*first, "<unk>"])
