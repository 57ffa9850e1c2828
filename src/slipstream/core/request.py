"""The scheduler's state of one request. It is minimal; properties give what follows from it."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import TYPE_CHECKING

from slipstream.types import EngineRequest

if TYPE_CHECKING:
    from slipstream.core.kv_cache_manager import KVCacheManager
    from slipstream.core.queue import Account
    from slipstream.core.speculation import Drafting


class Status(Enum):
    FORKING = auto()  # waits for the request whose prompt it shares
    WAITING = auto()
    LOADING = auto()  # waits for blocks from a tier
    RUNNING = auto()
    FINISHED = auto()


class Request:
    """Tokens [0, num_computed_tokens) are in the cache, or will be when the steps in flight are done.

    `num_pending` tokens were sampled by steps in flight. They count, but only the device knows them.

    `blocks[g]` is the block table of group g. All tables have the same length, except that of an encoder's text. The first
    `num_passed[g]` entries of a window group are the null block: those blocks were released.

    `kv` is where its blocks are. Of several it is chosen whenever the request is admitted without blocks. Only a beam stays:
    those of a search take over one another's blocks.
    """

    __slots__ = (
        "account",
        "block_keys",
        "blocks",
        "decodes_until",
        "drafting",
        "drafts",
        "end",
        "forks",
        "held",
        "in_worker",
        "is_beam",
        "kv",
        "looked_up",
        "may_draft",
        "mirostat_mu",
        "needs_copy",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_given",
        "num_overtaken",
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
        "verifies_until",
    )

    kv: KVCacheManager

    def __init__(
        self, spec: EngineRequest, order: tuple[int, float, int], root_key: bytes, num_groups: int
    ) -> None:
        self.spec = spec
        self.request_id = spec.request_id
        self.order = order  # (priority, arrival, number): the smallest goes first
        self.root_key = root_key
        self.token_ids = [*spec.prompt_token_ids, *spec.answer_token_ids]
        self.num_prompt_tokens = len(spec.prompt_token_ids)
        self.num_given = len(
            self.token_ids
        )  # the prompt's, and those of an answer that began elsewhere
        self.end = self.num_prompt_tokens + (
            1 if spec.pooled else spec.max_tokens
        )  # it never has more tokens than this
        self.stops = frozenset((*spec.eos_token_ids, *spec.sampling.stop_token_ids))
        self.status = Status.WAITING
        self.account: Account | None = None  # its owner's, since it is queued
        self.is_beam = spec.beam_of is not None
        self.held = (
            False  # it is not scheduled before `RequestTable.release`, a beam not before `go_on`
        )
        self.num_computed_tokens = 0
        self.num_pending = 0
        self.blocks: list[list[int]] = [[] for _ in range(num_groups)]
        self.num_passed = [0] * num_groups
        self.block_keys: list[bytes] = []
        self.num_registered = 0  # leading blocks offered to the prefix cache
        self.looked_up = False  # in the tiers below the device
        self.needs_copy = False  # the blocks it writes next may be shared
        self.decodes_until = 0  # a step at a position before this one needs no block, copy or check
        self.verifies_until = (
            0  # the same of a step with drafts that ends before this position, with the next drafts
        )
        self.drafts: tuple[
            int, ...
        ] = ()  # guessed tokens behind the last one, which the next step verifies
        self.num_pending_drafts = (
            0  # drafts in the step in flight, of which the right ones are not known yet
        )
        sampling = spec.sampling
        self.may_draft = not (
            spec.pooled or self.is_beam or sampling.mirostat_mode
        )  # its state: token by token
        self.drafting: Drafting | None = None  # made when drafts are first proposed
        self.in_worker = False
        self.mirostat_mu: float | None = None  # its sampler's state behind the last known token
        self.forks: list[Request] = []  # requests that wait for this one's prompt
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.num_overtaken = 0  # while its adapter did not fit

    def draft(self, tokens: Sequence[int]) -> None:
        """Guess that `tokens` follow the last one. The next step computes them with that token and samples at each.
        `update` takes the tokens up to the first wrong guess, and the one sampled there."""
        self.drafts, self.decodes_until = tuple(tokens), 0

    def most_at(self, computed: int) -> int:
        """How many tokens a step may compute from here on. An answer that began elsewhere and would always be the same (greedy,
        or with a seed) goes on as if it had been computed here: its prompt, then token by token, since kernels round prompts
        and decodes differently."""
        spec = self.spec
        if not spec.answer_token_ids or (
            spec.sampling.temperature > 0 and spec.sampling.seed is None
        ):
            return self.end
        if computed < self.num_prompt_tokens:
            return self.num_prompt_tokens - computed
        return 1 if computed < self.num_given else self.end

    @property
    def num_tokens(self) -> int:
        """Known and pending."""
        return len(self.token_ids) + self.num_pending

    @property
    def holds_blocks(self) -> bool:
        return bool(self.blocks[0])
