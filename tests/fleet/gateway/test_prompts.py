"""A gateway counts the tokens of pooled requests as the replica will."""

from __future__ import annotations

import json

import pytest

from slipstream.config import EngineArgs
from slipstream.fleet.gateway.prompts import Prompts


@pytest.mark.parametrize(
    ("path", "body", "count"),
    [
        ("/v1/embeddings", {"input": ["the cat", "the"]}, 9),
        ("/embeddings", {"input": "the cat"}, 6),
        ("/v2/embed", {"texts": ["the cat"], "input_type": "search_query", "model": "m"}, 6),
        ("/pooling", {"input": ["the cat", "the"]}, 9),
        ("/v1/pooling", {"input": "the cat", "task": "token_embed"}, 6),
    ],
)
async def test_tokens_of_pooled_requests_are_reserved(tiny_encoder, path, body, count):
    prompts = Prompts("m", EngineArgs(model=str(tiny_encoder), device="cpu"), {})
    read = await prompts.read(path, json.dumps(body).encode(), {}, counts=True)
    assert read.reserve == (count, 0)


@pytest.mark.parametrize("path", ["/classify", "/v1/classify", "/embed_sparse"])
async def test_a_request_that_the_replica_refuses_reserves_nothing(tiny_encoder, path):
    prompts = Prompts("m", EngineArgs(model=str(tiny_encoder), device="cpu"), {})
    body = {"input": "the cat"} if "classify" in path else {"inputs": "the cat"}
    read = await prompts.read(path, json.dumps(body).encode(), {}, counts=True)
    assert read.reserve is None
