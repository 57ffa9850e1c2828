"""Makes a scheduler with the participants that an engine needs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from slipstream.config import CacheConfig, SchedulingConfig
from slipstream.config.forms import NO_DRAFTS, DraftSettings, SpeculationConfig
from slipstream.core.participants.adapters import AdapterAdmission, LoadAdapter
from slipstream.core.participants.base import Participant
from slipstream.core.participants.routed_experts import KeptRoutedExperts
from slipstream.core.participants.speculation import Speculation
from slipstream.core.participants.whole_media import WholeMedia
from slipstream.core.scheduler import Scheduler
from slipstream.core.tiers.block_store import BlockStore
from slipstream.costs.graph_sizes import Padding


def make_scheduler(
    scheduling: SchedulingConfig,
    cache: CacheConfig,
    *,
    max_model_len: int,
    num_blocks: int,
    salt: str = "",
    speculation: SpeculationConfig = NO_DRAFTS,
    drafts_ahead: bool = False,
    max_adapters: int = 0,
    load_adapter: LoadAdapter | None = None,
    whole_media: bool = False,
    routed_experts: bool = False,
    stores: Sequence[BlockStore] = (),
    padded: Padding | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Scheduler:
    """Scheduler of a text-generating model; arguments beyond `Scheduler`'s are of participants.

    Grammars and beam searches join with their first request (`engine/listeners.py`).

    `drafts_ahead`: the drafter starts the next drafts before these are verified. `max_adapters`:
    maximum adapters that run at once; `load_adapter` loads them. `whole_media`: all tokens of an
    image attend to each other. `routed_experts`: answers include the experts of their tokens.
    """
    participants: list[Participant] = []
    if isinstance(speculation, DraftSettings):
        participants.append(Speculation(speculation))
    if max_adapters or load_adapter is not None:
        participants.append(AdapterAdmission(load_adapter or (lambda lora, keep: ""), max_adapters))
    if whole_media:
        participants.append(WholeMedia())
    if routed_experts:
        participants.append(KeptRoutedExperts(num_blocks, cache.block_size))
    return Scheduler(
        scheduling,
        cache,
        max_model_len=max_model_len,
        num_blocks=num_blocks,
        salt=salt,
        participants=participants,
        drafts_ahead=drafts_ahead,
        stores=stores,
        padded=padded,
        clock=clock,
        max_drafts=speculation.limit,
    )
