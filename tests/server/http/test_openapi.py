"""The OpenAPI document."""

from __future__ import annotations

import pytest

from slipstream.server.http import openapi


def test_a_path_without_a_group_is_named():
    assert openapi._group("/v1/files/{id}/content") == "OpenAI"
    with pytest.raises(LookupError, match="/v1/new is in no group"):
        openapi._group("/v1/new")
