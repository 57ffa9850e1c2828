"""Languages of a model that translates over HTTP, with OpenAI's own client."""

from __future__ import annotations

import openai
import pytest

from slipstream import LLM, SamplingParams
from slipstream.config import EngineArgs
from slipstream.engine.async_llm import AsyncLLM
from tests.engine.test_encoder_decoder import write_languages
from tests.server.conftest import serving
from tests.support import tiny_models

SETTINGS = dict(device="cpu", dtype="float32", num_threads=1, block_size=4, max_model_len=64)


def test_completions_take_languages(tmp_path):
    tiny_models.build_bart(tmp_path, "m2m_100", pad_token_id=0)
    write_languages(tmp_path, "eng_Latn $A </s>")
    asked = [
        {"target_language": "eng_Latn"},
        {"source_language": "de", "target_language": "de"},
        {},
    ]
    with LLM(str(tmp_path), **SETTINGS) as llm:
        sampling = SamplingParams(temperature=0, max_tokens=16)
        own = [llm.generate({"prompt": "hello", **how}, sampling)[0] for how in asked]
    expected = [output.outputs[0].text for output in own]
    assert len({tuple(output.outputs[0].token_ids) for output in own}) == 3
    args = EngineArgs(model=str(tmp_path), **SETTINGS)
    with serving(start=lambda: AsyncLLM.start(args), served_model_names=("m",)) as server:
        create = server.client().completions.create
        for how, text in zip(asked, expected, strict=True):
            answer = create(model="m", prompt="hello", max_tokens=16, temperature=0, extra_body=how)
            assert answer.choices[0].text == text
        several = create(
            model="m", prompt=["hello", "hello"], max_tokens=16, temperature=0, extra_body=asked[0]
        )
        assert [choice.text for choice in several.choices] == [expected[0]] * 2
        for field, wrong in (("target_language", "tlh"), ("source_language", 3)):
            with pytest.raises(openai.BadRequestError) as caught:
                create(model="m", prompt="hello", extra_body={field: wrong})
            assert caught.value.param == field
