"""Inputs of a draft head, gathered from the rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from slipstream.messages.steps import ScheduledRequest, StepPlan
from slipstream.worker.inputs.input_batch import GatheredInputs, gather
from slipstream.worker.inputs.rows import RowTable


def gather_pairs(table: RowTable, shares: Sequence[ScheduledRequest]) -> GatheredInputs:
    """Inputs of a draft head for `shares` of requests (`worker/draft/head_drafter.py`).

    Each token is at the position before its own, where the state is with which it is paired. The
    sampled token follows the token, as always.
    """
    before = tuple([s._replace(num_computed_tokens=s.num_computed_tokens - 1) for s in shares])
    given = gather(table, StepPlan(0, before), ahead=1)
    requests = tuple([s for s in shares if s.num_sampled])
    return dataclasses.replace(given, sampled=dataclasses.replace(given.sampled, requests=requests))
