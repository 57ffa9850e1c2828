"""Results of single self-checks (looks) of the model, as a replica's status shows them."""

from __future__ import annotations

import msgspec


class Look(msgspec.Struct, kw_only=True):
    """Result of one self-check: its time (seconds since 1970), the KL divergence in nats, the
    fraction of equal most likely tokens, and the fraction of solved tasks, if there are any."""

    time: float
    kl: float
    top1_agreement: float
    tasks: float | None
    is_good: bool


class VersionCheck(msgspec.Struct, kw_only=True):
    """Results of the self-checks of a weight version. KL in nats of the first and the last check, and the
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
    looks: list[Look]  # over the whole time; if there were many, the worst of each group
