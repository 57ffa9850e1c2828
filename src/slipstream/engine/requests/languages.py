"""Inputs of an encoder-decoder's encoder and decoder, with the language tokens of translation models. No torch.

Translation models have a token for each language. A prompt names languages next to its text, {"prompt": "…",
"source_language": "eng_Latn", "target_language": "deu_Latn"}, as the tokenizer spells them, or without the surrounding
signs (de for __de__ and >>de<<).

1. The source's token replaces the language token that the tokenizer adds at one end of a text (NLLB, mBART, M2M-100).
2. The target's token is the decoder's second token; the default is the checkpoint's `forced_bos_token_id`.
3. In Marian the target's token precedes the encoder's text instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slipstream.errors import RequestError
from slipstream.params.prompts import Prompt

if TYPE_CHECKING:
    from slipstream.engine.text.tokenizer import Tokenizer
    from slipstream.spec.description import ModelDescription
    from slipstream.spec.model import EncoderSpec

LANGUAGES = ("source_language", "target_language")
FORMS = ("{}", "__{}__", ">>{}<<")
BEFORE_TEXT = ">>{}<<"


def without_languages(prompt: dict[str, Any], description: ModelDescription | None) -> Any:
    """A prompt without its language keys. RequestError if the model supports none."""
    encoder = None if description is None else description.spec.encoder
    if encoder is None or encoder.audio is not None:
        name = next(name for name in LANGUAGES if name in prompt)
        raise RequestError(f"{name}: this model translates no text; leave it out", field=name)
    return {name: value for name, value in prompt.items() if name not in LANGUAGES}


def both_sides(
    tokenizer: Tokenizer | None, encoder: EncoderSpec, prompt: Prompt, tokens: list[int]
) -> tuple[tuple[int, ...], list[int]]:
    """(the encoder's tokens, the decoder's first tokens) of a prompt with these tokens.
    RequestError names a language that the tokenizer lacks."""
    begin = [encoder.start_token_id, *encoder.forced]
    named: dict[str, Any] = dict(prompt) if isinstance(prompt, dict) else {}
    source, target = (named.get(name) for name in LANGUAGES)
    if source is not None:
        tokens = _from_source(tokenizer, _language(tokenizer, source, LANGUAGES[0])[0], tokens)
    if target is not None:
        token, form = _language(tokenizer, target, LANGUAGES[1])
        if form == BEFORE_TEXT:
            return (token, *tokens), begin
        begin = [encoder.start_token_id, token]
    return tuple(tokens), begin


def _language(tokenizer: Tokenizer | None, name: Any, field: str) -> tuple[int, str]:
    """(token of a language, the spelling in `FORMS` that the tokenizer uses)."""
    if tokenizer is None:
        raise RequestError(f"{field} needs a tokenizer (skip_tokenizer_init is set)", field=field)
    for form in FORMS if isinstance(name, str) and name else ():
        token = tokenizer.token_to_id(form.format(name))
        if token is not None and (form != "{}" or _may_be_language(tokenizer, token)):
            return token, form
    known = sorted(t for i in tokenizer.special_ids if (t := _spelled(tokenizer, i)))
    more = ", …" if len(known) > 300 else ""
    some = f"; use one of {', '.join(known[:300])}{more}" if known else "; leave it out"
    raise RequestError(f"{field}={name!r} is no language of this tokenizer's{some}", field=field)


def _may_be_language(tokenizer: Tokenizer, token: int) -> bool:
    return bool(_spelled(tokenizer, token)) and token in tokenizer.special_ids


def _spelled(tokenizer: Tokenizer, token: int) -> str:
    """Text of a special token that may be a language's; empty for others, which have signs around them (</s>, [PAD])."""
    text = tokenizer.id_to_token(token) or ""
    return "" if text[:1] in ("<", "[") else text


def _from_source(tokenizer: Tokenizer | None, language: int, tokens: list[int]) -> list[int]:
    assert tokenizer is not None
    ends = {0: tokenizer.prefix, len(tokens) - len(tokenizer.suffix): tokenizer.suffix}
    for first, added in ends.items():
        for i, token in enumerate(added):
            at = first + i
            if _may_be_language(tokenizer, token) and tokens[at : at + 1] == [token]:
                return [*tokens[:at], language, *tokens[at + 1 :]]
    raise RequestError(
        "source_language: this tokenizer puts no language next to a text, or special tokens were not added; leave it out",
        field="source_language",
    )
