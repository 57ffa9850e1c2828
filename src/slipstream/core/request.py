"""The scheduler's state of one request. Stored state is minimal; properties derive the rest."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import TYPE_CHECKING

from slipstream.messages.requests import EngineRequest, ids_of

if TYPE_CHECKING:
    from slipstream.core.cache.cache_value import Run
    from slipstream.core.cache.kv_cache_manager import KVCacheManager
    from slipstream.core.cache.sessions import Session
    from slipstream.core.cache.states import RequestState
    from slipstream.core.participants.base import Participant
    from slipstream.core.queue import Account


class Status(Enum):
    FORKING = auto()  # waits for the request whose prompt it shares
    WAITING = auto()
    LOADING = auto()  # waits for blocks from a tier
    RUNNING = auto()
    FINISHED = auto()


class Request:
    """A request in the scheduler.

    Tokens [0, num_computed_tokens) are in the cache once the steps in flight are done.

    `num_pending` counts tokens that steps in flight sample. They are included in `num_tokens`, but
    only the device knows their values. A step with guesses counts as many as it has guesses:
    until its result is known nothing else of the request can be computed.

    `blocks[g]` is the block table of group g. All tables have the same length, except the table of
    an encoder's text. The first `num_passed[g]` entries of a window group are the null block,
    because these blocks were released.

    `kv` is the cache manager of the request's rank. With several ranks, one is chosen each time the
    request is admitted without blocks, unless its guide keeps it where it was.
    """

    __slots__ = (
        "account",
        "block_keys",
        "blocks",
        "end",
        "forks",
        "guesses",
        "guide",
        "held",
        "in_worker",
        "kv",
        "lease",
        "looked_up",
        "mirostat_mu",
        "needs_copy",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_given",
        "num_hit_tokens",
        "num_overtaken",
        "num_passed",
        "num_peer_tokens",
        "num_pending",
        "num_preemptions",
        "num_prompt_tokens",
        "num_registered",
        "num_shared",
        "order",
        "participants",
        "passed",
        "request_id",
        "root_key",
        "run",
        "session",
        "shared",
        "spec",
        "state",
        "status",
        "stops",
        "token_ids",
    )

    kv: KVCacheManager

    def __init__(
        self, spec: EngineRequest, order: tuple[int, float, int], root_key: bytes, num_groups: int
    ) -> None:
        self.spec = spec
        self.request_id = spec.request_id
        self.order = order  # (priority, arrival, number); the smallest goes first
        self.root_key = root_key
        self.token_ids = ids_of(spec.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.token_ids.extend(spec.answer_token_ids)
        # prompt tokens, and answer tokens that another engine has already generated
        self.num_given = len(self.token_ids)
        # maximum number of tokens
        self.end = self.num_prompt_tokens + (1 if spec.pooled else spec.max_tokens)
        self.stops = frozenset((*spec.eos_token_ids, *spec.sampling.stop_token_ids))
        self.status = Status.WAITING
        self.account: Account | None = None  # its owner's account, set by `WaitingQueue.enter`
        self.participants: tuple[Participant, ...] = ()  # those that it concerns
        self.guide: Participant | None = None  # the one that decides about each of its steps
        self.held = False  # not scheduled until what held it lets it go
        self.num_computed_tokens = 0
        self.num_pending = 0
        self.blocks: list[list[int]] = [[] for _ in range(num_groups)]
        self.num_passed = [0] * num_groups
        self.block_keys: list[bytes] = []
        self.num_registered = 0  # leading blocks that were offered to the prefix cache
        self.looked_up = False  # whether the tiers below the device were searched
        self.needs_copy = False  # whether the next blocks to write may be shared
        # end of the positions at which it decodes without a check; see `KVCacheManager.lease`
        self.lease = 0
        # guessed tokens after the last token; the next step verifies them
        self.guesses: tuple[int, ...] = ()
        self.in_worker = False
        # state of its Mirostat sampler after the last known token
        self.mirostat_mu: float | None = None
        self.forks: list[Request] = []  # requests that wait for this request's prompt
        self.num_cached_tokens = 0
        self.num_peer_tokens = 0  # tokens that another engine computed for it
        # tokens with cached keys and values, if more than the states allowed to take
        self.num_hit_tokens = 0
        self.state: RequestState | None = None  # its slots, if layers are recurrent
        # its place in the order of eviction; None under LRU
        self.session: Session | None = None
        self.run: Run | None = None  # of its last cached block
        self.shared: list[Session] = []  # of the runs before, which it has in common with others
        self.num_shared = 0  # blocks of these runs
        self.passed: Run | None = None  # of the blocks that it needs no more
        self.num_preemptions = 0
        self.num_overtaken = 0  # number of requests admitted ahead while this one did not fit

    def key_at(self, position: int, block_size: int) -> bytes | None:
        """The key of the block that ends at `position`; None if none does, or its tokens are not known yet."""
        index, rest = divmod(position, block_size)
        return None if rest or not 0 < index <= len(self.block_keys) else self.block_keys[index - 1]

    def guess(self, tokens: Sequence[int]) -> None:
        """Set `tokens` as guesses after the last token.

        The next step computes them together with that token and samples at each position. `update`
        accepts the tokens up to the first wrong guess, and the token sampled there.
        """
        self.guesses = tuple(tokens)
        if self.lease:
            self.kv.drop_lease(self)

    def most_at(self, computed: int) -> int:
        """Maximum number of tokens that one step may compute from position `computed` on.

        This limits an answer that began on another engine and must be reproducible (greedy, or with
        a seed). It continues as if computed here: first the prompt, then token by token. The reason
        is that prefill and decode kernels round differently.
        """
        spec = self.spec
        if not spec.answer_token_ids or (
            spec.sampling.temperature > 0 and spec.sampling.seed is None
        ):
            return self.end
        if computed < self.num_prompt_tokens:
            return self.num_prompt_tokens - computed
        return 1 if computed < self.num_given else self.end

    @property
    def calls(self) -> bool:
        """Whether its answer calls a tool, as far as its tokens tell: otherwise, whether it may."""
        hints = self.spec.cache_hints
        answer = self.token_ids[self.num_prompt_tokens :]
        return hints.calls and (
            not hints.call_tokens or not frozenset(hints.call_tokens).isdisjoint(answer)
        )

    @property
    def num_tokens(self) -> int:
        """Number of known and pending tokens."""
        return len(self.token_ids) + self.num_pending

    @property
    def holds_blocks(self) -> bool:
        return bool(self.blocks[0])
