"""The tokens that end an answer of a GGUF file, by llama.cpp's rule."""

from __future__ import annotations

import pytest

from slipstream.engine.text.tokenizer import Tokenizer
from slipstream.spec.stored.gguf_ends import END_NAMES, end_tokens
from tests.data.make_tokens import write_gguf
from tests.engine.text.test_tokenizer import GOLDEN

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
FIRST = len(GOLDEN["byte_level"]["tokens"])


def ends(tmp_path, *names, kind=CONTROL, **fields):
    """The texts of the ends of a byte-level vocabulary with `names` after its own tokens, whose </s> is its end."""
    own = GOLDEN["byte_level"]
    tokens = [*own["tokens"], *names]
    types = [*own["token_type"], *[kind] * len(names)]
    made = own | {"pre": "gpt-2", "tokens": tokens, "token_type": types} | fields
    tokenizer = Tokenizer.from_pretrained(write_gguf(tmp_path / "x.gguf", made))
    return [tokenizer.id_to_token(i) for i in tokenizer.eos_token_ids], tokenizer


def test_gpt_oss_ends_with_return_or_call_and_not_with_end(tmp_path):
    names = ("<|return|>", "<|call|>", "<|end|>", "<|start|>", "<|endoftext|>")
    for fields in ({}, {"eot_token_id": FIRST + 2}):
        found, _ = ends(tmp_path, *names, eos_token_id=FIRST, **fields)
        assert found == ["<|return|>", "</s>", "<|call|>", "<|endoftext|>"]


@pytest.mark.parametrize(
    ("names", "is_end"),
    [
        (("<|end|>",), True),
        (("<|end|>", "<|return|>"), True),
        (("<|end|>", "<|call|>"), True),
        (("<|end|>", "<|calls|>", "<|flush|>"), False),
        (("<|end|>", "<|calls|>", "<|return|>"), False),
    ],
)
def test_end_counts_unless_the_vocabulary_has_messages_of_several_channels(tmp_path, names, is_end):
    found, _ = ends(tmp_path, *names)
    assert ("<|end|>" in found) == is_end


def test_closing_tag_is_no_end_where_tool_responses_are(tmp_path):
    found, _ = ends(tmp_path, "<turn|>", "<|tool_response>", eos_token_id=FIRST)
    assert found == ["<turn|>", "<|tool_response>"]


@pytest.mark.parametrize("kind", [NORMAL, CONTROL, USER_DEFINED])
@pytest.mark.parametrize("name", sorted(END_NAMES - {"</s>", "<|tool_response>"}))
def test_named_token_is_an_end_whatever_its_type(tmp_path, name, kind):
    found, tokenizer = ends(tmp_path, name, kind=kind)
    assert found == ["</s>", name]
    assert FIRST in tokenizer.special_ids
    assert FIRST in tokenizer.encode(f"a{name}")


def test_padding_repository_and_file_of_code_models_are_ends(tmp_path):
    names = ("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|fim_prefix|>", "[PAD]")
    found, _ = ends(tmp_path, *names)
    assert found == ["</s>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"]
    found, _ = ends(tmp_path, *names, fim_pad_token_id=FIRST + 3, eom_token_id=FIRST + 4)
    assert found == ["</s>", "[PAD]", "<|fim_prefix|>", "<|repo_name|>", "<|file_sep|>"]


def test_silent_sentencepiece_file_ends_with_its_second_token():
    assert end_tokens({"tokenizer.ggml.model": "llama"}) == (2,)
    assert end_tokens({"tokenizer.ggml.model": "t5"}) == (1,)
    assert end_tokens({"tokenizer.ggml.model": "gpt2"}) == ()
    for eos, eot in ((7, 7), (7, None)):  # each once, and not the kind's own beside a number
        numbers = {"tokenizer.ggml.eos_token_id": eos, "tokenizer.ggml.eot_token_id": eot}
        assert end_tokens({"tokenizer.ggml.model": "llama", **numbers}) == (7,)


def test_templates_of_a_file_are_found_by_their_names(tmp_path):
    fields = {"tokenizer.chat_template": "D", "tokenizer.chat_template.tool_use": "T"}
    _, tokenizer = ends(tmp_path, **fields)
    assert tokenizer.apply_chat_template([]) == "D"
    assert tokenizer.apply_chat_template([], tools=[{}]) == "T"
