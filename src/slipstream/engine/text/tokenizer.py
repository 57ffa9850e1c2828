"""Text to tokens and back, through the `tokenizers` library: from a Hugging Face folder or from a GGUF file.
No torch.

Three kinds of vocabulary are supported: byte-level ones, which write bytes as printable characters;
SentencePiece's, with ▁ for a space and <0x0A> for a byte; and WordPiece (BERT), where ## continues a word, so
that other spaces are lost. Each token is converted to bytes, and decoding joins these: a character split over
tokens is restored, invalid UTF-8 becomes replacement characters. The library's own decoders only differ for
invalid text (a bad byte token there spoils its neighbours). Other decoders are refused by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import tokenizers
from tokenizers import processors

from slipstream.engine.text import gguf_tokenizer, tokenizer_folder
from slipstream.engine.text.chat_template import render, shaped_for
from slipstream.engine.text.known_beginnings import KnownBeginnings, seams_of
from slipstream.engine.text.past_turns import past_turns
from slipstream.engine.text.tiktoken import spelling
from slipstream.engine.text.tokenizer_parts import (
    MAX_LOCKED_CHARS,
    SpecialTokens,
    TokenizerBackend,
    TokenizerParts,
    has_own_patterns,
    in_time,
    on_text,
)
from slipstream.errors import CheckpointError, RequestError, UnsupportedModelError
from slipstream.spec.description import ModelDescription
from slipstream.spec.stored.gguf import GGUFFile
from slipstream.spec.stored.gguf_parts import model_files


class TokenizedText(dict[str, Any]):
    """`input_ids` and `attention_mask` of a text, as keys and as attributes; lists of lists for several texts."""

    @property
    def input_ids(self) -> Any:
        return self["input_ids"]

    @property
    def attention_mask(self) -> Any:
        return self["attention_mask"]


class Tokenizer:
    """A model's tokenizer. `backend` splits and merges. Special tokens around a text, and decoding,
    are implemented here. `chat_templates` are by name."""

    def __init__(
        self,
        backend: TokenizerBackend,
        special: SpecialTokens,
        *,
        chat_templates: Mapping[str, str] | None = None,
    ) -> None:
        self._backend = backend
        self._special = special
        self._beginnings = KnownBeginnings(seams_of(backend))
        self._templates = dict(chat_templates or {})
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.vocab_size: int = max(
            (backend.get_vocab_size(with_added_tokens=False), *(i + 1 for i in added))
        )
        # filled as tokens are decoded
        self._bytes = {i: token.content.encode() for i, token in added.items()}
        self._texts: tuple[dict[int, str], dict[int, str]] = {}, {}
        self._spelling, self._strips_leading_space = _decoding(backend)
        self.has_time_limit = has_own_patterns(backend)  # such patterns may take hours
        self._num_rows: int | None = None  # rows of the model's embedding, if the model is known
        self.image_placeholder: str | None = None  # of a model that accepts images or audio

    @classmethod
    def for_model(cls, model: ModelDescription, path: str | Path | None = None) -> Tokenizer:
        """The model's own tokenizer, or the one at `path`, whose ids are checked against the rows of the model's embedding.

        CheckpointError if an ordinary token has no row. An added token may lack one (Gemma 3's text models have no row for
        the image token); a text with such a token raises RequestError.
        """
        if path is None and model.gguf is not None:
            tokenizer = cls._of(gguf_tokenizer.read(model.gguf))
            model.gguf.let_go_metadata()
        else:
            tokenizer = cls.from_pretrained(model.path if path is None else path)
        rows = tokenizer._num_rows = model.spec.vocab_size
        tokenizer.image_placeholder = (
            None if model.spec.media is None else model.spec.media.prompt.placeholder
        )
        largest = max(
            [
                tokenizer._largest_ordinary_id(),
                *tokenizer._special.prefix,
                *tokenizer._special.suffix,
            ]
        )
        if largest >= rows:
            raise CheckpointError(
                f"the tokenizer has the token id {largest}, and the model's embedding has {rows} rows: it is another model's. "
                "Pass tokenizer=PATH of the right one",
                field="tokenizer",
            )
        return tokenizer

    def _largest_ordinary_id(self) -> int:
        """Largest id of an ordinary token. Ids are mostly 0, 1, 2, …; if the id that this implies
        does not exist, there are gaps, and all ids are compared."""
        backend = self._backend
        last = backend.get_vocab_size(with_added_tokens=False) - 1
        if backend.id_to_token(last) is not None:
            return last
        return max(backend.get_vocab(with_added_tokens=False).values(), default=-1)

    def _checked(self, ids: list[int]) -> list[int]:
        """Returns the ids. RequestError if the embedding has no row for one of them."""
        if self._num_rows is not None and ids and max(ids) >= self._num_rows:
            token = self.id_to_token(max(ids))
            raise RequestError(
                f"the text holds the token {token!r} ({max(ids)}), and the model's embedding has only {self._num_rows} rows",
                field="prompt",
            )
        return ids

    @classmethod
    def from_pretrained(cls, path: str | Path) -> Tokenizer:
        """Load a tokenizer from a .gguf file or from a folder. The first of these in the folder
        is taken: tokenizer.json, those in `renumbered.FILES`, Mistral's tekken.json, GPT-2's vocab.json
        and merges.txt, SentencePiece's or tiktoken's tokenizer.model, T5's spiece.model, BERT's
        vocab.txt."""
        path = Path(path)
        if path.is_dir() and not any((path / name).is_file() for name in tokenizer_folder.FILES):
            path = next(iter(model_files(path)), path)
        if path.is_file():
            return cls._of(gguf_tokenizer.read(GGUFFile(path)))
        return cls._of(tokenizer_folder.read(path))

    @classmethod
    def _of(cls, parts: TokenizerParts) -> Tokenizer:
        return cls(parts.backend, parts.special, chat_templates=parts.chat_templates)

    def save(self, folder: Path) -> None:
        """Write tokenizer.json, tokenizer_config.json and generation_config.json (with the tokens that end an
        answer). `from_pretrained`, and transformers, can rebuild this tokenizer from them."""
        backend = tokenizers.Tokenizer.from_str(self._backend.to_str())
        around = self._special.prefix, self._special.suffix
        if any(around):
            before, after = (" ".join(f"{backend.id_to_token(i)}:0" for i in ids) for ids in around)
            named = [
                (str(backend.id_to_token(i)), i) for i in dict.fromkeys((*around[0], *around[1]))
            ]
            backend.post_processor = processors.TemplateProcessing(
                f"{before} $A {after}".strip(), special_tokens=named
            )
        backend.save(str(folder / "tokenizer.json"))
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **self._special.texts,
        }
        if set(self._templates) == {"default"}:
            config["chat_template"] = self._templates["default"]
        elif self._templates:
            config["chat_template"] = [
                {"name": name, "template": text} for name, text in self._templates.items()
            ]
        (folder / "tokenizer_config.json").write_text(
            json.dumps(config, indent=2, ensure_ascii=False), encoding="utf-8"
        )
        ends = {"bos_token_id": self._special.bos_id, "eos_token_id": list(self._special.eos_ids)}
        (folder / "generation_config.json").write_text(json.dumps(ends, indent=2), encoding="utf-8")

    # --- Text and tokens ----------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Number of tokens, added ones included."""
        return self.vocab_size

    def __call__(
        self, text: str | Sequence[str], *, add_special_tokens: bool = True
    ) -> TokenizedText:
        """Tokens of a text, or of each of several, in the form of transformers' tokenizers."""
        if isinstance(text, str):
            ids = self.encode(text, add_special_tokens)
            return TokenizedText(input_ids=ids, attention_mask=[1] * len(ids))
        lists = [self.encode(one, add_special_tokens) for one in text]
        return TokenizedText(input_ids=lists, attention_mask=[[1] * len(ids) for ids in lists])

    def encode(
        self, text: str, add_special_tokens: bool = True, *, salt: str | None = None
    ) -> list[int]:
        """Tokens of a text. Special tokens spelled out in the text become these tokens. None is added twice:
        a text from a chat template that begins with BOS gets no second BOS. With a `salt`, long texts are
        cached, so that later texts with the same salt and beginning take less time."""
        if salt is None:
            ids = self._checked(self._plain(text))
        else:
            ids = self._checked(self._beginnings.encode(text, salt, self._plain))
        return self._surrounded(ids) if add_special_tokens else ids

    def _plain(self, text: str) -> list[int]:
        return self._encoded([text], add_special_tokens=False)[0].ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encodes each text with special tokens, on all cores if the library may use threads."""
        if len(texts) == 1:
            return [self.encode(texts[0])]
        found = self._encoded(texts, add_special_tokens=False)
        return [self._surrounded(self._checked(encoding.ids)) for encoding in found]

    def _encoded(
        self, texts: Sequence[Any], *, add_special_tokens: bool
    ) -> list[tokenizers.Encoding]:
        """Encodings of texts, or of pairs of texts. The library holds the GIL while it encodes a
        single text, but not for a batch. A short text is faster under the GIL; a long one would
        block the process for seconds."""
        if self.has_time_limit:
            return in_time(
                self._backend.encode_batch_fast, list(texts), add_special_tokens=add_special_tokens
            )
        own = texts[0] if len(texts) == 1 and isinstance(texts[0], tuple) else texts
        if len(texts) == 1 and sum(map(len, own)) <= MAX_LOCKED_CHARS:
            return [on_text(self._backend.encode, *own, add_special_tokens=add_special_tokens)]
        return on_text(
            self._backend.encode_batch_fast, list(texts), add_special_tokens=add_special_tokens
        )

    def _surrounded(self, ids: list[int]) -> list[int]:
        prefix, suffix = self._special.prefix, self._special.suffix
        if prefix and tuple(ids[: len(prefix)]) != prefix:
            ids = [*prefix, *ids]
        if suffix and tuple(ids[-len(suffix) :]) != suffix:
            ids = [*ids, *suffix]
        return ids

    def encode_pairs(
        self, pairs: Sequence[tuple[str, str]], *, max_length: int | None = None
    ) -> list[tuple[list[int], int]]:
        """Encodes pairs of texts, joined as the model's files say: (tokens, number of tokens of the first part) each, on all
        cores if the library may use threads. `max_length` cuts the second text's end, the first's only if necessary."""
        found = self._encoded(pairs, add_special_tokens=True)
        for encoding in found:
            self._checked(encoding.ids)
        return [_cut_pair(encoding, max_length) for encoding in found]

    @property
    def prefix(self) -> tuple[int, ...]:
        """Tokens added before every text that is encoded with special tokens."""
        return self._special.prefix

    @property
    def suffix(self) -> tuple[int, ...]:
        """Tokens added after every text that is encoded with special tokens."""
        return self._special.suffix

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        skip = self.special_ids if skip_special_tokens else frozenset[int]()
        data = b"".join([self.token_bytes(i) for i in ids if i not in skip])
        if self._strips_leading_space:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", "replace")

    def strips_space_after(self, ids: Iterable[int], skip_special_tokens: bool = True) -> bool:
        """Whether `decode` drops a space that follows `ids`. It only drops the space that
        SentencePiece adds before a text, so only if `ids` produce no visible text."""
        skip = self.special_ids if skip_special_tokens else frozenset[int]()
        return self._strips_leading_space and not any(
            i not in skip and self.token_bytes(i) for i in ids
        )

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one token, possibly an incomplete character. Empty for an id without a token."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._spelled(self.id_to_token(token_id) or "")
        return known

    def texts(self, skip_special_tokens: bool) -> dict[int, str]:
        """Cache of texts by token, for tokens without incomplete characters around them. The
        detokenizer fills it. With `skip_special_tokens` a special token's text is empty."""
        return self._texts[skip_special_tokens]

    def _spelled(self, token: str) -> bytes:
        if self._spelling == "wordpiece":
            return token[2:].encode() if token.startswith("##") else b" " + token.encode()
        if self._spelling == "bytes":
            return b"".join([_BYTE_OF.get(c) or c.encode() for c in token])
        if byte := re.fullmatch("<0x([0-9A-Fa-f]{2})>", token):
            return bytes.fromhex(byte[1])
        return token.replace("▁", " ").encode()

    def token_to_id(self, token: str) -> int | None:
        found: int | None = self._backend.token_to_id(token)
        return found

    def id_to_token(self, token_id: int) -> str | None:
        """The token as spelled in the vocabulary; None for an id without a token."""
        token: str | None = (
            self._backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None
        )
        return token

    @property
    def bos_token_id(self) -> int | None:
        return self._special.bos_id

    @property
    def eos_token_id(self) -> int | None:
        """The main one of `eos_token_ids`; None if there is none."""
        return self._special.eos_ids[0] if self._special.eos_ids else None

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """All tokens that end an answer, the main one first."""
        return self._special.eos_ids

    # --- Chat ---------------------------------------------------------------------------------------------------------

    @property
    def chat_template(self) -> str | None:
        return self._templates.get("default")

    @property
    def tool_template(self) -> str | None:
        """The template for conversations with tools: the one named tool_use, if there is one."""
        return self._templates.get("tool_use", self.chat_template)

    def set_chat_template(self, template: str) -> None:
        """Replace the model's chat templates, with and without tools. Templates with other names stay."""
        self._templates.pop("tool_use", None)
        self._templates["default"] = template

    def template_for(self, chat_template: str | None, *, tools: bool) -> str | None:
        """The template that `chat_template` names (such as `rag`), or `chat_template` itself if it is Jinja; None: the
        model's."""
        if chat_template:
            return self._templates.get(chat_template, chat_template)
        return self.tool_template if tools else self.chat_template

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        tokenize: bool = False,
        **variables: Any,
    ) -> str:
        """The conversation in the model's chat format. A message's content is a string, or a list of parts of the types text
        and image; the template gets the form that it can read. RequestError (field "messages") with the template's message
        if it refuses. With `tools` the template named tool_use is used, if there is one; `chat_template` names another one,
        or is itself a template. Keys of a message whose value is None are omitted; its reasoning is passed under all names
        that templates use. With `continue_final_message` the text ends with the last message, for the model to continue."""
        if tokenize:
            message = "apply_chat_template gives text; encode(text, add_special_tokens=False) gives its tokens"
            raise RequestError(message, field="tokenize")
        if continue_final_message and add_generation_prompt:
            message = "an answer is either begun or continued: set add_generation_prompt=False with continue_final_message"
            raise RequestError(message, field="continue_final_message")
        template = self.template_for(chat_template, tools=tools is not None)
        if template is None:
            raise RequestError(
                "this model has no chat template; if it writes text, use completions with a plain prompt",
                field="messages",
            )
        if continue_final_message:
            last = messages[-1] if messages else {}
            if not isinstance(last.get("content"), str):
                raise RequestError(
                    "continue_final_message needs a last message that is text", field="messages"
                )
            messages = [*messages[:-1], {**last, "content": last["content"] + _END + " "}]
        turns = past_turns(template, list(map(_filled, messages)))
        messages = shaped_for(template, turns, self.image_placeholder)
        given = {
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        text = render(template, {**self._special.texts, "documents": None, **variables, **given})
        if continue_final_message:
            text, found, after = text.rpartition(_END)
            # for templates that strip content
            text = text if after.startswith(" ") else text.rstrip()
            if not found:
                message = "the model's chat template changes the last message, which therefore can't be continued"
                raise RequestError(message, field="continue_final_message")
        return text


def _filled(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as transformers passes it to templates, without keys whose value is None, for which many templates would
    write "None"."""
    kept = {key: value for key, value in message.items() if value is not None}
    names = ("reasoning_content", "thinking", "reasoning")
    reasoning = next((kept[name] for name in names if name in kept), None)
    if reasoning is None:
        return kept
    return {"thinking": reasoning, **kept, "reasoning_content": reasoning}


_END = "\ue000end\ue000"
"""Marker of the end of a message's text in a rendered conversation; uses private-use characters."""

_BYTE_OF = {character: bytes([b]) for b, character in spelling().items()}


def _decoding(
    backend: TokenizerBackend,
) -> tuple[Literal["bytes", "sentencepiece", "wordpiece"], bool]:
    """(how tokens spell text, whether the decoder strips a space at the beginning), from the
    backend's decoder."""
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


def _cut_pair(encoding: tokenizers.Encoding, max_length: int | None) -> tuple[list[int], int]:
    """(tokens of a pair, at most `max_length`, number of tokens of the first part). The second text
    is truncated first. RequestError if there is no room for a pair."""
    ids, kinds = encoding.ids, encoding.type_ids
    if max_length is None or len(ids) <= max_length:
        return ids, kinds.count(0)
    parts = encoding.sequence_ids
    spare = len(ids) - max_length
    cut = {1: min(spare, parts.count(1)), 0: max(0, spare - parts.count(1))}
    if cut[0] > parts.count(0):
        raise RequestError(
            f"max_length={max_length} leaves no room for a pair", field="truncate_prompt_tokens"
        )
    ends = {part: [i for i, s in enumerate(parts) if s == part] for part in (0, 1)}
    gone = {i for part in (0, 1) for i in ends[part][len(ends[part]) - cut[part] :]}
    kept = [i for i in range(len(ids)) if i not in gone]
    return [ids[i] for i in kept], sum(kinds[i] == 0 for i in kept)
