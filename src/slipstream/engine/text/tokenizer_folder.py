"""The tokenizer of a Hugging Face folder: tokenizer.json, Mistral's tekken.json, or the files that the older classes of
transformers have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from slipstream.engine.text import renumbered, sentencepiece, tekken, tiktoken
from slipstream.engine.text.tokenizer_parts import (
    SpecialTokens,
    TokenizerParts,
    check_steps,
    reading,
)
from slipstream.errors import CheckpointError, UnsupportedModelError
from slipstream.spec.description import read_json

FILES = (
    "tokenizer.json",
    "vocab.json",
    "tokenizer.model",
    "spiece.model",
    "vocab.txt",
    tekken.FILE,
    "config.json",
)
TEMPLATES_FOLDER = "additional_chat_templates"
"""Folder in which transformers stores named templates."""
_GPT2_END = "<|endoftext|>"


def read(path: Path) -> TokenizerParts:
    """Read the tokenizer of a folder. CheckpointError or UnsupportedModelError if that is not possible."""
    with reading(path):
        return _read(path)


def _read(path: Path) -> TokenizerParts:
    config = {
        **_optional(path / "special_tokens_map.json"),
        **_optional(path / "tokenizer_config.json"),
    }
    generation, model = _optional(path / "generation_config.json"), _optional(path / "config.json")
    mistral: tekken.Tekken | None = None
    if (path / tekken.FILE).is_file() and not (path / "tokenizer.json").is_file():
        mistral = tekken.from_file(path / tekken.FILE)
        config = {**mistral.texts, "add_bos_token": True, **config}
    kind = renumbered.class_of(path, config, model)
    if kind is not None and not (path / "tokenizer.json").is_file():
        return _renumbered(path, kind, config, (generation, model))
    backend = mistral.backend if mistral else _backend(path, config)
    check_steps(backend, path)  # before the first text is encoded, which is below
    backend.no_truncation()
    backend.no_padding()
    if not (path / "tokenizer.json").is_file() and backend.token_to_id(_GPT2_END) is not None:
        config = {"bos_token": _GPT2_END, "eos_token": _GPT2_END, "unk_token": _GPT2_END, **config}
    _add_tokens(
        backend, {str(i): {"content": t} for t, i in _optional(path / "added_tokens.json").items()}
    )
    _add_tokens(backend, config.get("added_tokens_decoder") or {})
    _mark_special(backend, config)

    texts = {
        key: text
        for key, value in config.items()
        if key.endswith("_token") and (text := _text(value))
    }
    ids = {key: backend.token_to_id(text) for key, text in texts.items()}
    # GPT-2's folder has them as ids in the model's config
    for key in ("bos_token", "eos_token"):
        if ids.get(key) is None and (found := _ids([model.get(f"{key}_id")])):
            ids[key] = found[0]
            texts[key] = backend.id_to_token(found[0]) or ""
    prefix, suffix = _surroundings(backend, config, ids)
    special = SpecialTokens(
        bos_id=ids.get("bos_token"),
        eos_ids=_ids(
            [ids.get("eos_token"), generation.get("eos_token_id"), model.get("eos_token_id")]
        ),
        prefix=prefix,
        suffix=suffix,
        texts=texts,
    )
    templates = _chat_templates(path, config)
    if mistral and not templates:
        templates = {"default": mistral.chat_template}
    return TokenizerParts(backend, special, templates)


def _renumbered(
    path: Path, kind: str, config: Mapping[str, Any], more: Sequence[Mapping[str, Any]]
) -> TokenizerParts:
    backend, texts = renumbered.read(path, kind, config)
    check_steps(backend, path)
    prefix, suffix = (tuple(ids) for ids in backend.around)
    special = SpecialTokens(
        bos_id=backend.token_to_id("<s>") if "bos_token" in texts else None,
        eos_ids=_ids([backend.token_to_id("</s>"), *(found.get("eos_token_id") for found in more)]),
        prefix=prefix,
        suffix=suffix,
        texts=texts,
    )
    return TokenizerParts(backend, special, {})


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _backend(path: Path, config: dict[str, Any]) -> tokenizers.Tokenizer:
    """Builds the backend from the folder's tokenizer files. Defaults of the tokenizer's class are
    added to `config` where it lacks them."""
    if (path / "tokenizer.json").is_file():
        with reading(path / "tokenizer.json"):
            return tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    if (path / "vocab.json").is_file() and (path / "merges.txt").is_file():
        return _gpt2_backend(path, config)
    if (path / "tokenizer.model").is_file():
        return _model_backend(path / "tokenizer.model", config)
    if (path / "spiece.model").is_file():
        return _t5_backend(path, config)
    if (path / "vocab.txt").is_file():
        return _bert_backend(path, config)
    raise UnsupportedModelError(
        f"{path} has no tokenizer.json; pass tokenizer=PATH of a folder that has one, or skip_tokenizer_init",
        field="tokenizer",
    )


_LLAMAS = ("LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer")
_CHATGLM = (
    "[MASK]",
    "[gMASK]",
    "[sMASK]",
    "sop",
    "eop",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
)
"""Tokens that ChatGLM 2 and 3 add after their pieces. Only ChatGLM 3 uses the role tokens."""


def _model_backend(file: Path, config: dict[str, Any]) -> tokenizers.Tokenizer:
    """Builds the backend from tokenizer.model (SentencePiece's or tiktoken's), with the prefix
    tokens of its class."""
    if tiktoken.is_tiktoken(file):
        backend = tiktoken.from_file(file, config)
        prefix = tiktoken.PREFIXES[config["tokenizer_class"]]
        _add_tokens(backend, config.get("added_tokens_decoder") or {})
    else:
        kind = config.get("tokenizer_class")
        if kind is not None:  # other classes may split or surround text differently
            _require_class(file.parent, config, file.name, *_LLAMAS, "ChatGLMTokenizer")
        backend, prefix = sentencepiece.from_file(file), ()
        if kind == "ChatGLMTokenizer":
            prefix = ("[gMASK]", "sop")
            backend.add_tokens(
                [
                    AddedToken(t, special=True, single_word=t.isalpha(), normalized=False)
                    for t in _CHATGLM
                ]
            )
        elif kind is not None:
            config.setdefault("add_bos_token", True)
    ids = [backend.token_to_id(token) for token in prefix]
    if None in ids:
        raise CheckpointError(
            f"{file} has no {' '.join(prefix)}, nor has tokenizer_config.json",
            field="added_tokens_decoder",
        )
    if prefix:
        named = list(zip(prefix, ids, strict=True))
        backend.post_processor = processors.TemplateProcessing(
            single=[*prefix, "$A"], special_tokens=named
        )
    return backend


def _gpt2_backend(path: Path, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Builds the backend from GPT-2's files. Other tokenizers use the same file names but split text differently, so the
    folder must name GPT-2's class."""
    kind = config.get("tokenizer_class") or {"gpt2": "GPT2Tokenizer"}.get(
        str(_optional(path / "config.json").get("model_type"))
    )
    if kind not in ("GPT2Tokenizer", "GPT2TokenizerFast"):
        raise UnsupportedModelError(
            f"{path} has vocab.json and merges.txt for a {kind}; without a tokenizer.json only GPT2Tokenizer's are "
            "supported; pass tokenizer=PATH of a folder that has one",
            field="tokenizer_class",
        )
    with reading(path / "vocab.json"):
        bpe = models.BPE.from_file(str(path / "vocab.json"), str(path / "merges.txt"))
    backend = tokenizers.Tokenizer(bpe)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=config.get("add_prefix_space") is True
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _require_class(path: Path, config: Mapping[str, Any], file: str, *names: str) -> None:
    """Raise UnsupportedModelError unless the folder's tokenizer_class, or its slow form, is one of
    `names`. Other classes use a `file` of the same name with different contents."""
    kind = config.get("tokenizer_class")
    if kind not in (*names, *(f"{name}Fast" for name in names)):
        raise UnsupportedModelError(
            f"{path} has {file} for a {kind}; without a tokenizer.json only those of {', '.join(names)} are supported; pass "
            "tokenizer=PATH of a folder that has one",
            field="tokenizer_class",
        )


def _t5_backend(path: Path, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Builds T5's backend: SentencePiece's pieces, then the sentinels from the last to the first; a text ends with </s>."""
    _require_class(path, config, "spiece.model", "T5Tokenizer", "MT5Tokenizer")
    backend = sentencepiece.from_file(path / "spiece.model")
    count = config.get("extra_ids", 100)
    if type(count) is not int or not 0 <= count <= 10_000:
        message = f"tokenizer_config.json: extra_ids = {count!r} is no number from 0 to 10,000"
        raise UnsupportedModelError(message, field="extra_ids")
    backend.add_special_tokens(
        [AddedToken(f"<extra_id_{i}>", special=True) for i in reversed(range(count))]
    )
    end = backend.token_to_id("</s>")
    if end is not None:
        backend.post_processor = processors.TemplateProcessing(
            single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", end)]
        )
    return backend


def _bert_backend(path: Path, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Builds the backend from WordPiece's vocab.txt, which has one token per line."""
    _require_class(path, config, "vocab.txt", "BertTokenizer", "DistilBertTokenizer")
    words = (path / "vocab.txt").read_text(encoding="utf-8").splitlines()
    vocab = {word: i for i, word in enumerate(words)}
    names = {
        key: _text(config.get(f"{key}_token")) or f"[{key.upper()}]"
        for key in ("unk", "cls", "sep")
    }
    if missing := [name for name in names.values() if name not in vocab]:
        raise CheckpointError(f"{path / 'vocab.txt'} lacks {', '.join(missing)}", field="tokenizer")
    backend = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token=names["unk"]))
    backend.normalizer = normalizers.BertNormalizer(
        lowercase=config.get("do_lower_case", True) is not False,
        handle_chinese_chars=config.get("tokenize_chinese_chars", True) is not False,
        strip_accents=config.get("strip_accents"),
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    sep, cls = ((names[key], vocab[names[key]]) for key in ("sep", "cls"))
    backend.post_processor = processors.BertProcessing(sep, cls)
    backend.add_special_tokens([AddedToken(name, special=True) for name in names.values()])
    return backend


def _add_tokens(backend: tokenizers.Tokenizer, declared: Mapping[str, Any]) -> None:
    """Registers tokens declared next to tokenizer.json, by id. A text that contains one means that token."""
    if not isinstance(declared, Mapping) or not all(
        str(n).isdecimal() and _text(e) for n, e in declared.items()
    ):
        raise CheckpointError(
            "added tokens are objects with content, by id", field="added_tokens_decoder"
        )
    known = {token.content: token.special for token in backend.get_added_tokens_decoder().values()}
    for number, entry in sorted(declared.items(), key=lambda item: int(item[0])):
        text = _text(entry)
        if known.get(text) != bool(entry.get("special")):
            flags = {
                name: bool(entry.get(name))
                for name in ("single_word", "lstrip", "rstrip", "normalized", "special")
            }
            backend.add_tokens([AddedToken(text, **flags)])
        if backend.token_to_id(text) != int(number):
            raise CheckpointError(
                f"the added token {text!r} has the id {number}, and its place is {backend.token_to_id(text)}",
                field="added_tokens_decoder",
            )


def _mark_special(backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> None:
    known = {
        token.content for token in backend.get_added_tokens_decoder().values() if token.special
    }
    named = [
        _text(config.get(f"{kind}_token"))
        for kind in ("bos", "eos", "unk", "pad", "cls", "sep", "mask")
    ]
    named += [_text(entry) for entry in config.get("additional_special_tokens") or ()]
    new = {t for t in named if t and t not in known and backend.token_to_id(t) is not None}
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in sorted(new)])


def _surroundings(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], ids: Mapping[str, int | None]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(tokens before a text, tokens after it), from the post-processor, or from add_bos_token and
    add_eos_token."""
    bare: list[int] = backend.encode("a", add_special_tokens=False).ids
    full: list[int] = backend.encode("a", add_special_tokens=True).ids
    at = next(i for i in range(len(full) + 1) if full[i : i + len(bare)] == bare)
    prefix, suffix = tuple(full[:at]), tuple(full[at + len(bare) :])
    bos, eos = ids.get("bos_token"), ids.get("eos_token")
    if (
        isinstance(wanted := config.get("add_bos_token"), bool)
        and bos is not None
        and wanted != (bos in prefix)
    ):
        prefix = (bos, *prefix) if wanted else tuple(i for i in prefix if i != bos)
    if (
        isinstance(wanted := config.get("add_eos_token"), bool)
        and eos is not None
        and wanted != (eos in suffix)
    ):
        suffix = (*suffix, eos) if wanted else tuple(i for i in suffix if i != eos)
    return prefix, suffix


def _text(value: Any) -> str:
    """Text of a token in a config, which is a string or an object that contains it."""
    value = value.get("content") if isinstance(value, Mapping) else value
    return value if isinstance(value, str) else ""


def _ids(values: Iterable[Any]) -> tuple[int, ...]:
    """Token ids from configs, each an id, a list or None, in order and without duplicates."""
    flat = [i for value in values for i in (value if isinstance(value, list) else [value])]
    return tuple(
        dict.fromkeys(i for i in flat if isinstance(i, int) and not isinstance(i, bool) and i >= 0)
    )


def _chat_templates(path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name. If there are template files, the config's entry is ignored."""
    files = {file.stem: file for file in sorted((path / TEMPLATES_FOLDER).glob("*.jinja"))}
    if (own := path / "chat_template.jinja").is_file():
        files = {"default": own, **files}
    if files:
        return {name: file.read_text(encoding="utf-8") for name, file in files.items()}
    found = _optional(path / "chat_template.json").get("chat_template", config.get("chat_template"))
    if isinstance(found, list):
        named = [(t.get("name"), t.get("template")) for t in found if isinstance(t, Mapping)]
        return {
            name: text for name, text in named if isinstance(name, str) and isinstance(text, str)
        }
    return {"default": found} if isinstance(found, str) else {}
