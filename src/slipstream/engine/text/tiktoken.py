"""tiktoken's vocabularies: a file with one token per line, as base64 bytes and rank (tokenizer.model of Llama 3 and GLM-4).

The rank is the token's id and its merge priority: the adjacent pair whose union has the lowest rank is merged first. So a
token has one merge: of the two parts to which tokens of lower rank reduce its bytes. A token that they leave in more parts
is only produced when it is a whole piece of text, which tiktoken looks up before merging (`ignore_merges`).

The file does not say how a text is split into pieces, nor which tokens are special. The split is known for the tokenizer
classes below; special tokens are in tokenizer_config.json (`added_tokens_decoder`).
"""

from __future__ import annotations

import binascii
import re
from base64 import b64decode
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers

from slipstream.errors import CheckpointError, UnsupportedModelError

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORDS_END = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CL100K = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + WORDS_END
"""Split pattern of OpenAI's vocabulary cl100k, also used by Llama 3 and GLM-4."""

PREFIXES = {
    "ChatGLM4Tokenizer": ("[gMASK]", "<sop>"),
    "PreTrainedTokenizerFast": ("<|begin_of_text|>",),
}
"""Tokens that precede every text, by `tokenizer_class`: GLM-4's, and the one that Llama 3's folders
name. Both classes split texts by CL100K."""

MAX_SQUARES = 2**27
"""Maximum sum of the squared lengths of all tokens. Vocabularies of 256,000 tokens have about
2**24."""


def is_tiktoken(path: Path) -> bool:
    """Whether a tokenizer.model is in tiktoken's format. SentencePiece's files of that name begin
    with a control character."""
    with path.open("rb") as file:
        return re.match(rb"[A-Za-z0-9+/]+={0,2} [0-9]+\s", file.read(1024)) is not None


def from_file(path: Path, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Reads a tokenizer's file. `config` is tokenizer_config.json. UnsupportedModelError for a
    class whose split pattern is unknown."""
    kind = config.get("tokenizer_class")
    if kind not in PREFIXES:
        raise UnsupportedModelError(
            f"{path} is a tiktoken file for a {kind}, and does not say how that cuts texts; {', '.join(PREFIXES)} are known; "
            "pass tokenizer=PATH of a folder with a tokenizer.json",
            field="tokenizer_class",
        )
    ranks = read(path)
    check_lengths(ranks)
    spell = spelling()
    names = {token: "".join(spell[b] for b in token) for token in ranks}
    parts = [join(token, ranks) for token in sorted(ranks, key=ranks.__getitem__)]
    merges = [(names[p[0]], names[p[1]]) for p in parts if len(p) == 2]
    vocab = {names[token]: rank for token, rank in ranks.items()}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=True))
    cut = pre_tokenizers.Split(Regex(CL100K), behavior="isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def read(path: Path) -> dict[bytes, int]:
    """Read each token's rank. CheckpointError if the ranks are not 0, 1, 2, … or a single byte has
    none."""
    ranks: dict[bytes, int] = {}
    try:
        for line in path.read_bytes().splitlines():
            if line:
                token, rank = line.split()
                ranks[b64decode(token, validate=True)] = int(rank)
    except (ValueError, binascii.Error) as error:
        raise CheckpointError(
            f"{path} can't be read as a tiktoken file: {error}", field=path.name
        ) from error
    if sorted(ranks.values()) != list(range(len(ranks))) or any(
        bytes([b]) not in ranks for b in range(256)
    ):
        raise CheckpointError(
            f"{path}: ranks are missing or twice there, or a byte is no token", field=path.name
        )
    return ranks


def check_lengths(tokens: Collection[str | bytes]) -> None:
    """Raise CheckpointError if tokens are so long that computing their merges would take minutes: a
    merge takes time proportional to the square of its token's length."""
    if sum(len(token) ** 2 for token in tokens) > MAX_SQUARES:
        raise CheckpointError(
            f"the tokenizer's tokens are too long: the longest has {max(map(len, tokens))} characters",
            field="tokens",
        )


def join(token: bytes, ranks: Mapping[bytes, int]) -> list[bytes]:
    """The parts of a token's bytes after all merges of lower rank. A single byte is its own
    part."""
    parts, least = [token[i : i + 1] for i in range(len(token))], ranks[token]
    while len(parts) > 1:
        found = [(ranks.get(parts[i] + parts[i + 1], least), i) for i in range(len(parts) - 1)]
        rank, at = min(found)
        if rank >= least:
            break
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts


def spelling() -> dict[int, str]:
    """The printable character that represents each byte in byte-level BPE (Radford et al. 2019)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = sorted(set(range(256)) - set(printable))
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}
