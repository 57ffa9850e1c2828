"""The checks. Importing this package enters all of them in the table."""

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
"""The order of areas. Load comes last, since a server may be busy after it."""
