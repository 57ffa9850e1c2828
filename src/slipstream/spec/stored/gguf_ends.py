"""The tokens of a GGUF file that end an answer, by llama.cpp's rule. No torch.

1. Tokens whose id is in the metadata: `eos`, `eot`, `eom`, and `fim_pad`, `fim_rep`, `fim_sep` of
   code-infilling models.
2. Tokens whose text is in `END_NAMES`, of any type, because many files give only one id, and some
   mark end tokens as plain text.
3. For each `fim_*` without an id, the first token with one of its names.
4. Excluded: a name that means something else if certain other tokens exist (`_MEANS_MORE`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

END_NAMES = frozenset((
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>",
    "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "</s>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]",
    "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~[",
))  # fmt: skip

_FILL_NAMES = {
    "fim_pad": frozenset(("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]")),
    "fim_rep": frozenset(("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>")),
    "fim_sep": frozenset(("<|file_sep|>",)),
}

_MEANS_MORE = (
    (
        "<|end|>",
        frozenset(("<|return|>", "<|call|>")),
    ),  # gpt-oss: ends one of several messages of an answer
    ("<|end|>", frozenset(("<|flush|>", "<|call|>"))),  # Solar Open; so are the next two
    ("<|end|>", frozenset(("<|return|>", "<|calls|>"))),
    ("<|end|>", frozenset(("<|flush|>", "<|calls|>"))),
    ("</s>", frozenset(("<|tool_response>",))),  # Gemma 4: an HTML tag
    ("</s>", frozenset(("<|plamo:eos|>",))),
)
"""(name, others): `name` doesn't end an answer if all of `others` do."""

_NAMES = END_NAMES.union(*_FILL_NAMES.values(), ("<|plamo:eos|>",))

NUMBERED = ("eos", "eot", "eom", *_FILL_NAMES)
"""Tokens whose ids the metadata gives, as `tokenizer.ggml.…_token_id`."""

DEFAULT_EOS = {"llama": 2, "t5": 1}
"""Default id of `eos` by `tokenizer.ggml.model`: SentencePiece's own."""


def end_tokens(metadata: Mapping[str, Any]) -> tuple[Any, ...]:
    """Ids of the tokens that end an answer, those from the metadata first. The reader of ids checks
    their range, not this function."""
    given, kind = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.model")
    tokens: list[Any] = given if isinstance(given, list) else []
    named = {i: t for i, t in enumerate(tokens) if isinstance(t, str) and t in _NAMES}
    found = {name: metadata.get(f"tokenizer.ggml.{name}_token_id") for name in NUMBERED}
    if found["eos"] is None and isinstance(kind, str):
        found["eos"] = DEFAULT_EOS.get(kind)
    for name, texts in _FILL_NAMES.items():
        if found[name] is None:
            found[name] = next((i for i, text in named.items() if text in texts), None)
    ends: list[Any] = []
    for number in (*found.values(), *(i for i, text in named.items() if text in END_NAMES)):
        if number is not None and number not in ends:
            ends.append(number)

    def text_of(number: Any) -> str | None:
        return named.get(number) if isinstance(number, int) else None

    texts_of_ends = set(map(text_of, ends))
    none = {name for name, others in _MEANS_MORE if others <= texts_of_ends}
    return tuple(number for number in ends if text_of(number) not in none)
