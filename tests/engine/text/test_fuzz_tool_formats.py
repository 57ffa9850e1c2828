"""Random answers through each parser of a tool format; `python -m tests.engine.text.fuzz_tool_formats` reads more."""

from __future__ import annotations

import pytest

from tests.engine.text.fuzz_tool_formats import PARSERS, fuzz


@pytest.mark.parametrize("name", PARSERS)
def test_random_answers_are_read_and_pieces_change_nothing(name):
    assert fuzz(name, 60) == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", PARSERS)
def test_many_random_answers_are_read_and_pieces_change_nothing(name):
    assert fuzz(name, 3000, seed=1) == []
