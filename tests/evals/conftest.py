"""Fixtures that the tests of evaluation share with those of compression."""

from tests.compress.conftest import one_thread

__all__ = ["one_thread"]
