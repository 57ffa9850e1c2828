"""What the scheduler knows of one request. Stored state is minimal; the rest follows from it."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import TYPE_CHECKING

from slipstream.types import EngineRequest

if TYPE_CHECKING:
    from slipstream.core.speculation import Drafting


class Status(Enum):
    FORKING = auto()  # waits for the request whose prompt it shares
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class Request:
    """Tokens [0, num_computed_tokens) are in the cache, or will be when the steps in flight are done.

    `num_pending` tokens were sampled by steps in flight. They count, but only the device knows them.

    `blocks[g]` is the block table of group g. All tables are equally long, but for that of an encoder's text. The first
    `num_passed[g]` entries of a window group are the null block: those blocks were released.
    """

    __slots__ = (
        "block_keys",
        "blocks",
        "decodes_until",
        "drafting",
        "drafts",
        "end",
        "forks",
        "held",
        "in_worker",
        "needs_copy",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_passed",
        "num_pending",
        "num_pending_drafts",
        "num_preemptions",
        "num_prompt_tokens",
        "num_registered",
        "order",
        "request_id",
        "root_key",
        "spec",
        "status",
        "stops",
        "token_ids",
    )

    def __init__(self, spec: EngineRequest, order: tuple[int, float, int], root_key: bytes, num_groups: int) -> None:
        self.spec = spec
        self.request_id = spec.request_id
        self.order = order  # priority, arrival, number: who goes first
        self.root_key = root_key
        self.token_ids = list(spec.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.end = self.num_prompt_tokens + (1 if spec.pooled else spec.max_tokens)  # it never has more tokens than this
        self.stops = frozenset((*spec.eos_token_ids, *spec.sampling.stop_token_ids))
        self.status = Status.WAITING
        self.held = False  # nothing is scheduled of it yet, wherever it stands
        self.num_computed_tokens = 0
        self.num_pending = 0
        self.blocks: list[list[int]] = [[] for _ in range(num_groups)]
        self.num_passed = [0] * num_groups
        self.block_keys: list[bytes] = []
        self.num_registered = 0  # leading blocks offered to the prefix cache
        self.needs_copy = False  # the blocks it writes next may be shared
        self.decodes_until = 0  # before this position a step needs nothing but the next token: no block, copy or check
        self.drafts: tuple[int, ...] = ()  # guessed tokens behind the last one, to be verified by the next step
        self.num_pending_drafts = 0  # of the step in flight: nobody knows yet how many of them are right
        self.drafting: Drafting | None = None  # what drafts are made from, once there were to be some
        self.in_worker = False
        self.forks: list[Request] = []  # wait for our prompt
        self.num_cached_tokens = 0
        self.num_preemptions = 0

    def draft(self, tokens: Sequence[int]) -> None:
        """Guess that `tokens` follow the last one. The next step computes them with that token and samples at each; `update`
        then takes the tokens up to the first wrong guess, and one more."""
        self.drafts, self.decodes_until = tuple(tokens), 0

    @property
    def num_tokens(self) -> int:
        """Known and pending."""
        return len(self.token_ids) + self.num_pending

    @property
    def holds_blocks(self) -> bool:
        return bool(self.blocks[0])
