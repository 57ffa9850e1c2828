"""Servers to which `bench serve` sends requests, and the description of their load."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from slipstream.costs.environment import plain
from slipstream.errors import ConfigError

if TYPE_CHECKING:
    from slipstream.bench.adapters.openai import Endpoint
    from slipstream.bench.load import Arrivals


async def endpoint_of(
    args: argparse.Namespace, url: str, model: str | None, api_key: str | None
) -> Endpoint:
    """Endpoint at `url`, with the first model that it lists if none is given."""
    import msgspec

    from slipstream.bench.adapters.openai import Endpoint, OpenAIEndpoint

    endpoint = Endpoint(
        url=url, model=model or "", api_key=api_key, ignore_eos=args.ignore_eos, send_text=True
    )
    if model is None:
        async with OpenAIEndpoint(endpoint) as server:
            models = await server.served_models()
        if not models:
            raise ConfigError(f"{url} serves no model", field="url")
        endpoint = msgspec.structs.replace(endpoint, model=models[0].id)
    return endpoint


async def vocab_size_of(endpoint: Endpoint) -> int:
    """Size of the vocabulary that the endpoint reports for its model."""
    from slipstream.bench.adapters.openai import OpenAIEndpoint

    async with OpenAIEndpoint(endpoint) as server:
        found = {model.id: model.num_token_ids for model in await server.served_models()}.get(
            endpoint.model
        )
    if found is None:
        raise ConfigError(
            f"{endpoint.url} does not say how many token ids {endpoint.model} has; give --vocab-size, or a model with the "
            "same vocabulary: slipstream bench serve MODEL --url …",
            field="vocab_size",
        )
    return found


def described_arrivals(arrivals: Arrivals | None) -> dict[str, Any]:
    """The load's arrivals as data; None means those of the trace."""
    if arrivals is None:
        return {"kind": "trace"}
    return {"kind": type(arrivals).__name__.lower(), **plain(arrivals)}
