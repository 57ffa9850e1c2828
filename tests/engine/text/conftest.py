"""Tokenizers that several files of tests read."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.engine.text.tokenizer import Tokenizer
from tests.data.make_tokens import golden_tokens, write_gguf
from tests.support import tiny_models

GOLDEN = golden_tokens()


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> dict[str, Tokenizer]:
    folder = tmp_path_factory.mktemp("small")
    files = {
        "bytes": GOLDEN["byte_level"] | {"pre": "smollm"},
        "spaces": GOLDEN["sentencepiece"],
        "no_prefix": GOLDEN["sentencepiece"] | {"add_space_prefix": False},
    }
    return {
        name: Tokenizer.from_pretrained(write_gguf(folder / f"{name}.gguf", f))
        for name, f in files.items()
    }


@pytest.fixture
def folder(tmp_path) -> Path:
    tiny_models.write_tokenizer(tmp_path)
    return tmp_path
