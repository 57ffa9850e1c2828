"""tiktoken's vocabularies: a file with one token per line, as base64 bytes and rank (tokenizer.model of Llama 3 and GLM-4).

The rank is the token's id, and the order in which neighbours are joined: of all that spell a token together, those of the
least rank first. So a token's merges are all its cuts into two others, of which a text meets the one that the tokens before it
leave. One that they leave in more parts is met only as a whole piece of text, which tiktoken looks up before it joins anything
(`ignore_merges`).

The file does not say how a text is split into pieces, nor which tokens are special. The split is known for the tokenizer
classes below; special tokens are in tokenizer_config.json (`added_tokens_decoder`).
"""

from __future__ import annotations

import binascii
import re
from base64 import b64decode
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers

from slipstream.errors import CheckpointError, UnsupportedModelError

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORDS_END = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CL100K = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + WORDS_END
"""The pattern of OpenAI's vocabulary of that name, which Llama 3 and GLM-4 took over."""
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CASED_END = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEKKEN = rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*|\p{{N}}|{CASED_END}"
"""Mistral's pattern, which cuts words where small letters end."""

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
    return build(ranks, CL100K)


def build(
    ranks: Mapping[bytes, int], pattern: str, *, before: Sequence[str] = ()
) -> tokenizers.Tokenizer:
    """A tokenizer that cuts texts by a pattern and joins by ranks. Tokens `before` have the first ids, in place of ranks."""
    check_lengths(ranks)
    spell = spelling()
    names = {token: "".join(spell[b] for b in token) for token in ranks}
    merges = [
        (names[token[:cut]], names[token[cut:]])
        for token in sorted(ranks, key=ranks.__getitem__)
        for cut in range(1, len(token))
        if token[:cut] in names and token[cut:] in names
    ]
    vocab = {token: i for i, token in enumerate(before)}
    vocab |= {names[token]: len(before) + rank for token, rank in ranks.items()}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=True))
    cut_texts = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [cut_texts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
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


def spelling() -> dict[int, str]:
    """The printable character that represents each byte in byte-level BPE (Radford et al. 2019)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = sorted(set(range(256)) - set(printable))
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}
