"""Text to tokens and back, through the `tokenizers` library: from a Hugging Face folder or from a GGUF file. No torch.

Three kinds of vocabulary are known: byte-level ones, whose tokens spell bytes in printable characters, those of
SentencePiece, with ▁ for a space and <0x0A> for a byte, and WordPiece (BERT), where ## continues a word and nothing else tells
whether there was a space. All come down to bytes, and decoding is joining those: a
character split over tokens becomes whole, bytes that are no UTF-8 become replacement characters. The library's own
decoders differ from that only in broken text (one bad byte token spoils the good ones next to it). Other decoders are
refused by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from slipstream.engine.chat_template import render
from slipstream.engine.tiktoken import spelling
from slipstream.errors import CheckpointError, RequestError, UnsupportedModelError
from slipstream.spec.description import read_json


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecialTokens:
    """What a model's files say of them. `prefix` and `suffix` stand around every text that is encoded with special
    tokens. `texts` are the names that chat templates use: bos_token, eos_token, …"""

    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    texts: Mapping[str, str] = field(default_factory=dict)


class Tokenizer:
    """`backend` splits and merges; what surrounds a text, and the way back, are done here. `chat_templates` by name."""

    def __init__(
        self, backend: tokenizers.Tokenizer, special: SpecialTokens, *, chat_templates: Mapping[str, str] | None = None
    ) -> None:
        self._backend = backend
        self._special = special
        self._templates = dict(chat_templates or {})
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.vocab_size: int = max((backend.get_vocab_size(with_added_tokens=False), *(i + 1 for i in added)))
        self._bytes = {i: token.content.encode() for i, token in added.items()}  # filled as tokens are met
        self._spelling, self._strips_leading_space = _decoding(backend)

    @classmethod
    def from_pretrained(cls, path: str | Path) -> Tokenizer:
        """From a .gguf file, or from a folder with tokenizer.json, GPT-2's vocab.json and merges.txt, SentencePiece's
        or tiktoken's tokenizer.model, T5's spiece.model, or BERT's vocab.txt."""
        path = Path(path)
        if path.is_dir() and not any((path / name).is_file() for name in _FILES):
            path = next(iter(sorted(path.glob("*.gguf"))), path)
        if path.is_file():
            from slipstream.engine.gguf_tokenizer import from_gguf
            from slipstream.spec.gguf import GGUFFile

            return from_gguf(GGUFFile(path))
        return _from_folder(path)

    def save(self, folder: Path) -> None:
        """tokenizer.json, tokenizer_config.json and, for the tokens that end an answer, generation_config.json: this tokenizer
        can be had of them again, and transformers'."""
        backend = tokenizers.Tokenizer.from_str(self._backend.to_str())
        around = self._special.prefix, self._special.suffix
        if any(around):
            before, after = (" ".join(f"{backend.id_to_token(i)}:0" for i in ids) for ids in around)
            named = [(str(backend.id_to_token(i)), i) for i in dict.fromkeys((*around[0], *around[1]))]
            backend.post_processor = processors.TemplateProcessing(f"{before} $A {after}".strip(), special_tokens=named)
        backend.save(str(folder / "tokenizer.json"))
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **self._special.texts,
        }
        if set(self._templates) == {"default"}:
            config["chat_template"] = self._templates["default"]
        elif self._templates:
            config["chat_template"] = [{"name": name, "template": text} for name, text in self._templates.items()]
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False), encoding="utf-8")
        ends = {"bos_token_id": self._special.bos_id, "eos_token_id": list(self._special.eos_ids)}
        (folder / "generation_config.json").write_text(json.dumps(ends, indent=2), encoding="utf-8")

    # --- Text and tokens ----------------------------------------------------------------------------------------------

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Special tokens written out in the text count as such. What they already say is not said twice: a text from a
        chat template that begins with the beginning-of-sequence token gets no second one."""
        try:
            ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        except TypeError as error:  # no str, or one that UTF-8 can't write
            raise _not_unicode() from error
        return self._surrounded(ids) if add_special_tokens else ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of each with special tokens, on all cores where the library may use them."""
        if len(texts) == 1:
            return [self.encode(texts[0])]
        try:
            found = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        except TypeError as error:
            raise _not_unicode() from error
        return [self._surrounded(encoding.ids) for encoding in found]

    def _surrounded(self, ids: list[int]) -> list[int]:
        prefix, suffix = self._special.prefix, self._special.suffix
        if prefix and tuple(ids[: len(prefix)]) != prefix:
            ids = [*prefix, *ids]
        if suffix and tuple(ids[-len(suffix) :]) != suffix:
            ids = [*ids, *suffix]
        return ids

    def encode_pair(self, first: str, second: str, *, max_length: int | None = None) -> tuple[list[int], int]:
        """Two texts as the model's files join them, and how many tokens are of the first part. With `max_length` the second is
        cut at its end, and the first too if nothing else helps."""
        return self.encode_pairs([(first, second)], max_length=max_length)[0]

    def encode_pairs(self, pairs: Sequence[tuple[str, str]], *, max_length: int | None = None) -> list[tuple[list[int], int]]:
        """`encode_pair` of each, on all cores where the library may use them."""
        try:
            if len(pairs) == 1:
                found = [self._backend.encode(*pairs[0], add_special_tokens=True)]
            else:
                found = self._backend.encode_batch_fast(list(pairs), add_special_tokens=True)
        except TypeError as error:
            raise _not_unicode() from error
        return [_cut_pair(encoding, max_length) for encoding in found]

    @property
    def suffix(self) -> tuple[int, ...]:
        """What stands after every text that is encoded with special tokens."""
        return self._special.suffix

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        skip = self.special_ids if skip_special_tokens else frozenset[int]()
        data = b"".join([self.token_bytes(i) for i in ids if i not in skip])
        if self._strips_leading_space:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", "replace")

    def strips_space_after(self, ids: Iterable[int], skip_special_tokens: bool = True) -> bool:
        """Whether `decode` takes off a space that comes after `ids`: only the space that SentencePiece puts before a
        text, so only if nothing of `ids` shows. What continues a text keeps its space."""
        skip = self.special_ids if skip_special_tokens else frozenset[int]()
        return self._strips_leading_space and not any(i not in skip and self.token_bytes(i) for i in ids)

    def token_bytes(self, token_id: int) -> bytes:
        """What one token stands for, also where that is part of a character; nothing for an id without a token."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._spelled(self.id_to_token(token_id) or "")
        return known

    def _spelled(self, token: str) -> bytes:
        if self._spelling == "wordpiece":
            return token[2:].encode() if token.startswith("##") else b" " + token.encode()
        if self._spelling == "bytes":
            return b"".join([_BYTE_OF.get(c) or c.encode() for c in token])
        if byte := re.fullmatch("<0x([0-9A-Fa-f]{2})>", token):
            return bytes.fromhex(byte[1])
        return token.replace("▁", " ").encode()

    def id_to_token(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it; None for an id without one."""
        token: str | None = self._backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None
        return token

    @property
    def bos_token_id(self) -> int | None:
        return self._special.bos_id

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Every token that ends an answer, the main one first."""
        return self._special.eos_ids

    # --- Chat ---------------------------------------------------------------------------------------------------------

    @property
    def chat_template(self) -> str | None:
        return self._templates.get("default")

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The conversation as the model wants to see it. RequestError (field "messages") says what the template
        refused. `tools` choose the template named tool_use, where there is one."""
        template = self._templates.get("tool_use", self.chat_template) if tools else self.chat_template
        if template is None:
            raise RequestError(
                "this model has no chat template; if it writes text, use completions with a plain prompt", field="messages"
            )
        given = {"messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt}
        return render(template, {**self._special.texts, **variables, **given})


_BYTE_OF = {character: bytes([b]) for b, character in spelling().items()}


def _decoding(backend: tokenizers.Tokenizer) -> tuple[Literal["bytes", "sentencepiece", "wordpiece"], bool]:
    """From the backend's decoder: (how tokens spell text, is a space at the beginning taken off?)."""
    state = {} if backend.decoder is None else json.loads(backend.decoder.__getstate__())
    parts = state.get("decoders", [state])
    match [part.get("type") for part in parts]:
        case ["ByteLevel"]:
            return "bytes", False
        case ["Metaspace"]:
            return "sentencepiece", parts[0].get("prepend_scheme") != "never"
        case ["Replace", "ByteFallback", "Fuse", *strip] if strip in ([], ["Strip"]):
            return "sentencepiece", bool(strip)
        case ["WordPiece"]:
            return "wordpiece", True
        case kinds:
            raise UnsupportedModelError(
                f"the tokenizer's decoder {kinds} is not supported; ByteLevel, WordPiece and SentencePiece's are",
                field="tokenizer",
            )


# --- Hugging Face folders ---------------------------------------------------------------------------------------------

_FILES = ("tokenizer.json", "vocab.json", "tokenizer.model", "spiece.model", "vocab.txt", "config.json")
_GPT2_END = "<|endoftext|>"


def _from_folder(path: Path) -> Tokenizer:
    config = {**_optional(path / "special_tokens_map.json"), **_optional(path / "tokenizer_config.json")}
    generation, model = _optional(path / "generation_config.json"), _optional(path / "config.json")
    backend = _backend(path, config)
    backend.no_truncation()
    backend.no_padding()
    if not (path / "tokenizer.json").is_file() and backend.token_to_id(_GPT2_END) is not None:
        config = {"bos_token": _GPT2_END, "eos_token": _GPT2_END, "unk_token": _GPT2_END, **config}
    _add_tokens(backend, {str(i): {"content": t} for t, i in _optional(path / "added_tokens.json").items()})
    _add_tokens(backend, config.get("added_tokens_decoder") or {})
    _mark_special(backend, config)

    texts = {key: text for key, value in config.items() if key.endswith("_token") and (text := _text(value))}
    ids = {key: backend.token_to_id(text) for key, text in texts.items()}
    for key in ("bos_token", "eos_token"):  # GPT-2's folder names them by number, in the model's config
        if ids.get(key) is None and (found := _ids([model.get(f"{key}_id")])):
            ids[key] = found[0]
            texts[key] = backend.id_to_token(found[0]) or ""
    prefix, suffix = _surroundings(backend, config, ids)
    special = SpecialTokens(
        bos_id=ids.get("bos_token"),
        eos_ids=_ids([ids.get("eos_token"), generation.get("eos_token_id"), model.get("eos_token_id")]),
        prefix=prefix,
        suffix=suffix,
        texts=texts,
    )
    return Tokenizer(backend, special, chat_templates=_chat_templates(path, config))


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _backend(path: Path, config: dict[str, Any]) -> tokenizers.Tokenizer:
    """What a class does where its config is silent is put into `config`."""
    if (path / "tokenizer.json").is_file():
        try:
            return tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
        except Exception as error:  # the library raises plain Exception
            raise CheckpointError(f"{path / 'tokenizer.json'} can't be read: {error}", field="tokenizer") from error
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
_CHATGLM = ("[MASK]", "[gMASK]", "[sMASK]", "sop", "eop", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
"""What ChatGLM 2 and 3 have behind their pieces (the roles: 3)."""


def _model_backend(file: Path, config: dict[str, Any]) -> tokenizers.Tokenizer:
    """tokenizer.model, of SentencePiece or of tiktoken, and what its class puts before a text."""
    from slipstream.engine import sentencepiece, tiktoken

    if tiktoken.is_tiktoken(file):
        backend, prefix = tiktoken.from_file(file, config), tiktoken.PREFIXES[config["tokenizer_class"]]
        _add_tokens(backend, config.get("added_tokens_decoder") or {})
    else:
        kind = config.get("tokenizer_class")
        if kind is not None:  # others may split, or surround a text, in ways of their own
            _require_class(file.parent, config, file.name, *_LLAMAS, "ChatGLMTokenizer")
        backend, prefix = sentencepiece.from_file(file), ()
        if kind == "ChatGLMTokenizer":
            prefix = ("[gMASK]", "sop")
            backend.add_tokens([AddedToken(t, special=True, single_word=t.isalpha(), normalized=False) for t in _CHATGLM])
        elif kind is not None:
            config.setdefault("add_bos_token", True)
    ids = [backend.token_to_id(token) for token in prefix]
    if None in ids:
        raise CheckpointError(f"{file} has no {' '.join(prefix)}, nor has tokenizer_config.json", field="added_tokens_decoder")
    if prefix:
        named = list(zip(prefix, ids, strict=True))
        backend.post_processor = processors.TemplateProcessing(single=[*prefix, "$A"], special_tokens=named)
    return backend


def _gpt2_backend(path: Path, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """GPT-2's files. Others use the same names and split text differently, so it must say that it is one."""
    kind = config.get("tokenizer_class") or {"gpt2": "GPT2Tokenizer"}.get(
        str(_optional(path / "config.json").get("model_type"))
    )
    if kind not in ("GPT2Tokenizer", "GPT2TokenizerFast"):
        raise UnsupportedModelError(
            f"{path} has vocab.json and merges.txt for a {kind}; without a tokenizer.json only GPT2Tokenizer's are "
            "supported; pass tokenizer=PATH of a folder that has one",
            field="tokenizer_class",
        )
    try:
        bpe = models.BPE.from_file(str(path / "vocab.json"), str(path / "merges.txt"))
    except Exception as error:  # the library raises plain Exception
        raise CheckpointError(f"{path}: vocab.json and merges.txt can't be read: {error}", field="tokenizer") from error
    backend = tokenizers.Tokenizer(bpe)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=config.get("add_prefix_space") is True)
    backend.decoder = decoders.ByteLevel()
    return backend


def _require_class(path: Path, config: Mapping[str, Any], file: str, *names: str) -> None:
    """A file whose name several kinds of tokenizers use must be of one of `names`, or of their fast forms."""
    kind = config.get("tokenizer_class")
    if kind not in (*names, *(f"{name}Fast" for name in names)):
        raise UnsupportedModelError(
            f"{path} has {file} for a {kind}; without a tokenizer.json only those of {', '.join(names)} are supported; pass "
            "tokenizer=PATH of a folder that has one",
            field="tokenizer_class",
        )


def _t5_backend(path: Path, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """SentencePiece's pieces, then the sentinels from the last to the first; a text ends with </s>."""
    from slipstream.engine.sentencepiece import from_file

    _require_class(path, config, "spiece.model", "T5Tokenizer", "MT5Tokenizer")
    backend = from_file(path / "spiece.model")
    count = config.get("extra_ids", 100)
    if not isinstance(count, int):
        raise UnsupportedModelError(f"tokenizer_config.json: extra_ids = {count!r} is no number", field="extra_ids")
    backend.add_special_tokens([AddedToken(f"<extra_id_{i}>", special=True) for i in reversed(range(count))])
    end = backend.token_to_id("</s>")
    if end is not None:
        backend.post_processor = processors.TemplateProcessing(
            single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", end)]
        )
    return backend


def _bert_backend(path: Path, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """WordPiece's vocab.txt, a token a line."""
    _require_class(path, config, "vocab.txt", "BertTokenizer", "DistilBertTokenizer")
    words = (path / "vocab.txt").read_text(encoding="utf-8").splitlines()
    vocab = {word: i for i, word in enumerate(words)}
    names = {key: _text(config.get(f"{key}_token")) or f"[{key.upper()}]" for key in ("unk", "cls", "sep")}
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
    """Tokens that stand beside tokenizer.json, by id. A text that holds one means that token."""
    known = {token.content: token.special for token in backend.get_added_tokens_decoder().values()}
    for number, entry in sorted(declared.items(), key=lambda item: int(item[0])):
        text = _text(entry)
        if known.get(text) != bool(entry.get("special")):
            flags = {
                name: bool(entry.get(name)) for name in ("single_word", "lstrip", "rstrip", "normalized", "special")
            }
            backend.add_tokens([AddedToken(text, **flags)])
        if backend.token_to_id(text) != int(number):
            raise CheckpointError(
                f"the added token {text!r} has the id {number}, and its place is {backend.token_to_id(text)}",
                field="added_tokens_decoder",
            )


def _mark_special(backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> None:
    known = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    named = [_text(config.get(f"{kind}_token")) for kind in ("bos", "eos", "unk", "pad", "cls", "sep", "mask")]
    named += [_text(entry) for entry in config.get("additional_special_tokens") or ()]
    new = {t for t in named if t and t not in known and backend.token_to_id(t) is not None}
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in sorted(new)])


def _surroundings(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], ids: Mapping[str, int | None]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What stands before and after a text: what the post-processor puts there, or what add_bos_token and add_eos_token
    say instead."""
    bare: list[int] = backend.encode("a", add_special_tokens=False).ids
    full: list[int] = backend.encode("a", add_special_tokens=True).ids
    at = next(i for i in range(len(full) + 1) if full[i : i + len(bare)] == bare)
    prefix, suffix = tuple(full[:at]), tuple(full[at + len(bare) :])
    bos, eos = ids.get("bos_token"), ids.get("eos_token")
    if isinstance(wanted := config.get("add_bos_token"), bool) and bos is not None and wanted != (bos in prefix):
        prefix = (bos, *prefix) if wanted else tuple(i for i in prefix if i != bos)
    if isinstance(wanted := config.get("add_eos_token"), bool) and eos is not None and wanted != (eos in suffix):
        suffix = (*suffix, eos) if wanted else tuple(i for i in suffix if i != eos)
    return prefix, suffix


def _text(value: Any) -> str:
    """A token in a config: its text, or an object that holds it."""
    value = value.get("content") if isinstance(value, Mapping) else value
    return value if isinstance(value, str) else ""


def _ids(values: Iterable[Any]) -> tuple[int, ...]:
    """Token ids of configs, each one, a list or none, in order and without repetition."""
    flat = [i for value in values for i in (value if isinstance(value, list) else [value])]
    return tuple(dict.fromkeys(i for i in flat if isinstance(i, int) and not isinstance(i, bool) and i >= 0))


def _chat_templates(path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """By name; a file of its own goes before the config's entry."""
    if (path / "chat_template.jinja").is_file():
        return {"default": (path / "chat_template.jinja").read_text(encoding="utf-8")}
    found = _optional(path / "chat_template.json").get("chat_template", config.get("chat_template"))
    if isinstance(found, list):
        named = [(t.get("name"), t.get("template")) for t in found if isinstance(t, Mapping)]
        return {name: text for name, text in named if isinstance(name, str) and isinstance(text, str)}
    return {"default": found} if isinstance(found, str) else {}


def _not_unicode() -> RequestError:
    return RequestError("the text is not valid Unicode (half a surrogate pair?)", field="prompt")


def _cut_pair(encoding: tokenizers.Encoding, max_length: int | None) -> tuple[list[int], int]:
    """Its tokens, at most `max_length`, and how many are of the first part."""
    ids, kinds = encoding.ids, encoding.type_ids
    if max_length is None or len(ids) <= max_length:
        return ids, kinds.count(0)
    parts = encoding.sequence_ids
    spare = len(ids) - max_length
    cut = {1: min(spare, parts.count(1)), 0: max(0, spare - parts.count(1))}
    if cut[0] > parts.count(0):
        raise RequestError(f"max_length={max_length} leaves no room for a pair", field="truncate_prompt_tokens")
    ends = {part: [i for i, s in enumerate(parts) if s == part] for part in (0, 1)}
    gone = {i for part in (0, 1) for i in ends[part][len(ends[part]) - cut[part] :]}
    kept = [i for i in range(len(ids)) if i not in gone]
    return [ids[i] for i in kept], sum(kinds[i] == 0 for i in kept)
