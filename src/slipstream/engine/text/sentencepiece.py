"""SentencePiece's vocabularies, from a tokenizer.model or from a GGUF file's fields.

They hold scores in place of merges: the neighbours whose union scores best are joined first. That is byte-pair merging
in the order of scores, so the merges are every way to cut a token into two others, best token first. Limits: of unigram models
those without bytes (T5, Marian); others are refused by name.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from slipstream.engine.text.tiktoken import check_lengths
from slipstream.errors import CheckpointError, UnsupportedModelError


class Kind(IntEnum):
    """Type of a token. The values are those of SentencePiece and GGUF."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def build(
    tokens: Sequence[str],
    scores: Sequence[float],
    kinds: Sequence[int],
    *,
    add_space_prefix: bool,
    merges: list[tuple[str, str]] | None = None,
) -> tokenizers.Tokenizer:
    """Builds the tokenizer. If given, `merges` are used instead of the scores."""
    check_lengths(tokens)
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = _by_scores(tokens, scores, kinds, vocab) if merges is None else merges
    unknown = next(
        (token for token, kind in zip(tokens, kinds, strict=True) if kind == Kind.UNKNOWN), None
    )
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=merges,
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=Kind.BYTE in kinds,
        )
    )
    prefix = [normalizers.Prepend("▁")] if add_space_prefix else []
    backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if add_space_prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    add_tokens(backend, tokens, kinds)
    return backend


def _by_scores(
    tokens: Sequence[str], scores: Sequence[float], kinds: Sequence[int], vocab: Mapping[str, int]
) -> list[tuple[str, str]]:
    mergeable = {Kind.NORMAL, Kind.USER_DEFINED, Kind.UNUSED}
    merges: list[tuple[float, int, int]] = []
    for i, token in enumerate(tokens):
        if kinds[i] in mergeable:
            for cut in range(1, len(token)):
                left, right = vocab.get(token[:cut]), vocab.get(token[cut:])
                if left is not None and right is not None:
                    merges.append((-scores[i], left, right))
    merges.sort()
    return [(tokens[left], tokens[right]) for _, left, right in merges]


def add_tokens(backend: tokenizers.Tokenizer, tokens: Sequence[str], kinds: Sequence[int]) -> None:
    """Registers the tokens whose text always means that token, wherever it occurs in a text. All but the user-defined ones
    are special."""
    # hashing ints is faster than hashing a Kind
    whole = {int(kind) for kind in (Kind.CONTROL, Kind.UNKNOWN, Kind.USER_DEFINED)}
    backend.add_tokens(
        [
            AddedToken(token, special=kind != Kind.USER_DEFINED, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind in whole
        ]
    )


class Pieces(NamedTuple):
    """A model file: tokens by id, and the fields of its trainer and normaliser by number. Of the normaliser {2: precompiled
    character map, 3: add_dummy_prefix, 4: remove_extra_whitespaces}."""

    tokens: list[str]
    scores: list[float]
    kinds: list[int]
    trainer: dict[int, Any]
    normalizer: dict[int, Any]


def pieces_of(path: Path) -> Pieces:
    """Read SentencePiece's model file, a protocol buffer: ModelProto{1: pieces, 2: trainer, 3:
    normaliser}."""
    found = Pieces([], [], [], {}, {})
    try:
        for number, value in _fields(path.read_bytes()):
            if number == 1:
                piece = dict(_fields(value))  # {1: text, 2: score, 3: kind}
                found.tokens.append(piece[1].decode())
                found.scores.append(struct.unpack("<f", piece[2])[0] if 2 in piece else 0.0)
                found.kinds.append(piece.get(3, Kind.NORMAL))
            elif number == 2:
                found.trainer.update(_fields(value))
            elif number == 3:
                found.normalizer.update(_fields(value))
    except (
        OSError,
        ValueError,
        KeyError,
        IndexError,
        TypeError,
        AttributeError,
        struct.error,
    ) as error:
        raise CheckpointError(
            f"{path} can't be read as a SentencePiece model: {error}", field=path.name
        ) from error
    return found


def from_file(path: Path) -> tokenizers.Tokenizer:
    return build_pieces(path, pieces_of(path))


def build_pieces(path: Path, pieces: Pieces) -> tokenizers.Tokenizer:
    """The tokenizer of a file's pieces. UnsupportedModelError if the file is of another kind."""
    tokens, scores, kinds, trainer, normalizer = pieces
    # model_type: unigram
    if trainer.get(3, 1) == 1 and kinds.count(Kind.UNKNOWN) == 1 and Kind.BYTE not in kinds:
        prefix, cleaned = bool(normalizer.get(3, 1)), bool(normalizer.get(4, 1))
        return unigram(
            tokens, scores, kinds, normalizer.get(2) or b"", add_prefix=prefix, remove_extra=cleaned
        )
    if trainer.get(3, 1) != 2:  # BPE
        raise UnsupportedModelError(
            f"{path} is neither a BPE model nor a unigram model without bytes; pass tokenizer=PATH of a folder with a "
            "tokenizer.json",
            field=path.name,
        )
    backend = build(tokens, scores, kinds, add_space_prefix=bool(normalizer.get(3, 1)))
    steps = _cleaning(normalizer.get(2) or b"", remove_extra=bool(normalizer.get(4, 1)))
    backend.normalizer = normalizers.Sequence([*steps, backend.normalizer])
    return backend


def _cleaning(charsmap: bytes, *, remove_extra: bool) -> list[Any]:
    """Steps of SentencePiece's normaliser before spaces are written as pieces have them."""
    steps: list[Any] = [normalizers.Precompiled(charsmap)] if charsmap else []
    if remove_extra:
        steps += [normalizers.Strip(), normalizers.Replace(tokenizers.Regex(" {2,}"), " ")]
    return steps


def unigram(
    tokens: list[str],
    scores: list[float],
    kinds: list[int],
    charsmap: bytes,
    *,
    add_prefix: bool,
    remove_extra: bool,
) -> tokenizers.Tokenizer:
    """Builds a unigram tokenizer (Kudo 2018), which chooses the most likely segmentation. `charsmap` is SentencePiece's
    precompiled character map; `add_prefix` and `remove_extra` are its add_dummy_prefix and remove_extra_whitespaces."""
    known = list(zip(tokens, scores, strict=True))
    backend = tokenizers.Tokenizer(
        models.Unigram(known, unk_id=kinds.index(Kind.UNKNOWN), byte_fallback=False)
    )
    backend.normalizer = normalizers.Sequence(_cleaning(charsmap, remove_extra=remove_extra))
    scheme: Any = "always" if add_prefix else "never"
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme)
    backend.decoder = decoders.Metaspace(replacement="▁", prepend_scheme=scheme)
    add_tokens(backend, tokens, kinds)
    return backend


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yields (field number, value) of a protocol buffer: an int, or the bytes of a fixed-size or length-delimited field."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        match tag & 7:
            case 0:
                value, at = _varint(data, at)
                yield tag >> 3, value
                continue
            case 1:
                length = 8
            case 2:
                length, at = _varint(data, at)
            case 5:
                length = 4
            case kind:
                raise ValueError(f"wire type {kind}")
        if length > len(data) - at:
            raise ValueError("cut off")
        yield tag >> 3, data[at : at + length]
        at += length


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (data[at] & 127) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 128:
            return value, at
        if shift > 63:
            raise ValueError("number too long")
