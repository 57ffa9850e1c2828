"""The tokenizer inside a GGUF file, rebuilt from its own fields.

Byte-level BPE (`gpt2`) differs between models in how text is split before merging; `tokenizer.ggml.pre` names that, and
the table below says how. Rebuilding it without that field gives wrong ids: SmolLM2, for one, keeps digits apart.
SentencePiece vocabularies (`llama`) carry scores in place of merges; llama.cpp always joins the neighbours whose union scores
best, which is byte-pair merging in the order of scores. Facts of both: llama.cpp's llama-vocab.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from slipstream.engine.tokenizer import SpecialTokens, Tokenizer
from slipstream.errors import CheckpointError, UnsupportedModelError
from slipstream.model.gguf import GGUFFile

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

_SPLITS: dict[str, tuple[bool, str]] = {
    "gpt-2": (False, _GPT2),
    "gpt2": (False, _GPT2),
    "smollm": (True, _GPT2),
    "starcoder": (True, _GPT2),
    "refact": (True, _GPT2),
    "command-r": (True, _GPT2),
    "llama-bpe": (False, _LLAMA3),
    "llama3": (False, _LLAMA3),
    "llama-v3": (False, _LLAMA3),
    "qwen2": (False, _QWEN2),
    "deepseek-r1-qwen": (False, _QWEN2),
}
"""`tokenizer.ggml.pre` → (digits one by one first?, how to split)."""


def from_gguf(path: Path) -> Tokenizer:
    meta = GGUFFile(path).metadata
    kind = meta.get("tokenizer.ggml.model")
    tokens = meta.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list):
        raise CheckpointError(f"{path.name} carries no tokenizer (tokenizer.ggml.tokens)", field="tokenizer.ggml.tokens")
    types = meta.get("tokenizer.ggml.token_type", [_NORMAL] * len(tokens))
    if kind == "gpt2":
        backend = _byte_level(meta, tokens)
    elif kind == "llama":
        backend = _sentencepiece(meta, tokens, types)
    else:
        raise UnsupportedModelError(
            f"tokenizer.ggml.model = {kind!r} is not supported; gpt2 and llama are", field="tokenizer.ggml.model"
        )
    added = [
        AddedToken(token, special=kind_of == _CONTROL, normalized=False)
        for token, kind_of in zip(tokens, types, strict=True)
        if kind_of in (_CONTROL, _USER_DEFINED)
    ]
    backend.add_tokens(added)
    bos, eos = (meta.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos"))
    first = meta.get("tokenizer.ggml.add_bos_token", kind == "llama") and bos is not None
    last = meta.get("tokenizer.ggml.add_eos_token", False) and eos is not None
    if first or last:
        pieces = [*([tokens[bos]] if first else []), "$A", *([tokens[eos]] if last else [])]
        known = [(tokens[i], i) for i, wanted in ((bos, first), (eos, last)) if wanted]
        template = processors.TemplateProcessing(single=" ".join(pieces), special_tokens=known)
        backend.post_processor = template
    ends = (eos, meta.get("tokenizer.ggml.eot_token_id"), meta.get("tokenizer.ggml.eom_token_id"))
    texts = {f"{n}_token": tokens[i] for n, i in (("bos", bos), ("eos", eos)) if i is not None}
    special = SpecialTokens(bos_id=bos, eos_ids=tuple(dict.fromkeys(e for e in ends if e is not None)), texts=texts)
    return Tokenizer(backend, special, meta.get("tokenizer.chat_template"), sentencepiece=kind == "llama")


def _byte_level(meta: Mapping[str, Any], tokens: list[str]) -> tokenizers.Tokenizer:
    pre = meta.get("tokenizer.ggml.pre", "gpt-2")
    if pre not in _SPLITS:
        raise UnsupportedModelError(
            f"tokenizer.ggml.pre = {pre!r} is not known; {', '.join(_SPLITS)} are. Pass tokenizer=PATH of the model's "
            "Hugging Face folder",
            field="tokenizer.ggml.pre",
        )
    merges = [tuple(merge.split(" ", 1)) for merge in meta.get("tokenizer.ggml.merges", ())]
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=merges,
            # Llama 3: a piece that is a token as it stands is that token, whatever the merges say.
            ignore_merges=pre in ("llama-bpe", "llama3", "llama-v3"),
        )
    )
    digits, pattern = _SPLITS[pre]
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    steps += [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(meta: Mapping[str, Any], tokens: list[str], types: list[int]) -> tokenizers.Tokenizer:
    scores = meta.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise CheckpointError("tokenizer.ggml.scores is missing or of the wrong length", field="tokenizer.ggml.scores")
    vocab = {token: i for i, token in enumerate(tokens)}
    merges: list[tuple[float, int, int, tuple[str, str]]] = []
    for token, i in vocab.items():
        if types[i] != _NORMAL:
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                merges.append((-scores[i], vocab[left], vocab[right], (left, right)))
    merges.sort(key=lambda m: m[:3])
    unknown = meta.get("tokenizer.ggml.unknown_token_id")
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=[m[3] for m in merges],
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=_BYTE in types,
        )
    )
    prefix = meta.get("tokenizer.ggml.add_space_prefix", True)
    steps: list[Any] = [normalizers.Prepend("▁")] if prefix else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    strip: list[Any] = [decoders.Strip(" ", 1, 0)] if prefix else []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return backend
