"""The tokenizer inside a GGUF file, rebuilt from its own fields.

Models with byte-level BPE (`gpt2`) differ in how text is split before merging. `tokenizer.ggml.pre` names the way, and
the table below describes it. Without that field ids would be wrong: SmolLM2, for example, separates digits. The table
follows llama.cpp's llama-vocab.cpp, or the models' own tokenizer.json where llama.cpp only approximates it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from slipstream.engine.text import sentencepiece
from slipstream.engine.text.sentencepiece import Kind
from slipstream.engine.text.tiktoken import (
    CASED_END,
    CL100K,
    CONTRACTIONS,
    LOWER,
    TEKKEN,
    UPPER,
    WORDS_END,
)
from slipstream.engine.text.tokenizer_parts import (
    SpecialTokens,
    TokenizerParts,
    check_steps,
    reading,
)
from slipstream.errors import CheckpointError, UnsupportedModelError
from slipstream.spec.stored.gguf import GGUFFile
from slipstream.spec.stored.gguf_ends import DEFAULT_EOS, END_NAMES, NUMBERED, end_tokens
from slipstream.spec.stored.gguf_parts import model_files


@dataclass(frozen=True, slots=True)
class Split:
    """How a byte-level model splits text before merging: each pattern splits the pieces that the previous ones left.

    `whole_tokens`: a piece that is itself a token becomes that token without merging. `add_bos` and `add_eos`: whether
    BOS and EOS are added, if the file does not say.
    """

    patterns: tuple[str, ...]
    whole_tokens: bool = False
    add_bos: bool = False
    add_eos: bool = False


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_QWEN2 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + WORDS_END
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}|{CASED_END}"
)
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_SPLITS: dict[tuple[str, ...], Split] = {
    (
        "gpt-2",
        "phi-2",
        "mpt",
        "olmo",
        "jais",
        "gigachat",
        "mellum",
        "exaone4",
        "trillion",
        "modern-bert",
    ): Split((_GPT2,)),
    ("roberta-bpe",): Split(
        (_GPT2,), add_bos=True, add_eos=True
    ),  # old files don't say so, but these models always use <s> … </s>
    ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"): Split(
        (r"\p{N}", _GPT2)
    ),
    ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2"): Split(
        (CL100K,), whole_tokens=True, add_bos=True
    ),
    ("dbrx", "smaug-bpe", "chatglm-bpe"): Split((CL100K,)),
    ("glm4",): Split((CL100K,), whole_tokens=True),
    ("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez", "hunyuan", "grok-2"): Split((_QWEN2,)),
    ("tekken",): Split((TEKKEN,), whole_tokens=True, add_bos=True),
    ("gpt-4o", "llama4"): Split((_GPT4O,)),
    ("deepseek-v3", "hunyuan-dense"): Split((r"\p{N}{1,3}", r"[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK3)),
    ("deepseek-coder",): Split(
        (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}")
    ),
    ("falcon",): Split((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")),
    ("bloom", "poro-chat", "gpt3-finnish"): Split((r" ?[^(\s|.,!?…。，、।۔،)]+",)),
    ("viking",): Split((r" ?[^(\s|.,!?…。，、।۔،)]+", r"\p{N}")),
    ("default",): Split((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
}
SPLITS = {name: split for names, split in _SPLITS.items() for name in names}
"""Splits by their name in `tokenizer.ggml.pre`."""


def read(file: GGUFFile) -> TokenizerParts:
    """Read the tokenizer of a GGUF file. CheckpointError or UnsupportedModelError if that is not possible."""
    with reading(file.path):
        return _read(file)


def _read(file: GGUFFile) -> TokenizerParts:
    path, fields = file.path, _Fields(file.metadata, file.path)
    kind = fields.get("model", str, None)
    tokens = fields.array("tokens", str)
    if not all(tokens):
        tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(tokens)]
    if not tokens:
        raise CheckpointError(f"{path} carries no tokenizer", field="tokenizer.ggml.tokens")
    if len(set(tokens)) < len(tokens):
        twice = next(t for t, n in Counter(tokens).items() if n > 1)
        raise CheckpointError(
            f"{path}: the token {twice!r} stands in the vocabulary twice",
            field="tokenizer.ggml.tokens",
        )
    kinds = fields.array("token_type", int, len(tokens)) or [int(Kind.NORMAL)] * len(tokens)
    numbered = {name: fields.token_id(name, None, len(tokens)) for name in NUMBERED}
    ends = tuple(i for i in end_tokens(file.metadata) if i < len(tokens))
    # an end token by its name, whatever its type says: this text always means the token
    for i in ends:
        kinds[i] = int(Kind.CONTROL) if tokens[i] in END_NAMES else kinds[i]
    add_eos = False
    if kind == "gpt2":
        pre = fields.get("pre", str, "default")
        if pre not in SPLITS:
            raise UnsupportedModelError(
                f"tokenizer.ggml.pre = {pre!r} is not known; {', '.join(SPLITS)} are. Pass tokenizer=PATH of the "
                "model's Hugging Face folder",
                field="tokenizer.ggml.pre",
            )
        bos = None
        add_bos, add_eos = SPLITS[pre].add_bos, SPLITS[pre].add_eos
        backend = _byte_level(fields, tokens, kinds, SPLITS[pre])
    elif kind == "llama":
        bos, add_bos = 1, True  # SentencePiece's defaults, for files that don't say
        scores = fields.array("scores", float, len(tokens))
        if not scores:
            raise CheckpointError(
                f"{path} lacks tokenizer.ggml.scores", field="tokenizer.ggml.scores"
            )
        prefix = fields.get("add_space_prefix", bool, True)
        backend = sentencepiece.build(tokens, scores, kinds, add_space_prefix=prefix)
    elif kind == "gemma4":  # SentencePiece's spelling, with merges instead of scores
        bos, add_bos = 2, True
        merges = [line.partition(" ")[::2] for line in fields.array("merges", str)]
        with reading(path, "tokenizer.ggml.merges"):
            backend = sentencepiece.build(
                tokens, (), kinds, add_space_prefix=False, merges=[(a, b) for a, b in merges]
            )
    elif kind == "t5":
        bos, add_bos, add_eos = None, False, True  # llama.cpp's defaults, for files that don't say
        charsmap = bytes(n & 255 for n in fields.array("precompiled_charsmap", int))
        scores = fields.array("scores", float, len(tokens))
        if not scores or int(Kind.UNKNOWN) not in kinds:
            raise CheckpointError(
                f"{path} lacks scores or the unknown token of its vocabulary",
                field="tokenizer.ggml.scores",
            )
        prefix, cleaned = (
            fields.get(k, bool, True) for k in ("add_space_prefix", "remove_extra_whitespaces")
        )
        backend = sentencepiece.unigram(
            tokens, scores, kinds, charsmap, add_prefix=prefix, remove_extra=cleaned
        )
        check_steps(backend, path)
    elif kind == "bert":
        return _wordpiece(fields, tokens)
    else:
        raise UnsupportedModelError(
            f"tokenizer.ggml.model = {kind!r} is not supported; gpt2, llama, gemma4, t5 and bert are",
            field="tokenizer.ggml.model",
        )
    bos = fields.token_id("bos", bos, len(tokens))
    eos = DEFAULT_EOS.get(kind) if numbered["eos"] is None else numbered["eos"]
    ids = {
        name: fields.token_id(key, None, len(tokens))
        for name, key in (("unk", "unknown"), ("pad", "padding"))
    }
    special = SpecialTokens(
        bos_id=bos,
        eos_ids=ends,
        prefix=(bos,) if bos is not None and fields.get("add_bos_token", bool, add_bos) else (),
        suffix=(eos,) if eos is not None and fields.get("add_eos_token", bool, add_eos) else (),
        texts={
            f"{name}_token": tokens[i]
            for name, i in {"bos": bos, "eos": eos, **ids}.items()
            if i is not None
        },
    )
    templates = {"default": fields.metadata.get("tokenizer.chat_template")}
    named = "tokenizer.chat_template."
    for key in fields.metadata:
        if key.startswith(named):
            templates[key.removeprefix(named)] = fields.metadata[key]
    own = path.with_name("chat_template.jinja")
    # next to several models it could belong to any of them
    if own.is_file() and len(model_files(path.parent)) == 1:
        templates = {"default": own.read_text(encoding="utf-8")}
    return TokenizerParts(
        backend, special, {k: v for k, v in templates.items() if isinstance(v, str)}
    )


def _wordpiece(fields: _Fields, tokens: list[str]) -> TokenizerParts:
    """Reads a BERT WordPiece model. The file marks tokens that begin a word with ▁, instead of
    marking others with ##. If it doesn't say whether text is lowercased, it is lowercased when no
    token has a capital letter. Accents are then stripped, too, unless the file says otherwise."""
    named = [t.startswith("[") and t.endswith("]") for t in tokens]
    words = [
        t if whole else t.removeprefix("▁") if t.startswith("▁") else f"##{t}"
        for t, whole in zip(tokens, named, strict=True)
    ]
    ids = {
        name: fields.token_id(name, None, len(tokens))
        for name in ("cls", "seperator", "unknown", "padding", "mask")
    }
    ids["cls"] = fields.token_id("bos", None, len(tokens)) if ids["cls"] is None else ids["cls"]
    if ids["cls"] is None or ids["seperator"] is None or ids["unknown"] is None:
        raise CheckpointError(
            f"{fields.path} does not name its CLS, SEP and UNK tokens",
            field="tokenizer.ggml.cls_token_id",
        )
    vocab = {word: i for i, word in enumerate(words)}
    backend = tokenizers.Tokenizer(
        models.WordPiece(vocab, unk_token=words[ids["unknown"]], max_input_chars_per_word=100)
    )
    small = not any(
        word != word.lower() for word, whole in zip(words, named, strict=True) if not whole
    )
    small = fields.get("normalizer.lowercase", bool, small)
    backend.normalizer = normalizers.BertNormalizer(
        lowercase=small, strip_accents=fields.get("normalizer.strip_accents", bool, small)
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=False)
    special = sorted({i for i in ids.values() if i is not None})
    backend.add_special_tokens([words[i] for i in special])
    texts = {"cls": "cls", "sep": "seperator", "unk": "unknown", "pad": "padding", "mask": "mask"}
    return TokenizerParts(
        backend,
        SpecialTokens(
            bos_id=None,
            eos_ids=(),
            prefix=(ids["cls"],),
            suffix=(ids["seperator"],),
            texts={
                f"{name}_token": words[i]
                for name, key in texts.items()
                if (i := ids[key]) is not None
            },
        ),
        {},
    )


def _byte_level(
    fields: _Fields, tokens: list[str], kinds: list[int], split: Split
) -> tokenizers.Tokenizer:
    merges = [line.partition(" ")[::2] for line in fields.array("merges", str)]
    vocab = dict(zip(tokens, range(len(tokens)), strict=True))
    with reading(fields.path, "tokenizer.ggml.merges"):
        backend = tokenizers.Tokenizer(
            models.BPE(vocab=vocab, merges=merges, ignore_merges=split.whole_tokens)
        )
    cuts = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in split.patterns]
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, spell])
    backend.decoder = decoders.ByteLevel()
    sentencepiece.add_tokens(backend, tokens, kinds)
    return backend


@dataclass(frozen=True, slots=True)
class _Fields:
    """Metadata under tokenizer.ggml, with types checked. CheckpointError names a wrong field."""

    metadata: Mapping[str, Any]
    path: Path

    def get(self, name: str, kind: type, default: Any) -> Any:
        value = self.metadata.get(f"tokenizer.ggml.{name}", default)
        if value is not default and type(value) is not kind:
            raise self._error(name, f"is not of type {kind.__name__}")
        return value

    def array(self, name: str, kind: type, length: int | None = None) -> list[Any]:
        """The field's array, which must have `length` entries; empty if the field is missing."""
        value = self.get(name, list, None) or []
        if not set(map(type, value)) <= {kind, int if kind is float else kind}:
            raise self._error(name, f"is not made of {kind.__name__}")
        if length is not None and len(value) not in (0, length):
            raise self._error(name, f"has {len(value)} entries for {length} tokens")
        return value

    def token_id(self, name: str, default: int | None, num_tokens: int) -> int | None:
        value: int | None = self.get(f"{name}_token_id", int, default)
        if value is not None and not 0 <= value < num_tokens:
            raise self._error(f"{name}_token_id", f"is {value}, and there are {num_tokens} tokens")
        return value

    def _error(self, name: str, problem: str) -> CheckpointError:
        key = f"tokenizer.ggml.{name}"
        return CheckpointError(f"{self.path}: {key} {problem}", field=key)
