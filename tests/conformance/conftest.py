"""Servers that are checked: those of tests/server."""

from tests.server.conftest import (  # noqa: F401
    model,
    serve,
    tiny_encoder_server,
    tiny_path,
    tiny_server,
)
