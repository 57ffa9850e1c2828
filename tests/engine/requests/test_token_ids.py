"""Valid token ids: the quick check of all and the check that names the wrong one agree."""

from __future__ import annotations

import enum

import msgspec
import numpy as np
import pytest

from slipstream import SamplingParams
from slipstream.engine.requests.processor import InputProcessor
from slipstream.errors import RequestError
from slipstream.messages.requests import EngineRequest, count_ids, ids_of, pack_ids


class Token(enum.IntEnum):
    THREE = 3


@pytest.fixture
def processor():
    return InputProcessor(None, vocab_size=10, max_model_len=20, eos_token_ids=())


@pytest.mark.parametrize("ids", [(0,), (0, 9), (Token.THREE,), (1, Token.THREE)])
def test_ids_of_any_kind_are_taken_as_numbers(processor, ids):
    sampling = SamplingParams(stop_token_ids=ids, logit_bias=dict.fromkeys(ids, 1))
    prepared = processor.prepare({"prompt_token_ids": ids}, sampling)
    assert prepared.prompt_token_ids == list(ids)
    assert prepared.engine_requests[0].prompt_token_ids == pack_ids(ids)


def test_what_has_no_tokens_is_refused(processor):
    for wrong in (None, 5, np.array(5)):
        with pytest.raises(RequestError, match="is a list of ints") as error:
            processor.prepare({"prompt_token_ids": wrong}, SamplingParams())
        assert error.value.field == "prompt_token_ids"
    with pytest.raises(RequestError, match=r"`tolist\(\)` of an array"):
        processor.prepare({"prompt_token_ids": np.array([5])}, SamplingParams())


@pytest.mark.parametrize("wrong", [10, -1, 2**80, True, np.int64(1), 1.0, float("nan"), "1", None])
def test_what_is_none_is_named(processor, wrong):
    for ids in ((wrong,), (1, wrong), (wrong, 1)):
        with pytest.raises(RequestError, match=r"prompt_token_ids: .* is not a token id") as error:
            processor.prepare({"prompt_token_ids": ids}, SamplingParams())
        assert error.value.field == "prompt_token_ids"
        assert repr(wrong) in str(error.value)
    with pytest.raises(RequestError, match="stop_token_ids"):
        processor.prepare({"prompt_token_ids": [1]}, SamplingParams(stop_token_ids=[1, wrong]))
    with pytest.raises(RequestError, match="logit_bias"):
        processor.prepare({"prompt_token_ids": [1]}, SamplingParams(logit_bias={10: 1.0}))


@pytest.mark.parametrize("ids", [(3, 1, 2), pack_ids((3, 1, 2))], ids=["tuple", "bytes"])
def test_ids_cross_to_the_engine_as_they_are(ids):
    request = EngineRequest(
        request_id="a", prompt_token_ids=ids, sampling=SamplingParams(), max_tokens=1
    )
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=EngineRequest)
    assert sent.prompt_token_ids == ids
    assert sent.num_prompt_tokens == count_ids(ids) == 3
    assert [*ids_of(ids)] == [3, 1, 2]


@pytest.mark.parametrize("other", [1.0, True])
def test_parameters_that_equal_the_last_checked_ones_but_in_type_are_refused(other):
    SamplingParams(stop_token_ids=(1,), allowed_token_ids=(1,))
    for name in ("stop_token_ids", "allowed_token_ids"):
        with pytest.raises(RequestError, match=name):
            SamplingParams(**{"stop_token_ids": (1,), "allowed_token_ids": (1,), name: (other,)})
