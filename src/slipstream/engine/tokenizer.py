"""Text to tokens and back, through the `tokenizers` library: from a Hugging Face folder or from a GGUF file. No torch.

Chat templates are the model's own Jinja, run in a sandbox with the names that Hugging Face templates expect.
"""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers

from slipstream.errors import CheckpointError, RequestError, UnsupportedModelError
from slipstream.model.description import read_json

if TYPE_CHECKING:
    from jinja2 import Template


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecialTokens:
    """What the model's files say of them. `texts` are the names that chat templates use: bos_token, eos_token, …"""

    bos_id: int | None
    eos_ids: tuple[int, ...]
    texts: Mapping[str, str]


class Tokenizer:
    def __init__(
        self, backend: tokenizers.Tokenizer, special: SpecialTokens, chat_template: str | None, *, sentencepiece: bool = False
    ) -> None:
        self._backend = backend
        self._special = special
        self.chat_template = chat_template
        self._sentencepiece = sentencepiece
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self._added = {i: token.content for i, token in added.items()}

    @classmethod
    def from_pretrained(cls, path: Path) -> Tokenizer:
        """From a folder with tokenizer.json (or vocab.json and merges.txt), or from a .gguf file."""
        if path.is_dir() and not (path / "tokenizer.json").is_file() and not (path / "config.json").is_file():
            path = next(iter(sorted(path.glob("*.gguf"))), path)
        if path.is_file():
            from slipstream.engine.gguf_tokenizer import from_gguf

            return from_gguf(path)
        return _from_folder(path)

    # --- Text and tokens ----------------------------------------------------------------------------------------------

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        return [e.ids for e in self._backend.encode_batch(list(texts), add_special_tokens=add_special_tokens)]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """What one token stands for, also where that is part of a character; nothing for an unused id."""
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._sentencepiece:
            if len(token) == 6 and token.startswith("<0x"):
                return bytes([int(token[3:5], 16)])
            return token.replace("▁", " ").encode()
        table = _byte_alphabet()
        return b"".join(table[c] if c in table else c.encode() for c in token)

    def id_to_token(self, token_id: int) -> str | None:
        token: str | None = self._backend.id_to_token(token_id)
        return token

    @property
    def strips_leading_space(self) -> bool:
        """SentencePiece puts a space before the first word, which decoding takes off again."""
        return self._sentencepiece

    @property
    def vocab_size(self) -> int:
        size: int = self._backend.get_vocab_size(with_added_tokens=True)
        return size

    @property
    def bos_token_id(self) -> int | None:
        return self._special.bos_id

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self._special.eos_ids

    # --- Chat ---------------------------------------------------------------------------------------------------------

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The conversation as the model wants to see it. RequestError (field "messages") says what the template refused."""
        if self.chat_template is None:
            raise RequestError("this model has no chat template; use completions, with a plain prompt", field="messages")
        from jinja2 import TemplateError

        try:
            return _compile(self.chat_template).render(
                messages=messages,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                **self._special.texts,
                **variables,
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise RequestError(f"the chat template refuses these messages: {error}", field="messages") from error


@functools.lru_cache(maxsize=8)
def _compile(template: str) -> Template:
    from jinja2 import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %} … {% endgeneration %}` marks the answers for training; here it is its contents."""

        tags = {"generation"}  # noqa: RUF012 (jinja2's own convention)

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: Any, indent: int | None = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent, **options)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation])
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    try:
        return environment.from_string(template)
    except TemplateError as error:
        raise RequestError(f"the model's chat template is broken: {error}", field="messages") from error


@functools.cache
def _byte_alphabet() -> dict[str, bytes]:
    """Byte-level BPE writes each byte as one printable character (Radford et al. 2019): that character to its byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in set(printable)]
    pairs = [(chr(b), b) for b in printable] + [(chr(256 + i), b) for i, b in enumerate(others)]
    return {character: bytes([b]) for character, b in pairs}


# --- Hugging Face folders -----------------------------------------------------------------------------------------------


def _from_folder(path: Path) -> Tokenizer:
    config = read_json(path / "tokenizer_config.json") if (path / "tokenizer_config.json").is_file() else {}
    if (path / "tokenizer.json").is_file():
        try:
            backend = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
        except Exception as error:  # the library raises plain Exception
            raise CheckpointError(f"{path / 'tokenizer.json'} can't be read: {error}", field="tokenizer") from error
    elif (path / "vocab.json").is_file() and (path / "merges.txt").is_file():
        backend = _byte_level(path, config)
    else:
        raise UnsupportedModelError(
            f"{path} has no tokenizer.json; pass tokenizer=PATH of a folder that has one, or skip_tokenizer_init", field="tokenizer"
        )
    backend.no_truncation()
    backend.no_padding()
    texts = {key: _text(value) for key, value in config.items() if key.endswith("_token") and _text(value)}
    ids = {key: backend.token_to_id(text) for key, text in texts.items()}
    eos = [ids.get("eos_token")]
    for name in ("generation_config.json", "config.json"):
        value = read_json(path / name).get("eos_token_id") if (path / name).is_file() else None
        eos += value if isinstance(value, list) else [value]
    special = SpecialTokens(
        bos_id=ids.get("bos_token"), eos_ids=tuple(dict.fromkeys(e for e in eos if isinstance(e, int))), texts=texts
    )
    return Tokenizer(backend, special, _chat_template(path, config), sentencepiece=_is_sentencepiece(backend))


def _text(value: Any) -> str:
    return str(value.get("content", "")) if isinstance(value, Mapping) else value if isinstance(value, str) else ""


def _chat_template(path: Path, config: Mapping[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several by name
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, Mapping)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _byte_level(path: Path, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """GPT-2's files."""
    from tokenizers import decoders, models, pre_tokenizers

    backend = tokenizers.Tokenizer(models.BPE.from_file(str(path / "vocab.json"), str(path / "merges.txt")))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=bool(config.get("add_prefix_space", False)))
    backend.decoder = decoders.ByteLevel()
    named = [_text(config.get(f"{kind}_token")) for kind in ("bos", "eos", "unk", "pad")]
    backend.add_special_tokens([t for t in dict.fromkeys(named) if t])
    return backend


def _is_sentencepiece(backend: tokenizers.Tokenizer) -> bool:
    """Whether tokens mark spaces with ▁ (SentencePiece's vocabularies) rather than write bytes as characters."""
    return backend.token_to_id("<0x0A>") is not None
