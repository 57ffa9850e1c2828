"""Weights that are made when they are taken."""

from __future__ import annotations

import pytest

from slipstream.model.load.pulled import Pulled


def counted(*names):
    made = []
    return Pulled({n: lambda n=n: made.append(n) or n.upper() for n in names}), made


def test_a_value_is_made_when_it_is_taken_and_not_kept():
    values, made = counted("a", "b")
    assert (len(values), "a" in values, made) == (2, True, [])
    assert values.pop("a") == "A"
    assert (list(values), made) == (["b"], ["a"])
    assert values.pop("a", None) is None


def test_a_part_can_be_taken_twice():
    values, made = counted("a.x", "b.x")
    for _ in range(2):
        own = values.only(lambda name: name.startswith("a."))
        assert own.pop("a.x") == "A.X"
        assert not own
    assert (made, sorted(values)) == (["a.x", "a.x"], ["a.x", "b.x"])


def test_a_value_that_is_set_replaces_its_maker():
    values, made = counted("a")
    values["a"] = "other"
    assert (dict(values), made) == ({"a": "other"}, [])


def test_an_error_of_a_maker_is_not_taken_for_a_missing_name():
    values = Pulled({"a": lambda: {}["inner"]})
    with pytest.raises(KeyError, match="inner"):
        values.get("a")
    with pytest.raises(KeyError, match="inner"):
        values.pop("a", None)
