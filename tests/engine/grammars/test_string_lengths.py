"""Masks by the lengths of strings are those that llguidance finds by itself."""

from __future__ import annotations

import random

import numpy as np
import pytest

from slipstream.engine.grammars.compiling import GrammarCompiler
from slipstream.engine.grammars.grammar import Grammars
from slipstream.engine.grammars.string_lengths import (
    CountedStrings,
    LengthVocabulary,
    StringLengths,
    counts_only,
)
from slipstream.engine.text.tokenizer import Tokenizer
from slipstream.messages.requests import EngineRequest
from slipstream.messages.steps import ScheduledRequest, StepPlan
from slipstream.params.answer_forms import StructuredOutputsParams
from slipstream.params.sampling import SamplingParams

NUM_TOKENS = 3000
TEXT = {"type": "string"}
SHORT = {"type": "string", "maxLength": 12}
LONG = {"type": "string", "minLength": 3, "maxLength": 30}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """Bytes, and words of letters, quotes, escapes, spaces and characters of two to four bytes, some of them cut in pieces."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    rng = random.Random(0)
    spell = dict(zip(range(256), _alphabet(), strict=True))
    words = dict.fromkeys(["</s>", *spell.values()])
    while len(words) < NUM_TOKENS:
        text = "".join(rng.choices('abcdeé中😀 0123-:,{}[]"\\\n', k=rng.randint(2, 12))).encode()
        first = rng.choice((0, 0, 0, 1))
        words[
            "".join(spell[byte] for byte in text[first : len(text) - rng.choice((0, 0, 0, 1))])
        ] = None
    backend = Backend(
        models.BPE(vocab={word: i for i, word in enumerate(words) if word}, merges=[])
    )
    backend.pre_tokenizer, backend.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    backend.add_special_tokens(["</s>"])
    folder = tmp_path_factory.mktemp("words")
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        '{"eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}'
    )
    return Tokenizer.from_pretrained(folder)


def _alphabet():
    """GPT-2's character of each byte."""
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printed else chr(next(others)) for byte in range(256)]


def request(params):
    sampling = SamplingParams(structured_outputs=params)
    return EngineRequest(
        request_id="r", prompt_token_ids=(5,), sampling=sampling, eos_token_ids=(0,), max_tokens=9
    )


def closed(**properties):
    return {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }


def opened(**properties):
    return {"type": "object", "properties": properties, "required": [*properties]}


SCHEMAS = [
    (SHORT, CountedStrings.ALL),
    (closed(name=LONG, kind={"enum": ["red", "green"]}, note=TEXT), CountedStrings.ALL),
    (
        {
            "type": "array",
            "items": closed(a=SHORT, b={"type": "array", "items": LONG, "maxItems": 3}),
        },
        CountedStrings.ALL,
    ),
    (closed(a={"$ref": "#/$defs/s"}) | {"$defs": {"s": SHORT}}, CountedStrings.ALL),
    (opened(name=SHORT, nature=LONG), CountedStrings.BOUNDED),
    (closed(a={"anyOf": [SHORT, LONG, {"type": "null"}]}), CountedStrings.BOUNDED),
    ({"type": "object", "additionalProperties": SHORT}, CountedStrings.ALL),
    ({"type": "object", "additionalProperties": SHORT, "required": ["ab"]}, CountedStrings.BOUNDED),
]


@pytest.mark.parametrize(("schema", "counts"), SCHEMAS)
def test_masks_are_those_of_the_whole_vocabulary(tokenizer, schema, counts, monkeypatch):
    assert counts_only(schema) is counts
    monkeypatch.setattr(GrammarCompiler, "_states_of_schema", lambda self, grammar: None)
    grammars = Grammars(
        lambda: tokenizer, NUM_TOKENS + 40, lambda tokenizer: tokenizer.eos_token_ids
    )
    params = StructuredOutputsParams(json=schema)
    found = []
    expand = StringLengths.expand
    monkeypatch.setattr(
        StringLengths, "expand", lambda self, own: found.append(expand(self, own)) or found[-1]
    )
    rng = np.random.default_rng(0)
    for answer in range(12):
        asked = request(params)
        if not grammars.begin(asked):
            while grammars.is_compiling:
                assert all(error is None for _, error in grammars.compiled())
        state = grammars._states["r"]
        whole = grammars._compiled["", params][0].deep_copy()
        for at in range(40):
            mask, ended = grammars.masks(
                StepPlan(step_id=1, scheduled=(ScheduledRequest("r", 1, 1, 1),))
            )
            if ended:
                break
            expected = np.zeros(len(mask.bits) // 4, np.int32)
            whole.unsafe_compute_mask_ptr(expected.ctypes.data, expected.nbytes)
            same = np.frombuffer(mask.bits, np.int32) ^ expected
            same[0] &= ~1  # the end
            assert not same.any(), (answer, at)
            allowed = np.flatnonzero(np.unpackbits(expected.view(np.uint8), bitorder="little"))
            if not len(allowed := allowed[allowed != 0]):
                break
            token = int(rng.choice(allowed))
            grammars.accept("r", [token])
            assert whole.consume_token(token)
            if at % 7 == 3:  # as behind guesses
                state.rollback(1)
                state.accept([token])
        assert state.lengths is not None, "it goes on to the end"
        grammars.forget(["r"])
    assert sum(mask is not None for mask in found) > 4


@pytest.mark.parametrize(
    "schema",
    [
        closed(a={"type": "string", "maxLength": 9, "pattern": "^a"}),
        closed(a={"type": "string", "maxLength": 30, "format": "date"}),
        closed(a={"anyOf": [SHORT, {"const": "abcdefghijklmnop"}]}),
        {"type": "object", "properties": {"a": TEXT}},
        {"type": "object", "required": ["ab"]},
        {"type": "object", "required": ["ab"], "additionalProperties": {"type": "integer"}},
        {"$defs": {"o": {"required": ["ab"]}}, "$ref": "#/$defs/o"},
        {"type": "object", "propertyNames": {"maxLength": 3}},
        {"type": "object", "minProperties": 1, "additionalProperties": SHORT},
        {"type": "object", "patternProperties": {"^a": SHORT}},
        {"properties": []},
    ],
)
def test_where_more_than_the_length_counts(schema):
    assert counts_only(schema) is None


def test_a_name_beside_named_properties_is_read_by_its_characters(tokenizer):
    """`"abcd` may go on as any other name does. Were it taken for "aaaa", anything could be its value."""
    grammars = Grammars(lambda: tokenizer, NUM_TOKENS, lambda tokenizer: tokenizer.eos_token_ids)
    params = StructuredOutputsParams(
        json={**opened(abcd={"enum": ["e"]}, other=SHORT), "required": []}
    )
    grammars.begin(request(params))
    while grammars.is_compiling:
        grammars.compiled()
    tokens = {tokenizer.token_bytes(i): i for i in range(1, NUM_TOKENS)}
    plan = StepPlan(step_id=1, scheduled=(ScheduledRequest("r", 1, 1, 1),))
    for byte in b'{"abcd":"':
        grammars.masks(plan)
        grammars.accept("r", [tokens[bytes([byte])]])
    mask = np.unpackbits(np.frombuffer(grammars.masks(plan)[0].bits, np.uint8), bitorder="little")
    assert tokenizer.token_bytes(int(np.flatnonzero(mask)[0])) == b"e"
    assert not mask[tokens[b"a"]]


def test_a_token_in_the_words_of_lengths():
    tokens = [
        b"</s>",
        b'"',
        b"a",
        b"abc",
        "né".encode(),
        b'ab",',
        b"\xc3",
        "a中".encode()[:-1],
        b"z",
    ]
    made = LengthVocabulary(tokens, [0], len(tokens))
    texts = [b"", *(b"a" * n for n in range(1, 12))]
    inside = [made.spelled(i, inside=True)[0] for i in range(1, len(tokens))]
    assert inside[0] == 32 + ord('"')
    assert inside[1] == inside[7] == 32 + ord("a"), "one plain character"
    assert inside[2] == 32 + 256 + 1, '"aaa"'
    assert inside[3] == 32 + 256, "two characters, three bytes"
    assert inside[5] == 32 + 0xC3
    assert len({*inside}) == 7
    assert made.spelled(4, inside=False) == [32 + byte for byte in "né".encode()]
    assert made.spelled(1, inside=False) == [32 + ord('"')]
    assert len(texts) == 12
