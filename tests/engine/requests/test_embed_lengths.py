"""The longest text of an embedding model, by the files of sentence-transformers before version 6 and since."""

from __future__ import annotations

import json

import pytest
import torch
from torch.nn import functional as F

from slipstream import LLM
from slipstream.errors import ContextLengthError, UnsupportedModelError
from slipstream.spec.description import read_spec
from tests.engine.requests.test_embed import SETTINGS
from tests.support import tiny_models

NEW = "sentence_transformers.base.modules.transformer.Transformer"
POOLING = "sentence_transformers.sentence_transformer.modules.pooling.Pooling"


@pytest.fixture
def folder(tmp_path):
    tiny_models.build_encoder(tmp_path)
    tiny_models.write_wordpiece(tmp_path)
    return tmp_path


def wrote(folder, *, limits=None, tokenizer=None, name="sentence_bert_config.json", pooling=None):
    """The folder as sentence-transformers 6 saves it."""
    modules = [{"path": "", "type": NEW}, {"path": "1_Pooling", "type": POOLING}]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    config = {"embedding_dimension": 32, "pooling_mode": "mean", "include_prompt": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({**config, **(pooling or {})}))
    if limits is not None:
        (folder / name).write_text(json.dumps(limits))
    file = folder / "tokenizer_config.json"
    old = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps({**old, "model_max_length": tokenizer}))
    return read_spec(folder)


@pytest.mark.parametrize(
    ("limits", "tokenizer", "length"),
    [
        ({"transformer_task": "feature-extraction"}, 20, 20),
        (None, 20, 20),
        (None, 20.0, 20),
        (None, None, None),
        (None, 10**30, None),
        (None, 1e30, None),
        ({"max_seq_length": 30}, 20, 30),
        ({"max_seq_length": None}, 20, 20),
        ({"max_seq_length": 30, "tokenizer_args": {"model_max_length": 40}}, 20, 40),
        ({"processor_kwargs": {"model_max_length": 40}}, 20, 40),
        ({"processing_kwargs": {"text": {"max_length": 50}}}, 20, 50),
        ({"processing_kwargs": {"text": {"truncation": True}}}, 20, 20),
    ],
)
def test_longest_text_is_the_first_that_the_files_say(folder, limits, tokenizer, length):
    assert wrote(folder, limits=limits, tokenizer=tokenizer).pooling.max_length == length


def test_longest_text_stands_in_files_of_old_versions(folder):
    found = wrote(folder, limits={"max_seq_length": 30}, name="sentence_roberta_config.json")
    assert found.pooling.max_length == 30


def test_folder_that_is_no_sentence_transformer_has_its_tokenizers_limit(folder):
    wrote(folder, tokenizer=20)
    (folder / "modules.json").unlink()
    assert read_spec(folder).pooling.max_length == 20


def test_reading_that_is_not_known_is_refused(folder):
    with pytest.raises(UnsupportedModelError, match=r"processing_kwargs\.text\.stride") as caught:
        wrote(folder, limits={"processing_kwargs": {"text": {"stride": 3}}})
    assert caught.value.field == "stride"


def test_pooling_mode_in_a_list_of_one_is_that_one(folder):
    assert wrote(folder, pooling={"pooling_mode": ["cls"]}).pooling.kind == "cls"
    with pytest.raises(UnsupportedModelError, match="pooling_mode"):
        wrote(folder, pooling={"pooling_mode": ["cls", "mean"]})


def test_long_text_is_cut_where_sentence_transformers_cuts_it(tmp_path):
    theirs = tiny_models.build_encoder(tmp_path)
    tiny_models.write_wordpiece(tmp_path)
    wrote(tmp_path, tokenizer=20)
    with LLM(str(tmp_path), **SETTINGS) as llm:
        with pytest.raises(ContextLengthError, match="20"):
            llm.embed("the " * 30)
        (cut,) = llm.embed("the " * 30, truncate=True)
    assert len(cut.prompt_token_ids) == 20
    with torch.no_grad():
        vector = theirs(torch.tensor([cut.prompt_token_ids])).last_hidden_state[0].mean(0)
    ours = torch.tensor(cut.embedding)
    torch.testing.assert_close(F.normalize(ours, dim=0), F.normalize(vector, dim=0))


def test_decoder_of_embeddings_has_a_limit_and_one_that_writes_has_none(tmp_path):
    tiny_models.build(tmp_path, "qwen3")
    tiny_models.write_tokenizer(tmp_path)
    assert (
        wrote(tmp_path, tokenizer=20, pooling={"pooling_mode": "lasttoken"}).pooling.max_length
        == 20
    )
    (tmp_path / "modules.json").unlink()
    assert read_spec(tmp_path).pooling.max_length is None
