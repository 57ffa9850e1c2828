"""Reasons why a forward path does not support a model or a batch."""

from __future__ import annotations


class Reason(str):
    """A reason as a sentence for a user, without a full stop."""

    notable: bool
    """Whether a user could expect the path to work. That a CPU lacks CUDA kernels is not
    notable."""

    def __new__(cls, text: str, *, notable: bool = True) -> Reason:
        reason = super().__new__(cls, text)
        reason.notable = notable
        return reason


class NotCovered(Exception):  # noqa: N818 (no error: another way is taken)
    def __init__(self, reason: Reason) -> None:
        super().__init__(str(reason))
        self.reason = reason
