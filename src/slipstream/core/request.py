"""What the scheduler knows of one sequence. Stored state is minimal; everything else follows from it."""

from __future__ import annotations

from enum import Enum, auto

from slipstream.types import EngineRequest


class Status(Enum):
    FORKING = auto()  # waits for the sequence whose prompt it shares
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class Request:
    """Tokens [0, num_computed_tokens) are in the cache, or will be when the steps in flight are done.

    `num_pending` tokens were sampled by steps in flight: they count, but only the device knows them.
    """

    __slots__ = (
        "block_ids",
        "block_keys",
        "encoder_block_ids",
        "end",
        "forks",
        "in_worker",
        "needs_copy",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_pending",
        "num_preemptions",
        "num_prompt_tokens",
        "num_registered",
        "order",
        "root_key",
        "spec",
        "status",
        "stops",
        "token_ids",
    )

    def __init__(self, spec: EngineRequest, order: tuple[int, float, int], root_key: bytes) -> None:
        self.spec = spec
        self.order = order  # priority, arrival, number: who goes first
        self.root_key = root_key
        self.token_ids = list(spec.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.end = self.num_prompt_tokens + (1 if spec.pooled else spec.max_tokens)  # it never has more tokens than this
        self.stops = frozenset((*spec.eos_token_ids, *spec.sampling.stop_token_ids))
        self.status = Status.WAITING
        self.num_computed_tokens = 0
        self.num_pending = 0
        self.block_ids: list[int] = []
        self.encoder_block_ids: list[int] = []  # keys and values of what the encoder read
        self.block_keys: list[bytes] = []
        self.num_registered = 0  # leading blocks offered to the prefix cache
        self.needs_copy = False  # the block it writes next may be shared
        self.in_worker = False
        self.forks: list[Request] = []  # wait for our prompt
        self.num_cached_tokens = 0
        self.num_preemptions = 0

    @property
    def request_id(self) -> str:
        return self.spec.request_id

    @property
    def num_tokens(self) -> int:
        """Known and pending."""
        return len(self.token_ids) + self.num_pending
