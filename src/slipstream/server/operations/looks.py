"""Looks of the self-check at the model, as a replica's status has them."""

from __future__ import annotations

import msgspec


class Look(msgspec.Struct, kw_only=True):
    """One look of a check: when (seconds since 1970), the KL in nats, the share of likeliest tokens that are the
    same, and the share of tasks that were done, if there are any."""

    time: float
    kl: float
    top1_agreement: float
    tasks: float | None
    is_good: bool


class VersionCheck(msgspec.Struct, kw_only=True):
    """The looks of a check at a version of the weights. KL in nats, of the first look and the last, and the
    largest; `top1_agreement` and `tasks` are the last one's. Times are seconds since 1970."""

    version: str
    against: str  # "the fingerprint", or "its own first look"
    num_looks: int
    num_bad: int
    kl_first: float
    kl_last: float
    kl_max: float
    top1_agreement: float
    tasks: float | None
    first_time: float
    last_time: float
    looks: list[Look]  # over the whole time; where they were many, the worst of each few
