from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A tiny model with random weights and a tokenizer."""
    from tests.support import tiny_models

    folder = tmp_path_factory.mktemp("tiny-model")
    tiny_models.write_with_tokenizer(folder, max_position_embeddings=1024)
    return folder
