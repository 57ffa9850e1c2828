"""The checks. Importing this package registers all of them."""

from __future__ import annotations

from slipstream.conformance.areas import (
    embeddings,
    errors,
    framing,
    listings,
    load,
    reasoning,
    sampling,
    schemas,
    streams,
    tools,
    usage,
)

AREAS = [
    module.__name__.rpartition(".")[2]
    for module in (
        *(framing, streams, sampling, usage, schemas, tools, reasoning),
        *(errors, listings, embeddings, load),
    )
]
"""Areas in the order of checking. Load comes last, because a server may be busy after it."""
